"""Dtypes and masks that the whole core shares: promotion to float32, masked means, safe ratios."""

from collections.abc import Sequence
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax._internal import collectives


def promote(*arrays: Any, names: Sequence[str] = ("scores",)) -> list[jax.Array]:
  """Casts all arrays to one common float type, float32 at least.

  bfloat16 and float16 become float32 since tau2 = 0.001 does not survive 8 or 11
  bits of mantissa; float64 is kept.

  Raises:
    TypeError: an array holds no real numbers; told by its name.
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
  # This function is an explicit promotion: it works where jax_numpy_dtype_promotion is "strict"
  # too.
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(jnp.float32, *(array.dtype for array in arrays_))
  return [array.astype(dtype) for array in arrays_]


def mask_like(where: Any, array: jax.Array, name: str = "where") -> jax.Array:
  """The mask as booleans in the shape of ``array``; ``None`` means all valid.

  Raises:
    ValueError: the mask has another shape, or, where its values are known, holds other numbers than
      0 and 1.
  """
  if where is None:
    return jnp.ones(array.shape, bool)
  where = as_mask(where, name)
  try:
    return jnp.broadcast_to(where, array.shape)
  except ValueError as error:
    raise ValueError(
      f"{name} must be a mask of the shape {array.shape}, got {where.shape}"
    ) from error


def as_mask(where: Any, name: str) -> jax.Array:
  """The mask as booleans; indices or weights in its place are told where their values are known."""
  if isinstance(where, jax.Array) and where.dtype == bool:
    return where  # without waiting for the device
  if not isinstance(where, jax.core.Tracer):
    numbers = np.asarray(where)
    if numbers.dtype != bool and not np.isin(numbers, (0, 1)).all():
      raise ValueError(
        f"{name} must be a mask of booleans, got {numbers[~np.isin(numbers, (0, 1))].flat[0]} in it"
      )
  return jnp.asarray(where, bool)


def masked(array: jax.Array, where: Any, name: str = "where") -> tuple[jax.Array, jax.Array]:
  """Fills the invalid entries with 0, whatever they hold, and returns the array and its mask.

  A valid entry that is infinite becomes NaN: `RetrievalLists` fills the entries that are not valid
  with infinities, so that a loss without the masks is NaN and not a plausible number.
  """
  mask = mask_like(where, array, name)
  # One after the other: no NaN is computed where the masks are right.
  array = jnp.where(mask, array, jnp.zeros_like(array))
  return jnp.where(jnp.isinf(array), jax.lax.stop_gradient(array - array), array), mask


def has_both(positive_where: jax.Array, negative_where: jax.Array) -> jax.Array:
  """``[...]`` lists with a valid positive and a valid negative, from masks ``[..., P]`` and ``[...,
  N]``.
  """
  return jnp.any(positive_where, axis=-1) & jnp.any(negative_where, axis=-1)


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
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


def masked_mean(
  values: jax.Array,
  where: jax.Array,
  axis: int | Sequence[int] | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  """Mean of the entries with ``where``; 0 where there are none.

  Sums and counts are added over the devices of ``axis_name`` first and divided once,
  so that devices with fewer valid entries weigh less.
  """
  # The inner `where` keeps inf and NaN of invalid entries out of value and gradient.
  total = jnp.sum(jnp.where(where, values, jnp.zeros_like(values)), axis=axis)
  count = count_true(where, axis).astype(total.dtype)
  total, count = collectives.psum((total, count), axis_name)
  return ratio(total, count)


def count_true(where: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
  """Counts the True entries, in int64 where int32 could overflow."""
  if where.size <= np.iinfo(np.int32).max:
    return jnp.sum(where, axis=axis)
  with jax.enable_x64(True):
    return jnp.sum(where, axis=axis, dtype=jnp.int64)
