"""Tests long lists by sorting (and its choice in _internal/pair_sums.py).

Value and gradient equal those of all pairs, in float32, for any scores.
"""

import functools
import itertools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax import ap_loss, interpolate_scores, losses, soprc_loss
from soprc_jax._internal import piecewise

P, N, M = 50, 700, 20
_LONG = (512, 2**13)
_LARGEST = float(np.finfo(np.float32).max)
_TOLERANCE = 1e-5


def _cases(num_positives=P, num_negatives=N):
  """Returns name -> (positive scores, negative scores, tau1). The lists are typical of a model
  before, during and after training.
  """
  rng = np.random.default_rng(0)

  def near(mean, deviation, count):
    return mean + deviation * rng.normal(size=count)

  few = min(20, num_negatives // 2)
  cases = {
    "typical": (near(0.5, 0.2, num_positives), near(0.0, 0.15, num_negatives), 0.1),
    "narrow": (near(0.5, 0.2, num_positives), near(0.0, 0.15, num_negatives), 0.01),
    "well ranked": (near(0.8, 0.03, num_positives), near(0.0, 0.1, num_negatives), 0.1),
    "few in reach": (
      near(0.8, 0.02, num_positives),
      np.r_[near(0.0, 0.05, num_negatives - few), near(0.72, 0.03, few)],
      0.1,
    ),
    "collapsed": (np.full(num_positives, 0.3), np.full(num_negatives, 0.3), 0.1),
    "nearly collapsed": (near(0.3, 1e-6, num_positives), near(0.3, 1e-6, num_negatives), 0.1),
    "reversed": (near(-0.5, 0.1, num_positives), near(0.5, 0.1, num_negatives), 0.03),
    "logits": (near(3.0, 5.0, num_positives), near(-8.0, 5.0, num_negatives), 0.1),
    "integers with ties": (
      rng.integers(-3, 9, num_positives),
      rng.integers(-9, 5, num_negatives),
      1.0,
    ),
  }
  return {name: (np.float32(h), np.float32(g), tau) for name, (h, g, tau) in cases.items()}


def _in_float64(positive, negative, v, prior, tau1, tau2=0.001, block=2**22, link="share"):
  """Returns the loss of Eq. 8 and its gradients in float64 numpy. Pairs are summed in blocks of
  positives and negatives.
  """
  h, g, v = (np.float64(array) for array in (positive, negative, v))
  tau1, tau2 = np.float64(np.float32(tau1)), np.float64(np.float32(tau2))
  rows = max(1, block // len(g))
  f, slope = np.zeros(len(h)), np.zeros(len(h))
  for i in range(0, len(h), rows):
    part = slice(i, i + rows)
    margin = (h[part, None] - g) / tau1
    f[part] = np.where(margin < 0, 1 - 2 * margin, np.square(np.maximum(1 - margin, 0))).mean(1)
    slope[part] = -2 * np.clip(1 - margin, 0, 1).mean(1) / tau1
  weight = 1 / (len(v) + 1)
  t = (1 - weight) * np.tanh(np.maximum(v - h[:, None], 0) / (2 * tau2)).mean(1) + weight
  total = (1 - prior) * f + prior * t
  by_f = (1 - prior) / total / len(h)
  if link == "share":
    by_f *= prior * t / total
  d_negative = np.zeros(len(g))
  for i in range(0, len(h), rows):
    part = slice(i, i + rows)
    d_negative += by_f[part] @ np.clip(1 - (h[part, None] - g) / tau1, 0, 1) * 2 / (tau1 * len(g))
  risk = (1 - prior) * f / total if link == "share" else np.log1p((1 - prior) * f / (prior * t))
  return risk.mean(), by_f * slope, d_negative


@functools.cache
def _value_and_gradient(algorithm, link="share"):
  def loss(positive, negative, v, prior, tau1):
    options = {"algorithm": algorithm, "link": link}
    return soprc_loss(positive, negative, v, prior=prior, tau1=tau1, **options)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def _assert_near(got, want, tolerance=_TOLERANCE):
  """Checks the loss to an absolute error and the gradients to a relative error."""
  assert abs(float(got[0]) - want[0]) < tolerance
  for found, wanted in zip(got[1], want[1:]):
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


def _assert_any_algorithm(offset, spread, tau1, dtype, algorithms, counts):
  """Checks loss and gradients against float64, for scores that are rounded around an offset."""
  rng = np.random.default_rng(1)
  positive, negative, v = (
    (offset + spread * rng.normal(mean, 1.0, count)).astype(dtype)
    for mean, count in ((1.0, counts[0]), (0.0, counts[1]), (1.0, M))
  )
  tau1 = float(np.float32(tau1))
  _, *want = _in_float64(positive, negative, v, 0.01, tau1)
  for algorithm in algorithms:
    with jax.enable_x64(dtype == np.float64):
      _, got = _value_and_gradient(algorithm)(positive, negative, v, 0.01, tau1)
    for found, wanted in zip(got, want):
      assert found.dtype == dtype
      np.testing.assert_allclose(
        found,
        wanted,
        rtol=0,
        atol=_TOLERANCE * np.abs(wanted).max(),
        err_msg=f"{algorithm} {tau1=} {spread=}",
      )


class SortedTest(parameterized.TestCase):
  @parameterized.product(
    case=list(_cases()), prior_and_link=((0.01, "share"), (0.5, "share"), (1e-6, "log"))
  )
  def test_equals_float64(self, case, prior_and_link):
    prior, link = prior_and_link
    positive, negative, tau1 = _cases()[case]
    v = interpolate_scores(positive, num_points=M)
    got = _value_and_gradient("sorted", link)(positive, negative, v, prior, tau1)
    _assert_near(got, _in_float64(positive, negative, v, prior, tau1, link=link))

  def test_one_small_term_beside_many_large_ones(self):
    # Two thresholds with the same value in reach of the first. The second also has 100,000 values
    # above it.
    values = np.float32(np.r_[np.linspace(0.5, 0.9, 100_000), -0.8001])
    where = np.ones(len(values), bool)
    thresholds = np.float32([-0.7002, -0.701])
    tau = jnp.float32(0.1)
    window = piecewise.PiecewisePolynomial(
      piecewise.ONE_SIDED_HUBER.pieces[:1], slope_is_linear=True
    )
    got = piecewise.piecewise_sum(window, thresholds, values, where, tau)
    u = 1 + (np.float64(values[-1]) - np.float64(thresholds)) / np.float64(np.float32(0.1))
    np.testing.assert_allclose(
      got, u**2, rtol=2e-3
    )  # u is 1e-4: its own rounding; prefix sums would give -1 to 1

  @parameterized.parameters(1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513)
  def test_any_number_of_values(self, count):
    rng = np.random.default_rng(count)
    thresholds, values = np.float32(rng.normal(size=5)), np.float32(rng.normal(size=count))
    where = rng.random(count) < 0.8
    got = piecewise.piecewise_sum(
      piecewise.ONE_SIDED_HUBER, thresholds, values, where, jnp.float32(0.5)
    )
    x = (np.float64(values)[where] - np.float64(thresholds)[:, None]) / 0.5
    want = np.where(x > 0, 1 + 2 * x, np.square(np.maximum(1 + x, 0))).sum(1)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)

  @parameterized.parameters(False, True)
  def test_ap_loss(self, tpr_gradient):
    rng = np.random.default_rng(1)
    # On a grid, so that equal scores are frequent. tau2 is wide, so that the middle of l2 matters.
    positive, negative = (np.float32(rng.integers(-40, 60, n) / 64) for n in (P, N))
    where = {"positive_where": rng.random(P) < 0.8, "negative_where": rng.random(N) < 0.8}

    def loss(algorithm):
      def value(positive, negative, tau1, tau2):
        options = {"tau1": tau1, "tau2": tau2, "tpr_gradient": tpr_gradient, "algorithm": algorithm}
        return ap_loss(positive, negative, **options, **where)

      return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))(positive, negative, 0.3, 0.05)

    (got, got_gradients), (want, want_gradients) = loss("sorted"), loss("dense")
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for found, wanted in zip(got_gradients, want_gradients):
      np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())

  def test_no_slope_where_a_score_equals_v(self):
    rng = np.random.default_rng(5)
    positive, negative, v = (np.float32(rng.integers(-8, 12, n) / 16) for n in (P, N, M))

    def gradient(algorithm):
      options = {
        "prior": 0.3,
        "tau1": 0.3,
        "tau2": 0.05,
        "tpr_gradient": True,
        "algorithm": algorithm,
      }
      return jax.jit(jax.grad(lambda h: soprc_loss(h, negative, v, **options)))(positive)

    want = gradient("dense")
    np.testing.assert_allclose(gradient("sorted"), want, atol=1e-5 * np.abs(want).max())

  @parameterized.parameters("sorted", "auto")
  def test_f58_without_dtype_promotion(self, algorithm):
    positive, negative, tau1 = _cases(*_LONG)["typical"]
    arguments = (jnp.bfloat16(positive), negative, np.float64(negative[:M]), 0.01, tau1)
    with jax.numpy_dtype_promotion("strict"):
      got = jax.eval_shape(_value_and_gradient(algorithm), *arguments)
    assert got[0].dtype == np.float32
    assert [gradient.dtype for gradient in got[1]] == [jnp.bfloat16, np.float32]

  def test_lists_masks_and_devices(self):
    rng = np.random.default_rng(2)
    h, g, v = (np.float32(rng.uniform(-1, 1, (2, 3, n))) for n in (P, 90, M))
    masks = rng.random(h.shape) < 0.7, rng.random(g.shape) < 0.7
    masks[0][0, 1], masks[1][1, 2] = (
      False,
      False,
    )  # a list without a positive, another one without a negative
    h, g = np.where(masks[0], h, np.nan), np.where(masks[1], g, np.nan)

    def loss(h, g, v, positive_where, negative_where, algorithm, **options):
      where = {"positive_where": positive_where, "negative_where": negative_where}
      return soprc_loss(h, g, v, prior=0.1, algorithm=algorithm, **where, **options)

    want = jax.jit(jax.value_and_grad(functools.partial(loss, algorithm="dense"), argnums=(0, 1)))(
      h, g, v, *masks
    )
    by_device = jax.pmap(
      jax.value_and_grad(
        functools.partial(loss, algorithm="sorted", axis_name="i"), argnums=(0, 1)
      ),
      axis_name="i",
    )(h, g, v, *masks)
    per_list = jax.jit(
      jax.vmap(jax.vmap(functools.partial(loss, algorithm="sorted", reduce_fn=None)))
    )(h, g, v, *masks)
    np.testing.assert_allclose(by_device[0], np.repeat(want[0], 2), rtol=1e-6)
    np.testing.assert_allclose(
      per_list, loss(h, g, v, *masks, algorithm="dense", reduce_fn=None), rtol=1e-5, atol=1e-7
    )
    for on_devices, wanted in zip(by_device[1], want[1]):
      scale = np.abs(wanted).max()
      # Both devices have the loss of all lists, so its sum over them has twice the gradient.
      np.testing.assert_allclose(on_devices / 2, wanted, atol=1e-5 * scale)

  @parameterized.product(offset=(0.0, 1.0, 10.0, 1e3, 1e4, -1e3), dtype=(np.float32, np.float64))
  def test_f48_gradients_equal_all_pairs_at_any_offset(self, offset, dtype):
    for tau1, spread in itertools.product((1e-4, 1e-3, 1e-2, 0.1, 1.0), (1e-3, 1e-2, 0.3)):
      # Widths far above and far below 1e-3, the spacing of float32 numbers at 1e4.
      _assert_any_algorithm(offset, spread, tau1, dtype, ("sorted", "dense"), (50, 700))

  @parameterized.parameters(0.0, 10.0, 1e3, -1e3)
  def test_f48_chosen_by_itself(self, offset):
    for tau1 in (1e-3, 0.1):
      assert piecewise.is_faster(*_LONG)
      _assert_any_algorithm(offset, 0.01, tau1, np.float32, ("auto",), _LONG)

  @parameterized.parameters(1e38, 3e38, _LARGEST, 1e-38, 0.0)
  def test_finite_for_any_finite_score_with_the_log_link(self, size):
    rng = np.random.default_rng(3)
    positive, negative = (np.float32(size * rng.choice([-1, 0, 1], n)) for n in (P, N))
    got = _value_and_gradient("sorted", "log")(
      positive, negative, np.zeros(M, np.float32), 0.01, 0.1
    )
    assert got[0] >= 0
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(got))

  @parameterized.parameters(1e38, 3e38, _LARGEST, 1e-38, 0.0)
  def test_finite_for_any_finite_score(self, size):
    rng = np.random.default_rng(3)
    positive, negative = (np.float32(size * rng.choice([-1, 0, 1], n)) for n in (P, N))
    v = np.zeros(M, np.float32)
    loss, gradients = _value_and_gradient("sorted")(positive, negative, v, 0.01, 0.1)
    assert 0 <= loss <= 1
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_allclose(
      loss, _value_and_gradient("dense")(positive, negative, v, 0.01, 0.1)[0], rtol=1e-5
    )

  @parameterized.parameters(0, 1)
  def test_nan_is_not_hidden(self, argument):
    scores = list(_cases()["typical"][:2])
    scores[argument] = np.where(np.arange(len(scores[argument])) == 7, np.nan, scores[argument])
    loss, _ = _value_and_gradient("sorted")(*scores, np.zeros(M, np.float32), 0.01, 0.1)
    assert np.isnan(loss)

  def test_tau_as_array_is_refused(self):
    positive, negative, tau1 = _cases()["typical"]
    with self.assertRaisesRegex(
      ValueError, r"algorithm='sorted' needs scalar taus, got one of shape \(700,\)"
    ):
      soprc_loss(
        positive, negative, negative[:M], prior=0.1, tau1=np.full(N, tau1), algorithm="sorted"
      )
    with self.assertRaisesRegex(ValueError, "algorithm must be one of .*got 'fast'"):
      soprc_loss(positive, negative, negative[:M], prior=0.1, algorithm="fast")

  def test_float64_keeps_its_digits(self):
    with jax.enable_x64(True):
      positive, negative, tau1 = _cases()["typical"]
      positive, negative, v = (
        jnp.asarray(a, jnp.float64) for a in (positive, negative, negative[:M])
      )
      got, want = (
        jax.jit(
          jax.value_and_grad(
            lambda h, a=a: soprc_loss(h, negative, v, prior=0.1, tau1=tau1, algorithm=a)
          )
        )(positive)
        for a in ("sorted", "dense")
      )
      np.testing.assert_allclose(got[0], want[0], rtol=1e-12)
      np.testing.assert_allclose(got[1], want[1], rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["typical", "few in reach", "logits"])
def test_a_million_negatives_equal_float64(case):
  positive, negative, tau1 = _cases(1000, 10**6)[case]
  v = interpolate_scores(positive, num_points=100)
  got = _value_and_gradient("sorted")(positive, negative, v, 0.01, tau1)
  _assert_near(got, _in_float64(positive, negative, v, 0.01, tau1))


def test_ten_million_negatives_fit():
  plan = _compiled(10**4, 10**7).memory_analysis()
  assert plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes < 2**30


def _compiled(num_positives, num_negatives, **options):
  """Returns XLA's program for loss and gradient."""
  shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (num_positives, num_negatives, 100)]
  loss = jax.value_and_grad(
    lambda h, g, v: soprc_loss(h, g, v, prior=0.01, **options), argnums=(0, 1)
  )
  return jax.jit(loss).lower(*shapes).compile()


def test_chosen_for_long_lists_with_linear_memory():
  counts = 2**14, 2**18
  plans = [_compiled(256, count) for count in counts]
  assert all("sort" in plan.as_text() for plan in plans)
  memory = [plan.memory_analysis().temp_size_in_bytes for plan in plans]
  flops = [plan.cost_analysis()["flops"] for plan in plans]
  growth = counts[1] / counts[0]
  assert memory[1] < 1.1 * growth * memory[0]
  assert memory[1] < 64 * counts[1]  # bytes per negative; a block of pairs alone has 64 MiB
  assert flops[1] < 1.5 * growth * flops[0]  # n log n


def test_short_lists_stay_dense():
  assert "sort" not in _compiled(8, 1000).as_text()
  assert "sort" in _compiled(8, 1000, algorithm="sorted").as_text()


@pytest.mark.parametrize("loss_fn", [losses.triplet_loss, losses.auroc_loss])
def test_retrieval_losses_of_long_lists(loss_fn, monkeypatch):
  rng = np.random.default_rng(4)
  embeddings = rng.normal(size=(40, 8))
  embeddings = np.float32(embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True))
  labels, where = rng.integers(0, 3, 40), rng.random(40) < 0.9
  value_and_gradient = jax.value_and_grad(loss_fn)
  want = jax.jit(lambda e: value_and_gradient(e, labels, where=where))(embeddings)
  calls = []

  def sums(*args):
    calls.append(args)
    return original(*args)

  original = piecewise.sums_of_lists
  monkeypatch.setattr(piecewise, "is_faster", lambda *sizes: True)
  monkeypatch.setattr(piecewise, "sums_of_lists", sums)
  got = jax.jit(lambda e: value_and_gradient(e, labels, where=where))(embeddings)
  assert calls
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], want[1], atol=1e-5 * np.abs(want[1]).max())
