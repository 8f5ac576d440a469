"""Tests lists from embeddings and from scores: positives, negatives and excluded candidates.

Covers _internal/class_labels.py and _internal/masks.py.
"""

import functools

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import pytest

from soprc_jax import (
  ap_loss,
  binary_lists,
  interpolate_scores,
  lists,
  retrieval_lists,
  score_ema,
  semi_variance,
  soprc_loss,
)
from soprc_jax._internal import masks

B, D, G = 7, 4, 5
_LABELS = np.array([9, 2, 9, 5, 2, 9, 9])  # unsorted; classes of 4, 2 and 1
_EMBEDDINGS = hnp.arrays(
  np.float32, (B, D), elements=st.integers(-8, 8).map(lambda i: np.float32(i / 8))
)


def _embeddings(seed, size=B):
  rows = np.random.default_rng(seed).normal(size=(size, D))
  return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _kept(scores, mask):
  """Returns the valid scores of each row, descending, since the order inside a list is free."""
  return [
    np.sort(row[valid])[::-1]
    for row, valid in zip(np.asarray(scores), np.asarray(mask), strict=True)
  ]


def _expected(embeddings, labels, where=None, gallery=None, gallery_labels=None):
  """Returns positives and negatives of each query by two loops."""
  own = gallery is None
  where = np.ones(len(labels), bool) if where is None else where
  gallery, gallery_labels = (embeddings, labels) if own else (gallery, gallery_labels)
  positives, negatives = [], []
  for i in range(len(labels)):
    sides = [], []
    for j in range(len(gallery_labels)):
      if where[i] and (not own or (where[j] and i != j)):
        sides[0 if labels[i] == gallery_labels[j] else 1].append(
          np.float64(embeddings[i]) @ np.float64(gallery[j])
        )
    positives.append(np.sort(sides[0])[::-1])
    negatives.append(np.sort(sides[1])[::-1])
  return positives, negatives


def _assert_lists(got, expected):
  for side, rows in zip(
    ((got.positive_scores, got.positive_where), (got.negative_scores, got.negative_where)), expected
  ):
    for ours, row in zip(_kept(*side), rows, strict=True):
      np.testing.assert_allclose(ours, row, rtol=0, atol=1e-6)


_ALL = functools.partial(retrieval_lists)
_SOME = functools.partial(retrieval_lists, max_positives=2)


def _loss(embeddings, labels, where=None, max_positives=None):
  """Returns one scalar that depends on every output of a list."""
  lists = retrieval_lists(embeddings, labels, where=where, max_positives=max_positives)
  v = jnp.broadcast_to(jnp.array([-0.5, 0.0, 0.5]), (embeddings.shape[0], 3))
  masks = {"positive_where": lists.positive_where, "negative_where": lists.negative_where}
  scores = lists.positive_scores, lists.negative_scores
  total = soprc_loss(*scores, v, prior=0.1, **masks) + 0.3 * ap_loss(*scores, **masks)
  return total + 0.1 * semi_variance(*scores, **masks)


_loss_and_grad = jax.jit(jax.value_and_grad(_loss), static_argnames="max_positives")


class RetrievalListsTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @hypothesis.given(embeddings=_EMBEDDINGS, where=hnp.arrays(bool, B))
  @hypothesis.settings(max_examples=15)
  def test_match_the_loops(self, embeddings, where):
    got = self.variant(_ALL)(embeddings, _LABELS, where=where)
    self.assertEqual(got.positive_scores.shape, (B, B))
    self.assertEqual(int(got.num_dropped), 0)
    _assert_lists(got, _expected(embeddings, _LABELS, where))

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(seed=st.integers(0, 2**16))
  @hypothesis.settings(max_examples=3)  # without jit every call compiles its lax.cond
  def test_order_of_the_batch_changes_nothing(self, seed):
    rng = np.random.default_rng(seed)
    embeddings, labels, order = _embeddings(seed), rng.permutation(_LABELS), rng.permutation(B)
    lists = self.variant(_SOME)
    expected, got = lists(embeddings, labels), lists(embeddings[order], labels[order])
    self.assertEqual(int(got.num_dropped), int(expected.num_dropped))
    for side in ("positive", "negative"):
      rows = _kept(getattr(expected, f"{side}_scores"), getattr(expected, f"{side}_where"))
      shuffled = _kept(getattr(got, f"{side}_scores"), getattr(got, f"{side}_where"))
      for i, row in zip(order, shuffled, strict=True):
        np.testing.assert_allclose(row, rows[i], rtol=0, atol=1e-6)

  def test_the_query_is_excluded_by_index(self):
    """Checks that exact duplicates of the query stay candidates, as positives and as negatives."""
    embeddings = np.tile(np.float32([[0.6, 0.8]]), (4, 1))
    got = retrieval_lists(embeddings, np.array([1, 1, 2, 1]))
    np.testing.assert_array_equal(np.sum(got.positive_where, axis=1), [2, 2, 0, 2])
    np.testing.assert_array_equal(np.sum(got.negative_where, axis=1), [1, 1, 3, 1])
    self.assertFalse(np.any(np.diag(got.positive_where) | np.diag(got.negative_where)))

  @parameterized.named_parameters(("exact", 3), ("more", 5), ("more_than_the_batch", 50))
  def test_enough_room_keeps_all_positives(self, max_positives):
    embeddings = _embeddings(0)
    got = retrieval_lists(embeddings, _LABELS, max_positives=max_positives)
    self.assertEqual(got.positive_scores.shape, (B, min(max_positives, B)))
    self.assertEqual(int(got.num_dropped), 0)
    _assert_lists(got, _expected(embeddings, _LABELS))
    value, gradient = _loss_and_grad(embeddings, _LABELS, max_positives=max_positives)
    expected, expected_gradient = _loss_and_grad(embeddings, _LABELS)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-5)

  @parameterized.named_parameters(
    ("one", 1, [3]), ("two", 2, [1, 5]), ("three", 3, [1, 3, 5]), ("six", 6, [0, 1, 2, 4, 5, 6])
  )
  def test_too_many_positives_keep_evenly_spaced_ranks(self, max_positives, ranks):
    """Checks 7 positives at known scores with 2 negatives. The second class has 1 positive and
    loses none.
    """
    cosines = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    embeddings = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)
    embeddings = np.concatenate([embeddings, [[0.0, 1.0], [0.0, -1.0]]]).astype(np.float32)
    labels = np.array([4] * 8 + [7] * 2)
    got = retrieval_lists(embeddings, labels, max_positives=max_positives)
    np.testing.assert_allclose(
      _kept(got.positive_scores, got.positive_where)[0], cosines[1:][ranks], atol=1e-6
    )
    self.assertEqual(int(got.num_dropped), 8 * (7 - max_positives))
    np.testing.assert_array_equal(np.sum(got.positive_where, axis=1), [max_positives] * 8 + [1] * 2)
    # The dropped positives do not become negatives.
    _assert_lists(
      got._replace(positive_where=got.positive_where & False),
      ([[]] * 10, _expected(embeddings, labels)[1]),
    )

  def test_kept_ranks_hold_in_every_row(self):
    """Checks the ranks of the design for every query. Of c positives, the kept ranks are (2 s + 1)
    c // (2 P) for s = 0 .. P - 1.
    """
    embeddings, labels = _embeddings(1, 11), np.array([0] * 9 + [1] * 2)
    got = retrieval_lists(embeddings, labels, max_positives=3)
    positives, _ = _expected(embeddings, labels)
    for i, row in enumerate(_kept(got.positive_scores, got.positive_where)):
      count = len(positives[i])
      ranks = [(2 * s + 1) * count // 6 for s in range(3)] if count > 3 else range(count)
      np.testing.assert_allclose(row, positives[i][list(ranks)], rtol=0, atol=1e-6)

  def test_masked_images_are_in_no_list(self):
    embeddings = _embeddings(2)
    where = np.array([True, True, True, False, True, False, True])
    got = retrieval_lists(embeddings, _LABELS, where=where, max_positives=3)
    _assert_lists(got, _expected(embeddings, _LABELS, where))
    np.testing.assert_array_equal(
      np.any(got.positive_where | got.negative_where[:, :3], axis=1)[~where], False
    )

  @parameterized.named_parameters(("all", None), ("some", 2))
  @hypothesis.given(seed=st.integers(0, 2**16), filler=st.sampled_from([0.0, 1.0, -7.0]))
  @hypothesis.settings(max_examples=15)
  def test_padding_changes_no_value_and_no_gradient(self, max_positives, seed, filler):
    embeddings = _embeddings(seed)
    expected, gradient = _loss_and_grad(embeddings, _LABELS, np.ones(B, bool), max_positives)
    padded = np.concatenate([embeddings[:3], np.full((3, D), filler, np.float32), embeddings[3:]])
    labels, where = np.insert(_LABELS, [3] * 3, 9), np.insert(np.ones(B, bool), [3] * 3, False)
    got, padded_gradient = _loss_and_grad(padded, labels, where, max_positives)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(
      padded_gradient[where], gradient, rtol=0, atol=2e-5 * np.abs(gradient).max()
    )
    np.testing.assert_array_equal(padded_gradient[~where], 0)

  @parameterized.named_parameters(
    ("zero_embeddings", np.zeros((B, D)), _LABELS),
    ("one_zero_embedding", np.eye(B, D, k=-3), _LABELS),
    ("collapsed", np.full((B, D), 0.5), _LABELS),
    ("one_class", _embeddings(3), np.zeros(B, int)),
    ("no_positives", _embeddings(3), np.arange(B)),
    ("opposite", np.concatenate([np.eye(1, D)] * 3 + [-np.eye(1, D)] * 4), _LABELS),
    ("large", _embeddings(3) * 1e7, _LABELS),
  )
  def test_value_and_gradient_are_finite(self, embeddings, labels):
    for dtype in (jnp.float32, jnp.bfloat16):
      for max_positives in (None, 2):
        value, gradient = _loss_and_grad(
          jnp.asarray(embeddings, dtype), labels, max_positives=max_positives
        )
        self.assertTrue(np.isfinite(value), value)
        self.assertTrue(np.isfinite(np.asarray(gradient, np.float32)).all(), gradient)
        if len(set(labels.tolist())) in (1, B):  # no list has both a positive and a negative
          self.assertEqual(float(value), 0.0)

  def test_gallery(self):
    queries, gallery = _embeddings(4), _embeddings(5, G)
    gallery_labels = np.array([2, 9, 2, 3, 2])
    where, gallery_where = np.arange(B) != 4, np.arange(G) != 0
    got = retrieval_lists(
      queries, _LABELS, gallery=gallery, gallery_labels=gallery_labels, where=where
    )
    self.assertEqual(got.negative_scores.shape, (B, G))
    _assert_lists(got, _expected(queries, _LABELS, where, gallery, gallery_labels))
    fewer = retrieval_lists(
      queries,
      _LABELS,
      gallery=gallery,
      gallery_labels=gallery_labels,
      gallery_where=gallery_where,
      max_positives=1,
    )
    positives, negatives = _expected(queries, _LABELS, None, gallery[1:], gallery_labels[1:])
    middle = [row[[len(row) // 2]] if len(row) > 1 else row for row in positives]
    _assert_lists(fewer, (middle, negatives))
    self.assertEqual(int(fewer.num_dropped), 2)  # two queries of class 2 with two positives each

  def test_a_gallery_does_not_exclude_the_index(self):
    embeddings = _embeddings(6)
    got = retrieval_lists(embeddings, _LABELS, gallery=embeddings, gallery_labels=_LABELS)
    np.testing.assert_array_equal(np.sum(got.positive_where, axis=1), [4, 2, 4, 1, 2, 4, 4])

  def test_dtypes_and_precision(self):
    embeddings = _embeddings(7)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
      rounded = jnp.asarray(embeddings, dtype)
      got = retrieval_lists(rounded, _LABELS)
      self.assertEqual(got.negative_scores.dtype, jnp.float32)
      exact = np.asarray(rounded, np.float64) @ np.asarray(rounded, np.float64).T
      where = np.asarray(got.negative_where)
      np.testing.assert_allclose(
        np.asarray(got.negative_scores)[where], exact[where], rtol=0, atol=1e-6
      )
    with jax.enable_x64(True):
      got = retrieval_lists(jnp.asarray(embeddings, jnp.float64), _LABELS)
      self.assertEqual(got.positive_scores.dtype, jnp.float64)
    for options in ({}, {"gallery": embeddings, "gallery_labels": _LABELS}):
      text = str(jax.make_jaxpr(functools.partial(retrieval_lists, **options))(embeddings, _LABELS))
      self.assertIn("precision=(Precision.HIGHEST, Precision.HIGHEST)", text)

  @parameterized.named_parameters(
    ("max_positives", {"max_positives": 0}, "max_positives"),
    ("gallery_alone", {"gallery": np.zeros((G, D))}, "gallery_labels"),
    ("gallery_labels_alone", {"gallery_labels": np.zeros(G, int)}, "gallery"),
    ("gallery_where_alone", {"gallery_where": np.ones(G, bool)}, "gallery_where"),
  )
  def test_bad_settings(self, options, name):
    with self.assertRaisesRegex(ValueError, name):
      retrieval_lists(_embeddings(0), _LABELS, **options)

  def test_bad_shapes(self):
    gallery = {"gallery": np.zeros((G, D)), "gallery_labels": np.zeros(G + 1, int)}
    for arguments, options in (
      ((_embeddings(0)[0], _LABELS), {}),
      ((_embeddings(0), _LABELS[:-1]), {}),
      ((_embeddings(0), _LABELS), gallery),
    ):
      with self.assertRaises(AssertionError):
        retrieval_lists(*arguments, **options)


class DevicesTest(chex.TestCase):
  @parameterized.product(kind=("pmap", "shard_map"), max_positives=(None, 1))
  def test_the_gallery_is_the_batch_of_all_devices(self, kind, max_positives):
    embeddings, labels = _embeddings(8, 8), np.array([9, 2, 9, 5, 2, 9, 9, 2])
    where = np.array([True, True, True, True, True, False, True, True])
    lists = functools.partial(retrieval_lists, max_positives=max_positives)

    def local(embeddings, labels, where):
      return lists(embeddings, labels, where=where, axis_name=mapping.AXIS)

    expected = lists(embeddings, labels, where=where)
    got = mapping.on_devices(local, kind)(*map(mapping.split, (embeddings, labels, where)))
    self.assertEqual(
      int(expected.num_dropped), 6 if max_positives else 0
    )  # summed over both devices
    np.testing.assert_array_equal(got.num_dropped, [int(expected.num_dropped)] * 2)
    for name in ("positive_scores", "positive_where", "negative_scores", "negative_where"):
      joined = np.concatenate(list(np.asarray(getattr(got, name))))
      self.assertEqual(joined.shape, getattr(expected, name).shape)
      if name.endswith("where"):
        np.testing.assert_array_equal(joined, getattr(expected, name))
      else:
        mask = np.asarray(getattr(expected, name.replace("scores", "where")))
        np.testing.assert_allclose(
          joined[mask], np.asarray(getattr(expected, name))[mask], rtol=0, atol=1e-6
        )


class BinaryListsTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @hypothesis.given(
    scores=hnp.arrays(np.float32, (2, 6), elements=st.floats(-1, 1, width=32)),
    labels=hnp.arrays(bool, (2, 6)),
    where=hnp.arrays(bool, (2, 6)),
  )
  @hypothesis.settings(max_examples=15)
  def test_splits_by_label(self, scores, labels, where):
    got = self.variant(binary_lists)(scores, labels, where=where)
    np.testing.assert_array_equal(got.positive_where, labels & where)
    np.testing.assert_array_equal(got.negative_where, ~labels & where)
    np.testing.assert_array_equal(got.positive_scores, np.where(labels & where, scores, -np.inf))
    np.testing.assert_array_equal(got.negative_scores, np.where(~labels & where, scores, np.inf))

  def test_one_list(self):
    got = binary_lists(np.float32([0.9, 0.1, 0.4]), np.array([1, 0, -1]))
    np.testing.assert_array_equal(got.positive_where, [[True, False, False]])
    np.testing.assert_array_equal(got.negative_where, [[False, True, True]])
    self.assertEqual(got.positive_scores.shape, (1, 3))
    self.assertEqual(int(got.num_dropped), 0)

  @parameterized.named_parameters(("all_positive", [1, 1, 1]), ("all_negative", [0, 0, 0]))
  def test_one_class(self, labels):
    def loss(scores):
      lists = binary_lists(scores, jnp.array(labels))
      return soprc_loss(
        lists.positive_scores,
        lists.negative_scores,
        jnp.zeros((1, 2)),
        prior=0.1,
        positive_where=lists.positive_where,
        negative_where=lists.negative_where,
      )

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array([0.9, 0.1, 0.4]))
    self.assertEqual(float(value), 0.0)
    np.testing.assert_array_equal(gradient, np.zeros(3))

  def test_losses_equal_those_of_separate_lists(self):
    scores, labels = (
      np.random.default_rng(0).normal(size=8).astype(np.float32),
      np.arange(8) % 3 == 0,
    )
    lists = binary_lists(scores, labels)
    masks = {"positive_where": lists.positive_where, "negative_where": lists.negative_where}
    np.testing.assert_allclose(
      ap_loss(lists.positive_scores, lists.negative_scores, **masks),
      ap_loss(scores[None, labels], scores[None, ~labels]),
      rtol=1e-6,
    )

  def test_dtypes_and_shapes(self):
    self.assertEqual(
      binary_lists(jnp.ones(3, jnp.bfloat16), jnp.ones(3)).positive_scores.dtype, jnp.float32
    )
    with jax.enable_x64(True):
      self.assertEqual(
        binary_lists(jnp.ones(3, jnp.float64), jnp.ones(3)).positive_scores.dtype, jnp.float64
      )
    with self.assertRaises(AssertionError):
      binary_lists(jnp.ones(3), jnp.ones(4))


def _ranks(slots, count, width):
  got = lists._evenly_spaced_ranks(jnp.asarray(slots)[None, :], jnp.full([1, 1], count), width)
  return np.asarray(got)[0].tolist()


@pytest.mark.parametrize(
  ("count", "width"),
  [
    (7, 3),
    (3, 7),
    (99_999, 50_000),
    (2**20, 2**11 + 1),
    (2**31 - 1, 2**30),
    (2**31 - 1, 2**31 - 1),
  ],
)
def test_f46_ranks_are_exact_beyond_a_product_of_31_bits(count, width):
  slots = sorted({0, 1, width // 3, width // 2, width - 2, width - 1})
  want = [(2 * slot + 1) * count // (2 * width) if count > width else slot for slot in slots]
  assert _ranks(slots, count, width) == want
  assert jax.jit(_ranks_of, static_argnums=2)(jnp.asarray(slots), count, width).tolist() == want


def _ranks_of(slots, count, width):
  return lists._evenly_spaced_ranks(slots[None, :], jnp.full([1, 1], count), width)[0]


def test_f46_half_of_a_large_gallery_is_kept_without_a_repeat():
  size, kept = 100_000, 50_000
  gallery = np.linspace(-1, 1, size, dtype=np.float32)[:, None]
  options = {"gallery": gallery, "gallery_labels": np.zeros(size, int), "max_positives": kept}
  found = retrieval_lists(np.ones((1, 1), np.float32), np.zeros(1, int), **options)
  # Every other positive, from the second highest on.
  np.testing.assert_array_equal(found.positive_scores[0], gallery[::-1, 0][1::2])
  assert found.num_dropped == size - kept


def test_f46_counts_beyond_31_bits():
  """Counts the entries of a broadcast array that is never allocated."""
  side = 2**16
  every = jax.jit(
    lambda one: masks.count_true(jnp.broadcast_to(one, (side, side))).astype(jnp.float32)
  )
  assert float(every(jnp.array(True))) == 2**32
  large = [jax.ShapeDtypeStruct((side, side), dtype) for dtype in (jnp.float32, bool)]
  assert jax.eval_shape(masks.masked_mean, *large).dtype == jnp.float32
  assert lists._num_dropped(jnp.full(3, 2**31 - 1, jnp.int32), 1, None) == 2**31 - 1
  assert lists._num_dropped(jnp.array([5, 1, 2]), 2, None) == 3


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_f41_labels_of_64_bits_and_two_types_are_compared_exactly(dtype):
  """Checks int64 next to uint64. A comparison in float64 would take 2^62 and 2^62 + 1 as equal."""
  with jax.enable_x64(True):
    labels = np.array([2**62, 7], dtype)
    gallery = np.array([2**62 + 1, 2**62, 7], np.int64)
    found = retrieval_lists(np.eye(2, D), labels, gallery=np.eye(3, D), gallery_labels=gallery)
    np.testing.assert_array_equal(
      found.positive_where, [[False, True, False], [False, False, True]]
    )
    large = retrieval_lists(
      np.eye(1, D),
      np.array([2**63], np.uint64),
      gallery=np.eye(1, D),
      gallery_labels=np.array([-(2**63)]),
    )
    assert large.negative_where.all()


def test_f41_arrays_of_64_bits_are_checked_where_jax_computes_in_32():
  with jax.enable_x64(True):
    labels = jnp.array([0, 2**32, 0])
  with pytest.raises(ValueError, match="labels must fit into 32 bits"):
    retrieval_lists(np.eye(3, D), labels)
  np.testing.assert_array_equal(
    binary_lists(np.zeros(3), labels).positive_where, [[False, True, False]]
  )


def _both_kinds():
  embeddings = _embeddings(3)
  return {
    "retrieval": retrieval_lists(embeddings, _LABELS, max_positives=3),
    "retrieval_all": retrieval_lists(embeddings, _LABELS),
    "gallery": retrieval_lists(
      embeddings, _LABELS, gallery=_embeddings(4, G), gallery_labels=_LABELS[:G]
    ),
    "binary": binary_lists(embeddings[:, :2].T, np.stack([_LABELS > 5, _LABELS < 0])),
  }


@pytest.mark.parametrize("name", _both_kinds())
def test_f50_valid_masks_and_update_args(name):
  found = _both_kinds()[name]
  np.testing.assert_array_equal(
    found.valid,
    np.asarray(found.positive_where).any(axis=1) & np.asarray(found.negative_where).any(axis=1),
  )
  assert found.masks == {
    "positive_where": found.positive_where,
    "negative_where": found.negative_where,
  }
  ids = np.arange(len(found.valid))
  tracker = score_ema(len(ids), 4, 0.5)
  state = jax.jit(
    lambda found: tracker.update(None, tracker.init(None), **found.update_args(ids))[1]
  )(found)
  want = interpolate_scores(found.positive_scores, num_points=4, where=found.positive_where)
  np.testing.assert_allclose(state.v, want, rtol=1e-6)
  assert found.update_args(ids)["list_ids"] is ids


def _losses_of(found, v, **masks):
  pair = found.positive_scores, found.negative_scores
  return {
    "soprc": lambda: soprc_loss(*pair, v, prior=0.1, **masks),
    "soprc_max": lambda: soprc_loss(
      *pair, v, prior=0.1, reduce_fn=functools.partial(jnp.max, initial=-jnp.inf), **masks
    ),
    "ap": lambda: ap_loss(*pair, **masks),
    "variance": lambda: semi_variance(*pair, **masks),
    "variance_of_all": lambda: semi_variance(
      *pair, average_over="all", mean_gradient=False, **masks
    ),
    "variance_of_lists": lambda: semi_variance(*pair, pool="list", **masks),
  }


def _v(found):
  return interpolate_scores(found.positive_scores, num_points=4, where=found.positive_where)


@pytest.mark.parametrize("name", ["retrieval", "binary"])
@pytest.mark.parametrize("left_out", ["positive_where", "negative_where", "both", "none"])
def test_f50_a_loss_without_the_masks_is_nan(name, left_out):
  found = _both_kinds()[name]
  masks = {name: mask for name, mask in found.masks.items() if left_out not in (name, "both")}
  values = jax.jit(
    lambda found, v: {name: loss() for name, loss in _losses_of(found, v, **masks).items()}
  )(found, _v(found))
  assert {name for name, value in values.items() if np.isnan(value)} == (
    set() if left_out == "none" else set(values)
  )


def test_f50_sorted_sums_without_the_masks_are_nan():
  found = _both_kinds()["retrieval"]
  loss = jax.jit(functools.partial(soprc_loss, prior=0.1, algorithm="sorted"))
  assert np.isnan(loss(found.positive_scores, found.negative_scores, _v(found)))


@pytest.mark.parametrize("loss", ["soprc", "ap", "variance"])
def test_f50_scores_on_the_host_without_masks_are_an_error(loss):
  found = jax.tree.map(np.asarray, _both_kinds()["retrieval"])
  with pytest.raises(
    ValueError, match=r"positive_scores contain -inf and come without a mask.*pass \*\*lists.masks"
  ):
    _losses_of(found, _v(found))[loss]()


@pytest.mark.parametrize("name", _both_kinds())
def test_f50_v_without_the_mask_is_nan_or_an_error(name):
  found = _both_kinds()[name]
  ids, tracker = np.arange(len(found.valid)), score_ema(len(found.valid), 4, 0.5)
  rows = tracker.lookahead(tracker.init(None), found.positive_scores, ids)
  incomplete = ~np.asarray(found.positive_where).all(axis=1)
  assert incomplete.any()
  np.testing.assert_array_equal(np.isnan(rows).all(axis=1), incomplete)
  with pytest.raises(ValueError, match=r"pass \*\*lists.masks"):
    tracker.lookahead(tracker.init(None), np.asarray(found.positive_scores), ids)


def _total(embeddings, jitted_lists=retrieval_lists):
  found = jitted_lists(embeddings, _LABELS, max_positives=2)
  return sum(loss() for loss in _losses_of(found, _v(found), **found.masks).values())


def test_f50_no_nan_is_computed_with_the_masks():
  """Runs step by step, since only the results of a jitted function are checked."""

  def total(embeddings):
    found = retrieval_lists(embeddings, _LABELS, max_positives=2)
    made = _losses_of(found, _v(found), **found.masks)
    return made["soprc"]() + made["variance"]()

  with jax.debug_nans(True):
    assert np.isfinite(jax.grad(total)(_embeddings(3))).all()


def _finite_lists(*args, **options):
  """Returns lists as they were in earlier versions: finite scores everywhere."""
  found = retrieval_lists(*args, **options)
  fill = {
    name: jnp.where(getattr(found, f"{name}_where"), getattr(found, f"{name}_scores"), 0.25)
    for name in ("positive", "negative")
  }
  return found._replace(positive_scores=fill["positive"], negative_scores=fill["negative"])


def test_f50_with_the_masks_the_infinite_scores_change_no_bit():
  value_and_grad = [
    jax.value_and_grad(functools.partial(_total, jitted_lists=make))
    for make in (retrieval_lists, _finite_lists)
  ]
  got, want = (jax.jit(function)(_embeddings(3)) for function in value_and_grad)
  jax.tree.map(np.testing.assert_array_equal, got, want)
