"""Converts weights, and loads them as a model that embeds images without training."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax.models import pretrained
from soprc_jax.models.vit_published import Published
from soprc_jax.training import build, checkpoints, defaults, vit_start
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)

# Number of outputs of an ImageNet classifier. Its logits are not embeddings.
_IMAGENET_CLASSES = 1000
# Groups of a given config that count; the model is that of the weights.
_GIVEN = ("data", "eval", "log")


def is_converted(folder: Path) -> bool:
  """Returns whether a folder is the output of ``soprc convert-weights`` and not that of a run."""
  return (folder / checkpoints.VARIABLES).is_dir() and not (folder / workdir_lib.CONFIG).exists()


def write(source: str, folder: Path) -> str:
  """Writes the weights of a file as a checkpoint that needs no other package.

  Args:
    source: see `pretrained.read`.
    folder: folder of the checkpoint.

  Returns:
    The ``model.name`` of the weights.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it cannot be read, or contains no known model.
  """
  variables = pretrained.load(source)
  vit = pretrained.vit_of(variables, source)
  name = "vit" if vit else pretrained.architecture(variables, source=source)
  checkpoints.save_variables(folder, variables, vit_start.description(vit) if vit else None)
  return name


def load(folder: Path, config: Any = None) -> tuple[Any, dict[str, Any]]:
  """Loads the config and the variables of `checkpoints.save_variables`.

  A vision transformer embeds images by its features. So does a ResNet without a head, or whose head
  is the ImageNet classifier.

  Args:
    folder: output of ``soprc convert-weights``.
    config: resolved config with the data, image size and batch size to use. Its model is replaced
      by that of the folder, and an open image size or interpolation by that of the weights. None
      takes the defaults.

  Returns:
    The resolved config, and ``{"params", "batch_stats"}``.

  Raises:
    ValueError: the files are corrupt, or contain no known model.
  """
  variables = checkpoints.load_variables(folder)
  published = vit_start.stored_description(folder)
  made = config_lib.default_config()
  if published is None:
    name, variables, width = _resnet(variables, folder)
    made.model.update({"name": name, "embedding_dim": width})
    what = f"their head of {width} outputs" if width else "the features of the backbone"
  else:
    made.model.update({"name": "vit", "embedding_dim": 0, "vit": published.architecture._asdict()})
    made.eval.update({name: getattr(published, name) for name in Published._fields[1:]})
    what = f"its pooled features, from {published.image_size} pixels or the given eval.image_size"
  if config is not None:
    _take(made, config)
  try:
    made = config_lib.resolve(made)
    if published is not None:
      pretrained.fit(variables, build.abstract_network(made), source=str(folder))
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error
  _log.info("Converted weights of %s: images are embedded by %s.", made.model.name, what)
  return made, variables


def _take(made: Any, given: Any) -> None:
  """Takes the data, the sizes of evaluation and the log from a given config, in place."""
  still_open = config_lib.open_keys(given)
  for group in _GIVEN:
    values = {name: one for name, one in given[group].to_dict().items() if one is not None}
    if group == "eval" and "eval.image_size" in still_open:
      values.pop("resize", None)
    elif group == "eval" and "eval.resize" in still_open:
      own = made.eval
      values["resize"] = defaults.scaled_resize(own.resize, own.image_size, values["image_size"])
    made[group].update(values)


def _resnet(variables: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], int]:
  """Returns name, variables and width of the head of a ResNet; 0 without a head."""
  name = pretrained.architecture(variables, source=str(folder))
  width = _head_width(variables["params"].get("head"), folder)
  if width not in (0, _IMAGENET_CLASSES):
    return name, variables, width
  params = {key: value for key, value in variables["params"].items() if key != "head"}
  return name, {**variables, "params": params}, 0


def _head_width(head: Any, folder: Path) -> int:
  """Returns the number of outputs of a linear head; 0 without a head."""
  if head is None:
    return 0
  shapes = {name: (np.shape(array), np.asarray(array).dtype.kind) for name, array in head.items()}
  match shapes:
    case {"kernel": ((_, width), "f"), "bias": ((other,), "f")} if width == other:
      return int(width)
  raise ValueError(
    f"{folder}: the head of the weights must have a kernel [features, D] and a bias [D] of floats, "
    f"got { {name: list(shape) for name, (shape, _) in shapes.items()} }: convert them without it"
  )
