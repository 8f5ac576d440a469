"""Tests the rule by which pairs are scored, the exact comparison of ids, and rejected input."""

from unittest import mock

from absl.testing import parameterized
import chex
import geometries
import numpy as np
import reference

from soprc_jax import metrics
from soprc_jax.metrics import exact_ranks


class RetrievalMetricsTest(chex.TestCase):
  @parameterized.product(fast=(False, True), size=(1, 4, 20, 300))
  def test_f47_float64_is_ranked_in_float64(self, fast, size):
    """Checks a positive nearer than all negatives by 1e-9, which float32 cannot distinguish."""
    gallery = np.full((size + 1, 3), 0.5)
    gallery[size, 0] += 1e-9
    labels, query = np.arange(size + 1) == size, np.array([[1.0, 0.0, 0.0]])
    with mock.patch.object(exact_ranks, "MIN_PRODUCTS", 0 if fast else 2**31):
      for queries in (query, query.astype(np.float32)):
        got = metrics.retrieval_metrics(
          queries, [1], gallery=gallery, gallery_labels=labels, ks=(1,)
        )
        self.assertEqual((got["mAUPRC"], got["recall@1"]), (1.0, 1.0))
      short = metrics.retrieval_metrics(
        query.astype(np.float32),
        [1],
        gallery=gallery.astype(np.float32),
        gallery_labels=labels,
        ks=(1,),
      )
    self.assertEqual((short["mAUPRC"], short["recall@1"]), (1 / (size + 1), 0.0))

  @parameterized.product(
    geometry=("around a midpoint", "duplicates up to 1e-8", "spread"), width=(3, 16, 200, 9000)
  )
  def test_f47_one_rule_for_blocks_ways_orders_and_parts(self, geometry, width):
    """Checks that no bit depends on block size, fast path, gallery order or split of the queries.
    The rule is that of the reference.
    """
    size = 70 if width < 9000 else 20
    embeddings, labels = geometries.geometry(geometry, 1, size, width), np.arange(size) // 2 % 5
    expected = reference.by_sorting_all(
      embeddings, labels, embeddings, labels, ~np.eye(size, dtype=bool)
    )
    order, ids = np.random.default_rng(0).permutation(size), np.arange(size)

    def check(got, rows):
      np.testing.assert_array_equal(got["ap_per_query"], expected[0][rows])
      np.testing.assert_array_equal(got["negatives_above"], expected[1][rows])
      return got["mAUPRC"]

    means = set()
    for min_products in (0, 2**40):
      with mock.patch.object(exact_ranks, "MIN_PRODUCTS", min_products):
        for block_size in (1, 5, 64, 100):
          means.add(
            check(
              metrics.retrieval_metrics(embeddings, labels, per_query=True, block_size=block_size),
              ids,
            )
          )
        means.add(
          check(metrics.retrieval_metrics(embeddings[order], labels[order], per_query=True), order)
        )
        for rows in np.array_split(ids, 3):
          options = {
            "gallery": embeddings[order],
            "gallery_labels": labels[order],
            "query_ids": rows,
            "gallery_ids": order,
          }
          check(
            metrics.retrieval_metrics(embeddings[rows], labels[rows], per_query=True, **options),
            rows,
          )
    self.assertLen(means, 1)

  # At the threshold 0.5, the last bits decide sums of 0.5 with this offset. In float32 this is
  # rounding up or down.
  @parameterized.parameters((np.float32, -(2.0**-26)), (np.float64, 0.0))
  def test_f47_curve_of_duplicates_around_a_threshold(self, dtype, offset):
    """Checks that exact duplicates reach the same thresholds for any block size."""
    embeddings = geometries.around_a_midpoint(np.random.default_rng(2), 70, 16).astype(np.float64)
    embeddings[embeddings == 2.0**-24] = 2 * offset
    embeddings[1::2] *= 0.5
    embeddings, labels = embeddings.astype(dtype), np.arange(70) // 2 % 5
    curves = [
      metrics.mean_pr_curve(embeddings, labels, thresholds=5, block_size=size)
      for size in (1, 5, 64, 70)
    ]
    for curve in curves[1:]:
      np.testing.assert_array_equal(curve, curves[0])

  def test_f47_squares_below_the_normal_numbers(self):
    """Checks that norms that underflow do not make a sum look certain."""
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(40, 8)) * 10.0 ** rng.choice([-170, 140], (40, 1))
    labels = np.arange(40) % 4
    got = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    expected = reference.by_sorting_all(
      embeddings, labels, embeddings, labels, ~np.eye(40, dtype=bool)
    )
    np.testing.assert_array_equal(got["ap_per_query"], expected[0])

  @parameterized.product(
    kinds=[
      ("int64", "uint64"),
      ("uint64", "int64"),
      ("int64", "uint8"),
      ("uint64", "uint64"),
      ("uint32", "int64"),
    ],
    start=(0, 2**31, 2**61, 2**63),
  )
  def test_f42_ids_of_any_integer_types_are_compared_exactly(self, kinds, start):
    """Checks that ids that share one float64 value exclude the query only."""
    embeddings, labels = geometries.data(3, 12, 3)
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
    embeddings, labels = geometries.data(3, 12, 3)
    own = metrics.retrieval_metrics(embeddings, labels, per_query=True)
    integers = np.array([2**63 + i if i % 2 else np.int64(-i) for i in range(12)], object)
    for ids in (integers, np.array([f"photo {i}" for i in range(12)], object)):
      options = {
        "gallery": embeddings,
        "gallery_labels": labels,
        "query_ids": ids,
        "gallery_ids": ids,
      }
      got = metrics.retrieval_metrics(embeddings, labels, per_query=True, **options)
      np.testing.assert_array_equal(got["ap_per_query"], own["ap_per_query"])

  def test_f42_negative_ids_and_labels_are_none_of_uint64(self):
    embeddings, labels = geometries.data(3, 12, 3)
    options = {"gallery": embeddings, "gallery_labels": labels.astype(np.uint64)}
    everything = metrics.retrieval_metrics(embeddings, labels, **options)
    wrapped = np.arange(12) - 2  # -2 and -1 are not 2^64 - 2 and 2^64 - 1
    got = metrics.retrieval_metrics(
      embeddings,
      labels,
      query_ids=wrapped,
      gallery_ids=2**64 - 12 + np.arange(12, dtype=np.uint64),
      **options,
    )
    self.assertEqual(got, everything)

  @parameterized.parameters(
    (np.arange(6.0), np.arange(6), "query_ids must be integers or text, got float64"),
    (
      np.arange(6),
      np.arange(6, dtype=np.float32),
      "gallery_ids must be integers or text, got float32",
    ),
    (
      np.array([1.5, 2, 3, 4, 5, 6], object),
      np.arange(6),
      "query_ids must be integers or text, got object",
    ),
    (np.arange(6) > 2, np.arange(6), "query_ids must be integers or text, got bool"),
    (
      [0, 1, 2, 3, -1, 2**63],
      np.arange(6),
      "query_ids must be integers or text, got float64.*dtype=object",
    ),
    (np.arange(6), np.arange(6).astype(str), "both be integers or both text, got int64 and <U21"),
  )
  def test_f42_ids_that_are_no_integers(self, query_ids, gallery_ids, message):
    embeddings, labels = geometries.data(0, 6, 2)
    with self.assertRaisesRegex(TypeError, message):
      metrics.retrieval_metrics(
        embeddings,
        labels,
        gallery=embeddings,
        gallery_labels=labels,
        query_ids=query_ids,
        gallery_ids=gallery_ids,
      )


def _call(name, **changes):
  """Runs one evaluation with some arguments changed."""
  embeddings, labels = geometries.data(0, 6, 2)
  arguments = {"embeddings": embeddings, "labels": labels} | changes
  return getattr(metrics, name)(**arguments)


class BadInputTest(chex.TestCase):
  @parameterized.product(
    name=("retrieval_metrics", "mean_pr_curve"), value=(np.nan, np.inf, -np.inf)
  )
  def test_non_finite_values(self, name, value):
    bad, _ = geometries.data(0, 6, 2)
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
    (
      "gallery_labels_shape",
      {"gallery": np.zeros((4, 6)), "gallery_labels": np.zeros(3, int)},
      "gallery_labels",
    ),
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
      {
        "query_ids": np.zeros(6, int),
        "gallery": np.zeros((4, 6)),
        "gallery_labels": np.zeros(4, int),
      },
      "gallery_ids",
    ),
  )
  def test_retrieval_metrics(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _call("retrieval_metrics", **changes)

  def test_thresholds(self):
    with self.assertRaisesRegex(ValueError, "thresholds"):
      _call("mean_pr_curve", thresholds=1)
