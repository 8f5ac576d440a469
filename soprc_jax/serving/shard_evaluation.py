"""Counts candidates in the shards of a gallery, in bounded memory, and computes metrics.

Each shard is read once. Its counts are written to a file of its own. So processes can count
different shards, and a stopped one resumes after its last finished shard. The counts of all shards
give the metrics, see `soprc_jax.metrics.streaming`.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import hashlib
import logging
import math
import os
from pathlib import Path
from typing import Any
import zlib

import jax
import numpy as np
import threadpoolctl

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import printable
from soprc_jax.metrics import per_query, streaming
from soprc_jax.serving import shard_survey
from soprc_jax.serving import shards as shards_lib
from soprc_jax.serving.shards import Shard

_log = logging.getLogger(__name__)

# Candidates that are counted at a time, if the memory suffices. More are slower on CPUs, since the
# scores of a tile leave the cache.
_BLOCK = 1 << 13
_LEAST_BLOCK = 1 << 8
# Bytes of a process that has loaded jax and computed something.
_BASE = 700 << 20
# Bytes of the pairs of up to 1,024 queries with 128 positives, and of their comparison, see
# `exact_ranks`.
_COMPARED = 32 << 20


def plan(
  files: shard_survey.Files, prepared: shard_survey.Prepared, memory_gb: float
) -> tuple[int, int]:
  """Returns how many candidates a thread counts at a time, and the number of threads.

  There is one thread for each core of the process, or as many as the memory suffices for.

  Args:
    files: the shards.
    prepared: of `prepare`.
    memory_gb: memory of the process in GiB.

  Raises:
    ValueError: if the memory does not suffice.
  """
  vectors = prepared.queries.vectors
  width, num_thresholds = vectors.shape[1], len(prepared.thresholds.scores)
  in_memory = sum(shard.rows * shard.width * 4 for shard in files.gallery if shard.stored)
  # Thresholds with their places in padded chunks, and counts.
  fixed = _BASE + in_memory + 4 * vectors.nbytes + 64 * num_thresholds + 16 * files.num_candidates
  # Of a thread: counts, and pairs that are compared with all positives.
  own = 32 * num_thresholds + _COMPARED
  # Two blocks in float32, on the host and on the device, and one in float64. Scores of tiles, flags
  # of doubtful pairs, the pairs, and exact scores with a sorted copy.
  rows = min(streaming.QUERY_ROWS, len(vectors))
  each = 28 * width + rows * (3 + 1 + 8) + 1024
  free, least = int(memory_gb * 2**30) - fixed, own + _LEAST_BLOCK * each
  if free < least:
    need = math.ceil((fixed + least) / 2**30 * 100) / 100
    raise ValueError(f"--memory_gb={memory_gb:g} is too little: this needs {need:.2f}")
  threads = min(_num_cores(), free // least)
  return min((free // threads - own) // each, _BLOCK), threads


def _num_cores() -> int:
  """Returns the cores that this process may use; two on a GPU, whose cores count instead."""
  if jax.default_backend() != "cpu":
    return 2
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def count(
  files: shard_survey.Files,
  prepared: shard_survey.Prepared,
  folder: Path,
  *,
  size: int,
  threads: int = 1,
  part: tuple[int, int] = (0, 1),
  on_rows: Callable[[int], None] | None = None,
) -> None:
  """Counts in the shards whose counts are not in a folder yet, and writes them there.

  Args:
    files: the shards.
    prepared: of `prepare`.
    folder: existing folder of the counts.
    size: largest number of candidates that a thread counts at a time.
    threads: number of threads.
    part: (I, N) counts only each N-th shard, from shard I on.
    on_rows: called with numbers of candidates as they are done.

  Raises:
    ValueError: if an embedding is not finite, or a shard is truncated.
  """
  counter = streaming.BlockCounter(
    prepared.queries, prepared.thresholds, size=size, num_candidates=files.num_candidates
  )
  keys = _keys(files, prepared)
  numbers = range(part[0], len(files.gallery), part[1])
  paths = [_counts_file(folder, files.gallery[number]) for number in numbers]
  file_io.remove_stale(folder, {path.name for path in paths})
  for number, path in zip(numbers, paths, strict=True):
    shard = files.gallery[number]
    if _read_counts(path, keys[number], len(prepared.thresholds.scores)) is not None:
      if on_rows:
        on_rows(shard.rows)
      continue
    total = np.zeros(len(prepared.thresholds.scores), np.int64)
    for rows, counts in _counts(counter, shard, prepared.excluded[number], size, threads):
      total += counts
      if on_rows:
        on_rows(rows)
    with file_io.whole(path) as file:
      np.savez(file, key=np.array(keys[number]), counts=total)


def _counts(
  counter: streaming.BlockCounter,
  shard: Shard,
  excluded: tuple[np.ndarray, np.ndarray],
  size: int,
  threads: int,
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the rows and the counts ``[T]`` of each block of a shard, in their order.

  Each thread counts a block. All threads in one product take longer, since a third of the work is
  reading and comparing, which only one of them would do.
  """

  def count_block(start: int) -> tuple[int, np.ndarray]:
    block = _read_block(shard, excluded, start, size)
    try:
      return len(block.vectors), counter.count(counter.prepare(block))
    except streaming.NotFiniteError as error:
      raise shard_survey.not_finite(shard, start + error.row) from None
    except ValueError as error:
      rows = f"rows {start} to {start + len(block.vectors) - 1}"
      raise ValueError(f"{printable(shard.path)}, {rows}: {error}") from None

  pending: collections.deque[futures.Future[tuple[int, np.ndarray]]] = collections.deque()
  with threadpoolctl.threadpool_limits(1, "blas"), futures.ThreadPoolExecutor(threads) as pool:
    for start in range(0, shard.rows, size):
      pending.append(pool.submit(count_block, start))
      if len(pending) > threads:
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()


def _read_block(
  shard: Shard, excluded: tuple[np.ndarray, np.ndarray], start: int, size: int
) -> streaming.Block:
  """Reads a block of a shard."""
  rows, positions = excluded
  vectors = shards_lib.read(shard, start, min(size, shard.rows - start))
  ids, here = None, (rows >= start) & (rows < start + len(vectors))
  if here.any():
    ids = np.full(len(vectors), -1)
    ids[rows[here] - start] = positions[here]
  return streaming.Block(vectors, ids=ids)


def _keys(files: shard_survey.Files, prepared: shard_survey.Prepared) -> list[str]:
  """Returns for each shard a hash of what determines its counts."""
  shared = hashlib.sha256(prepared.queries.vectors.tobytes())
  shared.update(prepared.thresholds.numbers.tobytes())
  shared.update(prepared.thresholds.scores.tobytes())
  keys = []
  for shard, excluded in zip(files.gallery, prepared.excluded, strict=True):
    own = shared.copy()
    own.update(shards_lib.state(shard).encode())
    for array in excluded:
      own.update(array.tobytes() + b"/")
    keys.append(own.hexdigest())
  return keys


def _counts_file(folder: Path, shard: Shard) -> Path:
  # Shards of several folders can have the same name.
  return folder / f"{shard.path.stem}-{zlib.crc32(str(shard.path.resolve()).encode()):08x}.npz"


def _read_counts(path: Path, key: str, size: int) -> np.ndarray | None:
  """Returns the counts of a file, or None if they are missing, of other data or corrupt."""
  if not path.exists():
    return None
  try:
    arrays = stored.read_arrays(path, ("key", "counts"))
  except ValueError as error:
    _log.warning("%s: this shard is counted again.", error)
    return None
  counts = arrays["counts"]
  if arrays["key"].ndim or arrays["key"].item() != key or counts.shape != (size,):
    _log.info("%s is of other queries or another gallery: counted again.", printable(path))
    return None
  return counts


def summarise(
  files: shard_survey.Files, prepared: shard_survey.Prepared, folder: Path, *, ks: Sequence[int]
) -> tuple[dict[str, Any], per_query.PerQuery, dict[str, np.ndarray]]:
  """Computes the metrics from the counts of all shards.

  Args:
    files: the shards.
    prepared: of `prepare`.
    folder: folder of the counts.
    ks: cut-offs k >= 1.

  Returns:
    Metrics with intervals, the results of the queries, and their average precision at each k.

  Raises:
    ValueError: if a shard is not counted, or has changed since.
  """
  total = np.zeros(len(prepared.thresholds.scores), np.int64)
  for shard, key in zip(files.gallery, _keys(files, prepared), strict=True):
    counts = _read_counts(_counts_file(folder, shard), key, len(total))
    if counts is None:
      raise ValueError(f"{printable(shard.path)} has changed while it was counted: start again")
    total += counts
  values = streaming.summarise(
    prepared.thresholds, total, ks=ks, num_candidates=files.num_candidates, per_query=True
  )
  at_k = {f"ap@{k}": values.pop(f"ap@{k}_per_query") for k in ks}
  queries = per_query.make(
    prepared.ids, prepared.class_names, values.pop("ap_per_query"), values.pop("negatives_above")
  )
  names = [name for name in values if name == "mAUPRC" or name.startswith("recall@")]
  values["intervals"] = per_query.intervals(queries, names)
  values["num_candidates"] = files.num_candidates
  values["num_excluded"] = sum(len(rows) for rows, _ in prepared.excluded)
  values["model"] = files.gallery[0].made_by
  return values, queries, at_k
