"""A fair comparison of methods: same start, batches and budget, each with its learning rate picked on val."""

from collections.abc import Callable, Sequence
import json
import logging
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

from soprc_jax.training import checkpoints, loop
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)
_DIVERGED = "diverged.json"

# What a comparison sets in every run: an override by hand would be lost.
OWN_KEYS = {
  "optim.learning_rate": "--rates",
  "seed": "--seeds",
  "model.init_from": "--init_from",
  "loss.name": "--methods",
  "loss.preset": "--methods",
}
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
  plan = Plan(
    methods=tuple(settings.methods),
    rates=tuple(float(rate) for rate in settings.rates),
    seeds=tuple(settings.seeds),
    init_from=settings.init_from,
    soprc_with_sgd=settings.soprc_with_sgd,
    sgd_rates=tuple(float(rate) for rate in settings.sgd_rates),
  )
  problems = []
  for key in ("methods", "rates", "seeds", "sgd_rates"):
    values = getattr(plan, key)
    if not values or len(set(values)) < len(values):
      problems.append(f"compare.{key} must have at least one entry and none twice; got {values}")
  for key in ("rates", "sgd_rates"):
    if any(not (rate > 0 and math.isfinite(rate)) for rate in getattr(plan, key)):
      problems.append(f"compare.{key} must be numbers > 0; got {getattr(plan, key)}")
  if any(not isinstance(seed, int) or seed < 0 for seed in plan.seeds):
    problems.append(f"compare.seeds must be integers >= 0; got {plan.seeds}")
  if problems:
    raise ValueError("the comparison does not work:\n" + "\n".join(f"  {problem}" for problem in problems))
  return plan


def check(plan: Plan, make_config: MakeConfig, folder: Path) -> None:
  """Raises a ValueError or an OSError for what would stop a run later: a method, a config, a start, a folder."""
  for method in plan.methods:
    for rate in _rates(plan, make_config, method):
      for seed in plan.seeds:
        name = RunName(method, rate, seed)
        workdir_lib.check(folder / name.folder(), run_config(plan, make_config, name))
  for seed in plan.seeds if plan.init_from else ():
    checkpoints.find_network(Path(plan.start(seed)).expanduser().absolute())


def run_config(plan: Plan, make_config: MakeConfig, name: RunName) -> Any:
  """The resolved config of a run."""
  config = make_config(name.method)
  if plan.soprc_with_sgd:
    config.optim.name = "sgd" if _by_sgd(plan, config) else "adam"
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
  progress = _Progress(_num_runs(plan, make_config))
  rows = []
  for method in plan.methods:
    rates = _rates(plan, make_config, method)

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
      return json.loads(path.read_text())
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


def val_by_rate(folder: Path, method: str, rates: Sequence[float], seed: int) -> dict[float, float]:
  """Val mAUPRC of the runs of ``seed``; all of them must have ended."""
  return {rate: metric(folder, RunName(method, rate, seed), "val", "mAUPRC") for rate in rates}


def best_rate(val: dict[float, float]) -> float:
  """The rate with the highest val mAUPRC, of equal ones the first; a rate at which training broke down is below all."""
  return max(val, key=lambda rate: -math.inf if math.isnan(val[rate]) else val[rate])


def describe(plan: Plan, make_config: MakeConfig) -> str:
  """The plan in a line."""
  grids = {method: _rates(plan, make_config, method) for method in plan.methods}
  shown = sorted({f"{', '.join(f'{rate:g}' for rate in grid)}" for grid in grids.values()})
  start = f"the networks in {plan.init_from}" if plan.init_from else "random weights"
  return (
    f"{_num_runs(plan, make_config)} runs: {len(plan.methods)} methods ({', '.join(plan.methods)}), learning rates "
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


def _num_runs(plan: Plan, make_config: MakeConfig) -> int:
  return sum(len(_rates(plan, make_config, method)) + len(plan.seeds) - 1 for method in plan.methods)


def _by_sgd(plan: Plan, config: Any) -> bool:
  return plan.soprc_with_sgd and config.loss.name == "soprc"


def _rates(plan: Plan, make_config: MakeConfig, method: str) -> tuple[float, ...]:
  return plan.sgd_rates if _by_sgd(plan, make_config(method)) else plan.rates


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
