"""Benchmarks the whole training step of a ResNet-50 on a CPU against torch.

The step has frozen batch norm, forward pass, SOPRC, backward pass and SGD.

Each image size is measured in a separate process: `malloc.keep_pages` must come before jax and
torch start threads, and it affects both.
"""

from collections.abc import Iterator
import functools
import json
import subprocess
import sys
from typing import Any

from experiments.benchmark.harness import REPETITIONS, Curve, Row, compare, median_seconds

# Image size -> batch: a step of about two seconds.
BATCHES = {64: 128, 224: 16}
_CURVE_BATCHES = (8, 16, 32, 64)
_CURVE_SIZES = (32, 64, 128, 256)
_CURVE_BATCH = 8
_TARGET = 1.0


def rows() -> Iterator[Row]:
  """Yields rows at 64 and 224 pixels against torch eager and torch.compile.

  Both use channels_last.
  """
  for size, batch_size in BATCHES.items():
    for fields in _in_a_process("rows", size, batch_size):
      yield Row(*fields)


def growth() -> Iterator[Curve]:
  """Yields the seconds of our step by the batch at 64 pixels, and by the pixels at batch 8."""
  for fields in _in_a_process("growth"):
    yield Curve(*fields)


def _in_a_process(*arguments: Any) -> Iterator[list[Any]]:
  """Yields the fields of a row or a curve, one per line that ``_main`` prints there.

  Raises:
    ModuleNotFoundError: torch is missing.
    CalledProcessError: the measurement failed; its own message is on stderr.
  """
  import torch  # noqa: F401

  command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    for line in process.stdout:
      yield json.loads(line)
  if process.returncode:
    raise subprocess.CalledProcessError(process.returncode, command)


def _main(kind: str, *arguments: str) -> None:
  from experiments import malloc

  malloc.keep_pages()
  if kind == "rows":
    results: Any = _measure(*map(int, arguments))
  else:
    results = _curves()
  for result in results:
    print(json.dumps(result), flush=True)


def _measure(image_size: int, batch_size: int) -> list[Row]:
  import os

  import torch

  from experiments.benchmark import train_peer

  torch.set_num_threads(os.cpu_count() or 1)
  ours = OurStep(image_size, batch_size)
  peers = {}
  for name, compile_net in (("torch eager", lambda net: net), ("torch.compile", torch.compile)):
    net = compile_net(train_peer.embedder(ours.variables))
    peers[f"{name} {torch.__version__}"] = train_peer.Step(
      net, ours.images, ours.labels, ours.per_class, ours.priors, ours.config
    )
  _check(ours, peers)
  case = f"ResNet-50, SOPRC, SGD, {batch_size} images of {image_size} pixels"
  return compare("train", case, ours=ours, peers=peers, target=_TARGET, warmup=1)


def _check(ours: "OurStep", peers: Any) -> None:
  """Raises an AssertionError if the losses of the first two steps differ.

  The second loss includes the first update.
  """
  import numpy as np

  for tolerance in (1e-4, 1e-3):
    loss = float(ours()["loss"][0])
    for name, peer in peers.items():
      np.testing.assert_allclose(peer(), loss, rtol=tolerance, err_msg=name)


class OurStep:
  """Our compiled step with its state and a batch of the embedded data set.

  Each call takes a step and returns its metrics.

  Args:
    image_size: side of the images in pixels.
    batch_size: number of images.
    dtype: type that the model computes in.

  Attributes:
    flops: floating-point operations of a step on each device, by XLA.
  """

  def __init__(self, image_size: int, batch_size: int, *, dtype: str = "float32"):
    import jax
    import numpy as np

    from soprc_jax.training import build, config, parallel

    settings = config.default_config()
    settings.data.update({"image_size": image_size, "augmentation": "affine", "flip": False})
    settings.train.batch_size = batch_size
    settings.model.dtype = dtype
    settings.optim.learning_rate = 1e-4
    self.config = config.resolve(settings)
    data, self.per_class = build.make_data(self.config), self.config.train.per_class
    parts = build.make_parts(self.config, data.class_counts())
    state = build.starting_state(self.config, parts)
    self.variables = jax.tree.map(
      np.asarray, {"params": state.params, "batch_stats": state.batch_stats}
    )
    counts = data.class_counts()
    self.priors = (self.config.loss.prior.value * counts / counts.max()).astype(np.float32)
    batch = dict(build.make_batches(self.config, data)[0])
    batch = {key: batch[key] for key in ("image", "label", "where")}
    self.images, self.labels = batch["image"], batch["label"]
    self._batch = parallel.shard(batch)
    self._state = parallel.replicate(state)
    self._compiled, _ = parallel.compile_ahead(parts.main_step, self._state, self._batch)
    self.flops = float(self._compiled.cost_analysis()["flops"])  # type: ignore[attr-defined]

  def __call__(self) -> Any:
    self._state, metrics = self._compiled(self._state, self._batch)
    return metrics


def _curves() -> Iterator[Curve]:
  batches = [_seconds(64, size) for size in _CURVE_BATCHES]
  yield Curve("train", "ResNet-50 step, 64 pixels", "images", _CURVE_BATCHES, "seconds", batches)
  pixels = [_seconds(size, _CURVE_BATCH) for size in _CURVE_SIZES]
  areas = [float(size**2) for size in _CURVE_SIZES]
  yield Curve(
    "train",
    f"ResNet-50 step, {_CURVE_BATCH} images",
    "pixels of an image",
    areas,
    "seconds",
    pixels,
  )


@functools.cache
def _seconds(image_size: int, batch_size: int) -> float:
  """Returns the median seconds of our step."""
  return median_seconds(OurStep(image_size, batch_size), repetitions=REPETITIONS)


if __name__ == "__main__":
  _main(*sys.argv[1:])
