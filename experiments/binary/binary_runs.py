"""Makes the runs of a study in its folder; each is made once, and kept."""

from collections.abc import Callable, Sequence
import json
import logging
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.binary import binary, binary_losses, binary_peer
from experiments.compare import plans
from soprc_jax._internal import file_io, stored
from soprc_jax.training import workdir

RUNS = "runs"
COSTS = "costs.json"
_log = logging.getLogger(__name__)


class Row(NamedTuple):
  """One method of a finished study, at its best learning rate.

  That is the one with the best mean validation AUPRC over the seeds.

  Attributes:
    method: its name.
    rate: learning rate.
    val_by_rate: learning rate -> mean over the seeds of the best validation AUPRC, NaN if training
      diverged at a seed.
    val: ``[S]`` best validation AUPRC at each seed.
    convergence: ``[S, E]`` validation AUPRC at each evaluation.
    scores: ``[S, n]`` or ``[S, n, K]`` logits of the test examples.
    labels: their labels, of the same shape.
  """

  method: str
  rate: float
  val_by_rate: dict[float, float]
  val: np.ndarray
  convergence: np.ndarray
  scores: np.ndarray
  labels: np.ndarray

  def at_edge(self) -> bool:
    """Returns whether a learning rate outside the grid may be better."""
    return len(self.val_by_rate) > 1 and self.rate in (min(self.val_by_rate), max(self.val_by_rate))


def run_all(
  config: Any, table: Any, folder: Path, *, methods: Sequence[str], python: str = ""
) -> list[Row]:
  """Trains every method at every seed, except for runs that the folder has already.

  Args:
    config: resolved config.
    table: data set of ``config.data``, see `binary.load`.
    folder: folder of the study, which exists.
    methods: names of `binary_losses.LABELS`. The first one is compared with the others.
    python: interpreter with libauc, for the method of that name.

  Raises:
    ValueError: the data do not fit the config.
    ChildProcessError: the script with libauc failed.
  """
  (folder / RUNS).mkdir(exist_ok=True)
  trainers: dict[tuple[str, int], Callable[[binary.Task], binary.Found]] = {}
  labels = []
  total, done, began, made = len(config.seeds) * len(methods), 0, time.perf_counter(), 0
  for seed in config.seeds:
    task = binary.prepare(config, table, seed)
    labels.append(task.splits.test.labels)
    for method in methods:
      path, done = run_path(folder, method, seed), done + 1
      if path.exists():
        _log.info("%d/%d %s, seed %d (finished before)", done, total, method, seed)
        continue
      if method == binary_losses.PEER:
        found, _ = binary_peer.train(config, task, python)
      else:
        size = method, task.num_positives
        if size not in trainers:
          trainers[size] = binary.make_trainer(config, method, task)
        found = trainers[size](task)
      save_run(path, found)
      made += 1
      left = (time.perf_counter() - began) / made * (total - done)
      best = float(np.nanmax(found.best)) if np.isfinite(found.best).any() else math.nan
      _log.info(
        "%d/%d %s, seed %d: val AUPRC %.4f (about %.1f min left)",
        done,
        total,
        method,
        seed,
        best,
        left / 60,
      )
  return [best_row(config, folder, method, np.stack(labels)) for method in methods]


def measure(
  config: Any,
  table: Any,
  folder: Path,
  rows: Sequence[Row],
  *,
  python: str = "",
  steps: int = 50,
  rounds: int = 9,
) -> dict[str, float]:
  """Returns the seconds of a training step of each method at its learning rate.

  The value is the median of ``rounds`` calls of ``steps`` steps from the initial weights. The
  methods take turns, so that a busy machine slows all of them alike. LibAUC comes after them in its
  own process (median of its steps). Values of an earlier call in the folder are reused if they are
  of the same methods.
  """
  path = folder / COSTS
  if path.exists():
    costs = stored.read_json(path)
    if (
      isinstance(costs, dict)
      and costs.keys() == {row.method for row in rows}
      and all(isinstance(seconds, float) and seconds > 0 for seconds in costs.values())
    ):
      return costs
  task = binary.prepare(config, table, config.seeds[0])
  batches = jax.numpy.asarray(task.batches.reshape(-1, task.batches.shape[-1])[:steps])
  ours = [row for row in rows if row.method != binary_losses.PEER]
  steppers = {row.method: binary.make_stepper(config, row.method, task, row.rate) for row in ours}
  states = {name: binary.first_state(config, name, task) for name in steppers}
  seconds: dict[str, list[float]] = {name: [] for name in steppers}
  for _ in range(rounds + 1):
    for name, stepper in steppers.items():
      began = time.perf_counter()
      states[name] = jax.block_until_ready(stepper(states[name], batches))
      seconds[name].append((time.perf_counter() - began) / len(batches))
  costs = {name: float(np.median(values[1:])) for name, values in seconds.items()}
  for row in rows:
    if row.method == binary_losses.PEER:
      short = binary_peer.first_steps(config, task, row.rate, steps=steps * rounds)
      costs[row.method] = binary_peer.train(*short, python)[1]
  workdir.write_atomically(path, json.dumps(costs, indent=1) + "\n")
  return costs


def best_row(config: Any, folder: Path, method: str, labels: np.ndarray) -> Row:
  """Returns the method at its best learning rate on the validation split, from its runs' files."""
  runs = [
    load_run(run_path(folder, method, seed), config, labels.shape[1:]) for seed in config.seeds
  ]
  best = np.stack([run.best for run in runs])
  val_by_rate = dict(zip(config.rates, best.mean(axis=0).tolist(), strict=True))
  rate = plans.best(val_by_rate)
  at = list(config.rates).index(rate)
  return Row(
    method,
    rate,
    val_by_rate,
    best[:, at],
    np.stack([run.val[at] for run in runs]),
    np.stack([run.scores[at] for run in runs]),
    labels,
  )


def run_path(folder: Path, method: str, seed: int) -> Path:
  return folder / RUNS / f"{method}-seed{seed}.npz"


def save_run(path: Path, found: binary.Found) -> None:
  with file_io.whole(path) as file:
    np.savez(file, **found._asdict())


def load_run(path: Path, config: Any, test_shape: tuple[int, ...]) -> binary.Found:
  """Returns the results of a run, with shapes that fit the config and the test labels.

  Raises:
    ValueError: the file is corrupt, or of a different run.
  """
  try:
    found = binary.Found(**stored.read_arrays(path, binary.Found._fields))
    rates = len(config.rates)
    shapes = ((rates, config.train.steps // config.eval.every),) * 2 + (
      (rates, *test_shape),
      (rates,),
    )
    for name, array, shape in zip(found._fields, found, shapes, strict=True):
      if array.shape != shape or array.dtype.kind != "f":
        raise ValueError(
          f"{path}: {name} must be {list(shape)} numbers, it is {list(array.shape)} of "
          f"{array.dtype}"
        )
  except ValueError as error:
    raise ValueError(f"{error}: remove it, and the run is repeated") from error
  return found
