"""Formats external values and names for messages, and normalizes the spelling of names."""

from typing import Any
import unicodedata

_SHOWN = 200
# Zero-width blanks, which `str.strip` does not remove.
_NO_WIDTH = "\u200b\u2060\ufeff"
# Unprintable according to Python, but part of words and emoji: no-break and wide blanks, joiners.
_HARMLESS = "\u00a0\u200c\u200d\u3000"


def shown(value: Any) -> str:
  """Returns the repr of a value, truncated after 200 characters.

  >>> print(shown("a" * 400)[-5:], len(shown("a" * 400)))
  aa... 203
  """
  try:
    text = repr(value)
  except ValueError:  # an integer with thousands of digits
    return (
      f"an integer of {value.bit_length()} bits"
      if isinstance(value, int)
      else f"a {type(value).__name__}"
    )
  return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def printable(value: Any) -> str:
  """Formats an external name on one line, with line ends and control characters as escapes.

  A terminal would execute control characters, and line ends would break a table.

  >>> print(printable("a\\nb \\x1b[31m"))
  a\\nb \\x1b[31m
  """
  return "".join(
    one if one.isprintable() or one in _HARMLESS else one.encode("unicode_escape").decode()
    for one in str(value)
  )


def stripped(text: str) -> str:
  """Removes blanks at both ends, including zero-width ones such as a byte order mark."""
  before = None
  while before != text:
    before, text = text, text.strip().strip(_NO_WIDTH)
  return text


def class_name(text: str) -> str:
  """Returns the canonical spelling of a name: NFC, without blanks at its ends.

  >>> class_name("\\tcafe\\u0301\\u00a0") == class_name("caf\\u00e9")
  True
  """
  return stripped(unicodedata.normalize("NFC", text))
