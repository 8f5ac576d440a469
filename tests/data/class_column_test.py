"""Tests how the cells of a column become classes or label sets, and every mistake in a cell."""

import logging

import numpy as np
import pytest
import several_labels
import trees

from soprc_jax.data import class_column, features, label_sets, sources

_RULE = label_sets.Rule(";")


def _read(*cells, rule=_RULE):
  return class_column.read(
    cells, where="list.csv", place=lambda position: f"list.csv:{position + 2}", rule=rule
  )


def test_order_and_blanks_do_not_count():
  column = _read("b;a", "a; b", " a ;b ", "a", "c")
  assert column.names == {0: "a", 1: "a;b", 2: "c"}
  assert column.labels(["b;a", "a; b", " a ;b ", "a", "c"]).tolist() == [1, 1, 1, 0, 2]
  assert column.label_sets.labels_of(1) == ["a", "b"]


def test_without_a_rule_a_cell_is_a_class():
  column = _read("b;a", "a;b", rule=None)
  assert column.names == {0: "a;b", 1: "b;a"}
  assert column.label_sets is None


@pytest.mark.parametrize("separator", [";", " ", " and ", "|"])
def test_any_separator(separator):
  column = _read(f"x{separator}y", "x", rule=label_sets.Rule(separator))
  assert column.label_sets.names == ["x", "y"]


@pytest.mark.parametrize(
  ("cell", "message"),
  [
    ("a;;b", r"list.csv:3: 'a;;b' has an empty label: write one ';' between two labels"),
    ("a; ;b", "has an empty label"),
    (";a", "has an empty label"),
    ("a;", "has an empty label"),
    ("a;b;a", r"list.csv:3: 'a;b;a' has the label 'a' twice: remove one"),
    ("a; a", "has the label 'a' twice"),
    ("caf\u00e9;cafe\u0301", "has the label 'caf\u00e9' twice"),
  ],
)
def test_mistakes_in_a_cell(cell, message):
  with pytest.raises(ValueError, match=message):
    _read("x", cell)


@pytest.mark.parametrize(("cell", "problem"), [("a;;b", "empty label"), ("b;b", "'b' twice")])
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path, cell, problem):
  path = several_labels.make(tmp_path / "d", count=20)
  lines = path.read_text().splitlines()
  image, _, split = lines[7].split(",")
  path.write_text("\n".join([*lines[:7], f"{image},{cell},{split}", *lines[8:]]) + "\n")
  with pytest.raises(ValueError, match=rf"{path.name}:8: .*{problem}"):
    trees.splits("csv", path, label_separator=";")
  np.savez(tmp_path / "f.npz", embeddings=np.eye(3), labels=np.array(["a", "a;b", cell]))
  with pytest.raises(ValueError, match=rf"f\.npz, row 2: .*{problem}"):
    features.load(str(tmp_path / "f.npz"), rule=_RULE)


def test_labels_that_are_others_when_they_are_joined_are_told():
  rule = label_sets.Rule("||")
  assert _read("a|||b", rule=rule).label_sets.names == ["a", "|b"]
  with pytest.raises(ValueError, match=r"list.csv:3: the labels \('a\|', 'b'\) are not the same"):
    _read("a|||b", "b||a|", rule=rule)


def test_a_separator_that_does_not_occur_is_told(caplog):
  with caplog.at_level(logging.WARNING):
    column = _read("a,b", "c")
  assert "the separator ';' (data.label_separator) occurs nowhere" in caplog.text
  plain = _read("a,b", "c", rule=None)
  assert (column.names, column.numbers) == (plain.names, plain.numbers)


def test_numbers_stay_labels():
  assert _read("7", "12", "40").names == {7: "7", 12: "12", 40: "40"}
  assert _read("7", "12;40").names == {0: "12;40", 1: "7"}


class TestSplits:
  def test_images_are_drawn_one_by_one(self, tmp_path):
    path = several_labels.make(tmp_path / "d", count=100, split=False)
    splits = trees.splits("csv", path, label_separator=";")
    assert {name: len(split) for name, split in splits.items()} == {
      "train": 50,
      "val": 25,
      "test": 25,
    }
    assert sorted(name for split in splits.values() for name in split.ids) == sorted(
      several_labels.sets_of(path)
    )
    again = trees.splits("csv", path, label_separator=";")
    assert again["test"].ids == splits["test"].ids
    other = trees.splits("csv", path, label_separator=";", split_seed=1)
    assert other["test"].ids != splits["test"].ids

  def test_the_file_may_have_the_splits(self, tmp_path):
    path = several_labels.make(tmp_path / "d", count=60)
    splits = trees.splits("csv", path, label_separator=";")
    wanted = several_labels.sets_of(path)
    for name, split in splits.items():
      sets = sources.label_sets(split)
      for index, image in enumerate(split.ids):
        assert set(sets.labels_of(split.labels[index])) == wanted[image]
        assert set(split[index].shown_class.split(";")) == wanted[image]
        of = next(line for line in path.read_text().splitlines() if line.startswith(image))
        assert of.endswith(f",{name}")
    whole = trees.splits("csv", path, label_separator=";", trainval=True)
    assert set(whole) == {"train", "test"}
    assert sources.label_sets(whole["train"]) is not None

  def test_stored_embeddings(self, tmp_path):
    cells = np.array(["a;b", "b", "c", "a", "c;b", "a;c"])
    np.savez(tmp_path / "f.npz", embeddings=np.eye(6), labels=cells)
    found = features.load(str(tmp_path / "f.npz"), rule=_RULE)["all"]
    assert sources.shown_classes(found) == ["a;b", "b", "c", "a", "b;c", "a;c"]
    assert sources.class_sizes(found).tolist() == [3, 3, 3]
    assert sources.compared_names(found) == {"a", "b", "c"}

  @pytest.mark.parametrize(
    ("cells", "message"),
    [
      (["a", "b", "c", "d"], "no two images that are relevant to each other"),
      (["a;b", "a;c", "a", "a;d"], "no query with a negative"),
    ],
  )
  def test_nothing_to_rank(self, tmp_path, cells, message):
    np.savez(
      tmp_path / "f.npz",
      embeddings=np.eye(12),
      labels=np.array([*cells, "a;b", "a", "x", "x", "a;b", "a", "x", "x"]),
      splits=np.repeat(["test", "val", "train"], 4),
    )
    with pytest.raises(ValueError, match=f"split 'test' of 4 images has {message}"):
      trees.splits("features", tmp_path / "f.npz", label_separator=";")
