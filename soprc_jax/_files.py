"""Files of users: written whole or not at all, and read only if they are regular files."""

from collections.abc import Iterator
import contextlib
import errno
import os
from pathlib import Path
import stat
from typing import BinaryIO

_KINDS = {
  stat.S_IFDIR: "a folder",
  stat.S_IFIFO: "a named pipe",
  stat.S_IFSOCK: "a socket",
  stat.S_IFCHR: "a device",
  stat.S_IFBLK: "a device",
}


def expanded(path: str | os.PathLike[str]) -> Path:
  """Returns the path that a user has given, with ``~`` as the home folder.

  Unlike `Path.expanduser` it takes a name that begins with ``~`` and is that of no user as it is.
  """
  return Path(os.path.expanduser(path))


def why_no_file(path: str | os.PathLike[str]) -> str:
  """Says why a path is no regular file, links followed; empty if it is one."""
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
  """Returns whether a path is a link that leads nowhere, be it circular."""
  return os.path.islink(path) and not os.path.exists(path)


def read_regular(path: str | os.PathLike[str]) -> bytes:
  """Returns the content of a regular file, and never waits for a pipe or a device.

  Raises:
    OSError: it cannot be read; its ``strerror`` says why if it is something else than a file.
  """
  with open(path, "rb", opener=_open_at_once) as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise OSError(errno.EINVAL, why_no_file(path), str(path))
    return file.read()


def _open_at_once(path: str, flags: int) -> int:
  return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has neither


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
  """A binary file to write, which takes the place of ``path`` when it is complete and on disk: a kill or a power cut leaves the old or the new one.

  A link at ``path`` is replaced, not followed, and so is one in the place of the file beside it.
  """
  aside = path.with_name(f".{path.name}.tmp")
  aside.unlink(missing_ok=True)
  try:
    with aside.open("xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(aside, path)
  finally:
    aside.unlink(missing_ok=True)
  _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
  """Puts the names in a folder on disk, where a system can do so."""
  if not hasattr(os, "O_DIRECTORY"):  # Windows
    return
  number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(number)
  except OSError:  # some network file systems cannot
    pass
  finally:
    os.close(number)
