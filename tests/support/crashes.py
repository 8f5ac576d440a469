"""Starts training processes and stops them at chosen moments.

What is left must resume to the result of an uninterrupted run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import runs

from soprc_jax.training import checkpoints

CHILD = str(runs.ROOT / "tests" / "support" / "crash_child.py")
# Phase (crash_child.PHASES) -> the maximum number of times it begins in the tiny run, and the
# maximum seconds from its beginning to the kill.
MOMENTS = {
  "starting": (1, 1.0),
  "compiling": (1, 8.0),
  "syncing": (12, 0.01),
  "after syncing": (12, 0.05),
  "evaluating": (12, 0.3),
  "after evaluating": (11, 0.3),
  "saving": (7, 0.15),
  "noting digests": (7, 0.01),
  "after saving": (7, 0.02),
  "testing": (1, 1.5),
}


class Moment(NamedTuple):
  """Specifies the n-th beginning of a phase, and the seconds after it."""

  phase: str
  nth: int
  delay: float


def draw_moment(rng, phase):
  """Draws a moment in a phase, uniform in time within it."""
  count, longest = MOMENTS[phase]
  return Moment(phase, int(rng.integers(1, count + 1)), float(rng.uniform(0, longest)))


def stop_at(flags, moment, folder, *, number=signal.SIGKILL):
  """Starts a run and sends it a signal at a moment. Returns its output and its return code, 0 if it
  finished before.
  """
  phases = folder.with_name(folder.name + ".phases")
  phases.write_text("")
  with open(folder.with_name(folder.name + ".output"), "w+") as output:
    process = subprocess.Popen(
      [sys.executable, CHILD, *flags],
      cwd=runs.ROOT,
      env=runs.environment(PHASES=str(phases)),
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    while (
      process.poll() is None and phases.read_text().split("\n").count(moment.phase) < moment.nth
    ):
      time.sleep(0.002)
    if process.poll() is None:
      time.sleep(moment.delay)
      os.killpg(process.pid, number)
    process.wait()
    output.seek(0)
    return process.returncode, output.read()


def left(folder):
  """Returns what a stopped run has left: checkpoint steps, half-written ones, lines in its log."""
  newest, log = folder / checkpoints.NEWEST, folder / "metrics.jsonl"
  names = [
    path.name
    for kind in (newest, folder / checkpoints.BEST)
    if kind.is_dir()
    for path in kind.iterdir()
  ]
  whole = (
    sorted(int(path.name) for path in newest.glob("*") if path.name.isdigit())
    if newest.is_dir()
    else []
  )
  lines = len(log.read_text().splitlines()) if log.exists() else 0
  return {
    "checkpoints": whole,
    "half": [name for name in names if not name.isdigit()],
    "lines": lines,
  }


def assert_same_run(folder, other):
  """Compares everything but wall-clock times. This covers parameters, optimizer, v, val and test
  metrics, baselines, and every line of the log.
  """
  assert runs.metrics(folder) == runs.metrics(other)
  got, want = runs.states(folder), runs.states(other)
  assert got.keys() == want.keys()
  assert any(".v" in path for path in want)
  differ = [
    path
    for path in want
    if got[path].dtype != want[path].dtype or got[path].tobytes() != want[path].tobytes()
  ]
  assert differ == []
  results, wanted = (json.loads((path / "results.json").read_text()) for path in (folder, other))
  for key in ("steps", "tested_step", "val", "test", "baselines", "config"):
    assert results[key] == wanted[key]
  with np.load(folder / "pr_curve.npz") as curve, np.load(other / "pr_curve.npz") as wanted_curve:
    for key in wanted_curve.files:
      np.testing.assert_array_equal(curve[key], wanted_curve[key])
