"""Tests interpolate_scores, binary_lists and metrics.auprc on any finite scores."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soprc_jax
from soprc_jax import metrics, testing

# A quarter of the number of examples in the profile of tests/conftest.py.
_FEW = hypothesis.settings.default.max_examples // 4

_SHAPES = [(3, 4), (1, 1), (2, 0), (0, 3)]
L = 7


@functools.cache
def _interpolate(grid, bounds, num_points):
  def total(scores, where):
    points = soprc_jax.interpolate_scores(
      scores, num_points=num_points, bounds=bounds, grid=grid, where=where
    )
    return jnp.sum(points / (1 + jnp.sum(jnp.abs(points))) if points.size else points), points

  return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize(
  ("grid", "num_points", "bounds"), [("midpoints", 5, None), ("blocks", 3, (-1.0, 1.0))]
)
@hypothesis.given(data=st.data(), garbage=st.sampled_from([0.0, np.nan, -np.inf]))
def test_interpolation_ascends_within_the_scores(grid, num_points, bounds, data, garbage):
  shape = data.draw(st.sampled_from(_SHAPES))
  scores, where = data.draw(testing.scores(shape)), data.draw(testing.masks(shape))
  spoiled = np.where(where, scores, garbage).astype(np.float32)
  gradient, points = (
    np.asarray(part) for part in _interpolate(grid, bounds, num_points)(spoiled, where)
  )
  assert points.shape == (shape[0], num_points)
  assert points.dtype == np.float32
  assert np.isfinite(points).all()
  assert np.all(np.diff(points, axis=1) >= 0)
  assert np.isfinite(gradient).all()
  assert not gradient[~where].any()
  for row, score, valid in zip(points, scores, where, strict=True):
    left = score[valid].astype(np.float64)
    if not left.size:
      assert not row.any()
      continue
    # The ends lie at most half a step outside the scores.
    beyond = 0.5 * (left.max() - left.min()) + 1e-6 * np.abs(left).max() + 1e-37
    assert left.min() - beyond <= row[0]
    assert row[-1] <= left.max() + beyond
    if bounds is not None:
      assert min(left.min(), bounds[0]) - 1e-6 <= row[0]
      assert row[-1] <= max(left.max(), bounds[1]) + 1e-6 * max(np.abs(left).max(), 1)
    if len(left) == 1 or np.all(left == left[0]):
      np.testing.assert_allclose(
        row, left[0], rtol=1e-6, atol=1e-37
      )  # less than the smallest normal float is flushed


@pytest.mark.parametrize("dtype", testing.FLOAT_TYPES, ids=lambda dtype: np.dtype(dtype).name)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=_FEW)
def test_interpolation_and_auprc_promote_every_dtype(dtype, data):
  scores, labels = (
    data.draw(testing.scores((3, 4), dtypes=[dtype])),
    data.draw(testing.masks((3, 4))),
  )
  wide = scores.astype(np.float32)
  points = soprc_jax.interpolate_scores(scores, num_points=5)
  assert points.dtype == jnp.float32
  np.testing.assert_array_equal(points, soprc_jax.interpolate_scores(wide, num_points=5))
  value = _auprc(scores, labels, 0.5, np.ones_like(labels))[0]
  assert value.dtype == jnp.float32
  np.testing.assert_array_equal(value, _auprc(wide, labels, 0.5, np.ones_like(labels))[0])


@jax.jit
def _auprc(scores, labels, prior, where):
  return metrics.auprc(scores, labels, prior=prior, where=where), metrics.auprc(
    scores, labels, where=where
  )


def _numpy_auprc(scores, labels, prior=None):
  """Returns Eq. 2, one positive at a time, by exact float64 comparisons."""
  positives, negatives = scores[labels], scores[~labels]
  if not len(positives):
    return 0.0
  prior = len(positives) / len(scores) if prior is None else prior
  true = np.array([np.mean(positives >= score) for score in positives])
  false = np.array([np.mean(negatives >= score) if len(negatives) else 0.0 for score in positives])
  return (
    np.mean(prior * true / (prior * true + (1 - prior) * false))
    if prior
    else np.mean(false == 0) * 0.0
  )


@hypothesis.given(
  data=st.data(),
  prior=st.sampled_from([1e-20, 1e-3, 0.5, 1.0]),
  garbage=st.sampled_from([0.0, np.nan, np.inf]),
)
def test_auprc_of_any_finite_scores(data, prior, garbage):
  scores, labels = data.draw(testing.scores((2, L), limit=3.4e38)), data.draw(testing.masks((2, L)))
  where = data.draw(testing.masks((2, L)))
  spoiled = np.where(where, scores, garbage).astype(np.float32)
  for found, used in zip(
    _auprc(spoiled, labels, np.float32(prior), where), (np.float32(prior), None), strict=True
  ):
    assert found.dtype == jnp.float32
    assert np.all((found >= 0) & (found <= 1))
    expected = [
      _numpy_auprc(s[m], y[m], used) for s, y, m in zip(scores, labels, where, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@hypothesis.given(data=st.data())
def test_auprc_sees_the_order_of_the_scores_only(data):
  """Checks that an increasing map of the scores and a permutation of the list change nothing."""
  scores, labels = data.draw(testing.scores((2, L))), data.draw(testing.masks((2, L)))
  order = np.random.default_rng(data.draw(st.integers(0, 2**16))).permutation(L)
  everything = np.ones((2, L), bool)
  expected = _auprc(scores, labels, 0.1, everything)
  ranks = np.stack([np.searchsorted(np.unique(row), row) for row in scores]).astype(np.float32)
  np.testing.assert_array_equal(_auprc(ranks, labels, 0.1, everything), expected)
  np.testing.assert_allclose(
    _auprc(scores[:, order], labels[:, order], 0.1, everything), expected, rtol=1e-6
  )


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_auprc_of_nothing_is_zero(shape):
  for prior in (None, 0.3):
    value = metrics.auprc(np.zeros(shape, np.float32), np.zeros(shape, bool), prior=prior)
    assert value.shape == shape[:-1]
    assert not np.any(value)


@hypothesis.given(data=st.data(), dtype=st.sampled_from(testing.FLOAT_TYPES))
def test_binary_lists_keep_every_valid_entry_on_one_side(data, dtype):
  scores, where = (
    data.draw(testing.scores((2, L), dtypes=[dtype])),
    data.draw(testing.masks((2, L))),
  )
  labels = data.draw(
    st.one_of(
      testing.masks((2, L)),
      testing.scores((2, L), dtypes=(np.float32, np.float64)),
      st.just(np.array([[-1, 0, 1, 2**31 - 1, 2**32, 2**40, -(2**40)]] * 2, np.int64)),
    )
  )
  found = soprc_jax.binary_lists(scores, labels, where=where)
  np.testing.assert_array_equal(found.positive_where, where & (labels > 0))
  np.testing.assert_array_equal(found.negative_where, where & ~(labels > 0))
  assert found.positive_scores.dtype == found.negative_scores.dtype == jnp.float32
  scores = scores.astype(np.float32)
  np.testing.assert_array_equal(
    found.positive_scores, np.where(found.positive_where, scores, -np.inf)
  )
  np.testing.assert_array_equal(
    found.negative_scores, np.where(found.negative_where, scores, np.inf)
  )
  assert int(found.num_dropped) == 0


@hypothesis.given(data=st.data())
def test_labels_mean_the_same_to_auprc_and_binary_lists(data):
  scores = data.draw(testing.scores((2, L)))
  labels = np.array(
    data.draw(
      st.sampled_from(
        [[0, 2**32, 2**40, -(2**40), 1, 0, 2**33], [0.0, 1e-300, -1e-300, 1e300, 0.5, -1, 0]]
      )
    )
  )
  value = metrics.auprc(scores[0], labels)
  np.testing.assert_allclose(value, _numpy_auprc(scores[0], labels > 0), rtol=2e-6)
