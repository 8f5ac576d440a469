"""Small array rules that the whole core shares: dtypes, masks, sums over devices."""

from collections.abc import Sequence
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
AxisName = str | tuple[str, ...] | None


# The smallest width: of less, float32 makes 0. The largest: beyond it products with a width overflow.
_WIDTHS = (float(np.finfo(np.float32).tiny), 1e30)


def promote(*arrays: Any, names: Sequence[str] = ("scores",)) -> list[Array]:
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
  # This function is an explicit promotion: it works where jax_numpy_dtype_promotion is "strict" too.
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(jnp.float32, *(array.dtype for array in arrays_))
  return [array.astype(dtype) for array in arrays_]


def mask_like(where: Any, array: Array, name: str = "where") -> Array:
  """The mask as booleans in the shape of ``array``; ``None`` means all valid.

  Raises:
    ValueError: the mask has another shape, or, where its values are known, holds other numbers than 0 and 1.
  """
  if where is None:
    return jnp.ones(array.shape, bool)
  where = as_mask(where, name)
  try:
    return jnp.broadcast_to(where, array.shape)
  except ValueError as error:
    raise ValueError(f"{name} must be a mask of the shape {array.shape}, got {where.shape}") from error


def as_mask(where: Any, name: str) -> Array:
  """The mask as booleans; indices or weights in its place are told where their values are known."""
  if isinstance(where, jax.Array) and where.dtype == bool:
    return where  # without waiting for the device
  if not isinstance(where, jax.core.Tracer):
    numbers = np.asarray(where)
    if numbers.dtype != bool and not np.isin(numbers, (0, 1)).all():
      raise ValueError(f"{name} must be a mask of booleans, got {numbers[~np.isin(numbers, (0, 1))].flat[0]} in it")
  return jnp.asarray(where, bool)


def masked(array: Array, where: Any, name: str = "where") -> tuple[Array, Array]:
  """Fills the invalid entries with 0, whatever they hold, and returns the array and its mask.

  A valid entry that is infinite becomes NaN: `RetrievalLists` fills the entries that are not valid with
  infinities, so that a loss without the masks is NaN and not a plausible number.
  """
  mask = mask_like(where, array, name)
  # One after the other: no NaN is computed where the masks are right.
  array = jnp.where(mask, array, jnp.zeros_like(array))
  return jnp.where(jnp.isinf(array), jax.lax.stop_gradient(array - array), array), mask


def check_masks_passed(**scores_and_masks: tuple[Any, Any]) -> None:
  """Raises a ValueError if scores on the host are infinite and come without a mask.

  Args:
    **scores_and_masks: name of the scores -> (scores, mask). Arrays on a device pass: no device is
      waited for, `masked` turns them into NaN.
  """
  for name, (scores, where) in scores_and_masks.items():
    if where is not None or isinstance(scores, jax.Array):
      continue
    numbers = np.asarray(scores)
    if numbers.dtype.kind == "f" and np.isinf(numbers).any():
      raise ValueError(
        f"{name} hold {numbers[np.isinf(numbers)].flat[0]} and come without a mask. Entries of "
        "RetrievalLists that are not valid are infinite: pass **lists.masks"
      )


def has_both(positive_where: Array, negative_where: Array) -> Array:
  """``[...]`` lists with a valid positive and a valid negative, from masks ``[..., P]`` and ``[..., N]``."""
  return jnp.any(positive_where, axis=-1) & jnp.any(negative_where, axis=-1)


def psum(values: Any, axis_name: AxisName) -> Any:
  """Sum over all devices of ``axis_name``; the identity where it is ``None``."""
  return values if axis_name is None else jax.lax.psum(values, axis_name)


def join_equal(values: Any, axis_name: AxisName) -> Any:
  """Arrays of all devices, joined on the leading axis in their order; shard_map knows that they are equal on all.

  As a sum, since an `all_gather` that shard_map takes for equal does not work under `jax.vmap` with an axis name.
  """
  count, index = jax.lax.psum(1, axis_name), jax.lax.axis_index(axis_name)

  def join(part: Array) -> Array:
    summand = part.astype(jnp.int32) if part.dtype == bool else part
    is_here = (jnp.arange(count) == index).reshape(-1, *[1] * part.ndim)
    whole = psum(jnp.where(is_here, summand, jnp.zeros_like(summand)), axis_name)
    return whole.reshape(-1, *part.shape[1:]).astype(part.dtype)

  return jax.tree.map(join, values)


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
  """Casts arrays to vary over the same axes of `jax.shard_map`; the identity outside of it.

  Loop carries and custom gradients need that. The transpose of the cast sums the gradient over the devices.
  """
  varying = [_varying_axes(array) for array in arrays]
  union = frozenset[str]().union(*varying)
  return tuple(
    jax.lax.pcast(array, tuple(sorted(union - axes)), to="varying") if union - axes else array
    for array, axes in zip(arrays, varying)
  )


def _varying_axes(array: Array) -> frozenset[str]:
  """Axes of `jax.shard_map` over which the devices hold different values."""
  kind: Any = jax.typeof(array)
  # Older releases of jax call it vma.
  return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


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
  count = count_true(where, axis).astype(total.dtype)
  total, count = psum((total, count), axis_name)
  return ratio(total, count)


def count_true(where: Array, axis: int | Sequence[int] | None = None) -> Array:
  """Counts the True entries, in int64 where int32 could overflow."""
  if where.size <= np.iinfo(np.int32).max:
    return jnp.sum(where, axis=axis)
  with jax.enable_x64(True):
    return jnp.sum(where, axis=axis, dtype=jnp.int64)


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


def sort_together(keys: Array, codes: Array, num_codes: int) -> tuple[Array, Array]:
  """Sorts int32 ``keys`` along the last axis together with their ``codes``.

  The codes are int32 in [0, num_codes). Equal keys are in the order of their codes.
  """
  # On a CPU one array of integers is sorted four times as fast as two arrays, and floats slower still.
  with jax.enable_x64(True):
    number = np.int64(num_codes)
    packed = keys.astype(jnp.int64) * number + codes.astype(jnp.int64)
    packed = jax.lax.sort(packed, is_stable=False)
    return (packed // number).astype(jnp.int32), (packed % number).astype(jnp.int32)


def check_count(name: str, value: Any, *, low: int = 1) -> None:
  """Raises a ValueError if a size is no integer, or below ``low``."""
  if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
    raise ValueError(f"{name} must be an integer, at least {low}; got {value!r}")


def check_range(name: str, value: Any, *, low: float = -np.inf, high: float = np.inf, open_low: bool = False) -> None:
  """Raises a ValueError if a host number lies outside ``[low, high]`` (``(low, high]`` with ``open_low``), or is not finite.

  Traced and device values pass: their numbers are not known, or not worth waiting for, here.
  """
  numbers = _host_numbers(name, value)
  if numbers is None:
    return
  below = numbers <= low if open_low else numbers < low
  wrong = below | (numbers > high) | ~np.isfinite(numbers)
  if wrong.any():
    first = numbers[wrong].flat[0]
    opening, closing = "(" if open_low or np.isinf(low) else "[", ")" if np.isinf(high) else "]"
    raise ValueError(f"{name} must lie in {opening}{low:g}, {high:g}{closing}, got {first:g}")


def check_width(name: str, value: Any) -> None:
  """Raises a ValueError if a host number is no width > 0: of less than float32 can hold it would make 0, hence 0/0."""
  check_range(name, value, low=0.0, open_low=True)
  numbers = _host_numbers(name, value)
  if numbers is None:
    return
  wrong = (numbers < _WIDTHS[0]) | (numbers > _WIDTHS[1])
  if wrong.any():
    first = numbers[wrong].flat[0]
    raise ValueError(
      f"{name} must lie in [{_WIDTHS[0]:.3g}, {_WIDTHS[1]:g}], the range that float32 computes with, got {first:g}"
    )


def _host_numbers(name: str, value: Any) -> np.ndarray | None:
  """The numbers of a plain value; None for traced and device values."""
  if value is None or isinstance(value, jax.Array):
    return None
  try:
    return np.asarray(value, np.float64)
  except (TypeError, ValueError) as error:
    raise TypeError(f"{name} must be a number or an array, got {value!r}") from error


def check_lists(**lists: Array) -> None:
  """Raises an AssertionError, as chex does, unless all are ``[..., list]`` with the same leading axes."""
  shapes = {name: array.shape for name, array in lists.items()}
  if any(len(shape) < 1 for shape in shapes.values()) or len({shape[:-1] for shape in shapes.values()}) > 1:
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise AssertionError(f"these must have a list axis behind the same leading axes: {told}")


def per_list(name: str, value: Any, scores: Array) -> Array:
  """A number or an array that broadcasts to ``[...]``, as ``[..., 1]`` in the scores' dtype."""
  array, leading = jnp.asarray(value, scores.dtype), scores.shape[:-1]
  try:
    return jnp.broadcast_to(array, leading)[..., None]
  except ValueError as error:
    raise ValueError(f"{name} must be a number or broadcast to the lists {leading}, got the shape {array.shape}") from error


def is_positive(labels: Any) -> Array:
  """Returns binary labels as booleans: > 0.

  Raises:
    TypeError: labels are no numbers.
    ValueError: a host label is NaN.
  """
  labels = _uncut(labels)
  if isinstance(labels, jax.Array):
    return labels if labels.dtype == bool else labels > 0
  if labels.dtype.kind in "OSUc":
    raise TypeError(f"labels must be numbers, > 0 for a positive; got {labels.dtype}")
  if np.any(labels != labels):
    raise ValueError("labels must be numbers, > 0 for a positive; got nan")
  return jnp.asarray(labels > 0)


def integer_labels(labels: Any, name: str = "labels") -> Array:
  """Returns labels of any integer type, or booleans, as an array of that type.

  Raises:
    TypeError: labels are no integers.
    ValueError: jax would cut a label to 32 bits. Traced labels have been cut before.
  """
  labels = _uncut(labels)
  if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool):
    if labels.size:
      raise TypeError(f"{name} must be integers, got {labels.dtype}")
    labels = labels.astype(np.int32)  # an empty list is one of floats
  if not isinstance(labels, jax.Array) and labels.size:
    ends = np.iinfo(jax.dtypes.canonicalize_dtype(np.int8 if labels.dtype == bool else labels.dtype))
    if labels.min() < ends.min or labels.max() > ends.max:
      raise ValueError(
        f"{name} must fit into {ends.bits} bits, map them to rows first; got {labels.min()} to {labels.max()}"
      )
  return jnp.asarray(labels)


def label_keys(labels: Array) -> Array:
  """Returns labels as signed integers of the widest type, int32 or with x64 int64.

  Labels of one type are equal where their keys are. An unsigned label beyond that type keeps its bits: its key is
  negative.
  """
  return labels.astype(jax.dtypes.canonicalize_dtype(np.int64))


def same_labels(labels: Array, others: Array) -> Array:
  """Which labels are equal, for any two integer types: 2^32 - 1 of uint32 is not -1 of int32."""
  keys, other_keys = label_keys(labels), label_keys(others)
  same = keys == other_keys
  if jnp.issubdtype(labels.dtype, jnp.unsignedinteger) != jnp.issubdtype(others.dtype, jnp.unsignedinteger):
    same = same & (keys >= 0)
  return same


def _uncut(labels: Any) -> Any:
  """Labels in a numpy array, unless jax already holds them in a type that it computes with."""
  if isinstance(labels, jax.core.Tracer):
    return labels
  if isinstance(labels, jax.Array):
    wide = labels.dtype in (np.int64, np.uint64, np.float64)
    if not (wide and jax.dtypes.canonicalize_dtype(labels.dtype) != labels.dtype):
      return labels
  return np.asarray(labels)


def prior_per_list(prior: Any, scores: Array) -> Array:
  """A prior that broadcasts to ``[...]``, as ``[..., 1]``; NaN outside [0, 1], since a traced one cannot raise."""
  (array,) = promote(prior, names=("prior",))
  return per_list("prior", jnp.where((array >= 0.0) & (array <= 1.0), array, jnp.nan), scores)
