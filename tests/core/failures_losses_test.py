"""Tests batches that failed in comparable libraries (shared/failures.md) with every loss of a run.

Each test checks value, gradient, carried state and counts. The losses are SOPRC and those of
training/baselines.py.
"""

import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import losses, retrieval_lists, soprc_loss, tracking
from soprc_jax.training import config as config_lib
from soprc_jax.training import loop, objectives

_B, _DIM, _CLASSES = 8, 4, 8
# Their terms need a positive or a negative, not both, or proxies alone.
_OF_PAIRS = (
  "contrastive",
  "xbm",
  "multi_similarity",
  "sup_con",
  "sigmoid",
  "proxy_anchor",
  "norm_softmax",
  "arc_face",
)
_every_loss = pytest.mark.parametrize("name", list(objectives.LOSSES))


@functools.cache
def _objective(name, max_positives=_B - 1):
  config = config_lib.default_config()
  config.update_from_flattened_dict(
    {"loss.num_points": 6, "loss.xbm.memory_size": 16, "loss.blackbox.memory_size": 16}
  )
  setting = objectives.Setting(
    np.full(_CLASSES, 5), 10, max_positives, axis_name=None, embedding_dim=_DIM
  )
  return objectives.make_objective(name, config_lib.resolve(config).loss, setting)


@functools.cache
def _compiled(name, max_positives=_B - 1):
  objective = _objective(name, max_positives)

  def step(state, embeddings, labels, where):
    def loss_fn(embeddings):
      outputs = objective.compute(
        objectives.Inputs(
          embeddings,
          labels,
          where,
          jnp.int32(0),
          (state,),
          objective.init_params(jax.random.key(0)),
        )
      )
      return outputs.loss, outputs

    (loss, outputs), gradient = jax.value_and_grad(loss_fn, has_aux=True)(embeddings)
    _, after = objective.tracker.update({}, state, {}, **outputs.update_args)
    return loss, gradient, outputs.metrics, after

  return jax.jit(step)


def _run(name, labels, *, where=None, seed=0, order=None, max_positives=_B - 1, state=None):
  """Returns loss, gradient, metrics and carried state of a batch. ``order`` permutes its images."""
  vectors = np.random.default_rng(seed).standard_normal((_B, _DIM))
  embeddings = np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
  labels, where = (
    np.array(labels, np.int32),
    np.ones(_B, bool) if where is None else np.array(where, bool),
  )
  order = np.arange(_B) if order is None else order
  state = _objective(name, max_positives).tracker.init({}) if state is None else state
  return jax.device_get(
    _compiled(name, max_positives)(state, embeddings[order], labels[order], where[order])
  )


@_every_loss
def test_f01_a_class_with_one_image_is_no_anchor(name):
  labels = np.array([0, 0, 3, 1, 1, 0, 1, 0])
  _, _, _, before = _run(name, [3, 3, 0, 0, 1, 1, 2, 2], seed=1)
  loss, gradient, metrics, after = _run(name, labels, state=before)
  chex.assert_tree_all_finite((loss, gradient, metrics, after))
  assert metrics["valid_lists"] == 7
  assert loss > 0
  if name == "soprc":
    old, new = tracking.find_state(before), tracking.find_state(after)
    assert old.weight[3] > 0
    np.testing.assert_array_equal(new.v[3], old.v[3])
    np.testing.assert_array_equal(new.weight[3], old.weight[3])
    assert (new.weight[:2] > old.weight[:2]).all()


def test_f01_the_list_of_a_class_with_one_image_has_no_loss_and_no_gradient():
  labels = np.array([0, 0, 3, 1, 1, 0, 1, 0])
  found = jax.jit(functools.partial(retrieval_lists, max_positives=3))(
    np.random.default_rng(0).normal(size=(_B, _DIM)), labels
  )
  masks = {"positive_where": found.positive_where, "negative_where": found.negative_where}

  def loss_fn(positive, negative):
    each = soprc_loss(
      positive, negative, jnp.zeros((_B, 6)), prior=0.1, tau1=5.0, reduce_fn=None, **masks
    )
    return soprc_loss(positive, negative, jnp.zeros((_B, 6)), prior=0.1, tau1=5.0, **masks), each

  scores = found.positive_scores, found.negative_scores
  (value, each), (positive, negative) = jax.jit(
    jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
  )(*scores)
  others = np.arange(_B) != 2
  assert each[2] == 0
  np.testing.assert_allclose(
    value, np.mean(each[others]), rtol=1e-6
  )  # the mean does not count it either
  np.testing.assert_array_equal(positive[2], 0)
  np.testing.assert_array_equal(negative[2], 0)
  assert np.abs(negative[others]).max(axis=1).min() > 0


@_every_loss
@pytest.mark.parametrize(
  ("labels", "where"),
  [
    (np.arange(8), None),
    (np.full(8, 5), None),
    (np.arange(8) // 2, [1, 0] * 4),
    (np.zeros(8), np.zeros(8)),
  ],
  ids=["no_positive_pair", "one_class", "no_positive_pair_by_mask", "all_masked"],
)
def test_f02_batches_without_a_list_are_finite_and_counted(name, labels, where):
  _, _, _, before = _run(name, [3, 3, 0, 0, 1, 1, 5, 5], seed=1)
  loss, gradient, metrics, after = _run(name, labels, where=where, state=before)
  chex.assert_tree_all_finite((loss, gradient, metrics, after))
  assert metrics["valid_lists"] == 0
  if name not in (*_OF_PAIRS, "blackbox") or (
    where is not None and not np.any(where)
  ):  # the memory may hold positives
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)
  if name == "soprc":
    old, new = tracking.find_state(before), tracking.find_state(after)
    # Positives move v with or without negatives.
    moved = np.arange(8) == 5 if len(set(labels)) == 1 and where is None else np.zeros(8, bool)
    np.testing.assert_array_equal((new.v != old.v).any(1), moved)
    np.testing.assert_array_equal(new.weight != old.weight, moved)


def test_f02_empty_batches_are_told_and_end_the_run_if_they_persist(caplog):
  counter = loop.EmptyBatches(limit=3)
  with caplog.at_level(logging.WARNING):
    for step, valid_lists in enumerate([4, 0, 0, 1, 0, 0]):
      counter.note(step, valid_lists)
  assert [record.message.split(":")[0] for record in caplog.records] == ["Step 1", "Step 4"]
  with pytest.raises(
    loop.EmptyBatchesError,
    match=r"in 3 batches in a row, up to step 6.*train\.per_class.*data\.small_classes",
  ):
    counter.note(6, 0.0)


@_every_loss
def test_f13_a_class_at_two_places_and_any_order_change_nothing(name):
  # A layout of four classes of two images would take the first class for two classes.
  labels = np.array([2, 2, 0, 0, 1, 1, 2, 2])
  loss, gradient, metrics, state = _run(name, labels)
  assert metrics["valid_lists"] == _B
  assert loss > 0
  for order in (np.argsort(labels, kind="stable"), np.random.default_rng(1).permutation(_B)):
    other_loss, other_gradient, other_metrics, other_state = _run(name, labels, order=order)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    # The similarity of an image to itself lies on a kink of listwise_ap, where float32 decides.
    # Only the gradient along the sphere is unaffected.
    scale = max(np.abs(gradient).max(), 1e-3)
    np.testing.assert_allclose(
      _tangential(other_gradient, order), _tangential(gradient)[order], atol=2e-5 * scale
    )
    chex.assert_trees_all_close(other_metrics, metrics, rtol=1e-5, atol=1e-6)
    if name == "soprc":
      chex.assert_trees_all_close(other_state, state, rtol=1e-6, atol=1e-6)


def _tangential(gradient, order=None):
  """Returns the part of each image's gradient along the unit sphere."""
  vectors = np.random.default_rng(0).standard_normal((_B, _DIM))
  rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  rows = rows if order is None else rows[order]
  return gradient - np.sum(gradient * rows, axis=1, keepdims=True) * rows


def test_f13_positives_that_a_class_at_two_places_has_too_many_are_counted():
  labels = np.array([2, 2, 0, 0, 1, 1, 2, 2])
  assert _run("soprc", labels)[2]["dropped_positives"] == 0
  assert _run("soprc", labels, max_positives=1)[2]["dropped_positives"] == 4 * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
  "loss_fn",
  [
    functools.partial(losses.smooth_ap_loss, tau=1e-3),
    functools.partial(losses.auroc_loss, surrogate="sigmoid", tau=1e-3),
    functools.partial(losses.auroc_loss, surrogate="huber", tau=1e-3),
    functools.partial(losses.multi_similarity_loss, beta=1000.0),
    losses.listwise_ap_loss,
  ],
  ids=["smooth_ap", "auroc_sigmoid", "auroc_huber", "multi_similarity", "listwise_ap"],
)
def test_f24_half_precision_and_a_tiny_temperature_are_finite_at_the_bounds(loss_fn, dtype):
  # Cosines of -1, 0 and 1 give differences of -2, 0 and 2, where exp(2 / tau) overflows float32.
  embeddings = np.array([[1, 0], [-1, 0], [0, 1], [1, 0], [0, -1], [-1, 0]])
  labels = np.array([0, 0, 1, 1, 2, 2])
  value, gradient = jax.jit(jax.value_and_grad(loss_fn))(jnp.asarray(embeddings, dtype), labels)
  assert value.dtype == jnp.float32
  assert value > 0
  chex.assert_tree_all_finite((value, gradient.astype(jnp.float32)))
  want = loss_fn(jnp.float32(embeddings), labels)
  np.testing.assert_allclose(
    value, want, rtol=1e-5
  )  # these numbers are exact in half precision, so all later results are too


def test_f38_a_frozen_subtree_takes_no_part_in_clipping():
  """Checks `score_ema` in front of an optimizer that clips the gradient of the trained part. The
  clipping factor must not depend on the frozen part.
  """
  tracker = tracking.score_ema(2, 3, 0.5)
  trained = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
  tx = optax.chain(
    tracker,
    optax.partition(
      {"trained": trained, "frozen": optax.set_to_zero()}, {"head": "trained", "stem": "frozen"}
    ),
  )
  params = {"head": jnp.zeros(2), "stem": jnp.zeros(2)}
  gradient = {"head": jnp.array([0.3, 0.4]), "stem": jnp.array([300.0, 400.0])}
  scores = {"positive_scores": jnp.array([[0.1, 0.2]]), "list_ids": jnp.array([1])}
  updates, state = tx.update(gradient, tx.init(params), params, **scores)
  np.testing.assert_allclose(
    updates["head"], [-0.3, -0.4], rtol=1e-6
  )  # 0.5 is below the norm bound: not clipped
  np.testing.assert_array_equal(updates["stem"], 0)
  assert tracking.find_state(state).weight.tolist() == [0, 0.5]
