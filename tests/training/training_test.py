"""The training step, its devices and phases, evaluation, and a whole run in this process on two devices."""

import ast
import functools
import itertools
import json
import os
import signal

import chex
import crashes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from soprc_jax import metrics, tracking
from soprc_jax.data import pipeline, sources
from soprc_jax.models import EmbeddingNet, ResNet
from soprc_jax.training import build, checkpoints, evaluation, interrupts, loop, objectives, optimizers, parallel, run_log
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib

NUM_DEVICES = 2
_CLASSES, _BATCH, _SIZE = 6, 16, 8
_SETTINGS = {
  "loss.num_points": 10,
  "loss.tau1": 0.1,
  "loss.prior.kind": "constant",
  "loss.prior.value": 0.3,
  "optim.name": "adam",
  "optim.schedule": "constant",
  "optim.learning_rate": 0.01,
  "optim.weight_decay": 0.0,
}


def _config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(_SETTINGS | {key.replace("__", "."): value for key, value in values.items()})
  return config_lib.resolve(config)


class _Toy:
  """A step of a network of one block, on one device (compiled by jit) or on all (by pmap); compiled once for each setting."""

  def __init__(self, *, devices=1, warmup=False, masked=False, freeze_bn=False, dtype="float32", microbatch=0, **values):
    config = _config(**values)
    self.devices = devices
    axis_name = parallel.AXIS_NAME if devices > 1 else None
    setting = objectives.Setting(np.full(_CLASSES, 5), num_steps=30, max_positives=3, axis_name=axis_name)
    main = objectives.make_objective(config.loss.name, config.loss, setting)
    objective = objectives.make_objective(config.warmup.loss, config.loss, setting) if warmup else main
    backbone = ResNet((1,), False, width=4, stem="small", freeze_bn=freeze_bn, dtype=jnp.dtype(dtype), axis_name=axis_name)
    self.model = EmbeddingNet(backbone, embedding_dim=8, dtype=jnp.dtype(dtype))
    self.tx = optax.chain(main.tracker, optimizers.make_optimizer(config))
    self.function = functools.partial(
      step_lib.train_step,
      model=self.model,
      tx=self.tx,
      objective=objective,
      carrier=main,
      first_step=0,
      masked=masked,
      axis_name=axis_name,
      microbatch=microbatch,
    )
    self.step = jax.jit(self.function) if devices == 1 else parallel.compile_step(self.function)

  def initial(self):
    variables = _variables()
    return step_lib.TrainState(step=jnp.zeros([], jnp.int32), **variables, opt_state=self.tx.init(variables["params"]))

  def run(self, batches, state=None):
    """The state and the metrics of every step, as seen by every device if there are several."""
    state = self.initial() if state is None else state
    if self.devices > 1:
      state = parallel.replicate(state)
    history = []
    for batch in batches:
      state, scalars = self.step(state, batch if self.devices == 1 else parallel.shard(batch))
      history.append(jax.device_get(scalars))
    return jax.device_get(state), history


_toy = functools.cache(_Toy)


@functools.cache
def _variables():
  """Random weights of all toys, drawn once: compiling their initialisation takes seconds."""
  net = EmbeddingNet(ResNet((1,), False, width=4, stem="small"), embedding_dim=8)
  return dict(jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, _SIZE, _SIZE, 3), jnp.uint8)))


def _batch(seed=0, where=None):
  """Four classes of four, each class a colour of its own under noise."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(rng.permutation(_CLASSES)[:4], 4)
  colours = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]])[:, None, None] * 140 + 58
  images = np.uint8(colours[labels] + rng.integers(-57, 58, (_BATCH, _SIZE, _SIZE, 3)))
  where = np.ones(_BATCH, bool) if where is None else np.array(where, bool)
  return {"image": images, "label": labels.astype(np.int32), "where": where}


def _first(tree):
  return jax.tree.map(lambda leaf: leaf[0], tree)


def _leaves_moved(before, after):
  return [bool(np.any(a != b)) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]


class TestStep:
  def test_loss_decreases(self):
    _, history = _toy(devices=NUM_DEVICES).run([_batch(seed) for seed in range(30)])
    losses = np.array([scalars["loss"][0] for scalars in history])
    assert np.isfinite(losses).all()
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()

  def test_counts_steps_and_moves_everything(self):
    toy = _toy(devices=NUM_DEVICES)
    state, _ = toy.run([_batch(0), _batch(1)])
    before, after = jax.device_get(toy.initial()), _first(state)
    assert after.step == 2
    assert after.step.dtype == np.int32
    assert all(_leaves_moved(before.params, after.params))
    assert all(_leaves_moved(before.batch_stats, after.batch_stats))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [leaf.dtype for leaf in jax.tree.leaves(before)] == [leaf.dtype for leaf in jax.tree.leaves(after)]

  @pytest.mark.parametrize(
    ("values", "where"),
    [
      ({}, None),
      ({"loss__preset": "paper", "loss__name": "soprc"}, None),
      ({"loss__name": "triplet"}, None),
      # As many valid images on each device or not: the lists must be right anyway. Batch norm is frozen here.
      ({"masked": True, "freeze_bn": True}, [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0]),
    ],
    ids=["soprc", "paper", "triplet", "masked"],
  )
  def test_f23_two_devices_equal_one_on_the_joined_batch(self, values, where):
    batches = [_batch(seed, where) for seed in range(3)]
    want, want_history = _toy(**values).run(batches)
    got, history = _toy(devices=NUM_DEVICES, **values).run(batches)
    chex.assert_trees_all_equal(_first(got), jax.tree.map(lambda leaf: leaf[1], got))  # the same on every device
    for scalars, want_scalars in zip(history, want_history, strict=True):
      chex.assert_trees_all_close(_first(scalars), want_scalars, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(_first(got), want, rtol=1e-3, atol=2e-5)

  @pytest.mark.parametrize(
    ("check_vma", "values"),
    [(False, {}), (True, {}), (True, {"freeze_bn": True, "microbatch": 4})],
    ids=["unchecked", "whole", "microbatches"],
  )
  def test_the_same_step_under_shard_map(self, check_vma, values):
    # Moving off pmap is an edit in parallel.py: the step itself does not know who has mapped it.
    toy, batches = _toy(devices=NUM_DEVICES, **values), [_batch(seed) for seed in range(3)]
    want, want_history = toy.run(batches)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM_DEVICES]), (parallel.AXIS_NAME,))
    everywhere, parts = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(parallel.AXIS_NAME)
    step = jax.jit(
      jax.shard_map(
        toy.function, mesh=mesh, in_specs=(everywhere, parts), out_specs=(everywhere, everywhere), check_vma=check_vma
      )
    )
    state = toy.initial()
    for batch, scalars in zip(batches, want_history, strict=True):
      state, got = step(state, batch)
      chex.assert_trees_all_close(jax.device_get(got), _first(scalars), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state), _first(want), rtol=1e-3, atol=2e-5)

  def test_f13_order_of_the_batch_changes_nothing(self):
    order = np.random.default_rng(5).permutation(_BATCH)
    batch = _batch()
    want, want_history = _toy().run([batch])
    got, history = _toy().run([{key: value[order] for key, value in batch.items()}])
    np.testing.assert_allclose(history[0]["loss"], want_history[0]["loss"], rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=2e-5)

  def test_masked_images_play_no_role(self):
    # In the loss, in v and in batch statistics.
    where = np.arange(_BATCH) % 4 < 3
    batch = _batch(0, where)
    other = batch | {"image": np.where(where[:, None, None, None], batch["image"], 255 - batch["image"])}
    toy = _toy(masked=True)
    chex.assert_trees_all_close(toy.run([batch]), toy.run([other]), rtol=1e-5, atol=1e-6)

  @pytest.mark.parametrize("where", [[0] * 16, [1] + [0] * 15, [1] * 4 + [0] * 12, [1, 0, 0, 0] * 4])
  def test_f02_batches_without_a_list_leave_v_alone_and_weights_finite(self, where):
    # All masked, one image, one class (v still moves), one image of each class.
    toy = _toy(masked=True, freeze_bn=True)
    state, history = toy.run([_batch(0, where)])
    chex.assert_tree_all_finite((state, history))
    assert history[0]["loss"] == pytest.approx(0, abs=1e-6) or where[:4] == [1] * 4
    moved = tracking.find_state(state.opt_state).weight > 0
    assert moved.sum() == (1 if where[:4] == [1] * 4 else 0)

  def test_f26_frozen_batch_norm_keeps_its_statistics_to_the_bit(self):
    toy = _toy(freeze_bn=True)
    state, _ = toy.run([_batch(seed) for seed in range(3)])
    before = jax.device_get(toy.initial())
    chex.assert_trees_all_equal(state.batch_stats, before.batch_stats)
    assert all(_leaves_moved(before.params, state.params))

  def test_bfloat16_step_is_finite_and_keeps_float32_parameters(self):
    state, history = _toy(dtype="bfloat16").run([_batch(seed) for seed in range(3)])
    chex.assert_tree_all_finite((state, history))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    _, want = _toy().run([_batch(0)])
    np.testing.assert_allclose(history[0]["loss"], want[0]["loss"], rtol=0.05)


class TestCarriedScores:
  def test_the_loss_uses_exactly_the_v_that_the_step_stores(self, monkeypatch):
    used = []
    original = objectives.estimators.soprc_loss

    def spy(positive_scores, negative_scores, v, **options):
      jax.debug.callback(lambda rows: used.append(np.array(rows)), v)
      return original(positive_scores, negative_scores, v, **options)

    monkeypatch.setattr(objectives.estimators, "soprc_loss", spy)
    toy = _Toy()
    state = toy.initial()
    for seed in range(3):
      used.clear()
      batch = _batch(seed)
      state, _ = toy.run([batch], state)
      jax.effects_barrier()
      stored = tracking.find_state(state.opt_state)
      np.testing.assert_array_equal(used[0], stored.v[batch["label"]])

  def test_rows_of_classes_in_the_batch_move_and_no_others(self):
    state, _ = _toy().run([_batch(0)])
    stored = tracking.find_state(state.opt_state)
    present = np.isin(np.arange(_CLASSES), _batch(0)["label"])
    np.testing.assert_allclose(stored.weight, np.where(present, 0.1, 0.0), rtol=1e-6)
    np.testing.assert_array_equal(stored.v.any(1), present)

  def test_a_warmup_step_with_another_loss_leaves_v_and_weights_alone(self):
    start, _ = _toy().run([_batch(0), _batch(1)])
    after, history = _toy(warmup=True).run([_batch(2)], start)
    before, stored = tracking.find_state(start.opt_state), tracking.find_state(after.opt_state)
    np.testing.assert_array_equal(stored.v, before.v)
    np.testing.assert_array_equal(stored.weight, before.weight)
    assert all(_leaves_moved(start.params, after.params))
    assert "soprc" not in history[0]

  def test_a_warmup_starts_from_the_same_structure(self):
    # Both phases step the same state: no part of it may change its type.
    state, _ = _toy(warmup=True).run([_batch(0)])
    assert jax.tree.structure(_toy().initial()) == jax.tree.structure(state)


class TestParallel:
  def test_batch_size_that_the_devices_do_not_divide(self):
    parallel.check_batch(8, 4, 0)
    parallel.check_batch(24, 4, 6)
    with pytest.raises(ValueError, match=r"train\.batch_size=21 is not divisible by 2 devices: use 18 or 24"):
      parallel.check_batch(21, 3, 0)  # both fit the classes of three too
    with pytest.raises(ValueError, match=r"use 18$"):
      parallel.check_batch(9, 9, 0)
    with pytest.raises(ValueError, match=r"train\.microbatch=3 is not divisible by 2 devices: use 2 or 4"):
      parallel.check_batch(24, 4, 3)

  def test_one_place_names_pmap(self):
    named = []
    for path in [path for folder in ("soprc_jax", "experiments", "configs") for path in (runs.ROOT / folder).rglob("*.py")]:
      for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
          names = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
          named += [(path.name, function.name)] * names.count("pmap")
    assert named == [("parallel.py", "compile_step")]

  def test_replicate_and_back(self):
    tree = {"a": np.arange(3, dtype=np.float32), "b": (np.int32(4), np.zeros((2, 0), np.int8))}
    stacked = parallel.replicate(tree)
    assert stacked["a"].shape == (NUM_DEVICES, 3)
    got = parallel.unreplicate(stacked)
    chex.assert_trees_all_equal(got, tree)
    chex.assert_trees_all_equal_dtypes(got, tree)

  def test_unreplicated_arrays_are_copies(self):
    # The step gives its buffers away; a checkpoint in the making must not see the next step in them.
    toy = _toy(devices=NUM_DEVICES)
    state = parallel.replicate(toy.initial())
    kept = parallel.unreplicate(state)
    before = jax.tree.map(np.copy, kept)
    state, _ = toy.step(state, parallel.shard(_batch(0)))
    jax.block_until_ready(state)
    chex.assert_trees_all_equal(kept, before)

  def test_each_device_has_its_part_of_the_batch(self):
    batch = _batch()
    parts = parallel.shard(batch)
    assert parts["image"].shape == (NUM_DEVICES, _BATCH // NUM_DEVICES, _SIZE, _SIZE, 3)
    np.testing.assert_array_equal(np.concatenate(parts["image"]), batch["image"])

  def test_alone_there_is_nothing_to_wait_for(self):
    parallel.wait_for_all("nobody")
    parallel.check_equal("the text", "any")
    rows = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(parallel.gather_rows(rows), rows)
    assert parallel.is_main()


class _Source:
  """Random pictures, five of each class."""

  def __init__(self, count):
    self.labels = np.arange(count) // 5
    self._images = np.random.default_rng(0).integers(0, 256, (count, _SIZE, _SIZE, 3), np.uint8)

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), str(index))


def _eval_config(**values):
  config = config_lib.default_config()
  config.eval.update({"image_size": _SIZE, **values})
  return config


class TestEvaluation:
  @pytest.mark.parametrize("batch_size", [3, 26, 100])
  def test_f31_padding_and_batch_size_change_nothing_and_compile_once(self, batch_size, monkeypatch):
    source, toy, traced = _Source(26), _toy(), []
    embed_step = step_lib.embed_step
    monkeypatch.setattr(step_lib, "embed_step", lambda *args, **options: traced.append(1) or embed_step(*args, **options))
    embed = evaluation.make_embed(toy.model, _eval_config(batch_size=batch_size))
    got = embed(parallel.replicate(_variables()), source)
    assert len(traced) == 1  # the last batch, of 2 or of all 26, has the shape of the others
    want = toy.model.apply(_variables(), source._images)
    assert got.embeddings.shape == (26, 8)  # no tail is dropped
    np.testing.assert_allclose(got.embeddings, want, atol=1e-5)
    np.testing.assert_array_equal(got.labels, source.labels)
    assert got.num_broken == 0
    embed(parallel.replicate(_variables()), _Source(7))
    assert len(traced) == 1

  def test_metrics_are_those_of_all_images(self):
    source, toy = _Source(26), _toy()
    config = _eval_config(batch_size=8, ks=(1, 4), block_size=7)
    embedded = evaluation.make_embed(toy.model, config)(parallel.replicate(_variables()), source)
    got = evaluation.evaluate(embedded, config)
    want = metrics.retrieval_metrics(embedded.embeddings, source.labels, ks=(1, 4))
    assert got == want | {"num_broken": 0}
    assert (got["num_queries"], got["num_skipped"]) == (25, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """`loop.train` in this process, on two devices, with a warm-up: its config, workdir and results."""
  config = runs.tiny_config(warmup_steps=3, steps=5)
  workdir = tmp_path_factory.mktemp("run") / "workdir"
  chex.clear_trace_counter()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step_lib, "train_step", chex.assert_max_traces(step_lib.train_step, n=2))
    results = loop.train(config, workdir)
  return config, workdir, results


class TestRun:
  def test_each_phase_is_traced_once(self, run):
    assert run[2]["steps"] == 8  # the fixture raises at a third trace

  def test_log_tells_the_phases(self, run):
    lines = [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert ["soprc" in line for line in lines] == [False] * 3 + [True] * 5
    schedule = optimizers.make_schedule(run[0])
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [schedule(step) for step in range(8)])
    assert lines[3]["v_weight"] == 0  # the warm-up left v alone
    assert [line["step"] for line in lines if "val_mAUPRC" in line] == [3, 6, 8]

  def test_starts_only_on_devices_that_divide_the_batch(self, tmp_path):
    config = runs.tiny_config(**{"train.batch_size": 9, "train.per_class": 3})
    with pytest.raises(ValueError, match="is not divisible by 2 devices: use 6 or 12"):
      loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _and_terminate(function, due):
  """A function that sends SIGTERM to this process when it begins, if that is due."""

  def terminating(*args, **kwargs):
    if due(*args, **kwargs):
      os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)

  return terminating


def _dying_after(count):
  """`pipeline.iterate` whose workers die of a SIGTERM after some batches."""
  iterate = pipeline.iterate

  def dying(*args, **kwargs):
    yield from itertools.islice(iterate(*args, **kwargs), count)
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("Worker process was terminated unexpectedly")

  return dying


def test_what_was_best_beyond_the_newest_checkpoint_is_forgotten(tmp_path, monkeypatch):
  """As on other devices, whose bits are others: the steps come again, and the network that was best of them is not the one that was."""
  config, folder = runs.tiny_config(warmup_steps=0, steps=8), tmp_path / "run"
  evaluate, write = evaluation.evaluate, workdir_lib.MetricsLog.write

  def train(*values):
    left = list(values)
    monkeypatch.setattr(evaluation, "evaluate", lambda *args: evaluate(*args) | {"mAUPRC": left.pop(0) if left else 0.0})
    return loop.train(config, folder)

  def dies(log, line):
    if line["step"] == 7:
      raise RuntimeError("killed")
    write(log, line)

  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "write", dies)
    with pytest.raises(RuntimeError, match="killed"):
      train(0.1, 0.3)
  best = folder / checkpoints.BEST
  assert sorted(path.name for path in best.iterdir()) == ["3", "6"]  # a checkpoint is of step 4
  results = train(0.05, 0.06)
  assert results["tested_step"] == 3
  assert results["val"]["mAUPRC"] == 0.1
  assert [path.name for path in best.iterdir()] == ["3"]


def test_an_evaluation_is_cut_short_by_a_pre_emption_and_done_later(run, tmp_path, monkeypatch):
  config, folder = run[0], tmp_path / "run"
  newest = checkpoints.NEWEST

  def stopped(after, owner, name, due=lambda *args: True):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, _and_terminate(getattr(owner, name), due))
      with pytest.raises(interrupts.InterruptedRunError, match=f"Stopped by SIGTERM after step {after} of 8"):
        loop.train(config, folder)
    assert (folder / newest / str(after)).is_dir()
    last = list(workdir_lib.read_metrics(folder))[-1]
    assert last["step"] == after
    assert "val_mAUPRC" not in last

  # The processes that load images die of the same signal, before the first step and amid the steps.
  for count, told in ((0, "before the first of 8 steps"), (2, "after step 2 of 8")):
    with monkeypatch.context() as patch:
      patch.setattr(pipeline, "iterate", _dying_after(count))
      with pytest.raises(interrupts.InterruptedRunError, match=f"Stopped by SIGTERM {told}"):
        loop.train(config, folder)
  assert (folder / newest / "2").is_dir()
  stopped(3, evaluation, "evaluate")
  stopped(3, evaluation, "evaluate")  # amid the one that makes up for it
  # A kill when its network is kept and its line is not there yet.
  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "replace_last", None)
    with pytest.raises(TypeError):
      loop.train(config, folder)
  assert (folder / checkpoints.BEST / "3").is_dir()
  # A signal amid the steps, before an evaluation begins.
  stopped(6, workdir_lib.MetricsLog, "write", lambda log, line: line["step"] == 5)
  stopped(8, workdir_lib.MetricsLog, "write", lambda log, line: line["step"] == 7)
  # A signal when the last step is done.
  with monkeypatch.context() as patch:
    patch.setattr(run_log.Records, "complete", _and_terminate(run_log.Records.complete, lambda *args: True))
    with pytest.raises(interrupts.InterruptedRunError, match="Stopped by SIGTERM after step 8 of 8"):
      loop.train(config, folder)
  assert not (folder / workdir_lib.RESULTS).exists()
  loop.train(config, folder)
  crashes.assert_same_run(folder, run[1])
  keys = [list(line) for line in workdir_lib.read_metrics(folder)]
  assert keys == [list(line) for line in workdir_lib.read_metrics(run[1])]


def test_a_process_that_is_not_the_main_one_writes_checkpoints_only(tmp_path, monkeypatch):
  # Those are written together; logs, tables and pictures by process 0 alone.
  config = runs.tiny_config(warmup_steps=0, steps=2)
  workdir_lib.claim(tmp_path, config)
  monkeypatch.setattr(parallel, "is_main", lambda: False)
  monkeypatch.setattr(workdir_lib, "claim", None)
  results = loop.train(config, tmp_path)
  assert results["test"]["num_queries"] > 0
  names = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
  assert names == {"config.json", "best", "checkpoints"}


class TestBuild:
  def test_splits_rows_and_counts(self):
    config = runs.tiny_config()
    data = build.make_data(config)
    classes = {name: set(split.labels.tolist()) for name, split in data.splits.items()}
    assert not classes["train"] & classes["val"] | classes["train"] & classes["test"] | classes["val"] & classes["test"]
    assert sorted(data.rows) == sorted(classes["train"])
    counts = data.class_counts()
    for label, row in list(data.rows.items())[:20]:
      assert counts[row] == (data.splits["train"].labels == label).sum()

  def test_phases_have_their_own_batch_norm_mode(self):
    # The warm-up trains batch norm from random weights, the main phase may freeze it.
    config = runs.tiny_config(**{"warmup.freeze_bn": False, "model.freeze_bn": True})
    for name, want in (("warmup", False), ("model", True)):
      assert build.make_model(config, freeze_bn=config[name].freeze_bn).backbone.freeze_bn is want

  def test_seed_decides_the_weights(self):
    net = EmbeddingNet(ResNet((1,), False, width=4, stem="small"), embedding_dim=8)
    tx = optimizers.make_optimizer(_config())
    one, same, other = (
      step_lib.init_state(net, tx, key=jax.random.key(seed), image_size=_SIZE).params for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(one, same)
    assert np.any(one["head"]["kernel"] != other["head"]["kernel"])
