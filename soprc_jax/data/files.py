"""Sources of image files below a root folder, and what is checked of them before anything is trained."""

from collections.abc import Iterable, Mapping, Sequence
import errno
import os
from pathlib import Path, PurePosixPath

import numpy as np

from soprc_jax._text import shown
from soprc_jax.data import pictures, sources

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SHOWN = 5
_LONG = 200  # characters of a name


class Files:
  """Images in files, read at each access; an example's id is its path below the root.

  Args:
    root: folder.
    paths: ``[N]`` paths below it, with ``/``.
    labels: ``[N]`` integers.
    class_names: label -> what the data call the class.
  """

  def __init__(
    self, root: Path, paths: Sequence[str], labels: Sequence[int] | np.ndarray, class_names: Mapping[int, str] | None = None
  ):
    self.root = root
    self.paths = list(paths)
    self._labels = np.asarray(labels, np.int64)
    self.class_names = dict(class_names or {})

  @property
  def labels(self) -> np.ndarray:
    return self._labels

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> sources.Example:
    path, label = self.root / self.paths[index], int(self._labels[index])
    content = pictures.Encoded(path.read_bytes(), str(path))
    return sources.Example(content, label, self.paths[index], self.class_names.get(label, ""))


def check_root(root: str, *, what: str, layout: str) -> Path:
  """The folder of a data set.

  Args:
    root: ``data.root``.
    what: name of the data set and where it comes from.
    layout: what must lie in the folder.

  Raises:
    ValueError: not given.
    FileNotFoundError: no such folder.
  """
  if not root:
    raise ValueError(f"data.root is empty: give the folder of {what}, with\n{layout}")
  folder = Path(root).expanduser().absolute()
  if not folder.is_dir():
    raise FileNotFoundError(f"data.root={root}: there is no such folder. It must be that of {what}, with\n{layout}")
  return folder


def read_lines(path: Path, *, what: str, layout: str) -> list[tuple[int, str]]:
  """(number, text) of the lines of a list that are not blank.

  Raises:
    FileNotFoundError: with ``what`` and ``layout`` as in `check_root`.
    ValueError: the list is empty, not UTF-8, or a web page.
  """
  try:
    text = path.read_text(encoding="utf-8-sig")
  except FileNotFoundError:
    raise FileNotFoundError(f"{path} is missing. data.root must be the folder of {what}, with\n{layout}") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
  lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
  if not lines:
    raise ValueError(f"{path} is empty")
  if lines[0][1].lower().startswith(("<!doctype", "<html", "<?xml")):
    # What a server sends in place of the file: a quota, a login, a page that has moved.
    raise ValueError(
      f"{path} is a web page and no list: the download went wrong, fetch it again. data.root must be the folder of {what}, with\n{layout}"
    )
  return lines


def check_paths(root: Path, paths: Sequence[str], *, listed_in: str) -> None:
  """Raises an error for a path that leaves the root, that stands twice, or that is no file.

  Args:
    root: folder.
    paths: below it.
    listed_in: what names the list in messages.

  Raises:
    ValueError: a path is absolute, not in its plain form, leaves the root, or is listed twice.
    FileNotFoundError: files are missing; the first few are named.
  """
  seen: set[str] = set()
  for path in paths:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path or "\0" in path:
      raise ValueError(
        f"{listed_in}: {shown(path)} must be a path relative to {root} that stays in it, with / between folders"
      )
    if str(parts) != path:  # else one file could be listed under two names
      raise ValueError(f"{listed_in}: write {shown(str(parts))} instead of {shown(path)}")
    if path in seen:
      raise ValueError(f"{listed_in}: {shown(path)} is listed twice")
    seen.add(path)
  missing = list(_missing(root, paths))
  if missing:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise FileNotFoundError(
      f"{listed_in}: there is no file {', '.join(map(_cut, missing[:_SHOWN]))}{more} in {root}: put it there, or take its line out of the list"
    )


def check_lists(lists: Mapping[str, Mapping[str, int]]) -> None:
  """Raises a ValueError if two lists give a file different labels.

  Args:
    lists: name of each list -> path -> label.
  """
  found: dict[str, tuple[str, int]] = {}
  for name, labels in lists.items():
    for path, label in labels.items():
      other, known = found.setdefault(path, (name, label))
      if known != label:
        raise ValueError(f"{shown(path)} has label {known} in {other} and {label} in {name}")


def check_disjoint(
  train: np.ndarray, test: np.ndarray, *, names: tuple[str, str], class_names: Mapping[int, str] | None = None
) -> None:
  """Raises a ValueError if a class is in both splits: test classes must be unseen.

  Args:
    train: labels.
    test: labels.
    names: of the two.
    class_names: label -> what the data call the class; the label itself if missing.
  """
  both = np.intersect1d(train, test).tolist()
  if both:
    shown = [(class_names or {}).get(label, label) for label in both]
    raise ValueError(
      f"{len(both)} of the classes are both in {names[0]} and in {names[1]}, e.g. {_few(shown)}: give each class to one of them"
    )


def label_numbers(names: Iterable[str]) -> dict[str, int]:
  """Class name -> label: the number itself where all names are integers, else the place in sorted order."""
  unique = sorted(set(names))
  if all(_is_integer(name) for name in unique):
    return {name: int(name) for name in unique}
  return {name: number for number, name in enumerate(unique)}


def _is_integer(name: str) -> bool:
  return name.lstrip("-").isdecimal() and len(name) < 18 and str(int(name)) == name


def _missing(root: Path, paths: Sequence[str]) -> Iterable[str]:
  """Paths that are not files; each folder is listed once, since asking for every file is slow on network disks."""
  folders: dict[str, set[str]] = {}
  for path in paths:
    folder, name = os.path.split(path)
    if folder not in folders:
      try:
        with os.scandir(root / folder) as entries:
          folders[folder] = {entry.name for entry in entries if entry.is_file()}
      except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
          raise
        folders[folder] = set()
    if name not in folders[folder]:
      yield path


def _cut(text: str) -> str:
  return text if len(text) <= _LONG else text[:_LONG] + "..."


def _few(values: Sequence[object]) -> str:
  return ", ".join(_cut(str(value)) for value in values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
