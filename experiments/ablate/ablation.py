"""Makes the runs of an ablation: which are left, how long they take, and their results."""

from collections.abc import Callable, Iterator
import itertools
import logging
from pathlib import Path
import time
from typing import Any, NamedTuple

from experiments.ablate.ablation_stages import STAGES, Option, Stage, Variant
from experiments.compare import comparison, plans, step_cost
from soprc_jax.training import build, checkpoints, classes, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)
# The config without changes.
BASE = Option("soprc", {})
WRITES = (
  "comparison.json",
  "ablation.json",
  "gradient_through_t.md",
  classes.IMAGES,
  *(f"{name}.{kind}" for name in STAGES for kind in ("md", "png")),
  comparison.RUN_FOLDERS,
)
# An option -> the config of its runs; learning rate, seed and start not yet set.
MakeConfig = Callable[[Option], Any]


class Plan(NamedTuple):
  """The runs of an ablation.

  Attributes:
    stages: the stages to compare.
    seeds: the first one chooses option and learning rate.
    init_from: as `plans.Plan.init_from`.
  """

  stages: tuple[Stage, ...]
  seeds: tuple[int, ...]
  init_from: str

  def starts(self) -> dict[int, str]:
    """Returns seed -> path of the model that its runs start from; empty for random weights."""
    return (
      {seed: plans.start_of(self.init_from, seed) for seed in self.seeds} if self.init_from else {}
    )


class Result(NamedTuple):
  """Results of a variant.

  Attributes:
    variant: the variant.
    row: the chosen option (as ``method``) with the learning rate, and its runs.
    trials: number of options and learning rates that were tried.
  """

  variant: Variant
  row: comparison.Row
  trials: int


def check(
  plan: Plan, make_config: MakeConfig, folder: Path, *, allow_seen_classes: bool = False
) -> None:
  """Raises a ValueError or an OSError for anything that would stop a run later.

  ``allow_seen_classes`` is that of `comparison.check_starts`.

  Raises:
    ValueError: the data have no validation split, or too few classes for a batch; a run is of
      another config; a start does not fit.
    OSError: a start is missing.
  """
  comparison.check_folder(folder, WRITES)
  for start in plan.starts().values():
    checkpoints.check_start(start)
  base = run_config(plan, make_config, BASE, None, plan.seeds[0])
  if base.data.trainval:
    raise ValueError(
      "data.trainval must be False in an ablation, which chooses options and learning rates on the "
      "validation split; got True"
    )
  for _, option, rates in _options(plan):
    for rate, seed in itertools.product(rates, plan.seeds):
      name = plans.RunName(option.name, rate, seed)
      workdir_lib.check(folder / name.folder(), run_config(plan, make_config, option, rate, seed))
  _check_batches(plan, make_config)
  starts, config = plan.starts(), base.copy_and_resolve_references()
  comparison.check_starts(starts, config, allow_seen_classes=allow_seen_classes)


def claim(plan: Plan, make_config: MakeConfig, folder: Path) -> None:
  """Creates the folder with a note of what is ablated, or checks the note that is there.

  Raises:
    ValueError: the folder is of an ablation of another config, or with other initial models.
  """
  config = run_config(plan, make_config, BASE, None, plan.seeds[0])
  shared = config.to_dict()
  del shared["seed"], shared["model"]["init_from"], shared["optim"]["learning_rate"]
  comparison.claim(shared, plan.starts(), folder, data=config.data)


def _check_batches(plan: Plan, make_config: MakeConfig) -> None:
  """Builds the splits and the sampler of every batch size, to find errors early."""
  checked = set[int]()
  for stage, option, _ in _options(plan):
    config = run_config(plan, make_config, option, None, plan.seeds[0])
    if config.train.batch_size not in checked:
      checked.add(config.train.batch_size)
      try:
        parallel.check_batch(
          config.train.batch_size, config.train.per_class, config.train.microbatch
        )
        build.make_data(config)
      except ValueError as error:
        raise ValueError(
          f"stage {stage}, {option.name}: {error}; or leave the stage out (--stages)"
        ) from error


def _options(plan: Plan) -> Iterator[tuple[str, Option, tuple[float, ...]]]:
  """Yields every option of a plan: the stage's name, the option, and its learning rates."""
  for stage in plan.stages:
    for variant in stage.variants:
      for option in variant.options:
        yield stage.name, option, variant.rates


def seconds_a_run(plan: Plan, make_config: MakeConfig) -> Callable[[Option], float]:
  """Returns a function that estimates the seconds of a run of an option.

  It times steps of the config now.
  """
  estimate = step_cost.run_seconds(run_config(plan, make_config, BASE, None, plan.seeds[0]))
  return lambda option: estimate(run_config(plan, make_config, option, None, plan.seeds[0]))


def planned(plan: Plan, folder: Path) -> dict[str, list[tuple[Option, bool]]]:
  """Returns stage name -> its runs that no earlier stage makes.

  Each run is (option, whether it has ended before).

  Until its trials have ended, the first option of a variant stands for the one that the validation
  split will choose.
  """
  seen, found = set[plans.RunName](), dict[str, list[tuple[Option, bool]]]()
  for stage in plan.stages:
    found[stage.name] = []
    for variant in stage.variants:
      trials = [
        (option, rate, plan.seeds[0]) for option in variant.options for rate in variant.rates
      ]
      option, rate = _choose(variant, plan, folder) or trials[0][:2]
      for option, rate, seed in [*trials, *((option, rate, seed) for seed in plan.seeds[1:])]:
        name = plans.RunName(option.name, rate, seed)
        if name not in seen:
          seen.add(name)
          found[stage.name].append((option, comparison.finished(folder, name) is not None))
  return found


def run(
  plan: Plan,
  make_config: MakeConfig,
  folder: Path,
  *,
  minutes: float,
  seconds: Callable[[Option], float],
  allow_seen_classes: bool = False,
) -> bool:
  """Makes the runs that have not ended yet, one after the other, within a time limit.

  It starts a run only if the run is likely to end in time.

  Args:
    plan: the runs to make.
    make_config: returns the config of an option.
    folder: folder of the ablation.
    minutes: time limit. No run is started that would end later, except the first one.
    seconds: returns the estimated seconds of a run of an option.
    allow_seen_classes: see `soprc_jax.training.loop.train`.

  Returns:
    Whether all runs have ended.

  Raises:
    ValueError: a folder holds a run of another config.
  """
  began, made = time.perf_counter(), 0
  progress = comparison.Progress(sum(map(len, planned(plan, folder).values())))

  def ended(option: Option, rate: float, seed: int) -> bool:
    """Makes a run unless there is no time left for it."""
    nonlocal made
    name = plans.RunName(option.name, rate, seed)
    is_new = comparison.finished(folder, name) is None
    if is_new and made and time.perf_counter() - began + seconds(option) > 60 * minutes:
      return False
    config = run_config(plan, make_config, option, rate, seed)
    comparison.run_one(config, folder, name, progress, allow_seen_classes=allow_seen_classes)
    made += is_new
    return True

  for stage in plan.stages:
    for variant in stage.variants:
      trials = [(option, rate) for option in variant.options for rate in variant.rates]
      if not all(ended(option, rate, plan.seeds[0]) for option, rate in trials):
        return False
      option, rate = _choose(variant, plan, folder) or trials[0]
      if not all(ended(option, rate, seed) for seed in plan.seeds[1:]):
        return False
  return True


def results(plan: Plan, folder: Path) -> dict[str, list[Result]]:
  """Returns stage name -> results of its variants.

  Variants with runs that have not ended are left out.
  """
  found = dict[str, list[Result]]()
  for stage in plan.stages:
    found[stage.name] = []
    for variant in stage.variants:
      chosen = _choose(variant, plan, folder)
      if chosen is None:
        continue
      option, rate = chosen
      runs = tuple(plans.RunName(option.name, rate, seed) for seed in plan.seeds)
      if all(comparison.finished(folder, name) is not None for name in runs):
        val = comparison.val_by_rate(folder, option.name, variant.rates, plan.seeds[0])
        row = comparison.Row(option.name, rate, val, runs)
        found[stage.name].append(Result(variant, row, len(variant.options) * len(variant.rates)))
  return found


def _choose(variant: Variant, plan: Plan, folder: Path) -> tuple[Option, float] | None:
  """Returns the option and learning rate with the best validation mAUPRC at the first seed.

  None before all trials have ended.
  """
  val: dict[tuple[int, float], float] = {}
  for i, option in enumerate(variant.options):
    names = [plans.RunName(option.name, rate, plan.seeds[0]) for rate in variant.rates]
    if any(comparison.finished(folder, name) is None for name in names):
      return None
    by_rate = comparison.val_by_rate(folder, option.name, variant.rates, plan.seeds[0])
    val |= {(i, rate): value for rate, value in by_rate.items()}
  i, rate = plans.best(val)
  return variant.options[i], rate


def run_config(
  plan: Plan, make_config: MakeConfig, option: Option, rate: float | None, seed: int
) -> Any:
  """Returns the resolved config of a run; without a learning rate that of the config file."""
  config = make_config(option)
  config.seed = seed
  config.model.init_from = plans.start_of(plan.init_from, seed)
  if rate is not None:
    config.optim.learning_rate = rate
  return config_lib.resolve(config)
