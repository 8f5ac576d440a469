"""Searches a gallery in shards by an index, and ranks what it finds by exact similarities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax._internal import stored
from soprc_jax._internal.strings import printable
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import search, shard_formats, shard_index, shard_tables
from soprc_jax.serving.shards import Shard

_ORIGIN = {"workdir": str, "model": str, "split": str, "root": str, "digest": str} | dict.fromkeys(
  ("step", "image_size", "resize"), int
)


def described(opened: shard_index.Opened) -> index_lib.Index:
  """Returns an index without embeddings that names the model of the shards.

  Raises:
    ValueError: if the model is unknown, or the shards are of several splits.
  """
  origins = [_origin(shard) for shard in opened.shards]
  splits = sorted({origin["split"] for origin in origins})
  if len(splits) > 1:
    raise ValueError(f"the shards of the index are of several splits, {', '.join(splits)}")
  roots = {origin["root"] for origin in origins}
  names = np.empty(0, np.str_)
  return index_lib.Index(
    embeddings=np.empty((0, opened.shards[0].width), np.float32),
    ids=names,
    class_names=names,
    labels=np.empty(0, np.int64),
    positions=np.empty(0, np.int64),
    broken_ids=names,
    split=splits[0],
    # Ids of several folders are absolute, see `_names`.
    root=roots.pop() if len(roots) == 1 else "",
    **{key: origins[0][key] for key in ("workdir", "step", "digest", "model")},
    **{key: origins[0][key] for key in ("image_size", "resize")},
  )


def _origin(shard: Shard) -> dict[str, Any]:
  if not shard.made_by:
    raise ValueError(
      f"{printable(shard.path)} was computed by an unknown model: soprc search needs shards of "
      "soprc embed"
    )
  return stored.read_json(shard.path.with_suffix(".json"), _ORIGIN, remedy=shard_formats.REMEDY)


def class_names(opened: shard_index.Opened) -> Iterator[str]:
  """Yields the names of the classes of an index. Each table is read when it is reached."""
  for shard in opened.shards:
    yield from {str(label) for label in shard_tables.read(shard).labels or [] if label}


def nearest(
  opened: shard_index.Opened,
  about: index_lib.Index,
  queries: np.ndarray,
  *,
  top: int,
  candidates: int,
) -> tuple[index_lib.Index, list[list[search.Neighbour]]]:
  """Finds the nearest images of each query among the candidates of an index.

  Args:
    opened: the index.
    about: of `described`.
    queries: ``[Q, D]`` float32.
    top: number of images per query, >= 1. There are fewer if the index finds fewer.
    candidates: number of images whose exact similarity is computed, at least ``top``.

  Returns:
    An index of the images that were found, with their rows in the joined shards as positions, and
    the nearest images of each query, the nearest first.

  Raises:
    ValueError: if the widths differ, ``candidates`` is less than ``top``, or a table is unreadable.
  """
  width = opened.shards[0].width
  if queries.shape[1] != width:
    raise ValueError(f"the queries have width {queries.shape[1]}, the index has width {width}")
  if candidates < top:
    raise ValueError(f"--candidates={candidates} must be at least --top, here {top}")
  rows = opened.engine.search(queries, candidates)
  union = np.unique(rows[rows >= 0])
  ids, names = _names(opened.shards, union, is_relative=bool(about.root or about.split))
  found = about._replace(
    embeddings=shard_index.gather(opened.shards, union),
    ids=np.array(ids, np.str_),
    class_names=np.array(names, np.str_),
    positions=union,
  )
  places = [np.searchsorted(union, row[row >= 0]) for row in rows]
  return found, [
    search.ranked(found, query, here, top) for query, here in zip(queries, places, strict=True)
  ]


def _names(
  shards: list[Shard], rows: np.ndarray, *, is_relative: bool
) -> tuple[list[str], list[str]]:
  """Returns ids and classes of some ascending rows of the joined shards."""
  ids, names, first = list[str](), list[str](), 0
  for shard in shards:
    here = rows[slice(*np.searchsorted(rows, [first, first + shard.rows]))] - first
    first += shard.rows
    if not len(here):
      continue
    table = shard_tables.read(shard)
    if table.ids is None:
      raise ValueError(f"{printable(shard.path)} has no ids: {shard_formats.REMEDY}")
    ids += [
      table.ids[row] if is_relative else str(Path(shard.root) / table.ids[row]) for row in here
    ]
    labels = table.labels or [None] * shard.rows
    names += ["" if labels[row] is None else str(labels[row]) for row in here]
  return ids, names
