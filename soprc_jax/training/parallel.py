"""Devices and processes of a run; only `compile_step` uses ``jax.pmap``.

A step is a pure function of (state, batch) with an axis name. This module compiles it for all
devices of all processes. Every process runs the same program on its part of each batch. The process
with `is_main` writes all logs, tables and plots.
"""

import collections
from collections.abc import Callable
import hashlib
import math
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

AXIS_NAME = "devices"


def compile_step(step_fn: Callable[..., Any], *, donate_state: bool = True) -> Callable[..., Any]:
  """Compiles ``step_fn(state, batch)`` for all devices.

  The state is replicated, the batch is sharded along its first axis.

  Args:
    step_fn: pure function; collectives use the axis `AXIS_NAME`.
    donate_state: whether the memory of ``state`` is reused for the result.
  """
  return jax.pmap(step_fn, axis_name=AXIS_NAME, donate_argnums=(0,) if donate_state else ())


def compile_ahead(compiled_step: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], int]:
  """Compiles a step of `compile_step` for given arguments.

  Returns:
    The compiled step, and the bytes that it needs on each device.
  """
  executable = compiled_step.lower(*args).compile()  # type: ignore[attr-defined]
  plan = executable.memory_analysis()
  size = (
    plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    - plan.alias_size_in_bytes
    + plan.temp_size_in_bytes
  )
  return executable, int(size)


def join_processes(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run. Must be called before any other use of a device.

  Args:
    coordinator: ``host:port`` of process 0, which the others connect to. If all three arguments are
      None, jax asks the cluster's manager: SLURM, Open MPI, Kubernetes or Cloud TPU.
    num_processes: number of processes.
    process_id: number of this process, from 0.

  Raises:
    ValueError: the processes cannot be joined, or have different numbers of devices.
  """
  # Without gloo, CPU devices of several processes cannot communicate. Other devices do not use it.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  try:
    jax.distributed.initialize(coordinator, num_processes, process_id)
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f"the processes of the run cannot be joined ({error}). Give --coordinator=HOST:PORT, "
      "--num_processes and --process_id, or only --distributed under SLURM, Open MPI, Kubernetes "
      "or on Cloud TPU"
    ) from error
  counts = collections.Counter(device.process_index for device in jax.devices())
  if len(set(counts.values())) > 1:
    shown = ", ".join(f"process {index}: {count}" for index, count in sorted(counts.items()))
    raise ValueError(f"all processes must have the same number of devices, got ({shown})")


def num_processes() -> int:
  """Returns the number of processes of the run."""
  return jax.process_count()


def process_index() -> int:
  """Returns the number of this process, from 0."""
  return jax.process_index()


def is_main() -> bool:
  """Returns whether this is the process that writes logs, tables and plots."""
  return jax.process_index() == 0


def wait_for_all(what: str) -> None:
  """Blocks until every process has called this; ``what`` names the barrier in messages."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)


def preempted(step: int) -> bool:
  """Returns whether all processes must stop after this step, because one received a SIGTERM.

  Every process must call this after every step.
  """
  return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


def check_equal(what: str, text: str) -> None:
  """Raises a ValueError if the processes do not all have the same text.

  Args:
    what: names the text in messages.
    text: text of this process.
  """
  digests = gather_rows(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)[None])
  different = np.flatnonzero((digests != digests[0]).any(axis=1))
  if different.size:
    raise ValueError(
      f"{what} of process {different[0]} is not that of process 0: start all processes with the "
      "same flags"
    )


def gather_rows(array: np.ndarray) -> np.ndarray:
  """Gathers the rows of all processes on every process, bit for bit.

  Args:
    array: ``[n, ...]``.

  Returns:
    ``[processes * n, ...]``, in the order of the processes.
  """
  if jax.process_count() == 1:
    return array
  # As bytes, since jax would convert float64 to float32.
  rows = np.ascontiguousarray(array)
  gathered = np.asarray(multihost_utils.process_allgather(rows.reshape(-1).view(np.uint8)))
  return gathered.reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])


def from_main(tree: Any) -> Any:
  """Broadcasts a tree of numpy arrays from process 0 to every process.

  Arrays that each process computes itself may differ in the last bit between hardware.
  """
  if jax.process_count() == 1:
    return tree
  return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def num_devices() -> int:
  """Returns the number of devices over all processes."""
  return jax.device_count()


def axis_name() -> str | None:
  """Returns the axis name for collectives between the devices of the run.

  It is None for a single device, where even a sum over one device would copy its operand.
  """
  return AXIS_NAME if num_devices() > 1 else None


def describe() -> str:
  """Describes the devices and the version of jax, e.g. ``1 x cpu, jax 0.10.2``."""
  processes = f" in {num_processes()} processes" if num_processes() > 1 else ""
  return f"{num_devices()} x {jax.devices()[0].device_kind}{processes}, jax {jax.__version__}"


def check_batch(batch_size: int, per_class: int, microbatch: int) -> None:
  """Raises a ValueError if the number of devices does not divide a batch or a microbatch.

  The message names the nearest sizes that work.

  Args:
    batch_size: images over all devices, a multiple of ``per_class``.
    per_class: images of each class.
    microbatch: a divisor of ``batch_size``, or 0.
  """
  count = num_devices()
  if batch_size % count:
    step = math.lcm(count, per_class)
    lower = batch_size // step * step
    fitting = [str(size) for size in (lower, lower + step) if size >= 2 * per_class]
    raise ValueError(
      f"train.batch_size={batch_size} is not divisible by {count} devices: use "
      f"{' or '.join(fitting)}"
    )
  if microbatch % count:
    sizes = [size for size in range(count, batch_size + 1, count) if batch_size % size == 0]
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - microbatch))[:2])
    raise ValueError(
      f"train.microbatch={microbatch} is not divisible by {count} devices: use "
      f"{' or '.join(map(str, nearest))}"
    )


def replicate(tree: Any) -> Any:
  """Copies a tree to every local device."""
  count = jax.local_device_count()
  stacked = jax.tree.map(
    lambda leaf: np.broadcast_to(np.asarray(leaf)[None], (count, *np.shape(leaf))), tree
  )
  # Through a compiled identity, so that the first step sees the layout of every later one and the
  # step compiles once.
  return compile_step(lambda leaves: leaves, donate_state=False)(stacked)


def same_everywhere(value: np.generic) -> np.ndarray:
  """Repeats a scalar of a batch for every local device."""
  return np.full(jax.local_device_count(), value)


def unreplicate(tree: Any) -> Any:
  """Copies a replicated tree from the first local device to numpy arrays.

  The arrays are copies, so no later step can overwrite them.
  """

  def first(leaf: Any) -> np.ndarray:
    shard = np.array(leaf.addressable_shards[0].data)
    return shard.reshape(leaf.shape[1:])

  return jax.tree.map(first, tree)


def shard(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Splits the first axis over the local devices: ``[n, B / n, ...]``."""
  count = jax.local_device_count()
  return {key: value.reshape(count, -1, *value.shape[1:]) for key, value in batch.items()}
