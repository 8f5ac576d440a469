"""Reads the tables of shards: ids and labels of embeddings, in Parquet or CSV files."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from soprc_jax._internal.strings import printable, shown
from soprc_jax.serving import shard_formats, shards
from soprc_jax.serving.shard_formats import IDS
from soprc_jax.serving.shards import Shard

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
  """Reads the ids and the labels of a shard. Ids have no blanks at their ends.

  An HDF5 file without a table may have ids, and no labels.

  Raises:
    shards.MixedError: if the table is of another shard, as far as the origin tells.
    ValueError: if it is unreadable or has another number of rows, an id is empty or neither a text
      nor an integer, or a Parquet file needs pyarrow, which is missing.
  """
  if shard.stored is not None:
    names = shard.stored.class_names
    spelled = [names.get(int(one), "") for one in shard.stored.labels]
    return Table(_as_texts(list(shard.stored.ids), shard.path), spelled)
  there = [path for path in map(shard.path.with_suffix, (".parquet", ".csv")) if path.exists()]
  if len(there) > 1:
    raise ValueError(f"{printable(there[0])} and {there[1].name} both exist: remove one of them")
  if not there:
    inside = shard_formats.ids(shard.path) if shard.layout.dataset else None
    if inside is not None and len(inside) != shard.rows:
      raise ValueError(
        f"{printable(shard.path)} has {len(inside)} ids for {shard.rows} embeddings: write one for "
        "each"
      )
    return Table(None if inside is None else _as_texts(inside, shard.path), None)
  (path,) = there
  try:
    columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
  except ImportError:
    raise ValueError(
      f"{printable(path)} needs pyarrow: pip install pyarrow, or convert it to .csv"
    ) from None
  except Exception as error:  # a corrupt file can raise many kinds
    remedy = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
    raise ValueError(f"{printable(path)} cannot be read: {error}{remedy}") from error
  for key, values in columns.items():
    if len(values) != shard.rows:
      raise ValueError(
        f"{printable(path)}: column {key} has {len(values)} rows for {shard.rows} embeddings in "
        f"{shard.path.name}: write one row for each"
      )
  found = next((columns[key] for key in IDS if key in columns), None)
  labels = next((columns[key] for key in LABELS if key in columns), None)
  ids = None if found is None else _as_texts(found, path)
  if ids is not None and shard.ids and shards.ids_digest(ids) != shard.ids:
    beside = shard.path.with_suffix(".json").name
    raise shards.MixedError(
      f"{printable(path)} has not the ids of {shard.path.name}: it is of another shard, or was "
      f'changed. Put the right file there; or, if you have changed ids, remove "ids" from {beside}'
    )
  return Table(ids, labels)


def _as_texts(ids: list[Any], path: Path) -> list[str]:
  check_types("an id", ids, {str, int}, path)
  texts = [str(one).strip() for one in ids]
  if "" in texts:
    raise ValueError(f"{printable(path)}: the id is empty in row {texts.index('')}")
  return texts


def check_types(what: str, values: list[Any], types: set[type], path: Path) -> None:
  """Raises a ValueError if a value of a column is neither a text nor an integer.

  The same number of another type has another text, e.g. 1.0 or b'1', and would match nothing.

  Args:
    what: name of a value in the message.
    values: the column.
    types: those of its values that are right.
    path: file of the column.
  """
  for kind in set(map(type, values)) - types:
    row = next(row for row, one in enumerate(values) if type(one) is kind)
    raise ValueError(
      f"{printable(path)}: {what} must be a text or an integer, got {shown(values[row])} of type "
      f"{kind.__name__} in row {row}: cast the column to integers or text"
    )


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
  doubled = [key for key in (*IDS, *LABELS) if header.count(key) > 1]
  if doubled:
    raise ValueError(f"it has {header.count(doubled[0])} columns {doubled[0]}: rename one")
  uneven = [number for number, row in enumerate(lines) if len(row) != len(header)]
  if uneven:
    raise ValueError(f"row {uneven[0]} has not the {len(header)} columns of the header")
  columns = zip(*lines, strict=True) if lines else ([] for _ in header)
  return dict(zip(header, map(list, columns), strict=True))
