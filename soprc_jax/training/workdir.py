"""The folder of a run: its config and lock, its log lines and its results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import datetime
import fnmatch
import json
import logging
import os
from pathlib import Path
import socket
from typing import Any

import filelock
from ml_collections import ConfigDict

from soprc_jax._internal import file_io, stored
from soprc_jax.training import config as config_lib
from soprc_jax.training import config_key

CONFIG = "config.json"
METRICS = "metrics.jsonl"
RESULTS = "results.json"
PR_CURVE = "pr_curve.npz"
# Files by which each program recognizes its own folders.
MARKERS = (CONFIG, "comparison.json", "simulation.json", "stability.json", "benchmark.json")
# Files that a training run, or a program that reads its folder, writes there or reads as its own.
WRITES = (
  CONFIG,
  METRICS,
  RESULTS,
  PR_CURVE,
  "pr_curve.png",
  "convergence.png",
  "v.jsonl",
  "images.json.gz",
  "tensorboard",
  "checkpoints",
  "best",
  "damaged",
  "diverged",
  "diverged.json",
  "variables",
  "per_query*.npz",
  "evaluation_*",
)


def per_query(split: str) -> str:
  """Returns the name of the file with the result of each query of a test split.

  >>> per_query("test"), per_query("test_small")
  ('per_query.npz', 'per_query_small.npz')
  """
  return f"per_query{split.removeprefix('test')}.npz"


def check(workdir: Path, config: ConfigDict, writes: Sequence[str] = WRITES) -> bool:
  """Returns whether a folder is free for a new run, without changing it.

  It is False if the folder has a run of the same config, which can be resumed.

  Args:
    workdir: folder; it need not exist.
    config: resolved.
    writes: see `check_files`.

  Raises:
    ValueError: the folder has a run of another config, files that a run would overwrite, or a link
      in their place.
  """
  check_files(workdir, writes, own=CONFIG)
  if not (workdir / CONFIG).exists():
    return True
  lines = config_differences(workdir, config)
  if lines:
    raise ValueError(
      f"--workdir={workdir} holds a run of another config; choose another folder, or the same "
      "config to resume it:\n" + "\n".join(f"  {line}" for line in lines)
    )
  return False


def check_files(folder: Path, writes: Sequence[str], *, own: str, name: str = "--workdir") -> None:
  """Raises a ValueError if a program would overwrite files of a folder, or write through a link.

  Other files are allowed in the folder, such as the log of a scheduler. A folder with ``own`` is
  one to resume.

  Args:
    folder: folder; it need not exist.
    writes: names of the files that the program writes there, or patterns of `fnmatch`.
    own: the file by which the program recognizes its own folders, one of `MARKERS`; empty if it
      resumes none.
    name: name of the flag, for messages.
  """
  if not folder.is_dir():
    if folder.exists() or folder.is_symlink():
      what = "a file" if folder.exists() else "a link to nothing"
      raise ValueError(f"{name}={folder} is {what}: choose a new folder")
    return
  refuse_links(folder, [*writes, own])
  if not own or not (folder / own).exists():
    there = [entry for entry in _among(folder, [*writes, *MARKERS]) if not entry.startswith(".")]
    if there:
      raise ValueError(
        f"{name}={folder} holds {', '.join(there[:5])}, which this program would overwrite "
        "or take for its own: choose a new folder"
      )


def refuse_links(workdir: Path, writes: Sequence[str] = ("*",)) -> None:
  """Raises a ValueError if a folder that will be written to has a link.

  A link in an untrusted folder could lead to any file of this machine.

  Args:
    workdir: the folder.
    writes: names or patterns of the entries of the folder that are written.
  """
  for entry in _among(workdir, writes):
    top = workdir / entry
    below = (
      os.path.join(where, name) for where, *found in os.walk(top) for name in [*found[0], *found[1]]
    )
    for path in [str(top), *below]:
      if os.path.islink(path):
        raise ValueError(
          f"{path} is a link, and a run does not write through links in its folder: replace it by "
          "the file or folder that it links to (--workdir itself may be a link)"
        )


def _among(folder: Path, patterns: Sequence[str]) -> list[str]:
  """Returns the names in a folder that match any of the patterns, sorted."""
  return sorted(
    name
    for name in os.listdir(folder)
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
  )


def claim(
  workdir: Path,
  config: ConfigDict,
  writes: Sequence[str] = WRITES,
  *,
  chosen: Mapping[str, Any] | None = None,
) -> None:
  """Creates a folder and writes the config into it, unless it has a run of the same config.

  Args:
    workdir: folder of the run.
    config: resolved; no key is open.
    writes: see `check_files`.
    chosen: see `chosen`. It is in the file of the config, so that no kill can separate them.

  Raises:
    ValueError: see `check`.
  """
  if check(workdir, config, writes):
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / CONFIG, config_lib.to_json(config, chosen))


# Shape of what `chosen` returns.
CHOICES = {str: {"value": object, "reason": str}}


def chosen(workdir: Path) -> dict[str, Any]:
  """Returns the keys that the run in a folder has chosen: key -> ``{"value", "reason"}``.

  The entry of ``train.steps`` also has ``"minutes"``, its time budget.

  Raises:
    ValueError: see `read_config`; the choices are corrupt.
  """
  found: dict[str, Any] = read_config(workdir).get(config_lib.CHOSEN, {})
  problem = stored.problem(found, CHOICES, config_lib.CHOSEN)
  if problem:
    raise ValueError(f"{workdir / CONFIG} is corrupt ({problem}): restore it from a copy")
  return found


def filled(workdir: Path, config: ConfigDict) -> ConfigDict:
  """Returns a config whose open keys have the values of the run in ``workdir``.

  Raises:
    ValueError: see `read_config`; the values do not fit the config.
  """
  if not config_lib.open_keys(config):
    return config
  return config_lib.fill(config, dict(config_key.leaves(read_config(workdir))))


def read_config(workdir: Path) -> dict[str, Any]:
  """Reads the resolved config of the run in ``workdir``.

  Raises:
    ValueError: there is no config, or it is not JSON.
  """
  path = workdir / CONFIG
  try:
    return stored.read_json(path, dict, remedy="restore it, or choose another --workdir")
  except FileNotFoundError:
    converted = (
      ": it is the output of soprc convert-weights, which has no data; train from it with "
      "--config.model.init_from, or use soprc embed"
    )
    hint = converted if (workdir / "variables").is_dir() else ""
    raise ValueError(f"--workdir={workdir} holds no run ({CONFIG} is missing){hint}") from None


def config_differences(workdir: Path, config: ConfigDict) -> list[str]:
  """Returns a line for each key in which the run in ``workdir`` differs from a config.

  A line is ``key: VALUE there, VALUE here``, where "there" is the run. An open key does not differ.

  Raises:
    ValueError: see `read_config`.
  """
  there = dict(read_config(workdir))
  there.pop(config_lib.CHOSEN, None)
  # Keys that an older version did not write take their defaults. What is not a config at all is
  # compared as it is.
  with contextlib.suppress(ValueError):
    there = json.loads(config_lib.to_json(config_lib.from_json(there)))
  here = json.loads(config_lib.to_json(filled(workdir, config)))
  return config_lib.differences(here, there)


def find_config(workdir: Path) -> dict[str, Any] | None:
  """Reads the resolved config of the run in a folder; None if there is no run."""
  return read_config(workdir) if (workdir / CONFIG).is_file() else None


def write_atomically(path: Path, text: str) -> None:
  """Writes a text file atomically, see `soprc_jax._internal.file_io.whole`."""
  with file_io.whole(path) as file:
    file.write(text.encode())


def write_results(workdir: Path, results: dict[str, Any]) -> None:
  """Writes ``results.json``."""
  write_atomically(workdir / RESULTS, json.dumps(results, indent=2, default=list) + "\n")


class JsonLines:
  """A file of one JSON object per line, each with its step, that a run appends to and resumes.

  Args:
    path: path of the file; its previous content is replaced by ``lines``.
    lines: lines to keep, oldest first.
    writes: whether this process writes the file. Other processes of the run only have the lines in
      memory.

  Attributes:
    lines: lines of the file, oldest first.
  """

  def __init__(self, path: Path, lines: list[dict[str, Any]], *, writes: bool = True):
    self.lines, self._path, self._writes = lines, path, writes
    self._open()

  def _open(self) -> None:
    """Writes the lines to the file, and opens it for appending."""
    if self._writes:
      write_atomically(self._path, "".join(_dump(line) for line in self.lines))
    self._file = (self._path if self._writes else Path(os.devnull)).open("a", encoding="utf-8")

  def write(self, line: dict[str, Any]) -> None:
    """Appends a line."""
    self.lines.append(line)
    with file_io.naming(self._path):
      self._file.write(_dump(line))

  def replace_last(self, line: dict[str, Any]) -> None:
    """Replaces the last line. After a kill the file has either the old line or the new one."""
    self.lines[-1] = line
    self._file.close()
    self._open()

  def sync(self) -> None:
    """Writes all lines to disk, before a checkpoint, so that none of its steps is missing."""
    with file_io.naming(self._path):
      self._file.flush()
      if self._writes:
        os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


class MetricsLog(JsonLines):
  """``metrics.jsonl``: one line per step, in order and without repeats, even if the run was killed.

  Args:
    workdir: folder of the run.
    last_step: step of the checkpoint that the run resumes from. Later lines are dropped, since
      those steps are repeated.
    writes: see `JsonLines`.

  Raises:
    ValueError: the file lacks a step up to ``last_step``.
  """

  def __init__(self, workdir: Path, *, last_step: int, writes: bool = True):
    path = workdir / METRICS
    lines = [line for line in read_metrics(workdir) if line["step"] <= last_step]
    there = [line["step"] for line in lines]
    missing = sorted(set(range(1, last_step + 1)) - set(there))
    if missing or len(there) > last_step:
      what = f"lacks step {missing[0]}" if missing else "has a step twice"
      raise ValueError(
        f"{path} {what}, and the run resumes from step {last_step}: it is corrupt. Restore it from "
        "a copy, or remove the checkpoints of later steps than those it still has"
      )
    super().__init__(path, lines, writes=writes)


def read_metrics(workdir: Path) -> Iterator[dict[str, Any]]:
  """Reads the lines of ``metrics.jsonl``, see `read_lines`."""
  return read_lines(workdir / METRICS)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
  """Yields the lines of a file of `JsonLines`; none if there is no file.

  It stops at the first invalid line, such as one that a kill truncated.
  """
  if not path.exists():
    return
  with path.open("rb") as file:
    for text in file:
      try:
        line = json.loads(text)
      except (ValueError, RecursionError):  # invalid JSON, invalid encoding, or too deeply nested
        return
      if not (isinstance(line, dict) and isinstance(line.get("step"), int)):
        return
      yield line


def data_wait_share(lines: Iterable[Mapping[str, Any]]) -> float:
  """Returns the share of the time of some steps in which the devices waited for images.

  Args:
    lines: lines of ``metrics.jsonl``; without any, the share is 0.
  """
  waits, seconds = 0.0, 0.0
  for line in lines:
    waits, seconds = waits + line["data_wait"], seconds + line["seconds"]
  return round(waits / seconds, 4) if seconds else 0.0


def _dump(line: dict[str, Any]) -> str:
  return json.dumps(line) + "\n"


_log = logging.getLogger(__name__)

LOCK = ".lock"
# Names the holder of the lock. The lock file itself is emptied by every process that tries to lock.
HOLDER = ".lock_holder"


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
  """Holds the lock of an existing folder.

  The operating system releases the lock when the process ends, also by a kill.

  Raises:
    ValueError: another process holds the lock, which the message names; or the lock file is a link
      or not a regular file.
  """
  path = workdir / LOCK
  for own in (path, workdir / HOLDER):
    what = "a link" if own.is_symlink() else file_io.why_no_file(own)
    if what not in ("", "missing"):
      raise ValueError(f"{own} is {what}, which the lock of a run never is: remove it")
  held = filelock.FileLock(path, timeout=0)
  try:
    held.acquire()
  except filelock.Timeout:
    raise ValueError(
      f"--workdir={workdir} is in use by {_holder(workdir)}: wait for that run or stop it, or "
      "choose another folder"
    ) from None
  except NotImplementedError as error:  # some network file systems do not support locks
    _log.warning("%s cannot be locked (%s): make sure that no other run uses it.", workdir, error)
  try:
    now = datetime.datetime.now()
    with file_io.whole(workdir / HOLDER) as file:
      file.write(
        f"process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S}\n".encode()
      )
    yield
  finally:
    held.release()


def _holder(workdir: Path) -> str:
  try:
    return (workdir / HOLDER).read_text(
      encoding="utf-8", errors="replace"
    ).strip() or "another process"
  except OSError:
    return "another process"
