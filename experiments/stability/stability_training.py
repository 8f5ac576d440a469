"""Trains the small model of the stability study on many copies of the data.

The copies differ in one example each.
"""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import estimators, interpolation, surrogates, tracking
from soprc_jax._internal import masks

Algorithm = Literal[
  "SOPRC", "SOPRC without v", "AP loss", "SOPRC, gradient through T", "SOPRC, self weight 1/n+"
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
_CARRIES_V = ("SOPRC", "SOPRC, gradient through T", "SOPRC, self weight 1/n+")

FEATURES, HIDDEN, POINTS = 20, 8, 20
# The prior belongs to the distribution: it does not change with the numbers of examples.
LOSS: dict[str, Any] = {"prior": 0.1, "tau1": 0.5, "tau2": 0.05}
BOUNDS = (-1.0, 1.0)
_START_SCALE = 0.3
# At smaller distances of two trainings, the difference of their float32 gradients is rounding.
_LEAST_DISTANCE = 1e-3
# Number of repetitions that are trained at once, with models tested on each other's training sets.
BLOCK = 4


class Examples(NamedTuple):
  """Features ``[N+, D]`` and ``[N-, D]`` of the two classes, or positions in them.

  Attributes:
    positive: values of the positives.
    negative: values of the negatives.
  """

  positive: Any
  negative: Any


class Inputs(NamedTuple):
  """A training on S, the first of C copies, and on C - 1 sets that differ from S in one example.

  Attributes:
    start: ``[W]`` initial parameters.
    batches: features ``[T, n+, D]`` and ``[T, n-, D]`` of the batches from S.
    positions: their positions in S, ``[T, n+]`` and ``[T, n-]``.
    new: ``[C, D]`` the example that replaces one of S in each copy.
    replaced: ``[C]`` positions of the positive, and of the negative, that it replaces; -1 for none.
  """

  start: Any
  batches: Examples
  positions: Examples
  new: Any
  replaced: Examples


class Trained(NamedTuple):
  """Trainings of R repetitions.

  Attributes:
    weights: ``[R, T, W]`` parameters of the training on S after each step.
    distances: ``[R, T, C - 1]`` distances of the other copies' parameters from them.
    gradient: ``[R]`` largest norm of the full gradient of f-hat (`_batch_risk`) on the batches, for
      every algorithm.
    smoothness: ``[R]`` largest change of the gradient over the change of the parameters, between S
      and a copy that sees the same batch.
  """

  weights: jax.Array
  distances: jax.Array
  gradient: jax.Array
  smoothness: jax.Array


def first_weights(rng: np.random.Generator) -> np.ndarray:
  """Returns the parameters of the untrained model, ``[W]``."""
  return np.float32(_START_SCALE) * rng.standard_normal(HIDDEN * (FEATURES + 2), np.float32)


def scores(weights: jax.Array, examples: jax.Array) -> jax.Array:
  """Computes scores in (-1, 1) by one hidden layer of tanh.

  They are bounded with bounded gradients, as the theory assumes.

  Args:
    weights: ``[C, W]``.
    examples: ``[n, D]`` for all models, or ``[C, 1, D]``, one for each model.

  Returns:
    ``[C, n]``, or ``[C, 1]``.
  """
  inner, bias, outer = jnp.split(weights, [HIDDEN * FEATURES, HIDDEN * (FEATURES + 1)], axis=1)
  inner = inner.reshape(-1, FEATURES, HIDDEN)
  # Shared examples are multiplied with the weights of all models at once.
  product = jnp.einsum("nd,cdh->cnh" if examples.ndim == 2 else "cnd,cdh->cnh", examples, inner)
  return jnp.tanh(jnp.einsum("cnh,ch->cn", jnp.tanh(product + bias[:, None]), outer))


def train(inputs: Inputs, *, algorithm: str, beta: float, rate: float, decays: bool) -> Trained:
  """Trains all copies by plain SGD (Alg. 1 without L_var), with the same start and batches.

  Args:
    inputs: inputs of R repetitions, stacked.
    algorithm: one of `ALGORITHMS`.
    beta: beta of Eq. 10.
    rate: learning rate eta, or C of eta_t = C / t.
    decays: whether the learning rate is C / t.
  """
  return _train_all(inputs, beta, rate, decays, algorithm)


@functools.partial(jax.jit, static_argnames="algorithm")
def _train_all(inputs: Inputs, beta: Any, rate: Any, decays: Any, algorithm: str) -> Trained:
  # A few at a time: one is too small to keep the core busy, all of them do not fit into its cache.
  return jax.lax.map(
    lambda one: _train(one, beta, rate, decays, algorithm), inputs, batch_size=BLOCK
  )


def _train(inputs: Inputs, beta: Any, rate: Any, decays: Any, algorithm: str) -> Trained:
  copies = len(inputs.new)
  tracker = tracking.score_ema(
    copies, POINTS, lambda count: beta, bounds=BOUNDS
  )  # a number would compile again for each value

  def loss_fn(
    weights: jax.Array, state: Any, batch: Examples, hits: Examples
  ) -> tuple[jax.Array, jax.Array]:
    own = scores(weights, inputs.new[:, None])
    positive = jnp.where(hits.positive, own, scores(weights, batch.positive))
    negative = jnp.where(hits.negative, own, scores(weights, batch.negative))
    return jnp.sum(_losses(positive, negative, state, tracker, algorithm)), positive

  def step(carry: Any, batch: tuple[Examples, Examples]) -> tuple[Any, Any]:
    weights, state, t = carry
    features, positions = batch
    hits = jax.tree.map(
      lambda at, replaced: at[None] == replaced[:, None], positions, inputs.replaced
    )
    gradient, positive = jax.grad(loss_fn, has_aux=True)(weights, state, features, hits)
    if algorithm in _CARRIES_V:
      _, state = tracker.update(None, state, positive_scores=positive, list_ids=jnp.arange(copies))
    same = ~(jnp.any(hits.positive, axis=1) | jnp.any(hits.negative, axis=1))
    ratio = _ratio(_distances(gradient), _distances(weights), same[1:])
    weights = weights - rate / jnp.where(decays, t, 1.0) * gradient
    return (weights, state, t + 1.0), (weights[0], _distances(weights), ratio)

  start = jnp.broadcast_to(inputs.start[None], (copies, len(inputs.start)))
  carry = (start, tracker.init(None), jnp.ones([]))
  _, (weights, distances, ratios) = jax.lax.scan(step, carry, (inputs.batches, inputs.positions))
  before = jnp.concatenate([inputs.start[None], weights[:-1]])

  def risk(weights: jax.Array, batch: Examples) -> jax.Array:
    return _batch_risk(*(scores(weights[None], of_class)[0] for of_class in batch))

  norms = jax.vmap(lambda *at: jnp.linalg.norm(jax.grad(risk)(*at)))(before, inputs.batches)
  return Trained(weights, distances, jnp.max(norms), jnp.max(ratios))


def _losses(
  positive: jax.Array, negative: jax.Array, state: Any, tracker: Any, algorithm: str
) -> jax.Array:
  """Computes the loss of each copy, ``[C]``."""
  if algorithm == "AP loss":
    taus = {name: LOSS[name] for name in ("tau1", "tau2")}
    return estimators.ap_loss(positive, negative, reduce_fn=None, **taus)
  if algorithm in _CARRIES_V:
    v = tracker.lookahead(state, positive, jnp.arange(len(positive)))
  else:
    v = interpolation.interpolate_scores(positive, num_points=POINTS, bounds=BOUNDS)
  through = algorithm == "SOPRC, gradient through T"
  self_weight = 1 / positive.shape[1] if algorithm == "SOPRC, self weight 1/n+" else None
  return estimators.soprc_loss(
    positive, negative, v, reduce_fn=None, tpr_gradient=through, self_weight=self_weight, **LOSS
  )


def _batch_risk(positive: jax.Array, negative: jax.Array) -> jax.Array:
  """Computes f-hat of a batch (Eq. 8) from its scores ``[n+]`` and ``[n-]``.

  Eq. 6 has f-hat as a function of model and batch, so v is phi of the batch. The gradient passes
  through TPR and phi too, unlike that of `estimators.soprc_loss`.
  """
  points = interpolation.interpolate_scores(positive, num_points=POINTS, bounds=BOUNDS)
  margins = positive[:, None] - negative[None], positive[:, None] - points[None]
  false = jnp.mean(surrogates.one_sided_huber(margins[0], tau=LOSS["tau1"]), axis=1)
  true = jnp.mean(surrogates.one_sided_sigmoid(margins[1], tau=LOSS["tau2"]), axis=1)
  true = (true * POINTS + 1) / (POINTS + 1)  # the self weight of the algorithm
  return jnp.mean(masks.share((1 - LOSS["prior"]) * false, LOSS["prior"] * true))


def _distances(rows: jax.Array) -> jax.Array:
  """Computes distances from the first row of ``[C, W]``, ``[C - 1]``."""
  return jnp.linalg.norm(rows[1:] - rows[:1], axis=1)


def _ratio(change: jax.Array, moved: jax.Array, where: jax.Array) -> jax.Array:
  """Computes the largest ``change / moved`` of copies that see the same batch.

  Copies that are too near for a reliable ratio are left out.
  """
  return jnp.max(masks.ratio(change, moved), where=where & (moved > _LEAST_DISTANCE), initial=0.0)


def risks(weights: Any, data: Examples, batches: Examples) -> tuple[np.ndarray, np.ndarray]:
  """Computes two risks of each model w_r on each set S_q of its block of `BLOCK` repetitions.

  The first one is f(w_r; S_q) (Eq. 4) with the surrogates, where v has the scores of all positives.
  The second one is F(w_r; S_q) (Eq. 6), the mean of f-hat over batches, estimated from some.

  Args:
    weights: ``[R, W]`` parameters of each repetition's model, R a multiple of `BLOCK`.
    data: ``[R, N+, D]`` and ``[R, N-, D]`` training sets.
    batches: ``[R, K, n+]`` and ``[R, K, n-]`` positions of K batches in each set.

  Returns:
    Two arrays ``[R / BLOCK, BLOCK, BLOCK]``, models by sets.
  """
  whole, batched = (
    np.asarray(values, np.float64).reshape(-1, BLOCK, BLOCK)
    for values in _risks(jnp.asarray(weights), data, batches)
  )
  return whole, batched


@jax.jit
def _risks(weights: jax.Array, data: Examples, batches: Examples) -> tuple[jax.Array, jax.Array]:
  def risk(at: jax.Array) -> tuple[jax.Array, jax.Array]:
    r, q = at // BLOCK, at // BLOCK**2 * BLOCK + at % BLOCK
    positive, negative = (scores(weights[r][None], of_class[q])[0] for of_class in data)
    of_batches = jax.vmap(_batch_risk)(positive[batches.positive[q]], negative[batches.negative[q]])
    return estimators.soprc_loss(positive, negative, positive, **LOSS), jnp.mean(of_batches)

  return jax.lax.map(risk, jnp.arange(len(weights) * BLOCK))
