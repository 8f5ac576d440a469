"""Tests that what pip installs works outside the repository.

The wheel is complete, and the command (soprc_jax/cli.py) and the README's example run from it.
"""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
import runs

pytest.importorskip("setuptools", minversion="70.1")  # can build wheels itself since then


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """Returns a folder with only the unpacked wheel."""
  folder = tmp_path_factory.mktemp("wheel")
  build = [
    sys.executable,
    "-c",
    "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))",
  ]
  # setuptools writes next to its sources, so only files known to git are copied.
  sources = folder / "sources"
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=runs.ROOT, capture_output=True, check=False
  )
  names = [
    name for name in listed.stdout.decode().split("\0") if name and (runs.ROOT / name).is_file()
  ]
  if not names:
    pytest.skip("not a clone: git lists no files")
  for name in names:
    (sources / name).parent.mkdir(parents=True, exist_ok=True)
    (sources / name).write_bytes((runs.ROOT / name).read_bytes())
  done = subprocess.run(
    [*build, str(folder)], cwd=sources, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  (wheel,) = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "installed")
  return folder / "installed"


def _python(installed, code, cwd):
  env = runs.environment() | {"PYTHONPATH": str(installed)}
  return subprocess.run(
    [sys.executable, "-P", "-c", code],
    cwd=cwd,
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_all_modules_and_data_are_in_it(installed):
  sources = installed.parent / "sources"
  here = {
    path.relative_to(sources) for path in (sources / "soprc_jax").rglob("*") if path.is_file()
  }
  for program_files in ("experiments", "configs"):
    here |= {
      pathlib.Path("soprc_jax/programs", path.relative_to(sources))
      for path in (sources / program_files).rglob("*")
      if path.is_file()
    }
  there = {
    path.relative_to(installed) for path in (installed / "soprc_jax").rglob("*") if path.is_file()
  }
  assert here == there
  assert {path.name for path in installed.iterdir()} == {
    "soprc_jax",
    *(path.name for path in installed.glob("*.dist-info")),
  }


def test_the_example_of_the_readme_runs_from_it(installed, tmp_path):
  (code,) = re.findall(r"```python\n(.*?)```", (runs.ROOT / "README.md").read_text(), re.S)
  where = (
    "import json, os; print('value of the test: ' + "
    "json.dumps(os.path.dirname(soprc_jax.__file__)))"
  )
  done = _python(installed, code + where, tmp_path)
  assert done.returncode == 0, done.stderr
  assert "step 99: loss 0.00, mAUPRC 1.00\n" in done.stdout
  assert runs.value(done.stdout) == str(installed / "soprc_jax")


def test_the_core_needs_none_of_the_packages_of_a_run(installed, tmp_path):
  """Checks that `import soprc_jax` loads only jax, optax, chex and numpy of those in setup.cfg."""
  code = (
    "import json, sys, soprc_jax; found = [soprc_jax.__version__, sorted(sys.modules.keys() & "
    "{'flax', 'orbax', 'ml_collections', 'PIL', 'grain', "
    "'matplotlib', 'hypothesis'})]; print('value of the test: ' + json.dumps(found))"
  )
  done = _python(installed, code, tmp_path)
  assert done.returncode == 0, done.stderr
  version = runs.ROOT.joinpath("soprc_jax/version.py").read_text().split('"')[-2]
  assert runs.value(done.stdout) == [version, []]
  assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def environment(installed):
  """Returns a new environment with the wheel; its requirements come from the test environment."""
  folder = installed.parent / "environment"
  venv.create(folder, with_pip=False, symlinks=True)
  (wheel,) = installed.parent.glob("*.whl")
  install = [
    "pip",
    f"--python={folder / 'bin/python'}",
    "install",
    "--no-index",
    "--no-deps",
    str(wheel),
  ]
  done = subprocess.run(
    [sys.executable, "-m", *install], capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  (packages,) = folder.glob("lib/python*/site-packages")
  # Only a path in a .pth file: .pth files in that path, of an editable installation, are not read.
  (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
  return folder


def _soprc(environment, arguments, cwd):
  env = runs.environment() | {"PYTHONPATH": str(runs.ROOT / "tests" / "support" / "offline")}
  where = [environment / "bin/python", "-c", "import soprc_jax; print(soprc_jax.__file__)"]
  found = subprocess.run(where, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
  assert found.stdout.startswith(str(environment)), found.stderr
  command = [environment / "bin/soprc", *arguments]
  return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_the_command_runs_from_another_folder(environment, tmp_path):
  """Checks ``soprc train`` and ``soprc evaluate``, with a bare config name and an argument."""
  settings = [
    "--config=glyphs:triplet",
    "--workdir=run",
    "--config.model.width=8",
    "--config.model.embedding_dim=8",
  ]
  settings += [
    "--config.train.steps=1",
    "--config.train.batch_size=8",
    "--config.data.train_share=0.96",
    "--config.data.val_share=0.02",
    "--config.log.progress=false",
  ]
  for command in ("train", "evaluate"):
    done = _soprc(environment, [command, *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test: mAUPRC 0." in done.stdout
  assert (tmp_path / "run" / "results.json").is_file()


def test_the_command_lists_every_program(environment, tmp_path):
  done = _soprc(environment, ["--help"], tmp_path)
  assert done.returncode == 0, done.stderr
  listed = done.stdout.split("commands:\n")[1].split("\n\n")[0]
  folder = runs.ROOT / "experiments"
  programs = {path.stem for path in folder.glob("[!_]*.py")}
  programs |= {path.parent.name for path in folder.glob("*/__main__.py")}
  programs -= {"binary", "flags", "gallery", "malloc"}
  assert [line.split()[0] for line in listed.splitlines()] == sorted(
    name.replace("_", "-") for name in programs
  )


@pytest.mark.parametrize(
  ("name", "hint"), [("trian", " Did you mean 'train'?"), ("flags", ""), ("../x", "")]
)
def test_an_unknown_command_is_named(environment, tmp_path, name, hint):
  done = _soprc(environment, [name], tmp_path)
  assert done.returncode == 1
  assert f"soprc has no command {name!r}.{hint}" in done.stderr
