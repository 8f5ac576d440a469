"""Images that somebody names: files, folders, patterns, lists. No classes are needed."""

from collections.abc import Sequence
import glob
import logging
import os
from pathlib import Path

import numpy as np

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import decoding, image_files, sources

_log = logging.getLogger(__name__)

_LIST = (
  "a folder of images, a CSV file with a header 'path' or 'path,label', or a text file with "
  "one path a line"
)


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
    return sources.Example(decoding.Stored(self.root / path, path), 0, path, self.names[index])


def find(path: str, *, flag: str, on_broken: str = "error") -> Named:
  """The images that a path stands for: those of a folder and the folders in it, or those in a list.

  A name in a list is taken as it stands if there is such a file, else without blanks at its ends.

  Args:
    path: folder, ``.csv`` file, text file, or one image. Paths in a list are relative to the
      list's folder, or absolute.
    flag: what names the path in messages.
    on_broken: ``"skip"`` keeps links that lead nowhere in folders and lists. They are counted
      where images are read.

  Raises:
    FileNotFoundError: there is no such folder or list, or an image of the list is missing or no
      regular file.
    ValueError: there is no image, the list is none, an image stands in it twice, or a link in a
      folder leads nowhere.
  """
  place = file_io.given(path, name=flag)
  if place.is_dir():
    source = Named(Path.cwd(), _below(place, flag))
    if on_broken != "skip":
      check_links(source)
    return source
  why = file_io.why_no_file(place)
  if why:
    reason = (
      "there is no such file or folder" if why == "missing" else f"this is no regular file ({why})"
    )
    raise FileNotFoundError(f"{flag}={printable(path)}: {reason}; give {_LIST}")
  if _is_image(place.name):
    return Named(Path.cwd(), [str(place)])
  root = place.absolute().parent
  rows = _csv_rows(place) if place.suffix.lower() == ".csv" else _text_rows(place)
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
      reason = "" if why == "missing" else f" (this is no regular file: {why})"
      raise FileNotFoundError(f"{place}:{number}: there is no file {shown(name)} in {root}{reason}")
  spellings = image_files.one_spelling(
    (label for _, _, label in rows if strings.stripped(label)), where=place
  )
  return Named(
    root, [name for _, name, _ in rows], [spellings.get(label, "") for _, _, label in rows]
  )


def check_links(source: Named) -> None:
  """Raises a `BrokenImageError` if an image is a link that leads nowhere."""
  dead = [path for path in source.paths if file_io.is_dead_link(source.root / path)]
  if dead:
    raise decoding.BrokenImageError(
      f"{len(dead)} images cannot be read, e.g. {printable(dead[0])} "
      f"({file_io.why_no_file(source.root / dead[0])}): "
      "take them out; --on_broken=skip leaves them out and counts them"
    )


def queries(given: Sequence[str], *, flag: str) -> list[str]:
  """The files that some paths stand for, in their order: files, folders with all that is in them,
  patterns with ``*``, ``?`` or ``[...]``.

  A file that several of them name is taken once, by its first spelling.

  Raises:
    FileNotFoundError: there is no such file, or it is no regular one.
    ValueError: nothing is given, or a folder or pattern has no image.
  """
  found: list[str] = []
  for path in given:
    if not path:
      raise FileNotFoundError(
        f"{flag}=: an image file is wanted, a folder of images, or a pattern like 'photos/*.jpg'"
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
      reason = "there is no such file" if why == "missing" else f"this is no regular file ({why})"
      raise FileNotFoundError(f"{flag}={printable(path)}: {reason}")
  first: dict[str, str] = {}
  for path, key in zip(found, image_files.places(Path.cwd(), found)):
    first.setdefault(key, path)
  return list(first.values())


def _below(folder: Path, flag: str) -> list[str]:
  """Images of a folder and of the folders in it, sorted; links that lead nowhere are among them.

  What is hidden is skipped. What else is left out is reported: a link to a folder above it would
  never end, and a pipe would never be read.
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
  """Images whose paths match a pattern, sorted; what else has the name of one is reported."""
  named = sorted(match for match in glob.glob(str(pattern), recursive=True) if _is_image(match))
  matches = [
    match for match in named if not file_io.why_no_file(match) or file_io.is_dead_link(match)
  ]
  if len(matches) < len(named):
    _warn_left_out(str(pattern), sorted({*named} - {*matches}))
  if not matches:
    raise FileNotFoundError(f"{given}: no image has such a name")
  return matches


def _warn_left_out(where: str, others: Sequence[str]) -> None:
  _log.warning(
    "Left out of %s, no images by their names, no regular files or linked folders: %d, e.g. %s.",
    printable(where),
    len(others),
    printable(min(others)),
  )


def _is_image(name: str) -> bool:
  return os.path.splitext(name)[1].lower() in image_files.EXTENSIONS


def _csv_rows(path: Path) -> list[tuple[int, str, str]]:
  """(line, image, class) of a CSV file."""
  headers = [["path"], ["path", "label"], ["path", "label", "split"]]
  listed = image_files.read_csv(
    path, headers, remedy=f"give {_LIST}", may_be_empty=("label", "split")
  )
  return _not_empty(path, [(number, row["path"], row.get("label", "")) for number, row in listed])


def _text_rows(path: Path) -> list[tuple[int, str, str]]:
  """(line, image, no class) of a list of one path a line."""
  try:
    text = file_io.read_regular(path).decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is no list that can be read ({error.reason} at byte {error.start}); give {_LIST}"
    ) from error
  root = path.absolute().parent
  return _not_empty(
    path,
    [
      (number, image_files.as_listed(root, line), "") for number, line in image_files.lines_of(text)
    ],
  )


def _not_empty(path: Path, rows: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
  if not rows:
    raise ValueError(f"{path} lists no image")
  return rows
