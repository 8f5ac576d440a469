"""Rules on the keys, types and values of a config, and the lines that tell which are broken."""

from collections.abc import Container, Iterable, Iterator, Mapping
import math
from typing import Any

from soprc_jax._internal.strings import shown

# What float32 has left for products and quotients of a setting: 0, or of a size between these.
SIZES = (1e-30, 1e30)
# Counts become int32 on the devices.
LARGEST_COUNT = 2**31 - 1
_WHAT = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}


def value_of(config: Any, key: str) -> Any:
  """The value of a dotted key."""
  for part in key.split("."):
    config = config[part]
  return config


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """(dotted key, value) of each leaf of a nested dict."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from leaves(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def key_problems(
  here: Mapping[str, Any], expected: Mapping[str, Any], *, free: Container[str] = (), prefix: str = ""
) -> list[str]:
  """What is missing, unknown, or a value in place of a group of keys: a line each, sorted.

  Args:
    here: nested dict of a config.
    expected: the one that it must have the keys of.
    free: groups in which any keys may stand.
    prefix: of the dotted keys.
  """
  names = ", ".join(map(str, expected))
  problems = [f"{prefix}{key} is unknown; keys here: {names}" for key in here.keys() - expected.keys()]
  problems += [f"{prefix}{key} is missing" for key in expected.keys() - here.keys()]
  for key in expected.keys() & here.keys():
    name, value, group = f"{prefix}{key}", here[key], expected[key]
    if isinstance(group, Mapping) != isinstance(value, Mapping):
      what = f"a group of keys: {', '.join(group) or 'any'}" if isinstance(group, Mapping) else "a single value"
      problems.append(f"{name} must be {what}; got {shown(value)}")
    elif isinstance(group, Mapping) and name not in free:
      problems += key_problems(value, group, free=free, prefix=f"{name}.")
  return sorted(problems)


def type_problems(here: Mapping[str, Any], expected: Mapping[str, Any], *, skip: Container[str] = ()) -> list[str]:
  """Values of another type than those of a config that works, or of a size that no computation can take: a line each.

  Args:
    here: nested dict of a config with the keys of ``expected``.
    expected: nested dict whose values have the right types; a tuple stands for any number of entries like its own.
    skip: keys to leave out.
  """
  problems = []
  for key, like in leaves(expected):
    value = value_of(here, key)
    if key in skip:
      continue
    if isinstance(like, (tuple, list)):
      what, entries = f"a tuple, each entry {_WHAT[type(like[0])]}", value if isinstance(value, (tuple, list)) else None
    else:
      what, entries = _WHAT[type(like)], (value,)
    found = [_type_problem(entry, like[0] if isinstance(like, (tuple, list)) else like) for entry in entries or ()]
    if entries is None or any(found):
      problem = next(filter(None, found), f"got {shown(value)} ({type(value).__name__})")
      problems.append(f"{key} must be {what}; {problem}")
  return problems


def _type_problem(value: Any, like: Any) -> str:
  """What is wrong with the type, or the size, of a single value; empty if nothing is."""
  kind = type(like)
  allowed = (int, float) if kind is float else (kind,)
  if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
    return f"got {shown(value)} ({type(value).__name__})"
  if kind is int and abs(value) >= 2**63:
    return f"it must be below 2**63, got {shown(value)}"
  # NaN and infinity have a message of their own, see `Rules.number`.
  usable = not value or SIZES[0] <= abs(value) <= SIZES[1] if kind is float and value - value == 0 else True
  return "" if usable else f"it must be 0, or of a size from {SIZES[0]:g} to {SIZES[1]:g}, got {shown(value)}"


class Rules:
  """Checks keys of a config one by one; ``problems`` holds a line for each broken rule: the key, what is allowed, and the value."""

  def __init__(self, config: Any):
    self._config = config
    self.problems: list[str] = []

  def choice(self, key: str, allowed: Iterable[Any]) -> None:
    """The value must be one of some."""
    allowed, value = tuple(allowed), value_of(self._config, key)
    if value not in allowed:
      self.problems.append(f"{key} must be one of {', '.join(map(str, allowed))}; got {shown(value)}")

  def number(self, key: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """The value must be finite and lie in [low, high], or with ``open_low`` in (low, high]."""
    value = value_of(self._config, key)
    # NaN is in no interval; math.isfinite would not take an integer of 400 digits.
    inside = low < value <= high if open_low else low <= value <= high
    if not inside or value == math.inf:
      limit = f"> {low:g}" if open_low else f">= {low:g}"
      limit += f" and <= {_limit(high)}" if math.isfinite(high) else ""
      self.problems.append(f"{key} must be {limit}; got {shown(value)}")


def _limit(value: float) -> str:
  return str(value) if isinstance(value, int) else f"{value:g}"
