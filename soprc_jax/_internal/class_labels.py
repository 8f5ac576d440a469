"""Labels of classes: integers of any width, compared by value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_positive(labels: Any) -> jax.Array:
  """Returns binary labels as booleans: > 0.

  Raises:
    TypeError: labels are not numbers.
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


def integer_labels(labels: Any, name: str = "labels") -> jax.Array:
  """Returns labels of any integer type, or booleans, as an array of that type.

  Raises:
    TypeError: labels are not integers.
    ValueError: jax would cut a label to 32 bits. Traced labels are already cut and not checked.
  """
  labels = _uncut(labels)
  if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool):
    if labels.size:
      raise TypeError(f"{name} must be integers, got {labels.dtype}")
    labels = labels.astype(np.int32)  # numpy gives an empty list a float dtype
  if not isinstance(labels, jax.Array) and labels.size:
    ends = np.iinfo(
      jax.dtypes.canonicalize_dtype(np.int8 if labels.dtype == bool else labels.dtype)
    )
    if labels.min() < ends.min or labels.max() > ends.max:
      raise ValueError(
        f"{name} must fit into {ends.bits} bits, map them to rows first; got {labels.min()} to "
        f"{labels.max()}"
      )
  return jnp.asarray(labels)


def label_keys(labels: jax.Array) -> jax.Array:
  """Returns labels as signed integers of the widest type: int32, or int64 with x64.

  Labels of one type are equal if and only if their keys are. An unsigned label beyond that type
  keeps its bits, so its key is negative.
  """
  return labels.astype(jax.dtypes.canonicalize_dtype(np.int64))


def same_labels(labels: jax.Array, others: jax.Array) -> jax.Array:
  """Compares labels of any two integer types by value: 2^32 - 1 of uint32 is not -1 of int32."""
  keys, other_keys = label_keys(labels), label_keys(others)
  same = keys == other_keys
  if jnp.issubdtype(labels.dtype, jnp.unsignedinteger) != jnp.issubdtype(
    others.dtype, jnp.unsignedinteger
  ):
    same = same & (keys >= 0)
  return same


def _uncut(labels: Any) -> Any:
  """Converts labels to a numpy array, unless they are a jax array of a supported type."""
  if isinstance(labels, jax.core.Tracer):
    return labels
  if isinstance(labels, jax.Array):
    wide = labels.dtype in (np.int64, np.uint64, np.float64)
    if not (wide and jax.dtypes.canonicalize_dtype(labels.dtype) != labels.dtype):
      return labels
  return np.asarray(labels)
