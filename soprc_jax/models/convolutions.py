"""Convolutions of the ResNets, computed on CPUs as matrix products.

The function is the same on all devices. On GPUs and TPUs XLA calls optimized convolution libraries.
Its convolutions for CPUs, and especially their gradients, are several times slower than its matrix
products. The two numbers after each method are the factors by which a training step slows down
without it: for ``configs/glyphs.py``, and for a ResNet-50 at 224 pixels.

* 1x1 convolutions are products of pixels and kernel (1.16, 1.95).
* 3x3 convolutions of stride 1 use Winograd's algorithm (Lavin and Gray, "Fast algorithms for
  convolutional neural networks", CVPR 2016). A tile of outputs takes 36 matrix products instead of
  144 for a direct convolution. The same holds for the gradients (1.54, 1.18).
* All others are a product of the patches (im2col) and the kernel (1.23, 1.01).

The latter two cut an axis into overlapping windows (`_windows`). Winograd's algorithm also sums
such windows (`_add_windows`).
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import collectives

# Winograd's F(4, 3) at the points 0, 1, -1, 2, -2 and infinity: the outputs of a tile along an
# axis, and the matrices of the input (B^T in the paper), the kernel (G) and the output (A^T).
_TILE = 4
_INPUT = np.array(
  [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
  ]
)
_KERNEL = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
_OUTPUT = np.array(
  [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
)


def implementation(dtype: Any) -> str:
  """Returns the method of `convolve` here: ``"products"`` of matrices on CPUs, else ``"xla"``.

  CPUs use ``"xla"`` too if the dtype is neither float32 nor float64.
  """
  # The differences in Winograd's algorithm need more digits than bfloat16 has.
  wide = jnp.dtype(dtype) in (jnp.float32, jnp.float64)
  return "products" if wide and jax.default_backend() == "cpu" else "xla"


def convolve(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Convolves with torch's padding ``(size - 1) // 2`` on each side, by `implementation`.

  Args:
    x: ``[B, H, W, C]``.
    kernel: ``[size, size, C, K]`` of odd size, in the dtype of ``x``.
    stride: stride of both axes, >= 1.

  Returns:
    ``[B, ceil(H / stride), ceil(W / stride), K]``.
  """
  size = kernel.shape[0]
  if implementation(x.dtype) == "xla":
    return by_xla(x, kernel, stride=stride)
  # Under shard_map the gradients below are those of a single device. jax sums them.
  x, kernel = collectives.vary_alike(x, kernel)
  if size == 1:
    return _product(x[:, ::stride, ::stride], kernel[0, 0])
  if size == 3 and stride == 1:
    return _winograd(x, kernel)
  return _product(_patches(x, size, stride), kernel.reshape(-1, kernel.shape[3]))


def by_xla(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Convolves like `convolve` up to rounding, but with XLA's own operation on every backend.

  Arguments are those of `convolve`.
  """
  padding = [(kernel.shape[0] // 2,) * 2] * 2
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


@jax.custom_vjp
def _winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Computes a 3x3 convolution of stride 1, ``[B, H, W, K]``."""
  tiles = _to_tiles(_pad(x, 1), _INPUT, _num_tiles(x))
  products = jnp.einsum("ijbhwc,ijck->ijbhwk", tiles, _kernel_tiles(kernel, _KERNEL))
  return _from_tiles(products, _OUTPUT)[:, : x.shape[1], : x.shape[2]]


def _winograd_forward(
  x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _winograd(x, kernel), (x, kernel)


def _winograd_backward(
  saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Applies the transposed steps of the forward pass in reverse order.

  With jax's own transposes a training step takes 1.4 times as long.
  """
  x, kernel = saved
  grad_products = _to_tiles(grad, _OUTPUT.T, _num_tiles(x))
  tiles = _to_tiles(_pad(x, 1), _INPUT, _num_tiles(x))
  grad_kernel_tiles = jnp.einsum("ijbhwc,ijbhwk->ijck", tiles, grad_products)
  grad_tiles = jnp.einsum("ijbhwk,ijck->ijbhwc", grad_products, _kernel_tiles(kernel, _KERNEL))
  grad_x = _from_tiles(grad_tiles, _INPUT.T)[:, 1 : x.shape[1] + 1, 1 : x.shape[2] + 1]
  return grad_x, _kernel_tiles(grad_kernel_tiles, _KERNEL.T)


_winograd.defvjp(_winograd_forward, _winograd_backward)


def _num_tiles(x: jax.Array) -> tuple[int, int]:
  return -(-x.shape[1] // _TILE), -(-x.shape[2] // _TILE)


def _to_tiles(x: jax.Array, matrix: np.ndarray, counts: tuple[int, int]) -> jax.Array:
  """Computes ``matrix w matrix^T`` of each window w of ``x [B, H, W, C]``.

  Returns:
    ``[n, n, B, *counts, C]`` for an n x m matrix.
  """
  size = matrix.shape[1]
  rows = jnp.stack(_combine(matrix, _windows(x, 1, size, _TILE, counts[0])))
  # Fused into one pass, the rows would be recomputed for each column, and the step would take 1.2
  # times as long.
  rows = jax.lax.optimization_barrier(rows)
  return jnp.stack(_combine(matrix, _windows(rows, 3, size, _TILE, counts[1])), axis=1)


def _from_tiles(tiles: jax.Array, matrix: np.ndarray) -> jax.Array:
  """Sums the windows ``matrix t matrix^T`` of all tiles t at their positions.

  This is the transpose of `_to_tiles` with the transposed matrix.
  """
  columns = _add_windows(_combine(matrix, [tiles[:, j] for j in range(tiles.shape[1])]), 3)
  columns = jax.lax.optimization_barrier(columns)
  return _add_windows(_combine(matrix, [columns[i] for i in range(columns.shape[0])]), 1)


def _kernel_tiles(kernel: jax.Array, matrix: np.ndarray) -> jax.Array:
  """Computes ``matrix k matrix^T`` over the first two axes, as a product with one matrix.

  With einsum the step of a ResNet-50 takes 1.3 times as long.
  """
  rows, size = matrix.shape
  both = jnp.asarray(np.kron(matrix, matrix), kernel.dtype)
  return (both @ kernel.reshape(size * size, -1)).reshape(rows, rows, *kernel.shape[2:])


def _combine(matrix: np.ndarray, parts: Sequence[jax.Array]) -> list[jax.Array]:
  """Computes ``matrix @ parts`` by additions, skipping entries that are 0."""
  return [
    functools.reduce(
      jnp.add, [_times(factor, part) for factor, part in zip(row, parts, strict=True) if factor]
    )
    for row in matrix
  ]


def _times(factor: float, part: jax.Array) -> jax.Array:
  return part if factor == 1 else part * jnp.asarray(factor, part.dtype)


@jax.custom_vjp
def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
  """Computes ``x [..., C] @ matrix [C, K]``."""
  return x @ matrix


def _product_forward(
  x: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return x @ matrix, (x, matrix)


def _product_backward(
  saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, matrix = saved
  rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
  # The left factor of a product over the pixels is copied to its transpose, so it should be the
  # narrower one. A step gains 8 to 10 %.
  if matrix.shape[0] <= matrix.shape[1]:
    grad_matrix = rows.T @ grad_rows
  else:
    grad_matrix = jax.lax.optimization_barrier(grad_rows.T @ rows).T
  return grad @ matrix.T, grad_matrix


_product.defvjp(_product_forward, _product_backward)


def _patches(x: jax.Array, size: int, stride: int) -> jax.Array:
  """Returns the patches in the order of the kernel.

  Returns:
    ``[B, ceil(H / stride), ceil(W / stride), size * size * C]``.
  """
  counts = -(-x.shape[1] // stride), -(-x.shape[2] // stride)
  rows = _windows(_pad(x, size // 2), 1, size, stride, counts[0])
  return jnp.concatenate(
    [part for row in rows for part in _windows(row, 2, size, stride, counts[1])], axis=3
  )


def _pad(x: jax.Array, margin: int) -> jax.Array:
  return jnp.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))


def _windows(x: jax.Array, axis: int, size: int, stride: int, count: int) -> list[jax.Array]:
  """Cuts ``count`` windows along an axis, one every ``stride`` elements.

  Returns:
    ``size`` arrays like ``x`` with ``count`` entries on the axis: element 0, 1, ... ``size - 1`` of
    each window. Elements beyond the end of the axis are 0.
  """
  reach = (count - 1) * stride + 1
  x = _extend(x, axis, 0, max(0, reach + size - 1 - x.shape[axis]))
  return [jax.lax.slice_in_dim(x, i, i + reach, stride, axis) for i in range(size)]


def _add_windows(parts: Sequence[jax.Array], axis: int) -> jax.Array:
  """Sums the windows of tiles at their positions, the transpose of `_windows`.

  The axis is as long as the windows reach, rounded up to whole tiles.
  """
  last = -(-len(parts) // _TILE) - 1
  sums = []
  for offset in range(_TILE):
    moved = [
      _extend(parts[i], axis, i // _TILE, last - i // _TILE)
      for i in range(offset, len(parts), _TILE)
    ]
    sums.append(functools.reduce(jnp.add, moved))
  stacked = jnp.stack(sums, axis=axis + 1)
  return stacked.reshape(*stacked.shape[:axis], -1, *stacked.shape[axis + 2 :])


def _extend(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
  """Pads ``x`` with zeros before and after along an axis."""
  return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)])
