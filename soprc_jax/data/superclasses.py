"""Superclasses: each class of a data set belongs to one, by a column of the data."""

from collections.abc import Iterable, Sequence
import logging

import numpy as np

from soprc_jax._internal import strings
from soprc_jax._internal.strings import shown
from soprc_jax.data import sources

_log = logging.getLogger(__name__)


def of_classes(
  pairs: Iterable[tuple[int, str]], *, where: object, names: dict[int, str] | None = None
) -> dict[int, str]:
  """Returns label -> superclass, and warns if they say no more than the classes, or nothing.

  Args:
    pairs: label and superclass of each image.
    where: place of the superclasses in messages.
    names: label -> name of the class in messages; the label itself if missing.

  Raises:
    ValueError: a class has two superclasses, or an empty one.

  >>> of_classes([(3, "bird"), (4, "bird"), (5, "fish")], where="images.csv")
  {3: 'bird', 4: 'bird', 5: 'fish'}
  """
  found: dict[int, str] = {}
  for label, written in pairs:
    superclass = strings.class_name(written)
    name = shown((names or {}).get(label, str(label)))
    if not superclass:
      raise ValueError(f"{where}: class {name} has an image without a superclass: give it one")
    if found.setdefault(label, superclass) != superclass:
      raise ValueError(
        f"{where}: class {name} has two superclasses, {shown(found[label])} and "
        f"{shown(superclass)}: give all of its images the same one"
      )
  count = len(set(found.values()))
  if len(found) > 1 and count in (1, len(found)):
    _log.warning(
      "%s: %s (data.superclass). Is it another column?",
      strings.printable(where),
      "all classes have the same superclass, so the metrics of superclasses say nothing"
      if count == 1
      else "each class has a superclass of its own, so the metrics of superclasses say no more "
      "than those of classes",
    )
  return found


def rows(source: sources.Source, labels: Sequence[int] | np.ndarray) -> np.ndarray | None:
  """Returns the superclass of each of ``labels [n]`` as integers; None if they are unknown.

  Equal names have equal integers, in the order of the names, for one source.
  """
  of_label = sources.superclasses(source)
  if not of_label:
    return None
  numbers = {name: row for row, name in enumerate(sorted(set(of_label.values())))}
  return np.array([numbers[of_label[int(label)]] for label in labels], np.int64)
