"""Convolutions of the ResNets: the same function on all devices, computed on CPUs as matrix
products.

XLA hands convolutions on GPUs and TPUs to libraries that are made for them. Its own ones for CPUs,
and above all their gradients, are several times slower than its matrix products. Each way below is
followed by how many times as long a training step takes without it, of ``configs/glyphs.py`` and of
a ResNet-50 at 224 pixels.

* 1x1 convolutions are products of pixels and kernel (1.16, 1.95).
* 3x3 convolutions of stride 1 are Winograd's (Lavin and Gray, "Fast algorithms for convolutional
  neural networks", CVPR 2016). A tile of outputs takes 36 products of matrices where a direct one
  takes 144, the gradients likewise (1.54, 1.18).
* The others are a product of the patches (im2col) and the kernel (1.23, 1.01).

Both of the latter cut an axis into windows that overlap (`_windows`). Winograd's also adds such
windows up (`_add_windows`).
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
  """Returns how `convolve` computes on this machine: ``"products"`` of matrices on CPUs, else
  ``"xla"``.
  """
  # Winograd's differences need more digits than bfloat16 has.
  wide = jnp.dtype(dtype) in (jnp.float32, jnp.float64)
  return "products" if wide and jax.default_backend() == "cpu" else "xla"


def convolve(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Convolves with torch's padding ``(size - 1) // 2`` on each side, by `implementation`.

  Args:
    x: ``[B, H, W, C]``.
    kernel: ``[size, size, C, K]`` of the dtype of ``x``, of odd size.
    stride: of both axes.

  Returns:
    ``[B, ceil(H / stride), ceil(W / stride), K]``.
  """
  size = kernel.shape[0]
  if implementation(x.dtype) == "xla":
    return by_xla(x, kernel, stride=stride)
  # Under shard_map the gradients below are those of each device; jax adds them up.
  x, kernel = collectives.vary_alike(x, kernel)
  if size == 1:
    return _product(x[:, ::stride, ::stride], kernel[0, 0])
  if size == 3 and stride == 1:
    return _winograd(x, kernel)
  return _product(_patches(x, size, stride), kernel.reshape(-1, kernel.shape[3]))


def by_xla(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Computes the same by XLA's own operation on every backend, up to rounding. Arguments as in
  `convolve`.
  """
  padding = [(kernel.shape[0] // 2,) * 2] * 2
  return jax.lax.conv_general_dilated(
    x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


@jax.custom_vjp
def _winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """3x3 convolution of stride 1, ``[B, H, W, K]``."""
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
  """The transposes of the forward pass, from its end to its start. jax's own take the step 1.4
  times as long.
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
  """``matrix w matrix^T`` of each window w of ``x [B, H, W, C]``: ``[n, n, B, *counts, C]`` from n
  x m matrices.
  """
  size = matrix.shape[1]
  rows = jnp.stack(_combine(matrix, _windows(x, 1, size, _TILE, counts[0])))
  # Fused into one pass, the rows would be computed again for each column: the step takes 1.2 times
  # as long.
  rows = jax.lax.optimization_barrier(rows)
  return jnp.stack(_combine(matrix, _windows(rows, 3, size, _TILE, counts[1])), axis=1)


def _from_tiles(tiles: jax.Array, matrix: np.ndarray) -> jax.Array:
  """Sum of the windows ``matrix t matrix^T`` of all tiles t, where they lie: the transpose of
  `_to_tiles` with the transposed matrix.
  """
  columns = _add_windows(_combine(matrix, [tiles[:, j] for j in range(tiles.shape[1])]), 3)
  columns = jax.lax.optimization_barrier(columns)
  return _add_windows(_combine(matrix, [columns[i] for i in range(columns.shape[0])]), 1)


def _kernel_tiles(kernel: jax.Array, matrix: np.ndarray) -> jax.Array:
  """``matrix k matrix^T`` over the first two axes, as a product with one matrix: by einsum a
  ResNet-50's step takes 1.3 times as long.
  """
  rows, size = matrix.shape
  both = jnp.asarray(np.kron(matrix, matrix), kernel.dtype)
  return (both @ kernel.reshape(size * size, -1)).reshape(rows, rows, *kernel.shape[2:])


def _combine(matrix: np.ndarray, parts: Sequence[jax.Array]) -> list[jax.Array]:
  """``matrix @ parts`` by additions of the entries that are not 0."""
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
  """``x [..., C] @ matrix [C, K]``."""
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
  # The left factor of a product over the pixels is copied to its transpose: take the narrower one.
  # A step gains 8 to 10 %.
  if matrix.shape[0] <= matrix.shape[1]:
    grad_matrix = rows.T @ grad_rows
  else:
    grad_matrix = jax.lax.optimization_barrier(grad_rows.T @ rows).T
  return grad @ matrix.T, grad_matrix


_product.defvjp(_product_forward, _product_backward)


def _patches(x: jax.Array, size: int, stride: int) -> jax.Array:
  """``[B, ceil(H / stride), ceil(W / stride), size * size * C]``, in the kernel's order."""
  counts = -(-x.shape[1] // stride), -(-x.shape[2] // stride)
  rows = _windows(_pad(x, size // 2), 1, size, stride, counts[0])
  return jnp.concatenate(
    [part for row in rows for part in _windows(row, 2, size, stride, counts[1])], axis=3
  )


def _pad(x: jax.Array, margin: int) -> jax.Array:
  return jnp.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))


def _windows(x: jax.Array, axis: int, size: int, stride: int, count: int) -> list[jax.Array]:
  """Element 0, 1, ... ``size - 1`` of each of ``count`` windows along an axis, which starts a
  window every ``stride`` elements.

  Returns:
    ``size`` arrays like ``x`` with ``count`` entries on the axis; 0 where a window goes over the
    end.
  """
  reach = (count - 1) * stride + 1
  x = _extend(x, axis, 0, max(0, reach + size - 1 - x.shape[axis]))
  return [jax.lax.slice_in_dim(x, i, i + reach, stride, axis) for i in range(size)]


def _add_windows(parts: Sequence[jax.Array], axis: int) -> jax.Array:
  """Sum of windows of tiles where they lie: the transpose of `_windows`, as long as the windows
  reach, in whole tiles.
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
  """``x`` with so many zeros in front and behind."""
  return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)])
