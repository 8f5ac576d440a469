"""Sums of a function of the difference of two scores, over the pairs of a list."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from soprc_jax import surrogates
from soprc_jax._internal import blockwise, masks, piecewise

ALGORITHMS = ("auto", "dense", "sorted")


class PairFunction(NamedTuple):
  """A function f of a threshold and a value.

  Attributes:
    of_margins: ``(threshold - value, tau) -> f``, elementwise.
    polynomial: f of ``(value - threshold) / tau``, for sums by sorting; None if it is none.
    only_float32: whether the polynomial is only as exact as float32.
  """

  of_margins: Callable[[jax.Array, jax.Array], jax.Array]
  polynomial: piecewise.PiecewisePolynomial | None = None
  only_float32: bool = False


# l1 and l2 of Eq. 7, and the positive part.
L1 = PairFunction(
  lambda margins, tau: surrogates.one_sided_huber(margins, tau=tau), piecewise.ONE_SIDED_HUBER
)
L2 = PairFunction(
  lambda margins, tau: surrogates.one_sided_sigmoid(margins, tau=tau),
  piecewise.ONE_SIDED_SIGMOID,
  only_float32=True,
)
HINGE = PairFunction(lambda margins, tau: jax.nn.relu(-margins / tau), piecewise.HINGE)


def pair_sums(
  function: PairFunction,
  thresholds: jax.Array,
  values: jax.Array,
  where: jax.Array,
  *,
  tau: Any,
  algorithm: str = "auto",
) -> jax.Array:
  """Sums a function over the valid values of its list, for each threshold.

  Args:
    function: of each pair.
    thresholds: ``[..., T]``.
    values: ``[..., Y]`` with the same leading axes.
    where: ``[..., Y]`` mask of the valid values.
    tau: width > 0.
    algorithm: ``"dense"``: every pair, in blocks; ``"sorted"``: by sorting, of functions that are
      polynomials; ``"auto"``:
      by sorting where that is faster.

  Returns:
    ``[..., T]``.

  Raises:
    ValueError: ``"sorted"`` with a tau that is no scalar.
  """
  if function.polynomial is not None and _is_sorted(function, thresholds, values, tau, algorithm):
    return piecewise.sums_of_lists(function.polynomial, thresholds, values, where, tau)

  def sums(thresholds: jax.Array) -> jax.Array:
    margins = thresholds[..., :, None] - values[..., None, :]
    found = function.of_margins(margins, jnp.asarray(tau, margins.dtype))
    return jnp.sum(jnp.where(where[..., None, :], found, jnp.zeros_like(found)), axis=-1)

  return blockwise.map_columns(sums, thresholds, values.size)


def pair_means(
  function: PairFunction,
  thresholds: jax.Array,
  values: jax.Array,
  where: jax.Array,
  *,
  tau: Any,
  algorithm: str = "auto",
) -> jax.Array:
  """Averages a function over the valid values of its list, 0 without any; else as `pair_sums`."""
  sums = pair_sums(function, thresholds, values, where, tau=tau, algorithm=algorithm)
  count = jnp.sum(where, axis=-1, keepdims=True).astype(sums.dtype)
  return masks.ratio(sums, jnp.broadcast_to(count, sums.shape))


def _is_sorted(
  function: PairFunction, thresholds: jax.Array, values: jax.Array, tau: Any, algorithm: str
) -> bool:
  """Whether the sum is to be taken by sorting, from what is known when traced."""
  if algorithm == "dense" or 0 in thresholds.shape or 0 in values.shape:
    return False
  if jnp.ndim(tau):
    if algorithm == "sorted":
      raise ValueError(f"algorithm='sorted' needs scalar taus, got one of shape {jnp.shape(tau)}")
    return False
  if function.only_float32 and values.dtype != jnp.float32:
    return False
  return algorithm == "sorted" or piecewise.is_faster(thresholds.shape[-1], values.shape[-1])
