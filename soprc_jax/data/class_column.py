"""Reads the column of classes of a data set: one class an image, or several labels an image."""

from collections.abc import Callable, Iterable
import itertools
import logging
from typing import NamedTuple

import numpy as np

from soprc_jax._internal import strings
from soprc_jax._internal.strings import shown
from soprc_jax.data import image_files, label_sets

_log = logging.getLogger(__name__)


class Column(NamedTuple):
  """Holds the classes of a column, or its patterns.

  Attributes:
    numbers: text of a cell -> label.
    names: label -> displayed name. That of a pattern is its labels, sorted and joined.
    label_sets: labels of each pattern; None if an image has one class.
  """

  numbers: dict[str, int]
  names: dict[int, str]
  label_sets: label_sets.LabelSets | None

  def labels(self, cells: Iterable[str]) -> np.ndarray:
    """Returns the label of each cell, ``[N]`` int64."""
    return np.array([self.numbers[cell] for cell in cells], np.int64)


def read(
  cells: Iterable[str],
  *,
  where: object,
  place: Callable[[int], str],
  rule: label_sets.Rule | None = None,
) -> Column:
  """Reads the cells of a column.

  Args:
    cells: the cells; equal ones may repeat.
    where: place of the column in messages.
    place: position of a cell -> its place in messages, such as FILE:LINE.
    rule: how several labels an image are written and compared; None: a cell is one class.

  Raises:
    ValueError: a class or a label is blank, a cell has a label twice, or its labels are others when
      they are joined and split again.
  """
  if rule is None:
    cells = dict.fromkeys(cells)
    spellings = image_files.one_spelling(cells, where=where)
    numbers = image_files.label_numbers(spellings.values())
    names = {number: name for name, number in numbers.items()}
    return Column({cell: numbers[spellings[cell]] for cell in cells}, names, None)
  sets = label_lists(cells, rule.separator, where=where, place=place)
  if all(len(found) == 1 for found in sets.values()):
    warn_unused(rule.separator, where=where)
  texts = {cell: rule.separator.join(found) for cell, found in sets.items()}
  numbers = image_files.label_numbers(texts.values())
  by_number = {numbers[texts[cell]]: found for cell, found in sets.items()}
  return Column(
    {cell: numbers[text] for cell, text in texts.items()},
    {number: text for text, number in numbers.items()},
    label_sets.LabelSets(by_number, rule),
  )


def label_lists(
  cells: Iterable[str], separator: str, *, where: object, place: Callable[[int], str]
) -> dict[str, tuple[str, ...]]:
  """Returns cell -> its labels in their unified spelling, sorted; see `read`.

  Raises:
    ValueError: as `read`.
  """
  first: dict[str, int] = {}
  for position, cell in enumerate(cells):
    first.setdefault(cell, position)
  parts = {cell: _parts(cell, separator, place(position)) for cell, position in first.items()}
  spellings = image_files.one_spelling(
    (part for found in parts.values() for part in found), where=where
  )
  return {
    cell: _labels(cell, parts[cell], spellings, separator, place(position))
    for cell, position in first.items()
  }


def _parts(cell: str, separator: str, where: str) -> list[str]:
  """Returns the labels of a cell without blanks at their ends."""
  parts = [strings.stripped(part) for part in cell.split(separator)]
  if not all(parts):
    raise ValueError(
      f"{where}: {shown(cell)} has an empty label: write one {separator!r} between two labels, and "
      "none at the ends (data.label_separator)"
    )
  return parts


def warn_unused(separator: str, *, where: object) -> None:
  """Warns that a separator occurs nowhere."""
  _log.warning(
    "%s: no image has two labels, since the separator %r (data.label_separator) occurs nowhere. "
    "Is it another one?",
    strings.printable(where),
    separator,
  )


def _labels(
  cell: str, parts: list[str], spellings: dict[str, str], separator: str, where: str
) -> tuple[str, ...]:
  """Returns the labels of a cell in their unified spelling, sorted."""
  found = sorted(spellings[part] for part in parts)
  twice = [one for one, other in itertools.pairwise(found) if one == other]
  if twice:
    raise ValueError(f"{where}: {shown(cell)} has the label {shown(twice[0])} twice: remove one")
  joined = separator.join(found)  # the name of the pattern
  if joined.split(separator) != found:  # such as {a|, b} with "||", which reads as {a, |b}
    raise ValueError(
      f"{where}: the labels {shown(tuple(found))} are not the same when they are joined by "
      f"{separator!r} and split again (data.label_separator): choose a separator of which no label "
      "has a part"
    )
  return tuple(found)
