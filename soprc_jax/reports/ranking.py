"""Analyzes the rankings of a split: nearest images, AP by class, and confusable classes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from soprc_jax.metrics import similarities

# Memory of a block of scores and of the selection of the best scores.
_BLOCK_BYTES = 64 * 2**20


class Nearest(NamedTuple):
  """Holds the best-ranked candidates of each query.

  Attributes:
    positions: ``[N, k]`` positions, the nearest first; equal scores in the order of positions.
    scores: ``[N, k]`` float32, cosine similarities of unit vectors.
  """

  positions: np.ndarray
  scores: np.ndarray


class Classes(NamedTuple):
  """Holds results by class, in the order of the labels.

  Attributes:
    labels: ``[C]`` labels of the classes, ascending.
    sizes: ``[C]`` number of images of the class.
    ap: ``[C]`` mean AP of the queries of the class; NaN for a class of one image, which has none.
  """

  labels: np.ndarray
  sizes: np.ndarray
  ap: np.ndarray


class Pair(NamedTuple):
  """Holds a pair of classes whose images are confused.

  Attributes:
    labels: labels of both classes, the lower one first.
    errors: number of ranks that an image of the other class takes.
    places: number of ranks that are counted over all queries of both classes.
    examples: positions (query, wrong image) of some errors, the most similar first.
  """

  labels: tuple[int, int]
  errors: int
  places: int
  examples: tuple[tuple[int, int], ...]


def nearest(
  embeddings: np.ndarray,
  labels: np.ndarray,
  *,
  k: int,
  on_block: Callable[[int], None] = lambda count: None,
) -> Nearest:
  """Finds the ``k`` nearest images of each image by exact scores, without the image itself.

  It works block by block, so that memory stays bounded.

  Args:
    embeddings: ``[N, D]``, N >= 2.
    labels: ``[N]`` labels.
    k: number of images, >= 1; all others if there are fewer.
    on_block: called with the number of queries of each block.
  """
  k = min(k, len(embeddings) - 1)
  size = max(_BLOCK_BYTES // (16 * len(embeddings)), 1)
  task = similarities.make_task(embeddings, labels, None, None, None, None, size)
  positions = np.empty((len(embeddings), k), np.int64)
  scores = np.empty((len(embeddings), k), np.float32)
  for rows in similarities.blocks(task, size):
    found = similarities.all_scores(task, rows)
    positions[rows] = _best(found, k)
    scores[rows] = np.take_along_axis(found, positions[rows], axis=1)
    on_block(len(rows))
  return Nearest(positions, scores)


def by_class(labels: np.ndarray, ap: np.ndarray) -> Classes:
  """Computes the mean AP of the queries of each class.

  >>> by_class(np.array([7, 7, 9]), np.array([0.5, 1.0, np.nan])).ap
  array([0.75,  nan])
  """
  names, rows, sizes = np.unique(labels, return_inverse=True, return_counts=True)
  valid = ~np.isnan(ap)
  counts = np.bincount(rows[valid], minlength=len(names))
  sums = np.bincount(rows[valid], ap[valid], minlength=len(names))
  return Classes(
    names, sizes, np.divide(sums, counts, out=np.full(len(names), np.nan), where=counts > 0)
  )


def look_alikes(
  labels: np.ndarray,
  found: Nearest,
  *,
  right: np.ndarray,
  num_relevant: np.ndarray,
  count: int,
  examples: int,
) -> list[Pair]:
  """Finds the pairs of classes that are confused most often.

  A query with P other relevant images should have them at its first P ranks. If an image that is
  not relevant takes one of these ranks, and the rank is among the first k, that is an error.

  Args:
    labels: ``[N]`` labels.
    found: result of `nearest`.
    right: ``[N, k]`` bool, which of the nearest images are relevant.
    num_relevant: ``[N]`` images that are relevant to each query, itself included.
    count: number of pairs, those with most errors; ties are broken by the lowest labels.
    examples: number of errors to keep per pair, at most one of each query and of each wrong image.
  """
  names, rows = np.unique(labels, return_inverse=True)
  k = found.positions.shape[1]
  places = np.minimum(num_relevant - 1, k)
  others = rows[found.positions]
  wrong = ~right & (np.arange(k) < places[:, None])
  queries, columns = np.nonzero(wrong)
  if not len(queries):
    return []
  a, b = rows[queries], others[queries, columns]
  keys = np.minimum(a, b).astype(np.int64) * len(names) + np.maximum(a, b)
  pairs, inverse, errors = np.unique(keys, return_inverse=True, return_counts=True)
  class_places = np.bincount(rows, places, minlength=len(names)).astype(int)
  result = []
  for pair in np.argsort(-errors, kind="stable")[:count]:
    low, high = divmod(int(pairs[pair]), len(names))
    at = np.flatnonzero(inverse == pair)
    at = at[np.argsort(-found.scores[queries[at], columns[at]], kind="stable")]
    shown = _distinct(
      [(int(queries[i]), int(found.positions[queries[i], columns[i]])) for i in at], examples
    )
    total = int(class_places[low] + class_places[high])
    result.append(Pair((int(names[low]), int(names[high])), int(errors[pair]), total, shown))
  return result


def worst_queries(labels: np.ndarray, ap: np.ndarray, count: int) -> np.ndarray:
  """Returns the positions of the queries with the lowest AP, at most one per class.

  Of queries with equal AP the first one is taken.
  """
  order = np.argsort(ap, kind="stable")  # NaN last
  order = order[~np.isnan(ap[order])]
  first = np.unique(labels[order], return_index=True)[1]
  return order[np.sort(first)[:count]]


def some_queries(ap: np.ndarray, count: int, *, seed: int = 0) -> np.ndarray:
  """Returns the positions of random queries, ascending."""
  there = np.flatnonzero(~np.isnan(ap))
  return np.sort(np.random.default_rng(seed).choice(there, min(count, len(there)), replace=False))


def _best(scores: np.ndarray, k: int) -> np.ndarray:
  """Returns the ``[n, k]`` columns of the largest scores of each row of ``[n, G]``, descending.

  Of equal scores the first ones are taken.
  """
  last = scores.shape[1] - k
  limit = np.partition(scores, last, axis=1)[:, last]
  rows, columns = np.nonzero(scores >= limit[:, None])  # k per row, or more if some are equal
  order = np.lexsort((columns, -scores[rows, columns], rows))
  starts = np.searchsorted(rows, np.arange(len(scores)))
  return columns[order][starts[:, None] + np.arange(k)]


def _distinct(pairs: Sequence[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
  """Returns the first ``count`` pairs in which no image repeats."""
  kept: list[tuple[int, int]] = []
  seen: set[int] = set()
  for pair in pairs:
    if len(kept) < count and not seen.intersection(pair):
      kept.append(pair)
      seen.update(pair)
  return tuple(kept)
