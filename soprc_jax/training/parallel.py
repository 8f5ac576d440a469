"""Devices: the only file that names ``jax.pmap``.

A step is a pure function of (state, batch) with an axis name; here it is compiled for all devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

AXIS_NAME = "devices"


def compile_step(step_fn: Callable[..., Any], *, donate_state: bool = True) -> Callable[..., Any]:
  """Compiles ``step_fn(state, batch)`` for all devices: state replicated, batch sharded along its first axis."""
  return jax.pmap(step_fn, axis_name=AXIS_NAME, donate_argnums=(0,) if donate_state else ())


def compile_ahead(compiled_step: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], int]:
  """A step of `compile_step` compiled for these arguments, and the bytes that it needs on each device."""
  executable = compiled_step.lower(*args).compile()  # type: ignore[attr-defined]
  plan = executable.memory_analysis()
  size = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
  return executable, int(size)


def num_devices() -> int:
  """Devices over all processes."""
  return jax.device_count()


def describe() -> str:
  """What computes, e.g. ``1 x cpu, jax 0.10.2``."""
  return f"{num_devices()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"


def check_batch_size(name: str, size: int) -> None:
  """Raises a ValueError with the nearest sizes that fit if the devices do not divide ``size``."""
  count = num_devices()
  if size % count:
    lower = size // count * count
    fitting = [str(value) for value in (lower, lower + count) if value]
    raise ValueError(f"{name}={size} is not divisible by {count} devices: use {' or '.join(fitting)}")


def replicate(tree: Any) -> Any:
  """A copy of the tree on every local device."""
  count = jax.local_device_count()
  stacked = jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf)[None], (count, *np.shape(leaf))), tree)
  # Through a compiled identity, so that the first step sees the layout of every later one and compiles once.
  return jax.pmap(lambda leaf: leaf, axis_name=AXIS_NAME)(stacked)


def unreplicate(tree: Any) -> Any:
  """The tree of the first local device, as numpy arrays that no later step can overwrite."""

  def first(leaf: Any) -> np.ndarray:
    shard = np.array(leaf.addressable_shards[0].data)
    return shard.reshape(leaf.shape[1:])

  return jax.tree.map(first, tree)


def shard(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Splits the first axis over the local devices: ``[n, B / n, ...]``."""
  count = jax.local_device_count()
  return {key: value.reshape(count, -1, *value.shape[1:]) for key, value in batch.items()}


def unshard(values: Any) -> np.ndarray:
  """Joins the first two axes of a device result on the host."""
  array = np.asarray(values)
  return array.reshape(-1, *array.shape[2:])
