"""Tests retrieval metrics over a gallery against brute force, and at the size of the benchmarks."""

import tracemalloc
from unittest import mock

from absl.testing import parameterized
import chex
import geometries
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax.numpy as jnp
import numpy as np
import reference
import sklearn.metrics

from soprc_jax import metrics
from soprc_jax.metrics import exact_ranks


class RetrievalMetricsTest(chex.TestCase):
  def compare(self, result, expected, ks):
    valid = expected["above"] >= 0
    np.testing.assert_allclose(result["ap_per_query"], expected["ap"], rtol=1e-12)
    np.testing.assert_array_equal(result["negatives_above"], expected["above"])
    np.testing.assert_allclose(
      result["mAUPRC"], expected["ap"][valid].mean() if valid.any() else 0.0, rtol=1e-12
    )
    self.assertEqual([result[f"recall@{k}"] for k in ks], [expected["recall"][k] for k in ks])
    self.assertEqual((result["num_queries"], result["num_skipped"]), (valid.sum(), (~valid).sum()))

  @parameterized.product(seed=(0, 1), distinct=(None, 5), block_size=(1, 7, 1024))
  def test_own_gallery_matches_brute_force(self, seed, distinct, block_size):
    embeddings, labels = geometries.data(
      seed, 30, 12, distinct
    )  # classes of size 1 occur: skipped queries
    ks = (1, 2, 5)
    result = metrics.retrieval_metrics(
      embeddings, labels, ks=ks, block_size=block_size, per_query=True
    )
    others = ~np.eye(30, dtype=bool)
    self.compare(
      result,
      reference.retrieval(
        reference.similarities(embeddings, embeddings), labels, labels, others, ks
      ),
      ks,
    )
    self.assertGreater(result["num_skipped"], 0)

  @parameterized.named_parameters(("distinct", None), ("duplicates", 6))
  def test_separate_gallery_and_ids(self, distinct):
    embeddings, labels = geometries.data(2, 40, 6, distinct)
    queries, query_labels, gallery, gallery_labels = (
      embeddings[:15],
      labels[:15],
      embeddings[15:],
      labels[15:],
    )
    ks, scores = (1, 4), reference.similarities(queries, gallery)
    options = {
      "ks": ks,
      "gallery": gallery,
      "gallery_labels": gallery_labels,
      "block_size": 4,
      "per_query": True,
    }
    everything = np.ones(scores.shape, bool)
    result = metrics.retrieval_metrics(queries, query_labels, **options)
    self.compare(
      result, reference.retrieval(scores, query_labels, gallery_labels, everything, ks), ks
    )
    rng = np.random.default_rng(3)
    ids, gallery_ids = (
      rng.integers(0, 9, 15),
      rng.integers(0, 12, 25),
    )  # several candidates share an id
    result = metrics.retrieval_metrics(
      queries, query_labels, query_ids=ids, gallery_ids=gallery_ids, **options
    )
    usable = ids[:, None] != gallery_ids[None, :]
    self.compare(result, reference.retrieval(scores, query_labels, gallery_labels, usable, ks), ks)

  def test_ids_of_the_queries_exclude_all_their_views(self):
    embeddings, labels = geometries.data(4, 24, 4, 8)
    ids = np.arange(24) // 2  # two views of each image
    result = metrics.retrieval_metrics(embeddings, labels, ks=(1,), query_ids=ids, per_query=True)
    usable = ids[:, None] != ids[None, :]
    expected = reference.retrieval(
      reference.similarities(embeddings, embeddings), labels, labels, usable, (1,)
    )
    self.compare(result, expected, (1,))

  def test_excluding_the_own_id_from_a_copy_of_the_gallery(self):
    embeddings, labels = geometries.data(5, 30, 5, 10)
    own = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    ids, order = np.arange(30) * 3 + 7, np.random.default_rng(0).permutation(30)
    copy = metrics.retrieval_metrics(
      embeddings,
      labels,
      gallery=embeddings[order],
      gallery_labels=labels[order],
      query_ids=ids,
      gallery_ids=ids[order],
      per_query=True,
    )
    np.testing.assert_array_equal(copy["ap_per_query"], own["ap_per_query"])
    np.testing.assert_array_equal(copy["negatives_above"], own["negatives_above"])

  @parameterized.named_parameters(("distinct", None), ("duplicates", 9))
  def test_f08_block_size_changes_no_bit(self, distinct):
    embeddings, labels = geometries.data(6, 101, 12, distinct)
    results = [
      metrics.retrieval_metrics(embeddings, labels, ks=(1, 10), block_size=size, per_query=True)
      for size in (1, 3, 64, 101, 5000)
    ]
    for result in results[1:]:
      self.assertEqual(result["mAUPRC"], results[0]["mAUPRC"])
      np.testing.assert_array_equal(result["ap_per_query"], results[0]["ap_per_query"])
      np.testing.assert_array_equal(result["negatives_above"], results[0]["negatives_above"])

  @hypothesis.given(seed=st.integers(0, 2**16))
  @hypothesis.settings(max_examples=10)
  def test_order_changes_nothing(self, seed):
    embeddings, labels = geometries.data(seed, 25, 5, 8)
    order = np.random.default_rng(seed).permutation(25)
    first = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    second = metrics.retrieval_metrics(embeddings[order], labels[order], per_query=True)
    np.testing.assert_array_equal(second["ap_per_query"], first["ap_per_query"][order])
    np.testing.assert_array_equal(second["negatives_above"], first["negatives_above"][order])

  @parameterized.product(scale=(1.0, 0.0), fast=(False, True))
  @hypothesis.given(
    labels=hnp.arrays(np.int64, 12, elements=st.integers(0, 3)), seed=st.integers(0, 2**16)
  )
  @hypothesis.settings(max_examples=10)
  def test_f03_a_collapsed_model_gains_nothing_in_any_order(self, scale, fast, labels, seed):
    """Checks embeddings that are all equal, or all zero. AP is the share of positives, and recall@k
    needs fewer than k negatives.
    """
    embeddings = scale * np.tile(np.float32([[0.36, 0.48, 0.8]]), (12, 1))
    positives = np.array([np.sum(labels == y) - 1 for y in labels])
    valid = positives > 0
    expected = np.where(valid, positives / 11, np.nan)
    for order in (np.arange(12), np.random.default_rng(seed).permutation(12)):
      with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0 if fast else 2**31, _PAIR_COST=1):
        result = metrics.retrieval_metrics(embeddings, labels[order], ks=(1, 9), per_query=True)
      np.testing.assert_allclose(result["ap_per_query"], expected[order], rtol=1e-12)
      for k in (1, 9):
        self.assertEqual(
          result[f"recall@{k}"], float(np.mean(11 - positives[valid] < k)) if valid.any() else 0.0
        )
      precision, recall, grid = metrics.mean_pr_curve(embeddings, labels[order], thresholds=5)
      if valid.any():
        np.testing.assert_allclose(
          precision[grid <= 0], expected[valid].mean(), rtol=1e-12
        )  # all are retrieved, or none
        np.testing.assert_array_equal(recall[grid <= 0], 1.0)

  def test_recall_is_pessimistic(self):
    """Checks that a negative at the score of the best positive is ranked before it."""
    embeddings = np.float32([[1, 0], [0.6, 0.8], [0.6, 0.8], [0, 1]])
    result = metrics.retrieval_metrics(
      embeddings, np.array([0, 0, 1, 1]), ks=(1, 2, 3), per_query=True
    )
    np.testing.assert_array_equal(result["negatives_above"], [1, 2, 1, 1])
    self.assertEqual([result[f"recall@{k}"] for k in (1, 2, 3)], [0.0, 0.75, 1.0])

  @parameterized.named_parameters(("exact", 2**31), ("fast", 0))
  def test_f04_a_duplicate_of_the_query_stays_and_the_query_goes(self, min_products):
    embeddings = np.float32([[1, 0], [1, 0], [0, 1], [0, 1]])
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=min_products, _PAIR_COST=1):
      same = metrics.retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1,))
      crossed = metrics.retrieval_metrics(
        embeddings, np.array([0, 1, 0, 1]), ks=(1,), per_query=True
      )
      # Queries 1 and 2 in a gallery of all images, in another order, identified by their ids.
      order = np.array([2, 0, 3, 1])
      separate = metrics.retrieval_metrics(
        embeddings[1:3],
        np.array([1, 0]),
        ks=(1,),
        gallery=embeddings[order],
        gallery_labels=np.array([0, 1, 0, 1])[order],
        query_ids=["b", "c"],
        gallery_ids=np.array(["a", "b", "c", "d"])[order],
        per_query=True,
      )
    self.assertEqual((same["mAUPRC"], same["recall@1"]), (1.0, 1.0))
    # The duplicate is a negative, and one of the two at 0 is the positive: 1 / 3, ties included. If
    # the query counted as a hit, it would be 1 or 1 / 2.
    np.testing.assert_allclose(crossed["ap_per_query"], np.full(4, 1 / 3))
    self.assertEqual(crossed["recall@1"], 0.0)
    np.testing.assert_array_equal(separate["ap_per_query"], crossed["ap_per_query"][1:3])
    self.assertEqual(separate["recall@1"], 0.0)

  def test_f07_the_mean_is_over_the_whole_gallery_whatever_the_ks(self):
    """Checks a positive behind 3,000 negatives: an AP of the first 1,000 would be 0."""
    angles = np.concatenate([np.linspace(0.1, 1.0, 3000), [0.0, 1.5]])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = np.concatenate([np.arange(3000), [5000, 5000]])
    found = [
      metrics.retrieval_metrics(
        embeddings[-2:-1],
        labels[-2:-1],
        ks=ks,
        gallery=np.delete(embeddings, -2, 0),
        gallery_labels=np.delete(labels, -2),
      )
      for ks in ((1,), (1000,), (1, 10, 3001))
    ]
    for result in found:
      np.testing.assert_allclose(result["mAUPRC"], 1 / 3001, rtol=1e-9)
      # Every truncated metric has its k in its name.
      names = set(result) - {"mAUPRC", "num_queries", "num_skipped", "ks_beyond_gallery"}
      self.assertTrue(all(name.startswith("recall@") for name in names), names)
    self.assertEqual((found[1]["recall@1000"], found[2]["recall@3001"]), (0.0, 1.0))

  def test_f28_queries_without_a_positive_are_left_out_and_counted(self):
    embeddings, _ = geometries.data(7, 5, 1)
    result = metrics.retrieval_metrics(
      embeddings, np.array([0, 0, 1, 2, 3]), ks=(4,), per_query=True
    )
    self.assertEqual((result["num_queries"], result["num_skipped"]), (2, 3))
    np.testing.assert_array_equal(
      np.isnan(result["ap_per_query"]), [False, False, True, True, True]
    )
    np.testing.assert_array_equal(result["negatives_above"][2:], [-1, -1, -1])
    self.assertEqual(result["mAUPRC"], np.mean(result["ap_per_query"][:2]))
    # The alternative in the docstring counts them as 0.
    np.testing.assert_allclose(
      np.nan_to_num(result["ap_per_query"]).mean(), result["mAUPRC"] * 2 / 5, rtol=1e-12
    )
    nothing = metrics.retrieval_metrics(embeddings, np.arange(5), ks=(1,))
    self.assertEqual((nothing["mAUPRC"], nothing["recall@1"]), (0.0, 0.0))
    self.assertEqual((nothing["num_queries"], nothing["num_skipped"]), (0, 5))
    precision, recall, _ = metrics.mean_pr_curve(
      embeddings, np.array([0, 0, 1, 2, 3]), thresholds=3
    )
    self.assertTrue(np.isfinite(precision).all())
    self.assertEqual(recall[0], 1.0)  # the mean over two queries, not over five

  def test_f06_k_beyond_the_gallery_is_one_where_a_positive_exists_and_said_so(self):
    embeddings, labels = geometries.data(8, 10, 2)
    result = metrics.retrieval_metrics(embeddings, labels, ks=(1, 9, 10, 1000))
    self.assertEqual(result["ks_beyond_gallery"], [10, 1000])  # 9 candidates
    self.assertEqual((result["recall@10"], result["recall@1000"]), (1.0, 1.0))
    other = metrics.retrieval_metrics(
      embeddings, labels, ks=(10, 11), gallery=embeddings, gallery_labels=labels
    )
    self.assertEqual(other["ks_beyond_gallery"], [11])
    # No positive, and the last label is that of the query: padding of a list must not count as a
    # hit.
    labels = np.array([0, 0, 1, 2])
    lonely = metrics.retrieval_metrics(
      embeddings[2:4], labels[2:], ks=(1, 50), gallery=embeddings[:2], gallery_labels=labels[:2]
    )
    self.assertEqual(
      (lonely["recall@50"], lonely["num_queries"], lonely["num_skipped"]), (0.0, 0, 2)
    )
    mixed = metrics.retrieval_metrics(embeddings[:4], labels, ks=(50,), per_query=True)
    self.assertEqual((mixed["recall@50"], mixed["num_queries"]), (1.0, 2))

  def test_result(self):
    embeddings, labels = geometries.data(9, 20, 4)
    result = metrics.retrieval_metrics(jnp.asarray(embeddings), jnp.asarray(labels))
    self.assertEqual(
      set(result),
      {
        "mAUPRC",
        "recall@1",
        "recall@10",
        "recall@100",
        "recall@1000",
        "num_queries",
        "num_skipped",
        "ks_beyond_gallery",
      },
    )
    for name, value in result.items():
      self.assertIs(
        type(value), int if name.startswith("num") else list if name.startswith("ks") else float
      )
    # Any scale, any dtype.
    scaled = metrics.retrieval_metrics(embeddings.astype(np.float64) * 4, labels)
    self.assertEqual(scaled["mAUPRC"], result["mAUPRC"])
    half = metrics.retrieval_metrics(jnp.asarray(embeddings, jnp.bfloat16), labels)
    self.assertAlmostEqual(half["mAUPRC"], result["mAUPRC"], delta=0.05)

  @parameterized.named_parameters(("own", False), ("gallery", True))
  def test_agrees_with_auprc(self, separate):
    """Checks that the host evaluation and the JAX function compute the same Eq. 2."""
    embeddings, labels = geometries.data(10, 20, 4)
    options = {"gallery": embeddings, "gallery_labels": labels} if separate else {}
    result = metrics.retrieval_metrics(embeddings, labels, per_query=True, **options)
    where = np.ones((20, 20), bool) if separate else ~np.eye(20, dtype=bool)
    same = labels[:, None] == labels[None, :]
    got = metrics.auprc(reference.similarities(embeddings, embeddings), same, where=where)
    np.testing.assert_allclose(
      got, np.nan_to_num(result["ap_per_query"]), rtol=1e-5
    )  # 0 for a skipped query


class ScaleTest(chex.TestCase):
  """Tests galleries of the size of the benchmarks."""

  @parameterized.parameters(2, 15, 16, 17, 60)
  def test_few_and_many_positives(self, per_class):
    # Few are counted one by one, many in the sorted row.
    rng = np.random.default_rng(per_class)
    labels = np.repeat(np.arange(4), per_class)
    embeddings = rng.integers(-2, 3, (len(labels), 3)).astype(np.float32)  # with ties
    got = metrics.retrieval_metrics(embeddings, labels, ks=(1,), per_query=True)
    scores, others = embeddings @ embeddings.T, ~np.eye(len(labels), dtype=bool)
    want = [
      sklearn.metrics.average_precision_score(
        (labels == labels[i])[others[i]], scores[i][others[i]]
      )
      for i in range(len(labels))
    ]
    np.testing.assert_allclose(got["ap_per_query"], want, rtol=1e-6)
    above = [
      np.sum(scores[i][labels != labels[i]] >= scores[i][others[i] & (labels == labels[i])].max())
      for i in range(len(labels))
    ]
    np.testing.assert_array_equal(got["negatives_above"], above)

  def test_f08_gallery_of_inaturalist_in_bounded_memory(self):
    # 136,093 images: the number of pairs exceeds 32 bits, and all scores at once would take 70 GiB.
    size, queries = 136_093, 96
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5690, size)
    gallery = rng.normal(size=(size, 2)).astype(np.float32)
    ids = np.arange(size)
    tracemalloc.start()
    got = metrics.retrieval_metrics(
      gallery[:queries],
      labels[:queries],
      gallery=gallery,
      gallery_labels=labels,
      query_ids=ids[:queries],
      gallery_ids=ids,
      block_size=16,
      per_query=True,
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A block, the gallery in float64, and its grouping by label and by id.
    assert peak < 12 * 16 * size + 16 * size + 200 * size
    scores = (gallery[0].astype(np.float64) @ gallery.astype(np.float64).T).astype(np.float32)
    positive, negative = (labels == labels[0]) & (ids != 0), labels != labels[0]
    assert got["negatives_above"][0] == np.sum(scores[negative] >= scores[positive].max())
    assert got["num_queries"] == queries

  def test_f09_more_pairs_than_32_bits_count(self):
    # 16,384 x 136,093 pairs exceed 2^31. The positives are where a flat index would have wrapped
    # around.
    size, queries = 136_093, 16_384
    self.assertGreater(size * queries, 2**31)
    gallery = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    labels, ids = np.arange(size), np.arange(size)
    labels[[5, 7]] = labels[[-1, -2]]
    got = metrics.retrieval_metrics(
      gallery[-queries:],
      labels[-queries:],
      gallery=gallery,
      gallery_labels=labels,
      query_ids=ids[-queries:],
      gallery_ids=ids,
      block_size=256,
      per_query=True,
    )
    self.assertEqual((got["num_queries"], got["num_skipped"]), (2, queries - 2))
    for row, positive in ((-1, 5), (-2, 7)):
      scores = (gallery[row].astype(np.float64) @ gallery.astype(np.float64).T).astype(np.float32)
      above = np.sum(scores >= scores[positive]) - 1 - (scores[row] >= scores[positive])
      self.assertEqual(got["negatives_above"][row], above)
      self.assertEqual(got["ap_per_query"][row], 1 / (above + 1))

  def test_blocks_are_told(self):
    told = []
    metrics.retrieval_metrics(np.eye(7), np.arange(7) // 2, block_size=3, on_block=told.append)
    self.assertEqual(told, [3, 3, 1])

  def test_parts_of_the_queries_sum_up_to_the_whole(self):
    rng = np.random.default_rng(0)
    embeddings, labels, ids = rng.normal(size=(30, 4)), rng.integers(0, 12, 30), np.arange(30)
    want = metrics.retrieval_metrics(embeddings, labels, ks=(1, 40))
    shared = {
      "gallery": embeddings,
      "gallery_labels": labels,
      "gallery_ids": ids,
      "per_query": True,
    }
    parts = [
      metrics.retrieval_metrics(embeddings[part], labels[part], query_ids=part, **shared)
      for part in np.array_split(ids, 4)
    ]
    ap, above = (
      np.concatenate([part[key] for part in parts]) for key in ("ap_per_query", "negatives_above")
    )
    self.assertEqual(metrics.summarise_ranks(ap, above, ks=(1, 40), num_candidates=29), want)
    with self.assertRaisesRegex(ValueError, "ks must be at least one integer"):
      metrics.summarise_ranks(ap, above, ks=(0,), num_candidates=29)
