"""Benchmarks the startup: the import, and the first finished step of a training run."""

from collections.abc import Iterator, Sequence
import functools
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

from experiments.benchmark import harness

_IMPORT_TARGET, _WARM_TARGET = 1 / 1.5, 1.0
_FLOOR = (
  "import jax, optax, flax.linen, orbax.checkpoint, grain.python, tensorboardX, ml_collections"
)
_RUN = (
  "-m",
  "experiments.train",
  "--config=glyphs",
  "--config.log.line_every=1",
  "--config.train.steps=1000",
)
_RUN_REPETITIONS = 3


def rows() -> Iterator[harness.Row]:
  """Yields the rows, from fresh processes on a warm disk.

  They are the import of the core, and the time from the training command to its first finished
  step.
  """
  seconds = harness.time_together(
    {
      name: functools.partial(_run, ["-c", code])
      for name, code in (("ours", "import soprc_jax"), ("peer", "import jax, optax"))
    }
  )
  yield harness.row(
    "startup",
    "import soprc_jax",
    "import jax, optax",
    seconds["ours"],
    seconds["peer"],
    target=_IMPORT_TARGET,
  )
  cold, warm, floor = [], [], []
  _first_step_twice()  # warms the disk cache, and renders the glyphs
  for _ in range(_RUN_REPETITIONS):
    times = _first_step_twice()
    cold.append(times[0])
    warm.append(times[1])
    began = time.perf_counter()
    _run(["-c", f"{_FLOOR}; jax.devices()"])
    floor.append(time.perf_counter() - began)
  case = "experiments.train on glyphs, command to first finished step"
  yield harness.row(
    "startup",
    f"{case}, compiled before",
    "the same run without the compilation cache",
    warm,
    cold,
    target=_WARM_TARGET,
    note="by default the cache is one folder per user",
  )
  yield harness.row(
    "startup",
    f"{case}, compiled before",
    "importing the libraries alone",
    warm,
    floor,
    target=0.0,
    note="no target: a lower bound",
  )


def growth() -> Iterator[harness.Curve]:
  """Yields nothing, since the startup does not grow with a size."""
  yield from ()


def _run(arguments: Sequence[str]) -> None:
  subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def _first_step_twice() -> tuple[float, float]:
  """Returns seconds to the first step of a run in a new folder, and of a second call."""
  with tempfile.TemporaryDirectory() as folder:
    return _first_step(Path(folder) / "run"), _first_step(Path(folder) / "run")


def _first_step(workdir: Path) -> float:
  """Returns the seconds from the command to the log line of its first step.

  The line is written once the loss is known. Then the process is killed.

  Raises:
    RuntimeError: the command ended without a step.
  """
  began = time.perf_counter()
  command = [sys.executable, *_RUN, f"--workdir={workdir}"]
  env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled")}
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
      said.append(line)
      if " step 1/" in line:
        seconds = time.perf_counter() - began
        process.kill()
        return seconds
  raise RuntimeError("the run has ended before its first step:\n" + "".join(said))
