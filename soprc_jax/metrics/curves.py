"""Mean precision-recall curve over queries, from counts of scores at evenly spaced thresholds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from soprc_jax._internal import checks, sorting
from soprc_jax.metrics import candidates, similarities

# Up to this number a bin computed in float32 is off by at most one.
_MAX_THRESHOLDS = 2**20
_ROWS = 64


def mean_pr_curve(
  embeddings: npt.ArrayLike,
  labels: npt.ArrayLike | None = None,
  *,
  relevance: candidates.Mask | None = None,
  ignore: candidates.Mask | None = None,
  thresholds: int = 2001,
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
    thresholds: number T >= 2 of thresholds, evenly spaced in [-1, 1]; 2001 gives steps of 0.001.
    gallery: ``[G, D]`` candidates. ``None`` takes the queries, each without itself.
    gallery_labels: ``[G]`` integers, required with ``gallery`` and ``labels``.
    block_size: number of queries that are processed at a time. It does not change the result.

  Returns:
    ``precision [T], recall [T], thresholds [T]``, float64, with ascending thresholds. At a
    threshold that retrieves nothing a query counts with precision 1 and recall 0. Queries without a
    positive are skipped.

  Raises:
    ValueError: as in `retrieval_metrics`, or ``thresholds`` < 2.
  """
  checks.check_count("thresholds", thresholds, low=2)
  task = similarities.make_task(
    embeddings, labels, gallery, gallery_labels, None, None, block_size, relevance, ignore
  )
  precision, recall, count = np.zeros(thresholds), np.zeros(thresholds), 0
  for rows in similarities.blocks(task, block_size):
    scores = similarities.all_scores(task, rows, grid(thresholds))
    place, columns = task.positives(rows)
    numbers = np.bincount(place, minlength=len(rows))
    valid = numbers > 0
    retrieved = num_reached(scores, thresholds)[valid]
    hits = num_positives_reached(place, scores[place, columns], len(rows), thresholds)[valid]
    precisions = np.divide(hits, retrieved, out=np.ones(hits.shape), where=retrieved > 0)
    # On the first axis numpy adds one query after the other, so no sum depends on the block size.
    precision = np.add.reduce(np.concatenate([precision[None], precisions]))
    recall = np.add.reduce(np.concatenate([recall[None], hits / numbers[valid, None]]))
    count += len(precisions)
  return precision / max(count, 1), recall / max(count, 1), grid(thresholds)


def grid(number: int) -> np.ndarray:
  """Returns evenly spaced, symmetric thresholds in [-1, 1], ``[T]`` float64."""
  half = (number - 1) / 2
  return (np.arange(number) - half) / half


def num_reached(scores: np.ndarray, number: int) -> np.ndarray:
  """Counts the scores of each row that are at least as high as each threshold of `grid`.

  Args:
    scores: ``[n, G]``.
    number: number T of thresholds.

  Returns:
    ``[n, T]`` int64.
  """
  if number > _MAX_THRESHOLDS or scores.dtype != np.float32:
    return np.stack(
      [len(row) - np.searchsorted(np.sort(row), grid(number), side="left") for row in scores]
    )
  # Sorting each row makes `mean_pr_curve` of 5,000 x 512 take 1.18 times as long.
  edges = jnp.asarray(_edges(number))
  # Calls return before they are done, so all cores work on them.
  parts = [
    _histograms(_rows(scores[start : start + _ROWS]), edges)
    for start in range(0, len(scores), _ROWS)
  ]
  counts = np.concatenate([np.asarray(part) for part in parts])[: len(scores)]
  return _from_histograms(counts)


def num_positives_reached(
  place: np.ndarray, scores: np.ndarray, rows: int, number: int
) -> np.ndarray:
  """Counts like `num_reached`, for a few scores per row: ``scores [m]`` of rows ``place [m]``."""
  bins = np.searchsorted(grid(number), scores, side="right")
  counts = np.bincount(place * (number + 1) + bins, minlength=rows * (number + 1))
  return _from_histograms(counts.reshape(rows, number + 1))


def _from_histograms(counts: np.ndarray) -> np.ndarray:
  """Converts bin counts ``[n, T + 1]`` to counts of scores that reach each threshold, ``[n, T]``.

  Scores in bin i reach the first i thresholds.
  """
  reached = counts[:, :0:-1].astype(np.int64)
  np.cumsum(reached, axis=1, out=reached)  # in place takes a third of the time
  return reached[:, ::-1]


def _rows(scores: np.ndarray) -> np.ndarray:
  """Pads the scores to _ROWS rows, so that only one shape is compiled."""
  missing = _ROWS - len(scores)
  return np.pad(scores, [(0, missing), (0, 0)]) if missing else scores


def _edges(number: int) -> np.ndarray:
  """Returns the edges of the bins in terms of `ordered_bits`, ``[T + 2]`` int32.

  A score s reaches i thresholds if ``edges[i] <= ordered_bits(s) < edges[i + 1]``. This is exact,
  since scores are float32.
  """
  thresholds = grid(number)
  above = thresholds.astype(np.float32)
  above = np.where(above < thresholds, np.nextafter(above, np.float32(np.inf)), above)
  bits = above.view(np.int32)
  ends = np.iinfo(np.int32)
  edges = np.where(
    above == 0, -1, np.where(bits < 0, bits ^ ends.max, bits)
  )  # -1 are the ordered bits of -0.0, which reaches 0
  return np.concatenate([[ends.min], edges, [ends.max]]).astype(np.int32)


@jax.jit
def _histograms(scores: jax.Array, edges: jax.Array) -> jax.Array:
  """Counts the scores of each row that reach exactly i thresholds, ``[n, T + 1]``."""
  number = len(edges) - 2
  half = (number - 1) / 2

  def histogram(row: jax.Array) -> jax.Array:
    guess = jnp.clip(jnp.floor(row * half + half), -1, number - 1).astype(jnp.int32) + 1
    guess = jnp.clip(guess, 0, number)  # a NaN converts to an arbitrary integer
    values = sorting.ordered_bits(row)
    bins = (
      guess
      + (values >= edges[guess + 1]).astype(jnp.int32)
      - (values < edges[guess]).astype(jnp.int32)
    )
    return (
      jnp.zeros(number + 1, jnp.int32)
      .at[jnp.clip(bins, 0, number)]
      .add(1, mode="promise_in_bounds")
    )

  return jax.lax.map(histogram, scores)
