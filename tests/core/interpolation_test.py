"""Tests score interpolation phi (Alg. 2) against plain loops."""

import functools
import math
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

from soprc_jax import interpolate_scores, interpolation

pytestmark = pytest.mark.core

_GRIDS = [("midpoints", "midpoints"), ("blocks", "blocks")]
_COSINES = hnp.arrays(np.float32, (3, 5), elements=st.floats(-1, 1, width=32))
_MASKS = hnp.arrays(bool, (3, 5))
_HUGE = hnp.arrays(
  np.float32,
  (3, 5),
  elements=st.sampled_from([-3e37, -1e30, -1.0, 0.0, 1.0, 1e30, 3e37]).map(np.float32),
)


def _authors_blocks(scores, num_points):
  """Returns the authors' layout as described in goldens/README.md. Whole blocks are concatenated
  and surplus entries are cut off.
  """
  s = np.sort(np.asarray(scores, np.float64))
  n = len(s)
  s = np.concatenate([[max(2 * s[0] - s[1], -1)], s, [min(2 * s[-1] - s[-2], 1)]])
  length = math.ceil(num_points / n)
  a = np.arange(length) / length
  blocks = [
    ((s[i - 1] + a * (s[i] - s[i - 1])) + (s[i] + a * (s[i + 1] - s[i]))) / 2
    for i in range(1, n + 1)
  ]
  return np.concatenate(blocks)[:num_points]


# One function object per setting, so that jit compiles once.
_BOUNDED = {
  grid: functools.partial(interpolate_scores, num_points=7, bounds=(-1.0, 1.0), grid=grid)
  for grid in interpolation.GRIDS
}


class InterpolateScoresTest(chex.TestCase):
  @parameterized.product(bounds=(None, (-1.0, 1.0)), grid=("midpoints", "blocks"))
  def test_matches_the_loops(self, bounds, grid):
    interpolate = functools.partial(interpolate_scores, num_points=7, bounds=bounds, grid=grid)
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 6):
      scores = rng.uniform(-1, 1, (3, n)).astype(np.float32)
      expected = [reference.interpolate(row, 7, bounds, grid) for row in scores]
      np.testing.assert_allclose(interpolate(scores), expected, rtol=0, atol=5e-7)

  @chex.all_variants(with_pmap=False)
  @parameterized.named_parameters(_GRIDS)
  @hypothesis.given(scores=_COSINES, mask=_MASKS)
  def test_masked_lists_match_the_loops_and_ascend(self, grid, scores, mask):
    got = np.asarray(self.variant(_BOUNDED[grid])(scores, where=mask))
    expected = [
      reference.interpolate(row[valid], 7, (-1.0, 1.0), grid)
      for row, valid in zip(scores, mask, strict=True)
    ]
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-7)
    self.assertTrue(np.all(np.diff(got, axis=-1) >= 0), got)
    self.assertTrue(np.all(np.abs(got) <= 1), got)

  @parameterized.named_parameters(_GRIDS)
  @hypothesis.given(scores=_HUGE, mask=_MASKS)
  def test_huge_scores_stay_finite_and_ascend(self, grid, scores, mask):
    for bounds in (None, (-1.0, 1.0)):
      got = np.asarray(
        interpolate_scores(scores, num_points=7, bounds=bounds, grid=grid, where=mask)
      )
      self.assertTrue(np.isfinite(got).all(), got)
      self.assertTrue(np.all(np.diff(got, axis=-1) >= 0), got)

  @parameterized.named_parameters(
    ("equal", [3.4e38] * 3),
    ("both_ends", [-3.4e38, 3.4e38, 3.4e38]),
    ("extrapolated", [1e38, -1e38, 0.0]),
  )
  def test_the_largest_float32_scores(self, scores):
    for grid in interpolation.GRIDS:
      got = np.asarray(interpolate_scores(np.float32(scores), num_points=5, grid=grid))
      self.assertTrue(np.isfinite(got).all(), got)
      self.assertTrue(np.all(np.diff(got) >= 0), got)

  @parameterized.named_parameters(_GRIDS)
  @hypothesis.given(scores=_COSINES, mask=_MASKS, seed=st.integers(0, 2**16))
  def test_order_and_padding_change_nothing(self, grid, scores, mask, seed):
    order = np.random.default_rng(seed).permutation(5)
    interpolate = functools.partial(interpolate_scores, num_points=6, grid=grid)
    got = interpolate(scores, where=mask)
    np.testing.assert_array_equal(interpolate(scores[:, order], where=mask[:, order]), got)
    garbage = np.float32([np.nan, 7, -np.inf])
    padded = np.concatenate([np.tile(garbage, (3, 1)), scores], axis=1)
    where = np.concatenate([np.zeros((3, 3), bool), mask], axis=1)
    np.testing.assert_array_equal(interpolate(padded, where=where), got)

  @parameterized.named_parameters(_GRIDS)
  def test_padding_changes_no_gradient(self, grid):
    scores = np.random.default_rng(1).uniform(-1, 1, (3, 4)).astype(np.float32)
    weights = np.random.default_rng(2).normal(size=(3, 6)).astype(np.float32)

    @jax.jit
    def gradient(scores, where):
      return jax.grad(
        lambda s: jnp.sum(
          weights * interpolate_scores(s, num_points=6, bounds=(-1, 1), grid=grid, where=where)
        )
      )(scores)

    plain = gradient(scores, np.ones((3, 4), bool))
    for filler in (0.0, np.nan, np.inf):
      padded = np.concatenate([scores, np.full((3, 2), filler, np.float32)], axis=1)
      got = gradient(padded, np.arange(6)[None, :] < np.full((3, 1), 4))
      np.testing.assert_allclose(got[:, :4], plain, rtol=0, atol=1e-6)
      np.testing.assert_array_equal(got[:, 4:], 0.0)

  @parameterized.named_parameters(
    ("equal", np.full((2, 4), 0.3), None),
    ("equal_at_the_bound", np.ones((2, 4)), None),
    ("both_bounds", np.array([[-1.0, 1.0, -1.0, 1.0]] * 2), None),
    ("zeros", np.zeros((2, 4)), None),
    ("none_valid", np.ones((2, 4)), np.zeros((2, 4), bool)),
    ("one_valid", np.ones((2, 4)), np.arange(4)[None, :] == np.full((2, 1), 2)),
    ("huge", np.array([[3e37, -3e37, 0.0, 1e37]] * 2), None),
  )
  def test_value_and_gradient_are_finite(self, scores, where):
    for grid in interpolation.GRIDS:
      value, gradient = jax.value_and_grad(
        lambda s, grid=grid: jnp.mean(
          interpolate_scores(s, num_points=5, bounds=(-1, 1), grid=grid, where=where) / 1e3
        )
      )(jnp.asarray(scores, jnp.float32))
      self.assertTrue(np.isfinite(value))
      self.assertTrue(np.isfinite(gradient).all(), gradient)

  @parameterized.named_parameters(_GRIDS)
  def test_one_score_is_constant_and_none_is_zero(self, grid):
    got = interpolate_scores(np.array([[0.25]]), num_points=4, bounds=(-1.0, 1.0), grid=grid)
    np.testing.assert_array_equal(got, np.full((1, 4), 0.25, np.float32))
    masked = interpolate_scores(
      np.array([[0.25, 0.9], [0.5, 0.7]]),
      num_points=4,
      grid=grid,
      where=np.array([[True, False], [False, False]]),
    )
    np.testing.assert_array_equal(masked, np.float32([[0.25] * 4, [0.0] * 4]))
    np.testing.assert_array_equal(
      interpolate_scores(np.zeros((2, 0)), num_points=3, grid=grid), np.zeros((2, 3))
    )

  @parameterized.named_parameters(_GRIDS)
  def test_equal_scores_give_exactly_that_score(self, grid):
    for score in np.float32([0.1, -0.7, 1.0]):
      got = interpolate_scores(np.full(3, score), num_points=10, grid=grid)
      np.testing.assert_array_equal(got, np.full(10, score))

  @parameterized.named_parameters(_GRIDS)
  def test_leading_axes_and_vmap(self, grid):
    scores = np.random.default_rng(3).uniform(-1, 1, (2, 3, 4)).astype(np.float32)
    interpolate = functools.partial(interpolate_scores, num_points=5, grid=grid)
    got = interpolate(scores)
    self.assertEqual(got.shape, (2, 3, 5))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(interpolate))(scores), got)
    np.testing.assert_array_equal(interpolate(scores[1, 2]), got[1, 2])

  def test_mask_broadcasts(self):
    scores = np.random.default_rng(3).uniform(-1, 1, (2, 4)).astype(np.float32)
    mask = np.array([True, False, True, True])
    got = interpolate_scores(scores, num_points=5, where=mask)
    np.testing.assert_array_equal(got, interpolate_scores(scores[:, mask], num_points=5))

  @parameterized.named_parameters(
    ("one", 1), ("divides", 9), ("does_not_divide", 10), ("fewer_than_scores", 2)
  )
  def test_blocks_grid_is_the_authors_layout(self, num_points):
    scores = np.array([0.4, -0.9, 0.8], np.float32)
    got = interpolate_scores(scores, num_points=num_points, bounds=(-1.0, 1.0), grid="blocks")
    np.testing.assert_allclose(got, _authors_blocks(scores, num_points), rtol=0, atol=2e-7)

  def test_erratum_2_ends(self):
    """Checks u_{n+1} = 2 u_n - u_{n-1}, not 2 u_n - 2 u_{n-1}. u_0 is analogous. Both stay inside
    the bounds.
    """
    # With M = n = 2 the midpoints are at a = 1/2: (u_{j} + 2 u_{j+1} + u_{j+2}) / 4.
    got = interpolate_scores(np.array([0.2, 0.6]), num_points=2)
    below, above = 2 * 0.2 - 0.6, 2 * 0.6 - 0.2
    np.testing.assert_allclose(
      got, [(below + 2 * 0.2 + 0.6) / 4, (0.2 + 2 * 0.6 + above) / 4], rtol=1e-6
    )
    clamped = interpolate_scores(np.array([0.2, 0.6]), num_points=2, bounds=(0.0, 0.9))
    np.testing.assert_allclose(
      clamped, [(0.0 + 2 * 0.2 + 0.6) / 4, (0.2 + 2 * 0.6 + 0.9) / 4], rtol=1e-6
    )

  def test_erratum_2_both_loops_interpolate_neighbouring_segments(self):
    """Checks that evenly spaced scores give a line, which phi continues. The pair printed in the
    second loop would bend it.
    """
    scores = np.array([0.5, 0.1, 0.3])  # any order: Alg. 2 sorts ascending
    t = (np.arange(9) + 0.5) / 9
    np.testing.assert_allclose(interpolate_scores(scores, num_points=9), 0.0 + 0.6 * t, rtol=1e-5)

  def test_erratum_2_scores_outside_the_bounds(self):
    """Checks that a bound never moves an end past the scores, so the row stays sorted."""
    scores = np.array([1.5, 2.0, -3.0, -2.0], np.float32)
    got = np.asarray(interpolate_scores(scores, num_points=8, bounds=(-1.0, 1.0)))
    self.assertTrue(np.all(np.diff(got) >= 0), got)
    np.testing.assert_allclose(got, reference.interpolate(scores, 8, (-1.0, 1.0)), rtol=1e-6)
    rounded = np.float32([1.0000001, 1.0000001])  # possible rounded cosines of duplicates
    np.testing.assert_array_equal(
      interpolate_scores(rounded, num_points=3, bounds=(-1.0, 1.0)), np.repeat(rounded[:1], 3)
    )

  def test_erratum_2_midpoints_grid_is_centred_and_blocks_grid_is_not(self):
    scores = np.array([-0.4, 0.0, 0.4])
    centred = np.asarray(interpolate_scores(scores, num_points=10))
    np.testing.assert_allclose(centred, -centred[::-1], atol=1e-7)
    # 10 points in 3 blocks of 4: the two highest of the 12 are cut off.
    blocks = np.asarray(interpolate_scores(scores, num_points=10, grid="blocks"))
    line = -0.6 + 0.1 * np.arange(12)
    np.testing.assert_allclose(blocks, line[:10], atol=1e-6)

  def test_dtypes(self):
    for given, expected in (
      (jnp.bfloat16, jnp.float32),
      (jnp.float16, jnp.float32),
      (jnp.float32, jnp.float32),
    ):
      self.assertEqual(
        interpolate_scores(jnp.array([0.5, 0.25], given), num_points=2).dtype, expected
      )
    with jax.enable_x64(True):
      self.assertEqual(
        interpolate_scores(jnp.array([0.5, 0.25], jnp.float64), num_points=2).dtype, jnp.float64
      )
      self.assertEqual(
        interpolate_scores(jnp.array([0.5, 0.25], jnp.float32), num_points=2).dtype, jnp.float32
      )

  def test_is_compiled_once_for_each_shape(self):
    with mock.patch.object(interpolation, "_extend", wraps=interpolation._extend) as traced:
      for value in range(3):
        interpolate_scores(np.full((2, 11), value, np.float32), num_points=13)
    self.assertEqual(traced.call_count, 1)

  @parameterized.named_parameters(
    ("no_points", {"num_points": 0}, "num_points"),
    ("float_points", {"num_points": 2.0}, "num_points"),
    ("grid", {"num_points": 2, "grid": "centers"}, "grid"),
    ("bounds_reversed", {"num_points": 2, "bounds": (1.0, -1.0)}, "bounds"),
    ("bounds_nan", {"num_points": 2, "bounds": (float("nan"), 1.0)}, "bounds"),
  )
  def test_bad_settings(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      interpolate_scores(np.zeros((2, 3)), **settings)

  def test_scalar_has_no_list_axis(self):
    with self.assertRaisesRegex(ValueError, "list axis"):
      interpolate_scores(0.5, num_points=2)
