"""Simulates estimation and interpolation errors (Fig. 1, Appendix B.2 and Props. 1 to 3).

A population of scores represents the data set. Batches are drawn from it with replacement. Their
share of positives pi_0 can differ from that of the population. All repetitions run in one compiled
call.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from experiments.simulate import score_memory
from soprc_jax import estimators, interpolation, metrics, surrogates, tracking
from soprc_jax._internal import blockwise, masks

# M, except in the study of v itself.
_POINTS = 100

# SOPRC with the v of Eq. 10, SOPRC with T from all positives, which no algorithm has, and the AP
# loss, whose T and prior are those of the batch.
ESTIMATORS = ("SOPRC", "all positives", "AP")


class Distribution(NamedTuple):
  """Distributions of the scores of positives and negatives.

  Attributes:
    title: title in plots.
    positive: ``(key, shape) -> scores``.
    negative: ``(key, shape) -> scores``.
    quantiles: ``shares in (0, 1) -> scores``, the quantiles of the positives.
    densities: ``x -> (density of positives, density of negatives)``.
    support: interval that plots show.
  """

  title: str
  positive: Callable[[jax.Array, tuple[int, ...]], jax.Array]
  negative: Callable[[jax.Array, tuple[int, ...]], jax.Array]
  quantiles: Callable[[np.ndarray], np.ndarray]
  densities: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
  support: tuple[float, float]


def _normal_density(x: np.ndarray, mean: float) -> np.ndarray:
  return np.exp(-((x - mean) ** 2) / 2) / np.sqrt(2 * np.pi)


def _beta_density(x: np.ndarray, a: int, b: int) -> np.ndarray:
  # 30 = 1 / B(2, 5): the only pair of parameters here, in both orders.
  return np.where((x >= 0) & (x <= 1), 30 * np.abs(x) ** (a - 1) * np.abs(1 - x) ** (b - 1), 0)


def _uniform_density(x: np.ndarray, low: float, high: float) -> np.ndarray:
  return np.where((x >= low) & (x <= high), 1 / (high - low), 0)


DISTRIBUTIONS = {
  "binormal": Distribution(
    "binormal: N(1, 1) and N(0, 1)",
    lambda key, shape: 1 + jax.random.normal(key, shape),
    lambda key, shape: jax.random.normal(key, shape),
    lambda shares: 1 + scipy.special.ndtri(shares),
    lambda x: (_normal_density(x, 1), _normal_density(x, 0)),
    (-4, 5),
  ),
  "bibeta": Distribution(
    "bibeta: B(5, 2) and B(2, 5)",
    lambda key, shape: jax.random.beta(key, 5, 2, shape),
    lambda key, shape: jax.random.beta(key, 2, 5, shape),
    lambda shares: scipy.special.betaincinv(5, 2, shares),
    lambda x: (_beta_density(x, 5, 2), _beta_density(x, 2, 5)),
    (-0.1, 1.1),
  ),
  "uniform": Distribution(
    "offset uniform: U(0.5, 1.5) and U(0, 1)",
    lambda key, shape: jax.random.uniform(key, shape, minval=0.5, maxval=1.5),
    lambda key, shape: jax.random.uniform(key, shape),
    lambda shares: 0.5 + shares,
    lambda x: (_uniform_density(x, 0.5, 1.5), _uniform_density(x, 0, 1)),
    (-0.1, 1.6),
  ),
}


class Population(NamedTuple):
  """All scores of a data set, ascending.

  Attributes:
    positive: ``[N+]``.
    negative: ``[N-]``.
  """

  positive: np.ndarray
  negative: np.ndarray

  @property
  def prior(self) -> float:
    """Returns the share pi of positives."""
    return len(self.positive) / (len(self.positive) + len(self.negative))


def draw_population(
  name: str, *, size: int = 100_000, prior: float = 0.1, seed: int = 0
) -> Population:
  """Draws ``size`` scores by `DISTRIBUTIONS`, a share ``prior`` of them positive."""
  keys = jax.random.split(jax.random.key(seed))
  num_positives = round(size * prior)
  positive = DISTRIBUTIONS[name].positive(keys[0], (num_positives,))
  negative = DISTRIBUTIONS[name].negative(keys[1], (size - num_positives,))
  return Population(np.sort(np.asarray(positive)), np.sort(np.asarray(negative)))


class Batch(NamedTuple):
  """Sizes of a batch.

  Attributes:
    positives: n+.
    negatives: n-.
  """

  positives: int
  negatives: int


def batch(size: int, share: float) -> Batch:
  """Returns a batch of ``size`` with a share pi_0 of positives, at least one.

  >>> batch(500, 0.02)
  Batch(positives=10, negatives=490)
  """
  positives = max(1, round(size * share))
  return Batch(positives, size - positives)


def zero_one_risk(population: Population) -> float:
  """Computes 1 - AUPRC of the population (Eq. 2)."""
  scores = np.concatenate([population.positive, population.negative])
  labels = np.arange(len(scores)) < len(population.positive)
  return 1 - float(metrics.auprc(scores, labels.astype(np.int32)))


class Batches(NamedTuple):
  """Batches of the scores of a fixed model.

  Attributes:
    rows: ``[R, n+]`` positions of the positives in the population.
    positive: ``[R, n+]``.
    negative: ``[R, n-]``.
    v: ``[R, M]``, v of Eq. 10 after each batch.
  """

  rows: jax.Array
  positive: jax.Array
  negative: jax.Array
  v: jax.Array


def draw_batches(
  population: Population, sizes: Batch, *, repetitions: int, beta: float, visits: int, seed: int
) -> Batches:
  """Draws independent batches, each the last of ``visits`` batches that v has followed.

  By Prop. 1 v is a mean of the phi of all visits, with weights ``beta (1 - beta)^age``, which the
  debiased start scales to a sum of 1. phi is linear in the sorted scores, so these are averaged.
  """
  rng = np.random.default_rng(seed)
  weights = beta * (1 - beta) ** np.arange(visits)
  rows = rng.integers(len(population.positive), size=(repetitions, sizes.positives))
  negative = rng.choice(population.negative, (repetitions, sizes.negatives))
  positive = population.positive[rows]
  average = np.zeros(rows.shape)
  for age, weight in enumerate(weights / weights.sum()):
    drawn = positive if age == 0 else rng.choice(population.positive, rows.shape)
    average += weight * np.sort(drawn, axis=-1)
  v = interpolation.interpolate_scores(average, num_points=_POINTS)
  return Batches(jnp.asarray(rows), jnp.asarray(positive), jnp.asarray(negative), v)


def zero_one_errors(
  population: Population, batches: Batches, *, risk: float
) -> dict[str, np.ndarray]:
  """Computes the errors against ``risk`` of the estimators with l_{0,1} in place of surrogates.

  Returns:
    ``[R]`` for each of `ESTIMATORS`.
  """
  found = _zero_one_estimates(batches, jnp.asarray(population.positive), population.prior)
  return {name: np.asarray(found[name], np.float64) - risk for name in ESTIMATORS}


@jax.jit
def _zero_one_estimates(batches: Batches, positives: jax.Array, prior: Any) -> dict[str, jax.Array]:
  own_prior = batches.positive.shape[1] / (batches.positive.shape[1] + batches.negative.shape[1])

  def estimate(positive: jax.Array, negative: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
    fpr = _share_at_least(jnp.sort(negative), positive)
    own_tpr = _share_at_least(jnp.sort(positive), positive)
    return {
      "SOPRC": _mean_risk(fpr, _share_at_least(v, positive), prior),
      "all positives": _mean_risk(fpr, _share_at_least(positives, positive), prior),
      "AP": _mean_risk(fpr, own_tpr, own_prior),
    }

  return jax.vmap(estimate)(batches.positive, batches.negative, batches.v)


def surrogate_risk(population: Population, *, tau1: float, tau2: float) -> float:
  """Computes the risk f of Eq. 4, which the estimators with surrogates estimate."""
  loss = jax.jit(
    functools.partial(
      estimators.soprc_loss, prior=population.prior, self_weight=0.0, tau1=tau1, tau2=tau2
    )
  )
  return float(loss(population.positive, population.negative, population.positive))


def surrogate_errors(
  population: Population, batches: Batches, *, risk: float, tau1: float, tau2: float
) -> dict[str, np.ndarray]:
  """Computes the errors like `zero_one_errors`, with l1 and l2 of Eq. 7.

  ``risk`` is the `surrogate_risk`.
  """
  tpr = _surrogate_tpr(jnp.asarray(population.positive), tau2)[batches.rows]
  found = _surrogate_estimates(batches, tpr, population.prior, tau1, tau2)
  return {name: np.asarray(found[name], np.float64) - risk for name in ESTIMATORS}


@jax.jit
def _surrogate_tpr(positives: jax.Array, tau2: Any) -> jax.Array:
  """Returns T of each positive, from all of them."""

  def share(score: jax.Array) -> jax.Array:
    return jnp.mean(surrogates.one_sided_sigmoid(score - positives, tau=tau2))

  return blockwise.map_rows(share, (positives,), len(positives))


@jax.jit
def _surrogate_estimates(
  batches: Batches, tpr: jax.Array, prior: Any, tau1: Any, tau2: Any
) -> dict[str, jax.Array]:
  options = {"tau1": tau1, "tau2": tau2, "self_weight": 0.0}

  def estimate(
    positive: jax.Array, negative: jax.Array, v: jax.Array, tpr: jax.Array
  ) -> dict[str, jax.Array]:
    margins = positive[:, None] - negative[None]
    fpr = jnp.mean(surrogates.one_sided_huber(margins, tau=tau1), axis=1)
    return {
      "SOPRC": estimators.soprc_loss(positive, negative, v, prior=prior, **options),
      "all positives": _mean_risk(fpr, tpr, prior),
      "AP": estimators.ap_loss(positive, negative, **options),
    }

  rows = batches.positive, batches.negative, batches.v, tpr
  return blockwise.map_rows(estimate, rows, rows[0].shape[1] * rows[1].shape[1])


class InterpolationErrors(NamedTuple):
  """Absolute errors of interpolated scores phi against the quantiles of the distribution.

  Attributes:
    of_mean: error of the mean of phi over all draws, averaged over the positions. It is exact.
    of_one: error of one draw of phi, averaged over the positions and over random draws.
    at_quantiles: largest error between the 10% and the 90% quantile (at 10,000 positions) if the
      scores lie at the quantiles (i - 1/2) / n+, as Prop. 3 assumes.
  """

  of_mean: float
  of_one: float
  at_quantiles: float


def interpolation_errors(
  name: str, num_positives: int, *, repetitions: int, seed: int
) -> InterpolationErrors:
  """Computes errors of phi from ``num_positives`` scores (Alg. 2) of a distribution."""
  distribution = DISTRIBUTIONS[name]
  positions, fine = ((np.arange(count) + 0.5) / count for count in (_POINTS, 100 * _POINTS))

  def errors(scores: Any, positions: np.ndarray) -> jax.Array:
    phi = interpolation.interpolate_scores(scores, num_points=len(positions))
    return jnp.abs(phi - distribution.quantiles(positions).astype(np.float32))

  # phi is linear in the sorted scores, so its mean is phi of their means.
  mean = expected_order_statistics(distribution.quantiles, num_positives)
  drawn = distribution.positive(jax.random.key(seed), (repetitions, num_positives))
  ideal = distribution.quantiles((np.arange(num_positives) + 0.5) / num_positives)
  return InterpolationErrors(
    float(jnp.mean(errors(mean, positions))),
    float(jnp.mean(jax.lax.map(lambda row: jnp.mean(errors(row, positions)), drawn))),
    float(jnp.max(errors(ideal, fine)[(fine >= 0.1) & (fine <= 0.9)])),
  )


def expected_order_statistics(
  quantiles: Callable[[np.ndarray], np.ndarray], count: int
) -> np.ndarray:
  """Computes the means ``[n]`` of n sorted draws from a distribution, given by its quantiles.

  The k-th is the integral of the quantiles over the density of Beta(k, n + 1 - k). The variable
  of integration is the normal score, where the trapezoidal rule is accurate.

  >>> print(expected_order_statistics(lambda shares: shares, 3).round(6))
  [0.25 0.5  0.75]
  """
  score = np.linspace(-8, 8, 4001)
  below, above = scipy.special.log_ndtr(score), scipy.special.log_ndtr(-score)
  log_density = -(score**2) / 2 - np.log(2 * np.pi) / 2
  k = np.arange(1, count + 1)[:, None]
  log_beta = scipy.special.betaln(k, count + 1 - k)
  weights = np.exp((k - 1) * below + (count - k) * above + log_density - log_beta)
  return weights @ quantiles(np.exp(below)) * (score[1] - score[0])


class Tracked(NamedTuple):
  """Mean and variance of v after T steps of Eq. 10, compared with Prop. 1.

  They are averaged over the positions.

  Attributes:
    steps: T.
    bias: mean of v minus E phi, measured.
    expected_bias: (1 - beta)^T (v_1 - E phi).
    variance: variance of v over that of phi, measured.
    expected_variance: beta / (2 - beta) (1 - (1 - beta)^(2T)) for a given start. For the debiased
      start the last bracket is (1 + q) / (1 - q), q = (1 - beta)^T.
  """

  steps: int
  bias: float
  expected_bias: float
  variance: float
  expected_variance: float


def tracked(
  population: Population,
  num_positives: int,
  *,
  beta: float,
  steps: int,
  initial_v: float | None,
  chains: int,
  seed: int,
  num_points: int = 10,
) -> Tracked:
  """Tests Prop. 1 by ``chains`` independent trackers that see batches of a fixed model.

  Args:
    population: scores.
    num_positives: n+ of each batch.
    beta: beta of Eq. 10.
    steps: T.
    initial_v: v_1 at every position. None starts debiased, so that the first phi fills v.
    chains: number of trackers.
    seed: seed of the batches.
    num_points: M.
  """
  start = None if initial_v is None else np.full(num_points, initial_v)
  state = tracking.score_ema(chains, num_points, beta, initial_v=start).init(None)
  v, phis = _track(
    jax.random.key(seed), jnp.asarray(population.positive), state, beta, num_positives, steps
  )
  phi_mean, phi_variance = jnp.mean(phis, axis=(0, 1)), jnp.var(phis, axis=(0, 1))
  q, limit = (1 - beta) ** steps, beta / (2 - beta)
  factor = limit * ((1 + q) / (1 - q) if initial_v is None else 1 - q**2)
  away = 0.0 if initial_v is None else float(jnp.mean(initial_v - phi_mean))
  return Tracked(
    steps,
    bias=float(jnp.mean(jnp.mean(v, axis=0) - phi_mean)),
    expected_bias=q * away,
    variance=float(jnp.mean(jnp.var(v, axis=0)) / jnp.mean(phi_variance)),
    expected_variance=factor,
  )


@functools.partial(jax.jit, static_argnames=("num_positives", "steps"))
def _track(
  key: jax.Array,
  positives: jax.Array,
  state: tracking.ScoreEmaState,
  beta: Any,
  num_positives: int,
  steps: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns ``v [chains, M]`` after all steps from a state, and each step's ``phi``.

  The shape of all phi is ``[T, chains, M]``.
  """
  chains, num_points = state.v.shape
  tracker = tracking.score_ema(
    chains, num_points, lambda count: beta
  )  # a number would compile again for each value

  def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    drawn = positives[jax.random.randint(key, (chains, num_positives), 0, len(positives))]
    _, state = tracker.update(None, state, positive_scores=drawn, list_ids=jnp.arange(chains))
    return state, interpolation.interpolate_scores(drawn, num_points=num_points)

  state, phis = jax.lax.scan(step, state, jax.random.split(key, steps))
  return state.v, phis


class Settings(NamedTuple):
  """The settings of `run`.

  Attributes:
    population: number of scores of a data set.
    prior: share pi of positives in it.
    shares: shares pi_0 of positives in the batches.
    batch_sizes: values of n+ + n-.
    repetitions: number of batches of each kind, and of draws of phi.
    tau1, tau2: widths of the surrogates.
    beta: beta of Eq. 10 for the v of the estimator.
    visits: number of batches that this v has followed.
    betas: values of beta in the test of Prop. 1.
    steps: values of T, the number of steps of Eq. 10.
    chains: number of independent trackers.
    stored: number of negatives in the study of a score memory.
    seed: seed of all draws.
  """

  population: int = 100_000
  prior: float = 0.1
  shares: tuple[float, ...] = (0.01, 0.02, 0.03, 0.1, 0.2)
  batch_sizes: tuple[int, ...] = (100, 200, 500, 1000, 2000, 5000)
  repetitions: int = 500
  tau1: float = 0.5
  tau2: float = 0.01
  beta: float = 0.1
  visits: int = 100
  betas: tuple[float, ...] = (0.02, 0.1, 0.5)
  steps: tuple[int, ...] = (1, 3, 10, 30, 100)
  chains: int = 2000
  stored: int = 20_000
  seed: int = 0


def _errors() -> dict[str, Any]:
  return {estimator: {"mean": float, "std": float} for estimator in ESTIMATORS}


# Schema of what `run` returns, in the form of `soprc_jax._internal.stored`.
RESULTS: dict[str, Any] = {
  **{
    name: {
      "estimation": [
        {"share": float, "batch_size": int, "zero_one": _errors(), "surrogate": _errors()}
      ],
      "interpolation": [
        {"num_positives": int, **dict.fromkeys(InterpolationErrors._fields, float)}
      ],
    }
    for name in DISTRIBUTIONS
  },
  "tracking": [
    dict.fromkeys(
      ("beta", "steps", "bias", "variance", "expected_bias", "expected_variance"), float
    )
    | {"start": str}
  ],
  "score_memory": [score_memory.ENTRY],
}


def run(settings: Settings, *, told: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
  """Runs the whole study and returns its numbers by distribution, ready for JSON.

  ``told`` receives a line about each finished part.
  """
  found: dict[str, Any] = {}
  for name in DISTRIBUTIONS:
    population = draw_population(
      name, size=settings.population, prior=settings.prior, seed=settings.seed
    )
    risks = {
      "zero_one": zero_one_risk(population),
      "surrogate": surrogate_risk(population, tau1=settings.tau1, tau2=settings.tau2),
    }
    found[name] = {
      "risk": risks,
      "estimation": [
        {
          "share": share,
          "batch_size": size,
          **_estimation(population, batch(size, share), risks, settings),
        }
        for share in settings.shares
        for size in settings.batch_sizes
      ],
      "interpolation": [
        {
          "num_positives": count,
          **interpolation_errors(
            name, count, repetitions=settings.repetitions, seed=settings.seed + 2
          )._asdict(),
        }
        for count in _positives(settings)
      ],
    }
    told(f"{name}: 1 - AUPRC {risks['zero_one']:.4f}, surrogate risk {risks['surrogate']:.4f}")
  population = draw_population(
    "binormal", size=settings.population, prior=settings.prior, seed=settings.seed
  )
  found["tracking"] = [
    {
      "beta": beta,
      "start": "debiased" if initial_v is None else "given",
      **tracked(
        population,
        20,
        beta=beta,
        steps=steps,
        initial_v=initial_v,
        chains=settings.chains,
        seed=settings.seed,
      )._asdict(),
    }
    for beta in settings.betas
    for initial_v in (0.0, None)
    for steps in settings.steps
  ]
  told(f"tracking: {len(found['tracking'])} settings of Prop. 1")
  found["score_memory"] = score_memory.study(
    score_memory.CASES,
    stored=settings.stored,
    repetitions=settings.repetitions,
    tau1=settings.tau1,
    tau2=settings.tau2,
    seed=settings.seed,
  )
  told(f"score memory: {len(score_memory.CASES)} populations")
  return found


def _positives(settings: Settings) -> list[int]:
  """Returns numbers of positives from the smallest to the largest batch, about three a decade."""
  found = [
    batch(size, share).positives for share in settings.shares for size in settings.batch_sizes
  ]
  steps = round(3 * np.log10(max(found) / min(found))) + 1
  return sorted({round(count) for count in np.geomspace(min(found), max(found), max(steps, 2))})


def _estimation(
  population: Population, sizes: Batch, risks: dict[str, float], settings: Settings
) -> dict[str, Any]:
  """Returns mean and standard deviation of the errors of one kind of batch."""
  batches = draw_batches(
    population,
    sizes,
    repetitions=settings.repetitions,
    beta=settings.beta,
    visits=settings.visits,
    seed=settings.seed + 1,
  )
  errors = {
    "zero_one": zero_one_errors(population, batches, risk=risks["zero_one"]),
    "surrogate": surrogate_errors(
      population, batches, risk=risks["surrogate"], tau1=settings.tau1, tau2=settings.tau2
    ),
  }
  return {
    kind: {
      name: {"mean": float(values.mean()), "std": float(values.std(ddof=1))}
      for name, values in by_name.items()
    }
    for kind, by_name in errors.items()
  }


def _share_at_least(ascending: jax.Array, thresholds: jax.Array) -> jax.Array:
  # The subtraction of integers is exact: 1 - index / length may round to a number below 0.
  index = jnp.searchsorted(ascending, thresholds, side="left")
  return (len(ascending) - index) / len(ascending)


def _mean_risk(fpr: jax.Array, tpr: jax.Array, prior: Any) -> jax.Array:
  return jnp.mean(masks.share((1 - prior) * fpr, prior * tpr))
