"""Digests of the files in a complete folder, to detect corruption that file formats miss."""

import hashlib
import json
from pathlib import Path

from soprc_jax._internal import stored
from soprc_jax.training import workdir

MANIFEST = "digests.json"


def write(folder: Path) -> None:
  """Writes the size and SHA-256 of every file in a folder to a manifest there."""
  content = {name: of_file(folder / name) for name in _files(folder)}
  workdir.write_atomically(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def exists(folder: Path) -> bool:
  """Returns whether a folder has a manifest of `write`."""
  return (folder / MANIFEST).exists()


def problem(folder: Path) -> str | None:
  """Returns what is wrong with the files of a folder, None if they match the manifest of `write`.

  Without a manifest, only links are found.
  """
  for entry in [folder, *sorted(folder.rglob("*"))]:
    # In an untrusted checkpoint, a link could put any file of this machine into the arrays.
    if entry.is_symlink():
      return f"{entry.relative_to(folder).as_posix() if entry != folder else folder.name} is a link"
  path = folder / MANIFEST
  try:
    content = stored.read_json(path, {str: [(int, str)]})
    noted = {name: (int(size), str(digest)) for name, (size, digest) in content.items()}
  except FileNotFoundError:
    return None
  except (ValueError, OSError):
    return f"{path.name} is corrupt"
  for name, (size, digest) in noted.items():
    file = folder / name
    try:
      if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes instead of {size}"
      if of_file(file)[1] != digest:
        return f"{name} is not as it was written"
    except FileNotFoundError:
      return f"{name} is missing"
    except OSError as error:
      return f"{name} cannot be read ({error.strerror})"
  return None


def _files(folder: Path) -> list[str]:
  # A kill may have left an unfinished manifest, see `file_io.whole`.
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*")
    if path.is_file() and path.name != MANIFEST and not path.name.startswith(f".{MANIFEST}.")
  )


def of_file(path: Path) -> tuple[int, str]:
  """Returns the size and the SHA-256 of a file."""
  with path.open("rb") as file:
    return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
