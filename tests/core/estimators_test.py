"""Tests the SOPRC loss (Eq. 8), the AP loss (Eq. 5) and the semi-variance (Eq. 9)."""

import functools
import itertools

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
import reference

from soprc_jax import (
  ap_loss,
  losses,
  metrics,
  positive_pull,
  retrieval_lists,
  semi_variance,
  soprc_loss,
)
from soprc_jax._internal import masks as masks_lib

Q, P, N, M = 3, 4, 5, 6
_LINKS = ("share", "log")
_TINY = float(np.finfo(np.float32).tiny)


def _grid_scores(*shape):
  """Returns scores on a grid of 1/256. Ties are frequent and float32 margins are exact, so results
  at tau2 = 0.001 can be compared.
  """
  return hnp.arrays(np.int16, shape, elements=st.integers(-256, 256)).map(
    lambda s: s.astype(np.float32) / 256
  )


def _masks(*shape):
  return hnp.arrays(bool, shape)


def _draw(seed, *widths, lists=Q):
  rng = np.random.default_rng(seed)
  return [rng.uniform(-1, 1, (lists, width)).astype(np.float32) for width in widths]


_V = _draw(99, M, lists=1)[0][0]


def _soprc(
  positive, negative, positive_where=None, negative_where=None, v=None, prior=0.1, **options
):
  v = jnp.broadcast_to(_V, (*positive.shape[:-1], M)) if v is None else v
  options = {"tau1": 0.2, "tau2": 0.05} | options
  return soprc_loss(
    positive,
    negative,
    v,
    prior=prior,
    positive_where=positive_where,
    negative_where=negative_where,
    **options,
  )


def _ap(positive, negative, positive_where=None, negative_where=None, **options):
  options = {"tau1": 0.2, "tau2": 0.05} | options
  return ap_loss(
    positive, negative, positive_where=positive_where, negative_where=negative_where, **options
  )


def _variance(positive, negative, positive_where=None, negative_where=None, **options):
  return semi_variance(
    positive, negative, positive_where=positive_where, negative_where=negative_where, **options
  )


# One list of questions for the whole family. Each entry is (positive, negative, masks) -> scalar.
_LOSSES = {
  "soprc": _soprc,
  "soprc_paper": functools.partial(_soprc, tpr_gradient=True, self_weight=0.0),
  "soprc_log": functools.partial(_soprc, link="log"),
  "soprc_log_paper": functools.partial(_soprc, link="log", tpr_gradient=True, self_weight=0.0),
  "ap": _ap,
  "ap_tpr_gradient": functools.partial(_ap, tpr_gradient=True),
  "variance": _variance,
  "variance_paper": functools.partial(_variance, average_over="all", pool="list"),
}
_FAMILY = [(name, name) for name in _LOSSES]
# log(F / (pi T)) of the largest F and the smallest pi T in float32.
_LARGEST_LOG = float(np.log(np.finfo(np.float32).max) - np.log(_TINY))
# Compiled once per shape, for all tests: eager gradients would compile every primitive separately.
_COMPILED = {name: jax.jit(loss) for name, loss in _LOSSES.items()}
_WITH_GRADIENT = {
  name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))) for name, loss in _LOSSES.items()
}


def _assert_finite(tree):
  for leaf in jax.tree.leaves(tree):
    np.testing.assert_array_equal(np.isfinite(np.asarray(leaf, np.float64)), True, str(leaf))


def _valid_rows(scores, mask):
  return [row[valid] for row, valid in zip(np.asarray(scores, np.float64), mask, strict=True)]


def _difference_quotient(function, scores, step=1e-6):
  """Returns central differences of a scalar numpy function, entry by entry."""
  scores, gradient = np.asarray(scores, np.float64), np.zeros(np.shape(scores))
  for index in np.ndindex(*scores.shape):
    up, down = scores.copy(), scores.copy()
    up[index] += step
    down[index] -= step
    gradient[index] = (function(up) - function(down)) / (2 * step)
  return gradient


class FamilyTest(chex.TestCase):
  """Tests what holds for every estimator of the family."""

  @chex.all_variants(with_pmap=False)
  @parameterized.named_parameters(_FAMILY)
  @hypothesis.given(
    positive=_grid_scores(Q, P), negative=_grid_scores(Q, N), seed=st.integers(0, 2**16)
  )
  @hypothesis.settings(max_examples=15)
  def test_order_changes_nothing(self, name, positive, negative, seed):
    rng = np.random.default_rng(seed)
    masks = rng.random((Q, P)) < 0.7, rng.random((Q, N)) < 0.7
    loss = self.variant(_LOSSES[name])
    expected = loss(positive, negative, *masks)
    lists, columns, others = rng.permutation(Q), rng.permutation(P), rng.permutation(N)

    def shuffled(array, order):
      return array[lists][:, order]

    got = loss(
      shuffled(positive, columns),
      shuffled(negative, others),
      shuffled(masks[0], columns),
      shuffled(masks[1], others),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

  @parameterized.named_parameters(_FAMILY)
  @hypothesis.given(
    positive=_grid_scores(Q, P),
    negative=_grid_scores(Q, N),
    filler=st.sampled_from([0.0, 7.0, -1e30]),
  )
  def test_padding_changes_no_value_and_no_gradient(self, name, positive, negative, filler):
    function = _WITH_GRADIENT[name]
    expected, gradients = function(positive, negative, np.ones((Q, P), bool), np.ones((Q, N), bool))

    def padded(array):
      array = np.concatenate([np.full((Q, 2), filler, array.dtype), array], axis=1)
      return np.concatenate(
        [array, np.full((1, array.shape[1]), filler, array.dtype)], axis=0
      )  # and a whole list

    where = padded(np.ones((Q, P), bool)), padded(np.ones((Q, N), bool))
    for mask in where:
      mask[:, :2], mask[-1] = False, False
    got, padded_gradients = function(padded(positive), padded(negative), *where)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    for gradient, padded_gradient in zip(gradients, padded_gradients, strict=True):
      np.testing.assert_allclose(padded_gradient[:Q, 2:], gradient, rtol=1e-5, atol=1e-6)
      np.testing.assert_array_equal(padded_gradient[:, :2], 0)
      np.testing.assert_array_equal(padded_gradient[Q:], 0)

  @parameterized.named_parameters(_FAMILY)
  def test_padding_may_hold_anything(self, name):
    """Checks that padding with -inf or NaN, as other libraries use, changes nothing."""
    positive, negative = _draw(5, P, N)
    function = _WITH_GRADIENT[name]
    where = np.arange(P) < np.full((Q, 1), P - 1), np.arange(N) < np.full((Q, 1), N - 1)
    expected, gradients = function(positive, negative, *where)
    for filler in (-np.inf, np.nan):
      value, filled = function(
        np.where(where[0], positive, filler), np.where(where[1], negative, filler), *where
      )
      np.testing.assert_allclose(value, expected, rtol=1e-6)
      for got, gradient in zip(filled, gradients, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-7)

  @parameterized.named_parameters(_FAMILY)
  def test_leading_axes(self, name):
    loss = _COMPILED[name]
    positive, negative = _draw(4, P, N, lists=4)
    expected = loss(positive, negative)
    self.assertEqual(expected.shape, ())
    np.testing.assert_allclose(
      loss(positive.reshape(2, 2, P), negative.reshape(2, 2, N)), expected, rtol=1e-6
    )
    alone = [loss(positive[i], negative[i]) for i in range(4)]
    batched = jax.jit(jax.vmap(_LOSSES[name]))(positive, negative)
    np.testing.assert_allclose(batched, alone, rtol=1e-6)
    if name != "variance":  # it pools the batch
      np.testing.assert_allclose(np.mean(alone), expected, rtol=1e-6)

  @parameterized.named_parameters(_FAMILY)
  def test_finite_for_degenerate_lists(self, name):
    positive, negative = _draw(7, P, N)
    everything = np.ones((Q, P), bool), np.ones((Q, N), bool)
    nothing = np.zeros((Q, P), bool), np.zeros((Q, N), bool)
    some = np.array([True, False, True])[:, None]
    cases = {
      "no positives": (positive, negative, nothing[0], everything[1]),
      "no negatives": (positive, negative, everything[0], nothing[1]),
      "nothing": (positive, negative, *nothing),
      "one empty list": (positive, negative, everything[0] & some, everything[1] & ~some[::-1]),
      "all equal": (np.full_like(positive, 0.3), np.full_like(negative, 0.3), *everything),
      "zeros": (np.zeros_like(positive), np.zeros_like(negative), *everything),
      "separated at the bounds": (np.ones_like(positive), -np.ones_like(negative), *everything),
      "reversed at the bounds": (-np.ones_like(positive), np.ones_like(negative), *everything),
      "huge": (positive * 1e30, negative * 1e30, *everything),
      "largest": (np.full_like(positive, -3.4e38), np.full_like(negative, 3.4e38), *everything),
      "tiny": (positive * 1e-38, negative * 1e-38, *everything),
    }
    huge = (
      ("huge", "largest") if name.startswith("variance") else ()
    )  # a sum of squares may be inf, but not NaN
    for case, arguments in cases.items():
      value, gradients = _WITH_GRADIENT[name](*arguments)
      with self.subTest(case):
        if case in huge:
          self.assertFalse(np.isnan(value))
          continue
        _assert_finite((value, gradients))
        if case in ("no positives", "no negatives", "nothing"):
          self.assertEqual(float(value), 0.0)
          np.testing.assert_array_equal(gradients[0], 0)
          np.testing.assert_array_equal(gradients[1], 0)
        if not name.startswith("variance"):
          self.assertBetween(float(value), 0.0, _LARGEST_LOG if "log" in name else 1.0)

  @parameterized.named_parameters(_FAMILY)
  def test_finite_for_empty_axes(self, name):
    for positive, negative in (((Q, 0), (Q, N)), ((Q, P), (Q, 0)), ((0, P), (0, N))):
      value, gradients = _WITH_GRADIENT[name](jnp.ones(positive), jnp.ones(negative))
      self.assertEqual(float(value), 0.0)
      _assert_finite(gradients)

  @parameterized.named_parameters(_FAMILY)
  def test_dtypes(self, name):
    positive, negative = _draw(8, P, N)
    loss = _COMPILED[name]
    expected = loss(positive, negative)
    self.assertEqual(expected.dtype, jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
      value, gradients = _WITH_GRADIENT[name](
        jnp.asarray(positive, dtype), jnp.asarray(negative, dtype)
      )
      self.assertEqual(value.dtype, jnp.float32)
      # The gradient has the dtype of the input. The arithmetic in between is float32.
      rounded = (
        jnp.asarray(positive, dtype).astype(jnp.float32),
        jnp.asarray(negative, dtype).astype(jnp.float32),
      )
      np.testing.assert_allclose(value, loss(*rounded), rtol=1e-5, atol=1e-7)
      _assert_finite(gradients)
    with jax.enable_x64(True):
      wide = loss(jnp.asarray(positive, jnp.float64), jnp.asarray(negative, jnp.float64))
      self.assertEqual(loss(jnp.asarray(positive), jnp.asarray(negative)).dtype, jnp.float32)
    self.assertEqual(wide.dtype, jnp.float64)
    np.testing.assert_allclose(expected, wide, rtol=1e-5)

  @parameterized.named_parameters(_FAMILY)
  def test_leading_axes_must_agree(self, name):
    with self.assertRaises(AssertionError):
      _LOSSES[name](jnp.ones((2, P)), jnp.ones((3, N)))


class SoprcLossTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @parameterized.parameters(*_LINKS)
  @hypothesis.given(
    positive=_grid_scores(Q, P),
    negative=_grid_scores(Q, N),
    v=_grid_scores(Q, M),
    masks=st.tuples(_masks(Q, P), _masks(Q, N)),
    prior=st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0]),
    tau2=st.sampled_from([0.001, 0.1]),
    self_weight=st.sampled_from([0.0, 1 / (M + 1), 1.0]),
  )
  def test_matches_the_reference(
    self, link, positive, negative, v, masks, prior, tau2, self_weight
  ):
    loss = self.variant(functools.partial(_per_list, link=link))
    got = loss(positive, negative, v, prior, 0.1, tau2, self_weight, *masks)
    rows = zip(_valid_rows(positive, masks[0]), _valid_rows(negative, masks[1]), v, strict=True)
    expected = [
      reference.soprc(p, n, row, prior, 0.1, tau2, self_weight, link=link, least=_TINY)
      for p, n, row in rows
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)

  @hypothesis.given(positive=_grid_scores(Q, P), negative=_grid_scores(Q, N), v=_grid_scores(Q, M))
  def test_default_options(self, positive, negative, v):
    got = _defaults(positive, negative, v)
    expected = [
      reference.soprc(p, n, row, 0.1) for p, n, row in zip(positive, negative, v, strict=True)
    ]
    np.testing.assert_allclose(got, np.mean(expected), rtol=1e-4, atol=2e-5)

  @parameterized.named_parameters(("one", 1), ("three", 3))
  @hypothesis.given(data=st.data())
  def test_upper_bound_of_one_minus_auprc(self, num_positives, data):
    """Checks the claim of the docstring: v = all positives, 0 <= self_weight <= 1 / P. It holds for
    any prior, any taus and both links.
    """
    positive = data.draw(_grid_scores(1, num_positives))
    negative, mask = data.draw(_grid_scores(1, N)), data.draw(_masks(1, N))
    mask[0, 0] = True  # a list without negatives is invalid: 0 on both sides
    tau1, tau2 = (
      data.draw(st.sampled_from([0.001, 0.1, 1.0])),
      data.draw(st.sampled_from([0.001, 0.1, 1.0])),
    )
    self_weight = data.draw(st.sampled_from([1 / (num_positives + 1), 0.0, 1 / num_positives]))
    scores = np.concatenate([positive, negative], axis=1)
    labels = np.arange(scores.shape[1])[None] < num_positives
    where = np.concatenate([np.ones((1, num_positives), bool), mask], axis=1)
    true_prior = num_positives / (num_positives + mask.sum())
    for prior in (true_prior, data.draw(st.floats(0.001, 0.999))):
      every = np.ones((1, num_positives), bool)
      numbers = (prior, tau1, tau2, self_weight)
      got, of_log = (
        float(loss(positive, negative, positive, *numbers, every, mask)[0])
        for loss in (_per_list_jit, _per_list_log_jit)
      )
      own = prior == true_prior
      auprc = float(
        (
          metrics.auprc(scores, labels, where=where)
          if own
          else _auprc_at(scores, labels, prior, where)
        )[0]
      )
      self.assertGreaterEqual(got, 1 - auprc - 2e-6)
      self.assertGreaterEqual(of_log, got * (1 - 1e-6))
      self.assertLessEqual(np.exp(-of_log), auprc + 2e-6)

  def test_upper_bound_needs_a_small_self_weight(self):
    """Checks that with self_weight = 1 > 1 / P the bound fails. Every T is 1, which exceeds the
    true positive rate of the best positive.
    """
    positive, negative = jnp.array([[0.9, 0.0]]), jnp.array([[0.9]])
    auprc = metrics.auprc(jnp.array([0.9, 0.0, 0.9]), jnp.array([1, 1, 0]))
    # tau1 is so wide that l1 is 1 everywhere, so F = 1. The terms are (1/3) / (1/3 + 2/3 T).
    loss = functools.partial(soprc_loss, positive, negative, positive, prior=2 / 3, tau1=1e6)
    np.testing.assert_allclose(1 - auprc, ((1 / 3) / (1 / 3 + 1 / 3) + 1 / 3) / 2, rtol=1e-6)
    np.testing.assert_allclose(loss(self_weight=1.0), 1 / 3, rtol=1e-4)
    self.assertLess(float(loss(self_weight=1.0)), 1 - float(auprc) - 0.05)
    for self_weight in (None, 0.0, 0.5):
      self.assertGreaterEqual(float(loss(self_weight=self_weight)), 1 - float(auprc) - 1e-5)

  @parameterized.parameters(*_LINKS)
  @hypothesis.given(positive=_grid_scores(Q, P), negative=_grid_scores(Q, N), v=_grid_scores(Q, M))
  def test_tpr_gradient_changes_no_value(self, link, positive, negative, v):
    got, expected = (_with_link(link, through)(positive, negative, v) for through in (True, False))
    np.testing.assert_array_equal(got, expected)

  @parameterized.product(link=_LINKS, tpr_gradient=(False, True), prior=(0.3, 1e-6))
  def test_gradient_against_finite_differences(self, link, tpr_gradient, prior):
    """Checks that True differentiates T and False holds it fixed."""
    with jax.enable_x64(True):
      positive, negative, v = (array.astype(np.float64) for array in _draw(11, P, N, M, lists=1))
      settings = {"prior": prior, "tau1": 0.2, "tau2": 0.1, "link": link}
      got = jax.jit(
        jax.grad(
          functools.partial(soprc_loss, v=v, tpr_gradient=tpr_gradient, **settings), argnums=(0, 1)
        )
      )(jnp.asarray(positive), jnp.asarray(negative))
      fixed = reference.true_positive_rates(positive[0], v[0], 1 / (M + 1), 0.1)

      def risk(p, n):
        tpr = reference.true_positive_rates(p, v[0], 1 / (M + 1), 0.1) if tpr_gradient else fixed
        return reference.list_risk(p, n, tpr, prior, 0.2, link)

      np.testing.assert_allclose(
        got[0][0],
        _difference_quotient(lambda p: risk(p, negative[0]), positive[0]),
        rtol=1e-6,
        atol=1e-8,
      )
      np.testing.assert_allclose(
        got[1][0],
        _difference_quotient(lambda n: risk(positive[0], n), negative[0]),
        rtol=1e-6,
        atol=1e-8,
      )

  def test_no_gradient_into_v(self):
    positive, negative, v = _draw(12, P, N, M)
    for name in (name for name in _LOSSES if name.startswith("soprc")):
      gradient = jax.jit(jax.grad(lambda v, name=name: _LOSSES[name](positive, negative, v=v)))(v)
      np.testing.assert_array_equal(gradient, np.zeros((Q, M)))

  @parameterized.product(
    prior=(0.0, 1e-6, 0.5, 1.0),
    tpr_gradient=(False, True),
    self_weight=(None, 0.0),
    link=_LINKS,
  )
  def test_finite_at_extreme_priors_and_margins(self, prior, tpr_gradient, self_weight, link):
    loss = _extreme(tpr_gradient, self_weight, link)
    ends = np.array([[-1.0, 1.0, -1.0, 1.0]] * Q, np.float32)
    v = np.array([[-1.0, 1.0, 0.0]] * Q, np.float32)
    cases = {
      "margins -2, 0 and 2": (ends, ends, v),
      "separated": (np.ones_like(ends), -np.ones_like(ends), v),
      "reversed": (-np.ones_like(ends), np.ones_like(ends), v),
      "equal": (np.zeros_like(ends), np.zeros_like(ends), np.zeros_like(v)),
      "huge": (ends * 1e30, ends[:, ::-1] * 1e30, v * 1e30),
      "largest": (ends * 3.4e38, ends[:, ::-1] * 3.4e38, v * 3.4e38),
    }
    for case, arrays in cases.items():
      with self.subTest(case):
        value, gradients = loss(*arrays, np.float32(prior))
        _assert_finite((value, gradients))
        self.assertBetween(float(value), 0.0, _LARGEST_LOG if link == "log" else 1.0)

  def test_prior_zero_and_one(self):
    positive, negative, v = _draw(13, P, N, M)
    np.testing.assert_allclose(_soprc(positive, negative, v=v, prior=1.0), 0.0)
    # Every F here is positive, so every term is F / F.
    np.testing.assert_allclose(_soprc(positive - 2.0, negative, v=v, prior=0.0), 1.0, rtol=1e-6)
    # 0 / 0 is 0: no negative within reach, and a true positive rate of 0 with self_weight = 0.
    nothing = _soprc(positive + 5.0, negative, v=v, prior=0.5, self_weight=0.0)
    self.assertEqual(float(nothing), 0.0)

  def test_float32_gradient_at_a_small_prior(self):
    """Checks shares within 1e-6 of 1. The quotient rule would lose their difference to 1."""
    positive, negative, v = _draw(14, P, 64, M)
    for tpr_gradient, link in itertools.product((False, True), _LINKS):
      gradient = jax.jit(
        jax.grad(
          functools.partial(soprc_loss, v=v, prior=1e-4, tpr_gradient=tpr_gradient, link=link),
          argnums=(0, 1),
        )
      )
      narrow = gradient(positive, negative)
      with jax.enable_x64(True):
        wide = [
          np.asarray(array)
          for array in gradient(positive.astype(np.float64), negative.astype(np.float64))
        ]
      for got, expected in zip(narrow, wide, strict=True):
        self.assertLess(np.abs(expected).max(), 0.1 if link == "share" else np.inf)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-4 * np.abs(expected).max())

  @parameterized.parameters(*_LINKS)
  def test_prior_and_self_weight_of_each_list(self, link):
    positive, negative, v = _draw(15, P, N, M)
    priors, weights = np.float32([0.1, 0.01, 0.5]), np.float32([0.0, 0.5, 1.0])
    loss = functools.partial(_soprc, reduce_fn=None, link=link)
    got = loss(positive, negative, v=v, prior=priors, self_weight=weights)
    expected = [
      loss(positive[i], negative[i], v=v[i], prior=priors[i], self_weight=weights[i])
      for i in range(Q)
    ]
    np.testing.assert_allclose(got, expected, rtol=1e-6)

  @parameterized.parameters(*_LINKS)
  def test_order_of_v_changes_nothing(self, link):
    positive, negative, v = _draw(16, P, N, M)
    got, expected = (_soprc(positive, negative, v=rows, link=link) for rows in (v[:, ::-1], v))
    np.testing.assert_allclose(got, expected, rtol=1e-6)

  @parameterized.named_parameters(
    ("prior_percentage", {"prior": 2.0}, "prior"),
    ("prior_negative", {"prior": -0.1}, "prior"),
    ("prior_nan", {"prior": float("nan")}, "prior"),
    ("prior_of_one_list", {"prior": np.array([0.1, 0.2, 3.0])}, "prior"),
    ("tau1", {"prior": 0.1, "tau1": 0.0}, "tau1"),
    ("tau2", {"prior": 0.1, "tau2": -0.1}, "tau2"),
    ("self_weight", {"prior": 0.1, "self_weight": 1.5}, "self_weight"),
    (
      "link",
      {"prior": 0.1, "link": "odds"},
      r"link must be one of \('share', 'log'\), got 'odds'",
    ),
    (
      "log_of_prior_zero",
      {"prior": 0.0, "link": "log"},
      r"prior \(with link='log'\) must lie in \(0, 1\], got 0",
    ),
    ("log_of_a_list_of_prior_zero", {"prior": np.array([0.1, 0.0, 1]), "link": "log"}, "prior"),
  )
  def test_bad_settings(self, settings, name):
    positive, negative, v = _draw(0, P, N, M)
    with self.assertRaisesRegex(ValueError, name):
      soprc_loss(positive, negative, v, **settings)
    if "prior" not in name and "link" not in name:
      settings.pop("prior")
      with self.assertRaisesRegex(ValueError, name):
        ap_loss(positive, negative, **settings)

  @parameterized.parameters(30.0, 1.0001, -0.1, float("nan"))
  def test_f34_a_prior_that_is_no_share_is_never_taken(self, prior):
    """Checks a percentage, a count and a negative number. The value raises an error where it is
    known. Where it is traced or on a device, that list is NaN.
    """
    positive, negative, v = _draw(0, P, N, M)
    for known in (prior, np.float32(prior), np.array([0.1, prior, 0.2])):
      with self.assertRaisesRegex(
        ValueError, r"prior \(a share of positives, not a percentage or a count\) must lie in"
      ):
        soprc_loss(positive, negative, v, prior=known)
    for link in _LINKS:
      each = jax.jit(functools.partial(soprc_loss, link=link, reduce_fn=None))(
        positive, negative, v, prior=jnp.array([0.1, prior, 0.2])
      )
      np.testing.assert_array_equal(np.isnan(each), [False, True, False])
    self.assertTrue(np.isnan(soprc_loss(positive, negative, v, prior=jnp.float32(prior))))
    labels = np.arange(P) < 2
    with self.assertRaisesRegex(ValueError, "prior must lie in"):
      metrics.auprc(positive[0], labels, prior=prior)
    found = jax.jit(lambda prior: metrics.auprc(positive, np.tile(labels, (Q, 1)), prior=prior))(
      jnp.array([0.1, prior, 0.2])
    )
    np.testing.assert_array_equal(np.isnan(found), [False, True, False])

  def test_v_needs_the_leading_axes(self):
    positive, negative, v = _draw(0, P, N, M)
    with self.assertRaises(AssertionError):
      soprc_loss(positive, negative, v[:2], prior=0.1)

  @parameterized.parameters(*_LINKS)
  def test_traced_hyperparameters(self, link):
    positive, negative, v = _draw(17, P, N, M)
    loss = functools.partial(soprc_loss, positive, negative, v, link=link)
    numbers = {"prior": 0.2, "tau1": 0.3, "tau2": 0.01, "self_weight": 0.1}
    got = jax.jit(lambda numbers: loss(**numbers))(numbers)
    np.testing.assert_allclose(got, loss(**numbers), rtol=1e-6)

  def test_erratum_3_the_best_positive_counts_itself(self):
    positive, negative, v = jnp.array([[0.9]]), jnp.array([[0.85]]), jnp.array([[0.1, 0.2, 0.3]])
    false_positives = (1 - 0.05 / 0.1) ** 2
    # The paper's mean: T = 0, so the loss is 1 and the gradient 0.
    value, gradient = jax.jit(
      jax.value_and_grad(lambda p: soprc_loss(p, negative, v, prior=0.2, self_weight=0.0))
    )(positive)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0.0)
    # The default is the authors' (1 + sum l2) / (M + 1), here 1 / 4.
    value, gradient = jax.jit(jax.value_and_grad(lambda p: soprc_loss(p, negative, v, prior=0.2)))(
      positive
    )
    np.testing.assert_allclose(
      value, 0.8 * false_positives / (0.8 * false_positives + 0.2 / 4), rtol=1e-5
    )
    self.assertLess(float(gradient[0, 0]), 0)
    # Between the entries of v: sum l2 = 2.
    low = soprc_loss(jnp.array([[0.15]]), negative, v, prior=0.2)
    expected = 1 + 2 * 0.7 / 0.1
    np.testing.assert_allclose(
      low, 0.8 * expected / (0.8 * expected + 0.2 * (1 + 2) / 4), rtol=1e-5
    )

  def test_erratum_3_the_weight_mixes(self):
    positive, negative, v = (array[0].astype(np.float64) for array in _draw(18, P, N, M, lists=1))
    for weight in (0.0, 0.25, 1.0):
      rates = (1 - weight) * np.array(
        [reference.sigmoid(p - v, 0.05).mean() for p in positive]
      ) + weight
      expected = reference.list_risk(positive, negative, rates, 0.1, 0.2)
      got = _soprc(np.float32(positive), np.float32(negative), v=np.float32(v), self_weight=weight)
      np.testing.assert_allclose(got, expected, rtol=1e-5)

  def test_erratum_6_the_gradient_through_t_pulls_positives_down(self):
    positive, negative, v = _draw(19, P, N, M)
    fixed, literal = (
      jax.jit(jax.grad(lambda p, flag=flag: _soprc(p, negative, v=v, tpr_gradient=flag)))(positive)
      for flag in (False, True)
    )
    default = jax.jit(jax.grad(lambda p: _soprc(p, negative, v=v)))(positive)
    np.testing.assert_array_equal(default, fixed)
    self.assertTrue(np.all(fixed <= 0))  # a descent step moves every positive up
    self.assertTrue(np.all(literal - fixed >= -1e-7))
    self.assertGreater(np.max(literal - fixed), 1e-3)

  def test_erratum_7_the_prior_replaces_the_share_of_the_batch(self):
    positive, negative, v = _draw(20, P, N, M)
    many = np.tile(negative, (1, 3))
    np.testing.assert_allclose(
      _soprc(positive, many, v=v), _soprc(positive, negative, v=v), rtol=1e-6
    )
    self.assertGreater(float(_ap(positive, many)), float(_ap(positive, negative)) + 1e-3)
    # Row 1 of the ablation: with prior and v of the batch, SOPRC is the AP loss.
    batch = _soprc(positive, negative, v=positive, prior=P / (P + N), self_weight=1 / P)
    np.testing.assert_allclose(batch, _ap(positive, negative), rtol=1e-6)

  def test_erratum_7_a_true_prior_starves_the_gradient_of_an_untrained_model(self):
    positive, negative, v = _draw(21, P, N, M)

    def norm(prior, link):
      return np.linalg.norm(
        jax.grad(lambda p: _soprc(p, negative, v=v, prior=prior, link=link))(positive)
      )

    self.assertLess(norm(1e-4, "share"), 0.01 * norm(0.1, "share"))
    self.assertGreater(norm(1e-4, "log"), norm(0.1, "log"))  # not with the other link


class LogLinkTest(chex.TestCase):
  """Tests link="log" where the precision is 0 or close to it."""

  def test_the_risk_is_minus_the_logarithm_of_the_precision(self):
    positive, negative, v = _draw(60, 1, N, M)  # one positive, so that the mean is its risk
    share, log = (
      _soprc(positive, negative, v=v, prior=0.5, link=link, reduce_fn=None) for link in _LINKS
    )
    self.assertTrue(np.all((share > 0.1) & (share < 0.99)), share)
    np.testing.assert_allclose(log, -np.log1p(-np.float64(share)), rtol=1e-4)

  @parameterized.parameters(1e-6, 1e-12, 1e-30)
  def test_float32_at_a_tiny_prior(self, prior):
    """Checks value and gradient against float64. There the share is 1 in float32."""
    positive, negative, v = _draw(61, P, 64, M)
    loss = jax.jit(
      jax.value_and_grad(
        functools.partial(soprc_loss, v=v, prior=prior, link="log"), argnums=(0, 1)
      )
    )
    value, gradients = loss(positive, negative)
    with jax.enable_x64(True):
      wide, wide_gradients = loss(*(np.float64(array) for array in (positive, negative)))
    np.testing.assert_allclose(value, wide, rtol=1e-6)
    for got, expected in zip(gradients, wide_gradients, strict=True):
      np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())

  @parameterized.product(zero=("prior", "T"), tpr_gradient=(False, True))
  def test_a_precision_of_zero_has_a_value_and_the_gradient_of_log_f(self, zero, tpr_gradient):
    # The best positive, above v, and a negative within tau1 of it.
    positive, negative, v = jnp.array([[0.9]]), jnp.array([[0.85]]), jnp.array([[0.1, 0.2]])
    prior, self_weight = (jnp.float32(0.0), None) if zero == "prior" else (0.2, 0.0)
    options = {"link": "log", "self_weight": self_weight, "tpr_gradient": tpr_gradient}
    value, gradient = jax.value_and_grad(
      lambda h: soprc_loss(h, negative, v, prior=prior, **options)
    )(positive)
    rate = 0.5**2  # l1 at a margin of tau1 / 2
    np.testing.assert_allclose(value, np.log((1 - prior) * rate / _TINY), rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-2 * 0.5 / 0.1 / rate]], rtol=1e-4)

  def test_no_negative_in_reach_and_a_precision_of_zero_is_zero(self):
    positive, negative, v = jnp.array([[0.9]]), jnp.array([[0.2]]), jnp.array([[0.1, 0.2]])
    for options in ({"prior": 0.2, "self_weight": 0.0}, {"prior": jnp.float32(0.0)}):
      value, gradient = jax.value_and_grad(
        functools.partial(soprc_loss, negative_scores=negative, v=v, link="log", **options)
      )(positive)
      self.assertEqual(float(value), 0.0)
      np.testing.assert_array_equal(gradient, 0.0)

  def test_one_small_term_of_a_large_quotient(self):
    """Checks the function itself where F / (pi T) overflows and where it rounds to 0."""
    part = jnp.array([3e38, 3e38, 1.0, 1e-9, 0.0, 0.0])
    rest = jnp.array([1e-30, 0.0, 1e-38, 1.0, 1.0, 0.0])
    value, slopes = jax.vmap(jax.value_and_grad(masks_lib.log_ratio, argnums=(0, 1)))(part, rest)
    wide = np.float64(part), np.maximum(np.float64(rest), _TINY)
    np.testing.assert_allclose(value, np.log1p(wide[0] / wide[1]), rtol=1e-6)
    np.testing.assert_allclose(slopes[0][:5], 1 / (wide[0] + wide[1])[:5], rtol=1e-5, atol=_TINY)
    floored = np.float64(rest) < _TINY
    expected = -wide[0] / (wide[0] + wide[1]) / wide[1]
    np.testing.assert_allclose(slopes[1], np.where(floored, 0.0, expected), rtol=1e-5)
    self.assertEqual(float(slopes[0][5]), 0.0)

  def test_the_compiled_slope_of_a_tiny_rest(self):
    """XLA makes one division of two, by a product that underflows."""
    part, rest = jnp.array([0.0, 1e-20, 1e-30]), jnp.array([6e-37, 1e-20, 1e-36])
    slopes = jax.jit(jax.vmap(jax.grad(masks_lib.log_ratio, argnums=1)))(part, rest)
    wide = np.float64(part), np.float64(rest)
    np.testing.assert_allclose(slopes, -wide[0] / (wide[0] + wide[1]) / wide[1], rtol=1e-5)


@functools.cache
def _extreme(tpr_gradient, self_weight, link):
  """Returns loss and gradient at the smallest taus as a function of arrays only, compiled once."""

  def loss(positive, negative, v, prior):
    return soprc_loss(
      positive,
      negative,
      v,
      prior=prior,
      tau1=0.001,
      tau2=0.001,
      self_weight=self_weight,
      tpr_gradient=tpr_gradient,
      link=link,
    )

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def _per_list(
  positive,
  negative,
  v,
  prior,
  tau1,
  tau2,
  self_weight,
  positive_where,
  negative_where,
  link="share",
):
  return soprc_loss(
    positive,
    negative,
    v,
    prior=jnp.asarray(prior),  # on the device, where a prior of 0 is no error
    tau1=tau1,
    tau2=tau2,
    self_weight=self_weight,
    positive_where=positive_where,
    negative_where=negative_where,
    link=link,
    reduce_fn=None,
  )


_per_list_jit = jax.jit(_per_list)
_per_list_log_jit = jax.jit(functools.partial(_per_list, link="log"))
_defaults = jax.jit(functools.partial(soprc_loss, prior=0.1))
_with_link = functools.cache(
  lambda link, tpr_gradient: jax.jit(
    functools.partial(soprc_loss, prior=0.1, link=link, tpr_gradient=tpr_gradient)
  )
)
_auprc_at = jax.jit(
  lambda scores, labels, prior, where: metrics.auprc(scores, labels, prior=prior, where=where)
)


class ApLossTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @hypothesis.given(
    positive=_grid_scores(Q, P),
    negative=_grid_scores(Q, N),
    masks=st.tuples(_masks(Q, P), _masks(Q, N)),
    tau2=st.sampled_from([0.001, 0.1]),
  )
  def test_matches_the_reference(self, positive, negative, masks, tau2):
    got = self.variant(_ap_per_list)(positive, negative, *masks, tau2)
    rows = zip(_valid_rows(positive, masks[0]), _valid_rows(negative, masks[1]), strict=True)
    expected = [reference.average_precision_loss(p, n, 0.2, tau2) for p, n in rows]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)

  def test_self_weight(self):
    positive, negative = _draw(22, P, N)
    for weight in (0.0, 0.3, 1.0):
      expected = [
        reference.average_precision_loss(p, n, 0.2, 0.05, weight)
        for p, n in zip(positive, negative, strict=True)
      ]
      np.testing.assert_allclose(
        _ap(positive, negative, self_weight=weight), np.mean(expected), rtol=1e-5
      )

  @parameterized.named_parameters(("without", False), ("with", True))
  def test_gradient_against_finite_differences(self, tpr_gradient):
    with jax.enable_x64(True):
      positive, negative = (array.astype(np.float64) for array in _draw(23, P, N, lists=1))
      gradient = jax.jit(jax.grad(lambda p: _ap(p, negative, tau2=0.1, tpr_gradient=tpr_gradient)))(
        jnp.asarray(positive)
      )
      fixed = reference.true_positive_rates(positive[0], positive[0], 1 / P, 0.1)

      def risk(p):
        tpr = reference.true_positive_rates(p, p, 1 / P, 0.1) if tpr_gradient else fixed
        return reference.list_risk(p, negative[0], tpr, P / (P + N), 0.2)

      np.testing.assert_allclose(
        gradient[0], _difference_quotient(risk, positive[0]), rtol=1e-6, atol=1e-8
      )


def _ap_per_list(positive, negative, positive_where, negative_where, tau2):
  return _ap(positive, negative, positive_where, negative_where, tau2=tau2, reduce_fn=None)


class ReduceFnTest(chex.TestCase):
  """Tests reductions where lists 0 and 3 of 5 are invalid: no positive, no negative."""

  def setUp(self):
    super().setUp()
    self.positive, self.negative = _draw(30, P, N, lists=5)
    self.where = np.ones((5, P), bool), np.ones((5, N), bool)
    self.where[0][0], self.where[1][3] = False, False
    self.valid = np.array([False, True, True, False, True])

  def loss(self, name, reduce_fn, where=None):
    return _LOSSES[name](self.positive, self.negative, *(where or self.where), reduce_fn=reduce_fn)

  @parameterized.parameters("soprc", "soprc_log", "ap")
  def test_none_returns_each_list(self, name):
    each = np.asarray(self.loss(name, None))
    self.assertEqual(each.shape, (5,))
    np.testing.assert_array_equal(each[~self.valid], 0)
    self.assertTrue(np.all(each[self.valid] > 0))

  @parameterized.named_parameters(
    ("mean", jnp.mean, np.mean),
    ("sum", jnp.sum, np.sum),
    ("max", functools.partial(jnp.max, initial=-1.0), np.max),
    ("min", functools.partial(jnp.min, initial=2.0), np.min),
    (
      "custom",
      lambda values, where: jnp.sum(values**2, where=where),
      lambda values: np.sum(values**2),
    ),
  )
  def test_sees_only_valid_lists(self, reduce_fn, expected):
    for name in ("soprc", "soprc_log", "ap"):
      each = np.asarray(self.loss(name, None))
      np.testing.assert_allclose(self.loss(name, reduce_fn), expected(each[self.valid]), rtol=1e-6)

  @parameterized.named_parameters(
    ("mean", jnp.mean),
    ("sum", jnp.sum),
    ("max", functools.partial(jnp.max, initial=-jnp.inf)),
    ("none", None),
  )
  def test_no_valid_list_is_zero(self, reduce_fn):
    nothing = np.zeros((5, P), bool), self.where[1]
    for link in _LINKS:
      loss = functools.partial(_soprc, reduce_fn=reduce_fn, link=link)
      np.testing.assert_array_equal(
        loss(self.positive, self.negative, *nothing), np.zeros(5) if reduce_fn is None else 0.0
      )
      gradient = jax.jit(jax.grad(lambda p, loss=loss: jnp.sum(loss(p, self.negative, *nothing))))(
        self.positive
      )
      np.testing.assert_array_equal(gradient, 0.0)


class PositivePullTest(chex.TestCase):
  @hypothesis.given(positive=_grid_scores(Q, P), mask=_masks(Q, P))
  def test_matches_the_reference(self, positive, mask):
    got = jax.jit(positive_pull)(positive, positive_where=mask)
    rows = [row[valid].astype(np.float64) for row, valid in zip(positive, mask)]
    pulls = [
      np.log((1 + np.exp(-2 * (row - 0.5)).sum()) / (1 + len(row) * np.exp(-1))) / 2
      for row in rows
      if row.size
    ]
    np.testing.assert_allclose(got, np.mean(pulls) if pulls else 0.0, rtol=1e-5, atol=1e-6)

  def test_it_is_the_positive_part_of_multi_similarity(self):
    vectors = np.random.default_rng(0).standard_normal((8, 5))
    vectors = np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    labels = np.repeat([0, 1], 4)
    found = retrieval_lists(vectors, labels)
    got = positive_pull(found.positive_scores, positive_where=found.positive_where, alpha=3, base=0)
    whole = losses.multi_similarity_loss(vectors, labels, alpha=3, beta=1, base=0)
    negatives = np.exp(vectors @ vectors.T)[labels[:, None] != labels].reshape(8, 4)
    lowest = np.log1p(3 * np.exp(-3)) / 3
    np.testing.assert_allclose(got, whole - np.log1p(negatives.sum(1)).mean() - lowest, rtol=1e-4)

  def test_it_is_0_where_all_similarities_are_1(self):
    mask = np.array([[True, True, True], [True, False, False]])
    np.testing.assert_allclose(positive_pull(jnp.ones((2, 3)), positive_where=mask), 0.0, atol=1e-7)

  def test_gradient(self):
    mask = np.array([[True, True, False], [True, False, False], [False, False, False]])
    scores = jnp.where(mask, 0.5, jnp.inf)  # as `RetrievalLists` fills invalid entries
    slopes = jax.jit(jax.grad(lambda h: positive_pull(h, positive_where=mask)))(scores)
    # exp(0) = 1 for each positive: 1 / (1 + 2) and 1 / (1 + 1), over two lists.
    np.testing.assert_allclose(slopes, [[-1 / 6, -1 / 6, 0], [-1 / 4, 0, 0], [0, 0, 0]], rtol=1e-6)

  def test_extreme_scores_are_finite(self):
    scores = jnp.array([[1e30, -1e30]])
    value, slopes = jax.jit(jax.value_and_grad(positive_pull))(scores)
    np.testing.assert_allclose(value, 1e30, rtol=1e-6)
    np.testing.assert_allclose(slopes, [[0.0, -1.0]])

  def test_bad_numbers_are_named(self):
    for name in ("alpha", "base"):
      with self.assertRaisesRegex(ValueError, name):
        positive_pull(np.zeros((1, 2)), **{name: np.nan})

  def test_f50_without_the_mask_it_is_nan(self):
    scores = jnp.array([[0.5, jnp.inf]])
    self.assertTrue(np.isnan(jax.jit(positive_pull)(scores)))
    with self.assertRaisesRegex(ValueError, "without a mask"):
      positive_pull(np.asarray(scores))


class SemiVarianceTest(chex.TestCase):
  @parameterized.product(average_over=("selected", "all"), pool=("batch", "list"))
  @hypothesis.given(
    positive=_grid_scores(Q, P),
    negative=_grid_scores(Q, N),
    masks=st.tuples(_masks(Q, P), _masks(Q, N)),
  )
  def test_matches_the_reference(self, average_over, pool, positive, negative, masks):
    got = _variance_jit(
      positive, negative, *masks, lambda1=0.7, lambda2=3.0, average_over=average_over, pool=pool
    )
    rows = _valid_rows(positive, masks[0]), _valid_rows(negative, masks[1])
    expected = reference.semi_variance(*rows, 0.7, 3.0, average_over, pool)
    if average_over == "selected":
      # A score within rounding of the mean may be selected or not. It changes the average only if
      # other scores are selected.
      hypothesis.assume(not _near_the_mean(rows, pool))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)

  def test_weights(self):
    positive, negative = _draw(40, P, N)
    both = _variance(positive, negative, lambda1=2.0, lambda2=3.0)
    parts = [
      _variance(positive, negative, lambda1=a, lambda2=b) for a, b in ((1.0, 0.0), (0.0, 1.0))
    ]
    np.testing.assert_allclose(both, 2 * parts[0] + 3 * parts[1], rtol=1e-6)
    default = _variance(positive, negative)
    np.testing.assert_allclose(default, parts[0] + 5 * parts[1], rtol=1e-6)

  def test_sides(self):
    """Checks that only positives below and negatives above their mean count."""
    got = _variance(
      jnp.array([[0.9, 0.9, 0.0]]), jnp.array([[0.0, 0.0, 0.6]]), lambda1=1.0, lambda2=1.0
    )
    np.testing.assert_allclose(got, 0.6**2 + 0.4**2, rtol=1e-5)

  @parameterized.product(
    average_over=("selected", "all"), pool=("batch", "list"), mean_gradient=(False, True)
  )
  def test_gradient_against_finite_differences(self, average_over, pool, mean_gradient):
    options = {"lambda1": 0.7, "lambda2": 3.0, "average_over": average_over, "pool": pool}
    with jax.enable_x64(True):
      scores = [array.astype(np.float64) for array in _draw(41, P, N)]
      got = jax.jit(
        jax.grad(
          functools.partial(_variance, mean_gradient=mean_gradient, **options), argnums=(0, 1)
        )
      )(*scores)
      for side in (0, 1):

        def value(changed, side=side):
          arrays = [changed if i == side else array for i, array in enumerate(scores)]
          if mean_gradient:
            return reference.semi_variance(*arrays, 0.7, 3.0, average_over, pool)
          return (
            _half_with_fixed_mean(changed, scores[side], side, average_over, pool)
            * (0.7, 3.0)[side]
          )

        np.testing.assert_allclose(
          got[side], _difference_quotient(value, scores[side]), rtol=1e-6, atol=1e-9
        )

  def test_erratum_8_denominators(self):
    positive, negative = jnp.array([[0.9, 0.8, 0.1]]), jnp.array([[0.5]])
    squared = (0.6 - 0.1) ** 2
    selected = _variance(positive, negative)
    np.testing.assert_allclose(selected, squared / 1, rtol=1e-5)
    np.testing.assert_allclose(
      _variance(positive, negative, average_over="all"), squared / 3, rtol=1e-5
    )

  def test_erratum_8_pools(self):
    positive, negative = jnp.array([[0.9, 0.7], [0.3, 0.1]]), jnp.array([[0.5], [0.5]])
    each = 0.1**2  # each list: one positive 0.1 below its mean
    np.testing.assert_allclose(_variance(positive, negative, pool="list"), each, rtol=1e-5)
    together = ((0.5 - 0.3) ** 2 + (0.5 - 0.1) ** 2) / 2  # the batch: mean 0.5
    np.testing.assert_allclose(_variance(positive, negative, pool="batch"), together, rtol=1e-5)

  def test_erratum_8_defaults_are_the_authors(self):
    positive, negative = _draw(42, P, N)
    explicit = _variance(
      positive, negative, average_over="selected", pool="batch", mean_gradient=True
    )
    np.testing.assert_array_equal(_variance(positive, negative), explicit)

    def gradient(**options):
      return jax.jit(jax.grad(lambda p: _variance(p, negative, **options)))(positive)

    np.testing.assert_array_equal(gradient(), gradient(mean_gradient=True))
    self.assertGreater(np.abs(gradient() - gradient(mean_gradient=False)).max(), 1e-3)

  @parameterized.product(average_over=("selected", "all"), pool=("batch", "list"))
  def test_erratum_8_empty_selection_is_zero(self, average_over, pool):
    equal = np.full((Q, P), 0.3, np.float32), np.full((Q, N), 0.1, np.float32)
    loss = functools.partial(_variance, average_over=average_over, pool=pool)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*equal)
    np.testing.assert_allclose(value, 0.0, atol=1e-12)
    _assert_finite(gradients)

  @parameterized.named_parameters(
    ("average_over", {"average_over": "both"}, "average_over"), ("pool", {"pool": "query"}, "pool")
  )
  def test_bad_settings(self, options, name):
    with self.assertRaisesRegex(ValueError, name):
      _variance(*_draw(0, P, N), **options)


_variance_jit = jax.jit(_variance, static_argnames=("average_over", "pool", "mean_gradient"))


def _near_the_mean(rows, pool):
  """Returns whether a score of a valid list lies within float32 rounding of its mean. Lists whose
  scores all lie that close do not count.
  """
  pairs = [(p, n) for p, n in zip(*rows, strict=True) if len(p) and len(n)]
  if pool == "batch" and pairs:
    pairs = [(np.concatenate([p for p, _ in pairs]), np.concatenate([n for _, n in pairs]))]
  for scores in (side for pair in pairs for side in pair):
    gaps = np.abs(scores - scores.mean())
    if np.any(gaps < 1e-5) and gaps.max() > 1e-5:
      return True
  return False


def _half_with_fixed_mean(changed, original, side, average_over, pool):
  """Returns one half of Eq. 9 around the mean of the original scores."""
  mean = np.mean(original) if pool == "batch" else np.mean(original, axis=1, keepdims=True)
  excess = np.maximum((1, -1)[1 - side] * (changed - mean), 0)
  axis = None if pool == "batch" else 1
  count = (
    np.sum(excess > 0, axis=axis)
    if average_over == "selected"
    else np.sum(np.ones_like(excess), axis=axis)
  )
  return np.mean(np.sum(excess**2, axis=axis) / np.maximum(count, 1))


class DevicesTest(chex.TestCase):
  """Tests that loss and gradient on two devices equal those on one device. The masks of the devices
  are unequal. The single device gets the joined batch.
  """

  def setUp(self):
    super().setUp()
    self.scale = np.float32(0.8)
    self.positive, self.negative = _draw(50, P, N, lists=6)
    rng = np.random.default_rng(51)
    self.where = rng.random((6, P)) < 0.6, rng.random((6, N)) < 0.8
    self.where[0][:3, 0], self.where[0][3:5] = True, False  # device 1 has one valid list of three
    self.where[0][5], self.where[1][:, 0] = True, True

  def compare(self, loss, kind, where):
    """Compares ``loss(positive, negative, *where, axis_name=...)``. A shared parameter scales the
    scores.
    """

    def value(scale, positive, negative, *where, axis_name=None):
      return loss(scale * positive, scale * negative, *where, axis_name=axis_name)

    def on_each(*arguments):
      result, gradient = jax.value_and_grad(functools.partial(value, axis_name=mapping.AXIS))(
        *arguments
      )
      return result, jax.lax.pmean(gradient, mapping.AXIS)

    arrays = (self.positive, self.negative, *where)
    expected, expected_gradient = jax.jit(jax.value_and_grad(value))(self.scale, *arrays)
    got, gradient = mapping.on_devices(on_each, kind)(
      mapping.replicate(self.scale), *map(mapping.split, arrays)
    )
    np.testing.assert_allclose(got, np.full(2, expected), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, np.full(2, expected_gradient), rtol=1e-5, atol=1e-7)
    return float(expected)

  @parameterized.product(name=tuple(_LOSSES), kind=("pmap", "shard_map"))
  def test_equals_one_device(self, name, kind):
    self.assertGreater(self.compare(_LOSSES[name], kind, self.where), 0.0)

  @parameterized.product(reduce_fn=("sum", "max", "custom"), kind=("pmap", "shard_map"))
  def test_other_reductions(self, reduce_fn, kind):
    reduce_fn = {
      "sum": jnp.sum,
      "max": functools.partial(jnp.max, initial=0.0),
      "custom": lambda values, where: (
        jnp.sum(values**2, where=where) / jnp.sum(where).astype(values.dtype)
      ),
    }[reduce_fn]
    self.compare(functools.partial(_soprc, reduce_fn=reduce_fn), kind, self.where)

  @parameterized.product(
    name=("soprc", "soprc_log", "variance", "variance_paper"), kind=("pmap", "shard_map")
  )
  def test_a_device_without_valid_lists(self, name, kind):
    self.where[0][3:] = False
    self.assertGreater(self.compare(_LOSSES[name], kind, self.where), 0.0)

  @parameterized.product(name=("soprc", "soprc_log"), kind=("pmap", "shard_map"))
  def test_no_valid_list_anywhere(self, name, kind):
    self.where[0][:] = False
    self.assertEqual(self.compare(_LOSSES[name], kind, self.where), 0.0)

  @parameterized.named_parameters(mapping.KINDS)
  def test_reduce_fn_none_stays_local(self, kind):
    arrays = (self.positive, self.negative, *self.where)
    expected = _soprc(*arrays, reduce_fn=None)
    local = functools.partial(_soprc, reduce_fn=None, axis_name=mapping.AXIS)
    got = mapping.on_devices(local, kind)(*map(mapping.split, arrays))
    np.testing.assert_allclose(np.reshape(got, -1), expected, rtol=1e-6)


# Shapes at which XLA's maximum dropped the NaN in the fused sum over v, and one at which it did
# not.
@pytest.mark.optimized
@pytest.mark.parametrize("link", _LINKS)
@pytest.mark.parametrize(
  ("num_lists", "num_positives", "num_negatives"), [(32, 31, 32), (32, 8, 8), (2, 3, 2)]
)
def test_a_nan_in_v_reaches_the_loss_under_jit(num_lists, num_positives, num_negatives, link):
  """Checks that an invalid row of v (a list id out of range, under jit) gives no finite loss."""
  rng = np.random.default_rng(0)
  positive, negative = (
    np.float32(rng.random((num_lists, size))) for size in (num_positives, num_negatives)
  )
  loss = jax.jit(lambda v: soprc_loss(positive, negative, v, prior=0.1, link=link, reduce_fn=None))
  assert np.isnan(loss(jnp.full((num_lists, 20), jnp.nan))).all()
  assert np.isfinite(loss(jnp.full((num_lists, 20), 0.5))).all()
