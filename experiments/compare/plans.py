"""Plans a comparison: methods, learning rates, seeds and start, and the config of each run."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple, TypeVar

from soprc_jax._internal.strings import shown
from soprc_jax.training import config as config_lib
from soprc_jax.training import config_key, methods
from soprc_jax.training.config_key import Key

# Keys that a comparison sets in every run: an override would have no effect.
OWN_KEYS = {
  "optim.learning_rate": "--rates",
  "seed": "--seeds",
  "model.init_from": "--init_from",
  "loss.name": "--methods",
  "loss.preset": "--methods",
}
_LARGEST_RATE = 1e38  # largest power of ten in float32
T = TypeVar("T")
KEYS = (
  Key(
    "compare.methods",
    methods.OF_PAPER,
    "methods; the default is the rows of the paper's tables, SOPRC in three ways",
  ),
  Key(
    "compare.rates",
    (0.001, 0.01, 0.1),
    "learning rates; each method uses the best on the validation split at the first seed",
  ),
  Key("compare.seeds", (0, 1, 2), "seeds"),
  Key(
    "compare.init_from",
    "",
    "workdir of the run whose model all runs start from, {seed} replaced; empty: random weights",
  ),
  Key(
    "compare.soprc_with_sgd",
    False,
    "whether SOPRC uses SGD with sgd_rates and the others Adam, as in the paper's appendix",
  ),
  Key("compare.sgd_rates", (0.001, 0.01, 0.1), "learning rates of SOPRC in that case"),
  Key(
    "compare.trials",
    0,
    "random trials of each method instead of the grid of learning rates; 0: the grid",
  ),
)
# Seed, and seed of the split, of all trials. A seed that is reported may not be one of these.
TUNING_SEED = 20_000
# A method's name -> the config of its runs, learning rate and seed not yet set.
MakeConfig = Callable[[str], Any]


class Plan(NamedTuple):
  """The runs of a comparison.

  Every method runs each learning rate with the first seed, and its best one with the other seeds.
  With trials, every method makes as many with a tuning seed on a tuning split, see
  `random_search.run`. Its best one runs with all seeds on the split of the config.

  Attributes:
    methods: names that the config file, or `methods.choose`, accepts. The first one is compared
      with the others.
    rates: grid of learning rates.
    seeds: seeds of weights, batches and augmentation. The first one chooses the learning rate.
    init_from: workdir of the run whose model all methods start from, ``{seed}`` replaced; empty:
      random weights.
    soprc_with_sgd: SOPRC trains by SGD and the others by Adam, as in the paper's appendix. If
      False, all train by ``config.optim.name``.
    sgd_rates: grid of SOPRC's learning rates with ``soprc_with_sgd``.
    trials: number of random trials of each method; 0: the grid.
  """

  methods: tuple[str, ...]
  rates: tuple[float, ...]
  seeds: tuple[int, ...]
  init_from: str
  soprc_with_sgd: bool
  sgd_rates: tuple[float, ...]
  trials: int = 0

  def start(self, seed: int) -> str:
    """Returns ``model.init_from`` of the runs of a seed."""
    return start_of(self.init_from, seed)

  def starts(self) -> dict[int, str]:
    """Returns seed -> path of the model that its runs start from; empty for random weights."""
    return {seed: self.start(seed) for seed in self.seeds} if self.init_from else {}


class RunName(NamedTuple):
  """The name of one run of a comparison."""

  method: str
  rate: float
  seed: int

  def folder(self) -> str:
    """Returns the name of its folder, e.g. ``triplet-lr0.004-seed1``."""
    return f"{self.method.replace(':', '.')}-lr{self.rate:g}-seed{self.seed}"


def default_settings() -> Any:
  """Returns the group ``compare`` of a config file."""
  return config_key.default_config(KEYS).compare


def read_plan(settings: Any) -> Plan:
  """Returns the plan of ``config.compare``.

  Raises:
    ValueError: a key is wrong. The message names each with its value and what is allowed.
  """
  default = default_settings().to_dict()
  _raise_if(
    [f"compare.{problem}" for problem in config_key.key_problems(settings.to_dict(), default)]
  )
  types = (
    {key: tree[key] for key in ("init_from", "soprc_with_sgd", "trials")}
    for tree in (settings, default)
  )
  problems = [f"compare.{problem}" for problem in config_key.type_problems(*types)]

  def entries(key: str, kind: type, what: str, usable: Callable[[Any], bool]) -> tuple[Any, ...]:
    values = tuple(settings[key]) if isinstance(settings[key], (tuple, list)) else (settings[key],)
    if not all(
      isinstance(value, (kind, int)) and not isinstance(value, bool) and usable(value)
      for value in values
    ):
      problems.append(f"compare.{key} must be {what}; got {shown(settings[key])}")
      return ()
    # Names of folders have six digits of a learning rate.
    names = [f"{value:g}" if kind is float else str(value) for value in values]
    if not values or len(set(names)) < len(names):
      problems.append(
        f"compare.{key} must have at least one entry and none twice; got {shown(values)}"
      )
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
    trials=settings.trials,
  )
  if plan.trials and not problems:
    problems += _trials_problems(plan)
  _raise_if(problems)
  return plan


def _trials_problems(plan: Plan) -> list[str]:
  """Returns what does not go together with ``compare.trials``."""
  problems = []
  if plan.trials < 2:
    problems.append(f"compare.trials must be 0 or at least 2; got {plan.trials}")
  if plan.soprc_with_sgd:
    problems.append("compare.trials searches one range of learning rates: use soprc_with_sgd=False")
  if TUNING_SEED in plan.seeds:
    problems.append(f"compare.seeds must not have {TUNING_SEED}, the seed of the trials")
  if "{seed}" in plan.init_from:
    problems.append(
      "compare.trials starts all runs from one model: compare.init_from must not have {seed}"
    )
  return problems


def _raise_if(problems: list[str]) -> None:
  if problems:
    raise ValueError(
      "the comparison is not valid:\n" + "\n".join(f"  {problem}" for problem in problems)
    )


def start_of(init_from: str, seed: int) -> str:
  """Returns ``model.init_from`` of the runs of a seed, with ``{seed}`` replaced."""
  return init_from.replace("{seed}", str(seed))


def run_config(
  plan: Plan, make_config: MakeConfig, name: RunName, trial: Mapping[str, Any] | None = None
) -> Any:
  """Returns the resolved config of a run.

  Args:
    plan: the comparison.
    make_config: returns the config of a method.
    name: name of the run. With `TUNING_SEED` it has the tuning split too.
    trial: searched values of the run, see `random_search.config_values`.
  """
  config = make_config(name.method)
  config.update_from_flattened_dict(trial or {})
  if name.seed == TUNING_SEED and plan.trials:
    config.data.split_seed = TUNING_SEED
  if plan.soprc_with_sgd and name.method in methods.METHODS:
    config.optim.name = "sgd" if _by_sgd(plan, name.method) else "adam"
  config.optim.learning_rate = name.rate
  config.seed = name.seed
  config.model.init_from = plan.start(name.seed)
  return config_lib.resolve(config)


def best(val: Mapping[T, float]) -> T:
  """Returns the key with the highest validation mAUPRC, the first of equal ones.

  NaN, where training diverged, is below all other values.
  """
  return max(val, key=lambda key: -math.inf if math.isnan(val[key]) else val[key])


def describe(plan: Plan) -> str:
  """Returns the plan in one line."""
  grids = {method: rates_of(plan, method) for method in plan.methods}
  shown = sorted({f"{', '.join(f'{rate:g}' for rate in grid)}" for grid in grids.values()})
  start = f"the models in {plan.init_from}" if plan.init_from else "random weights"
  if plan.trials:
    return (
      f"{num_runs(plan)} runs: {len(plan.methods)} methods ({', '.join(plan.methods)}), "
      f"{plan.trials} random trials each at seed and split {TUNING_SEED}, the best on the "
      f"validation split at seeds {', '.join(map(str, plan.seeds))}; from {start}"
    )
  return (
    f"{num_runs(plan)} runs: {len(plan.methods)} methods ({', '.join(plan.methods)}), learning "
    f"rates {' or '.join(shown)} at seed {plan.seeds[0]}, the best on the validation split at "
    f"seeds {', '.join(map(str, plan.seeds))}; from {start}"
  )


def shared(config: Any, *, with_trials: bool = False) -> dict[str, Any]:
  """Returns what all runs of a comparison have in common.

  That is everything except the loss, the optimizer, the seed and the start. With trials it is also
  without what they search, and without the seed of the split.
  """
  tree = config.to_dict()
  if with_trials:
    for key in ("sampler", "confusable", "split_seed"):
      del tree["data"][key]
  del tree["loss"], tree["seed"], tree["model"]["init_from"]
  for key in ("name", "learning_rate"):
    del tree["optim"][key]
  return tree


def num_runs(plan: Plan) -> int:
  """Returns the number of runs of a plan."""
  if plan.trials:
    return len(plan.methods) * (plan.trials + len(plan.seeds))
  return sum(len(rates_of(plan, method)) + len(plan.seeds) - 1 for method in plan.methods)


def possible_runs(plan: Plan, method: str) -> list[RunName]:
  """Returns every run that a method may make: each learning rate at each seed."""
  return [RunName(method, rate, seed) for seed in plan.seeds for rate in rates_of(plan, method)]


def _by_sgd(plan: Plan, method: str) -> bool:
  return (
    plan.soprc_with_sgd and method in methods.METHODS and methods.METHODS[method].loss == "soprc"
  )


def rates_of(plan: Plan, method: str) -> tuple[float, ...]:
  """Returns the grid of learning rates of a method."""
  return plan.sgd_rates if _by_sgd(plan, method) else plan.rates
