"""What must hold of a resolved config, told before anything is compiled."""

from collections.abc import Iterable
import math
from typing import Any

from soprc_jax import interpolation, losses
from soprc_jax._internal.strings import shown
from soprc_jax.data import datasets, pipeline, sampler, transforms
from soprc_jax.models import RESNETS, resnet
from soprc_jax.training import nonfinite, objectives, optimizers
from soprc_jax.training import rules as rules_lib

DTYPES = ("float32", "bfloat16")
# Largest values of what takes memory or processes: far beyond any use, and still told at once instead of by a machine that stands still.
_SIDE, _IMAGES, _POINTS = 2**14, 2**20, 10**6
_AT_MOST = {
  "model.width": _SIDE,
  "model.embedding_dim": _IMAGES,
  "data.image_size": _SIDE,
  "eval.image_size": _SIDE,
  "eval.batch_size": _IMAGES,
  "eval.block_size": _IMAGES,
  "data.prefetch": 10**4,
  "data.workers": 1024,
  "train.batch_size": _IMAGES,
  "loss.num_points": _POINTS,
  "loss.fast_ap.num_bins": _POINTS,
  "loss.listwise_ap.num_bins": _POINTS,
  "loss.xbm.memory_size": 2**24,
  "loss.blackbox.memory_size": 2**24,
  "seed": 2**32 - 1,  # larger ones would draw the weights of a smaller one
}


def unused_problems(config: Any, keys: Iterable[str]) -> list[str]:
  """Which keys of ``loss`` the losses of a run do not use: one line each.

  Args:
    config: resolved.
    keys: that the user has set, with dots.
  """
  names = [config.loss.name] + ([config.warmup.loss] if config.warmup.steps else [])
  if any(":" in name for name in names):  # a loss of one's own may use any
    return []
  problems = []
  for key in keys:
    group, _, rest = key.partition(".")
    if group == "loss" and not any(_uses(name, rest.partition(".")[0]) for name in names):
      problems.append(f"{key} is not used by loss.name={config.loss.name}: leave it out, or choose a loss that uses it")
  return problems


def _uses(name: str, key: str) -> bool:
  """Whether a loss uses ``loss.KEY``, or the keys in that group."""
  if key == "name":
    return True
  if key in objectives.LOSSES or key == "custom":
    return key == name
  return name == "soprc" or (name == "ap" and key in ("tau1", "tau2", "tpr_gradient", "preset"))


def check(config: Any, *, imports: bool = True) -> list[str]:
  """What is wrong with a resolved config: one line each, naming the key, the value and what is allowed.

  Args:
    config: resolved.
    imports: whether a loss of one's own may be imported: not for a config that a folder has brought.
  """
  rules = rules_lib.Rules(config)
  problems, choice, number = rules.problems, rules.choice, rules.number
  choice("data.source", tuple(datasets.SOURCES))
  choice("data.augmentation", transforms.AUGMENTATIONS)
  choice("data.on_broken", pipeline.ON_BROKEN)
  choice("data.small_classes", sampler.SMALL_CLASS_POLICIES)
  choice("model.name", sorted(RESNETS))
  choice("model.stem", resnet.STEMS)
  choice("model.dtype", DTYPES)
  choice("model.stem_stride", (1, 2))
  for key in ("loss.name", "warmup.loss"):
    problem = objectives.name_problem(rules_lib.value_of(config, key), imports=imports)
    if problem:
      problems.append(f"{key} {problem}")
  choice("loss.v", ("carried", "batch"))
  choice("loss.initial_v", ("debiased", "uniform"))
  choice("loss.grid", interpolation.GRIDS)
  choice("loss.average_over", ("selected", "all"))
  choice("loss.pool", ("batch", "list"))
  choice("loss.prior.kind", objectives.PRIOR_KINDS)
  choice("loss.prior.shape", objectives.PRIOR_SHAPES)
  number("loss.prior.until", 0, 1, open_low=True)
  if config.warmup.loss in objectives.CARRIED:
    problems.append(
      f"warmup.loss must not carry a state of its own (as {', '.join(objectives.CARRIED)}); got {config.warmup.loss!r}"
    )
  choice("loss.auroc.surrogate", tuple(losses.auroc.SURROGATES))
  choice("optim.name", optimizers.OPTIMIZERS)
  choice("optim.schedule", optimizers.SCHEDULES)
  choice("train.on_nonfinite", nonfinite.POLICIES)
  number("train.max_skipped", 1)
  number("log.v_classes", 0)
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
  ks = config.eval.ks
  if not ks or min(ks) < 1 or max(ks) > rules_lib.LARGEST_COUNT or len(set(ks)) < len(ks):
    problems.append(f"eval.ks must be different numbers >= 1, one at least; got {shown(ks)}")
  for key, size, resize in (
    ("data.resize", config.data.image_size, config.data.resize if config.data.augmentation == "crop" else 0),
    ("eval.resize", config.eval.image_size, config.eval.resize),
  ):
    if resize and resize < size:
      problems.append(f"{key}, the shorter side before the crop, must be at least {size}, the crop; got {resize}")
  milestones = config.optim.milestones
  if list(milestones) != sorted(set(milestones)) or any(not 0 < step <= rules_lib.LARGEST_COUNT for step in milestones):
    problems.append(f"optim.milestones must be steps >= 1 that ascend; got {shown(milestones)}")
  size, per_class = config.train.batch_size, config.train.per_class
  if per_class < 2:
    problems.append(f"train.per_class must be at least 2, a query needs a positive; got {per_class}")
  elif size < 2 * per_class or size % per_class:
    lower = max(size // per_class, 2) * per_class
    problems.append(
      f"train.batch_size must be a multiple of train.per_class={per_class} with at least two classes, "
      f"e.g. {lower} or {lower + per_class}; got {size}"
    )
  problems += _microbatch_problems(config)
  # Whatever has no rule of its own above: no number is infinite, no count, size or seed negative, or too large.
  for key, value in rules_lib.leaves(config.to_dict()):
    if key.startswith("loss.custom.") or any(problem.startswith(f"{key} ") for problem in problems):
      continue
    if isinstance(value, float) and not math.isfinite(value):
      problems.append(f"{key} must be a finite number; got {value!r}")
    elif isinstance(value, int):
      number(key, 0, _AT_MOST.get(key, rules_lib.LARGEST_COUNT))
  return problems


def custom_problems(custom: dict[str, Any]) -> list[str]:
  """What is wrong with the options of a loss of one's own: anything that config.json cannot hold."""
  return [
    f"loss.custom.{key} must be a finite number, a text, True, False, None, or a tuple of such; got {shown(value)}"
    for key, value in rules_lib.leaves(custom)
    if not _is_plain(value)
  ]


def _is_plain(value: Any) -> bool:
  if isinstance(value, (tuple, list)):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _microbatch_problems(config: Any) -> list[str]:
  """What is wrong with ``train.microbatch``: whole microbatches, and none whose gradient is not that of the batch."""
  size, batch_size = config.train.microbatch, config.train.batch_size
  if size in (0, batch_size):
    return []
  if size < 0 or batch_size % size:
    fitting = [n for n in range(1, min(batch_size, _IMAGES) + 1) if batch_size % n == 0]
    near = sorted(sorted(fitting, key=lambda n: abs(n - size))[:3])
    return [
      f"train.microbatch must divide train.batch_size={batch_size}, e.g. {', '.join(map(str, near))}, or be 0; got {size}"
    ]
  phases = [("model.freeze_bn", config.model.freeze_bn, config.train.steps)]
  phases.append(("warmup.freeze_bn", config.warmup.freeze_bn, config.warmup.steps))
  return [
    f"train.microbatch must be 0 with {key}=False: batch norm in training mode takes its statistics over the whole batch, so that "
    f"the gradient by microbatches would be another one; got {size}. Freeze it (from a trained network, model.init_from)"
    for key, frozen, steps in phases
    if steps and not frozen
  ]
