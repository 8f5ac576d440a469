"""A folder of images, one subfolder a class."""

import logging
from pathlib import Path

from soprc_jax.data import files

_log = logging.getLogger(__name__)

_LAYOUT = "  CLASS/IMAGE   one subfolder a class, images (" + ", ".join(files.EXTENSIONS) + ") in it"


def load(root: str) -> files.Files:
  """All images of a folder; labels are the places of the subfolders in sorted order (their names where these are integers).

  Hidden entries are skipped; other files that are no images are counted in a warning.

  Raises:
    ValueError: no subfolder, one without an image, or one with folders or what cannot be read as a file (a pipe, a broken link) in it.
    FileNotFoundError: no such folder.
  """
  if Path(root).expanduser().is_file():
    raise ValueError(
      f"data.root={root} is a file: give a folder, or for a CSV data.source=csv (--config=configs/folder.py:csv)"
    )
  folder = files.check_root(root, what="your images", layout=_LAYOUT)
  classes = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
  if not classes:
    raise ValueError(f"data.root={root} has no subfolders. It must have\n{_LAYOUT}")
  numbers = files.label_numbers(entry.name for entry in classes)
  classes.sort(key=lambda entry: numbers[entry.name])
  paths, labels, others = [], [], []
  for entry in classes:
    images, rest = _images(entry)
    if not images:
      raise ValueError(f"{entry} has no image: remove the folder, or put images ({', '.join(files.EXTENSIONS)}) in it")
    paths += [f"{entry.name}/{name}" for name in images]
    labels += [numbers[entry.name]] * len(images)
    others += rest
  if others:
    _log.warning("Left out of %s, no images by their names: %d, e.g. %s.", folder, len(others), others[0])
  return files.Files(folder, paths, labels, {number: name for name, number in numbers.items()})


def _images(folder: Path) -> tuple[list[str], list[str]]:
  """Names of the images of a class, and of its other files, sorted."""
  images: list[str] = []
  others: list[str] = []
  for entry in sorted(folder.iterdir()):
    if entry.name.startswith("."):
      continue
    if not entry.is_file():
      if entry.is_dir():
        raise ValueError(f"{entry} is a folder in the folder of a class. data.root must have\n{_LAYOUT}")
      raise ValueError(f"{entry} is no file that can be read (a link to nothing? a pipe?): take it out")
    (images if entry.suffix.lower() in files.EXTENSIONS else others).append(entry.name)
  return images, [f"{folder.name}/{name}" for name in others]
