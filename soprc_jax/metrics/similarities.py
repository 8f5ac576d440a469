"""Queries and their gallery: checked, and scored by one reproducible rule.

The score of two vectors is the sum of the products of their entries. It is computed in float64, in
an order of addition that depends on the width only (`pair_scores`), then rounded to float32 unless
an entry has more precision. So equal vectors have equal scores at any position. A matrix product
adds in an order that depends on its shape and on the library. It is used only where its error bound
leaves no doubt. The other pairs are scored one by one.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from soprc_jax._internal import checks, pair_options
from soprc_jax.metrics import candidates

# Pairs whose vectors are gathered at a time, so that both sides stay in the cache of a core.
_PAIRS = 256
# Rows of a float64 product at a time.
_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Task:
  """Holds the checked inputs of one evaluation.

  Attributes:
    queries: ``[N, D]`` float32 or float64.
    gallery: ``[G, D]`` float32 or float64.
    members: relevant candidates of each query.
    excluded: candidates that are excluded from the gallery of each query. None excludes none.
    excludes_itself: whether the queries are their own gallery.
  """

  queries: np.ndarray
  gallery: np.ndarray
  members: candidates.Candidates
  excluded: candidates.Candidates | None
  excludes_itself: bool

  @property
  def dtype(self) -> np.dtype:
    """Returns the dtype of the scores: float64 if an embedding is float64, else float32."""
    return np.result_type(self.queries, self.gallery)

  @functools.cached_property
  def gallery_in_float64(self) -> np.ndarray:
    """Returns the gallery in float64, ``[G, D]``; converted on first access."""
    return self.gallery.astype(np.float64, copy=False)

  @functools.cached_property
  def norms(self) -> tuple[np.ndarray, float]:
    """Returns the norms of the queries, ``[N]``, and the largest norm of the gallery."""
    return _norms(self.queries), float(_norms(self.gallery).max(initial=0.0))

  def positives(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs each of ``rows``, given by its index among them, with each of its positives.

    Returns:
      Indices and positions, ``[n]`` each.
    """
    place, columns = self.members.pairs(rows)
    if self.excluded is None:
      return place, columns
    kept = ~self.excluded.contains(rows, place, columns)
    return place[kept], columns[kept]


def make_task(
  embeddings: npt.ArrayLike,
  labels: npt.ArrayLike | None,
  gallery: npt.ArrayLike | None,
  gallery_labels: npt.ArrayLike | None,
  query_ids: npt.ArrayLike | None,
  gallery_ids: npt.ArrayLike | None,
  block_size: int,
  relevance: candidates.Mask | None = None,
  ignore: candidates.Mask | None = None,
) -> Task:
  """Checks the arguments of `soprc_jax.metrics.retrieval_metrics`.

  Raises:
    TypeError, ValueError: as in `soprc_jax.metrics.retrieval_metrics`.
  """
  checks.check_count("block_size", block_size)
  pair_options.check_one_given(labels, relevance, "relevance")
  pair_options.check_gallery(labels, gallery, gallery_labels)
  if labels is None:  # equal ones, which are not used
    labels = np.zeros(np.shape(embeddings)[:1], int)
    gallery_labels = None if gallery is None else np.zeros(np.shape(gallery)[:1], int)
  queries, labels = _checked("embeddings", embeddings, "labels", labels)
  own = gallery is None
  if gallery is None or gallery_labels is None:  # both, as checked above
    gallery, gallery_labels = queries, labels
  else:
    gallery, gallery_labels = _checked("gallery", gallery, "gallery_labels", gallery_labels)
  if queries.shape[1] != gallery.shape[1]:
    raise ValueError(f"embeddings have width {queries.shape[1]}, the gallery {gallery.shape[1]}")
  check_scores(queries, gallery)
  if own and gallery_ids is None:
    gallery_ids = query_ids
  if (query_ids is None) != (gallery_ids is None):
    raise ValueError("query_ids and gallery_ids must be given together: one of them is missing")
  groups = None
  if query_ids is not None:
    query_ids, gallery_ids = (
      _checked_ids("query_ids", query_ids),
      _checked_ids("gallery_ids", gallery_ids),
    )
    if (
      query_ids.size
      and gallery_ids.size
      and (query_ids.dtype.kind in "US") != (gallery_ids.dtype.kind in "US")
    ):
      raise TypeError(
        f"query_ids and gallery_ids must both be integers or both text, got {query_ids.dtype} and "
        f"{gallery_ids.dtype}"
      )
    if query_ids.shape != labels.shape or gallery_ids.shape != gallery_labels.shape:
      raise ValueError(
        f"ids must have one entry per image: {labels.shape} and {gallery_labels.shape}, "
        f"got {query_ids.shape} and {gallery_ids.shape}"
      )
    groups = candidates.group(query_ids, gallery_ids)
  elif own:
    positions = np.arange(len(labels))
    groups = candidates.Groups(positions, positions, np.ones_like(positions))
  shape = len(queries), len(gallery)
  members: candidates.Candidates = candidates.group(labels, gallery_labels)
  if relevance is not None:
    members = candidates.Masked("relevance", relevance, shape)
  excluded: candidates.Candidates | None = groups
  if ignore is not None:
    excluded = candidates.Masked("ignore", ignore, shape, also=groups)
  return Task(queries, gallery, members, excluded, own)


def _checked(
  name: str, embeddings: npt.ArrayLike, labels_name: str, labels: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
  embeddings, labels = np.asarray(embeddings), np.asarray(labels)
  if embeddings.dtype.kind in "cOSU":
    raise TypeError(f"{name} must be real numbers, got {embeddings.dtype}")
  if labels.size and labels.dtype.kind not in "biu":
    raise TypeError(f"{labels_name} must be integers, got {labels.dtype}")
  # float32 represents every number of the shorter float types.
  is_short = jnp.issubdtype(embeddings.dtype, np.floating) and embeddings.dtype.itemsize <= 4
  embeddings = embeddings.astype(np.float32 if is_short else np.float64, copy=False)
  if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
    raise ValueError(
      f"{name} must be [N, D] and {labels_name} [N], got {embeddings.shape} and {labels.shape}"
    )
  finite = np.isfinite(embeddings).all(axis=1)
  if not finite.all():
    raise ValueError(f"{name} has non-finite values, first in row {int(np.argmin(finite))}")
  return embeddings, labels


def _checked_ids(name: str, ids: Any) -> np.ndarray:
  """Converts ids to an array of integers or text.

  Floats are rejected, since different ids may round to the same float.
  """
  ids = np.asarray(ids)
  if ids.dtype == object and all(isinstance(value, str) for value in ids.flat):
    ids = ids.astype(str)
  exact = ids.dtype == object and all(isinstance(value, (int, np.integer)) for value in ids.flat)
  if ids.size and ids.dtype.kind not in "iuUS" and not exact:
    raise TypeError(
      f"{name} must be integers or text, got {ids.dtype}: pass an array of one integer type, or "
      "dtype=object for Python integers beyond 64 bits"
    )
  return ids


def check_scores(queries: np.ndarray, gallery: np.ndarray) -> None:
  """Raises a ValueError if a score may overflow its dtype.

  It would tie with others, or with excluded candidates.
  """
  largest, other = (float(np.abs(part).max(initial=0.0)) for part in (queries, gallery))
  dtype = np.result_type(queries, gallery)
  if largest and other > float(np.finfo(dtype).max) / largest / max(queries.shape[1], 1):
    raise ValueError(
      f"embeddings with entries up to {max(largest, other):g} have scores beyond {dtype}: scale "
      "them, e.g. to unit norm"
    )


def blocks(task: Task, block_size: int) -> Iterator[np.ndarray]:
  """Yields the rows of the queries in blocks of at most ``block_size``."""
  for start in range(0, len(task.queries), block_size):
    yield np.arange(start, min(start + block_size, len(task.queries)))


def all_scores(
  task: Task, rows: np.ndarray, limits: Sequence[float] | np.ndarray = ()
) -> np.ndarray:
  """Computes the scores of all candidates of some queries.

  Args:
    task: queries and gallery.
    rows: ``[n]`` indices of queries.
    limits: other numbers that the scores will be compared with.

  Returns:
    ``[n, G]``, -inf for excluded candidates. Comparisons within a row and with the limits have the
    same results as for `pair_scores`. float32 scores equal those of `pair_scores`. A float64 score
    equals that of `pair_scores` if another score of its row or a limit is near it.
  """
  scores = np.empty((len(rows), len(task.gallery)), task.dtype)
  norms, largest = task.norms
  # Twice the error of a sum of D products in any order (`exact_ranks`), and of underflow.
  bounds = 2.02 * (task.queries.shape[1] + 2) * 2.0**-53 * norms[rows] * largest + 2.0**-1000
  # In parts, since allocating memory of the size of a block takes as long as the product in it.
  for start in range(0, len(rows), _ROWS):
    part, bound = slice(start, start + _ROWS), bounds[start : start + _ROWS, None]
    product = task.queries[rows[part]].astype(np.float64) @ task.gallery_in_float64.T
    if task.dtype == np.float32:
      low = _sum_in_float32(product, -bound, np.empty(product.shape, np.float32))
      in_doubt = low != _sum_in_float32(product, bound, scores[part])
    else:
      scores[part] = product
      in_doubt = np.stack([_near_others(*row, limits) for row in zip(product, 2 * bound)])
    # A search over one axis is twenty times as fast as over two.
    place, columns = np.divmod(np.flatnonzero(in_doubt), scores.shape[1])
    scores[start + place, columns] = pair_scores(task, rows[part][place], columns)
  if task.excluded is not None:
    task.excluded.fill(scores, rows, -np.inf)
  return scores


def _sum_in_float32(product: np.ndarray, bound: np.ndarray, out: np.ndarray) -> np.ndarray:
  """Adds in float64, and rounds into ``out``."""
  return np.add(product, bound, out=out, dtype=np.float64, casting="same_kind")


def _near_others(
  scores: np.ndarray, distance: np.ndarray, limits: Sequence[float] | np.ndarray
) -> np.ndarray:
  """Returns which scores have another score, or a limit, within a distance, ``[G]`` bool."""
  ordered = np.sort(np.concatenate([scores, limits]))
  close = ordered[1:] - ordered[:-1] <= distance
  if not close.any():
    return np.zeros(scores.shape, bool)
  return np.isin(scores, ordered[np.append(close, False) | np.append(False, close)])


def pair_scores(task: Task, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """Computes the scores of some pairs of a query and a candidate, ``[n]``.

  The order of each sum depends on the width only, since numpy adds the entries of a row pairwise.
  einsum is not suitable, since it splits its input into buffers independently of the rows.
  """
  scores = np.empty(len(rows), task.dtype)
  for start in range(0, len(rows), _PAIRS):
    part = slice(start, start + _PAIRS)
    products = task.queries[rows[part]].astype(np.float64) * task.gallery[columns[part]]
    scores[part] = np.add.reduce(products, axis=1)
  return scores


def _norms(vectors: np.ndarray) -> np.ndarray:
  """Returns upper bounds of the norms, ``[n]`` float64, despite squares lost to underflow."""
  squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
  return np.sqrt(squares) + 2.0**-500 * vectors.shape[1]
