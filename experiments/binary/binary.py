"""Trains on imbalanced classes, or several labels, with one compiled call per method and seed.

The call trains all learning rates side by side.

The test split is the same at all seeds. At a seed, all methods share the division into train and
validation, the initial weights, the batches, the optimizer and the budget. AUPRC is computed from
the logits. With K labels they are ``[n, K]``, and AUPRC is the mean over the labels.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax

from experiments.binary import binary_losses
from soprc_jax import metrics
from soprc_jax._internal import masks
from soprc_jax.data import balanced, multilabel, tabular
from soprc_jax.models import mlp
from soprc_jax.training import optimizers
from soprc_jax.training.loss_protocol import Inputs, Objective, Setting


class Task(NamedTuple):
  """What all methods share at one seed.

  Attributes:
    splits: train, validation and test data.
    params: initial weights.
    batches: ``[E, K, B]`` int32 positions in the training split: E evaluations, K steps before
      each.
    num_positives: only the first ``num_positives`` examples of a batch may be positive. With
      several labels, each of them has at most that many positives in a batch.
  """

  splits: tabular.Splits
  params: Any
  batches: np.ndarray
  num_positives: int


class Found(NamedTuple):
  """The results of a method at one seed, with R learning rates.

  Attributes:
    val: ``[R, E]`` validation AUPRC, NaN where a logit is not finite.
    losses: ``[R, E]`` mean training loss since the previous evaluation.
    scores: ``[R, n]`` or ``[R, n, K]`` logits of the test examples, by the model with the best
      validation AUPRC.
    best: ``[R]`` validation AUPRC of that model, NaN if there is none.
  """

  val: np.ndarray
  losses: np.ndarray
  scores: np.ndarray
  best: np.ndarray


class State(NamedTuple):
  """The state that a step updates."""

  params: Any
  opt_state: Any
  step: jax.Array


def load(config: Any) -> tabular.Table | multilabel.Table:
  """Loads the data set of ``config.data``.

  Raises:
    FileNotFoundError: there is no such folder or file.
    ValueError: a package is missing, or the positive class is unknown.
  """
  data = config.data
  if data.name in multilabel.DATA_SETS:
    return multilabel.load(data.name, root=data.root)
  return tabular.load(data.name, positive=data.positive)


def prepare(config: Any, table: tabular.Table | multilabel.Table, seed: int) -> Task:
  """Returns the task of a seed.

  Raises:
    ValueError: the data do not fit the config.
  """
  data = config.data
  seeds = {"seed": seed, "split_seed": data.split_seed}
  shares = {"val_share": data.val_share, "test_share": data.test_share}
  sampler: balanced.BalancedSampler | balanced.MultilabelSampler
  if isinstance(table, tabular.Table):
    splits = tabular.split(table, share=data.share, **shares, **seeds)
    sampler = balanced.BalancedSampler(
      splits.train.labels, batch_size=data.batch_size, positive_share=data.positive_share, seed=seed
    )
  else:
    splits = (
      multilabel.long_tailed(table, **data.long_tail, **seeds)
      if data.long_tail.head
      else multilabel.split(table, **shares, **seeds)
    )
    sampler = balanced.MultilabelSampler(
      splits.train.labels,
      batch_size=data.batch_size,
      num_classes=data.classes_per_batch,
      per_class=data.per_class,
      seed=seed,
    )
  features = jnp.zeros((1, splits.train.features.shape[1]))
  params = _network(config, splits).init(jax.random.key(seed), features)
  batches = sampler.batches(0, config.train.steps).reshape(-1, config.eval.every, data.batch_size)
  num_positives = (
    sampler.num_positives
    if isinstance(sampler, balanced.BalancedSampler)
    else _most_positives(splits.train.labels, batches)
  )
  return Task(splits, params, batches, num_positives)


def _most_positives(labels: np.ndarray, batches: np.ndarray) -> int:
  """Returns the most positives of a label in a batch, rounded up so that seeds share a size."""
  most = max(int(labels[rows].sum(axis=1).max()) for rows in batches)
  return min(-(-most // 16) * 16, batches.shape[-1])


def make_loss(config: Any, name: str, task: Task) -> Objective:
  """Returns the loss of a method for tasks of this size."""
  labels = task.splits.train.labels
  counts = np.stack([(labels == value).sum(axis=0) for value in (0, 1)], axis=-1)
  setting = Setting(
    counts, num_steps=config.train.steps, max_positives=task.num_positives, axis_name=None
  )
  return binary_losses.make(name, config.loss, setting)


def make_trainer(config: Any, name: str, task: Task) -> Callable[[Task], Found]:
  """Returns a function that trains a method on any task of the same size.

  The seeds share its compilation.
  """
  loss = make_loss(config, name, task)
  network = _network(config, task.splits)

  def run(rate: Any, params: Any, splits: tabular.Splits, batches: Any) -> tuple[Any, ...]:
    tx = make_optimizer(config, loss, rate)
    take_steps = functools.partial(
      _take_steps, network, loss, tx, splits.train.features, splits.train.labels
    )

    def evaluated(carry: Any, rows: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
      state, best, best_params = carry
      state, losses = take_steps(state, rows)
      logits: Any = network.apply(state.params, splits.val.features)
      value = auprc(binary_losses.ranked(name, logits), splits.val.labels)
      better = value > best  # always False for NaN
      best_params = jax.tree.map(
        lambda new, old: jnp.where(better, new, old), state.params, best_params
      )
      return (state, jnp.where(better, value, best), best_params), (value, jnp.mean(losses))

    state = State(params, tx.init(params), jnp.zeros([], jnp.int32))
    (_, best, best_params), (val, losses) = jax.lax.scan(
      evaluated, (state, jnp.float32(-1), params), batches
    )
    logits: Any = network.apply(best_params, splits.test.features)
    return (
      val,
      losses,
      binary_losses.ranked(name, logits),
      jnp.where(best < 0, jnp.nan, best),
    )

  over_rates = jax.jit(jax.vmap(run, in_axes=(0, None, None, None)))
  rates = jnp.array(config.rates, jnp.float32)

  def train(task: Task) -> Found:
    splits = task.splits._replace(feature_names=(), label_names=())
    return Found(
      *(np.asarray(values) for values in over_rates(rates, task.params, splits, task.batches))
    )

  return train


def make_stepper(config: Any, name: str, task: Task, rate: float) -> Callable[[State, Any], State]:
  """Returns a function ``(state, batches [K, B]) -> state`` that takes K steps only.

  It is for timing and for tests.
  """
  loss = make_loss(config, name, task)
  tx = make_optimizer(config, loss, rate)
  train = task.splits.train
  data = jnp.asarray(train.features), jnp.asarray(train.labels)

  @jax.jit
  def take_steps(data: tuple[jax.Array, jax.Array], state: State, rows: Any) -> State:
    return _take_steps(_network(config, task.splits), loss, tx, *data, state, rows)[0]

  # The data are an argument: as a constant they would be compiled in.
  return functools.partial(take_steps, data)


def first_state(config: Any, name: str, task: Task) -> State:
  """Returns the state that every run of a task starts from."""
  tx = make_optimizer(config, make_loss(config, name, task), 1.0)
  return State(task.params, tx.init(task.params), jnp.zeros([], jnp.int32))


def make_optimizer(
  config: Any, loss: Objective, rate: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns the loss's tracker, chained with ``config.optim`` at a learning rate.

  The learning rate may be traced.
  """
  # Updates of SGD and of Adam are linear in the learning rate, so those at rate 1 can be scaled.
  return optax.chain(
    loss.tracker, optimizers.make_optimizer(_at_rate_one(config)), optax.scale(rate)
  )


def rate_factors(config: Any) -> np.ndarray:
  """Returns the factor of the learning rate at each step, ``[steps]``, by the schedule."""
  schedule = optimizers.make_schedule(_at_rate_one(config))
  steps = jnp.arange(config.train.steps)
  return np.broadcast_to(np.asarray(schedule(steps), np.float64), steps.shape)


def _at_rate_one(config: Any) -> Any:
  """Returns what `optimizers` reads of a retrieval config, with a learning rate of 1."""
  optim = {**config.optim.to_dict(), "learning_rate": 1.0, "head_multiplier": 1.0}
  return config_dict.ConfigDict(
    {
      "optim": optim,
      "train": config.train.to_dict(),
      "warmup": {"steps": 0},
      "loss": {"proxy_multiplier": 1.0},
    }
  )


@jax.jit
def auprc(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Computes `metrics.auprc`, NaN if a logit is not finite.

  Of logits and labels ``[n, K]`` it is the mean over the labels that have a positive.
  """
  value = metrics.auprc(logits.T, labels.T)
  if labels.ndim > 1:
    value = masks.masked_mean(value, jnp.any(labels > 0, axis=0))
  return jnp.where(jnp.all(jnp.isfinite(logits)), value, jnp.nan)


def _take_steps(
  network: mlp.MLP,
  loss: Objective,
  tx: optax.GradientTransformationExtraArgs,
  features: Any,
  labels: Any,
  state: State,
  rows: Any,
) -> tuple[State, jax.Array]:
  """Takes one optimization step (Alg. 1) for each row ``[B]`` of ``rows [K, B]``.

  Returns the state and the losses ``[K]``.
  """

  def step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
    def objective(params: Any) -> tuple[jax.Array, Mapping[str, Any]]:
      logits: Any = network.apply(params, features[rows])
      where = jnp.ones(rows.shape, bool)
      outputs = loss.compute(Inputs(logits, labels[rows], where, state.step, state.opt_state))
      return outputs.loss, outputs.update_args

    (value, seen), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, **seen)
    return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), value

  return jax.lax.scan(step, state, rows)


def _network(config: Any, splits: tabular.Splits) -> mlp.MLP:
  labels = splits.train.labels
  return mlp.MLP(tuple(config.model.widths), labels.shape[1] if labels.ndim > 1 else None)
