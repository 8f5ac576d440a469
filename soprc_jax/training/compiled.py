"""Where compiled functions are kept: jax runs what it finds there, so that it must be of this user's own making."""

import hashlib
import hmac
import logging
import os
from pathlib import Path
import secrets
import stat
import uuid

from soprc_jax import _cache

_log = logging.getLogger(__name__)

FOLDER = ".jax_cache"
_SECRET = "compiled.key"
_SECRET_BYTES = 32


def folder(workdir: Path) -> Path | None:
  """The folder below a workdir, under a name that only this user can know: what came with the folder of somebody else is never run.

  The name is drawn from the path of the workdir and a key in the cache of the user (`soprc_jax._cache`), made here the first time.

  Args:
    workdir: absolute path.

  Returns:
    None, with a warning, where the key cannot be kept.
  """
  try:
    key = _key(_cache.file(_SECRET))
  except OSError as error:
    _log.warning("Cannot keep a key (%s): compiled functions are not kept either.", error)
    return None
  return workdir / FOLDER / hmac.new(key, os.fsencode(workdir), hashlib.sha256).hexdigest()[:32]


def _key(path: Path) -> bytes:
  if not _is_own(path):
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
      file.write(secrets.token_bytes(_SECRET_BYTES))
    os.replace(aside, path)  # of two processes that make it at once, one finds its compiled functions only the next time
  return path.read_bytes()


def _is_own(path: Path) -> bool:
  """Returns whether a key is whole, and of this user: in a home that many share, another one may have put it there."""
  try:
    found = path.lstat()
  except FileNotFoundError:
    return False
  mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
  return stat.S_ISREG(found.st_mode) and mine and found.st_size == _SECRET_BYTES
