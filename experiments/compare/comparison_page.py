"""Makes the report page on a comparison of methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
import numpy as np

from experiments.compare import comparison as comparison_lib
from experiments.compare import plans, tables
from soprc_jax._internal import stored
from soprc_jax.metrics import per_query
from soprc_jax.reports import charts, page, paper_numbers, run_tables
from soprc_jax.training import workdir as workdir_lib

_NUMBER = (None, float)
_TEST = {"mean": _NUMBER, "std": _NUMBER, "values": [_NUMBER]}
_DIFFERENCE = {"mean": float, "low": float, "high": float, "probability": float}
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
_TABLE = {
  "methods": [_METHOD],
  "config": _CONFIG,
  "plan": {"seeds": [int], "rates": [float], "init_from": str},
}
_SEARCHES = [
  {
    "label": str,
    "spaces": [[str]],
    "best": dict,
    "at_edge": list,
    "expected_best": {str: float},
  }
]


def make(folder: Path) -> str:
  """Returns the HTML page on a finished comparison.

  Curves need the folders of its runs. The page says so if they are gone.

  Raises:
    ValueError: a file is corrupt.
    OSError: a file cannot be read.
  """
  path = folder / "table.json"
  table = stored.read_json(
    path, _TABLE, remedy="remove it, and the command of soprc compare writes it again"
  )
  _check(path, table)
  entries = sorted(table["methods"], key=lambda entry: -_mean(entry))
  source, shared = table["config"]["data"]["source"], run_tables.flat(table["config"])
  default = run_tables.flat(run_tables.defaults("default"))
  seen = table.get("seen_classes")
  return page.document(
    "comparison.html",
    title=f"Comparison of {len(entries)} methods on {source}",
    folder=folder,
    config=table["config"],
    plan=table["plan"],
    headline=[
      (f"{entry['label']}, test mAUPRC", page.number(entry["test"]["mAUPRC"]["mean"]))
      for entry in entries[:3]
    ],
    seen=seen if isinstance(seen, str) else "",
    methods=_methods(table, entries),
    differences=tables.DIFFERENCES,
    unresolved=tables.unresolved({entry["label"]: _difference(entry) for entry in entries}),
    broken=[entry["label"] for entry in entries if None in entry["test"]["mAUPRC"]["values"]],
    in_paper=paper_numbers.has(source),
    paper=_paper(table, entries) if paper_numbers.has(source) else None,
    curves=_curves(folder, table),
    rates=_searches(table["searches"]) if "searches" in table else _rates(entries),
    search_note=tables.SEARCH_NOTE if "searches" in table else "",
    costs=_costs(table, entries),
    keys=shared,
    all_keys=run_tables.all_keys(shared, run_tables.changes(shared, default)),
    own_keys=_own_keys(folder, table["methods"], default),
    **_software(folder, table),
  )


def _check(path: Path, table: Mapping[str, Any]) -> None:
  """Raises a ValueError if the methods do not have the same metrics and seeds."""
  first = table["methods"][0]
  problem = stored.problem(table.get("searches"), (None, _SEARCHES), "searches")
  for entry in table["methods"]:
    sizes = {len(entry["runs"]), *(len(found["values"]) for found in entry["test"].values())}
    problem = problem or stored.problem(
      entry.get("first_minus_this"), (None, _DIFFERENCE), f"{entry['method']}.first_minus_this"
    )
    if problem:
      raise ValueError(
        f"{path} is corrupt ({problem}): remove it, and the command of soprc compare writes it "
        "again"
      )
    if (
      entry["test"].keys() != first["test"].keys()
      or "mAUPRC" not in entry["test"]
      or sizes != {len(table["plan"]["seeds"])}
    ):
      raise ValueError(
        f"{path} is corrupt (method {entry['method']!r} has other metrics or seeds than the plan): "
        "remove it, and the command of soprc compare writes it again"
      )


def _methods(table: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Markup:
  metrics = list(entries[0]["test"])
  first = table["methods"][0]
  header = ["method", "learning rate", *metrics, f"{first['label']} minus this, mAUPRC", "P(ahead)"]
  rows = []
  for entry in entries:
    gap = _difference(entry)
    rate = f"{entry['learning_rate']:g}{'*' if _at_edge(entry) else ''}"
    cells = [
      rate,
      *(_with_deviation(entry["test"][metric]) for metric in metrics),
      "" if entry is first else "-" if gap is None else str(gap),
      "" if gap is None else f"{gap.probability:.3f}",
    ]
    rows.append([page.name(entry["label"]), *map(page.Number, cells)])
  seeds = len(table["plan"]["seeds"])
  caption = (
    f"Test results, mean ± standard deviation over {seeds} seeds"
    if seeds > 1
    else "Test results of one seed"
  )
  return page.table(
    f"{caption}, values from 0 to 1; best mAUPRC first", header, rows, own=[entries.index(first)]
  )


def _paper(table: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> tuple[Markup, str]:
  """Returns a table with the paper's numbers on the same data, and its note."""
  data = table["config"]["data"]
  reported = paper_numbers.reported(data["source"], trainval=bool(data.get("trainval")))
  assert reported is not None
  metrics = [metric for metric in reported.metrics if metric in entries[0]["test"]]
  header = [
    "method",
    *(f"{metric}, here" for metric in metrics),
    *(f"{metric}, paper" for metric in metrics),
  ]
  rows = []
  for entry in entries:
    there = reported.rows.get(entry["method"])
    here = [run_tables.percent(entry["test"][metric]["mean"]) for metric in metrics]
    columns = [reported.metrics.index(metric) for metric in metrics]
    rows.append(
      [
        page.name(entry["label"]),
        *here,
        *(page.number(there[i] if there else None, 2) for i in columns),
      ]
    )
  caption = f"In percent; the paper's (Table 1 and its appendix): {reported.title}"
  return page.table(caption, header, rows), reported.note


def _curves(folder: Path, table: Mapping[str, Any]) -> list[Markup]:
  """Returns precision-recall and convergence charts; empty if the runs' folders are gone."""
  rows = {entry["label"]: _row(folder, table, entry) for entry in table["methods"]}
  if not any(
    (folder / run.folder() / workdir_lib.RESULTS).exists()
    for row in rows.values()
    for run in row.runs
  ):
    return []
  pr = {label: tables.mean_pr_curve(folder, row, points=201) for label, row in rows.items()}
  val = {label: tables.mean_convergence(folder, row) for label, row in rows.items()}
  mean = "mean over seeds" if len(table["plan"]["seeds"]) > 1 else "one seed"
  return [
    charts.line_chart(
      f"Mean precision-recall curves on test, {mean}",
      _series(pr),
      x_label="mean recall",
      y_label="mean precision",
      x_range=(0.0, 1.0),
      y_range=(0.0, 1.0),
    ),
    charts.line_chart(
      f"mAUPRC on val, {mean}", _series(val, marks=True), x_label="step", y_label="mAUPRC on val"
    ),
  ]


def _series(curves: Mapping[str, tables.Curve], *, marks: bool = False) -> list[charts.Series]:
  """Returns the curves, best mean first; a method has the same color in all charts."""
  series = [
    charts.Series(name, x, y, None if i == 0 else i - 1, marks=marks and len(x) <= 40)
    for i, (name, (x, y)) in enumerate(curves.items())
  ]
  return sorted(
    series, key=lambda one: -float(np.nan_to_num(np.mean(one.y))) if len(one.y) else 0.0
  )


def _row(folder: Path, table: Mapping[str, Any], entry: Mapping[str, Any]) -> comparison_lib.Row:
  names = tuple(
    plans.RunName(entry["method"], entry["learning_rate"], seed) for seed in table["plan"]["seeds"]
  )
  if [name.folder() for name in names] != entry["runs"]:
    raise ValueError(
      f"{folder / 'table.json'} is corrupt (the runs of {entry['method']!r} are not those of its "
      "learning rate and seeds): remove it, and the command of soprc compare writes it again"
    )
  val = {
    float(rate): np.nan if value is None else value for rate, value in entry["val_by_rate"].items()
  }
  return comparison_lib.Row(entry["method"], entry["learning_rate"], val, names)


def _rates(entries: Sequence[Mapping[str, Any]]) -> Markup:
  rates = sorted({float(rate) for entry in entries for rate in entry["val_by_rate"]})
  rows = []
  for entry in entries:
    found = {float(rate): value for rate, value in entry["val_by_rate"].items()}
    cells = [
      page.Number("broke down") if found.get(rate, 0) is None else found.get(rate) for rate in rates
    ]
    rows.append([page.name(entry["label"]), *cells])
  return page.table(
    "mAUPRC on val at the first seed, by learning rate",
    ["method", *(f"{rate:g}" for rate in rates)],
    rows,
  )


def _searches(searches: Sequence[Mapping[str, Any]]) -> Markup:
  cells = [[page.name(row[0]), *row[1:]] for row in tables.search_cells(searches)]
  return page.table("Random trials of each method", tables.search_header(searches), cells)


def _costs(table: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Markup:
  rows, size = [], table["config"]["train"]["batch_size"]
  for entry in entries:
    seconds = entry["step_seconds"]
    cells = [1e3 * seconds, size / seconds if seconds else None, entry["peak_memory_bytes"] / 2**20]
    rows.append([page.name(entry["label"]), *(page.number(cell, 0) for cell in cells)])
  caption = (
    "Cost of a training step of the whole batch, on "
    f"{table.get('costs_on', 'a device that was not noted')}"
  )
  return page.table(caption, ["method", "milliseconds", "images per second", "memory, MiB"], rows)


def _own_keys(
  folder: Path, methods: Sequence[Mapping[str, Any]], default: Mapping[str, Any]
) -> Markup | None:
  """Returns the keys of loss and optimizer by method; None if all runs' folders are gone."""
  configs = {entry["label"]: _own_config(folder, entry) for entry in methods}
  if not any(configs.values()):
    return None
  rows = []
  for label, own in configs.items():
    changed = run_tables.changes(own, default).items()
    told = [
      page.markup("<code>{}={}</code>", key, value)
      for key, value in changed
      if key.startswith(("loss.", "optim."))
    ]
    rows.append([page.name(label), Markup(", ").join(told) if own else "its folder is gone"])
  caption = (
    "Keys of loss and optimizer that differ from the defaults, by method (at the first seed)"
  )
  return page.table(caption, ["method", "keys"], rows)


def _own_config(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
  found = workdir_lib.find_config(folder / entry["runs"][0])
  return run_tables.flat(found) if found else {}


def _software(folder: Path, table: Mapping[str, Any]) -> dict[str, object]:
  path = folder / table["methods"][0]["runs"][0] / workdir_lib.RESULTS
  found = stored.read_json(path, dict) if path.exists() else {}
  devices = table.get("trained_on") or [found.get("device", "not noted")]
  noted = found.get("versions")
  return {
    "device": " and ".join(map(str, devices)),
    "noted": noted,
    "software": run_tables.versions(noted),
  }


def _with_deviation(found: Mapping[str, Any]) -> str:
  if found["mean"] is None:
    return "-"
  return f"{found['mean']:.4f}" + ("" if found["std"] is None else f" ± {found['std']:.4f}")


def _difference(entry: Mapping[str, Any]) -> per_query.Difference | None:
  """Returns the first method's mAUPRC minus that of this one; None in tables of older versions."""
  found = entry.get("first_minus_this")
  return None if found is None else per_query.Difference(**found)


def _mean(entry: Mapping[str, Any]) -> float:
  value = entry["test"]["mAUPRC"]["mean"]
  return -np.inf if value is None else float(value)


def _at_edge(entry: Mapping[str, Any]) -> bool:
  if "at_edge" in entry:
    return bool(entry["at_edge"])
  rates = [float(rate) for rate in entry["val_by_rate"]]
  return len(rates) > 1 and entry["learning_rate"] in (min(rates), max(rates))
