"""Chooses the number of steps of a run by a time budget (``soprc train --minutes``).

The costs of a run are measured on a throw-away state, so the measurement changes no result.
"""

from collections.abc import Mapping
import logging
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import confusable, datasets, pipeline, sources
from soprc_jax.training import build, defaults, evaluation, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training.defaults import Choice

_log = logging.getLogger(__name__)

# The keys that a budget chooses.
KEYS = ("train.steps", "eval.every", "checkpoint.every")
LEAST_STEPS = 10
# Evaluations of a run, and the largest share of its time that they may take.
EVALUATIONS, EVALUATION_SHARE = 10, 0.25
# Steps are measured for this share of the budget, within these numbers of steps.
_MEASURED_SHARE, _LEAST_MEASURED, _MOST_MEASURED = 0.05, 2, 30
# Images whose ranking is measured.
_RANKED = 2048
# Seconds for what is not measured: two checkpoints; plots and results at the end.
_SAVING, _ENDING = 0.5, 3.0


class Budget(NamedTuple):
  """A time budget.

  Attributes:
    minutes: wall time of the whole command.
    began: `time.perf_counter` when the command began.
  """

  minutes: float
  began: float

  def left(self) -> float:
    """Returns the seconds that are left."""
    return 60 * self.minutes - (time.perf_counter() - self.began)


class Costs(NamedTuple):
  """The seconds that the parts of a run take.

  Attributes:
    fixed: compilation, warm-up, test and plots.
    step: a step of the main phase, with the wait for its batch.
    evaluation: an evaluation on the validation split, with a checkpoint.
  """

  fixed: float
  step: float
  evaluation: float


def open_config(config: Any, given: Any) -> None:
  """Leaves the keys of a budget open in a config; those that are given keep their values.

  Args:
    config: unresolved config, changed in place.
    given: dotted keys that the user has set.

  Raises:
    ValueError: ``train.steps`` is given.
  """
  if "train.steps" in given:
    raise ValueError("--minutes chooses train.steps: leave out --minutes or --config.train.steps")
  config_lib.leave_open(config, *(key for key in KEYS if key not in given))


def check(minutes: float) -> None:
  """Raises a ValueError if a time budget is not a positive finite number."""
  if not (math.isfinite(minutes) and minutes > 0):
    raise ValueError(f"--minutes must be a finite number > 0, got {minutes:g}")


def choose(config: ConfigDict, data: build.Data, budget: Budget) -> dict[str, Choice]:
  """Chooses a value for each open key of `KEYS`, so that the run ends with its budget.

  Args:
    config: resolved; only keys of `KEYS` are open.
    data: data of the run.
    budget: its time.

  Returns:
    Dotted key -> choice.

  Raises:
    ValueError: the budget is too short for `LEAST_STEPS` steps.
  """
  _log.info("Measuring the time of a step for --minutes=%g.", budget.minutes)
  costs = measure(config, data, budget)
  left = budget.left()
  every = config.eval.every
  # Process 0 decides, since clocks differ.
  steps, evaluations = (
    int(count) for count in parallel.from_main(np.array(count_steps(left, costs, every)))
  )
  if steps < LEAST_STEPS:
    needed = 60 * budget.minutes - left + costs.fixed + LEAST_STEPS * costs.step
    needed += costs.evaluation * (LEAST_STEPS // every + 1 if every else 1)
    raise ValueError(
      f"--minutes={budget.minutes:g} is too short for {LEAST_STEPS} steps: on this machine they "
      f"take {needed:.0f} s, with start-up, compilation, an evaluation and the test. Give "
      f"--minutes={math.ceil(needed * 1.2 / 6) / 10:g} or more"
    )
  rest = 60 * budget.minutes - left + costs.fixed
  reason = (
    f"--minutes={budget.minutes:g}: {rest:.0f} s for start-up, compilation, test and plots, then "
    f"{costs.step:.3g} s a step and {costs.evaluation:.2g} s an evaluation"
  )
  period = max(-(-steps // evaluations), 1)
  choices = {
    "train.steps": Choice(steps, reason),
    "eval.every": Choice(period, f"{evaluations} evaluations of {steps} steps"),
    "checkpoint.every": Choice(
      max(-(-steps // EVALUATIONS), 1), f"{EVALUATIONS} checkpoints of {steps} steps"
    ),
  }
  still_open = config_lib.open_keys(config)
  return {key: choice for key, choice in choices.items() if key in still_open}


def count_steps(seconds: float, costs: Costs, every: int | None = None) -> tuple[int, int]:
  """Returns the numbers of steps and of evaluations that fit into a time.

  Args:
    seconds: time that is left for the run.
    costs: its costs.
    every: given steps between evaluations, 0 for one at the end; None chooses up to `EVALUATIONS`
      that take at most `EVALUATION_SHARE` of the time.

  >>> count_steps(130.0, Costs(fixed=10.0, step=0.1, evaluation=2.0))
  (1000, 10)
  """
  seconds -= costs.fixed
  if every:
    steps = (seconds - costs.evaluation) / (costs.step + costs.evaluation / every)
    return max(math.floor(steps), 0), max(math.floor(steps) // every, 1)
  evaluations = 1
  if every is None:
    most = EVALUATION_SHARE * seconds / max(costs.evaluation, 1e-9)
    evaluations = min(max(math.floor(most), 1), EVALUATIONS)
  return max(math.floor((seconds - evaluations * costs.evaluation) / costs.step), 0), evaluations


def measure(config: ConfigDict, data: build.Data, budget: Budget) -> Costs:
  """Measures the costs of a run, from random weights.

  Args:
    config: resolved; only keys of `KEYS` are open.
    data: data of the run.
    budget: limits the time of the measurement.
  """
  # Another number of steps is another program where a schedule depends on it. A number that no run
  # before had makes sure that the compilation is measured, as the run will need it, and not read
  # from the cache.
  steps = 10**6 + time.time_ns() % 10**6
  config = config_lib.fill(config, {"train.steps": steps, "eval.every": 0, "checkpoint.every": 0})
  config = ConfigDict(config.to_dict())
  config.model.init_from = ""
  config.log.progress = False
  # Confusable classes need a trained model; the cost of finding them is added to that of a step.
  config.data.sampler = "random"
  parts = build.make_parts(
    config, data.class_counts(), superclasses=data.superclasses(), of_data=data.patterns
  )
  state = parallel.replicate(parallel.from_main(build.starting_state(config, parts)))
  variables = evaluation.variables_of(state)
  evaluation_costs = _evaluation_costs(config, data, parts, variables)
  stream = pipeline.iterate(
    build.make_batches(config, build.make_data(config, data.splits)),
    start=config.warmup.steps,
    workers=config.data.workers,
    prefetch=config.data.prefetch,
  )
  seconds: list[float] = []
  count = _LEAST_MEASURED
  while len(seconds) <= count:
    began = time.perf_counter()
    batch = next(stream)
    batch.pop("position")
    if config.data.on_broken != "skip":
      batch.pop("broken")
    number = np.int32(config.warmup.steps + len(seconds) + 1)
    state, _ = parts.main_step(
      state, parallel.shard(batch) | {"step": parallel.same_everywhere(number)}
    )
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - began)
    if len(seconds) == 2:
      fitting = 60 * budget.minutes * _MEASURED_SHARE / seconds[1]
      count = int(
        parallel.from_main(np.array(min(max(fitting, _LEAST_MEASURED), _MOST_MEASURED))).astype(int)
      )
  # The batches of the first steps were loaded while the step was compiled.
  step = float(np.mean(seconds[1 + count // 2 :]))
  compiling = max(seconds[0] - step, 0.0) * (2 if config.warmup.steps else 1)
  return Costs(
    fixed=evaluation_costs.fixed + compiling + config.warmup.steps * step,
    step=step + evaluation_costs.step,
    evaluation=evaluation_costs.evaluation,
  )


def _evaluation_costs(
  config: ConfigDict, data: build.Data, parts: build.Parts, variables: Any
) -> Costs:
  """Measures an evaluation on the validation split, and the test (as ``fixed``).

  ``step`` is the part of a step in the embedding of images for `confusable.ConfusableSampler`.

  Embedding is measured on two batches and scales with their number. Ranking is measured on random
  embeddings and scales with the square of the images.
  """
  embed = evaluation.make_embed(parts.model, config)
  size = config.eval.batch_size
  some = sources.Subset(data.splits["train"], range(min(len(data.splits["train"]), 2 * size)))
  began = time.perf_counter()
  embed(variables, sources.Subset(some, range(1)))
  compiling = time.perf_counter() - began
  began = time.perf_counter()
  width = embed(variables, some).embeddings.shape[1]
  batch = (time.perf_counter() - began) / -(-len(some) // size)

  def seconds(split: sources.Source) -> float:
    labels = np.sort(split.labels)[:_RANKED]
    embeddings = np.random.default_rng(0).normal(size=(len(labels), width)).astype(np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    found = evaluation.Embedded(
      embeddings, labels, np.arange(len(labels)), 0, label_sets=sources.label_sets(split)
    )
    evaluation.evaluate(found, config)  # compiles
    began = time.perf_counter()
    evaluation.evaluate(found, config)
    ranking = (time.perf_counter() - began) * (len(split) / len(labels)) ** 2
    return batch * -(-len(split) // size) + ranking

  test = sum(seconds(split) for name, split in data.splits.items() if name.startswith("test"))
  # The classes of v.jsonl are embedded too, in a batch of their own.
  val = (seconds(data.splits["val"]) if "val" in data.splits else 0.0) + batch + _SAVING
  plan, refresh = data.sampler, 0.0
  if isinstance(plan, confusable.ConfusableSampler):
    refresh = len(plan.to_embed(0)[0]) / size * batch / plan.refresh
  return Costs(fixed=compiling + test + _ENDING, step=refresh, evaluation=val)


def fill(
  config: ConfigDict, splits: datasets.Splits, time_budget: Budget | None
) -> tuple[ConfigDict, dict[str, Any]]:
  """Fills the open keys of the config of a new run.

  Returns:
    The config, and the choices in the format of `workdir.chosen`.

  Raises:
    ValueError: a key stays open, or the choices do not fit the other keys.
  """
  choices = defaults.choose(config, splits, num_devices=parallel.num_devices())
  config = config_lib.fill(config, {key: choice.value for key, choice in choices.items()})
  if time_budget is not None:
    by_time = choose(config, build.make_data(config, splits), time_budget)
    config = config_lib.fill(config, {key: choice.value for key, choice in by_time.items()})
    choices |= by_time
  still_open = config_lib.open_keys(config)
  if still_open:
    raise ValueError(f"{', '.join(still_open)} must have a value; got None. Set it, or --minutes")
  found = {key: choice._asdict() for key, choice in choices.items()}
  if time_budget is not None:
    found["train.steps"]["minutes"] = time_budget.minutes
  return config, found


def check_same(chosen: Mapping[str, Any], time_budget: Budget | None, workdir: Path) -> None:
  """Raises a ValueError if a run is resumed with another time budget than it was started with."""
  if time_budget is None:
    return
  minutes = chosen.get("train.steps", {}).get("minutes")
  if minutes != time_budget.minutes:
    started = "without --minutes" if minutes is None else f"with --minutes={minutes:g}"
    raise ValueError(
      f"--minutes={time_budget.minutes:g}: the run in {workdir} was started {started}. Give the "
      "same command to resume it, or choose another --workdir"
    )
