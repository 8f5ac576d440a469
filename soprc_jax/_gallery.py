"""Queries and the gallery that they are ranked in: checked, grouped, and scored exactly.

The score of two vectors is their float64 product rounded to float32: equal vectors then have equal scores wherever they
stand, and no result depends on how the queries are cut into blocks.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from soprc_jax import _arrays

# Pairs whose vectors are gathered at a time: both sides stay in the cache of a core.
_PAIRS = 256
# Rows in a float64 product at a time.
_ROWS = 64


class Groups(NamedTuple):
  """Positions in the gallery that share a key, for each query those of its own key.

  Attributes:
    order: ``[G]`` positions, those of a group side by side, ascending within it.
    starts: ``[N]`` where the group of a query begins in ``order``.
    counts: ``[N]`` its size; 0 if the gallery lacks the key.
  """

  order: np.ndarray
  starts: np.ndarray
  counts: np.ndarray

  def of(self, row: int) -> np.ndarray:
    """Positions that share the key of a query."""
    return self.order[self.starts[row] : self.starts[row] + self.counts[row]]

  def pairs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[n], [n]``: each of ``rows``, by its place among them, with each position of its group."""
    counts = self.counts[rows]
    place = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place, self.order[np.repeat(self.starts[rows], counts) + within]


@dataclasses.dataclass(frozen=True)
class Task:
  """Checked inputs of one evaluation.

  Attributes:
    queries: ``[N, D]`` float32 or float64.
    gallery: ``[G, D]`` float32 or float64.
    members: candidates of the class of each query.
    excluded: candidates that are left out of the gallery of each query; None: none.
    excludes_itself: whether the queries are their own gallery.
  """

  queries: np.ndarray
  gallery: np.ndarray
  members: Groups
  excluded: Groups | None
  excludes_itself: bool

  @functools.cached_property
  def gallery_in_float64(self) -> np.ndarray:
    """``[G, D]``, made when it is first asked for."""
    return self.gallery.astype(np.float64, copy=False)

  def positives(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[n], [n]``: each of ``rows``, by its place among them, with each of its positives."""
    place, columns = self.members.pairs(rows)
    if self.excluded is None:
      return place, columns
    # A candidate is left out if it stands within the group that its query leaves out.
    inverse = _inverse(self.excluded.order)[columns] - self.excluded.starts[rows][place]
    kept = (inverse < 0) | (inverse >= self.excluded.counts[rows][place])
    return place[kept], columns[kept]


def make_task(
  embeddings: Any,
  labels: Any,
  gallery: Any,
  gallery_labels: Any,
  query_ids: Any,
  gallery_ids: Any,
  block_size: int,
) -> Task:
  """Checks the arguments of `soprc_jax.metrics.retrieval_metrics`.

  Raises:
    ValueError: as there.
  """
  _arrays.check_count("block_size", block_size)
  if (gallery is None) != (gallery_labels is None):
    raise ValueError("gallery and gallery_labels go together: one of them is missing")
  queries, labels = _checked("embeddings", embeddings, "labels", labels)
  own = gallery is None
  if own:
    gallery, gallery_labels = queries, labels
  else:
    gallery, gallery_labels = _checked("gallery", gallery, "gallery_labels", gallery_labels)
  if queries.shape[1] != gallery.shape[1]:
    raise ValueError(f"embeddings have width {queries.shape[1]}, the gallery {gallery.shape[1]}")
  _check_scores(queries, gallery)
  _check_one_sign(labels, gallery_labels)
  if own and gallery_ids is None:
    gallery_ids = query_ids
  if (query_ids is None) != (gallery_ids is None):
    raise ValueError("query_ids and gallery_ids go together: one of them is missing")
  excluded = None
  if query_ids is not None:
    query_ids, gallery_ids = np.asarray(query_ids), np.asarray(gallery_ids)
    if any(ids.dtype.kind == "f" and np.isnan(ids).any() for ids in (query_ids, gallery_ids)):
      raise ValueError("query_ids and gallery_ids must not be nan, which is not equal to itself")
    if query_ids.shape != labels.shape or gallery_ids.shape != gallery_labels.shape:
      raise ValueError(
        f"ids must have one entry an image: {labels.shape} and {gallery_labels.shape}, "
        f"got {query_ids.shape} and {gallery_ids.shape}"
      )
    excluded = group(query_ids, gallery_ids)
  elif own:
    positions = np.arange(len(labels))
    excluded = Groups(positions, positions, np.ones_like(positions))
  return Task(queries, gallery, group(labels, gallery_labels), excluded, own)


def _checked(name: str, embeddings: Any, labels_name: str, labels: Any) -> tuple[np.ndarray, np.ndarray]:
  embeddings, labels = np.asarray(embeddings), np.asarray(labels)
  if embeddings.dtype.kind in "cOSU":
    raise TypeError(f"{name} must be real numbers, got {embeddings.dtype}")
  if labels.size and labels.dtype.kind not in "biu":
    raise TypeError(f"{labels_name} must be integers, got {labels.dtype}")
  if embeddings.dtype != np.float32:
    embeddings = embeddings.astype(np.float64, copy=False)
  if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
    raise ValueError(f"{name} must be [N, D] and {labels_name} [N], got {embeddings.shape} and {labels.shape}")
  finite = np.isfinite(embeddings).all(axis=1)
  if not finite.all():
    raise ValueError(f"{name} has non-finite values, first in row {int(np.argmin(finite))}")
  return embeddings, labels


def _check_scores(queries: np.ndarray, gallery: np.ndarray) -> None:
  """Raises a ValueError where a score may be beyond float32: it would tie with others, or with what is left out."""
  largest, other = (float(np.abs(part).max(initial=0.0)) for part in (queries, gallery))
  if largest and other > float(np.finfo(np.float32).max) / largest / max(queries.shape[1], 1):
    raise ValueError(
      f"embeddings with entries up to {max(largest, other):g} have scores beyond float32: scale them, e.g. to unit norm"
    )


def _check_one_sign(labels: np.ndarray, gallery_labels: np.ndarray) -> None:
  """Raises a TypeError for uint64 beside signed labels: numpy compares them in float64, which takes neighbours for one label."""
  if np.result_type(labels, gallery_labels).kind == "f" and labels.size and gallery_labels.size:
    raise TypeError(f"labels and gallery_labels must be of one type, got {labels.dtype} and {gallery_labels.dtype}")


def group(keys: np.ndarray, gallery_keys: np.ndarray) -> Groups:
  """Positions in ``gallery_keys [G]`` of each of ``keys [N]``."""
  order = np.argsort(gallery_keys, kind="stable")
  ordered = gallery_keys[order]
  starts = np.searchsorted(ordered, keys, side="left")
  return Groups(order, starts, np.searchsorted(ordered, keys, side="right") - starts)


def _inverse(order: np.ndarray) -> np.ndarray:
  inverse = np.empty_like(order)
  inverse[order] = np.arange(len(order))
  return inverse


def blocks(task: Task, block_size: int) -> Iterator[np.ndarray]:
  """Rows of queries, so many at a time."""
  for start in range(0, len(task.queries), block_size):
    yield np.arange(start, min(start + block_size, len(task.queries)))


def all_scores(task: Task, rows: np.ndarray) -> np.ndarray:
  """``[len(rows), G]`` float32 scores of all candidates of some queries; -inf where left out."""
  scores = np.empty((len(rows), len(task.gallery)), np.float32)
  # Fresh memory of the size of a block costs as much as the product in it.
  for start in range(0, len(rows), _ROWS):
    part = slice(start, start + _ROWS)
    scores[part] = task.queries[rows[part]].astype(np.float64) @ task.gallery_in_float64.T
  if task.excluded is not None:
    scores[task.excluded.pairs(rows)] = -np.inf
  return scores


def pair_scores(task: Task, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """``[n]`` float32 scores of some pairs of a query and a candidate.

  The order of each sum depends on the width only, so equal vectors have equal scores to the last bit.
  """
  scores = np.empty(len(rows), np.float32)
  for start in range(0, len(rows), _PAIRS):
    part = slice(start, start + _PAIRS)
    queries, candidates = task.queries[rows[part]], task.gallery[columns[part]]
    scores[part] = np.einsum("nd,nd->n", queries.astype(np.float64), candidates.astype(np.float64))
  return scores
