"""Dtypes and masks of the whole core: promotion to float32, masked means, safe ratios."""

from collections.abc import Sequence
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import collectives


def promote(*arrays: Any, names: Sequence[str] = ("scores",)) -> list[jax.Array]:
  """Casts all arrays to one common float type, at least float32.

  bfloat16 and float16 become float32, since tau2 = 0.001 is lost in 8 or 11 bits of mantissa.
  float64 is kept.

  Raises:
    TypeError: an array does not contain real numbers; the error has its name.
  """
  arrays_ = []
  for name, array in itertools.zip_longest(names, arrays, fillvalue=names[-1]):
    if not isinstance(array, jax.Array):
      array = np.asarray(array)
      if array.dtype.kind in "OSU":
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
      raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    arrays_.append(jnp.asarray(array))
  # This promotion is explicit, so it also works if jax_numpy_dtype_promotion is "strict".
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(jnp.float32, *(array.dtype for array in arrays_))
  return [array.astype(dtype) for array in arrays_]


def mask_like(where: Any, array: jax.Array, name: str = "where") -> jax.Array:
  """Casts a mask to bool in the shape of ``array``; ``None`` means all valid.

  Raises:
    ValueError: the mask has another shape, or its concrete values are not all 0 or 1.
  """
  if where is None:
    return jnp.ones(array.shape, bool)
  where = as_mask(where, name)
  try:
    return jnp.broadcast_to(where, array.shape)
  except ValueError as error:
    raise ValueError(
      f"{name} must be a mask of shape {array.shape}, got shape {where.shape}"
    ) from error


def as_mask(where: Any, name: str) -> jax.Array:
  """Casts a mask to bool. Raises if concrete values are not 0 or 1, e.g. indices or weights."""
  if isinstance(where, jax.Array) and where.dtype == bool:
    return where  # without waiting for the device
  if not isinstance(where, jax.core.Tracer):
    check_mask(np.asarray(where), name)
  return jnp.asarray(where, bool)


def check_mask(numbers: np.ndarray, name: str) -> None:
  """Raises a ValueError if an array contains other numbers than 0 and 1."""
  if numbers.dtype == bool:
    return
  wrong = numbers[~np.isin(numbers, (0, 1))]
  if wrong.size:
    raise ValueError(
      f"{name} must be a mask of booleans, got {wrong.flat[0]} in it: compare numbers first, e.g. "
      "numbers > 0"
    )


def masked(array: jax.Array, where: Any, name: str = "where") -> tuple[jax.Array, jax.Array]:
  """Replaces all invalid entries by 0, and returns the array and its mask.

  A valid entry that is infinite becomes NaN. `RetrievalLists` fills its invalid entries with
  infinities, so a loss without the masks is NaN instead of a plausible number.
  """
  mask = mask_like(where, array, name)
  # In two steps, so that no NaN is computed if the masks are right.
  array = jnp.where(mask, array, jnp.zeros_like(array))
  return jnp.where(jnp.isinf(array), jax.lax.stop_gradient(array - array), array), mask


def has_both(positive_where: jax.Array, negative_where: jax.Array) -> jax.Array:
  """Returns which lists have a valid positive and a valid negative.

  Args:
    positive_where: ``[..., P]`` mask.
    negative_where: ``[..., N]`` mask.

  Returns:
    ``[...]`` bool.
  """
  return jnp.any(positive_where, axis=-1) & jnp.any(negative_where, axis=-1)


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """Divides, with 0 (and zero gradient) where the denominator is 0."""
  empty = denominator == 0
  quotient = numerator / jnp.where(empty, jnp.ones_like(denominator), denominator)
  return jnp.where(empty, jnp.zeros_like(quotient), quotient)


@jax.custom_jvp
def share(part: jax.Array, rest: jax.Array) -> jax.Array:
  """Computes ``part / (part + rest)`` for finite part, rest >= 0; 0/0 gives 0."""
  return ratio(part, part + rest)


@share.defjvp
def _share_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  # With a prior of 1e-4 the share is within 1e-6 of 1, where the quotient rule subtracts two nearly
  # equal float32 numbers. rest / total and part / total are finite, and accurate at both ends.
  (part, rest), (d_part, d_rest) = primals, tangents
  quotient = share(part, rest)
  total = part + rest
  complement = ratio(rest, total)
  return quotient, ratio(complement * d_part - quotient * d_rest, total)


@jax.custom_jvp
def log_ratio(part: jax.Array, rest: jax.Array) -> jax.Array:
  """Computes ``log(1 + part / rest)`` for finite part, rest >= 0; 0/0 gives 0.

  A ``rest`` below the smallest normal number of the dtype counts as that number, so the value stays
  finite. The gradient with respect to ``part`` stays there, that with respect to ``rest`` is 0.
  """
  rest = _at_least_tiny(rest)
  quotient = part / rest
  # Where the quotient overflows, the 1 does not count.
  return jnp.where(jnp.isinf(quotient), jnp.log(part) - jnp.log(rest), jnp.log1p(quotient))


@log_ratio.defjvp
def _log_ratio_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  (part, rest), (d_part, d_rest) = primals, tangents
  floor = _at_least_tiny(rest)
  constant, zero = floor != rest, jnp.zeros_like(rest)
  # The quotient rule has part / rest, which can overflow. Neither factor here does.
  total = part + floor
  slope = jnp.where(constant & (part == 0), zero, 1.0 / total)
  # XLA turns two divisions into one by the product, which can underflow to 0.
  slope_of_rest = jnp.where(constant, zero, (part / total) * (1.0 / floor))
  return log_ratio(part, rest), slope * d_part - slope_of_rest * d_rest


def _at_least_tiny(array: jax.Array) -> jax.Array:
  """Raises entries to the smallest normal number; NaN stays, which jnp.maximum may drop."""
  tiny = jnp.finfo(array.dtype).tiny
  return jnp.where(array < tiny, jnp.full_like(array, tiny), array)


def masked_mean(
  values: jax.Array,
  where: jax.Array,
  axis: int | Sequence[int] | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  """Averages the entries selected by ``where``; 0 if there are none.

  Sums and counts are first added over the devices of ``axis_name``, then divided once. So devices
  with fewer valid entries weigh less.
  """
  # The inner `where` keeps inf and NaN of invalid entries out of value and gradient.
  total = jnp.sum(jnp.where(where, values, jnp.zeros_like(values)), axis=axis)
  count = count_true(where, axis).astype(total.dtype)
  total, count = collectives.psum((total, count), axis_name)
  return ratio(total, count)


def count_true(where: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
  """Counts the True entries, in int64 if int32 could overflow."""
  if where.size <= np.iinfo(np.int32).max:
    return jnp.sum(where, axis=axis)
  with jax.enable_x64(True):
    return jnp.sum(where, axis=axis, dtype=jnp.int64)


def log1p_sum_exp(
  logits: jax.Array, mask: jax.Array, axis_name: collectives.AxisName = None
) -> jax.Array:
  """Computes ``log(1 + sum exp)`` over the last axis without overflow; 0 if nothing is valid.

  With ``axis_name`` the sum is over the last axes of all its devices.
  """
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=0.0))
  top = top if axis_name is None else jax.lax.pmax(top, axis_name)
  total = jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, logits, 0.0) - top), 0.0), axis=-1)
  total = collectives.psum(total, axis_name)
  return top[..., 0] + jnp.log(jnp.exp(-top[..., 0]) + total)


def log_sum_exp(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """Computes ``log(sum exp)`` over the last axis without overflow; 0 if nothing is valid."""
  valid = jnp.any(mask, axis=-1)
  top = jnp.max(logits, axis=-1, keepdims=True, where=mask, initial=-jnp.inf)
  top = jax.lax.stop_gradient(jnp.where(valid[..., None], top, 0.0))
  total = jnp.sum(jnp.where(mask, jnp.exp(jnp.where(mask, logits, 0.0) - top), 0.0), axis=-1)
  return top[..., 0] + jnp.log(jnp.where(valid, total, 1.0))


def l2_normalize(vectors: jax.Array, *, eps: float = 1e-12) -> jax.Array:
  """Divides the vectors of the last axis by their norm.

  A norm of at most ``eps`` gives 0 with gradient 0, never NaN.

  >>> print(l2_normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
  [[0.6 0.8]
   [0.  0. ]]
  """
  # Beyond 2^60 the squares could overflow. The factor is an exact power of two that the norm
  # cancels.
  huge = jnp.max(jnp.abs(vectors), axis=-1, keepdims=True) > 2.0**60
  vectors = vectors * jnp.where(
    huge, jnp.asarray(2.0**-70, vectors.dtype), jnp.ones([], vectors.dtype)
  )
  squared = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
  usable = squared > eps**2
  # The inner `where` avoids rsqrt(0), whose gradient would be inf * 0.
  scale = jax.lax.rsqrt(jnp.where(usable, squared, jnp.ones_like(squared)))
  return vectors * jnp.where(usable, scale, jnp.zeros_like(scale))
