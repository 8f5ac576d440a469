"""What the config files share: their arguments, ``--config=FILE:ARGUMENT[,ARGUMENT...]``, and their
settings of comparisons.
"""

from collections.abc import Callable, Mapping
import difflib
import functools
from typing import Any

from experiments.compare import plans
from soprc_jax.training import config as config_lib
from soprc_jax.training import methods

Change = Callable[[Any], None]


def apply(config: Any, text: str, arguments: Mapping[str, Change]) -> Any:
  """Changes a config by its arguments, in their order, and returns it.

  Raises:
    ValueError: unknown argument; the known ones are listed.
  """
  for name in filter(None, text.split(",")):
    if name not in arguments:
      close = difflib.get_close_matches(name, arguments, n=1)
      hint = f", did you mean {close[0]!r}?" if close else ""
      raise ValueError(f"arguments are {', '.join(arguments)}; got {name!r}{hint}")
    arguments[name](config)
  return config


def method_arguments() -> dict[str, Change]:
  """Every method of the comparison: losses, and the presets of SOPRC."""
  return {name: functools.partial(methods.choose, name=name) for name in methods.METHODS}


def ablation_arguments(*, sgd_rate: float, adam_rate: float) -> dict[str, Change]:
  """``ablation1`` .. ``ablation5``, the rows of the paper's Table 2, see `ablation_values`.

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
  """Config values of a row of the paper's Table 2, by their dotted keys.

  (1) biased prior, v of the batch; (2) unbiased prior, v of the batch; (3) carried v; (4) with the
  semi-variance term; (5) the same with Adam. The others by SGD. A prior that is annealed goes from
  the same start in all rows, so that row 1 differs from row 2 in one thing.
  """
  values: dict[str, Any] = {} if row > 1 else {"loss.prior.kind": "batch"}
  terms = (1.0, 5.0) if row >= 4 else (0.0, 0.0)
  return values | {
    "loss.v": "batch" if row <= 2 else "carried",
    "loss.lambda1": terms[0],
    "loss.lambda2": terms[1],
    "optim.name": "sgd" if row <= 4 else "adam",
  }


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
  """What the paper's three data sets have in common: ResNet-50 with frozen batch norm, SGD in three
  stages, 56 x 4 images, test at 256 pixels.

  Args:
    source: ``data.source``.
    learning_rate: of SGD at the start, and the middle of the grid of a comparison.
    milestones: steps at which it is divided by 10.
    steps: of training.
    prior: of the largest class.
    ks: of recall@k.
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
  """What the configs of the paper's three data sets take: methods, ablations, ``adam``,
  ``trainval`` and ``crop``.
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
