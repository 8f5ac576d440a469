"""Score interpolation phi (Alg. 2): maps any number of scores to a fixed number of points."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, masks

Grid = Literal["midpoints", "blocks"]
GRIDS = ("midpoints", "blocks")


def interpolate_scores(
  scores: ArrayLike,
  *,
  num_points: int,
  bounds: tuple[float, float] | None = None,
  grid: Grid = "midpoints",
  where: ArrayLike | None = None,
) -> jax.Array:
  r"""Interpolates M points phi(u), the quantiles of a list's positive scores (Alg. 2).

  Let ``u_1 <= ... <= u_n`` be the valid scores, extended by ``u_0 = 2 u_1 - u_2`` and ``u_{n+1} = 2
  u_n - u_{n-1}``. Take a position t in [0, 1), with ``i = floor(t n)`` and ``a = t n - i``. Then
  phi is the mean of the points at ``a`` on the segments ``u_i -> u_{i+1}`` and ``u_{i+1} ->
  u_{i+2}``. That is a straight line between the midpoints of neighboring scores. (Alg. 2 as printed
  sorts in descending order and names the wrong pair in its second loop; docs/paper.md, errata 2.)

  Args:
    scores: ``[..., P]`` finite scores in any order, clipped to a quarter of the largest number of
      the dtype.
    num_points: M >= 1, static.
    bounds: ``(b, B)``, the range of the scores. It clips the two extrapolated ends, which never
      move past u_1 and u_n. ``None`` does not clip them.
    grid: positions, static. ``"midpoints"``: ``t_j = (j + 1/2) / M``. ``"blocks"``: ``t_j = j / (n
      ceil(M / n))``, the authors' code, which omits the top end if n does not divide M.
    where: ``[..., P]`` mask of the valid scores; ``None`` means all. n counts per list.

  Returns:
    ``[..., M]``, ascending, at least float32. One valid score gives a constant row, none gives
    zeros. A valid score that is NaN or infinite makes its row NaN.

  Raises:
    ValueError: ``num_points``, ``grid`` or ``bounds`` is out of range; ``where`` has another shape,
      or contains other numbers than 0 and 1.

  >>> phi = interpolate_scores(jnp.array([0.8, 0.2, 0.4]), num_points=6, bounds=(-1.0, 1.0))
  >>> print([f"{value:.3f}" for value in phi])
  ['0.150', '0.250', '0.375', '0.525', '0.675', '0.825']
  """
  bounds = check_settings(num_points, bounds, grid)
  checks.check_masks_passed(scores=(scores, where))
  (scores,) = masks.promote(scores)
  if scores.ndim < 1:
    raise ValueError("scores must have a list axis: shape [..., P], got a scalar")
  mask = masks.mask_like(where, scores)
  return _interpolate(scores, mask, int(num_points), bounds, grid)


def check_settings(
  num_points: int, bounds: tuple[float, float] | None, grid: Grid
) -> tuple[float, float] | None:
  """Checks the settings of `interpolate_scores` and returns the bounds as floats.

  Raises:
    ValueError: a setting is out of range.
  """
  checks.check_count("num_points", num_points)
  if grid not in GRIDS:
    raise ValueError(f"grid must be one of {GRIDS}, got {grid!r}")
  if bounds is None:
    return None
  ends = np.asarray(bounds, np.float64)
  if ends.shape != (2,) or not ends[0] < ends[1]:
    raise ValueError(f"bounds must be (low, high) with low < high, got {bounds!r}")
  return float(ends[0]), float(ends[1])


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _interpolate(
  scores: jax.Array,
  mask: jax.Array,
  num_points: int,
  bounds: tuple[float, float] | None,
  grid: Grid,
) -> jax.Array:
  if scores.shape[-1] == 0:
    return jnp.zeros((*scores.shape[:-1], num_points), scores.dtype)
  scores, mask = masks.masked(scores, mask)  # NaN where a valid score is infinite
  count = jnp.sum(mask, axis=-1, keepdims=True)
  unknown = jnp.any(jnp.isnan(scores), axis=-1, keepdims=True)
  extended = _extend(scores, mask, count, bounds)
  midpoints = 0.5 * (extended[..., :-1] + extended[..., 1:])
  segment, offset = _positions(count, num_points, grid, scores.dtype)
  left = jnp.take_along_axis(midpoints, segment, axis=-1)
  right = jnp.take_along_axis(midpoints, segment + 1, axis=-1)
  # Rounding can move a point past the end of its segment, into the next one.
  points = left + offset * (right - left)
  points = jnp.where(points > right, right, points)
  points = jnp.where(count > 0, points, jnp.zeros_like(points))
  return jnp.where(unknown, jnp.nan, points)


def _extend(
  scores: jax.Array, mask: jax.Array, count: jax.Array, bounds: tuple[float, float] | None
) -> jax.Array:
  """Returns ``u_0 .. u_{n+1}`` of each list, ``[..., P + 2]``; later entries repeat ``u_{n+1}``."""
  # Up to a quarter of the largest float no sum or difference below overflows.
  limit = float(jnp.finfo(scores.dtype).max) / 4
  scores = jnp.clip(scores, -limit, limit)
  low, high = bounds or (-limit, limit)
  top = jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
  # Masked entries sort to the end; a finite filler keeps inf - inf out of unused branches.
  filler = jnp.where(count > 0, top, jnp.zeros_like(top))
  ascending = jnp.sort(jnp.where(mask, scores, filler), axis=-1)

  def at(index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(ascending, jnp.maximum(index, 0), axis=-1)

  first, last = at(jnp.zeros_like(count)), at(count - 1)
  second, before_last = at(jnp.minimum(count - 1, 1)), at(count - 2)
  below = jnp.minimum(jnp.maximum(first - (second - first), low), first)
  above = jnp.maximum(jnp.minimum(last + (last - before_last), high), last)
  rank = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,))
  inner = jnp.where(rank < count, ascending, above)
  return jnp.concatenate([below, inner, above], axis=-1)


def _positions(
  count: jax.Array, num_points: int, grid: Grid, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns segment ``floor(t n)`` and offset ``t n - floor(t n)`` of each point, ``[..., M]``."""
  n = jnp.maximum(count, 1)
  j = jnp.arange(num_points).reshape((1,) * (count.ndim - 1) + (-1,))
  if grid == "blocks":
    length = -(-num_points // n)
    return j // length, (j % length).astype(dtype) / length.astype(dtype)
  position = (j.astype(dtype) + 0.5) / num_points * n.astype(dtype)
  segment = jnp.minimum(jnp.floor(position).astype(n.dtype), n - 1)
  return segment, position - segment.astype(dtype)
