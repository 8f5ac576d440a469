"""Candidates of each query that share its key: its class, or its id."""

from typing import NamedTuple

import numpy as np


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

  def of(self, row: int) -> np.ndarray:
    """Returns the positions that share the key of a query."""
    return self.order[self.starts[row] : self.starts[row] + self.counts[row]]

  def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs each of ``rows``, given by its index among them, with each position of its group.

    Returns:
      Indices and positions, ``[n]`` each.
    """
    counts = self.counts[rows]
    place = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place, self.order[np.repeat(self.starts[rows], counts) + within]


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


def inverse(order: np.ndarray) -> np.ndarray:
  """Returns the inverse of a permutation."""
  places = np.empty_like(order)
  places[order] = np.arange(len(order))
  return places
