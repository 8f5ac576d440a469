"""Tests that a resumed run equals an uninterrupted one.

After a SIGKILL at any moment, the same command ends with the same bits.
"""

import json
import shutil

import crashes
import pytest
import runs


def _checkpoints(folder):
  """Returns the steps of the finished checkpoints."""
  return crashes.left(folder)["checkpoints"]


def _logged(folder):
  return crashes.left(folder)["lines"]


def test_f14_killed_twice(tmp_path):
  folder = tmp_path / "run"
  flags = runs.tiny_flags(folder)
  # While the main phase compiles: steps 5 and 6 are in the log, the newest checkpoint is of step 4.
  assert runs.start_and_kill(flags, lambda _: _logged(folder) >= 6)
  assert (_checkpoints(folder), _logged(folder)) == ([4], 6)
  # During the main phase: v differs from its start.
  assert runs.start_and_kill(flags, lambda _: _checkpoints(folder)[-1:] >= [8])
  assert 8 <= _checkpoints(folder)[-1] < 24
  done = runs.call("experiments.train", *flags)
  assert done.returncode == 0, done.stderr
  assert "Resuming from step" in done.stderr
  crashes.assert_same_run(folder, runs.finished().workdir)


@pytest.mark.slow
def test_goes_on_with_other_workers_and_a_damaged_compile_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
  folder = tmp_path / "run"
  assert runs.start_and_kill(runs.tiny_flags(folder), lambda _: _checkpoints(folder)[-1:] >= [12])
  # JAX writes its cache in place, so a kill can leave half a file.
  entries = [path for path in (tmp_path / "compiled").rglob("*") if path.is_file()]
  assert entries
  for path in entries:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  done = runs.call("experiments.train", *runs.tiny_flags(folder, **{"data.workers": 2}))
  assert done.returncode == 0, done.stderr
  reference = runs.finished().workdir
  assert runs.metrics(folder) == runs.metrics(reference)
  assert (
    json.loads((folder / "results.json").read_text())["test"]
    == json.loads((reference / "results.json").read_text())["test"]
  )


def test_f19_a_finished_run_stays_as_it_is_by_a_relative_workdir(tmp_path):
  # From another directory, with a relative workdir.
  reference = runs.finished().workdir
  shutil.copytree(reference, tmp_path / "copied")
  done = runs.call("experiments.train", *runs.tiny_flags("copied"), cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "copied" / "metrics.jsonl").read_bytes() == (
    reference / "metrics.jsonl"
  ).read_bytes()
  crashes.assert_same_run(tmp_path / "copied", reference)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["copied"]
