"""Defines data sets as random-access sources of labeled images, and views of them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from soprc_jax.data import decoding
from soprc_jax.data.label_sets import LabelSets


class Example(NamedTuple):
  """Holds one image and its class.

  Attributes:
    image: ``[H, W, 3]`` uint8 RGB, upright; or an image file, or its content, see
      `decoding.as_picture`; or the vector ``[F]`` of stored embeddings, see `features`.
    label: class, any integer; of an image with several labels its pattern, see `label_sets`.
    id: name of the image in messages and lists, unique in its source.
    class_name: displayed name of the class; empty if the label is displayed.
  """

  image: np.ndarray | decoding.Encoded | decoding.Stored
  label: int
  id: str
  class_name: str = ""

  @property
  def shown_class(self) -> str:
    """The displayed name of the class, or its label if it has no name."""
    return self.class_name or str(self.label)


class Source(Protocol):
  """Gives random access to examples, with all labels known without reading an image."""

  @property
  def labels(self) -> np.ndarray:
    """The ``[N]`` int64 labels, in the order of the source."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Example: ...


class Subset:
  """Selects the examples of a source at the given positions, in that order."""

  def __init__(self, source: Source, positions: Sequence[int] | np.ndarray):
    self._source = source
    self.positions = np.asarray(positions, np.int64)
    if self.positions.size and not (
      self.positions.min() >= 0 and self.positions.max() < len(source)
    ):
      raise IndexError(
        f"positions must lie in [0, {len(source)}), got up to {self.positions.max()}"
      )
    self.labels = source.labels[self.positions]
    self.class_names = class_names(source)
    self.superclasses = superclasses(source)
    self.label_sets = label_sets(source)
    self.width = width(source)

  @property
  def ids(self) -> list[str]:
    everything = ids(self._source)
    return [everything[position] for position in self.positions]

  def __len__(self) -> int:
    return len(self.positions)

  def __getitem__(self, index: int) -> Example:
    return self._source[int(self.positions[index])]

  def vectors(self, positions: np.ndarray) -> np.ndarray:
    return vectors(self._source, self.positions[positions])


class Joined:
  """Concatenates the examples of several sources."""

  def __init__(self, parts: Sequence[Source]):
    self._parts = list(parts)
    self._ends = np.cumsum([len(part) for part in parts])
    self.labels = np.concatenate([part.labels for part in parts])
    self.class_names = {label: name for part in parts for label, name in class_names(part).items()}
    self.superclasses = {
      label: name for part in parts for label, name in superclasses(part).items()
    }
    self.label_sets = label_sets(parts[0])  # that of the whole data set
    self.width = width(parts[0])

  @property
  def ids(self) -> list[str]:
    return [name for part in self._parts for name in ids(part)]

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> Example:
    part = int(np.searchsorted(self._ends, index, side="right"))
    return self._parts[part][index - int(self._ends[part] - len(self._parts[part]))]

  def vectors(self, positions: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(self[int(position)].image) for position in positions])


def label_sets(source: Source) -> LabelSets | None:
  """Returns the labels of the patterns of a source; None if an image has one class.

  They are the source's attribute ``label_sets``. They may have patterns of other splits too.
  """
  found: LabelSets | None = getattr(source, "label_sets", None)
  return found


def class_sizes(source: Source) -> np.ndarray:
  """Returns the number of images of each class that occurs; of each label, if there are several."""
  sets = label_sets(source)
  if sets is None:
    return np.unique(source.labels, return_counts=True)[1]
  return np.array([len(images) for images in sets.images_by_label(source.labels)])


def width(source: Source) -> int:
  """Returns the number F of entries of the vectors of a source; 0 if it has images."""
  return int(getattr(source, "width", 0))


def vectors(source: Source, positions: np.ndarray) -> np.ndarray:
  """Returns the vectors ``[n, F]`` at some positions of a source that has vectors."""
  found: np.ndarray = source.vectors(positions)  # type: ignore[attr-defined]
  return found


def ids(source: Source) -> Sequence[str]:
  """Returns the id of every image.

  They are the source's attribute ``ids``. Without that attribute every image is read.
  """
  found: Sequence[str] | None = getattr(source, "ids", None)
  return [source[index].id for index in range(len(source))] if found is None else found


def shown_classes(source: Source) -> list[str]:
  """Returns the displayed class of every image: its name, or its label if it has no name."""
  names = class_names(source)
  return [names.get(label, str(label)) for label in source.labels.tolist()]


def class_names(source: Source) -> dict[int, str]:
  """Returns label -> class name for the classes whose labels are positions in a list of names.

  Such a label means another class if a folder is added or removed, so stored results must be
  compared by name. The names are the source's attribute ``class_names``. Labels that are
  themselves ids of the data are left out.
  """
  names: dict[int, str] = getattr(source, "class_names", {})
  present = set(np.unique(source.labels).tolist())
  return {label: name for label, name in names.items() if label in present and name != str(label)}


def superclasses(source: Source) -> dict[int, str]:
  """Returns label -> superclass, the source's attribute ``superclasses``; empty without it."""
  found: dict[int, str] = getattr(source, "superclasses", {})
  return found


def compared_names(source: Source) -> set[str]:
  """Returns the names by which classes are recognized elsewhere: of classes, or of labels."""
  sets = label_sets(source)
  if sets is None:
    return set(shown_classes(source))
  return {name for label in np.unique(source.labels).tolist() for name in sets.labels_of(label)}


def split_by_class(
  labels: np.ndarray, shares: dict[str, float], seed: int
) -> dict[str, np.ndarray]:
  """Returns the positions of disjoint splits that share no class.

  Args:
    labels: ``[N]`` labels.
    shares: split name -> its share of the classes, > 0; the shares sum to 1.
    seed: the result is a pure function of (labels, shares, seed).

  Returns:
    Split name -> positions, ascending. Every class is in exactly one split.

  Raises:
    ValueError: if the shares are not positive or do not sum to 1, or if a split would be empty.

  >>> splits = split_by_class(np.array([5, 5, 8, 8, 9, 9]), {"train": 2 / 3, "test": 1 / 3}, seed=0)
  >>> print({name: len(positions) for name, positions in splits.items()})
  {'train': 4, 'test': 2}
  """
  if abs(sum(shares.values()) - 1.0) > 1e-6 or min(shares.values()) <= 0:
    raise ValueError(f"shares must be positive and sum to 1, got {shares}")
  classes = np.random.default_rng(seed).permutation(np.unique(labels))
  ends = np.round(np.cumsum(list(shares.values())) * len(classes)).astype(int)
  splits = {}
  for name, start, end in zip(shares, [0, *ends[:-1]], ends):
    if end <= start:
      given = ", ".join(f"{split} {share:g}" for split, share in shares.items())
      raise ValueError(
        f"split {name!r} is empty: {len(classes)} classes are too few for the shares {given}. Give "
        "more classes, or change data.train_share and data.val_share"
      )
    splits[name] = np.flatnonzero(np.isin(labels, classes[start:end]))
  return splits


def label_rows(labels: np.ndarray) -> dict[int, int]:
  """Returns label -> row of the auxiliary vectors v: labels may have gaps, rows have none.

  >>> label_rows(np.array([11320, 11318, 11320]))
  {11318: 0, 11320: 1}
  """
  return {int(label): row for row, label in enumerate(np.unique(labels))}
