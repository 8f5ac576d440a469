"""Tests low-rank adapters, from single functions to the export of a run."""

import functools
import pathlib
import runpy

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import toys

import soprc_jax
from soprc_jax.metrics import per_query
from soprc_jax.models import EmbeddingNet
from soprc_jax.serving import export, network
from soprc_jax.training import (
  build,
  checkpoints,
  evaluation,
  finetuning,
  loop,
  lora,
  parallel,
  replay,
  workdir,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib

TARGETS = config_lib.default_config().model.lora.targets


class _Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x + nn.Dense(12, name="out")(nn.relu(nn.Dense(6, name="q")(x)))
    return nn.LayerNorm(name="norm1")(x)


class _Backbone(nn.Module):
  """Has the parameter paths of a transformer."""

  @nn.compact
  def __call__(self, images, *, train=False, where=None):
    del train, where
    x = nn.Dense(12, name="patch_embed")(images.reshape(len(images), -1))
    for index in range(2):
      x = _Block(name=f"blocks_{index}")(x)
    return x


NET = EmbeddingNet(_Backbone(), embedding_dim=8)
LIKE = jax.ShapeDtypeStruct((1, toys.SIZE, toys.SIZE, 3), jnp.uint8)


def _state(rank=2, alpha=3.0, targets=TARGETS):
  toy = toys.make(optim__weight_decay=0.01, optim__name="adam", optim__learning_rate=0.01)
  adapters = {"rank": rank, "alpha": alpha, "targets": targets}
  return jax.device_get(
    step_lib.init_state(
      NET, toy.tx, key=jax.random.key(3), like=LIKE, trained=lora.TRAINED, adapters=adapters
    )
  )


def _trained(state, steps=4, **values):
  """Returns the state after some steps."""
  toy = toys.make(optim__weight_decay=0.01, optim__name="adam", optim__learning_rate=0.01, **values)
  function = functools.partial(toy.function, model=NET, trained=lora.TRAINED)
  step = jax.jit(function) if toy.devices == 1 else parallel.compile_step(function)
  state = state if toy.devices == 1 else parallel.replicate(state)
  for seed in range(steps):
    batch = toys.make_batch(seed)
    state, scalars = step(state, batch if toy.devices == 1 else parallel.shard(batch))
    assert not np.any(scalars["nonfinite"])
  return jax.device_get(state if toy.devices == 1 else parallel.unreplicate(state))


def _embed(params):
  return NET.apply({"params": params}, toys.make_batch()["image"])


class TestParameters:
  def test_adapters_of_the_kernels_of_blocks(self):
    flat = finetuning.flat(_state().params["lora"])
    assert {path: leaf.shape for path, leaf in flat.items()} == {
      "scale": (),
      **{
        f"backbone/blocks_{index}/{name}/kernel/{part}": shape
        for index in range(2)
        for name, part, shape in (
          ("q", "a", (12, 2)),
          ("q", "b", (2, 6)),
          ("out", "a", (6, 2)),
          ("out", "b", (2, 12)),
        )
      },
    }
    first, second = (flat[f"backbone/blocks_{index}/q/kernel/a"] for index in range(2))
    assert np.any(first != second)  # every adapter has numbers of its own
    assert flat["scale"] == np.float32(1.5)

  def test_the_model_starts_as_it_was_to_the_bit(self):
    params = _state().params
    chex.assert_trees_all_equal(lora.merged(params), lora.base(params))
    np.testing.assert_array_equal(_embed(lora.merge(params)), _embed(lora.base(params)))

  def test_merged_is_the_base_plus_the_adapters(self):
    params = _trained(_state()).params
    flat, merged = finetuning.flat(params), finetuning.flat(lora.merged(params))
    assert set(merged) == set(finetuning.flat(lora.base(params)))
    for path, leaf in merged.items():
      want = np.float64(flat[path])
      if f"lora/{path}/a" in flat:
        a, b = (np.float64(flat[f"lora/{path}/{part}"]) for part in "ab")
        assert np.linalg.norm(a @ b) > 0.01
        want = want + 1.5 * a @ b
      np.testing.assert_allclose(leaf, want, rtol=1e-6, atol=1e-6)

  def test_merging_leaves_its_input_alone(self):
    params = _trained(_state(), steps=1).params
    before = jax.tree.map(np.array, params)
    lora.merge(params)
    chex.assert_trees_all_equal(params, before)

  def test_without_adapters_nothing_is_merged(self):
    params = lora.base(_state().params)
    assert lora.merge(params) is lora.merged(params) is params

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"targets": "conv1"}, r"targets='conv1' matches no kernel .* there are .*blocks_0/out/kern"),
      ({"targets": "head"}, "besides the head"),
      ({"rank": 7}, r"rank=7 exceeds a side of backbone/blocks_0/.*/kernel .* at most 6"),
    ],
  )
  def test_what_does_not_fit_is_an_error(self, values, message):
    with pytest.raises(ValueError, match=message):
      _state(**values)

  def test_convolutions_have_no_adapters(self, tmp_path):
    config = runs.tiny_config(**{"model.lora.rank": 2, "model.lora.targets": "layer"})
    with pytest.raises(ValueError, match=r"there are none\. Convolutions have no adapters"):
      loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class TestSteps:
  def test_only_adapters_and_head_move(self):
    before = _state()
    after = _trained(before)
    old, new = finetuning.flat(before.params), finetuning.flat(after.params)
    moved = {path for path in old if np.any(old[path] != new[path])}
    assert moved == {
      path for path in old if path.startswith("head/") or path.endswith(("/kernel/a", "/kernel/b"))
    }
    # Adam has two moments of each of these, and nothing else.
    count = sum(leaf.size for leaf in jax.tree.leaves(after.opt_state[1]) if leaf.ndim)
    assert count == 2 * sum(old[path].size for path in moved)

  @pytest.mark.parametrize(
    "values", [{"microbatch": 4, "freeze_bn": True}, {"devices": 2}], ids=str
  )
  def test_microbatches_and_devices_train_the_same(self, values):
    # One step of Adam has the sign of the gradient; several show its size too.
    want, found = _trained(_state(), steps=3), _trained(_state(), steps=3, **values)
    chex.assert_trees_all_close(found.params, want.params, rtol=1e-3, atol=2e-4)

  def test_full_rank_descends_as_the_kernels_do(self):
    # With A = identity and alpha = rank, B is a kernel's change, so one step of SGD of B is one of
    # the kernel.
    toy = toys.make(optim__momentum=0.0, optim__weight_decay=0.0)
    targets = "blocks_1/q/kernel"
    adapters = {"rank": 6, "alpha": 6.0, "targets": targets}
    start = step_lib.init_state(
      NET, toy.tx, key=jax.random.key(3), like=LIKE, trained=lora.TRAINED, adapters=adapters
    )
    flat = finetuning.flat(start.params)
    flat[f"lora/backbone/{targets}/a"] = jnp.eye(12, 6)
    start = step_lib.TrainState(
      start.step, finetuning.nested(flat), start.batch_stats, start.opt_state
    )
    function = functools.partial(toy.function, model=NET)
    after, _ = jax.jit(functools.partial(function, trained=lora.TRAINED))(start, toys.make_batch())
    plain = step_lib.TrainState(
      start.step, lora.base(start.params), start.batch_stats, toy.tx.init(lora.base(start.params))
    )
    want, _ = jax.jit(function)(plain, toys.make_batch())
    found = lora.merged(after.params)["backbone"]["blocks_1"]["q"]["kernel"]
    expected = want.params["backbone"]["blocks_1"]["q"]["kernel"]
    begin = plain.params["backbone"]["blocks_1"]["q"]["kernel"]
    assert np.abs(expected - begin)[:6].max() > 1e-5
    np.testing.assert_allclose(found[:6], expected[:6], rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(found[6:], begin[6:])


_FEATURES = str(pathlib.Path(runs.ROOT, "configs", "features.py"))


def _config(path, **values):
  config = runpy.run_path(_FEATURES)["get_config"]("mlp")
  config.data.root = str(path)
  config.update_from_flattened_dict(
    {
      "train.steps": 12,
      "train.batch_size": 32,
      "train.per_class": 4,
      "eval.every": 4,
      "checkpoint.every": 4,
      "model.features": 16,
      "model.hidden": 24,
      "model.embedding_dim": 8,
      "optim.learning_rate": 0.01,
      "log.progress": False,
    }
    | values
  )
  return config_lib.resolve(config)


ADAPTED = {"model.lora.rank": 3, "model.lora.targets": "hidden/kernel"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns vectors, their file, the workdirs of a run and of one with adapters, its results."""
  folder = tmp_path_factory.mktemp("lora")
  rng = np.random.default_rng(0)
  labels = np.repeat(np.arange(60), 5)
  vectors = np.float32(rng.normal(size=(60, 16))[labels] + rng.normal(size=(300, 16)))
  np.savez(folder / "f.npz", embeddings=vectors, labels=labels)
  loop.train(_config(folder / "f.npz"), folder / "first")
  config = _config(folder / "f.npz", **ADAPTED, **{"model.init_from": str(folder / "first")})
  results = loop.train(config, folder / "run")
  return vectors, folder / "f.npz", folder / "first", folder / "run", results


def _restored(folder):
  """Returns the state of the newest checkpoint of a run."""
  config = network.stored_config(folder)
  like = build.abstract_state(config, build.make_parts(config, np.full(30, 5)))
  store = checkpoints.Store(folder / checkpoints.NEWEST)
  try:
    return store.restore(like)[0]
  finally:
    store.close()


class TestRun:
  def test_starts_from_the_merged_model_and_keeps_its_base(self, made):
    _, _, first, run, _ = made
    base = checkpoints.load_network(
      str(first), build.abstract_network(network.stored_config(first))
    )
    params = _restored(run).params
    chex.assert_trees_all_equal(params["hidden"], base["params"]["hidden"])
    assert np.any(params["head"]["kernel"] != base["params"]["head"]["kernel"])
    assert np.any(params["lora"]["hidden"]["kernel"]["b"])

  def test_a_checkpoint_has_the_merged_model_and_the_adapters(self, made):
    run = made[3]
    store = checkpoints.Store(run / checkpoints.NEWEST)
    found = store.restore_network(build.abstract_network(network.stored_config(run)))
    store.close()
    chex.assert_trees_all_equal(found["params"], lora.merged(_restored(run).params))

  def test_loaded_and_exported_models_are_that_of_the_run(self, made, tmp_path):
    vectors, _, first, run, results = made
    loaded = network.load(run)
    assert set(loaded.variables["params"]) == {"hidden", "head"}
    assert "lora" not in loaded.architecture
    embedded = soprc_jax.load(run).embed(vectors)
    # The test of the run embedded with the state in memory, before any file was written.
    config = network.stored_config(run)
    val, _ = evaluation.evaluate_workdir(config, run, split="val", newest=False)
    assert val["mAUPRC"] == results["val"]["mAUPRC"]
    values, queries = evaluation.evaluate_workdir(config, run, split="test", newest=False)
    assert values["mAUPRC"] == results["test"]["mAUPRC"]
    chex.assert_trees_all_equal(queries, per_query.read(run / workdir.per_query("test")))
    export.write(tmp_path / "model.shlo", loaded, "stablehlo")
    called = jax.export.deserialize(bytearray((tmp_path / "model.shlo").read_bytes())).call
    np.testing.assert_allclose(called(vectors), embedded, atol=1e-6)
    plain = soprc_jax.load(first).embed(vectors)
    assert np.abs(plain - embedded).max() > 1e-3

  def test_another_run_starts_from_the_merged_model(self, made, tmp_path):
    run = made[3]
    merged = network.load(run).variables["params"]
    for adapted in ({}, ADAPTED):
      config = _config(made[1], **adapted, **{"model.init_from": str(run)})
      state = build.starting_state(config, build.make_parts(config, np.full(30, 5)))
      chex.assert_trees_all_equal(lora.merged(jax.device_get(state.params)), merged)

  def test_resumes_bit_for_bit(self, made, tmp_path, monkeypatch):
    _, file, first, run, _ = made
    config = _config(file, **ADAPTED, **{"model.init_from": str(first)})
    original = loop._Run._start_step

    def stop(self, number, stream):
      if number == 7:
        raise KeyboardInterrupt
      return original(self, number, stream)

    with monkeypatch.context() as patch:
      patch.setattr(loop._Run, "_start_step", stop)
      with pytest.raises(KeyboardInterrupt):
        loop.train(config, tmp_path / "run")
    loop.train(config, tmp_path / "run")
    chex.assert_trees_all_equal(_restored(tmp_path / "run"), _restored(run))
    assert runs.metrics(tmp_path / "run") == runs.metrics(run)

  def test_a_step_that_diverges_is_stored_and_repeated(self, made, tmp_path):
    values = {"optim.learning_rate": 1e30, "model.init_from": str(made[2]), "optim.name": "sgd"}
    with pytest.raises(step_lib.DivergedError):
      loop.train(_config(made[1], **ADAPTED, **values), tmp_path / "run")
    told = replay.describe(tmp_path / "run")
    assert "now:  not finite: " in told
    assert "lora.hidden.kernel.a" in told.split("gradient: ")[1]
