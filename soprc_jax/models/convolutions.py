"""Convolutions and max pooling of the ResNets: the same functions on all devices, computed on CPUs as matrix products.

XLA hands convolutions on GPUs and TPUs to libraries that are made for them. On CPUs its own ones, and above all their gradients, are
several times slower than its matrix products, so here

* 1x1 convolutions are products of pixels and kernel;
* 3x3 convolutions of stride 1 are Winograd's (Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016): a tile of
  outputs takes 36 products of matrices where a direct one takes 144, the gradients likewise;
* the others are a product of the patches (im2col) and the kernel.

All of them cut an axis into windows that overlap (`_windows`), and their gradients add such windows up again (`_add_windows`).
"""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import functools

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
# Whether max pooling is XLA's own too, within `plain`.
_plain: contextvars.ContextVar[bool | None] = contextvars.ContextVar("plain", default=None)


def convolve(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
  """Convolution with torch's padding ``(size - 1) // 2`` on each side, as `jax.lax.conv_general_dilated` up to rounding.

  Args:
    x: ``[B, H, W, C]``.
    kernel: ``[size, size, C, K]`` of the dtype of ``x``, of odd size.
    stride: of both axes.

  Returns:
    ``[B, ceil(H / stride), ceil(W / stride), K]``.
  """
  size = kernel.shape[0]
  # Winograd's differences need more digits than bfloat16 has.
  if _plain.get() is not None or not _on_cpu() or x.dtype not in (jnp.float32, jnp.float64):
    padding = [(size // 2, size // 2)] * 2
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
  # Under shard_map the gradients below are those of each device; jax adds them up.
  x, kernel = collectives.vary_alike(x, kernel)
  if size == 1:
    return _product(x[:, ::stride, ::stride], kernel[0, 0])
  if size == 3 and stride == 1 and x.shape[3] >= _WINOGRAD_CHANNELS:
    return _winograd(x, kernel)
  return _product(_patches(x, size, stride), kernel.reshape(-1, kernel.shape[3]))


def max_pool(x: jax.Array) -> jax.Array:
  """Maximum of 3x3 pixels with stride 2 and padding 1: ``[B, ceil(H / 2), ceil(W / 2), C]`` from ``[B, H, W, C]``.

  Of equal pixels the first one in reading order has the gradient, as in torch.
  """
  if _plain.get() is False:
    return _max_of_slices(_max_of_slices(x, 2), 1)
  if _plain.get() or not _on_cpu():
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, ((0, 0), (1, 1), (1, 1), (0, 0)))
  # The first row that holds the maximum, and in it the first column.
  return _max_along(_max_along(x, 2), 1)


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
  """``max(x, 0)`` with gradient 0 at 0; keeps its result for the gradient, which the next layer keeps anyway, and not ``x``."""
  return jax.nn.relu(x)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  y = jax.nn.relu(x)
  return y, y


def _relu_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
  return (jnp.where(y > 0, grad, jnp.zeros_like(grad)),)


relu.defvjp(_relu_forward, _relu_backward)


@contextlib.contextmanager
def plain(*, pool: bool = True) -> Iterator[None]:
  """What is traced within has XLA's own convolutions on CPUs too: for programs that leave this machine.

  Args:
    pool: the same for max pooling; False has the maxima of slices, which the ONNX converter and runtime know.
  """
  token = _plain.set(pool)
  try:
    yield
  finally:
    _plain.reset(token)


def _on_cpu() -> bool:
  return jax.default_backend() == "cpu"


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
  """``matrix k matrix^T`` over the first two axes, as a product with one matrix of at most 36 rows."""
  rows, size = matrix.shape
  both = jnp.asarray(np.kron(matrix, matrix), kernel.dtype)
  return (both @ kernel.reshape(size * size, -1)).reshape(rows, rows, *kernel.shape[2:])


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _max_along(x: jax.Array, axis: int) -> jax.Array:
  """Maximum of 3 neighbours along the axis, with stride 2 and padding 1."""
  return functools.reduce(jnp.maximum, _pool_windows(x, axis))


def _max_forward(x: jax.Array, axis: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  y = _max_along(x, axis)
  return y, (x, y)


def _max_backward(axis: int, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
  x, y = saved
  free, parts = jnp.ones(y.shape, bool), []
  for window in _pool_windows(x, axis):
    first = free & (window == y)
    parts.append(jnp.where(first, grad, jnp.zeros_like(grad)))
    free = free & ~first
  return (jax.lax.slice_in_dim(_add_windows(parts, axis, 2), 1, x.shape[axis] + 1, axis=axis),)


_max_along.defvjp(_max_forward, _max_backward)


def _max_of_slices(x: jax.Array, axis: int) -> jax.Array:
  """The same without a padding: the edge once more changes no maximum that it is in."""
  length = x.shape[axis]
  edges = jax.lax.slice_in_dim(x, 0, 1, axis=axis), jax.lax.slice_in_dim(x, length - 1, length, axis=axis)
  x = jnp.concatenate([edges[0], x, edges[1]], axis=axis)
  reach = 2 * -(-length // 2) - 1
  return functools.reduce(jnp.maximum, [jax.lax.slice_in_dim(x, i, i + reach, stride=2, axis=axis) for i in range(3)])


def _pool_windows(x: jax.Array, axis: int) -> list[jax.Array]:
  margin = [(1, 1) if i == axis else (0, 0) for i in range(x.ndim)]
  padded = jnp.pad(x, margin, constant_values=-jnp.inf)
  return _windows(padded, axis, 3, 2, -(-x.shape[axis] // 2))


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
