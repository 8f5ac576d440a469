"""Cache folders of the user, for files that later runs reuse."""

import atexit
import functools
import logging
import os
from pathlib import Path
import shutil
import stat
import tempfile

_log = logging.getLogger(__name__)

_NAME = "soprc_jax"


def file(name: str) -> Path:
  """Returns the path of a file in the cache of the user, and creates its folder if it is missing.

  The folder is ``$XDG_CACHE_HOME/soprc_jax`` or ``~/.cache/soprc_jax``. If that is not writable, a
  temporary folder that only this user can write is used, with one warning. A file that exists in
  the usual folder is read from there.

  Raises:
    OSError: there is no temporary folder either.
  """
  try:
    usual = _usual()
    if (usual / name).exists():
      return usual / name
    usual.mkdir(parents=True, exist_ok=True)
    if not os.access(usual, os.W_OK | os.X_OK):
      raise PermissionError(f"{usual} is not writable")
    return usual / name
  except (
    OSError,
    RuntimeError,
  ) as error:  # pathlib raises a RuntimeError if the user has no home
    folder = _temporary()
    reason = str(error).rstrip(".")
    _warn(
      f"No cache folder ({reason}): files are cached in {folder}. Set XDG_CACHE_HOME to choose a "
      "better one."
    )
    return folder / name


def private_folder(name: str) -> Path:
  """Returns a cache folder that only this user can write, or a temporary one.

  It is meant for files that are executed, such as compiled functions. In a home that several users
  share, another user may have put them there.

  Raises:
    OSError: there is no temporary folder either.
  """
  path = file(name)
  try:
    path.mkdir(mode=0o700)
  except FileExistsError:
    if hasattr(os, "geteuid") and not _is_private(path):
      _warn(
        f"{path} is ignored, because it is not private to this user. Remove it, or make it private "
        "(chmod 700)."
      )
      return _of_process()
  return path


def has_home() -> bool:
  """Returns whether the user has a writable home folder."""
  try:
    return os.access(_home(), os.W_OK | os.X_OK)
  except (OSError, RuntimeError):
    return False


def _usual() -> Path:
  given = os.environ.get("XDG_CACHE_HOME")
  if given and Path(given).is_absolute():
    return Path(given) / _NAME
  if given:
    _warn(f"XDG_CACHE_HOME={given} is ignored: it must be an absolute path.")
  return _home() / ".cache" / _NAME


def _home() -> Path:
  home = Path.home()
  # Not created: a system can name a home that is meant not to exist (/nonexistent).
  if not home.is_absolute() or not home.is_dir():
    raise FileNotFoundError(f"the home folder {home} does not exist")
  return home


def _temporary() -> Path:
  """Returns the temporary folder of this user, or of this process if that name is taken."""
  if not hasattr(os, "geteuid"):  # Windows
    return _of_process()
  path = Path(tempfile.gettempdir()) / f"{_NAME}-{os.geteuid()}"
  try:
    path.mkdir(mode=0o700)
  except FileExistsError:
    # Another user may have created a folder, link or file of this name.
    if not _is_private(path):
      return _of_process()
  return path


def _is_private(path: Path) -> bool:
  found = path.lstat()
  return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


@functools.cache
def _of_process() -> Path:
  folder = tempfile.mkdtemp(prefix=f"{_NAME}-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return Path(folder)


@functools.cache
def _warn(message: str) -> None:
  """Logs a warning, each message only once."""
  _log.warning("%s", message)
