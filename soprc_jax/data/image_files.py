"""Reads image files below a root folder, and checks their lists before training starts."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import csv
import difflib
import errno
import logging
import os
from pathlib import Path, PurePosixPath
import re

import numpy as np

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import decoding, sources
from soprc_jax.data.label_sets import LabelSets

_log = logging.getLogger(__name__)

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SHOWN = 5
_LONG = 200  # maximum number of characters of a name


class Files:
  """Provides images in files, read when they are decoded.

  The id of an example is its path below the root.

  Args:
    root: folder.
    paths: ``[N]`` paths below the root, separated by ``/``.
    labels: ``[N]`` integers.
    class_names: label -> name of the class in the data.
    label_sets: labels of each pattern, if an image has several labels.
    superclasses: label -> superclass; None if they are unknown.
  """

  def __init__(
    self,
    root: Path,
    paths: Sequence[str],
    labels: Sequence[int] | np.ndarray,
    class_names: Mapping[int, str] | None = None,
    *,
    label_sets: LabelSets | None = None,
    superclasses: Mapping[int, str] | None = None,
  ):
    self.root = root
    self.ids = self.paths = list(paths)
    self.labels = np.asarray(labels, np.int64)
    self.class_names = dict(class_names or {})
    self.label_sets = label_sets
    self.superclasses = dict(superclasses or {})

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> sources.Example:
    path, label = self.root / self.paths[index], int(self.labels[index])
    image = decoding.Stored(path, str(path))
    return sources.Example(image, label, self.paths[index], self.class_names.get(label, ""))


def check_root(root: str, *, what: str, layout: str) -> Path:
  """Returns the folder of a data set.

  Args:
    root: value of ``data.root``.
    what: name of the data set and where it comes from.
    layout: the files that the folder must contain, for messages.

  Raises:
    ValueError: if ``root`` is empty.
    FileNotFoundError: if there is no such folder.
  """
  if not root:
    raise ValueError(f"data.root is empty: give the folder of {what}, with\n{layout}")
  folder = file_io.given(root, name="data.root").absolute()
  if not folder.is_dir():
    raise FileNotFoundError(
      f"data.root={printable(root)}: there is no such folder. It must be the folder of {what}, "
      f"with\n{layout}"
    )
  return folder


def lines_of(text: str) -> list[tuple[int, str]]:
  """Returns (number, text) of each line that is not blank, unchanged.

  A line ends at a line feed, with or without a carriage return before it. Names may contain any
  other character.

  >>> lines_of("a\\r\\n\\n b\\x0cc")
  [(1, 'a'), (3, ' b\\x0cc')]
  """
  lines = (line.removesuffix("\r") for line in text.split("\n"))
  return [(number, line) for number, line in enumerate(lines, start=1) if strings.stripped(line)]


def read_lines(path: Path, *, what: str, layout: str) -> list[tuple[int, str]]:
  """Reads `lines_of` a list file.

  Args:
    path: path of the file.
    what: name of the data set, as in `check_root`.
    layout: the files of the data set, as in `check_root`.

  Raises:
    FileNotFoundError: if the file is missing.
    ValueError: if the list is empty, not UTF-8, or a web page.
  """
  try:
    text = file_io.read_regular(path).decode("utf-8-sig")
  except FileNotFoundError:
    raise FileNotFoundError(
      f"{path} is missing. data.root must be the folder of {what}, with\n{layout}"
    ) from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
  lines = lines_of(text)
  if not lines:
    raise ValueError(f"{path} is empty")
  if lines[0][1].strip().lower().startswith(("<!doctype", "<html", "<?xml")):
    # Servers send such a page instead of the file: a quota, a login, a page that has moved.
    raise ValueError(
      f"{path} is a web page, not a list: the download failed, fetch it again. data.root must "
      f"be the folder of {what}, with\n{layout}"
    )
  return lines


def read_csv(
  path: Path,
  headers: Sequence[Sequence[str]],
  *,
  remedy: str,
  may_be_empty: Sequence[str] = (),
  more_columns: bool = False,
) -> list[tuple[int, dict[str, str]]]:
  """Reads (line number, column -> field) of each row of a CSV file of images.

  The column ``path`` is read by `as_listed`; other fields stay unchanged.

  Args:
    path: path of the file; paths in it are relative to its folder.
    headers: the allowed headers.
    remedy: what to do about another header, for the message.
    may_be_empty: columns whose fields may be empty; default: none.
    more_columns: other columns may follow those of a header. Their fields may be empty. Their names
      differ from each other, and clearly from those of the headers.

  Raises:
    ValueError: if the file is not UTF-8 text or not CSV, or if a row or the header is wrong.
  """
  rows = []
  try:
    with path.open(newline="", encoding="utf-8-sig") as stream:
      reader = csv.reader(stream)
      columns = [strings.class_name(column) for column in next(reader, [])]
      others = _other_columns(columns, headers) if more_columns else None
      if columns not in headers and others is None:
        raise ValueError(f"{path}: the columns are {shown(columns)}; {remedy}")
      may_be_empty = [*may_be_empty, *(others or [])]
      for fields in filter(None, reader):
        found = dict(zip(columns, fields))
        blank = [column for column in found if not strings.stripped(found[column])]
        if len(fields) != len(columns) or not set(blank) <= set(may_be_empty):
          wanted = "fields" if set(columns) & set(may_be_empty) else "fields that are not empty"
          raise ValueError(
            f"{path}:{reader.line_num}: expected {len(columns)} {wanted}, got {shown(fields)}"
          )
        found["path"] = as_listed(path.parent, found["path"])
        rows.append((reader.line_num, found))
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
    ) from error
  except csv.Error as error:
    raise ValueError(f"{path} is not a valid CSV file ({error})") from error
  return rows


def _other_columns(columns: list[str], headers: Sequence[Sequence[str]]) -> list[str] | None:
  """Returns the columns behind those of the longest header that fits, or None if there is none.

  A name that may be a slip of the pen for a known one fits none.
  """
  known = {name for header in headers for name in header}
  for header in sorted(headers, key=len, reverse=True):
    others = columns[len(header) :]
    if columns[: len(header)] == list(header):
      slips = (difflib.get_close_matches(name.lower(), known, cutoff=0.75) for name in others)
      fine = all(others) and len(set(others)) == len(others) and not any(slips)
      return others if fine else None
  return None


def as_listed(root: Path, path: str) -> str:
  """Returns a listed path as written if it exists, else without blanks at its ends."""
  bare = strings.stripped(path)
  return path if path == bare or os.path.lexists(root / path) else bare


def places(root: Path, paths: Iterable[str]) -> Iterator[str]:
  """Yields for each path a key that all its spellings share: its real folder and its name.

  Absolute and relative spellings, dots, and links to folders give the same key. Links to files are
  not followed: a link is another name, and so another image.
  """
  folders: dict[str, str] = {}
  for path in paths:
    folder, name = os.path.split(root / path)
    if "\0" in folder:  # no folder can have this name, and `realpath` raises
      yield path
      continue
    if folder not in folders:
      folders[folder] = os.path.realpath(folder)
    yield os.path.join(folders[folder], name)


def is_regular(entry: "os.DirEntry[str]") -> bool:
  """Returns whether a folder entry is a regular file or a link to one."""
  try:
    return entry.is_file()
  except OSError:  # a circular link
    return False


def check_paths(
  root: Path, paths: Sequence[str], *, listed_in: str, on_broken: str = "error"
) -> None:
  """Raises an error for a path that leaves the root, is listed twice, or is not a file.

  Args:
    root: folder.
    paths: paths below the root.
    listed_in: name of the list in messages.
    on_broken: ``"skip"`` accepts broken links. They are counted where images are read.

  Raises:
    ValueError: if a path is absolute, not normalized, leaves the root, or is listed twice.
    FileNotFoundError: if files are missing; the message names the first few.
  """
  seen: dict[str, str] = {}
  for path, place in zip(paths, places(root, paths)):
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path or "\0" in path:
      raise ValueError(
        f"{listed_in}: {shown(path)} must be a path relative to {root} and inside it, with / "
        "between folders"
      )
    if str(parts) != path:  # otherwise one file could be listed under two names
      raise ValueError(f"{listed_in}: write {shown(str(parts))} instead of {shown(path)}")
    if place in seen:
      raise ValueError(
        f"{listed_in}: {shown(path)} is listed twice{other_spelling(path, seen[place])}"
      )
    seen[place] = path
  missing = [f"{_cut(path)}{why}" for path, why in _missing(root, paths, on_broken=on_broken)]
  if missing:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise FileNotFoundError(
      f"{listed_in}: there is no file {', '.join(missing[:_SHOWN])}{more} in {root}: add it, or "
      "remove its line from the list"
    )


def other_spelling(path: str, first: str) -> str:
  """Returns the first spelling of a repeated path for a message, or "" if it is the same."""
  return "" if path == first else f", also as {shown(first)}"


def check_lists(lists: Mapping[str, Mapping[str, int]]) -> None:
  """Raises a ValueError if two lists assign different labels to one file.

  Args:
    lists: name of the list -> path -> label.
  """
  found: dict[str, tuple[str, int]] = {}
  for name, labels in lists.items():
    for path, label in labels.items():
      other, known = found.setdefault(path, (name, label))
      if known != label:
        raise ValueError(f"{shown(path)} has label {known} in {other} and {label} in {name}")


def check_disjoint(
  train: np.ndarray,
  test: np.ndarray,
  *,
  names: tuple[str, str],
  class_names: Mapping[int, str] | None = None,
) -> None:
  """Raises a ValueError if a class is in both splits, since test classes must be unseen.

  Args:
    train: labels of one split.
    test: labels of the other split.
    names: names of both splits in the message.
    class_names: label -> name of the class in the data; the label itself if missing.
  """
  both = np.intersect1d(train, test).tolist()
  if both:
    shown = [(class_names or {}).get(label, label) for label in both]
    raise ValueError(
      f"{len(both)} of the classes are both in {names[0]} and in {names[1]}, e.g. {_few(shown)}: "
      "keep each class in one of them"
    )


def one_spelling(
  names: Iterable[str], *, where: object, spelling: Callable[[str], str] = strings.class_name
) -> dict[str, str]:
  """Returns class name as written -> its unified spelling, and warns if names are merged.

  Args:
    names: names as written; each may occur several times.
    where: their place in messages.
    spelling: maps a name to its unified spelling.

  Raises:
    ValueError: if a name is blank.
  """
  spellings = {name: spelling(name) for name in names}
  written = collections.defaultdict(list)
  for name, one in spellings.items():
    if not one:
      raise ValueError(f"{where}: the class name {name!a} is blank: give the class a name")
    written[one].append(name)
  merged = {one: sorted(found) for one, found in written.items() if len(found) > 1}
  if merged:
    # ascii() shows the difference between blanks and accents that look the same.
    examples = [
      f"{', '.join(map(ascii, found))} as {one!a}" for one, found in sorted(merged.items())
    ]
    _log.warning(
      "%s: %d class names differ only in blanks at their ends, in their Unicode form, or in "
      "leading zeros of a number. They count as %d: %s.",
      printable(where),
      sum(map(len, merged.values())),
      len(merged),
      _few(examples),
    )
  return spellings


def label_numbers(names: Iterable[str]) -> dict[str, int]:
  """Returns class name -> label: the name as a number if all are integers, else its sorted rank."""
  unique = sorted(set(names))
  if all(map(_is_integer, unique)):
    return {name: int(name) for name in unique}
  return {name: number for number, name in enumerate(unique)}


def is_number(field: str) -> bool:
  """Returns whether a list field is an id: digits only, few enough for an int64."""
  return field.isascii() and field.isdecimal() and len(field) < 18


def _is_integer(name: str) -> bool:
  """Returns whether a name is an integer in its canonical form: not 007, -0, +1 or 1_000."""
  return len(name) < 18 and re.fullmatch("0|-?[1-9][0-9]*", name) is not None


def _missing(root: Path, paths: Sequence[str], *, on_broken: str) -> Iterator[tuple[str, str]]:
  """Yields paths that are not regular files, with the reason if something else exists there.

  Each folder is listed once, since a request for every file is slow on network disks.
  """
  folders: dict[str, set[str]] = {}
  for path in paths:
    folder, name = os.path.split(path)
    if folder not in folders:
      try:
        with os.scandir(root / folder) as entries:
          folders[folder] = {entry.name for entry in entries if is_regular(entry)}
      except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
          raise
        folders[folder] = set()
    if name not in folders[folder]:
      if on_broken == "skip" and file_io.is_dead_link(root / path):
        continue
      why = file_io.why_no_file(root / path)
      yield path, f" ({why})" if os.path.lexists(root / path) else ""


def _cut(text: str) -> str:
  text = printable(text)
  return text if len(text) <= _LONG else text[:_LONG] + "..."


def _few(values: Sequence[object]) -> str:
  return ", ".join(_cut(str(value)) for value in values[:_SHOWN]) + (
    ", ..." if len(values) > _SHOWN else ""
  )
