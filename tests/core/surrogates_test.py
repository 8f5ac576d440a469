"""Tests the two surrogates of the 0-1 loss (Eq. 7)."""

import functools

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

from soprc_jax import surrogates

pytestmark = pytest.mark.core

_TAUS = st.sampled_from([0.001, 0.01, 0.1, 1.0])
# Cosine margins, exact ties, and numbers so small or so large that naive formulas underflow or
# overflow.
_MARGINS = hnp.arrays(
  np.float32,
  (12,),
  elements=st.one_of(
    st.floats(-2, 2, width=32),
    st.sampled_from([0.0, -0.0, 1e-30, -1e-30, 2.0, -2.0, 1e30, -1e30]).map(np.float32),
  ),
)
_FUNCTIONS = [
  ("one_sided_huber", surrogates.one_sided_huber),
  ("one_sided_sigmoid", surrogates.one_sided_sigmoid),
]


@functools.cache  # one function object, so that jit compiles once
def _slope(function):
  """Returns the elementwise derivative."""
  return jax.jit(lambda margin, tau: jax.grad(lambda x: jnp.sum(function(x, tau=tau)))(margin))


class SurrogatesTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  def test_huber_values(self):
    got = self.variant(surrogates.one_sided_huber)(
      np.array([-0.1, -0.05, 0.0, 0.05, 0.1, 0.2], np.float32), tau=0.1
    )
    np.testing.assert_allclose(got, [1 + 2, 1 + 1, 1, 0.5**2, 0, 0], rtol=1e-6, atol=1e-7)

  @chex.all_variants(with_pmap=False)
  def test_sigmoid_values(self):
    e2 = np.exp(2.0)
    margins = np.array([-1.0, -0.2, -0.1, 0.0, 0.1], np.float32)
    got = self.variant(surrogates.one_sided_sigmoid)(margins, tau=0.1)
    np.testing.assert_allclose(
      got, [1, (e2 - 1) / (e2 + 1), (np.e - 1) / (np.e + 1), 0, 0], rtol=1e-4, atol=1e-7
    )

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(margins=_MARGINS, tau=_TAUS)
  def test_match_the_reference(self, margins, tau):
    huber = self.variant(surrogates.one_sided_huber)(margins, tau=tau)
    sigmoid = self.variant(surrogates.one_sided_sigmoid)(margins, tau=tau)
    np.testing.assert_allclose(huber, reference.huber(margins, tau), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(sigmoid, reference.sigmoid(margins, tau), rtol=1e-4, atol=1e-6)

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(margins=_MARGINS, tau=_TAUS)
  def test_bound_the_zero_one_loss(self, margins, tau):
    above = np.asarray(self.variant(surrogates.one_sided_huber)(margins, tau=tau))
    below = np.asarray(self.variant(surrogates.one_sided_sigmoid)(margins, tau=tau))
    between = reference.zero_one(margins)
    self.assertTrue(np.all(above >= between), (margins, above))
    self.assertTrue(np.all(between >= below), (margins, below))
    self.assertTrue(np.all(below >= 0))

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(margins=_MARGINS, tau=_TAUS)
  def test_decrease(self, margins, tau):
    margins = np.sort(margins)
    for _, function in _FUNCTIONS:
      values = np.asarray(self.variant(function)(margins, tau=tau))
      self.assertTrue(np.all(values[1:] <= values[:-1]), (margins, values))

  @parameterized.named_parameters(_FUNCTIONS)
  @hypothesis.given(margins=_MARGINS, tau=_TAUS)
  def test_gradient_is_finite_and_points_down(self, function, margins, tau):
    slope = np.asarray(_slope(function)(margins, tau))
    self.assertTrue(np.isfinite(slope).all(), (margins, slope))
    self.assertTrue(np.all(slope <= 0), (margins, slope))

  @parameterized.named_parameters(_FUNCTIONS)
  def test_f24_gradient_is_finite_at_the_bounds_with_a_small_tau(self, function):
    margins = np.array([-2.0, 0.0, 2.0, -3e38, 3e38], np.float32)
    values, slope = function(margins[:3], tau=0.001), _slope(function)(margins, 0.001)
    self.assertTrue(np.isfinite(values).all())
    self.assertTrue(np.isfinite(slope).all(), slope)
    np.testing.assert_array_equal(slope[2], 0.0)

  def test_gradient_matches_finite_differences(self):
    with jax.enable_x64(True):
      margins = np.array([-0.9, -0.21, -0.03, 0.02, 0.07, 0.3])  # away from the kinks at 0 and tau
      step = 1e-6
      for function in (reference.huber, reference.sigmoid):
        ours = (
          surrogates.one_sided_huber
          if function is reference.huber
          else surrogates.one_sided_sigmoid
        )
        expected = (function(margins + step, 0.1) - function(margins - step, 0.1)) / (2 * step)
        np.testing.assert_allclose(_slope(ours)(margins, 0.1), expected, rtol=1e-6, atol=1e-8)

  def test_huber_is_convex(self):
    margins = np.linspace(-0.5, 0.5, 401, dtype=np.float32)
    slope = np.asarray(_slope(surrogates.one_sided_huber)(margins, 0.1))
    self.assertTrue(np.all(np.diff(slope) >= -1e-4))

  def test_erratum_1_huber_is_continuous_at_zero(self):
    """Checks the corrected surrogate. The printed -2x / tau1 for x < 0 jumps from 1 to 0 at 0 and
    falls below the 0-1 loss.
    """
    below = np.array([-0.02, -1e-3, -1e-6, -1e-30], np.float32)
    got = np.asarray(surrogates.one_sided_huber(below, tau=0.1))
    np.testing.assert_allclose(got, 1 - 2 * below.astype(np.float64) / 0.1, rtol=1e-6)
    np.testing.assert_allclose(got[-1], surrogates.one_sided_huber(0.0, tau=0.1), rtol=1e-6)
    printed = -2 * below / 0.1
    self.assertTrue(np.all(printed < reference.zero_one(below)))

  @parameterized.named_parameters(_FUNCTIONS)
  def test_dtypes(self, function):
    for given, expected in (
      (jnp.bfloat16, jnp.float32),
      (jnp.float16, jnp.float32),
      (jnp.float32, jnp.float32),
    ):
      self.assertEqual(function(jnp.array([-0.5, 0.5], given), tau=0.1).dtype, expected)
    self.assertEqual(function(jnp.array([-1, 1]), tau=0.1).dtype, jnp.float32)
    with jax.enable_x64(True):
      self.assertEqual(function(jnp.array([-0.5, 0.5], jnp.float64), tau=0.1).dtype, jnp.float64)

  @parameterized.named_parameters(_FUNCTIONS)
  def test_a_plain_tau_does_not_widen_float32_under_x64(self, function):
    with jax.enable_x64(True):
      self.assertEqual(function(jnp.array([-0.5, 0.5], jnp.float32), tau=0.1).dtype, jnp.float32)
      self.assertEqual(function(jnp.array([-0.5, 0.5], jnp.bfloat16), tau=0.1).dtype, jnp.float32)

  @parameterized.named_parameters(_FUNCTIONS)
  def test_tau_may_be_an_array_or_traced(self, function):
    margins, taus = np.full((2, 3), -0.05, np.float32), np.array([[0.1], [0.2]], np.float32)
    got = jax.jit(function)(margins, tau=taus)
    self.assertEqual(got.shape, (2, 3))
    np.testing.assert_allclose(got[1], function(margins[1], tau=0.2), rtol=1e-6)
    self.assertEqual(function(0.5, tau=0.1).shape, ())
