"""Tests list files: each published format, and that every mistake is reported before training."""

import re

import pytest
import trees

from soprc_jax.data import decoding, image_folder, list_files


class TestCsv:
  def test_without_split(self, tmp_path):
    splits = trees.splits("csv", trees.csv(tmp_path, 8))
    assert {name: len(split) for name, split in splits.items()} == {
      "train": 16,
      "val": 8,
      "test": 8,
    }
    trees.check_examples(
      splits["val"], lambda example: (int(example.id[6:9]), int(example.id[-5])), 0
    )

  def test_with_split(self, tmp_path):
    path = trees.csv(tmp_path, 8, split=lambda label: ("test", "train", "train", "val")[label % 4])
    splits = trees.splits("csv", path)
    assert trees.classes(splits["test"]) == {0, 4}
    assert trees.classes(splits["val"]) == {3, 7}
    assert trees.classes(splits["train"]) == {1, 2, 5, 6}

  def test_more_columns_may_follow_and_be_empty(self, tmp_path):
    path = trees.csv(tmp_path, 8)
    plain = trees.splits("csv", path)["test"]
    header, *lines = path.read_text().splitlines()
    rows = [f"{line},{'red' if i % 2 else ''},7" for i, line in enumerate(lines)]
    path.write_text("\n".join([f"{header},colour,size", *rows]) + "\n")
    assert trees.splits("csv", path)["test"].ids == plain.ids
    colours = list_files.csv_column(str(path), "colour")
    assert list(colours) == [line.split(",")[0] for line in lines]
    assert list(colours.values())[:3] == ["", "red", ""]
    with pytest.raises(ValueError, match="no column 'color': choose one of path, label, colour"):
      list_files.csv_column(str(path), "color")

  def test_val_is_drawn_where_it_is_not_given(self, tmp_path):
    splits = trees.splits(
      "csv", trees.csv(tmp_path, 12, split=lambda label: "test" if label < 4 else "train")
    )
    assert {name: len(trees.classes(split)) for name, split in splits.items()} == {
      "train": 6,
      "val": 2,
      "test": 4,
    }

  @pytest.mark.parametrize(
    ("text", "error", "message"),
    [
      ("file,label\na,b\n", ValueError, r"the columns are \['file', 'label'\]"),
      ("", ValueError, r"the columns are \[\]"),
      ("path,label\nclass_000/0.png\n", ValueError, r"csv:2: expected 2 fields that are not empty"),
      ("path,label\nclass_000/0.png,\n", ValueError, r"csv:2: expected 2 fields"),
      ("path,label\nclass_000/0.png,a,b\n", ValueError, r"csv:2: expected 2 fields"),
      (
        "path,label,split\nclass_000/0.png,a,dev\n",
        ValueError,
        r"csv:2: split must be one of train, val, test; got 'dev'",
      ),
      (
        "path,label\nclass_000/0.png,a\nclass_000/0.png,a\n",
        ValueError,
        r"csv:3: 'class_000/0\.png' is listed twice, first in line 2",
      ),
      (
        "path,label\n./class_000/0.png,a\n",
        ValueError,
        r"write 'class_000/0\.png' instead of '\./class_000/0\.png'",
      ),
      ("path,label\nclass_000//0.png,a\n", ValueError, r"write 'class_000/0\.png' instead of"),
      ("path,label\nnotes.txt,a\n", ValueError, r"csv:2: the name 'notes\.txt' must end in one of"),
      (
        "path;label\nclass_000/0.png;a\n",
        ValueError,
        r"(?s)the columns are \['path;label'\].*separated by commas",
      ),
      ("path,label,splt\nclass_000/0.png,a,b\n", ValueError, "(?s)'splt'.*names that are unlike"),
      ("path,label,Split\nclass_000/0.png,a,b\n", ValueError, "(?s)'Split'.*names that are unlike"),
      (
        "path,label,x,x\nclass_000/0.png,a,b,c\n",
        ValueError,
        "(?s)'x', 'x'.*names that are unlike",
      ),
      (
        "path,label,\nclass_000/0.png,a,b\n",
        ValueError,
        "(?s)the columns are.*names that are unlike",
      ),
      (
        "path,x,label\nclass_000/0.png,a,b\n",
        ValueError,
        "(?s)the columns are.*a header 'path,label'",
      ),
      ("path,label\nclass_000/9.png,a\n", FileNotFoundError, r"there is no file class_000/9\.png"),
      (
        "path,label\n../secret.png,a\n",
        ValueError,
        r"'\.\./secret\.png' must be a path relative to",
      ),
      (
        "path,label\n/etc/passwd.png,a\n",
        ValueError,
        r"'/etc/passwd\.png' must be a path relative to",
      ),
      ("path,label\n", ValueError, "has no image"),
      ("path,label,split\nclass_000/0.png,a,train\n", ValueError, "has no image of split 'test'"),
      (
        "path,label,split\nclass_000/0.png,a,train\nclass_000/1.png,a,test\n",
        ValueError,
        r"1 of the classes are both in split train of \S+csv and in split test, e\.g\. a: keep "
        r"each class in one of them",
      ),
    ],
  )
  def test_what_is_wrong_is_told(self, tmp_path, text, error, message):
    path = trees.csv(tmp_path, 2)
    path.write_text(text)
    with pytest.raises(error, match=message):
      trees.splits("csv", path)

  def test_missing_file(self, tmp_path):
    with pytest.raises(
      FileNotFoundError, match=r"must be a CSV file, with\n  a header 'path,label'"
    ):
      trees.splits("csv", tmp_path / "images.csv")
    with pytest.raises(FileNotFoundError, match="for a folder of images omit :csv"):
      trees.splits("csv", tmp_path)

  def test_text_of_another_encoding_or_kind(self, tmp_path):
    path = trees.csv(tmp_path, 8)
    path.write_bytes(path.read_bytes() + "class_000/é.png,a\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"images\.csv is not UTF-8 text .*: save it as UTF-8"):
      trees.splits("csv", path)
    path.write_text("path,label\n" + "x" * 200_000 + ".png,a\n")
    with pytest.raises(
      ValueError, match=r"images\.csv is not a valid CSV file \(field larger than"
    ):
      trees.splits("csv", path)

  def test_classes_keep_their_names(self, tmp_path):
    path = trees.csv(tmp_path, 8)
    path.write_text(
      path.read_text().replace(",", ",thing ").replace("path,thing label", "path,label")
    )
    example = trees.splits("csv", path)["train"][0]
    assert example.class_name.startswith("thing ")
    assert example.label in range(8)


@pytest.mark.parametrize("name", list(trees.WRITERS))
class TestBenchmarks:
  def test_official_test_split_and_val_by_class(self, tmp_path, name):
    splits = trees.splits(name, trees.WRITERS[name](tmp_path))
    sizes = {split: len(trees.classes(source)) for split, source in splits.items()}
    tests = {"test": 6, "test_medium": 4, "test_small": 2} if name == "vehicle_id" else {"test": 3}
    assert sizes == {"train": 6, "val": 2} | tests
    assert not trees.classes(splits["train"]) & trees.classes(splits["val"])
    assert not (trees.classes(splits["train"]) | trees.classes(splits["val"])) & trees.classes(
      splits["test"]
    )
    assert all(len(source) == trees.PER_CLASS * sizes[split] for split, source in splits.items())

  def test_images(self, tmp_path, name):
    def label_of(example):
      if name == "sop":
        return example.label, int(example.id[-5])
      if name == "inaturalist":
        return int(example.id.split("/")[2]) - 2800, int(example.id[-8])
      return example.label, int(example.id[-5])

    splits = trees.splits(name, trees.WRITERS[name](tmp_path))
    for source in splits.values():
      trees.check_examples(source, label_of, 12)  # JPEG

  def test_f35_missing_root_says_what_to_fetch(self, tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"https://") as error:
      trees.splits(name, tmp_path / "nowhere")
    assert all(
      part in str(error.value) for part in list_files.BENCHMARKS[name].lists["train"].split("/")
    )

  def test_missing_list(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    (tmp_path / list_files.BENCHMARKS[name].lists["test"]).unlink()
    with pytest.raises(
      FileNotFoundError, match=r"is missing\. data\.root must be the folder of .*https://"
    ):
      trees.splits(name, tmp_path)

  def test_empty_list(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    (tmp_path / list_files.BENCHMARKS[name].lists["test"]).write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
      trees.splits(name, tmp_path)

  def test_f35_missing_image(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    image = sorted(tmp_path.rglob("*.[jJ][pP][gG]"))[-1]
    image.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no file .*{image.name}"):
      trees.splits(name, tmp_path)

  def test_image_that_is_listed_twice(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match=rf":{len(lines) + 1}: .* is listed twice"):
      trees.splits(name, tmp_path)

  def test_line_that_cannot_be_read(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(
      ValueError, match=r":33: expected .*, got 'nonsense'|:34: expected .*, got 'nonsense'"
    ):
      trees.splits(name, tmp_path)

  def test_test_class_among_the_training_classes(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
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
      ValueError,
      match=r"1 of the classes are both in .*train.* and in .*test.*: keep each class in one of "
      r"them",
    ):
      trees.splits(name, tmp_path)

  def test_f35_web_page_in_place_of_a_list(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    path = tmp_path / list_files.BENCHMARKS[name].lists["train"]
    path.write_text("\n<!DOCTYPE html>\n<html><title>Quota exceeded</title></html>\n")
    with pytest.raises(
      ValueError, match="is a web page, not a list: the download failed, fetch it again"
    ) as error:
      trees.splits(name, tmp_path)
    assert all(
      part in str(error.value)
      for part in (str(path), "https://", list_files.BENCHMARKS[name].lists["test"].split("/")[-1])
    )

  def test_f35_web_page_in_place_of_an_image(self, tmp_path, name):
    trees.WRITERS[name](tmp_path)
    for path in tmp_path.rglob("*.[jJ][pP][gG]"):
      path.write_bytes(b"<!DOCTYPE html><html></html>")
    image = trees.splits(name, tmp_path)["train"][0].image
    with pytest.raises(
      decoding.BrokenImageError, match=r"\.(jpg|JPG): this is not a readable image"
    ):
      decoding.as_picture(image)


class TestListsThatDisagree:
  def test_image_with_two_labels(self, tmp_path):
    trees.vehicle_id(tmp_path, 8)
    path = tmp_path / "train_test_split" / "test_list_800.txt"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first[:-5] + "00010", *rest]))
    with pytest.raises(
      ValueError, match=r"'image/0000090\.jpg' has label 9 in .*2400\.txt and 10 in .*800\.txt"
    ):
      trees.splits("vehicle_id", tmp_path)

  def test_header_of_sop(self, tmp_path):
    trees.sop(tmp_path, 8, 3)
    path = tmp_path / "Ebay_train.txt"
    path.write_text(path.read_text().split("\n", 1)[1])
    with pytest.raises(
      ValueError, match="the header must be 'image_id class_id super_class_id path', got"
    ):
      trees.splits("sop", tmp_path)

  def test_path_that_leaves_the_root(self, tmp_path):
    trees.sop(tmp_path, 8, 3)
    path = tmp_path / "Ebay_train.txt"
    path.write_text(path.read_text() + "99 1 1 bicycle_final/../../secret.jpg\n")
    with pytest.raises(ValueError, match="must be a path relative to"):
      trees.splits("sop", tmp_path)


class TestNamesInLists:
  _NAMES = (
    "a\u2028b.png",
    "a\x0cb.png",
    "a\x0bb\x85c.png",
    "a\x1cb.png",
    " a.png",
    "a b.png",
    "\u00a0a.png",
    "a\rb.png",
  )

  @pytest.mark.parametrize("name", _NAMES)
  def test_f64_only_a_line_feed_ends_a_line(self, tmp_path, name):
    for benchmark, end in (("sop", "\n"), ("inaturalist", "\r\n")):
      root = tmp_path / benchmark
      trees.WRITERS[benchmark](root)
      path = root / list_files.BENCHMARKS[benchmark].lists["train"]
      first = path.read_text().splitlines()[-1].split(" ")[-1]
      image = first.rsplit("/", 1)[0] + "/" + name
      trees.write(root / image, 0, 0)
      line = f"999 1 1 {image}" if benchmark == "sop" else image
      path.write_bytes((path.read_text() + line).replace("\n", end).encode())
      train = list_files.load(benchmark, str(root))["train"]
      assert train[len(train) - 1].id == image
      assert decoding.as_picture(train[len(train) - 1].image).size == (24, 30)

  def test_f64_the_file_that_exists_wins_over_its_name_without_blanks(self, tmp_path):
    for i, name in enumerate((" a.png", "a.png", "b.png", "c .png")):
      trees.write(tmp_path / name, i, 0)
    (tmp_path / "x.csv").write_text("path,label\n a.png,0\na.png,1\n  b.png ,2\nc .png,3\n")
    source = list_files.load_csv(str(tmp_path / "x.csv"))["all"]
    assert [source[i].id for i in range(4)] == [" a.png", "a.png", "b.png", "c .png"]
    trees.check_examples(source, lambda example: (example.label, 0), 0)

  def test_f64_names_in_messages_stay_on_their_line(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_000" / "a\n\x1b[31mb.txt").write_text("")
    source = image_folder.load(str(tmp_path))
    assert r"e.g. class_000/a\n\x1b[31mb.txt." in caplog.text
    (tmp_path / "class_000" / "x\n\x1b[31m.png").write_bytes(b"x")
    source = image_folder.load(str(tmp_path))
    assert source[4].id == "class_000/x\n\x1b[31m.png"
    with pytest.raises(
      decoding.BrokenImageError,
      match=r"class_000/x\\n\\x1b\[31m\.png: this is not a readable image",
    ):
      decoding.as_picture(source[4].image)


class TestOneImageTwice:
  @pytest.mark.parametrize(
    "other", ["./a.png", "sub/../a.png", "sub/.././a.png", "linked/a.png", ".//a.png"]
  )
  def test_f65_by_another_spelling(self, tmp_path, other):
    (tmp_path / "sub").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path)
    trees.write(tmp_path / "a.png", 0, 0)
    (tmp_path / "x.csv").write_text(f"path,label\na.png,0\n{other},1\n")
    message = (
      rf"csv:3: '{re.escape(other)}' is listed twice, first in line 2, also as 'a\.png': remove one"
    )
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
    with pytest.raises(
      ValueError, match=rf"'linked/{last}' is listed twice, also as 'bicycle_final/{last}'"
    ):
      list_files.load("sop", str(tmp_path))

  def test_f65_two_classes_that_are_one_folder(self, tmp_path):
    for i in range(4):
      (tmp_path / f"c{i}").mkdir()
      trees.write(tmp_path / f"c{i}" / "a.png", i, 0)
    assert len(image_folder.load(str(tmp_path))) == 4
    (tmp_path / "d").symlink_to("c2")
    with pytest.raises(ValueError, match=r"/d and .*/c2 are the same folder.*remove the link"):
      image_folder.load(str(tmp_path))

  def test_f65_a_link_to_an_image_is_another_image(self, tmp_path):
    trees.write(tmp_path / "a.png", 0, 0)
    (tmp_path / "b.png").symlink_to("a.png")
    (tmp_path / "x.csv").write_text("path,label\na.png,0\nb.png,1\n")
    assert len(list_files.load_csv(str(tmp_path / "x.csv"))["all"]) == 2
