"""Small array rules that the whole core shares: dtypes, masks, sums over devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
AxisName = str | tuple[str, ...] | None


def promote(*arrays: Any) -> list[Array]:
  """Casts all arrays to one common float type, float32 at least.

  bfloat16 and float16 become float32 since tau2 = 0.001 does not survive 8 or 11
  bits of mantissa; float64 is kept.
  """
  arrays_ = [jnp.asarray(array) for array in arrays]
  dtype = jnp.result_type(jnp.float32, *(array.dtype for array in arrays_))
  return [array.astype(dtype) for array in arrays_]


def mask_like(where: Any, array: Array) -> Array:
  """The mask as booleans in the shape of ``array``; ``None`` means all valid."""
  if where is None:
    return jnp.ones(array.shape, bool)
  return jnp.broadcast_to(jnp.asarray(where, bool), array.shape)


def masked(array: Array, where: Any) -> tuple[Array, Array]:
  """The array with 0 in its invalid entries, whatever they hold (NaN too), and its mask."""
  mask = mask_like(where, array)
  return jnp.where(mask, array, jnp.zeros_like(array)), mask


def psum(values: Any, axis_name: AxisName) -> Any:
  """Sum over all devices of ``axis_name``; the identity where it is ``None``."""
  return values if axis_name is None else jax.lax.psum(values, axis_name)


def ratio(numerator: Array, denominator: Array) -> Array:
  """``numerator / denominator``, 0 (with zero gradient) where the denominator is 0."""
  empty = denominator == 0
  quotient = numerator / jnp.where(empty, jnp.ones_like(denominator), denominator)
  return jnp.where(empty, jnp.zeros_like(quotient), quotient)


@jax.custom_jvp
def share(part: jax.Array, rest: jax.Array) -> jax.Array:
  """``part / (part + rest)`` for finite part, rest >= 0; 0/0 is 0."""
  return ratio(part, part + rest)


@share.defjvp
def _share_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  # A prior of 1e-4 puts the share within 1e-6 of 1, where the quotient rule subtracts two nearly
  # equal float32 numbers; rest / total and part / total are accurate at both ends, and finite.
  (part, rest), (d_part, d_rest) = primals, tangents
  quotient = share(part, rest)
  total = part + rest
  complement = ratio(rest, total)
  return quotient, ratio(complement * d_part - quotient * d_rest, total)


def masked_mean(values: Array, where: Array, axis: int | Sequence[int] | None = None, axis_name: AxisName = None) -> Array:
  """Mean of the entries with ``where``; 0 where there are none.

  Sums and counts are added over the devices of ``axis_name`` first and divided once,
  so that devices with fewer valid entries weigh less.
  """
  # The inner `where` keeps inf and NaN of invalid entries out of value and gradient.
  total = jnp.sum(jnp.where(where, values, jnp.zeros_like(values)), axis=axis)
  count = jnp.sum(where, axis=axis).astype(total.dtype)
  total, count = psum((total, count), axis_name)
  return ratio(total, count)


def ordered_bits(array: Array) -> Array:
  """int32 in the order of float32 numbers, -0.0 below 0.0: XLA's CPU backend sorts integers five times as fast as floats, and compares the
  smallest floats with each other instead of taking them for 0."""
  bits = jax.lax.bitcast_convert_type(array, jnp.int32)
  return _mirrored(bits)


def from_ordered_bits(bits: Array) -> Array:
  """The float32 numbers of `ordered_bits`."""
  return jax.lax.bitcast_convert_type(_mirrored(bits), jnp.float32)


def _mirrored(bits: Array) -> Array:
  """The bits of negative floats, or back again: by themselves they count downwards."""
  return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def check_count(name: str, value: Any, *, low: int = 1) -> None:
  """Raises a ValueError if a size is no integer, or below ``low``."""
  if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
    raise ValueError(f"{name} must be an integer, at least {low}; got {value!r}")


def check_range(name: str, value: Any, *, low: float = -np.inf, high: float = np.inf, open_low: bool = False) -> None:
  """Raises a ValueError if a host number lies outside ``[low, high]`` (``(low, high]`` with ``open_low``).

  Traced and device values pass: their numbers are not known, or not worth waiting for, here.
  """
  if not isinstance(value, (bool, int, float, np.ndarray, np.generic)):
    return
  numbers = np.asarray(value, np.float64)
  below = numbers <= low if open_low else numbers < low
  wrong = below | (numbers > high) | np.isnan(numbers)
  if wrong.any():
    first = numbers[wrong].flat[0]
    raise ValueError(f"{name} must lie in {'(' if open_low else '['}{low:g}, {high:g}], got {first:g}")


def or_nan(value: Any, *, low: float, high: float) -> Array:
  """The numbers in ``[low, high]``, NaN for the others: what is traced cannot raise, and must not go on as if it were right."""
  (array,) = promote(value)
  return jnp.where((array >= low) & (array <= high), array, jnp.nan)
