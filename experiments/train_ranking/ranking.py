"""Trains a network on query groups, with all learning rates of a method side by side.

At a seed all methods share the initial weights, the batches, the optimizer and the budget.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.binary import binary
from experiments.train_ranking import ranking_losses
from soprc_jax import metrics
from soprc_jax.data import query_groups, tabular
from soprc_jax.data.query_groups import QueryGroups
from soprc_jax.models import mlp
from soprc_jax.training.loss_protocol import Inputs, Objective

# Documents that are scored at once, and columns that are standardized at once.
_BLOCK, _COLUMNS = 2**16, 16
# NDCG has the gain 2^relevance - 1. A sum of gains must fit float32.
_MAX_RELEVANCE = 100


class Task(NamedTuple):
  """The documents of the three splits, standardized by those of train.

  Attributes:
    train: documents to learn from.
    val: documents that choose the learning rate and the step.
    test: documents of the results.
    drawn: ``[G']`` numbers of the training queries that are drawn, see `QueryGroups.graded`.
  """

  train: QueryGroups
  val: QueryGroups
  test: QueryGroups
  drawn: np.ndarray


def prepare(train: QueryGroups, val: QueryGroups, test: QueryGroups) -> Task:
  """Returns the task. A feature that is constant in train becomes 0 everywhere.

  Raises:
    ValueError: train has no query whose documents differ in relevance; val has no query with a
      relevant document, or test fewer than two; a relevance is above 100.
  """
  for name, split in (("train", train), ("val", val), ("test", test)):
    if split.relevance.max() > _MAX_RELEVANCE:
      raise ValueError(
        f"--{name} has a relevance of {split.relevance.max():g}: it must be at most "
        f"{_MAX_RELEVANCE}, since NDCG has the gain 2^relevance - 1. Use grades such as 0 to 4"
      )
  for name, split in (("val", val), ("test", test)):
    if not split.relevant.any():
      raise ValueError(
        f"--{name} has no relevant document (relevance > 0) in {len(split.sizes)} queries: give a "
        "file with some"
      )
  if (test.relevant > 0).sum() < 2:
    raise ValueError(
      "--test has one query with a relevant document, and an interval for new queries needs two: "
      "give a file with more"
    )
  drawn = np.flatnonzero(train.graded & (train.relevant > 0))
  if not len(drawn):
    raise ValueError(
      f"--train has no query whose documents differ in relevance, of {len(train.sizes)}: nothing "
      "can be learned from it"
    )
  parts = [
    tabular.standardization(train.features[:, first : first + _COLUMNS])
    for first in range(0, train.features.shape[1], _COLUMNS)
  ]
  mean, scale = (np.concatenate(own).astype(np.float32) for own in zip(*parts, strict=True))

  def standardized(split: QueryGroups) -> QueryGroups:
    return split._replace(features=(split.features - mean) * scale)

  return Task(standardized(train), standardized(val), standardized(test), drawn)


def make_trainer(config: Any, name: str, task: Task) -> Callable[[int], binary.Found]:
  """Returns a function of the seed that trains a method. The seeds share its compilations."""
  network = mlp.MLP(tuple(config.model.widths))
  loss = ranking_losses.make(name, config.train.steps)
  rates = jnp.array(config.rates, jnp.float32)
  step = jax.jit(
    jax.vmap(functools.partial(_step, config, network, loss), in_axes=(0, 0, None, None, None))
  )
  data = jnp.asarray(task.train.features), jnp.asarray(task.train.relevance)

  def start(params: Any, rate: jax.Array) -> binary.State:
    tx = binary.make_optimizer(config, loss, rate)
    return binary.State(params, tx.init(params), jnp.zeros([], jnp.int32))

  def train(seed: int) -> binary.Found:
    params = network.init(jax.random.key(seed), data[0][:1])
    states = jax.vmap(start, in_axes=(None, 0))(params, rates)
    sampler = query_groups.GroupSampler(len(task.drawn), batch_size=config.train.queries, seed=seed)
    best, best_params, val, losses = np.full(len(rates), -1.0), states.params, [], []
    for first in range(0, config.train.steps, config.eval.every):
      values = []
      for number in range(first, first + config.eval.every):
        rows, where = query_groups.padded_rows(task.train, task.drawn[sampler(number)])
        states, value = step(rates, states, data, jnp.asarray(rows), jnp.asarray(where))
        values.append(value)
      found = score(network, states.params, task.val.features)
      val.append([mean(per_query(task.val, one)["AP"]) for one in found])
      losses.append(np.mean(np.stack(values), axis=0))
      better = np.asarray(val[-1]) > best  # False for NaN
      best = np.where(better, val[-1], best)
      best_params = jax.tree.map(functools.partial(_where, better), states.params, best_params)
    scores = score(network, best_params, task.test.features)
    return binary.Found(
      np.array(val).T, np.array(losses).T, scores, np.where(best < 0, np.nan, best)
    )

  return train


def _step(
  config: Any,
  network: mlp.MLP,
  loss: Objective,
  rate: Any,
  state: binary.State,
  data: tuple[jax.Array, jax.Array],
  rows: jax.Array,
  where: jax.Array,
) -> tuple[binary.State, jax.Array]:
  """Takes one optimization step on the documents ``rows [Q, L]``, and returns its loss too."""
  features, relevance = (values[rows] for values in data)
  tx = binary.make_optimizer(config, loss, rate)

  def objective(params: Any) -> jax.Array:
    scores: Any = network.apply(params, features.reshape(-1, features.shape[-1]))
    scores = scores.reshape(rows.shape)
    return loss.compute(Inputs(scores, relevance, where, state.step, state.opt_state)).loss

  value, grads = jax.value_and_grad(objective)(state.params)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return binary.State(params, opt_state, state.step + 1), value


def _where(chosen: np.ndarray, new: jax.Array, old: jax.Array) -> jax.Array:
  """Chooses between ``[R, ...]`` arrays by ``chosen [R]``."""
  return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def mean(values: np.ndarray) -> float:
  """Returns the mean over the queries that have a value, NaN if none has one."""
  known = values[np.isfinite(values)]
  return float(known.mean()) if len(known) else float("nan")


def score(network: mlp.MLP, params: Any, features: np.ndarray) -> np.ndarray:
  """Computes the scores ``[R, N]`` of documents by R networks, in blocks."""
  parts = [
    np.asarray(_score(network, params, features[first : first + _BLOCK]))
    for first in range(0, len(features), _BLOCK)
  ]
  return np.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _score(network: mlp.MLP, params: Any, features: Any) -> Any:
  return jax.vmap(network.apply, in_axes=(0, None))(params, features)


def per_query(groups: QueryGroups, scores: np.ndarray) -> dict[str, np.ndarray]:
  """Computes average precision and NDCG@10 of each query.

  The gain of NDCG is 2^relevance - 1. Ties count against average precision, and are broken at
  random in NDCG.

  Args:
    groups: G queries with N documents.
    scores: ``[N]``.

  Returns:
    ``AP`` and ``NDCG@10``, each ``[G]``, NaN for a query without a relevant document; all NaN if a
    score is not finite.
  """
  rows, where = query_groups.padded_rows(groups, np.arange(len(groups.sizes)))
  known = groups.relevant > 0
  if not np.isfinite(scores).all():
    known = np.zeros_like(known)
    scores = np.zeros_like(scores)
  values = _per_query(scores[rows], groups.relevance[rows], where)
  return {
    name: np.where(known, np.asarray(own, np.float64), np.nan) for name, own in values.items()
  }


@jax.jit
def _per_query(scores: Any, relevance: Any, where: Any) -> dict[str, jax.Array]:
  ndcg = ranking_losses.rax().ndcg_metric(
    scores, relevance, where=where, topn=10, key=jax.random.key(0), reduce_fn=None
  )
  return {"AP": metrics.auprc(scores, relevance, where=where), "NDCG@10": ndcg}
