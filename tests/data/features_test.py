"""Tests stored embeddings as a data set: the formats of the file, and what is wrong with one."""

import numpy as np
import pytest

from soprc_jax.data import datasets, features, sources
from soprc_jax.training import config as config_lib

N, D = 12, 3
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
LABELS = np.repeat([7, 3, 5], 4)
SPLITS = np.repeat(["train", "val", "test"], 4)


def _npz(path, **changes):
  arrays = {"embeddings": VECTORS, "labels": LABELS} | changes
  np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
  return str(path)


def _splits(found):
  return {name: (sources.ids(split), split.labels.tolist()) for name, split in found.items()}


class TestLoad:
  def test_vectors_labels_and_ids(self, tmp_path):
    found = features.load(_npz(tmp_path / "f.npz"))["all"]
    assert (found.width, len(found)) == (D, N)
    np.testing.assert_array_equal(found.vectors(np.array([5, 0])), VECTORS[[5, 0]])
    np.testing.assert_array_equal(found[3].image, VECTORS[3])
    assert found.labels.tolist() == LABELS.tolist()
    assert found[3].id == "3"

  def test_names_of_classes_and_given_ids(self, tmp_path):
    names, ids = np.repeat(["b", "a", "c"], 4), [f"photo {i}.jpg" for i in range(N)]
    found = features.load(_npz(tmp_path / "f.npz", labels=names, ids=ids))["all"]
    assert found[0].class_name == "b"
    assert found.labels[0] == 1  # the place of the name in sorted order
    assert found[2].id == "photo 2.jpg"

  def test_splits(self, tmp_path):
    found = features.load(_npz(tmp_path / "f.npz", splits=SPLITS))
    assert _splits(found) == {
      "train": (["0", "1", "2", "3"], [7] * 4),
      "val": (["4", "5", "6", "7"], [3] * 4),
      "test": (["8", "9", "10", "11"], [5] * 4),
    }

  def test_the_output_of_soprc_embed(self, tmp_path):
    # It has scalars about its own run, and labels only for a split.
    more = {"class_names": np.repeat(["x", "y", "z"], 4), "split": "test", "step": 3}
    found = features.load(_npz(tmp_path / "f.npz", labels=np.zeros(0, int), **more))["all"]
    assert found[11].class_name == "z"

  @pytest.mark.parametrize("suffix", [".npy", ".parquet", ".h5"])
  def test_all_formats_have_the_same_content(self, tmp_path, suffix):
    wanted = _splits(features.load(_npz(tmp_path / "f.npz", splits=SPLITS)))
    path = tmp_path / f"g{suffix}"
    if suffix == ".npy":
      np.save(path, VECTORS)
      lines = [f"{label},{split}" for label, split in zip(LABELS, SPLITS)]
      path.with_suffix(".csv").write_text("\n".join(["label,split", *lines]) + "\n")
    elif suffix == ".parquet":
      pyarrow = pytest.importorskip("pyarrow")
      from pyarrow import parquet

      columns = {"embedding": list(VECTORS), "label": LABELS, "split": SPLITS}
      parquet.write_table(pyarrow.table(columns), path)
    else:
      h5py = pytest.importorskip("h5py")
      with h5py.File(path, "w") as file:
        file["features"], file["labels"] = VECTORS, LABELS
        file["splits"] = SPLITS.astype("S")
    found = features.load(str(path))
    assert _splits(found) == wanted
    np.testing.assert_array_equal(found["test"].vectors(np.arange(4)), VECTORS[8:])

  @pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
  def test_other_numbers_become_float32(self, tmp_path, dtype):
    found = features.load(_npz(tmp_path / "f.npz", embeddings=(9 * VECTORS).astype(dtype)))["all"]
    vectors = found.vectors(np.arange(N))
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, (9 * VECTORS).astype(dtype), rtol=1e-6)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"embeddings": None}, "has no embeddings, but 'labels'. It must have"),
      ({"features": VECTORS}, "has embeddings and features: remove those that are not to be used"),
      ({"embeddings": VECTORS[0]}, r"must be numbers \[N, D\], got float32 \[3\]"),
      ({"embeddings": VECTORS.astype(str)}, r"must be numbers \[N, D\], got <U"),
      ({"embeddings": np.where(VECTORS > 1, np.nan, VECTORS)}, r"vectors are not finite.* row \d"),
      ({"embeddings": VECTORS.astype(np.float64) * 1e300}, "not finite in float32"),
      ({"labels": None}, "has no labels. It must have"),
      ({"labels": LABELS[:5]}, r"the labels \(labels\) must be 12 integers or texts.*; got 5"),
      (
        {"labels": LABELS + 0.5},
        r"must be integers or texts; got 7\.5 in row 0",
      ),
      ({"labels": np.array(["a"] * 11 + [" "])}, r"the labels \(labels\) are empty in row 11"),
      ({"ids": ["a"] * 2 + list(range(10))}, "the id 'a' occurs 2 times"),
      ({"splits": ["train"] * 11 + ["dev"]}, "a split must be one of train, val, test; got 'dev'"),
      ({"labels": LABELS > 4}, r"must be integers or texts; got True in row 0"),
      ({"labels": np.array([b"\xff"] * N)}, r"the labels \(labels\) are not UTF-8 in row 0"),
      ({"class_names": ["a", "b"]}, r"the labels \(class_names\) must be 12 .*; got 2"),
      ({"splits": "train"}, r"the splits \(splits\) must be 12 .*; got a scalar"),
      ({"Splits": SPLITS}, "rename 'Splits' to 'splits'"),
      ({" label": LABELS}, "rename ' label' to 'label'"),
      ({"embeddings": VECTORS.astype(np.float64) * 1e-60}, "12 vectors are 0 in float32"),
      ({"splits": ["train"] * N}, "has no vector of split 'test'"),
      ({"splits": np.roll(SPLITS, 1)}, "classes are both in split"),
    ],
  )
  def test_what_is_wrong_is_named(self, tmp_path, changes, message):
    path = _npz(tmp_path / "f.npz", **changes)
    with pytest.raises(ValueError, match=message) as error:
      features.load(path)
    assert "f.npz" in str(error.value)

  def test_a_missing_corrupt_or_other_file(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.npz.*stored embeddings, and it is missing"):
      features.load(str(tmp_path / "gone.npz"))
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad\.npz cannot be read: it is not an \.npz file"):
      features.load(str(tmp_path / "bad.npz"))
    (tmp_path / "f.txt").write_text("1 2 3")
    with pytest.raises(ValueError, match=r"f\.txt: the name must end in \.npz, "):
      features.load(str(tmp_path / "f.txt"))

  def test_a_row_of_the_csv_with_other_columns(self, tmp_path):
    np.save(tmp_path / "f.npy", VECTORS)
    (tmp_path / "f.csv").write_text("label,split\n1,train\n2\n")
    with pytest.raises(ValueError, match=r"f\.csv has 2 columns, and a row has \['2'\]"):
      features.load(str(tmp_path / "f.npy"))
    for text, told in (
      ("label,fold\n1,2\n", r"must have different columns of .*; got 'fold'"),
      ("label,label\n1,2\n", "got 'label'"),
      ("label;split\n1;2\n", "got 'label;split'"),
      ("", "got ''"),
    ):
      (tmp_path / "f.csv").write_text(text)
      with pytest.raises(ValueError, match=told):
        features.load(str(tmp_path / "f.npy"))
    # Blanks after the commas and empty lines do not matter.
    lines = [f"{label}, {split}" for label, split in zip(LABELS, SPLITS)]
    (tmp_path / "f.csv").write_text("\n".join(["label, split", *lines, ""]) + "\n")
    assert set(features.load(str(tmp_path / "f.npy"))) == {"train", "val", "test"}
    (tmp_path / "f.csv").write_text("label\n1\n2\n")
    with pytest.raises(ValueError, match=r"the labels \(label\) must be 12 .*; got 2"):
      features.load(str(tmp_path / "f.npy"))

  def test_pickled_objects_are_not_loaded(self, tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path, embeddings=VECTORS, labels=np.array([object()] * N))
    with pytest.raises(ValueError, match=r"has objects: .*texts \.astype\(str\)"):
      features.load(str(path))


def test_the_splits_of_a_config(tmp_path):
  labels = np.repeat(np.arange(40), 4)
  vectors = np.random.default_rng(0).standard_normal((160, D))
  config = config_lib.default_config()
  path = _npz(tmp_path / "f.npz", embeddings=vectors, labels=labels)
  config.data.update({"source": "features", "root": path})
  splits = datasets.make_splits(config.data)
  assert {name: len(split) for name, split in splits.items()} == {
    "train": 80,
    "val": 16,
    "test": 64,
  }
  assert all(sources.width(split) == D for split in splits.values())
  places = splits["test"].positions
  np.testing.assert_array_equal(
    sources.vectors(splits["test"], np.array([1, 0])), np.float32(vectors)[places[[1, 0]]]
  )
  config.data.trainval = True
  joined = datasets.make_splits(config.data)["train"]
  assert (sources.width(joined), len(joined)) == (D, 96)
  np.testing.assert_array_equal(sources.vectors(joined, np.array([95]))[0], joined[95].image)


def test_a_checksum_follows_the_numbers(tmp_path):
  before = features.load(_npz(tmp_path / "f.npz"))["all"]
  changed = VECTORS.copy()
  changed[4, 0] += 1
  after = features.load(_npz(tmp_path / "g.npz", embeddings=changed))["all"]
  pairs = zip(features.checked_ids(before), features.checked_ids(after), strict=True)
  assert [one == other for one, other in pairs] == [row != 4 for row in range(N)]


def test_vectors_of_zeros_are_counted(tmp_path, caplog):
  vectors = VECTORS.copy()
  vectors[[2, 5]] = 0
  features.load(_npz(tmp_path / "f.npz", embeddings=vectors))
  assert "2 of 12 vectors are 0, the first in row 2" in caplog.text


def test_a_row_of_parquet_without_a_vector_is_named(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  rows = [list(vector) for vector in VECTORS.astype(float)]
  for odd in (None, [1.0], [None, *rows[0][1:]]):
    rows[3] = odd
    parquet.write_table(pyarrow.table({"embedding": rows, "label": LABELS}), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=r"a list of equally many numbers, row 3 is "):
      features.load(str(tmp_path / "f.parquet"))
  table = pyarrow.table({"embedding": [1.5] * N, "label": LABELS})
  parquet.write_table(table, tmp_path / "f.parquet")
  with pytest.raises(ValueError, match=r"a list of equally many numbers, row 0 is 1\.5"):
    features.load(str(tmp_path / "f.parquet"))


def test_groups_in_hdf5_are_left_out(tmp_path):
  h5py = pytest.importorskip("h5py")
  with h5py.File(tmp_path / "f.h5", "w") as file:
    file["embeddings"], file["labels"] = VECTORS, LABELS
    file.create_group("more")["notes"] = 1
  assert len(features.load(str(tmp_path / "f.h5"))["all"]) == N


def test_vectors_without_classes(tmp_path):
  path = _npz(tmp_path / "f.npz", labels=None)
  found = features.load_unlabeled(path, name="--images")
  assert (len(found), found[0].class_name) == (N, "")
  some = _npz(tmp_path / "g.npz", labels=["a", ""] * 6)  # a query may lack a class
  assert [one.class_name for one in features.load_unlabeled(some, name="--query")][:2] == ["a", ""]
  array = features.from_array(VECTORS, name="images")
  np.testing.assert_array_equal(array.vectors(np.arange(N)), VECTORS)
  with pytest.raises(ValueError, match=r"images: the embeddings must be numbers"):
    features.from_array(VECTORS[:0], name="images")
