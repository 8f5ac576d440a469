"""Loads and splits tables with several labels an example, or with a long tail of classes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from soprc_jax._internal import checks
from soprc_jax.data import glyph_labels, glyphs, plain_characters, rendered, tabular, yeast

_SPLIT_KEY = 0x3A9E
THIRDS = ("many", "medium", "few")


class Table(NamedTuple):
  """Holds a data set with K labels, of which an example can have several.

  Attributes:
    features: ``[N, D]`` float32.
    labels: ``[N, K]`` bool.
    names: names of the K labels.
    groups: ``[N]`` integers. Examples of one group are in one split.
  """

  features: np.ndarray
  labels: np.ndarray
  names: tuple[str, ...]
  groups: np.ndarray


def load(name: str, *, root: str = "") -> Table:
  """Loads a data set by its name.

  Args:
    name: key of `DATA_SETS`.
    root: folder of the unpacked package for ``yeast``, of fonts for ``character_labels`` and
      ``character_classes`` (empty: the fonts of the system). The other data sets do not use it.

  Raises:
    FileNotFoundError: there is no such folder or file.
    ValueError: the name is unknown, or a package is missing.
  """
  if name not in DATA_SETS:
    raise ValueError(f"data.name must be one of {', '.join(DATA_SETS)}; got {name!r}")
  return DATA_SETS[name](root)


def split(
  table: Table, *, val_share: float, test_share: float, seed: int, split_seed: int = 0
) -> tabular.Splits:
  """Splits a table at random by its groups; ``split_seed`` alone draws the test split.

  Features are centered by the means of the training examples, and divided by one number, the root
  mean square of the centered features.

  Args:
    table: data set.
    val_share: share of the groups in the validation split, in (0, 1).
    test_share: the same for the test split; the rest is the training split.
    seed: integer >= 0 of the division into train and validation.
    split_seed: integer >= 0 of the test split.

  Raises:
    ValueError: the shares leave a split without a group.
  """
  groups = np.unique(table.groups)
  val, test = (round(len(groups) * share) for share in (val_share, test_share))
  if min(val, test, len(groups) - val - test) < 1:
    raise ValueError(
      "data.val_share and data.test_share must leave groups of examples for each split, got "
      f"{val_share:g} and {test_share:g} of {len(groups)} groups"
    )
  order = np.random.default_rng([_SPLIT_KEY, split_seed]).permutation(groups)
  rest = np.random.default_rng([_SPLIT_KEY, split_seed, seed]).permutation(order[test:])
  parts = {"train": rest[val:], "val": rest[:val], "test": order[:test]}
  return _splits(
    table, {name: np.flatnonzero(np.isin(table.groups, own)) for name, own in parts.items()}
  )


def long_tailed(
  table: Table,
  *,
  num_classes: int,
  head: int,
  tail: int,
  val_images: int,
  test_images: int,
  seed: int,
  split_seed: int = 0,
) -> tabular.Splits:
  """Splits a table of classes so that the numbers of training examples follow a power law.

  Validation and test stay balanced. ``split_seed`` alone draws the classes, their order and the
  test split. ``seed`` draws the training and validation examples from the rest. Features are
  scaled as in `split`.

  Args:
    table: data set of which each example has one label.
    num_classes: number of classes K; the labels of the splits are ``[n, K]``, head class first.
    head: training examples of the first class.
    tail: training examples of the last class, see `class_sizes`.
    val_images: validation examples of each class, >= 1.
    test_images: test examples of each class, >= 1.
    seed: integer >= 0 of the division into train and validation.
    split_seed: integer >= 0 of the classes and of the test split.

  Raises:
    ValueError: an example has not one label, or the table has too few classes with enough examples.
  """
  if (table.labels.sum(axis=1) != 1).any():
    raise ValueError(
      "data.long_tail.head > 0 needs a data set with one label an example, such as glyph_classes"
    )
  for name, count in (
    ("data.long_tail.val_images", val_images),
    ("data.long_tail.test_images", test_images),
  ):
    checks.check_count(name, count)
  counts, needed = table.labels.sum(axis=0), head + val_images + test_images
  enough = np.flatnonzero(counts >= needed)
  if not 2 <= num_classes <= len(enough):
    raise ValueError(
      f"data.long_tail.num_classes={num_classes} must be at least 2, and {len(enough)} classes "
      f"have the {needed} examples of head + val_images + test_images: lower one of these keys of "
      "data.long_tail"
    )
  rng = np.random.default_rng([_SPLIT_KEY, split_seed])
  chosen = rng.permutation(enough)[:num_classes]
  again = np.random.default_rng([_SPLIT_KEY, split_seed, seed])
  rows: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
  for label, size in zip(chosen.tolist(), class_sizes(num_classes, head, tail).tolist()):
    own = rng.permutation(np.flatnonzero(table.labels[:, label]))
    rest = again.permutation(own[test_images:])
    rows["test"].append(own[:test_images])
    rows["val"].append(rest[:val_images])
    rows["train"].append(rest[val_images : val_images + size])
  table = table._replace(
    labels=table.labels[:, chosen], names=tuple(table.names[label] for label in chosen)
  )
  return _splits(table, {name: np.sort(np.concatenate(own)) for name, own in rows.items()})


def class_sizes(num_classes: int, head: int, tail: int) -> np.ndarray:
  """Returns numbers of examples that fall from ``head`` to ``tail`` by a power law of the rank.

  Raises:
    ValueError: ``head`` or ``tail`` is not an integer with 1 <= tail <= head.

  >>> class_sizes(5, 100, 4)
  array([100,  25,  11,   6,   4])
  """
  checks.check_count("data.long_tail.tail", tail)
  checks.check_count("data.long_tail.head", head, low=tail)
  exponent = np.log(head / tail) / np.log(num_classes)
  return np.rint(head * np.arange(1, num_classes + 1) ** -exponent).astype(np.int64)


def thirds(counts: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the classes of each third by frequency, ``many``, ``medium`` and ``few``.

  Args:
    counts: ``[K]`` numbers of positives. Classes of the same number keep their order.
  """
  order = np.argsort(-np.asarray(counts), kind="stable")
  return dict(zip(THIRDS, map(np.sort, np.array_split(order, 3)), strict=True))


def _splits(table: Table, rows: Mapping[str, np.ndarray]) -> tabular.Splits:
  train = table.features[rows["train"]].astype(np.float64)
  mean = train.mean(axis=0)
  scale = max(float(np.sqrt(((train - mean) ** 2).mean())), 1e-30)

  def part(own: np.ndarray) -> tabular.Part:
    features = ((table.features[own] - mean) / scale).astype(np.float32)
    return tabular.Part(features, table.labels[own].astype(np.int32), own)

  features = tuple(f"x{number}" for number in range(table.features.shape[1]))
  return tabular.Splits(
    part(rows["train"]), part(rows["val"]), part(rows["test"]), features, table.names
  )


def _yeast(root: str) -> Table:
  features, labels, names = yeast.load(root)
  return Table(features, labels, names, np.arange(len(labels)))


def _of_structure(images: rendered.Rendered) -> Table:
  """Returns images with structural labels; the images of a character are a group."""
  labels, names = glyph_labels.labels(images.labels, images.ids)
  return Table(_pixels(images.images), labels, names, images.labels)


def _of_classes(images: rendered.Rendered) -> Table:
  """Returns images with their character as the only label."""
  codes = np.unique(images.labels)
  names = tuple(f"U+{code:04X}" for code in codes.tolist())
  return Table(
    _pixels(images.images), images.labels[:, None] == codes, names, np.arange(len(images))
  )


def _pixels(images: np.ndarray, side: int = 16) -> np.ndarray:
  """Returns ``[N, side * side]`` pixels in [0, 1], means of squares of the images ``[N, S, S]``."""
  count, block = len(images), images.shape[1] // side
  squares = images.reshape(count, side, block, side, block)
  return (squares.mean(axis=(2, 4)) / 255).reshape(count, -1).astype(np.float32)


# Names of the data sets that ``root`` is for.
ROOTED = ("yeast", "character_labels", "character_classes")
# Name -> function of the folder.
DATA_SETS: Mapping[str, Callable[[str], Table]] = {
  "yeast": _yeast,
  "glyph_labels": lambda _: _of_structure(glyphs.load()),
  "glyph_classes": lambda _: _of_classes(glyphs.load()),
  "character_labels": lambda root: _of_structure(plain_characters.load(root)),
  "character_classes": lambda root: _of_classes(plain_characters.load(root)),
}
