"""Embeds one shard of the user's images or of a split, and writes it.

Shards are written independently of each other, by any number of processes. A finished shard is
skipped. A shard that a stop has left unfinished is written again.
"""

import csv
import hashlib
import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax import version
from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable
from soprc_jax.data import features, sources
from soprc_jax.serving import image_inputs, shard_formats, shard_tables, shards
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import workdir

_log = logging.getLogger(__name__)


def part_of(source: sources.Source, number: int, count: int) -> Any:
  """Returns the images of a shard: a source of the same kind, consecutive in the order of all.

  Args:
    source: all images.
    number: the shard, from 0.
    count: number of shards.

  Raises:
    ValueError: if there are more shards than images.
  """
  if count > len(source):
    raise ValueError(f"--shard={number}/{count}: there are only {len(source)} images")
  part = slice(len(source) * number // count, len(source) * (number + 1) // count)
  if isinstance(source, image_inputs.Named):
    return image_inputs.Named(source.root, source.paths[part], source.names[part])
  rows = np.arange(part.start, part.stop)
  if isinstance(source, features.Features):
    return features.Features(
      source.vectors(rows),
      source.labels[rows],
      source.ids[part],
      source.class_names,
      made_by=source.made_by,
    )
  return sources.Subset(source, rows)


def inputs_digest(source: sources.Source) -> str:
  """Returns a hash of the names of all images, or of their labels where names need the images."""
  names = source.paths if isinstance(source, image_inputs.Named) else getattr(source, "ids", None)
  found = hashlib.sha256(np.asarray(source.labels, "<i8").tobytes())
  for name in names or ():
    found.update(f"{name}\n".encode(errors="surrogateescape"))
  return found.hexdigest()


def remove_stale(path: Path) -> None:
  """Removes the temporary files that killed processes have left for a shard."""
  file_io.remove_stale(
    path.parent, {f"{path.stem}{suffix}" for suffix in (path.suffix, ".json", ".parquet", ".csv")}
  )


def is_finished(
  path: Path, network: network_lib.Network, *, dtype: str, inputs: str, count: int
) -> bool:
  """Returns whether a shard exists.

  Args:
    path: its file of embeddings.
    network: the model that embeds.
    dtype: float32 or float16.
    inputs: `inputs_digest` of all images.
    count: number of shards.

  Raises:
    ValueError: if it was made with another model, dtype or other images, its files are of different
      shards, its origin is missing, or if there are shards of another number or format. The message
      names the file.
  """
  remedy = "choose a new folder for --output"
  for other in path.parent.glob("shard-*-of-*.*"):
    if other.suffix not in shard_formats.SUFFIXES:
      continue
    if not other.stem.endswith(f"-of-{count:05d}"):
      raise ValueError(f"{printable(other)} is not one of {count} shards: {remedy}")
    if other.suffix != path.suffix:  # formats would share tables
      raise ValueError(f"{printable(other)} has another format than {path.name}: {remedy}")
  if not path.exists():
    return False
  try:
    (found,) = shards.find_all([path], flag="--output")
    if shard_tables.read(found).ids is None:
      raise ValueError(f"{printable(path)} has no table")
  except shards.MixedError:  # its files are the user's to sort out
    raise
  except ValueError as error:
    _log.warning("%s. It is written again.", error)
    return False
  if not found.made_by:
    raise ValueError(
      f"{printable(path.with_suffix('.json'))} is missing: put it back, or remove "
      f"{printable(path)}, and it is written again"
    )
  for what, there, here in (
    ("model", found.made_by, network.digest),
    ("list of images", found.inputs, inputs),
    ("dtype", found.dtype.name, dtype),
  ):
    if there != here:
      raise ValueError(f"{printable(path)} was made with another {what}: {remedy}")
  return True


def write(path: Path, index: index_lib.Index, *, dtype: str, inputs: str) -> None:
  """Writes a shard with its table and its origin. The embeddings are replaced last.

  Args:
    path: its file of embeddings; the suffix decides the format.
    index: its embeddings.
    dtype: float32 or float16.
    inputs: `inputs_digest` of all images.

  Raises:
    OSError: if the disk is full or the folder is not writable.
  """
  vectors = index.embeddings.astype(dtype)
  if not len(vectors):
    _log.warning("%s is empty: none of its images can be decoded.", printable(path))
  meta = {"format": shards.FORMAT, "rows": len(vectors), "width": vectors.shape[1], "dtype": dtype}
  meta |= {"vectors": shards.vectors_digest(vectors.__getitem__, len(vectors))}
  meta |= {"ids": shards.ids_digest([one.strip() for one in index.ids.tolist()])}
  meta |= {"digest": index.digest, "inputs": inputs, "broken_ids": index.broken_ids.tolist()}
  meta |= {key: getattr(index, key) for key in ("workdir", "step", "model", "image_size", "resize")}
  meta |= {"split": index.split, "root": index.root, "label_rule": index.label_rule}
  meta |= {"soprc_jax_version": version.__version__}
  path.unlink(missing_ok=True)  # so that it never stands next to another table
  _write_table(path, index)
  workdir.write_atomically(path.with_suffix(".json"), json.dumps(meta, indent=1) + "\n")
  with file_io.whole(path) as file:
    shard_formats.write(file, path.suffix, vectors, index.ids.tolist())


def _write_table(path: Path, index: index_lib.Index) -> None:
  """Writes ids and labels as Parquet, or as CSV where pyarrow is missing."""
  columns = {"id": index.ids.tolist(), "label": index.class_names.tolist()}
  has_parquet = importlib.util.find_spec("pyarrow") is not None
  suffix, other = (".parquet", ".csv") if has_parquet else (".csv", ".parquet")
  path.with_suffix(other).unlink(missing_ok=True)
  with file_io.whole(path.with_suffix(suffix)) as file:
    if has_parquet:
      import pyarrow
      from pyarrow import parquet

      parquet.write_table(pyarrow.table(columns), file)
      return
    text = io.TextIOWrapper(file, "utf-8", newline="")
    csv.writer(text).writerows([list(columns), *zip(*columns.values(), strict=True)])
    text.detach()
