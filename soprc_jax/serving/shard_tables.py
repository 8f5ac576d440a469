"""Reads the tables of shards: ids and labels of embeddings, in Parquet or CSV files."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from soprc_jax._internal.strings import printable, shown
from soprc_jax.serving.shards import IDS, Shard

# Columns of labels, the preferred one first.
LABELS = ("class_names", "labels", "label")


class Table(NamedTuple):
  """Holds the names of the embeddings of a shard.

  Attributes:
    ids: ``[N]`` texts; None if there are none.
    labels: ``[N]`` texts or integers; None if there are none.
  """

  ids: list[str] | None
  labels: list[Any] | None


def read(shard: Shard) -> Table:
  """Reads the ids and the labels of a shard.

  Raises:
    ValueError: if the table is unreadable or has another number of rows, an id is empty, or a
      Parquet file needs pyarrow, which is missing.
  """
  if shard.stored is not None:
    names = shard.stored.class_names
    return Table(list(shard.stored.ids), [names.get(int(one), "") for one in shard.stored.labels])
  parquet, text = shard.path.with_suffix(".parquet"), shard.path.with_suffix(".csv")
  if parquet.exists() and text.exists():
    raise ValueError(f"{printable(parquet)} and {text.name} both exist: remove one of them")
  if not (parquet.exists() or text.exists()):
    return Table(None, None)
  path = parquet if parquet.exists() else text
  try:
    columns = _parquet(path) if path == parquet else _csv(path)
  except ImportError:
    raise ValueError(
      f"{printable(path)} needs pyarrow: pip install pyarrow, or convert it to .csv"
    ) from None
  except Exception as error:  # a corrupt file can raise many kinds
    raise ValueError(f"{printable(path)} cannot be read: {error}") from error
  for key, values in columns.items():
    if len(values) != shard.rows:
      raise ValueError(
        f"{printable(path)}: column {key} has {len(values)} rows for {shard.rows} embeddings in "
        f"{shard.path.name}"
      )
  ids = next((columns[key] for key in IDS if key in columns), None)
  labels = next((columns[key] for key in LABELS if key in columns), None)
  return Table(None if ids is None else _as_texts(ids, path), labels)


def _as_texts(ids: list[Any], path: Path) -> list[str]:
  for kind in set(map(type, ids)) - {str}:
    if kind is not int:
      row = next(row for row, one in enumerate(ids) if type(one) is kind)
      raise ValueError(
        f"{printable(path)}: an id must be a text or an integer, got {shown(ids[row])} in row {row}"
      )
    ids = [str(one) for one in ids]
  if "" in ids:
    raise ValueError(f"{printable(path)}: the id is empty in row {ids.index('')}")
  return ids


def _parquet(path: Path) -> dict[str, list[Any]]:
  from pyarrow import parquet

  with parquet.ParquetFile(path) as file:
    known = [key for key in (*IDS, *LABELS) if key in file.schema_arrow.names]
    table = file.read(columns=known)
  return {key: table[key].to_pylist() for key in known}


def _csv(path: Path) -> dict[str, list[Any]]:
  with path.open(newline="", encoding="utf-8-sig") as file:
    rows = csv.reader(file)
    header = next(rows, [])
    lines = [row for row in rows if row]
  uneven = [number for number, row in enumerate(lines) if len(row) != len(header)]
  if uneven:
    raise ValueError(f"row {uneven[0]} has not the {len(header)} columns of the header")
  columns = zip(*lines, strict=True) if lines else ([] for _ in header)
  return dict(zip(header, map(list, columns), strict=True))
