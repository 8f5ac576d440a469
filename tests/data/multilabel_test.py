"""Tests tables with several labels: their splits, also with a long tail."""

import numpy as np
import pytest

from soprc_jax.data import multilabel


def _table(groups=60, size=4):
  rng = np.random.default_rng(0)
  count = groups * size
  features = rng.normal(3.0, 2.0, (count, 5)).astype(np.float32)
  labels = rng.random((count, 3)) < (0.5, 0.2, 0.1)
  return multilabel.Table(features, labels, ("a", "b", "c"), np.repeat(np.arange(groups), size))


def _classes(counts=(60, 60, 60, 60, 20)):
  labels = np.repeat(np.eye(len(counts), dtype=bool), counts, axis=0)
  features = np.random.default_rng(0).normal(size=(len(labels), 4)).astype(np.float32)
  names = tuple(f"c{k}" for k in range(len(counts)))
  return multilabel.Table(features, labels, names, np.arange(len(labels)))


class TestSplit:
  def _split(self, table, **values):
    return multilabel.split(table, **{"val_share": 0.2, "test_share": 0.3, "seed": 0} | values)

  def test_a_group_is_in_one_split(self):
    table = _table()
    splits = self._split(table)
    groups = [set(table.groups[part.rows]) for part in splits[:3]]
    assert [len(own) for own in groups] == [30, 12, 18]
    assert len(set.union(*groups)) == 60
    for part in splits[:3]:
      np.testing.assert_array_equal(part.labels, table.labels[part.rows])
      assert part.features.dtype == np.float32
    assert splits.label_names == ("a", "b", "c")

  def test_test_examples_are_the_split_seeds_alone(self):
    table = _table()
    one, other = (self._split(table, seed=seed) for seed in (0, 1))
    assert np.array_equal(one.test.rows, other.test.rows)
    assert not np.array_equal(one.val.rows, other.val.rows)
    assert not np.array_equal(self._split(table, split_seed=1).test.rows, one.test.rows)

  def test_features_are_scaled_by_the_training_examples(self):
    train = self._split(_table()).train.features
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-5)
    assert np.sqrt((train**2).mean()) == pytest.approx(1, abs=1e-5)

  def test_a_split_without_a_group(self):
    with pytest.raises(ValueError, match=r"must leave groups of examples for each split, got 0\.5"):
      self._split(_table(), val_share=0.5, test_share=0.5)


class TestLongTail:
  def _split(self, table, **values):
    options = {"num_classes": 4, "head": 32, "tail": 2, "val_images": 5, "test_images": 10}
    return multilabel.long_tailed(table, **options | {"seed": 0} | values)

  def test_train_has_a_long_tail_and_test_is_balanced(self):
    splits = self._split(_classes())
    assert splits.train.labels.sum(axis=0).tolist() == [32, 8, 4, 2]
    assert splits.val.labels.sum(axis=0).tolist() == [5] * 4
    assert splits.test.labels.sum(axis=0).tolist() == [10] * 4
    rows = np.concatenate([part.rows for part in splits[:3]])
    assert len(np.unique(rows)) == len(rows)
    assert sorted(splits.label_names) == ["c0", "c1", "c2", "c3"]  # c4 has too few examples
    for part in splits[:3]:
      names = np.array(splits.label_names)[part.labels.argmax(axis=1)]
      assert (names == np.array(_classes().names)[_classes().labels[part.rows].argmax(1)]).all()

  def test_test_and_classes_are_the_split_seeds_alone(self):
    table = _classes()
    one, other = (self._split(table, seed=seed) for seed in (0, 1))
    assert np.array_equal(one.test.rows, other.test.rows)
    assert one.label_names == other.label_names
    assert not np.array_equal(one.train.rows, other.train.rows)
    assert not np.isin(other.train.rows, one.test.rows).any()

  def test_sizes_follow_a_power_law(self):
    sizes = multilabel.class_sizes(60, 150, 2)
    assert (sizes[0], sizes[-1]) == (150, 2)
    rank = np.arange(1, 61)
    slope = np.polyfit(np.log(rank[:20]), np.log(sizes[:20]), 1)[0]
    assert slope == pytest.approx(-np.log(75) / np.log(60), abs=0.03)

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      (
        {"num_classes": 5},
        r"data\.long_tail\.num_classes=5 must be at least 2, and 4 classes have the 47 examples",
      ),
      ({"tail": 40}, "data.long_tail.head must be an integer, at least 40; got 32"),
      ({"test_images": 0}, "data.long_tail.test_images must be an integer, at least 1; got 0"),
    ],
  )
  def test_refusals(self, values, message):
    with pytest.raises(ValueError, match=message):
      self._split(_classes(), **values)
    with pytest.raises(ValueError, match="needs a data set with one label an example"):
      self._split(_table())


def test_thirds():
  parts = multilabel.thirds(np.array([5, 100, 7, 50, 1, 6, 6]))
  assert {name: own.tolist() for name, own in parts.items()} == {
    "many": [1, 2, 3],
    "medium": [5, 6],
    "few": [0, 4],
  }


class TestLoad:
  def test_glyphs(self):
    classes, labels = (multilabel.load(name) for name in ("glyph_classes", "glyph_labels"))
    assert classes.features.shape == labels.features.shape == (29233, 256)
    assert (classes.labels.sum(axis=1) == 1).all()
    assert labels.labels.shape == (29233, 50)
    assert labels.groups[0] == ord("!")
    for values in (classes.features.min(), 1 - classes.features.max()):
      assert 0 <= values < 0.2

  def test_unknown(self):
    with pytest.raises(ValueError, match=r"data\.name must be one of yeast, glyph_labels"):
      multilabel.load("iris")
