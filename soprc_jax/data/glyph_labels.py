"""Labels of the images of characters by structure: style of the typeface, script, marks, letters.

The labels follow from the name of the typeface and from the Unicode data that Python ships.
"""

import collections
from collections.abc import Sequence
import unicodedata

import numpy as np

# A label that fewer characters have is left out, and so is one that all images or none have.
LEAST_CHARACTERS = 20
_STYLES = {
  "style bold": ("Bold", "Bol", "Black"),
  "style light": ("Light", "Thin"),
  "style oblique": ("Oblique", "Italic", "Ita"),
  "style monospace": ("Mono",),
  "style serif": ("Serif", "STIX", "Mincho", "mincho", "Myeongjo", "Sung", "Batang", "batang"),
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
  columns = {name: np.array([name in own[int(code)] for code in codes]) for name in kept}
  faces = [name.split("/")[1] for name in ids]
  for style, words in _STYLES.items():
    columns[style] = np.array([any(word in face for word in words) for face in faces])
  columns = {name: column for name, column in columns.items() if 0 < column.sum() < len(column)}
  return np.stack(list(columns.values()), axis=1), tuple(columns)


def of_character(code: int) -> set[str]:
  """Returns the labels of a character: script or shape, general category, marks, Hangul letters.

  >>> sorted(of_character(ord("é")))
  ['category Ll', 'kind LATIN', 'with ACUTE']
  >>> sorted(of_character(ord("각")))[2:]
  ['with CHOSEONG KIYEOK', 'with JONGSEONG KIYEOK', 'with JUNGSEONG A']
  """
  name, _, marks = unicodedata.name(chr(code), "").partition(" WITH ")
  found = {f"category {unicodedata.category(chr(code))}"}
  first = name.split(" ")[0]
  if first and first not in _NO_KIND:
    found.add(f"kind {first}")
  letters = unicodedata.normalize("NFD", chr(code))
  if first == "HANGUL" and len(letters) > 1:  # a syllable
    found |= {f"with {unicodedata.name(one).removeprefix('HANGUL ')}" for one in letters}
  return found | {f"with {mark}" for mark in marks.split() if mark != "AND"}
