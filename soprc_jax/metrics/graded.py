"""Metrics of graded relevance over a gallery, for classes with superclasses: H-AP and NDCG.

Scores and equal scores follow the rule of `soprc_jax.metrics.retrieval_metrics`.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from soprc_jax.metrics import retrieval, similarities


def graded_metrics(
  embeddings: npt.ArrayLike,
  labels: npt.ArrayLike,
  *,
  gains: Sequence[float] | None = None,
  ks: Sequence[int] = (),
  gallery: npt.ArrayLike | None = None,
  gallery_labels: npt.ArrayLike | None = None,
  query_ids: npt.ArrayLike | None = None,
  gallery_ids: npt.ArrayLike | None = None,
  block_size: int = 1024,
  per_query: bool = False,
  on_block: Callable[[int], None] | None = None,
) -> dict[str, Any]:
  r"""Computes H-AP, NDCG and the mAUPRC of each level of a hierarchy of labels.

  Level 0 is the finest one, e.g. classes, and level L - 1 the coarsest one, e.g. superclasses. A
  candidate has the finest level that it shares with the query, and a relevance ``rel > 0`` by that
  level. It is 0 for a candidate that shares none.

  **H-AP** (Ramzi et al., Hierarchical Average Precision Training for Pertinent Image Retrieval,
  ECCV 2022) counts all scores ``>=`` that of k, as AUPRC does:

  .. math:: \frac{1}{\sum_k rel(k)} \sum_{k:\, rel(k) > 0}
            \frac{\sum_{j:\, s_j \ge s_k} \min(rel(k), rel(j))}{|\{j: s_j \ge s_k\}|}

  It is a weighted mean of average precisions (docs/howto/graded.md), and with a single level the
  AUPRC, bit for bit.

  **NDCG** (Järvelin and Kekäläinen, 2002) has the gains ``2^l - 1`` of Burges et al. (2005) and of
  the authors of H-AP: l is 1 for the coarsest level and L for the finest. The discount of rank r is
  ``1 / log2(1 + r)``. NDCG@k takes the first k candidates, and the best possible first k. Among
  candidates of equal scores the less relevant ones come first, so NDCG is the lowest value of all
  orders of equal scores.

  Args:
    embeddings: ``[N, D]`` finite queries.
    labels: ``[N, L]`` integers, one column for each level, the finest first. Images of one label
      must have the same label at every coarser level.
    gains: ``[L]`` relevance of each level, decreasing and > 0. None takes that of the authors of
      H-AP: ``l / L``, divided by the number of candidates of that level, for each query.
    ks: cut-offs k >= 1 of NDCG@k.
    gallery: ``[G, D]`` candidates. ``None`` takes the queries, each without itself.
    gallery_labels: ``[G, L]`` integers, required with ``gallery``.
    query_ids: as in `retrieval_metrics`.
    gallery_ids: as in `retrieval_metrics`.
    block_size: number of queries that are processed at a time. It does not change the result.
    per_query: adds ``"h_ap_per_query"`` ``[N]``, ``"ndcg_per_query"`` ``[N]`` and
      ``"ap_per_level"`` ``[L, N]``, NaN for a skipped query.
    on_block: called after each block with its number of queries.

  Returns:
    ``{"H-AP": float, "NDCG": float, "NDCG@k": float for each k, "mAUPRC_per_level": list of L
    floats, "num_queries": int, "num_skipped": int}``. The mAUPRC of a level has the candidates of
    that level or a finer one as positives, and is over the queries that have one. The others are
    over the queries with a candidate of any level. A mean over no query is 0.

  Raises:
    TypeError: as in `retrieval_metrics`.
    ValueError: as in `retrieval_metrics`; labels are not ``[N, L]``, or one has two coarser labels;
      gains are not L decreasing numbers > 0.

  >>> embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
  >>> result = graded_metrics(embeddings, np.array([[0, 7], [1, 7], [0, 7], [2, 8]]))
  >>> print(f"{result['H-AP']:.3f} {result['NDCG']:.3f} {result['mAUPRC_per_level'][1]:.3f}")
  0.833 0.828 0.944
  """
  ks = retrieval.checked_ks(ks) if len(ks) else []
  labels, gallery_labels = _checked_labels(labels, gallery_labels)
  num_levels = labels.shape[1]
  relevance = _checked_gains(gains, num_levels)
  task = similarities.make_task(
    embeddings,
    labels[:, -1],
    gallery,
    None if gallery_labels is None else gallery_labels[:, -1],
    query_ids,
    gallery_ids,
    block_size,
  )
  others = labels if gallery_labels is None else gallery_labels
  cuts = [len(task.gallery), *ks]
  discounts = 1 / np.log2(np.arange(2, len(task.gallery) + 2))
  ap = np.full((num_levels, len(labels)), np.nan)
  h_ap, ndcg = np.full(len(labels), np.nan), np.full((len(cuts), len(labels)), np.nan)
  for rows in similarities.blocks(task, block_size):
    scores = similarities.all_scores(task, rows)
    place, columns = task.positives(rows)
    level = np.full(len(place), num_levels - 1)
    for finer in reversed(range(num_levels - 1)):
      level[labels[rows[place], finer] == others[columns, finer]] = finer
    ends = np.searchsorted(place, np.arange(len(rows) + 1))
    for i, row in enumerate(rows):
      mine = slice(ends[i], ends[i + 1])
      if ends[i] < ends[i + 1]:
        found = _rank(scores[i], scores[i, columns[mine]], level[mine])
        aps = _Aps(found, num_levels)
        ap[:, row] = [aps.of(range(each + 1)) for each in range(num_levels)]
        h_ap[row] = _h_ap(aps, relevance, is_shared=gains is None)
        ndcg[:, row] = [_ndcg(found, discounts[:k], num_levels) for k in cuts]
    if on_block is not None:
      on_block(len(rows))
  result: dict[str, Any] = {"H-AP": mean(h_ap), "NDCG": mean(ndcg[0])}
  result |= {f"NDCG@{k}": mean(values) for k, values in zip(ks, ndcg[1:], strict=True)}
  result["mAUPRC_per_level"] = [mean(values) for values in ap]
  result["num_skipped"] = int(np.isnan(h_ap).sum())
  result["num_queries"] = len(labels) - result["num_skipped"]
  if per_query:
    result |= {"h_ap_per_query": h_ap, "ndcg_per_query": ndcg[0], "ap_per_level": ap}
  return result


def mean(values: np.ndarray) -> float:
  """Returns the mean of the numbers of ``values [N]`` that are not NaN; 0 for none."""
  kept = values[~np.isnan(values)]
  return math.fsum(kept) / len(kept) if len(kept) else 0.0


class _Relevant(NamedTuple):
  """Holds the P relevant candidates of a query by ascending score.

  Attributes:
    scores: ``[P]``.
    level: ``[P]`` level of each; among equal scores finer levels come first.
    retrieved: ``[P]`` number of candidates that score at least as high.
    rank: ``[P]`` from 1, where the less relevant of equal scores come first.
  """

  scores: np.ndarray
  level: np.ndarray
  retrieved: np.ndarray
  rank: np.ndarray


def _rank(everyone: np.ndarray, scores: np.ndarray, level: np.ndarray) -> _Relevant:
  """Ranks the relevant candidates, given their scores among those of everyone ``[G]``."""
  order = np.argsort(scores)
  if (scores[order[1:]] == scores[order[:-1]]).any():
    order = np.lexsort((level, scores))
  scores, level = scores[order], level[order]
  retrieved = len(everyone) - np.searchsorted(np.sort(everyone), scores, side="left")
  irrelevant = retrieved - _num_hits(scores)
  return _Relevant(scores, level, retrieved, irrelevant + np.arange(len(scores), 0, -1))


def _num_hits(scores: np.ndarray) -> np.ndarray:
  """Counts the ascending scores that are at least as high as each one."""
  return len(scores) - np.searchsorted(scores, scores, side="left")


class _Aps:
  """Computes the average precisions of a query with the candidates of some levels as positives."""

  def __init__(self, found: _Relevant, num_levels: int):
    self.level, self._num_levels = found.level, num_levels
    self._found, self._known = found, dict[tuple[int, ...], float]()

  def of(self, levels: Iterable[int]) -> float:
    """Returns Eq. 2 with the candidates of some levels as the positives, NaN without one."""
    key = tuple(sorted(set(levels)))
    if key not in self._known:
      chosen = np.zeros(self._num_levels, bool)
      chosen[list(key)] = True
      positive = chosen[self.level]
      hits = _num_hits(self._found.scores[positive])
      retrieved = self._found.retrieved[positive]
      self._known[key] = float(np.mean(hits / retrieved)) if len(hits) else math.nan
    return self._known[key]


def _h_ap(aps: _Aps, relevance: np.ndarray, *, is_shared: bool) -> float:
  """Returns H-AP, as the mean of average precisions that it is."""
  counts = np.bincount(aps.level, minlength=len(relevance))
  values = relevance / np.maximum(counts, 1) if is_shared else relevance
  steps = np.unique(values[counts > 0])
  parts = [np.flatnonzero(values >= step) for step in steps]
  weights = np.diff(steps, prepend=0.0) * [counts[part].sum() for part in parts]
  # Divided first, so that a single part has the weight 1.
  return math.fsum((weights / weights.sum()) * [aps.of(part.tolist()) for part in parts])


def _ndcg(found: _Relevant, discounts: np.ndarray, num_levels: int) -> float:
  """Returns NDCG with a discount for each of the first ranks, and 0 for the others."""
  gains = np.exp2(np.arange(num_levels, 0, -1)) - 1.0
  # The first rank first in both sums, so that a perfect order has the value 1.
  own = gains[found.level[::-1]]
  best = np.repeat(gains, np.bincount(found.level, minlength=num_levels))[: len(discounts)]
  kept = found.rank[::-1] <= len(discounts)
  total = np.sum(own[kept] * discounts[found.rank[::-1][kept] - 1])
  return float(total / np.sum(best * discounts[: len(best)]))


def _checked_labels(
  labels: npt.ArrayLike, gallery_labels: npt.ArrayLike | None
) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns labels as arrays, once it is sure that each has one coarser label."""
  parts = [np.asarray(part) for part in (labels, gallery_labels) if part is not None]
  for name, part in zip(("labels", "gallery_labels"), parts, strict=False):
    if part.ndim != 2 or part.shape[1] != parts[0].shape[1] or not part.shape[1]:
      raise ValueError(
        f"{name} must have a column for each level, the finest first, and be as wide as labels; "
        f"got {list(part.shape)}"
      )
  pairs = np.concatenate([part.astype(object) for part in parts])
  for finer in range(pairs.shape[1] - 1):
    coarser: dict[Any, Any] = {}
    for one, other in pairs[:, finer : finer + 2].tolist():
      if coarser.setdefault(one, other) != other:
        raise ValueError(
          f"label {one} of level {finer} has two labels at level {finer + 1}, "
          f"{coarser[one]} and {other}: it must have one"
        )
  return parts[0], parts[1] if len(parts) > 1 else None


def _checked_gains(gains: Sequence[float] | None, num_levels: int) -> np.ndarray:
  if gains is None:
    return np.arange(num_levels, 0, -1) / num_levels
  values = np.asarray(gains, np.float64)
  if values.shape != (num_levels,) or not (
    (values > 0).all() and np.isfinite(values).all() and (np.diff(values) < 0).all()
  ):
    raise ValueError(
      f"gains must be {num_levels} decreasing numbers > 0, one for each level; got {gains}"
    )
  return values
