"""Runs the examples of docs/howto/gallery.md that embed shards: a shell, GNU parallel, SLURM, Ray.

An example is skipped where its engine is missing. SLURM itself does not run: its script does, with
the variable that `sbatch --array` sets.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import networks
import pytest
import runs

_PAGE = (runs.ROOT / "docs" / "howto" / "gallery.md").read_text()
_COUNT = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture
def place(made, tmp_path):
  """Returns a folder with the run, the list and the command of the examples."""
  root, run = made
  shutil.copytree(run, tmp_path / "runs" / "mine")
  names = [f"{path},{path.parent.name}" for path in sorted(root.rglob("*.png"))]
  (tmp_path / "list.csv").write_text("\n".join(["path,label", *names]) + "\n")
  command = tmp_path / "bin" / "soprc"
  command.parent.mkdir()
  command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m soprc_jax.cli "$@"\n')
  command.chmod(0o755)
  return tmp_path


def _block(language, text):
  """Returns the one code block of a language that has a text, with a few shards for a hundred."""
  blocks = re.findall(rf"^```{language}\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE)
  (block,) = (block for block in blocks if text in block)
  for old, new in (("/100", f"/{_COUNT}"), ("0 99", f"0 {_COUNT - 1}"), ("(100)", f"({_COUNT})")):
    block = block.replace(old, new)
  return block


def _run(place, *command, **extra):
  env = runs.environment(**extra)
  env["PATH"] = f"{place / 'bin'}{os.pathsep}{env['PATH']}"
  done = subprocess.run(
    command, cwd=place, env=env, capture_output=True, text=True, timeout=900, check=False
  )
  assert done.returncode == 0, done.stderr


def _assert_embedded(place):
  names = [f"shard-{number:05d}-of-{_COUNT:05d}.npy" for number in range(_COUNT)]
  assert sorted(path.name for path in (place / "shards").glob("*.npy")) == names


def test_a_shell(place):
  _run(place, "bash", "-ec", _block("bash", "for i in $(seq 0 99); do soprc embed"))
  _assert_embedded(place)


def test_gnu_parallel(place):
  found = shutil.which("parallel")
  version = found and subprocess.run([found, "--version"], capture_output=True, text=True).stdout
  if not version or "GNU parallel" not in version:
    pytest.skip("GNU parallel is not installed")
  _run(place, "bash", "-ec", _block("bash", "parallel -j 2"), HOME=str(place))
  _assert_embedded(place)


def test_the_script_of_a_slurm_array(place):
  script = _block("bash", "#SBATCH --array=0-99")
  (place / "embed.sh").write_text(script)
  for number in range(_COUNT):
    _run(place, "bash", "-e", "embed.sh", SLURM_ARRAY_TASK_ID=str(number))
  _assert_embedded(place)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray")
def test_ray(place):
  (place / "embed.py").write_text(_block("python", "import ray"))
  # Ray asks for the address of this machine by a socket to another one.
  paths = [path for path in sys.path if path and "offline" not in path]
  extra = {"PYTHONPATH": os.pathsep.join([str(runs.ROOT), *paths]), "RAY_USAGE_STATS_ENABLED": "0"}
  _run(place, sys.executable, "embed.py", **extra)
  _assert_embedded(place)
