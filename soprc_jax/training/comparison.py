"""A fair comparison of methods: same start, batches and budget, each with its learning rate picked on val."""

from collections.abc import Callable, Sequence
import json
import logging
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

from soprc_jax.training import build, checkpoints, loop, methods, objectives
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)
_DIVERGED = "diverged.json"
_NOTE = "comparison.json"

# What a comparison sets in every run: an override by hand would be lost.
OWN_KEYS = {
  "optim.learning_rate": "--rates",
  "seed": "--seeds",
  "model.init_from": "--init_from",
  "loss.name": "--methods",
  "loss.preset": "--methods",
}
_LARGEST_RATE = 1e38  # of float32
# A method's name -> the config of its runs, rate and seed not yet set.
MakeConfig = Callable[[str], Any]


class Plan(NamedTuple):
  """Which runs a comparison makes: every method at each rate with the first seed, and at its best rate with the others.

  Attributes:
    methods: names that the config file, or `methods.choose`, takes. The first is compared with the others.
    rates: grid of learning rates.
    seeds: seeds of weights, batches and augmentation; the first picks the rate.
    init_from: workdir of the run that all methods start from, ``{seed}`` replaced; empty: random weights.
    soprc_with_sgd: SOPRC trains by SGD and the others by Adam, as in the paper's appendix; else all by ``config.optim.name``.
    sgd_rates: grid of SOPRC's rates in that case.
  """

  methods: tuple[str, ...]
  rates: tuple[float, ...]
  seeds: tuple[int, ...]
  init_from: str
  soprc_with_sgd: bool
  sgd_rates: tuple[float, ...]

  def start(self, seed: int) -> str:
    """``model.init_from`` of the runs of a seed."""
    return self.init_from.replace("{seed}", str(seed))


class RunName(NamedTuple):
  """One run of a comparison."""

  method: str
  rate: float
  seed: int

  def folder(self) -> str:
    """Name of its folder, e.g. ``triplet-lr0.004-seed1``."""
    return f"{self.method.replace(':', '.')}-lr{self.rate:g}-seed{self.seed}"


class Row(NamedTuple):
  """One method of a finished comparison.

  Attributes:
    method: its name.
    rate: the learning rate with the best val mAUPRC at the first seed.
    val: rate -> val mAUPRC at the first seed, NaN for a rate at which training broke down.
    runs: its runs at ``rate``, one a seed.
  """

  method: str
  rate: float
  val: dict[float, float]
  runs: tuple[RunName, ...]

  def at_edge(self) -> bool:
    """Whether a rate beyond the grid may be better."""
    return len(self.val) > 1 and self.rate in (min(self.val), max(self.val))


def read_plan(settings: Any) -> Plan:
  """The plan of ``config.compare``.

  Raises:
    ValueError: names each wrong key with its value and what is allowed.
  """
  problems = []

  def entries(key: str, kind: type, what: str, usable: Callable[[Any], bool]) -> tuple[Any, ...]:
    values = tuple(settings[key]) if isinstance(settings[key], (tuple, list)) else (settings[key],)
    if not all(isinstance(value, (kind, int)) and not isinstance(value, bool) and usable(value) for value in values):
      problems.append(f"compare.{key} must be {what}; got {settings[key]!r}")
      return ()
    # Folders are named by six digits of a rate.
    names = [f"{value:g}" if kind is float else str(value) for value in values]
    if not values or len(set(names)) < len(names):
      problems.append(f"compare.{key} must have at least one entry and none twice; got {values}")
    return tuple(kind(value) for value in values)

  def rates(key: str) -> tuple[float, ...]:
    return entries(key, float, "numbers > 0", lambda rate: 0 < rate < _LARGEST_RATE)

  plan = Plan(
    methods=entries("methods", str, "names", lambda name: isinstance(name, str)),
    rates=rates("rates"),
    seeds=entries("seeds", int, "integers >= 0 and < 2**32", lambda seed: 0 <= seed < 2**32),
    init_from=settings.init_from,
    soprc_with_sgd=settings.soprc_with_sgd,
    sgd_rates=rates("sgd_rates"),
  )
  if problems:
    raise ValueError("the comparison does not work:\n" + "\n".join(f"  {problem}" for problem in problems))
  return plan


def check(plan: Plan, make_config: MakeConfig, folder: Path) -> None:
  """Raises a ValueError or an OSError for what would stop a run later or make the comparison unfair.

  Args:
    plan: which runs.
    make_config: config of a method.
    folder: of the comparison, which may hold an earlier part of it.

  Raises:
    ValueError: methods differ in more than the loss (and the optimizer); the data have no val; a run or the folder is of another comparison; a
      start does not fit.
    OSError: a start is missing.
  """
  if folder.exists() and (not folder.is_dir() or (folder / workdir_lib.CONFIG).exists()):
    raise ValueError(
      f"--workdir={folder} is {'the folder of a training run' if folder.is_dir() else 'a file'}: choose a new folder"
    )
  base = make_config("soprc")
  if base.loss.name != "soprc" or base.loss.preset != "default":
    raise ValueError(
      "the config file's argument chooses a loss or a preset already: leave it out, and give it in --methods"
    )
  first = run_config(plan, make_config, RunName(plan.methods[0], plan.rates[0], plan.seeds[0]))
  if first.data.trainval:
    raise ValueError("data.trainval must be False in a comparison: learning rates are picked on val; got True")
  for method in plan.methods:
    for rate in _rates(plan, method):
      for seed in plan.seeds:
        name = RunName(method, rate, seed)
        config = run_config(plan, make_config, name)
        _check_alike(first, config, method)
        workdir_lib.check(folder / name.folder(), config)
    if config.loss.name not in objectives.LOSSES:
      objectives.check(config.loss.name, config.loss)
  _check_starts(plan, first)


def claim(plan: Plan, make_config: MakeConfig, folder: Path) -> None:
  """Makes the folder and notes what is compared from which start, or checks that it is what was noted there.

  Raises:
    ValueError: the folder holds a comparison of another config, or its runs started from other networks.
  """
  config = run_config(plan, make_config, RunName(plan.methods[0], plan.rates[0], plan.seeds[0]))
  starts = {str(seed): checkpoints.fingerprint(plan.start(seed)) for seed in plan.seeds if plan.start(seed)}
  noted = {"shared": shared(config), "starts": starts}
  path = folder / _NOTE
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_atomically(path, json.dumps(noted, indent=2, default=list) + "\n")
    return
  there = workdir_lib.read_json(path)
  lines = config_lib.differences(json.loads(json.dumps(noted["shared"], default=list)), there["shared"])
  if lines:
    raise ValueError(
      f"--workdir={folder} holds a comparison of another config; choose another folder:\n  " + "\n  ".join(lines)
    )
  for seed, start in starts.items():
    if there["starts"].get(seed, start) != start:
      raise ValueError(
        f"the network in {plan.start(int(seed))} is not the one that earlier runs in {folder} started from: choose another folder"
      )
  if bool(there["starts"]) != bool(starts):
    raise ValueError(
      f"earlier runs in {folder} started from {'networks' if there['starts'] else 'random weights'}: choose another folder"
    )
  noted["starts"] = there["starts"] | starts
  workdir_lib.write_atomically(path, json.dumps(noted, indent=2, default=list) + "\n")


def run_config(plan: Plan, make_config: MakeConfig, name: RunName) -> Any:
  """The resolved config of a run."""
  config = make_config(name.method)
  if plan.soprc_with_sgd and name.method in methods.METHODS:
    config.optim.name = "sgd" if _by_sgd(plan, name.method) else "adam"
  config.optim.learning_rate = name.rate
  config.seed = name.seed
  config.model.init_from = plan.start(name.seed)
  return config_lib.resolve(config)


def run_all(plan: Plan, make_config: MakeConfig, folder: Path) -> list[Row]:
  """Makes every run that has not finished yet; a killed comparison goes on where it stopped.

  Args:
    plan: which runs.
    make_config: config of a method.
    folder: of the comparison; each run has a folder in it.

  Raises:
    ValueError: a folder holds a run of another config.
  """
  progress = _Progress(_num_runs(plan))
  rows = []
  for method in plan.methods:
    rates = _rates(plan, method)

    def run(rate: float, seed: int, method: str = method) -> RunName:
      name = RunName(method, rate, seed)
      _run(run_config(plan, make_config, name), folder, name, progress)
      return name

    for rate in rates:
      run(rate, plan.seeds[0])
    val = val_by_rate(folder, method, rates, plan.seeds[0])
    best = best_rate(val)
    rows.append(Row(method, best, val, tuple(run(best, seed) for seed in plan.seeds)))
  return rows


def finished(folder: Path, name: RunName) -> dict[str, Any] | None:
  """``results.json`` of a run; of one that broke down a dict with ``"diverged"``, the reason; None if it has not ended yet."""
  for file in (workdir_lib.RESULTS, _DIVERGED):
    path = folder / name.folder() / file
    if path.exists():
      return workdir_lib.read_json(path)
  return None


def metric(folder: Path, name: RunName, split: str, key: str) -> float:
  """A metric of a run that has ended, NaN if it broke down.

  Raises:
    FileNotFoundError: it has not ended.
  """
  results = finished(folder, name)
  if results is None:
    raise FileNotFoundError(f"{name.folder()} has not finished in {folder}")
  return math.nan if "diverged" in results else results[split][key]


def device(folder: Path, name: RunName) -> str:
  """What a run was trained on."""
  return str((finished(folder, name) or {}).get("device", "an unknown device"))


def val_by_rate(folder: Path, method: str, rates: Sequence[float], seed: int) -> dict[float, float]:
  """Val mAUPRC of the runs of ``seed``; all of them must have ended."""
  return {rate: metric(folder, RunName(method, rate, seed), "val", "mAUPRC") for rate in rates}


def best_rate(val: dict[float, float]) -> float:
  """The rate with the highest val mAUPRC, of equal ones the first; a rate at which training broke down is below all."""
  return max(val, key=lambda rate: -math.inf if math.isnan(val[rate]) else val[rate])


def describe(plan: Plan) -> str:
  """The plan in a line."""
  grids = {method: _rates(plan, method) for method in plan.methods}
  shown = sorted({f"{', '.join(f'{rate:g}' for rate in grid)}" for grid in grids.values()})
  start = f"the networks in {plan.init_from}" if plan.init_from else "random weights"
  return (
    f"{_num_runs(plan)} runs: {len(plan.methods)} methods ({', '.join(plan.methods)}), learning rates "
    f"{' or '.join(shown)} at seed {plan.seeds[0]}, the best on val at seeds {', '.join(map(str, plan.seeds))}; from {start}"
  )


def _run(config: Any, folder: Path, name: RunName, progress: "_Progress") -> None:
  """Makes a run unless it has ended before."""
  workdir_lib.check(folder / name.folder(), config)  # a finished run of another config must not enter the table
  began = time.perf_counter()
  is_new = finished(folder, name) is None
  if is_new:
    _log.info("Run %s", name.folder())
    try:
      loop.train(config, folder / name.folder())
    except loop.DivergedError as error:
      # Too high a rate is a result like another: remembered, so that the same command does not repeat it.
      workdir_lib.write_atomically(folder / name.folder() / _DIVERGED, json.dumps({"diverged": str(error)}) + "\n")
  results = finished(folder, name) or {}
  told = (
    results.get("diverged") or f"val mAUPRC {results['val']['mAUPRC']:.4f}, test mAUPRC {results['test']['mAUPRC']:.4f}"
  )
  progress.tell(name, told, time.perf_counter() - began if is_new else None)


def shared(config: Any) -> dict[str, Any]:
  """What all runs of a comparison have in common: everything but the loss, the optimizer, the seed and the start."""
  tree = config.to_dict()
  del tree["loss"], tree["seed"], tree["model"]["init_from"]
  for key in ("name", "learning_rate"):
    del tree["optim"][key]
  return tree


def _check_alike(first: Any, config: Any, method: str) -> None:
  lines = config_lib.differences(shared(config), shared(first))
  if lines:
    raise ValueError(
      f"method {method!r} differs from the first one in more than its loss and optimizer, so that they cannot be compared:\n  "
      + "\n  ".join(lines)
    )


def _check_starts(plan: Plan, config: Any) -> None:
  """Loads the network that each seed starts from, and throws it away."""
  if not plan.init_from:
    return
  data = build.make_data(config)
  like = build.abstract_state(config, build.make_parts(config, data))
  for seed in plan.seeds:
    start = plan.start(seed)
    if workdir_lib.find_config(Path(start).expanduser()) and not (Path(start).expanduser() / workdir_lib.RESULTS).exists():
      raise ValueError(f"the run in {start} has not finished: the network to start from would change as it goes on")
    with config.unlocked():
      config.model.init_from = start
    build.check_unseen(config)
    checkpoints.load_network(start, like)


def _num_runs(plan: Plan) -> int:
  return sum(len(_rates(plan, method)) + len(plan.seeds) - 1 for method in plan.methods)


def _by_sgd(plan: Plan, method: str) -> bool:
  return plan.soprc_with_sgd and method in methods.METHODS and methods.METHODS[method].loss == "soprc"


def _rates(plan: Plan, method: str) -> tuple[float, ...]:
  return plan.sgd_rates if _by_sgd(plan, method) else plan.rates


class _Progress:
  """One line a run, with the time left judged by the runs made so far."""

  def __init__(self, total: int):
    self._total, self._done, self._seconds = total, set[RunName](), list[float]()

  def tell(self, name: RunName, told: str, seconds: float | None) -> None:
    """A run has ended, in this many seconds, or before."""
    if name in self._done:
      return  # the first seed at the best rate
    self._done.add(name)
    line = f"{len(self._done)}/{self._total} {name.folder()}: {told}"
    if seconds is None:
      _log.info("%s (made before)", line)
      return
    self._seconds.append(seconds)
    left = (self._total - len(self._done)) * sum(self._seconds) / len(self._seconds)
    _log.info("%s (%.0f s; about %.1f min left)", line, seconds, left / 60)
