"""Makes the splits of the data set that the config names."""

import functools

from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import (
  characters,
  features,
  glyphs,
  image_folder,
  label_sets,
  list_files,
  sources,
  tfds_source,
)

# Name in config.data.source -> what is read from config.data.root.
SOURCES = {
  "glyphs": "the embedded data set; root is the folder of its cache",
  "characters": "Han and Hangul characters in many typefaces; root is a folder of fonts",
  "folder": "a folder of images, one subfolder a class",
  "csv": "a CSV file with path,label or path,label,split",
  "features": "stored embeddings of any model with their classes, in one file",
  "sop": "Stanford Online Products, list files",
  "inaturalist": "iNaturalist 2018, retrieval lists of SmoothAP",
  "vehicle_id": "PKU VehicleID, list files",
  "tfds_sop": "Stanford Online Products, prepared by TensorFlow Datasets",
  "tfds_inaturalist": "iNaturalist 2018, prepared by TensorFlow Datasets, with the retrieval lists",
}
# Sources that `data.superclass` can name the superclasses of.
WITH_SUPERCLASSES = ("glyphs", "csv", "features", "sop")
Splits = dict[str, sources.Source]


def make_splits(config: ConfigDict) -> Splits:
  """Makes the splits ``train``, ``val`` and ``test`` of ``config.data``, which share no class.

  VehicleID also has ``test_medium`` and ``test_small``. If a data set has an official test split,
  ``val_share`` of its other classes form the validation split. They are drawn with ``split_seed``.
  A CSV file, or a file of stored embeddings, can define the splits. Other data sets are split by
  ``train_share`` and ``val_share``; the rest is the test split. With ``trainval`` the training
  split includes the validation classes, and there is no ``val``.

  With ``label_separator`` an image has several labels. Splits then share labels, and they are drawn
  image by image.

  Raises:
    ValueError: if the data are invalid; the message names the place.
    FileNotFoundError: if a folder or file is missing; the message says what to put where.
  """
  name, root = config.source, config.root
  if config.superclass and name not in WITH_SUPERCLASSES:
    raise ValueError(
      f"data.superclass must be empty with data.source={name}, which has no superclasses; got "
      f"{config.superclass!r}. It can name those of {', '.join(WITH_SUPERCLASSES)}"
    )
  if name == "glyphs":
    splits = _by_shares(glyphs.load(root or None, superclass=config.superclass), config)
  elif name == "characters":
    splits = _with_val(characters.load(root, characters.Size(**config.characters)), config)
  elif name == "folder":
    splits = _by_shares(image_folder.load(root, on_broken=config.on_broken), config)
  elif name in ("csv", "features"):
    load_csv = functools.partial(list_files.load_csv, on_broken=config.on_broken)
    load = load_csv if name == "csv" else features.load
    found: Splits = dict(load(root, superclass=config.superclass, rule=label_rule(config)))
    splits = _by_shares(found["all"], config) if "all" in found else _with_val(found, config)
  elif name in list_files.BENCHMARKS:
    options = {"on_broken": config.on_broken, "superclass": config.superclass}
    splits = _with_val(dict(list_files.load(name, root, **options)), config)
  elif name in tfds_source.DATA_SETS:
    train, test = tfds_source.load(name, root)
    splits = _with_val({"train": train, "test": test}, config)
  else:
    raise ValueError(f"data.source must be one of {', '.join(SOURCES)}; got {name!r}")
  if config.trainval:
    splits["train"] = sources.Joined([splits["train"], splits.pop("val")])
  _check(splits)
  return splits


def unit(config: ConfigDict) -> str:
  """Returns what the examples of ``config.data`` are called in the log: images or vectors."""
  return "vectors" if config.source == "features" else "images"


def label_rule(config: ConfigDict) -> label_sets.Rule | None:
  """Returns how several labels an image are written; None if ``config.data`` has one class each."""
  if not config.label_separator:
    return None
  return label_sets.Rule(config.label_separator, config.min_jaccard)


def _by_shares(source: sources.Source, config: ConfigDict) -> Splits:
  train, val = config.train_share, config.val_share
  if train + val >= 1:
    raise ValueError(
      f"data.train_share={train} + data.val_share={val} must be below 1: the rest of the classes "
      "is for test"
    )
  shares = {"train": train, "val": val, "test": 1.0 - train - val}
  return _subsets(source, shares, config.split_seed)


def _with_val(splits: Splits, config: ConfigDict) -> Splits:
  """Adds a validation split, drawn from the training classes, unless the data have one."""
  if "val" in splits:
    return splits
  if config.val_share >= 1:
    raise ValueError(
      f"data.val_share must be below 1, got {config.val_share}: no class would train"
    )
  rest = _subsets(
    splits["train"], {"train": 1.0 - config.val_share, "val": config.val_share}, config.split_seed
  )
  return splits | rest


def _subsets(source: sources.Source, shares: dict[str, float], seed: int) -> Splits:
  # Labels cannot be split where an image has several: there each image is on its own.
  labels = source.labels if sources.label_sets(source) is None else np.arange(len(source))
  positions = sources.split_by_class(labels, shares, seed)
  return {name: sources.Subset(source, where) for name, where in positions.items()}


def _check(splits: Splits) -> None:
  """Raises a ValueError for a split in which no query has a positive, or no query a negative."""
  total = len(np.unique(np.concatenate([source.labels for source in splits.values()])))
  for name, source in splits.items():
    if sources.label_sets(source) is not None:
      _check_label_sets(name, source)
      continue
    counts = np.unique(source.labels, return_counts=True)[1]
    if counts.max(initial=0) < 2:
      raise ValueError(
        f"every class of split {name!r} has one image, so there is nothing to retrieve: add images "
        "to the classes"
      )
    if len(counts) < 2:
      raise ValueError(
        f"split {name!r} has one class of {total} in the data, so no query has a negative. Add "
        "classes (the default shares need 32), give the split more of them (data.train_share, "
        "data.val_share), or for val set data.trainval=True, which needs no val"
      )


def _check_label_sets(name: str, source: sources.Source) -> None:
  """Raises a ValueError as `_check`, where an image has several labels."""
  sets = sources.label_sets(source)
  assert sets is not None
  has_positive = False
  for pattern in np.unique(source.labels):
    relevant = int(sets.count(np.array([pattern]), source.labels)[0])
    has_positive |= relevant > 1
    if 1 < relevant < len(source):
      return
  problem = (
    "no two images that are relevant to each other, so there is nothing to retrieve: add images of "
    "the same labels, give the split more images (data.train_share, data.val_share), or lower "
    "data.min_jaccard"
  )
  if has_positive:
    problem = (
      "no query with a negative, since all relevant images are relevant to all: add images with "
      "other labels, or raise data.min_jaccard"
    )
  raise ValueError(f"split {name!r} of {len(source)} images has {problem}")
