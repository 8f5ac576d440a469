"""Tests soprc_loss, ap_loss, semi_variance and the surrogates on any finite input.

`soprc_jax.testing` draws the input.
"""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soprc_jax
from soprc_jax import testing

# A quarter of the number of examples in the profile of tests/conftest.py.
_FEW = hypothesis.settings.default.max_examples // 4

M = 6
# Few positives compared with the negatives: slopes are then interpolated.
_WIDE = [(2, 3, 8)]
_PRIORS = st.sampled_from([0.0, 1e-30, 1e-4, 0.5, 1.0])
_TAUS = st.sampled_from([1e-6, 1e-3, 0.1, 10.0, 1e6])


def _soprc(positive, negative, masks, v, prior, tau1, tau2, **options):
  return soprc_jax.soprc_loss(
    positive,
    negative,
    v,
    prior=prior,
    tau1=tau1,
    tau2=tau2,
    positive_where=masks[0],
    negative_where=masks[1],
    **options,
  )


def _ap(positive, negative, masks, v, prior, tau1, tau2, **options):
  del v, prior
  return soprc_jax.ap_loss(
    positive,
    negative,
    tau1=tau1,
    tau2=tau2,
    positive_where=masks[0],
    negative_where=masks[1],
    **options,
  )


_ESTIMATORS = {
  "soprc": _soprc,
  "soprc_paper": functools.partial(_soprc, tpr_gradient=True, self_weight=0.0),
  "soprc_log": functools.partial(_soprc, link="log"),
  "soprc_log_paper": functools.partial(_soprc, link="log", tpr_gradient=True, self_weight=0.0),
  "ap": _ap,
  "ap_tpr_gradient": functools.partial(_ap, tpr_gradient=True),
}
_each_estimator = pytest.mark.parametrize("name", list(_ESTIMATORS))


@functools.cache
def _compiled(name, algorithm="dense"):
  loss = functools.partial(_ESTIMATORS[name], algorithm=algorithm)
  each = functools.partial(loss, reduce_fn=None)
  return jax.jit(
    lambda *arguments: (jax.value_and_grad(loss, argnums=(0, 1))(*arguments), each(*arguments))
  )


def _run(name, lists, v, prior, tau1, tau2, algorithm="dense"):
  """Returns the mean over lists, its gradients, and the value of each list."""
  numbers = (np.float32(number) for number in (prior, tau1, tau2))
  (value, gradients), each = _compiled(name, algorithm)(*lists[:2], lists[2:], v, *numbers)
  return np.asarray(value), [np.asarray(gradient) for gradient in gradients], np.asarray(each)


def _assert_finite(*arrays):
  for array in arrays:
    assert np.isfinite(np.asarray(array, np.float64)).all(), array


def _rows(lists):
  return lists.positive_scores.shape[0]


@_each_estimator
@hypothesis.given(
  lists=testing.score_lists(),
  levels=testing.scores((3, M)),
  prior=_PRIORS,
  tau1=_TAUS,
  tau2=_TAUS,
  garbage=st.booleans(),
)
def test_any_finite_lists_have_a_finite_loss_in_its_range(
  name, lists, levels, prior, tau1, tau2, garbage
):
  """Checks that invalid lists count 0. Masked entries may have any value and get no gradient."""
  if garbage:
    scores = [
      np.where(where, side, np.nan).astype(side.dtype)
      for side, where in zip(lists[:2], lists[2:], strict=True)
    ]
    lists = testing.ScoreLists(*scores, *lists[2:])
  value, gradients, each = _run(name, lists, levels[: _rows(lists)], prior, tau1, tau2)
  _assert_finite(value, each, *gradients)
  valid = lists.positive_where.any(axis=1) & lists.negative_where.any(axis=1)
  assert each.shape == valid.shape
  assert value.dtype == each.dtype == np.float32
  # log(F / (pi T)) is at most that of the largest and the smallest normal number.
  largest = np.log(np.finfo(np.float32).max) - np.log(np.finfo(np.float32).tiny)
  assert np.all((each >= 0) & (each <= (largest if "log" in name else 1)))
  assert not each[~valid].any()
  np.testing.assert_allclose(value, each[valid].mean() if valid.any() else 0.0, rtol=1e-6)
  for gradient, where, scores in zip(gradients, lists[2:], lists[:2], strict=True):
    assert gradient.shape == scores.shape
    assert gradient.dtype == scores.dtype
    assert not gradient[~(where & valid[:, None])].any()


@pytest.mark.parametrize("name", ["soprc", "ap"])
@pytest.mark.parametrize("dtype", testing.FLOAT_TYPES, ids=lambda dtype: np.dtype(dtype).name)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=_FEW)
def test_every_dtype_is_computed_in_float32(name, dtype, data):
  lists = data.draw(testing.score_lists([(3, 4, 5)], dtypes=[dtype]))
  v = data.draw(testing.scores((3, M), dtypes=[dtype]))
  value, gradients, each = _run(name, lists, v, 0.1, 0.1, 0.001)
  assert value.dtype == each.dtype == np.float32
  _assert_finite(value, each, *gradients)
  narrow = (
    np.float32 if dtype == np.float64 else dtype
  )  # the result of jax for float64 where x64 is off
  assert all(gradient.dtype == narrow for gradient in gradients)
  as_float32 = testing.ScoreLists(*(side.astype(np.float32) for side in lists[:2]), *lists[2:])
  expected = _run(name, as_float32, v.astype(np.float32), 0.1, 0.1, 0.001)
  np.testing.assert_array_equal(each, expected[2])


@hypothesis.given(lists=testing.score_lists(_WIDE), tau1=_TAUS, tau2=_TAUS)
def test_sorted_equals_dense(lists, tau1, tau2):
  """Checks the sorted algorithm against the dense one. In the other losses the positives take the
  role of v. The pieces of both sums are found by the same search.
  """
  dense, by_sorting = (
    _run("ap", lists, np.zeros((2, M)), 0.0, tau1, tau2, way) for way in ("dense", "sorted")
  )
  _assert_finite(*by_sorting[1])
  np.testing.assert_allclose(by_sorting[2], dense[2], rtol=2e-5, atol=1e-6)
  for got, gradient in zip(by_sorting[1], dense[1], strict=True):
    np.testing.assert_allclose(
      got, gradient, rtol=1e-3, atol=1e-4 * max(np.abs(gradient).max(), 1e-3)
    )


@hypothesis.given(
  lists=testing.score_lists(_WIDE, limit=1e20),  # margins up to 1e30 tau1
  prior=st.sampled_from([1e-30, 1e-4, 0.5, 1.0]),
  tau1=_TAUS,
  tau2=_TAUS,
)
def test_sorted_equals_dense_with_the_log_link(lists, prior, tau1, tau2):
  # With v = 0 for all lists. The dense gradient sums over few pairs.
  dense, by_sorting = (
    _run("soprc_log", lists, np.zeros((2, M), np.float32), prior, tau1, tau2, way)
    for way in ("dense", "sorted")
  )
  _assert_finite(*by_sorting[1])
  np.testing.assert_allclose(by_sorting[2], dense[2], rtol=2e-5, atol=1e-6)
  for got, gradient in zip(by_sorting[1], dense[1], strict=True):
    np.testing.assert_allclose(
      got, gradient, rtol=1e-3, atol=1e-4 * max(np.abs(gradient).max(), 1e-3)
    )


@pytest.mark.parametrize("paper", [False, True])
@hypothesis.given(
  lists=testing.score_lists([(3, 4, 5)]),
  levels=testing.scores((3, M)),
  prior=_PRIORS,
  tau1=_TAUS,
  tau2=_TAUS,
)
def test_the_log_bounds_the_share(paper, lists, levels, prior, tau1, tau2):
  """Checks log(1 + A) >= A / (1 + A), and Jensen's inequality for the mean of the logarithms."""
  share, log = (
    _run(name + "_paper" * paper, lists, levels, prior, tau1, tau2)[2]
    for name in ("soprc", "soprc_log")
  )
  assert np.all(log >= share * np.float32(1 - 1e-6)), (log, share)
  assert np.all(np.exp(-log) <= 1 - share + 2e-6), (log, share)


@_each_estimator
@hypothesis.given(
  lists=testing.score_lists([(3, 4, 5)], limit=8.0),
  levels=testing.scores((3, M), limit=8.0),
  prior=_PRIORS,
)
def test_masked_entries_are_as_if_they_were_not_there(name, lists, levels, prior):
  _, _, each = _run(name, lists, levels, prior, 0.1, 0.01)
  for i, valid in enumerate(lists.positive_where.any(axis=1) & lists.negative_where.any(axis=1)):
    if not valid:
      continue
    left = [side[i][where[i]] for side, where in zip(lists[:2], lists[2:], strict=True)]
    # All of one shape, so that one compilation is enough. The padding repeats entries, which would
    # change a mean, so it is masked.
    padded = [np.resize(side, size) for side, size in zip(left, (4, 5), strict=True)]
    where = [np.arange(size) < len(side) for side, size in zip(left, (4, 5), strict=True)]
    alone = testing.ScoreLists(*(np.tile(part, (3, 1)) for part in (*padded, *where)))
    np.testing.assert_allclose(
      _run(name, alone, np.tile(levels[i], (3, 1)), prior, 0.1, 0.01)[2],
      each[i],
      rtol=1e-5,
      atol=1e-7,
    )


@_each_estimator
@hypothesis.given(
  lists=testing.score_lists([(3, 4, 5)]), levels=testing.scores((3, M)), seed=st.integers(0, 2**16)
)
def test_order_changes_no_value_and_permutes_the_gradient(name, lists, levels, seed):
  """Checks more than the test of the family in estimators_test. It includes gradients and scores of
  any size.
  """
  rng = np.random.default_rng(seed)
  rows, columns, others, points = (rng.permutation(size) for size in (3, 4, 5, M))
  value, gradients, each = _run(name, lists, levels, 0.1, 0.1, 0.001)
  orders = (columns, others, columns, others)
  shuffled = testing.ScoreLists(
    *(part[rows][:, order] for part, order in zip(lists, orders, strict=True))
  )
  got = _run(name, shuffled, levels[rows][:, points], 0.1, 0.1, 0.001)
  np.testing.assert_allclose(got[0], value, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(got[2], each[rows], rtol=1e-5, atol=1e-7)
  for mine, gradient, order in zip(got[1], gradients, orders, strict=False):
    expected = gradient[rows][:, order]
    np.testing.assert_allclose(
      mine, expected, rtol=1e-4, atol=1e-5 * max(np.abs(expected).max(), 1e-6)
    )


_POOLS = [("selected", "batch"), ("all", "batch"), ("selected", "list"), ("all", "list")]


@functools.cache
def _variance(average_over, pool, mean_gradient):
  def loss(positive, negative, masks):
    return soprc_jax.semi_variance(
      positive,
      negative,
      positive_where=masks[0],
      negative_where=masks[1],
      average_over=average_over,
      pool=pool,
      mean_gradient=mean_gradient,
    )

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize(("average_over", "pool"), _POOLS)
@hypothesis.given(data=st.data(), mean_gradient=st.booleans())
def test_semi_variance_is_finite_and_not_negative(average_over, pool, data, mean_gradient):
  shapes = testing.LIST_SHAPES if (average_over, pool) == _POOLS[0] else [(3, 4, 5), (2, 0, 3)]
  lists = data.draw(testing.score_lists(shapes, limit=1e15))
  value, gradients = _variance(average_over, pool, mean_gradient)(*lists[:2], lists[2:])
  _assert_finite(value, *gradients)
  assert value >= 0
  assert value.dtype == jnp.float32
  for gradient, where in zip(gradients, lists[2:], strict=True):
    assert not np.asarray(gradient)[~where].any()


@pytest.mark.parametrize(("average_over", "pool"), _POOLS)
@hypothesis.given(lists=testing.score_lists([(3, 4, 5)], limit=3.4e38))
def test_semi_variance_of_the_largest_scores_is_no_nan(average_over, pool, lists):
  """Checks that a sum of squares may overflow float32, but is not NaN."""
  value, gradients = _variance(average_over, pool, True)(*lists[:2], lists[2:])
  assert not np.isnan(value)
  assert not any(np.isnan(gradient).any() for gradient in gradients)


@pytest.mark.parametrize("name", list(_ESTIMATORS))
@hypothesis.given(
  lists=testing.score_lists([(3, 4, 5)], limit=3.4e38), levels=testing.scores((3, M), limit=3.4e38)
)
def test_the_largest_scores(name, lists, levels):
  value, gradients, each = _run(name, lists, levels, 0.1, 0.1, 0.001)
  _assert_finite(value, each, *gradients)


@functools.cache
def _surrogate(function):
  def total(margin, tau):
    values = function(margin, tau=tau)
    return jnp.sum(values), values

  return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize("function", [soprc_jax.one_sided_huber, soprc_jax.one_sided_sigmoid])
@hypothesis.given(margins=testing.scores((8,), dtypes=testing.FLOAT_TYPES), tau=_TAUS)
def test_surrogates_are_finite_in_their_range_and_decrease(function, margins, tau):
  gradient, values = _surrogate(function)(margins, np.float32(tau))
  _assert_finite(values)
  # The slope of float16 margins is float16, which ends at 65504. For a smaller tau it must be -inf,
  # never NaN.
  if 2 / tau <= float(jnp.finfo(margins.dtype).max):
    _assert_finite(gradient)
  assert not np.isnan(np.asarray(gradient, np.float32)).any()
  assert values.dtype == jnp.float32
  assert values.shape == margins.shape
  assert np.all(values >= 0)
  assert np.all(np.asarray(gradient, np.float32) <= 0)
  if function is soprc_jax.one_sided_sigmoid:
    assert np.all(values <= 1)
  order = np.argsort(margins.astype(np.float32), kind="stable")
  assert np.all(np.diff(np.asarray(values)[order]) <= 0)
