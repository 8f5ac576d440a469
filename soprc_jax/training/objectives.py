"""Objectives of a training step: a loss chosen by name, with the state that it carries.

All losses follow one protocol. An `Objective` has a transform that carries its state (the identity
if there is none) and a function from the embeddings of the batch to the loss.
"""

from collections.abc import Callable, Mapping
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from soprc_jax import estimators, interpolation, lists, tracking
from soprc_jax._internal import collectives, masks
from soprc_jax.training import baselines, superclass_lists
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting, relevance
from soprc_jax.training.patterns import Patterns

PRIOR_KINDS = ("frequency", "scaled", "batch", "constant")
PRIOR_SHAPES = ("log", "linear", "cosine")
# A list of at least this risk has at most a fifth of the largest gradient, since with
# r = A / (A + B), dr / dA = r (1 - r) / A.
_SATURATED = 0.95
_COSINE_BOUNDS = (-1.0, 1.0)
VALID_LISTS = "valid_lists"


def make_objective(name: str, config: Any, setting: Setting) -> Objective:
  """Returns the objective of a loss by its name.

  Args:
    name: key of `LOSSES`, or ``package.module:function`` for a custom loss: a function
      ``(config.loss, setting) -> Objective``, for example one line with `baselines.stateless`. Its
      options belong in ``config.loss.custom``.
    config: ``config.loss``, resolved.
    setting: properties of the run.

  Returns:
    The objective. If it has no metric ``valid_lists``, that of `count_lists` is added. Where an
    image has several labels, its inputs have the relevance mask.

  Raises:
    ValueError: the name is unknown, or the function cannot be imported; the loss does not work
      where an image has several labels.
  """
  problem = name_problem(name)
  if problem is None and setting.patterns is not None:
    problem = several_labels_problem(name)
  if problem:
    raise ValueError(problem)
  objective = _factory(name)(config, setting)

  def compute(inputs: Inputs) -> Outputs:
    inputs = _with_mask(inputs, setting)
    outputs = objective.compute(inputs)
    counted = (
      {}
      if VALID_LISTS in outputs.metrics
      else {VALID_LISTS: count_lists(inputs, setting.axis_name)}
    )
    return outputs._replace(metrics={**counted, **outputs.metrics})

  return objective._replace(compute=compute)


def _with_mask(inputs: Inputs, setting: Setting) -> Inputs:
  """Adds the relevance mask of the batch, where an image has several labels."""
  if setting.patterns is None:
    return inputs
  everyone = inputs.labels
  if setting.axis_name is not None:
    everyone = jax.lax.all_gather(everyone, setting.axis_name, tiled=True)
  return inputs._replace(positives=setting.patterns.relevant(inputs.labels, everyone))


def count_lists(inputs: Inputs, axis_name: str | None) -> jax.Array:
  """Counts the images that have a positive and a negative in the batch of all devices.

  If there are none, a ranking loss is 0 and means nothing.
  """
  nothing = jnp.zeros((inputs.labels.shape[0], 1))  # only the masks are used
  labels, pairs = relevance(inputs)
  found = lists.similarities(nothing, labels, where=inputs.where, axis_name=axis_name, pairs=pairs)
  return collectives.psum(jnp.sum(masks.has_both(found.positive, found.negative)), axis_name)


def name_problem(name: str, *, imports: bool = True) -> str | None:
  """Returns what is wrong with the name of a loss, None if nothing is.

  Args:
    name: key of `LOSSES`, or ``package.module:function``.
    imports: whether the function may be imported. If False, only the form of the name is checked.
  """
  if name in LOSSES:
    return None
  if ":" not in name:
    return (
      f"must be one of {', '.join(LOSSES)}, or package.module:function for a custom loss; got "
      f"{name!r}"
    )
  if not imports:
    return None
  try:
    factory = _factory(name)
  except Exception as error:  # importing the user's module may raise anything
    return f"{name!r} cannot be imported: {type(error).__name__}: {error}"
  return None if callable(factory) else f"{name!r} is not a function"


def several_labels_problem(name: str) -> str | None:
  """Returns why a loss does not work where an image has several labels; None if it does.

  A custom loss works if it takes ``positives``, see `loss_protocol.relevance`.
  """
  if name not in baselines.ONE_CLASS:
    return None
  working = ", ".join(other for other in LOSSES if other not in baselines.ONE_CLASS)
  return (
    f"{name} needs one class an image ({baselines.ONE_CLASS[name]}), and with data.label_separator "
    f"an image has several labels: choose one of {working}"
  )


def check(name: str, config: Any, patterns: Patterns | None = None) -> None:
  """Traces a loss on a small batch, so that errors in a custom loss are raised before training.

  Args:
    name: see `make_objective`.
    config: see `make_objective`.
    patterns: those of the run; None: an image has one class.

  Raises:
    ValueError: the objective cannot be created, or does not return a scalar loss.
  """
  dim, count = 4, 8
  setting = Setting(
    np.array([4, 4]), num_steps=10, max_positives=3, axis_name=None, embedding_dim=dim, seed=0
  )
  if patterns is not None:
    first = np.minimum(np.arange(2), len(patterns.members) - 1)
    small = patterns._replace(
      members=patterns.members[first], num_relevant=patterns.num_relevant[first]
    )
    setting = setting._replace(patterns=small)

  def loss(embeddings: Any, params: Any) -> Any:
    objective = make_objective(name, config, setting)
    state = objective.tracker.init({})
    labels = jnp.arange(count, dtype=jnp.int32) // 4
    inputs = Inputs(
      embeddings, labels, jnp.ones(count, bool), jnp.zeros([], jnp.int32), (state,), params
    )
    outputs = objective.compute(inputs)
    objective.tracker.update({}, state, {}, **outputs.update_args)
    return outputs.loss

  try:
    params = jax.eval_shape(make_objective(name, config, setting).init_params, jax.random.key(0))
    embeddings = jax.ShapeDtypeStruct((count, dim), jnp.float32)
    jax.eval_shape(jax.grad(loss, (0, 1)), embeddings, params)
  except Exception as error:  # the user's function may raise anything
    raise ValueError(
      f"loss.name={name!r} does not work as a loss (soprc_jax/training/loss_protocol.py): "
      f"{type(error).__name__}: {error}"
    ) from error
  if patterns is not None and not _takes_mask(_factory(name)(config, setting), count, dim):
    raise ValueError(
      f"loss.name={name!r} does not depend on inputs.positives, which says what is relevant where "
      "an image has several labels (data.label_separator): pass it on, see relevance() in "
      "soprc_jax/training/loss_protocol.py"
    )


def _takes_mask(objective: Objective, count: int, dim: int) -> bool:
  """Returns whether the loss of a small random batch depends on the relevance mask."""
  embeddings = masks.l2_normalize(jax.random.normal(jax.random.key(0), (count, dim)))
  state = objective.tracker.init({})
  params = objective.init_params(jax.random.key(1))
  labels = jnp.arange(count, dtype=jnp.int32) // 4

  def loss(positives: np.ndarray) -> float:
    inputs = Inputs(
      embeddings,
      labels,
      jnp.ones(count, bool),
      jnp.zeros([], jnp.int32),
      (state,),
      params,
      jnp.asarray(positives),
    )
    return float(objective.compute(inputs).loss)

  places = np.arange(count)
  return loss(places[:, None] // 4 == places // 4) != loss(places[:, None] % 2 == places % 2)


def _factory(name: str) -> Callable[[Any, Setting], Objective]:
  if name in LOSSES:
    return LOSSES[name]
  module, _, function = name.partition(":")
  return getattr(importlib.import_module(module), function)


def soprc(config: Any, setting: Setting, *, v: jax.Array | None = None) -> Objective:
  """Returns SOPRC: Eq. 8 with v of Eq. 10, or of the batch, plus the semi-variance (Eq. 9).

  The metrics ``soprc`` and ``saturated_lists`` are those of Eq. 8 with either ``link``, so that
  runs can be compared. With ``superclass_gain`` the loss is the weighted mean of Eq. 8 over classes
  and superclasses, see `graded_loss`; ``superclass_soprc`` is that of the superclasses alone. The
  other terms are those of the classes.

  Args:
    config: ``config.loss``, resolved.
    setting: properties of the run.
    v: ``[B, M]``, used in the loss instead; None takes that of ``config.v``.
  """
  carried = config.v == "carried"
  superclasses = superclass_lists.make(config, setting)
  tracker = _tracker(config, setting, superclass_lists.num_rows(setting, superclasses))
  prior_fn = make_prior(config.prior, setting)
  tau1_fn = anneal(config.tau1_start, config.tau1, setting.num_steps)
  # A full pull on an untrained network can move all images to one point.
  pull_fn = optax.linear_schedule(0.0, config.pull, setting.num_steps)

  def compute(inputs: Inputs) -> Outputs:
    labels, pairs = relevance(inputs)
    found = lists.retrieval_lists(
      inputs.embeddings,
      labels,
      max_positives=setting.max_positives,
      where=inputs.where,
      axis_name=setting.axis_name,
      **pairs,
    )
    levels = [found] if superclasses is None else [found, superclasses.make_lists(inputs)]
    update_args = found.update_args(inputs.labels)
    if superclasses is not None:
      update_args = superclasses.update_args(levels, inputs)
    if v is not None:
      own_v = v
    elif carried:
      own_v = tracker.lookahead(inputs.opt_state, **update_args)
    else:
      own_v = interpolation.interpolate_scores(
        update_args["positive_scores"],
        num_points=config.num_points,
        bounds=_COSINE_BOUNDS,
        grid=config.grid,
        where=update_args["positive_where"],
      )
    prior = prior_fn(inputs.step, inputs.labels, found)
    priors = [prior]
    if superclasses is not None:
      labels = superclasses.labels(inputs)
      priors.append(make_prior(config.prior, superclasses.setting)(inputs.step, labels, levels[1]))
    tau1 = tau1_fn(inputs.step)
    risk_fn, *others = [
      functools.partial(
        estimators.soprc_loss,
        level.positive_scores,
        level.negative_scores,
        level_v,
        prior=level_prior,
        tau2=config.tau2,
        self_weight=config.self_weight,
        tpr_gradient=config.tpr_gradient,
        reduce_fn=None,
        axis_name=setting.axis_name,
        **level.masks,
      )
      for level, level_v, level_prior in zip(
        levels, jnp.split(own_v, len(levels)), priors, strict=True
      )
    ]

    def mean(values: jax.Array) -> jax.Array:
      return masks.masked_mean(values, found.valid, None, setting.axis_name)

    def loss_of(level_fn: Callable[..., jax.Array], shares: jax.Array) -> jax.Array:
      linked_fn = functools.partial(level_fn, link=config.link)
      narrow = shares if config.link == "share" else linked_fn(tau1=tau1)
      return estimators.with_wide(narrow, linked_fn, wide=config.wide)

    risks, *other_risks = [fn(link="share", tau1=tau1) for fn in (risk_fn, *others)]
    risk = mean(risks)
    linked = loss_of(risk_fn, risks)
    loss = mean(linked)
    if superclasses is not None:
      loss = superclasses.mean([linked, *map(loss_of, others, other_risks)], levels, inputs)
    metrics = {
      "soprc": risk,
      "prior": _pmean(jnp.mean(prior), setting.axis_name),
      "tau1": tau1,
    }
    if superclasses is not None:
      metrics["superclass_soprc"] = masks.masked_mean(
        other_risks[0], levels[1].valid, None, setting.axis_name
      )
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
        **found.masks,
      )
      metrics["semi_variance"] = variance
      loss += variance
    if config.pull:
      metrics["positive_pull"] = estimators.positive_pull(
        found.positive_scores,
        positive_where=found.positive_where,
        axis_name=setting.axis_name,
      )
      loss += pull_fn(inputs.step) * metrics["positive_pull"]
    metrics[VALID_LISTS] = collectives.psum(jnp.sum(found.valid), setting.axis_name)
    metrics["dropped_positives"] = found.num_dropped
    metrics["saturated_lists"] = mean((risks > _SATURATED).astype(jnp.float32))
    if carried:
      weight = tracking.find_state(inputs.opt_state).weight
      metrics["v_rows_seen"] = jnp.mean((weight > 0).astype(jnp.float32))
      metrics["v_weight"] = jnp.mean(weight)
    return Outputs(loss, update_args if carried else {}, metrics)

  def idle_args(inputs: Inputs) -> dict[str, Any]:
    if not carried:
      return {}
    list_ids, width = inputs.labels, setting.max_positives
    if superclasses is not None:
      list_ids, width = jnp.concatenate(superclasses.list_ids(inputs)), superclasses.width
    nothing = jnp.zeros((list_ids.shape[0], width))
    return {
      "positive_scores": nothing,
      "list_ids": list_ids,
      "positive_where": jnp.zeros(nothing.shape, bool),
    }

  return Objective(tracker if carried else optax.identity(), compute, idle_args)


LOSSES: Mapping[str, Callable[[Any, Setting], Objective]] = {"soprc": soprc, **baselines.LOSSES}
# Losses with carried state cannot serve as the warm-up of another one.
CARRIED = ("soprc", *baselines.CARRIED)


def _tracker(config: Any, setting: Setting, num_rows: int) -> tracking.ScoreEma:
  uniform = np.arange(config.num_points) / config.num_points
  return tracking.score_ema(
    num_rows,
    config.num_points,
    config.beta,
    bounds=_COSINE_BOUNDS,
    grid=config.grid,
    initial_v=uniform if config.initial_v == "uniform" else None,
    axis_name=setting.axis_name,
  )


def make_prior(
  config: Any, setting: Setting
) -> Callable[[jax.Array, jax.Array, lists.RetrievalLists], jax.Array]:
  """Returns a function ``(step, labels, lists) -> prior [B]``, the prior of each query.

  With c images of the query's class among N training images, the kinds are as follows. Where an
  image has several labels, c is the number of relevant images, the query included.

  * ``frequency``: (c - 1) / (N - 1), the share of positives among the other images, as in the
    paper;
  * ``scaled``: value * c / max c, as in the authors' code;
  * ``batch``: n+ / (n+ + n-), the share of positives in the list, a biased estimator;
  * ``constant``: value.

  With ``start`` > 0 the prior changes from there to the above, by `anneal` with ``shape`` and
  ``until``.
  """
  counts, total = setting.class_counts.astype(np.float64), int(setting.class_counts.sum())
  if setting.patterns is not None:
    counts = setting.patterns.num_relevant.astype(np.float64)
  if config.kind == "frequency":
    # A class of one image has no positives. Its lists are invalid, so the value is never used.
    table = np.maximum(counts - 1, 1) / max(total - 1, 1)
  elif config.kind == "scaled":
    table = config.value * counts / counts.max()
  else:
    table = np.full(len(counts), config.value if config.kind == "constant" else 0.5)
  per_class = table.astype(np.float32)  # on the host: arrays created under jit must not outlive it

  def prior(step: jax.Array, labels: jax.Array, found: lists.RetrievalLists) -> jax.Array:
    if config.kind == "batch":
      positives = jnp.sum(found.positive_where, axis=-1)
      target = positives / jnp.maximum(positives + jnp.sum(found.negative_where, axis=-1), 1)
      target = jnp.maximum(target, jnp.finfo(jnp.float32).tiny)
    else:
      target = jnp.asarray(per_class)[labels]
    return anneal(config.start, target, setting.num_steps, shape=config.shape, until=config.until)(
      step
    )

  return prior


def anneal(
  start: float, end: Any, num_steps: int, *, shape: str = "log", until: float = 1.0
) -> Callable[[jax.Array], jax.Array]:
  """Returns a schedule from ``start`` to ``end``; constantly ``end`` if ``start`` is 0.

  Args:
    start: value at step 0, > 0; or 0.
    end: value from step ``until * num_steps`` on, > 0, a number or an array.
    num_steps: number of steps of the phase.
    shape: ``log``: linear in the logarithm; ``linear``: linear in the value; ``cosine``: half a
      cosine in the logarithm, slow at both ends.
    until: share of the phase that the schedule takes, in (0, 1].

  >>> schedule = anneal(0.5, 0.005, 100)
  >>> print(f"{schedule(0):.3f} {schedule(50):.3f} {schedule(100):.3f}")
  0.500 0.050 0.005
  >>> schedule = anneal(0.5, 0.1, 100, shape="linear", until=0.5)
  >>> print(f"{schedule(0):.2f} {schedule(25):.2f} {schedule(50):.2f} {schedule(100):.2f}")
  0.50 0.30 0.10 0.10
  """

  def schedule(step: Any) -> jax.Array:
    target = jnp.asarray(end, jnp.float32)
    if not start:
      return target
    done = jnp.clip(jnp.asarray(step, jnp.float32) / max(until * num_steps, 1), 0.0, 1.0)
    if shape == "linear":
      return (1 - done) * start + done * target
    if shape == "cosine":
      done = (1 - jnp.cos(np.pi * done)) / 2
    return jnp.exp((1 - done) * jnp.log(start) + done * jnp.log(target))

  return schedule


def _pmean(value: jax.Array, axis_name: str | None) -> jax.Array:
  return value if axis_name is None else jax.lax.pmean(value, axis_name)
