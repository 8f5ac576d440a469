"""Retrieval metrics over a gallery: mean AUPRC (Eq. 2) and recall@k.

They take numpy arrays and work block by block, so that the similarity matrix of a whole data set is
never in memory. `retrieval_metrics` states the precision of similarities, and when two of them are
equal.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from soprc_jax._internal import checks
from soprc_jax.metrics import candidates, exact_ranks, similarities


def retrieval_metrics(
  embeddings: npt.ArrayLike,
  labels: npt.ArrayLike | None = None,
  *,
  relevance: candidates.Mask | None = None,
  ignore: candidates.Mask | None = None,
  ks: Sequence[int] = (1, 10, 100, 1000),
  gallery: npt.ArrayLike | None = None,
  gallery_labels: npt.ArrayLike | None = None,
  query_ids: npt.ArrayLike | None = None,
  gallery_ids: npt.ArrayLike | None = None,
  block_size: int = 1024,
  per_query: bool = False,
  on_block: Callable[[int], None] | None = None,
) -> dict[str, Any]:
  """Computes mean AUPRC (Eq. 2) and recall@k over a gallery, with each image as a query.

  Ties count against the model. AUPRC counts every score ``>=`` that of the positive. recall@k is a
  hit only if fewer than k negatives score at least as high as the best positive. The query is
  excluded from its gallery by index (or by id), never by rank, so an exact duplicate of it stays a
  candidate.

  The similarity of two vectors is the sum of the products of their entries. It is computed in
  float64, in an order of addition that depends on D only. It is then rounded to float32, unless an
  embedding is float64 (or an integer type). Two similarities are equal if these numbers are. So
  exact duplicates tie, and no result depends on ``block_size``, on the order of the gallery, on
  devices or on processes.

  Args:
    embeddings: ``[N, D]`` finite queries; bfloat16 and float16 count as float32.
    labels: ``[N]`` integers. Exactly one of ``labels`` and ``relevance`` is required.
    relevance: which candidates are positives of each query: a bool array or a scipy sparse matrix
      ``[N, G]``, or a function of ``rows [n]`` that returns ``[n, G]`` of either kind. It is called
      once for each block, with ascending indices of queries, so that ``[N, G]`` need not fit into
      memory. The pair of a query with itself is never used.
    ignore: candidates that are left out for a query, since their relevance is unknown, in the same
      form.
    ks: cut-offs k >= 1.
    gallery: ``[G, D]`` candidates. ``None`` takes the queries.
    gallery_labels: ``[G]`` integers, required with ``gallery`` and ``labels``.
    query_ids: ``[N]`` integers or text. Candidates with the id of the query are excluded.
    gallery_ids: ``[G]``, required with ``query_ids`` and ``gallery``.
    block_size: number of queries that are processed at a time. Memory is at most about ``8 *
      block_size * G`` bytes, plus the embeddings and a float64 copy of them. ``relevance`` and
      ``ignore`` each add about ``2 * block_size * G`` bytes, and 16 bytes for each positive of a
      block. It does not change the result.
    per_query: adds ``"ap_per_query"`` ``[N]`` (NaN for skipped queries) and ``"negatives_above"``
      ``[N]``, the number of negatives that score at least as high as the best positive (-1 for
      skipped queries).
    on_block: called after each block with its number of queries, e.g. to move a progress bar.

  Returns:
    ``{"mAUPRC": float, "recall@k": float for each k, "num_queries": int, "num_skipped": int,
    "ks_beyond_gallery": list}``. A query without a positive in the gallery is skipped, and counted
    by ``num_skipped``. ``num_queries`` counts the others. To count a skipped query as 0, take
    ``np.nan_to_num(result["ap_per_query"]).mean()`` with ``per_query``. ``ks_beyond_gallery`` lists
    the ks above the number of candidates, where recall is 1 if and only if a positive exists. All
    values are 0 if every query is skipped.

  Raises:
    TypeError: labels are not integers, ids are neither integers nor text, or embeddings are not
      real numbers.
    ValueError: shapes do not fit; both or neither of ``labels`` and ``relevance`` are given; a mask
      has other numbers than 0 and 1; a value is not finite, or so large that a score would not be;
      a k or ``block_size`` is not an integer >= 1.

  >>> embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> result = retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1,))
  >>> print(f"{result['mAUPRC']:.3f} {result['recall@1']:.2f}")
  0.750 0.50
  """
  ks = checked_ks(ks)
  task = similarities.make_task(
    embeddings,
    labels,
    gallery,
    gallery_labels,
    query_ids,
    gallery_ids,
    block_size,
    relevance,
    ignore,
  )
  counter = exact_ranks.Counter(task, block_size)
  ap, above = np.full(len(task.queries), np.nan), np.full(len(task.queries), -1)
  for rows in similarities.blocks(task, block_size):
    ap[rows], above[rows] = counter.ranks(rows)
    if on_block is not None:
      on_block(len(rows))
  num_candidates = max(len(task.gallery) - (1 if task.excludes_itself else 0), 0)
  result = summarise_ranks(ap, above, ks=ks, num_candidates=num_candidates)
  if per_query:
    result["ap_per_query"] = ap
    result["negatives_above"] = above
  return result


def summarise_ranks(
  ap_per_query: npt.ArrayLike,
  negatives_above: npt.ArrayLike,
  *,
  ks: Sequence[int],
  num_candidates: int,
) -> dict[str, Any]:
  """Computes the result of `retrieval_metrics` from its values per query.

  The values may come from several processes.

  Args:
    ap_per_query: ``[N]`` average precision.
    negatives_above: ``[N]`` number of negatives at least as high as the best positive; -1 for a
      skipped query.
    ks: cut-offs k >= 1.
    num_candidates: size of the gallery of a query, the query itself not counted.

  Raises:
    TypeError: ``negatives_above`` are not integers.
    ValueError: a k or ``num_candidates`` is not an integer or too low; the two arrays do not fit,
      or one of their entries is out of range.
  """
  ks, above, ap = checked_ks(ks), np.asarray(negatives_above), np.asarray(ap_per_query)
  checks.check_count("num_candidates", num_candidates, low=0)
  if above.dtype.kind not in "iu":
    raise TypeError(f"negatives_above must be integers, got {above.dtype}")
  if above.ndim != 1 or ap.shape != above.shape:
    raise ValueError(
      f"ap_per_query and negatives_above must be [N], got {ap.shape} and {above.shape}"
    )
  if above.min(initial=0) < -1:
    raise ValueError(
      f"negatives_above must be counts, or -1 for a skipped query; got {above.min()}"
    )
  if above.max(initial=0) > num_candidates:
    raise ValueError(
      f"negatives_above must be at most num_candidates={num_candidates}, got {above.max()}"
    )
  valid = above >= 0
  wrong = ap[valid][~((ap[valid] >= 0) & (ap[valid] <= 1))]
  if wrong.size:
    raise ValueError(
      "ap_per_query must lie in [0, 1] for a query that negatives_above does not skip, got "
      f"{wrong[0]}"
    )
  count = int(valid.sum())
  result: dict[str, Any] = {
    "mAUPRC": math.fsum(ap[valid]) / count if count else 0.0
  }  # fsum is exact in any order
  for k in ks:
    result[f"recall@{k}"] = float((above[valid] < k).mean()) if count else 0.0
  result["num_queries"] = count
  result["num_skipped"] = len(above) - count
  result["ks_beyond_gallery"] = [k for k in ks if k > num_candidates]
  return result


def checked_ks(ks: Sequence[int]) -> list[int]:
  ks = list(ks) if isinstance(ks, Iterable) else []
  if not ks or any(
    not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1 for k in ks
  ):
    raise ValueError(f"ks must be at least one integer, each >= 1; got {ks}")
  return [int(k) for k in ks]
