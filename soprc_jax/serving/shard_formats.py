"""Layouts of embeddings in files: ``.npy``, ``.fbin`` and HDF5.

* ``.npy``: of numpy, float32 or float16.
* ``.fbin``: of big-ann-benchmarks, cuVS and DiskANN. Two uint32, the numbers of rows and columns,
  then the rows in float32; all little-endian.
* ``.h5`` or ``.hdf5``: a dataset ``features`` (or embeddings, embedding) ``[N, D]`` of float32 or
  float16, and one of ids, ``index`` (or ids, id, path). The features of ILIAS are stored like this.
"""

from collections.abc import Sequence
from pathlib import Path
import tokenize
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import features

SUFFIXES = (".npy", ".fbin", ".h5", ".hdf5")
# Columns of ids, the preferred one first.
IDS = ("ids", "id", "path")
REMEDY = "remove the shard, and write it again with soprc embed"
_DTYPES = (np.dtype(np.float16), np.dtype(np.float32))
_FBIN_HEADER = np.dtype("<u4")
# Rows that are gathered at a time.
_GATHERED = 1 << 14


class Layout(NamedTuple):
  """Describes where the embeddings are in a file.

  Attributes:
    rows: number N of embeddings.
    width: number D of their entries.
    dtype: float16 or float32.
    offset: bytes before the first embedding, if the rows are consecutive bytes; otherwise None.
    dataset: name of the dataset of an HDF5 file; empty for others.
  """

  rows: int
  width: int
  dtype: np.dtype
  offset: int | None
  dataset: str = ""


def layout(path: Path) -> Layout:
  """Reads where the embeddings are in a file. Other suffixes are read as ``.npy``.

  Raises:
    ValueError: if the file is truncated or no array ``[N, D]`` of float16 or float32.
    OSError: if it cannot be read.
  """
  suffix = path.suffix.lower()
  if suffix in (".h5", ".hdf5"):
    return _hdf5(path)
  return _fbin(path) if suffix == ".fbin" else _npy(path)


def _npy(path: Path) -> Layout:
  with path.open("rb") as file:
    try:
      version = np.lib.format.read_magic(file)
      lib: Any = np.lib.format
      read = lib.read_array_header_1_0 if version == (1, 0) else lib.read_array_header_2_0
      shape, is_fortran, dtype = read(file)
    except (ValueError, TypeError, RecursionError, tokenize.TokenError) as error:
      raise ValueError(
        f"{printable(path)} is not a readable .npy file ({error}): give e.g. 'shards/*.npy', or "
        "write it again"
      ) from error
    offset = file.tell()
  _check_array(path, "", shape, dtype, is_fortran=is_fortran)
  return _with_size(path, Layout(shape[0], shape[1], dtype, offset))


def _fbin(path: Path) -> Layout:
  header = np.fromfile(path, _FBIN_HEADER, 2)
  if len(header) < 2 or not header[1]:
    raise ValueError(
      f"{printable(path)} is not a readable .fbin file: it must begin with two uint32, the numbers "
      "of rows and columns. Write it again"
    )
  rows, width = header.tolist()
  return _with_size(path, Layout(rows, width, np.dtype(np.float32), header.nbytes))


def _with_size(path: Path, found: Layout) -> Layout:
  """Returns a layout if it fills the file."""
  size = path.stat().st_size
  wanted = (found.offset or 0) + found.rows * found.width * found.dtype.itemsize
  if size != wanted:
    raise ValueError(
      f"{printable(path)} is {'truncated' if size < wanted else 'corrupt'}: it has {size} bytes "
      f"instead of {wanted}. {REMEDY[0].upper()}{REMEDY[1:]}"
    )
  return found


def _check_array(
  path: Path, dataset: str, shape: tuple[int, ...], dtype: np.dtype, *, is_fortran: bool = False
) -> None:
  if len(shape) != 2 or not shape[1] or is_fortran or dtype not in _DTYPES:
    raise ValueError(
      f"{printable(path)}{f': {dataset}' if dataset else ''} must be an array [N, D] of float16 or "
      f"float32 in C order, got {dtype} {list(shape)}{' in Fortran order' if is_fortran else ''}: "
      "convert it"
    )


def _hdf5(path: Path) -> Layout:
  with _opened(path) as file:
    name = _dataset(file, features.VECTORS)
    if not name:
      there = ", ".join(map(shown, file)) or "nothing"
      raise ValueError(
        f"{printable(path)} has no dataset {' or '.join(features.VECTORS)}, but {there}: rename "
        "that of the embeddings"
      )
    found = file[name]
    _check_array(path, name, found.shape, found.dtype)
    offset = None if found.chunks else found.id.get_offset()
    rows, width = map(int, found.shape)
    return Layout(rows, width, found.dtype, offset, name)


def _opened(path: Path) -> Any:
  """Opens an HDF5 file for reading."""
  try:
    import h5py
  except ImportError:
    raise ValueError(
      f"{printable(path)} needs the package h5py: pip install h5py, or convert it to .npy"
    ) from None
  try:
    return h5py.File(path, "r")
  except OSError as error:
    raise ValueError(
      f"{printable(path)} is not a readable HDF5 file ({error}). {REMEDY[0].upper()}{REMEDY[1:]}"
    ) from error


def _dataset(file: Any, names: Sequence[str]) -> str:
  """Returns the first of some names that is a dataset inside an HDF5 file, or ""."""
  import h5py

  for name in names:
    # A link or a virtual dataset would read other files.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
      continue
    found = file[name]
    if isinstance(found, h5py.Dataset) and not (found.is_virtual or found.external):
      return name
  return ""


def ids(path: Path) -> list[Any] | None:
  """Returns the ids in an HDF5 file, texts or integers; None if there are none.

  Raises:
    ValueError: if they cannot be read.
  """
  import h5py

  with _opened(path) as file:
    name = _dataset(file, ("index", *IDS))
    if not name:
      return None
    try:
      text = h5py.check_string_dtype(file[name].dtype)
      return np.atleast_1d(file[name].asstr()[()] if text else file[name][()]).tolist()
    except Exception as error:  # a corrupt file can raise many kinds
      raise ValueError(f"{printable(path)}: {name} cannot be read: {error}") from error


def read(path: Path, found: Layout, start: int, count: int) -> np.ndarray:
  """Reads some embeddings, ``[count, D]``.

  A memory map would keep what it has read in the memory of the process.

  Raises:
    ValueError: if the file has become shorter, or is corrupt.
    OSError: if it cannot be read.
  """
  if found.offset is None:
    with _opened(path) as file:
      try:
        return file[found.dataset][start : start + count]
      except (OSError, KeyError) as error:
        raise ValueError(f"{printable(path)} is corrupt ({error}): {REMEDY}") from error
  at = found.offset + start * found.width * found.dtype.itemsize
  values = np.fromfile(path, found.dtype, count * found.width, offset=at)
  if values.size != count * found.width:
    raise ValueError(f"{printable(path)} was truncated while it was read: {REMEDY}")
  return values.reshape(count, found.width)


def gather(path: Path, found: Layout, rows: np.ndarray) -> np.ndarray:
  """Reads the embeddings in some rows, ``[n, D]``, in bounded additional memory."""
  values = np.empty((len(rows), found.width), found.dtype)
  if found.offset is None:
    for start in range(0, found.rows, _GATHERED):
      here = (rows >= start) & (rows < start + _GATHERED)
      if here.any():
        block = read(path, found, start, min(_GATHERED, found.rows - start))
        values[here] = block[rows[here] - start]
    return values
  for start in range(0, len(rows), _GATHERED):
    part = slice(start, start + _GATHERED)
    # Opened again for each part: closing a map releases the memory of what it has read.
    mapped = np.memmap(path, found.dtype, "r", found.offset, (found.rows, found.width))
    values[part] = mapped[rows[part]]
  return values


def check_written(suffix: str, dtype: str) -> None:
  """Raises a ValueError if a format cannot be written here, or has no such numbers.

  Args:
    suffix: one of `SUFFIXES`.
    dtype: float32 or float16.
  """
  if suffix == ".fbin" and dtype != "float32":
    raise ValueError(f"--format=fbin holds float32: leave out --dtype={dtype}, or use npy or h5")
  if suffix == ".h5":
    try:
      import h5py  # noqa: F401
    except ImportError:
      raise ValueError("--format=h5 needs the package h5py: pip install h5py") from None


def write(file: BinaryIO, suffix: str, vectors: np.ndarray, names: Sequence[str]) -> None:
  """Writes embeddings into an open file, which can be read and sought too.

  Args:
    file: the file.
    suffix: one of `SUFFIXES`.
    vectors: ``[N, D]``; float32 for ``.fbin``.
    names: ``[N]`` ids; only HDF5 has a place for them.
  """
  if suffix == ".fbin":
    file.write(np.array(vectors.shape, _FBIN_HEADER).tobytes())
    file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
  elif suffix == ".h5":
    import h5py

    with h5py.File(file, "w") as content:
      content.create_dataset("features", data=vectors)
      content.create_dataset("index", data=list(names), dtype=h5py.string_dtype())
  else:
    np.save(file, vectors, allow_pickle=False)
