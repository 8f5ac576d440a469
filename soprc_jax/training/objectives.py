"""What a training step minimises: a loss chosen by name, with the state that it carries.

One protocol for all losses, stateless or carried: an `Objective` gives the transform that carries its state (the
identity where there is none) and a function from the embeddings of the batch to the loss.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from soprc_jax import estimators, interpolation, lists, losses, tracking

PRIOR_KINDS = ("frequency", "scaled", "batch", "constant")
_COSINE_BOUNDS = (-1.0, 1.0)


class Inputs(NamedTuple):
  """What an objective sees of a batch.

  Attributes:
    embeddings: ``[B, D]`` unit norm, float32.
    labels: ``[B]`` rows of the classes.
    where: ``[B]`` valid images.
    step: scalar int32, steps done in this phase.
    opt_state: optimizer state, which holds the carried state.
  """

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  step: jax.Array
  opt_state: Any


class Outputs(NamedTuple):
  """What an objective gives back.

  Attributes:
    loss: scalar, equal on all devices.
    update_args: keyword arguments that ``tx.update`` passes to the carried state.
    metrics: scalars to log, equal on all devices.
  """

  loss: jax.Array
  update_args: dict[str, Any]
  metrics: dict[str, jax.Array]


class Objective(NamedTuple):
  """A loss with its carried state.

  Attributes:
    tracker: transform that carries the state; stands before the optimizer in ``optax.chain``.
    compute: `Inputs` -> `Outputs`; pure.
    idle_args: `Inputs` -> arguments of ``tx.update`` that leave the carried state alone, for a warm-up with another loss.
  """

  tracker: optax.GradientTransformation
  compute: Callable[[Inputs], Outputs]
  idle_args: Callable[[Inputs], dict[str, Any]]


class Setting(NamedTuple):
  """What objectives need to know of the run.

  Attributes:
    class_counts: ``[C]`` training images of each class (row).
    num_steps: steps of the phase, for schedules.
    max_positives: largest number of positives of a query in a batch.
    axis_name: mapped axis of the devices.
  """

  class_counts: np.ndarray
  num_steps: int
  max_positives: int
  axis_name: str | None


def make_objective(name: str, config: Any, setting: Setting) -> Objective:
  """The objective ``name`` with the sub-config ``config.loss``.

  Raises:
    ValueError: unknown name.
  """
  if name not in LOSSES:
    raise ValueError(f"loss.name must be one of {', '.join(LOSSES)}; got {name!r}")
  return LOSSES[name](config, setting)


def _soprc(config: Any, setting: Setting) -> Objective:
  """SOPRC: Eq. 8 with v of Eq. 10 (or of the batch), plus the semi-variance term of Eq. 9."""
  carried = config.v == "carried"
  tracker = _tracker(config, setting)
  prior_fn = make_prior(config.prior, setting)
  tau1_fn = log_linear(config.tau1_start, config.tau1, setting.num_steps)
  self_weight = None if config.self_weight == -1 else config.self_weight

  def pairs(inputs: Inputs) -> lists.RetrievalLists:
    return lists.retrieval_lists(
      inputs.embeddings,
      inputs.labels,
      max_positives=setting.max_positives,
      where=inputs.where,
      axis_name=setting.axis_name,
    )

  def compute(inputs: Inputs) -> Outputs:
    found = pairs(inputs)
    if carried:
      v = tracker.lookahead(inputs.opt_state, found.positive_scores, inputs.labels, found.positive_where)
    else:
      v = interpolation.interpolate_scores(
        found.positive_scores,
        num_points=config.num_points,
        bounds=_COSINE_BOUNDS,
        grid=config.grid,
        where=found.positive_where,
      )
    masks: dict[str, Any] = {"positive_where": found.positive_where, "negative_where": found.negative_where}
    prior = prior_fn(inputs.step, inputs.labels, found)
    risk = estimators.soprc_loss(
      found.positive_scores,
      found.negative_scores,
      v,
      prior=prior,
      tau1=tau1_fn(inputs.step),
      tau2=config.tau2,
      self_weight=self_weight,
      tpr_gradient=config.tpr_gradient,
      axis_name=setting.axis_name,
      **masks,
    )
    metrics = {"soprc": risk, "prior": _pmean(jnp.mean(prior), setting.axis_name), "tau1": tau1_fn(inputs.step)}
    loss = risk
    if config.lambda1 or config.lambda2:
      variance = estimators.semi_variance(
        found.positive_scores,
        found.negative_scores,
        lambda1=config.lambda1,
        lambda2=config.lambda2,
        average_over=config.average_over,
        pool=config.pool,
        mean_gradient=config.mean_gradient,
        axis_name=setting.axis_name,
        **masks,
      )
      metrics["semi_variance"] = variance
      loss = risk + variance
    metrics["valid_lists"] = _count_valid(found, setting.axis_name)
    update_args = {}
    if carried:
      update_args = _tracker_args(found.positive_scores, inputs.labels, found.positive_where)
      weight = tracking.find_state(inputs.opt_state).weight
      metrics["v_rows_seen"] = jnp.mean((weight > 0).astype(jnp.float32))
      metrics["v_weight"] = jnp.mean(weight)
    return Outputs(loss, update_args, metrics)

  def idle_args(inputs: Inputs) -> dict[str, Any]:
    if not carried:
      return {}
    nothing = jnp.zeros((inputs.labels.shape[0], setting.max_positives))
    return _tracker_args(nothing, inputs.labels, jnp.zeros(nothing.shape, bool))

  return Objective(tracker if carried else optax.identity(), compute, idle_args)


def _triplet(config: Any, setting: Setting) -> Objective:
  def compute(inputs: Inputs) -> Outputs:
    loss = losses.triplet_loss(
      inputs.embeddings,
      inputs.labels,
      margin=config.triplet.margin,
      where=inputs.where,
      max_positives=setting.max_positives,
      axis_name=setting.axis_name,
    )
    return Outputs(loss, {}, {})

  return Objective(optax.identity(), compute, lambda inputs: {})


LOSSES: Mapping[str, Callable[[Any, Setting], Objective]] = {"soprc": _soprc, "triplet": _triplet}
CARRIED = ("soprc",)


def _tracker(config: Any, setting: Setting) -> tracking.ScoreEma:
  uniform = np.arange(config.num_points) / config.num_points
  return tracking.score_ema(
    len(setting.class_counts),
    config.num_points,
    config.beta,
    bounds=_COSINE_BOUNDS,
    grid=config.grid,
    initial_v=uniform if config.initial_v == "uniform" else None,
    axis_name=setting.axis_name,
  )


def _tracker_args(positive_scores: jax.Array, list_ids: jax.Array, where: jax.Array) -> dict[str, Any]:
  return {"positive_scores": positive_scores, "list_ids": list_ids, "positive_where": where}


def make_prior(config: Any, setting: Setting) -> Callable[[jax.Array, jax.Array, lists.RetrievalLists], jax.Array]:
  """A function ``(step, labels, lists) -> prior [B]`` of each query.

  Kinds: ``frequency``: the share of a query's positives among the other training images, (c - 1) / (N - 1), the paper's;
  ``scaled``: value * c / max c, the authors' code; ``batch``: the list's own share in the batch, n+ / (n+ + n-), the biased
  estimator; ``constant``: value. With ``start`` > 0 the prior goes from there to the above, log-linear over the phase.
  """
  counts = setting.class_counts.astype(np.float64)
  if config.kind == "frequency":
    # A class of one image has no positives: its lists are invalid, the value is never used.
    table = np.maximum(counts - 1, 1) / max(counts.sum() - 1, 1)
  elif config.kind == "scaled":
    table = config.value * counts / counts.max()
  else:
    table = np.full(len(counts), config.value if config.kind == "constant" else 0.5)
  per_class = jnp.asarray(table, jnp.float32)

  def prior(step: jax.Array, labels: jax.Array, found: lists.RetrievalLists) -> jax.Array:
    if config.kind == "batch":
      positives = jnp.sum(found.positive_where, axis=-1)
      target = positives / jnp.maximum(positives + jnp.sum(found.negative_where, axis=-1), 1)
      target = jnp.maximum(target, jnp.finfo(jnp.float32).tiny)
    else:
      target = per_class[labels]
    return log_linear(config.start, target, setting.num_steps)(step)

  return prior


def log_linear(start: float, end: Any, num_steps: int) -> Callable[[jax.Array], jax.Array]:
  """Schedule from ``start`` to ``end`` in ``num_steps`` steps, linear in the logarithm; constant if start is 0.

  >>> schedule = log_linear(0.5, 0.005, 100)
  >>> print(f"{schedule(0):.3f} {schedule(50):.3f} {schedule(100):.3f}")
  0.500 0.050 0.005
  """

  def schedule(step: Any) -> jax.Array:
    target = jnp.asarray(end, jnp.float32)
    if not start:
      return target
    done = jnp.clip(jnp.asarray(step, jnp.float32) / max(num_steps, 1), 0.0, 1.0)
    return jnp.exp((1 - done) * jnp.log(start) + done * jnp.log(target))

  return schedule


def _count_valid(found: lists.RetrievalLists, axis_name: str | None) -> jax.Array:
  valid = jnp.any(found.positive_where, axis=-1) & jnp.any(found.negative_where, axis=-1)
  count = jnp.sum(valid)
  return count if axis_name is None else jax.lax.psum(count, axis_name)


def _pmean(value: jax.Array, axis_name: str | None) -> jax.Array:
  return value if axis_name is None else jax.lax.pmean(value, axis_name)
