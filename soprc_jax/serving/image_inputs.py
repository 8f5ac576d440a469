"""Finds the user's images by files, folders, patterns or lists, or vectors in a file.

They need no classes.
"""

from collections.abc import Sequence
import glob
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import archives, decoding, features, image_files, sources

_log = logging.getLogger(__name__)

_LIST = (
  "a folder of images, a CSV file with a header 'path' or 'path,label', or a text file with "
  "one path per line"
)


class Named:
  """Provides image files by their paths; the id of an example is its path as given.

  Args:
    root: folder that the paths are relative to.
    paths: ``[N]`` paths of files.
    class_names: ``[N]`` names of the classes, empty where unknown; default: all unknown.
  """

  def __init__(self, root: Path, paths: Sequence[str], class_names: Sequence[str] | None = None):
    self.root = root
    self.paths = list(paths)
    self.names = list(class_names) if class_names is not None else [""] * len(self.paths)
    # A class has no number here, so all labels are 0. They are never used for ranking.
    self.labels = np.zeros(len(self.paths), np.int64)

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> sources.Example:
    path = self.paths[index]
    return sources.Example(decoding.Stored(self.root / path, path), 0, path, self.names[index])


def find(path: str, *, flag: str, on_broken: str = "error") -> Any:
  """Finds the images of a folder and its subfolders, of a list, or one image file.

  A file of stored embeddings gives its vectors (`features.Features`). A tar or Parquet file with
  encoded images, or a pattern of them, gives these (`archives`). Otherwise the result is a `Named`.

  A path in a list is used as written if there is such a file, else without blanks at its ends.

  Args:
    path: folder, ``.csv`` file, text file, one image, a file of `features`, or a file or pattern of
      `archives`. Paths in a list are absolute or relative to the folder of the list.
    flag: name of the path in messages.
    on_broken: ``"skip"`` keeps broken links in folders and lists. They are counted where images
      are read.

  Raises:
    FileNotFoundError: if there is no such folder or list, if a folder has no image, or if an image
      of the list is missing or not a regular file.
    ValueError: if the list is invalid or empty, lists an image twice, or a link in a folder is
      broken.
  """
  place = file_io.given(path, name=flag)
  packed = _archives(place)
  if packed:
    return archives.load(packed)
  if features.is_file(place) and not place.is_dir():
    return features.load_unlabeled(path, name=flag)
  if place.is_dir():
    source = Named(Path.cwd(), _below(place, flag))
    if on_broken != "skip":
      check_links(source)
    return source
  why = file_io.why_no_file(place)
  if why:
    reason = (
      "there is no such file or folder"
      if why == "missing"
      else f"this is not a regular file ({why})"
    )
    raise FileNotFoundError(f"{flag}={printable(path)}: {reason}; give {_LIST}")
  if _is_image(place.name):
    return Named(Path.cwd(), [str(place)])
  root = place.absolute().parent
  rows = _csv_rows(place) if place.suffix.lower() == ".csv" else _text_rows(place)
  if not rows:
    raise ValueError(f"{place} lists no image")
  first: dict[str, tuple[int, str]] = {}
  for (number, name, _), key in zip(rows, image_files.places(root, (name for _, name, _ in rows))):
    if key in first:
      line, other = first[key]
      raise ValueError(
        f"{place}:{number}: {shown(name)} is listed twice, first in line "
        f"{line}{image_files.other_spelling(name, other)}"
      )
    first[key] = number, name
    why = file_io.why_no_file(root / name)
    if why and not (on_broken == "skip" and file_io.is_dead_link(root / name)):
      reason = "" if why == "missing" else f" (this is not a regular file: {why})"
      raise FileNotFoundError(f"{place}:{number}: there is no file {shown(name)} in {root}{reason}")
  spellings = image_files.one_spelling(
    (label for _, _, label in rows if strings.stripped(label)), where=place
  )
  return Named(
    root, [name for _, name, _ in rows], [spellings.get(label, "") for _, _, label in rows]
  )


def _archives(place: Path) -> list[Path]:
  """Returns the files of `archives` that a path or pattern names; empty if it names none."""
  if place.is_file():
    return [place] if archives.has_images(place) else []
  is_pattern = place.suffix.lower() in archives.SUFFIXES and glob.has_magic(str(place))
  return [Path(path) for path in sorted(glob.glob(str(place)))] if is_pattern else []


def check_links(source: Named) -> None:
  """Raises a `BrokenImageError` if an image is a broken link."""
  dead = [path for path in source.paths if file_io.is_dead_link(source.root / path)]
  if dead:
    raise decoding.BrokenImageError(
      f"{len(dead)} images cannot be read, e.g. {printable(dead[0])} "
      f"({file_io.why_no_file(source.root / dead[0])}): "
      "remove them, or set --on_broken=skip, which skips and counts them"
    )


def queries(given: Sequence[str], *, flag: str) -> list[str]:
  """Returns the image files of the given files, folders and patterns, in their order.

  Folders include their subfolders. Patterns contain ``*``, ``?`` or ``[...]``. A file that is given
  several times is returned once, in its first spelling.

  Args:
    given: the paths and patterns.
    flag: name of the paths in messages.

  Raises:
    FileNotFoundError: if a path is empty, there is no such file, it is not a regular file, or a
      folder or pattern has no image.
    ValueError: if a path is not local.
  """
  found: list[str] = []
  for path in given:
    if not path:
      raise FileNotFoundError(
        f"{flag}= is empty: give an image file, a folder of images, or a pattern like "
        "'photos/*.jpg'"
      )
    place = file_io.given(path, name=flag)
    why = file_io.why_no_file(place)
    if place.is_dir():
      found += _below(place, flag)
    elif not why:
      found.append(str(place))
    elif why == "missing" and glob.has_magic(path):
      found += _matching(place, f"{flag}={printable(path)}")
    else:
      reason = (
        "there is no such file" if why == "missing" else f"this is not a regular file ({why})"
      )
      raise FileNotFoundError(f"{flag}={printable(path)}: {reason}")
  first: dict[str, str] = {}
  for path, key in zip(found, image_files.places(Path.cwd(), found)):
    first.setdefault(key, path)
  return list(first.values())


def _below(folder: Path, flag: str) -> list[str]:
  """Returns the images of a folder and its subfolders, sorted; broken links are included.

  Hidden entries are skipped. A warning counts the other skipped entries, such as linked folders
  (they could form a cycle) and pipes (reading them would block).
  """
  found: list[str] = []
  others: list[str] = []
  waiting = [str(folder)]
  while waiting:
    with os.scandir(waiting.pop()) as entries:
      for entry in entries:
        if entry.name.startswith("."):
          continue
        if entry.is_dir(follow_symlinks=False):
          waiting.append(entry.path)
        elif _is_image(entry.name) and (
          image_files.is_regular(entry) or file_io.is_dead_link(entry.path)
        ):
          found.append(entry.path)
        else:
          others.append(entry.path)
  if others:
    _warn_left_out(str(folder), others)
  if not found:
    raise FileNotFoundError(
      f"{flag}={printable(folder)} has no image ({', '.join(image_files.EXTENSIONS)}) in it"
    )
  return sorted(found)


def _matching(pattern: Path, given: str) -> list[str]:
  """Returns the images that match a pattern, sorted; warns of matches that are not files."""
  named = sorted(match for match in glob.glob(str(pattern), recursive=True) if _is_image(match))
  matches = [
    match for match in named if not file_io.why_no_file(match) or file_io.is_dead_link(match)
  ]
  if len(matches) < len(named):
    _warn_left_out(str(pattern), sorted({*named} - {*matches}))
  if not matches:
    raise FileNotFoundError(f"{given}: no image matches the pattern")
  return matches


def _warn_left_out(where: str, others: Sequence[str]) -> None:
  _log.warning(
    "Skipped in %s: %d entries that are linked folders, not regular files, or not images by their "
    "names, e.g. %s.",
    printable(where),
    len(others),
    printable(min(others)),
  )


def _is_image(name: str) -> bool:
  return os.path.splitext(name)[1].lower() in image_files.EXTENSIONS


def _csv_rows(path: Path) -> list[tuple[int, str, str]]:
  """Reads (line, image, class) of each row of a CSV file."""
  headers = [["path"], ["path", "label"], ["path", "label", "split"]]
  listed = image_files.read_csv(
    path, headers, remedy=f"give {_LIST}", may_be_empty=("label", "split")
  )
  return [(number, row["path"], row.get("label", "")) for number, row in listed]


def _text_rows(path: Path) -> list[tuple[int, str, str]]:
  """Reads (line, image, "") of each line of a list with one path per line."""
  try:
    text = file_io.read_regular(path).decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is not a readable list ({error.reason} at byte {error.start}); give {_LIST}"
    ) from error
  root = path.absolute().parent
  return [
    (number, image_files.as_listed(root, line), "") for number, line in image_files.lines_of(text)
  ]
