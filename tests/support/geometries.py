"""Provides embeddings that are hard to rank, with labels."""

import numpy as np


def data(seed, size, classes, distinct=None):
  """Returns embeddings and labels. ``distinct`` limits the number of different embeddings; the
  others are exact duplicates.
  """
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(distinct or size, 6))
  rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
  return rows[rng.integers(0, len(rows), size)] if distinct else rows, rng.integers(
    0, classes, size
  )


def around_a_midpoint(rng, size, width):
  """Returns float32 vectors whose exact products are 1 + 2^-24, up to the rounding of float64 sums.
  Half of them are queries of ones. At these products the order of the sum decides whether float32
  rounds up or down.
  """
  tiny = rng.integers(-2, 3, (1 + size // 8, width)) * 2.0**-53
  tiny[:, :2] = 1.0, 2.0**-24
  for row in tiny:
    rng.shuffle(row)
  rows = tiny[rng.integers(0, len(tiny), size)]
  rows[::2] = 1.0
  return rows.astype(np.float32)


def geometry(name, seed, size, width):
  """Returns embeddings that are hard to rank in float32."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(size, width))
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  if name == "spread":
    return rows.astype(np.float32)
  if name == "collapsed":
    return np.tile(rows[:1], (size, 1))
  if name == "nearly collapsed":
    return (rows[:1] + 1e-6 * rows).astype(np.float32)
  if name == "duplicates":
    return rows[rng.integers(0, size // 8, size)].astype(np.float32)
  if name == "duplicates up to 1e-8":
    return rows[rng.integers(0, size // 4, size)] + 1e-8 * rng.normal(size=rows.shape)
  if name == "any norm":
    return rows * 10.0 ** rng.integers(-30, 4, (size, 1))
  if name == "around a midpoint":
    return around_a_midpoint(rng, size, width)
  return np.round(rows * 4) / 4  # "grid": all products exact, many ties
