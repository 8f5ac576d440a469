"""Tests what holds for image files of all sources: class names, and paths that are not files."""

import os

import numpy as np
import pytest
import trees

from soprc_jax.data import decoding, image_files, image_folder, list_files, pipeline

_SAME_NAMES = [
  (
    "cat",
    [
      "cat ",
      "\tcat",
      "\u00a0cat",
      "cat\u3000",
      "\ufeffcat",
      "\u200bcat\u2060",
      " \ufeff cat\u00a0",
    ],
  ),
  ("caf\u00e9", ["cafe\u0301", " cafe\u0301", "caf\u00e9 "]),
  ("\u00c5", ["\u212b", "A\u030a"]),
  ("7", [" 7", "7\u00a0"]),
]


class TestNamesThatAreOne:
  """Tests F43: blanks at the ends of a name and its Unicode form do not make a new class."""

  @pytest.mark.parametrize(("name", "others"), _SAME_NAMES)
  def test_f43_labels_of_a_csv(self, tmp_path, caplog, name, others):
    spellings = [name, *others, "other"]
    lines = [f'{i}.png,"{spelling}"' for i, spelling in enumerate(spellings)]
    for i in range(len(spellings)):
      trees.write(tmp_path / f"{i}.png", 0, 0)
    (tmp_path / "x.csv").write_text("\n".join(["path,label", *lines]))
    source = list_files.load_csv(str(tmp_path / "x.csv"))["all"]
    assert len(trees.classes(source)) == 2
    assert {source[i].class_name for i in range(len(source))} == {name, "other"}
    assert f"{len(spellings) - 1} class names differ only in" in caplog.text
    assert all(ascii(spelling) in caplog.text for spelling in spellings[:3])

  @pytest.mark.parametrize(("name", "others"), _SAME_NAMES)
  def test_f43_names_of_folders(self, tmp_path, caplog, name, others):
    for spelling in (name, *others, "other"):
      trees.write(tmp_path / spelling / "a.png", 0, 0)
    source = image_folder.load(str(tmp_path))
    assert len(trees.classes(source)) == 2
    assert {source[i].class_name for i in range(len(source))} == {name, "other"}
    # The images keep their names on disk.
    assert {source[i].id for i in range(len(source))} == {
      f"{one}/a.png" for one in (name, *others, "other")
    }
    assert all(decoding.as_picture(source[i].image).size == (24, 30) for i in range(len(source)))
    assert f"{len(others) + 1} class names differ only in" in caplog.text

  def test_f43_nothing_is_reported_where_all_names_differ(self, tmp_path, caplog):
    for name in ("cat", "Cat", "c at", "ca\u0308t", "ca t"):
      trees.write(tmp_path / name / "a.png", 0, 0)
    assert len(trees.classes(image_folder.load(str(tmp_path)))) == 5
    assert not caplog.text

  def test_f43_a_class_in_two_splits_by_another_spelling(self, tmp_path):
    rows = ["path,label,split", "0.png,caf\u00e9,train", "1.png,cafe\u0301 ,test"]
    for i in range(2):
      trees.write(tmp_path / f"{i}.png", 0, 0)
    (tmp_path / "x.csv").write_text("\n".join(rows))
    with pytest.raises(
      ValueError, match=r"1 of the classes are both in split train .* e\.g\. caf\u00e9: keep"
    ):
      list_files.load_csv(str(tmp_path / "x.csv"))

  def test_f43_header_and_splits_with_blanks(self, tmp_path):
    path = trees.csv(tmp_path, 8, split=lambda label: ("test", "train", "train", "val")[label % 4])
    header, *rows = path.read_text().splitlines()
    path.write_text(
      "\n".join([header.replace(",", "\u00a0, "), *(row.replace(",t", ", t") for row in rows)])
    )
    assert len(trees.splits("csv", path)["test"]) == 2 * trees.PER_CLASS

  @pytest.mark.parametrize("name", ["\u00a0", " \ufeff"])
  def test_f43_a_blank_name_is_an_error(self, tmp_path, name):
    trees.write(tmp_path / name / "a.png", 0, 0)
    with pytest.raises(ValueError, match=r"the class name '.*' is blank: give the class a name"):
      image_folder.load(str(tmp_path))
    (tmp_path / "x.csv").write_text(f"path,label\n{name}/a.png,{name}\n")
    with pytest.raises(ValueError, match=r"csv:2: expected 2 fields that are not empty"):
      list_files.load_csv(str(tmp_path / "x.csv"))

  def test_f43_list_files(self, tmp_path, caplog):
    trees.inaturalist(tmp_path / "inat", 4, 2)
    path = tmp_path / "inat" / list_files.BENCHMARKS["inaturalist"].lists["train"]
    first = path.read_text().splitlines()[0]
    folder, name = first.rsplit("/", 1)
    trees.write(tmp_path / "inat" / f"{folder} " / name, 0, 0)
    path.write_text(path.read_text() + f"{folder} /{name}\n")
    assert len(trees.classes(list_files.load("inaturalist", str(tmp_path / "inat"))["train"])) == 4
    assert "2 class names differ only in" in caplog.text
    caplog.clear()
    trees.sop(tmp_path / "sop", 4, 2)
    path = tmp_path / "sop" / "Ebay_train.txt"
    path.write_text(path.read_text().replace("2 2 1 ", "2 002 1 ").replace("6 2 1 ", "6 002 1 "))
    assert trees.classes(list_files.load("sop", str(tmp_path / "sop"))["train"]) == {1, 2, 3, 4}
    assert "'002', '2' as '2'" in caplog.text
    trees.sop(tmp_path / "digits", 4, 2)
    path = tmp_path / "digits" / "Ebay_train.txt"
    path.write_text(path.read_text().replace("6 2 1 ", "6 \u0662 1 "))  # an Arabic digit
    with pytest.raises(ValueError, match="four fields"):
      list_files.load("sop", str(tmp_path / "digits"))


_ODD_NAMES = [
  "-",
  "--1",
  "+1",
  "1_000",
  "\u0663",
  "1e5",
  "\u00b2",
  "9" * 5000,
  "9" * 18,
  "-0",
  "007",
  "7",
  "0x7",
  "--",
  "1-",
]


class TestNamesThatAreNearlyNumbers:
  def test_f62_labels_are_places_and_no_two_names_merge(self):
    numbers = image_files.label_numbers(_ODD_NAMES)
    assert sorted(numbers.values()) == list(range(len(_ODD_NAMES)))
    assert sorted(numbers, key=numbers.get) == sorted(_ODD_NAMES)

  @pytest.mark.parametrize("name", _ODD_NAMES)
  def test_f62_one_of_them_beside_numbers(self, name):
    names = {"1", "22", "-3"} | {name}
    numbers = image_files.label_numbers(names)
    plain = name == "7"
    assert numbers == (
      {one: int(one) for one in names} if plain else {one: i for i, one in enumerate(sorted(names))}
    )

  def test_f62_plain_integers_are_the_labels(self):
    names = ["0", "-1", "10", "9" * 17, "-" + "9" * 16]
    assert image_files.label_numbers(names) == {name: int(name) for name in names}

  def test_f62_folders(self, tmp_path):
    names = [name for name in _ODD_NAMES if len(name) < 200]
    for name in names:
      trees.write(tmp_path / name / "a.png", 0, 0)
    assert len(trees.classes(image_folder.load(str(tmp_path)))) == len(names)


def _special(path, kind):
  """Creates something that is not a regular file at a path."""
  if kind == "pipe":
    os.mkfifo(path)
  elif kind == "link to a pipe":
    os.mkfifo(path.parent.parent / "the pipe")
    path.symlink_to(path.parent.parent / "the pipe")
  elif kind == "device":
    path.symlink_to("/dev/zero")
  elif kind == "folder":
    path.mkdir()
  elif kind == "dead link":
    path.symlink_to(path.with_name("nowhere.png"))
  elif kind == "circular link":
    path.symlink_to(path.name)


class TestWhatIsNoFile:
  @pytest.mark.parametrize(
    ("kind", "why"),
    [
      ("pipe", "a named pipe"),
      ("link to a pipe", "a named pipe"),
      ("device", "a device"),
      ("folder", "a folder"),
    ],
  )
  @pytest.mark.parametrize("on_broken", ["error", "skip"])
  def test_f52_in_a_list_it_is_an_error(self, tmp_path, kind, why, on_broken):
    path = trees.csv(tmp_path, 8)
    (tmp_path / "class_000" / "1.png").unlink()
    _special(tmp_path / "class_000" / "1.png", kind)
    with pytest.raises(FileNotFoundError, match=rf"no file class_000/1\.png \({why}\) in"):
      trees.splits("csv", path, on_broken=on_broken)

  @pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
  def test_f52_in_a_folder_it_is_an_error_or_left_out_and_counted(self, tmp_path, caplog, kind):
    trees.folder(tmp_path, 8)
    _special(tmp_path / "class_000" / "x.jpg", kind)
    with pytest.raises(ValueError, match=r"x\.jpg is not a readable file \(a .*on_broken=skip"):
      trees.splits("folder", tmp_path)
    assert sum(map(len, trees.splits("folder", tmp_path, on_broken="skip").values())) == 32
    assert "class_000/x.jpg" in caplog.text

  def test_f52_a_file_that_turns_into_a_pipe_is_not_waited_for(self, tmp_path):
    source = image_folder.load(str(trees.folder(tmp_path, 8)))
    (tmp_path / "class_000" / "0.png").unlink()
    os.mkfifo(tmp_path / "class_000" / "0.png")
    with pytest.raises(
      decoding.BrokenImageError, match=r"0\.png: this file cannot be read \(a named pipe\)"
    ):
      decoding.as_picture(source[0].image)

  @pytest.mark.parametrize("kind", ["dead link", "circular link"])
  @pytest.mark.parametrize("source", ["folder", "csv"])
  def test_f63_a_link_that_leads_nowhere(self, tmp_path, kind, source):
    root = trees.csv(tmp_path, 8)
    (tmp_path / "class_000" / "1.png").unlink()
    _special(tmp_path / "class_000" / "1.png", kind)
    root = tmp_path if source == "folder" else root
    with pytest.raises(
      (ValueError, FileNotFoundError), match=r"class_000/1\.png .*\(a (circular )?link"
    ):
      trees.splits(source, root)
    splits = trees.splits(source, root, on_broken="skip")
    assert sum(map(len, splits.values())) == 32
    for split in splits.values():
      batches = pipeline.eval_batches(split, batch_size=len(split), image_size=8, on_broken="skip")
      left_out = [split[i].id for i in np.flatnonzero(~next(batches)["where"])]
      assert left_out == [
        split[i].id for i in range(len(split)) if split[i].id == "class_000/1.png"
      ]

  def test_f63_a_folder_of_a_class_that_leads_nowhere(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_900").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ValueError, match=r"class_900 is not a readable file \(a link to nothing\)"):
      trees.splits("folder", tmp_path)
    assert sum(map(len, trees.splits("folder", tmp_path, on_broken="skip").values())) == 32
    assert "class_900" in caplog.text

  @pytest.mark.parametrize("name", ["sop", "inaturalist", "vehicle_id"])
  def test_f63_in_list_files(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    image = sorted(tmp_path.rglob("*.[jJ][pP][gG]"))[-1]
    image.unlink()
    image.symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=rf"{image.name} \(a link to nothing\)"):
      trees.splits(name, tmp_path)
    test = trees.splits(name, tmp_path, on_broken="skip")["test"]
    batches = pipeline.eval_batches(test, batch_size=len(test), image_size=8, on_broken="skip")
    assert (~next(batches)["where"]).sum() == 1
