"""Convolutions of the ResNets: the same function on all devices, computed on CPUs as matrix products.

XLA hands convolutions on GPUs and TPUs to libraries that are made for them. Its own ones for CPUs, and above all their gradients,
are several times slower than its matrix products. Each way below is followed by how many times as long a training step takes
without it, of ``configs/glyphs.py`` and of a ResNet-50 at 224 pixels.

* 1x1 convolutions are products of pixels and kernel (1.16, 1.95).
* 3x3 convolutions of stride 1 are Winograd's (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016). A
  tile of outputs takes 36 products of matrices where a direct one takes 144, the gradients likewise (1.54, 1.18).
* The others are a product of the patches (im2col) and the kernel (1.23, 1.01).

Both of the latter cut an axis into windows that overlap (`_windows`), and their gradients add such windows up again
(`_add_windows`).
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import collectives

# Winograd's F(4, 3) at the points 0, 1, -1, 2, -2 and infinity, F(2, 3) at 0, 1, -1 and infinity; tile length -> matrices of the input
# (B^T in the paper), the kernel (G) and the output (A^T).
_WINOGRAD = {
  4: (
    (
      (4, 0, -5, 0, 1, 0),
      (0, -4, -4, 1, 1, 0),
      (0, 4, -4, -1, 1, 0),
      (0, -2, -1, 2, 1, 0),
      (0, 2, -1, -2, 1, 0),
      (0, 4, 0, -5, 0, 1),
    ),
    (
      (1 / 4, 0, 0),
      (-1 / 6, -1 / 6, -1 / 6),
      (-1 / 6, 1 / 6, -1 / 6),
      (1 / 24, 1 / 12, 1 / 6),
      (1 / 24, -1 / 12, 1 / 6),
      (0, 0, 1),
    ),
    ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
  ),
  2: (
    ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    ((1, 1, 1, 0), (0, 1, -1, -1)),
  ),
}
# Below so many channels the tiles cost more than they save.
_WINOGRAD_CHANNELS = 16


def implementation(dtype: Any) -> str:
  """Returns how `convolve` computes on this machine: ``"products"`` of matrices on CPUs, else ``"xla"``."""
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
  if size == 3 and stride == 1 and x.shape[3] >= _WINOGRAD_CHANNELS:
    return _winograd(x, kernel)
  return _product(_patches(x, size, stride), kernel.reshape(-1, kernel.shape[3]))


def by_xla(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Computes the same by XLA's own operation on every backend, up to rounding. Arguments as in `convolve`."""
  padding = [(kernel.shape[0] // 2,) * 2] * 2
  return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def _winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """3x3 convolution of stride 1, ``[B, H, W, K]``."""
  length, (b, g, a) = _winograd_of(x)
  tiles = _to_tiles(_pad(x, 1), b, length, _num_tiles(x, length))
  products = jnp.einsum("ijbhwc,ijck->ijbhwk", tiles, _kernel_tiles(kernel, g))
  return _from_tiles(products, a, length)[:, : x.shape[1], : x.shape[2]]


def _winograd_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _winograd(x, kernel), (x, kernel)


def _winograd_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The transposes of the forward pass, from its end to its start."""
  x, kernel = saved
  length, (b, g, a) = _winograd_of(x)
  counts = _num_tiles(x, length)
  grad_products = _to_tiles(grad, a.T, length, counts)
  tiles = _to_tiles(_pad(x, 1), b, length, counts)
  grad_kernel_tiles = jnp.einsum("ijbhwc,ijbhwk->ijck", tiles, grad_products)
  grad_tiles = jnp.einsum("ijbhwk,ijck->ijbhwc", grad_products, _kernel_tiles(kernel, g))
  grad_x = _from_tiles(grad_tiles, b.T, length)[:, 1 : x.shape[1] + 1, 1 : x.shape[2] + 1]
  return grad_x, _kernel_tiles(grad_kernel_tiles, g.T)


_winograd.defvjp(_winograd_forward, _winograd_backward)


def _winograd_of(x: jax.Array) -> tuple[int, tuple[np.ndarray, ...]]:
  """Outputs of a tile along each axis, and the matrices of the input, the kernel and the output."""
  length = 4 if max(x.shape[1], x.shape[2]) > 4 else 2
  return length, tuple(np.array(matrix) for matrix in _WINOGRAD[length])


def _num_tiles(x: jax.Array, length: int) -> tuple[int, int]:
  return -(-x.shape[1] // length), -(-x.shape[2] // length)


def _to_tiles(x: jax.Array, matrix: np.ndarray, stride: int, counts: tuple[int, int]) -> jax.Array:
  """``matrix w matrix^T`` of each window w of ``x [B, H, W, C]``: ``[n, n, B, *counts, C]`` from n x m matrices."""
  size = matrix.shape[1]
  rows = jnp.stack(_combine(matrix, _windows(x, 1, size, stride, counts[0])))
  # Fused into one pass, the rows would be computed again for each column.
  rows = jax.lax.optimization_barrier(rows)
  return jnp.stack(_combine(matrix, _windows(rows, 3, size, stride, counts[1])), axis=1)


def _from_tiles(tiles: jax.Array, matrix: np.ndarray, stride: int) -> jax.Array:
  """Sum of the windows ``matrix t matrix^T`` of all tiles t, where they lie: the transpose of `_to_tiles` with the transposed matrix."""
  columns = _add_windows(_combine(matrix, [tiles[:, j] for j in range(tiles.shape[1])]), 3, stride)
  columns = jax.lax.optimization_barrier(columns)
  return _add_windows(_combine(matrix, [columns[i] for i in range(columns.shape[0])]), 1, stride)


def _kernel_tiles(kernel: jax.Array, matrix: np.ndarray) -> jax.Array:
  """``matrix k matrix^T`` over the first two axes."""
  factors = jnp.asarray(matrix, kernel.dtype)
  return jnp.einsum("ai,bj,ijck->abck", factors, factors, kernel)


def _combine(matrix: np.ndarray, parts: Sequence[jax.Array]) -> list[jax.Array]:
  """``matrix @ parts`` by additions of the entries that are not 0."""
  return [
    functools.reduce(jnp.add, [_times(factor, part) for factor, part in zip(row, parts, strict=True) if factor])
    for row in matrix
  ]


def _times(factor: float, part: jax.Array) -> jax.Array:
  return part if factor == 1 else part * jnp.asarray(factor, part.dtype)


@jax.custom_vjp
def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
  """``x [..., C] @ matrix [C, K]``."""
  return x @ matrix


def _product_forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return x @ matrix, (x, matrix)


def _product_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, matrix = saved
  rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
  # The left factor of a product over the pixels is copied to its transpose: take the narrower one.
  if matrix.shape[0] <= matrix.shape[1]:
    grad_matrix = rows.T @ grad_rows
  else:
    grad_matrix = jax.lax.optimization_barrier(grad_rows.T @ rows).T
  return grad @ matrix.T, grad_matrix


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _patches(x: jax.Array, size: int, stride: int) -> jax.Array:
  """``[B, ceil(H / stride), ceil(W / stride), size * size * C]``, in the kernel's order."""
  counts = -(-x.shape[1] // stride), -(-x.shape[2] // stride)
  rows = _windows(_pad(x, size // 2), 1, size, stride, counts[0])
  return jnp.concatenate([part for row in rows for part in _windows(row, 2, size, stride, counts[1])], axis=3)


def _patches_forward(x: jax.Array, size: int, stride: int) -> tuple[jax.Array, tuple[int, int]]:
  return _patches(x, size, stride), (x.shape[1], x.shape[2])


def _patches_backward(size: int, stride: int, shape: tuple[int, int], grad: jax.Array) -> tuple[jax.Array]:
  parts = jnp.split(grad, size * size, axis=3)
  rows = [_add_windows(parts[i * size : (i + 1) * size], 2, stride) for i in range(size)]
  padded = _add_windows(rows, 1, stride)
  pad, (height, width) = size // 2, shape
  # Windows of an odd stride may end before the image does.
  room = [(0, max(0, length + pad - padded.shape[axis])) for axis, length in ((1, height), (2, width))]
  padded = jnp.pad(padded, [(0, 0), *room, (0, 0)])
  return (padded[:, pad : pad + height, pad : pad + width],)


_patches.defvjp(_patches_forward, _patches_backward)


def _pad(x: jax.Array, margin: int) -> jax.Array:
  return jnp.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))


def _windows(x: jax.Array, axis: int, size: int, stride: int, count: int) -> list[jax.Array]:
  """Element 0, 1, ... ``size - 1`` of each of ``count`` windows along an axis, which starts a window every ``stride`` elements.

  Returns:
    ``size`` arrays like ``x`` with ``count`` entries on the axis; 0 where a window goes over the end.
  """
  # Blocks of one stride, in place of strided slices, which XLA's CPU code reads one by one.
  blocks = count + (size - 1) // stride
  margin = [(0, blocks * stride - x.shape[i], 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
  x = jax.lax.pad(x, jnp.zeros([], x.dtype), margin)
  x = x.reshape(*x.shape[:axis], blocks, stride, *x.shape[axis + 1 :])
  parts = []
  for i in range(size):
    first = i // stride
    block = jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    parts.append(jax.lax.index_in_dim(block, i % stride, axis=axis + 1, keepdims=False))
  return parts


def _add_windows(parts: Sequence[jax.Array], axis: int, stride: int) -> jax.Array:
  """Sum of windows where they lie: the transpose of `_windows`, as long as the windows reach, in whole strides."""
  num_blocks = -(-len(parts) // stride)
  sums = []
  for offset in range(stride):
    moved = [_shift(parts[i], axis, i // stride, num_blocks - 1) for i in range(offset, len(parts), stride)]
    sums.append(functools.reduce(jnp.add, moved))
  stacked = jnp.stack(sums, axis=axis + 1)
  return stacked.reshape(*stacked.shape[:axis], -1, *stacked.shape[axis + 2 :])


def _shift(x: jax.Array, axis: int, before: int, total: int) -> jax.Array:
  """``x`` with ``before`` zeros in front and ``total`` in all."""
  return jnp.pad(x, [(before, total - before) if i == axis else (0, 0) for i in range(x.ndim)])
