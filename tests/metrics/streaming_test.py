"""Tests that metrics by blocks equal those of the joined gallery, bit for bit."""

from unittest import mock

from absl.testing import parameterized
import chex
import geometries
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from soprc_jax import metrics
from soprc_jax.metrics import exact_ranks, streaming

_GEOMETRIES = ("spread", "nearly collapsed", "duplicates", "grid", "around a midpoint")
_KS = (1, 3, 10)


def _streamed(queries, labels, gallery, gallery_labels, ids, gallery_ids, *, size, reverse=False):
  """Returns the metrics of a gallery that is given in blocks of at most ``size`` rows."""
  asked = streaming.make_queries(queries, labels, ids)
  parts = [slice(start, start + size) for start in range(0, len(gallery), size)]
  blocks = [
    streaming.Block(gallery[p], gallery_labels[p], None if ids is None else gallery_ids[p])
    for p in (parts[::-1] if reverse else parts)
  ]
  of_queries = [
    streaming.Block(
      block.vectors[kept], block.labels[kept], None if ids is None else block.ids[kept]
    )
    for block in blocks
    for kept in [np.isin(block.labels, labels)]
  ]
  thresholds = streaming.find_thresholds(asked, of_queries)
  counter = streaming.BlockCounter(asked, thresholds, size=size, num_candidates=len(gallery))
  counts = sum(counter.count(counter.prepare(block)) for block in blocks)
  return streaming.summarise(
    thresholds, counts, ks=_KS, num_candidates=len(gallery), per_query=True
  )


def _assert_equal(got, want):
  for name, value in want.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)


class StreamingTest(chex.TestCase):
  # 1: all doubtful pairs are scored one by one. 16: a query with more than 6 doubtful candidates is
  # counted exactly.
  @parameterized.product(geometry=_GEOMETRIES, pair_cost=(1, 16), min_products=(0, 2**40))
  @hypothesis.given(
    seed=st.integers(0, 2**16),
    classes=st.sampled_from([3, 20, 60]),
    dtype=st.sampled_from([np.float16, np.float32]),
    with_ids=st.booleans(),
    reverse=st.booleans(),
  )
  @hypothesis.settings(max_examples=4)
  def test_equal_to_the_joined_gallery(
    self, geometry, pair_cost, min_products, seed, classes, dtype, with_ids, reverse
  ):
    vectors = geometries.geometry(geometry, seed, 136, 16).astype(dtype)
    rng = np.random.default_rng(seed)
    labels, names = rng.integers(0, classes, 136), rng.integers(0, 100, 136)
    ids = (names[:40], names[40:]) if with_ids else (None, None)
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=min_products, _PAIR_COST=pair_cost):
      got = _streamed(
        vectors[:40],
        labels[:40],
        vectors[40:],
        labels[40:],
        *ids,
        size=40,
        reverse=reverse,
      )
    want = metrics.retrieval_metrics(
      vectors[:40],
      labels[:40],
      gallery=vectors[40:],
      gallery_labels=labels[40:],
      query_ids=ids[0],
      gallery_ids=ids[1],
      ks=_KS,
      per_query=True,
    )
    _assert_equal(got, want)


@pytest.mark.parametrize("min_products", [0, 2**40])
def test_queries_in_their_gallery_and_many_positives(min_products, monkeypatch):
  monkeypatch.setattr(exact_ranks, "MIN_PRODUCTS", min_products)
  monkeypatch.setattr(streaming, "QUERY_ROWS", 16)  # more chunks than one
  vectors = geometries.geometry("duplicates", 0, 400, 8)
  labels = np.repeat([0, 1, 2, 3, 4], [1, 9, 30, 140, 220])  # one class has no positive
  ids = np.array([f"image {i}" for i in range(400)])
  got = _streamed(vectors, labels, vectors, labels, ids, ids, size=150)
  want = metrics.retrieval_metrics(vectors, labels, ks=_KS, per_query=True)
  _assert_equal(got, want)
  assert got["num_skipped"] == 1


@pytest.mark.parametrize("entries", [1, 1 << 26])
def test_a_mask_in_place_of_labels(entries, monkeypatch):
  monkeypatch.setattr(streaming, "_MASK", entries)
  vectors = geometries.geometry("duplicates", 0, 120, 8)
  relevant = np.random.default_rng(0).random((30, 90)) < 0.2
  ids = np.where(np.arange(90) < 5, np.arange(90), -1)
  asked = streaming.make_queries(vectors[:30], np.zeros(30, int), np.arange(30))
  blocks = [
    streaming.Block(
      vectors[30:][start : start + 40],
      ids=ids[start : start + 40],
      relevance=lambda rows, start=start: relevant[rows, start : start + 40],
    )
    for start in (0, 40, 80)
  ]
  thresholds = streaming.find_thresholds(asked, blocks)
  counter = streaming.BlockCounter(asked, thresholds, size=40, num_candidates=90)
  counts = sum(counter.count(counter.prepare(block)) for block in blocks)
  got = streaming.summarise(thresholds, counts, ks=_KS, num_candidates=90, per_query=True)
  want = metrics.retrieval_metrics(
    vectors[:30],
    gallery=vectors[30:],
    relevance=relevant,
    query_ids=np.arange(30),
    gallery_ids=ids,
    ks=_KS,
    per_query=True,
  )
  _assert_equal(got, want)


def test_ap_at_k_equals_its_definition():
  vectors, labels = geometries.data(0, 120, 9)
  got = _streamed(vectors[:30], labels[:30], vectors[30:], labels[30:], None, None, size=32)
  scores = vectors[:30].astype(np.float64) @ vectors[30:].T.astype(np.float64)
  for k in _KS:
    want = []
    for row, label in zip(scores, labels[:30]):
      relevant = (labels[30:] == label)[np.argsort(-row)]
      precision = np.cumsum(relevant) / np.arange(1, 91)
      want.append((precision * relevant)[:k].sum() / min(k, relevant.sum()))
    np.testing.assert_allclose(got[f"ap@{k}_per_query"], want, rtol=1e-12)
    np.testing.assert_allclose(got[f"mAP@{k}"], np.mean(want), rtol=1e-12)


def test_ap_at_k_counts_ties_against_the_model():
  # The positive ties with two negatives: it is third.
  vectors, labels = np.ones((3, 2), np.float32), np.array([1, 0, 1])
  got = _streamed(vectors[:1], np.array([0]), vectors, labels, None, None, size=2)
  assert [got[f"mAP@{k}"] for k in _KS] == [0.0, 1 / 3, 1 / 3]
  assert [got[f"recall@{k}"] for k in _KS] == [0.0, 1.0, 1.0]


def test_no_positive_at_all():
  vectors = np.eye(3, dtype=np.float32)
  got = _streamed(vectors, np.arange(3), vectors, np.arange(3, 6), None, None, size=2)
  assert (got["num_queries"], got["num_skipped"], got["mAUPRC"], got["mAP@3"]) == (0, 3, 0.0, 0.0)


def test_errors():
  vectors = np.eye(3, dtype=np.float32)
  with pytest.raises(TypeError, match="float16 or float32, got float64"):
    streaming.make_queries(np.eye(3), np.arange(3))
  queries = streaming.make_queries(vectors, np.arange(3))
  found = streaming.find_thresholds(queries, [streaming.Block(vectors, np.arange(3))])
  counter = streaming.BlockCounter(queries, found, size=4, num_candidates=3)
  with pytest.raises(ValueError, match="first in row 1") as caught:
    counter.prepare(streaming.Block(np.array([[0, 0, 0], [0, np.nan, 1]], np.float32)))
  assert caught.value.row == 1
  with pytest.raises(ValueError, match=r"\[G, 3\], got \[2, 4\]"):
    counter.prepare(streaming.Block(np.zeros((2, 4), np.float32)))
  with pytest.raises(ValueError, match="scores beyond float32"):
    counter.prepare(streaming.Block(np.full((1, 3), 3e38, np.float32)))
  with pytest.raises(ValueError, match="blocks miss"):
    streaming.summarise(found, np.zeros(3, np.int64), ks=(1,), num_candidates=3)
