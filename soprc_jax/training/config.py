"""The config of a run: defaults, presets, and checks that run before compilation.

Files in ``configs/`` call `default_config` and change fields. Options that a preset decides are
``None`` until `resolve` fills them in. A value that the user sets overrides the preset.

A key of `OPEN` may be open: None until the run chooses its value, see `leave_open` and `fill`.
"""

from collections.abc import Iterable, Mapping
import json
from typing import Any

from ml_collections import config_dict

from soprc_jax.training import config_key, config_rules
from soprc_jax.training.config_table import KEYS, OPEN, PRESETS, RESUME_FREE

# mypy cannot check the fields of ml_collections' class; `resolve` checks them.
ConfigDict: Any = config_dict.ConfigDict

# Entry of config.json, next to the keys: which of them the run has chosen, and why.
CHOSEN = "chosen"

# Groups of a config file for soprc compare and soprc ablate, which check them.
_OF_OTHER_PROGRAMS = ("compare",)
# Groups that take any keys.
_FREE = tuple(key.name for key in KEYS if key.default == {})


def default_config() -> Any:
  """Returns the keys of `KEYS` with their defaults, and `PRESETS` as ``config.presets``."""
  config = config_key.default_config(KEYS)
  config.presets = ConfigDict(PRESETS)
  for preset in config.presets.values():
    if preset.self_weight is None:  # without a type, no number could be set
      preset.self_weight = config_dict.placeholder(float)
  return config


def leave_open(config: Any, *names: str) -> None:
  """Leaves keys open, so that the run chooses their values. A later value of the user counts.

  Args:
    config: config of `default_config`, changed in place.
    *names: dotted keys of `OPEN`.
  """
  kinds = {key.name: key.kind or type(key.default) for key in KEYS if key.may_be_open}
  with config.unlocked():
    for name in names:
      group, _, last = name.rpartition(".")
      node = config_key.value_of(config, group)
      del node[last]  # with the value None alone, the key would lose its type
      node[last] = config_dict.placeholder(kinds[name])


def open_keys(config: Any) -> list[str]:
  """Returns the keys of a config, or of its dict, that are open."""
  tree = config if isinstance(config, dict) else config.to_dict()
  values = dict(config_key.leaves(tree))  # the config of another study lacks some of the keys
  return [name for name in OPEN if values.get(name, "") is None]


def fill(config: Any, values: Mapping[str, Any]) -> Any:
  """Returns a resolved config with values for its open keys, checked again.

  Args:
    config: resolved.
    values: dotted key -> value. Those of keys that are not open are left out.

  Raises:
    ValueError: see `resolve`.
  """
  tree = config.to_dict()
  for name in set(open_keys(tree)) & values.keys():
    _set(tree, name, values[name])
  expected = default_config().to_dict()
  _fill(expected)
  return _checked(tree, expected)


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
  group, _, last = name.rpartition(".")
  config_key.value_of(tree, group)[last] = value


def resolve(config: Any) -> Any:
  """Returns a checked, locked copy of a config with every open option filled in from the preset.

  The copy lacks the table of presets and the groups of other programs. Keys that the run chooses
  stay open, see `open_keys`.

  Raises:
    ValueError: a key is wrong; the message names each with its value and what is allowed.
  """
  default = default_config().to_dict()
  # As plain dicts, so that wrong values of any type reach the checks.
  tree = {key: value for key, value in config.to_dict().items() if key not in _OF_OTHER_PROGRAMS}
  missing = sorted(default.keys() - tree.keys())
  if missing:
    raise ValueError(
      f"the config has no {', '.join(missing)}: a retrieval run needs the keys of "
      "soprc_jax.training.config.default_config() "
      "(configs/imbalanced.py is for soprc train-binary)"
    )
  config_key.raise_if(config_key.key_problems(tree, default, free=_FREE))
  for filled in (default, tree):
    _fill(filled)
  return _checked(tree, default)


def _fill(tree: dict[str, Any]) -> None:
  """Fills open options of the dict of a config from its preset, and removes ``presets``.

  Raises:
    ValueError: there is no such preset.
  """
  config_key.raise_if(
    config_key.value_problems([key for key in KEYS if key.name == "loss.preset"], tree)
  )
  preset, loss = tree.pop("presets")[tree["loss"]["preset"]], tree["loss"]
  for there, here in ((preset, loss), (preset["prior"], loss["prior"])):
    here |= {key: value for key, value in there.items() if here[key] is None}
  if loss["self_weight"] is None:
    loss["self_weight"] = _self_weight(loss["num_points"])


def _self_weight(num_points: Any) -> float:
  """Returns 1 / (M + 1): a positive counts itself once, next to M points."""
  usable = isinstance(num_points, int) and num_points > 0  # else the checks report it
  return 1 / (num_points + 1) if usable else 0.0


def _checked(tree: dict[str, Any], expected: dict[str, Any], *, imports: bool = True) -> Any:
  """Checks a dict that has every key and no preset, and returns it as a locked config.

  While a key is open, the checks of sizes that depend on each other are left out.
  """
  still_open = open_keys(tree)
  for name in still_open:
    _set(tree, name, config_key.value_of(expected, name))
  config_key.raise_if(
    [
      *config_key.type_problems(tree, expected),
      *config_rules.custom_problems(tree["loss"]["custom"]),
    ]
  )
  config = ConfigDict(tree)
  config_key.raise_if(
    [
      *config_key.value_problems(KEYS, config),
      *config_rules.joint_problems(config, imports=imports),
      *([] if still_open else config_rules.size_problems(config)),
    ]
  )
  leave_open(config, *still_open)
  config.lock()
  return config


def unused_problems(config: Any, given: Iterable[str]) -> list[str]:
  """Returns a line for each key that a run does not use: its loss, sampler and so on.

  Args:
    config: resolved.
    given: dotted keys that the user has set.
  """
  given = list(given)
  problems = config_key.used_with_problems(KEYS, config, given)
  names = [config.loss.name] + ([config.warmup.loss] if config.warmup.steps else [])
  if any(":" in name for name in names):  # a custom loss may use any key of loss
    return problems
  return problems + [
    f"{key} is not used by loss.name={config.loss.name}: leave it out, or choose a loss that uses "
    "it"
    for key in config_key.unused(KEYS, names, given)
  ]


def to_json(config: Any, chosen: Mapping[str, Any] | None = None) -> str:
  """Returns the sorted, indented JSON of a resolved config, with what the run has chosen."""
  tree = config.to_dict() | ({CHOSEN: dict(chosen)} if chosen else {})
  return json.dumps(tree, indent=2, sort_keys=True, default=list) + "\n"


def from_json(tree: dict[str, Any]) -> Any:
  """Returns the resolved config of a ``config.json``.

  Keys that an older version did not write take their defaults. No custom loss is imported. What the
  run noted on its choices (`CHOSEN`) is left out.

  Raises:
    ValueError: it is not the config of a run.
  """
  config = default_config()
  del config.presets
  try:
    config.update(_as_tuples({key: value for key, value in tree.items() if key != CHOSEN}))
  except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"this is not the config of a run: {error}") from error
  expected, found = default_config().to_dict(), config.to_dict()
  presets = {"presets": expected["presets"]}
  _fill(expected)
  config_key.raise_if(config_key.key_problems(found, expected, free=_FREE))
  config_key.raise_if([f"{name} must have a value; got None" for name in open_keys(found)])
  found |= presets
  _fill(found)
  return _checked(found, expected, imports=False)


def _as_tuples(tree: Any) -> Any:
  """Turns JSON's lists back into tuples."""
  if isinstance(tree, dict):
    return {key: _as_tuples(value) for key, value in tree.items()}
  return tuple(_as_tuples(value) for value in tree) if isinstance(tree, list) else tree


def differences(here: dict[str, Any], there: dict[str, Any], prefix: str = "") -> list[str]:
  """Returns a line ``key: VALUE there, VALUE here`` for each key that differs and must not."""
  lines = []
  for key in sorted(here.keys() | there.keys()):
    name, a, b = prefix + key, here.get(key), there.get(key)
    if isinstance(a, dict) and isinstance(b, dict):
      lines += differences(a, b, name + ".")
    elif a != b and name not in RESUME_FREE:
      lines.append(f"{name}: {b!r} there, {a!r} here")
  return lines
