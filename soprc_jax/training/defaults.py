"""Chooses the keys of a config that follow the data: widths, batch, image size, learning rate.

A config file leaves these keys open (`config.leave_open`), as ``configs/folder.py`` does. Each rule
is one pure function, and its numbers are the constants below.
"""

import math
from typing import Any, NamedTuple

from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import datasets, decoding, sources
from soprc_jax.models import HEADS
from soprc_jax.models.vit_published import Published
from soprc_jax.training import config as config_lib
from soprc_jax.training import config_key, vit_keys, vit_start

# The keys of the rules: for images, for a vision transformer, and for stored embeddings.
KEYS = (
  "train.per_class",
  "data.image_size",
  "eval.image_size",
  "train.batch_size",
  "optim.learning_rate",
)
VIT_KEYS = (*(key.name for key in vit_keys.KEYS), "eval.interpolation", "eval.resize")
# Those of ``model.vit`` without which the weights compute something else, and that no shape tells.
_OF_THE_WEIGHTS = ("heads", "activation", "rope", "epsilon", "antialias")
FEATURES_KEYS = (
  "model.features",
  "model.embedding_dim",
  "train.per_class",
  "train.batch_size",
  "optim.learning_rate",
)
# Images per class in a batch: at most, and at least.
PER_CLASS, LEAST_PER_CLASS = 4, 2
# Images per batch: of images of up to SMALL_SIDE pixels, and of larger ones.
SMALL_SIDE, SMALL_BATCH, BATCH = 64, 256, 64
# Learning rate for a batch of RATE_BATCH images, by optimizer and by the weights at the start.
RATE_BATCH = 256
_RANDOM, _CONV3, _PRETRAINED = "random weights", "random weights of conv3", "pretrained weights"
_HEAD = "a head on stored embeddings"
_VIT, _PRETRAINED_VIT = "random weights of vit", "pretrained weights of vit"
RATES = {
  ("adam", _RANDOM): 4e-3,
  ("adam", _CONV3): 8e-3,
  ("adam", _PRETRAINED): 2e-4,
  ("adam", _HEAD): 1e-3,
  ("adam", _VIT): 1e-3,
  ("adam", _PRETRAINED_VIT): 4e-5,
  ("sgd", _RANDOM): 0.2,
  ("sgd", _CONV3): 0.2,
  ("sgd", _PRETRAINED): 0.02,
  ("sgd", _HEAD): 0.2,
  ("sgd", _VIT): 0.02,
  ("sgd", _PRETRAINED_VIT): 2e-3,
}
# Image side in pixels: a multiple of SIDE_STEP, in the range of the model: conv3, or its stem.
SIDE_STEP = 16
SIDES = {"conv3": (32, 32), "small": (32, 64), "imagenet": (64, 224)}
# Largest image side of a vision transformer in training, if it was published for larger images, and
# the range of the sides for random weights.
LARGEST_VIT_SIDE, VIT_SIDES = 256, (32, 224)
# Largest embedding of a head.
EMBEDDING_DIM = 512
# Number of images whose size is read.
SAMPLE = 64


class Choice(NamedTuple):
  """A chosen value of a key, and the reason for it: a phrase without a full stop."""

  value: Any
  reason: str


def choose(
  config: ConfigDict, splits: datasets.Splits, *, num_devices: int = 1
) -> dict[str, Choice]:
  """Chooses a value for each open key of `KEYS`, `VIT_KEYS` and `FEATURES_KEYS`.

  The choice is a function of the config, of the labels and sizes of the training images, and of the
  number of devices. Other keys keep their values, and the rules take them into account.

  Args:
    config: resolved.
    splits: splits of ``config.data``.
    num_devices: number of devices, which must divide the batch.

  Returns:
    Dotted key -> choice.

  Raises:
    decoding.BrokenImageError: no image of the sample is readable.
    ValueError: the weights of ``model.init_from`` cannot be read, or are of another model.
  """
  still_open = set(config_lib.open_keys(config)) & {*KEYS, *VIT_KEYS, *FEATURES_KEYS}
  found: dict[str, Choice] = {}

  def value(name: str, choice: Choice) -> Any:
    """Returns the value of a key, after adding the choice if the key is open."""
    if name not in still_open:
      return config_key.value_of(config, name)
    found[name] = choice
    return choice.value

  train = splits["train"]
  width = value("model.features", Choice(sources.width(train), "the width of the vectors"))
  value("model.embedding_dim", embedding_dim_rule(config.model.name, width))
  counts = sources.class_sizes(train)
  per_class = value("train.per_class", per_class_rule(counts, config.train.batch_size))
  side = config.data.image_size
  published = _published(config, still_open)
  if "data.image_size" in still_open:
    side = value("data.image_size", _side_rule(config, train, published))
  for name, choice in vit_rules(config, published, side).items():
    value(name, choice)
  eval_side = value("eval.image_size", Choice(side, "as data.image_size"))
  value("eval.resize", resize_rule(published, eval_side))
  if config.data.small_classes == "drop":
    counts = counts[counts >= per_class]
  unit = math.lcm(per_class, num_devices, config.train.microbatch or 1)
  side = 0 if sources.width(train) else side
  batch_size = value("train.batch_size", batch_size_rule(len(counts), per_class, side, unit))
  value("optim.learning_rate", learning_rate_rule(config.optim.name, start(config), batch_size))
  return found


def _published(config: ConfigDict, still_open: set[str]) -> Published | None:
  """Returns what is known of the vision transformer of ``model.init_from``, if keys follow it.

  Raises:
    ValueError: the weights are those of another model.
  """
  start = config.model.init_from
  if config.model.name != "vit" or not start or not still_open.intersection(VIT_KEYS):
    return None
  found = vit_start.find(start)
  if found is None:
    raise ValueError(
      f"model.init_from={start} has no vision transformer, which model.name=vit is: choose another "
      "model.name, or its weights"
    )
  for name in _OF_THE_WEIGHTS:
    given, own = config.model.vit[name], getattr(found.architecture, name)
    if f"model.vit.{name}" not in still_open and given != own:
      raise ValueError(
        f"model.vit.{name}={given} must be {own}, that of the weights in model.init_from={start}: "
        "leave it out"
      )
  return found


def _side_rule(config: ConfigDict, train: sources.Source, published: Published | None) -> Choice:
  """Chooses the image side, by the weights or by the images."""
  if published is not None:
    return published_side_rule(published)
  if config.model.name == "vit":
    return vit_side_rule(
      short_sides(train), config.model.vit.patch or vit_start.standard(config).patch
    )
  return image_size_rule(short_sides(train), model_kind(config))


def published_side_rule(published: Published) -> Choice:
  """Chooses the side that a vision transformer was published for, at most `LARGEST_VIT_SIDE`."""
  native, patch = published.image_size, published.architecture.patch
  if native <= LARGEST_VIT_SIDE:
    return Choice(native, "that of the weights in model.init_from")
  return Choice(
    max(VIT_SIDES[1] // patch, 1) * patch,
    f"the weights in model.init_from take {native} pixels, which is slow; whole patches of {patch}",
  )


def resize_rule(published: Published | None, side: int) -> Choice:
  """Chooses the shorter side before the crop of evaluation: the share of the published one."""
  if published is None:
    return Choice(0, "as eval.image_size")
  resize, native = published.resize, published.image_size
  value = scaled_resize(resize, native, side)
  return Choice(value, f"the weights take {native} pixels of {resize}")


def scaled_resize(resize: int, native: int, side: int) -> int:
  """Returns the shorter side before a crop of ``side``, for that of a crop of ``native``."""
  return round(resize * side / native)


def vit_side_rule(sides: np.ndarray, patch: int) -> Choice:
  """Chooses the median shorter side in the range `VIT_SIDES`, rounded to patches.

  >>> vit_side_rule(np.array([100]), 16).value
  96
  """
  median, (low, high) = float(np.median(sides)), VIT_SIDES
  side = max(round(min(max(median, low), high) / patch), 1) * patch
  return Choice(
    side,
    f"the median shorter side of {len(sides)} images is {median:g} pixels; {low} to {high}, in "
    f"whole patches of {patch}",
  )


def vit_rules(config: ConfigDict, published: Published | None, side: int) -> dict[str, Choice]:
  """Chooses the keys of ``model.vit``: those of the weights, or ViT-S/16 for images of a side."""
  if published is not None:
    arch, reason = published.architecture, "as in the weights in model.init_from"
  else:
    arch = vit_start.standard(config)
    arch, reason = arch._replace(image_size=side), f"the standard for a width of {arch.width}"
  interpolation = published.interpolation if published else "bilinear"
  return {f"model.vit.{name}": Choice(one, reason) for name, one in arch._asdict().items()} | {
    "eval.interpolation": Choice(interpolation, reason)
  }


def short_sides(source: sources.Source) -> np.ndarray:
  """Returns the shorter sides in pixels of up to `SAMPLE` images, evenly spaced in the source.

  Unreadable images are left out; `data.on_broken` decides what happens when a batch has one.

  Raises:
    decoding.BrokenImageError: none of the images is readable.
  """
  sides, broken = [], None
  for position in np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).astype(int):
    try:
      sides.append(min(decoding.as_picture(source[int(position)].image).size))
    except decoding.BrokenImageError as error:
      broken = error
  if broken is not None and not sides:
    raise broken
  return np.array(sides)


def embedding_dim_rule(head: str, width: int) -> Choice:
  """Chooses the width of the embedding of a head on features of a width.

  >>> embedding_dim_rule("linear", 768).value
  512
  """
  if head == "residual":
    return Choice(width, "the width of the features, to which residual adds")
  return Choice(min(width, EMBEDDING_DIM), f"the features have {width}; at most {EMBEDDING_DIM}")


def per_class_rule(counts: np.ndarray, batch_size: int | None = None) -> Choice:
  """Chooses `PER_CLASS`, or the median class size if it is smaller.

  Args:
    counts: ``[C]`` images of each training class; of each label, if an image has several.
    batch_size: given batch, which the value then divides if possible; None: open.

  >>> per_class_rule(np.array([3, 3, 9]))
  Choice(value=3, reason='the median training class has 3 images')
  """
  median = int(np.median(counts))
  most = max(min(PER_CLASS, median), LEAST_PER_CLASS)
  why = f"the median training class has {median} images"
  for count in range(most, LEAST_PER_CLASS - 1, -1):
    if batch_size and batch_size % count == 0:
      return Choice(count, f"{why}, and it divides train.batch_size={batch_size}")
  return Choice(most, why)


def model_kind(config: ConfigDict) -> str:
  """Returns the key of `SIDES` of a model."""
  return "conv3" if config.model.name == "conv3" else str(config.model.stem)


def image_size_rule(sides: np.ndarray, kind: str) -> Choice:
  """Chooses the median shorter side, rounded to `SIDE_STEP`, in the range of the model.

  Args:
    sides: ``[n]`` pixels.
    kind: see `model_kind`.
  """
  median, (low, high) = float(np.median(sides)), SIDES[kind]
  return Choice(
    min(max(round(median / SIDE_STEP) * SIDE_STEP, low), high),
    f"the median shorter side of {len(sides)} images is {median:g} pixels; {kind} takes "
    f"{low} to {high}",
  )


def batch_size_rule(num_classes: int, per_class: int, side: int, unit: int) -> Choice:
  """Chooses a batch by the image size, in which each class occurs at most once.

  Args:
    num_classes: training classes.
    per_class: images of a class in the batch.
    side: image side in pixels; 0 for vectors.
    unit: number that must divide the batch, a multiple of ``per_class``.

  >>> batch_size_rule(20, 4, 64, 4).value
  80
  """
  wanted, most = SMALL_BATCH if side <= SMALL_SIDE else BATCH, num_classes * per_class
  least = -(-2 * per_class // unit)  # two classes
  return Choice(
    max(min(wanted, most) // unit, least) * unit,
    f"{num_classes} training classes with {per_class} images each allow {most}; at most {wanted} "
    + (f"for images of {side} pixels" if side else "vectors"),
  )


def start(config: ConfigDict) -> str:
  """Returns the weights at the start, as in `RATES`."""
  if config.model.name in HEADS:
    return _HEAD
  if config.model.name == "vit":
    return _PRETRAINED_VIT if config.model.init_from else _VIT
  if config.model.init_from or config.model.freeze_bn:
    return _PRETRAINED
  return _CONV3 if config.model.name == "conv3" else _RANDOM


def learning_rate_rule(optimizer: str, weights: str, batch_size: int) -> Choice:
  """Chooses a learning rate that grows with the square root of the batch.

  >>> learning_rate_rule("adam", "random weights", 64).value
  0.002
  """
  rate = RATES[optimizer, weights]
  return Choice(
    float(f"{rate * math.sqrt(batch_size / RATE_BATCH):.3g}"),
    f"{rate:g} * sqrt({batch_size} / {RATE_BATCH}) for {optimizer} from {weights}",
  )
