"""Mean precision-recall curve over queries, from counts of scores at fixed thresholds."""

import numpy as np
import numpy.typing as npt

from soprc_jax._internal import checks
from soprc_jax.metrics import candidates, similarities


def mean_pr_curve(
  embeddings: npt.ArrayLike,
  labels: npt.ArrayLike | None = None,
  *,
  relevance: candidates.Mask | None = None,
  ignore: candidates.Mask | None = None,
  thresholds: int | npt.ArrayLike = 2001,
  gallery: npt.ArrayLike | None = None,
  gallery_labels: npt.ArrayLike | None = None,
  block_size: int = 1024,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Computes mean precision and recall over the queries at fixed similarity thresholds.

  These are the curves of the paper's figures.

  Args:
    embeddings: ``[N, D]`` queries, unit norm.
    labels: ``[N]`` integers. Exactly one of ``labels`` and ``relevance`` is required.
    relevance: the positives of each query, as in `retrieval_metrics`.
    ignore: candidates that are left out for a query, as in `retrieval_metrics`.
    thresholds: number T >= 2 of thresholds, evenly spaced in [-1, 1]; 2001 gives steps of 0.001. Or
      the thresholds themselves, ``[T]`` ascending numbers.
    gallery: ``[G, D]`` candidates. ``None`` takes the queries, each without itself.
    gallery_labels: ``[G]`` integers, required with ``gallery`` and ``labels``.
    block_size: number of queries that are processed at a time. It does not change the result.

  Returns:
    ``precision [T], recall [T], thresholds [T]``, float64, with ascending thresholds. At a
    threshold that retrieves nothing a query counts with precision 1 and recall 0. Queries without a
    positive are skipped.

  Raises:
    ValueError: as in `retrieval_metrics`; ``thresholds`` is a number < 2, or does not ascend.
  """
  at = _thresholds(thresholds)
  task = similarities.make_task(
    embeddings, labels, gallery, gallery_labels, None, None, block_size, relevance, ignore
  )
  precision, recall, count = np.zeros(len(at)), np.zeros(len(at)), 0
  for rows in similarities.blocks(task, block_size):
    scores = similarities.all_scores(task, rows, at)
    place, columns = task.positives(rows)
    numbers = np.bincount(place, minlength=len(rows))
    valid = numbers > 0
    retrieved = num_reached(scores, at)[valid]
    hits = num_positives_reached(place, scores[place, columns], len(rows), at)[valid]
    precisions = np.divide(hits, retrieved, out=np.ones(hits.shape), where=retrieved > 0)
    # On the first axis numpy adds one query after the other, so no sum depends on the block size.
    precision = np.add.reduce(np.concatenate([precision[None], precisions]))
    recall = np.add.reduce(np.concatenate([recall[None], hits / numbers[valid, None]]))
    count += len(precisions)
  return precision / max(count, 1), recall / max(count, 1), at


def _thresholds(given: int | npt.ArrayLike) -> np.ndarray:
  """Returns thresholds ``[T]``, given their number or themselves."""
  if np.ndim(given) == 0:
    checks.check_count("thresholds", given, low=2)
    return grid(int(given))  # type: ignore[arg-type]
  at = np.asarray(given, np.float64)
  if at.ndim != 1 or not np.isfinite(at).all() or not (np.diff(at) > 0).all() or not at.size:
    raise ValueError(f"thresholds must be a number >= 2, or [T] ascending numbers; got {given!r}")
  return at


def grid(number: int) -> np.ndarray:
  """Returns evenly spaced, symmetric thresholds in [-1, 1], ``[T]`` float64."""
  half = (number - 1) / 2
  return (np.arange(number) - half) / half


def fine_grid() -> np.ndarray:
  """Returns thresholds that also tell scores near 1 apart, ``[T]`` float64, ascending.

  They are 1,001 evenly spaced ones, and 1,000 whose distance to 1 grows evenly in its logarithm,
  from 1e-7. All scores of a collapsed model can lie between two thresholds of `grid`, where the
  curve would be a straight line from precision 1 to recall 1.
  """
  return np.unique(np.concatenate([grid(1001), 1 - np.geomspace(1e-7, 2.0, 1000)]))


def num_reached(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
  """Counts the scores of each row that are at least as high as each threshold.

  Args:
    scores: ``[n, G]``.
    thresholds: ``[T]`` float64.

  Returns:
    ``[n, T]`` int64.
  """
  if scores.dtype == np.float32:
    # A float32 score reaches a threshold if it reaches the next float32 number.
    near = thresholds.astype(np.float32)
    thresholds = np.where(near < thresholds, np.nextafter(near, np.float32(np.inf)), near)
  return np.stack(
    [len(row) - np.searchsorted(np.sort(row), thresholds, side="left") for row in scores]
  )


def num_positives_reached(
  place: np.ndarray, scores: np.ndarray, rows: int, thresholds: np.ndarray
) -> np.ndarray:
  """Counts like `num_reached`, for a few scores per row: ``scores [m]`` of rows ``place [m]``."""
  bins = np.searchsorted(thresholds, scores, side="right")  # the number of thresholds reached
  size = len(thresholds) + 1
  counts = np.bincount(place * size + bins, minlength=rows * size).reshape(rows, size)
  reached = counts[:, :0:-1].astype(np.int64)
  np.cumsum(reached, axis=1, out=reached)  # in place takes a third of the time
  return reached[:, ::-1]
