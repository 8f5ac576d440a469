"""Evaluation: empirical AUPRC (Eq. 2), retrieval metrics over a gallery, mean precision-recall curve.

`auprc` is a JAX function. The retrieval metrics run on the host with numpy, block by block, so that no
similarity matrix of a whole data set is ever held. Similarities are computed in float64 and rounded to float32: equal
vectors then have equal scores wherever they stand, and no result depends on the block size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import _arrays


def auprc(scores: Any, labels: Any, *, prior: Any = None, where: Any = None) -> jax.Array:
  r"""Empirical area under the precision-recall curve of each list (Eq. 2); also called average precision.

  .. math:: \mathrm{mean}_i \frac{\pi\, TPR(h_i)}{\pi\, TPR(h_i) + (1 - \pi)\, FPR(h_i)}

  with rates that count scores ``>= h_i``, so ties do not depend on the order and the value equals scikit-learn's
  ``average_precision_score`` for the list's own prior.

  Args:
    scores: ``[..., L]``, any finite range.
    labels: ``[..., L]``; > 0 is positive.
    prior: positive rate pi in (0, 1], broadcastable to ``[...]``, to which precision is rescaled; ``None`` is the list's own.
    where: ``[..., L]`` mask of the valid entries.

  Returns:
    ``[...]`` in [0, 1], at least float32; 0 for a list without a positive.

  Raises:
    AssertionError: when traced, if shapes differ.
    ValueError: ``prior`` is a plain number outside [0, 1].

  >>> print(auprc(jnp.array([0.9, 0.8, 0.7, 0.6]), jnp.array([1, 0, 1, 0])))
  0.8333334
  """
  (scores,) = _arrays.promote(scores)
  labels = jnp.asarray(labels)
  chex.assert_equal_shape([scores, labels])
  _arrays.check_range("prior", prior, low=0.0, high=1.0)
  mask = _arrays.mask_like(where, scores)
  axis = scores.ndim - 1
  keys = jnp.where(mask, -scores, jnp.inf)
  positive = (mask & (labels > 0)).astype(jnp.int32)
  negative = (mask & (labels <= 0)).astype(jnp.int32)
  keys, positive, negative = jax.lax.sort((keys, positive, negative), dimension=axis, num_keys=1)
  # Counts at the end of each group of equal scores, since those count as >= each other.
  is_last = jnp.concatenate([keys[..., 1:] != keys[..., :-1], jnp.ones_like(keys[..., :1], bool)], axis)

  def at_group_end(counts: jax.Array) -> jax.Array:
    upper = jnp.where(is_last, counts, jnp.iinfo(counts.dtype).max)
    return jax.lax.cummin(upper, axis=axis, reverse=True)

  true_positives = at_group_end(jnp.cumsum(positive, axis=axis)).astype(scores.dtype)
  false_positives = at_group_end(jnp.cumsum(negative, axis=axis)).astype(scores.dtype)
  if prior is not None:
    prior = jnp.broadcast_to(jnp.asarray(prior, scores.dtype), scores.shape[:-1])[..., None]
    true_positives *= prior * jnp.sum(negative, axis=axis, keepdims=True)
    false_positives *= (1 - prior) * jnp.sum(positive, axis=axis, keepdims=True)
    # Without negatives every precision is 1, whatever the prior.
    true_positives = jnp.where(jnp.any(negative > 0, axis=axis, keepdims=True), true_positives, 1.0)
  precision = _arrays.ratio(true_positives, true_positives + false_positives)
  return _arrays.masked_mean(precision, positive > 0, axis=-1)


def retrieval_metrics(
  embeddings: Any,
  labels: Any,
  *,
  ks: Sequence[int] = (1, 10, 100, 1000),
  gallery: Any = None,
  gallery_labels: Any = None,
  query_ids: Any = None,
  gallery_ids: Any = None,
  block_size: int = 1024,
  per_query: bool = False,
  on_block: Callable[[int], None] | None = None,
) -> dict[str, Any]:
  """Mean AUPRC (Eq. 2) and recall@k over a gallery, each image a query in turn.

  Ties are broken against us: AUPRC counts every score ``>=`` that of the positive, and recall@k is a hit only if
  fewer than k negatives score at least as high as the best positive. The query is left out of its gallery by index (or by
  id), never by rank, so an exact duplicate of it stays a candidate.

  Args:
    embeddings: ``[N, D]`` queries, finite.
    labels: ``[N]`` integers.
    ks: cut-offs >= 1.
    gallery: ``[G, D]`` candidates; ``None``: the queries themselves.
    gallery_labels: ``[G]`` integers, with ``gallery``.
    query_ids: ``[N]``: candidates with the id of the query are left out.
    gallery_ids: ``[G]``, with ``query_ids`` and ``gallery``.
    block_size: queries at a time; memory is about ``12 * block_size * G`` bytes beside the embeddings in float64. It does not change the
      result.
    per_query: adds ``"ap_per_query"`` ``[N]`` (NaN for skipped queries) and ``"negatives_above"`` ``[N]``, the number of negatives
      that score at least as high as the best positive (-1 for skipped queries).
    on_block: called after each block with its number of queries, e.g. to move a progress bar.

  Returns:
    ``{"mAUPRC": float, "recall@k": float for each k, "num_queries": int, "num_skipped": int, "ks_beyond_gallery": list}``. A query without a
    positive in the gallery is skipped and counted, ``num_queries`` counts the others. For the ks that exceed the number of
    candidates, listed last, recall is 1 iff a positive exists. All values are 0 if every query is skipped.

  Raises:
    ValueError: shapes do not fit, a value is not finite, or a k or ``block_size`` is below 1.

  >>> embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> result = retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1,))
  >>> print(f"{result['mAUPRC']:.3f} {result['recall@1']:.2f}")
  0.750 0.50
  """
  ks = _checked_ks(ks)
  task = _task(embeddings, labels, gallery, gallery_labels, query_ids, gallery_ids, block_size)
  num_queries = len(task.labels)
  ap = np.full(num_queries, np.nan)
  above = np.full(num_queries, -1)
  for rows, scores in _blocks(task, block_size):
    for i, row in enumerate(rows):
      positives = _positive_scores(task, row, scores[i])
      if positives.size:
        ap[row], above[row] = _rank(positives, scores[i])
    if on_block is not None:
      on_block(len(rows))
  candidates = len(task.gallery_labels) - (1 if task.excludes_itself else 0)
  result = summarise_ranks(ap, above, ks=ks, num_candidates=candidates)
  if per_query:
    result["ap_per_query"] = ap
    result["negatives_above"] = above
  return result


def summarise_ranks(ap_per_query: Any, negatives_above: Any, *, ks: Sequence[int], num_candidates: int) -> dict[str, Any]:
  """The result of `retrieval_metrics` from its values per query, e.g. those that several processes have computed.

  Args:
    ap_per_query: ``[N]`` average precision.
    negatives_above: ``[N]`` negatives at least as high as the best positive; -1 where a query is skipped.
    ks: cut-offs >= 1.
    num_candidates: size of the gallery of a query, itself not counted.

  Raises:
    ValueError: a k is below 1.
  """
  ks, above = _checked_ks(ks), np.asarray(negatives_above)
  valid = above >= 0
  count = int(valid.sum())
  result: dict[str, Any] = {"mAUPRC": float(np.asarray(ap_per_query)[valid].mean()) if count else 0.0}
  for k in ks:
    result[f"recall@{k}"] = float((above[valid] < k).mean()) if count else 0.0
  result["num_queries"] = count
  result["num_skipped"] = len(above) - count
  result["ks_beyond_gallery"] = [k for k in ks if k > num_candidates]
  return result


def mean_pr_curve(
  embeddings: Any,
  labels: Any,
  *,
  thresholds: int = 2001,
  gallery: Any = None,
  gallery_labels: Any = None,
  block_size: int = 1024,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean precision and recall over the queries at fixed similarity thresholds (the curves of the paper's figures).

  Args:
    embeddings: ``[N, D]`` queries, unit norm.
    labels: ``[N]`` integers.
    thresholds: number T >= 2 of thresholds, evenly spaced in [-1, 1]; 2001 gives steps of 0.001.
    gallery: ``[G, D]`` candidates; ``None``: the queries themselves, each without itself.
    gallery_labels: ``[G]`` integers, with ``gallery``.
    block_size: queries at a time. It does not change the result.

  Returns:
    ``precision [T], recall [T], thresholds [T]``, float64, thresholds ascending. At a threshold that retrieves nothing a query counts
    with precision 1 and recall 0. Queries without a positive are left out.

  Raises:
    ValueError: as in `retrieval_metrics`, or ``thresholds`` < 2.
  """
  if thresholds < 2:
    raise ValueError(f"thresholds must be at least 2, got {thresholds}")
  task = _task(embeddings, labels, gallery, gallery_labels, None, None, block_size)
  half = (thresholds - 1) / 2
  grid = (np.arange(thresholds) - half) / half
  precision, recall, count = np.zeros(thresholds), np.zeros(thresholds), 0
  for rows, scores in _blocks(task, block_size):
    positives = [np.sort(_positive_scores(task, row, scores[i])) for i, row in enumerate(rows)]
    scores.sort(axis=1)  # in place: the block is ours
    for i in range(len(rows)):
      if positives[i].size:
        retrieved = len(scores[i]) - np.searchsorted(scores[i], grid, side="left")
        hits = len(positives[i]) - np.searchsorted(positives[i], grid, side="left")
        precision += np.where(retrieved > 0, hits / np.maximum(retrieved, 1), 1.0)
        recall += hits / len(positives[i])
        count += 1
  return precision / max(count, 1), recall / max(count, 1), grid


class _Task(NamedTuple):
  """Checked inputs of one evaluation, with the gallery's positions grouped by label and by id."""

  queries: np.ndarray
  labels: np.ndarray
  gallery: np.ndarray
  gallery_labels: np.ndarray
  members: dict[Any, np.ndarray]  # label -> positions in the gallery
  excluded: dict[int, np.ndarray]  # query -> positions left out of its gallery
  excludes_itself: bool


def _task(
  embeddings: Any,
  labels: Any,
  gallery: Any,
  gallery_labels: Any,
  query_ids: Any,
  gallery_ids: Any,
  block_size: int,
) -> _Task:
  if block_size < 1:
    raise ValueError(f"block_size must be at least 1, got {block_size}")
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
  if own and gallery_ids is None:
    gallery_ids = query_ids
  if (query_ids is None) != (gallery_ids is None):
    raise ValueError("query_ids and gallery_ids go together: one of them is missing")
  excluded: dict[int, np.ndarray] = {}
  if query_ids is not None:
    query_ids, gallery_ids = np.asarray(query_ids), np.asarray(gallery_ids)
    if query_ids.shape != labels.shape or gallery_ids.shape != gallery_labels.shape:
      raise ValueError(
        f"ids must have one entry an image: {labels.shape} and {gallery_labels.shape}, "
        f"got {query_ids.shape} and {gallery_ids.shape}"
      )
    groups = _group(gallery_ids)
    nothing = np.zeros(0, np.int64)
    excluded = {row: groups.get(key, nothing) for row, key in enumerate(query_ids.tolist())}
  elif own:
    excluded = {row: np.array([row]) for row in range(len(labels))}
  return _Task(queries, labels, gallery, gallery_labels, _group(gallery_labels), excluded, own)


def _checked(name: str, embeddings: Any, labels_name: str, labels: Any) -> tuple[np.ndarray, np.ndarray]:
  embeddings, labels = np.asarray(embeddings, np.float64), np.asarray(labels)
  if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
    raise ValueError(f"{name} must be [N, D] and {labels_name} [N], got {embeddings.shape} and {labels.shape}")
  finite = np.isfinite(embeddings).all(axis=1)
  if not finite.all():
    raise ValueError(f"{name} has non-finite values, first in row {int(np.argmin(finite))}")
  return embeddings, labels


def _group(keys: np.ndarray) -> dict[Any, np.ndarray]:
  """Positions of each distinct key."""
  if not len(keys):
    return {}
  order = np.argsort(keys, kind="stable")
  ordered = keys[order]
  starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
  return dict(zip(ordered[starts].tolist(), np.split(order, starts[1:]), strict=True))


def _blocks(task: _Task, block_size: int) -> Iterator[tuple[range, np.ndarray]]:
  """Rows of queries with their float32 similarities ``[rows, G]``; -inf where left out."""
  transposed = task.gallery.T
  for start in range(0, len(task.labels), block_size):
    rows = range(start, min(start + block_size, len(task.labels)))
    scores = (task.queries[rows.start : rows.stop] @ transposed).astype(np.float32)
    for i, row in enumerate(rows):
      if row in task.excluded:
        scores[i, task.excluded[row]] = -np.inf
    yield rows, scores


def _positive_scores(task: _Task, row: int, scores: np.ndarray) -> np.ndarray:
  members = task.members.get(task.labels[row].item())
  if members is None:
    return scores[:0]
  positives = scores[members]
  return positives[positives > -np.inf]


def _rank(positives: np.ndarray, scores: np.ndarray) -> tuple[float, int]:
  """AP (Eq. 2) and the number of negatives at or above the best positive, from the scores of all candidates."""
  positives = np.sort(positives)
  # Counting what scores at least as high as each positive is faster than sorting all candidates, unless there are many positives.
  if len(positives) <= max(16, len(scores) // 1000):
    retrieved = np.array([np.count_nonzero(scores >= positive) for positive in positives])
  else:
    scores = np.sort(scores)
    retrieved = len(scores) - np.searchsorted(scores, positives, side="left")
  hits = len(positives) - np.searchsorted(positives, positives, side="left")
  return float(np.mean(hits / retrieved)), int(retrieved[-1] - hits[-1])


def _checked_ks(ks: Sequence[int]) -> list[int]:
  ks = [int(k) for k in ks]
  if any(k < 1 for k in ks):
    raise ValueError(f"ks must be at least 1, got {ks}")
  return ks
