"""Tests a folder of images: its content, and that every mistake is reported before training."""

import pytest
import trees


class TestFolder:
  def test_images_and_splits(self, tmp_path):
    splits = trees.splits("folder", trees.folder(tmp_path, 8))
    assert {name: len(split) for name, split in splits.items()} == {
      "train": 16,
      "val": 8,
      "test": 8,
    }
    assert trees.classes(splits["train"]) | trees.classes(splits["val"]) | trees.classes(
      splits["test"]
    ) == set(range(8))
    for split in splits.values():
      trees.check_examples(split, lambda example: (example.label, int(example.id[-5])), 0)
    assert splits["train"][0].id.startswith("class_00")

  def test_names_that_are_numbers_are_the_labels(self, tmp_path):
    for name in ("7", "900", "-3", "12", "13", "14", "15", "16"):
      trees.write(tmp_path / name / "a.png", 1, 0)
      trees.write(tmp_path / name / "b.JPG", 1, 1)
    splits = trees.splits("folder", tmp_path)
    assert set.union(*map(trees.classes, splits.values())) == {7, 900, -3, 12, 13, 14, 15, 16}

  def test_order_of_the_disk_plays_no_role(self, tmp_path):
    trees.folder(tmp_path, 8)
    for path in sorted(tmp_path.glob("*/*"), reverse=True):
      path.rename(path.with_suffix(".tmp"))
      path.with_suffix(".tmp").rename(path)
    again = trees.splits("folder", tmp_path)
    assert [again["train"][i].id for i in range(16)] == sorted(
      again["train"][i].id for i in range(16)
    )

  def test_other_files_are_counted_and_hidden_ones_skipped(self, tmp_path, caplog):
    trees.folder(tmp_path, 8)
    (tmp_path / "class_001" / "notes.txt").write_text("x")
    (tmp_path / "class_001" / ".DS_Store").write_text("x")
    (tmp_path / ".git").mkdir()
    splits = trees.splits("folder", tmp_path)
    assert sum(map(len, splits.values())) == 32
    assert ": 1 entries whose names are not those of images" in caplog.text
    assert "class_001/notes.txt" in caplog.text

  def test_trainval_trains_on_the_classes_of_val(self, tmp_path):
    trees.folder(tmp_path, 8)
    with_val, without = (
      trees.splits("folder", tmp_path),
      trees.splits("folder", tmp_path, trainval=True),
    )
    assert set(without) == {"train", "test"}
    assert trees.classes(without["train"]) == trees.classes(with_val["train"]) | trees.classes(
      with_val["val"]
    )
    assert trees.classes(without["test"]) == trees.classes(with_val["test"])
    trees.check_examples(without["train"], lambda example: (example.label, int(example.id[-5])), 0)

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      (
        lambda root: (root / "class_009").mkdir(),
        r"class_009 has no image: remove the folder, or put images",
      ),
      (
        lambda root: (root / "class_001" / "more").mkdir(),
        r"more is a folder inside the folder of a class",
      ),
      (
        lambda root: [path.unlink() for path in root.glob("*/[123].png")],
        "has one image, so there is nothing to retrieve",
      ),
    ],
  )
  def test_what_is_wrong_is_told(self, tmp_path, change, message):
    change(trees.folder(tmp_path, 8))
    with pytest.raises(ValueError, match=message):
      trees.splits("folder", tmp_path)

  def test_roots(self, tmp_path):
    with pytest.raises(
      ValueError, match=r"data\.root is empty: give the folder of your images, with\n  CLASS/IMAGE"
    ):
      trees.splits("folder", "")
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*nowhere: there is no such folder"):
      trees.splits("folder", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no subfolders"):
      trees.splits("folder", tmp_path)

  def test_a_file_in_its_place(self, tmp_path):
    with pytest.raises(
      ValueError, match=r"is a file: give a folder, or for a CSV data\.source=csv"
    ):
      trees.splits("folder", trees.csv(tmp_path, 8))

  def test_too_few_classes(self, tmp_path):
    with pytest.raises(ValueError, match="classes are too few"):
      trees.splits("folder", trees.folder(tmp_path, 2))
    with pytest.raises(
      ValueError, match=r"split 'val' has one class.*data\.val_share.*data\.trainval=True"
    ):
      trees.splits("folder", trees.folder(tmp_path, 4))
