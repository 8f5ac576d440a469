"""Images that somebody names: files, folders, patterns, lists. No classes are needed."""

from collections.abc import Sequence
import csv
import glob
import logging
import os
from pathlib import Path

import numpy as np

from soprc_jax._text import shown
from soprc_jax.data import files, pictures, sources

_log = logging.getLogger(__name__)

_LIST = "a folder of images, a CSV file with a header 'path' or 'path,label', or a text file with one path a line"


class Named:
  """A source of image files by their paths; an example's id is its path as given.

  Args:
    root: folder that paths are relative to.
    paths: ``[N]`` files.
    class_names: ``[N]`` what the classes are called; empty where that is not known.
  """

  def __init__(self, root: Path, paths: Sequence[str], class_names: Sequence[str] | None = None):
    self.root = root
    self.paths = list(paths)
    self.names = list(class_names) if class_names is not None else [""] * len(self.paths)
    # Without a number of its own a class cannot be a label; nothing here ranks by labels.
    self._labels = np.zeros(len(self.paths), np.int64)

  @property
  def labels(self) -> np.ndarray:
    return self._labels

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> sources.Example:
    path = self.paths[index]
    return sources.Example(pictures.Encoded((self.root / path).read_bytes(), path), 0, path, self.names[index])


def find(path: str, *, flag: str) -> Named:
  """The images that a path stands for: those of a folder and the folders in it, or those in a list.

  Args:
    path: folder, ``.csv`` file, or text file. Paths in a list are relative to the list's folder, or absolute.
    flag: what names the path in messages.

  Raises:
    FileNotFoundError: there is no such folder or list, or an image of the list is missing.
    ValueError: there is no image, the list is none, or an image stands in it twice.
  """
  place = Path(path).expanduser()
  if place.is_dir():
    return Named(Path.cwd(), _below(place, flag))
  if not place.is_file():
    raise FileNotFoundError(f"{flag}={path}: there is no such file or folder; give {_LIST}")
  if place.suffix.lower() in files.EXTENSIONS:
    return Named(Path.cwd(), [path])
  rows = _csv_rows(place) if place.suffix.lower() == ".csv" else _text_rows(place)
  root, seen = place.absolute().parent, dict[str, int]()
  for number, name, _ in rows:
    if name in seen:
      raise ValueError(f"{place}:{number}: {shown(name)} is listed twice, first in line {seen[name]}")
    seen[name] = number
    if "\0" in name or not (root / name).is_file():
      raise FileNotFoundError(f"{place}:{number}: there is no file {shown(name)} in {root}")
  return Named(root, [name for _, name, _ in rows], [label for _, _, label in rows])


def queries(given: Sequence[str], *, flag: str) -> list[str]:
  """The files that some paths stand for, in their order: files, folders with all that is in them, patterns with ``*``, ``?`` or ``[...]``.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: nothing is given, or a folder or pattern has no image.
  """
  found: list[str] = []
  for path in given:
    if not path:
      raise FileNotFoundError(f"{flag}=: an image file is wanted, a folder of images, or a pattern like 'photos/*.jpg'")
    place = Path(path).expanduser()
    if place.is_dir():
      found += _below(place, flag)
    elif place.exists():
      found.append(str(place))
    elif glob.has_magic(path):
      matches = sorted(match for match in glob.glob(str(place), recursive=True) if _is_image(match))
      if not matches:
        raise FileNotFoundError(f"{flag}={path}: no image has such a name")
      found += matches
    else:
      raise FileNotFoundError(f"{flag}={path}: there is no such file")
  return list(dict.fromkeys(found))


def _below(folder: Path, flag: str) -> list[str]:
  """Images of a folder and of the folders in it, sorted; what is hidden is skipped, what is left out is told."""
  found: list[str] = []
  others: list[str] = []

  def fail(error: OSError) -> None:
    raise error

  for where, folders, names in os.walk(folder, onerror=fail):
    links = [name for name in folders if os.path.islink(os.path.join(where, name))]
    others += [os.path.join(where, name) for name in links]  # one that leads to a folder above it would never end
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    for name in sorted(names):
      if not name.startswith("."):
        (found if _is_image(name) else others).append(os.path.join(where, name))
  if others:
    _log.warning("Left out of %s, no images by their names or linked folders: %d, e.g. %s.", folder, len(others), others[0])
  if not found:
    raise FileNotFoundError(f"{flag}={folder} has no image ({', '.join(files.EXTENSIONS)}) in it")
  return sorted(found)


def _is_image(name: str) -> bool:
  return os.path.splitext(name)[1].lower() in files.EXTENSIONS


def _csv_rows(path: Path) -> list[tuple[int, str, str]]:
  """(line, image, class) of a CSV file."""
  rows = []
  try:
    with path.open(newline="", encoding="utf-8-sig") as stream:
      reader = csv.DictReader(stream)
      columns = list(reader.fieldnames or [])
      if columns not in (["path"], ["path", "label"], ["path", "label", "split"]):
        raise ValueError(f"{path}: the columns are {shown(columns)}; give {_LIST}")
      for row in reader:
        if None in row or None in row.values() or not row["path"]:
          raise ValueError(f"{path}:{reader.line_num}: {len(columns)} fields wanted, got {shown(list(row.values()))}")
        rows.append((reader.line_num, row["path"], row.get("label", "")))
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error
  except csv.Error as error:
    raise ValueError(f"{path} is no CSV file ({error})") from error
  if not rows:
    raise ValueError(f"{path} lists no image")
  return rows


def _text_rows(path: Path) -> list[tuple[int, str, str]]:
  """(line, image, no class) of a list of one path a line."""
  try:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is no list that can be read ({error.reason} at byte {error.start}); give {_LIST}") from error
  rows = [(number, line.strip(), "") for number, line in enumerate(lines, start=1) if line.strip()]
  if not rows:
    raise ValueError(f"{path} lists no image")
  return rows
