"""Documents with features and relevance in groups, one group for each query, and padded batches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from soprc_jax.data import balanced


class QueryGroups(NamedTuple):
  """Holds the documents of G queries, those of a query side by side.

  Attributes:
    features: ``[N, D]`` float32.
    relevance: ``[N]`` float32 >= 0; a document is relevant if it is > 0.
    sizes: ``[G]`` numbers of documents >= 1, with sum N.
    names: name of each query.

  >>> groups = QueryGroups(np.zeros((3, 1)), np.array([1, 0, 0]), np.array([2, 1]), ("a", "b"))
  >>> print(groups.starts, groups.relevant, groups.shares)
  [0 2] [1 0] [0.5 0. ]
  """

  features: np.ndarray
  relevance: np.ndarray
  sizes: np.ndarray
  names: Sequence[str]

  @property
  def starts(self) -> np.ndarray:
    """The row of the first document of each query, ``[G]``."""
    return np.cumsum(self.sizes) - self.sizes

  @property
  def relevant(self) -> np.ndarray:
    """The number of relevant documents of each query, ``[G]``."""
    return np.add.reduceat((self.relevance > 0).astype(np.int64), self.starts)

  @property
  def shares(self) -> np.ndarray:
    """The share of relevant documents of each query, ``[G]``: the prior of its list."""
    return self.relevant / self.sizes

  @property
  def graded(self) -> np.ndarray:
    """Whether the documents of a query differ in relevance, ``[G]``.

    A query without such a difference cannot be ranked better or worse.
    """
    return np.minimum.reduceat(self.relevance, self.starts) < np.maximum.reduceat(
      self.relevance, self.starts
    )


def padded_rows(
  groups: QueryGroups, chosen: np.ndarray, *, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rows of the documents of some queries, padded to a common length L.

  Nothing is cut. With ``length=None`` L is the smallest power of two that fits the longest of the
  chosen queries, but at most the longest of all. So a function of ``[Q, L]`` is compiled at most
  once for each power of two, and less than half of the longest row is padding. The shorter queries
  of the batch are padded to the same L.

  Args:
    groups: the documents.
    chosen: ``[Q]`` numbers of queries.
    length: L; None chooses it.

  Returns:
    ``[Q, L]`` int32 rows of documents, 0 where padded, and ``[Q, L]`` mask of the documents.

  Raises:
    ValueError: a query has more than ``length`` documents.

  >>> groups = QueryGroups(np.zeros((4, 1)), np.zeros(4), np.array([3, 1]), ("a", "b"))
  >>> print(*padded_rows(groups, np.array([1, 0])))
  [[3 0 0]
   [0 1 2]] [[ True False False]
   [ True  True  True]]
  """
  sizes = groups.sizes[chosen]
  if length is None:
    length = min(1 << (int(sizes.max()) - 1).bit_length(), int(groups.sizes.max()))
  if sizes.max() > length:
    at = chosen[int(np.argmax(sizes))]
    raise ValueError(
      f"length={length} would cut the query {groups.names[at]!r} of {sizes.max()} documents: raise "
      "it, or pass None"
    )
  columns = np.arange(length)
  where = columns < sizes[:, None]
  rows = np.where(where, groups.starts[chosen][:, None] + columns, 0)
  return rows.astype(np.int32), where


class GroupSampler(balanced.BalancedSampler):
  """Draws the ``[Q]`` numbers of the queries of a batch, a pure function of (seed, step).

  Every query is drawn once in an epoch, in an order that is shuffled again in every epoch.

  Args:
    num_groups: G.
    batch_size: Q, the number of queries in a batch, from 2 to G.
    seed: integer >= 0.

  Raises:
    ValueError: the batch size is out of range.

  >>> sampler = GroupSampler(4, batch_size=2, seed=0)
  >>> sorted(int(query) for step in range(2) for query in sampler(step))
  [0, 1, 2, 3]
  """

  def __init__(self, num_groups: int, *, batch_size: int, seed: int):
    if not 2 <= batch_size <= num_groups:
      raise ValueError(
        f"a batch must have 2 to {num_groups} queries, as many as there are; got {batch_size}"
      )
    super().__init__(np.zeros(num_groups), batch_size=batch_size, positive_share=0, seed=seed)
