"""Tests data sets prepared by TFDS, read without TensorFlow."""

import collections
import pickle

import numpy as np
import pytest
import trees

from soprc_jax.data import tfds_source


class TestTfds:
  def test_sop(self, tmp_path):
    splits = trees.splits("tfds_sop", trees.tfds_sop(tmp_path, 8, 3))
    assert trees.classes(splits["test"]) == {11318, 11319, 11320}
    assert trees.classes(splits["train"]) | trees.classes(splits["val"]) == set(range(8))
    count = collections.Counter()

    def label_of(example):
      count[example.label] += 1
      return example.label, count[example.label] - 1

    for source in splits.values():
      trees.check_examples(source, label_of, 12)

  def test_worker_processes_can_have_it(self, tmp_path):
    source = pickle.loads(
      pickle.dumps(trees.splits("tfds_sop", trees.tfds_sop(tmp_path, 8, 3))["test"])
    )
    assert source[0].label == 11318

  def test_labels_are_read_once_and_a_damaged_file_of_them_is_read_again(
    self, tmp_path, monkeypatch
  ):
    trees.tfds_sop(tmp_path, 8, 3)
    want = trees.splits("tfds_sop", tmp_path)["train"].labels
    kept = sorted(tmp_path.glob(".soprc_jax-*.npy"))
    assert len(kept) == 2
    monkeypatch.setattr(tfds_source, "_plain", None)  # reading a record would fail
    np.testing.assert_array_equal(trees.splits("tfds_sop", tmp_path)["train"].labels, want)
    monkeypatch.undo()
    for path in kept:
      path.write_bytes(path.read_bytes()[:-5])
    np.testing.assert_array_equal(trees.splits("tfds_sop", tmp_path)["train"].labels, want)

  def test_inaturalist_by_its_lists(self, tmp_path):
    trees.tfds_inaturalist(tmp_path, 8, 3)
    splits, by_lists = (
      trees.splits("tfds_inaturalist", tmp_path),
      trees.splits("inaturalist", tmp_path),
    )
    for split, source in splits.items():
      np.testing.assert_array_equal(source.labels, by_lists[split].labels)
      for i in range(len(source)):
        assert source[i].id == by_lists[split][i].id.split("/")[-1].removesuffix(".jpg")
        assert source[i].image.data == by_lists[split][i].image.data

  def test_an_image_of_the_lists_that_is_not_in_the_data(self, tmp_path):
    trees.inaturalist(tmp_path, 8, 3)
    examples = [
      {"id": path.stem, "label": 5, "supercategory": 1, "image": str(path)}
      for path in sorted(tmp_path.rglob("*.jpg"))
    ]
    trees.tfds(tmp_path, "i_naturalist2018", {"train": examples[:-1], "validation": examples[:1]})
    with pytest.raises(
      ValueError, match=r"1 images of the list for .* are not in i_naturalist2018"
    ):
      trees.splits("tfds_inaturalist", tmp_path)

  @pytest.mark.parametrize("name", list(tfds_source.DATA_SETS))
  def test_what_is_not_prepared_says_the_command(self, tmp_path, name):
    if name == "tfds_inaturalist":
      trees.inaturalist(tmp_path, 8, 3)
    with pytest.raises(
      FileNotFoundError,
      match=f"tfds build {tfds_source.DATA_SETS[name]} --file_format=array_record",
    ):
      trees.splits(name, tmp_path)
