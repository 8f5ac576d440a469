"""Writing files that are in their place whole or not at all."""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
from typing import BinaryIO


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
