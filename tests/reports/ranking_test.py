"""Tests what a report shows of the rankings of a split."""

import numpy as np

from soprc_jax import metrics
from soprc_jax.reports import ranking


def _look_alikes(labels, found, *, count):
  """Returns the confused pairs of classes, where an image of the same class is relevant."""
  return ranking.look_alikes(
    labels,
    found,
    right=labels[found.positions] == labels[:, None],
    num_relevant=(labels[:, None] == labels).sum(axis=1),
    count=count,
    examples=2,
  )


class TestRanking:
  def _nearest(self, embeddings, k):
    """Returns the nearest, one query at a time."""
    scores = (embeddings.astype(np.float64) @ embeddings.T.astype(np.float64)).astype(np.float32)
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]

  def test_nearest_are_exact_and_ties_go_by_index(self, monkeypatch):
    rng = np.random.default_rng(0)
    embeddings = rng.integers(-1, 2, (60, 3)).astype(np.float32)  # many equal ones
    expected = self._nearest(embeddings, 10)
    for size in (1, 2**13, 2**20):
      monkeypatch.setattr(ranking, "_BLOCK_BYTES", size)
      found = ranking.nearest(embeddings, np.arange(60), k=10)
      np.testing.assert_array_equal(found.positions, expected)
    np.testing.assert_array_equal(found.scores[5], (embeddings @ embeddings[5])[expected[5]])

  def test_more_than_there_are(self):
    found = ranking.nearest(np.eye(3, dtype=np.float32), np.zeros(3, int), k=10)
    assert found.positions.shape == (3, 2)

  def test_ap_of_a_class_is_the_mean_over_its_queries(self):
    rng = np.random.default_rng(1)
    labels, embeddings = rng.integers(0, 6, 40), rng.normal(size=(40, 4)).astype(np.float32)
    labels[0] = 99  # alone
    ap = metrics.retrieval_metrics(embeddings, labels, per_query=True)["ap_per_query"]
    found = ranking.by_class(labels, ap)
    for label, size, value in zip(found.labels, found.sizes, found.ap, strict=True):
      each = []
      for query in np.flatnonzero(labels == label):
        scores = embeddings @ embeddings[query]
        others = np.arange(40) != query
        positives = np.flatnonzero(others & (labels == label))
        each += (
          [np.mean([np.mean(labels[others & (scores >= scores[p])] == label) for p in positives])]
          if len(positives)
          else []
        )
      assert size == (labels == label).sum()
      np.testing.assert_allclose(value, np.mean(each) if each else np.nan)
    assert np.isnan(found.ap[-1])

  def test_look_alikes(self):
    # 1 and 2 are in one place, 3 is far away, 4 is next to it with one stray image of 3.
    angles = np.radians([0, 0.1, 0.2, 0.3, 90, 91, 120, 121, 120.5])
    labels = np.array([1, 2, 1, 2, 3, 3, 4, 4, 3])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    pairs = _look_alikes(labels, ranking.nearest(embeddings, labels, k=3), count=5)
    assert [pair.labels for pair in pairs] == [(3, 4), (1, 2)]
    assert (pairs[1].errors, pairs[1].places) == (4, 4)  # the nearest of each is of the other class
    # Queries of 3 have two places. 4 is in the second of two of them, and in both of the stray one.
    # Queries of 4 have one place, which the stray one takes.
    assert (pairs[0].errors, pairs[0].places) == (6, 8)
    used = [position for example in pairs[0].examples for position in example]
    assert len(set(used)) == len(used)
    assert all({labels[query], labels[other]} == {3, 4} for query, other in pairs[0].examples)

  def test_no_errors_no_look_alikes(self):
    labels = np.repeat(np.arange(3), 3)
    assert _look_alikes(labels, ranking.nearest(np.eye(3)[labels], labels, k=10), count=5) == []

  def test_worst_queries_are_of_different_classes(self):
    labels, ap = np.array([5, 5, 7, 8, 8]), np.array([0.1, 0.1, np.nan, 0.05, 0.9])
    assert ranking.worst_queries(labels, ap, 3).tolist() == [3, 0]
    assert ranking.some_queries(ap, 9).tolist() == [0, 1, 3, 4]

  def test_thousands_of_classes(self):
    labels = np.repeat(np.arange(2000), 2)
    embeddings = np.random.default_rng(2).normal(size=(4000, 4)).astype(np.float32)
    found = ranking.nearest(embeddings, labels, k=10)
    pairs = _look_alikes(labels, found, count=8)
    assert len(pairs) == 8
    assert pairs[0].errors >= pairs[-1].errors > 0
