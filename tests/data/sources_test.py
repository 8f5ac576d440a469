"""Tests splits by class, rows of labels, and views of a source."""

import numpy as np
import pictures
import pytest

from soprc_jax.data import sources


class TestSources:
  def test_splits_share_no_class_and_cover_all(self):
    labels = np.repeat(np.arange(100, 200), 3)[np.random.default_rng(0).permutation(300)]
    shares = {"train": 0.5, "val": 0.1, "test": 0.4}
    splits = sources.split_by_class(labels, shares, seed=3)
    assert sorted(np.concatenate(list(splits.values()))) == list(range(300))
    classes = {name: set(labels[positions]) for name, positions in splits.items()}
    assert {name: len(found) for name, found in classes.items()} == {
      "train": 50,
      "val": 10,
      "test": 40,
    }
    assert not classes["train"] & classes["val"]
    assert not classes["train"] & classes["test"]
    assert not classes["val"] & classes["test"]
    assert all((np.diff(positions) > 0).all() for positions in splits.values())

  def test_split_is_a_pure_function_of_the_seed(self):
    labels, shares = np.repeat(np.arange(60), 2), {"train": 0.5, "test": 0.5}
    one, same, other = (sources.split_by_class(labels, shares, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["train"], same["train"])
    assert not np.array_equal(one["train"], other["train"])

  def test_split_of_a_class_does_not_depend_on_the_order_of_the_images(self):
    labels = np.repeat(np.arange(60), 2)
    shuffled = np.random.default_rng(0).permutation(labels)
    shares = {"train": 0.5, "test": 0.5}
    one, other = (sources.split_by_class(values, shares, seed=0) for values in (labels, shuffled))
    assert set(labels[one["train"]]) == set(shuffled[other["train"]])

  @pytest.mark.parametrize(
    ("shares", "message"),
    [
      ({"train": 0.5, "test": 0.4}, "sum to 1"),
      ({"train": 1.0, "test": 0.0}, "positive"),
      ({"train": 0.9999, "test": 0.0001}, "'test' is empty"),
    ],
  )
  def test_bad_shares_are_refused(self, shares, message):
    with pytest.raises(ValueError, match=message):
      sources.split_by_class(np.arange(10), shares, seed=0)

  def test_f10_rows_of_labels_that_are_not_contiguous(self):
    labels = np.array([2**40, -7, 11318, 2**40, -7])
    assert sources.label_rows(labels) == {-7: 0, 11318: 1, 2**40: 2}

  def test_subset_keeps_order_labels_and_ids(self):
    source = pictures.Pictures([5, 6, 7, 8])
    subset = sources.Subset(source, [3, 1])
    assert len(subset) == 2
    assert list(subset.labels) == [8, 6]
    assert [subset[i].id for i in range(2)] == ["picture3", "picture1"]

  @pytest.mark.parametrize("positions", [[0, 4], [-1]])
  def test_positions_outside_the_source_are_refused(self, positions):
    with pytest.raises(IndexError, match="4"):
      sources.Subset(pictures.Pictures([5, 6, 7, 8]), positions)
