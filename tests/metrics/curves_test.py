"""Tests the mean precision-recall curve against brute force."""

from absl.testing import parameterized
import chex
import geometries
import numpy as np
import reference

from soprc_jax import metrics
from soprc_jax.metrics import curves


class MeanPrCurveTest(chex.TestCase):
  def brute_force(self, scores, labels, gallery_labels, usable, grid):
    precision, recall = [], []
    for i in range(len(labels)):
      same = gallery_labels == labels[i]
      if not np.any(same & usable[i]):
        continue
      retrieved = [np.sum(usable[i] & (scores[i] >= t)) for t in grid]
      hits = [np.sum(same & usable[i] & (scores[i] >= t)) for t in grid]
      precision.append([h / r if r else 1.0 for h, r in zip(hits, retrieved, strict=True)])
      recall.append(np.array(hits) / np.sum(same & usable[i]))
    return np.mean(precision, axis=0), np.mean(recall, axis=0)

  @parameterized.product(distinct=(None, 5), thresholds=(2, 9, 41), block_size=(1, 7, 1024))
  def test_matches_brute_force(self, distinct, thresholds, block_size):
    embeddings, labels = geometries.data(11, 24, 8, distinct)
    embeddings = np.round(embeddings * 8) / 8  # products on thresholds
    precision, recall, grid = metrics.mean_pr_curve(
      embeddings, labels, thresholds=thresholds, block_size=block_size
    )
    np.testing.assert_allclose(grid, np.linspace(-1, 1, thresholds), atol=1e-12)
    expected = self.brute_force(
      reference.similarities(embeddings, embeddings), labels, labels, ~np.eye(24, dtype=bool), grid
    )
    np.testing.assert_allclose(precision, expected[0], rtol=1e-12)
    np.testing.assert_allclose(recall, expected[1], rtol=1e-12)

  @parameterized.parameters(2, 3, 8, 21, 2001, 4096)
  def test_num_reached_is_exact_at_the_thresholds(self, number):
    thresholds = curves.grid(number)
    at = thresholds.astype(np.float32)
    near = [np.nextafter(at, np.float32(to)) for to in (-np.inf, np.inf)]
    ends = np.float32([-np.inf, np.inf, -3e38, 3e38, 0.0, -0.0, 1e-45, -1e-45])
    scores = np.random.default_rng(0).permutation(np.concatenate([at, *near, ends]))
    scores = np.stack([scores, np.ones_like(scores)])
    want = [[np.sum(row.astype(np.float64) >= t) for t in thresholds] for row in scores]
    np.testing.assert_array_equal(curves.num_reached(scores, thresholds), want)

  def test_fine_grid_resolves_a_collapsed_model(self):
    """Checks scores that all lie between two thresholds of the default."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) // 4
    vectors = 1.0 + 4e-3 * rng.normal(size=(120, 8))
    vectors += 4e-3 * rng.normal(size=(30, 8))[labels]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    area = metrics.retrieval_metrics(vectors, labels, ks=(1,))["mAUPRC"]
    self.assertLess(area, 0.5)

    def under(**options):
      precision, recall, _ = metrics.mean_pr_curve(vectors, labels, **options)
      return -np.trapezoid(precision, recall), np.abs(np.diff(recall)).max()

    self.assertGreater(under()[1], 0.9)  # the default is a straight line
    found, jump = under(thresholds=curves.fine_grid())
    self.assertLess(jump, 0.05)
    self.assertAlmostEqual(found, area, delta=0.1)

  def test_own_thresholds(self):
    embeddings, labels = geometries.data(14, 20, 3)
    want = metrics.mean_pr_curve(embeddings, labels, thresholds=21)
    for part, own in zip(want, metrics.mean_pr_curve(embeddings, labels, thresholds=want[2])):
      np.testing.assert_array_equal(part, own)
    for wrong in ([], [0.5, 0.5], [0.0, np.nan], [[0.0, 1.0]]):
      with self.assertRaisesRegex(ValueError, "ascending numbers"):
        metrics.mean_pr_curve(embeddings, labels, thresholds=wrong)

  @parameterized.parameters("spread", "duplicates up to 1e-8", "collapsed")
  def test_sums_in_the_order_of_the_queries(self, geometry):
    """Checks that the curve equals, bit for bit, the one from sorting the scores of each query."""
    embeddings, labels = geometries.geometry(geometry, 0, 90, 16), np.arange(90) // 3
    scores = reference.similarities(embeddings, embeddings)
    np.fill_diagonal(scores, -np.inf)
    grid, precision, recall = curves.grid(2001), np.zeros(2001), np.zeros(2001)
    for i, row in enumerate(scores):
      positives = np.sort(row[(labels == labels[i]) & (np.arange(90) != i)])
      retrieved = 90 - np.searchsorted(np.sort(row), grid, side="left")
      hits = len(positives) - np.searchsorted(positives, grid, side="left")
      precision += np.where(retrieved > 0, hits / np.maximum(retrieved, 1), 1.0)
      recall += hits / len(positives)
    for block_size in (7, 90):
      got = metrics.mean_pr_curve(embeddings, labels, block_size=block_size)
      np.testing.assert_array_equal(got[0], precision / 90)
      np.testing.assert_array_equal(got[1], recall / 90)

  def test_gallery(self):
    embeddings, labels = geometries.data(12, 30, 5)
    queries, gallery = slice(0, 10), slice(10, 30)
    precision, recall, grid = metrics.mean_pr_curve(
      embeddings[queries],
      labels[queries],
      thresholds=21,
      gallery=embeddings[gallery],
      gallery_labels=labels[gallery],
      block_size=3,
    )
    scores = reference.similarities(embeddings[queries], embeddings[gallery])
    expected = self.brute_force(
      scores, labels[queries], labels[gallery], np.ones(scores.shape, bool), grid
    )
    np.testing.assert_allclose(precision, expected[0], rtol=1e-12)
    np.testing.assert_allclose(recall, expected[1], rtol=1e-12)

  def test_ends_and_default_grid(self):
    embeddings, labels = geometries.data(13, 20, 3)
    precision, recall, grid = metrics.mean_pr_curve(embeddings * 0.999, labels)
    self.assertEqual((precision.shape, recall.shape, grid.shape), ((2001,), (2001,), (2001,)))
    self.assertEqual((recall[0], recall[-1], precision[-1]), (1.0, 0.0, 1.0))
    self.assertTrue(np.all(np.diff(recall) <= 0))

  def test_scores_outside_the_thresholds(self):
    """Checks scores that are not normalized: everything above 1 is retrieved at every threshold."""
    embeddings, labels = np.full((4, 2), 3.0), np.array([0, 0, 1, 1])
    precision, recall, _ = metrics.mean_pr_curve(embeddings, labels, thresholds=5)
    np.testing.assert_allclose(precision, np.full(5, 1 / 3))
    np.testing.assert_array_equal(recall, np.ones(5))
    precision, recall, _ = metrics.mean_pr_curve(
      np.array([[3.0], [-3.0]]), np.array([0, 0]), thresholds=5
    )
    np.testing.assert_array_equal(precision, np.ones(5))
    np.testing.assert_array_equal(recall, np.zeros(5))
