"""Empirical AUPRC (Eq. 2), retrieval metrics and the mean precision-recall curve against brute force."""

import tracemalloc
from unittest import mock

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sklearn.metrics

from soprc_jax import metrics
from soprc_jax.metrics import curves, exact_ranks, similarities

L = 9
# Few distinct values: most lists have ties.
_TIED = hnp.arrays(np.float32, (2, L), elements=st.integers(-3, 3).map(lambda i: np.float32(i / 3)))
_SCORES = st.one_of(_TIED, hnp.arrays(np.float32, (2, L), elements=st.floats(-1e3, 1e3, width=32)))
_NORMAL = hnp.arrays(np.float32, (2, L), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False))
_LABELS = hnp.arrays(np.int32, (2, L), elements=st.integers(0, 1))
_MASKS = hnp.arrays(bool, (2, L))


def _at_prior(scores, labels, prior, where):
  return metrics.auprc(scores, labels, prior=prior, where=where)


class AuprcTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @hypothesis.given(scores=_SCORES, labels=_LABELS)
  def test_equals_scikit_learn(self, scores, labels):
    labels[:, 0] = 1  # scikit-learn warns without a positive
    expected = [sklearn.metrics.average_precision_score(y, s) for y, s in zip(labels, scores, strict=True)]
    np.testing.assert_allclose(self.variant(metrics.auprc)(scores, labels), expected, rtol=1e-6)

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(scores=_SCORES, labels=_LABELS, where=_MASKS, prior=st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
  def test_prior_and_mask_match_brute_force(self, scores, labels, where, prior):
    got = self.variant(_at_prior)(scores, labels, prior, where)
    rows = [(s[m], y[m]) for s, y, m in zip(scores, labels, where, strict=True)]
    np.testing.assert_allclose(got, [reference.auprc(s, y, prior) for s, y in rows], rtol=1e-5)
    own = self.variant(metrics.auprc)(scores, labels, where=where)
    np.testing.assert_allclose(own, [reference.auprc(s, y) for s, y in rows], rtol=1e-5)

  @hypothesis.given(scores=_SCORES, labels=_LABELS, where=_MASKS, seed=st.integers(0, 2**16))
  def test_order_and_padding_change_nothing(self, scores, labels, where, seed):
    order = np.random.default_rng(seed).permutation(L)
    expected = _jitted(scores, labels, where=where)
    np.testing.assert_array_equal(_jitted(scores[:, order], labels[:, order], where=where[:, order]), expected)
    for filler in (np.inf, -np.inf, 1e30):
      padded = np.concatenate([np.full((2, 3), filler, np.float32), scores], axis=1)
      more_labels, more = (
        np.pad(part, [(0, 0), (3, 0)], constant_values=fill) for part, fill in ((labels, 1), (where, False))
      )
      np.testing.assert_allclose(_jitted(padded, more_labels, where=more), expected, rtol=1e-6)

  @hypothesis.given(scores=_SCORES, labels=_LABELS)
  def test_own_prior_is_the_default(self, scores, labels):
    share = labels.mean(axis=1)
    np.testing.assert_allclose(_jitted(scores, labels, prior=share.astype(np.float32)), _jitted(scores, labels), rtol=1e-5)

  def test_ties_count_as_retrieved(self):
    # Both positives tie with one of two negatives: precision 2 / 3, whatever the order.
    for labels in ([1, 1, 0, 0], [0, 1, 1, 0]):
      scores = np.where(np.arange(4) < 3, 0.5, 0.1)
      np.testing.assert_allclose(metrics.auprc(scores, np.array(labels)), 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics.auprc(np.full(10, 0.3), np.arange(10) < 2), 0.2, rtol=1e-6)

  def test_degenerate_lists(self):
    scores = np.random.default_rng(0).normal(size=5)
    self.assertEqual(float(metrics.auprc(scores, np.zeros(5))), 0.0)
    self.assertEqual(float(metrics.auprc(scores, np.ones(5))), 1.0)
    self.assertEqual(float(metrics.auprc(scores, np.ones(5), prior=0.01)), 1.0)
    self.assertEqual(float(metrics.auprc(scores, np.ones(5), where=np.zeros(5, bool))), 0.0)
    self.assertEqual(float(metrics.auprc(scores, np.array([1, -1, 0, -1, 0]) * 0 - 1)), 0.0)
    np.testing.assert_array_equal(metrics.auprc(np.zeros((2, 0)), np.zeros((2, 0))), [0.0, 0.0])
    huge = np.float32([3.4e38, -3.4e38, 0.0, 1e38])
    np.testing.assert_allclose(metrics.auprc(huge, np.array([1, 0, 1, 0])), (1 + 2 / 3) / 2, rtol=1e-6)

  def test_leading_axes_and_prior_of_each_list(self):
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=(2, 3, L)), rng.random((2, 3, L)) < 0.4
    priors = rng.random((2, 3)).astype(np.float32)
    got = metrics.auprc(scores, labels, prior=priors)
    expected = [[reference.auprc(scores[i, j], labels[i, j], priors[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(metrics.auprc)(scores, labels), metrics.auprc(scores, labels), rtol=1e-6)

  def test_counts_beyond_float16(self):
    """A long list keeps exact counts: 1 positive under 5000 negatives."""
    scores = np.concatenate([[0.0], np.ones(5000)])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
      got = metrics.auprc(jnp.asarray(scores, dtype), np.arange(5001) == 0)
      self.assertEqual(got.dtype, jnp.float32)
      np.testing.assert_allclose(got, 1 / 5001, rtol=1e-6)

  def test_zeros_tie(self):
    for scores in (np.float32([0.0, -0.0]), np.float32([-0.0, 0.0])):
      np.testing.assert_allclose(metrics.auprc(scores, np.array([1, 0])), 0.5)

  @parameterized.product(nan=(np.nan, -np.nan), at=(0, 1, 2), dtype=("float16", "bfloat16", "float32", "float64"))
  def test_f45_scores_of_nan(self, nan, at, dtype):
    scores = np.array([3.0, 2.0, 1.0])
    scores[at] = nan
    scores, labels, where = scores.astype(jnp.dtype(dtype)), np.array([1, 0, 1]), np.arange(3) != at
    for host in (scores, scores[None]):
      with self.assertRaisesRegex(ValueError, "scores must be numbers, got nan"):
        metrics.auprc(host, labels.reshape(host.shape))
    with jax.enable_x64(True):
      device = jnp.asarray(scores)
      for function in (metrics.auprc, jax.jit(metrics.auprc)):
        self.assertTrue(np.isnan(function(device, labels)))
        both = function(jnp.stack([device, jnp.zeros_like(device)]), np.stack([labels, labels]), prior=jnp.array(0.1))
        np.testing.assert_array_equal(np.isnan(both), [True, False])
        # What is masked may hold anything.
        expected = metrics.auprc(jnp.where(where, device, 5), labels, where=where)
        np.testing.assert_array_equal(function(device, labels, where=where), expected)
    np.testing.assert_array_equal(metrics.auprc(scores, labels, where=where), expected)

  def test_f45_labels_of_nan(self):
    labels = np.float32([1, np.nan, 0])
    with self.assertRaisesRegex(ValueError, "nan"):
      metrics.auprc(np.zeros(3), labels)
    self.assertTrue(np.isnan(metrics.auprc(jnp.zeros(3), jnp.asarray(labels))))

  # Without numbers that compiled code may take for zero.
  @hypothesis.given(scores=st.one_of(_TIED, _NORMAL), labels=_LABELS, where=_MASKS)
  def test_float32_is_ranked_as_float64(self, scores, labels, where):
    """The integers that stand for the scores in the sort have their order, ties included."""
    with jax.enable_x64(True):
      wide = metrics.auprc(jnp.asarray(scores, jnp.float64), labels, where=where)
    np.testing.assert_allclose(_jitted(scores, labels, where=where), wide, rtol=1e-6)

  def test_one_array_is_sorted(self):
    """On a CPU three arrays take six times as long as one of integers."""
    text = str(jax.make_jaxpr(metrics.auprc)(jnp.zeros(8), jnp.zeros(8)))
    self.assertIn("num_keys=1", text)
    self.assertRegex(text, r"i64\[8\] = sort\[")

  def test_dtypes(self):
    with jax.enable_x64(True):
      self.assertEqual(metrics.auprc(jnp.ones(3, jnp.float64), jnp.ones(3)).dtype, jnp.float64)
      self.assertEqual(metrics.auprc(jnp.ones(3, jnp.float32), jnp.ones(3)).dtype, jnp.float32)

  def test_bad_input(self):
    with self.assertRaises(AssertionError):
      metrics.auprc(np.zeros(3), np.zeros(4))
    for prior in (1.5, -0.1, float("nan")):
      with self.assertRaisesRegex(ValueError, "prior"):
        metrics.auprc(np.zeros(3), np.ones(3), prior=prior)


_jitted = jax.jit(metrics.auprc)


def _data(seed, size, classes, distinct=None):
  """Embeddings and labels; with ``distinct``, only so many different embeddings (exact duplicates)."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(distinct or size, 6))
  rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
  return rows[rng.integers(0, len(rows), size)] if distinct else rows, rng.integers(0, classes, size)


class RetrievalMetricsTest(chex.TestCase):
  def compare(self, result, expected, ks):
    valid = expected["above"] >= 0
    np.testing.assert_allclose(result["ap_per_query"], expected["ap"], rtol=1e-12)
    np.testing.assert_array_equal(result["negatives_above"], expected["above"])
    np.testing.assert_allclose(result["mAUPRC"], expected["ap"][valid].mean() if valid.any() else 0.0, rtol=1e-12)
    self.assertEqual([result[f"recall@{k}"] for k in ks], [expected["recall"][k] for k in ks])
    self.assertEqual((result["num_queries"], result["num_skipped"]), (valid.sum(), (~valid).sum()))

  @parameterized.product(seed=(0, 1), distinct=(None, 5), block_size=(1, 7, 1024))
  def test_own_gallery_matches_brute_force(self, seed, distinct, block_size):
    embeddings, labels = _data(seed, 30, 12, distinct)  # classes of size 1 occur: skipped queries
    ks = (1, 2, 5)
    result = metrics.retrieval_metrics(embeddings, labels, ks=ks, block_size=block_size, per_query=True)
    others = ~np.eye(30, dtype=bool)
    self.compare(
      result, reference.retrieval(reference.similarities(embeddings, embeddings), labels, labels, others, ks), ks
    )
    self.assertGreater(result["num_skipped"], 0)

  @parameterized.named_parameters(("distinct", None), ("duplicates", 6))
  def test_separate_gallery_and_ids(self, distinct):
    embeddings, labels = _data(2, 40, 6, distinct)
    queries, query_labels, gallery, gallery_labels = embeddings[:15], labels[:15], embeddings[15:], labels[15:]
    ks, scores = (1, 4), reference.similarities(queries, gallery)
    options = {"ks": ks, "gallery": gallery, "gallery_labels": gallery_labels, "block_size": 4, "per_query": True}
    everything = np.ones(scores.shape, bool)
    result = metrics.retrieval_metrics(queries, query_labels, **options)
    self.compare(result, reference.retrieval(scores, query_labels, gallery_labels, everything, ks), ks)
    rng = np.random.default_rng(3)
    ids, gallery_ids = rng.integers(0, 9, 15), rng.integers(0, 12, 25)  # several candidates share an id
    result = metrics.retrieval_metrics(queries, query_labels, query_ids=ids, gallery_ids=gallery_ids, **options)
    usable = ids[:, None] != gallery_ids[None, :]
    self.compare(result, reference.retrieval(scores, query_labels, gallery_labels, usable, ks), ks)

  def test_ids_of_the_queries_exclude_all_their_views(self):
    embeddings, labels = _data(4, 24, 4, 8)
    ids = np.arange(24) // 2  # two views of each image
    result = metrics.retrieval_metrics(embeddings, labels, ks=(1,), query_ids=ids, per_query=True)
    usable = ids[:, None] != ids[None, :]
    expected = reference.retrieval(reference.similarities(embeddings, embeddings), labels, labels, usable, (1,))
    self.compare(result, expected, (1,))

  def test_excluding_the_own_id_from_a_copy_of_the_gallery(self):
    embeddings, labels = _data(5, 30, 5, 10)
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

  @parameterized.product(fast=(False, True), size=(1, 4, 20, 300))
  def test_f47_float64_is_ranked_in_float64(self, fast, size):
    """The positive is nearer than all negatives by 1e-9, which float32 cannot tell."""
    gallery = np.full((size + 1, 3), 0.5)
    gallery[size, 0] += 1e-9
    labels, query = np.arange(size + 1) == size, np.array([[1.0, 0.0, 0.0]])
    with mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0 if fast else 2**31):
      for queries in (query, query.astype(np.float32)):
        got = metrics.retrieval_metrics(queries, [1], gallery=gallery, gallery_labels=labels, ks=(1,))
        self.assertEqual((got["mAUPRC"], got["recall@1"]), (1.0, 1.0))
      short = metrics.retrieval_metrics(
        query.astype(np.float32), [1], gallery=gallery.astype(np.float32), gallery_labels=labels, ks=(1,)
      )
    self.assertEqual((short["mAUPRC"], short["recall@1"]), (1 / (size + 1), 0.0))

  @parameterized.product(geometry=("around a midpoint", "duplicates up to 1e-8", "spread"), width=(3, 16, 200, 9000))
  def test_f47_one_rule_for_blocks_ways_orders_and_parts(self, geometry, width):
    """Not a bit depends on block size, fast path, order of the gallery or how queries are shared out; the rule is that of the reference."""
    size = 70 if width < 9000 else 20
    embeddings, labels = _geometry(geometry, 1, size, width), np.arange(size) // 2 % 5
    expected = _by_sorting_all(embeddings, labels, embeddings, labels, ~np.eye(size, dtype=bool))
    order, ids = np.random.default_rng(0).permutation(size), np.arange(size)

    def check(got, rows):
      np.testing.assert_array_equal(got["ap_per_query"], expected[0][rows])
      np.testing.assert_array_equal(got["negatives_above"], expected[1][rows])
      return got["mAUPRC"]

    means = set()
    for min_products in (0, 2**40):
      with mock.patch.object(exact_ranks, "MIN_PRODUCTS", min_products):
        for block_size in (1, 5, 64, 100):
          means.add(check(metrics.retrieval_metrics(embeddings, labels, per_query=True, block_size=block_size), ids))
        means.add(check(metrics.retrieval_metrics(embeddings[order], labels[order], per_query=True), order))
        for rows in np.array_split(ids, 3):
          options = {"gallery": embeddings[order], "gallery_labels": labels[order], "query_ids": rows, "gallery_ids": order}
          check(metrics.retrieval_metrics(embeddings[rows], labels[rows], per_query=True, **options), rows)
    self.assertLen(means, 1)

  # Sums of 0.5 with this offset are decided at the threshold 0.5 by their last bits, in float32 by rounding up or down.
  @parameterized.parameters((np.float32, -(2.0**-26)), (np.float64, 0.0))
  def test_f47_curve_of_duplicates_around_a_threshold(self, dtype, offset):
    """Exact duplicates reach the same thresholds, whatever the block size."""
    embeddings = _around_a_midpoint(np.random.default_rng(2), 70, 16).astype(np.float64)
    embeddings[embeddings == 2.0**-24] = 2 * offset
    embeddings[1::2] *= 0.5
    embeddings, labels = embeddings.astype(dtype), np.arange(70) // 2 % 5
    curves = [metrics.mean_pr_curve(embeddings, labels, thresholds=5, block_size=size) for size in (1, 5, 64, 70)]
    for curve in curves[1:]:
      np.testing.assert_array_equal(curve, curves[0])

  def test_f47_squares_below_the_normal_numbers(self):
    """Norms that underflow do not make a sum look sure."""
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(40, 8)) * 10.0 ** rng.choice([-170, 140], (40, 1))
    labels = np.arange(40) % 4
    got = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    expected = _by_sorting_all(embeddings, labels, embeddings, labels, ~np.eye(40, dtype=bool))
    np.testing.assert_array_equal(got["ap_per_query"], expected[0])

  @parameterized.product(
    kinds=[("int64", "uint64"), ("uint64", "int64"), ("int64", "uint8"), ("uint64", "uint64"), ("uint32", "int64")],
    start=(0, 2**31, 2**61, 2**63),
  )
  def test_f42_ids_of_any_integer_types_are_compared_exactly(self, kinds, start):
    """Ids that one float64 cannot tell leave out the query only."""
    embeddings, labels = _data(3, 12, 3)
    ids = [start + i for i in range(12)]
    own = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    if all(start + 11 <= np.iinfo(kind).max for kind in kinds):
      query_ids, gallery_ids = (np.array(ids, kind) for kind in kinds)
      got = metrics.retrieval_metrics(
        embeddings,
        labels,
        gallery=embeddings,
        gallery_labels=labels,
        query_ids=query_ids,
        gallery_ids=gallery_ids,
        per_query=True,
      )
      np.testing.assert_array_equal(got["ap_per_query"], own["ap_per_query"])

  def test_f42_ids_of_python_objects(self):
    embeddings, labels = _data(3, 12, 3)
    own = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    integers = np.array([2**63 + i if i % 2 else np.int64(-i) for i in range(12)], object)
    for ids in (integers, np.array([f"photo {i}" for i in range(12)], object)):
      options = {"gallery": embeddings, "gallery_labels": labels, "query_ids": ids, "gallery_ids": ids}
      got = metrics.retrieval_metrics(embeddings, labels, per_query=True, **options)
      np.testing.assert_array_equal(got["ap_per_query"], own["ap_per_query"])

  def test_f42_negative_ids_and_labels_are_none_of_uint64(self):
    embeddings, labels = _data(3, 12, 3)
    options = {"gallery": embeddings, "gallery_labels": labels.astype(np.uint64)}
    everything = metrics.retrieval_metrics(embeddings, labels, **options)
    wrapped = np.arange(12) - 2  # -2 and -1 are not 2^64 - 2 and 2^64 - 1
    got = metrics.retrieval_metrics(
      embeddings, labels, query_ids=wrapped, gallery_ids=2**64 - 12 + np.arange(12, dtype=np.uint64), **options
    )
    self.assertEqual(got, everything)

  @parameterized.parameters(
    (np.arange(6.0), np.arange(6), "query_ids must be integers or text, got float64"),
    (np.arange(6), np.arange(6, dtype=np.float32), "gallery_ids must be integers or text, got float32"),
    (np.array([1.5, 2, 3, 4, 5, 6], object), np.arange(6), "query_ids must be integers or text, got object"),
    (np.arange(6) > 2, np.arange(6), "query_ids must be integers or text, got bool"),
    ([0, 1, 2, 3, -1, 2**63], np.arange(6), "query_ids must be integers or text, got float64.*dtype=object"),
    (np.arange(6), np.arange(6).astype(str), "both be integers or both text, got int64 and <U21"),
  )
  def test_f42_ids_that_are_no_integers(self, query_ids, gallery_ids, message):
    embeddings, labels = _data(0, 6, 2)
    with self.assertRaisesRegex(TypeError, message):
      metrics.retrieval_metrics(
        embeddings, labels, gallery=embeddings, gallery_labels=labels, query_ids=query_ids, gallery_ids=gallery_ids
      )

  @parameterized.named_parameters(("distinct", None), ("duplicates", 9))
  def test_f08_block_size_changes_no_bit(self, distinct):
    embeddings, labels = _data(6, 101, 12, distinct)
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
    embeddings, labels = _data(seed, 25, 5, 8)
    order = np.random.default_rng(seed).permutation(25)
    first = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    second = metrics.retrieval_metrics(embeddings[order], labels[order], per_query=True)
    np.testing.assert_array_equal(second["ap_per_query"], first["ap_per_query"][order])
    np.testing.assert_array_equal(second["negatives_above"], first["negatives_above"][order])

  @parameterized.product(scale=(1.0, 0.0), fast=(False, True))
  @hypothesis.given(labels=hnp.arrays(np.int64, 12, elements=st.integers(0, 3)), seed=st.integers(0, 2**16))
  @hypothesis.settings(max_examples=10)
  def test_f03_a_collapsed_model_gains_nothing_in_any_order(self, scale, fast, labels, seed):
    """All embeddings equal, or all zero: AP is the share of positives, and recall@k needs fewer than k negatives."""
    embeddings = scale * np.tile(np.float32([[0.36, 0.48, 0.8]]), (12, 1))
    positives = np.array([np.sum(labels == y) - 1 for y in labels])
    valid = positives > 0
    expected = np.where(valid, positives / 11, np.nan)
    for order in (np.arange(12), np.random.default_rng(seed).permutation(12)):
      with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0 if fast else 2**31, _PAIR_COST=1):
        result = metrics.retrieval_metrics(embeddings, labels[order], ks=(1, 9), per_query=True)
      np.testing.assert_allclose(result["ap_per_query"], expected[order], rtol=1e-12)
      for k in (1, 9):
        self.assertEqual(result[f"recall@{k}"], float(np.mean(11 - positives[valid] < k)) if valid.any() else 0.0)
      precision, recall, grid = metrics.mean_pr_curve(embeddings, labels[order], thresholds=5)
      if valid.any():
        np.testing.assert_allclose(precision[grid <= 0], expected[valid].mean(), rtol=1e-12)  # all are retrieved, or none
        np.testing.assert_array_equal(recall[grid <= 0], 1.0)

  def test_recall_is_pessimistic(self):
    """A negative at the score of the best positive counts as before it."""
    embeddings = np.float32([[1, 0], [0.6, 0.8], [0.6, 0.8], [0, 1]])
    result = metrics.retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1, 2, 3), per_query=True)
    np.testing.assert_array_equal(result["negatives_above"], [1, 2, 1, 1])
    self.assertEqual([result[f"recall@{k}"] for k in (1, 2, 3)], [0.0, 0.75, 1.0])

  @parameterized.named_parameters(("exact", 2**31), ("fast", 0))
  def test_f04_a_duplicate_of_the_query_stays_and_the_query_goes(self, min_products):
    embeddings = np.float32([[1, 0], [1, 0], [0, 1], [0, 1]])
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=min_products, _PAIR_COST=1):
      same = metrics.retrieval_metrics(embeddings, np.array([0, 0, 1, 1]), ks=(1,))
      crossed = metrics.retrieval_metrics(embeddings, np.array([0, 1, 0, 1]), ks=(1,), per_query=True)
      # The queries 1 and 2 in a gallery of all, in another order: by their ids.
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
    # The duplicate is a negative, one of the two at 0 is the positive: 1 / 3, ties included. With itself as a hit it would be 1 or 1 / 2.
    np.testing.assert_allclose(crossed["ap_per_query"], np.full(4, 1 / 3))
    self.assertEqual(crossed["recall@1"], 0.0)
    np.testing.assert_array_equal(separate["ap_per_query"], crossed["ap_per_query"][1:3])
    self.assertEqual(separate["recall@1"], 0.0)

  def test_f07_the_mean_is_over_the_whole_gallery_whatever_the_ks(self):
    """The positive behind 3,000 negatives: an AP of the first 1,000 would be 0."""
    angles = np.concatenate([np.linspace(0.1, 1.0, 3000), [0.0, 1.5]])
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = np.concatenate([np.arange(3000), [5000, 5000]])
    found = [
      metrics.retrieval_metrics(
        embeddings[-2:-1], labels[-2:-1], ks=ks, gallery=np.delete(embeddings, -2, 0), gallery_labels=np.delete(labels, -2)
      )
      for ks in ((1,), (1000,), (1, 10, 3001))
    ]
    for result in found:
      np.testing.assert_allclose(result["mAUPRC"], 1 / 3001, rtol=1e-9)
      # Whatever is cut off says where.
      names = set(result) - {"mAUPRC", "num_queries", "num_skipped", "ks_beyond_gallery"}
      self.assertTrue(all(name.startswith("recall@") for name in names), names)
    self.assertEqual((found[1]["recall@1000"], found[2]["recall@3001"]), (0.0, 1.0))

  def test_f28_queries_without_a_positive_are_left_out_and_counted(self):
    embeddings, _ = _data(7, 5, 1)
    result = metrics.retrieval_metrics(embeddings, np.array([0, 0, 1, 2, 3]), ks=(4,), per_query=True)
    self.assertEqual((result["num_queries"], result["num_skipped"]), (2, 3))
    np.testing.assert_array_equal(np.isnan(result["ap_per_query"]), [False, False, True, True, True])
    np.testing.assert_array_equal(result["negatives_above"][2:], [-1, -1, -1])
    self.assertEqual(result["mAUPRC"], np.mean(result["ap_per_query"][:2]))
    # The alternative of the docstring counts them as 0.
    np.testing.assert_allclose(np.nan_to_num(result["ap_per_query"]).mean(), result["mAUPRC"] * 2 / 5, rtol=1e-12)
    nothing = metrics.retrieval_metrics(embeddings, np.arange(5), ks=(1,))
    self.assertEqual((nothing["mAUPRC"], nothing["recall@1"]), (0.0, 0.0))
    self.assertEqual((nothing["num_queries"], nothing["num_skipped"]), (0, 5))
    precision, recall, _ = metrics.mean_pr_curve(embeddings, np.array([0, 0, 1, 2, 3]), thresholds=3)
    self.assertTrue(np.isfinite(precision).all())
    self.assertEqual(recall[0], 1.0)  # the mean over two queries, not over five

  def test_f06_k_beyond_the_gallery_is_one_where_a_positive_exists_and_said_so(self):
    embeddings, labels = _data(8, 10, 2)
    result = metrics.retrieval_metrics(embeddings, labels, ks=(1, 9, 10, 1000))
    self.assertEqual(result["ks_beyond_gallery"], [10, 1000])  # 9 candidates
    self.assertEqual((result["recall@10"], result["recall@1000"]), (1.0, 1.0))
    other = metrics.retrieval_metrics(embeddings, labels, ks=(10, 11), gallery=embeddings, gallery_labels=labels)
    self.assertEqual(other["ks_beyond_gallery"], [11])
    # No positive, and the last label is that of the query: nothing that fills a list up may count as a hit.
    labels = np.array([0, 0, 1, 2])
    lonely = metrics.retrieval_metrics(
      embeddings[2:4], labels[2:], ks=(1, 50), gallery=embeddings[:2], gallery_labels=labels[:2]
    )
    self.assertEqual((lonely["recall@50"], lonely["num_queries"], lonely["num_skipped"]), (0.0, 0, 2))
    mixed = metrics.retrieval_metrics(embeddings[:4], labels, ks=(50,), per_query=True)
    self.assertEqual((mixed["recall@50"], mixed["num_queries"]), (1.0, 2))

  def test_result(self):
    embeddings, labels = _data(9, 20, 4)
    result = metrics.retrieval_metrics(jnp.asarray(embeddings), jnp.asarray(labels))
    self.assertEqual(
      set(result),
      {"mAUPRC", "recall@1", "recall@10", "recall@100", "recall@1000", "num_queries", "num_skipped", "ks_beyond_gallery"},
    )
    for name, value in result.items():
      self.assertIs(type(value), int if name.startswith("num") else list if name.startswith("ks") else float)
    # Any scale, any dtype.
    scaled = metrics.retrieval_metrics(embeddings.astype(np.float64) * 4, labels)
    self.assertEqual(scaled["mAUPRC"], result["mAUPRC"])
    half = metrics.retrieval_metrics(jnp.asarray(embeddings, jnp.bfloat16), labels)
    self.assertAlmostEqual(half["mAUPRC"], result["mAUPRC"], delta=0.05)

  @parameterized.named_parameters(("own", False), ("gallery", True))
  def test_agrees_with_auprc(self, separate):
    """The host evaluation and the JAX function are the same Eq. 2."""
    embeddings, labels = _data(10, 20, 4)
    options = {"gallery": embeddings, "gallery_labels": labels} if separate else {}
    result = metrics.retrieval_metrics(embeddings, labels, per_query=True, **options)
    where = np.ones((20, 20), bool) if separate else ~np.eye(20, dtype=bool)
    same = labels[:, None] == labels[None, :]
    got = metrics.auprc(reference.similarities(embeddings, embeddings), same, where=where)
    np.testing.assert_allclose(got, np.nan_to_num(result["ap_per_query"]), rtol=1e-5)  # 0 for a skipped query


def _by_sorting_all(queries, labels, gallery, gallery_labels, usable):
  """AP and negatives above of each query from the exact scores of all candidates: what the fast counts must equal bit for bit."""
  scores = np.where(usable, reference.similarities(queries, gallery), -np.inf)
  ap, above = np.full(len(labels), np.nan), np.full(len(labels), -1)
  for i, row in enumerate(scores):
    positives = np.sort(row[(gallery_labels == labels[i]) & usable[i]])
    if len(positives):
      ordered = np.sort(row)
      retrieved = len(row) - np.searchsorted(ordered, positives, side="left")
      hits = len(positives) - np.searchsorted(positives, positives, side="left")
      ap[i], above[i] = np.mean(hits / retrieved), retrieved[-1] - hits[-1]
  return ap, above


def _around_a_midpoint(rng, size, width):
  """float32 vectors, half of them queries of ones, whose exact products are 1 + 2^-24, up to what float64 sums lose: just there
  float32 rounds up or down, by the order of the sum."""
  tiny = rng.integers(-2, 3, (1 + size // 8, width)) * 2.0**-53
  tiny[:, :2] = 1.0, 2.0**-24
  for row in tiny:
    rng.shuffle(row)
  rows = tiny[rng.integers(0, len(tiny), size)]
  rows[::2] = 1.0
  return rows.astype(np.float32)


def _geometry(name, seed, size, width):
  """Embeddings that are hard to rank in float32."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(size, width))
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  if name == "spread":
    return rows.astype(np.float32)
  if name == "collapsed":
    return np.tile(rows[:1], (size, 1))
  if name == "nearly collapsed":
    return (rows[:1] + 1e-6 * rows).astype(np.float32)
  if name == "duplicates":
    return rows[rng.integers(0, size // 8, size)].astype(np.float32)
  if name == "duplicates up to 1e-8":
    return rows[rng.integers(0, size // 4, size)] + 1e-8 * rng.normal(size=rows.shape)
  if name == "any norm":
    return rows * 10.0 ** rng.integers(-30, 4, (size, 1))
  if name == "around a midpoint":
    return _around_a_midpoint(rng, size, width)
  return np.round(rows * 4) / 4  # "grid": all products exact, many ties


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
  """Counts by float32 products are those of the exact scores, wherever these have to be made."""

  def compare(self, result, expected):
    # Not a bit may differ.
    np.testing.assert_array_equal(result["ap_per_query"], expected[0])
    np.testing.assert_array_equal(result["negatives_above"], expected[1])

  # 1: all that is in doubt is scored pair by pair; 16: a query with more than 6 candidates in doubt is ranked exactly.
  @parameterized.product(geometry=_GEOMETRIES, pair_cost=(1, 16))
  @hypothesis.given(seed=st.integers(0, 2**16), classes=st.sampled_from([3, 20, 60]), block_size=st.sampled_from([40, 96]))
  @hypothesis.settings(max_examples=8)
  def test_equal_to_exact_scores_of_all(self, geometry, pair_cost, seed, classes, block_size):
    embeddings = _geometry(geometry, seed, 96, 16)
    labels = np.random.default_rng(seed).integers(0, classes, 96)
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0, _PAIR_COST=pair_cost):
      got = metrics.retrieval_metrics(embeddings, labels, block_size=block_size, per_query=True)
    self.compare(got, _by_sorting_all(embeddings, labels, embeddings, labels, ~np.eye(96, dtype=bool)))

  @parameterized.product(geometry=("spread", "duplicates"), ids=(None, 5, 90))
  def test_gallery_and_ids(self, geometry, ids):
    embeddings, rng = _geometry(geometry, 0, 96, 16), np.random.default_rng(0)
    labels = rng.integers(0, 12, 96)
    options, usable = {}, np.ones((40, 56), bool)
    if ids:
      keys = rng.integers(0, ids, 96)
      options, usable = {"query_ids": keys[:40], "gallery_ids": keys[40:]}, keys[:40, None] != keys[40:]
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0, _PAIR_COST=4):
      got = metrics.retrieval_metrics(
        embeddings[:40], labels[:40], gallery=embeddings[40:], gallery_labels=labels[40:], per_query=True, **options
      )
    self.compare(got, _by_sorting_all(embeddings[:40], labels[:40], embeddings[40:], labels[40:], usable))

  def test_the_fast_way_is_taken(self):
    """Above a size, for spread embeddings, no query needs the exact scores of all."""
    embeddings, labels = _geometry("spread", 0, 512, 64), np.arange(512) // 4
    with (
      mock.patch.object(exact_ranks, "MIN_PRODUCTS", 512 * 512 * 64),
      mock.patch.object(exact_ranks, "exact_ranks", side_effect=AssertionError("exact scores of all")),
    ):
      metrics.retrieval_metrics(embeddings, labels)
      with self.assertRaisesRegex(AssertionError, "exact scores of all"):
        metrics.retrieval_metrics(embeddings[:-1], labels[:-1])

  def test_collapsed_embeddings_do_without_it(self):
    """After a block in which most queries were in doubt, the product in float32 is not tried again."""
    embeddings, labels = _geometry("collapsed", 0, 96, 16), np.arange(96) // 4
    with (
      mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0),
      mock.patch.object(exact_ranks, "_count_block", side_effect=exact_ranks._count_block) as count,
    ):
      metrics.retrieval_metrics(embeddings, labels, block_size=24)
    self.assertEqual(count.call_count, 1)

  @parameterized.parameters(16, 300)
  def test_bound(self, width):
    """The float32 score is within the bound of the exact one, and the bound is of the size of float32 errors."""
    vectors = _geometry("spread", 1, 400, width)
    task = similarities.make_task(vectors, np.zeros(400, int), None, None, None, None, 400)
    with mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0):
      bound = exact_ranks.Counter(task, 400)._bound[:, None]
    error = np.abs(np.float64(vectors @ vectors.T) - np.float64(vectors) @ np.float64(vectors).T)
    self.assertLess(np.max(error / bound), 1.0)
    self.assertLess(np.max(bound), 1.1 * (width + 8) * 2.0**-24)

  def test_memory_and_work(self):
    """Temporary memory is that of a tile of scores, whatever the number of positives; work grows with the gallery."""

    def measured(size, positives):
      shapes = [jax.ShapeDtypeStruct((8, 128, last), jnp.float32) for last in (32, positives, positives)]
      compiled = exact_ranks._count_block.lower(jax.ShapeDtypeStruct((size, 32), jnp.float32), shapes).compile()
      return compiled.memory_analysis().temp_size_in_bytes, compiled.memory_analysis().output_size_in_bytes

    tile = 4 * 128
    for size in (2000, 4000):
      for positives in (4, 32):
        temporary, output = measured(size, positives)
        # Scores of a tile and what is in doubt in the block, once in the loop and once as its result.
        self.assertLess(temporary, (2 * tile + 2 * 1024) * size + 4 * 10**5)
        self.assertLess(output, 1024 * (size + 4 * positives + 4) + 1000)


class ScaleTest(chex.TestCase):
  """Galleries of the size of the benchmarks."""

  @parameterized.parameters(2, 15, 16, 17, 60)
  def test_few_and_many_positives(self, per_class):
    # Few are counted one by one, many in the sorted row.
    rng = np.random.default_rng(per_class)
    labels = np.repeat(np.arange(4), per_class)
    embeddings = rng.integers(-2, 3, (len(labels), 3)).astype(np.float32)  # with ties
    got = metrics.retrieval_metrics(embeddings, labels, ks=(1,), per_query=True)
    scores, others = embeddings @ embeddings.T, ~np.eye(len(labels), dtype=bool)
    want = [
      sklearn.metrics.average_precision_score((labels == labels[i])[others[i]], scores[i][others[i]])
      for i in range(len(labels))
    ]
    np.testing.assert_allclose(got["ap_per_query"], want, rtol=1e-6)
    above = [
      np.sum(scores[i][labels != labels[i]] >= scores[i][others[i] & (labels == labels[i])].max())
      for i in range(len(labels))
    ]
    np.testing.assert_array_equal(got["negatives_above"], above)

  def test_f08_gallery_of_inaturalist_in_bounded_memory(self):
    # 136,093 images: counts of pairs leave 32 bits, and all scores at once would be 70 GiB.
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
    # 16,384 x 136,093 pairs are more than 2^31; the positives stand where a flat index would have wrapped around.
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
    shared = {"gallery": embeddings, "gallery_labels": labels, "gallery_ids": ids, "per_query": True}
    parts = [
      metrics.retrieval_metrics(embeddings[part], labels[part], query_ids=part, **shared) for part in np.array_split(ids, 4)
    ]
    ap, above = (np.concatenate([part[key] for part in parts]) for key in ("ap_per_query", "negatives_above"))
    self.assertEqual(metrics.summarise_ranks(ap, above, ks=(1, 40), num_candidates=29), want)
    with self.assertRaisesRegex(ValueError, "ks must be at least 1"):
      metrics.summarise_ranks(ap, above, ks=(0,), num_candidates=29)


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
    embeddings, labels = _data(11, 24, 8, distinct)
    embeddings = np.round(embeddings * 8) / 8  # products on thresholds
    precision, recall, grid = metrics.mean_pr_curve(embeddings, labels, thresholds=thresholds, block_size=block_size)
    np.testing.assert_allclose(grid, np.linspace(-1, 1, thresholds), atol=1e-12)
    expected = self.brute_force(
      reference.similarities(embeddings, embeddings), labels, labels, ~np.eye(24, dtype=bool), grid
    )
    np.testing.assert_allclose(precision, expected[0], rtol=1e-12)
    np.testing.assert_allclose(recall, expected[1], rtol=1e-12)

  @parameterized.product(number=(2, 3, 8, 21, 2001, 4096), sorts=(False, True))
  def test_num_reached_is_exact_at_the_thresholds(self, number, sorts):
    at = curves.grid(number).astype(np.float32)
    near = [np.nextafter(at, np.float32(to)) for to in (-np.inf, np.inf)]
    ends = np.float32([-np.inf, np.inf, -3e38, 3e38, 0.0, -0.0, 1e-45, -1e-45])
    scores = np.random.default_rng(0).permutation(np.concatenate([at, *near, ends]))[None].repeat(70, axis=0)
    scores[1] = 1.0
    want = [len(row) - np.searchsorted(np.sort(row), curves.grid(number), side="left") for row in scores[:2]]
    with mock.patch.object(curves, "_MAX_THRESHOLDS", 1 if sorts else 2**20):
      got = curves.num_reached(scores, number)
    np.testing.assert_array_equal(got[:2], want)
    np.testing.assert_array_equal(got[2:], np.tile(want[0], (68, 1)))

  @parameterized.parameters("spread", "duplicates up to 1e-8", "collapsed")
  def test_sums_in_the_order_of_the_queries(self, geometry):
    """Bit for bit the curve that sorting the scores of each query gives."""
    embeddings, labels = _geometry(geometry, 0, 90, 16), np.arange(90) // 3
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
    embeddings, labels = _data(12, 30, 5)
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
    expected = self.brute_force(scores, labels[queries], labels[gallery], np.ones(scores.shape, bool), grid)
    np.testing.assert_allclose(precision, expected[0], rtol=1e-12)
    np.testing.assert_allclose(recall, expected[1], rtol=1e-12)

  def test_ends_and_default_grid(self):
    embeddings, labels = _data(13, 20, 3)
    precision, recall, grid = metrics.mean_pr_curve(embeddings * 0.999, labels)
    self.assertEqual((precision.shape, recall.shape, grid.shape), ((2001,), (2001,), (2001,)))
    self.assertEqual((recall[0], recall[-1], precision[-1]), (1.0, 0.0, 1.0))
    self.assertTrue(np.all(np.diff(recall) <= 0))

  def test_scores_outside_the_thresholds(self):
    """Not normalised: everything above 1 is retrieved at every threshold."""
    embeddings, labels = np.full((4, 2), 3.0), np.array([0, 0, 1, 1])
    precision, recall, _ = metrics.mean_pr_curve(embeddings, labels, thresholds=5)
    np.testing.assert_allclose(precision, np.full(5, 1 / 3))
    np.testing.assert_array_equal(recall, np.ones(5))
    precision, recall, _ = metrics.mean_pr_curve(np.array([[3.0], [-3.0]]), np.array([0, 0]), thresholds=5)
    np.testing.assert_array_equal(precision, np.ones(5))
    np.testing.assert_array_equal(recall, np.zeros(5))


def _call(name, **changes):
  """One evaluation with some arguments changed."""
  embeddings, labels = _data(0, 6, 2)
  arguments = {"embeddings": embeddings, "labels": labels} | changes
  return getattr(metrics, name)(**arguments)


class BadInputTest(chex.TestCase):
  @parameterized.product(name=("retrieval_metrics", "mean_pr_curve"), value=(np.nan, np.inf, -np.inf))
  def test_non_finite_values(self, name, value):
    bad, _ = _data(0, 6, 2)
    bad[3, 1] = value
    with self.assertRaisesRegex(ValueError, "embeddings.*row 3"):
      _call(name, embeddings=bad)
    with self.assertRaisesRegex(ValueError, "gallery.*row 3"):
      _call(name, gallery=bad, gallery_labels=np.zeros(6, int))

  @parameterized.named_parameters(
    ("labels", {"labels": np.zeros(5, int)}, "labels"),
    ("rank", {"embeddings": np.zeros(6)}, "embeddings"),
    ("gallery_alone", {"gallery": np.zeros((4, 6))}, "gallery_labels"),
    ("gallery_labels_alone", {"gallery_labels": np.zeros(4, int)}, "gallery"),
    ("gallery_labels_shape", {"gallery": np.zeros((4, 6)), "gallery_labels": np.zeros(3, int)}, "gallery_labels"),
    ("width", {"gallery": np.zeros((4, 5)), "gallery_labels": np.zeros(4, int)}, "width"),
    ("block_size", {"block_size": 0}, "block_size"),
  )
  def test_both_functions(self, changes, message):
    for name in ("retrieval_metrics", "mean_pr_curve"):
      with self.assertRaisesRegex(ValueError, message):
        _call(name, **changes)

  @parameterized.named_parameters(
    ("ks", {"ks": (1, 0)}, "ks"),
    ("ids_shape", {"query_ids": np.zeros(5, int)}, "ids"),
    ("gallery_ids_alone", {"gallery_ids": np.zeros(6, int)}, "query_ids"),
    (
      "query_ids_alone",
      {"query_ids": np.zeros(6, int), "gallery": np.zeros((4, 6)), "gallery_labels": np.zeros(4, int)},
      "gallery_ids",
    ),
  )
  def test_retrieval_metrics(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _call("retrieval_metrics", **changes)

  def test_thresholds(self):
    with self.assertRaisesRegex(ValueError, "thresholds"):
      _call("mean_pr_curve", thresholds=1)


@pytest.mark.parametrize(
  ("dtype", "kind"),
  [("bfloat16", "bool"), ("float16", "uint8"), ("float32", "int32"), ("float64", "float32")],
)
@pytest.mark.parametrize("prior", [None, np.array([0.3, 0.6])], ids=["own", "given"])
def test_f58_auprc_without_dtype_promotion(dtype, kind, prior):
  scores, labels = [[3, 1, 2, 2], [1, 4, 2, 3]], np.array([[1, 0, 1, 0], [0, 0, 1, 1]])
  with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
    arrays = jnp.asarray(scores, dtype), jnp.asarray(labels, kind)
    got = jax.jit(lambda scores, labels: metrics.auprc(scores, labels, prior=prior))(*arrays)
  for i in range(2):
    share = labels[i].mean() if prior is None else prior[i]
    assert got[i] == pytest.approx(_by_rates(scores[i], labels[i], share), rel=1e-6)


def _by_rates(scores, labels, prior):
  """Eq. 2 by rates, one positive after the other."""
  scores, positive = np.array(scores), labels > 0
  precisions = []
  for score in scores[positive]:
    true_rate, false_rate = (np.mean(scores[kind] >= score) for kind in (positive, ~positive))
    precisions.append(prior * true_rate / (prior * true_rate + (1 - prior) * false_rate))
  return np.mean(precisions)
