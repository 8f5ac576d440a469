"""Tests graded metrics against their definitions in float64, and their properties."""

import itertools

import geometries
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import reference
import sklearn.metrics

from soprc_jax import metrics

_GAINS = (None, (1.0, 0.3), (5.0, 4.9))


def _labels(seed, count, num_classes, num_superclasses):
  """Returns ``[N, 2]`` labels with gaps. The first image has a superclass of its own."""
  rng = np.random.default_rng(seed)
  classes = rng.integers(0, num_classes, count)
  labels = np.stack([7 * classes - 3, rng.integers(0, num_superclasses, num_classes)[classes]], 1)
  labels[0] = 10**6
  return labels


def _relevances(labels, others, allowed, gains):
  """Returns ``[N, G]`` relevances, and levels from 1 for the coarsest; 0 without one."""
  same = labels[:, None, :] == others[None, :, :]
  levels = np.sum(same, axis=2) * allowed
  num_levels = labels.shape[1]
  relevance = np.zeros(levels.shape)
  for row in range(len(labels)):
    for level in range(1, num_levels + 1):
      mine = levels[row] == level
      if mine.any():
        given = level / num_levels / mine.sum() if gains is None else gains[num_levels - level]
        relevance[row, mine] = given
  return relevance, levels


def _h_ap(scores, relevance):
  """Returns H-AP of one query by its definition."""
  total = 0.0
  for k in np.flatnonzero(relevance):
    above = scores >= scores[k]
    hierarchical = relevance[k] + sum(
      min(relevance[k], relevance[j]) for j in np.flatnonzero(relevance) if j != k and above[j]
    )
    total += hierarchical / above.sum()
  return total / relevance.sum()


def _ndcg(scores, gains, k):
  """Returns the lowest NDCG@k of all orders of equal scores, by trying them all."""

  def dcg(gains):
    return sum(gain / np.log2(2 + i) for i, gain in enumerate(gains[:k]))

  groups = [list(gains[scores == score]) for score in np.unique(scores)[::-1]]
  orders = itertools.product(*(set(itertools.permutations(group)) for group in groups))
  worst = min(dcg(list(itertools.chain(*order))) for order in orders)
  return worst / dcg(sorted(gains, reverse=True))


@pytest.mark.parametrize("gains", _GAINS)
@pytest.mark.parametrize(("seed", "distinct"), [(0, None), (1, 9), (2, 4)])
def test_h_ap_and_levels_match_their_definitions(gains, seed, distinct):
  embeddings, _ = geometries.data(seed, 40, 12, distinct)
  labels = _labels(seed, 40, 14, 6)
  found = metrics.graded_metrics(embeddings, labels, gains=gains, block_size=7, per_query=True)
  scores, allowed = reference.similarities(embeddings, embeddings), ~np.eye(40, dtype=bool)
  relevance, _ = _relevances(labels, labels, allowed, gains)
  want = [
    _h_ap(scores[row][allowed[row]], relevance[row][allowed[row]])
    if relevance[row].any()
    else np.nan
    for row in range(40)
  ]
  np.testing.assert_allclose(found["h_ap_per_query"], want, rtol=1e-12)
  np.testing.assert_allclose(found["H-AP"], np.nanmean(want), rtol=1e-12)
  for level in (0, 1):
    plain = metrics.retrieval_metrics(embeddings, labels[:, level], ks=(1,), per_query=True)
    np.testing.assert_array_equal(found["ap_per_level"][level], plain["ap_per_query"])
    assert found["mAUPRC_per_level"][level] == plain["mAUPRC"]
  assert found["num_skipped"] == plain["num_skipped"] > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_ndcg_matches_scikit_learn_without_equal_scores(seed):
  embeddings, _ = geometries.data(seed, 30, 8, None)
  labels, ks = _labels(seed, 30, 6, 2), (1, 3, 200)
  queries, gallery = embeddings[:10], embeddings[10:]
  options = {"gallery": gallery, "gallery_labels": labels[10:], "ks": ks, "per_query": True}
  found = metrics.graded_metrics(queries, labels[:10], **options)
  scores = reference.similarities(queries, gallery).astype(np.float64)
  _, levels = _relevances(labels[:10], labels[10:], np.ones(scores.shape, bool), None)
  has = levels.any(axis=1)
  gains = 2.0 ** levels[has] - 1
  assert gains.max() == 3
  for k, name in ((None, "NDCG"), *((k, f"NDCG@{k}") for k in ks)):
    want = sklearn.metrics.ndcg_score(gains, scores[has], k=k)
    np.testing.assert_allclose(found[name], want, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_equal_scores_count_against_the_model(seed):
  embeddings, _ = geometries.data(seed, 9, 5, 4)
  labels = _labels(seed, 9, 4, 2)
  found = metrics.graded_metrics(embeddings, labels, ks=(1, 3), per_query=True)
  scores, allowed = reference.similarities(embeddings, embeddings), ~np.eye(9, dtype=bool)
  _, levels = _relevances(labels, labels, allowed, None)
  rows = np.flatnonzero(levels.any(axis=1))
  for k, name in ((9, "NDCG"), (1, "NDCG@1"), (3, "NDCG@3")):
    want = [
      _ndcg(scores[row][allowed[row]], 2.0 ** levels[row][allowed[row]] - 1, k) for row in rows
    ]
    np.testing.assert_allclose(found[name], np.mean(want), rtol=1e-12)


@hypothesis.given(st.integers(0, 10**6), st.sampled_from([None, 3, 8]), st.integers(1, 40))
@hypothesis.settings(deadline=None, max_examples=30)
def test_one_level_is_auprc_bit_for_bit(seed, distinct, count):
  embeddings, labels = geometries.data(seed, count, 5, distinct)
  want = metrics.retrieval_metrics(embeddings, labels, ks=(1,), per_query=True)
  for gains in (None, (0.3,)):
    found = metrics.graded_metrics(embeddings, labels[:, None], gains=gains, per_query=True)
    np.testing.assert_array_equal(found["h_ap_per_query"], want["ap_per_query"])
    assert found["H-AP"] == want["mAUPRC"] == found["mAUPRC_per_level"][0]
    assert found["num_queries"] == want["num_queries"]


@hypothesis.given(st.integers(0, 10**6), st.sampled_from(_GAINS), st.sampled_from([None, 4]))
@hypothesis.settings(deadline=None, max_examples=30)
def test_no_order_and_no_block_size_changes_a_bit(seed, gains, distinct):
  embeddings, _ = geometries.data(seed, 25, 5, distinct)
  labels, options = _labels(seed, 25, 8, 3), {"gains": gains, "ks": (2,), "per_query": True}
  found = metrics.graded_metrics(embeddings, labels, **options)
  order = np.random.default_rng(seed).permutation(25)
  moved = metrics.graded_metrics(embeddings[order], labels[order], block_size=3, **options)
  for name in ("H-AP", "NDCG", "NDCG@2", "mAUPRC_per_level", "num_queries"):
    assert found[name] == moved[name]
  for name in ("h_ap_per_query", "ndcg_per_query"):
    np.testing.assert_array_equal(found[name][order], moved[name])
    assert ((found[name] >= 0) & (found[name] <= 1) | np.isnan(found[name])).all()


@pytest.mark.parametrize("gains", _GAINS)
def test_a_perfect_order_has_the_value_1(gains):
  angles = np.array([0.0, 0.01, 0.5, 0.51, 3.0, 3.01])
  labels = np.array([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1]])
  found = metrics.graded_metrics(
    np.stack([np.cos(angles), np.sin(angles)], 1), labels, gains=gains, ks=(1, 3)
  )
  names = ("H-AP", "NDCG", "NDCG@1", "NDCG@3")
  np.testing.assert_allclose([found[name] for name in names], 1, rtol=1e-15)
  assert found["NDCG"] == 1


def test_ids_exclude_queries():
  embeddings, _ = geometries.data(0, 20, 6, 8)
  labels, ids = _labels(0, 20, 5, 2), np.arange(20)
  own = metrics.graded_metrics(embeddings, labels)
  options = {"gallery": embeddings, "gallery_labels": labels, "gallery_ids": ids}
  parts = [
    metrics.graded_metrics(
      embeddings[part], labels[part], query_ids=ids[part], per_query=True, **options
    )
    for part in (slice(0, 9), slice(9, 20))
  ]
  joined = np.concatenate([part["h_ap_per_query"] for part in parts])
  np.testing.assert_allclose(np.nanmean(joined), own["H-AP"], rtol=1e-14)


def test_mistakes():
  embeddings, _ = geometries.data(0, 6, 2, None)
  labels = np.array([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1]])
  with pytest.raises(ValueError, match="label 1 of level 0 has two labels at level 1, 0 and 1"):
    metrics.graded_metrics(embeddings, np.array([[0, 0], [1, 0], [1, 1], [2, 1], [2, 1], [2, 1]]))
  with pytest.raises(ValueError, match="labels must have a column for each level"):
    metrics.graded_metrics(embeddings, labels[:, 0])
  with pytest.raises(ValueError, match="gallery_labels must have a column for each level"):
    metrics.graded_metrics(embeddings, labels, gallery=embeddings, gallery_labels=labels[:, :1])
  for gains in ((0.5, 1.0), (1.0,), (1.0, 0.0), (1.0, 1.0), (np.inf, 1.0)):
    with pytest.raises(ValueError, match="gains must be 2 decreasing numbers > 0"):
      metrics.graded_metrics(embeddings, labels, gains=gains)
  with pytest.raises(TypeError, match="integers"):
    metrics.graded_metrics(embeddings, labels.astype(float))
  with pytest.raises(ValueError, match="ks must be at least one integer"):
    metrics.graded_metrics(embeddings, labels, ks=(0,))


def test_no_query_is_left():
  found = metrics.graded_metrics(np.eye(3), np.array([[0, 0], [1, 1], [2, 2]]))
  assert (found["H-AP"], found["NDCG"], found["num_queries"], found["num_skipped"]) == (0, 0, 0, 3)
