"""Tests a NaN or an infinity in a step.

The run stops or skips the step and keeps what reproduces it. No such value enters its state.
"""

import functools
import json
import logging
import os
import signal

import jax
import numpy as np
import pytest
import runs

from soprc_jax.training import build, checkpoints, interrupts, loop, replay, workdir

# Steps of the run, counted from 1, at which broken_losses.soprc gives a NaN.
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
  return build.abstract_state(
    config, build.make_parts(config, build.make_data(config).class_counts())
  )


def _state(folder, step):
  """Returns all leaves of a checkpoint except the step, by path."""
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
  """Returns ``MetricsLog.write`` with a SIGTERM to this process after the line of a step."""
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
  assert "training diverged at step 4 of 10: not finite: loss, gradient" in message
  assert f"soprc replay --workdir={folder} --own_loss=broken_losses:soprc; try" in message

  # The run keeps the batch and the state before the step. That state includes neither the step nor
  # the next one, which had already started.
  report = json.loads((folder / "diverged" / "4" / "report.json").read_text())
  assert (report["step"], report["loss"], report["nonfinite"][:1]) == (4, "nan", ["loss"])
  _assert_same(
    _state(folder / "diverged" / "4" / "state", 3), _state(folder / checkpoints.NEWEST, 3)
  )
  data = build.make_data(config)
  batch = build.make_batches(config, data)[3]
  with pytest.raises(
    ValueError,
    match=r"a folder alone may not run it: if it is yours, add --own_loss=broken_losses:soprc$",
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

  # The same run resumes and skips the step. It stops when more steps in a row are skipped than
  # allowed.
  with (
    caplog.at_level(logging.WARNING, "soprc_jax"),
    pytest.raises(loop.DivergedError, match="after 2 skipped steps in a row"),
  ):
    loop.train(_config(**{"train.on_nonfinite": "skip", "train.max_skipped": 2}), folder)
  assert sum("Skipped step" in message for message in caplog.messages) == 3
  assert replay.steps(folder) == [4, 8]
  _assert_same(_state(folder / checkpoints.NEWEST, 4), _state(folder / checkpoints.NEWEST, 3))
  _assert_same(
    _state(folder / "diverged" / "8" / "state", 7), _state(folder / checkpoints.NEWEST, 5)
  )

  # A SIGTERM while the run skips steps, and then the rest of the run.
  with monkeypatch.context() as patch:
    patch.setattr(workdir.MetricsLog, "write", _write_and_terminate_at(8))
    with pytest.raises(
      interrupts.InterruptedRunError, match="Stopped by SIGTERM after step 9 of 10"
    ) as stopped:
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
