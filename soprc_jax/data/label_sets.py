"""Images with several labels: patterns, and which of them are relevant to each other.

A *pattern* is a distinct set of labels. It is the class of an image with several labels: the
integer label of the image is the number of its pattern. Images of a pattern have the same relevant
images.
"""

from collections.abc import Iterator, Mapping, Sequence
import functools
import json
from typing import NamedTuple

import numpy as np

from soprc_jax._internal.strings import shown


class Rule(NamedTuple):
  """Says how labels are written, and which images are relevant to each other.

  Attributes:
    separator: text between two labels of an image, not empty.
    min_jaccard: smallest Jaccard index of the label sets of two relevant images, in (0, 1]. The
      index is the number of shared labels divided by that of all labels of both. 0: one shared
      label suffices.
  """

  separator: str
  min_jaccard: float = 0.0

  def to_text(self) -> str:
    """Returns what `from_text` takes."""
    return json.dumps(self)

  @classmethod
  def from_text(cls, text: str) -> "Rule":
    """Returns the rule that `to_text` has written.

    Raises:
      ValueError: the text is of another program.
    """
    try:
      separator, min_jaccard = json.loads(text)
      if not (separator and isinstance(separator, str) and 0 <= min_jaccard <= 1):
        raise ValueError("another range")
    except (TypeError, ValueError) as error:
      raise ValueError(f"{shown(text)} is no separator with a least Jaccard index") from error
    return cls(separator, min_jaccard)


class LabelSets:
  """Holds the labels of each pattern of a data set.

  Args:
    sets: pattern -> its labels, different and at least one.
    rule: how they are written and compared.

  Attributes:
    rule: the argument.
    names: ``[L]`` labels, sorted.
    patterns: ``[C]`` int64, ascending.
    members: ``[C, S]`` int32, the labels of each pattern as indices of ``names``, ascending. The
      number L fills the rows of smaller patterns.
    sizes: ``[C]`` number of labels of each pattern.

  >>> sets = LabelSets({0: ["cat"], 1: ["cat", "dog"], 2: ["dog"]}, Rule(";"))
  >>> sets.relevant(np.array([0]), np.array([0, 1, 2]))
  array([[ True,  True, False]])
  """

  def __init__(self, sets: Mapping[int, Sequence[str]], rule: Rule):
    self.rule = rule
    self.names = sorted({name for names in sets.values() for name in names})
    self.patterns = np.array(sorted(sets), np.int64)
    place = {name: index for index, name in enumerate(self.names)}
    rows = [sorted(place[name] for name in sets[pattern]) for pattern in self.patterns.tolist()]
    self.sizes = np.array([len(row) for row in rows], np.int64)
    self.members = np.full((len(rows), max(map(len, rows), default=0)), len(self.names), np.int32)
    for row, members in zip(self.members, rows, strict=True):
      row[: len(members)] = members

  @property
  def overlaps(self) -> bool:
    """Whether any pattern has two labels."""
    return bool((self.sizes > 1).any())

  @functools.cached_property
  def needed(self) -> np.ndarray:
    """The number of shared labels that two patterns need, by the number of all their labels.

    Counts decide, on the host and on devices: a rounded quotient does not.
    """
    least = self.rule.min_jaccard
    numbers = [1]
    for union in range(1, 2 * self.members.shape[1] + 1):
      # Never less than for a smaller union, so it is not searched from 1 again.
      numbers.append(next(n for n in range(numbers[-1], union + 1) if n / union >= least))
    return np.array(numbers, np.int32)

  def rows(self, patterns: np.ndarray) -> np.ndarray:
    """Returns the row of each pattern in `members`."""
    return np.searchsorted(self.patterns, patterns)

  def labels_of(self, pattern: int) -> list[str]:
    """Returns the labels of a pattern, sorted."""
    row = int(self.rows(np.array([pattern]))[0])
    return [self.names[place] for place in self.members[row, : self.sizes[row]]]

  def relevant(self, patterns: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns which patterns are relevant to each other, ``[n, m]`` bool.

    Args:
      patterns: ``[n]``.
      others: ``[m]``, or ``[n, m]`` with other ones for each pattern.
    """
    columns = self.rows(others)
    found = np.zeros((len(patterns), columns.shape[-1]), bool)
    for row, places in _grouped(self.rows(patterns)):
      found[places] = self._relevant_to(row)[columns if columns.ndim == 1 else columns[places]]
    return found

  def count(self, patterns: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Counts the images that are relevant to each pattern, ``[n]``.

    Args:
      patterns: ``[n]``.
      among: ``[N]`` patterns of the images that are counted. They include the query itself, if it
        is one of them.
    """
    sizes = np.bincount(self.rows(among), minlength=len(self.patterns))
    found = np.zeros(len(patterns), np.int64)
    for row, places in _grouped(self.rows(patterns)):
      found[places] = sizes[self._relevant_to(row)].sum()
    return found

  def images_by_label(self, patterns: np.ndarray) -> list[np.ndarray]:
    """Returns the positions of the images of each label that occurs, in the order of the names.

    Args:
      patterns: ``[N]`` patterns of the images.
    """
    members = self.members[self.rows(patterns)]
    positions = np.repeat(np.arange(len(patterns)), members.shape[1])
    kept = members.ravel() < len(self.names)
    return [found for _, found in _grouped(members.ravel()[kept], positions[kept])]

  @functools.cached_property
  def _with_label(self) -> list[np.ndarray]:
    """The rows of the patterns of each label."""
    return self.images_by_label(self.patterns)

  def _relevant_to(self, row: int) -> np.ndarray:
    """Returns which patterns are relevant to that of a row, ``[C]`` bool."""
    there = [self._with_label[label] for label in self.members[row, : self.sizes[row]]]
    shared = np.bincount(np.concatenate(there), minlength=len(self.patterns))
    return shared >= self.needed[self.sizes[row] + self.sizes - shared]


def _grouped(
  keys: np.ndarray, values: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields each key, ascending, with its values in their order; without values, their places."""
  order = np.argsort(keys, kind="stable")
  found, starts = np.unique(keys[order], return_index=True)
  parts = np.split(order if values is None else values[order], starts[1:])
  yield from zip(found.tolist(), parts, strict=False)
