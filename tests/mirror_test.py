"""Tests that each module's tests are found by its name, or by the README's second table."""

import ast
import collections
import importlib
import pathlib
import re

_TESTS = pathlib.Path(__file__).parent
_PACKAGE = _TESTS.parent / "soprc_jax"
_ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w/]+_test\.py)` \|$", re.MULTILINE)


def _own(module):
  """Returns the test file that has the name of a module."""
  package, _, name = module.removesuffix(".py").rpartition("/")
  return f"{package.strip('_') or 'core'}/{name.strip('_')}_test.py"


def _names(file, module):
  """Returns whether a test file names or imports a module, or uses its package's exports of it."""
  text = (_TESTS / file).read_text()
  dotted = "soprc_jax." + module.removesuffix(".py").replace("/", ".")
  package = importlib.import_module(dotted.rpartition(".")[0])
  exported = {
    key for key, value in vars(package).items() if getattr(value, "__module__", "") == dotted
  }
  imported, used = set(), set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.ImportFrom):
      imported |= {f"{node.module}.{one.name}" for one in node.names}
    elif isinstance(node, ast.Attribute):
      used.add(node.attr)
  return module in text or dotted in imported or not exported.isdisjoint(used)


def test_every_module_is_tested_where_its_name_or_the_table_says():
  paths = _PACKAGE.rglob("*.py")
  modules = sorted(
    path.relative_to(_PACKAGE).as_posix() for path in paths if path.stem != "__init__"
  )
  rows, wrong = dict(_ROW.findall((_TESTS / "README.md").read_text())), []
  for module in rows.keys() - set(modules):
    wrong.append(f"{module}: soprc_jax/ does not have it: remove its row")
  for module in modules:
    own, row = _own(module), rows.get(module)
    if (_TESTS / own).is_file():
      if row:
        wrong.append(f"{module}: tests/{own} tests it: remove its row")
    elif row is None:
      wrong.append(f"{module}: write tests/{own}, or a row of the second table of tests/README.md")
    elif not (_TESTS / row).is_file():
      wrong.append(f"{module}: there is no tests/{row}: name the file that tests it")
    elif not _names(row, module):
      wrong.append(
        f"{module}: tests/{row} does not name it: import it, or put its path in the docstring"
      )
  assert wrong == []


def test_no_two_test_files_share_a_name():
  """Checks what pytest needs: it imports test files by their names, without folders."""
  counts = collections.Counter(path.name for path in _TESTS.rglob("*_test.py"))
  assert [name for name, count in counts.items() if count > 1] == []
