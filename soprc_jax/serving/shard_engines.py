"""Indexes of faiss and usearch behind one interface. The rows of a gallery are added in blocks."""

from collections.abc import Callable
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from soprc_jax._internal.strings import printable

# faiss asks for this many vectors for each centroid of k-means. More than `_PER_LIST` are slow.
_LEAST, _PER_LIST = 39, 64
_CENTROIDS = 256
# Vectors from which the ranges of 8-bit numbers are found.
_RANGE_SAMPLE = 100_000
_FULL = "perhaps since the disk is full: free some space, or choose another --output"


class Engine(Protocol):
  """Is an index of a package."""

  def add(self, vectors: np.ndarray, first: int) -> None:
    """Adds ``[n, D]`` float32 vectors as the rows from ``first`` on."""

  def search(self, queries: np.ndarray, count: int) -> np.ndarray:
    """Returns ``[Q, count]`` rows with large products, the largest first; -1 for none."""

  def save(self, file: BinaryIO) -> None:
    """Writes the index to an open file, which the package itself can read too.

    Raises:
      OSError: if it cannot be written completely.
    """


class Kind(NamedTuple):
  """Describes a kind of index.

  Attributes:
    suffix: of its file: that of the package.
    sample: number of rows -> number of vectors that it is trained on; 0 for none.
    make: makes an empty index from the width, the number of rows and the sample.
    load: reads a file.
  """

  suffix: str
  sample: Callable[[int], int]
  make: Callable[[int, int, np.ndarray], Engine]
  load: Callable[[Path], Engine]


class _Faiss:
  def __init__(self, index: Any):
    self._index = index

  def add(self, vectors: np.ndarray, first: int) -> None:
    self._index.add(np.ascontiguousarray(vectors, np.float32))

  def search(self, queries: np.ndarray, count: int) -> np.ndarray:
    return self._index.search(np.ascontiguousarray(queries, np.float32), count)[1]

  def save(self, file: BinaryIO) -> None:
    # By a path, faiss would report only some of the errors of a full disk.
    _faiss().write_index(self._index, _faiss().PyCallbackIOWriter(file.write))


class _Usearch:
  def __init__(self, index: Any):
    self._index = index

  def add(self, vectors: np.ndarray, first: int) -> None:
    self._index.add(np.arange(first, first + len(vectors), dtype=np.uint64), vectors)

  def search(self, queries: np.ndarray, count: int) -> np.ndarray:
    found = np.full((len(queries), count), -1)
    matches = self._index.search(queries.reshape(len(queries), -1), min(count, len(self._index)))
    # usearch returns one row for one query.
    keys = np.atleast_2d(matches.keys).astype(np.int64)
    counts = np.full(len(queries), getattr(matches, "counts", keys.shape[1]))
    found[:, : keys.shape[1]] = np.where(np.arange(keys.shape[1]) < counts[:, None], keys, -1)
    return found

  def save(self, file: BinaryIO) -> None:
    wanted = self._index.serialized_length
    try:
      self._index.save(file.name)
    except RuntimeError as error:
      raise OSError(f"usearch could not write its {wanted} bytes ({error}), {_FULL}") from error
    size = os.fstat(file.fileno()).st_size
    if size != wanted:  # usearch does not report all errors
      raise OSError(f"usearch wrote {size} of {wanted} bytes, {_FULL}")


def _faiss() -> Any:
  try:
    import faiss
  except ImportError:
    raise ValueError("this kind of index needs the package faiss: pip install faiss-cpu") from None
  return faiss


def _usearch() -> Any:
  try:
    from usearch import index
  except ImportError:
    raise ValueError("--kind=usearch needs the package usearch: pip install usearch") from None
  return index


def _num_lists(rows: int) -> int:
  """Returns the number of lists of IVF: about the square root of the number of rows."""
  return max(min(2 ** round(np.log2(max(rows, 1)) / 2), rows // _LEAST), 1)


def _ivfpq_sample(rows: int) -> int:
  if rows < _LEAST * _CENTROIDS:
    raise ValueError(
      f"--kind=ivfpq needs at least {_LEAST * _CENTROIDS} embeddings, got {rows}: take hnsw"
    )
  return min(rows, max(_PER_LIST * _num_lists(rows), _LEAST * _CENTROIDS))


def _ivfpq(width: int, rows: int, sample: np.ndarray) -> Engine:
  """Makes an inverted file with codes of a byte for each four entries, or for fewer."""
  # faiss needs parts of equal width.
  size = next(part for part in range(max(width // 4, 1), width + 1) if width % part == 0)
  lists = _num_lists(rows)
  index = _faiss().index_factory(width, f"IVF{lists},PQ{size}", _faiss().METRIC_INNER_PRODUCT)
  index.train(sample)
  index.nprobe = min(max(lists // 16, 8), lists)
  return _Faiss(index)


def _hnsw(width: int, rows: int, sample: np.ndarray) -> Engine:
  return _Faiss(_faiss().IndexHNSWFlat(width, 32, _faiss().METRIC_INNER_PRODUCT))


def _int8(width: int, rows: int, sample: np.ndarray) -> Engine:
  faiss = _faiss()
  kind = faiss.ScalarQuantizer.QT_8bit
  index = faiss.IndexScalarQuantizer(width, kind, faiss.METRIC_INNER_PRODUCT)
  index.train(sample)
  return _Faiss(index)


def _binary(width: int, rows: int, sample: np.ndarray) -> Engine:
  # The bits are the signs of the entries, without a rotation or trained thresholds.
  return _Faiss(_faiss().IndexLSH(width, width, False, False))


def _hnsw_of_usearch(width: int, rows: int, sample: np.ndarray) -> Engine:
  return _Usearch(_usearch().Index(ndim=width, metric="ip", dtype="f16"))


def _load_faiss(path: Path) -> Engine:
  faiss = _faiss()
  try:
    return _Faiss(faiss.read_index(str(path)))
  except RuntimeError as error:
    raise _unreadable(path, error) from error


def _load_usearch(path: Path) -> Engine:
  index = _usearch()
  try:
    return _Usearch(index.Index.restore(str(path)))
  except (ValueError, RuntimeError) as error:
    raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
  return ValueError(
    f"{printable(path)} is not a readable index ({str(error)[:200]}): build it again with soprc "
    "index"
  )


KINDS = {
  "ivfpq": Kind(".faiss", _ivfpq_sample, _ivfpq, _load_faiss),
  "hnsw": Kind(".faiss", lambda rows: 0, _hnsw, _load_faiss),
  "int8": Kind(".faiss", lambda rows: min(rows, _RANGE_SAMPLE), _int8, _load_faiss),
  "binary": Kind(".faiss", lambda rows: 0, _binary, _load_faiss),
  "usearch": Kind(".usearch", lambda rows: 0, _hnsw_of_usearch, _load_usearch),
}
