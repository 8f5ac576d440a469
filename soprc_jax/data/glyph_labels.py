"""Labels of the images of ``glyphs`` by structure: style of the typeface, script, kind and marks.

The labels follow from the name of the typeface and from the Unicode data that Python ships.
"""

import collections
from collections.abc import Sequence
import unicodedata

import numpy as np

# A label that fewer characters have is left out.
LEAST_CHARACTERS = 20
_STYLES = {
  "style bold": ("Bold", "Bol"),
  "style oblique": ("Oblique", "Italic", "Ita"),
  "style monospace": ("Mono",),
  "style serif": ("Serif", "STIX"),
}
# First words of names that are no script and no shape.
_NO_KIND = ("LEFT", "RIGHT", "LOWER", "UPPER", "WHITE", "BLACK")


def labels(codes: np.ndarray, ids: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
  """Returns the labels ``[N, K]`` bool of N images and their K names.

  Args:
    codes: ``[N]`` code points.
    ids: ``U+CODE/TYPEFACE`` of each image.
  """
  own = {int(code): of_character(int(code)) for code in np.unique(codes)}
  counts = collections.Counter(name for found in own.values() for name in found)
  kept = sorted(name for name, count in counts.items() if count >= LEAST_CHARACTERS)
  columns = [np.array([name in own[int(code)] for code in codes]) for name in kept]
  faces = [name.split("/")[1] for name in ids]
  for words in _STYLES.values():
    columns.append(np.array([any(word in face for word in words) for face in faces]))
  return np.stack(columns, axis=1), (*kept, *_STYLES)


def of_character(code: int) -> set[str]:
  """Returns the labels of a character: script or shape, general category, and marks.

  >>> sorted(of_character(ord("é")))
  ['category Ll', 'kind LATIN', 'with ACUTE']
  """
  name, _, marks = unicodedata.name(chr(code), "").partition(" WITH ")
  found = {f"category {unicodedata.category(chr(code))}"}
  first = name.split(" ")[0]
  if first and first not in _NO_KIND:
    found.add(f"kind {first}")
  return found | {f"with {mark}" for mark in marks.split() if mark != "AND"}
