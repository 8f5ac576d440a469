"""Tests real training processes that are stopped in every way.

Nothing is lost, and the same command ends with the bits of an uninterrupted run.

All are slow. ``python -m pytest -m slow tests/training/crash_test.py -s`` prints what each stop
left behind.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import crashes
import numpy as np
import pytest
import runs

from soprc_jax.training import checkpoints, workdir

_TRAIN = "experiments.train"
pytestmark = pytest.mark.slow


def _finish(folder, *, message=None, **values):
  """Runs the same command to its end and compares the result."""
  done = runs.call(_TRAIN, *runs.tiny_flags(folder, **values))
  assert done.returncode == 0, done.stderr
  assert message is None or message in done.stderr, done.stderr
  crashes.assert_same_run(folder, runs.finished().workdir)
  return done


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("phase", crashes.MOMENTS)
def test_kill(tmp_path, phase, seed):
  """Kills a run 50 times: five times in each phase, at random moments."""
  rng = np.random.default_rng([seed, list(crashes.MOMENTS).index(phase)])
  folder = tmp_path / "run"
  while True:
    moment = crashes.draw_moment(rng, phase)
    status, output = crashes.stop_at(runs.tiny_flags(folder), moment, folder)
    if status:
      break
    folder = folder.with_name(folder.name + "_")  # it finished before the moment came
  assert status == -signal.SIGKILL, output
  print(f"\nkill {phase} {seed}: {moment}, left {crashes.left(folder)}")
  _finish(folder)


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(tmp_path, seed):
  """Kills one run several times, at random moments of random phases, until it is done."""
  rng, folder, kills = np.random.default_rng([99, seed]), tmp_path / "run", 0
  for _ in range(6):
    moment = crashes.draw_moment(
      rng, rng.choice(["compiling", "syncing", "saving", "after saving", "evaluating"])
    )
    moment = moment._replace(
      nth=min(moment.nth, 2), delay=min(moment.delay, 2.0)
    )  # otherwise a fast machine is done before the third
    status, _ = crashes.stop_at(runs.tiny_flags(folder), moment, folder)
    kills += status == -signal.SIGKILL
    print(f"\nseed {seed}: {moment}, status {status}, left {crashes.left(folder)}")
  assert kills >= 3
  _finish(folder)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("phase", ["compiling", "evaluating", "saving", "after saving"])
def test_asked_to_stop(tmp_path, phase, number, status):
  """Checks a SIGTERM, as schedulers send it, or Ctrl-C. The run writes a checkpoint of the last
  step, the exit status reports it, and the same command resumes.
  """
  rng, folder = np.random.default_rng([7, number]), tmp_path / "run"
  moment = crashes.draw_moment(rng, phase)._replace(nth=2 if phase != "compiling" else 1)
  found, output = crashes.stop_at(runs.tiny_flags(folder), moment, folder, number=number)
  left = crashes.left(folder)
  print(f"\n{signal.Signals(number).name} {moment}: left {left}; {output.splitlines()[-1]}")
  assert found == status, output
  assert "Traceback" not in output
  assert (
    f"Stopped by {signal.Signals(number).name} after step {left['checkpoints'][-1]} of 24"
    in output.splitlines()[-1]
  )
  assert left["lines"] == left["checkpoints"][-1]
  _finish(folder, message=f"Resuming from step {left['checkpoints'][-1]} of 24")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_with_the_processes_that_load_images(tmp_path, number, status):
  """Checks a signal to the whole process group, including the loader processes. Ctrl-C in a
  terminal and some schedulers send it.
  """
  folder = tmp_path / "run"
  flags = runs.tiny_flags(folder, steps=500, **{"data.workers": 1})
  found, output = crashes.stop_at(
    flags, crashes.Moment("after saving", 4, 0.5), folder, number=number
  )
  print(f"\n{signal.Signals(number).name}: left {crashes.left(folder)}; {output}")
  assert found == status, output
  assert "Traceback" not in output
  newest = crashes.left(folder)["checkpoints"][-1]
  assert f"Stopped by {signal.Signals(number).name} after step {newest} of 506" in output
  assert crashes.left(folder)["lines"] == newest


@pytest.mark.parametrize("how", ["cut", "flipped", "deleted"])
def test_the_newest_checkpoint_is_damaged(tmp_path, how):
  folder = tmp_path / "run"
  status, output = crashes.stop_at(
    runs.tiny_flags(folder), crashes.Moment("after saving", 6, 0.0), folder
  )
  assert status == -signal.SIGKILL, output
  older, newer = crashes.left(folder)["checkpoints"][-2:]
  path = max(
    (folder / checkpoints.NEWEST / str(newer)).rglob("d/*"), key=lambda file: file.stat().st_size
  )
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 16
  if how == "deleted":
    path.unlink()
  else:
    path.write_bytes(content[: len(content) // 3] if how == "cut" else content)
  done = _finish(folder, message=f"The checkpoint of step {newer} is corrupt")
  assert f"Resuming from step {older} of 24" in done.stderr


def test_the_second_run_in_a_folder_is_refused(tmp_path):
  folder = tmp_path / "run"
  flags = runs.tiny_flags(folder)
  with subprocess.Popen(
    [sys.executable, "-m", _TRAIN, *flags],
    cwd=runs.ROOT,
    env=runs.environment(),
    stderr=subprocess.DEVNULL,
  ) as first:
    while not (folder / workdir.HOLDER).exists():
      assert first.poll() is None
      time.sleep(0.01)
    second = runs.call(_TRAIN, *flags)
    assert second.returncode == 1
    assert "Traceback" not in second.stderr
    assert f"is in use by process {first.pid}" in second.stderr.splitlines()[-1]
    assert first.wait() == 0
  crashes.assert_same_run(folder, runs.finished().workdir)


@pytest.fixture
def small_disk(tmp_path):
  """Returns a separate file system of a few MiB."""
  folder = tmp_path / "disk"
  folder.mkdir()
  done = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True
  )
  if done.returncode:
    pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
  yield folder
  subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("free_kib", [0, 16, 200, 1500, 1900])
def test_the_disk_is_full(small_disk, tmp_path, free_kib):
  """Checks runs with less and less space, where the first write fails. With space again the run
  resumes.
  """
  folder, ballast = small_disk / "run", small_disk / "ballast"
  # The cache of compiled functions would fill it first, and jax only warns of that.
  env = runs.environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"))
  disk = os.statvfs(small_disk)
  ballast.write_bytes(b"\0" * (disk.f_bavail * disk.f_frsize - free_kib * 1024))
  done = runs.call(_TRAIN, *runs.tiny_flags(folder), env=env)
  print(
    f"\n{free_kib} KiB: left {crashes.left(folder) if folder.is_dir() else None}; "
    f"{done.stderr.splitlines()[-1][:300]}"
  )
  assert done.returncode == 1, done.stderr
  assert "Traceback" not in done.stderr, done.stderr
  assert f"no space is left for the run in {folder}" in done.stderr.splitlines()[-1]
  ballast.unlink()
  assert runs.call(_TRAIN, *runs.tiny_flags(folder), env=env).returncode == 0
  crashes.assert_same_run(folder, runs.finished().workdir)


def _bound_by_permissions(flags):
  """Runs the command as a user bound by permissions, even where this process is root."""
  command = [sys.executable, "-m", _TRAIN, *flags]
  if os.getuid() == 0:
    if shutil.which("setpriv") is None:
      pytest.skip("root, and no setpriv to give up its rights")
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
  return subprocess.run(
    command, cwd=runs.ROOT, env=runs.environment(), capture_output=True, text=True
  )


def _assert_denied(done, path):
  print("\n" + done.stderr[-400:])
  assert done.returncode == 1
  assert "Traceback" not in done.stderr
  assert "Permission denied" in done.stderr.splitlines()[-1]
  assert str(path) in done.stderr.splitlines()[-1]


def test_no_permission_to_make_the_folder(tmp_path):
  tmp_path.chmod(0o555)
  _assert_denied(_bound_by_permissions(runs.tiny_flags(tmp_path / "run")), tmp_path / "run")
  tmp_path.chmod(0o755)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".", checkpoints.NEWEST, checkpoints.BEST, "tensorboard"])
def test_permission_to_write_is_gone(tmp_path, name):
  folder = tmp_path / "run"
  # The run stops before its first evaluation, at step 3, which will write the first best model.
  status, output = crashes.stop_at(
    runs.tiny_flags(folder), crashes.Moment("evaluating", 1, 0.0), folder
  )
  assert status == -signal.SIGKILL, output
  path = folder / name
  if not path.exists():
    pytest.skip(f"{name} is not there yet")
  mode = path.stat().st_mode
  path.chmod(0o444 if path.is_file() else 0o555)
  _assert_denied(_bound_by_permissions(runs.tiny_flags(folder)), path)
  path.chmod(mode)
  _finish(folder)
