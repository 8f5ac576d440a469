r"""Checks and measures soprc_jax on the accelerator of this machine, for `.ci/gpu_check`.

.ci/gpu_check [--table=TABLE.md]

Checks: loss, gradient and v equal those of the CPU; pmap and jax.shard_map give the same steps;
retrieval metrics have the bits of the CPU; a resumed run has the bits of one without a stop.
Measures: a step of ResNet-50 by precision, next to torch.compile if torch is installed; the loss by
algorithm; the evaluation of 60,502 queries. It takes less than ten minutes on one H100 or H200. On
a CPU the sizes are small, to see that it works, and the CPU is compared with itself. The table goes
to the standard output; a relative --table is relative to the repository. The exit
status is 1 if a check fails.
"""

from collections.abc import Callable, Iterator
import functools
import importlib.util
import logging
from pathlib import Path
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple
from unittest import mock

from absl import app
from absl import flags as absl_flags
import jax
import jax.numpy as jnp
import numpy as np

from configs import glyphs
from experiments import flags
from experiments.benchmark import harness
from experiments.benchmark import loss as loss_benchmark
from experiments.benchmark import metrics as metrics_benchmark
from experiments.benchmark import train as train_benchmark
from soprc_jax import batch_loss, estimators, lists, metrics, tracking
from soprc_jax._internal import text_table
from soprc_jax.training import build, checkpoints, loop, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

_TABLE = absl_flags.DEFINE_string("table", None, "Markdown file for the table; must not exist.")
_log = logging.getLogger("soprc_jax.benchmark")

# Dense teraflops a second by the vendor's data sheet: float32, TF32, bfloat16.
_PEAKS = {"H100": (67, 495, 990), "H200": (67, 495, 990), "A100": (19.5, 156, 312)}
_PRECISIONS = {
  "float32": ("highest", "float32"),
  "TF32": ("tensorfloat32", "float32"),
  "bfloat16": ("tensorfloat32", "bfloat16"),
}
# Largest relative difference of sums in another order, and of whole steps.
_CLOSE, _CLOSE_STEPS = 2e-5, 1e-4
_VERDICTS = {None: "", True: "passed", False: "**failed**"}
# Class count and width of the batch of the parity check.
_CLASSES, _DIM = 56, 128


class Result(NamedTuple):
  """One line of the table. ``passed`` is None for a measurement."""

  what: str
  value: str
  passed: bool | None = None


class Sizes(NamedTuple):
  """Sizes of the measurements: images and pixels of a step, batches of the loss, queries."""

  images: int
  pixels: int
  batches: tuple[int, ...]
  queries: int


_SMALL, _LARGE = Sizes(8, 64, (224,), 3_000), Sizes(224, 224, (224, 1024, 4096), 60_502)


def main(argv: list[str]) -> None:
  flags.require(argv, "--table=TABLE.md")
  with flags.errors_as_messages():
    out = Path(_TABLE.value) if _TABLE.value else None
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
      raise ValueError(f"--table={out} exists, or its folder does not: choose a new file")
    results = list(check(_SMALL if jax.default_backend() == "cpu" else _LARGE))
  table = text_table.markdown(
    ["what", "value", ""],
    [[one.what, one.value, _VERDICTS[one.passed]] for one in results],
  )
  text = f"{parallel.describe()}, {time.strftime('%Y-%m-%d')}\n\n{table}\n"
  print(text)
  if out is not None:
    workdir_lib.write_atomically(out, text)
  if failed := [one.what for one in results if one.passed is False]:
    sys.exit(f"Error: failed: {'; '.join(failed)}")


def check(sizes: Sizes) -> Iterator[Result]:
  """Yields all checks and measurements, logged as they come."""
  for part in (_parity, _mappings, _metrics, _resume, _steps, _losses, _evaluation):
    began = time.perf_counter()
    try:
      for result in part(sizes):
        _log.info("%s: %s", result.what, result.value)
        yield result
    except Exception as error:  # the other parts still have something to say
      _log.exception("%s failed", part.__name__.strip("_"))
      message = str(error).partition("\n")[0]
      yield Result(part.__name__.strip("_"), f"{type(error).__name__}: {message}", False)
    _log.info("%s took %.0f s.", part.__name__.strip("_"), time.perf_counter() - began)


def _parity(sizes: Sizes) -> Iterator[Result]:
  """Compares loss, gradient and v of two steps with those of the CPU."""
  del sizes
  labels = np.repeat(np.arange(_CLASSES), 4)
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(_CLASSES, _DIM))[labels] + rng.normal(size=(len(labels), _DIM))
  vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

  def steps() -> Any:
    tracker = tracking.score_ema(_CLASSES, 100, 0.1, bounds=(-1, 1))
    state = tracker.init(None)

    @jax.jit
    def step(state: Any, embeddings: jax.Array) -> Any:
      loss_fn = functools.partial(
        batch_loss.retrieval_loss, labels=labels, tracker=tracker, opt_state=state, prior=0.01
      )
      (loss, args), slopes = jax.value_and_grad(loss_fn, has_aux=True)(embeddings)
      return loss, slopes, tracker.update(None, state, **args)[1]

    first = step(state, jnp.asarray(vectors))
    return jax.device_get((first, step(first[2], jnp.asarray(vectors[::-1].copy()))))

  found = steps()
  with jax.default_device(jax.devices("cpu")[0]):
    want = steps()
  for name, pick in (("loss", 0), ("gradient", 1), ("v", 2)):
    error = max(_difference(one[pick], other[pick]) for one, other in zip(found, want, strict=True))
    yield Result(f"{name} of two steps, difference to the CPU", f"{error:.1e}", error <= _CLOSE)


def _difference(found: Any, want: Any) -> float:
  """Returns the largest difference of two trees, relative to the largest number of each leaf."""
  worst = 0.0
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
    error = np.max(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)))
    worst = max(worst, float(error) / max(float(np.max(np.abs(other))), 1e-30))
  return worst


def _mappings(sizes: Sizes) -> Iterator[Result]:
  """Compares three steps under pmap and under jax.shard_map, on all devices."""
  del sizes
  unresolved = glyphs.get_config("smoke")
  unresolved.optim.name = "sgd"  # Adam's first steps depend on the signs of small numbers
  config = config_lib.resolve(unresolved)
  data = build.make_data(config)
  batches = build.make_batches(config, data)
  # The step itself, with collectives on a single device too.
  with mock.patch.multiple(
    parallel, compile_step=lambda step: step, axis_name=lambda: parallel.AXIS_NAME
  ):
    raw = build.make_parts(config, data.class_counts())
  parts = build.make_parts(config, data.class_counts())
  start = build.starting_state(config, parts)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), (parallel.AXIS_NAME,))
  everywhere, own = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(parallel.AXIS_NAME)
  in_specs, out_specs = (everywhere, own), (everywhere, everywhere)
  mapped = jax.jit(jax.shard_map(raw.main_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
  one, other = parallel.replicate(start), start
  for number in range(3):
    batch = {key: batches[number][key] for key in ("image", "label", "where")}
    one, _ = parts.main_step(one, parallel.shard(batch))
    other, _ = mapped(other, batch)
  error = _difference(parallel.unreplicate(one).params, jax.device_get(other).params)
  yield Result(
    f"pmap and shard_map on {jax.device_count()} devices, weights after three steps",
    f"{error:.1e}",
    error <= _CLOSE_STEPS,
  )


def _metrics(sizes: Sizes) -> Iterator[Result]:
  """Compares retrieval metrics with those of the CPU, which must have the same bits."""
  del sizes
  embeddings, labels = metrics_benchmark.make_embeddings(3_000, _DIM)
  found = metrics.retrieval_metrics(embeddings, labels)
  with jax.default_device(jax.devices("cpu")[0]):
    want = metrics.retrieval_metrics(embeddings, labels)
  yield Result(
    "retrieval metrics of 3,000 queries, bits of the CPU", f"{found['mAUPRC']:.6f}", found == want
  )


def _resume(sizes: Sizes) -> Iterator[Result]:
  """Resumes a finished run of four steps from its checkpoint of step 2."""
  del sizes
  small = glyphs.get_config("smoke")
  small.data.update({"train_share": 0.96, "val_share": 0.02})
  config = config_lib.resolve(small)
  parts = build.make_parts(config, build.make_data(config).class_counts())

  def weights(folder: Path) -> Any:
    store = checkpoints.Store(folder / checkpoints.NEWEST, keep=None)
    state, _ = store.restore(build.abstract_state(config, parts))
    store.close()
    return state

  with tempfile.TemporaryDirectory(prefix="soprc_jax_device_") as folder:
    workdir = Path(folder) / "run"
    whole = loop.train(config, workdir)["test"]
    want = weights(workdir)
    shutil.rmtree(workdir / checkpoints.NEWEST / "4")
    (workdir / workdir_lib.RESULTS).unlink()
    resumed = loop.train(config, workdir)["test"]
    same = jax.tree.all(jax.tree.map(np.array_equal, weights(workdir), want))
  yield Result(
    "run resumed from step 2 of 4, bits of the state and the test", "", same and whole == resumed
  )


def _steps(sizes: Sizes) -> Iterator[Result]:
  """Times a step of ResNet-50 by precision, next to torch."""
  kind = jax.devices()[0].device_kind
  peaks = next((peak for name, peak in _PEAKS.items() if name in kind), None)
  for place, (name, (precision, dtype)) in enumerate(_PRECISIONS.items()):
    if name == "TF32" and jax.default_backend() == "cpu":
      continue
    with jax.default_matmul_precision(precision):
      step = train_benchmark.OurStep(sizes.pixels, sizes.images, dtype=dtype)
      seconds = _seconds(step)
    rate = step.flops / seconds / 1e12
    share = f", {rate / peaks[place]:.0%} of {peaks[place]} TFLOP/s" if peaks else ""
    peer = _torch_seconds(step, name)
    beside = f"; torch.compile {1e3 * peer:.1f} ms" if peer else ""
    yield Result(
      f"step of ResNet-50, {sizes.images} images of {sizes.pixels} pixels, {name}",
      f"{1e3 * seconds:.1f} ms, {rate:.2f} TFLOP/s{share}{beside}",
    )


def _torch_seconds(step: train_benchmark.OurStep, precision: str) -> float | None:
  """Returns the seconds of the same step by torch.compile; None without torch on this device."""
  if importlib.util.find_spec("torch") is None or precision == "bfloat16":
    return None
  import torch

  from experiments.benchmark import train_peer

  on_cpu = jax.default_backend() == "cpu"
  if not on_cpu and not torch.cuda.is_available():
    return None
  torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
  torch.backends.cudnn.allow_tf32 = precision != "float32"
  with torch.device("cpu" if on_cpu else "cuda"):
    net = torch.compile(train_peer.embedder(step.variables))
    peer = train_peer.Step(net, step.images, step.labels, step.per_class, step.priors, step.config)
    return _seconds(peer)


def _losses(sizes: Sizes) -> Iterator[Result]:
  """Times value and gradient of SOPRC with the sums over all pairs, and by sorting."""

  def risk(
    embeddings: jax.Array, batch: loss_benchmark.Batch, algorithm: estimators.Algorithm
  ) -> jax.Array:
    found = lists.retrieval_lists(
      embeddings, batch.labels, max_positives=loss_benchmark.PER_CLASS - 1
    )
    prior, v = loss_benchmark.PRIOR, batch.v
    scores = found.positive_scores, found.negative_scores
    return estimators.soprc_loss(*scores, v, prior=prior, algorithm=algorithm, **found.masks)

  gradient = jax.jit(jax.value_and_grad(risk), static_argnums=2)
  for size in sizes.batches:
    batch = loss_benchmark.make_batch(size)
    times = {
      algorithm: _seconds(functools.partial(gradient, batch.embeddings, batch, algorithm))
      for algorithm in estimators.ALGORITHMS
    }
    shown = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    yield Result(f"SOPRC and its gradient, {size} x {loss_benchmark.DIM}", shown)


def _evaluation(sizes: Sizes) -> Iterator[Result]:
  embeddings, labels = metrics_benchmark.make_embeddings(sizes.queries, _DIM)
  run = functools.partial(metrics.retrieval_metrics, embeddings, labels)
  run()
  began = time.perf_counter()
  run()
  seconds = time.perf_counter() - began
  yield Result(f"retrieval metrics of {sizes.queries} queries", f"{seconds:.1f} s")


def _seconds(function: Callable[[], Any]) -> float:
  return statistics.median(
    harness.time_together({"ours": function}, repetitions=5, warmup=2)["ours"]
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
