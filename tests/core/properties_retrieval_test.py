"""Tests retrieval_metrics, mean_pr_curve and summarise_ranks on any embeddings.

The reference is a few lines of numpy.
"""

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import reference

from soprc_jax import metrics, testing

_SHAPES = [(6, 3), (1, 2), (0, 3), (9, 1)]
_KS = (1, 2, 3, 8, 1000)
_DTYPES = (np.float32, np.float64, np.float16, jnp.bfloat16)
_batches = testing.embeddings_and_labels(_SHAPES, dtypes=_DTYPES)


def _metrics(embeddings, labels, **options):
  return metrics.retrieval_metrics(embeddings, labels, ks=_KS, per_query=True, **options)


def _expected(scores, same, allowed):
  """Returns each query's AP by Eq. 2 and its number of negatives at or above the best positive."""
  ap, above = [], []
  for row, positive, candidate in zip(scores, same & allowed, allowed, strict=True):
    best = row[positive].max(initial=-np.inf)
    ap.append(
      np.mean([np.sum(row[positive] >= s) / np.sum(row[candidate] >= s) for s in row[positive]])
      if positive.any()
      else np.nan
    )
    above.append(np.sum(row[candidate & ~positive] >= best) if positive.any() else -1)
  return np.array(ap, float), np.array(above, int)


def _check(result, ap, above, num_candidates):
  np.testing.assert_allclose(result["ap_per_query"], ap, rtol=1e-12)
  np.testing.assert_array_equal(result["negatives_above"], above)
  valid = above >= 0
  assert result["num_queries"] == valid.sum()
  assert result["num_skipped"] == (~valid).sum()
  np.testing.assert_allclose(result["mAUPRC"], ap[valid].mean() if valid.any() else 0.0, rtol=1e-12)
  recalls = [result[f"recall@{k}"] for k in _KS]
  assert recalls == sorted(recalls), "recall ascends with k"
  assert all(0 <= recall <= 1 for recall in recalls)
  for k, recall in zip(_KS, recalls, strict=True):
    assert recall == (float(np.mean(above[valid] < k)) if valid.any() else 0.0)
  assert result["ks_beyond_gallery"] == [k for k in _KS if k > num_candidates]


@hypothesis.given(
  batch=_batches, block_size=st.sampled_from([1, 2, 5, 1024]), seed=st.integers(0, 2**16)
)
def test_own_gallery(batch, block_size, seed):
  embeddings, labels = batch[:2]
  size = len(labels)
  result = _metrics(embeddings, labels, block_size=block_size)
  others = ~np.eye(size, dtype=bool)
  _check(
    result,
    *_expected(
      reference.similarities(embeddings, embeddings), labels[:, None] == labels[None, :], others
    ),
    max(size - 1, 0),
  )
  order = np.random.default_rng(seed).permutation(size)
  shuffled = _metrics(embeddings[order], labels[order])
  np.testing.assert_array_equal(shuffled["ap_per_query"], result["ap_per_query"][order])
  np.testing.assert_array_equal(shuffled["negatives_above"], result["negatives_above"][order])


@hypothesis.given(
  queries=testing.embeddings_and_labels([(4, 3), (0, 3)]),
  gallery=testing.embeddings_and_labels([(5, 3), (0, 3)]),
  data=st.data(),
)
def test_separate_gallery_with_and_without_ids(queries, gallery, data):
  same = queries.labels[:, None] == gallery.labels[None, :]
  scores, options = reference.similarities(queries.embeddings, gallery.embeddings), {}
  allowed = np.ones_like(same)
  if data.draw(st.booleans()):
    ids = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in same.shape]
    allowed = np.array(ids[0], int)[:, None] != np.array(ids[1], int)[None, :]
    options = {"query_ids": np.array(ids[0], int), "gallery_ids": np.array(ids[1], int)}
  result = _metrics(
    queries.embeddings,
    queries.labels,
    gallery=gallery.embeddings,
    gallery_labels=gallery.labels,
    block_size=3,
    **options,
  )
  _check(result, *_expected(scores, same, allowed), same.shape[1])


@hypothesis.given(
  batch=_batches, block_size=st.sampled_from([1, 4, 1024]), thresholds=st.sampled_from([2, 5, 21])
)
def test_mean_pr_curve(batch, block_size, thresholds):
  embeddings, labels = batch[:2]
  precision, recall, grid = metrics.mean_pr_curve(
    embeddings, labels, thresholds=thresholds, block_size=block_size
  )
  assert precision.shape == recall.shape == grid.shape == (thresholds,)
  assert precision.dtype == recall.dtype == grid.dtype == np.float64
  assert np.all(np.diff(grid) > 0)
  assert (grid[0], grid[-1]) == (-1, 1)
  assert np.all((precision >= 0) & (precision <= 1 + 1e-12) & (recall >= 0) & (recall <= 1 + 1e-12))
  assert np.all(np.diff(recall) <= 1e-12), "recall falls with the threshold"
  others = ~np.eye(len(labels), dtype=bool)
  same = (labels[:, None] == labels[None, :]) & others
  scores, valid = reference.similarities(embeddings, embeddings), same.any(axis=1)
  for t in (0, thresholds // 2, thresholds - 1):
    reached = (scores >= grid[t]) & others
    hits, retrieved = (reached & same).sum(axis=1)[valid], reached.sum(axis=1)[valid]
    expected = np.where(retrieved > 0, hits / np.maximum(retrieved, 1), 1.0)
    np.testing.assert_allclose(precision[t], expected.mean() if valid.any() else 0.0, rtol=1e-12)
    np.testing.assert_allclose(
      recall[t], np.mean(hits / same.sum(axis=1)[valid]) if valid.any() else 0.0, rtol=1e-12
    )


@hypothesis.given(
  above=st.lists(st.integers(-1, 12), max_size=9),
  ks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
  cut=st.integers(0, 9),
)
def test_summarise_ranks_of_parts_and_in_any_order(above, ks, cut):
  above = np.array(above, int)
  ap = np.where(above < 0, np.nan, 1 / (2.0 + above))
  whole = metrics.summarise_ranks(ap, above, ks=ks, num_candidates=12)
  assert whole["num_queries"] + whole["num_skipped"] == len(above)
  assert 0 <= whole["mAUPRC"] <= 1
  parts = [
    metrics.summarise_ranks(ap[part], above[part], ks=ks, num_candidates=12)
    for part in (slice(cut), slice(cut, None))
  ]
  for name in ("mAUPRC", *(f"recall@{k}" for k in ks)):
    total = sum(part[name] * part["num_queries"] for part in parts)
    np.testing.assert_allclose(whole[name] * whole["num_queries"], total, rtol=1e-12)
  recalls = [whole[f"recall@{k}"] for k in sorted(ks)]
  assert recalls == sorted(recalls)
  assert whole["ks_beyond_gallery"] == [k for k in ks if k > 12]


def test_labels_of_64_bits_are_compared_exactly():
  """Checks uint64 next to int64. A comparison in float64 would take neighbors as equal."""
  labels = np.array([2**60, 2**60 + 1, 2**60, 2**60 + 1])
  embeddings = np.eye(4)
  assert metrics.retrieval_metrics(embeddings, labels)["num_queries"] == 4
  for kind in (np.int64, np.uint64):
    options = {"gallery": embeddings, "gallery_labels": labels.astype(kind) + kind(2)}
    assert metrics.retrieval_metrics(embeddings, labels, **options)["num_queries"] == 0
    options["gallery_labels"] = labels.astype(kind)
    assert metrics.retrieval_metrics(embeddings, labels, **options)["num_queries"] == 4
