"""ResNet feature extractors with torchvision's architecture.

See He et al., 2016; this is "v1.5", with the stride on the 3x3 convolution. Padding is explicit,
and batch norm has torchvision's epsilon and momentum, so converted weights give the same features.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from soprc_jax._internal import collectives, masks
from soprc_jax.models import convolutions

# name -> (blocks in each stage, whether they are bottlenecks). resnet8 is the three-stage CIFAR
# model with one block per stage.
RESNETS: dict[str, tuple[tuple[int, ...], bool]] = {
  "resnet8": ((1, 1, 1), False),
  "resnet18": ((2, 2, 2, 2), False),
  "resnet34": ((3, 4, 6, 3), False),
  "resnet50": ((3, 4, 6, 3), True),
  "resnet101": ((3, 4, 23, 3), True),
}
STEMS = ("imagenet", "small")

Convolve = Callable[..., jax.Array]
_Norm = Any  # a partial of _Normalize that takes its name
_kaiming_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nn.Module):
  """Maps images to globally pooled features.

  Attributes:
    stages: number of blocks in each stage. The width doubles and the resolution halves from stage
      to stage.
    bottleneck: whether blocks are bottlenecks (ResNet-50 and deeper) instead of basic blocks.
    width: channels of the first stage, 64 in the paper's models.
    stem: ``"imagenet"``: 7x7 convolution with stride 2 and a 3x3 max pool with stride 2.
      ``"small"``: 3x3 convolution, for images of about 32 pixels.
    stem_stride: stride of the small stem, 1 or 2. Stride 2 costs a quarter of stride 1.
    pool_grid: g >= 1; the last feature map is averaged to g x g cells. 1 is the paper's global
      average. A larger grid keeps where something is in the image, for aligned images such as
      characters and icons.
    freeze_bn: whether batch norm uses the running statistics in training too, and never updates
      them. Scale and bias are still trained.
    dtype: compute dtype, float32 or bfloat16. Parameters are float32.
    axis_name: mapped axis over which batch statistics are averaged if they are not frozen.
    convolve: function that computes the convolutions. ``convolutions.by_xla`` uses XLA's own on
      CPUs too, for programs that are exported to other machines.
  """

  stages: Sequence[int]
  bottleneck: bool
  width: int = 64
  stem: str = "imagenet"
  stem_stride: int = 1
  pool_grid: int = 1
  freeze_bn: bool = True
  dtype: Any = jnp.float32
  axis_name: str | None = None
  convolve: Convolve = convolutions.convolve

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Computes the features of normalized images.

    Args:
      images: ``[B, H, W, 3]``, normalized, any size.
      train: whether to use the statistics of the batch and update the running ones, unless
        ``freeze_bn``.
      where: ``[B]`` mask of the images that count in batch statistics; ``None`` means all.

    Returns:
      ``[B, F]``, F = width * 2^(stages - 1) * g^2, times 4 with bottlenecks; in ``dtype``.

    Raises:
      ValueError: the stem is unknown; the last feature map is smaller than the grid.
    """
    if self.stem not in STEMS:
      raise ValueError(f"stem must be one of {STEMS}, got {self.stem!r}")
    norm = functools.partial(
      _Normalize,
      use_running_average=self.freeze_bn or not train,
      dtype=self.dtype,
      axis_name=self.axis_name,
      convolve=self.convolve,
    )
    x = images.astype(self.dtype)
    if self.stem == "imagenet":
      x = nn.relu(_conv_norm(x, where, self.width, 7, 2, norm, ("conv1", "bn1")))
      x = _max_pool(x)
    else:
      x = nn.relu(_conv_norm(x, where, self.width, 3, self.stem_stride, norm, ("conv1", "bn1")))
    block = _Bottleneck if self.bottleneck else _BasicBlock
    for stage, num_blocks in enumerate(self.stages):
      for index in range(num_blocks):
        x = block(
          width=self.width * 2**stage,
          stride=2 if stage > 0 and index == 0 else 1,
          norm=norm,
          name=f"layer{stage + 1}_{index}",
        )(x, where)
    return grid_pool(x, self.pool_grid)


def grid_pool(x: jax.Array, grid: int) -> jax.Array:
  """Averages a feature map ``[B, H, W, C]`` to cells, ``[B, grid * grid * C]``.

  Cell i covers the rows floor(i H / grid) to ceil((i + 1) H / grid), so any size works.

  Raises:
    ValueError: the map is smaller than the grid.
  """
  if min(x.shape[1:3]) < grid:
    raise ValueError(
      f"the last feature map has {x.shape[1]} x {x.shape[2]} points, fewer than "
      f"model.pool_grid={grid}: take a smaller grid or larger images"
    )

  def cells(size: int) -> list[slice]:
    return [slice(i * size // grid, -(-(i + 1) * size // grid)) for i in range(grid)]

  if grid == 1:
    return jnp.mean(x, axis=(1, 2))
  means = [
    jnp.mean(x[:, rows, columns], axis=(1, 2))
    for rows in cells(x.shape[1])
    for columns in cells(x.shape[2])
  ]
  return jnp.concatenate(means, axis=-1)


def _max_pool(x: jax.Array) -> jax.Array:
  """Computes the maximum of 3x3 pixels with stride 2 and padding 1.

  The gradient goes to the first of equal pixels in reading order, as in torch.

  Args:
    x: ``[B, H, W, C]``.

  Returns:
    ``[B, ceil(H / 2), ceil(W / 2), C]``.
  """
  # Copies of the edge do not change a maximum. The ONNX converter supports neither padding in the
  # pooling itself nor jnp.pad.
  for axis in (1, 2):
    first, last = (
      jax.lax.slice_in_dim(x, start, start + 1, axis=axis) for start in (0, x.shape[axis] - 1)
    )
    x = jnp.concatenate([first, x, last], axis=axis)
  return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))


class _Kernel(nn.Module):
  """Holds the kernel of a convolution, ``[size, size, C, K]``."""

  shape: tuple[int, int, int, int]

  @nn.compact
  def __call__(self) -> jax.Array:
    return self.param("kernel", _kaiming_normal, self.shape, jnp.float32)


class _BatchNorm(nn.Module):
  """Holds a batch norm under the name ``bn``, as checkpoints have it."""

  normalize: _Norm

  @nn.compact
  def __call__(self, *args: Any) -> jax.Array:
    return self.normalize(name="bn")(*args)


class _Normalize(nn.Module):
  """Applies a convolution, then batch norm with torchvision's constants.

  Batch statistics are those of the valid images of all devices. Flax's `nn.BatchNorm` averages the
  means of the devices, even if these have different numbers of valid images.
  """

  use_running_average: bool
  dtype: Any
  axis_name: str | None
  convolve: Convolve

  @nn.compact
  def __call__(
    self, x: jax.Array, kernel: jax.Array, stride: int, where: jax.Array | None
  ) -> jax.Array:
    features = kernel.shape[-1]
    running_mean = self.variable("batch_stats", "mean", jnp.zeros, (features,), jnp.float32)
    running_var = self.variable("batch_stats", "var", jnp.ones, (features,), jnp.float32)
    scale = self.param("scale", nn.initializers.ones, (features,), jnp.float32)
    bias = self.param("bias", nn.initializers.zeros, (features,), jnp.float32)
    if self.use_running_average:
      # The factor is folded into the kernel. That saves a pass over the pixels, and its gradient
      # follows from that of the kernel.
      factor = jax.lax.rsqrt(running_var.value + 1e-5) * scale
      kernel = kernel * factor[None, None, None]
      offset = bias - running_mean.value * factor
      y = self.convolve(x, kernel.astype(self.dtype), stride=stride)
      return y + offset.astype(self.dtype)[None, None, None]
    y = self.convolve(x, kernel.astype(self.dtype), stride=stride)
    y = y.astype(jnp.float32)
    mean, var, count = _batch_moments(y, where, self.axis_name)
    # torch's momentum 0.1 weights the new value. A batch without a valid image changes nothing.
    weight = jnp.where(count > 0, 0.1, 0.0)
    running_mean.value = (1 - weight) * running_mean.value + weight * jax.lax.stop_gradient(mean)
    running_var.value = (1 - weight) * running_var.value + weight * jax.lax.stop_gradient(var)
    factor = jax.lax.rsqrt(var + 1e-5) * scale
    normal = (y - mean[None, None, None]) * factor[None, None, None] + bias[None, None, None]
    return normal.astype(self.dtype)


def _batch_moments(
  x: jax.Array, where: jax.Array | None, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes mean and variance of each channel over the valid images of all devices.

  Returns:
    Mean, variance, and the number of valid pixels.
  """
  count = jnp.asarray(x.shape[0] if where is None else jnp.sum(where), jnp.float32) * (
    x.shape[1] * x.shape[2]
  )
  if where is not None:
    x = jnp.where(where[:, None, None, None], x, jnp.zeros_like(x))
  sums = jnp.sum(x, axis=(0, 1, 2)), jnp.sum(jnp.square(x), axis=(0, 1, 2)), count
  (total, total_square, count) = collectives.psum(sums, axis_name)
  mean = masks.ratio(total, jnp.broadcast_to(count, total.shape))
  mean_square = masks.ratio(total_square, jnp.broadcast_to(count, total.shape))
  # Rounding can give a tiny negative number if a channel is constant.
  return mean, jnp.maximum(mean_square - jnp.square(mean), 0.0), count


def _conv_norm(
  x: jax.Array,
  where: jax.Array | None,
  width: int,
  size: int,
  stride: int,
  norm: _Norm,
  names: tuple[str, str],
) -> jax.Array:
  """Applies a convolution to ``width`` channels and its batch norm.

  ``names`` are the names of the two modules in the compact scope of the caller.
  """
  kernel = _Kernel((size, size, x.shape[-1], width), name=names[0])()
  return _BatchNorm(norm, name=names[1])(x, kernel, stride, where)


class _BasicBlock(nn.Module):
  """Applies two 3x3 convolutions and a shortcut (ResNet-18 and -34)."""

  width: int
  stride: int
  norm: _Norm

  @nn.compact
  def __call__(self, x: jax.Array, where: jax.Array | None) -> jax.Array:
    y = nn.relu(_conv_norm(x, where, self.width, 3, self.stride, self.norm, ("conv1", "bn1")))
    y = _conv_norm(y, where, self.width, 3, 1, self.norm, ("conv2", "bn2"))
    return nn.relu(y + _shortcut(self, x, y, where))


class _Bottleneck(nn.Module):
  """Applies 1x1, strided 3x3 and 1x1 convolutions and a shortcut (ResNet-50 and deeper).

  The last convolution has four times the width.
  """

  width: int
  stride: int
  norm: _Norm

  @nn.compact
  def __call__(self, x: jax.Array, where: jax.Array | None) -> jax.Array:
    y = nn.relu(_conv_norm(x, where, self.width, 1, 1, self.norm, ("conv1", "bn1")))
    y = nn.relu(_conv_norm(y, where, self.width, 3, self.stride, self.norm, ("conv2", "bn2")))
    y = _conv_norm(y, where, self.width * 4, 1, 1, self.norm, ("conv3", "bn3"))
    return nn.relu(y + _shortcut(self, x, y, where))


def _shortcut(block: Any, x: jax.Array, y: jax.Array, where: jax.Array | None) -> jax.Array:
  """Returns the input of a block, projected if the shape changes.

  It must be called in the compact scope of the block.
  """
  if x.shape == y.shape:
    return x
  return _conv_norm(
    x, where, y.shape[-1], 1, block.stride, block.norm, ("downsample_conv", "downsample_bn")
  )
