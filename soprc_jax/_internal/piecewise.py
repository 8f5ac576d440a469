r"""Sums of a piecewise polynomial over all pairs of a list, by sorting.

The sums are ``S_i = sum_j w_j f((y_j - t_i) / tau)``. They take ``O((T + Y) log Y)`` time and
linear memory.

The values y are sorted once. A tree over them stores the moments of each node about its smallest
value. An interval of sorted values consists of a few nodes of each level. With c children per node
these are at most c - 1 at either end. The sum of a polynomial over a node follows from its moments.

Every moment and, for l1, every coefficient is non-negative, and nothing is ever subtracted. So the
rounding error of float32 stays relative to the sum. Differences of prefix sums would lose all
digits of the small sums, which matter most.
"""

from collections.abc import Sequence
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import blockwise, collectives, sorting

# Smaller sums are faster pair by pair.
_MIN_THRESHOLDS = 64
_MIN_VALUES = 2**13
_MIN_PAIRS = 2**22
# Number of nodes joined to one of the next level: few are faster to query, many faster to build.
_FEW_CHILDREN = 2
_MANY_CHILDREN = 4
# Scaled distances beyond this only occur in nodes that no bounded piece uses. Their powers must not
# overflow.
_FAR = 1e6
# The linear piece of l1 is capped here. In float32 the risk A / (1 + A) reaches 1 long before.
_FARTHEST = 1e30


class Piece(NamedTuple):
  """Holds a polynomial ``f(x) = sum_k coefficients[k] (x - low)^k`` for ``low <= x < high``.

  Only the last piece may end at infinity.
  """

  low: float
  high: float
  coefficients: tuple[float, ...]


class PiecewisePolynomial(NamedTuple):
  """Holds a piecewise polynomial that is 0 below its first piece.

  Attributes:
    pieces: adjacent pieces in ascending order. A piece that ends at infinity is at most linear.
    slope_is_linear: whether the derivative is continuous, and linear in each piece.
  """

  pieces: tuple[Piece, ...]
  slope_is_linear: bool

  @property
  def degree(self) -> int:
    return max(len(piece.coefficients) for piece in self.pieces) - 1

  def derivative(self) -> "PiecewisePolynomial":
    """Returns the derivative, piece by piece."""
    pieces = []
    for piece in self.pieces:
      slopes = tuple(k * coefficient for k, coefficient in enumerate(piece.coefficients))[1:]
      pieces.append(piece._replace(coefficients=slopes or (0.0,)))
    return PiecewisePolynomial(tuple(pieces), slope_is_linear=False)


def _tanh_pieces() -> tuple[Piece, ...]:
  """Returns ``tanh(x / 2)`` for x >= 0, accurate to 1e-7.

  Between the edges it is a Chebyshev interpolation of degree 6, beyond them 1.
  """
  edges = (0.0, 1.0, 2.0, 3.0, 4.0, 5.5, 7.5, 10.5, 17.5)
  pieces = []
  for low, high in itertools.pairwise(edges):
    if low == 0.0:  # x times an even function, so that small values keep their relative accuracy
      fit = np.polynomial.Chebyshev.interpolate(lambda x: np.tanh(x / 2) / x, 5, domain=[low, high])
      coefficients = np.r_[0.0, fit.convert(kind=np.polynomial.Polynomial).coef]
    else:
      fit = np.polynomial.Chebyshev.interpolate(lambda x: np.tanh(x / 2), 6, domain=[low, high])
      coefficients = fit.convert(kind=np.polynomial.Polynomial)(
        np.polynomial.Polynomial([low, 1.0])
      ).coef
    pieces.append(Piece(low, high, tuple(float(c) for c in coefficients)))
  return (*pieces, Piece(edges[-1], math.inf, (1.0,)))


# l1(h - g) of Eq. 7 as a function of (g - h) / tau1, l2(h - v) as one of (v - h) / tau2, and the
# positive part.
ONE_SIDED_HUBER = PiecewisePolynomial(
  (Piece(-1.0, 0.0, (0.0, 0.0, 1.0)), Piece(0.0, math.inf, (1.0, 2.0))), slope_is_linear=True
)
HINGE = PiecewisePolynomial((Piece(0.0, math.inf, (0.0, 1.0)),), slope_is_linear=False)
ONE_SIDED_SIGMOID = PiecewisePolynomial(_tanh_pieces(), slope_is_linear=False)


def is_faster(num_thresholds: int, num_values: int) -> bool:
  """Returns whether sorting is faster than all pairs, forward and backward, as measured on CPU."""
  enough = num_thresholds >= _MIN_THRESHOLDS and num_values >= _MIN_VALUES
  return enough and num_thresholds * num_values >= _MIN_PAIRS


def sums_of_lists(
  f: PiecewisePolynomial, thresholds: jax.Array, values: jax.Array, where: jax.Array, tau: Any
) -> jax.Array:
  """Computes `piecewise_sum` of each list, ``[..., T]``.

  ``thresholds [..., T]``, ``values [..., Y]`` and ``where [..., Y]`` have equal leading axes.
  """
  tau = jnp.asarray(tau, values.dtype)
  thresholds, values, where, tau = collectives.vary_alike(thresholds, values, where, tau)
  lead = thresholds.shape[:-1]
  if math.prod(lead) == 1:  # a gather with a batch axis is slower
    return piecewise_sum(
      f, thresholds.reshape(-1), values.reshape(-1), where.reshape(-1), tau
    ).reshape(thresholds.shape)
  rows = tuple(array.reshape(-1, array.shape[-1]) for array in (thresholds, values, where))
  sums = blockwise.map_rows(
    lambda t, y, w: piecewise_sum(f, t, y, w, tau),
    rows,
    4 * (thresholds.shape[-1] + values.shape[-1]),
  )
  return sums.reshape(*lead, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def piecewise_sum(
  f: PiecewisePolynomial, thresholds: jax.Array, values: jax.Array, where: jax.Array, tau: jax.Array
) -> jax.Array:
  """Sums ``f((values_j - thresholds_i) / tau)`` over the valid values, for each threshold.

  Args:
    f: the function.
    thresholds: ``[T]`` finite numbers in any order.
    values: ``[Y]`` finite numbers in any order.
    where: ``[Y]`` mask of the valid values.
    tau: scalar > 0.

  Returns:
    ``[T]``, differentiable with respect to thresholds, values and tau in reverse mode. A NaN in a
    valid entry makes all of it NaN.
  """
  return _piecewise_sum_forward(f, thresholds, values, where, tau)[0]


@functools.partial(jax.jit, static_argnums=0)
def _piecewise_sum_forward(
  f: PiecewisePolynomial, thresholds: jax.Array, values: jax.Array, where: jax.Array, tau: jax.Array
) -> tuple[jax.Array, Any]:
  tree = _make_tree(*_sorted_valid(values, where), tau, f.degree, thresholds.shape[0])
  sums, slopes = _query(tree, thresholds, tau, f)
  # Comparisons with NaN are false, which would hide the NaN.
  poisoned = jnp.isnan(thresholds) | jnp.any(jnp.isnan(values) & where)
  sums, slopes = jnp.where(poisoned, jnp.nan, sums), jnp.where(poisoned, jnp.nan, slopes)
  return sums, (thresholds, values, where, tau, slopes)


@functools.partial(jax.jit, static_argnums=0)
def _piecewise_sum_backward(
  f: PiecewisePolynomial, residuals: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
  thresholds, values, where, tau, slopes = residuals
  d_thresholds = -cotangent * slopes / tau
  # The gradient with respect to the values is the same sum with exchanged roles, weighted by the
  # cotangents: f'((y - t) / tau) = f'((-t - -y) / tau).
  slope = f.derivative()
  negated, weights = _sort_with(-thresholds, cotangent)
  knots = _knots(f, thresholds, tau)
  interpolates = f.slope_is_linear and values.shape[0] > knots.shape[0]
  num_queries = knots.shape[0] if interpolates else values.shape[0]
  tree = _make_tree(negated, weights, tau, slope.degree, num_queries)
  if interpolates:
    slope_sums = _interpolated_slopes(tree, _sort(knots), values, tau, slope)
  else:
    slope_sums = _query(tree, -values, tau, slope)[0]
  d_values = jnp.where(where, slope_sums / tau, jnp.zeros_like(values))
  # f depends on differences over tau only. The terms are centered, since a common shift cancels.
  centre = thresholds[0]
  d_tau = (
    -(
      jnp.sum((thresholds - centre) * d_thresholds)
      + jnp.sum(jnp.where(where, values - centre, 0.0) * d_values)
    )
    / tau
  )
  return d_thresholds, d_values, None, d_tau


piecewise_sum.defvjp(_piecewise_sum_forward, _piecewise_sum_backward)


def _interpolated_slopes(
  tree: "_Tree", knots: jax.Array, values: jax.Array, tau: jax.Array, slope: PiecewisePolynomial
) -> jax.Array:
  """Interpolates ``sum_i c_i f'((values_j - thresholds_i) / tau)`` between ascending knots.

  Between knots the sum is linear in the value.
  """
  at_knots = _query(tree, -knots, tau, slope)[0]
  # Halves do not overflow. The sum is constant below the first knot and above the last one.
  half_width, rise = 0.5 * knots[1:] - 0.5 * knots[:-1], at_knots[1:] - at_knots[:-1]
  flat = jnp.zeros_like(knots[:1])
  # One row per knot, so that a value needs a single gather.
  rows = jnp.stack(
    [
      jnp.concatenate([knots[:1], knots]),
      jnp.concatenate([at_knots[:1], at_knots]),
      jnp.concatenate([flat, rise, flat]),
      jnp.concatenate([flat, half_width, flat]),
    ],
    axis=1,
  )
  found = rows[jnp.searchsorted(knots, values, side="right")]
  start, at_start, rise, half_width = (found[:, i] for i in range(4))
  share = (0.5 * values - 0.5 * start) / jnp.where(half_width > 0, half_width, 1.0)
  return at_start + rise * share


def _knots(f: PiecewisePolynomial, thresholds: jax.Array, tau: jax.Array) -> jax.Array:
  """Returns the two floats around each lower edge ``t + tau * low`` of all pieces.

  No value lies between the two. An edge rounded to a single float would be off by (spacing of
  floats at t) / tau.
  """
  knots = []
  for piece in f.pieces:
    if piece.low == 0.0:
      knots.append(thresholds)
      continue
    edge = thresholds + tau * piece.low
    # The same quotient assigns pairs to pieces.
    scaled, infinity = (edge - thresholds) / tau, jnp.full_like(edge, jnp.inf)
    knots.append(jnp.where(scaled > piece.low, jnp.nextafter(edge, -infinity), edge))
    knots.append(jnp.where(scaled < piece.low, jnp.nextafter(edge, infinity), edge))
  return jnp.concatenate(knots)


class _Tree(NamedTuple):
  """Holds sorted values with the moments of their nodes.

  Attributes:
    values: ``[Y]`` in ascending order.
    weights: ``[Y]``.
    nodes: ``[nodes, 2 + degree]``, level by level without the leaves: smallest value a, then the
      moments ``sum w ((y - a) / tau)^k``.
    starts: row of the first node of each level.
    children: number of nodes that are joined to one of the next level.
  """

  values: jax.Array
  weights: jax.Array
  nodes: jax.Array
  starts: tuple[int, ...]
  children: int


def _make_tree(
  values: jax.Array, weights: jax.Array, tau: jax.Array, degree: int, num_queries: int
) -> _Tree:
  children = _MANY_CHILDREN if values.shape[0] > _MANY_CHILDREN * num_queries else _FEW_CHILDREN
  level = [values, weights] + [jnp.zeros_like(values)] * degree
  levels: list[jax.Array] = []
  starts = [0]
  while not levels or level[0].shape[0] > 1:
    level = _join_neighbours(level, tau, children)
    levels.append(jnp.stack(level, axis=1))
    starts.append(starts[-1] + level[0].shape[0])
  return _Tree(values, weights, jnp.concatenate(levels), tuple(starts[:-1]), children)


def _join_neighbours(level: list[jax.Array], tau: jax.Array, children: int) -> list[jax.Array]:
  """Computes the moments of groups of adjacent nodes, about the smallest value of the first one."""
  missing = -level[0].shape[0] % children
  groups = [
    jnp.pad(column, (0, missing), mode="edge" if i == 0 else "constant").reshape(-1, children)
    for i, column in enumerate(level)
  ]
  anchor, moments = groups[0][:, 0], groups[1:]
  distance = jnp.minimum((groups[0] - anchor[:, None]) / tau, _FARTHEST)
  powers = [jnp.ones_like(distance), distance] + [
    jnp.minimum(distance, _FAR) ** k for k in range(2, len(moments))
  ]
  joined = [
    jnp.sum(sum(math.comb(k, c) * powers[k - c] * moments[c] for c in range(k + 1)), axis=1)
    for k in range(len(moments))
  ]
  return [anchor, *joined]


def _query(
  tree: _Tree, thresholds: jax.Array, tau: jax.Array, f: PiecewisePolynomial
) -> tuple[jax.Array, jax.Array]:
  """Sums f and its derivative over all values, for each threshold."""
  none = collectives.vary_alike(jnp.zeros_like(thresholds), thresholds)[0]
  sums = none, none
  # A value at the first edge contributes 0, and so does its slope, as in the surrogates.
  first = _num_below(tree.values, thresholds, tau, f.pieces[0].low, with_equal=True)
  for piece in f.pieces:
    if math.isinf(piece.high):
      end = collectives.vary_alike(jnp.full_like(first, len(tree.values)), first)[0]
    else:
      end = _num_below(tree.values, thresholds, tau, piece.high, with_equal=False)
    sums = _add_piece(tree, thresholds, tau, piece, first, end, sums)
    first = end
  return sums


def _num_below(
  values: jax.Array, thresholds: jax.Array, tau: jax.Array, edge: float, *, with_equal: bool
) -> jax.Array:
  """Counts the ascending values with ``(y - t) / tau < edge`` (or ``<=``), ``[T]``.

  The search uses that very quotient, as the sum over pairs does. If tau is less than the spacing of
  floats at t, ``t + tau * edge`` is t itself. That would put equal scores on the wrong side of the
  edge.
  """

  def halve(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = ends
    middle = low + (high - low) // 2
    scaled = (values.at[middle].get(mode="promise_in_bounds") - thresholds) / tau
    below = (scaled <= edge) if with_equal else (scaled < edge)
    return jnp.where(below, middle, low), jnp.where(below, high, middle)

  none = jnp.zeros(thresholds.shape, jnp.int32)
  low, high, _ = collectives.vary_alike(none, jnp.full_like(none, values.shape[0]), thresholds)
  return jax.lax.fori_loop(0, math.ceil(math.log2(values.shape[0] + 1)), halve, (low, high))[1]


def _add_piece(
  tree: _Tree,
  thresholds: jax.Array,
  tau: jax.Array,
  piece: Piece,
  first: jax.Array,
  end: jax.Array,
  sums: Any,
) -> Any:
  """Adds the sums of one polynomial over the sorted values ``[first, end)``.

  It climbs the tree from the leaves to the root.
  """
  degree, children, to_the_end = len(piece.coefficients) - 1, tree.children, math.isinf(piece.high)

  def add(sums: Any, used: jax.Array, anchor: jax.Array, moments: Sequence[jax.Array]) -> Any:
    # Non-negative up to the rounding of the edge. The difference of close numbers is exact.
    offset = jnp.clip((anchor - thresholds) / tau - piece.low, 0.0, _FARTHEST)
    at_anchor = _taylor(piece.coefficients, offset)
    value = sum(slope * moment for slope, moment in zip(at_anchor, moments))
    slope = sum((k + 1) * at_anchor[k + 1] * moments[k] for k in range(degree))
    return sums[0] + jnp.where(used, value, 0.0), sums[1] + jnp.where(used, slope, 0.0)

  def at_leaves(index: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    weight = tree.weights[index]
    return tree.values[index], [weight] + [jnp.zeros_like(weight)] * degree

  def at_level(start: jax.Array, index: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    rows = tree.nodes[start + index]
    return rows[..., 0], [rows[..., 1 + k] for k in range(degree + 1)]

  def climb(nodes_at: Any, first: jax.Array, end: jax.Array, sums: Any) -> Any:
    """Adds the nodes at the ends that do not fill a node of the next level."""

    def take_ends(_: jax.Array, carry: Any) -> Any:
      first, end, sums = carry
      take = (first % children != 0) & (first < end)
      sums = add(sums, take, *nodes_at(jnp.where(take, first, 0)))
      first = first + take.astype(first.dtype)
      if not to_the_end:
        take = (end % children != 0) & (first < end)
        end = end - take.astype(end.dtype)
        sums = add(sums, take, *nodes_at(jnp.where(take, end, 0)))
      return first, end, sums

    first, end, sums = jax.lax.fori_loop(0, children - 1, take_ends, (first, end, sums))
    if to_the_end:
      # The last node may be padded, so the remainder up to the end already consists of whole nodes.
      # Without a remainder first equals end.
      return -(-first // children), -(-end // children), sums
    return first // children, end // children, sums

  first, end, sums = climb(at_leaves, first, end, sums)
  starts = jnp.asarray(tree.starts, jnp.int32)

  def one_level(level: jax.Array, carry: Any) -> Any:
    return climb(functools.partial(at_level, starts[level]), *carry)

  first, end, sums = jax.lax.fori_loop(0, len(tree.starts), one_level, (first, end, sums))
  if to_the_end:  # the remaining values, at the root
    sums = add(sums, first < end, *at_level(starts[-1], jnp.zeros_like(first)))
  return sums


def _taylor(coefficients: Sequence[float], x: jax.Array) -> list[jax.Array]:
  """Returns the coefficients of the polynomial about x."""
  degree = len(coefficients) - 1
  powers = [jnp.ones_like(x)]
  for _ in range(degree):
    powers.append(powers[-1] * x)
  return [
    sum(
      math.comb(c, k) * coefficients[c] * powers[c - k]
      for c in range(k, degree + 1)
      if coefficients[c]
    )
    + jnp.zeros_like(x)
    for k in range(degree + 1)
  ]


def _sorted_valid(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sorts the values in ascending order, with weight 1 where valid and 0 elsewhere.

  Invalid values come first and are set to the smallest valid value.
  """
  num_valid = jnp.sum(where, dtype=jnp.int32)
  ascending = _sort(jnp.where(where, values, -jnp.inf))
  valid = jnp.arange(values.shape[0], dtype=jnp.int32) >= values.shape[0] - num_valid
  lowest = jnp.min(jnp.where(where, values, jnp.inf))
  filler = jnp.where(num_valid > 0, lowest, jnp.zeros_like(lowest))
  return jnp.where(valid, ascending, filler), valid.astype(values.dtype)


def _sort_with(keys: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sorts keys without NaN in ascending order, and the weights along with them."""
  if keys.dtype != jnp.float32:
    keys, weights = jax.lax.sort((keys, weights), num_keys=1)
    return keys, weights
  bits, weights = jax.lax.sort((sorting.ordered_bits(keys), weights), num_keys=1)
  return sorting.from_ordered_bits(bits), weights


def _sort(array: jax.Array) -> jax.Array:
  """Sorts floats without NaN, like ``jnp.sort``."""
  if array.dtype != jnp.float32:
    return jnp.sort(array)
  return sorting.from_ordered_bits(jnp.sort(sorting.ordered_bits(array)))
