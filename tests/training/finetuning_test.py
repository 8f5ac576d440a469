"""Tests which parameters are trained and at which share of the learning rate."""

import functools
import re
import time

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import toys

from soprc_jax.training import budget, build, finetuning, loop, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib

VIT = (
  "backbone/class_token",
  "backbone/pos_embed",
  "backbone/patch_embed/kernel",
  "backbone/pre_norm/scale",
  *(f"backbone/blocks_{index}/attn/q/kernel" for index in range(12)),
  *(f"backbone/blocks_{index}/norm1/scale" for index in range(12)),
  "backbone/norm/scale",
  "backbone/pool/attn/q/kernel",
  "backbone/projection/kernel",
  "head/bias",
)


def _paths(name):
  return tuple(
    finetuning.flat(build.abstract_network(runs.tiny_config(**{"model.name": name}))["params"])
  )


class TestDepths:
  def test_of_a_transformer(self):
    found = finetuning.depths(VIT)
    assert {found[path] for path in VIT[:4]} == {0}
    for part in ("attn/q/kernel", "norm1/scale"):  # by number, not as texts: 2 before 10
      assert [found[f"backbone/blocks_{index}/{part}"] for index in range(12)] == list(range(1, 13))
    assert {found[path] for path in VIT[-4:]} == {13}

  def test_of_a_resnet(self):
    found = finetuning.depths(_paths("resnet18"))
    assert found["backbone/conv1/kernel"] == found["backbone/bn1/bn/scale"] == 0
    blocks = [f"backbone/layer{stage}_{index}" for stage in range(1, 5) for index in range(2)]
    for depth, block in enumerate(blocks, start=1):
      assert {found[path] for path in found if path.startswith(f"{block}/")} == {depth}
    assert found["head/kernel"] == 9

  def test_of_conv3(self):
    found = finetuning.depths(_paths("conv3"))
    assert [found[f"backbone/conv{stage}_kernel"] for stage in (1, 2, 3)] == [1, 2, 3]
    assert (found["backbone/conv2_bias"], found["head/bias"]) == (2, 4)

  def test_of_an_adapter_is_that_of_its_kernel(self):
    paths = [*VIT, "lora/backbone/blocks_3/attn/q/kernel/a", "lora/scale"]
    assert finetuning.depths(paths)[paths[-2]] == 4

  def test_without_layers(self):
    with pytest.raises(ValueError, match=r"optim\.layer_decay needs .* hidden/kernel.*Set it to 1"):
      finetuning.depths(["hidden/kernel", "head/kernel"])

  def test_rate_factors(self):
    found = finetuning.rate_factors(VIT, 0.5)
    assert found["head/bias"] == 1.0
    assert found["backbone/blocks_11/norm1/scale"] == 0.5
    assert found["backbone/pos_embed"] == 0.5**13


class TestSelect:
  def test_and_join_are_inverse(self):
    params = toys.drawn()["params"]
    part = finetuning.select(params, r"layer1_0/conv|^head/bias")
    assert set(finetuning.flat(part)) == {
      "backbone/layer1_0/conv1/kernel",
      "backbone/layer1_0/conv2/kernel",
      "head/bias",
    }
    chex.assert_trees_all_equal(finetuning.join(params, part), params)
    moved = finetuning.join(params, jax.tree.map(lambda leaf: leaf + 1, part))
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), params, moved)
    assert {path for path, value in finetuning.flat(changed).items() if value} == set(
      finetuning.flat(part)
    )

  def test_empty_pattern_is_all(self):
    params = toys.drawn()["params"]
    assert finetuning.select(params, "") is params


def _frozen_run(**values):
  """Returns the states before and after three steps that train the head and one convolution."""
  pattern = r"^head/|layer1_0/conv2"
  toy = toys.make(freeze_bn=True, **{"optim__weight_decay": 0.1}, **values)
  start = toy.initial()
  start = step_lib.TrainState(
    start.step,
    start.params,
    start.batch_stats,
    toy.tx.init(finetuning.select(start.params, pattern)),
  )
  function = functools.partial(toy.function, trained=pattern)
  step = jax.jit(function) if toy.devices == 1 else parallel.compile_step(function)
  state = start if toy.devices == 1 else parallel.replicate(start)
  for seed in range(3):
    batch = toys.make_batch(seed)
    state, scalars = step(state, batch if toy.devices == 1 else parallel.shard(batch))
    assert not np.any(scalars["nonfinite"])
  if toy.devices > 1:
    state = parallel.unreplicate(state)
  return pattern, jax.device_get(start), jax.device_get(state)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_parameters_keep_their_bits_and_have_no_state(optimizer):
  pattern, before, after = _frozen_run(optim__name=optimizer)
  old, new = finetuning.flat(before.params), finetuning.flat(after.params)
  for path, leaf in old.items():
    assert np.array_equal(new[path], leaf) != bool(re.search(pattern, path)), path
  chex.assert_trees_all_equal(after.batch_stats, before.batch_stats)
  sizes = {leaf.shape for leaf in jax.tree.leaves(before.opt_state[1])} - {()}
  trained = {leaf.shape for leaf in jax.tree.leaves(finetuning.select(before.params, pattern))}
  assert sizes == trained
  assert {leaf.shape for leaf in old.values()} - trained  # state of others would be seen


@pytest.mark.parametrize("values", [{"microbatch": 4}, {"devices": 2}], ids=str)
def test_microbatches_and_devices_train_the_same(values):
  _, _, want = _frozen_run()
  _, _, found = _frozen_run(**values)
  chex.assert_trees_all_close(found.params, want.params, rtol=1e-3, atol=2e-5)


def test_trained_parameters_move_as_if_none_were_frozen():
  # In a step, the gradient of a parameter does not depend on which others are trained.
  toy = toys.make(freeze_bn=True)
  start, pattern = toy.initial(), r"^head/"
  part = step_lib.TrainState(
    start.step,
    start.params,
    start.batch_stats,
    toy.tx.init(finetuning.select(start.params, pattern)),
  )
  found, _ = jax.jit(functools.partial(toy.function, trained=pattern))(part, toys.make_batch())
  want, _ = toy.step(start, toys.make_batch())
  chex.assert_trees_all_close(found.params["head"], want.params["head"], rtol=1e-5, atol=1e-7)


def test_no_gradient_is_computed_for_what_is_frozen():
  # The gradients by kernels and inputs are two thirds of the products of a step.
  toy = toys.make(freeze_bn=True)
  start = toy.initial()

  def products(pattern):
    part = toy.tx.init(finetuning.select(start.params, pattern))
    state = step_lib.TrainState(start.step, start.params, start.batch_stats, part)
    step = jax.jit(functools.partial(toy.function, trained=pattern))
    return str(step.lower(state, toys.make_batch()).as_text()).count("stablehlo.dot_general")

  assert products("") > 1.5 * products("^head/") > 0


class TestConfig:
  def test_a_pattern_without_a_match_lists_paths(self, tmp_path):
    config = runs.tiny_config(**{"optim.train_only": "blocks_11"})
    with pytest.raises(ValueError, match=r"train_only='blocks_11' matches no .* backbone/bn1/bn/b"):
      loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()

  def test_layer_decay_counts_frozen_layers_too(self):
    config = runs.tiny_config(
      **{
        "optim.train_only": "^head/|layer2",
        "optim.layer_decay": 0.5,
        "optim.name": "sgd",
        "optim.schedule": "constant",
        "optim.learning_rate": 1.0,
        "optim.momentum": 0.0,
        "optim.weight_decay": 0.0,
        "warmup.steps": 0,
      }
    )
    parts = build.make_parts(config, np.full(10, 4))
    state = build.starting_state(config, parts)
    part = finetuning.select(state.params, parts.trained)
    ones = jax.tree.map(jnp.ones_like, part)
    scores = {"positive_scores": jnp.zeros((1, 3)), "list_ids": jnp.zeros(1, int)}  # of v

    def update():
      return parts.tx.update(ones, state.opt_state, part, **scores)[0]

    updates = jax.vmap(update, axis_name=parallel.AXIS_NAME, axis_size=1)()
    paths = finetuning.flat(build.abstract_network(config)["params"])
    factors = finetuning.rate_factors(paths, 0.5)
    for path, leaf in finetuning.flat(updates).items():
      np.testing.assert_array_equal(leaf, -np.float32(factors[path]))

  def test_proxies_are_trained_beside_the_chosen_parameters(self):
    config = runs.tiny_config(
      steps=2,
      warmup_steps=0,
      **{"loss.name": "norm_softmax", "optim.train_only": "^head/", "optim.layer_decay": 0.5},
    )
    data = build.make_data(config)
    parts = build.make_parts(config, data.class_counts())
    start = build.starting_state(config, parts)
    batch = parallel.shard(build.make_batches(config, data)[0])
    after, _ = parts.main_step(parallel.replicate(start), batch)
    after = parallel.unreplicate(after)
    assert np.any(after.loss_params["proxies"] != start.loss_params["proxies"])
    assert np.any(after.params["head"]["kernel"] != start.params["head"]["kernel"])
    chex.assert_trees_all_equal(after.params["backbone"], jax.device_get(start.params["backbone"]))

  def test_a_run_logs_the_numbers_and_freezes(self, tmp_path, caplog):
    config = runs.tiny_config(
      steps=3,
      warmup_steps=2,
      **{"optim.train_only": "^head/", "warmup.freeze_bn": True, "model.freeze_bn": False},
    )
    with caplog.at_level("INFO"):
      loop.train(config, tmp_path / "run")
    params = build.abstract_network(config)["params"]
    total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
    head = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params["head"]))
    assert f"Training {head:,} of {total:,} parameters" in caplog.text
    assert "frozen parameters are random" in caplog.text
    start = build.starting_state(config, build.make_parts(config, np.full(10, 4)))
    end = build.checkpoints.load_network(
      str(tmp_path / "run"), {"params": start.params, "batch_stats": start.batch_stats}
    )
    chex.assert_trees_all_equal(end["params"]["backbone"], jax.device_get(start.params["backbone"]))
    assert np.any(end["params"]["head"]["kernel"] != start.params["head"]["kernel"])
    # The statistics of batch norm are not parameters: model.freeze_bn decides on them.
    moved = traverse_util.flatten_dict(end["batch_stats"], sep="/")
    began = traverse_util.flatten_dict(start.batch_stats, sep="/")
    assert any(np.any(moved[path] != leaf) for path, leaf in began.items())

  def test_a_time_budget(self):
    config = config_lib.ConfigDict(
      runs.tiny_config(warmup_steps=0, **{"optim.train_only": "^head/"}).to_dict()
    )
    config_lib.leave_open(config, *budget.KEYS)
    costs = budget.measure(config, build.make_data(config), budget.Budget(0.1, time.perf_counter()))
    assert costs.step > 0
