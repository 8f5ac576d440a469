"""Reads files that the programs have written, JSON and arrays, and checks their shape."""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax._internal.strings import shown

# Fits nearly all of them, since a results folder contains nothing but what a run has computed.
REMEDY = "remove it, and it is computed again"
_WHAT = {
  dict: "an object",
  list: "a list with entries",
  str: "a text",
  float: "a number",
  int: "an integer",
  bool: "true or false",
}


def read_json(path: Path, shape: Any = object, *, remedy: str = REMEDY) -> Any:
  """Returns the content of a JSON file, and checks its shape.

  Args:
    path: path of the file.
    shape: expected shape of the content, see `problem`.
    remedy: what to do if the file is corrupt, for the message.

  Raises:
    OSError: the file is missing or unreadable.
    ValueError: it is not JSON, or has another shape.
  """
  try:
    content = json.loads(path.read_bytes())
    found = problem(content, shape)
  except (ValueError, RecursionError) as error:  # invalid JSON or encoding, or too deeply nested
    found = str(error)
  if found:
    raise ValueError(f"{path} is corrupt ({found}): {remedy}")
  return content


def problem(content: Any, shape: Any, place: str = "") -> str:
  """Returns where and how the content differs from a shape, or "" if it fits.

  Args:
    content: content of a JSON file.
    shape: the expected shape, one of

      * a type: float takes integers too, a bool is not a number, object takes anything;
      * None;
      * ``[shape]`` for a list with at least one entry;
      * ``{str: shape}`` for any keys, ``{"key": shape}`` for at least these keys;
      * a tuple of shapes, one of which must fit.

    place: position of the content in the file.

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
  """Returns the named arrays of an ``.npz`` file.

  Raises:
    OSError: the file is missing or unreadable.
    ValueError: it is corrupt, or lacks one of the arrays.
  """
  # Opened here, since numpy does not close the file of a corrupt archive.
  with path.open("rb") as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in names}
    # A flipped bit can indicate an encryption, a compression or a wrong size. numpy, zipfile and
    # zlib then raise a dozen kinds of errors.
    except Exception as error:
      reason = (
        f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
      )
      raise ValueError(f"{path} is corrupt ({reason})") from error
