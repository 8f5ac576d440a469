"""Tests the table of tests/README.md.

Every reported failure has a row. Its tests exist and carry its number.
"""

import ast
import pathlib
import re

_TESTS = pathlib.Path(__file__).parent
_NUMBERS = range(1, 68)


def _rows():
  """Returns (number of the failure, ids of its tests) for each row."""
  lines = (_TESTS / "README.md").read_text().splitlines()
  rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| F\d+ \|", line)]
  return [(int(cells[0][1:]), re.findall(r"`([^`]+)`", cells[-1]), cells) for cells in rows]


def _names(file):
  """Returns the test functions of a file, including methods of classes."""
  tree = ast.parse((_TESTS / file).read_text())
  bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
  return {node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef)}


def test_every_failure_has_one_row_with_all_four_cells():
  rows = _rows()
  assert [number for number, _, _ in rows] == list(_NUMBERS)
  for number, ids, cells in rows:
    assert len(cells) == 4, number
    assert all(cells), number
    assert ids, number


def test_the_tests_of_a_row_exist_and_carry_its_number():
  wrong = []
  for number, ids, _ in _rows():
    for entry in ids:
      file, _, name = entry.partition("::")
      if (
        not name.startswith(f"test_f{number:02}_")
        or not (_TESTS / file).is_file()
        or name not in _names(file)
      ):
        wrong.append(f"F{number}: {entry}")
  assert wrong == []


def test_no_test_carries_the_number_of_no_failure():
  for path in _TESTS.rglob("*_test.py"):
    found = [int(name[6:8]) for name in _names(path) if re.match(r"test_f\d\d_", name)]
    assert set(found) <= set(_NUMBERS), path.name
