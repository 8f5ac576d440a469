"""Writes embeddings in shards with their tables, and reads them back as one gallery."""

import csv
import json

import geometries
import numpy as np

from soprc_jax.serving import shard_formats, shards


def write(path, vectors, ids=None, labels=None, *, digest=None, inputs="", root="", table="csv"):
  """Writes ``path``, a table if there are ids, and an origin if there is a digest.

  Another suffix than ``.fbin`` and ``.h5`` is that of an ``.npy`` file.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("w+b") as file:
    shard_formats.write(file, path.suffix, vectors, map(str, ids or range(len(vectors))))
  columns = {"id": ids, "label": labels}
  columns = {key: list(values) for key, values in columns.items() if values is not None}
  if table == "csv" and columns:
    with path.with_suffix(".csv").open("w", newline="") as file:
      csv.writer(file).writerows([list(columns), *zip(*columns.values())])
  elif columns:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"))
  if digest is not None:
    meta = {
      "format": shards.FORMAT,
      "digest": digest,
      "inputs": inputs,
      "root": root,
    }
    meta |= {"rows": len(vectors), "width": vectors.shape[1], "dtype": vectors.dtype.name}
    path.with_suffix(".json").write_text(json.dumps(meta))
  return path


def gallery(
  folder,
  *,
  num=3,
  dtypes=(np.float32, np.float16),
  seed=0,
  geometry="duplicates",
  suffix=".npy",
):
  """Writes 120 images as ``num`` shards, and 20 queries; returns vectors, labels and ids.

  The queries are rows 0 to 19 of these. The gallery is rows 129 to 10, in this order.
  """
  rng = np.random.default_rng(seed)
  vectors = geometries.geometry(geometry, seed, 130, 16)
  labels = [f"class {i}" for i in rng.integers(0, 12, 130)]
  ids = [f"photos/{i}.jpg" for i in range(130)]
  parts = np.array_split(np.arange(129, 9, -1), num)
  for number, part in enumerate(parts):
    rows = vectors[part].astype(dtypes[number % len(dtypes)])
    vectors[part] = rows
    write(
      folder / "shards" / f"{shards.name(number, num)}{suffix}",
      rows,
      [ids[i] for i in part],
      [labels[i] for i in part],
      table=("csv", "parquet")[number % 2],
    )
  write(folder / f"queries{suffix}", vectors[:20], ids[:20], labels[:20])
  return vectors, labels, ids
