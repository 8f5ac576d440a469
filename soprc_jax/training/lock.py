"""One run in a folder at a time."""

from collections.abc import Iterator
import contextlib
import datetime
import logging
import os
from pathlib import Path
import socket

import filelock

from soprc_jax._internal import file_io

_log = logging.getLogger(__name__)

LOCK = ".lock"
# Who holds it; a lock file itself is emptied by whoever asks for it.
HOLDER = ".lock_holder"


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
  """Holds the lock of a folder that exists; the system releases it when the process ends, in whatever way.

  Raises:
    ValueError: another process holds it; the message tells which one. Or the lock file is a link or no regular file.
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
      f"--workdir={workdir} is in use by {_holder(workdir)}: wait for that run or stop it, or choose another folder"
    ) from None
  except NotImplementedError as error:  # some network file systems know no locks
    _log.warning("%s cannot be locked (%s): see to it that no other run uses it.", workdir, error)
  try:
    now = datetime.datetime.now()
    with file_io.whole(workdir / HOLDER) as file:
      file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S}\n".encode())
    yield
  finally:
    held.release()


def _holder(workdir: Path) -> str:
  try:
    return (workdir / HOLDER).read_text(encoding="utf-8", errors="replace").strip() or "another process"
  except OSError:
    return "another process"
