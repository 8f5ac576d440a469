"""Benchmarks the input pipeline: JPEG files to augmented batches, against torchvision's loader.

Also measures how long a training run waits for its images.
"""

from collections.abc import Iterator
import itertools
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from PIL import Image

from experiments.benchmark import harness
from soprc_jax.data import image_folder, pipeline, sampler, sources
from soprc_jax.training import workdir

_CLASSES, _PER_CLASS = 24, 8
_SIDES = (500, 1400)
_SIZE, _BATCH = 224, 16
_TIMED, _PREFETCH = 16, 4
_WORKERS = (0, 1, 2)
_TARGETS = {0: 1.0, 1: 1.0, 2: 1.0}
_WAIT_TARGET = 0.01
_WAIT_STEPS = 100
_CURVE_IMAGES = (64, 128, 256, 512)


def rows() -> Iterator[harness.Row]:
  """Yields the rows: random resized crops to 224 pixels with 0, 1 and 2 workers.

  The last row is the share of a glyphs run that is spent waiting.
  """
  with tempfile.TemporaryDirectory() as folder:
    _write_images(Path(folder))
    for workers in _WORKERS:
      yield _loaders(folder, workers)
  yield _waiting()


def growth() -> Iterator[harness.Curve]:
  """Yields the seconds by number of images, loaded in threads."""
  with tempfile.TemporaryDirectory() as folder:
    _write_images(Path(folder))
    costs = []
    for number in _CURVE_IMAGES:
      stream = _ours(folder, workers=0, num_steps=number // _BATCH)
      began = time.perf_counter()
      for _ in stream:
        pass
      costs.append(time.perf_counter() - began)
  yield harness.Curve("input", "JPEG to batches", "images", _CURVE_IMAGES, "seconds", costs)


def _write_images(folder: Path) -> None:
  """Writes JPEG files of smooth shapes with some grain, one subfolder per class.

  They are the same each time.
  """
  rng = np.random.default_rng(0)
  for label, number in itertools.product(range(_CLASSES), range(_PER_CLASS)):
    width, height = (int(side) for side in rng.integers(*_SIDES, 2))
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(scale=8.0, size=(height, width, 1)).astype(np.int16)
    path = folder / f"{label:02}" / f"{number}.jpg"
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8)).save(path, quality=90)


def _loaders(folder: str, workers: int) -> harness.Row:
  torchvision = _import_torchvision()
  import torch

  # Batches that may have been loaded while the other loader was timed.
  drained = _PREFETCH + 2 + 2 * _PREFETCH * workers
  steps = (drained + _TIMED) * (harness.REPETITIONS + 1)
  streams = {
    "ours": _ours(folder, workers, steps),
    "peer": _theirs(torch, torchvision, folder, workers, steps),
  }
  seconds: dict[str, list[float]] = {name: [] for name in streams}
  for _ in range(harness.REPETITIONS):
    for name, stream in streams.items():
      for _ in range(drained):
        next(stream)
      began = time.perf_counter()
      for _ in range(_TIMED):
        images = next(stream)
      seconds[name].append(time.perf_counter() - began)
      if images.shape not in ((_BATCH, _SIZE, _SIZE, 3), (_BATCH, 3, _SIZE, _SIZE)):
        raise AssertionError(f"{name} gives batches of shape {images.shape}")
  del streams
  rates = (
    _BATCH * _TIMED / float(np.median(seconds[name])) / (os.cpu_count() or 1) for name in seconds
  )
  return harness.row(
    "input",
    f"{_BATCH * _TIMED} JPEG of {_SIDES[0]} to {_SIDES[1]} pixels, random resized crop to {_SIZE}, "
    f"{workers} workers",
    f"torchvision {torchvision.__version__}, DataLoader of {workers} workers",
    seconds["ours"],
    seconds["peer"],
    target=_TARGETS[workers],
    note="{:.0f} and {:.0f} images per second and core".format(*rates),
  )


def _ours(folder: str, workers: int, num_steps: int) -> Iterator[np.ndarray]:
  source = image_folder.load(folder)
  plan = sampler.ClassSampler(source.labels, batch_size=_BATCH, per_class=4, seed=0)
  batches = pipeline.TrainBatches(
    source,
    plan,
    rows=sources.label_rows(source.labels),
    augmentation="resized_crop",
    image_size=_SIZE,
    seed=0,
    num_steps=num_steps,
  )
  for batch in pipeline.iterate(batches, start=0, workers=workers, prefetch=_PREFETCH):
    yield batch["image"]


def _theirs(
  torch: Any, torchvision: Any, folder: str, workers: int, num_steps: int
) -> Iterator[Any]:
  transforms = torchvision.transforms
  # The same crops: 20% to 100% of the area.
  crop = transforms.RandomResizedCrop(_SIZE, scale=(0.2, 1.0))
  transform = transforms.Compose(
    [crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
  )
  data = torchvision.datasets.ImageFolder(folder, transform)
  chosen = torch.utils.data.RandomSampler(data, replacement=True, num_samples=num_steps * _BATCH)
  options = {"prefetch_factor": _PREFETCH} if workers else {}
  for images, _ in torch.utils.data.DataLoader(
    data, _BATCH, sampler=chosen, num_workers=workers, **options
  ):
    yield images


def _import_torchvision() -> Any:
  """Imports torchvision, also if it was built for another torch.

  Its compiled operators are missing then, but are not needed here.
  """
  import torch

  library = torch.library.Library("torchvision", "FRAGMENT")
  while True:
    try:
      import torchvision
    except RuntimeError as error:
      missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
      if missing is None:
        raise
      library.define(f"{missing[1]}(Tensor a) -> Tensor")
      for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    else:
      return torchvision


def _waiting() -> harness.Row:
  """Returns the row of a short run of configs/glyphs.py, from times in its metrics.jsonl."""
  with tempfile.TemporaryDirectory() as folder:
    command = [
      "-m",
      "experiments.train",
      "--config=glyphs",
      f"--workdir={folder}/run",
      "--config.eval.every=0",
    ]
    command += [f"--config.train.steps={_WAIT_STEPS}", "--config.checkpoint.every=0"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    lines = list(workdir.read_metrics(Path(folder) / "run"))
  waited, total = (sum(line[name] for line in lines) for name in ("data_wait", "seconds"))
  return harness.row(
    "input",
    f"waiting for data in {_WAIT_STEPS} steps of glyphs",
    f"{_WAIT_TARGET:.0%} of the time of the steps",
    [waited],
    [_WAIT_TARGET * total],
    target=1.0,
    note=f"{waited / total:.2%} of {total:.0f} s",
  )
