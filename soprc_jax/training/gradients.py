"""The gradient of a loss on the embeddings of a batch, computed exactly by microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

EmbedFn = Callable[[Any, jax.Array], jax.Array]
LossFn = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def by_microbatches(
  embed: EmbedFn, loss_fn: LossFn, params: Any, loss_params: Any, images: jax.Array, *, size: int
) -> tuple[tuple[jax.Array, Any], tuple[Any, Any]]:
  """Computes the loss of a batch and its gradient in the memory of ``size`` images.

  The result is that of ``jax.value_and_grad(f, (0, 1), has_aux=True)(params, loss_params)`` with
  ``f(p, q) = loss_fn(embed(p, images), q)``.

  All images are embedded first. The loss is computed on all embeddings, so its lists are those of
  the whole batch. Then each microbatch is embedded again and backpropagates its part of the
  gradient (Gao et al., "Scaling deep contrastive learning batch size under memory limited setup",
  2021). The result is exact, not an average of losses of the microbatches.

  Args:
    embed: ``(params, images [n, ...]) -> [n, D]``, each image independently, without statistics of
      the batch.
    loss_fn: ``(embeddings [B, D], loss_params) -> (loss, aux)``.
    params: parameters of the model.
    loss_params: parameters of the loss.
    images: ``[B, ...]``.
    size: number of images per microbatch; divides B.

  Returns:
    ``((loss, aux), gradients)``, with the gradients of both kinds of parameters.

  Raises:
    ValueError: when traced, if ``size`` does not divide B.
  """
  count = images.shape[0]
  if count % size:
    raise ValueError(f"microbatches of {size} images do not divide a batch of {count}")

  def split(array: jax.Array) -> jax.Array:
    return array.reshape(count // size, size, *array.shape[1:])

  parts = split(images)
  embeddings = jax.lax.map(lambda part: embed(params, part), parts)
  outputs, (slopes, loss_gradient) = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(
    embeddings.reshape(count, -1), loss_params
  )

  def add(total: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
    part_images, part_slopes = part
    pull_back = jax.vjp(lambda p: embed(p, part_images), params)[1]
    return jax.tree.map(jnp.add, total, pull_back(part_slopes)[0]), None

  gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (parts, split(slopes)))
  return outputs, (gradient, loss_gradient)
