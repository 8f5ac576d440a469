"""Sums of a function of score differences over the pairs of a list."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from soprc_jax import surrogates
from soprc_jax._internal import blockwise, masks, piecewise

ALGORITHMS = ("auto", "dense", "sorted")


class PairFunction(NamedTuple):
  """Holds a function f of a threshold and a value.

  Attributes:
    of_margins: ``(threshold - value, tau) -> f``, elementwise.
    polynomial: f as a piecewise polynomial of ``(value - threshold) / tau``, for sums by sorting;
      None if f is not one.
    only_float32: whether the polynomial is accurate to float32 only.
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
    function: function of each pair.
    thresholds: ``[..., T]``.
    values: ``[..., Y]`` with the same leading axes.
    where: ``[..., Y]`` mask of the valid values.
    tau: width > 0.
    algorithm: ``"dense"``: every pair, in blocks. ``"sorted"``: by sorting, for functions that are
      polynomials. ``"auto"``: by sorting if that is faster.

  Returns:
    ``[..., T]``.

  Raises:
    ValueError: ``"sorted"`` with a tau that is not a scalar.
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
  """Averages a function over the valid values of its list, like `pair_sums`; 0 without any."""
  sums = pair_sums(function, thresholds, values, where, tau=tau, algorithm=algorithm)
  count = jnp.sum(where, axis=-1, keepdims=True).astype(sums.dtype)
  return masks.ratio(sums, jnp.broadcast_to(count, sums.shape))


def _is_sorted(
  function: PairFunction, thresholds: jax.Array, values: jax.Array, tau: Any, algorithm: str
) -> bool:
  """Decides from static information whether to compute the sum by sorting."""
  if algorithm == "dense" or 0 in thresholds.shape or 0 in values.shape:
    return False
  if jnp.ndim(tau):
    if algorithm == "sorted":
      raise ValueError(f"algorithm='sorted' needs scalar taus, got one of shape {jnp.shape(tau)}")
    return False
  if function.only_float32 and values.dtype != jnp.float32:
    return False
  return algorithm == "sorted" or piecewise.is_faster(thresholds.shape[-1], values.shape[-1])
