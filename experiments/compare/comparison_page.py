"""The report on a comparison of methods."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.compare import comparison as comparison_lib
from experiments.compare import plans, tables
from soprc_jax.reports import about, charts, page, paper, run_tables
from soprc_jax.reports.markup import Markup, join, paragraph, tag
from soprc_jax.training import files
from soprc_jax.training import workdir as workdir_lib

_NUMBER = (None, float)
_TEST = {"mean": _NUMBER, "std": _NUMBER, "values": [_NUMBER]}
_METHOD = {
  "method": str,
  "label": str,
  "learning_rate": float,
  "val_by_rate": {str: _NUMBER},
  "runs": [str],
  "test": {str: _TEST},
  "step_seconds": float,
  "peak_memory_bytes": float,
}
_CONFIG = {"data": {"source": str}, "model": dict, "train": {"steps": int, "batch_size": int}}
_TABLE = {"methods": [_METHOD], "config": _CONFIG, "plan": {"seeds": [int], "rates": [float], "init_from": str}}


def make(folder: Path) -> str:
  """The page on a finished comparison; curves need the folders of its runs, the page says where they are gone.

  Raises:
    ValueError: a file is damaged.
    OSError: a file may not be read.
  """
  path = folder / "table.json"
  table = files.read(path, _TABLE, remedy="remove it, and the command of experiments.compare writes it again")
  _check(path, table)
  entries = sorted(table["methods"], key=lambda entry: -_mean(entry))
  sections = [
    page.Section("methods", "Methods", _methods(table, entries)),
    page.Section("paper", "Beside the paper", _paper(table, entries)),
    page.Section("curves", "Precision-recall and convergence", _curves(folder, table)),
    page.Section("rates", "Learning rates", _rates(entries)),
    page.Section("costs", "Cost of a step", _costs(table, entries)),
    page.Section("config", "Config", _config(folder, table)),
    page.Section("versions", "Versions and device", _versions(folder, table)),
  ]
  return page.document(
    f"Comparison of {len(entries)} methods on {table['config']['data']['source']}", _intro(folder, table, entries), sections
  )


def _check(path: Path, table: dict[str, Any]) -> None:
  """Raises a ValueError where the methods do not have the same metrics and seeds."""
  first = table["methods"][0]
  for entry in table["methods"]:
    sizes = {len(entry["runs"]), *(len(found["values"]) for found in entry["test"].values())}
    if (
      entry["test"].keys() != first["test"].keys()
      or "mAUPRC" not in entry["test"]
      or sizes != {len(table["plan"]["seeds"])}
    ):
      raise ValueError(
        f"{path} is damaged (method {entry['method']!r} has other metrics or seeds than the plan): remove it, and the command of experiments.compare "
        "writes it again"
      )


def _intro(folder: Path, table: dict[str, Any], entries: list[dict[str, Any]]) -> Markup:
  config, plan = table["config"], table["plan"]
  start = f"from the networks in {plan['init_from']}" if plan["init_from"] else "from random weights"
  seeds = len(plan["seeds"])
  text = (
    f"{config['model'].get('name')} (width {config['model'].get('width')}), {config['train']['steps']:,} steps of {config['train']['batch_size']} images, {start}, "
    f"{seeds} seed{'s' * (seeds > 1)}; folder "
  )
  shown = [
    (f"{entry['label']}, test mAUPRC", "-" if (mean := entry["test"]["mAUPRC"]["mean"]) is None else f"{mean:.4f}")
    for entry in entries[:3]
  ]
  seen = table.get("seen_classes")
  warning = paragraph(seen, class_="warning") if isinstance(seen, str) else ""
  return join([paragraph(text, tag("code", folder)), page.cards(shown), warning])


def _methods(table: dict[str, Any], entries: list[dict[str, Any]]) -> Markup:
  metrics = list(entries[0]["test"])
  first = table["methods"][0]
  values = _values(first)
  header = ["method", "learning rate", *metrics, f"{first['label']} minus this, mAUPRC"]
  rows = []
  for entry in entries:
    gap = "" if entry is first else tables.difference(values, _values(entry))
    rows.append(
      [
        page.name(entry["label"]),
        page.Cell(f"{entry['learning_rate']:g}{'*' if _at_edge(entry) else ''}", True),
        *(page.Cell(_with_deviation(entry["test"][metric]), True) for metric in metrics),
        page.Cell("-" if "nan" in gap else gap, True),
      ]
    )
  seeds = len(table["plan"]["seeds"])
  caption = f"Test results, mean ± standard deviation over {seeds} seeds" if seeds > 1 else "Test results of one seed"
  parts = [
    page.table(f"{caption}, values from 0 to 1; best mAUPRC first", header, rows, own=[entries.index(first)]),
    paragraph(
      "The learning rate is picked on val at the first seed (* at the edge of its grid: one beyond may be better). The difference is paired by seed, ± its "
      "standard error.",
      class_="note",
    ),
  ]
  broken = [entry["label"] for entry in entries if any(value is None for value in entry["test"]["mAUPRC"]["values"])]
  if broken:
    parts.append(
      paragraph(f"Training broke down (not finite) in a run of {', '.join(broken)}: no mean is shown.", class_="warning")
    )
  return join(parts)


def _paper(table: dict[str, Any], entries: list[dict[str, Any]]) -> Markup:
  data = table["config"]["data"]
  known = paper.has(data["source"])
  reported = paper.reported(data["source"] if known else "sop", trainval=known and bool(data.get("trainval")))
  assert reported is not None
  metrics = [metric for metric in reported.metrics if metric in entries[0]["test"]]
  header = ["method", *(f"{metric}, here" for metric in metrics), *(f"{metric}, paper" for metric in metrics)]
  rows = []
  for entry in entries:
    there = reported.rows.get(entry["method"])
    here = [entry["test"][metric]["mean"] for metric in metrics]
    columns = [reported.metrics.index(metric) for metric in metrics]
    rows.append(
      [
        page.name(entry["label"]),
        *(page.number(None if value is None else 100.0 * value, 2) for value in here),
        *(page.number(there[column] if there else None, 2) for column in columns),
      ]
    )
  note = [paragraph(reported.note, class_="note")] if reported.note else []
  missing = [] if known else [run_tables.no_numbers(data["source"])]
  return join(
    [*missing, page.table(f"In percent; the paper's (Table 1 and its appendix): {reported.title}", header, rows), *note]
  )


def _curves(folder: Path, table: dict[str, Any]) -> Markup:
  rows = [_row(folder, table, entry) for entry in table["methods"]]
  ended = [row for row in rows if any((folder / run.folder() / workdir_lib.RESULTS).exists() for run in row.runs)]
  if not ended:
    return paragraph(
      "Left out: the folders of the runs are not here. Make the report in the folder of the comparison, before they are removed.",
      class_="note",
    )
  labels = {entry["method"]: entry["label"] for entry in table["methods"]}
  pr, val = {}, {}
  for row in rows:
    pr[labels[row.method]] = tables.mean_pr_curve(folder, row, points=201)
    val[labels[row.method]] = tables.mean_convergence(folder, row)
  mean = "mean over seeds" if len(table["plan"]["seeds"]) > 1 else "one seed"
  pictures = [
    charts.line_chart(
      f"Mean precision-recall curves on test, {mean}",
      _series(pr),
      x_label="mean recall",
      y_label="mean precision",
      x_range=(0.0, 1.0),
      y_range=(0.0, 1.0),
    ),
    charts.line_chart(f"mAUPRC on val, {mean}", _series(val, marks=True), x_label="step", y_label="mAUPRC on val"),
  ]
  return join(
    [
      paragraph("The first method is drawn thickest; legends go from the best to the worst.", class_="note"),
      tag("div", *pictures, class_="charts"),
    ]
  )


def _series(curves: dict[str, tuple[np.ndarray, np.ndarray]], *, marks: bool = False) -> list[charts.Series]:
  """Best mean first; a method has the same colour in all charts."""
  series = [
    charts.Series(name, x, y, None if i == 0 else i - 1, marks=marks and len(x) <= 40)
    for i, (name, (x, y)) in enumerate(curves.items())
  ]
  return sorted(series, key=lambda one: -float(np.nan_to_num(np.mean(one.y))) if len(one.y) else 0.0)


def _row(folder: Path, table: dict[str, Any], entry: dict[str, Any]) -> comparison_lib.Row:
  names = tuple(plans.RunName(entry["method"], entry["learning_rate"], seed) for seed in table["plan"]["seeds"])
  if [name.folder() for name in names] != entry["runs"]:
    raise ValueError(
      f"{folder / 'table.json'} is damaged (the runs of {entry['method']!r} are not those of its rate and seeds): remove it, and make it again"
    )
  val = {float(rate): np.nan if value is None else value for rate, value in entry["val_by_rate"].items()}
  return comparison_lib.Row(entry["method"], entry["learning_rate"], val, names)


def _rates(entries: list[dict[str, Any]]) -> Markup:
  rates = sorted({float(rate) for entry in entries for rate in entry["val_by_rate"]})
  rows = []
  for entry in entries:
    found = {float(rate): value for rate, value in entry["val_by_rate"].items()}
    cells = [
      page.Cell("broke down", True) if rate in found and found[rate] is None else page.number(found.get(rate))
      for rate in rates
    ]
    rows.append([page.name(entry["label"]), *cells])
  return page.table("mAUPRC on val at the first seed, by learning rate", ["method", *(f"{rate:g}" for rate in rates)], rows)


def _costs(table: dict[str, Any], entries: list[dict[str, Any]]) -> Markup:
  rows = [
    [
      page.name(entry["label"]),
      page.number(1e3 * entry["step_seconds"], 0),
      page.number(table["config"]["train"]["batch_size"] / entry["step_seconds"] if entry["step_seconds"] else None, 0),
      page.number(entry["peak_memory_bytes"] / 2**20, 0),
    ]
    for entry in entries
  ]
  return join(
    [
      page.table(
        f"Cost of a training step of the whole batch, on {table.get('costs_on', 'a device that was not noted')}",
        ["method", "milliseconds", "images per second", "memory, MiB"],
        rows,
      ),
      paragraph(
        "Time: median of steps without loading, the methods taking turns. Memory: XLA's plan for the step on one device.",
        class_="note",
      ),
    ]
  )


def _config(folder: Path, table: dict[str, Any]) -> Markup:
  default = about.flat(about.defaults("default"))
  shared = about.flat(table["config"])
  changed = [key for key, value in shared.items() if default.get(key, object()) != value]
  parts = [page.details(f"All {len(shared)} keys that the runs share", about.all_keys(shared, changed))]
  rows = []
  for entry in table["methods"]:
    own = _own_config(folder, entry)
    keys = {
      key: value
      for key, value in own.items()
      if key.startswith(("loss.", "optim.")) and default.get(key, object()) != value
    }
    told = join((tag("code", f"{key}={value}") for key, value in keys.items()), ", ") if own else "its folder is gone"
    rows.append((bool(own), [page.name(entry["label"]), told]))
  if any(there for there, _ in rows):
    caption = "Keys of loss and optimizer that differ from the defaults, by method (at the first seed)"
    parts.append(page.table(caption, ["method", "keys"], [row for _, row in rows]))
  else:
    parts.append(
      paragraph("The folders of the runs are not here, and with them the keys that differ by method.", class_="note")
    )
  return join(parts)


def _own_config(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
  found = workdir_lib.find_config(folder / entry["runs"][0])
  return about.flat(found) if found else {}


def _versions(folder: Path, table: dict[str, Any]) -> Markup:
  path = folder / table["methods"][0]["runs"][0] / workdir_lib.RESULTS
  found = files.read(path, dict) if path.exists() else {}
  devices = table.get("trained_on") or [found.get("device", "not noted")]
  return about.versions({"versions": found.get("versions"), "device": " and ".join(map(str, devices))})


def _with_deviation(found: dict[str, Any]) -> str:
  if found["mean"] is None:
    return "-"
  return f"{found['mean']:.4f}" + ("" if found["std"] is None else f" ± {found['std']:.4f}")


def _values(entry: dict[str, Any]) -> np.ndarray:
  return np.array([np.nan if value is None else value for value in entry["test"]["mAUPRC"]["values"]], float)


def _mean(entry: dict[str, Any]) -> float:
  value = entry["test"]["mAUPRC"]["mean"]
  return -np.inf if value is None else float(value)


def _at_edge(entry: dict[str, Any]) -> bool:
  rates = [float(rate) for rate in entry["val_by_rate"]]
  return len(rates) > 1 and entry["learning_rate"] in (min(rates), max(rates))
