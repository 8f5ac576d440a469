"""Heads from stored embeddings of another model to unit-norm embeddings."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from soprc_jax._internal import masks

HEADS = ("linear", "mlp", "residual")


class Head(nn.Module):
  """Maps features of another model to embeddings whose inner products are cosine similarities.

  The features are first scaled to the norm sqrt(F). Networks then see entries of about 1, whatever
  the scale of the features.

  Attributes:
    kind: one of `HEADS`: a linear layer; one hidden layer before it; or the features plus a
      hidden and a linear layer, which start at 0. ``residual`` keeps the width of the features, so
      it starts at their own ranking.
    hidden: width of the hidden layer.
    embedding_dim: width D of the embedding; not used by ``residual``.
    dtype: compute dtype.
  """

  kind: str = "linear"
  hidden: int = 1024
  embedding_dim: int = 128
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, features: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Embeds features.

    Args:
      features: ``[B, F]`` numbers of any scale.
      train: not used, as in models without batch norm.
      where: not used.

    Returns:
      ``[B, D]`` float32 of norm 1 (or 0, see `l2_normalize`).
    """
    del train, where
    width = features.shape[-1]
    features = features.astype(jnp.float32)
    # By the largest entry first, whose square could overflow or vanish.
    largest = jnp.max(jnp.abs(features), axis=-1, keepdims=True)
    features = features / jnp.where(largest > 0, largest, jnp.ones_like(largest))
    scaled = masks.l2_normalize(features) * width**0.5
    x = scaled.astype(self.dtype)
    # Other names, so that no head starts from the weights of one of another kind.
    hidden, last = ("branch", "shift") if self.kind == "residual" else ("hidden", "head")
    if self.kind != "linear":
      x = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name=hidden)(x))
    if self.kind == "residual":
      zero = nn.initializers.zeros
      x = scaled + nn.Dense(width, dtype=self.dtype, kernel_init=zero, name=last)(x)
    else:
      x = nn.Dense(self.embedding_dim, dtype=self.dtype, name=last)(x)
    return masks.l2_normalize(x.astype(jnp.float32))
