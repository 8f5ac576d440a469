"""One run in a folder at a time."""

from collections.abc import Iterator
import contextlib
import datetime
import errno
import logging
import os
from pathlib import Path
import socket

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

LOCK = ".lock"


def _open(path: Path) -> int:
  """The lock file, made if it is missing; a link there is not followed.

  Raises:
    ValueError: it is a link.
  """
  try:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
  except OSError as error:
    if error.errno == errno.ELOOP:
      raise ValueError(f"{path} is a link, which the lock of a run never is: remove it") from error
    raise


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
  """Holds the lock of a folder that exists; the system releases it when the process ends, in whatever way.

  Raises:
    ValueError: another process holds it; the message tells which one.
  """
  if fcntl is None:
    _log.warning("No locks on this system: see to it that no other run uses %s.", workdir)
    yield
    return
  # The file stays: deleting it would let a third process lock another file of the same name.
  with os.fdopen(_open(workdir / LOCK), "r+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise ValueError(
        f"--workdir={workdir} is in use by {holder}: wait for that run or stop it, or choose another folder"
      ) from None
    except OSError as error:
      # Some network file systems know no locks.
      _log.warning("%s cannot be locked (%s): see to it that no other run uses it.", workdir, error.strerror)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n")
    file.flush()
    yield
