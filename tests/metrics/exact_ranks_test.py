"""Tests that ranks by float32 products equal those by exact scores (`metrics/rank_counts.py`)."""

from unittest import mock

from absl.testing import parameterized
import chex
import geometries
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import reference

from soprc_jax import metrics
from soprc_jax.metrics import exact_ranks, similarities

_GEOMETRIES = (
  "spread",
  "collapsed",
  "nearly collapsed",
  "duplicates",
  "duplicates up to 1e-8",
  "any norm",
  "grid",
  "around a midpoint",
)


class FastCountsTest(chex.TestCase):
  """Tests that counts by float32 products equal those of the exact scores. Exact scores are
  computed only where the float32 product leaves a doubt.
  """

  def compare(self, result, expected):
    # Not a bit may differ.
    np.testing.assert_array_equal(result["ap_per_query"], expected[0])
    np.testing.assert_array_equal(result["negatives_above"], expected[1])

  # 1: all doubtful pairs are scored one by one. 16: a query with more than 6 doubtful candidates is
  # ranked exactly.
  @parameterized.product(geometry=_GEOMETRIES, pair_cost=(1, 16))
  @hypothesis.given(
    seed=st.integers(0, 2**16),
    classes=st.sampled_from([3, 20, 60]),
    block_size=st.sampled_from([40, 96]),
  )
  @hypothesis.settings(max_examples=8)
  def test_equal_to_exact_scores_of_all(self, geometry, pair_cost, seed, classes, block_size):
    embeddings = geometries.geometry(geometry, seed, 96, 16)
    labels = np.random.default_rng(seed).integers(0, classes, 96)
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0, _PAIR_COST=pair_cost):
      got = metrics.retrieval_metrics(embeddings, labels, block_size=block_size, per_query=True)
    self.compare(
      got, reference.by_sorting_all(embeddings, labels, embeddings, labels, ~np.eye(96, dtype=bool))
    )

  @parameterized.product(geometry=("spread", "duplicates"), ids=(None, 5, 90))
  def test_gallery_and_ids(self, geometry, ids):
    embeddings, rng = geometries.geometry(geometry, 0, 96, 16), np.random.default_rng(0)
    labels = rng.integers(0, 12, 96)
    options, usable = {}, np.ones((40, 56), bool)
    if ids:
      keys = rng.integers(0, ids, 96)
      options, usable = (
        {"query_ids": keys[:40], "gallery_ids": keys[40:]},
        keys[:40, None] != keys[40:],
      )
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0, _PAIR_COST=4):
      got = metrics.retrieval_metrics(
        embeddings[:40],
        labels[:40],
        gallery=embeddings[40:],
        gallery_labels=labels[40:],
        per_query=True,
        **options,
      )
    self.compare(
      got,
      reference.by_sorting_all(embeddings[:40], labels[:40], embeddings[40:], labels[40:], usable),
    )

  def test_the_fast_way_is_taken(self):
    """Checks that above a size, for spread embeddings, no query needs the exact scores of all."""
    embeddings, labels = geometries.geometry("spread", 0, 512, 64), np.arange(512) // 4
    with (
      mock.patch.object(exact_ranks, "MIN_PRODUCTS", 512 * 512 * 64),
      mock.patch.object(
        exact_ranks, "exact_ranks", side_effect=AssertionError("exact scores of all")
      ),
    ):
      metrics.retrieval_metrics(embeddings, labels)
      with self.assertRaisesRegex(AssertionError, "exact scores of all"):
        metrics.retrieval_metrics(embeddings[:-1], labels[:-1])

  def test_collapsed_embeddings_do_without_it(self):
    """Checks that the product in float32 is skipped after a block with mostly doubtful queries."""
    embeddings, labels = geometries.geometry("collapsed", 0, 96, 16), np.arange(96) // 4
    with (
      mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0),
      mock.patch.object(exact_ranks, "_count_block", side_effect=exact_ranks._count_block) as count,
    ):
      metrics.retrieval_metrics(embeddings, labels, block_size=24)
    self.assertEqual(count.call_count, 1)

  @parameterized.parameters((0.05, True), (3.0, False))
  def test_one_comparison_where_few_reach_the_lowest_positive(self, noise, is_sparse):
    """Checks that a good model needs no count for each positive, and a poor one does."""
    rng = np.random.default_rng(0)
    labels = np.arange(512) // 4
    embeddings = rng.normal(size=(128, 64))[labels] + noise * rng.normal(size=(512, 64))
    with (
      mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0),
      mock.patch.object(exact_ranks, "_count_block", side_effect=exact_ranks._count_block) as count,
    ):
      got = metrics.retrieval_metrics(embeddings, labels, block_size=128, per_query=True)
    self.assertEqual(count.call_count, 0 if is_sparse else 4)
    usable = ~np.eye(512, dtype=bool)
    self.compare(got, reference.by_sorting_all(embeddings, labels, embeddings, labels, usable))

  @parameterized.parameters(16, 300)
  def test_bound(self, width):
    """Checks that the float32 score is within the bound of the exact one. The bound has the size of
    float32 errors.
    """
    vectors = geometries.geometry("spread", 1, 400, width)
    task = similarities.make_task(vectors, np.zeros(400, int), None, None, None, None, 400)
    with mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0):
      bound = exact_ranks.Counter(task, 400)._bound[:, None]
    error = np.abs(np.float64(vectors @ vectors.T) - np.float64(vectors) @ np.float64(vectors).T)
    self.assertLess(np.max(error / bound), 1.0)
    self.assertLess(np.max(bound), 1.1 * (width + 8) * 2.0**-24)

  def test_memory_and_work(self):
    """Checks that temporary memory is that of a tile of scores, for any number of positives. Work
    grows with the gallery.
    """

    def measured(size, positives):
      shapes = [
        jax.ShapeDtypeStruct((8, 128, last), jnp.float32) for last in (32, positives, positives)
      ]
      compiled = exact_ranks._count_block.lower(
        jax.ShapeDtypeStruct((size, 32), jnp.float32), shapes
      ).compile()
      return (
        compiled.memory_analysis().temp_size_in_bytes,
        compiled.memory_analysis().output_size_in_bytes,
      )

    tile = 4 * 128
    for size in (2000, 4000):
      for positives in (4, 32):
        temporary, output = measured(size, positives)
        # Scores of a tile and the doubtful entries of the block, once in the loop and once as its
        # result.
        self.assertLess(temporary, (2 * tile + 2 * 1024) * size + 4 * 10**5)
        self.assertLess(output, 1024 * (size + 4 * positives + 4) + 1000)
