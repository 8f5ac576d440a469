"""Shared part of the losses with proxies: cosines between images and proxies of classes."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax import lists
from soprc_jax._internal import class_labels, collectives, masks


class Cosines(NamedTuple):
  """Holds the similarities of the images of this device to all proxies.

  Attributes:
    scores: ``[B, C]``.
    own: ``[B, C]`` mask of the proxy of the class of each valid image.
    valid: ``[B]`` mask of the valid images.
  """

  scores: jax.Array
  own: jax.Array
  valid: jax.Array


def cosines(
  embeddings: ArrayLike, labels: ArrayLike, proxies: ArrayLike, *, where: ArrayLike | None
) -> Cosines:
  """Computes the `Cosines` of a batch. Proxies are normalized, embeddings are not.

  An image whose traced label is no row of ``proxies`` is not valid.

  Raises:
    AssertionError: when traced, if shapes do not fit.
    ValueError: a label on the host is no row of ``proxies``.
  """
  (table,) = masks.promote(proxies, names=("proxies",))
  chex.assert_rank(table, 2, custom_message="proxies must be [C, D]")
  batch = lists.join_devices(embeddings, labels, where, None)
  chex.assert_equal(
    table.shape[1],
    batch.embeddings.shape[1],
    custom_message="proxies must be [C, D] with the width D of the embeddings",
  )
  _check_rows(labels, where, table.shape[0])
  vectors, table = masks.promote(batch.embeddings, table)
  scores = jnp.matmul(vectors, masks.l2_normalize(table).T, precision=jax.lax.Precision.HIGHEST)
  rows = jnp.arange(table.shape[0], dtype=jnp.int32)
  own = class_labels.same_labels(batch.labels[:, None], rows[None, :]) & batch.where[:, None]
  return Cosines(scores, own, jnp.any(own, axis=1))


def _check_rows(labels: ArrayLike, where: ArrayLike | None, count: int) -> None:
  if isinstance(labels, jax.core.Tracer) or isinstance(where, jax.core.Tracer):
    return
  rows = np.asarray(labels) if where is None else np.asarray(labels)[np.asarray(where, bool)]
  wrong = rows[(rows < 0) | (rows >= count)]
  if wrong.size:
    raise ValueError(
      f"labels must be rows of proxies, from 0 to {count - 1}; got {wrong[0]}: map them to rows"
    )


def cross_entropy(logits: jax.Array, found: Cosines, axis_name: collectives.AxisName) -> jax.Array:
  """Averages the cross entropy of ``logits [B, C]`` over the valid images of all devices."""
  own = jnp.sum(jnp.where(found.own, logits, jnp.zeros_like(logits)), axis=-1)
  losses = jax.nn.logsumexp(logits, axis=-1) - own
  return masks.masked_mean(losses, found.valid, None, axis_name)
