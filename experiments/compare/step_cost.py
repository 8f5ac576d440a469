"""Measures what a training step costs by method.

Time is measured with the methods taking turns. Memory is what XLA plans.
"""

from collections.abc import Callable, Mapping
import time
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax.training import build, parallel

# Without the backward pass an image costs about a third of a training step's share.
_FORWARD_SHARE = 1 / 3


class Cost(NamedTuple):
  """The cost of one training step.

  Attributes:
    step_seconds: median seconds of a step of the batch of all devices, without loading.
    peak_bytes: memory of the step on one device, in bytes, by XLA's plan. It counts the arguments
      (model, optimizer with the state of the loss, batch), results that do not reuse their memory,
      and temporaries.
  """

  step_seconds: float
  peak_bytes: int


def measure(configs: Mapping[str, Any], *, rounds: int = 7) -> dict[str, Cost]:
  """Measures the main-phase step of each resolved config, from random weights.

  The methods take turns, one step each per round, so that a busy machine slows all of them alike.

  Args:
    configs: name -> resolved config.
    rounds: number of timed steps of each, after one that is not timed.
  """
  steps = {name: _Step(config) for name, config in configs.items()}
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for _ in range(rounds + 1):
    for name, step in steps.items():
      seconds[name].append(step.time_one())
  return {
    name: Cost(float(np.median(seconds[name][1:])), step.peak_bytes) for name, step in steps.items()
  }


def run_seconds(base: ConfigDict) -> Callable[[ConfigDict], float]:
  """Measures steps of a config and returns a function that estimates a run's seconds.

  The function takes a config that is like the measured one.

  Args:
    base: resolved config.
  """
  began = time.perf_counter()
  step = measure({"base": base}, rounds=2)["base"].step_seconds
  starting = time.perf_counter() - began
  sizes = {name: len(split) for name, split in build.make_data(base).splits.items()}

  def seconds(config: ConfigDict) -> float:
    trained = config.train.batch_size * config.train.steps
    evaluations = 1 + (config.train.steps // config.eval.every if config.eval.every else 0)
    evaluated = sizes.get("val", 0) * evaluations + sum(
      size for name, size in sizes.items() if name.startswith("test")
    )
    return starting + step / base.train.batch_size * (trained + _FORWARD_SHARE * evaluated)

  return seconds


class _Step:
  """A compiled step with its state and a batch."""

  def __init__(self, config: Any):
    config = config.copy_and_resolve_references()
    with config.unlocked():
      config.model.init_from = ""
      config.data.sampler = "random"  # the cost of a step does not depend on which classes it has
    data = build.make_data(config)
    parts = build.make_parts(config, data.class_counts())
    self._state = parallel.replicate(build.starting_state(config, parts))
    batch = dict(build.make_batches(config, data)[config.warmup.steps])
    for key in ("position", "broken"):
      batch.pop(key)
    self._batch = parallel.shard(batch)
    self._compiled, self.peak_bytes = parallel.compile_ahead(
      parts.main_step, self._state, self._batch
    )

  def time_one(self) -> float:
    began = time.perf_counter()
    self._state, _ = self._compiled(self._state, self._batch)
    jax.block_until_ready(self._state)
    return time.perf_counter() - began
