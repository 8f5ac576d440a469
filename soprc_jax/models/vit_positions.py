"""Positions of patches: resized position embeddings and rotary embeddings, as constants."""

import math

import numpy as np


def resizing(size: int, new_size: int, *, antialias: bool) -> np.ndarray:
  """Returns the matrix of torch's bicubic resizing along one axis, ``[new_size, size]`` float32.

  Args:
    size: number of old points, >= 1.
    new_size: number of new points, >= 1.
    antialias: whether the kernel widens where points are left out, as in Pillow. torch then also
      takes another cubic (-0.5 instead of -0.75), and leaves out what is beyond the border instead
      of repeating the border.
  """
  scale = size / new_size
  centers = (np.arange(new_size) + 0.5) * scale - 0.5
  if antialias:
    weights = _cubic((np.arange(size) - centers[:, None]) / max(scale, 1.0), -0.5)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
  matrix = np.zeros((new_size, size))
  for offset in range(-1, 3):
    points = np.floor(centers).astype(int) + offset
    np.add.at(
      matrix,
      (np.arange(new_size), np.clip(points, 0, size - 1)),
      _cubic(points - centers, -0.75),
    )
  return matrix.astype(np.float32)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
  """Computes Keys' cubic convolution kernel, which is 0 beyond 2."""
  x = np.abs(x)
  inner = (a + 2) * x**3 - (a + 3) * x**2 + 1
  outer = a * (x**3 - 5 * x**2 + 8 * x - 4)
  return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


def rotations(grid: tuple[int, int], size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns cosine and sine of the angles of DINOv3's rotary embeddings.

  The first half of the frequencies turns with the row, the second with the column. Both go from -1
  to 1 for any image size.

  Args:
    grid: rows and columns of patches.
    size: width of an attention head, a multiple of 4.
    base: base of the periods.

  Returns:
    Two arrays ``[1, rows * columns, 1, size]`` float32.
  """
  periods = base ** np.arange(0, 1, 4 / size)
  places = np.meshgrid(*((2 * np.arange(n) + 1) / n - 1 for n in grid), indexing="ij")
  angles = 2 * math.pi * np.stack(places, axis=-1).reshape(-1, 2, 1) / periods
  angles = np.tile(angles.reshape(len(angles), -1), 2)[None, :, None]
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
