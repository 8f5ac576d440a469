"""Tests that the README's paper map leads to existing names, and its other promises about names."""

import contextlib
import importlib
import io
import pathlib
import re
import runpy

import jax
import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text()
_RESULTS = (_ROOT / "results" / "README.md").read_text()


def _paper_map():
  """Returns (equation or algorithm, dotted symbol) for each symbol in the "Paper map" table."""
  table = _README.split("## Paper map")[1].split("\n## ")[0]
  for row in re.findall(r"^\| ((?:Eq|Alg)\. \d+)[^|]*\|([^|]*)\|", table, re.M):
    for symbol in re.findall(r"`(soprc_jax[\w.]*)`", row[1]):
      yield row[0], symbol


def _load(dotted):
  """Returns the object behind a dotted name: the longest importable module, then attributes."""
  parts = dotted.split(".")
  for split in range(len(parts), 0, -1):
    try:
      found = importlib.import_module(".".join(parts[:split]))
    except ModuleNotFoundError:
      continue
    for name in parts[split:]:
      found = getattr(found, name)
    return found
  raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize(("source", "symbol"), list(_paper_map()))
def test_paper_map_names_the_defining_function(source, symbol):
  first_line = _load(symbol).__doc__.strip().splitlines()[0]
  assert f"({source}" in first_line, f"{symbol}: {first_line!r} does not name ({source})"


def test_the_example_prints_what_stands_below_it():
  code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", _README, re.S).groups()
  output = io.StringIO()
  with (
    contextlib.redirect_stdout(output),
    jax.numpy_rank_promotion("allow"),
    jax.numpy_dtype_promotion("standard"),
  ):
    exec(compile(code, "README.md", "exec"), {})
  assert output.getvalue() == printed


def test_it_is_short():
  assert len(_README.splitlines()) <= 185
  assert len(_README.split()) <= 1200


def test_paper_map_is_complete():
  assert {source for source, _ in _paper_map()} == {
    "Eq. 2",
    "Eq. 5",
    "Eq. 7",
    "Eq. 8",
    "Eq. 9",
    "Eq. 10",
    "Alg. 1",
    "Alg. 2",
  }


@pytest.mark.parametrize(
  ("folder", "text"), [("", _README), ("results", _RESULTS)], ids=["README", "results"]
)
def test_pictures_and_links_exist(folder, text):
  for path in re.findall(r'src="([^"]+)"', text):
    assert (_ROOT / folder / path).is_file(), path
  for path, _, anchor in re.findall(r"\]\(((?!http)[^)#]*)(#([^)]+))?\)", text):
    target = (_ROOT / folder / path) if path else None
    body = text if target is None else target.read_text()
    assert anchor == "" or anchor in map(_anchor, re.findall(r"^#+ (.+)$", body, re.M)), anchor


def _anchor(heading):
  """Returns GitHub's name of a heading."""
  return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("text", [_README, _RESULTS], ids=["README", "results"])
def test_commands_name_files_and_arguments_that_exist(text):
  for name, argument in re.findall(r"--config=(\w+)(?::([\w,]+))?", text):
    path = _ROOT / "configs" / f"{name}.py"
    assert path.is_file()
    for one in filter(None, argument.split(",")):
      assert one in runpy.run_path(str(path))["ARGUMENTS"]
  for command in re.findall(r"soprc ([\w-]+) --[a-z]", text):
    place = _ROOT / "experiments" / command.replace("-", "_")
    assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
