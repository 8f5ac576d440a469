"""Compares methods fairly: same start, batches and budget.

The learning rate of each method is chosen on the validation split.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import glob
import json
import logging
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

from experiments.compare import plans, random_search
from soprc_jax._internal import file_io, stored
from soprc_jax.data import datasets
from soprc_jax.training import (
  build,
  checkpoints,
  classes,
  config_key,
  defaults,
  loop,
  objectives,
  parallel,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)
_DIVERGED = "diverged.json"
_NOTE = "comparison.json"
# Pattern of the runs' folders, see `plans.RunName.folder`.
RUN_FOLDERS = "*-lr*-seed*"
WRITES = (
  _NOTE,
  classes.IMAGES,
  "table.md",
  "table.json",
  "costs.json",
  "pr_curves.png",
  "convergence.png",
  RUN_FOLDERS,
)
_NOTE_REMEDY = "restore it from a copy, or choose another --workdir"
_NOTED = {"shared": dict, "starts": {str: str}}
# Schema of what a run leaves: its results, or why it diverged.
_METRICS = {"mAUPRC": float}
_ENDED = ({"diverged": str}, {"val": _METRICS, "test": _METRICS})


class Row(NamedTuple):
  """One method of a finished comparison.

  Attributes:
    method: its name.
    rate: the learning rate with the best validation mAUPRC at the first seed.
    val: learning rate -> validation mAUPRC at the first seed, NaN where training diverged.
    runs: its runs at ``rate``, one per seed.
    trials: its random trials, if there were any; ``val`` has them by their learning rates.
  """

  method: str
  rate: float
  val: dict[float, float]
  runs: tuple[plans.RunName, ...]
  trials: random_search.Found | None = None

  def at_edge(self) -> bool:
    """Returns whether a value outside the grid, or outside the searched space, may be better."""
    if self.trials is not None:
      return bool(self.trials.edges)
    return len(self.val) > 1 and self.rate in (min(self.val), max(self.val))


def check(
  plan: plans.Plan, make_config: plans.MakeConfig, folder: Path, *, allow_seen_classes: bool = False
) -> None:
  """Raises a ValueError or an OSError for what would stop a run later or be unfair.

  Args:
    plan: the runs to make.
    make_config: returns the config of a method.
    folder: folder of the comparison. It may have an earlier part of it.
    allow_seen_classes: see `check_starts`.

  Raises:
    ValueError: methods differ in more than the loss (and the optimizer); the data have no
      validation split; a run or the folder is of another comparison; a start does not fit.
    OSError: a start is missing.
  """
  check_folder(folder)
  for start in plan.starts().values():
    checkpoints.check_start(start)
  base = make_config("soprc")
  if base.loss.name != "soprc" or base.loss.preset != "default":
    raise ValueError(
      "the config file's argument already chooses a loss or a preset: leave it out, and give it in "
      "--methods"
    )
  first = plans.run_config(
    plan, make_config, plans.RunName(plan.methods[0], plan.rates[0], plan.seeds[0])
  )
  if first.data.trainval:
    raise ValueError(
      "data.trainval must be False in a comparison, which chooses learning rates on the validation "
      "split; got True"
    )
  build.make_data(first)
  if plan.trials:
    _check_tuning(plan, make_config, first)
  for method in plan.methods:
    for rate in plans.rates_of(plan, method)[: 1 if plan.trials else None]:
      for seed in plan.seeds:
        name = plans.RunName(method, rate, seed)
        config = plans.run_config(plan, make_config, name)
        _check_alike(first, config, method)
        workdir_lib.check(folder / name.folder(), config)
    if config.loss.name not in objectives.LOSSES:
      objectives.check(config.loss.name, config.loss)
  check_starts(plan.starts(), first, allow_seen_classes=allow_seen_classes)


def _check_tuning(plan: plans.Plan, make_config: plans.MakeConfig, first: Any) -> None:
  """Raises a ValueError if the trials would be made on a reported split, or have no space."""
  for method in plan.methods:
    random_search.space(method, plan.rates)
  if first.data.confusable.pool < random_search.LARGEST_GROUP - 1:
    raise ValueError(
      f"--trials tries groups of {random_search.LARGEST_GROUP} classes, and "
      f"data.confusable.pool={first.data.confusable.pool} has too few: set at least "
      f"{random_search.LARGEST_GROUP - 1}"
    )
  if first.data.split_seed == plans.TUNING_SEED:
    raise ValueError(
      f"data.split_seed={plans.TUNING_SEED} is the split of the trials, which is never reported: "
      "choose another one"
    )
  name = plans.RunName(plan.methods[0], plan.rates[0], plans.TUNING_SEED)
  build.make_data(plans.run_config(plan, make_config, name))


def choices(config: Any, folder: Path) -> dict[str, Any]:
  """Returns values for the open keys of a config, which all runs share.

  They are those of the earlier runs in the folder, else they follow the data.

  Args:
    config: resolved.
    folder: folder of the comparison. It need not exist.

  Raises:
    ValueError: the note in the folder is corrupt; see `datasets.make_splits`.
  """
  still_open = config_lib.open_keys(config)
  if not still_open:
    return {}
  found: dict[str, Any] = {}
  if (folder / _NOTE).exists():
    there = stored.read_json(folder / _NOTE, _NOTED, remedy=_NOTE_REMEDY)
    noted = dict(config_key.leaves(there["shared"]))
    found = {key: noted[key] for key in still_open if key in noted}
    config = config_lib.fill(config, found)
  chosen = defaults.choose(
    config, datasets.make_splits(config.data), num_devices=parallel.num_devices()
  )
  for key, choice in chosen.items():
    _log.info("%s=%s: %s.", key, choice.value, choice.reason)
  return found | {key: choice.value for key, choice in chosen.items()}


def check_folder(folder: Path, writes: Sequence[str] = WRITES) -> None:
  """Raises a ValueError if a comparison cannot be written to the folder.

  The folder may not be a file, be of a training run, or have files that would be overwritten.

  Args:
    folder: folder of the comparison. It may have an earlier part of it.
    writes: see `workdir.check_files`.
  """
  if (folder / workdir_lib.CONFIG).exists() and not (folder / _NOTE).exists():
    raise ValueError(f"--workdir={folder} is the folder of a training run: choose a new folder")
  workdir_lib.check_files(folder, writes, own=_NOTE)


def check_starts(
  starts: Mapping[int, str], config: Any, *, allow_seen_classes: bool = False
) -> None:
  """Checks the model that each seed starts from by loading it.

  Args:
    starts: seed -> ``model.init_from``, see `plans.Plan.starts`.
    config: resolved config of one of the runs.
    allow_seen_classes: log a warning instead of raising an error if a start was trained on classes
      of val or test.

  Raises:
    ValueError: a start does not fit, was trained on classes of val or test, or is a run that has
      not finished.
    OSError: a start is missing.
  """
  if not starts:
    return
  like, splits = build.abstract_network(config), datasets.make_splits(config.data)
  for start in starts.values():
    folder = file_io.given(start, name="starts")
    if workdir_lib.find_config(folder) and not (folder / workdir_lib.RESULTS).exists():
      raise ValueError(
        f"the run in {start} has not finished, so that the model to start from can still change: "
        "finish it first"
      )
    with config.unlocked():
      config.model.init_from = start
    build.check_unseen(config, splits, allow_seen_classes=allow_seen_classes)
    checkpoints.load_network(start, like)


def claim(
  shared: Mapping[str, Any], starts: Mapping[int, str], folder: Path, *, data: Any = None
) -> None:
  """Creates the folder with a note of what is compared, or checks the note that is there.

  The note has the config, the starts and the data.

  Args:
    shared: what all runs have in common, e.g. `plans.shared`.
    starts: seed -> ``model.init_from``, see `plans.Plan.starts`.
    folder: folder of the comparison.
    data: ``config.data`` of the runs; None leaves the data out.

  Raises:
    ValueError: the folder has a comparison of another config, its runs started from other models,
      the data have changed since, or there is a link in it.
  """
  prints = {str(seed): checkpoints.fingerprint(start) for seed, start in starts.items()}
  noted = {"shared": shared, "starts": prints}
  splits = {} if data is None else datasets.make_splits(data)
  if splits:
    noted["data"] = classes.describe(splits, data_source=data.source)["splits"]
  path = folder / _NOTE
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_atomically(path, json.dumps(noted, indent=2, default=list) + "\n")
    if splits:
      classes.write_images(folder, splits)
    return
  workdir_lib.refuse_links(folder, WRITES)
  there = stored.read_json(path, _NOTED, remedy=_NOTE_REMEDY)
  lines = config_lib.differences(
    json.loads(json.dumps(noted["shared"], default=list)), there["shared"]
  )
  if lines:
    raise ValueError(
      f"--workdir={folder} holds a comparison of another config; choose another folder:\n  "
      + "\n  ".join(lines)
    )
  for seed, start in starts.items():
    if there["starts"].get(str(seed), prints[str(seed)]) != prints[str(seed)]:
      raise ValueError(
        f"the model in {start} is not the one that earlier runs in {folder} started from: choose "
        "another folder"
      )
  if bool(there["starts"]) != bool(starts):
    raise ValueError(
      f"earlier runs in {folder} started from "
      f"{'models' if there['starts'] else 'random weights'}: choose another folder"
    )
  if splits:
    _check_data(path, there, noted["data"], splits)
  noted["starts"] = there["starts"] | prints
  workdir_lib.write_atomically(path, json.dumps(there | noted, indent=2, default=list) + "\n")


def _check_data(
  path: Path, there: Mapping[str, Any], here: Mapping[str, Any], splits: datasets.Splits
) -> None:
  """Raises a ValueError if the data are not those that the earlier runs were trained on."""
  folder = path.parent
  problem = stored.problem(dict(there), {"data": classes.SPLITS})
  if problem:
    raise ValueError(
      f"{path} is corrupt ({problem}): restore it from a copy, or choose another --workdir"
    )
  lines = classes.split_changes(there["data"], here, splits, folder)
  if lines:
    raise ValueError(classes.changed_message(folder, lines))
  if not (folder / classes.IMAGES).exists():
    classes.write_images(folder, splits)


def run_all(
  plan: plans.Plan, make_config: plans.MakeConfig, folder: Path, *, allow_seen_classes: bool = False
) -> list[Row]:
  """Makes every run that has not finished yet; a stopped comparison resumes.

  Args:
    plan: the runs to make.
    make_config: returns the config of a method.
    folder: folder of the comparison. Each run has a folder in it.
    allow_seen_classes: see `loop.train`.

  Raises:
    ValueError: a folder holds a run of another config.
  """
  progress = Progress(plans.num_runs(plan))
  rows = []
  for method in plan.methods:

    def run(
      rate: float, seed: int, trial: Mapping[str, Any] | None = None, method: str = method
    ) -> plans.RunName:
      name = plans.RunName(method, rate, seed)
      config = plans.run_config(plan, make_config, name, trial)
      run_one(config, folder, name, progress, allow_seen_classes=allow_seen_classes)
      return name

    if plan.trials:
      rows.append(_searched(plan, method, folder, run))
      continue
    rates = plans.rates_of(plan, method)
    for rate in rates:
      run(rate, plan.seeds[0])
    val = val_by_rate(folder, method, rates, plan.seeds[0])
    rate = plans.best(val)
    rows.append(Row(method, rate, val, tuple(run(rate, seed) for seed in plan.seeds)))
  return rows


def _searched(
  plan: plans.Plan, method: str, folder: Path, run: Callable[..., plans.RunName]
) -> Row:
  """Makes the random trials of a method, and then the runs of the best one."""

  def validate(trial: dict[str, Any]) -> float:
    name = run(trial[random_search.RATE], plans.TUNING_SEED, random_search.config_values(trial))
    return metric(folder, name, "val", "mAUPRC")

  space = random_search.space(method, plan.rates)
  found = random_search.run(space, plan.trials, plans.TUNING_SEED, validate)
  best, rate = found.values, found.best[random_search.RATE]
  val = dict(zip((trial[random_search.RATE] for trial in found.trials), found.val, strict=True))
  return Row(method, rate, val, tuple(run(rate, seed, best) for seed in plan.seeds), found)


def finished(folder: Path, name: plans.RunName) -> dict[str, Any] | None:
  """Returns ``results.json`` of a run, or None if the run has not ended yet.

  For a diverged run it is a dict with ``"diverged"``, the reason.
  """
  for file in (workdir_lib.RESULTS, _DIVERGED):
    path = folder / name.folder() / file
    if path.exists():
      return stored.read_json(
        path,
        _ENDED,
        remedy="restore it from a copy, or remove it and the same command resumes the run",
      )
  return None


def num_finished(folder: Path, plan: plans.Plan, method: str) -> int:
  """Returns how many runs of a method have ended."""
  names = plans.possible_runs(plan, method)
  if plan.trials:  # their learning rates follow from the runs
    prefix, _ = names[0].folder().rsplit("-lr", 1)
    paths = folder.glob(f"{glob.escape(prefix)}-lr*-seed*")
    names = [plans.RunName(method, *_parts(path.name)) for path in paths]
  return sum(finished(folder, name) is not None for name in names)


def _parts(name: str) -> tuple[float, int]:
  """Returns learning rate and seed of the name of a run's folder."""
  rate, seed = name.rsplit("-lr", 1)[1].rsplit("-seed", 1)
  return float(rate), int(seed)


def metric(folder: Path, name: plans.RunName, split: str, key: str) -> float:
  """Returns a metric of a run that has ended, NaN if it diverged.

  Raises:
    FileNotFoundError: the run has not ended.
    ValueError: its results lack the metric.
  """
  results = finished(folder, name)
  if results is None:
    raise FileNotFoundError(f"{name.folder()} has not finished in {folder}")
  if "diverged" in results:
    return math.nan
  problem = stored.problem(results, {split: {key: float}})
  if problem:
    raise ValueError(
      f"the results of {folder / name.folder()} are corrupt or of another evaluation: {problem}"
    )
  return results[split][key]


def seen_classes(folder: Path, names: Iterable[plans.RunName]) -> str:
  """Returns a note on the classes, or labels, of val and test that the starts were trained on.

  Empty if there are none.
  """
  found = [(finished(folder, name) or {}).get("seen_classes") for name in names]
  told = {
    classes.sentence(one): one.get("unit", "classes")
    for one in found
    if one and not stored.problem(one, classes.SEEN)
  }
  unit = " and ".join(sorted(set(told.values())))
  return f"Not a test of unseen {unit}: {'; '.join(told)}." if told else ""


def device(folder: Path, name: plans.RunName) -> str:
  """Returns the device that a run was trained on."""
  return str((finished(folder, name) or {}).get("device", "an unknown device"))


def val_by_rate(folder: Path, method: str, rates: Sequence[float], seed: int) -> dict[float, float]:
  """Returns validation mAUPRC by learning rate of the runs of ``seed``.

  All of them must have ended.
  """
  return {
    rate: metric(folder, plans.RunName(method, rate, seed), "val", "mAUPRC") for rate in rates
  }


def run_one(
  config: Any,
  folder: Path,
  name: plans.RunName,
  progress: "Progress",
  *,
  allow_seen_classes: bool = False,
) -> None:
  """Makes a run unless it has ended before, and logs its result.

  Args:
    config: resolved config of this run.
    folder: folder of the comparison.
    name: name of the run.
    progress: progress of the comparison.
    allow_seen_classes: see `loop.train`.

  Raises:
    ValueError: the folder has a run of another config.
  """
  workdir_lib.check(
    folder / name.folder(), config
  )  # a finished run of another config must not enter the table
  began = time.perf_counter()
  found = finished(folder, name)
  # With another patience than before, a diverged run may continue.
  is_new = found is None or (
    "diverged" in found and _patience(config) not in (0, found.get("patience"))
  )
  if is_new:
    _log.info("Run %s", name.folder())
    try:
      loop.train(config, folder / name.folder(), allow_seen_classes=allow_seen_classes)
    except loop.DivergedError as error:
      # A learning rate that is too high is a result too: noted, so that the same command does not
      # repeat it.
      note = {"diverged": str(error), "patience": _patience(config)}
      workdir_lib.write_atomically(folder / name.folder() / _DIVERGED, json.dumps(note) + "\n")
  results = finished(folder, name) or {}
  told = (
    results.get("diverged")
    or f"val mAUPRC {results['val']['mAUPRC']:.4f}, test mAUPRC {results['test']['mAUPRC']:.4f}"
  )
  progress.tell(name, told, time.perf_counter() - began if is_new else None)


def _patience(config: Any) -> int:
  """Returns how many non-finite steps in a row a run skips before it stops."""
  return int(config.train.max_skipped) if config.train.on_nonfinite == "skip" else 0


def _check_alike(first: Any, config: Any, method: str) -> None:
  lines = config_lib.differences(plans.shared(config), plans.shared(first))
  if lines:
    raise ValueError(
      f"method {method!r} differs from the first one in more than its loss and optimizer, so that "
      "they cannot be compared:\n  " + "\n  ".join(lines)
    )


class Progress:
  """Logs one line per run, with the time left estimated from the runs so far."""

  def __init__(self, total: int):
    self._total, self._done, self._seconds = total, set[plans.RunName](), list[float]()

  def tell(self, name: plans.RunName, told: str, seconds: float | None) -> None:
    """Logs that a run has ended in ``seconds``; None if it had ended before."""
    if name in self._done:
      return  # the first seed at the best learning rate
    self._done.add(name)
    line = f"{len(self._done)}/{self._total} {name.folder()}: {told}"
    if seconds is None:
      _log.info("%s (finished before)", line)
      return
    self._seconds.append(seconds)
    left = (self._total - len(self._done)) * sum(self._seconds) / len(self._seconds)
    _log.info("%s (%.0f s; about %.1f min left)", line, seconds, left / 60)
