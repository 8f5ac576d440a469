"""Vision transformers with the architectures of DINO, DINOv2, DINOv3, CLIP and SigLIP.

See Dosovitskiy et al., 2021. `vit_weights` converts published weights to the parameters here.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.models import embedding, vit_positions

POOLS = ("class", "mean", "attention")
Activation = Callable[[jax.Array], jax.Array]
# quick_gelu is that of CLIP. swiglu gates a second hidden layer, see `_Mlp`.
ACTIVATIONS: dict[str, Activation] = {
  "gelu": functools.partial(nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(nn.gelu, approximate=True),
  "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
  "swiglu": nn.silu,
}
# Cosine and sine of the angles of rotary embeddings, see `vit_positions.rotations`.
_Turns = tuple[np.ndarray, np.ndarray]
_small_normal = nn.initializers.normal(0.02)


class Architecture(NamedTuple):
  """Describes a vision transformer; each field has its key in ``config.model.vit``.

  Attributes:
    image_size: side in pixels of the images whose patches the position embeddings belong to.
    patch: side of a patch in pixels.
    width: width of a token.
    depth: number of blocks.
    heads: attention heads, which divide the width.
    mlp: width of the hidden layer of a block.
    activation: one of `ACTIVATIONS`.
    pool: one of `POOLS`: the class token; the mean of the patches; or attention with a trained
      query, SigLIP's.
    class_token: whether there is a class token.
    registers: number of register tokens, which take part in attention only.
    rope: 0: a position embedding of each patch is trained. > 0: base of the periods of DINOv3's
      rotary embeddings, which need none.
    antialias: whether position embeddings are resized with antialiasing.
    layer_scale: 0: none. > 0: initial factor of each channel of a block's output.
    pre_norm: whether tokens are normalized before the first block, as in CLIP. The patch embedding
      then has no bias.
    epsilon: added to the variance in each normalization.
    projection: width of a linear projection of the pooled features, as in CLIP; 0: none.
    mean: mean of the RGB values in [0, 1] that images are normalized with.
    std: standard deviation of these values.
  """

  image_size: int = 224
  patch: int = 16
  width: int = 384
  depth: int = 12
  heads: int = 6
  mlp: int = 1536
  activation: str = "gelu"
  pool: str = "class"
  class_token: bool = True
  registers: int = 0
  rope: float = 0.0
  antialias: bool = False
  layer_scale: float = 0.0
  pre_norm: bool = False
  epsilon: float = 1e-6
  projection: int = 0
  mean: tuple[float, ...] = embedding.IMAGE_MEAN
  std: tuple[float, ...] = embedding.IMAGE_STD


class ViT(nn.Module):
  """Maps images to pooled features.

  Attributes:
    architecture: see there. Its mean and std belong to the caller, which normalizes the images.
    dtype: compute dtype, float32 or bfloat16. Parameters, normalizations and the softmax are
      float32.
    remat: whether the gradient computes the inside of each block again instead of keeping it.
  """

  architecture: Architecture
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Computes the features of normalized images.

    Position embeddings are resized to the grid of the images.

    Args:
      images: ``[B, H, W, 3]``, normalized; H and W at least a patch. Pixels beyond the last whole
        patch are left out.
      train: not used: training and evaluation compute the same.
      where: not used: no image affects another one.

    Returns:
      ``[B, F]``, F = ``projection`` or ``width``; in ``dtype``.

    Raises:
      ValueError: the images are smaller than a patch.
    """
    del train, where
    arch = self.architecture
    x, grid = self._patches(images.astype(self.dtype))
    if not arch.rope:
      x = x + self._positions(grid).astype(self.dtype)
    x, prefix = self._with_tokens(x)
    if arch.pre_norm:
      x = _normed(x, arch, "pre_norm")
    turns = (
      vit_positions.rotations(grid, arch.width // arch.heads, arch.rope) if arch.rope else None
    )
    block = nn.remat(_Block) if self.remat else _Block
    for index in range(arch.depth):
      x = block(arch, self.dtype, prefix, name=f"blocks_{index}")(x, turns)
    if arch.pool == "class":
      x = _normed(x[:, 0], arch, "norm")
    else:
      x = _normed(x[:, prefix:], arch, "norm")
      if arch.pool == "mean":
        x = jnp.mean(x, axis=1)
      else:
        x = _AttentionPool(arch, self.dtype, name="pool")(x)
    if arch.projection:
      x = nn.Dense(arch.projection, use_bias=False, dtype=self.dtype, name="projection")(x)
    return x

  def _patches(self, images: jax.Array) -> tuple[jax.Array, tuple[int, int]]:
    """Returns the embedded patches ``[B, rows * columns, width]``, and (rows, columns)."""
    arch, (count, height, width, channels) = self.architecture, images.shape
    size = arch.patch
    grid = rows, columns = height // size, width // size
    if not rows or not columns:
      raise ValueError(
        f"images of {height} x {width} pixels are smaller than a patch, model.vit.patch={size}"
      )
    x = images[:, : rows * size, : columns * size]
    x = x.reshape(count, rows, size, columns, size, channels).swapaxes(2, 3)
    x = x.reshape(count, rows, columns, size, size, channels)
    return _PatchEmbed(arch, self.dtype, name="patch_embed")(x).reshape(
      count, rows * columns, arch.width
    ), grid

  def _positions(self, grid: tuple[int, int]) -> jax.Array:
    """Returns the position embeddings of a grid, ``[1, rows * columns, width]``."""
    arch = self.architecture
    side = arch.image_size // arch.patch
    native = self.param("pos_embed", _small_normal, (1, side * side, arch.width), jnp.float32)
    if grid == (side, side):
      return native
    vertical, horizontal = (
      vit_positions.resizing(side, count, antialias=arch.antialias) for count in grid
    )
    resized = jnp.einsum(
      "ri,cj,ijd->rcd",
      vertical,
      horizontal,
      native.reshape(side, side, arch.width),
      precision=jax.lax.Precision.HIGHEST,
    )
    return resized.reshape(1, grid[0] * grid[1], arch.width)

  def _with_tokens(self, x: jax.Array) -> tuple[jax.Array, int]:
    """Puts the class token and the registers before the patches; returns their number too."""
    arch, tokens = self.architecture, []
    counts = {"class_token": int(arch.class_token), "registers": arch.registers}
    for name, count in counts.items():
      if count:
        token = self.param(name, _small_normal, (1, count, arch.width), jnp.float32)
        shape = (x.shape[0], count, arch.width)
        tokens.append(jnp.broadcast_to(token.astype(self.dtype), shape))
    return jnp.concatenate([*tokens, x], axis=1), sum(counts.values())


class _PatchEmbed(nn.Module):
  """Maps patches ``[B, rows, columns, P, P, 3]`` linearly to tokens."""

  architecture: Architecture
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    arch = self.architecture
    shape = (*x.shape[-3:], arch.width)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
    x = x.reshape(*x.shape[:3], -1) @ kernel.reshape(-1, arch.width).astype(self.dtype)
    if arch.pre_norm:
      return x
    bias = self.param("bias", nn.initializers.zeros, (arch.width,), jnp.float32)
    return x + bias.astype(self.dtype)[None, None, None]


def _normed(x: jax.Array, architecture: Architecture, name: str) -> jax.Array:
  """Normalizes tokens in float32, in the compact scope of the caller; keeps the dtype."""
  norm = nn.LayerNorm(architecture.epsilon, dtype=jnp.float32, use_fast_variance=False, name=name)
  return norm(x.astype(jnp.float32)).astype(x.dtype)


class _Block(nn.Module):
  """Adds attention and a multilayer perceptron, each of the normalized tokens, to the tokens."""

  architecture: Architecture
  dtype: Any
  prefix: int

  @nn.compact
  def __call__(self, x: jax.Array, turns: _Turns | None) -> jax.Array:
    arch = self.architecture
    y = _normed(x, arch, "norm1")
    y = _Attention(arch, self.dtype, self.prefix, name="attn")(y, y, turns)
    x = x + self._scaled(y, "layer_scale1")
    y = _Mlp(arch, self.dtype, name="mlp")(_normed(x, arch, "norm2"))
    return x + self._scaled(y, "layer_scale2")

  def _scaled(self, x: jax.Array, name: str) -> jax.Array:
    initial = self.architecture.layer_scale
    if not initial:
      return x
    scale = self.param(name, nn.initializers.constant(initial), x.shape[-1:], jnp.float32)
    return x * scale.astype(x.dtype)[None, None]


class _Attention(nn.Module):
  """Attends from some tokens to others."""

  architecture: Architecture
  dtype: Any
  prefix: int = 0

  @nn.compact
  def __call__(
    self, queries: jax.Array, tokens: jax.Array, turns: _Turns | None = None
  ) -> jax.Array:
    arch = self.architecture
    dense = functools.partial(nn.Dense, arch.width, dtype=self.dtype)
    # DINOv3's keys have no bias. Without rotations one would change nothing.
    q, k, v = (
      dense(name=name, use_bias=name != "k" or turns is None)(x).reshape(
        *x.shape[:2], arch.heads, -1
      )
      for name, x in (("q", queries), ("k", tokens), ("v", tokens))
    )
    if turns is not None:
      q, k = (_rotated(x, self.prefix, *turns) for x in (q, k))
    # Its softmax is float32 in any dtype, which it reaches by implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
      x = jax.nn.dot_product_attention(q, k, v)
    return dense(name="out")(x.reshape(*queries.shape))


def _rotated(x: jax.Array, prefix: int, cos: np.ndarray, sin: np.ndarray) -> jax.Array:
  """Turns queries or keys ``[B, T, heads, size]`` by the place of their patch.

  The tokens before the patches stay.
  """
  patches = x[:, prefix:].astype(jnp.float32)
  first, second = jnp.split(patches, 2, axis=-1)
  turned = patches * cos + jnp.concatenate([-second, first], axis=-1) * sin
  return jnp.concatenate([x[:, :prefix], turned.astype(x.dtype)], axis=1)


class _Mlp(nn.Module):
  """Applies one hidden layer; with ``swiglu`` it is multiplied by an activated second one."""

  architecture: Architecture
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    arch = self.architecture
    hidden = functools.partial(nn.Dense, arch.mlp, dtype=self.dtype)
    activate = ACTIVATIONS[arch.activation]
    if arch.activation == "swiglu":
      y = activate(hidden(name="gate")(x)) * hidden(name="fc1")(x)
    else:
      y = activate(hidden(name="fc1")(x))
    return nn.Dense(x.shape[-1], dtype=self.dtype, name="fc2")(y)


class _AttentionPool(nn.Module):
  """Pools tokens by attention of a trained query, and a block's perceptron (SigLIP)."""

  architecture: Architecture
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    arch = self.architecture
    probe = self.param("probe", _small_normal, (1, 1, arch.width), jnp.float32)
    query = jnp.broadcast_to(probe.astype(self.dtype), (x.shape[0], 1, arch.width))
    y = _Attention(arch, self.dtype, name="attn")(query, x)
    y = y + _Mlp(arch, self.dtype, name="mlp")(_normed(y, arch, "norm"))
    return y[:, 0]
