"""Reads and checks the JSON files that publishers put next to the weights of their models."""

from collections.abc import Callable, Mapping
from typing import Any

from soprc_jax._internal import stored
from soprc_jax._internal.strings import shown

# Returns the content of a JSON file next to the weights, None if there is none.
ReadBeside = Callable[[str], dict[str, Any] | None]

REMEDY = "correct it, or download it again"
# Key -> shape as in `stored.problem`, or the keys of an object. Each key may be missing. The value
# of an ``object`` is the side of a square, see `side`.
_PUBLISHED = {
  "model_type": str,
  "architectures": [str],
  "architecture": str,
  "hidden_act": str,
  "layer_norm_eps": float,
  "rope_theta": float,
  "num_attention_heads": int,
  "num_hidden_layers": int,
  "hidden_size": int,
  "intermediate_size": int,
  "num_register_tokens": int,
  "projection_dim": int,
  "patch_size": object,
  "image_size": object,
  "model_args": {"num_heads": int},
  "pretrained_cfg": {
    "mean": [float],
    "std": [float],
    "input_size": [int],
    "crop_pct": float,
    "interpolation": str,
  },
}
_CONFIG = _PUBLISHED | {"vision_config": _PUBLISHED}
_PREPROCESSOR = {
  "image_mean": [float],
  "image_std": [float],
  "resample": int,
  "do_rescale": bool,
  "rescale_factor": float,
  "do_normalize": bool,
  "do_center_crop": bool,
  "size": object,
  "crop_size": object,
}
_MAY_BE_0 = {"num_register_tokens", "projection_dim", "resample", "mean", "image_mean"}
_LARGEST = 2**31
_HIGHEST = {"layer_norm_eps": 1, "crop_pct": 1}
_COUNTS = {"mean": 3, "std": 3, "image_mean": 3, "image_std": 3, "input_size": 3}


def config(beside: ReadBeside, source: str) -> dict[str, Any]:
  """Returns the content of ``config.json``, an empty dict if there is none.

  A key that is null counts as missing, but not within timm's ``pretrained_cfg``.

  Args:
    beside: reads a file next to the weights.
    source: name of the weights, for messages.

  Raises:
    ValueError: a value has another type or is out of its range.
  """
  found = dict(beside("config.json") or {})
  if isinstance(found.get("vision_config"), dict):
    found["vision_config"] = _given(found["vision_config"])
  return _checked(found, _CONFIG, "config.json", source)


def preprocessor(beside: ReadBeside, source: str) -> dict[str, Any]:
  """Returns the preprocessing of Hugging Face, from either of its files; empty without one.

  Args and errors: as for `config`.
  """
  name = "preprocessor_config.json"
  found = beside(name)
  if found is None:
    name = "processor_config.json"
    found = _checked(beside(name), {"image_processor": _PREPROCESSOR}, name, source)
    found = found.get("image_processor")
  return _checked(found, _PREPROCESSOR, name, source)


def side(values: Mapping[str, Any], name: str, source: str) -> int:
  """Returns the side in pixels of a square, which a file may give in one of many forms.

  Args:
    values: content of the file.
    name: its key.
    source: name of the weights, for messages.

  Raises:
    ValueError: it is no number of pixels, or the two sides differ.
  """
  given = values[name]
  sides = given
  if isinstance(given, dict):
    sides = [given[key] for key in ("shortest_edge", "height", "width") if key in given]
  elif not isinstance(given, list):
    sides = [given]
  if stored.problem(sides, [int]) or min(sides) < 1 or max(sides) != min(sides):
    raise ValueError(
      f"{source}: {name} in the files next to it must be a number of pixels, the side of a square; "
      f"got {shown(given)}: {REMEDY}"
    )
  return int(sides[0])


def _checked(
  content: dict[str, Any] | None, keys: Mapping[str, Any], file: str, source: str
) -> dict[str, Any]:
  content = _given(content or {})
  found = _problem(content, keys, "")
  if found:
    raise ValueError(f"{source}: in the {file} next to it {found}: {REMEDY}")
  return content


def _given(content: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in content.items() if value is not None}


def _problem(content: Any, keys: Mapping[str, Any], place: str) -> str:
  """Returns what is wrong with an object whose keys may be missing, "" if nothing is."""
  for name, shape in keys.items():
    if name not in content:
      continue
    value, at = content[name], place + name
    found = stored.problem(value, dict if isinstance(shape, dict) else shape, at)
    if isinstance(shape, dict):
      found = found or _problem(value, shape, f"{at}.")
    found = found or _range_problem(name, value, at)
    if found:
      return found
  return ""


def _range_problem(name: str, value: Any, place: str) -> str:
  numbers = value if isinstance(value, list) else [value]
  if len(numbers) != _COUNTS.get(name, len(numbers)):
    return f"{place} must be {_COUNTS[name]} numbers, it is {shown(value)}"
  high = _HIGHEST.get(name, _LARGEST)
  for number in numbers:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
      continue
    # NaN fails both comparisons.
    if not (0 < number <= high or (number == 0 and name in _MAY_BE_0)):
      least = ">= 0" if name in _MAY_BE_0 else "> 0"
      most = f" and at most {high}" if name in _HIGHEST else " and finite"
      return f"{place} must be {least}{most}, it is {shown(value)}"
  return ""
