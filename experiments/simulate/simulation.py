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

from soprc_jax import estimators, interpolation, metrics, tracking
from soprc_jax._internal import blockwise

# M, except in the study of v itself.
_POINTS = 100


class Distribution(NamedTuple):
  """Distributions of the scores of positives and negatives.

  Attributes:
    title: title in plots.
    positive: ``(key, shape) -> scores``.
    negative: ``(key, shape) -> scores``.
    densities: ``x -> (density of positives, density of negatives)``.
    support: interval that plots show.
  """

  title: str
  positive: Callable[[jax.Array, tuple[int, ...]], jax.Array]
  negative: Callable[[jax.Array, tuple[int, ...]], jax.Array]
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
    lambda x: (_normal_density(x, 1), _normal_density(x, 0)),
    (-4, 5),
  ),
  "bibeta": Distribution(
    "bibeta: B(5, 2) and B(2, 5)",
    lambda key, shape: jax.random.beta(key, 5, 2, shape),
    lambda key, shape: jax.random.beta(key, 2, 5, shape),
    lambda x: (_beta_density(x, 5, 2), _beta_density(x, 2, 5)),
    (-0.1, 1.1),
  ),
  "uniform": Distribution(
    "offset uniform: U(0.5, 1.5) and U(0, 1)",
    lambda key, shape: jax.random.uniform(key, shape, minval=0.5, maxval=1.5),
    lambda key, shape: jax.random.uniform(key, shape),
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


def zero_one_errors(
  population: Population, sizes: Batch, *, risk: float, repetitions: int, seed: int
) -> dict[str, np.ndarray]:
  """Computes the errors against ``risk`` of the estimators with l_{0,1}.

  l_{0,1} replaces the surrogates. The result is ``{"SOPRC": [R], "AP": [R]}``.

  SOPRC uses the population's prior, and its v has the scores of all positives. The AP loss uses the
  batch's share and the batch's positives.
  """
  keys = jax.random.split(jax.random.key(seed), repetitions)
  found = _zero_one_estimates(keys, *_arrays_of(population), sizes)
  return {name: np.asarray(values, np.float64) - risk for name, values in found.items()}


@functools.partial(jax.jit, static_argnames="sizes")
def _zero_one_estimates(
  keys: jax.Array, positives: jax.Array, negatives: jax.Array, sizes: Batch
) -> dict[str, jax.Array]:
  prior = len(positives) / (len(positives) + len(negatives))

  def estimate(key: jax.Array) -> dict[str, jax.Array]:
    positive, negative = _draw(key, positives, negatives, sizes)
    fpr = _share_at_least(jnp.sort(negative), positive)
    own_tpr = _share_at_least(jnp.sort(positive), positive)
    return {
      "SOPRC": _mean_risk((1 - prior) * fpr, prior * _share_at_least(positives, positive)),
      "AP": _mean_risk(sizes.negatives * fpr, sizes.positives * own_tpr),
    }

  return jax.vmap(estimate)(keys)


def surrogate_risk(population: Population, *, tau1: float, tau2: float) -> float:
  """Computes the risk f that the surrogate estimators estimate: Eq. 8 on the population."""
  v = _whole_v(population, _POINTS)
  loss = jax.jit(
    functools.partial(
      estimators.soprc_loss, prior=population.prior, self_weight=0.0, tau1=tau1, tau2=tau2
    )
  )
  return float(loss(population.positive, population.negative, v))


def surrogate_errors(
  population: Population,
  sizes: Batch,
  *,
  risk: float,
  repetitions: int,
  seed: int,
  tau1: float,
  tau2: float,
) -> dict[str, np.ndarray]:
  """Computes the errors like `zero_one_errors`, with l1 and l2 of Eq. 7.

  ``risk`` is the `surrogate_risk`.
  """
  keys = jax.random.split(jax.random.key(seed), repetitions)
  found = _surrogate_estimates(
    keys, *_arrays_of(population), _whole_v(population, _POINTS), tau1, tau2, sizes
  )
  return {name: np.asarray(values, np.float64) - risk for name, values in found.items()}


@functools.partial(jax.jit, static_argnames="sizes")
def _surrogate_estimates(
  keys: jax.Array,
  positives: jax.Array,
  negatives: jax.Array,
  v: jax.Array,
  tau1: Any,
  tau2: Any,
  sizes: Batch,
) -> dict[str, jax.Array]:
  options = {"tau1": tau1, "tau2": tau2, "self_weight": 0.0}
  prior = len(positives) / (len(positives) + len(negatives))

  def estimate(key: jax.Array) -> dict[str, jax.Array]:
    positive, negative = _draw(key, positives, negatives, sizes)
    return {
      "SOPRC": estimators.soprc_loss(positive, negative, v, prior=prior, **options),
      "AP": estimators.ap_loss(positive, negative, **options),
    }

  return blockwise.map_rows(estimate, (keys,), sizes.positives * sizes.negatives)


class InterpolationErrors(NamedTuple):
  """Errors of interpolated scores phi against the quantiles of all positives.

  They are averaged over the positions.

  Attributes:
    of_mean: mean absolute error of the mean of phi over the repetitions: the systematic error.
    of_one: mean absolute error of a single phi: the error of one batch.
    spread: standard deviation of the error of a single phi over the repetitions.
  """

  of_mean: float
  of_one: float
  spread: float


def interpolation_errors(
  population: Population, num_positives: int, *, repetitions: int, seed: int
) -> InterpolationErrors:
  """Computes errors of phi from ``num_positives`` scores (Alg. 2), by random draws."""
  keys = jax.random.split(jax.random.key(seed), repetitions)
  quantiles = _whole_v(population, _POINTS)
  mean, single = _interpolated(keys, _arrays_of(population)[0], quantiles, num_positives)
  return InterpolationErrors(
    float(jnp.mean(jnp.abs(mean - quantiles))), float(jnp.mean(single)), float(jnp.std(single))
  )


@functools.partial(jax.jit, static_argnames="num_positives")
def _interpolated(
  keys: jax.Array, positives: jax.Array, quantiles: jax.Array, num_positives: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the mean of phi over the draws, and the mean error of each draw."""

  def phi(key: jax.Array) -> jax.Array:
    drawn = positives[jax.random.randint(key, (num_positives,), 0, len(positives))]
    return interpolation.interpolate_scores(drawn, num_points=_POINTS)

  rows = blockwise.map_rows(phi, (keys,), num_positives + _POINTS)
  return jnp.mean(rows, axis=0), jnp.mean(jnp.abs(rows - quantiles[None]), axis=1)


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
    jax.random.key(seed), _arrays_of(population)[0], state, beta, num_positives, steps
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
    repetitions: number of batches of each kind.
    interpolation_repetitions: number of draws of phi. There are more of them, since the error of
      their mean is far below that of one draw.
    smooth_positives: number of positives of the data set that phi is drawn from.
    tau1, tau2: widths of the surrogates.
    betas: values of beta in Eq. 10.
    steps: values of T, the number of steps of Eq. 10.
    chains: number of independent trackers.
    seed: seed of all draws.
  """

  population: int = 100_000
  prior: float = 0.1
  shares: tuple[float, ...] = (0.01, 0.02, 0.03, 0.1, 0.2)
  batch_sizes: tuple[int, ...] = (100, 200, 500, 1000, 2000, 5000)
  repetitions: int = 500
  interpolation_repetitions: int = 20_000
  smooth_positives: int = 1_000_000
  tau1: float = 0.5
  tau2: float = 0.01
  betas: tuple[float, ...] = (0.02, 0.1, 0.5)
  steps: tuple[int, ...] = (1, 3, 10, 30, 100)
  chains: int = 2000
  seed: int = 0


def _errors() -> dict[str, Any]:
  return {estimator: {"mean": float, "std": float} for estimator in ("SOPRC", "AP")}


# Schema of what `run` returns, in the form of `soprc_jax._internal.stored`.
RESULTS: dict[str, Any] = {
  **{
    name: {
      "estimation": [
        {"share": float, "batch_size": int, "zero_one": _errors(), "surrogate": _errors()}
      ],
      "interpolation": [{"num_positives": int, "of_mean": float, "of_one": float}],
    }
    for name in DISTRIBUTIONS
  },
  "tracking": [
    dict.fromkeys(
      ("beta", "steps", "bias", "variance", "expected_bias", "expected_variance"), float
    )
    | {"start": str}
  ],
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
    # The population's quantiles have errors of about 1 / sqrt(its size), which would hide the error
    # of many positives. So this population is larger.
    smooth = draw_population(
      name, size=2 * settings.smooth_positives, prior=0.5, seed=settings.seed
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
        {"num_positives": count, **_interpolation(smooth, count, settings)}
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
  shared = {"repetitions": settings.repetitions, "seed": settings.seed + 1}
  errors = {
    "zero_one": zero_one_errors(population, sizes, risk=risks["zero_one"], **shared),
    "surrogate": surrogate_errors(
      population, sizes, risk=risks["surrogate"], tau1=settings.tau1, tau2=settings.tau2, **shared
    ),
  }
  return {
    kind: {
      name: {"mean": float(values.mean()), "std": float(values.std(ddof=1))}
      for name, values in by_name.items()
    }
    for kind, by_name in errors.items()
  }


def _interpolation(population: Population, count: int, settings: Settings) -> dict[str, float]:
  return interpolation_errors(
    population, count, repetitions=settings.interpolation_repetitions, seed=settings.seed + 2
  )._asdict()


def _arrays_of(population: Population) -> tuple[jax.Array, jax.Array]:
  return jnp.asarray(population.positive), jnp.asarray(population.negative)


def _draw(
  key: jax.Array, positive: jax.Array, negative: jax.Array, sizes: Batch
) -> tuple[jax.Array, jax.Array]:
  keys = jax.random.split(key)
  chosen_positive = jax.random.randint(keys[0], (sizes.positives,), 0, len(positive))
  chosen_negative = jax.random.randint(keys[1], (sizes.negatives,), 0, len(negative))
  return positive[chosen_positive], negative[chosen_negative]


def _share_at_least(ascending: jax.Array, thresholds: jax.Array) -> jax.Array:
  return 1 - jnp.searchsorted(ascending, thresholds, side="left") / len(ascending)


def _mean_risk(part: jax.Array, rest: jax.Array) -> jax.Array:
  return jnp.mean(part / jnp.maximum(part + rest, jnp.finfo(part.dtype).tiny))


def _whole_v(population: Population, num_points: int) -> jax.Array:
  """Returns the interpolated scores of all positives, which v tracks."""
  return interpolation.interpolate_scores(population.positive, num_points=num_points)
