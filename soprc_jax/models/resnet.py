"""ResNet feature extractors, the architecture of torchvision's (He et al., 2016; "v1.5": stride on
the 3x3).

Padding is explicit, and batch norm has torchvision's epsilon and momentum, so converted weights
give the same features.
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
# network of one block a stage.
RESNETS: dict[str, tuple[tuple[int, ...], bool]] = {
  "resnet8": ((1, 1, 1), False),
  "resnet18": ((2, 2, 2, 2), False),
  "resnet34": ((3, 4, 6, 3), False),
  "resnet50": ((3, 4, 6, 3), True),
  "resnet101": ((3, 4, 23, 3), True),
}
STEMS = ("imagenet", "small")

Convolve = Callable[..., jax.Array]
_Norm = Any  # a partial of nn.BatchNorm that takes its name
_kaiming_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResNet(nn.Module):
  """Images to globally pooled features.

  Attributes:
    stages: number of blocks in each stage; the width doubles and the resolution halves from stage
      to stage.
    bottleneck: bottleneck blocks (ResNet-50 and deeper) instead of basic ones.
    width: channels of the first stage, 64 in the paper's networks.
    stem: ``"imagenet"``: 7x7 convolution with stride 2 and a 3x3 max pool with stride 2;
      ``"small"``: 3x3 convolution, for images of about 32 pixels.
    stem_stride: stride of the small stem, 1 or 2. Stride 2 costs a quarter.
    freeze_bn: normalise by the running statistics and never move them, in training too; scale and
      bias still train.
    dtype: compute dtype, float32 or bfloat16; parameters are float32.
    axis_name: mapped axis over which batch statistics are averaged when they are not frozen.
    convolve: computes the convolutions. ``convolutions.by_xla`` is XLA's own on CPUs too, for
      programs that leave this machine.
  """

  stages: Sequence[int]
  bottleneck: bool
  width: int = 64
  stem: str = "imagenet"
  stem_stride: int = 1
  freeze_bn: bool = True
  dtype: Any = jnp.float32
  axis_name: str | None = None
  convolve: Convolve = convolutions.convolve

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Features of normalised images.

    Args:
      images: ``[B, H, W, 3]``, normalised, any size.
      train: use the statistics of the batch, and update the running ones, unless ``freeze_bn``.
      where: ``[B]`` images that count in batch statistics; ``None`` means all.

    Returns:
      ``[B, F]``, F = width * 2^(stages - 1), times 4 with bottlenecks; in ``dtype``.
    """
    if self.stem not in STEMS:
      raise ValueError(f"stem must be one of {STEMS}, got {self.stem!r}")
    norm = functools.partial(
      _BatchNorm,
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
    return jnp.mean(x, axis=(1, 2))


def _max_pool(x: jax.Array) -> jax.Array:
  """Maximum of 3x3 pixels with stride 2 and padding 1: ``[B, ceil(H / 2), ceil(W / 2), C]`` from
  ``[B, H, W, C]``.

  The gradient goes to the first of equal pixels in reading order, as in torch.
  """
  # Copies of the edge change no maximum. The ONNX converter knows neither a padding of the pooling
  # itself nor jnp.pad.
  for axis in (1, 2):
    first, last = (
      jax.lax.slice_in_dim(x, start, start + 1, axis=axis) for start in (0, x.shape[axis] - 1)
    )
    x = jnp.concatenate([first, x, last], axis=axis)
  return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))


class _Kernel(nn.Module):
  """The kernel of a convolution, ``[size, size, C, K]``."""

  shape: tuple[int, int, int, int]

  @nn.compact
  def __call__(self) -> jax.Array:
    return self.param("kernel", _kaiming_normal, self.shape, jnp.float32)


class _BatchNorm(nn.Module):
  """Batch norm with torchvision's constants, over the valid images of all devices, of a
  convolution.
  """

  use_running_average: bool
  dtype: Any
  axis_name: str | None
  convolve: Convolve

  @nn.compact
  def __call__(
    self, x: jax.Array, kernel: jax.Array, stride: int, where: jax.Array | None
  ) -> jax.Array:
    normalize = _Normalize(
      self.use_running_average, self.dtype, self.axis_name, self.convolve, name="bn"
    )
    return normalize(x, kernel, stride, where)


class _Normalize(nn.Module):
  """Flax's `nn.BatchNorm` but for its mask: that one averages the means of the devices, however few
  images each has.
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
      # The factor goes into the kernel: no pass over the pixels, and its gradient comes from the
      # kernel's.
      factor = jax.lax.rsqrt(running_var.value + 1e-5) * scale
      kernel = kernel * factor[None, None, None]
      offset = bias - running_mean.value * factor
      y = self.convolve(x, kernel.astype(self.dtype), stride=stride)
      return y + offset.astype(self.dtype)[None, None, None]
    y = self.convolve(x, kernel.astype(self.dtype), stride=stride)
    y = y.astype(jnp.float32)
    mean, var, count = _batch_moments(y, where, self.axis_name)
    # torch's momentum 0.1 weights the new value; a batch without a valid image says nothing.
    weight = jnp.where(count > 0, 0.1, 0.0)
    running_mean.value = (1 - weight) * running_mean.value + weight * jax.lax.stop_gradient(mean)
    running_var.value = (1 - weight) * running_var.value + weight * jax.lax.stop_gradient(var)
    factor = jax.lax.rsqrt(var + 1e-5) * scale
    normal = (y - mean[None, None, None]) * factor[None, None, None] + bias[None, None, None]
    return normal.astype(self.dtype)


def _batch_moments(
  x: jax.Array, where: jax.Array | None, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Mean and variance of each channel over the valid images of all devices, and the number of their
  pixels.
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
  # Rounding may leave a tiny negative number where a channel is constant.
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
  """A convolution to ``width`` channels and its batch norm, under these names of the module in
  whose compact scope it is called.
  """
  kernel = _Kernel((size, size, x.shape[-1], width), name=names[0])()
  return norm(name=names[1])(x, kernel, stride, where)


class _BasicBlock(nn.Module):
  """Two 3x3 convolutions (ResNet-18 and -34)."""

  width: int
  stride: int
  norm: _Norm

  @nn.compact
  def __call__(self, x: jax.Array, where: jax.Array | None) -> jax.Array:
    y = nn.relu(_conv_norm(x, where, self.width, 3, self.stride, self.norm, ("conv1", "bn1")))
    y = _conv_norm(y, where, self.width, 3, 1, self.norm, ("conv2", "bn2"))
    return nn.relu(y + _shortcut(self, x, y, where))


class _Bottleneck(nn.Module):
  """1x1, 3x3 with the stride, 1x1 to four times the width (ResNet-50 and deeper)."""

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
  """The block's input, projected where the shape changes; called inside the block's compact
  scope.
  """
  if x.shape == y.shape:
    return x
  return _conv_norm(
    x, where, y.shape[-1], 1, block.stride, block.norm, ("downsample_conv", "downsample_bn")
  )
