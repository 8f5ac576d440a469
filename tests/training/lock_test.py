"""Tests that two runs cannot use one folder."""

import os
import subprocess
import sys
import time

import pytest
import runs

from soprc_jax.training import loop, workdir

_HOLDER = """
import pathlib, sys, time
from soprc_jax.training import workdir
with workdir.hold(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  time.sleep(600)
"""


def _holder(folder):
  """Starts another process that locks the workdir."""
  process = subprocess.Popen(
    [sys.executable, "-c", _HOLDER, folder], cwd=runs.ROOT, stdout=subprocess.PIPE, text=True
  )
  assert any(line == "held\n" for line in process.stdout)  # libraries may print before it
  return process


def test_a_link_is_not_followed(tmp_path):
  (tmp_path / "mine").write_text("mine")
  (tmp_path / workdir.LOCK).symlink_to(tmp_path / "mine")
  with (
    pytest.raises(
      ValueError, match=r"\.lock is a link, which the lock of a run never is: remove it"
    ),
    workdir.hold(tmp_path),
  ):
    pass
  assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", [workdir.LOCK, workdir.HOLDER])
@pytest.mark.parametrize("kind", ["a folder", "a named pipe"])
def test_what_is_no_file_is_refused(tmp_path, name, kind):
  (os.mkdir if kind == "a folder" else os.mkfifo)(tmp_path / name)
  with (
    pytest.raises(
      ValueError, match=rf"{name} is {kind}, which the lock of a run never is: remove it"
    ),
    workdir.hold(tmp_path),
  ):
    pass


def test_the_second_is_refused_until_the_first_is_gone_however_it_went(tmp_path):
  process = _holder(tmp_path)
  try:
    with (
      pytest.raises(ValueError, match=f"is in use by process {process.pid} on .*, since 20"),
      workdir.hold(tmp_path),
    ):
      pass
  finally:
    process.kill()
    process.wait()
  process.stdout.close()
  with workdir.hold(tmp_path):
    assert (tmp_path / workdir.HOLDER).read_text().startswith(f"process {os.getpid()} on ")
  with workdir.hold(tmp_path):  # a second time
    pass


def test_a_child_of_a_killed_run_does_not_keep_it(tmp_path):
  # Loader processes may outlive their parent for a short time.
  with workdir.hold(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
  try:
    time.sleep(0.1)
    with workdir.hold(tmp_path):
      pass
  finally:
    child.kill()
    child.wait()


def test_a_run_in_a_folder_in_use_changes_nothing(tmp_path):
  folder, config = tmp_path / "run", runs.tiny_config()
  folder.mkdir()
  with workdir.hold(folder), pytest.raises(ValueError, match="is in use by process"):
    loop.train(config, folder)
  assert {path.name for path in folder.iterdir()} <= {workdir.LOCK, workdir.HOLDER}
  workdir.claim(folder, config)
  before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
  with workdir.hold(folder), pytest.raises(ValueError, match="is in use by process"):
    loop.train(config, folder)
  assert {path: path.stat().st_mtime_ns for path in folder.iterdir()}.keys() == before.keys()
