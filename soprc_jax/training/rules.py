"""Rules on the values of a config, and the lines that tell which are broken."""

from collections.abc import Iterable
import math
from typing import Any


def value_of(config: Any, key: str) -> Any:
  """The value of a dotted key."""
  for part in key.split("."):
    config = config[part]
  return config


class Rules:
  """Checks keys of a config one by one; ``problems`` holds a line for each broken rule: the key, what is allowed, and the value."""

  def __init__(self, config: Any):
    self._config = config
    self.problems: list[str] = []

  def choice(self, key: str, allowed: Iterable[Any]) -> None:
    """The value must be one of some."""
    allowed, value = tuple(allowed), value_of(self._config, key)
    if value not in allowed:
      self.problems.append(f"{key} must be one of {', '.join(map(str, allowed))}; got {value!r}")

  def number(self, key: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """The value must be finite and lie in [low, high], or with ``open_low`` in (low, high]."""
    value = value_of(self._config, key)
    inside = low < value <= high if open_low else low <= value <= high
    if not (inside and math.isfinite(value)):
      limit = f"> {low:g}" if open_low else f">= {low:g}"
      limit += f" and <= {high:g}" if math.isfinite(high) else ""
      self.problems.append(f"{key} must be {limit}; got {value!r}")
