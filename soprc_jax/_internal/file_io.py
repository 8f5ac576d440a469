"""File access: checks paths, reads regular files, writes files atomically, detects full disks."""

from collections.abc import Collection, Iterator
import contextlib
import errno
import os
from pathlib import Path
import re
import secrets
import shutil
import stat
import time
from typing import BinaryIO

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

# At least two letters before the colon, since a Windows drive has one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 16 << 20  # bytes: a file system with less counts as full
_RECENT = 60  # seconds
# Names of the temporary files of `whole`.
_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
_KINDS = {
  stat.S_IFDIR: "a folder",
  stat.S_IFIFO: "a named pipe",
  stat.S_IFSOCK: "a socket",
  stat.S_IFCHR: "a device",
  stat.S_IFBLK: "a device",
}


def given(path: str | os.PathLike[str], *, name: str) -> Path:
  """Returns the local path that a user has passed, with ``~`` replaced by the home folder.

  Unlike `Path.expanduser` it keeps a name that begins with ``~`` but names no user.

  Args:
    path: as passed.
    name: name of the flag or the config key, for messages.

  Raises:
    ValueError: it is an address such as ``gs://BUCKET/FOLDER``, or the home folder is unknown.
  """
  text = os.fspath(path)
  address = _ADDRESS.match(text.lstrip())
  if address and address[1].lower() == "file":
    raise ValueError(f"{name}={text}: give the plain path, without {address[1]}://")
  if address:
    raise ValueError(
      f"{name}={text}: remote folders are not supported. Give a local path; mount or copy remote "
      "files first"
    )
  expanded = os.path.expanduser(text)
  if expanded == text and (text == "~" or text.startswith("~/")):
    raise ValueError(f"{name}={text}: the home folder is unknown here. Give the path without ~")
  return Path(expanded)


def make_folder(path: Path, *, name: str) -> None:
  """Creates a folder and its parents, unless it exists.

  Args:
    path: the folder.
    name: name of the flag, for messages.

  Raises:
    ValueError: a file is in its place, or in that of a parent.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
  except (FileExistsError, NotADirectoryError):
    raise ValueError(f"{name}={path}: a file is in its place, choose another folder") from None


def why_no_file(path: str | os.PathLike[str]) -> str:
  """Returns why a path is not a regular file, or "" if it is one. Links are followed."""
  try:
    mode = os.stat(path).st_mode
  except FileNotFoundError:
    return "a link to nothing" if os.path.islink(path) else "missing"
  except OSError as error:
    return "a circular link" if error.errno == errno.ELOOP else error.strerror or "unreadable"
  except ValueError:  # NUL in the name
    return "missing"
  return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def is_dead_link(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a dangling or circular link."""
  return os.path.islink(path) and not os.path.exists(path)


def read_regular(path: str | os.PathLike[str]) -> bytes:
  """Returns the content of a regular file, without ever waiting for a pipe or a device.

  Raises:
    OSError: the file cannot be read, or is not a regular file; ``strerror`` says why.
  """
  with open(path, "rb", opener=_open_at_once) as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise OSError(errno.EINVAL, why_no_file(path), str(path))
    return file.read()


def _open_at_once(path: str, flags: int) -> int:
  return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # not available on Windows


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
  """Opens a binary file for writing, which replaces ``path`` once it is complete and on disk.

  After a kill or a power cut ``path`` is either the old or the new file. Of several writers at once
  the last to finish wins. A link at ``path`` is replaced, not followed.
  """
  aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
  with naming(path):
    try:
      with aside.open("x+b") as file:
        with contextlib.suppress(OSError):
          _lock(file)  # `remove_stale` leaves it
        yield file
        file.flush()
        os.fsync(file.fileno())
      os.replace(aside, path)
    finally:
      aside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def remove_stale(folder: Path, names: Collection[str]) -> None:
  """Removes the temporary files that killed calls of `whole` have left for files of a folder.

  Those of running processes are locked and stay. Those of the last minute stay too, since a new one
  may not be locked yet, and all stay where files cannot be locked.

  Args:
    folder: the folder, which is listed once.
    names: names of the files.
  """
  for aside in folder.iterdir():
    match = _ASIDE.fullmatch(aside.name)
    if not match or match[1] not in names:
      continue
    with contextlib.suppress(OSError), aside.open("rb") as file:
      if time.time() - os.fstat(file.fileno()).st_mtime > _RECENT:
        _lock(file)
        aside.unlink()


def _lock(file: BinaryIO) -> None:
  """Locks a file until it is closed.

  Raises:
    BlockingIOError: another process has locked it.
    OSError: the system or the file system has no locks.
  """
  if fcntl is None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
  fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the file name to system errors that lack it, such as those of a full disk."""
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = str(path)
    raise


def is_full(error: BaseException) -> bool:
  """Returns whether an error, or one of its causes, reports a full disk or quota."""
  # tensorstore, which Orbax uses, reports it as text.
  return any(
    getattr(cause, "errno", None) in _FULL
    or any(os.strerror(number) in str(cause) for number in _FULL)
    for cause in _causes(error)
  )


def what_is_full(error: BaseException, *places: Path) -> str:
  """Returns the file that an error of `is_full` names, or else the file systems that are full now.

  Args:
    error: as raised.
    places: folders that are written to. The temporary folder and the shared memory of processes are
      always included.
  """
  for cause in _causes(error):
    if (
      isinstance(cause, OSError)
      and cause.errno in _FULL
      and isinstance(cause.filename, (str, bytes))
    ):
      return os.fsdecode(cause.filename)
  free = _free(*places, Path(os.environ.get("TMPDIR") or "/tmp"), Path("/dev/shm"))
  full = {place: size for place, size in free.items() if size < _LITTLE}
  listed = ", ".join(
    f"{place} ({size / 2**20:.1f} MiB free)" for place, size in (full or free).items()
  )
  return (
    listed
    if full
    else f"a file system or a quota that the error does not name; now there is {listed}"
  )


def _free(*places: Path) -> dict[Path, int]:
  """Returns the free bytes of each file system of the places, by its first place."""
  found, seen = dict[Path, int](), set[int]()
  for place in places:
    with contextlib.suppress(OSError):
      there = next(folder for folder in (place, *place.parents) if folder.exists())
      if there.stat().st_dev not in seen:
        seen.add(there.stat().st_dev)
        found[place] = shutil.disk_usage(there).free
  return found


def _causes(error: BaseException) -> list[BaseException]:
  """Returns an error and its causes, the error first."""
  causes: list[BaseException] = []
  found: BaseException | None = error
  while found is not None and found not in causes:
    causes.append(found)
    found = found.__cause__ or found.__context__
  return causes


def _sync_folder(folder: Path) -> None:
  """Flushes the names in a folder to disk, if the system supports it."""
  if not hasattr(os, "O_DIRECTORY"):  # Windows
    return
  number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(number)
  except OSError:  # some network file systems cannot
    pass
  finally:
    os.close(number)
