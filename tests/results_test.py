"""Recomputes the numbers of README.md and results/README.md from the files in results/."""

import json
import pathlib
import re

import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_README, _DETAILS = (
  (_ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "results/README.md")
)


def _table(text, header):
  """Returns the rows of the Markdown table whose header line starts so, as lists of cells."""
  lines = text.splitlines()
  (start,) = [i for i, line in enumerate(lines) if line.startswith(header)]
  rows = []
  for line in lines[start:]:
    if not line.startswith("|"):
      break
    rows.append([cell.strip() for cell in line.strip("|").split("|")])
  return rows[0], rows[2:]


def _methods(folder):
  """Returns label -> entry of a comparison's table.json."""
  table = json.loads((_ROOT / "results" / folder / "table.json").read_text())
  return {entry["label"]: entry for entry in table["methods"]}


def _over_seeds(entry, digits, metric="mAUPRC"):
  values = np.array(entry["test"][metric]["values"])
  return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def _interval(difference, digits):
  mean, low, high = (f"{difference[key]:+.{digits}f}" for key in ("mean", "low", "high"))
  return f"{mean} [{low}, {high}]"


# Column of the README's table -> folder of its comparison.
_COLUMNS = {
  "glyphs, equal effort": "search_glyphs",
  "icons, equal effort": "search_icons",
  "characters, equal effort": "search_characters",
}


_SEARCHES = (
  *_COLUMNS.values(),
  "features_characters",
  "features_icons",
  "scale_heads",
)


def test_readme_table():
  header, rows = _table(_README, "| test mAUPRC |")
  assert set(header[1:]) <= set(_COLUMNS)
  assert len(rows) >= 4
  for column in header[1:]:
    entries, searched = _methods(_COLUMNS[column]), column.endswith("equal effort")
    for row in rows:
      label, cell = (row[i].replace("*", "") for i in (0, header.index(column)))
      entry = entries.get(label)
      if not cell:
        assert entry is None
        continue
      want = _over_seeds(entry, 3)
      if searched and entry["first_minus_this"]:
        want += f"; {_interval(entry['first_minus_this'], 3)}"
      assert cell == want


@pytest.mark.parametrize("folder", _SEARCHES)
def test_searches_had_equal_effort(folder):
  table = json.loads((_ROOT / "results" / folder / "table.json").read_text())
  assert {len(one["trials"]) for one in table["searches"]} == {table["plan"]["trials"]}
  assert {len(one["best"]) for one in table["searches"]} == {3}
  seeds = {int(run.rsplit("seed", 1)[1]) for one in table["methods"] for run in one["runs"]}
  assert seeds == set(table["plan"]["seeds"])


@pytest.mark.parametrize("folder", _SEARCHES)
def test_tables_of_searches(folder):
  lines = (_ROOT / "results" / folder / "table.md").read_text().splitlines()
  rows = [line for line in lines if line.startswith("| ")]
  assert len(rows) == 2 + 2 * len(_methods(folder))
  assert [row for row in rows if row not in _DETAILS] == []


@pytest.mark.parametrize("folder", ["compare", "finetune"])
def test_tables_of_all_methods(folder):
  entries = _methods(folder)
  section = _DETAILS.split("## Every method" if folder == "compare" else "## Fine-tuning")[1]
  header, rows = _table(section.split("\n## ")[0], "| method | rate |")
  assert len(rows) == len(entries) == 12
  soprc = np.array(entries["SOPRC"]["test"]["mAUPRC"]["values"])
  for row in rows:
    cells = dict(zip(header, row))
    entry = entries[cells["method"]]
    assert cells["rate"].strip("*") == f"{entry['learning_rate']:g}"
    for metric in ("mAUPRC", "recall@1", "recall@10"):
      assert cells[metric] == _over_seeds(entry, 4, metric)
    gaps = soprc - np.array(entry["test"]["mAUPRC"]["values"])
    want = f"{gaps.mean():+.4f} ± {gaps.std(ddof=1) / np.sqrt(len(gaps)):.4f}"
    assert cells["SOPRC minus this"] == ("" if entry["label"] == "SOPRC" else want)


def test_every_folder_says_how_it_was_made():
  _, rows = _table(_DETAILS, "| folder | command |")
  named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row[0])}
  there = {path.name for path in (_ROOT / "results").iterdir() if path.is_dir()}
  assert named == there
  for row in rows:
    assert re.search(r"`soprc [a-z-]+ ", row[1])
    assert re.search(r"`[0-9a-f]{7}`", row[2])


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "flights"])
def test_tables_of_binary_studies(name):
  """Checks each row of a study's own table. The last column, the time of a step, may be missing."""
  lines = (_ROOT / "results" / f"binary_{name}" / "table.md").read_text().splitlines()
  rows = [line for line in lines[2:] if line.startswith("|")]
  assert len(rows) >= 6
  shown = _DETAILS.split(f"**{name}**: train")[1].split("\n\n**")[0]
  assert [row for row in rows if row.removesuffix("|").rpartition("|")[0] + "|" not in shown] == []


@pytest.mark.parametrize(
  "folder",
  [
    "multilabel_yeast",
    "multilabel_glyphs",
    "multilabel_characters",
    "long_tail_glyphs",
    "long_tail_characters",
  ],
)
def test_tables_of_studies_with_several_labels(folder):
  lines = (_ROOT / "results" / folder / "table.md").read_text().splitlines()
  rows = [line for line in lines[2:] if line.startswith("|")]
  assert len(rows) >= 6
  assert [row for row in rows if row not in _DETAILS] == []
  content = json.loads((_ROOT / "results" / folder / "results.json").read_text())
  for entry in content["methods"]:
    values = np.array(entry["test"]["mAP"])
    (row,) = [row for row in rows if row.startswith(f"| {entry['label']} |")]
    assert f"| {values.mean():.4f} ± {values.std(ddof=1):.4f} |" in row


def test_table_of_the_how_to_on_binary_data():
  page = (_ROOT / "docs" / "howto" / "binary.md").read_text(encoding="utf-8")
  header, rows = _table(page, "| | SOPRC | AP loss |")
  for row in rows[:3]:
    name = row[0].split(" (")[0]
    content = json.loads((_ROOT / "results" / f"binary_{name}" / "results.json").read_text())
    shown = dict(zip(header[1:], row[1:]))
    found = {entry["label"].lower(): entry["test"]["AUPRC"] for entry in content["methods"]}
    for method in header[1:-1]:
      (values,) = [v for label, v in found.items() if label.startswith(method.lower())]
      assert shown[method] == f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}", (
        name,
        method,
      )


def test_table_of_the_ranking_study():
  folder = _ROOT / "results" / "ranking_flights"
  rows = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
  section = _DETAILS.split("## Ranking of query groups")[1]
  assert [row for row in rows if row not in section] == []
  header, cells = _table(section, "| method | learning rate | test MAP |")
  shown = {row[0]: dict(zip(header, row)) for row in cells}
  for entry in json.loads((folder / "results.json").read_text())["methods"]:
    for metric, column in (("AP", "test MAP"), ("NDCG@10", "test NDCG@10")):
      values = entry["test"][metric]
      want = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
      assert shown[entry["label"]][column] == want
