"""Defines what the config files share: arguments and comparison settings.

Arguments follow the file name: ``--config=FILE:ARGUMENT[,ARGUMENT...]``.
"""

from collections.abc import Callable, Mapping
import difflib
import functools
from typing import Any

from experiments.compare import plans
from soprc_jax.training import config as config_lib
from soprc_jax.training import methods

Change = Callable[[Any], None]
# Of each of these, a call can have one: two losses, two rows of a table, two heads.
_ALTERNATIVES = (
  tuple(methods.METHODS),
  tuple(f"ablation{row}" for row in range(1, 6)),
  ("mlp", "residual"),
)


def apply(config: Any, text: str, arguments: Mapping[str, Change]) -> Any:
  """Applies the arguments to a config, in their order, and returns the config.

  Raises:
    ValueError: an argument is unknown, and the message lists the known ones; or two arguments
      exclude each other.
  """
  names = list(filter(None, text.split(",")))
  for group in _ALTERNATIVES:
    chosen = [name for name in names if name in group]
    if len(set(chosen)) > 1:
      raise ValueError(f"{' and '.join(chosen)} exclude each other: give one of them")
  for name in names:
    if name not in arguments:
      close = difflib.get_close_matches(name, arguments, n=1)
      hint = f", did you mean {close[0]!r}?" if close else ""
      raise ValueError(f"arguments are {', '.join(arguments)}; got {name!r}{hint}")
    arguments[name](config)
  return config


def method_arguments() -> dict[str, Change]:
  """Returns the arguments that choose a method: every loss, and the presets of SOPRC."""
  return {name: functools.partial(methods.choose, name=name) for name in methods.METHODS}


def ablation_arguments(*, sgd_rate: float, adam_rate: float) -> dict[str, Change]:
  """Returns ``ablation1`` .. ``ablation5``, the rows of the paper's Table 2.

  `ablation_values` has the config values of each row.

  Args:
    sgd_rate: learning rate of rows 1 to 4.
    adam_rate: learning rate of row 5.
  """

  def ablation(row: int) -> Change:
    def change(config: Any) -> None:
      config.update_from_flattened_dict(ablation_values(row))
      config.optim.learning_rate = sgd_rate if config.optim.name == "sgd" else adam_rate

    return change

  return {f"ablation{row}": ablation(row) for row in range(1, 6)}


def ablation_values(row: int) -> dict[str, Any]:
  """Returns the config values of a row of the paper's Table 2, by dotted key.

  The rows are: (1) biased prior, v of the batch; (2) unbiased prior, v of the batch; (3) carried v;
  (4) carried v with the semi-variance term; (5) row 4 with Adam. Rows 1 to 4 use SGD. An annealed
  prior has the same start in all rows, so that row 1 differs from row 2 in one thing only.
  """
  values: dict[str, Any] = {} if row > 1 else {"loss.prior.kind": "batch"}
  terms = (1.0, 5.0) if row >= 4 else (0.0, 0.0)
  return values | {
    "loss.v": "batch" if row <= 2 else "carried",
    "loss.lambda1": terms[0],
    "loss.lambda2": terms[1],
    "optim.name": "sgd" if row <= 4 else "adam",
  }


def log_link_recipe(config: Any) -> None:
  """Sets SOPRC with the log link at a constant prior, and Adam with a ramp.

  With the log link a small prior starves no list, so it needs no annealing.
  """
  config.presets.default.link = "log"
  config.presets.default.prior.update({"kind": "constant", "value": 0.001, "start": 0.0})
  config.optim.update({"name": "adam", "schedule": "cosine", "weight_decay": 0.0})
  # Adam's first full steps can move a network to where no loss recovers.
  config.optim.ramp_steps = 50


def compared(config: Any, **settings: Any) -> None:
  """Adds the settings of ``soprc compare`` to a config: its defaults, with some replaced."""
  config.compare = plans.default_settings()
  config.compare.update(settings)


def photograph_config(
  source: str,
  *,
  learning_rate: float,
  milestones: tuple[int, int],
  steps: int,
  prior: float,
  ks: tuple[int, ...],
) -> Any:
  """Returns the base config of the paper's three data sets.

  It is a ResNet-50 with frozen batch norm, trained by SGD with two learning rate drops on batches
  of 56 x 4 images. Testing is at 256 pixels.

  Args:
    source: ``data.source``.
    learning_rate: initial learning rate of SGD, and the middle of the learning rate grid of a
      comparison.
    milestones: steps at which the learning rate is divided by 10.
    steps: number of training steps.
    prior: prior of the largest class.
    ks: values of k for recall@k.
  """
  config = config_lib.default_config()
  config.data.update({"source": source, "val_share": 0.1, "workers": 8})
  config.optim.update(
    {"learning_rate": learning_rate, "milestones": milestones, "weight_decay": 4e-4}
  )
  for preset in ("default", "authors"):
    config.presets[preset].prior.value = prior
  config.train.steps = steps
  config.eval.update({"every": 1000, "image_size": 256, "ks": ks})
  config.checkpoint.every = 1000
  rates = (learning_rate / 10, learning_rate, 10 * learning_rate)
  compared(config, rates=rates, sgd_rates=rates)
  return config


def photograph_arguments(*, sgd_rate: float, adam_rate: float = 1e-4) -> dict[str, Change]:
  """Returns the arguments of the configs of the paper's three data sets.

  These are methods, ablations, ``adam``, ``trainval`` and ``crop``.
  """

  def adam(config: Any) -> None:
    config.optim.update({"name": "adam", "learning_rate": adam_rate})

  def trainval(config: Any) -> None:
    config.data.trainval = True

  def crop(config: Any) -> None:
    config.data.update({"augmentation": "crop", "resize": 256})

  def slow_v(config: Any) -> None:
    config.loss.beta = 0.001

  changes = method_arguments()
  for name in ("paper", "authors"):
    changes[name] = _both(changes[name], slow_v)
  ablations = ablation_arguments(sgd_rate=sgd_rate, adam_rate=adam_rate)
  return {**changes, **ablations, "adam": adam, "trainval": trainval, "crop": crop}


def _both(first: Change, second: Change) -> Change:
  def change(config: Any) -> None:
    first(config)
    second(config)

  return change
