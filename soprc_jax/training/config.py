"""The config of a run: defaults, presets, and checks that fail before anything is compiled.

Files in ``configs/`` call `default_config` and change fields. Options that a preset decides are ``None`` until
`resolve` fills them in; a value given by hand wins over the preset.
"""

import json
from typing import Any

from ml_collections import config_dict

from soprc_jax._internal.strings import shown
from soprc_jax.training import config_checks, rules

# ml_collections' class is opaque to mypy: its fields are checked by `check` instead.
ConfigDict: Any = config_dict.ConfigDict

PRESETS = ("default", "paper", "authors")
# Keys that may differ when a run is resumed, since they change no result.
# A run that goes on has met no broken image that it could not go on from, so data.on_broken is free too.
# The same holds of what follows a step that is not finite.
RESUME_FREE = (
  "data.root",
  "data.workers",
  "data.prefetch",
  "data.on_broken",
  "log.progress",
  "log.v_classes",
  "train.on_nonfinite",
  "train.max_skipped",
)

# Groups that a config file may hold for experiments.compare and experiments.ablate, which check them.
_OF_OTHER_PROGRAMS = ("compare",)
# Groups in which any keys may stand.
_FREE = ("loss.custom",)


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
      "augmentation": "resized_crop",  # the authors' code; "crop": the paper's text; see soprc_jax/data/transforms.py
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
      "init_from": "",  # network to start from: workdir of a run, FILE.pth, FILE.safetensors or hf://USER/REPOSITORY; empty: random weights
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
      "prior": ConfigDict(
        {
          "kind": none(str),
          "value": none(float),
          "start": none(float),
          "shape": "log",  # of the way from start: log | linear | cosine
          "until": 1.0,  # share of the run after which it has arrived
        }
      ),
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
  config.train = ConfigDict(
    {
      "steps": 50_000,  # after the warm-up
      "batch_size": 224,  # of all devices
      "per_class": 4,  # K
      # > 0: so many of the batch's images (of all devices) go through the network at a time: less memory, the same gradient. Divides
      # batch_size; batch norm must be frozen.
      "microbatch": 0,
      # A NaN or an infinity in a step, which the state never takes: stop | skip (leave the step out and go on; by max_skipped of them in a row it stops).
      "on_nonfinite": "stop",
      "max_skipped": 10,
    }
  )
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
  config.log = ConfigDict(
    {
      "progress": True,
      "line_every": 50,
      "v_classes": 4,  # training classes whose v is kept at each evaluation, beside the scores that it follows (v.jsonl); 0: none
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
      "prior": {"kind": prior_kind, "value": prior_value, "start": 0.0},  # start > 0: from there, see loss.prior.shape
    }
  )


def resolve(config: Any) -> Any:
  """A checked copy with every option filled in from the preset, without the table of presets and the groups of other programs.

  Raises:
    ValueError: names each wrong key with its value and what is allowed.
  """
  default = default_config().to_dict()
  # As plain dicts: whatever stands there must reach the checks.
  tree = {key: value for key, value in config.to_dict().items() if key not in _OF_OTHER_PROGRAMS}
  missing = sorted(default.keys() - tree.keys())
  if missing:
    raise ValueError(
      f"the config has no {', '.join(missing)}: a retrieval run needs the keys of soprc_jax.training.config.default_config() "
      "(configs/imbalanced.py is for experiments.train_binary)"
    )
  _raise_if(rules.key_problems(tree, default, free=_FREE))
  if tree["loss"]["preset"] not in PRESETS:
    raise ValueError(f"loss.preset must be one of {PRESETS}, got {shown(tree['loss']['preset'])}")
  for filled in (default, tree):
    _fill(filled)
  _raise_if([*rules.type_problems(tree, default), *config_checks.custom_problems(tree["loss"]["custom"])])
  config = ConfigDict(tree)
  _raise_if(config_checks.check(config))
  config.lock()
  return config


def _fill(tree: dict[str, Any]) -> None:
  """Takes the preset out of the dict of a config, and what is left to it from there."""
  preset, loss = tree.pop("presets")[tree["loss"]["preset"]], tree["loss"]
  for there, here in ((preset, loss), (preset["prior"], loss["prior"])):
    here |= {key: value for key, value in there.items() if here[key] is None}


def _raise_if(problems: list[str]) -> None:
  if problems:
    raise ValueError("the config does not work:\n" + "\n".join(f"  {problem}" for problem in problems))


def to_json(config: Any) -> str:
  """Sorted, indented JSON of a resolved config."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list) + "\n"


def from_json(tree: dict[str, Any]) -> Any:
  """The resolved config of a ``config.json``; keys that it does not have, being older, take their defaults. Nothing that it names is imported.

  Raises:
    ValueError: it is no config of a run.
  """
  config = default_config()
  del config.presets
  try:
    config.update(_as_tuples(tree))
  except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"this is no config of a run: {error}") from error
  expected, found = default_config().to_dict(), config.to_dict()
  _fill(expected)
  _raise_if(rules.key_problems(found, expected, free=_FREE))
  _raise_if([*rules.type_problems(found, expected), *config_checks.custom_problems(found["loss"]["custom"])])
  _raise_if(config_checks.check(config, imports=False))
  config.lock()
  return config


def _as_tuples(tree: Any) -> Any:
  """JSON's lists as the tuples that they were."""
  if isinstance(tree, dict):
    return {key: _as_tuples(value) for key, value in tree.items()}
  return tuple(_as_tuples(value) for value in tree) if isinstance(tree, list) else tree


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
