"""The config of a run: defaults, presets, and checks that fail before anything is compiled.

Files in ``configs/`` call `default_config` and change fields. Options that a preset decides are ``None`` until
`resolve` fills them in; a value given by hand wins over the preset.
"""

from collections.abc import Iterator
import json
import math
from typing import Any

from ml_collections import config_dict

from soprc_jax import interpolation, losses
from soprc_jax.data import datasets, images, pipeline, sampler
from soprc_jax.models import RESNETS, resnet
from soprc_jax.training import methods, objectives, optimizers

# ml_collections' class is opaque to mypy: its fields are checked by `check` instead.
ConfigDict: Any = config_dict.ConfigDict

DTYPES = ("float32", "bfloat16")
PRESETS = ("default", "paper", "authors")
# Keys that may differ when a run is resumed, since they change no result.
RESUME_FREE = ("data.root", "data.workers", "data.prefetch", "log.progress")


def default_config() -> Any:
  """The paper's setting where it gives one, the authors' code where the text is silent; see each file in ``configs/``."""
  none = config_dict.placeholder
  config = ConfigDict()
  config.seed = 0
  config.data = ConfigDict(
    {
      "source": "glyphs",  # what each reads: soprc_jax/data/datasets.py
      "root": "",  # folder of the data, or the CSV file (glyphs: folder of its cache, which has a default)
      "image_size": 224,
      "augmentation": "resized_crop",  # the authors' code; "crop": the paper's text; see soprc_jax/data/images.py
      "resize": 256,  # shorter side before the augmentation "crop"
      "on_broken": "error",  # an image that cannot be decoded: error | skip
      "small_classes": "mask",  # classes with fewer than per_class images: mask | repeat | drop
      "train_share": 0.5,  # shares of the classes; the rest is for test; unused where there is an official test split
      "val_share": 0.1,
      "trainval": False,  # train on the classes of val too; then there is no val, and the last network is tested
      "split_seed": 0,
      "workers": 0,  # loader processes; 0: threads
      "prefetch": 4,
    }
  )
  config.model = ConfigDict(
    {
      "name": "resnet50",
      "width": 64,
      "stem": "imagenet",
      "stem_stride": 1,  # of the small stem
      "embedding_dim": 512,
      "dtype": "float32",
      "freeze_bn": True,
      "init_from": "",  # workdir of a run whose network to start from; empty: random weights
    }
  )
  config.loss = ConfigDict(
    {
      "name": "soprc",
      "preset": "default",
      "tau1": 0.1,  # Eq. 7
      "tau1_start": 0.0,  # > 0: tau1 goes from here to tau1, log-linear over the run
      "tau2": 0.001,
      "beta": 0.1,  # Eq. 10
      "num_points": 100,  # M
      "v": "carried",  # carried | batch (ablation: phi of the batch itself)
      "lambda1": 1.0,  # Eq. 9; 0 and 0 leave the term out
      "lambda2": 5.0,
      # Decided by the preset unless set here (README, errata 2 to 8).
      "self_weight": none(float),
      "tpr_gradient": none(bool),
      "initial_v": none(str),  # debiased | uniform
      "grid": none(str),
      "average_over": none(str),
      "pool": none(str),
      "mean_gradient": none(bool),
      "prior": ConfigDict({"kind": none(str), "value": none(float), "start": none(float)}),
      # Options of the other losses, each under its name; the reference hyperparameters.
      "contrastive": ConfigDict({"positive_margin": 1.0, "negative_margin": 0.5, "average_active": False}),
      "triplet": ConfigDict({"margin": 0.1}),
      "multi_similarity": ConfigDict({"alpha": 2.0, "beta": 40.0, "base": 0.5}),
      "smooth_ap": ConfigDict({"tau": 0.01, "include_self": True}),
      "fast_ap": ConfigDict({"num_bins": 10}),
      "listwise_ap": ConfigDict({"num_bins": 20, "include_self": True}),
      "auroc": ConfigDict({"surrogate": "huber", "tau": 0.1, "include_self": True}),
      "xbm": ConfigDict(
        {"memory_size": 4096, "start_after": 0, "negative_margin": 0.5, "include_self": False, "overflow": "ring"}
      ),
      "blackbox": ConfigDict(
        {"lambda_": 5.0, "margin": 0.0, "interclass_coef": 0.9, "memory_size": 1024, "include_self": True}
      ),
      "custom": ConfigDict(),  # options of a loss of your own, loss.name=package.module:function
    }
  )
  config.presets = ConfigDict(
    {
      "default": _preset(-1.0, False, "debiased", "midpoints", "selected", "batch", "scaled", 0.1),
      "paper": _preset(0.0, True, "uniform", "midpoints", "all", "list", "frequency", 0.0),
      "authors": _preset(-1.0, False, "uniform", "blocks", "selected", "batch", "scaled", 0.1),
    }
  )
  config.optim = ConfigDict(
    {
      "name": "sgd",
      "learning_rate": 0.01,
      "schedule": "step",
      "milestones": (15_000, 30_000),  # steps of the main phase at which the rate is multiplied by decay_factor
      "decay_factor": 0.1,
      "ramp_steps": 0,  # linear ramp from 0 at the start of the main phase
      "momentum": 0.9,
      "weight_decay": 4e-4,
      "head_multiplier": 1.0,  # learning rate of the head relative to the backbone's
    }
  )
  config.warmup = ConfigDict({"steps": 0, "loss": "triplet", "learning_rate": 1e-3, "freeze_bn": False})
  config.train = ConfigDict({"steps": 50_000, "batch_size": 224, "per_class": 4, "microbatch": 0})
  config.eval = ConfigDict(
    {
      "every": 1000,
      "image_size": 224,  # side of the middle crop of the test transform
      "resize": 0,  # shorter side before that crop; 0: image_size
      "batch_size": 224,
      "block_size": 1024,
      "ks": (1, 10, 100, 1000),
      "one_per_class": 0,  # > 0: test also with this many random galleries of one image a class (VehicleID)
    }
  )
  config.checkpoint = ConfigDict({"every": 1000, "keep": 2})
  config.log = ConfigDict({"progress": True, "line_every": 50})
  # Of experiments.compare alone; see soprc_jax/training/comparison.py.
  config.compare = ConfigDict(
    {
      "methods": methods.COMPARED,
      "rates": (0.001, 0.01, 0.1),  # learning rates, of which val at the first seed picks each method's own
      "seeds": (0, 1, 2),
      "init_from": "",  # workdir of the run that all start from, {seed} replaced; empty: random weights
      "soprc_with_sgd": False,  # SOPRC by SGD with sgd_rates, the others by Adam, as in the paper's appendix
      "sgd_rates": (0.001, 0.01, 0.1),
    }
  )
  return config


def _preset(
  self_weight: float,
  tpr_gradient: bool,
  initial_v: str,
  grid: str,
  average_over: str,
  pool: str,
  prior_kind: str,
  prior_value: float,
) -> Any:
  return ConfigDict(
    {
      "self_weight": self_weight,  # -1: 1 / (M + 1)
      "tpr_gradient": tpr_gradient,
      "initial_v": initial_v,
      "grid": grid,
      "average_over": average_over,
      "pool": pool,
      "mean_gradient": True,
      "prior": {"kind": prior_kind, "value": prior_value, "start": 0.0},  # start > 0: log-linear from there
    }
  )


def resolve(config: Any) -> Any:
  """A checked copy with every option filled in from the preset, without the tables of presets and comparisons.

  Raises:
    ValueError: names each wrong key with its value and what is allowed.
  """
  config = ConfigDict(config.to_dict())
  config.unlock()
  if config.loss.preset not in PRESETS:
    raise ValueError(f"loss.preset must be one of {PRESETS}, got {config.loss.preset!r}")
  preset = config.presets[config.loss.preset]
  for key, value in preset.items():
    if key != "prior" and config.loss[key] is None:
      config.loss[key] = value
  for key, value in preset.prior.items():
    if config.loss.prior[key] is None:
      config.loss.prior[key] = value
  del config.presets, config.compare
  problems = check(config)
  if problems:
    raise ValueError("the config does not work:\n" + "\n".join(f"  {problem}" for problem in problems))
  config.lock()
  return config


def check(config: Any) -> list[str]:
  """What is wrong with a resolved config: one line each, naming the key, the value and what is allowed."""
  problems: list[str] = []

  def get(key: str) -> Any:
    value: Any = config
    for part in key.split("."):
      value = value[part]
    return value

  def choice(key: str, allowed: Any) -> None:
    if get(key) not in allowed:
      problems.append(f"{key} must be one of {', '.join(map(str, allowed))}; got {get(key)!r}")

  def number(key: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    value = get(key)
    inside = low < value <= high if open_low else low <= value <= high
    if not (inside and math.isfinite(value)):
      limit = f"> {low:g}" if open_low else f">= {low:g}"
      limit += f" and <= {high:g}" if math.isfinite(high) else ""
      problems.append(f"{key} must be {limit}; got {value!r}")

  choice("data.source", tuple(datasets.SOURCES))
  choice("data.augmentation", images.AUGMENTATIONS)
  choice("data.on_broken", pipeline.ON_BROKEN)
  choice("data.small_classes", sampler.SMALL_CLASS_POLICIES)
  choice("model.name", sorted(RESNETS))
  choice("model.stem", resnet.STEMS)
  choice("model.dtype", DTYPES)
  choice("model.stem_stride", (1, 2))
  for key in ("loss.name", "warmup.loss"):
    problem = objectives.name_problem(get(key))
    if problem:
      problems.append(f"{key} {problem}")
  choice("loss.v", ("carried", "batch"))
  choice("loss.initial_v", ("debiased", "uniform"))
  choice("loss.grid", interpolation.GRIDS)
  choice("loss.average_over", ("selected", "all"))
  choice("loss.pool", ("batch", "list"))
  choice("loss.prior.kind", objectives.PRIOR_KINDS)
  if config.warmup.loss in objectives.CARRIED:
    problems.append(
      f"warmup.loss must not carry a state of its own (as {', '.join(objectives.CARRIED)}); got {config.warmup.loss!r}"
    )
  choice("loss.auroc.surrogate", losses.auroc.SURROGATES)
  choice("optim.name", optimizers.OPTIMIZERS)
  choice("optim.schedule", optimizers.SCHEDULES)
  number("seed", 0, 2**32 - 1)  # larger ones would draw the weights of a smaller one
  for key in ("train.steps", "warmup.steps"):
    number(key, 0)
  for key in ("model.width", "model.embedding_dim", "data.image_size", "eval.image_size", "eval.batch_size"):
    number(key, 1)
  for key in ("eval.block_size", "checkpoint.keep", "data.prefetch", "loss.num_points", "log.line_every"):
    number(key, 1)
  for key in ("tau1", "tau2", "multi_similarity.alpha", "multi_similarity.beta", "smooth_ap.tau", "auroc.tau"):
    number(f"loss.{key}", 0, open_low=True)
  number("loss.fast_ap.num_bins", 1)
  number("loss.blackbox.lambda_", 0, open_low=True)
  number("loss.blackbox.interclass_coef", 0, 1)
  number("loss.xbm.start_after", 0)
  choice("loss.xbm.overflow", ("ring", "tail"))
  for name in ("xbm", "blackbox"):
    if config.loss.name == name:
      number(f"loss.{name}.memory_size", config.train.batch_size)
  number("loss.listwise_ap.num_bins", 2)
  for key in ("loss.tau1_start", "loss.lambda1", "loss.lambda2", "loss.triplet.margin", "optim.weight_decay"):
    number(key, 0)
  for key in ("optim.learning_rate", "warmup.learning_rate", "optim.decay_factor", "optim.head_multiplier"):
    number(key, 0)
  number("optim.momentum", 0, 1)
  number("loss.beta", 0, 1, open_low=True)
  number("loss.prior.start", 0, 1)
  if config.loss.self_weight != -1:
    number("loss.self_weight", 0, 1)
  if config.loss.prior.kind in ("scaled", "constant"):
    number("loss.prior.value", 0, 1, open_low=True)
  number("data.train_share", 0, 1, open_low=True)
  number("data.val_share", 0, 1, open_low=True)
  if config.data.train_share + config.data.val_share >= 1:
    problems.append("data.train_share + data.val_share must be below 1, the rest of the classes is for test")
  if config.train.steps + config.warmup.steps < 1:
    problems.append("train.steps + warmup.steps must be at least 1")
  if any(k < 1 for k in config.eval.ks) or not config.eval.ks:
    problems.append(f"eval.ks must be numbers >= 1; got {config.eval.ks}")
  for key, size, resize in (
    ("data.resize", config.data.image_size, config.data.resize if config.data.augmentation == "crop" else 0),
    ("eval.resize", config.eval.image_size, config.eval.resize),
  ):
    if resize and resize < size:
      problems.append(f"{key}, the shorter side before the crop, must be at least {size}, the crop; got {resize}")
  if list(config.optim.milestones) != sorted(config.optim.milestones):
    problems.append(f"optim.milestones must ascend; got {config.optim.milestones}")
  size, per_class = config.train.batch_size, config.train.per_class
  if per_class < 2:
    problems.append(f"train.per_class must be at least 2, a query needs a positive; got {per_class}")
  elif size < 2 * per_class or size % per_class:
    lower = max(size // per_class, 2) * per_class
    problems.append(
      f"train.batch_size must be a multiple of train.per_class={per_class} with at least two classes, "
      f"e.g. {lower} or {lower + per_class}; got {size}"
    )
  if config.train.microbatch != 0:
    problems.append(f"train.microbatch must be 0: microbatches are not implemented yet; got {config.train.microbatch}")
  # Whatever has no rule of its own above: no number is infinite, no count, size or seed negative.
  for key, value in _leaves(config.to_dict()):
    if any(problem.startswith(f"{key} ") for problem in problems):
      continue
    if isinstance(value, float) and not math.isfinite(value):
      problems.append(f"{key} must be a finite number; got {value!r}")
    elif isinstance(value, int) and value < 0:
      problems.append(f"{key} must be >= 0; got {value!r}")
  return problems


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """(dotted key, value) of each leaf of a nested dict."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


def to_json(config: Any) -> str:
  """Sorted, indented JSON of a resolved config."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list) + "\n"


def differences(here: dict[str, Any], there: dict[str, Any], prefix: str = "") -> list[str]:
  """Lines ``key: there -> here`` for each key that differs and may not."""
  lines = []
  for key in sorted(here.keys() | there.keys()):
    name, a, b = prefix + key, here.get(key), there.get(key)
    if isinstance(a, dict) and isinstance(b, dict):
      lines += differences(a, b, name + ".")
    elif a != b and name not in RESUME_FREE:
      lines.append(f"{name}: {b!r} there, {a!r} here")
  return lines
