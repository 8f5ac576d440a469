"""A folder of images, one subfolder a class."""

import logging
import os
from pathlib import Path

from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable
from soprc_jax.data import image_files

_log = logging.getLogger(__name__)

_LAYOUT = (
  "  CLASS/IMAGE   one subfolder a class, images (" + ", ".join(image_files.EXTENSIONS) + ") in it"
)


def load(root: str, *, on_broken: str = "error") -> image_files.Files:
  """All images of a folder; labels are the places of the subfolders in sorted order (their names
  where these are integers).

  Hidden entries are skipped; other files that are no images are counted in a warning. Subfolders
  whose names differ only in blanks at their ends or in their form in Unicode are one class, and a
  warning names them.

  Args:
    root: folder.
    on_broken: ``"skip"`` keeps links that lead nowhere, which are counted where images are read,
      and leaves out what else is no file.

  Raises:
    ValueError: no subfolder, one without an image, one with folders or what cannot be read as a
      file (a pipe, a broken link) in it, or two that are one folder.
    FileNotFoundError: no such folder.
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
  spellings = image_files.one_spelling((entry.name for entry in classes), where=folder)
  numbers = image_files.label_numbers(spellings.values())
  classes.sort(key=lambda entry: (numbers[spellings[entry.name]], entry.name))
  paths, labels = [], []
  for entry in classes:
    images = _images(entry, others, on_broken)
    if not images:
      raise ValueError(
        f"{printable(entry)} has no image: remove the folder, or put images "
        f"({', '.join(image_files.EXTENSIONS)}) in it"
      )
    paths += [f"{entry.name}/{name}" for name in images]
    labels += [numbers[spellings[entry.name]]] * len(images)
  if others:
    _log.warning(
      "Left out of %s, no images by their names: %d, e.g. %s.",
      printable(folder),
      len(others),
      printable(others[0]),
    )
  return image_files.Files(
    folder, paths, labels, {number: name for name, number in numbers.items()}
  )


def _classes(folder: Path, others: list[str], on_broken: str) -> list[Path]:
  """Folders of the classes; links that lead nowhere are added to the others, or raise."""
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
  """Raises a ValueError if two classes are one folder, which would give each of its images two
  labels.
  """
  first: dict[str, Path] = {}
  for entry in classes:
    other = first.setdefault(os.path.realpath(entry), entry)
    if other is not entry:
      raise ValueError(
        f"{printable(entry)} and {printable(other)} are one folder, so each image in it would have "
        "two classes: "
        "remove the link"
      )


def _images(folder: Path, others: list[str], on_broken: str) -> list[str]:
  """Names of the images of a class, sorted; its other files are added to the others."""
  images = []
  with os.scandir(folder) as entries:
    for entry in sorted(entries, key=lambda entry: entry.name):
      if entry.name.startswith("."):
        continue
      path, regular = folder / entry.name, image_files.is_regular(entry)
      if not regular and path.is_dir():
        raise ValueError(
          f"{printable(path)} is a folder in the folder of a class. data.root must have\n{_LAYOUT}"
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
  """Raises a ValueError for what is no file, unless it may be left out."""
  if on_broken != "skip":
    raise ValueError(
      f"{printable(path)} is no file that can be read ({file_io.why_no_file(path)}): take it out; "
      "data.on_broken=skip leaves it out and counts it"
    )
