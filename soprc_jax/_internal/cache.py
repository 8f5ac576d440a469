"""Where files are kept that later runs of the same user find again."""

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
  """Returns the place of a file in the cache of the user; its folder is made if it is missing.

  The folder is ``$XDG_CACHE_HOME/soprc_jax`` or ``~/.cache/soprc_jax``. Where that cannot be
  written, it is a temporary folder that only this user can write, with one warning. A file that is
  in the usual folder is read there.

  Raises:
    OSError: there is no temporary folder either.
  """
  try:
    usual = _usual()
    if (usual / name).exists():
      return usual / name
    usual.mkdir(parents=True, exist_ok=True)
    if not os.access(usual, os.W_OK | os.X_OK):
      raise PermissionError(f"{usual} cannot be written")
    return usual / name
  except (
    OSError,
    RuntimeError,
  ) as error:  # pathlib raises a RuntimeError where the user has no home
    folder = _temporary()
    reason = str(error).rstrip(".")
    _warn(
      f"No cache folder ({reason}): files are cached in {folder}. XDG_CACHE_HOME can name a better "
      "one."
    )
    return folder / name


def private_folder(name: str) -> Path:
  """Returns a folder in the cache of the user that only this user can write, or a temporary one.

  For what is run when it is found there, such as compiled functions: in a home that many share,
  another user may have put them there.

  Raises:
    OSError: there is no temporary folder either.
  """
  path = file(name)
  try:
    path.mkdir(mode=0o700)
  except FileExistsError:
    if hasattr(os, "geteuid") and not _is_private(path):
      _warn(
        f"{path} is not of this user alone, and is not used. Remove it, or make it so (chmod 700)."
      )
      return _of_process()
  return path


def has_home() -> bool:
  """Returns whether the user has a home folder that files can be written to."""
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
  # Making a missing home would put a folder where the system says that there is none
  # (/nonexistent).
  if not home.is_absolute() or not home.is_dir():
    raise FileNotFoundError(f"the home folder {home} does not exist")
  return home


def _temporary() -> Path:
  """Returns the temporary folder of this user, or of this process alone where something else has
  its name.
  """
  if not hasattr(os, "geteuid"):  # Windows
    return _of_process()
  path = Path(tempfile.gettempdir()) / f"{_NAME}-{os.geteuid()}"
  try:
    path.mkdir(mode=0o700)
  except FileExistsError:
    # Anybody can make a folder of this name first, and a link or a file too.
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
  """Logs a warning, each once."""
  _log.warning("%s", message)
