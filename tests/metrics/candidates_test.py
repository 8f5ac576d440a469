"""Tests relevance that is not one class an image, in retrieval metrics and in the mean PR curve."""

import tracemalloc
from unittest import mock

from absl.testing import parameterized
import chex
import geometries
import hypothesis
from hypothesis import strategies as st
import numpy as np
import reference
import scipy.sparse

from soprc_jax import metrics
from soprc_jax.metrics import exact_ranks

_N = 60


def _forms(mask):
  """Returns a mask in every form that is accepted."""
  return {
    "bool": mask,
    "numbers": mask.astype(np.uint8),
    "sparse array": scipy.sparse.coo_array(mask),
    "sparse matrix": scipy.sparse.csc_matrix(mask.astype(float)),
    "function": lambda rows: mask[rows],
    "function of sparse rows": lambda rows: scipy.sparse.csr_array(mask)[rows],
  }


def _brute_force(queries, gallery, relevant, usable):
  """Computes AP and negatives above the best positive of each query, pair by pair."""
  scores = reference.similarities(queries, gallery)
  ap, above = np.full(len(queries), np.nan), np.full(len(queries), -1)
  for i in range(len(queries)):
    columns = [j for j in range(len(gallery)) if usable[i, j]]
    positives = [scores[i, j] for j in columns if relevant[i, j]]
    if not positives:
      continue
    precisions = []
    for score in positives:
      hits = sum(other >= score for other in positives)
      precisions.append(hits / sum(scores[i, j] >= score for j in columns))
    ap[i] = np.mean(precisions)
    above[i] = sum(scores[i, j] >= max(positives) for j in columns if not relevant[i, j])
  return ap, above


class RelevanceTest(chex.TestCase):
  def compare(self, got, wanted):
    """Asserts that two results are equal bit for bit."""
    self.assertEqual(set(got), set(wanted))
    for key, value in wanted.items():
      np.testing.assert_array_equal(got[key], value, err_msg=key)

  @parameterized.product(
    form=tuple(_forms(np.eye(1, dtype=bool))),
    fast=(False, True),
    distinct=(None, 7),
    block_size=(1, 7, 1024),
  )
  def test_of_labels_equals_labels(self, form, fast, distinct, block_size):
    embeddings, labels = geometries.data(0, _N, 12, distinct)
    mask = _forms(labels[:, None] == labels)[form]
    options = {"ks": (1, 5), "block_size": block_size, "per_query": True}
    with mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0 if fast else 2**40):
      wanted = metrics.retrieval_metrics(embeddings, labels, **options)
      self.compare(metrics.retrieval_metrics(embeddings, relevance=mask, **options), wanted)
    self.assertGreater(wanted["num_skipped"] + wanted["num_queries"], 0)

  @parameterized.product(fast=(False, True), own=(False, True))
  def test_of_labels_equals_labels_with_gallery_and_ids(self, fast, own):
    embeddings, labels = geometries.data(1, _N, 6, 20)
    ids = np.random.default_rng(2).integers(0, 25, _N)
    part = slice(0, _N if own else 25)
    gallery = {} if own else {"gallery": embeddings[25:], "gallery_ids": ids[25:]}
    others = labels if own else labels[25:]
    options = {"ks": (1, 5), "query_ids": ids[part], "per_query": True, **gallery}
    of_labels = {} if own else {"gallery_labels": others}
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0 if fast else 2**40, _PAIR_COST=1):
      wanted = metrics.retrieval_metrics(embeddings[part], labels[part], **options, **of_labels)
      mask = labels[part, None] == others
      self.compare(metrics.retrieval_metrics(embeddings[part], relevance=mask, **options), wanted)

  @parameterized.product(fast=(False, True), block_size=(1, 9, 64), by_labels=(False, True))
  @hypothesis.given(seed=st.integers(0, 2**16), ignored=st.sampled_from([0.0, 0.1, 0.9]))
  @hypothesis.settings(max_examples=5)
  def test_any_masks_by_brute_force(self, fast, block_size, by_labels, seed, ignored):
    rng = np.random.default_rng(seed)
    embeddings, labels = geometries.data(seed, _N, 8, 25)
    relevant = labels[:, None] == labels if by_labels else rng.random((_N, _N)) < 0.07
    ignore = rng.random((_N, _N)) < ignored
    given = {"labels": labels} if by_labels else {"relevance": relevant}
    # 4: queries with more than 15 ignored candidates are ranked exactly, others in the fast way.
    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0 if fast else 2**40, _PAIR_COST=4):
      got = metrics.retrieval_metrics(
        embeddings, ignore=ignore, ks=(1, 3), block_size=block_size, per_query=True, **given
      )
    usable = ~ignore & ~np.eye(_N, dtype=bool)
    ap, above = _brute_force(embeddings, embeddings, relevant, usable)
    np.testing.assert_allclose(got["ap_per_query"], ap, rtol=1e-12)
    np.testing.assert_array_equal(got["negatives_above"], above)
    counted = above >= 0
    self.assertEqual(got["recall@3"], (above[counted] < 3).mean() if counted.any() else 0.0)

  def test_any_masks_with_a_gallery_and_ids(self):
    rng = np.random.default_rng(5)
    queries, gallery = (geometries.data(seed, size, 4, 9)[0] for seed, size in ((1, 20), (1, 45)))
    relevant, ignore = rng.random((20, 45)) < 0.1, rng.random((20, 45)) < 0.2
    ids, gallery_ids = rng.integers(0, 9, 20), rng.integers(0, 9, 45)
    for min_products in (0, 2**40):
      with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=min_products, _PAIR_COST=2):
        got = metrics.retrieval_metrics(
          queries,
          relevance=scipy.sparse.csr_array(relevant),
          ignore=ignore,
          gallery=gallery,
          query_ids=ids,
          gallery_ids=gallery_ids,
          per_query=True,
        )
      usable = ~ignore & (ids[:, None] != gallery_ids)
      ap, above = _brute_force(queries, gallery, relevant, usable)
      np.testing.assert_allclose(got["ap_per_query"], ap, rtol=1e-12)
      np.testing.assert_array_equal(got["negatives_above"], above)

  @parameterized.parameters(False, True)
  def test_a_function_is_called_once_for_each_block(self, fast):
    embeddings, labels = geometries.data(0, _N, 12)
    asked = []

    def relevance(rows):
      asked.append(rows)
      return labels[rows, None] == labels

    with mock.patch.multiple(exact_ranks, MIN_PRODUCTS=0 if fast else 2**40, _PAIR_COST=4):
      metrics.retrieval_metrics(embeddings, relevance=relevance, block_size=25)
    self.assertEqual([len(rows) for rows in asked], [25, 25, 10])
    np.testing.assert_array_equal(np.concatenate(asked), np.arange(_N))

  def test_mean_pr_curve(self):
    rng = np.random.default_rng(3)
    embeddings, labels = geometries.data(4, 30, 5, 12)
    same, ignore = labels[:, None] == labels, rng.random((30, 30)) < 0.3
    wanted = metrics.mean_pr_curve(embeddings, labels, thresholds=21)
    got = metrics.mean_pr_curve(embeddings, relevance=same, thresholds=21, block_size=7)
    np.testing.assert_array_equal(got, wanted)
    relevant = rng.random((30, 30)) < 0.2
    got = metrics.mean_pr_curve(embeddings, relevance=relevant, ignore=ignore, thresholds=21)
    scores = reference.similarities(embeddings, embeddings)
    usable, precision, recall = ~ignore & ~np.eye(30, dtype=bool), [], []
    for row, known, mask in zip(scores, usable, relevant & usable):
      if mask.any():
        retrieved = [np.sum(row[known] >= limit) for limit in got[2]]
        hits = np.array([np.sum(row[mask] >= limit) for limit in got[2]])
        precision.append([h / r if r else 1.0 for h, r in zip(hits, retrieved)])
        recall.append(hits / mask.sum())
    np.testing.assert_allclose(got[0], np.mean(precision, axis=0), rtol=1e-12)
    np.testing.assert_allclose(got[1], np.mean(recall, axis=0), rtol=1e-12)

  def test_memory_is_bounded_by_the_block(self):
    size, block = 8000, 64
    embeddings = geometries.data(0, size, 2)[0]
    labels = np.arange(size) // 4

    def relevance(rows):
      return labels[rows, None] == labels

    def peak(**given):
      tracemalloc.start()
      metrics.retrieval_metrics(embeddings, block_size=block, **given)
      found = tracemalloc.get_traced_memory()[1]
      tracemalloc.stop()
      return found

    peak(labels=labels)  # what is allocated once
    # The mask of all pairs would take 125 bytes for each pair of a block.
    self.assertLess(peak(relevance=relevance), peak(labels=labels) + 3 * block * size)

  @parameterized.named_parameters(
    ("both", {"labels": np.zeros(4, int), "relevance": np.eye(4)}, "labels or relevance.*both"),
    ("neither", {}, "labels or relevance.*neither"),
    ("shape", {"relevance": np.eye(3)}, r"relevance must be \[N, G\] = \(4, 4\).*got \(3, 3\)"),
    (
      "shape_of_ignore",
      {"labels": np.zeros(4, int), "ignore": scipy.sparse.eye_array(5)},
      r"ignore must be \[N, G\] = \(4, 4\).*got \(5, 5\)",
    ),
    ("numbers", {"relevance": 2 * np.eye(4)}, "relevance must be a mask of booleans, got 2.0.*> 0"),
    (
      "sparse_numbers",
      {"relevance": scipy.sparse.csr_array(3 * np.eye(4))},
      "relevance must be a mask of booleans, got 3.0",
    ),
    (
      "of_a_function",
      {"relevance": lambda rows: np.ones((len(rows), 3), bool)},
      r"relevance must return \[4, 4\] for 4 rows.*got \(4, 3\)",
    ),
    (
      "numbers_of_a_function",
      {"relevance": lambda rows: np.full((len(rows), 4), 7)},
      "relevance must be a mask of booleans, got 7",
    ),
    (
      "gallery_labels",
      {"relevance": np.eye(4), "gallery": np.eye(4), "gallery_labels": np.arange(4)},
      "gallery_labels needs labels",
    ),
  )
  def test_bad_masks_are_reported(self, options, message):
    for function in (metrics.retrieval_metrics, metrics.mean_pr_curve):
      with self.assertRaisesRegex(ValueError, message):
        function(np.eye(4, dtype=np.float32), **options)
