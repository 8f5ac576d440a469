"""Loads stored embeddings of any model as a data set: vectors with classes, from one file."""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import csv
import functools
import logging
import os
from pathlib import Path
from typing import Any
import zipfile
import zlib

import numpy as np

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import class_column, image_files, sources, superclasses
from soprc_jax.data.label_sets import LabelSets, Rule

_log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
# Names of the arrays or columns, the preferred one first.
VECTORS = ("embeddings", "embedding", "features")
_CLASSES = ("class_names", "labels", "label")
_SPLITS = ("splits", "split")
_IDS = ("ids", "id", "path")
_ORIGIN = ("digest", "label_rule")
_LAYOUT = """\
  embeddings  [N, D] numbers (or: embedding, features)
  labels      [N] integers or texts (or: label, class_names)
  splits      [N] train, val or test (or: split); optional
  ids         [N] names of the vectors (or: id, path); optional
  as the arrays of an .npz or .h5 file, as the columns of a .parquet file, or as an .npy file of the
  embeddings next to a .csv file of the same name with the other columns"""


class Features:
  """Provides vectors in memory as the examples of a data set.

  Args:
    vectors: ``[N, D]`` float32.
    labels: ``[N]`` integers.
    ids: ``[N]`` names of the vectors.
    class_names: label -> displayed name; None displays the labels.
    made_by: digest of the model that `soprc embed` used; empty if unknown.
    label_rule: `label_sets.Rule` of the classes as text, of `soprc embed`; empty if unknown.
    label_sets: labels of each pattern, if a vector has several labels.
    superclasses: label -> superclass; None if they are unknown.

  Attributes:
    width: the number D.
  """

  def __init__(
    self,
    vectors: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str],
    class_names: Mapping[int, str] | None = None,
    *,
    made_by: str = "",
    label_rule: str = "",
    label_sets: LabelSets | None = None,
    superclasses: Mapping[int, str] | None = None,
  ):
    self.made_by = made_by
    self.label_rule = label_rule
    self.label_sets = label_sets
    self.superclasses = dict(superclasses or {})
    self._vectors, self.width = vectors, vectors.shape[1]
    self.labels = np.asarray(labels, np.int64)
    self.ids = list(ids)
    self.class_names = dict(class_names or {})

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> sources.Example:
    label = int(self.labels[index])
    return sources.Example(
      self._vectors[index], label, self.ids[index], self.class_names.get(label, "")
    )

  def vectors(self, positions: np.ndarray) -> np.ndarray:
    """Returns the vectors at some positions, ``[n, D]``."""
    return self._vectors[positions]


def checked_ids(source: sources.Source) -> list[str]:
  """Returns the id of every vector with a checksum of its numbers.

  So a run notices that it is resumed or evaluated on other numbers.
  """
  vectors = sources.vectors(source, np.arange(len(source)))
  return [
    f"{name} (checksum {zlib.crc32(vector):08x})"
    for name, vector in zip(sources.ids(source), vectors, strict=True)
  ]


def is_file(path: str | os.PathLike[str]) -> bool:
  """Returns whether the name of a file is that of stored vectors."""
  return Path(path).suffix.lower() in _READERS


def load(path: str, *, superclass: str = "", rule: Rule | None = None) -> dict[str, Features]:
  """Loads the vectors of a file by split, or all under ``"all"`` without splits.

  Args:
    path: file, see the layout in the message of the error.
    superclass: array or column with the superclass of each vector; empty: none.
    rule: how several labels a vector are written and compared; None: it has one class.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is unreadable, an array is missing or has another length, a vector is not
      finite, or an id occurs twice. A class is in two splits or has two superclasses, or the
      training or test split is missing. Labels are wrong, see `class_column.read`.
  """
  found = _read(path, name="data.root", superclass=superclass)
  where = printable(path)
  if found.classes is None:
    raise ValueError(f"{where} has no labels. It must have\n{_LAYOUT}")
  _log.info(
    "%s: %d vectors of %d numbers; %s.",
    where,
    *found.vectors.shape,
    "the splits are drawn here" if found.splits is None else "the file has the splits",
  )
  column = class_column.read(
    found.classes, where=Path(path), place=lambda row: f"{where}, row {row}", rule=rule
  )
  labels, names, sets = column.labels(found.classes), column.names, column.label_sets
  of_class = superclasses.of_classes(
    zip(labels.tolist(), found.superclasses or (), strict=found.superclasses is not None),
    where=where,
    names=names,
  )
  make = functools.partial(Features, class_names=names, label_sets=sets, superclasses=of_class)
  if found.splits is None:
    return {"all": make(found.vectors, labels, found.ids)}
  wrong = sorted(set(found.splits) - set(SPLITS))
  if wrong:
    raise ValueError(f"{where}: a split must be one of {', '.join(SPLITS)}; got {shown(wrong[0])}")
  splits, of = {}, np.array(found.splits)
  for split in SPLITS:
    places = np.flatnonzero(of == split)
    if places.size:
      ids = [found.ids[place] for place in places]
      splits[split] = make(found.vectors[places], labels[places], ids)
  for split in ("train", "test"):
    if split not in splits:
      raise ValueError(f"{where} has no vector of split {split!r}")
  for place, one in enumerate(splits if sets is None else ()):
    for other in list(splits)[:place]:
      image_files.check_disjoint(
        splits[one].labels,
        splits[other].labels,
        names=(f"split {one} of {where}", f"split {other}"),
        class_names=names,
      )
  return splits


def load_unlabeled(path: str, *, name: str) -> Features:
  """Loads all vectors of a file. They need no classes; names of classes are kept.

  Args:
    path: file, see `load`.
    name: name of the path in messages.

  Raises:
    FileNotFoundError, ValueError: as `load`.
  """
  found = _read(path, name=name, partly=True)
  classes = found.classes or [""] * len(found.vectors)
  names = {number: text for number, text in enumerate(dict.fromkeys(classes)) if text}
  numbers = {text: number for number, text in enumerate(dict.fromkeys(classes))}
  labels = np.array([numbers[text] for text in classes])
  return Features(
    found.vectors, labels, found.ids, names, made_by=found.made_by, label_rule=found.label_rule
  )


def from_array(vectors: np.ndarray, *, name: str) -> Features:
  """Returns the vectors of an array; the id of each is its row.

  Args:
    vectors: ``[N, F]`` numbers.
    name: name of the array in messages.

  Raises:
    ValueError: the array is empty or has no finite numbers.
  """
  found = _Table({"embeddings": vectors}, name)
  return Features(found.vectors, np.zeros(len(vectors), np.int64), found.ids)


class _Table:
  """The checked content of a file; classes and splits are None if the file has none.

  Args:
    arrays: name -> array of the file.
    where: the file in messages.
    partly: whether some vectors may lack a class.
    superclass: name of the array of superclasses; empty: none.
  """

  def __init__(
    self, arrays: Mapping[str, Any], where: str, *, partly: bool = False, superclass: str = ""
  ):
    _check_names(arrays, where)
    found = [name for name in VECTORS if name in arrays]
    if not found:
      raise ValueError(f"{where} has no embeddings, but {_names(arrays)}. It must have\n{_LAYOUT}")
    if len(found) > 1:
      raise ValueError(f"{where} has {' and '.join(found)}: remove those that are not to be used")
    vectors = np.asarray(arrays[found[0]])
    if vectors.dtype.kind not in "fiu" or vectors.ndim != 2 or 0 in vectors.shape:
      raise ValueError(
        f"{where}: the embeddings must be numbers [N, D], got {vectors.dtype} {list(vectors.shape)}"
      )
    self.vectors = _as_float32(vectors, where)
    count = len(vectors)
    self.classes = _texts(arrays, _CLASSES, count, what="labels", where=where, partly=partly)
    self.splits = None
    if not partly:
      self.splits = _texts(arrays, _SPLITS, count, what="splits", where=where)
    self.ids = _texts(arrays, _IDS, count, what="ids", where=where) or [
      str(row) for row in range(count)
    ]
    twice, times = collections.Counter(self.ids).most_common(1)[0]
    if times > 1:
      raise ValueError(f"{where}: the id {shown(twice)} occurs {times} times: ids must differ")
    self.superclasses = None
    if superclass:
      self.superclasses = _texts(arrays, (superclass,), count, what="superclasses", where=where)
      if self.superclasses is None:
        raise ValueError(
          f"{where} has no {shown(superclass)} (data.superclass), but {_names(arrays)}"
        )
    # Of `soprc embed`; empty in other files.
    self.made_by, self.label_rule = (
      str(array) if np.ndim(array) == 0 else ""
      for array in (arrays.get(key, "") for key in _ORIGIN)
    )


def _check_names(arrays: Mapping[str, Any], where: str) -> None:
  """Raises a ValueError for a name that is one of ours but for case or blanks.

  Such an array would be left out silently, for example the splits.
  """
  for name in arrays:
    plain = name.strip().lower()
    if name not in _KNOWN and plain in _KNOWN:
      raise ValueError(f"{where}: rename {shown(name)} to {plain!r}")


def _as_float32(vectors: np.ndarray, where: str) -> np.ndarray:
  """Returns vectors in float32, and warns of those that are 0."""
  with np.errstate(over="ignore", under="ignore"):
    found = np.ascontiguousarray(vectors, np.float32)
  finite = np.isfinite(found).all(axis=1)
  if not finite.all():
    raise ValueError(
      f"{where}: {int((~finite).sum())} vectors are not finite in float32, the first in row "
      f"{int(np.argmin(finite))}: remove them"
    )
  zero = ~found.any(axis=1)
  lost = zero & vectors.any(axis=1)
  if lost.any():
    raise ValueError(
      f"{where}: {int(lost.sum())} vectors are 0 in float32, the first in row "
      f"{int(np.argmax(lost))}: multiply all by a large number"
    )
  if zero.any():
    _log.warning(
      "%s: %d of %d vectors are 0, the first in row %d. Is an image missing?",
      where,
      int(zero.sum()),
      len(found),
      int(np.argmax(zero)),
    )
  return found


def _read(path: str, *, name: str, partly: bool = False, superclass: str = "") -> _Table:
  file = file_io.given(path, name=name)
  why = file_io.why_no_file(file) if path else "empty"
  if why:
    raise FileNotFoundError(
      f"{name}={path!r} must be a file of stored embeddings, and it is {why}. It must have\n"
      f"{_LAYOUT}"
    )
  reader = _READERS.get(file.suffix.lower())
  if reader is None:
    raise ValueError(
      f"{name}={printable(path)}: the name must end in {', '.join(_READERS)}. The file must have\n"
      f"{_LAYOUT}"
    )
  try:
    arrays = reader(file, (*_KNOWN, *filter(None, [superclass])))
  except ImportError as error:
    raise ValueError(
      f"{name}={printable(path)} needs the package {error.name}: pip install {error.name}, or "
      "convert the file to .npz"
    ) from None
  except Exception as error:  # corrupt files raise many kinds of errors
    # numpy would advise to load pickled objects, which can run code.
    is_pickle = "allow_pickle" in str(error)
    reason = (
      "an array has objects: vectors need one width, and texts .astype(str)" if is_pickle else error
    )
    raise ValueError(f"{name}={printable(path)} cannot be read: {reason}") from error
  return _Table(arrays, printable(path), partly=partly, superclass=superclass)


def _names(arrays: Mapping[str, Any]) -> str:
  return ", ".join(map(shown, arrays)) or "nothing"


def _texts(
  arrays: Mapping[str, Any],
  names: Sequence[str],
  count: int,
  *,
  what: str,
  where: str,
  partly: bool = False,
) -> list[str] | None:
  """Returns a column as texts without blanks at their ends, or None if there is none."""
  name = next((name for name in names if np.size(arrays.get(name, ()))), "")
  array = arrays.get(name)
  # `soprc embed` notes the split of all vectors.
  if array is None or (name == "split" and np.ndim(array) == 0):
    return None
  values = np.asarray(array).tolist()
  if not isinstance(values, list) or len(values) != count:
    got = len(values) if isinstance(values, list) else "a scalar"
    raise ValueError(
      f"{where}: the {what} ({name}) must be {count} integers or texts, one for each vector; got "
      f"{got}"
    )
  texts = []
  for row, value in enumerate(values):
    if isinstance(value, bool) or not isinstance(value, (int, str, bytes)):
      raise ValueError(
        f"{where}: the {what} ({name}) must be integers or texts; got {shown(value)} in row {row}"
      )
    try:
      texts.append(value.decode() if isinstance(value, bytes) else str(value))
    except UnicodeDecodeError as error:
      raise ValueError(f"{where}: the {what} ({name}) are not UTF-8 in row {row}") from error
  if what == "ids":
    return texts
  texts = [strings.class_name(text) for text in texts]
  if what == "labels" and not any(texts):
    return None
  if "" in texts and not partly:
    raise ValueError(f"{where}: the {what} ({name}) are empty in row {texts.index('')}")
  return texts


_KNOWN = (*VECTORS, *_CLASSES, *_SPLITS, *_IDS)


def _npz(file: Path, known: Sequence[str]) -> dict[str, Any]:
  if not zipfile.is_zipfile(file):
    raise ValueError("it is not an .npz file")
  with np.load(file, allow_pickle=False) as arrays:
    names = [name for name in arrays.files if name in (*known, *_ORIGIN)]
    others = dict.fromkeys(arrays.files)
    return others | {name: arrays[name] for name in names}


def _npy(file: Path, known: Sequence[str]) -> dict[str, Any]:
  arrays: dict[str, Any] = {"embeddings": np.load(file, allow_pickle=False)}
  beside = file.with_suffix(".csv")
  if beside.exists():
    with beside.open(newline="", encoding="utf-8-sig") as stream:
      lines = [row for row in csv.reader(stream) if row]
    header, *rows = lines or [[]]
    header = [strings.class_name(column) for column in header]
    wrong = [column for column in header if column not in known or header.count(column) > 1]
    if wrong or not header:
      raise ValueError(
        f"{beside.name} must have different columns of {', '.join(known[len(VECTORS) :])}, "
        f"separated by commas; got {shown(wrong[0] if wrong else '')}"
      )
    uneven = [row for row in rows if len(row) != len(header)]
    if uneven:
      raise ValueError(f"{beside.name} has {len(header)} columns, and a row has {uneven[0]}")
    arrays |= dict(zip(header, map(list, zip(*rows)), strict=True)) if rows else {}
  return arrays


def _parquet(file: Path, known: Sequence[str]) -> dict[str, Any]:
  from pyarrow import parquet

  table = parquet.read_table(file)
  found: dict[str, Any] = dict.fromkeys(table.column_names)
  for name in table.column_names:
    if name in VECTORS:
      found[name] = _stacked(table[name].to_pylist(), name)
    elif name in known:
      found[name] = table[name].to_pylist()
  return found


def _stacked(rows: list[Any], name: str) -> np.ndarray:
  """Stacks the vectors of a column; one that is no list, or is not like the first, raises."""
  with contextlib.suppress(ValueError):  # of unequal lengths
    array = np.array(rows)
    if array.ndim == 2 and array.dtype.kind in "fiu":
      return array
  width = np.size(rows[:1])
  for row, vector in enumerate(rows):
    numbers = np.asarray(vector)
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu" or len(numbers) != width:
      raise ValueError(
        f"{name} must be a list of equally many numbers, row {row} is {shown(vector)}"
      )
  raise ValueError(f"{name} has no rows")


def _hdf5(file: Path, known: Sequence[str]) -> dict[str, Any]:
  import h5py

  with h5py.File(file, "r") as content:
    others = dict.fromkeys(content)
    return others | {
      name: content[name][()]
      for name in content
      if name in known and isinstance(content[name], h5py.Dataset)
    }


_READERS: Mapping[str, Callable[[Path, Sequence[str]], dict[str, Any]]] = {
  ".npz": _npz,
  ".npy": _npy,
  ".parquet": _parquet,
  ".h5": _hdf5,
  ".hdf5": _hdf5,
}
