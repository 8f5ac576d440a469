"""Tests user-given paths, and the error report for a full disk."""

import contextlib
import errno
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
import runs

from experiments import flags
from soprc_jax._internal import file_io
from soprc_jax.training import loop, workdir


@pytest.mark.parametrize(
  "path",
  [
    "gs://bucket/run",
    "s3://bucket/run",
    "hdfs://host:8020/run",
    "S3A://bucket",
    "gs:/bucket/run",
    "dbfs:/run",
    pathlib.Path("gs://bucket/run"),
    "host:/run",
  ],
)
def test_f59_remote_folders_are_not_supported(path):
  with pytest.raises(ValueError, match=r"--workdir=\S+: remote folders are not supported"):
    file_io.given(path, name="--workdir")


@pytest.mark.parametrize("path", ["file:///tmp/run", "FILE:/tmp/run"])
def test_f59_the_address_of_a_local_file_names_the_remedy(path):
  with pytest.raises(
    ValueError, match=r"--output=\S+: give the plain path, without (file|FILE)://"
  ):
    file_io.given(path, name="--output")


@pytest.mark.parametrize(
  "path", ["run", "/tmp/run", "a:b", "runs/gs:/x", "C:/runs", "2024-01-01T10:30/run", "a=b:/c", "."]
)
def test_f59_plain_paths_are_taken(path):
  assert file_io.given(path, name="--workdir") == pathlib.Path(path)


def test_f55_a_tilde_without_a_home_is_an_error(monkeypatch):
  assert file_io.given("~/run", name="--workdir") == pathlib.Path.home() / "run"

  monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # its result for an unknown user
  with pytest.raises(ValueError, match=r"--workdir=~/run: the home folder is unknown here"):
    file_io.given("~/run", name="--workdir")


def test_f59_a_run_in_python_rejects_it_too(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="remote folders are not supported"):
    loop.train(runs.tiny_config(), pathlib.Path("gs://bucket/run"))
  assert list(tmp_path.iterdir()) == []


class _Usage(NamedTuple):
  free: int


def _no_space():
  return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disks(tmp_path, monkeypatch):
  """Returns a function that sets the free bytes of three file systems. They are those of the
  workdir, the temporary folder and the shared memory.
  """
  place = {
    "workdir": tmp_path / "run",
    "temporary": tmp_path / "temporary",
    "shared": pathlib.Path("/dev/shm"),
  }
  for folder in place.values():
    folder.mkdir(exist_ok=True)
  monkeypatch.setenv("TMPDIR", str(place["temporary"]))
  found = dict.fromkeys(place, 2**40)
  devices = {str(path): number for number, path in enumerate(place.values())}
  free = {path: name for name, path in place.items()}
  monkeypatch.setattr(
    shutil, "disk_usage", lambda path: _Usage(found[free[path]] if path in free else 2**40)
  )
  real = pathlib.Path.stat

  class _Stat(NamedTuple):
    st_dev: int
    st_mode: int

  def stat(self, **options):
    status = real(self, **options)
    return _Stat(devices[str(self)], status.st_mode) if str(self) in devices else status

  monkeypatch.setattr(pathlib.Path, "stat", stat)
  return place, found


def test_a_folder_in_the_place_of_a_file(tmp_path):
  for _ in range(2):
    file_io.make_folder(tmp_path / "a" / "b", name="--output")
  (tmp_path / "a" / "b" / "file").write_text("")
  for wrong in ("file", "file/c/d"):
    with pytest.raises(ValueError, match=rf"--output=\S+{wrong}: a file is in its place, choose"):
      file_io.make_folder(tmp_path / "a" / "b" / wrong, name="--output")


def test_two_writers_of_one_file_do_not_mix(tmp_path):
  path = tmp_path / "a"
  with file_io.whole(path) as first:
    first.write(b"fir")
    with file_io.whole(path) as second:
      second.write(b"sec")
      first.flush()
    assert path.read_bytes() == b"sec"
    first.write(b"st")
  assert path.read_bytes() == b"first"
  with contextlib.suppress(KeyError), file_io.whole(path) as third:
    third.write(b"x")
    raise KeyError
  assert path.read_bytes() == b"first"
  assert list(tmp_path.iterdir()) == [path]


_WRITER = """
import pathlib, sys
from soprc_jax._internal import file_io
with file_io.whole(pathlib.Path(sys.argv[1])) as file:
  file.write(b"part")
  print("writes", flush=True)
  sys.stdin.read()
"""


def test_what_a_killed_writer_leaves_is_removed_and_a_living_one_is_left(tmp_path):
  path = tmp_path / "a[1].npy"
  pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": runs.environment()}
  children = [
    subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], cwd=runs.ROOT, **pipe)
    for _ in range(2)
  ]
  assert [child.stdout.readline() for child in children] == [b"writes\n"] * 2
  children[0].kill()
  children[0].wait()
  other = tmp_path / f".a[1].npy.{'0' * 16}.tmp.txt"
  other.write_text("")
  files = set(tmp_path.iterdir())
  file_io.remove_stale(tmp_path, {path.name})
  assert set(tmp_path.iterdir()) == files  # too new
  for file in files:
    os.utime(file, (0, 0))
  file_io.remove_stale(tmp_path, {"a1.npy"})
  assert set(tmp_path.iterdir()) == files  # of another file
  file_io.remove_stale(tmp_path, {path.name})
  left = set(tmp_path.iterdir())
  assert (len(files), len(left)) == (3, 2)
  children[1].communicate()  # ends its input
  assert children[1].returncode == 0
  assert path.read_bytes() == b"part"
  assert set(tmp_path.iterdir()) == {path, other}
  for child in children:
    child.stdin.close()
    child.stdout.close()


def test_nothing_is_removed_without_locks(tmp_path, monkeypatch):
  path = tmp_path / f".a.{'0' * 16}.tmp"
  path.write_text("")
  os.utime(path, (0, 0))
  monkeypatch.setattr(file_io, "fcntl", None)
  file_io.remove_stale(tmp_path, {"a"})
  assert path.exists()
  with file_io.whole(tmp_path / "a") as file:
    file.write(b"x")
  monkeypatch.undo()
  file_io.remove_stale(tmp_path, {"a"})
  assert list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.mark.parametrize("full", ["workdir", "temporary", "shared"])
def test_f56_the_file_system_that_is_full_is_named(disks, full):
  place, free = disks
  free[full] = 4096
  with (
    pytest.raises(OSError, match="no space is left") as error,
    loop._disk_errors(place["workdir"]),
  ):
    raise _no_space()
  told = str(error.value).split(": free some")[0]
  assert str(place[full]) in told
  assert [str(path) in told for name, path in place.items() if name != full] == [False, False]
  assert ("for the run in" in told) == (full == "workdir")
  assert f"resumes from the newest checkpoint in {place['workdir']}" in str(error.value)


def test_f56_where_no_file_system_is_full_now_all_are_listed(disks):
  place, _ = disks
  with (
    pytest.raises(OSError, match="that the error does not name") as error,
    loop._disk_errors(place["workdir"]),
  ):
    raise ValueError("tensorstore: No space left on device")
  assert all(str(path) in str(error.value) for path in place.values())


def test_f56_the_file_that_failed_is_named(disks, tmp_path):
  place, free = disks
  free["workdir"] = 0  # the error still names the other file
  other = tmp_path / "elsewhere" / "file"
  with (
    pytest.raises(OSError, match="no space is left in") as error,
    loop._disk_errors(place["workdir"]),
  ):
    raise RuntimeError("a reader has failed") from OSError(errno.EDQUOT, "quota", str(other))
  assert f"no space is left in {other}: free some" in str(error.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_f56_files_of_a_run_know_their_name(tmp_path, monkeypatch):
  real = pathlib.Path.open
  monkeypatch.setattr(
    pathlib.Path, "open", lambda self, mode, **more: real(pathlib.Path("/dev/full"), "wb")
  )
  with pytest.raises(OSError, match="No space left") as error:
    workdir.write_atomically(tmp_path / "results.json", "x" * 10**5)
  assert error.value.filename == str(tmp_path / "results.json")
  monkeypatch.undo()
  log = workdir.JsonLines(tmp_path / "metrics.jsonl", [])
  log._file.close()
  log._file = open("/dev/full", "a")  # noqa: SIM115
  log.write({"step": 1})
  with pytest.raises(OSError, match="No space left") as error:
    log.sync()
  assert error.value.filename == str(tmp_path / "metrics.jsonl")
  with contextlib.suppress(OSError):
    log.close()


@pytest.mark.parametrize(
  "error", [_no_space(), RuntimeError("tensorstore: No space left on device")]
)
def test_f56_other_programs_name_it_too(disks, capsys, error):
  disks[1]["shared"] = 0
  with pytest.raises(SystemExit), flags.errors_as_messages():
    raise error
  assert capsys.readouterr().err.startswith(
    "Error: no space is left in /dev/shm (0.0 MiB free): free some ("
  )


def test_f56_a_named_file_is_reported_once(capsys):
  with pytest.raises(SystemExit), flags.errors_as_messages():
    raise OSError(errno.ENOSPC, "No space left on device", "/full/file")
  assert capsys.readouterr().err == "Error: [Errno 28] No space left on device: '/full/file'\n"


@pytest.mark.slow
def test_f56_a_small_shared_memory_is_not_blamed_on_the_workdir(tmp_path):
  """Checks shared memory, which loader processes use together with the run."""
  program = [sys.executable, "-m", "experiments.train"]
  flags_of_run = runs.tiny_flags(tmp_path / "run", **{"data.workers": 2, "data.image_size": 224})
  small = (
    'mount -t tmpfs -o size=4k,nr_inodes=2 tmpfs /dev/shm && : > /dev/shm/ballast && exec "$@"'
  )
  command = ["unshare", "-m", "sh", "-c", small, "sh", *program, *flags_of_run]
  if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
    pytest.skip("no mount namespace here")
  env = runs.environment()
  done = subprocess.run(
    command, cwd=runs.ROOT, env=env, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 1, done.stderr
  assert "Traceback" not in done.stderr, done.stderr
  assert "/dev/shm" in done.stderr.splitlines()[-1]
  assert "for the run in" not in done.stderr.splitlines()[-1]
