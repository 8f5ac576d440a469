"""The config of the study of imbalanced classification, and the checks that fail before anything is compiled."""

from typing import Any

from ml_collections import config_dict

from experiments.binary import binary_losses
from soprc_jax._internal.strings import shown
from soprc_jax.data import tabular
from soprc_jax.training import optimizers
from soprc_jax.training import rules as rules_lib

# ml_collections' class is opaque to mypy: its fields are checked by `resolve` instead.
ConfigDict: Any = config_dict.ConfigDict

_SCHEDULES = ("constant", "cosine")
_SURROGATES = ("logistic", "huber")
# Beyond them float32 has no steps, or no numbers.
_RATES = (1e-12, 1e12)
_WIDEST = 2**14


def default_config() -> Any:
  """All keys with values that work; ``configs/imbalanced.py`` changes them by data set."""
  config = ConfigDict()
  config.seeds = (0, 1, 2, 3, 4)  # of thinning, splits, weights and batches
  config.methods = binary_losses.METHODS  # the first is compared with the others
  config.rates = (0.001, 0.003, 0.01, 0.03)  # learning rates, of which val picks each method's own
  config.data = ConfigDict(
    {
      "name": "digits",  # digits | breast_cancer | flights
      "positive": 8,  # the positive class of digits and breast_cancer
      "share": 0.05,  # share of positives to which the data are thinned; 0: as they are
      "val_share": 0.2,
      "test_share": 0.4,
      "batch_size": 64,
      "positive_share": 0.25,  # of each batch; 0: uniform sampling, so the data's own
    }
  )
  config.model = ConfigDict({"widths": (64, 64)})
  config.loss = ConfigDict(
    {
      "scores": "sigmoid",  # of the logits, for the losses of ranking: none | sigmoid | tanh; tau1 is in their units
      "tau1": 0.1,  # Eq. 7
      "tau2": 0.001,
      "beta": 0.1,  # Eq. 10
      "num_points": 100,  # M; 0: N+, a v as long as the training data have positives, as in the paper
      "prior_start": 0.5,  # > 0: the prior goes from here to the data's, log-linear over the run; 0: it is the data's throughout
      "self_weight": -1.0,  # -1: 1 / (M + 1)
      "tpr_gradient": False,
      # Knobs of the other methods, each under its name.
      "weighted_cross_entropy": ConfigDict({"share": 0.5}),  # share of positives that the weights make; 0: the data's
      "focal": ConfigDict({"gamma": 2.0}),
      "auroc": ConfigDict({"surrogate": "logistic", "tau": 0.1}),  # logistic (of the logits) | huber (of the scores)
      "ap": ConfigDict({"tau1": 0.1}),
      "libauc": ConfigDict({"gamma": 0.9, "margin": 1.0}),  # the defaults of its APLoss
    }
  )
  config.optim = ConfigDict({"name": "adam", "schedule": "cosine", "ramp_steps": 0, "momentum": 0.9, "weight_decay": 0.0})
  config.train = ConfigDict({"steps": 1000})
  config.eval = ConfigDict({"every": 50})  # the best of these networks on val is tested
  return config


def resolve(config: Any) -> Any:
  """A checked, locked copy.

  Raises:
    ValueError: names each wrong key with its value and what is allowed.
  """
  tree, default = config.to_dict(), default_config().to_dict()
  problems = rules_lib.key_problems(tree, default)
  if {problem.split(" ")[0] for problem in problems} & (tree.keys() ^ default.keys()):
    problems.append("Is this the config of another program? experiments.train_binary takes configs/imbalanced.py")
  if not problems:
    problems = rules_lib.type_problems(tree, default)
  if not problems:
    problems = _value_problems(config)
  if problems:
    raise ValueError("the config does not work:\n" + "\n".join(f"  {problem}" for problem in problems))
  config = ConfigDict(config.to_dict())
  config.lock()
  return config


def without_methods(config: Any) -> Any:
  """A copy without the list of methods: what they share, so that a folder can take further ones."""
  kept = config.copy_and_resolve_references()
  with kept.unlocked():
    del kept.methods
  return kept


def _value_problems(config: Any) -> list[str]:
  rules = rules_lib.Rules(config)
  problems, choice, number = rules.problems, rules.choice, rules.number

  def several(key: str, fits: Any, what: str) -> None:
    values = rules_lib.value_of(config, key)
    # Rates are told apart by six digits, as in results.json.
    if not values or not all(fits(value) for value in values) or len({_shown(value) for value in values}) < len(values):
      problems.append(f"{key} must be different {what}, one at least; got {shown(tuple(values))}")

  several("seeds", lambda seed: 0 <= seed < 2**31, "integers >= 0")
  several("rates", _usable_rate, f"numbers from {_RATES[0]:g} to {_RATES[1]:g}")
  several("methods", lambda name: name in binary_losses.METHODS, f"names of {', '.join(binary_losses.METHODS)}")
  choice("data.name", tuple(tabular.DATA_SETS))
  number("data.positive", 0, rules_lib.LARGEST_COUNT)
  number("data.share", 0, 0.5)
  for key in ("data.val_share", "data.test_share"):
    number(key, 0, 1, open_low=True)
  if config.data.val_share + config.data.test_share >= 1:
    problems.append("data.val_share + data.test_share must be below 1, the rest is for training")
  number("data.batch_size", 2, 2**20)
  number("data.positive_share", 0, 0.99)
  if any(not 1 <= width <= _WIDEST for width in config.model.widths):
    problems.append(f"model.widths must be integers >= 1 and <= {_WIDEST}; got {shown(tuple(config.model.widths))}")
  choice("loss.scores", binary_losses.SCORES)
  for key in ("loss.tau1", "loss.tau2", "loss.auroc.tau", "loss.ap.tau1", "loss.libauc.margin"):
    number(key, 0, open_low=True)
  for key in ("loss.beta", "loss.libauc.gamma"):
    number(key, 0, 1, open_low=True)
  number("loss.num_points", 0, 10**6)
  number("loss.prior_start", 0, 1)
  if config.loss.self_weight != -1:
    number("loss.self_weight", 0, 1)
  number("loss.weighted_cross_entropy.share", 0, 0.99)
  number("loss.focal.gamma", 0)
  choice("loss.auroc.surrogate", _SURROGATES)
  choice("optim.name", optimizers.OPTIMIZERS)
  choice("optim.schedule", _SCHEDULES)
  number("optim.ramp_steps", 0, rules_lib.LARGEST_COUNT)
  number("optim.momentum", 0, 1)
  number("optim.weight_decay", 0)
  number("train.steps", 1, 10**7)
  number("eval.every", 1)
  if not problems and config.train.steps % config.eval.every:
    near = max(config.train.steps // config.eval.every, 1) * config.eval.every
    problems.append(
      f"train.steps must be a multiple of eval.every={config.eval.every}, e.g. {near}; got {config.train.steps}"
    )
  return problems


def _usable_rate(rate: Any) -> bool:
  return _RATES[0] <= rate <= _RATES[1]


def _shown(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)
