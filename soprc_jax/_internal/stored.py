"""Files that the programs have written and read back: JSON of the expected shape and arrays, or a
message that says what is wrong.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax._internal.strings import shown

# What remedies nearly all of them: nothing in a results folder is more than what a run has
# computed.
REMEDY = "remove it, and what it stands for is made again"
_WHAT = {
  dict: "an object",
  list: "a list with entries",
  str: "a text",
  float: "a number",
  int: "an integer",
  bool: "true or false",
}


def read_json(path: Path, shape: Any = object, *, remedy: str = REMEDY) -> Any:
  """The content of a JSON file.

  Args:
    path: of the file.
    shape: of its content, see `problem`.
    remedy: what to do where it is another, told in the message.

  Raises:
    OSError: it is not there, or may not be read.
    ValueError: it is no JSON, or of another shape.
  """
  try:
    content = json.loads(path.read_bytes())
    found = problem(content, shape)
  except (ValueError, RecursionError) as error:  # of JSON, of its encoding, of a million brackets
    found = str(error)
  if found:
    raise ValueError(f"{path} is damaged ({found}): {remedy}")
  return content


def problem(content: Any, shape: Any, place: str = "") -> str:
  """Where the content is not of a shape, and what it is there; empty if it is.

  Args:
    content: of a JSON file.
    shape: a type (float takes integers too, bool is none; object takes anything), None, ``[shape]``
      for a list of one or more, ``{str: shape}`` for any keys, ``{"key": shape}`` for these keys
      among others, or a tuple of shapes of which one must fit.
    place: of the content in the file.

  >>> problem({"val": {"mAUPRC": "high"}}, {"val": {"mAUPRC": float}})
  "val.mAUPRC must be a number, it is 'high'"
  """
  if isinstance(shape, tuple):
    found = [problem(content, one, place) for one in shape]
    return "" if "" in found else found[-1]
  if isinstance(shape, Mapping):
    return _object_problem(content, shape, place)
  if isinstance(shape, list):
    if not isinstance(content, list) or not content:
      return _told(content, place, list)
    return next(
      filter(None, (problem(entry, shape[0], f"{place}[{i}]") for i, entry in enumerate(content))),
      "",
    )
  if shape is None:
    return "" if content is None else f"{place or 'it'} must be null, it is {shown(content)}"
  kinds = (int, float) if shape is float else shape
  fits = isinstance(content, kinds) and (not isinstance(content, bool) or shape in (bool, object))
  return "" if fits else _told(content, place, shape)


def _object_problem(content: Any, shape: Mapping[Any, Any], place: str) -> str:
  if not isinstance(content, dict):
    return _told(content, place, dict)
  inner = f"{place}." if place else ""
  if str in shape:
    return next(
      filter(None, (problem(value, shape[str], inner + key) for key, value in content.items())), ""
    )
  for key, wanted in shape.items():
    found = (
      f"{inner}{key} is missing"
      if key not in content
      else problem(content[key], wanted, inner + key)
    )
    if found:
      return found
  return ""


def _told(content: Any, place: str, kind: type) -> str:
  return f"{place or 'it'} must be {_WHAT.get(kind, kind.__name__)}, it is {shown(content)}"


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
  """The arrays of these names in an ``.npz`` file.

  Raises:
    OSError: the file is not there, or may not be read.
    ValueError: it is damaged, or holds no such arrays.
  """
  # Opened here: numpy leaves the file of a damaged archive open.
  with path.open("rb") as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in names}
    # A flipped bit can claim an encryption, a compression or a size of its own: numpy, zipfile and
    # zlib fail at it in a dozen ways.
    except Exception as error:
      reason = (
        f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
      )
      raise ValueError(f"{path} is damaged ({reason})") from error
