"""Exact retrieval metrics over a gallery that is read block by block, in one pass.

Average precision needs, for each positive, only the number of candidates that score at least as
high. So the positives of each query are scored first. Their scores are thresholds. Then each block
of the gallery counts its candidates at or above each threshold. Counts are integers. So their sum
does not depend on the order of the blocks, nor on the processes that counted them.

1. `make_queries` checks the queries.
2. `find_thresholds` scores the positives.
3. `BlockCounter` counts in one block. The caller adds the counts of all blocks.
4. `summarise` computes the metrics from the sums.

Scores and ties follow the rule of `soprc_jax.metrics.retrieval_metrics`. Its result on the joined
gallery is the same, bit for bit.
"""

from collections.abc import Iterable, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from soprc_jax.metrics import candidates, exact_ranks, rank_counts, retrieval, similarities

# Queries that are counted at a time. Memory is up to about 9 bytes for each pair of one of these
# and a candidate of the block.
QUERY_ROWS = 1024
# Entries of a mask of relevance at a time.
_MASK = 1 << 26
# Norms up to this have products that float32 represents.
_MAX_NORM = 2.0**50


class Queries(NamedTuple):
  """Holds checked queries.

  Attributes:
    vectors: ``[N, D]`` float32.
    labels: ``[N]`` integers.
    ids: ``[N]`` integers or text. Candidates with the id of a query are excluded from its gallery.
      None excludes none.
  """

  vectors: np.ndarray
  labels: np.ndarray
  ids: np.ndarray | None


class Block(NamedTuple):
  """Holds a part of the gallery.

  Attributes:
    vectors: ``[G, D]`` finite float16 or float32.
    labels: ``[G]`` integers; not read by `BlockCounter`.
    ids: ``[G]`` like the ids of the queries; None if the queries have none, or if no query is in
      the block.
    relevance: which candidates are positives of rows of queries, as in
      `soprc_jax.metrics.retrieval_metrics`; None: those of the same label.
  """

  vectors: np.ndarray
  labels: np.ndarray | None = None
  ids: np.ndarray | None = None
  relevance: candidates.Mask | None = None


class Thresholds(NamedTuple):
  """Holds the scores of the positives of all queries, one query after the other.

  Attributes:
    scores: ``[T]`` float32, ascending for each query.
    numbers: ``[N]`` number of positives of each query.
  """

  scores: np.ndarray
  numbers: np.ndarray


def make_queries(
  vectors: npt.ArrayLike, labels: npt.ArrayLike, ids: npt.ArrayLike | None = None
) -> Queries:
  """Checks queries.

  Args:
    vectors: ``[N, D]`` finite float16 or float32.
    labels: ``[N]`` integers.
    ids: ``[N]`` integers or text, see `Queries`.

  Raises:
    TypeError, ValueError: as `soprc_jax.metrics.retrieval_metrics`, or the vectors are not float16
      or float32.
  """
  _check_type(np.asarray(vectors))
  task = similarities.make_task(vectors, labels, None, None, ids, None, 1)
  return Queries(task.queries, np.asarray(labels), None if ids is None else np.asarray(ids))


def find_thresholds(queries: Queries, blocks: Iterable[Block]) -> Thresholds:
  """Scores the positives of each query.

  Args:
    queries: of `make_queries`.
    blocks: all positives of the queries; other candidates are ignored.

  Raises:
    TypeError, ValueError: as `soprc_jax.metrics.retrieval_metrics`.
  """
  rows = np.arange(len(queries.labels))
  found = [(np.empty(0, np.int64), np.empty(0, np.float32))]
  for block in blocks:
    _check_type(block.vectors)
    has_ids, has_mask = block.ids is not None, block.relevance is not None
    task = similarities.make_task(
      queries.vectors,
      None if has_mask else queries.labels,
      block.vectors,
      block.labels,
      queries.ids if has_ids else None,
      block.ids,
      1,
      block.relevance,
    )
    step = max(_MASK // max(len(block.vectors), 1) if has_mask else len(rows), 1)
    for start in range(0, len(rows), step):
      place, columns = task.positives(rows[start : start + step])
      place += start
      found.append((place, similarities.pair_scores(task, place, columns)))
  place, scores = (np.concatenate(parts) for parts in zip(*found, strict=True))
  return Thresholds(scores[np.lexsort((scores, place))], np.bincount(place, minlength=len(rows)))


class _Chunk(NamedTuple):
  """Holds some queries with similar numbers of positives.

  Attributes:
    rows: ``[n]`` indices of the queries.
    scores: ``[n, P]`` scores of their positives, ascending, padded by inf.
    places: ``[n, P]`` positions in `Thresholds.scores`; meaningless for the padding.
    is_real: ``[n, P]`` False for the padding.
  """

  rows: np.ndarray
  scores: np.ndarray
  places: np.ndarray
  is_real: np.ndarray


def _chunks(thresholds: Thresholds) -> Iterable[_Chunk]:
  """Yields the queries that have a positive, those with similar numbers of positives together."""
  numbers = thresholds.numbers
  starts = np.cumsum(numbers) - numbers
  # Powers of two, as in `rank_counts.padded`.
  sizes = np.array([int(number - 1).bit_length() for number in numbers], np.int64)
  for size in np.unique(sizes[numbers > 0]):
    same = np.flatnonzero((sizes == size) & (numbers > 0))
    # Few rows at a time, where there are many positives.
    step = max(min(QUERY_ROWS, (QUERY_ROWS * exact_ranks.MAX_POSITIVES) >> int(size)), 1)
    for start in range(0, len(same), step):
      rows = same[start : start + step]
      within = np.arange(1 << int(size))
      is_real = within < numbers[rows, None]
      places = np.where(is_real, starts[rows, None] + within, 0)
      scores = np.where(is_real, thresholds.scores[places], np.float32(np.inf))
      yield _Chunk(rows, scores, places, is_real)


class BlockCounter:
  """Counts the candidates of a block that score at least as high as each positive.

  Args:
    queries: of `make_queries`.
    thresholds: of `find_thresholds`.
    size: largest number of candidates of a block.
    num_candidates: size of the gallery, or an estimate. It decides only whether compiling pays.
  """

  def __init__(self, queries: Queries, thresholds: Thresholds, *, size: int, num_candidates: int):
    self._queries, self._size = queries, size
    self._num_thresholds = len(thresholds.scores)
    self._chunks = list(_chunks(thresholds))
    products = queries.vectors.size * num_candidates
    self._compiles = products >= exact_ranks.MIN_PRODUCTS
    self._sparsity = exact_ranks.Sparsity()

  def prepare(self, block: Block) -> exact_ranks.Counter:
    """Checks a block.

    Raises:
      TypeError: the vectors are not float16 or float32.
      ValueError: a vector is not finite, so large that a score would not be, or has another width
        than the queries.
    """
    _check_type(block.vectors)
    vectors = block.vectors.astype(np.float32, copy=False)
    if vectors.ndim != 2 or vectors.shape[1] != self._queries.vectors.shape[1]:
      raise ValueError(
        f"a block must be [G, {self._queries.vectors.shape[1]}], got {list(vectors.shape)}"
      )
    excluded = None
    if block.ids is not None and self._queries.ids is not None:
      excluded = candidates.group(self._queries.ids, block.ids)
    nobody = np.zeros(len(self._queries.vectors), np.int64)
    members = candidates.Groups(np.empty(0, np.int64), nobody, nobody)
    task = similarities.Task(self._queries.vectors, vectors, members, excluded, False)
    largest = task.norms[1]
    if not np.isfinite(largest):
      row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
      raise NotFiniteError(row)
    if max(largest, task.norms[0].max(initial=0.0)) > _MAX_NORM:
      similarities.check_scores(task.queries, task.gallery)
    return exact_ranks.Counter(
      task, QUERY_ROWS, compiles=self._compiles, size=self._size, sparsity=self._sparsity
    )

  def count(self, block: exact_ranks.Counter) -> np.ndarray:
    """Returns the counts ``[T]`` int64 of a block of `prepare`."""
    counts = np.zeros(self._num_thresholds, np.int64)
    for chunk in self._chunks:
      found = block.at_least(chunk.rows, chunk.scores)
      counts[chunk.places[chunk.is_real]] = found[chunk.is_real]
    return counts


class NotFiniteError(ValueError):
  """Reports a vector that is not finite.

  Attributes:
    row: its row in the block.
  """

  def __init__(self, row: int):
    super().__init__(f"the block has non-finite values, first in row {row}")
    self.row = row


def summarise(
  thresholds: Thresholds,
  counts: np.ndarray,
  *,
  ks: Sequence[int],
  num_candidates: int,
  per_query: bool = False,
) -> dict[str, Any]:
  """Computes the result of `soprc_jax.metrics.retrieval_metrics`, and mAP@k.

  mAP@k is the mean over the queries of ``1 / min(m, k) * sum_i precision_i``, where m is the number
  of positives. The sum is over the positives among the first k candidates, and ``precision_i`` is
  the share of positives at or above the score of positive i. A positive is among the first k if at
  most k candidates, itself included, score at least as high. So ties count against the model, as
  for mAUPRC, which mAP@k equals (up to rounding) for k of at least the number of candidates.

  Args:
    thresholds: of `find_thresholds`.
    counts: ``[T]`` sums of the counts of all blocks.
    ks: cut-offs k >= 1.
    num_candidates: size of the gallery.
    per_query: adds ``"ap_per_query"`` and ``"negatives_above"`` as `retrieval_metrics` does, and
      ``"ap@k_per_query"`` ``[N]`` (NaN for skipped queries) for each k.

  Raises:
    ValueError: a k is not an integer >= 1, or counts are impossible.
  """
  num_queries = len(thresholds.numbers)
  ap, above = np.full(num_queries, np.nan), np.full(num_queries, -1)
  cut = {k: np.full(num_queries, np.nan) for k in retrieval.checked_ks(ks)}
  for chunk in _chunks(thresholds):
    rows, numbers = chunk.rows, thresholds.numbers[chunk.rows]
    retrieved = np.where(chunk.is_real, counts[chunk.places], 0)
    hits = rank_counts.num_hits(chunk.scores, numbers)
    if (retrieved < hits)[chunk.is_real].any():
      raise ValueError("a positive has fewer candidates at its score than positives: blocks miss")
    ap[rows], above[rows] = rank_counts.from_counts(chunk.scores, numbers, retrieved)
    precision = np.where(chunk.is_real, hits / np.maximum(retrieved, 1), 0.0)
    for k, values in cut.items():
      sums = np.where(retrieved <= k, precision, 0.0).sum(axis=1)
      values[rows] = sums / np.minimum(numbers, k)
  result = retrieval.summarise_ranks(ap, above, ks=ks, num_candidates=num_candidates)
  for k, values in cut.items():
    count = result["num_queries"]
    result[f"mAP@{k}"] = math.fsum(values[above >= 0]) / count if count else 0.0
  if per_query:
    result |= {"ap_per_query": ap, "negatives_above": above}
    result |= {f"ap@{k}_per_query": values for k, values in cut.items()}
  return result


def _check_type(vectors: np.ndarray) -> None:
  if vectors.dtype not in (np.float16, np.float32):
    raise TypeError(f"vectors must be float16 or float32, got {vectors.dtype}")
