"""Loads stored embeddings of any model as a data set: vectors with classes, from one file."""

import collections
from collections.abc import Callable, Mapping, Sequence
import csv
import os
from pathlib import Path
from typing import Any
import zlib

import numpy as np

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import image_files, sources

SPLITS = ("train", "val", "test")
# Names of the arrays or columns, the preferred one first.
_VECTORS = ("embeddings", "embedding", "features")
_CLASSES = ("class_names", "labels", "label")
_SPLITS = ("splits", "split")
_IDS = ("ids", "id", "path")
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
  """

  def __init__(
    self,
    vectors: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str],
    class_names: Mapping[int, str] | None = None,
  ):
    self._vectors = vectors
    self._labels = np.asarray(labels, np.int64)
    self.ids = list(ids)
    self.class_names = dict(class_names or {})

  @property
  def width(self) -> int:
    """The number D of entries of a vector."""
    return self._vectors.shape[1]

  @property
  def labels(self) -> np.ndarray:
    return self._labels

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> sources.Example:
    label = int(self._labels[index])
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


def load(path: str) -> dict[str, Features]:
  """Loads the vectors of a file by split, or all under ``"all"`` without splits.

  Args:
    path: file, see the layout in the message of the error.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is unreadable, an array is missing or has another length, a vector is not
      finite, an id occurs twice, a class is in two splits, or the training or test split is
      missing.
  """
  found = _read(path, name="data.root")
  where = printable(path)
  if found.classes is None:
    raise ValueError(f"{where} has no labels. It must have\n{_LAYOUT}")
  spellings = image_files.one_spelling(found.classes, where=Path(path))
  numbers = image_files.label_numbers(spellings.values())
  labels = np.array([numbers[spellings[name]] for name in found.classes], np.int64)
  names = {number: name for name, number in numbers.items()}
  if found.splits is None:
    return {"all": Features(found.vectors, labels, found.ids, names)}
  wrong = sorted(set(found.splits) - set(SPLITS))
  if wrong:
    raise ValueError(f"{where}: a split must be one of {', '.join(SPLITS)}; got {shown(wrong[0])}")
  splits, of = {}, np.array(found.splits)
  for split in SPLITS:
    places = np.flatnonzero(of == split)
    if places.size:
      ids = [found.ids[place] for place in places]
      splits[split] = Features(found.vectors[places], labels[places], ids, names)
  for split in ("train", "test"):
    if split not in splits:
      raise ValueError(f"{where} has no vector of split {split!r}")
  for place, one in enumerate(splits):
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
  found = _read(path, name=name)
  classes = found.classes or [""] * len(found.vectors)
  names = {number: text for number, text in enumerate(dict.fromkeys(classes)) if text}
  numbers = {text: number for number, text in enumerate(dict.fromkeys(classes))}
  return Features(found.vectors, np.array([numbers[text] for text in classes]), found.ids, names)


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
  """The checked content of a file; classes and splits are None if the file has none."""

  def __init__(self, arrays: Mapping[str, Any], where: str):
    vectors = next((arrays[name] for name in _VECTORS if name in arrays), None)
    if vectors is None:
      raise ValueError(f"{where} has no embeddings, but {_names(arrays)}. It must have\n{_LAYOUT}")
    vectors = np.asarray(vectors)
    if vectors.dtype.kind not in "fiu" or vectors.ndim != 2 or 0 in vectors.shape:
      raise ValueError(
        f"{where}: the embeddings must be numbers [N, D], got {vectors.dtype} {list(vectors.shape)}"
      )
    with np.errstate(over="ignore"):
      self.vectors = np.ascontiguousarray(vectors, np.float32)
    finite = np.isfinite(self.vectors).all(axis=1)
    if not finite.all():
      raise ValueError(
        f"{where}: {int((~finite).sum())} vectors are not finite in float32, the first in row "
        f"{int(np.argmin(finite))}: remove them"
      )
    count = len(vectors)
    columns = {
      what: _texts(arrays, names, count, what=what, where=where)
      for what, names in (("labels", _CLASSES), ("splits", _SPLITS), ("ids", _IDS))
    }
    self.classes, self.splits = columns["labels"], columns["splits"]
    self.ids = columns["ids"] or [str(row) for row in range(count)]
    twice, times = collections.Counter(self.ids).most_common(1)[0]
    if times > 1:
      raise ValueError(f"{where}: the id {shown(twice)} occurs {times} times: ids must differ")


def _read(path: str, *, name: str) -> _Table:
  file = file_io.given(path, name=name)
  why = file_io.why_no_file(file) if path else "missing"
  if why:
    raise FileNotFoundError(
      f"{name}={path!r} must be a file of stored embeddings ({why}). It must have\n{_LAYOUT}"
    )
  reader = _READERS.get(file.suffix.lower())
  if reader is None:
    raise ValueError(
      f"{name}={printable(path)}: the name must end in {', '.join(_READERS)}. The file must have\n"
      f"{_LAYOUT}"
    )
  try:
    arrays = reader(file)
  except ImportError as error:
    raise ValueError(
      f"{name}={printable(path)} needs the package {error.name}: pip install {error.name}, or "
      "convert the file to .npz"
    ) from None
  except Exception as error:  # corrupt files raise many kinds of errors
    raise ValueError(f"{name}={printable(path)} cannot be read: {error}") from error
  return _Table(arrays, printable(path))


def _first(arrays: Mapping[str, Any], names: Sequence[str]) -> Any:
  """Returns the first array that is there and not empty, or None."""
  return next((arrays[name] for name in names if name in arrays and np.size(arrays[name])), None)


def _names(arrays: Mapping[str, Any]) -> str:
  return ", ".join(map(shown, arrays)) or "nothing"


def _texts(
  arrays: Mapping[str, Any], names: Sequence[str], count: int, *, what: str, where: str
) -> list[str] | None:
  """Returns a column as texts without blanks at their ends, or None if there is none."""
  array = _first(arrays, names)
  if array is None or np.ndim(array) == 0:  # a scalar is a note of `soprc embed` on its own run
    return None
  values = np.asarray(array).tolist()
  if len(values) != count or not all(isinstance(value, (int, str, bytes)) for value in values):
    raise ValueError(
      f"{where}: the {what} must be {count} integers or texts, one for each vector; got "
      f"{len(values)} of {type(values[0]).__name__}"
    )
  texts = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
  if what == "ids":
    return texts
  texts = [strings.class_name(text) for text in texts]
  if what == "labels" and not any(texts):
    return None
  if "" in texts:
    raise ValueError(f"{where}: the {what} are empty in row {texts.index('')}")
  return texts


def _npz(file: Path) -> dict[str, Any]:
  with np.load(file, allow_pickle=False) as arrays:
    return {name: arrays[name] for name in arrays.files}


def _npy(file: Path) -> dict[str, Any]:
  arrays: dict[str, Any] = {"embeddings": np.load(file, allow_pickle=False)}
  beside = file.with_suffix(".csv")
  if beside.exists():
    with beside.open(newline="", encoding="utf-8-sig") as stream:
      header, *rows = csv.reader(stream)
    uneven = [row for row in rows if len(row) != len(header)]
    if uneven:
      raise ValueError(f"{beside.name} has {len(header)} columns, and a row has {uneven[0]}")
    arrays |= dict(zip(header, map(list, zip(*rows)), strict=True))
  return arrays


def _parquet(file: Path) -> dict[str, Any]:
  from pyarrow import parquet

  table = parquet.read_table(file)
  return {
    name: np.stack(table[name].to_numpy()) if name in _VECTORS else table[name].to_pylist()
    for name in table.column_names
    if name in (*_VECTORS, *_CLASSES, *_SPLITS, *_IDS)
  }


def _hdf5(file: Path) -> dict[str, Any]:
  import h5py

  with h5py.File(file, "r") as content:
    return {name: content[name][()] for name in content}


_READERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
  ".npz": _npz,
  ".npy": _npy,
  ".parquet": _parquet,
  ".h5": _hdf5,
  ".hdf5": _hdf5,
}
