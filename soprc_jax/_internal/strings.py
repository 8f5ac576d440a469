"""Values and names from outside: as messages show them, and one spelling for each name."""

from typing import Any
import unicodedata

_SHOWN = 200
# Blanks of no width, which `str.strip` leaves.
_NO_WIDTH = "\u200b\u2060\ufeff"
# Unprintable for Python, but part of words and of emoji: no-break and wide blanks, joiners.
_HARMLESS = "\u00a0\u200c\u200d\u3000"


def shown(value: Any) -> str:
  """The value as Python writes it, cut where it is long.

  >>> print(shown("a" * 400)[-5:], len(shown("a" * 400)))
  aa... 203
  """
  try:
    text = repr(value)
  except ValueError:  # of thousands of digits
    return (
      f"an integer of {value.bit_length()} bits"
      if isinstance(value, int)
      else f"a {type(value).__name__}"
    )
  return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def printable(value: Any) -> str:
  """Writes a name from outside on one line: line ends, control characters and the like as escapes.

  A terminal would obey them, and a table would break.

  >>> print(printable("a\\nb \\x1b[31m"))
  a\\nb \\x1b[31m
  """
  return "".join(
    one if one.isprintable() or one in _HARMLESS else one.encode("unicode_escape").decode()
    for one in str(value)
  )


def stripped(text: str) -> str:
  """Removes the blanks at both ends, also those of no width (a byte order mark)."""
  before = None
  while before != text:
    before, text = text, text.strip().strip(_NO_WIDTH)
  return text


def class_name(text: str) -> str:
  """Returns the spelling that all spellings of a name share: NFC, without blanks at its ends.

  >>> class_name("\\tcafe\\u0301\\u00a0") == class_name("caf\\u00e9")
  True
  """
  return stripped(unicodedata.normalize("NFC", text))
