"""Evaluation: empirical AUPRC (Eq. 2), retrieval metrics over a gallery, mean precision-recall curve.

`auprc` is a JAX function. The retrieval metrics take numpy arrays and work block by block, so that no similarity matrix of a whole
data set is ever held. `retrieval_metrics` states the precision of similarities and when two of them are equal.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import _arrays, _counting, _gallery, _thresholds

# What an entry of a list is when it is sorted by its score; 0 is masked.
_NEGATIVE, _POSITIVE = 1, 2


def auprc(scores: Any, labels: Any, *, prior: Any = None, where: Any = None) -> jax.Array:
  r"""Empirical area under the precision-recall curve of each list (Eq. 2); also called average precision.

  .. math:: \mathrm{mean}_i \frac{\pi\, TPR(h_i)}{\pi\, TPR(h_i) + (1 - \pi)\, FPR(h_i)}

  with rates that count scores ``>= h_i``, so ties do not depend on the order and the value equals scikit-learn's
  ``average_precision_score`` for the list's own prior.

  Args:
    scores: ``[..., L]``, any range. A NaN in a valid entry makes the result of its list NaN.
    labels: ``[..., L]``; > 0 is positive.
    prior: positive rate pi in (0, 1], broadcastable to ``[...]``, to which precision is rescaled; ``None`` is the list's own. A traced one
      outside [0, 1] gives NaN.
    where: ``[..., L]`` mask of the valid entries.

  Returns:
    ``[...]`` in [0, 1], at least float32; 0 for a list without a positive.

  Raises:
    AssertionError: when traced, if shapes differ.
    ValueError: ``prior`` is a plain number outside [0, 1]; scores or labels on the host have a NaN in a valid entry.

  >>> print(auprc(jnp.array([0.9, 0.8, 0.7, 0.6]), jnp.array([1, 0, 1, 0])))
  0.8333334
  """
  given, given_labels = scores, labels
  (scores,) = _arrays.promote(scores)
  labels = _arrays.is_positive(labels)
  chex.assert_equal_shape([scores, labels], custom_message="labels must have the shape of scores")
  _arrays.check_lists(scores=scores)
  _arrays.check_range("prior", prior, low=0.0, high=1.0)
  mask = _arrays.mask_like(where, scores)
  _check_no_nan(given, where)
  axis = scores.ndim - 1
  codes = jnp.where(mask, jnp.where(labels, _POSITIVE, _NEGATIVE), 0)
  keys, codes = _sorted_together(jnp.where(mask, -scores, jnp.inf), codes)
  positive, negative = ((codes == kind).astype(jnp.int32) for kind in (_POSITIVE, _NEGATIVE))
  # Counts at the end of each group of equal scores, since those count as >= each other.
  is_last = jnp.concatenate([keys[..., 1:] != keys[..., :-1], jnp.ones_like(keys[..., :1], bool)], axis)

  def at_group_end(counts: jax.Array) -> jax.Array:
    upper = jnp.where(is_last, counts, jnp.iinfo(counts.dtype).max)
    return jax.lax.cummin(upper, axis=axis, reverse=True)

  true_positives = at_group_end(jnp.cumsum(positive, axis=axis)).astype(scores.dtype)
  false_positives = at_group_end(jnp.cumsum(negative, axis=axis)).astype(scores.dtype)
  if prior is not None:
    prior = _arrays.prior_per_list(prior, scores)
    num_positives, num_negatives = (
      jnp.sum(kind, axis=axis, keepdims=True).astype(scores.dtype) for kind in (positive, negative)
    )
    true_positives *= prior * num_negatives
    false_positives *= (1 - prior) * num_positives
    # Without negatives every precision is 1, whatever the prior.
    true_positives = jnp.where(jnp.any(negative > 0, axis=axis, keepdims=True), true_positives, 1.0)
  precision = _arrays.ratio(true_positives, true_positives + false_positives)
  unknown = jnp.isnan(scores)
  if isinstance(given_labels, jax.Array):
    unknown |= given_labels != given_labels
  return jnp.where(jnp.any(mask & unknown, axis=axis), jnp.nan, _arrays.masked_mean(precision, positive > 0, axis=-1))


def _check_no_nan(scores: Any, where: Any) -> None:
  """Raises a ValueError if scores on the host have a NaN in a valid entry; device values are not waited for."""
  if isinstance(scores, jax.Array) or isinstance(where, jax.Array):
    return
  scores = np.asarray(scores)
  if np.any((scores != scores) & (True if where is None else np.asarray(where, bool))):
    raise ValueError("scores must be numbers, got nan: find out what computed it, or leave the entry out by where")


def _sorted_together(keys: jax.Array, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
  """``[..., L]`` numbers that are equal and ascend as ``keys`` do, and ``codes`` of two bits, in the same order; NaN anywhere."""
  axis = keys.ndim - 1
  if keys.dtype != jnp.float32:
    keys, codes = jax.lax.sort((keys, codes), dimension=axis, num_keys=1)
    return keys, codes
  return _arrays.sort_together(_arrays.ordered_bits(_with_one_zero(keys)), codes, 4)


def _with_one_zero(keys: jax.Array) -> jax.Array:
  """float32 numbers with one zero, found by its bits: a comparison takes the smallest numbers for 0 too."""
  bits = jax.lax.bitcast_convert_type(keys, jnp.int32)
  return jax.lax.bitcast_convert_type(jnp.where(bits & jnp.iinfo(jnp.int32).max == 0, 0, bits), jnp.float32)


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

  The similarity of two vectors is the sum of the products of their entries. It is computed in float64, in an order of addition
  that depends on D only, and is then rounded to float32, unless an embedding is float64 (or an integer type): then it stays
  float64. Two similarities are equal if these numbers are. So exact duplicates tie, and no result depends on ``block_size``, on
  the order of the gallery, on devices or on processes.

  Args:
    embeddings: ``[N, D]`` queries, finite; bfloat16 and float16 count as float32.
    labels: ``[N]`` integers.
    ks: cut-offs >= 1.
    gallery: ``[G, D]`` candidates; ``None``: the queries themselves.
    gallery_labels: ``[G]`` integers, with ``gallery``.
    query_ids: ``[N]`` integers or text: candidates with the id of the query are left out.
    gallery_ids: ``[G]``, with ``query_ids`` and ``gallery``.
    block_size: queries at a time; memory is at most about ``8 * block_size * G`` bytes besides the embeddings and a float64 copy
      of them. It does not change the result.
    per_query: adds ``"ap_per_query"`` ``[N]`` (NaN for skipped queries) and ``"negatives_above"`` ``[N]``, the number of negatives
      that score at least as high as the best positive (-1 for skipped queries).
    on_block: called after each block with its number of queries, e.g. to move a progress bar.

  Returns:
    ``{"mAUPRC": float, "recall@k": float for each k, "num_queries": int, "num_skipped": int, "ks_beyond_gallery": list}``. A query without a
    positive in the gallery is skipped and counted, ``num_queries`` counts the others; to count it as 0, take
    ``np.nan_to_num(result["ap_per_query"]).mean()`` with ``per_query``. For the ks that exceed the number of
    candidates, listed last, recall is 1 iff a positive exists. All values are 0 if every query is skipped.

  Raises:
    TypeError: labels are no integers, ids neither integers nor text, or embeddings no real numbers.
    ValueError: shapes do not fit; a value is not finite, or so large that a score would not be; a k or ``block_size`` is no integer or below 1.

  >>> embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> result = retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1,))
  >>> print(f"{result['mAUPRC']:.3f} {result['recall@1']:.2f}")
  0.750 0.50
  """
  ks = _checked_ks(ks)
  task = _gallery.make_task(embeddings, labels, gallery, gallery_labels, query_ids, gallery_ids, block_size)
  counter = _counting.Counter(task, block_size)
  ap, above = np.full(len(task.queries), np.nan), np.full(len(task.queries), -1)
  for rows in _gallery.blocks(task, block_size):
    ap[rows], above[rows] = counter.ranks(rows)
    if on_block is not None:
      on_block(len(rows))
  candidates = max(len(task.gallery) - (1 if task.excludes_itself else 0), 0)
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
    TypeError: ``negatives_above`` are no integers.
    ValueError: a k or ``num_candidates`` is no integer or too low; the two arrays do not fit, or an entry of them is out of range.
  """
  ks, above, ap = _checked_ks(ks), np.asarray(negatives_above), np.asarray(ap_per_query)
  _arrays.check_count("num_candidates", num_candidates, low=0)
  if above.dtype.kind not in "iu":
    raise TypeError(f"negatives_above must be integers, got {above.dtype}")
  if above.ndim != 1 or ap.shape != above.shape:
    raise ValueError(f"ap_per_query and negatives_above must be [N], got {ap.shape} and {above.shape}")
  if above.min(initial=0) < -1:
    raise ValueError(f"negatives_above must be counts, or -1 for a skipped query; got {above.min()}")
  if above.max(initial=0) > num_candidates:
    raise ValueError(f"negatives_above must be at most num_candidates={num_candidates}, got {above.max()}")
  valid = above >= 0
  wrong = ap[valid][~((ap[valid] >= 0) & (ap[valid] <= 1))]
  if wrong.size:
    raise ValueError(f"ap_per_query must lie in [0, 1] for a query that negatives_above does not skip, got {wrong[0]}")
  count = int(valid.sum())
  result: dict[str, Any] = {"mAUPRC": math.fsum(ap[valid]) / count if count else 0.0}  # in any order
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
  _arrays.check_count("thresholds", thresholds, low=2)
  task = _gallery.make_task(embeddings, labels, gallery, gallery_labels, None, None, block_size)
  precision, recall, count = np.zeros(thresholds), np.zeros(thresholds), 0
  for rows in _gallery.blocks(task, block_size):
    scores = _gallery.all_scores(task, rows, _thresholds.grid(thresholds))
    place, columns = task.positives(rows)
    numbers = np.bincount(place, minlength=len(rows))
    valid = numbers > 0
    retrieved = _thresholds.num_reached(scores, thresholds)[valid]
    hits = _thresholds.num_positives_reached(place, scores[place, columns], len(rows), thresholds)[valid]
    precisions = np.divide(hits, retrieved, out=np.ones(hits.shape), where=retrieved > 0)
    # Over the first axis numpy adds one query after the other, so that no sum depends on the block size.
    precision = np.add.reduce(np.concatenate([precision[None], precisions]))
    recall = np.add.reduce(np.concatenate([recall[None], hits / numbers[valid, None]]))
    count += len(precisions)
  return precision / max(count, 1), recall / max(count, 1), _thresholds.grid(thresholds)


def _checked_ks(ks: Sequence[int]) -> list[int]:
  ks = list(ks) if isinstance(ks, Iterable) else []
  if not ks or any(not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1 for k in ks):
    raise ValueError(f"ks must be at least 1 and integers, at least one of them; got {ks}")
  return [int(k) for k in ks]
