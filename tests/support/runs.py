"""Runs small trainings for the tests of training, command line and resuming.

They run in this process or in others.
"""

import atexit
import functools
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import filelock
import jax
import numpy as np

from soprc_jax.training import build, checkpoints, run_log, v_history, workdir
from soprc_jax.training import config as config_lib

ROOT = pathlib.Path(__file__).parents[2]
GLYPHS = str(ROOT / "configs" / "glyphs.py")

# A model and splits so small that start-up and compilation take nearly all the time.
TINY = {
  "model.width": 4,
  "model.embedding_dim": 16,
  "data.image_size": 16,
  "data.train_share": 0.96,
  "data.val_share": 0.02,
  "loss.num_points": 20,
  "train.batch_size": 16,
  "eval.image_size": 16,
  "eval.every": 3,
  "eval.ks": (1, 10),
  "checkpoint.every": 4,
}


def tiny_config(*, steps=18, warmup_steps=6, **values):
  """Returns the resolved config of a tiny run on glyphs; keys with dots set other values."""
  config = runpy.run_path(GLYPHS)["get_config"]("")
  config.update_from_flattened_dict(
    TINY | {"train.steps": steps, "warmup.steps": warmup_steps} | values
  )
  return config_lib.resolve(config)


def tiny_comparison(**values):
  """Returns ``config.compare`` of the tiny run, with some values."""
  settings = runpy.run_path(GLYPHS)["get_config"]("").compare
  settings.update(values)
  return settings


def tiny_flags(folder, *, steps=18, warmup_steps=6, **values):
  """Returns the flags of the same run."""
  values = TINY | {"train.steps": steps, "warmup.steps": warmup_steps} | values
  return [
    f"--config={GLYPHS}",
    f"--workdir={folder}",
    *(f"--config.{key}={value}" for key, value in values.items()),
  ]


def environment(devices=1, **extra):
  """Returns the environment of a user with ``devices`` CPU devices. It does not depend on that of
  the test session.
  """
  kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  flags = [f"--xla_force_host_platform_device_count={devices}"]
  flags += [flag for flag in os.environ["XLA_FLAGS"].split() if "emitters" in flag]
  return kept | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support' / 'offline'}",
    "XLA_FLAGS": " ".join(flags),
    **extra,
  }


@functools.cache
def _server():
  """Returns the process of forks.py, which ends with this one."""
  process = subprocess.Popen(
    [sys.executable, str(pathlib.Path(__file__).with_name("forks.py"))],
    env=environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  atexit.register(process.communicate)  # closes its standard input and waits
  return process


def call(module, *flags, cwd=ROOT, env=None):
  """Runs ``python -m module`` to its end.

  Without ``env`` it runs in a fork of a process that has imported the libraries, which saves
  seconds. The environment is then that of the first call.
  """
  if env:
    command = [sys.executable, "-m", module, *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
  server = _server()
  with tempfile.TemporaryDirectory() as folder:
    outputs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
    for path in outputs:
      path.touch()
    request = [module, [str(flag) for flag in flags], str(cwd), *map(str, outputs)]
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    status = int(server.stdout.readline())
    return subprocess.CompletedProcess(request, status, *(path.read_text() for path in outputs))


# Printed before a value by a program of a test, since libraries may print other lines around it.
MARK = "value of the test: "


def value(stdout):
  """Returns what a program has printed after `MARK`; other output is ignored."""
  (text,) = [text.splitlines()[0] for text in stdout.split(MARK)[1:]]
  return json.loads(text)


def free_port():
  """Returns a port that nothing on this machine listens on."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


class Finished(NamedTuple):
  """Holds a run that nothing interrupted."""

  workdir: pathlib.Path
  seconds: float
  stdout: str
  stderr: str


@functools.cache
def finished():
  """Returns the tiny run, uninterrupted, shared by all tests of all workers. They must not change
  its folder.
  """
  folder = pathlib.Path(os.environ["SOPRC_JAX_TESTS"])
  kept = folder / "finished.json"
  with filelock.FileLock(folder / "finished.lock"):
    if not kept.exists():
      began = time.perf_counter()
      done = call("experiments.train", *tiny_flags(folder / "run"), env=environment())
      assert done.returncode == 0, done.stderr
      kept.write_text(json.dumps([time.perf_counter() - began, done.stdout, done.stderr]))
  return Finished(folder / "run", *json.loads(kept.read_text()))


def start_and_kill(flags, due, *, devices=1):
  """Starts ``experiments.train`` and sends SIGKILL as soon as ``due(seconds)``. Returns False if it
  finished before.
  """
  with tempfile.TemporaryFile("w+") as output:
    process = subprocess.Popen(
      [sys.executable, "-m", "experiments.train", *flags],
      cwd=ROOT,
      env=environment(devices),
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    began = time.perf_counter()
    while process.poll() is None:
      if due(time.perf_counter() - began):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return process.returncode == -signal.SIGKILL
      time.sleep(0.005)
    output.seek(0)
    assert process.returncode == 0, output.read()
    return False


def metrics(folder):
  """Returns the lines of metrics.jsonl without the wall-clock fields, and those of v.jsonl. They
  are text, so that a single bit shows.
  """
  lines = [*workdir.read_metrics(folder), *workdir.read_lines(folder / v_history.FILE)]
  return [
    repr({name: value for name, value in line.items() if name not in run_log.CLOCK_FIELDS})
    for line in lines
  ]


def states(folder, **values):
  """Returns the states in the newest and the best checkpoint of a tiny run. They have all leaves by
  path, including v.
  """
  config = tiny_config(**values)
  parts = build.make_parts(config, build.make_data(config).class_counts())
  like = build.abstract_state(config, parts)
  found = {}
  for kind in (checkpoints.NEWEST, checkpoints.BEST):
    store = checkpoints.Store(folder / kind, keep=2)
    state, _ = store.restore(like)
    store.close()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      found[kind + jax.tree_util.keystr(path)] = np.asarray(leaf)
  return found
