"""Checks of a config that concern several keys at once."""

import math
from typing import Any

from soprc_jax._internal.strings import shown
from soprc_jax.models import HEADS, RESNETS, adapter
from soprc_jax.training import config_key, config_table, objectives, vit_keys


def joint_problems(config: Any, *, imports: bool) -> list[str]:
  """Returns a line for each combination of values, or name of a loss, that does not work.

  Args:
    config: resolved.
    imports: whether a custom loss may be imported. False for a config that was read from a folder.
  """
  names = {key: config_key.value_of(config, key) for key in ("loss.name", "warmup.loss")}
  told = {key: objectives.name_problem(name, imports=imports) for key, name in names.items()}
  problems = [f"{key} {problem}" for key, problem in told.items() if problem]
  if config.warmup.loss in objectives.CARRIED:
    problems.append(
      f"warmup.loss must have no carried state (as {', '.join(objectives.CARRIED)} have); got "
      f"{config.warmup.loss!r}"
    )
  if ":" in config.model.name:
    problem = adapter.name_problem(config.model.name, imports=imports)
    problems += [f"model.name {problem}"] if problem else []
  loss = config.loss
  if loss.prior.kind in ("scaled", "constant") and loss.prior.value == 0:
    problems.append(
      f"loss.prior.value must be > 0 with loss.prior.kind={loss.prior.kind}; got "
      f"{loss.prior.value!r}"
    )
  if loss.superclass_gain and (loss.name != "soprc" or not config.data.superclass):
    problems.append(
      "loss.superclass_gain must be 0 without loss.name=soprc and data.superclass, which names the "
      f"superclasses; got {loss.superclass_gain!r} with loss.name={loss.name}"
    )
  if (config.data.source == "features") != (config.model.name in HEADS):
    wanted = HEADS if config.data.source == "features" else config_table.BACKBONES
    problems.append(
      f"model.name must be one of {', '.join(wanted)} with data.source={config.data.source}; got "
      f"{config.model.name!r}"
    )
  if config.data.source == "features" and config.data.augmentation != "none":
    problems.append(
      "data.augmentation must be none with data.source=features, which are not images; got "
      f"{config.data.augmentation!r}"
    )
  problems += _several_labels_problems(config)
  if config.model.lora.rank and config.optim.train_only:
    problems.append(
      "optim.train_only must be empty with model.lora.rank > 0, which trains the adapters and the "
      f"head only; got {shown(config.optim.train_only)}"
    )
  if config.optim.layer_decay != 1 and config.model.name in HEADS:
    problems.append(
      f"optim.layer_decay must be 1 with model.name={config.model.name}, which has no layers; got "
      f"{config.optim.layer_decay!r}"
    )
  return problems


def _several_labels_problems(config: Any) -> list[str]:
  """Returns a line for each key that does not work where an image has several labels."""
  data, separator = config.data, config.data.label_separator
  if not separator:
    return (
      [f"data.min_jaccard must be 0 without data.label_separator; got {data.min_jaccard!r}"]
      if data.min_jaccard
      else []
    )
  problems = []
  if data.source not in config_table.OF_TABLES[1]:
    problems.append(
      f"data.label_separator must be empty with data.source={data.source}, where an image has one "
      f"class; got {shown(separator)}. Choose data.source=csv or features"
    )
  if data.sampler != "random":
    problems.append(
      "data.sampler must be random with data.label_separator, since similar labels have images in "
      f"common; got {data.sampler!r}"
    )
  if data.superclass:
    problems.append(
      "data.superclass must be empty with data.label_separator, since a set of labels has no "
      f"superclass; got {shown(data.superclass)}"
    )
  if config.eval.one_per_class:
    problems.append(
      "eval.one_per_class must be 0 with data.label_separator, since an image of one label is also "
      f"one of others; got {config.eval.one_per_class!r}"
    )
  losses_of = {"loss.name": config.loss.name}
  if config.warmup.steps:
    losses_of["warmup.loss"] = config.warmup.loss
  for key, name in losses_of.items():
    problem = objectives.several_labels_problem(name)
    problems += [f"{key}={problem}"] if problem else []
  if "recall_at_k" in losses_of.values() and config.loss.recall_at_k.mixup:
    problems.append(
      "loss.recall_at_k.mixup must be False with data.label_separator: a virtual image, mixed from "
      "two images of a class, has no label set"
    )
  return problems


def size_problems(config: Any) -> list[str]:
  """Returns a line for each combination of sizes that does not work; no key is open."""
  problems = []
  loss, size, per_class = config.loss, config.train.batch_size, config.train.per_class
  if loss.name in ("xbm", "blackbox") and loss[loss.name].memory_size < size:
    problems.append(
      f"loss.{loss.name}.memory_size must be >= train.batch_size={size}; got "
      f"{shown(loss[loss.name].memory_size)}"
    )
  if config.model.name == "residual" and config.model.embedding_dim != config.model.features:
    problems.append(
      "model.embedding_dim must be that of the features with model.name=residual, "
      f"{config.model.features}; got {config.model.embedding_dim}"
    )
  if config.model.name in HEADS and not config.model.embedding_dim:
    problems.append(
      f"model.embedding_dim must be at least 1 with model.name={config.model.name}; got 0"
    )
  problems += vit_keys.problems(config)
  if config.train.steps + config.warmup.steps < 1:
    problems.append("train.steps + warmup.steps must be at least 1")
  for key, side, resize in (
    (
      "data.resize",
      config.data.image_size,
      config.data.resize if config.data.augmentation == "crop" else math.inf,
    ),
    ("eval.resize", config.eval.image_size, config.eval.resize or math.inf),
  ):
    if resize < side:
      problems.append(
        f"{key}, the shorter side before the crop, must be at least {side}, the crop; got {resize}"
      )
  if per_class >= 2 and (size < 2 * per_class or size % per_class):
    lower = max(size // per_class, 2) * per_class
    problems.append(
      f"train.batch_size must be a multiple of train.per_class={per_class} with at least two "
      f"classes, e.g. {lower} or {lower + per_class}; got {size}"
    )
  return problems + _microbatch_problems(config)


def custom_problems(custom: dict[str, Any]) -> list[str]:
  """Returns a line for each option of a custom loss that config.json cannot hold."""
  return [
    f"loss.custom.{key} must be a finite number, a text, True, False, None, or a tuple of these; "
    f"got {shown(value)}"
    for key, value in config_key.leaves(custom)
    if not _is_plain(value)
  ]


def _is_plain(value: Any) -> bool:
  if isinstance(value, (tuple, list)):
    return all(map(_is_plain, value))
  return (
    value is None
    or isinstance(value, (str, int))
    or (isinstance(value, float) and math.isfinite(value))
  )


def _microbatch_problems(config: Any) -> list[str]:
  """Returns what is wrong with ``train.microbatch``.

  Microbatches must divide the batch, and their gradient must be that of the whole batch.
  """
  size, batch_size = config.train.microbatch, config.train.batch_size
  if size in (0, batch_size):
    return []
  if size < 0 or batch_size % size:
    fitting = [n for n in range(1, min(batch_size, config_table.IMAGES) + 1) if batch_size % n == 0]
    near = sorted(sorted(fitting, key=lambda n: abs(n - size))[:3])
    return [
      f"train.microbatch must divide train.batch_size={batch_size}, e.g. "
      f"{', '.join(map(str, near))}, or be 0; got {size}"
    ]
  phases = [("model.freeze_bn", config.model.freeze_bn, config.train.steps)]
  phases.append(("warmup.freeze_bn", config.warmup.freeze_bn, config.warmup.steps))
  return [
    f"train.microbatch must be 0 with {key}=False: batch norm in training mode takes its "
    "statistics over the whole batch, so microbatches would change the gradient; got "
    f"{size}. Freeze it (from a trained model, model.init_from)"
    for key, frozen, steps in phases
    if steps and not frozen and config.model.name in RESNETS  # the others have no batch norm
  ]
