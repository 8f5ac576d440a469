"""Sums and joined arrays over all devices of a mapped axis, under pmap, shard_map and vmap."""

from typing import Any

import jax
import jax.numpy as jnp

AxisName = str | tuple[str, ...] | None


def psum(values: Any, axis_name: AxisName) -> Any:
  """Sums over all devices of ``axis_name``; the identity if it is ``None``."""
  return values if axis_name is None else jax.lax.psum(values, axis_name)


def join_equal(values: Any, axis_name: AxisName) -> Any:
  """Joins the arrays of all devices on the leading axis, in the order of the devices.

  shard_map knows that the result is equal on all devices. It is computed as a sum, since an
  `all_gather` with that property does not work under `jax.vmap` with an axis name.
  """
  count, index = jax.lax.psum(1, axis_name), jax.lax.axis_index(axis_name)

  def join(part: jax.Array) -> jax.Array:
    summand = part.astype(jnp.int32) if part.dtype == bool else part
    is_here = (jnp.arange(count) == index).reshape(-1, *[1] * part.ndim)
    whole = psum(jnp.where(is_here, summand, jnp.zeros_like(summand)), axis_name)
    return whole.reshape(-1, *part.shape[1:]).astype(part.dtype)

  return jax.tree.map(join, values)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Casts arrays to vary over the same axes of `jax.shard_map`; the identity outside of it.

  Loop carries and custom gradients require this. The transpose of the cast sums the gradient over
  the devices.
  """
  varying = [_varying_axes(array) for array in arrays]
  union = frozenset[str]().union(*varying)
  return tuple(
    jax.lax.pcast(array, tuple(sorted(union - axes)), to="varying") if union - axes else array
    for array, axes in zip(arrays, varying)
  )


def _varying_axes(array: jax.Array) -> frozenset[str]:
  """Returns the axes of `jax.shard_map` over which the devices hold different values."""
  kind: Any = jax.typeof(array)
  # Older releases of jax name it vma.
  return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
