"""A plain network of three convolutions, for small aligned images and short runs on CPUs."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from soprc_jax.models import convolutions, resnet

_STAGES = 3
_he_normal = nn.initializers.variance_scaling(2.0, "fan_in", "normal")


class ConvNet(nn.Module):
  """Maps images to features by three 3x3 convolutions, each with a relu and a 2x2 max pool.

  There is no batch norm, so training and evaluation compute the same.

  Attributes:
    width: channels of the first convolution. They double from one to the next.
    pool_grid: g >= 1; see `resnet.ResNet`.
    dtype: compute dtype, float32 or bfloat16. Parameters are float32.
    convolve: see `resnet.ResNet`.
  """

  width: int = 32
  pool_grid: int = 4
  dtype: Any = jnp.float32
  convolve: resnet.Convolve = convolutions.convolve

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Computes the features of normalized images.

    Args:
      images: ``[B, H, W, 3]``, normalized; H and W at least 8 g.
      train: not used, see above.
      where: not used: no image affects another one.

    Returns:
      ``[B, F]``, F = 4 * width * g^2; in ``dtype``.

    Raises:
      ValueError: the last feature map is smaller than the grid.
    """
    del train, where
    x = images.astype(self.dtype)
    for stage in range(_STAGES):
      width = self.width * 2**stage
      kernel = self.param(
        f"conv{stage + 1}_kernel", _he_normal, (3, 3, x.shape[-1], width), jnp.float32
      )
      bias = self.param(f"conv{stage + 1}_bias", nn.initializers.zeros, (width,), jnp.float32)
      x = self.convolve(x, kernel.astype(self.dtype), stride=1)
      x = nn.relu(x + bias.astype(self.dtype)[None, None, None])
      x = _max_pool(x)
    return resnet.grid_pool(x, self.pool_grid)


def _max_pool(x: jax.Array) -> jax.Array:
  """Computes the maximum of 2x2 pixels; an odd last row or column is left out.

  The gradient of XLA's pooling on CPUs takes 22 times as long as that of these maxima.
  """
  x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
  x = jnp.maximum(x[:, ::2], x[:, 1::2])
  return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])
