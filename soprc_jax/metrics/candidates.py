"""Some of the candidates of each query: those that share its key, or those that a mask selects."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from soprc_jax._internal import masks

# A bool array or a sparse matrix ``[N, G]``, or a function of rows ``[n]`` that returns ``[n, G]``.
Mask = Callable[[np.ndarray], Any] | Any


class Candidates(Protocol):
  """Selects some of the candidates of each query, e.g. the relevant ones.

  ``rows`` are indices of queries, ascending. Pairs consist of the place of a query among ``rows``
  and the position of a candidate, ``[n]`` each, in ascending order.
  """

  def counts_of(self, rows: np.ndarray) -> np.ndarray:
    """Returns the number of candidates of each query."""

  def of_each(self, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the positions of the candidates of each query."""

  def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs."""

  def contains(self, rows: np.ndarray, place: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns which of some pairs are selected."""

  def fill(self, scores: np.ndarray, rows: np.ndarray, value: float) -> None:
    """Writes a value into ``scores [n, G]`` of all pairs."""


class Groups(NamedTuple):
  """Holds, for each query, the positions in the gallery that share its key.

  Attributes:
    order: ``[G]`` positions, grouped by key, ascending within each group.
    starts: ``[N]`` where the group of a query begins in ``order``.
    counts: ``[N]`` size of that group; 0 if the gallery lacks the key.
  """

  order: np.ndarray
  starts: np.ndarray
  counts: np.ndarray

  def counts_of(self, rows: np.ndarray) -> np.ndarray:
    return self.counts[rows]

  def of_each(self, rows: np.ndarray) -> Iterator[np.ndarray]:
    for row in rows:
      yield self.order[self.starts[row] : self.starts[row] + self.counts[row]]

  def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    counts = self.counts[rows]
    place = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place, self.order[np.repeat(self.starts[rows], counts) + within]

  def contains(self, rows: np.ndarray, place: np.ndarray, columns: np.ndarray) -> np.ndarray:
    # A position is in the group of a query if its place in the order lies there.
    places = np.empty_like(self.order)
    places[self.order] = np.arange(len(places))
    within = places[columns] - self.starts[rows][place]
    return (within >= 0) & (within < self.counts[rows][place])

  def fill(self, scores: np.ndarray, rows: np.ndarray, value: float) -> None:
    scores[self.pairs(rows)] = value


class Masked:
  """Selects the candidates of a mask that is read block by block.

  Args:
    name: name of the mask in errors.
    mask: bool array or sparse matrix ``[N, G]``, or function of rows that returns their ``[n, G]``.
    shape: N and G.
    also: groups that are selected too.

  Raises:
    ValueError: a shape does not fit, or a number is neither 0 nor 1.
  """

  def __init__(self, name: str, mask: Any, shape: tuple[int, int], also: Groups | None = None):
    self._name, self._width, self._also = name, shape[1], also
    self._rows, self._block = np.arange(0), np.zeros((0, shape[1]), bool)
    if callable(mask):
      self._read = mask
      return
    table: Any = mask.tocsr() if hasattr(mask, "tocsr") else np.asarray(mask)
    if table.shape != shape:
      raise ValueError(
        f"{name} must be [N, G] = {shape}, a row for each query and a column for each candidate; "
        f"got {table.shape}"
      )
    # Before the work of an evaluation. In rows, since a temporary could be larger than the mask.
    for part in [table.data] if hasattr(mask, "tocsr") else table:
      masks.check_mask(part, name)
    self._read = table.__getitem__

  def block(self, rows: np.ndarray) -> np.ndarray:
    """Returns the mask of some queries, ``[n, G]``. It reads each row of a block once."""
    if not np.isin(rows, self._rows).all():
      self._rows, self._block = rows, self._checked(rows)
    if len(rows) == len(self._rows):
      return self._block
    return self._block[np.searchsorted(self._rows, rows)]

  def _checked(self, rows: np.ndarray) -> np.ndarray:
    found = self._read(rows)
    found = np.asarray(found.toarray() if hasattr(found, "toarray") else found)
    if found.shape != (len(rows), self._width):
      raise ValueError(
        f"{self._name} must return [{len(rows)}, {self._width}] for {len(rows)} rows, a column for "
        f"each candidate; got {found.shape}"
      )
    masks.check_mask(found, self._name)
    found = found.astype(bool)
    if self._also is not None:
      self._also.fill(found, rows, True)
    return found

  def counts_of(self, rows: np.ndarray) -> np.ndarray:
    return self.block(rows).sum(axis=1)

  def of_each(self, rows: np.ndarray) -> Iterator[np.ndarray]:
    for row in self.block(rows):
      yield np.flatnonzero(row)

  def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # A search over one axis is twenty times as fast as over two.
    place, columns = np.divmod(np.flatnonzero(self.block(rows)), self._width)
    return place, columns

  def contains(self, rows: np.ndarray, place: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return self.block(rows)[place, columns]

  def fill(self, scores: np.ndarray, rows: np.ndarray, value: float) -> None:
    scores[self.block(rows)] = value


def group(keys: np.ndarray, gallery_keys: np.ndarray) -> Groups:
  """Groups the positions in ``gallery_keys [G]`` by each of ``keys [N]``.

  Keys of different integer types are compared by value.
  """
  if (
    np.result_type(keys, gallery_keys).kind == "f"
  ):  # numpy would compare uint64 and signed integers in float64
    keys, gallery_keys = keys.astype(object), gallery_keys.astype(object)
  order = np.argsort(gallery_keys, kind="stable")
  ordered = gallery_keys[order]
  starts = np.searchsorted(ordered, keys, side="left")
  return Groups(order, starts, np.searchsorted(ordered, keys, side="right") - starts)
