"""Values from outside as they stand in messages."""

from typing import Any

_SHOWN = 200


def shown(value: Any) -> str:
  """The value as Python writes it, cut where it is long.

  >>> print(shown("a" * 400)[-5:], len(shown("a" * 400)))
  aa... 203
  """
  try:
    text = repr(value)
  except ValueError:  # of thousands of digits
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
  return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
