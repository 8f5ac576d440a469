"""Tests a whole run in this process on two devices, up to its results (training/results.py)."""

import itertools
import json
import os
import signal

import chex
import crashes
import numpy as np
import pytest
import runs

from soprc_jax.data import pipeline
from soprc_jax.training import (
  checkpoints,
  evaluation,
  interrupts,
  loop,
  optimizers,
  parallel,
  run_log,
  v_history,
)
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Runs `loop.train` in this process, on two devices, with a warm-up. Returns its config, workdir
  and results.
  """
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
    np.testing.assert_allclose(
      [line["learning_rate"] for line in lines], [schedule(step) for step in range(8)]
    )
    assert lines[3]["v_weight"] == 0  # the warm-up did not change v
    assert [line["step"] for line in lines if "val_mAUPRC" in line] == [3, 6, 8]

  def test_starts_only_on_devices_that_divide_the_batch(self, tmp_path):
    config = runs.tiny_config(**{"train.batch_size": 9, "train.per_class": 3})
    with pytest.raises(ValueError, match="is not divisible by 2 devices: use 6 or 12"):
      loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _and_terminate(function, due):
  """Wraps a function so that its call sends SIGTERM to this process when ``due`` is true."""

  def terminating(*args, **kwargs):
    if due(*args, **kwargs):
      os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)

  return terminating


def _dying_after(count):
  """Returns `pipeline.iterate` whose workers die of a SIGTERM after some batches."""
  iterate = pipeline.iterate

  def dying(*args, **kwargs):
    yield from itertools.islice(iterate(*args, **kwargs), count)
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("Worker process was terminated unexpectedly")

  return dying


def _dying_at(step):
  """Returns `MetricsLog.write` that dies of the line of a step."""
  write = workdir_lib.MetricsLog.write

  def dying(log, line):
    if line["step"] == step:
      raise RuntimeError("killed")
    write(log, line)

  return dying


def test_what_was_best_beyond_the_newest_checkpoint_is_forgotten(tmp_path, monkeypatch):
  """Checks a run that resumes with other bits, e.g. on other devices. The steps after the
  checkpoint are made again, so the best model of the first attempt must not stay.
  """
  config, folder = runs.tiny_config(warmup_steps=0, steps=8), tmp_path / "run"
  evaluate = evaluation.evaluate

  def train(*values, baselines=0):
    left = [0.0] * baselines + list(values)
    monkeypatch.setattr(
      evaluation,
      "evaluate",
      lambda *args: evaluate(*args) | {"mAUPRC": left.pop(0) if left else 0.0},
    )
    return loop.train(config, folder)

  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "write", _dying_at(7))
    with pytest.raises(RuntimeError, match="killed"):
      train(0.1, 0.3, baselines=3)
  best = folder / checkpoints.BEST
  assert sorted(path.name for path in best.iterdir()) == ["3", "6"]  # the newest one is of step 4
  results = train(0.05, 0.06)
  assert results["tested_step"] == 3
  assert results["val"]["mAUPRC"] == 0.1
  assert [path.name for path in best.iterdir()] == ["3"]


def test_a_run_with_confusable_classes_resumes_bit_for_bit(tmp_path, monkeypatch):
  """Checks a resume between two refreshes: the neighbours are those of the checkpoint."""
  sampler = {"data.sampler": "confusable"} | {
    f"data.confusable.{key}": value for key, value in (("group", 2), ("pool", 3), ("refresh", 3))
  }
  config = runs.tiny_config(warmup_steps=2, steps=6, **sampler)
  loop.train(config, tmp_path / "whole")

  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "write", _dying_at(6))
    with pytest.raises(RuntimeError, match="killed"):
      loop.train(config, tmp_path / "resumed")
  loop.train(config, tmp_path / "resumed")  # from step 4; the neighbours were found at step 3
  assert runs.metrics(tmp_path / "resumed") == runs.metrics(tmp_path / "whole")
  lines = [(tmp_path / name / v_history.FILE).read_text() for name in ("resumed", "whole")]
  assert lines[0] == lines[1]


def test_an_evaluation_is_cut_short_by_a_pre_emption_and_done_later(run, tmp_path, monkeypatch):
  config, folder = run[0], tmp_path / "run"
  newest = checkpoints.NEWEST

  def stopped(after, owner, name, due=lambda *args: True):
    with monkeypatch.context() as patch:
      patch.setattr(owner, name, _and_terminate(getattr(owner, name), due))
      with pytest.raises(
        interrupts.InterruptedRunError, match=f"Stopped by SIGTERM after step {after} of 8"
      ):
        loop.train(config, folder)
    assert (folder / newest / str(after)).is_dir()
    last = list(workdir_lib.read_metrics(folder))[-1]
    assert last["step"] == after
    assert "val_mAUPRC" not in last

  # During the evaluation of the baselines.
  with monkeypatch.context() as patch:
    patch.setattr(evaluation, "evaluate", _and_terminate(evaluation.evaluate, lambda *args: True))
    with pytest.raises(interrupts.InterruptedRunError, match="before the first of 8 steps"):
      loop.train(config, folder)
  assert not (folder / newest).exists() or list((folder / newest).iterdir()) == []
  # The loader processes die of the same signal, before the first step and during the steps.
  for count, told in ((0, "before the first of 8 steps"), (2, "after step 2 of 8")):
    with monkeypatch.context() as patch:
      patch.setattr(pipeline, "iterate", _dying_after(count))
      with pytest.raises(interrupts.InterruptedRunError, match=f"Stopped by SIGTERM {told}"):
        loop.train(config, folder)
  assert (folder / newest / "2").is_dir()
  stopped(3, evaluation, "evaluate")
  stopped(3, evaluation, "evaluate")  # during the evaluation that makes up for it
  # A kill after the model was saved and before its line was written.
  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "replace_last", None)
    with pytest.raises(TypeError):
      loop.train(config, folder)
  assert (folder / checkpoints.BEST / "3").is_dir()
  # A signal during the steps, before an evaluation begins.
  stopped(6, workdir_lib.MetricsLog, "write", lambda log, line: line["step"] == 5)
  stopped(8, workdir_lib.MetricsLog, "write", lambda log, line: line["step"] == 7)
  # A signal after the last step.
  with monkeypatch.context() as patch:
    patch.setattr(
      run_log.Records, "complete", _and_terminate(run_log.Records.complete, lambda *args: True)
    )
    with pytest.raises(
      interrupts.InterruptedRunError, match="Stopped by SIGTERM after step 8 of 8"
    ):
      loop.train(config, folder)
  assert not (folder / workdir_lib.RESULTS).exists()
  loop.train(config, folder)
  crashes.assert_same_run(folder, run[1])
  keys = [list(line) for line in workdir_lib.read_metrics(folder)]
  assert keys == [list(line) for line in workdir_lib.read_metrics(run[1])]


def test_a_process_that_is_not_the_main_one_writes_checkpoints_only(tmp_path, monkeypatch):
  # All processes write checkpoints together. Process 0 alone writes logs, tables and images.
  config = runs.tiny_config(warmup_steps=0, steps=2)
  workdir_lib.claim(tmp_path, config)
  monkeypatch.setattr(parallel, "is_main", lambda: False)
  monkeypatch.setattr(workdir_lib, "claim", None)
  results = loop.train(config, tmp_path)
  assert results["test"]["num_queries"] > 0
  names = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
  assert names == {"config.json", "best", "checkpoints"}
