"""Model from images to unit-norm embeddings: backbone, linear head, normalization."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from soprc_jax._internal.masks import l2_normalize

# Mean and standard deviation of ImageNet's RGB values in [0, 1], as pretrained models expect.
IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)


class EmbeddingNet(nn.Module):
  """Maps images to embeddings whose inner products are cosine similarities (the paper's h_w).

  Attributes:
    backbone: module from normalized images to features, e.g. `ResNet`.
    embedding_dim: width D of the embedding, 512 in the paper. 0 omits the head, so that D is the
      number of features.
    dtype: compute dtype of the head.
    mean: mean of the RGB values in [0, 1] that images are normalized with.
    std: standard deviation of these values.
  """

  backbone: nn.Module
  embedding_dim: int = 512
  dtype: Any = jnp.float32
  mean: tuple[float, ...] = IMAGE_MEAN
  std: tuple[float, ...] = IMAGE_STD

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Embeds images.

    Args:
      images: ``[B, H, W, 3]`` uint8 RGB.
      train: whether the backbone runs in training mode, see there.
      where: ``[B]`` mask of the valid images; ``None`` means all.

    Returns:
      ``[B, D]`` float32 of norm 1 (or 0, see `l2_normalize`).
    """
    mean, std = (
      jnp.array(values, jnp.float32)[None, None, None] for values in (self.mean, self.std)
    )
    pixels = (images.astype(jnp.float32) / 255.0 - mean) / std
    features = self.backbone(pixels, train=train, where=where)
    if self.embedding_dim:
      features = nn.Dense(self.embedding_dim, dtype=self.dtype, name="head")(features)
    return l2_normalize(features.astype(jnp.float32))
