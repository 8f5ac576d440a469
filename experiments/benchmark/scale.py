"""Benchmarks what grows with the number of classes: steps, sampler, checkpoints, evaluation."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from pathlib import Path
import tempfile
import time
from typing import Any

import jax
import numpy as np

from configs import characters
from experiments.benchmark import harness
from experiments.benchmark import metrics as metrics_benchmark
from soprc_jax import metrics
from soprc_jax.data import sampler
from soprc_jax.training import build, checkpoints, parallel
from soprc_jax.training import config as config_lib

# Rows of v, or classes. The first is the peer of the last.
_ROWS = (1_000, 10_000, 100_000, 1_000_000)
_PER_CLASS = 5
# Test images of Stanford Online Products and of iNaturalist, and the dimension of an embedding.
_QUERIES, _DIM = (60_502, 136_093), 128
_STEP_TARGET, _PRODUCT_TARGET = 0.9, 0.5


def rows() -> Iterator[harness.Row]:
  """Yields a training step by rows of v, and the evaluation of the paper's test splits."""
  few, many = _ROWS[0], _ROWS[-1]
  seconds = harness.time_together({str(count): _step(count) for count in (few, many)})
  yield harness.row(
    "scale",
    f"training step of {characters.get_config().train.batch_size} images, {many} rows of v",
    f"the same with {few} rows",
    seconds[str(many)],
    seconds[str(few)],
    target=_STEP_TARGET,
  )
  for count in _QUERIES:
    embeddings, labels = metrics_benchmark.make_embeddings(count, _DIM)
    products = metrics_benchmark.make_products(embeddings, embeddings)
    ours = functools.partial(metrics.retrieval_metrics, embeddings, labels)
    seconds = harness.time_together({"ours": ours, **products}, repetitions=1, warmup=0)
    fastest = min(products, key=lambda name: seconds[name][0])
    yield harness.row(
      "scale",
      f"retrieval_metrics, {count} queries in {count} x {_DIM}",
      fastest,
      seconds["ours"],
      seconds[fastest],
      target=_PRODUCT_TARGET,
      note="float32 similarities, not counted or ranked",
    )


def growth() -> Iterator[harness.Curve]:
  """Yields the cost of a step, of planning an epoch and of a checkpoint by number of classes."""
  times = harness.time_together({str(count): _step(count) for count in _ROWS})
  steps = [float(np.median(times[str(count)])) for count in _ROWS]
  yield harness.Curve("scale", "training step", "rows of v", _ROWS, "seconds", steps)
  plans = [harness.median_seconds(functools.partial(_plan, count)) for count in _ROWS]
  yield harness.Curve("scale", "batches of an epoch", "classes", _ROWS, "seconds", plans)
  saved = [_checkpoint(count) for count in _ROWS]
  for name, cost, costs in zip(
    ("checkpoint, save", "checkpoint, restore", "checkpoint, size"),
    ("seconds", "seconds", "bytes"),
    zip(*saved, strict=True),
    strict=True,
  ):
    yield harness.Curve("scale", name, "rows of v", _ROWS, cost, costs)


def _parts(num_rows: int) -> tuple[Any, build.Parts]:
  config = config_lib.resolve(characters.get_config())
  return config, build.make_parts(config, np.full(num_rows, _PER_CLASS))


def _step(num_rows: int) -> Callable[[], Any]:
  """Returns a function that does one training step more of the run of `configs/characters.py`."""
  config, parts = _parts(num_rows)
  rng, size, side = np.random.default_rng(0), config.train.batch_size, config.data.image_size
  labels = np.repeat(rng.permutation(num_rows)[: size // config.train.per_class], 4)
  batch = parallel.shard(
    {
      "image": rng.integers(0, 256, (size, side, side, 3), np.uint8),
      "label": labels.astype(np.int32),
      "where": np.ones(size, bool),
    }
  )
  state = parallel.replicate(build.starting_state(config, parts))
  number = 0

  def step() -> Any:
    nonlocal state, number
    number += 1
    count = {"step": parallel.same_everywhere(np.int32(number))}
    state, scalars = parts.main_step(state, batch | count)
    return state, scalars

  return step


def _plan(num_classes: int) -> sampler.BatchPlan:
  labels = np.repeat(np.arange(num_classes), _PER_CLASS)
  return sampler.ClassSampler(labels, batch_size=256, per_class=4, seed=0)(0)


def _checkpoint(num_rows: int) -> Sequence[float]:
  """Returns seconds to save and to restore a checkpoint, and its bytes."""
  config, parts = _parts(num_rows)
  state = jax.device_get(build.starting_state(config, parts))
  v = np.random.default_rng(0).random(state.opt_state[0].v.shape, np.float32)  # zeros compress
  carried = state.opt_state[0]._replace(v=v)
  state = dataclasses.replace(state, opt_state=(carried, *state.opt_state[1:]))
  with tempfile.TemporaryDirectory(prefix="soprc_jax_benchmark_") as folder:
    store = checkpoints.Store(Path(folder) / "checkpoints")
    began = time.perf_counter()
    store.save(state, {})
    saved = time.perf_counter()
    store.restore(build.abstract_state(config, parts))
    restored = time.perf_counter()
    store.close()
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
  return saved - began, restored - saved, size
