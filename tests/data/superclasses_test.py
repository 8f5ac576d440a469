"""Tests the superclasses of the classes of each source that has them, and mistakes in them."""

import logging
from pathlib import Path
import re

import numpy as np
import pytest
import trees

from soprc_jax._internal import file_io
from soprc_jax.data import (
  datasets,
  features,
  image_files,
  list_files,
  rendered,
  sources,
  superclasses,
)
from soprc_jax.training import config as config_lib


def _splits(source, root, superclass):
  config = config_lib.default_config().data
  config.update({"source": source, "root": str(root), "superclass": superclass, "val_share": 0.25})
  return datasets.make_splits(config)


def _csv(root, kinds, split=None):
  path = trees.csv(root, 8, split)
  header, *lines = path.read_text().splitlines()
  rows = [f"{line},{kind}" for line, kind in zip(lines, kinds, strict=True)]
  path.write_text("\n".join([f"{header},kind", *rows]) + "\n")
  return path


@pytest.mark.parametrize("with_split", [False, True])
def test_a_column_of_a_csv(tmp_path, with_split):
  kinds = [("bird ", "fish")[i // trees.PER_CLASS % 2] for i in range(32)]
  split = ("train", "train", "val", "val", "test", "test", "test", "test")
  splits = _splits("csv", _csv(tmp_path, kinds, split.__getitem__ if with_split else None), "kind")
  for source in splits.values():
    for label, name in sources.class_names(source).items():
      want = ("bird", "fish")[int(name.split()[1]) % 2]
      assert sources.superclasses(source)[label] == want
  train = splits["train"]
  rows = superclasses.rows(train, train.labels)
  want = [sources.superclasses(train)[label] == "fish" for label in train.labels]
  np.testing.assert_array_equal(rows, want)
  joined = sources.Joined([splits["train"], splits["test"]])
  assert sources.superclasses(joined) == sources.superclasses(train)


def test_a_list_is_read_once(tmp_path, monkeypatch):
  read, opened = Path.open, []
  monkeypatch.setattr(
    Path, "open", lambda path, *args, **options: opened.append(path) or read(path, *args, **options)
  )
  path = _csv(tmp_path / "csv", ["x"] * 32)
  opened.clear()
  _splits("csv", path, "kind")
  assert opened.count(path) == 1
  trees.sop(tmp_path / "sop", 6, 3)
  fresh, lists = file_io.read_regular, []
  monkeypatch.setattr(file_io, "read_regular", lambda path: lists.append(path.name) or fresh(path))
  _splits("sop", tmp_path / "sop", "super_class_id")
  assert lists == ["Ebay_train.txt", "Ebay_test.txt"]


def test_sources_take_their_superclasses():
  given = {"superclasses": {0: "bird", 1: "fish"}}
  ids, labels = ["a", "b"], np.array([0, 1])
  for source in (
    features.Features(np.eye(2, dtype=np.float32), labels, ids, **given),
    image_files.Files(Path(), ids, labels, **given),
    rendered.Rendered(np.zeros((2, 4, 4), np.uint8), labels, np.array(ids), **given),
  ):
    assert sources.superclasses(source) == given["superclasses"]


def test_without_superclasses(tmp_path):
  train = _splits("csv", _csv(tmp_path, ["x"] * 32), "")["train"]
  assert sources.superclasses(train) == {}
  assert superclasses.rows(train, train.labels) is None


@pytest.mark.parametrize(
  ("kinds", "column", "message"),
  [
    (["x"] * 31 + ["y"], "kind", "class 'thing 7' has two superclasses, 'x' and 'y': give all"),
    (["x"] * 31 + [""], "kind", "class 'thing 7' has an image without a superclass: give it one"),
    (["x"] * 32, "colour", "has no column 'colour': choose one of path, label, kind"),
  ],
)
def test_mistakes_in_a_csv(tmp_path, kinds, column, message):
  with pytest.raises(ValueError, match=message):
    _splits("csv", _csv(tmp_path, kinds), column)


@pytest.mark.parametrize(
  ("kinds", "message"),
  [
    ("xxxx", "list.csv: all classes have the same superclass, so the metrics .* say nothing"),
    ("wxyz", "list.csv: each class has a superclass of its own, so the metrics .* say no more"),
    ("xyyy", ""),
    ("x", ""),
  ],
)
def test_superclasses_that_say_nothing_are_told(caplog, kinds, message):
  with caplog.at_level(logging.WARNING):
    superclasses.of_classes(enumerate(kinds), where="list.csv")
  assert re.search(message, caplog.text) if message else not caplog.records


def test_super_class_id_of_sop(tmp_path):
  trees.sop(tmp_path, 6, 3)
  path = tmp_path / "Ebay_train.txt"
  header, *lines = path.read_text().splitlines()
  fields = [line.split() for line in lines]
  changed = [f"{a} {label} {1 + int(label) % 2} {image}" for a, label, _, image in fields]
  path.write_text("\n".join([header, *changed]) + "\n")
  splits = _splits("sop", tmp_path, "super_class_id")
  assert sources.superclasses(splits["test"])[7] == "1"
  assert [sources.superclasses(splits["train"])[label] for label in (1, 2, 3)] == ["2", "1", "2"]
  with pytest.raises(ValueError, match=r"must be super_class_id, and data\.source sop; got 'kind'"):
    list_files.load("sop", str(tmp_path), superclass="kind")
  changed[0] = changed[0].replace(" 1 2 ", " 1 1 ")
  path.write_text("\n".join([header, *changed]) + "\n")
  with pytest.raises(ValueError, match="class '1' has two superclasses, '1' and '2'"):
    list_files.load("sop", str(tmp_path), superclass="super_class_id")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet", ".h5"])
def test_an_array_of_stored_embeddings(tmp_path, suffix):
  vectors, labels = np.eye(8, dtype=np.float32), np.repeat([3, 1, 7, 5], 2)
  kinds, path = np.repeat(["b", "a", "b", "b"], 2), tmp_path / f"f{suffix}"
  if suffix == ".npz":
    np.savez(path, embeddings=vectors, labels=labels, kind=kinds)
  elif suffix == ".npy":
    np.save(path, vectors)
    rows = [f"{label},{kind}" for label, kind in zip(labels, kinds, strict=True)]
    path.with_suffix(".csv").write_text("\n".join(["label,kind", *rows]) + "\n")
  elif suffix == ".parquet":
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"embeddings": vectors.tolist(), "labels": labels, "kind": kinds}
    parquet.write_table(pyarrow.table(table), path)
  else:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
      file["embeddings"], file["labels"] = vectors, labels
      file["kind"] = np.array(kinds, "S")
  found = features.load(str(path), superclass="kind")["all"]
  assert sources.superclasses(found) == {3: "b", 1: "a", 7: "b", 5: "b"}
  with pytest.raises(ValueError, match="color"):
    features.load(str(path), superclass="color")


def test_classes_of_features_with_two_superclasses(tmp_path):
  labels, kinds = np.repeat([0, 1], 2), np.array(["a", "b", "b", "b"])
  np.savez(tmp_path / "f.npz", embeddings=np.eye(4), labels=labels, kind=kinds)
  with pytest.raises(ValueError, match="class '0' has two superclasses, 'a' and 'b'"):
    features.load(str(tmp_path / "f.npz"), superclass="kind")


def test_sources_without_superclasses_refuse_a_name(tmp_path):
  with pytest.raises(ValueError, match=r"data\.superclass must be empty with data\.source"):
    _splits("folder", trees.folder(tmp_path, 8), "kind")
