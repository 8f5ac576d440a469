"""Keys of a config: each `Key` gives default, checks, error messages, ``--help`` and docs entry."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
import math
from typing import Any, NamedTuple

from ml_collections import config_dict

from soprc_jax._internal.strings import shown

# A setting is 0 or has a magnitude in this range, so that its products and quotients fit float32.
SIZES = (1e-30, 1e30)
# Counts become int32 on the devices.
LARGEST_COUNT = 2**31 - 1
_WHAT = {
  bool: "True or False",
  int: "an integer",
  float: "a number",
  str: "a text",
  tuple: "a tuple",
  dict: "a group of any keys",
}


class Key(NamedTuple):
  """Describes a key of a config.

  Attributes:
    name: dotted name.
    default: default value, whose type is that of the key. None: a preset or the program decides,
      see ``kind``. {}: a group that takes any keys.
    meaning: what the key does, for ``--help`` and the docs.
    low: smallest number allowed. None: 0 for an integer, any for another number.
    high: largest number allowed. None: `LARGEST_COUNT` for an integer, any finite one for another
      number.
    above: number that the value must exceed, instead of ``low``.
    choices: allowed values; empty: no such rule.
    must: any other rule, in the words of the error message.
    holds: function of the value that returns whether ``must`` holds. None: checked elsewhere.
    kind: type of a key whose default is None.
    losses: names of the losses that use the key; empty: it does not depend on the loss.
    used_with: another key, and the values of it with which this key is used; empty: with any.
    on_resume: whether the key may change when a run is resumed, since it changes no result.
    often: whether ``--help`` shows the key; ``--helpfull`` shows every key.
    may_be_open: whether a config may leave the key None, so that the run chooses the value.
  """

  name: str
  default: Any
  meaning: str
  low: float | None = None
  high: float | None = None
  above: float | None = None
  choices: Sequence[Any] = ()
  must: str = ""
  holds: Callable[[Any], bool] | None = None
  kind: type | None = None
  losses: Sequence[str] = ()
  used_with: tuple[str, Sequence[str]] | tuple[()] = ()
  on_resume: bool = False
  often: bool = False
  may_be_open: bool = False

  @property
  def allowed(self) -> str:
    """Returns what the value must be: the words after "KEY must be" in a message.

    >>> Key("loss.beta", 0.1, "step", above=0, high=1).allowed
    '> 0 and <= 1'
    """
    if self.must:
      return self.must
    if self.choices:
      return f"one of {', '.join(map(str, self.choices))}"
    if self._kind in (int, float):
      low, high = self._limits
      limits = []
      if self.above is not None:
        limits.append(f"> {self.above:g}")
      elif math.isfinite(low):
        limits.append(f">= {low:g}")
      # The bound of int32 is reported only for a count that exceeds it, see `value_problems`.
      if self.high is not None:
        limits.append(f"<= {high if isinstance(high, int) else f'{high:g}'}")
      return " and ".join(limits) or "a finite number"
    return _WHAT[self._kind]

  def allows(self, value: Any) -> bool:
    """Returns whether a value of the right type is allowed."""
    if value is None and self.default is None:
      return True
    if self.must:
      return self.holds is None or self.holds(value)
    if self.choices:
      return value in self.choices
    if self._kind not in (int, float):
      return True
    low, high = self._limits
    # NaN is in no interval; math.isfinite fails for an integer of 400 digits.
    inside = low <= value <= high if self.above is None else self.above < value <= high
    return inside and abs(value) != math.inf

  @property
  def _kind(self) -> type:
    return self.kind or type(self.default)

  @property
  def _limits(self) -> tuple[float, float]:
    low, high = (0, LARGEST_COUNT) if self._kind is int else (-math.inf, math.inf)
    return low if self.low is None else self.low, high if self.high is None else self.high


def group(prefix: str, *keys: Key, **shared: Any) -> tuple[Key, ...]:
  """Returns the keys of a group, named without its prefix, with the attributes that they share.

  >>> group("loss.triplet", Key("margin", 0.1, "margin"), losses=("triplet",))[0].name
  'loss.triplet.margin'
  """
  return tuple(key._replace(name=f"{prefix}.{key.name}", **shared) for key in keys)


def default_config(keys: Iterable[Key]) -> Any:
  """Returns a ``ConfigDict`` of the keys with their defaults."""
  tree: dict[str, Any] = {}
  for key in keys:
    *groups, last = key.name.split(".")
    node = tree
    for group in groups:
      node = node.setdefault(group, {})
    node[last] = config_dict.placeholder(key.kind) if key.default is None else key.default
  return config_dict.ConfigDict(tree)


def value_of(config: Any, key: str) -> Any:
  """Returns the value of a dotted key."""
  for part in key.split("."):
    config = config[part]
  return config


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Yields (dotted key, value) for each leaf of a nested dict."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from leaves(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def different(values: Sequence[Any], fits: Callable[[Any], bool]) -> bool:
  """Returns whether there are values, all fit, and all differ in their first six digits.

  Results and folders are named by six digits of a value.
  """
  names = {f"{value:g}" if isinstance(value, float) else str(value) for value in values}
  return 0 < len(names) == len(values) and all(map(fits, values))


def raise_if(problems: Sequence[str]) -> None:
  """Raises a ValueError with a line for each problem of a config, if there is any."""
  if problems:
    raise ValueError(
      "the config does not work:\n" + "\n".join(f"  {problem}" for problem in problems)
    )


def value_problems(keys: Iterable[Key], config: Any) -> list[str]:
  """Returns a line for each value that is not allowed: the key, what is allowed, and the value."""
  problems = []
  for key in keys:
    value = value_of(config, key.name)
    if not key.allows(value):
      is_large = key.high is None and isinstance(value, int) and value > LARGEST_COUNT
      allowed = f"<= {LARGEST_COUNT}" if is_large and not key.must else key.allowed
      problems.append(f"{key.name} must be {allowed}; got {shown(value)}")
  return problems


def used_with_problems(keys: Iterable[Key], config: Any, given: Collection[str]) -> list[str]:
  """Returns a line for each of the keys ``given`` that another key's value leaves unused."""
  return [
    f"{key.name} is not used by {other}={value}: leave it out, or choose {' or '.join(values)}"
    for key in keys
    if key.name in given and key.used_with
    for other, values in [key.used_with]
    if (value := value_of(config, other)) not in values
  ]


def unused(keys: Iterable[Key], names: Iterable[str], given: Iterable[str]) -> list[str]:
  """Returns the keys that the user has set and none of the losses uses.

  Args:
    keys: table of the keys.
    names: losses of the run.
    given: dotted keys that the user has set, including those of groups that take any keys.
  """
  losses = {key.name: key.losses for key in keys}
  used_by = ((key, losses.get(key) or losses.get(key.rpartition(".")[0])) for key in given)
  return [key for key, by in used_by if by and not set(by) & set(names)]


def key_problems(
  here: Mapping[str, Any],
  expected: Mapping[str, Any],
  *,
  free: Container[str] = (),
  prefix: str = "",
) -> list[str]:
  """Returns a line for each key that is missing, unknown, or a value instead of a group; sorted.

  Args:
    here: nested dict of a config.
    expected: nested dict with the keys that it must have.
    free: groups that take any keys.
    prefix: prefix of the dotted keys.
  """
  names = ", ".join(map(str, expected))
  problems = [
    f"{prefix}{key} is unknown; keys here: {names}" for key in here.keys() - expected.keys()
  ]
  problems += [f"{prefix}{key} is missing" for key in expected.keys() - here.keys()]
  for key in expected.keys() & here.keys():
    name, value, group = f"{prefix}{key}", here[key], expected[key]
    if isinstance(group, Mapping) != isinstance(value, Mapping):
      what = (
        f"a group of keys: {', '.join(group) or 'any'}"
        if isinstance(group, Mapping)
        else "a single value"
      )
      problems.append(f"{name} must be {what}; got {shown(value)}")
    elif isinstance(group, Mapping) and name not in free:
      problems += key_problems(value, group, free=free, prefix=f"{name}.")
  return sorted(problems)


def type_problems(here: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
  """Returns a line for each value of the wrong type, or of a magnitude outside `SIZES`.

  Args:
    here: nested dict of a config with the keys of ``expected``.
    expected: nested dict whose values have the right types. A tuple stands for any number of
      entries of its type, None for None or a number.
  """
  problems = []
  for key, like in leaves(expected):
    value = value_of(here, key)
    if isinstance(like, (tuple, list)):
      what, entries = (
        f"a tuple, each entry {_WHAT[type(like[0])]}",
        value if isinstance(value, (tuple, list)) else None,
      )
    elif like is None:
      like, entries = 0.0, () if value is None else (value,)
      what = "a number or None"
    else:
      what, entries = _WHAT[type(like)], (value,)
    found = [
      _type_problem(entry, like[0] if isinstance(like, (tuple, list)) else like)
      for entry in entries or ()
    ]
    if entries is None or any(found):
      problem = next(filter(None, found), f"got {shown(value)} ({type(value).__name__})")
      problems.append(f"{key} must be {what}; {problem}")
  return problems


def _type_problem(value: Any, like: Any) -> str:
  """Returns what is wrong with the type or magnitude of a single value; empty if nothing is."""
  kind = type(like)
  allowed = (int, float) if kind is float else (kind,)
  if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
    return f"got {shown(value)} ({type(value).__name__})"
  if kind is int and abs(value) >= 2**63:
    return f"it must be below 2**63, got {shown(value)}"
  # NaN and infinity have a separate message, see `Key.allows`.
  is_finite = kind is float and value - value == 0
  if is_finite and value and not SIZES[0] <= abs(value) <= SIZES[1]:
    return f"it must be 0, or of magnitude {SIZES[0]:g} to {SIZES[1]:g}, got {shown(value)}"
  return ""
