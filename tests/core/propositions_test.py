"""Tests Props. 1 and 2 by simulation with fixed keys.

Each tolerance is a stated number of standard errors of the simulation.
"""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import ap_loss, interpolate_scores, score_ema, soprc_loss

# 4.5 standard errors: a false alarm in about one of 150,000 comparisons. The keys are fixed.
_ERRORS = 4.5


class Proposition1Test(chex.TestCase):
  """Tests mean and variance of v after T steps with a fixed model.

  The model's batches are one of 8 lists of 4 positive scores, drawn uniformly, so that E phi and
  Var phi are exact. One tracker with 4000 rows is 4000 independent chains: every step gives each
  row one list.
  """

  num_chains, num_points, beta = 4000, 5, 0.2

  def simulate(self, steps, initial_v):
    rng = np.random.default_rng(0)
    lists = np.sort(rng.uniform(-1, 1, (8, 4)), axis=1).astype(np.float32)
    phi = np.asarray(interpolate_scores(lists, num_points=self.num_points), np.float64)
    tracker = score_ema(self.num_chains, self.num_points, self.beta, initial_v=initial_v)

    @jax.jit
    def run(key, ids):
      def body(state, key):
        drawn = jnp.asarray(lists)[jax.random.randint(key, (self.num_chains,), 0, len(lists))]
        return tracker.update(None, state, positive_scores=drawn, list_ids=ids)[1], None

      return jax.lax.scan(body, tracker.init(None), jax.random.split(key, steps))[0].v

    return (
      np.asarray(run(jax.random.key(7), jnp.arange(self.num_chains)), np.float64),
      phi.mean(axis=0),
      phi.var(axis=0),
    )

  def check(self, v, mean, variance):
    """Checks the sample mean and sample variance of each point against the claimed values. The
    tolerance is a number of standard errors.
    """
    error = np.sqrt(variance / self.num_chains)
    np.testing.assert_array_less(np.abs(v.mean(axis=0) - mean), _ERRORS * error)
    # The sample variance has variance (fourth central moment - variance^2) / n.
    fourth = np.mean((v - v.mean(axis=0)) ** 4, axis=0)
    error = np.sqrt((fourth - v.var(axis=0) ** 2) / self.num_chains)
    np.testing.assert_array_less(np.abs(v.var(axis=0, ddof=1) - variance), _ERRORS * error)

  @parameterized.named_parameters(("one", 1), ("few", 4), ("many", 25))
  def test_explicit_start(self, steps):
    """Checks the mean and the variance of v after an explicit start. E v = E phi + (1 - b)^T (v_1 -
    E phi). Var v = Var phi b / (2 - b) (1 - (1 - b)^2T), below the bound of the paper.
    """
    start = np.arange(self.num_points) / self.num_points
    v, mean, variance = self.simulate(steps, start)
    q, limit = (1 - self.beta) ** steps, self.beta / (2 - self.beta)
    self.check(v, mean + q * (start - mean), variance * limit * (1 - q**2))
    # The bound as printed. At T = 25 it is attained up to the sampling error of the variance (2
    # sqrt(2 / n)).
    np.testing.assert_array_less(
      v.var(axis=0), variance * limit * (1 + _ERRORS * np.sqrt(2 / self.num_chains))
    )

  @parameterized.named_parameters(("one", 1), ("few", 4), ("many", 25))
  def test_erratum_9_debiased_start(self, steps):
    """Checks the mean and the variance of v after a debiased start. E v = E phi from the first
    step. Var v = Var phi b / (2 - b) (1 + q) / (1 - q) with q = (1 - b)^T.
    """
    v, mean, variance = self.simulate(steps, None)
    q, limit = (1 - self.beta) ** steps, self.beta / (2 - self.beta)
    factor = limit * (1 + q) / (1 - q)
    self.check(v, mean, variance * factor)
    if steps == 1:
      self.assertAlmostEqual(factor, 1.0)  # v is phi
    self.assertGreater(
      factor, limit
    )  # the price: more variance than the bound of Prop. 1, which needs w = 1

  def test_a_smaller_beta_concentrates(self):
    """Checks the remark under Prop. 1."""
    spread = []
    for beta in (0.5, 0.1):
      self.beta = beta
      v, _, variance = self.simulate(60, None)
      spread.append(np.mean(v.var(axis=0) / variance))
    np.testing.assert_allclose(spread, [0.5 / 1.5, 0.1 / 1.9], rtol=0.1)


class Proposition2Test(chex.TestCase):
  """Tests means over batches with different shares of positives pi_0.

  The model is fixed, scores are binormal and pi = 0.2.

  Data: 40 positives and 160 negatives. v = all positive scores and the true prior, so f is the
  SOPRC loss of the whole data set (Eq. 4 with M = N+). A batch draws n+ and n- scores with
  replacement.
  """

  num_batches = 1500
  options = {"tau1": 0.3, "tau2": 0.01}  # noqa: RUF012

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(1)
    self.positive = rng.normal(0.3, 0.3, 40).astype(np.float32)
    self.negative = rng.normal(-0.1, 0.3, 160).astype(np.float32)
    self.prior = 40 / 200
    self.risk = self.full_risk(self.prior)

  def full_risk(self, prior):
    return float(
      soprc_loss(
        self.positive, self.negative, self.positive, prior=prior, self_weight=0.0, **self.options
      )
    )

  def batches(self, num_positives, num_negatives, seed=0):
    """Returns SOPRC and AP losses of every batch, ``[num_batches]`` each, in one compiled call."""

    @jax.jit
    def run(key):
      keys = jax.random.split(key)
      positive = jax.random.choice(keys[0], self.positive, (self.num_batches, num_positives))
      negative = jax.random.choice(keys[1], self.negative, (self.num_batches, num_negatives))
      v = jnp.broadcast_to(self.positive, (self.num_batches, len(self.positive)))
      soprc = soprc_loss(
        positive, negative, v, prior=self.prior, self_weight=0.0, reduce_fn=None, **self.options
      )
      ap = ap_loss(positive, negative, self_weight=0.0, reduce_fn=None, **self.options)
      return soprc, ap

    return [np.asarray(losses, np.float64) for losses in run(jax.random.key(seed))]

  def curvature_bias(self, num_negatives):
    """Returns the second-order bias of the estimator (kappa_1^2 / n- of Prop. 2). sigma(F) is
    concave and F is a mean of n- draws.
    """
    h, g = self.positive.astype(np.float64)[:, None], self.negative.astype(np.float64)[None, :]
    margins = (h - g) / self.options["tau1"]
    l1 = np.where(margins < 0, 1 - 2 * margins, np.maximum(1 - margins, 0) ** 2)
    rates = np.tanh(np.maximum(h.T - h, 0) / (2 * self.options["tau2"])).mean(axis=1)
    part, rest, slope = (1 - self.prior) * l1.mean(axis=1), self.prior * rates, 1 - self.prior
    second = -2 * rest * slope**2 / np.maximum(part + rest, 1e-12) ** 3
    return float(np.mean(0.5 * second * l1.var(axis=1) / num_negatives))

  def test_f34_soprc_does_not_move_with_the_share_of_positives(self):
    """Checks that the mean is the same for every n+ at equal numbers of negatives. The equality is
    exact. Here it is checked within the standard errors.
    """
    means, errors = [], []
    for i, num_positives in enumerate((2, 10, 50, 100)):  # pi_0 from 0.04 to 0.67
      soprc, _ = self.batches(num_positives, 50, seed=i)
      means.append(soprc.mean())
      errors.append(soprc.std(ddof=1) / np.sqrt(self.num_batches))
    for i in range(3):
      self.assertLess(abs(means[i] - means[3]), _ERRORS * np.hypot(errors[i], errors[3]))
    # The mean is f plus the second-order bias of the curvature, which vanishes with n-. Half of
    # that bias is allowed for higher orders.
    bias = self.curvature_bias(50)
    for mean, error in zip(means, errors, strict=True):
      self.assertLess(abs(mean - self.risk - bias), _ERRORS * error + 0.5 * abs(bias))

  @parameterized.named_parameters(
    ("scarce", 20), ("as_in_the_data", 40), ("frequent", 100), ("very_frequent", 150)
  )
  def test_erratum_9_ap_loss_moves_against_the_share_of_positives(self, num_positives):
    """Checks batches of 200. SOPRC stays at f. The AP loss converges to f at prior pi_0, which is
    too small where pi_0 > pi.
    """
    soprc, ap = self.batches(num_positives, 200 - num_positives, seed=num_positives)
    soprc_error, ap_error = (
      losses.std(ddof=1) / np.sqrt(self.num_batches) for losses in (soprc, ap)
    )
    bias = abs(self.curvature_bias(200 - num_positives))
    self.assertLess(abs(soprc.mean() - self.risk), _ERRORS * soprc_error + 2 * bias)
    share = num_positives / 200
    moved = self.full_risk(share)
    # The AP loss estimates T from n+ draws too. Its relative error is of order 1 / n+ of its limit.
    self.assertLess(abs(ap.mean() - moved), _ERRORS * ap_error + 2 * bias + moved / num_positives)
    if share != self.prior:
      gap = (ap.mean() - self.risk) * np.sign(self.prior - share)
      self.assertGreater(gap, _ERRORS * ap_error)  # the sign of pi - pi_0
      self.assertGreater(gap, 5 * abs(soprc.mean() - self.risk))

  def test_erratum_9_both_converge_to_the_surrogate_risk(self):
    """Checks the limit, which is not 1 - AUPRC. f bounds 1 - AUPRC from above (docstring of
    soprc_loss).
    """
    scores = np.concatenate([self.positive, self.negative]).astype(np.float64)
    precision = [
      np.mean(np.arange(200)[scores >= score] < 40) for score in self.positive.astype(np.float64)
    ]
    self.assertGreater(self.risk, 1 - np.mean(precision) + 0.05)
