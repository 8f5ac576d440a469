"""Exact ranks in a large gallery, from float32 products wherever these decide the order.

Let ``a`` be a query, ``b`` a candidate, ``u = 2^-24``, and D the width. Let ``s`` be the exact
score: by the rule of `similarities` a float64 sum, rounded to float32 unless an embedding is
float64. Let ``S`` be the float32 product. Then ``|S - s| <= 1.01 (D + 8) u |a| |b| + tiny``:

* Rounding a and b to float32 changes ``sum |a_i b_i| <= |a| |b|`` (Cauchy-Schwarz) by at most ``(2
  u + u^2) |a| |b|``.
* A float32 sum of D products has an error of at most ``D u / (1 - D u)`` times the sum of the
  absolute products (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). This holds for
  any order, with or without fused multiply-add.
* The float64 sum has an error of less than ``2^-28`` of that. Rounding it to float32 changes it by
  at most ``u |a| |b|``.
* Underflow, flushed to zero or not, costs less than ``2^-126`` in each of 2 D operations and in a
  comparison. In each of 2 D conversions it costs that times an entry of the other vector. ``tiny =
  2^-123 D (1 + |a| + |b|)`` is more than all of this.

Let p be the score of a positive. A candidate whose S differs from p by more than the bound is
certainly above or below p. The few other candidates are scored exactly. Nothing is estimated: the
counts are those of the exact scores.

For a good model few candidates reach the lowest positive of a query. On a CPU these are scored
exactly, and the others cost a product and one comparison (`Sparsity`).

With exact scores alone `retrieval_metrics` takes more than three times as long, both for 5,000 x
512 and for 1,024 queries in a gallery of 60,000.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.metrics import rank_counts, similarities

# Below this many multiplications all scores are computed exactly, since compiling takes longer.
MIN_PRODUCTS = 2**31
# Queries with more positives than this are counted in the sorted exact scores.
MAX_POSITIVES = 128
# An exact score of a single pair takes about as long as this many in a matrix product.
_PAIR_COST = 64
# Pairs that are compared with all positives of their query at a time.
_PAIRS = 2**14
# Rows of a product at a time, so that they are counted while still in the cache. With fewer rows
# the product is slow in a large gallery.
_TILE = 256
_MAX_WIDTH, _MAX_NORM = 2**16, 2.0**60


@dataclasses.dataclass
class Sparsity:
  """Says whether few candidates reach the lowest positive of most queries.

  Attributes:
    holds: assumed on a CPU until a block of queries shows otherwise. Counters of several parts of a
      gallery share it. It changes the time, and not the result.
  """

  holds: bool = dataclasses.field(default_factory=lambda: jax.default_backend() == "cpu")


class Counter:
  """Computes the ranks of blocks of queries, with the same result as `exact_ranks`.

  Args:
    task: queries and gallery.
    block_size: largest number of rows of a block.
    compiles: whether compiling takes less time than it saves; None decides by this task alone.
    size: number of candidates to compile for, at least that of the gallery; None takes that.
    sparsity: that of other parts of the gallery; None assumes that it holds.
  """

  def __init__(
    self,
    task: similarities.Task,
    block_size: int,
    *,
    compiles: bool | None = None,
    size: int | None = None,
    sparsity: Sparsity | None = None,
  ):
    self._task = task
    self._sparsity = Sparsity() if sparsity is None else sparsity
    # With more undecided candidates than this, exact scores of all candidates are cheaper. A short
    # part of a gallery may hold all positives, which says nothing about the other parts.
    self._limit = max(len(task.gallery), size or 0) // _PAIR_COST
    (norms, largest), width = task.norms, task.queries.shape[1]
    if compiles is None:
      compiles = len(norms) * task.gallery.size >= MIN_PRODUCTS
    self._is_fast = (
      compiles
      and width <= _MAX_WIDTH
      and max(largest, norms.max(initial=0.0)) <= _MAX_NORM
      # Other backends may build a float32 product from shorter types, which the bound does not
      # cover.
      and jax.default_backend() in ("cpu", "gpu")
    )
    if self._is_fast:
      self._bound = 1.01 * (width + 8) * 2.0**-24 * norms * largest + 2.0**-123 * width * (
        1 + norms + largest
      )
      self._tiles = _tiles(min(block_size, len(norms)))
      self._gallery, self._size = np.asarray(task.gallery, np.float32), size or 0

  @functools.cached_property
  def _device_gallery(self) -> jax.Array:
    """The gallery in the number of rows that is compiled for."""
    # Scores that are NaN are above no threshold, and near none.
    missing = max(self._size - len(self._gallery), 0)
    filler = np.full((missing, self._gallery.shape[1]), np.nan, np.float32)
    return jnp.asarray(np.concatenate([self._gallery, filler]) if missing else self._gallery)

  def ranks(self, rows: np.ndarray) -> rank_counts.Ranks:
    """Returns the ranks of the queries ``rows``."""
    left = np.ones(len(rows), bool)
    ap, above = np.full(len(rows), np.nan), np.full(len(rows), -1)
    if self._is_fast:
      few = self._task.members.counts_of(rows) <= MAX_POSITIVES
      if self._task.excluded is not None:
        few &= self._task.excluded.counts_of(rows) <= self._limit
      places = np.flatnonzero(few)
      decided, (ap[places], above[places]) = self._fast_ranks(rows[places])
      left[places[decided]] = False
      # If most queries stay undecided, the embeddings of other blocks are likely as close too.
      self._is_fast = left.mean() < 0.5
    if left.any():
      ap[left], above[left] = exact_ranks(self._task, rows[left])
    return rank_counts.Ranks(ap, above)

  def at_least(self, rows: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Counts the candidates of the queries ``rows`` that score at least as high as thresholds.

    Args:
      rows: ``[n]`` indices of queries.
      thresholds: ``[n, P]`` float32, ascending; inf counts no candidate.

    Returns:
      ``[n, P]`` int64. Excluded candidates are not counted.
    """
    left = np.ones(len(rows), bool)
    counts = np.zeros(thresholds.shape, np.int64)
    if self._is_fast and thresholds.shape[1] <= MAX_POSITIVES:
      decided, counts = self._fast_counts(rows, thresholds, _tiles(len(rows)))
      left = ~decided
    if left.any():
      counts[left] = _exact_counts(self._task, rows[left], thresholds[left])
    return counts

  def _fast_ranks(self, rows: np.ndarray) -> tuple[np.ndarray, rank_counts.Ranks]:
    """Computes ranks from float32 products.

    Returns:
      ``[n]`` bool, whether few enough candidates of a query are undecided, and the ranks of all
      queries. rank_counts.Ranks of the other queries are meaningless.
    """
    place, columns = self._task.positives(rows)
    numbers = np.bincount(place, minlength=len(rows))
    positives = rank_counts.padded(
      place, similarities.pair_scores(self._task, rows[place], columns), numbers
    )
    decided, retrieved = self._fast_counts(rows, positives, self._tiles)
    return decided, rank_counts.from_counts(positives, numbers, retrieved)

  def _fast_counts(
    self, rows: np.ndarray, thresholds: np.ndarray, tiles: tuple[int, int]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Counts as `at_least`, from float32 products.

    Returns:
      The bool ``[n]`` of `_fast_ranks`, and counts, which are meaningless for the other queries.
    """
    counts, decided = np.zeros(thresholds.shape, np.int64), np.zeros(len(rows), bool)
    if self._sparsity.holds and len(rows):
      decided, place, columns = self._reaching(rows, thresholds[:, 0])
      counts += self._at_least(rows, place, columns, thresholds)
      self._sparsity.holds = 2 * int(decided.sum()) >= len(rows)
    if not decided.all():
      left = np.flatnonzero(~decided)
      above, decided[left], place, columns = self._above_for_sure(
        rows[left], thresholds[left], min(tiles, _tiles(_power_of_two(len(left))))
      )
      counts[left] = above + self._at_least(rows[left], place, columns, thresholds[left])
    if self._task.excluded is not None:
      counts -= self._at_least(rows, *self._task.excluded.pairs(rows), thresholds)
    return decided, counts

  def _reaching(
    self, rows: np.ndarray, lowest: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the candidates that may score at least as high as ``lowest [n]``.

    In NumPy, since XLA takes 1.5 times as long for it on a CPU.

    Returns:
      ``[n]`` bool, whether few enough candidates of a query may, and the pairs of these queries.
    """
    low = np.nextafter((lowest - self._bound[rows]).astype(np.float32), -np.float32(np.inf))
    gallery = self._gallery
    out = np.empty((min(_TILE, len(rows)), len(gallery)), np.float32)
    nothing, decided = np.empty(0, np.int64), np.zeros(len(rows), bool)
    places, found = [nothing], [nothing]
    for start in range(0, len(rows), _TILE):
      part = slice(start, start + _TILE)
      queries = np.asarray(self._task.queries[rows[part]], np.float32)
      reaches = np.matmul(queries, gallery.T, out=out[: len(queries)]) >= low[part, None]
      if np.count_nonzero(reaches) > 2 * self._limit * len(queries):
        break  # a poor model, whose pairs would take much memory
      place, columns = np.divmod(np.flatnonzero(reaches), len(gallery))
      decided[part] = np.bincount(place, minlength=len(queries)) <= self._limit
      kept = decided[part][place]
      places.append(start + place[kept])
      found.append(columns[kept])
    return decided, np.concatenate(places), np.concatenate(found)

  def _above_for_sure(
    self, rows: np.ndarray, positives: np.ndarray, tiles: tuple[int, int]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Counts the candidates that are certainly above each positive.

    Returns:
      Counts ``[n, P]``, the bool ``[n]`` of `_fast_ranks`, and the undecided pairs.
    """
    bound = self._bound[rows][:, None]
    low = np.nextafter((positives - bound).astype(np.float32), -np.float32(np.inf))
    high = np.nextafter((positives + bound).astype(np.float32), np.float32(np.inf))
    parts = (
      _in_tiles(self._task.queries[rows], 0.0, tiles),
      _in_tiles(low, np.inf, tiles),
      _in_tiles(high, np.inf, tiles),
    )
    counts, doubtful, num_doubtful = (
      np.asarray(part)[: len(rows)] for part in _count_block(self._device_gallery, parts)
    )
    decided = num_doubtful <= self._limit
    # A search over one axis is twenty times as fast as over two.
    if not decided.all():  # a copy of all flags takes as long as the search
      doubtful = doubtful[decided]
    place, columns = np.divmod(np.flatnonzero(doubtful), doubtful.shape[1])
    return counts.astype(np.int64), decided, np.flatnonzero(decided)[place], columns

  def _at_least(
    self, rows: np.ndarray, place: np.ndarray, columns: np.ndarray, positives: np.ndarray
  ) -> np.ndarray:
    """Counts the pairs of each query that score at least as high as its positives, ``[n, P]``."""
    scores = similarities.pair_scores(self._task, rows[place], columns)
    size = positives.shape[1] + 1
    counts = np.zeros(len(rows) * size, np.int64)
    for start in range(0, len(place), _PAIRS):
      part = slice(start, start + _PAIRS)
      reached = np.count_nonzero(scores[part, None] >= positives[place[part]], axis=1)
      counts += np.bincount(place[part] * size + reached, minlength=len(counts))
    # Positives are ascending: who reaches j of them reaches the first j.
    from_above = counts.reshape(len(rows), size)[:, ::-1].cumsum(axis=1)
    return from_above[:, -2::-1]


def _tiles(rows: int) -> tuple[int, int]:
  """Returns the number of tiles, and the rows of each, that hold some rows."""
  tile = min(_TILE, -(-rows // 8) * 8)
  return -(-rows // tile), tile


def _power_of_two(number: int) -> int:
  """Returns the least power of two that is not smaller, so that few shapes are compiled."""
  return 1 << (number - 1).bit_length()


def _in_tiles(values: np.ndarray, filler: float, tiles: tuple[int, int]) -> np.ndarray:
  """Reshapes values to ``[tiles, rows, ...]`` float32, the same shape for all blocks."""
  full = np.full((tiles[0] * tiles[1], values.shape[1]), filler, np.float32)
  full[: len(values)] = values
  return full.reshape(*tiles, values.shape[1])


@jax.jit
def _count_block(
  gallery: jax.Array, tiles: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Counts of candidates by float32 scores.

  Args:
    gallery: ``[G, D]``.
    tiles: queries ``[t, r, D]``, low and high ``[t, r, P]``. Scores between low and high are
      undecided.

  Returns:
    ``[t * r, P]`` int32, number of candidates above high, without those undecided for any positive;
    ``[t * r, G]`` bool, which candidates are undecided; ``[t * r]`` int32, how many are undecided.
  """

  def count(tile: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, low, high = tile
    scores = jnp.einsum("rd,gd->rg", queries, gallery, precision=jax.lax.Precision.HIGHEST)
    thresholds = [(low[:, i, None], high[:, i, None]) for i in range(low.shape[1])]
    doubtful = functools.reduce(
      operator.or_, [(scores >= lower) & (scores <= upper) for lower, upper in thresholds]
    )
    sure = jnp.where(doubtful, -jnp.inf, scores)
    # A joint reduction of all counts is a single loop over the scores, several times as fast as one
    # loop for each count.
    parts = [(sure > upper).astype(jnp.int32) for _, upper in thresholds] + [
      doubtful.astype(jnp.int32)
    ]
    *counts, num_doubtful = jax.lax.reduce(parts, [jnp.int32(0)] * len(parts), _add_each, (1,))
    return jnp.stack(counts, axis=1), doubtful, num_doubtful

  return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), jax.lax.map(count, tiles))


def _add_each(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
  return [a + b for a, b in zip(left, right, strict=True)]


def _exact_counts(task: similarities.Task, rows: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
  """Counts as `Counter.at_least`, from exact scores of all candidates of float32."""
  scores = np.sort(similarities.all_scores(task, rows), axis=1)
  below = [np.searchsorted(row, limits) for row, limits in zip(scores, thresholds, strict=True)]
  return scores.shape[1] - np.array(below)


def exact_ranks(task: similarities.Task, rows: np.ndarray) -> rank_counts.Ranks:
  """Returns the ranks of the queries ``rows``, from exact scores of all candidates."""
  ap, above = np.full(len(rows), np.nan), np.full(len(rows), -1)
  scores = similarities.all_scores(task, rows)
  for i, columns in enumerate(task.members.of_each(rows)):
    positives = scores[i, columns]
    positives = positives[positives > -np.inf]
    if positives.size:
      ap[i], above[i] = _rank(positives, scores[i])
  return rank_counts.Ranks(ap, above)


def _rank(positives: np.ndarray, scores: np.ndarray) -> tuple[float, int]:
  """Computes AP (Eq. 2) and the number of negatives at or above the best positive.

  ``scores`` are those of all candidates.
  """
  positives = np.sort(positives)
  # Counting the scores at least as high as each positive is faster than sorting all candidates,
  # unless there are many positives.
  if len(positives) <= max(16, len(scores) // 1000):
    retrieved = np.array([np.count_nonzero(scores >= positive) for positive in positives])
  else:
    scores = np.sort(scores)
    retrieved = len(scores) - np.searchsorted(scores, positives, side="left")
  hits = len(positives) - np.searchsorted(positives, positives, side="left")
  return float(np.mean(hits / retrieved)), int(retrieved[-1] - hits[-1])
