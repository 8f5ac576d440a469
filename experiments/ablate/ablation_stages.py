"""Defines the stages of an ablation as changes of a config.

They are Table 2 of the paper, batch sizes, and each hyperparameter of SOPRC separately.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from configs import common
from soprc_jax.training import config_key

Values = Mapping[str, Any]


class Option(NamedTuple):
  """One way to train: the config with some values changed.

  Attributes:
    name: in the names of its runs' folders. Equal names mean equal values, so that stages share
      runs.
    values: dotted key -> value.
  """

  name: str
  values: Values


class Variant(NamedTuple):
  """One row of a stage's table, and one curve of its plot.

  Attributes:
    label: in table and legend.
    options: each is tried at every learning rate with the first seed. The validation split chooses
      one.
    rates: learning rates to try.
    value: its position on the axis of a sweep; None if the stage has no axis.
  """

  label: str
  options: tuple[Option, ...]
  rates: tuple[float, ...]
  value: float | None = None


class Stage(NamedTuple):
  """Variants that are compared with each other, all with one reference variant.

  Attributes:
    name: its name in ``--stages``.
    title: title of table and plot.
    variants: the rows of the table.
    reference: label of the variant that the others are compared with.
    axis: what `Variant.value` measures; None without an axis.
  """

  name: str
  title: str
  variants: tuple[Variant, ...]
  reference: str
  axis: str | None = None


# Table 2 of the paper: iNaturalist, ResNet-50, in percent.
PAPER_TABLE_2 = {
  "1: biased prior, v of the batch": (34.58, 66.35),
  "2: unbiased prior": (35.84, 67.08),
  "3: carried v": (35.99, 67.50),
  "4: semi-variance term": (36.16, 68.22),
  "5: Adam": (36.20, 68.48),
}
_TRUE_PRIOR = "2t: prior of the class frequency"
_SWEEPS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
  "tau1": ("loss.tau1", (0.01, 0.03, 0.1, 0.3)),
  "tau2": ("loss.tau2", (1e-4, 1e-3, 1e-2, 1e-1)),
  "beta": ("loss.beta", (0.001, 0.01, 0.1, 0.5, 1.0)),
  "num_points": ("loss.num_points", (3, 10, 30, 100, 300)),
  "lambda1": ("loss.lambda1", (0.0, 0.1, 1.0, 10.0)),
  "lambda2": ("loss.lambda2", (0.0, 0.5, 5.0, 50.0)),
}
# Names of the stages of `make`.
STAGES = (
  "table2",
  "batch_size",
  *_SWEEPS,
  "prior",
  "schedule",
  "start_of_v",
  "per_class",
  "exact_v",
  "gradient",
  "tuned",
)
_SYMBOLS = {"num_points": "M", "batch_size": "batch size, images"}


def make(base: Any, settings: Any) -> dict[str, Stage]:
  """Returns every stage for a config, by name.

  Args:
    base: resolved config of SOPRC without an ablation. A sweep includes its value.
    settings: ``config.compare``. The stages ``table2`` and ``tuned`` try its grids of learning
      rates; the others use the config's learning rate.
  """
  stages = [
    _table2(settings),
    _batch_sizes(base),
    *(_sweep(base, name, *entry) for name, entry in _SWEEPS.items()),
    _priors(base),
    _schedules(base),
    _start_of_v(base),
    _per_class(base),
    _exact_v(base),
    _gradient(base),
    _tuned(base, tuple(settings.rates)),
  ]
  return {stage.name: stage for stage in stages}


def option(base: Any, values: Values) -> Option:
  """Returns the option with these values, named by those that differ from the config.

  Its name is ``soprc`` if none differs.
  """
  changed = {key: value for key, value in values.items() if config_key.value_of(base, key) != value}
  return Option(
    ",".join(f"{_short(key)}={_shown(value)}" for key, value in changed.items()) or "soprc", changed
  )


def _table2(settings: Any) -> Stage:
  """Returns the five rows of Table 2, and row 2 with the true prior.

  In row 2 the prior is that of the config. The paper's unbiased prior is the frequency of the class
  in the training data. Each optimizer has its own grid of learning rates.
  """
  rows = []
  for row, label in enumerate(PAPER_TABLE_2, start=1):
    values = common.ablation_values(row)
    grid = settings.sgd_rates if values["optim.name"] == "sgd" else settings.rates
    rows.append(Variant(label, (Option(f"ablation{row}", values),), tuple(grid)))
    if row == 2:
      values = values | {"loss.prior.kind": "frequency"}
      rows.append(Variant(_TRUE_PRIOR, (Option("ablation2t", values),), tuple(grid)))
  return Stage("table2", "Table 2: the parts of SOPRC", tuple(rows), "4: semi-variance term")


def _batch_sizes(base: Any) -> Stage:
  own, per_class = base.train.batch_size, base.train.per_class
  sizes = sorted({max(own * factor // (4 * per_class), 2) * per_class for factor in (1, 2, 4, 8)})
  return _points(
    base, "batch_size", "train.batch_size", sizes, "Batch size, at the same number of steps"
  )


def _sweep(base: Any, name: str, key: str, values: tuple[Any, ...]) -> Stage:
  own = config_key.value_of(base, key)
  return _points(base, name, key, sorted({*values, own}), f"{_SYMBOLS.get(name, name)} of SOPRC")


def _points(base: Any, name: str, key: str, values: Iterable[Any], title: str) -> Stage:
  """Returns a stage with a variant for each value of a key."""
  own, rates = config_key.value_of(base, key), (base.optim.learning_rate,)

  def variant(value: Any) -> Variant:
    label = f"{value:g}" + (" (config)" if value == own else "")
    return Variant(label, (option(base, {key: value}),), rates, float(value))

  return Stage(
    name, title, tuple(map(variant, values)), f"{own:g} (config)", _SYMBOLS.get(name, name)
  )


def _named(base: Any, name: str, title: str, entries: Mapping[str, Values]) -> Stage:
  """Returns a stage of variants by label.

  The config itself comes first, and not again if an entry equals it.
  """
  rates = (base.optim.learning_rate,)
  rows = [Variant("config", (option(base, {}),), rates)]
  for label, values in entries.items():
    found = option(base, values)
    if found.values:
      rows.append(Variant(label, (found,), rates))
  return Stage(name, title, tuple(rows), "config")


def _prior(
  kind: str, value: float | None = None, start: float = 0.0, **more: Any
) -> dict[str, Any]:
  """Returns values of ``loss.prior``; ``frequency`` and ``batch`` need no ``value``."""
  tree: dict[str, Any] = {"kind": kind, "start": start, **more}
  if start:
    tree = {"shape": "log", "until": 1.0} | tree
  if value is not None:
    tree["value"] = value
  return {f"loss.prior.{key}": entry for key, entry in tree.items()}


def _priors(base: Any) -> Stage:
  entries = {
    "true frequency": _prior("frequency"),
    "share in the batch (biased)": _prior("batch"),
    "scaled, 0.1": _prior("scaled", 0.1),
    **{f"constant {value:g}": _prior("constant", value) for value in (0.003, 0.03, 0.1, 0.3, 0.5)},
  }
  return _named(base, "prior", "Prior, without annealing", entries)


def _schedules(base: Any) -> Stage:
  """Returns ways to lower the prior during training, and to narrow tau1 likewise."""
  entries = {
    "0.5 to frequency": _prior("frequency", start=0.5),
    "0.5 to 0.003": _prior("constant", 0.003, 0.5),
    "0.5 to 0.03": _prior("constant", 0.03, 0.5),
    "0.5 to 0.1": _prior("constant", 0.1, 0.5),
    "0.9 to 0.03": _prior("constant", 0.03, 0.9),
    "0.5 to 0.03, linear": _prior("constant", 0.03, 0.5, shape="linear"),
    "0.5 to 0.03, cosine": _prior("constant", 0.03, 0.5, shape="cosine"),
    "0.5 to 0.03 in half": _prior("constant", 0.03, 0.5, until=0.5),
    "tau1 from 0.3": {"loss.tau1_start": 0.3},
    "prior 0.03, tau1 from 0.3": _prior("constant", 0.03) | {"loss.tau1_start": 0.3},
  }
  return _named(base, "schedule", "Annealed prior and narrowed tau1", entries)


def _start_of_v(base: Any) -> Stage:
  entries: dict[str, Values] = {
    "uniform": {"loss.initial_v": "uniform"},
    "uniform, beta 0.01": {"loss.initial_v": "uniform", "loss.beta": 0.01},
    "v of the batch": {"loss.v": "batch"},
  }
  return _named(base, "start_of_v", "Start of v", entries)


def _per_class(base: Any) -> Stage:
  """Returns v carried and of the batch, by the number of images of a class in a batch."""
  entries: dict[str, Values] = {
    f"K = {images}, {label}": {"train.per_class": images, "loss.v": v}
    for images in (2, 4, 8)
    for v, label in (("carried", "v carried"), ("batch", "v of the batch"))
  }
  return _named(base, "per_class", "Images of a class in a batch, and v", entries)


def _exact_v(base: Any) -> Stage:
  """Returns v carried, of the batch and exact, in batches of all images of their classes.

  A batch has half as many classes as that of the config.
  """
  images = base.data.characters.max_images
  shared = {
    "train.per_class": images,
    "train.batch_size": max(base.train.batch_size // base.train.per_class // 2, 2) * images,
    "data.small_classes": "mask",
    "loss.name": "experiments.ablate.exact_v:objective",
  }
  rows = [
    Variant(
      f"{used} images, v {label}",
      (Option(f"exact_v-{used}-{'exact' if exact else v}", values),),
      (base.optim.learning_rate,),
    )
    for used in (2, 4)
    for label, v, exact in (
      ("carried", "carried", False),
      ("of the batch", "batch", False),
      ("exact", "batch", True),
    )
    for values in (shared | {"loss.custom.images": used, "loss.custom.exact": exact, "loss.v": v},)
  ]
  return Stage("exact_v", "v carried, of the batch, exact", tuple(rows), rows[0].label)


def _gradient(base: Any) -> Stage:
  through: Values = {"loss.tpr_gradient": True}
  entries = {
    "through T": through,
    "through T, tau2 0.1": {**through, "loss.tau2": 0.1},
    "through T, prior 0.5": {**through, **_prior("constant", 0.5)},
    "no T of itself": {"loss.self_weight": 0.0},
    "semi-variance (1, 5)": {"loss.lambda1": 1.0, "loss.lambda2": 5.0},
    "no semi-variance": {"loss.lambda1": 0.0, "loss.lambda2": 0.0},
    "preset paper": {
      "loss.tpr_gradient": True,
      "loss.self_weight": 0.0,
      "loss.initial_v": "uniform",
      "loss.average_over": "all",
      "loss.pool": "list",
      **_prior("frequency"),
    },
  }
  return _named(base, "gradient", "Gradient through T", entries)


def _tuned(base: Any, rates: tuple[float, ...]) -> Stage:
  """Returns SOPRC, SmoothAP and triplet, tuned with equal effort.

  Each tries three values of its most important hyperparameter at every learning rate.
  """

  def variant(label: str, loss: str, key: str, values: tuple[float, ...]) -> Variant:
    options = (option(base, {"loss.name": loss, key: value}) for value in values)
    return Variant(label, tuple(options), rates)

  rows = (
    variant("SOPRC", "soprc", "loss.lambda2", (0.0, 5.0, 50.0)),
    variant("SmoothAP", "smooth_ap", "loss.smooth_ap.tau", (0.01, 0.03, 0.1)),
    variant("Triplet", "triplet", "loss.triplet.margin", (0.05, 0.1, 0.2)),
  )
  return Stage(
    "tuned", "SOPRC, SmoothAP and triplet, tuned with equal effort on val", rows, "SOPRC"
  )


def _short(key: str) -> str:
  """Returns a key without the section that readers know.

  For example ``prior.kind`` for ``loss.prior.kind``, and ``loss`` for ``loss.name``.
  """
  return {"loss.name": "loss", "train.batch_size": "batch_size"}.get(key, key.removeprefix("loss."))


def _shown(value: Any) -> str:
  return (
    f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
  )
