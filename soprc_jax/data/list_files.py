"""Reads the training and test classes of retrieval benchmarks from their published list files.

Nothing is downloaded. The error for a missing root says what to download from where, and how to
arrange the files.
"""

from collections.abc import Callable
import itertools
from pathlib import Path
import re
from typing import NamedTuple

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import shown
from soprc_jax.data import class_column, image_files, superclasses
from soprc_jax.data.label_sets import Rule

TEST = "test"


class _Layout(NamedTuple):
  """Describes the files of a benchmark."""

  what: str
  layout: str
  lists: dict[str, str]
  # (list, its lines, root) -> {image: class}
  parse: Callable[[Path, list[tuple[int, str]], Path], dict[str, str]]
  spelling: Callable[[str], str]  # class name as written -> its unified spelling


def _sop_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """Parses lines ``image_id class_id super_class_id path`` below a header."""
  header = lines[0][1].split()
  if header != ["image_id", "class_id", "super_class_id", "path"]:
    raise ValueError(
      f"{path}:1: the header must be 'image_id class_id super_class_id path', got "
      f"{shown(lines[0][1])}"
    )
  rows: dict[str, str] = {}
  for number, line in lines[1:]:
    fields = _sop_fields(line)
    if len(fields) != 4 or not image_files.is_number(fields[1]) or not strings.stripped(fields[3]):
      raise ValueError(
        f"{path}:{number}: expected four fields 'image_id class_id super_class_id path', got "
        f"{shown(line)}"
      )
    _put(rows, image_files.as_listed(root, fields[3]), fields[1], path, number)
  return rows


def _sop_fields(line: str) -> list[str]:
  return re.split("[ \t]+", line.lstrip(" \t"), maxsplit=3)  # the path may contain blanks


def _inaturalist_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """Parses lines of one image path; the class is its two inner folders, e.g. ``Aves/2820``."""
  rows: dict[str, str] = {}
  for number, line in lines:
    image = image_files.as_listed(root, line)
    parts = image.split("/")
    if len(parts) < 3:
      raise ValueError(
        f"{path}:{number}: expected a path like train_val2018/Aves/2820/IMAGE.jpg, got "
        f"{shown(line)}"
      )
    _put(rows, image, "/".join(parts[-3:-1]), path, number)
  return rows


def _vehicle_id_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """Parses lines ``image vehicle`` of two numbers; image 1 is ``image/0000001.jpg``."""
  del root
  rows: dict[str, str] = {}
  for number, line in lines:
    fields = line.split()
    # Python parses no integer of more than 4300 digits. Ids of images and vehicles have fewer than
    # 18 digits.
    if len(fields) != 2 or not all(map(image_files.is_number, fields)):
      raise ValueError(f"{path}:{number}: expected two numbers 'image vehicle', got {shown(line)}")
    _put(rows, f"image/{int(fields[0]):07d}.jpg", fields[1], path, number)
  return rows


def _put(rows: dict[str, str], image: str, name: str, path: Path, number: int) -> None:
  if image in rows:
    raise ValueError(f"{path}:{number}: {shown(image)} is listed twice")
  rows[image] = name


def _number(name: str) -> str:
  return str(int(name))


def _names(name: str) -> str:
  return "/".join(map(strings.class_name, name.split("/")))


BENCHMARKS = {
  "sop": _Layout(
    "Stanford Online Products (https://cvgl.stanford.edu/projects/lifted_struct, "
    "Stanford_Online_Products.zip, 2.9 GB)",
    "  Ebay_train.txt, Ebay_test.txt   as in the archive\n  bicycle_final/, cabinet_final/, ...   "
    "its folders of images",
    {"train": "Ebay_train.txt", TEST: "Ebay_test.txt"},
    _sop_rows,
    _number,
  ),
  "inaturalist": _Layout(
    "iNaturalist 2018 (https://github.com/visipedia/inat_comp/tree/master/2018, "
    "train_val2018.tar.gz, 120 GB) with the retrieval lists of "
    "SmoothAP (https://github.com/Andrew-Brown1/Smooth_AP)",
    "  Inat_dataset_splits/Inaturalist_train_set1.txt and Inaturalist_test_set1.txt\n  "
    "train_val2018/Aves/..., as in the archive",
    {
      "train": "Inat_dataset_splits/Inaturalist_train_set1.txt",
      TEST: "Inat_dataset_splits/Inaturalist_test_set1.txt",
    },
    _inaturalist_rows,
    _names,
  ),
  # The paper's Table 1 shows the large list, which includes the smaller ones.
  "vehicle_id": _Layout(
    "PKU VehicleID (on request from https://www.pkuml.org/resources/pku-vehicleid.html)",
    "  train_test_split/train_list.txt, test_list_800.txt (small), test_list_1600.txt (medium), "
    "test_list_2400.txt (large)\n"
    "  image/0000001.jpg, ...   as in the archive",
    {
      "train": "train_test_split/train_list.txt",
      TEST: "train_test_split/test_list_2400.txt",
      "test_medium": "train_test_split/test_list_1600.txt",
      "test_small": "train_test_split/test_list_800.txt",
    },
    _vehicle_id_rows,
    _number,
  ),
}


def load(
  name: str, root: str, *, on_broken: str = "error", superclass: str = ""
) -> dict[str, image_files.Files]:
  """Loads a benchmark from its list files: ``"train"``, ``"test"``, and smaller test splits.

  Args:
    name: key of `BENCHMARKS`.
    root: folder of the data set.
    on_broken: see `image_files.check_paths`.
    superclass: ``"super_class_id"`` of Stanford Online Products gives the classes their
      superclasses. Empty: none.

  Raises:
    ValueError: if a line of a list is wrong, an image is listed twice or with two labels, or a test
      class is among the training classes.
    FileNotFoundError: if the folder, a list or an image is missing.
  """
  folder = image_files.check_root(root, what=BENCHMARKS[name].what, layout=BENCHMARKS[name].layout)
  (labels, class_names, lines), listed_in = read_lists(name, folder), BENCHMARKS[name].lists
  of_class = _sop_superclasses(name, folder, lines, superclass) if superclass else None
  splits = {}
  for split, found in labels.items():
    image_files.check_paths(folder, list(found), listed_in=listed_in[split], on_broken=on_broken)
    splits[split] = image_files.Files(
      folder, list(found), list(found.values()), class_names, superclasses=of_class
    )
  for split in [name for name in splits if name != "train"]:
    image_files.check_disjoint(
      splits["train"].labels, splits[split].labels, names=(listed_in["train"], listed_in[split])
    )
  return splits


# Split -> (number, text) of each line of its list, see `image_files.lines_of`.
_Lines = dict[str, list[tuple[int, str]]]


def _sop_superclasses(name: str, folder: Path, lines: _Lines, column: str) -> dict[int, str]:
  """Returns class -> superclass of Stanford Online Products, from lines that are checked."""
  if name != "sop" or column != "super_class_id":
    raise ValueError(
      f"data.superclass must be super_class_id, and data.source sop; got {column!r} and {name}"
    )
  rows = (_sop_fields(line) for of_split in lines.values() for _, line in of_split[1:])
  return superclasses.of_classes(((int(row[1]), row[2]) for row in rows), where=folder)


def read_lists(
  name: str, folder: Path, *, layout: str = ""
) -> tuple[dict[str, dict[str, int]], dict[int, str], _Lines]:
  """Reads split -> image -> label, label -> class name, and lines from the lists of a benchmark.

  The images themselves may be missing.

  Args:
    name: key of `BENCHMARKS`.
    folder: folder of the lists.
    layout: files that it must contain, for messages; if empty, those of the benchmark.

  Raises:
    ValueError: as `load`.
    FileNotFoundError: if a list is missing.
  """
  benchmark, rows, lines = BENCHMARKS[name], {}, {}
  layout = layout or benchmark.layout
  for split, file in benchmark.lists.items():
    path = folder / file
    lines[split] = image_files.read_lines(path, what=benchmark.what, layout=layout)
    rows[split] = benchmark.parse(path, lines[split], folder)
    if not rows[split]:
      raise ValueError(f"{path} lists no image")
  written = (label for found in rows.values() for label in found.values())
  spellings = image_files.one_spelling(written, where=folder, spelling=benchmark.spelling)
  numbers = image_files.label_numbers(spellings.values())
  labels = {
    split: {path: numbers[spellings[label]] for path, label in found.items()}
    for split, found in rows.items()
  }
  image_files.check_lists({benchmark.lists[split]: found for split, found in labels.items()})
  return labels, {number: label for label, number in numbers.items()}, lines


_CSV_LAYOUT = (
  "  a header 'path,label' or 'path,label,split', separated by commas, UTF-8; paths relative to "
  "the folder of the CSV; split one of train, val, test; columns for --group_by and "
  "data.superclass may follow, with names that are unlike these"
)
_CSV_HEADERS = (["path", "label"], ["path", "label", "split"])
CSV_SPLITS = ("train", "val", "test")
_Rows = list[tuple[int, dict[str, str]]]  # line, and column -> field, of each row


def load_csv(
  path: str, *, on_broken: str = "error", superclass: str = "", rule: Rule | None = None
) -> dict[str, image_files.Files]:
  """Loads the images of a CSV file by split, or all under ``"all"`` without a column ``split``.

  Args:
    path: path of the file.
    on_broken: see `image_files.check_paths`.
    superclass: column that names the superclass of each class; empty: none.
    rule: how several labels an image are written and compared; None: an image has one class.

  Raises:
    ValueError: if the header, a row or a split is wrong, an image is listed twice, a class is in
      two splits or has two superclasses, or there is no training or no test image; if labels are
      wrong, see `class_column.read`.
    FileNotFoundError: if the file or an image is missing.
  """
  file = file_io.given(path, name="data.root").absolute()
  if not path or not file.is_file():
    hint = "; for a folder of images omit :csv" if file.is_dir() and path else ""
    raise FileNotFoundError(f"data.root={path!r} must be a CSV file{hint}, with\n{_CSV_LAYOUT}")
  listed = _csv_lines(file)
  rows = _csv_rows(file, listed)
  paths = [path for found in rows.values() for path in found]
  image_files.check_paths(file.parent, paths, listed_in=str(file), on_broken=on_broken)
  column = class_column.read(
    (row["label"] for _, row in listed),
    where=file,
    place=lambda position: f"{file}:{listed[position][0]}",
    rule=rule,
  )
  of_class = None
  if superclass:
    of_image = _column(path, listed, superclass)
    pairs = ((column.numbers[row["label"]], of_image[row["path"]]) for _, row in listed)
    of_class = superclasses.of_classes(pairs, where=file, names=column.names)
  splits = {
    split: image_files.Files(
      file.parent,
      list(found),
      column.labels(found.values()),
      column.names,
      label_sets=column.label_sets,
      superclasses=of_class,
    )
    for split, found in rows.items()
  }
  for one, other in itertools.combinations(splits if rule is None else (), 2):
    names = (f"split {one} of {file}", f"split {other}")
    image_files.check_disjoint(
      splits[one].labels, splits[other].labels, names=names, class_names=column.names
    )
  return splits


def csv_column(path: str, column: str) -> dict[str, str]:
  """Reads image -> its value in a column of a CSV file of images.

  Args:
    path: path of the file, see `load_csv`.
    column: name of the column.

  Raises:
    ValueError: the file has no such column; see `load_csv`.
    OSError: the file is missing or unreadable.
  """
  return _column(path, _csv_lines(file_io.given(path, name="data.root").absolute()), column)


def _column(path: str, listed: _Rows, column: str) -> dict[str, str]:
  if listed and column not in listed[0][1]:
    raise ValueError(f"{path} has no column {column!r}: choose one of {', '.join(listed[0][1])}")
  return {row["path"]: row[column] for _, row in listed}


def _csv_lines(file: Path) -> _Rows:
  remedy = f"the file must have\n{_CSV_LAYOUT}"
  return image_files.read_csv(file, _CSV_HEADERS, remedy=remedy, more_columns=True)


def _csv_rows(file: Path, listed: _Rows) -> dict[str, dict[str, str]]:
  """Returns split (or ``"all"``) -> image -> class, and checks each row separately."""
  rows: dict[str, dict[str, str]] = {}
  first: dict[str, tuple[int, str]] = {}
  for (number, row), key in zip(
    listed, image_files.places(file.parent, (row["path"] for _, row in listed))
  ):
    place, path = f"{file}:{number}", row["path"]
    split = strings.class_name(row.get("split", "all"))
    if "split" in row and split not in CSV_SPLITS:
      raise ValueError(f"{place}: split must be one of {', '.join(CSV_SPLITS)}; got {shown(split)}")
    if key in first:
      line, other = first[key]
      raise ValueError(
        f"{place}: {shown(path)} is listed twice, first in line "
        f"{line}{image_files.other_spelling(path, other)}: remove one of the lines"
      )
    if Path(path).suffix.lower() not in image_files.EXTENSIONS:
      raise ValueError(
        f"{place}: the name {shown(path)} must end in one of {', '.join(image_files.EXTENSIONS)}"
      )
    first[key] = number, path
    rows.setdefault(split, {})[path] = row["label"]
  for split in ("train", "test") if listed and "split" in listed[0][1] else ("all",):
    if split not in rows:
      raise ValueError(f"{file} has no image" + (f" of split {split!r}" if split != "all" else ""))
  return rows
