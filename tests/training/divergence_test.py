"""A NaN or an infinity in a step: the run stops or leaves the step out, keeps what shows it again, and its state takes none."""

import functools
import json
import logging
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from soprc_jax.training import build, checkpoints, interrupts, loop, replay, workdir
from soprc_jax.training import step as step_lib
from soprc_jax.training.step import TrainState

# Steps of the run, from 1, at which broken_losses.soprc gives a NaN.
_BROKEN = (4, 6, 7, 8)


def _config(**values):
  fixed = {
    "loss.name": "broken_losses:soprc",
    "loss.custom": {"steps": tuple(step - 1 for step in _BROKEN)},
    "eval.every": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 20,
  }
  return runs.tiny_config(steps=10, warmup_steps=0, **(fixed | values))


@functools.cache
def _like():
  config = _config()
  return build.abstract_state(config, build.make_parts(config, build.make_data(config).class_counts()))


def _state(folder, step):
  """All leaves of a checkpoint but the step, by path."""
  store = checkpoints.Store(folder, keep=20)
  state, _ = store.restore(_like(), step=step)
  store.close()
  leaves = jax.tree_util.tree_leaves_with_path(state.replace(step=None))
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _assert_same(got, want):
  assert got.keys() == want.keys()
  assert any(".v" in path for path in got)
  assert [path for path in want if got[path].tobytes() != want[path].tobytes()] == []


def _write_and_terminate_at(step):
  """``MetricsLog.write``, with a SIGTERM to this process after the line of a step."""
  write = workdir.MetricsLog.write

  def write_and_terminate(log, line):
    write(log, line)
    if line["step"] == step:
      os.kill(os.getpid(), signal.SIGTERM)

  return write_and_terminate


def test_a_run_that_stops_then_skips_then_stops_then_ends(tmp_path, caplog, monkeypatch):
  folder = tmp_path / "run"
  config = _config()
  with pytest.raises(loop.DivergedError) as stopped:
    loop.train(config, folder)
  message = str(stopped.value)
  assert "training broke down at step 4 of 10: not finite: loss, gradient" in message
  assert f"soprc replay --workdir={folder} --own_loss=broken_losses:soprc; try" in message

  # What is kept: the state before the step, untouched by it and by the step that was under way behind it; and its batch.
  report = json.loads((folder / "diverged" / "4" / "report.json").read_text())
  assert (report["step"], report["loss"], report["nonfinite"][:1]) == (4, "nan", ["loss"])
  _assert_same(_state(folder / "diverged" / "4" / "state", 3), _state(folder / checkpoints.NEWEST, 3))
  data = build.make_data(config)
  batch = build.make_batches(config, data)[3]
  with pytest.raises(
    ValueError, match=r"a folder alone may not run it: if it is yours, add --own_loss=broken_losses:soprc$"
  ):
    replay.load(folder)
  found = replay.load(folder, trusted=["broken_losses:soprc"])
  np.testing.assert_array_equal(found.batch["image"], batch["image"])
  assert found.ids == [data.splits["train"][position].id for position in batch["position"]]
  assert found.ids[0] in message
  shown = replay.describe(folder, trusted=["broken_losses:soprc"])
  assert "Step 4" in shown
  assert "now:  not finite: loss, gradient" in shown
  assert "0 of 16 images" in shown
  assert [line["step"] for line in workdir.read_metrics(folder)] == [1, 2, 3]

  # The same run goes on with the step left out, and stops at more of them in a row than it may.
  with (
    caplog.at_level(logging.WARNING, "soprc_jax"),
    pytest.raises(loop.DivergedError, match="after 2 skipped steps in a row"),
  ):
    loop.train(_config(**{"train.on_nonfinite": "skip", "train.max_skipped": 2}), folder)
  assert sum("Skipped step" in message for message in caplog.messages) == 3
  assert replay.steps(folder) == [4, 8]
  _assert_same(_state(folder / checkpoints.NEWEST, 4), _state(folder / checkpoints.NEWEST, 3))
  _assert_same(_state(folder / "diverged" / "8" / "state", 7), _state(folder / checkpoints.NEWEST, 5))

  # A pre-emption while that goes on, and the rest of it.
  with monkeypatch.context() as patch:
    patch.setattr(workdir.MetricsLog, "write", _write_and_terminate_at(8))
    with pytest.raises(interrupts.InterruptedRunError, match="Stopped by SIGTERM after step 9 of 10") as stopped:
      loop.train(_config(**{"train.on_nonfinite": "skip", "train.max_skipped": 3}), folder)
  assert stopped.value.exit_status == 143
  assert (folder / checkpoints.NEWEST / "9").is_dir()
  results = loop.train(_config(**{"train.on_nonfinite": "skip", "train.max_skipped": 3}), folder)
  assert results["steps"] == results["tested_step"] == 10
  lines = list(workdir.read_metrics(folder))
  assert [line["step"] for line in lines] == list(range(1, 11))
  assert [line["step"] for line in lines if line.get("skipped")] == list(_BROKEN)
  assert [line["step"] for line in lines if line["loss"] is None] == list(_BROKEN)
  assert all(np.isfinite(leaf).all() for leaf in _state(folder / checkpoints.NEWEST, 10).values())


def test_a_folder_without_a_kept_step_is_told(tmp_path):
  with pytest.raises(ValueError, match="keeps no step that was not finite"):
    replay.load(tmp_path)


def test_damaged_reproductions_are_told(tmp_path):
  folder = tmp_path / "diverged" / "3"
  folder.mkdir(parents=True)
  for content in ("", "[]", "{}", '{"step": 3, "config": {}, "class_counts": 5}', '{"step": 3, "config": {"seed": "x"}}'):
    (folder / "report.json").write_text(content)
    with pytest.raises(ValueError, match=r"report\.json is damaged|report\.json"):
      replay.load(tmp_path)
  with pytest.raises(ValueError, match=r"--step=4: .* keeps 3"):
    replay.load(tmp_path, step=4)


def _old_and_new(value):
  old = TrainState(jnp.int32(4), {"w": jnp.ones(2)}, {}, (jnp.zeros(3),))
  new = TrainState(jnp.int32(5), {"w": jnp.array([2.0, value])}, {}, (jnp.ones(3),))
  return old, new


class TestGuard:
  @pytest.mark.parametrize(
    ("policy", "bad", "step", "kept", "count"),
    [
      ("stop", 0, 5, "new", 5),
      ("stop", 4, 5, "old", 4),
      ("stop", 0, 6, "old", 4),  # the state was left standing at the step before
      ("stop", 0, None, "new", 5),
      ("skip", 0, 5, "new", 5),
      ("skip", 4, 5, "old", 5),
      ("keep", 4, 5, "new", 5),
    ],
  )
  def test_what_is_kept(self, policy, bad, step, kept, count):
    old, new = _old_and_new(3.0)
    found = step_lib.guarded(old, new, jnp.int32(bad), policy=policy, step=step)
    want = {"old": old, "new": new}[kept]
    assert int(found.step) == count
    np.testing.assert_array_equal(found.params["w"], want.params["w"])
    np.testing.assert_array_equal(found.opt_state[0], want.opt_state[0])

  @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
  def test_any_nonfinite(self, value, dtype):
    tree = {"a": jnp.ones(3, dtype), "b": (jnp.arange(3), jnp.array([0.0, value], dtype))}
    assert bool(step_lib.any_nonfinite(tree))
    assert not bool(step_lib.any_nonfinite({"a": jnp.array([3e38, -3e38]), "b": jnp.arange(3)}))
    assert not bool(step_lib.any_nonfinite({}))

  def test_codes_name_their_parts(self):
    flags = {name: jnp.array(name in ("gradient", "carried state")) for name in step_lib.NONFINITE_PARTS}
    assert step_lib.nonfinite_names(float(step_lib.nonfinite_code(flags, None))) == ["gradient", "carried state"]
    assert step_lib.nonfinite_names(0.0) == []
