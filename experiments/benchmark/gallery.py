"""Benchmarks the evaluation of a gallery in shards, by the size of the gallery.

Queries and their positives are near random centres, the others are random: unit vectors of 128
numbers in float16.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from experiments.benchmark import harness
from soprc_jax.serving import shard_evaluation, shard_survey, shards

_QUERIES, _POSITIVES, _DIM, _BLOCK, _MEMORY_GB = 1_000, 10, 128, 1 << 13, 2.0
_SIZES = (10_000, 100_000, 1_000_000)
# Largest size for a package that holds all scores: 1 GB of memory, and 7 GB for the next one.
_SMALL = 10_000
_TOP = 1_000
_TARGET, _PRODUCT_TARGET = 1.0, 0.5


def rows() -> Iterator[harness.Row]:
  """Yields the evaluation next to the float32 product alone, and to other packages."""
  with tempfile.TemporaryDirectory(prefix="soprc_jax_benchmark_") as folder:
    files = _write(Path(folder))
    for size in _SIZES:
      found = _find(files, size)
      peers: dict[str, Callable[[], Any]] = {
        "product": functools.partial(_product, found),
        "IndexFlatIP": functools.partial(_flat, found),
      }
      if size <= _SMALL:
        peers["AccuracyCalculator"] = functools.partial(_calculator, found)
      yield from _compare(size, functools.partial(_evaluate, found), peers)


def _compare(
  size: int, ours: Callable[[], Any], peers: Mapping[str, Callable[[], Any]]
) -> Iterator[harness.Row]:
  notes = {
    "product": "float32 similarities, not counted",
    "IndexFlatIP": f"the first {_TOP} only",
    "AccuracyCalculator": "all candidates sorted",
  }
  seconds = harness.time_together({"ours": ours, **peers}, repetitions=1)
  for peer in peers:
    yield harness.row(
      "gallery",
      f"{_QUERIES} queries in {size} x {_DIM}, in files",
      peer,
      seconds["ours"],
      seconds[peer],
      target=_PRODUCT_TARGET if peer == "product" else _TARGET,
      note=notes[peer],
    )


def growth() -> Iterator[harness.Curve]:
  """Yields the time of the evaluation by the size of the gallery."""
  with tempfile.TemporaryDirectory(prefix="soprc_jax_benchmark_") as folder:
    files = _write(Path(folder))
    costs = [
      harness.median_seconds(functools.partial(_evaluate, _find(files, size)), repetitions=1)
      for size in _SIZES
    ]
  yield harness.Curve("gallery", "evaluation", "candidates", _SIZES, "seconds", costs)


def _write(folder: Path) -> Path:
  """Writes queries, their positives, and the distractors of each size; returns the folder."""
  rng = np.random.default_rng(0)
  centres = _unit(rng.normal(size=(_QUERIES, _DIM)))
  for name, count in (("queries", 1), ("gallery", _POSITIVES)):
    near = np.concatenate([centres + 0.09 * rng.normal(size=centres.shape) for _ in range(count)])
    np.save(folder / f"{name}.npy", _unit(near))
    lines = [f"{name}{row},{row % _QUERIES}" for row in range(len(near))]
    (folder / f"{name}.csv").write_text("\n".join(["id,label", *lines]) + "\n")
  for size in _SIZES:
    others = size - _POSITIVES * _QUERIES
    if others:
      vectors = _unit(rng.standard_normal((others, _DIM), np.float32))
      np.save(folder / f"others{size}.npy", vectors)
  return folder


def _unit(vectors: np.ndarray) -> np.ndarray:
  return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)


def _find(folder: Path, size: int) -> shard_survey.Files:
  others = folder / f"others{size}.npy"
  return shard_survey.find(
    str(folder / "queries.npy"),
    str(folder / "gallery.npy"),
    str(others) if others.exists() else None,
  )


def _evaluate(files: shard_survey.Files) -> dict[str, Any]:
  prepared = shard_survey.prepare(files)
  size, threads = shard_evaluation.plan(files, prepared, _MEMORY_GB)
  with tempfile.TemporaryDirectory(prefix="soprc_jax_benchmark_") as counts:
    shard_evaluation.count(files, prepared, Path(counts), size=size, threads=threads)
    return shard_evaluation.summarise(files, prepared, Path(counts), ks=(1, 10, 100, 1000))[0]


def _blocks(files: shard_survey.Files) -> Iterator[np.ndarray]:
  for shard in files.gallery:
    for start in range(0, shard.rows, _BLOCK):
      yield shards.read(shard, start, min(_BLOCK, shard.rows - start)).astype(np.float32)


def _asked(files: shard_survey.Files) -> np.ndarray:
  return shards.read(files.queries[0], 0, files.queries[0].rows).astype(np.float32)


def _product(files: shard_survey.Files) -> None:
  queries = _asked(files)
  for block in _blocks(files):
    queries @ block.T


def _flat(files: shard_survey.Files) -> None:
  import faiss

  index = faiss.IndexFlatIP(_DIM)
  for block in _blocks(files):
    index.add(block)
  index.search(_asked(files), min(_TOP, index.ntotal))


def _calculator(files: shard_survey.Files) -> dict[str, float]:
  """Computes the mean average precision of pytorch-metric-learning, which needs all labels."""
  from pytorch_metric_learning.distances import CosineSimilarity
  from pytorch_metric_learning.utils import accuracy_calculator, inference
  import torch

  gallery = np.concatenate(list(_blocks(files)))
  labels = np.arange(len(gallery))  # distractors are of no class of a query
  labels[: _QUERIES * _POSITIVES] %= _QUERIES
  calculator = accuracy_calculator.AccuracyCalculator(
    include=("mean_average_precision",),
    k=len(gallery),
    device=torch.device("cpu"),
    knn_func=inference.CustomKNN(CosineSimilarity(), batch_size=64),
  )
  asked = torch.from_numpy(_asked(files))
  return calculator.get_accuracy(
    asked, torch.arange(_QUERIES), torch.from_numpy(gallery), torch.from_numpy(labels)
  )
