"""Data sets on disk: every format read as it is published, every mistake told before training."""

import collections
import os
import pickle
import re

import numpy as np
import pytest
import trees

from soprc_jax.data import datasets, decoding, image_files, image_folder, list_files, pipeline, tfds_source
from soprc_jax.training import config as config_lib


def _config(source, root, **values):
  config = config_lib.default_config().data
  config.update({"source": source, "root": str(root), "train_share": 0.5, "val_share": 0.25} | values)
  return config


def _splits(source, root, **values):
  return datasets.make_splits(_config(source, root, **values))


def _check_examples(source, label_of, tolerance):
  """Every image has the pixels of its class and its number."""
  for i in range(len(source)):
    example = source[i]
    assert example.label == source.labels[i]
    assert isinstance(example.label, int)
    label, index = label_of(example)
    got = decoding.pixels(decoding.as_picture(example.image)).astype(int)
    assert np.abs(got - trees.pixels(label, index)).max() <= tolerance


def _classes(source):
  return set(source.labels.tolist())


class TestFolder:
  def test_images_and_splits(self, tmp_path):
    splits = _splits("folder", trees.folder(tmp_path, 8))
    assert {name: len(split) for name, split in splits.items()} == {"train": 16, "val": 8, "test": 8}
    assert _classes(splits["train"]) | _classes(splits["val"]) | _classes(splits["test"]) == set(range(8))
    for split in splits.values():
      _check_examples(split, lambda example: (example.label, int(example.id[-5])), 0)
    assert splits["train"][0].id.startswith("class_00")

  def test_names_that_are_numbers_are_the_labels(self, tmp_path):
    for name in ("7", "900", "-3", "12", "13", "14", "15", "16"):
      trees.write(tmp_path / name / "a.png", 1, 0)
      trees.write(tmp_path / name / "b.JPG", 1, 1)
    splits = _splits("folder", tmp_path)
    assert set.union(*map(_classes, splits.values())) == {7, 900, -3, 12, 13, 14, 15, 16}

  def test_order_of_the_disk_plays_no_role(self, tmp_path):
    trees.folder(tmp_path, 8)
    for path in sorted(tmp_path.glob("*/*"), reverse=True):
      path.rename(path.with_suffix(".tmp"))
      path.with_suffix(".tmp").rename(path)
    again = _splits("folder", tmp_path)
    assert [again["train"][i].id for i in range(16)] == sorted(again["train"][i].id for i in range(16))

  def test_other_files_are_counted_and_hidden_ones_skipped(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_001" / "notes.txt").write_text("x")
    (tmp_path / "class_001" / ".DS_Store").write_text("x")
    (tmp_path / ".git").mkdir()
    splits = _splits("folder", tmp_path)
    assert sum(map(len, splits.values())) == 32
    assert "no images by their names: 1" in caplog.text
    assert "class_001/notes.txt" in caplog.text

  def test_trainval_trains_on_the_classes_of_val(self, tmp_path):
    trees.folder(tmp_path, 8)
    with_val, without = _splits("folder", tmp_path), _splits("folder", tmp_path, trainval=True)
    assert set(without) == {"train", "test"}
    assert _classes(without["train"]) == _classes(with_val["train"]) | _classes(with_val["val"])
    assert _classes(without["test"]) == _classes(with_val["test"])
    _check_examples(without["train"], lambda example: (example.label, int(example.id[-5])), 0)

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      (lambda root: (root / "class_009").mkdir(), r"class_009 has no image: remove the folder, or put images"),
      (lambda root: (root / "class_001" / "more").mkdir(), r"more is a folder in the folder of a class"),
      (lambda root: [path.unlink() for path in root.glob("*/[123].png")], "has one image: there is nothing to retrieve"),
    ],
  )
  def test_what_is_wrong_is_told(self, tmp_path, change, message):
    change(trees.folder(tmp_path, 8))
    with pytest.raises(ValueError, match=message):
      _splits("folder", tmp_path)

  def test_roots(self, tmp_path):
    with pytest.raises(ValueError, match=r"data\.root is empty: give the folder of your images, with\n  CLASS/IMAGE"):
      _splits("folder", "")
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*nowhere: there is no such folder"):
      _splits("folder", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no subfolders"):
      _splits("folder", tmp_path)

  def test_a_file_in_its_place(self, tmp_path):
    with pytest.raises(ValueError, match=r"is a file: give a folder, or for a CSV data\.source=csv"):
      _splits("folder", trees.csv(tmp_path, 8))

  def test_too_few_classes(self, tmp_path):
    with pytest.raises(ValueError, match="classes are too few"):
      _splits("folder", trees.folder(tmp_path, 2))
    with pytest.raises(ValueError, match=r"split 'val' has one class.*data\.val_share.*data\.trainval=True"):
      _splits("folder", trees.folder(tmp_path, 4))


class TestCsv:
  def test_without_split(self, tmp_path):
    splits = _splits("csv", trees.csv(tmp_path, 8))
    assert {name: len(split) for name, split in splits.items()} == {"train": 16, "val": 8, "test": 8}
    _check_examples(splits["val"], lambda example: (int(example.id[6:9]), int(example.id[-5])), 0)

  def test_with_split(self, tmp_path):
    path = trees.csv(tmp_path, 8, split=lambda label: ("test", "train", "train", "val")[label % 4])
    splits = _splits("csv", path)
    assert _classes(splits["test"]) == {0, 4}
    assert _classes(splits["val"]) == {3, 7}
    assert _classes(splits["train"]) == {1, 2, 5, 6}

  def test_val_is_drawn_where_it_is_not_given(self, tmp_path):
    splits = _splits("csv", trees.csv(tmp_path, 12, split=lambda label: "test" if label < 4 else "train"))
    assert {name: len(_classes(split)) for name, split in splits.items()} == {"train": 6, "val": 2, "test": 4}

  @pytest.mark.parametrize(
    ("text", "error", "message"),
    [
      ("file,label\na,b\n", ValueError, r"the columns are \['file', 'label'\]"),
      ("", ValueError, r"the columns are \[\]"),
      ("path,label\nclass_000/0.png\n", ValueError, r"csv:2: 2 fields that are not empty wanted"),
      ("path,label\nclass_000/0.png,\n", ValueError, r"csv:2: 2 fields"),
      ("path,label\nclass_000/0.png,a,b\n", ValueError, r"csv:2: 2 fields"),
      ("path,label,split\nclass_000/0.png,a,dev\n", ValueError, r"csv:2: split must be one of train, val, test; got 'dev'"),
      (
        "path,label\nclass_000/0.png,a\nclass_000/0.png,a\n",
        ValueError,
        r"csv:3: 'class_000/0\.png' is listed twice, first in line 2",
      ),
      ("path,label\n./class_000/0.png,a\n", ValueError, r"write 'class_000/0\.png' instead of '\./class_000/0\.png'"),
      ("path,label\nclass_000//0.png,a\n", ValueError, r"write 'class_000/0\.png' instead of"),
      ("path,label\nnotes.txt,a\n", ValueError, r"csv:2: 'notes\.txt' is no image by its name"),
      ("path;label\nclass_000/0.png;a\n", ValueError, r"(?s)the columns are \['path;label'\].*commas between"),
      ("path,label,note\nclass_000/0.png,a,b\n", ValueError, "(?s)'note'.*and no other column"),
      ("path,label\nclass_000/9.png,a\n", FileNotFoundError, r"there is no file class_000/9\.png"),
      ("path,label\n../secret.png,a\n", ValueError, r"'\.\./secret\.png' must be a path relative to"),
      ("path,label\n/etc/passwd.png,a\n", ValueError, r"'/etc/passwd\.png' must be a path relative to"),
      ("path,label\n", ValueError, "has no image"),
      ("path,label,split\nclass_000/0.png,a,train\n", ValueError, "has no image of split 'test'"),
      (
        "path,label,split\nclass_000/0.png,a,train\nclass_000/1.png,a,test\n",
        ValueError,
        r"1 of the classes are both in split train of \S+csv and in split test, e\.g\. a: give each class to one of them",
      ),
    ],
  )
  def test_what_is_wrong_is_told(self, tmp_path, text, error, message):
    path = trees.csv(tmp_path, 2)
    path.write_text(text)
    with pytest.raises(error, match=message):
      _splits("csv", path)

  def test_missing_file(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be a CSV file, with\n  a header 'path,label'"):
      _splits("csv", tmp_path / "images.csv")
    with pytest.raises(FileNotFoundError, match="for a folder of images leave :csv out"):
      _splits("csv", tmp_path)

  def test_text_of_another_encoding_or_kind(self, tmp_path):
    path = trees.csv(tmp_path, 8)
    path.write_bytes(path.read_bytes() + "class_000/é.png,a\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"images\.csv is not UTF-8 text .*: save it as UTF-8"):
      _splits("csv", path)
    path.write_text("path,label\n" + "x" * 200_000 + ".png,a\n")
    with pytest.raises(ValueError, match=r"images\.csv is no CSV file \(field larger than"):
      _splits("csv", path)

  def test_classes_keep_their_names(self, tmp_path):
    path = trees.csv(tmp_path, 8)
    path.write_text(path.read_text().replace(",", ",thing ").replace("path,thing label", "path,label"))
    example = _splits("csv", path)["train"][0]
    assert example.class_name.startswith("thing ")
    assert example.label in range(8)


_WRITERS = {
  "sop": lambda root: trees.sop(root, 8, 3),
  "inaturalist": lambda root: trees.inaturalist(root, 8, 3),
  "vehicle_id": lambda root: trees.vehicle_id(root, 8),
}


@pytest.mark.parametrize("name", list(_WRITERS))
class TestBenchmarks:
  def test_official_test_split_and_val_by_class(self, tmp_path, name):
    splits = _splits(name, _WRITERS[name](tmp_path))
    sizes = {split: len(_classes(source)) for split, source in splits.items()}
    tests = {"test": 6, "test_medium": 4, "test_small": 2} if name == "vehicle_id" else {"test": 3}
    assert sizes == {"train": 6, "val": 2} | tests
    assert not _classes(splits["train"]) & _classes(splits["val"])
    assert not (_classes(splits["train"]) | _classes(splits["val"])) & _classes(splits["test"])
    assert all(len(source) == trees.PER_CLASS * sizes[split] for split, source in splits.items())

  def test_images(self, tmp_path, name):
    def label_of(example):
      if name == "sop":
        return example.label, int(example.id[-5])
      if name == "inaturalist":
        return int(example.id.split("/")[2]) - 2800, int(example.id[-8])
      return example.label, int(example.id[-5])

    splits = _splits(name, _WRITERS[name](tmp_path))
    for source in splits.values():
      _check_examples(source, label_of, 12)  # JPEG

  def test_f35_missing_root_says_what_to_fetch(self, tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"https://") as error:
      _splits(name, tmp_path / "nowhere")
    assert all(part in str(error.value) for part in list_files.BENCHMARKS[name].lists["train"].split("/"))

  def test_missing_list(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    (tmp_path / list_files.BENCHMARKS[name].lists["test"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing\. data\.root must be the folder of .*https://"):
      _splits(name, tmp_path)

  def test_empty_list(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    (tmp_path / list_files.BENCHMARKS[name].lists["test"]).write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
      _splits(name, tmp_path)

  def test_f35_missing_image(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    image = sorted(tmp_path.rglob("*.[jJ][pP][gG]"))[-1]
    image.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no file .*{image.name}"):
      _splits(name, tmp_path)

  def test_image_that_is_listed_twice(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match=rf":{len(lines) + 1}: .* is listed twice"):
      _splits(name, tmp_path)

  def test_line_that_cannot_be_read(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(ValueError, match=r":33: .* wanted, got 'nonsense'|:34: .* wanted, got 'nonsense'"):
      _splits(name, tmp_path)

  def test_test_class_among_the_training_classes(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    names = list_files.BENCHMARKS[name].lists
    train, test = tmp_path / names["train"], tmp_path / names["test"]
    lines = test.read_text().splitlines()
    if name == "sop":  # a new image of a test class
      trees.write(tmp_path / "bicycle_final/new.JPG", 9, 5)
      line = f"999 {lines[-1].split()[1]} 1 bicycle_final/new.JPG"
    elif name == "inaturalist":
      line = lines[-1].rsplit("/", 1)[0] + "/new.jpg"
      trees.write(tmp_path / line, 9, 5)
    else:
      trees.write(tmp_path / "image/0000999.jpg", 9, 5)
      line = f"0000999 {lines[-1].split()[1]}"
    train.write_text(train.read_text() + line + "\n")
    with pytest.raises(
      ValueError, match=r"1 of the classes are both in .*train.* and in .*test.*: give each class to one of them"
    ):
      _splits(name, tmp_path)

  def test_f35_web_page_in_place_of_a_list(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    path.write_text("\n<!DOCTYPE html>\n<html><title>Quota exceeded</title></html>\n")
    with pytest.raises(ValueError, match="is a web page and no list: the download went wrong, fetch it again") as error:
      _splits(name, tmp_path)
    assert all(
      part in str(error.value) for part in (str(path), "https://", list_files.BENCHMARKS[name].lists["test"].split("/")[-1])
    )

  def test_f35_web_page_in_place_of_an_image(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    for path in tmp_path.rglob("*.[jJ][pP][gG]"):
      path.write_bytes(b"<!DOCTYPE html><html></html>")
    image = _splits(name, tmp_path)["train"][0].image
    with pytest.raises(decoding.BrokenImageError, match=r"\.(jpg|JPG): this is no image that can be read"):
      decoding.as_picture(image)


class TestListsThatDisagree:
  def test_image_with_two_labels(self, tmp_path):
    trees.vehicle_id(tmp_path, 8)
    path = tmp_path / "train_test_split" / "test_list_800.txt"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first[:-5] + "00010", *rest]))
    with pytest.raises(ValueError, match=r"'image/0000090\.jpg' has label 9 in .*2400\.txt and 10 in .*800\.txt"):
      _splits("vehicle_id", tmp_path)

  def test_header_of_sop(self, tmp_path):
    trees.sop(tmp_path, 8, 3)
    path = tmp_path / "Ebay_train.txt"
    path.write_text(path.read_text().split("\n", 1)[1])
    with pytest.raises(ValueError, match="the header must be 'image_id class_id super_class_id path', got"):
      _splits("sop", tmp_path)

  def test_path_that_leaves_the_root(self, tmp_path):
    trees.sop(tmp_path, 8, 3)
    path = tmp_path / "Ebay_train.txt"
    path.write_text(path.read_text() + "99 1 1 bicycle_final/../../secret.jpg\n")
    with pytest.raises(ValueError, match="must be a path relative to"):
      _splits("sop", tmp_path)


class TestTfds:
  def test_sop(self, tmp_path):
    splits = _splits("tfds_sop", trees.tfds_sop(tmp_path, 8, 3))
    assert _classes(splits["test"]) == {11318, 11319, 11320}
    assert _classes(splits["train"]) | _classes(splits["val"]) == set(range(8))
    count = collections.Counter()

    def label_of(example):
      count[example.label] += 1
      return example.label, count[example.label] - 1

    for source in splits.values():
      _check_examples(source, label_of, 12)

  def test_worker_processes_can_have_it(self, tmp_path):
    source = pickle.loads(pickle.dumps(_splits("tfds_sop", trees.tfds_sop(tmp_path, 8, 3))["test"]))
    assert source[0].label == 11318

  def test_labels_are_read_once_and_a_damaged_file_of_them_is_read_again(self, tmp_path, monkeypatch):
    trees.tfds_sop(tmp_path, 8, 3)
    want = _splits("tfds_sop", tmp_path)["train"].labels
    kept = sorted(tmp_path.glob(".soprc_jax-*.npy"))
    assert len(kept) == 2
    monkeypatch.setattr(tfds_source, "_plain", None)  # reading a record would fail
    np.testing.assert_array_equal(_splits("tfds_sop", tmp_path)["train"].labels, want)
    monkeypatch.undo()
    for path in kept:
      path.write_bytes(path.read_bytes()[:-5])
    np.testing.assert_array_equal(_splits("tfds_sop", tmp_path)["train"].labels, want)

  def test_inaturalist_by_its_lists(self, tmp_path):
    trees.tfds_inaturalist(tmp_path, 8, 3)
    splits, by_lists = _splits("tfds_inaturalist", tmp_path), _splits("inaturalist", tmp_path)
    for split, source in splits.items():
      np.testing.assert_array_equal(source.labels, by_lists[split].labels)
      for i in range(len(source)):
        assert source[i].id == by_lists[split][i].id.split("/")[-1].removesuffix(".jpg")
        assert source[i].image.data == by_lists[split][i].image.data

  def test_an_image_of_the_lists_that_is_not_in_the_data(self, tmp_path):
    trees.inaturalist(tmp_path, 8, 3)
    examples = [
      {"id": path.stem, "label": 5, "supercategory": 1, "image": str(path)} for path in sorted(tmp_path.rglob("*.jpg"))
    ]
    trees.tfds(tmp_path, "i_naturalist2018", {"train": examples[:-1], "validation": examples[:1]})
    with pytest.raises(ValueError, match=r"1 images of the list for .* are not in i_naturalist2018"):
      _splits("tfds_inaturalist", tmp_path)

  @pytest.mark.parametrize("name", list(tfds_source.DATA_SETS))
  def test_what_is_not_prepared_says_the_command(self, tmp_path, name):
    if name == "tfds_inaturalist":
      trees.inaturalist(tmp_path, 8, 3)
    with pytest.raises(FileNotFoundError, match=f"tfds build {tfds_source.DATA_SETS[name]} --file_format=array_record"):
      _splits(name, tmp_path)


def test_unknown_source_lists_the_known_ones(tmp_path):
  with pytest.raises(ValueError, match="glyphs, folder, csv, sop, inaturalist, vehicle_id, tfds_sop"):
    _splits("imagenet", tmp_path)


_SAME_NAMES = [
  ("cat", ["cat ", "\tcat", "\u00a0cat", "cat\u3000", "\ufeffcat", "\u200bcat\u2060", " \ufeff cat\u00a0"]),
  ("caf\u00e9", ["cafe\u0301", " cafe\u0301", "caf\u00e9 "]),
  ("\u00c5", ["\u212b", "A\u030a"]),
  ("7", [" 7", "7\u00a0"]),
]


class TestNamesThatAreOne:
  """F43: blanks at the ends of a name and its form in Unicode make no class."""

  @pytest.mark.parametrize(("name", "others"), _SAME_NAMES)
  def test_f43_labels_of_a_csv(self, tmp_path, caplog, name, others):
    spellings = [name, *others, "other"]
    lines = [f'{i}.png,"{spelling}"' for i, spelling in enumerate(spellings)]
    for i in range(len(spellings)):
      trees.write(tmp_path / f"{i}.png", 0, 0)
    (tmp_path / "x.csv").write_text("\n".join(["path,label", *lines]))
    source = list_files.load_csv(str(tmp_path / "x.csv"))["all"]
    assert len(_classes(source)) == 2
    assert {source[i].class_name for i in range(len(source))} == {name, "other"}
    assert f"{len(spellings) - 1} names of classes are the same" in caplog.text
    assert all(ascii(spelling) in caplog.text for spelling in spellings[:3])

  @pytest.mark.parametrize(("name", "others"), _SAME_NAMES)
  def test_f43_names_of_folders(self, tmp_path, caplog, name, others):
    for spelling in (name, *others, "other"):
      trees.write(tmp_path / spelling / "a.png", 0, 0)
    source = image_folder.load(str(tmp_path))
    assert len(_classes(source)) == 2
    assert {source[i].class_name for i in range(len(source))} == {name, "other"}
    # The images keep the names that they have on disk.
    assert {source[i].id for i in range(len(source))} == {f"{one}/a.png" for one in (name, *others, "other")}
    assert all(decoding.as_picture(source[i].image).size == (24, 30) for i in range(len(source)))
    assert f"{len(others) + 1} names of classes are the same" in caplog.text

  def test_f43_nothing_is_reported_where_all_names_differ(self, tmp_path, caplog):
    for name in ("cat", "Cat", "c at", "ca\u0308t", "ca t"):
      trees.write(tmp_path / name / "a.png", 0, 0)
    assert len(_classes(image_folder.load(str(tmp_path)))) == 5
    assert not caplog.text

  def test_f43_a_class_in_two_splits_by_another_spelling(self, tmp_path):
    rows = ["path,label,split", "0.png,caf\u00e9,train", "1.png,cafe\u0301 ,test"]
    for i in range(2):
      trees.write(tmp_path / f"{i}.png", 0, 0)
    (tmp_path / "x.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"1 of the classes are both in split train .* e\.g\. caf\u00e9: give"):
      list_files.load_csv(str(tmp_path / "x.csv"))

  def test_f43_header_and_splits_with_blanks(self, tmp_path):
    path = trees.csv(tmp_path, 8, split=lambda label: ("test", "train", "train", "val")[label % 4])
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header.replace(",", "\u00a0, "), *(row.replace(",t", ", t") for row in rows)]))
    assert len(_splits("csv", path)["test"]) == 2 * trees.PER_CLASS

  @pytest.mark.parametrize("name", ["\u00a0", " \ufeff"])
  def test_f43_a_blank_name_is_an_error(self, tmp_path, name):
    trees.write(tmp_path / name / "a.png", 0, 0)
    with pytest.raises(ValueError, match=r"the class name '.*' is blank: give the class a name"):
      image_folder.load(str(tmp_path))
    (tmp_path / "x.csv").write_text(f"path,label\n{name}/a.png,{name}\n")
    with pytest.raises(ValueError, match=r"csv:2: 2 fields that are not empty wanted"):
      list_files.load_csv(str(tmp_path / "x.csv"))

  def test_f43_list_files(self, tmp_path, caplog):
    trees.inaturalist(tmp_path / "inat", 4, 2)
    path = tmp_path / "inat" / list_files.BENCHMARKS["inaturalist"].lists["train"]
    first = path.read_text().splitlines()[0]
    folder, name = first.rsplit("/", 1)
    trees.write(tmp_path / "inat" / f"{folder} " / name, 0, 0)
    path.write_text(path.read_text() + f"{folder} /{name}\n")
    assert len(_classes(list_files.load("inaturalist", str(tmp_path / "inat")).train)) == 4
    assert "2 names of classes are the same" in caplog.text
    caplog.clear()
    trees.sop(tmp_path / "sop", 4, 2)
    path = tmp_path / "sop" / "Ebay_train.txt"
    path.write_text(path.read_text().replace("2 2 1 ", "2 002 1 ").replace("6 2 1 ", "6 002 1 "))
    assert _classes(list_files.load("sop", str(tmp_path / "sop")).train) == {1, 2, 3, 4}
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
    assert numbers == ({one: int(one) for one in names} if plain else {one: i for i, one in enumerate(sorted(names))})

  def test_f62_plain_integers_are_the_labels(self):
    names = ["0", "-1", "10", "9" * 17, "-" + "9" * 16]
    assert image_files.label_numbers(names) == {name: int(name) for name in names}

  def test_f62_folders(self, tmp_path):
    names = [name for name in _ODD_NAMES if len(name) < 200]
    for name in names:
      trees.write(tmp_path / name / "a.png", 0, 0)
    assert len(_classes(image_folder.load(str(tmp_path)))) == len(names)


def _special(path, kind):
  """Puts something that is no regular file at a path."""
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
    [("pipe", "a named pipe"), ("link to a pipe", "a named pipe"), ("device", "a device"), ("folder", "a folder")],
  )
  @pytest.mark.parametrize("on_broken", ["error", "skip"])
  def test_f52_in_a_list_it_is_an_error(self, tmp_path, kind, why, on_broken):
    path = trees.csv(tmp_path, 8)
    (tmp_path / "class_000" / "1.png").unlink()
    _special(tmp_path / "class_000" / "1.png", kind)
    with pytest.raises(FileNotFoundError, match=rf"no file class_000/1\.png \({why}\) in"):
      _splits("csv", path, on_broken=on_broken)

  @pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
  def test_f52_in_a_folder_it_is_an_error_or_left_out_and_counted(self, tmp_path, caplog, kind):
    trees.folder(tmp_path, 8)
    _special(tmp_path / "class_000" / "x.jpg", kind)
    with pytest.raises(ValueError, match=r"x\.jpg is no file that can be read \(a .*on_broken=skip"):
      _splits("folder", tmp_path)
    assert sum(map(len, _splits("folder", tmp_path, on_broken="skip").values())) == 32
    assert "class_000/x.jpg" in caplog.text

  def test_f52_a_file_that_turns_into_a_pipe_is_not_waited_for(self, tmp_path):
    source = image_folder.load(str(trees.folder(tmp_path, 8)))
    (tmp_path / "class_000" / "0.png").unlink()
    os.mkfifo(tmp_path / "class_000" / "0.png")
    with pytest.raises(decoding.BrokenImageError, match=r"0\.png: this file cannot be read \(a named pipe\)"):
      decoding.as_picture(source[0].image)

  @pytest.mark.parametrize("kind", ["dead link", "circular link"])
  @pytest.mark.parametrize("source", ["folder", "csv"])
  def test_f63_a_link_that_leads_nowhere(self, tmp_path, kind, source):
    root = trees.csv(tmp_path, 8)
    (tmp_path / "class_000" / "1.png").unlink()
    _special(tmp_path / "class_000" / "1.png", kind)
    root = tmp_path if source == "folder" else root
    with pytest.raises((ValueError, FileNotFoundError), match=r"class_000/1\.png .*\(a (circular )?link"):
      _splits(source, root)
    splits = _splits(source, root, on_broken="skip")
    assert sum(map(len, splits.values())) == 32
    for split in splits.values():
      batches = pipeline.eval_batches(split, batch_size=len(split), image_size=8, on_broken="skip")
      left_out = [split[i].id for i in np.flatnonzero(~next(batches)["where"])]
      assert left_out == [split[i].id for i in range(len(split)) if split[i].id == "class_000/1.png"]

  def test_f63_a_folder_of_a_class_that_leads_nowhere(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_900").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ValueError, match=r"class_900 is no file that can be read \(a link to nothing\)"):
      _splits("folder", tmp_path)
    assert sum(map(len, _splits("folder", tmp_path, on_broken="skip").values())) == 32
    assert "class_900" in caplog.text

  @pytest.mark.parametrize("name", ["sop", "inaturalist", "vehicle_id"])
  def test_f63_in_list_files(self, tmp_path, name):
    _WRITERS[name](tmp_path)
    image = sorted(tmp_path.rglob("*.[jJ][pP][gG]"))[-1]
    image.unlink()
    image.symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=rf"{image.name} \(a link to nothing\)"):
      _splits(name, tmp_path)
    test = _splits(name, tmp_path, on_broken="skip")["test"]
    batches = pipeline.eval_batches(test, batch_size=len(test), image_size=8, on_broken="skip")
    assert (~next(batches)["where"]).sum() == 1


class TestNamesInLists:
  _NAMES = ("a\u2028b.png", "a\x0cb.png", "a\x0bb\x85c.png", "a\x1cb.png", " a.png", "a b.png", "\u00a0a.png", "a\rb.png")

  @pytest.mark.parametrize("name", _NAMES)
  def test_f64_only_a_line_feed_ends_a_line(self, tmp_path, name):
    for benchmark, end in (("sop", "\n"), ("inaturalist", "\r\n")):
      root = tmp_path / benchmark
      _WRITERS[benchmark](root)
      path = root / list_files.BENCHMARKS[benchmark].lists["train"]
      first = path.read_text().splitlines()[-1].split(" ")[-1]
      image = first.rsplit("/", 1)[0] + "/" + name
      trees.write(root / image, 0, 0)
      line = f"999 1 1 {image}" if benchmark == "sop" else image
      path.write_bytes((path.read_text() + line).replace("\n", end).encode())
      train = list_files.load(benchmark, str(root)).train
      assert train[len(train) - 1].id == image
      assert decoding.as_picture(train[len(train) - 1].image).size == (24, 30)

  def test_f64_the_file_that_exists_wins_over_its_name_without_blanks(self, tmp_path):
    for i, name in enumerate((" a.png", "a.png", "b.png", "c .png")):
      trees.write(tmp_path / name, i, 0)
    (tmp_path / "x.csv").write_text("path,label\n a.png,0\na.png,1\n  b.png ,2\nc .png,3\n")
    source = list_files.load_csv(str(tmp_path / "x.csv"))["all"]
    assert [source[i].id for i in range(4)] == [" a.png", "a.png", "b.png", "c .png"]
    _check_examples(source, lambda example: (example.label, 0), 0)

  def test_f64_names_in_messages_stay_on_their_line(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_000" / "a\n\x1b[31mb.txt").write_text("")
    source = image_folder.load(str(tmp_path))
    assert r"e.g. class_000/a\n\x1b[31mb.txt." in caplog.text
    (tmp_path / "class_000" / "x\n\x1b[31m.png").write_bytes(b"x")
    source = image_folder.load(str(tmp_path))
    assert source[4].id == "class_000/x\n\x1b[31m.png"
    with pytest.raises(decoding.BrokenImageError, match=r"class_000/x\\n\\x1b\[31m\.png: this is no image"):
      decoding.as_picture(source[4].image)


class TestOneImageTwice:
  @pytest.mark.parametrize("other", ["./a.png", "sub/../a.png", "sub/.././a.png", "linked/a.png", ".//a.png"])
  def test_f65_by_another_spelling(self, tmp_path, other):
    (tmp_path / "sub").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path)
    trees.write(tmp_path / "a.png", 0, 0)
    (tmp_path / "x.csv").write_text(f"path,label\na.png,0\n{other},1\n")
    message = rf"csv:3: '{re.escape(other)}' is listed twice, first in line 2, as 'a\.png' too: take one"
    with pytest.raises(ValueError, match=message):
      list_files.load_csv(str(tmp_path / "x.csv"))
    (tmp_path / "x.csv").write_text(f"path,label\na.png,0\n{tmp_path}/a.png,1\n")
    with pytest.raises(ValueError, match="is listed twice, first in line 2"):
      list_files.load_csv(str(tmp_path / "x.csv"))

  def test_f65_through_a_linked_folder_of_a_list_file(self, tmp_path):
    trees.sop(tmp_path, 4, 2)
    (tmp_path / "linked").symlink_to(tmp_path / "bicycle_final")
    path = tmp_path / "Ebay_train.txt"
    last = path.read_text().splitlines()[-1].split("/")[-1]
    path.write_text(path.read_text() + f"99 1 1 linked/{last}\n")
    with pytest.raises(ValueError, match=rf"'linked/{last}' is listed twice, as 'bicycle_final/{last}' too"):
      list_files.load("sop", str(tmp_path))

  def test_f65_two_classes_that_are_one_folder(self, tmp_path):
    for i in range(4):
      (tmp_path / f"c{i}").mkdir()
      trees.write(tmp_path / f"c{i}" / "a.png", i, 0)
    assert len(image_folder.load(str(tmp_path))) == 4
    (tmp_path / "d").symlink_to("c2")
    with pytest.raises(ValueError, match=r"/d and .*/c2 are one folder.*remove the link"):
      image_folder.load(str(tmp_path))

  def test_f65_a_link_to_an_image_is_another_image(self, tmp_path):
    trees.write(tmp_path / "a.png", 0, 0)
    (tmp_path / "b.png").symlink_to("a.png")
    (tmp_path / "x.csv").write_text("path,label\na.png,0\nb.png,1\n")
    assert len(list_files.load_csv(str(tmp_path / "x.csv"))["all"]) == 2
