"""Tests the empirical AUPRC (Eq. 2) against brute force.

Its sort is that of _internal/sorting.py.
"""

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

L = 9
# Few distinct values: most lists have ties.
_TIED = hnp.arrays(np.float32, (2, L), elements=st.integers(-3, 3).map(lambda i: np.float32(i / 3)))
_SCORES = st.one_of(_TIED, hnp.arrays(np.float32, (2, L), elements=st.floats(-1e3, 1e3, width=32)))
_NORMAL = hnp.arrays(
  np.float32, (2, L), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
)
_LABELS = hnp.arrays(np.int32, (2, L), elements=st.integers(0, 1))
_MASKS = hnp.arrays(bool, (2, L))


def _at_prior(scores, labels, prior, where):
  return metrics.auprc(scores, labels, prior=prior, where=where)


class AuprcTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @hypothesis.given(scores=_SCORES, labels=_LABELS)
  def test_equals_scikit_learn(self, scores, labels):
    labels[:, 0] = 1  # scikit-learn warns without a positive
    expected = [
      sklearn.metrics.average_precision_score(y, s) for y, s in zip(labels, scores, strict=True)
    ]
    np.testing.assert_allclose(self.variant(metrics.auprc)(scores, labels), expected, rtol=1e-6)

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(
    scores=_SCORES, labels=_LABELS, where=_MASKS, prior=st.sampled_from([1e-4, 0.1, 0.5, 1.0])
  )
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
    np.testing.assert_array_equal(
      _jitted(scores[:, order], labels[:, order], where=where[:, order]), expected
    )
    for filler in (np.inf, -np.inf, 1e30):
      padded = np.concatenate([np.full((2, 3), filler, np.float32), scores], axis=1)
      more_labels, more = (
        np.pad(part, [(0, 0), (3, 0)], constant_values=fill)
        for part, fill in ((labels, 1), (where, False))
      )
      np.testing.assert_allclose(_jitted(padded, more_labels, where=more), expected, rtol=1e-6)

  @hypothesis.given(scores=_SCORES, labels=_LABELS)
  def test_own_prior_is_the_default(self, scores, labels):
    share = labels.mean(axis=1)
    np.testing.assert_allclose(
      _jitted(scores, labels, prior=share.astype(np.float32)), _jitted(scores, labels), rtol=1e-5
    )

  def test_ties_count_as_retrieved(self):
    # Both positives tie with one of two negatives: precision is 2 / 3 in any order.
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
    np.testing.assert_allclose(
      metrics.auprc(huge, np.array([1, 0, 1, 0])), (1 + 2 / 3) / 2, rtol=1e-6
    )

  def test_leading_axes_and_prior_of_each_list(self):
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=(2, 3, L)), rng.random((2, 3, L)) < 0.4
    priors = rng.random((2, 3)).astype(np.float32)
    got = metrics.auprc(scores, labels, prior=priors)
    expected = [
      [reference.auprc(scores[i, j], labels[i, j], priors[i, j]) for j in range(3)]
      for i in range(2)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(
      jax.vmap(metrics.auprc)(scores, labels), metrics.auprc(scores, labels), rtol=1e-6
    )

  def test_counts_beyond_float16(self):
    """Checks exact counts in a long list: 1 positive under 5000 negatives."""
    scores = np.concatenate([[0.0], np.ones(5000)])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
      got = metrics.auprc(jnp.asarray(scores, dtype), np.arange(5001) == 0)
      self.assertEqual(got.dtype, jnp.float32)
      np.testing.assert_allclose(got, 1 / 5001, rtol=1e-6)

  def test_zeros_tie(self):
    for scores in (np.float32([0.0, -0.0]), np.float32([-0.0, 0.0])):
      np.testing.assert_allclose(metrics.auprc(scores, np.array([1, 0])), 0.5)

  @parameterized.product(
    nan=(np.nan, -np.nan), at=(0, 1, 2), dtype=("float16", "bfloat16", "float32", "float64")
  )
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
        both = function(
          jnp.stack([device, jnp.zeros_like(device)]),
          np.stack([labels, labels]),
          prior=jnp.array(0.1),
        )
        np.testing.assert_array_equal(np.isnan(both), [True, False])
        # Masked entries may have any value.
        expected = metrics.auprc(jnp.where(where, device, 5), labels, where=where)
        np.testing.assert_array_equal(function(device, labels, where=where), expected)
    np.testing.assert_array_equal(metrics.auprc(scores, labels, where=where), expected)

  def test_f45_labels_of_nan(self):
    labels = np.float32([1, np.nan, 0])
    with self.assertRaisesRegex(ValueError, "nan"):
      metrics.auprc(np.zeros(3), labels)
    self.assertTrue(np.isnan(metrics.auprc(jnp.zeros(3), jnp.asarray(labels))))

  # Without numbers that compiled code may flush to zero.
  @hypothesis.given(scores=st.one_of(_TIED, _NORMAL), labels=_LABELS, where=_MASKS)
  def test_float32_is_ranked_as_float64(self, scores, labels, where):
    """Checks that the integers that encode the scores in the sort keep order and ties."""
    with jax.enable_x64(True):
      wide = metrics.auprc(jnp.asarray(scores, jnp.float64), labels, where=where)
    np.testing.assert_allclose(_jitted(scores, labels, where=where), wide, rtol=1e-6)

  def test_one_array_is_sorted(self):
    """Checks that one array is sorted. On a CPU, sorting three arrays takes six times as long as
    sorting one of integers.
    """
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
  """Returns Eq. 2 by rates, one positive after the other."""
  scores, positive = np.array(scores), labels > 0
  precisions = []
  for score in scores[positive]:
    true_rate, false_rate = (np.mean(scores[kind] >= score) for kind in (positive, ~positive))
    precisions.append(prior * true_rate / (prior * true_rate + (1 - prior) * false_rate))
  return np.mean(precisions)
