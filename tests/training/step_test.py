"""Tests the training step, on one device and on two."""

import dataclasses
import functools
import os
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from soprc_jax import losses, tracking
from soprc_jax.training import objectives, parallel


def _first(tree):
  return jax.tree.map(lambda leaf: leaf[0], tree)


def _leaves_moved(before, after):
  return [
    bool(np.any(a != b))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  ]


class TestStep:
  def test_loss_decreases(self):
    _, history = toys.make(devices=toys.NUM_DEVICES).run(
      [toys.make_batch(seed) for seed in range(30)]
    )
    losses = np.array([scalars["loss"][0] for scalars in history])
    assert np.isfinite(losses).all()
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()

  def test_counts_steps_and_moves_everything(self):
    toy = toys.make(devices=toys.NUM_DEVICES)
    state, _ = toy.run([toys.make_batch(0), toys.make_batch(1)])
    before, after = jax.device_get(toy.initial()), _first(state)
    assert after.step == 2
    assert after.step.dtype == np.int32
    assert all(_leaves_moved(before.params, after.params))
    assert all(_leaves_moved(before.batch_stats, after.batch_stats))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [leaf.dtype for leaf in jax.tree.leaves(before)] == [
      leaf.dtype for leaf in jax.tree.leaves(after)
    ]

  @pytest.mark.parametrize(
    ("values", "where"),
    [
      ({}, None),
      ({"loss__preset": "paper", "loss__name": "soprc"}, None),
      ({"loss__name": "triplet"}, None),
      ({"loss__name": "proxy_anchor"}, None),
      # Devices may have equal or unequal numbers of valid images. The lists must be right in any
      # case. Batch norm is frozen here.
      ({"masked": True, "freeze_bn": True}, [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0]),
    ],
    ids=["soprc", "paper", "triplet", "proxies", "masked"],
  )
  def test_f23_two_devices_equal_one_on_the_joined_batch(self, values, where):
    batches = [toys.make_batch(seed, where) for seed in range(3)]
    want, want_history = toys.make(**values).run(batches)
    got, history = toys.make(devices=toys.NUM_DEVICES, **values).run(batches)
    chex.assert_trees_all_equal(
      _first(got), jax.tree.map(lambda leaf: leaf[1], got)
    )  # the same on every device
    for scalars, want_scalars in zip(history, want_history, strict=True):
      chex.assert_trees_all_close(_first(scalars), want_scalars, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(_first(got), want, rtol=1e-3, atol=2e-5)

  @pytest.mark.parametrize(
    ("check_vma", "values"),
    [(False, {}), (True, {}), (True, {"freeze_bn": True, "microbatch": 4})],
    ids=["unchecked", "whole", "microbatches"],
  )
  def test_the_same_step_under_shard_map(self, check_vma, values):
    # A change from pmap to another mapping stays inside parallel.py: the step does not depend on
    # the mapping.
    toy, batches = (
      toys.make(devices=toys.NUM_DEVICES, **values),
      [toys.make_batch(seed) for seed in range(3)],
    )
    want, want_history = toy.run(batches)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: toys.NUM_DEVICES]), (parallel.AXIS_NAME,))
    everywhere, parts = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(parallel.AXIS_NAME)
    step = jax.jit(
      jax.shard_map(
        toy.function,
        mesh=mesh,
        in_specs=(everywhere, parts),
        out_specs=(everywhere, everywhere),
        check_vma=check_vma,
      )
    )
    state = toy.initial()
    for batch, scalars in zip(batches, want_history, strict=True):
      state, got = step(state, batch)
      chex.assert_trees_all_close(jax.device_get(got), _first(scalars), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state), _first(want), rtol=1e-3, atol=2e-5)

  def test_f13_order_of_the_batch_changes_nothing(self):
    order = np.random.default_rng(5).permutation(toys.BATCH)
    batch = toys.make_batch()
    want, want_history = toys.make().run([batch])
    got, history = toys.make().run([{key: value[order] for key, value in batch.items()}])
    np.testing.assert_allclose(history[0]["loss"], want_history[0]["loss"], rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=2e-5)

  def test_masked_images_play_no_role(self):
    # In the loss, in v and in batch statistics.
    where = np.arange(toys.BATCH) % 4 < 3
    batch = toys.make_batch(0, where)
    other = batch | {
      "image": np.where(where[:, None, None, None], batch["image"], 255 - batch["image"])
    }
    toy = toys.make(masked=True)
    chex.assert_trees_all_close(toy.run([batch]), toy.run([other]), rtol=1e-5, atol=1e-6)

  @pytest.mark.parametrize(
    "where", [[0] * 16, [1] + [0] * 15, [1] * 4 + [0] * 12, [1, 0, 0, 0] * 4]
  )
  def test_f02_batches_without_a_list_leave_v_alone_and_weights_finite(self, where):
    # All masked, one image, one class (v still moves), one image of each class.
    toy = toys.make(masked=True, freeze_bn=True)
    state, history = toy.run([toys.make_batch(0, where)])
    chex.assert_tree_all_finite((state, history))
    assert history[0]["loss"] == pytest.approx(0, abs=1e-6) or where[:4] == [1] * 4
    moved = tracking.find_state(state.opt_state).weight > 0
    assert moved.sum() == (1 if where[:4] == [1] * 4 else 0)

  def test_f26_frozen_batch_norm_keeps_its_statistics_to_the_bit(self):
    toy = toys.make(freeze_bn=True)
    state, _ = toy.run([toys.make_batch(seed) for seed in range(3)])
    before = jax.device_get(toy.initial())
    chex.assert_trees_all_equal(state.batch_stats, before.batch_stats)
    assert all(_leaves_moved(before.params, state.params))

  def test_bfloat16_step_is_finite_and_keeps_float32_parameters(self):
    state, history = toys.make(dtype="bfloat16").run([toys.make_batch(seed) for seed in range(3)])
    chex.assert_tree_all_finite((state, history))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    _, want = toys.make().run([toys.make_batch(0)])
    np.testing.assert_allclose(history[0]["loss"], want[0]["loss"], rtol=0.05)


class TestCarriedScores:
  def test_the_loss_uses_exactly_the_v_that_the_step_stores(self, monkeypatch):
    used = []
    original = objectives.estimators.soprc_loss

    def spy(positive_scores, negative_scores, v, **options):
      jax.debug.callback(lambda rows: used.append(np.array(rows)), v)
      return original(positive_scores, negative_scores, v, **options)

    monkeypatch.setattr(objectives.estimators, "soprc_loss", spy)
    toy = toys.Toy()
    state = toy.initial()
    for seed in range(3):
      used.clear()
      batch = toys.make_batch(seed)
      state, _ = toy.run([batch], state)
      jax.effects_barrier()
      stored = tracking.find_state(state.opt_state)
      # XLA may fuse, and so round, the two differently: on some machines by one bit.
      np.testing.assert_allclose(used[0], stored.v[batch["label"]], rtol=3e-7)

  def test_rows_of_classes_in_the_batch_move_and_no_others(self):
    state, _ = toys.make().run([toys.make_batch(0)])
    stored = tracking.find_state(state.opt_state)
    present = np.isin(np.arange(toys.CLASSES), toys.make_batch(0)["label"])
    np.testing.assert_allclose(stored.weight, np.where(present, 0.1, 0.0), rtol=1e-6)
    np.testing.assert_array_equal(stored.v.any(1), present)

  def test_a_warmup_step_with_another_loss_leaves_v_and_weights_alone(self):
    start, _ = toys.make().run([toys.make_batch(0), toys.make_batch(1)])
    after, history = toys.make(warmup=True).run([toys.make_batch(2)], start)
    before, stored = tracking.find_state(start.opt_state), tracking.find_state(after.opt_state)
    np.testing.assert_array_equal(stored.v, before.v)
    np.testing.assert_array_equal(stored.weight, before.weight)
    assert all(_leaves_moved(start.params, after.params))
    assert "soprc" not in history[0]

  def test_a_warmup_starts_from_the_same_structure(self):
    # Both phases update the same state: no part of it may change its type.
    state, _ = toys.make(warmup=True).run([toys.make_batch(0)])
    assert jax.tree.structure(toys.make().initial()) == jax.tree.structure(state)


class TestLossParams:
  """Parameters of the loss are trained with the model, by the same optimizer."""

  def test_the_gradient_of_proxies_is_that_of_the_loss(self):
    values = {"loss__name": "norm_softmax", "optim__name": "sgd", "optim__momentum": 0.0}
    toy = toys.make(freeze_bn=True, loss__proxy_multiplier=3.0, **values)
    batch, start = toys.make_batch(0), toy.initial()
    after, _ = toy.run([batch])
    variables = {"params": start.params, "batch_stats": start.batch_stats}
    embeddings = toy.model.apply(variables, batch["image"])
    slopes = jax.grad(lambda p: losses.norm_softmax_loss(embeddings, batch["label"], p))(
      start.loss_params["proxies"]
    )
    moved = after.loss_params["proxies"] - start.loss_params["proxies"]
    assert np.abs(moved).max() > 1e-4
    np.testing.assert_allclose(moved, -3.0 * 0.01 * slopes, rtol=1e-3, atol=1e-7)

  @pytest.mark.parametrize("name", ["proxy_anchor", "sigmoid"])
  def test_microbatches_change_nothing(self, name):
    batches = [toys.make_batch(seed) for seed in range(2)]
    values = {"freeze_bn": True, "loss__name": name}
    want, _ = toys.make(**values).run(batches)
    got, _ = toys.make(microbatch=4, **values).run(batches)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=2e-5)
    assert all(_leaves_moved(toys.make(**values).initial().loss_params, got.loss_params))

  def test_a_warmup_by_another_loss_leaves_them_and_their_moments_alone(self):
    toy = toys.make(warmup=True, loss__name="proxy_anchor", optim__weight_decay=0.1)
    start = jax.device_get(toy.initial())
    after, _ = toy.run([toys.make_batch(0), toys.make_batch(1)])
    assert jax.tree.structure(start) == jax.tree.structure(after)
    chex.assert_trees_all_equal(after.loss_params, start.loss_params)
    assert all(_leaves_moved(start.params, after.params))

  def test_a_rejected_step_keeps_them(self):
    toy = toys.make(loss__name="proxy_anchor")
    start = toy.initial()
    broken = dataclasses.replace(start, params=jax.tree.map(lambda x: x * jnp.nan, start.params))
    after, history = toy.run([toys.make_batch(0)], broken)
    assert history[0]["nonfinite"] > 0
    chex.assert_trees_all_equal(after.loss_params, jax.device_get(start.loss_params))


class TestRejectedSteps:
  """A step that is not finite must not touch v, without a copy of its table at every step."""

  @pytest.mark.parametrize("loss", ["soprc", "xbm", "triplet"])
  @pytest.mark.parametrize("policy", ["stop", "skip"])
  def test_nothing_but_the_count_of_a_skipped_step_changes(self, loss, policy):
    toy = toys.Toy(**{"loss.name": loss})
    step = jax.jit(functools.partial(toy.function, on_nonfinite=policy))
    state, _ = step(toy.initial(), toys.make_batch(0))
    before = jax.device_get(state)
    broken = dataclasses.replace(
      state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    )
    after, scalars = step(broken, toys.make_batch(1))
    assert scalars["nonfinite"] > 0
    assert int(after.step) == int(before.step) + (policy == "skip")
    chex.assert_trees_all_equal(jax.device_get(after.opt_state), before.opt_state)
    fine, _ = step(dataclasses.replace(after, params=state.params), toys.make_batch(1))
    assert not _equal(fine.opt_state[0], before.opt_state[0]) or loss == "triplet"

  @pytest.mark.parametrize("policy", ["stop", "skip"])
  def test_a_custom_tracker_is_guarded_too(self, policy):
    toy = toys.Toy(**{"loss.name": "triplet"})
    compute = toy.function.keywords["objective"].compute
    own = objectives.Objective(optax.trace(0.9), compute)  # its state takes the gradients
    tx = optax.chain(own.tracker, optax.adam(1e-3))
    function = functools.partial(
      toy.function, tx=tx, objective=own, carrier=own, on_nonfinite=policy
    )
    state = toy.initial()
    state = dataclasses.replace(state, opt_state=tx.init(state.params))
    state, _ = jax.jit(function)(state, toys.make_batch(0))
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    after, _ = jax.jit(function)(dataclasses.replace(state, params=broken), toys.make_batch(1))
    chex.assert_trees_all_equal(after.opt_state, state.opt_state)

  def test_no_table_of_v_is_copied(self):
    rows, points, values = 5003, 7, {"loss.num_points": 7}
    setting = objectives.Setting(np.full(rows, 5), num_steps=30, max_positives=3, axis_name=None)
    toy, config = toys.Toy(**values), toys.make_config(**values)
    main = objectives.make_objective("soprc", config.loss, setting)
    tx = optax.chain(main.tracker, optax.sgd(0.1))
    function = functools.partial(toy.function, tx=tx, objective=main, carrier=main)
    state = toy.initial()
    state = dataclasses.replace(state, opt_state=tx.init(state.params))
    # As for a user: conftest.py leaves these emitters out, and then the scatter is a loop.
    off = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    options = {"xla_cpu_use_fusion_emitters": True} if off else None
    lowered = jax.jit(function, donate_argnums=0).lower(state, toys.make_batch(0))
    program = lowered.compile(options).as_text()
    of_table = set(re.findall(rf"f32\[{rows},{points}\]\S* ([\w-]+)\(", program))
    assert "parameter" in of_table
    assert of_table <= {"parameter", "scatter", "gather", "fusion", "get-tuple-element"}


def _equal(one, other):
  leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.array_equal(a, b) for a, b in leaves)
