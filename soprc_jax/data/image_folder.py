"""Loads a folder of images with one subfolder per class."""

import logging
import os
from pathlib import Path

from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable
from soprc_jax.data import class_column, image_files

_log = logging.getLogger(__name__)

_LAYOUT = (
  "  CLASS/IMAGE   one subfolder per class, with images ("
  + ", ".join(image_files.EXTENSIONS)
  + ") in it"
)


def load(root: str, *, on_broken: str = "error") -> image_files.Files:
  """Loads all images of a folder.

  The label of a class is the position of its subfolder in sorted order. If all names of subfolders
  are integers, they are the labels. Hidden entries are skipped. A warning counts other files that
  are not images. Subfolders whose names differ only in blanks at their ends or in their Unicode
  form are one class, and a warning names them.

  Args:
    root: folder.
    on_broken: ``"skip"`` keeps broken links, which are counted where images are read, and skips
      other entries that are not files.

  Raises:
    ValueError: if there is no subfolder, or if two subfolders are the same folder. Also if one has
      no image, contains folders, or contains an entry that is not readable as a file (a pipe, a
      broken link).
    FileNotFoundError: if there is no such folder.
  """
  if file_io.given(root, name="data.root").is_file():
    raise ValueError(
      f"data.root={root} is a file: give a folder, or for a CSV data.source=csv "
      "(--config=folder:csv)"
    )
  folder = image_files.check_root(root, what="your images", layout=_LAYOUT)
  others: list[str] = []
  classes = _classes(folder, others, on_broken)
  if not classes:
    raise ValueError(f"data.root={root} has no subfolders. It must have\n{_LAYOUT}")
  _check_folders(classes)
  column = class_column.read((entry.name for entry in classes), where=folder, place=str)
  classes.sort(key=lambda entry: (column.numbers[entry.name], entry.name))
  paths, labels = [], []
  for entry in classes:
    images = _images(entry, others, on_broken)
    if not images:
      raise ValueError(
        f"{printable(entry)} has no image: remove the folder, or put images "
        f"({', '.join(image_files.EXTENSIONS)}) in it"
      )
    paths += [f"{entry.name}/{name}" for name in images]
    labels += [column.numbers[entry.name]] * len(images)
  if others:
    _log.warning(
      "Skipped in %s: %d entries whose names are not those of images, e.g. %s.",
      printable(folder),
      len(others),
      printable(others[0]),
    )
  return image_files.Files(folder, paths, labels, column.names)


def _classes(folder: Path, others: list[str], on_broken: str) -> list[Path]:
  """Returns the folders of the classes; adds broken links to ``others``, or raises."""
  found = []
  for entry in sorted(folder.iterdir()):
    if entry.name.startswith("."):
      continue
    if entry.is_dir():
      found.append(entry)
    elif file_io.is_dead_link(entry):
      _check_skipped(entry, on_broken)
      others.append(entry.name)
  return found


def _check_folders(classes: list[Path]) -> None:
  """Raises a ValueError if two classes are one folder, since its images would have two labels."""
  first: dict[str, Path] = {}
  for entry in classes:
    other = first.setdefault(os.path.realpath(entry), entry)
    if other is not entry:
      raise ValueError(
        f"{printable(entry)} and {printable(other)} are the same folder, so each image in it would "
        "have two classes: remove the link"
      )


def _images(folder: Path, others: list[str], on_broken: str) -> list[str]:
  """Returns the names of the images of a class, sorted; adds its other files to ``others``."""
  images = []
  with os.scandir(folder) as entries:
    for entry in sorted(entries, key=lambda entry: entry.name):
      if entry.name.startswith("."):
        continue
      path, regular = folder / entry.name, image_files.is_regular(entry)
      if not regular and path.is_dir():
        raise ValueError(
          f"{printable(path)} is a folder inside the folder of a class. data.root must "
          f"have\n{_LAYOUT}"
        )
      is_image = path.suffix.lower() in image_files.EXTENSIONS
      if is_image and not regular:
        _check_skipped(path, on_broken)
      if is_image and (regular or file_io.is_dead_link(path)):
        images.append(entry.name)
      else:
        others.append(f"{folder.name}/{entry.name}")
  return images


def _check_skipped(path: Path, on_broken: str) -> None:
  """Raises a ValueError for an entry that is not a file, unless it may be skipped."""
  if on_broken != "skip":
    raise ValueError(
      f"{printable(path)} is not a readable file ({file_io.why_no_file(path)}): remove it, or set "
      "data.on_broken=skip, which skips and counts such entries"
    )
