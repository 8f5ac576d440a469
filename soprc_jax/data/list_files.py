"""The list files that the retrieval benchmarks publish, over a folder of their images: train
classes and test classes.

Nothing is downloaded: the error for a missing root says what to fetch from where, and how to lay it
out.
"""

from collections.abc import Callable
import itertools
from pathlib import Path
import re
from typing import NamedTuple

from soprc_jax._internal import file_io, strings
from soprc_jax._internal.strings import shown
from soprc_jax.data import image_files

TEST = "test"


class Benchmark(NamedTuple):
  """A data set with an official test split.

  Attributes:
    train: images of the training classes.
    tests: name -> images of test classes, the main one under ``"test"``.
  """

  train: image_files.Files
  tests: dict[str, image_files.Files]


class _Layout(NamedTuple):
  """What a benchmark looks like on disk."""

  what: str
  layout: str
  lists: dict[str, str]
  # (list, its lines, root) -> {image: class}
  parse: Callable[[Path, list[tuple[int, str]], Path], dict[str, str]]
  spelling: Callable[[str], str]  # of a class


def _sop_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """``image_id class_id super_class_id path`` under a header."""
  header = lines[0][1].split()
  if header != ["image_id", "class_id", "super_class_id", "path"]:
    raise ValueError(
      f"{path}:1: the header must be 'image_id class_id super_class_id path', got "
      f"{shown(lines[0][1])}"
    )
  rows: dict[str, str] = {}
  for number, line in lines[1:]:
    fields = re.split("[ \t]+", line.lstrip(" \t"), maxsplit=3)  # the path may have blanks
    if len(fields) != 4 or not image_files.is_number(fields[1]) or not strings.stripped(fields[3]):
      raise ValueError(
        f"{path}:{number}: four fields 'image_id class_id super_class_id path' wanted, got "
        f"{shown(line)}"
      )
    _put(rows, image_files.as_listed(root, fields[3]), fields[1], path, number)
  return rows


def _inaturalist_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """One image a line; its class is the two folders that it lies in, e.g. ``Aves/2820``."""
  rows: dict[str, str] = {}
  for number, line in lines:
    image = image_files.as_listed(root, line)
    parts = image.split("/")
    if len(parts) < 3:
      raise ValueError(
        f"{path}:{number}: a path like train_val2018/Aves/2820/IMAGE.jpg wanted, got {shown(line)}"
      )
    _put(rows, image, "/".join(parts[-3:-1]), path, number)
  return rows


def _vehicle_id_rows(path: Path, lines: list[tuple[int, str]], root: Path) -> dict[str, str]:
  """``image vehicle``, both numbers; the image is ``image/0000001.jpg``."""
  del root
  rows: dict[str, str] = {}
  for number, line in lines:
    fields = line.split()
    # Python reads no integer of more than 4300 digits, and no image or vehicle has as many as 18.
    if len(fields) != 2 or not all(map(image_files.is_number, fields)):
      raise ValueError(f"{path}:{number}: two numbers 'image vehicle' wanted, got {shown(line)}")
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
  # The paper's tables show the large list; the smaller ones lie in it.
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


def load(name: str, root: str, *, on_broken: str = "error") -> Benchmark:
  """A benchmark from its list files.

  Args:
    name: key of `BENCHMARKS`.
    root: folder of the data set.
    on_broken: see `image_files.check_paths`.

  Raises:
    ValueError: a line of a list is wrong, an image is listed twice or under two labels, or a test
      class is among the training classes.
    FileNotFoundError: the folder, a list or an image is missing.
  """
  folder = image_files.check_root(root, what=BENCHMARKS[name].what, layout=BENCHMARKS[name].layout)
  (labels, class_names), listed_in = read_lists(name, folder), BENCHMARKS[name].lists
  splits = {}
  for split, found in labels.items():
    image_files.check_paths(folder, list(found), listed_in=listed_in[split], on_broken=on_broken)
    splits[split] = image_files.Files(folder, list(found), list(found.values()), class_names)
  train = splits.pop("train")
  for split, source in splits.items():
    image_files.check_disjoint(
      train.labels, source.labels, names=(listed_in["train"], listed_in[split])
    )
  return Benchmark(train, splits)


def read_lists(
  name: str, folder: Path, *, layout: str = ""
) -> tuple[dict[str, dict[str, int]], dict[int, str]]:
  """Reads split -> image -> label, and label -> class name, from the list files of a benchmark; the
  images themselves are not looked for.

  Args:
    name: key of `BENCHMARKS`.
    folder: where the lists are.
    layout: what must lie there, for messages; the benchmark's own if empty.

  Raises:
    ValueError: as `load`, but for missing images.
    FileNotFoundError: a list is missing.
  """
  benchmark, rows = BENCHMARKS[name], {}
  for split, file in benchmark.lists.items():
    path = folder / file
    lines = image_files.read_lines(path, what=benchmark.what, layout=layout or benchmark.layout)
    rows[split] = benchmark.parse(path, lines, folder)
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
  return labels, {number: label for label, number in numbers.items()}


_CSV_LAYOUT = (
  "  a header 'path,label' or 'path,label,split' and no other column, commas between, UTF-8; paths "
  "relative to the folder of the CSV; "
  "split one of train, val, test"
)
CSV_SPLITS = ("train", "val", "test")


def load_csv(path: str, *, on_broken: str = "error") -> dict[str, image_files.Files]:
  """The images of a CSV: by split where it has that column, else all under ``"all"``.

  Args:
    path: of the file.
    on_broken: see `image_files.check_paths`.

  Raises:
    ValueError: a wrong header, row or split, an image that is listed twice, a class in two splits,
      no training or test image.
    FileNotFoundError: the file or an image is missing.
  """
  file = file_io.given(path, name="data.root").absolute()
  if not path or not file.is_file():
    hint = "; for a folder of images leave :csv out" if file.is_dir() and path else ""
    raise FileNotFoundError(f"data.root={path!r} must be a CSV file{hint}, with\n{_CSV_LAYOUT}")
  rows = _csv_rows(file)
  paths = [path for found in rows.values() for path in found]
  image_files.check_paths(file.parent, paths, listed_in=str(file), on_broken=on_broken)
  spellings = image_files.one_spelling(
    (label for found in rows.values() for label in found.values()), where=file
  )
  numbers = image_files.label_numbers(spellings.values())
  class_names = {number: name for name, number in numbers.items()}
  splits = {
    split: image_files.Files(
      file.parent, list(found), [numbers[spellings[label]] for label in found.values()], class_names
    )
    for split, found in rows.items()
  }
  for one, other in itertools.combinations(splits, 2):
    names = (f"split {one} of {file}", f"split {other}")
    image_files.check_disjoint(
      splits[one].labels, splits[other].labels, names=names, class_names=class_names
    )
  return splits


def _csv_rows(file: Path) -> dict[str, dict[str, str]]:
  """Split (or ``"all"``) -> image -> class, each row checked by itself."""
  headers = [["path", "label"], ["path", "label", "split"]]
  listed = image_files.read_csv(file, headers, remedy=f"the file must have\n{_CSV_LAYOUT}")
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
        f"{line}{image_files.other_spelling(path, other)}: "
        "take one of the lines out"
      )
    if Path(path).suffix.lower() not in image_files.EXTENSIONS:
      raise ValueError(
        f"{place}: {shown(path)} is no image by its name ({', '.join(image_files.EXTENSIONS)})"
      )
    first[key] = number, path
    rows.setdefault(split, {})[path] = row["label"]
  for split in ("train", "test") if listed and "split" in listed[0][1] else ("all",):
    if split not in rows:
      raise ValueError(f"{file} has no image" + (f" of split {split!r}" if split != "all" else ""))
  return rows
