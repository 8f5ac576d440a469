"""Tests that the documentation builds without a warning.

It has every public name, and its links work.
"""

import html
import importlib
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys

import pytest
import runs

from experiments.binary import binary_config
from experiments.compare import plans
import soprc_jax
from soprc_jax.training import config

inventory = pytest.importorskip("sphinx.util.inventory", reason="pip install -e '.[docs]'")
pytest.importorskip("myst_nb", reason="pip install -e '.[docs]'")

_DOCS = runs.ROOT / "docs"
_PAGES = sorted(path for path in _DOCS.rglob("*.md") if "_build" not in path.parts)
_DOCUMENTED = ("data", "models", "reports", "serving", "training")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """Builds the pages, without running the notebooks (`notebooks_test`)."""
  folder = tmp_path_factory.mktemp("html")
  command = [
    sys.executable,
    "-m",
    "sphinx",
    "-W",
    "--keep-going",
    "-q",
    "-b",
    "html",
    "-D",
    "nb_execution_mode=off",
  ]
  done = subprocess.run(
    [*command, "-d", folder / "doctrees", _DOCS, folder / "html"],
    cwd=runs.ROOT,
    env=runs.environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return folder / "html"


def _public(module):
  """Returns functions and classes without an underscore that a module defines."""
  for name, value in vars(module).items():
    made_here = (
      inspect.isfunction(value) or inspect.isclass(value)
    ) and value.__module__ == module.__name__
    if made_here and not name.startswith("_") and value.__doc__:
      yield f"{module.__name__}.{name}"


def test_every_public_name_is_in_the_interface(built):
  with (built / "objects.inv").open("rb") as file:
    found = inventory.InventoryFile.load(file, "", lambda base, path: path)
  documented = {name for kind, names in found.items() if kind.startswith("py:") for name in names}
  wanted = [f"soprc_jax.{name}" for name in soprc_jax.__all__ if name != "__version__"]
  wanted += [f"soprc_jax.losses.{name}" for name in soprc_jax.losses.__all__]
  wanted += [f"soprc_jax.metrics.{name}" for name in soprc_jax.metrics.__all__]
  modules = [importlib.import_module("soprc_jax.testing")]
  for package in _DOCUMENTED:
    folder = importlib.import_module(f"soprc_jax.{package}").__path__
    modules += [
      importlib.import_module(f"soprc_jax.{package}.{module.name}")
      for module in pkgutil.iter_modules(folder)
    ]
  wanted += [name for module in modules for name in _public(module)]
  assert [name for name in wanted if name not in documented] == []


def test_no_package_is_forgotten(built):
  packages = {module.name for module in pkgutil.iter_modules(soprc_jax.__path__) if module.ispkg}
  assert packages == {*_DOCUMENTED, "losses", "metrics", "_internal"}
  layout = (runs.ROOT / "CONTRIBUTING.md").read_text()
  assert [name for name in packages if f"  {name}/ " not in layout] == []
  modules = {module.name for module in pkgutil.iter_modules(soprc_jax.__path__) if not module.ispkg}
  assert [
    name
    for name in modules
    if name[0] != "_" and name != "version" and f"  {name}.py " not in layout
  ] == []


def test_every_program_is_named():
  text = (_DOCS / "programs.md").read_text()
  files = {path.stem for path in (runs.ROOT / "experiments").glob("[!_]*.py")}
  files |= {path.parent.name for path in (runs.ROOT / "experiments").glob("*/__main__.py")}
  named = {name.replace("-", "_") for name in re.findall(r"`soprc ([\w-]+)`", text)}
  named |= set(re.findall(r"`experiments[./](\w+)(?:\.py)?`", text))
  assert named == files


@pytest.mark.parametrize("path", _PAGES, ids=lambda path: str(path.relative_to(_DOCS)))
def test_commands_name_what_exists(path):
  """Checks files, programs, configs, their arguments and config keys. Sphinx checks links between
  pages.
  """
  text = path.read_text()
  for target in re.findall(r"\]\((?!https?:|path:)([^)#\s]+)", text):
    assert (path.parent / target).is_file(), target
  for program in re.findall(r"(?m)^ *(?:[\w.=]+ )*soprc ([\w-]+)|`soprc ([\w-]+)", text):
    program = "".join(program).replace("-", "_")
    places = [
      runs.ROOT / "experiments" / name for name in (f"{program}.py", f"{program}/__main__.py")
    ]
    assert program == "NAME" or any(place.is_file() for place in places), program
  for name, arguments in re.findall(r"--config=(?:configs/)?(\w+)(?:\.py)?(?::([\w,]+))?", text):
    known = (
      runpy.run_path(str(runs.ROOT / "configs" / f"{name}.py"))["ARGUMENTS"]
      if name != "NAME"
      else ()
    )
    assert [
      argument for argument in filter(None, arguments.split(",")) if argument not in known
    ] == []
  for key in re.findall(r"--config\.([\w.]+\w)[=`]", text):
    _value(config.default_config(), key)
  for name in re.findall(r"`((?:soprc_jax|tests|configs|experiments)/[\w/.]+\.\w+)`", text):
    assert (runs.ROOT / name).is_file() or name.endswith("/NAME.py"), name


def test_every_config_key_is_on_its_page(built):
  page = re.sub(r"<(?!/?t[dr])[^>]*>", "", (built / "config.html").read_text())
  rows = [
    [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.S)]
    for row in page.split("<tr")
  ]
  shown = {tuple(row[::2]) for row in rows if row}
  assert {
    (key.name, key.allowed) for table in (config, plans, binary_config) for key in table.KEYS
  } == shown


def _value(tree, key):
  """Returns the value of a key with dots; an AttributeError names one that does not exist."""
  for part in key.split("."):
    tree = getattr(tree, part)
  return tree


def test_the_page_of_results_is_no_copy():
  """Checks that conf.py replaces the page of results by results/README.md."""
  assert len((_DOCS / "results.md").read_text()) < 200


def test_the_build_is_one_command():
  command = "python -m sphinx -W --keep-going -b html docs docs/_build/html"
  assert command in (runs.ROOT / "CONTRIBUTING.md").read_text()
  assert "docs/_build/" in (runs.ROOT / ".gitignore").read_text().splitlines()
