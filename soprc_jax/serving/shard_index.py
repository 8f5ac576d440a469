"""Builds an index of a gallery in shards, measures its recall, and reads it.

An index is two files: ``NAME.faiss`` or ``NAME.usearch``, which these packages read too, and
``NAME.json`` with its origin and the digest of the first, which is renamed last.
"""

from collections.abc import Callable, Sequence
import contextlib
import glob
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import printable
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import shard_engines, shard_formats, shard_survey, shard_tables
from soprc_jax.serving import shards as shards_lib
from soprc_jax.serving.shards import Shard
from soprc_jax.training import checksums, workdir

FORMAT = "soprc_jax index 1"
SUFFIXES = (".faiss", ".usearch")
# Recall is measured on this many queries, for the first `TOP` of `CANDIDATES`.
QUERIES, TOP, CANDIDATES = 500, 10, 100
_BLOCK = 1 << 14
_SHARD = {"path": str, "state": str}
_META = {
  "format": str,
  "kind": str,
  "bytes": int,
  "sha256": str,
  "digest": str,
  "shards": [_SHARD],
}
_REMEDY = "build it again with soprc index"
# Rounding errors of products of vectors of norm 1.
_TOLERANCE = 1e-6


class Opened(NamedTuple):
  """Holds an index that was read.

  Attributes:
    engine: the index.
    shards: its shards, in the order of its rows.
  """

  engine: shard_engines.Engine
  shards: list[Shard]

  @property
  def num_images(self) -> int:
    """The number of rows of the joined shards."""
    return sum(shard.rows for shard in self.shards)


class Recall(NamedTuple):
  """Holds the share of the nearest images that an index finds.

  Attributes:
    alone: by the first results of the index.
    rescored: by those of its candidates that have the largest exact scores.
    num_queries: number of queries.
  """

  alone: float
  rescored: float
  num_queries: int


def find(pattern: str, *, flag: str) -> list[Shard]:
  """Finds the shards of an index, see `shards.find`.

  Raises:
    ValueError, FileNotFoundError: as `shards.find`, or if they are of different models or empty, or
      the table of one does not fit.
  """
  found = shards_lib.find(pattern, flag=flag)
  if any(shard.stored is not None for shard in found):
    raise ValueError(f"{flag}={pattern}: soprc search reads an .npz file without soprc index")
  shards_lib.check_same_model(found)
  if not sum(shard.rows for shard in found):
    raise ValueError(f"{flag}={pattern} has no embedding")
  for shard in found:  # a search reads the tables, and would fail after the index is built
    if shard_tables.read(shard).ids is None and shard.made_by:
      raise ValueError(f"{printable(shard.path)} has no ids: {shard_formats.REMEDY}")
  return found


def check_output(path: Path, kind: str) -> None:
  """Raises an error if the files of an index cannot be written or exist.

  An origin without an index is left by a kill, and is replaced.
  """
  index_lib.check_output(path, suffix=shard_engines.KINDS[kind].suffix)
  beside = path.with_suffix(".json")
  others = path.parent.glob(f"{glob.escape(path.stem)}.*")
  if not any(other.suffix.lower() in SUFFIXES for other in others):
    with contextlib.suppress(OSError, ValueError):
      if stored.read_json(beside, _META)["format"] == FORMAT:
        return
  index_lib.check_output(beside)


def build(
  path: Path,
  shards: Sequence[Shard],
  kind: str,
  *,
  on_rows: Callable[[int], Any] | None = None,
  seed: int = 0,
) -> Recall:
  """Builds an index in one pass over the shards, and writes it.

  Memory holds the index, a block, and for some kinds a sample to train on.

  Args:
    path: file of the index, see `check_output`.
    shards: the gallery, see `find`.
    kind: one of `shard_engines.KINDS`.
    on_rows: called with numbers of rows as they are added.
    seed: of the sample and of the queries whose recall is measured.

  Returns:
    The recall for queries drawn from the gallery. Each is left out of its own results.

  Raises:
    ValueError: if an embedding is not finite, there are too few, or the package is missing.
    FileExistsError, OSError: as `check_output`, or the disk is full.
  """
  check_output(path, kind)
  rng, rows = np.random.default_rng(seed), sum(shard.rows for shard in shards)
  states = [shards_lib.state(shard) for shard in shards]
  of_kind = shard_engines.KINDS[kind]
  file_io.remove_stale(path.parent, {path.name, path.with_suffix(".json").name})
  sample = gather(shards, _draw(rng, rows, of_kind.sample(rows)))
  engine = of_kind.make(shards[0].width, rows, sample)
  del sample
  asked = _draw(rng, rows, min(rows, QUERIES))
  queries = gather(shards, asked)
  exact, first = _Nearest(queries, asked), 0
  for shard in shards:
    for start in range(0, shard.rows, _BLOCK):
      block = shards_lib.read(shard, start, min(_BLOCK, shard.rows - start)).astype(np.float32)
      shard_survey.check_finite(shard, block, np.arange(start, start + len(block)))
      engine.add(block, first)
      exact.add(block, first)
      first += len(block)
      if on_rows:
        on_rows(len(block))
  recall = _recall(engine, shards, queries, asked, exact.scores.min(axis=1))
  meta = {"format": FORMAT, "kind": kind, "rows": rows}
  meta |= {"digest": shards[0].made_by, "recall": recall._asdict()}
  meta["shards"] = [
    {"path": str(shard.path.resolve()), "state": state}
    for shard, state in zip(shards, states, strict=True)
  ]
  with file_io.whole(path) as file:
    engine.save(file)
    file.flush()
    meta["bytes"], meta["sha256"] = checksums.of_file(Path(file.name))
    # Before the index gets its name: `check_output` knows an origin without an index.
    workdir.write_atomically(path.with_suffix(".json"), json.dumps(meta, indent=1) + "\n")
  return recall


def _draw(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
  """Draws ``count`` different rows, in ascending order."""
  return np.sort(rng.choice(rows, count, replace=False, shuffle=False))


def gather(shards: Sequence[Shard], rows: np.ndarray) -> np.ndarray:
  """Reads some rows of the joined shards as ``[n, D]`` float32.

  Args:
    shards: the shards.
    rows: ``[n]`` ascending.

  Raises:
    ValueError: if an embedding is not finite; the message names its shard and row.
  """
  found, first = np.empty((len(rows), shards[0].width), np.float32), 0
  for shard in shards:
    here = slice(*np.searchsorted(rows, [first, first + shard.rows]))
    if here.start < here.stop:
      found[here] = shards_lib.gather(shard, rows[here] - first)
      shard_survey.check_finite(shard, found[here], rows[here] - first)
    first += shard.rows
  return found


class _Nearest:
  """Finds the largest scores of queries over blocks, exactly.

  Args:
    queries: ``[Q, D]`` float32.
    asked: ``[Q]`` their rows, which are left out.
  """

  def __init__(self, queries: np.ndarray, asked: np.ndarray):
    self._queries, self._asked = queries, asked
    self.scores = np.full((len(queries), TOP), -np.inf, np.float32)

  def add(self, block: np.ndarray, first: int) -> None:
    """Adds the rows from ``first`` on."""
    products = self._queries @ block.T
    mine = (self._asked >= first) & (self._asked < first + len(block))
    products[mine, self._asked[mine] - first] = -np.inf
    both = np.concatenate([self.scores, products], axis=1)
    self.scores = np.partition(both, -TOP, axis=1)[:, -TOP:]


def _recall(
  engine: shard_engines.Engine,
  shards: Sequence[Shard],
  queries: np.ndarray,
  asked: np.ndarray,
  least: np.ndarray,
) -> Recall:
  """Measures which share of the nearest images an index finds.

  Args:
    engine: the index.
    shards: its shards.
    queries: ``[Q, D]``.
    asked: ``[Q]`` their rows.
    least: ``[Q]`` score of the last of the `TOP` nearest; -inf if there are fewer rows.
  """
  found = engine.search(queries, CANDIDATES + 1)
  found[found == asked[:, None]] = -1
  union = np.unique(found[found >= 0])
  vectors = gather(shards, union)
  scores = np.full(found.shape, -np.inf)
  for query, rows in enumerate(found):
    places = np.searchsorted(union, rows[rows >= 0])
    scores[query, rows >= 0] = vectors[places].astype(np.float64) @ queries[query]
  is_near = (scores >= least[:, None] - _TOLERANCE) & (found >= 0)
  num_near = np.minimum(TOP, sum(shard.rows for shard in shards) - 1)
  # The first results other than the query itself.
  order = np.argsort(found < 0, axis=1, kind="stable")
  first = np.take_along_axis(is_near, order, axis=1)[:, :TOP]
  counts = [np.minimum(near.sum(axis=1), num_near).sum() for near in (first, is_near)]
  total = max(len(queries) * num_near, 1)
  return Recall(float(counts[0] / total), float(counts[1] / total), len(queries))


def read(path: Path) -> Opened:
  """Reads an index, and checks that its shards have not changed.

  Raises:
    FileNotFoundError: if a file of the index or a shard is missing.
    ValueError: if a file is corrupt, of another version, or a shard has changed.
  """
  beside = path.with_suffix(".json")
  for file in (path, beside):
    if not file.is_file():
      raise FileNotFoundError(
        f"--index={printable(path)}: {printable(file)} is missing: soprc index writes it"
      )
  meta = stored.read_json(beside, _META, remedy=_REMEDY)
  if meta["format"] != FORMAT or meta["kind"] not in shard_engines.KINDS:
    raise ValueError(f"{printable(beside)} is not of an index of this version: {_REMEDY}")
  if path.stat().st_size != meta["bytes"]:
    raise ValueError(
      f"{printable(path)} has {path.stat().st_size} bytes instead of {meta['bytes']}: {_REMEDY}"
    )
  shards = shards_lib.find_all([Path(one["path"]) for one in meta["shards"]], flag="--index")
  for shard, one in zip(shards, meta["shards"], strict=True):
    if shards_lib.state(shard) != one["state"] or shard.made_by != meta["digest"]:
      raise ValueError(
        f"{printable(shard.path)} has changed since {printable(path)} was built: {_REMEDY}"
      )
  if checksums.of_file(path)[1] != meta["sha256"]:
    raise ValueError(f"{printable(path)} is not as it was written: {_REMEDY}")
  return Opened(shard_engines.KINDS[meta["kind"]].load(path), shards)
