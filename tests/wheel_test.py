"""What pip installs works outside the repository: everything is in the wheel, and the README's example runs from it."""

import doctest
import os
import subprocess
import sys
import zipfile

import pytest
import runs

pytest.importorskip("setuptools", minversion="70.1")  # builds wheels by itself from there on


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """A folder with the unpacked wheel alone."""
  folder = tmp_path_factory.mktemp("wheel")
  build = [sys.executable, "-c", "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"]
  # setuptools writes beside its sources: those are copied, without what git does not know.
  sources = folder / "sources"
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=runs.ROOT, capture_output=True, check=False)
  names = [name for name in listed.stdout.decode().split("\0") if name and (runs.ROOT / name).is_file()]
  if not names:
    pytest.skip("not a clone: git lists no files")
  for name in names:
    (sources / name).parent.mkdir(parents=True, exist_ok=True)
    (sources / name).write_bytes((runs.ROOT / name).read_bytes())
  done = subprocess.run([*build, str(folder)], cwd=sources, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  (wheel,) = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "installed")
  return folder / "installed"


def _python(installed, code, cwd):
  env = runs.environment() | {"PYTHONPATH": str(installed)}
  return subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_all_modules_and_data_are_in_it(installed):
  sources = installed.parent / "sources"
  here = {path.relative_to(sources) for path in (sources / "soprc_jax").rglob("*") if path.is_file()}
  there = {path.relative_to(installed) for path in (installed / "soprc_jax").rglob("*") if path.is_file()}
  assert here == there
  assert {path.name for path in installed.iterdir()} == {
    "soprc_jax",
    *(path.name for path in installed.glob("*.dist-info")),
  }


def test_the_example_of_the_readme_runs_from_it(installed, tmp_path):
  text = (runs.ROOT / "README.md").read_text().split("## Paper map")[0]
  (example,) = text.split("```python\n")[1:]
  code = "".join(part.source for part in doctest.DocTestParser().get_examples(example.split("```")[0]))
  where = "import json, os; print('value of the test: ' + json.dumps(os.path.dirname(soprc_jax.__file__)))"
  done = _python(installed, code + where, tmp_path)
  assert done.returncode == 0, done.stderr
  assert "AUPRC 0.8333\n" in done.stdout
  assert runs.value(done.stdout) == str(installed / "soprc_jax")


def test_the_core_needs_none_of_the_packages_of_a_run(installed, tmp_path):
  """`import soprc_jax` loads nothing beyond jax, optax, chex and numpy of what setup.cfg names."""
  code = (
    "import json, sys, soprc_jax; found = [soprc_jax.__version__, sorted(sys.modules.keys() & {'flax', 'orbax', 'ml_collections', 'PIL', 'grain', "
    "'matplotlib', 'hypothesis'})]; print('value of the test: ' + json.dumps(found))"
  )
  done = _python(installed, code, tmp_path)
  assert done.returncode == 0, done.stderr
  version = runs.ROOT.joinpath("soprc_jax/version.py").read_text().split('"')[-2]
  assert runs.value(done.stdout) == [version, []]
  assert os.listdir(tmp_path) == []
