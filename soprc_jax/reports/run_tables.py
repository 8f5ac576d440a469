"""Makes the tables of a run: results next to the paper's, state of v, time, config, software."""

from collections.abc import Collection, Mapping
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup
from ml_collections import ConfigDict
import numpy as np

from soprc_jax.reports import page, paper_numbers, reading, run_charts
from soprc_jax.reports.tested import Tested
from soprc_jax.training import config as config_lib
from soprc_jax.training import methods, superclass_metrics, trivial_baselines
from soprc_jax.training import results as results_lib

_COUNTS = {
  "num_queries": "queries",
  "num_skipped": "queries without a positive, skipped",
  "num_broken": "unreadable images, skipped",
  "num_repeats": "random galleries",
}


def headline(run: reading.Run) -> list[tuple[str, str]]:
  """Returns name and value of the most important metrics."""
  test, val = run.results["test"], run.results["val"]
  shown = [("test mAUPRC", f"{test['mAUPRC']:.4f}")]
  shown += [
    (f"test {name}", f"{value:.4f}") for name, value in test.items() if name.startswith("recall@")
  ][:2]
  shown += [
    (f"test {name}", f"{test[name]:.4f}") for name in superclass_metrics.NAMES if name in test
  ]
  shown += [("val mAUPRC", f"{val['mAUPRC']:.4f}")] if "mAUPRC" in val else []
  if "num_queries" in test:
    shown.append(("test queries", f"{test['num_queries']:,}"))
  return shown


def metrics(run: reading.Run) -> Markup:
  """Tabulates all metrics of all splits."""
  found = run.results
  names = reading.splits(found)
  keys = dict.fromkeys(
    key for name in names for key, value in found[name].items() if isinstance(value, float)
  )
  titles = {key: key for key in keys}
  titles |= {
    key: title for key, title in _COUNTS.items() if any(key in found[name] for name in names)
  }
  rows = [
    [title, *(_with_limits(found[name], key) for name in names)] for key, title in titles.items()
  ]
  return page.table(
    "Every metric of every evaluation (values from 0 to 1), on test with its 95 % interval for new "
    "classes",
    ["metric", *names],
    rows,
  )


def _with_limits(values: Mapping[str, Any], key: str) -> page.Cell:
  limits = values.get("intervals", {}).get(key)
  if limits is None:
    return values.get(key)
  return page.Number("{:.4f} [{:.4f}, {:.4f}]".format(values[key], *limits))


def baselines(run: reading.Run) -> list[Markup]:
  """Tabulates the metrics of each test split next to those of the baselines of the run."""
  found = []
  for split in reading.splits(run.results):
    names, rows = trivial_baselines.table(run.results, split)
    cells = [[page.name(title), *values] for title, values in rows]
    caption = f"{split}: the trained model and the baselines on the same images"
    found += [page.table(caption, ["", *map(_title, names)], cells, own={0})] if cells else []
  return found


def beside(run: reading.Run) -> list[tuple[Markup, str, list[str]]]:
  """Tabulates the paper's results on the same data, with the run in the first row.

  Returns:
    Tables, each with its note (may be empty) and the names of the metrics that the run lacks. Empty
    if the paper has no results on the data.
  """
  source = run.config.data.source
  if not paper_numbers.has(source):
    return []
  splits = reading.splits(run.results)
  tables = {
    split: paper_numbers.reported(source, trainval=run.config.data.trainval, split=split)
    for split in splits
  }
  return [_beside(table, run, split) for split, table in tables.items() if table is not None]


def _beside(
  table: paper_numbers.Reported, run: reading.Run, split: str
) -> tuple[Markup, str, list[str]]:
  own, values = run.config.loss.name, run.results[split]
  mine = page.name(f"this run: {methods.label(own)} on {run.config.data.source}, {split}")
  rows: list[list[page.Cell]] = [[mine, *(percent(values.get(metric)) for metric in table.metrics)]]
  marked = {0}
  for method, reported in table.rows.items():
    same = method == own
    if same:
      marked.add(len(rows))
    title = f"paper: {methods.label(method)}{' (the same loss)' if same else ''}"
    rows.append([title, *(page.number(value, 2) for value in reported)])
  caption = f"The paper's results in percent (Table 1 and its appendix): {table.title}"
  missing = [metric for metric in table.metrics if metric not in values]
  return (
    page.table(caption, ["", *map(_title, table.metrics)], rows, own=marked),
    table.note,
    missing,
  )


def percent(value: float | None) -> page.Number:
  """Formats a share as a cell in percent."""
  return page.number(None if value is None else 100.0 * value, 2)


def _title(metric: str) -> str:
  """Returns a metric's name with a possible line break after its @, so that tables fit a phone."""
  name, at, k = metric.partition("@")
  return page.markup("{}<wbr/>{}", name + at, k) if at else name


def v(history: run_charts.History) -> Markup:
  """Tabulates the last state of the auxiliary vectors v of the logged classes."""
  rows = []
  for name, entries in history.items():
    last = entries[-1]
    apart = run_charts.v_distance(last)
    cells = [
      last["visits"],
      last["last_visit"] or None,
      float(last["weight"]),
      None if np.isnan(apart) else apart,
    ]
    rows.append([page.name(name), *cells])
  header = [
    "class",
    "batches with a positive pair",
    "step of the last such batch",
    "weight of v",
    "mean of |v - true|",
  ]
  return page.table("State of the logged classes at the last evaluation", header, rows)


def time(run: reading.Run, found: Tested | None) -> Markup:
  """Tabulates the speed of training and loading, and of the evaluation if there was one."""
  seconds = run.column("seconds")[1]
  kept = seconds[np.isfinite(seconds)]
  speed = float(run.results.get("images_per_second", np.nan))
  rows: list[list[page.Cell]] = [["images per second (median step)", page.number(speed, 1)]]
  if "data_wait_share" in run.results:
    rows.append(
      ["share of the time waiting for images", page.Number(f"{run.results['data_wait_share']:.1%}")]
    )
  if kept.size:
    rows += [
      ["seconds per step, median", float(np.median(kept))],
      ["seconds per step, 95th percentile", float(np.quantile(kept, 0.95))],
      ["seconds of the slowest step (the first step compiles)", float(kept.max())],
      [
        "total minutes of all steps, without evaluation and checkpoints",
        page.number(float(kept.sum() / 60), 1),
      ],
    ]
  if found is not None:
    embedding = (
      f"seconds to embed {len(found.labels):,} test images for this report, including start-up"
    )
    rows += [
      [embedding, page.number(found.embedding_seconds, 1)],
      [
        f"seconds to rank them for this report, on {found.device}",
        page.number(found.ranking_seconds, 1),
      ],
    ]
  return page.table("Time", ["", "value"], rows)


def data_name(config: ConfigDict) -> str:
  """Returns the displayed name of the data: the user's folder or file, else the data source."""
  own = config.data.source in ("folder", "csv") and config.data.root
  return Path(config.data.root).name or config.data.source if own else config.data.source


def changed(run: reading.Run, own: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys set in addition to the config file, with their values.

  A key of the run's preset stands for the key of ``loss`` that it decides. For runs of older
  versions, they are the keys that differ from the defaults.
  """
  command = run.results.get("command")
  if command is None:
    return changes(own, flat(defaults(run.config.loss.preset)))
  preset, found = f"presets.{run.config.loss.preset}.", {}
  for key, value in command["overrides"].items():
    if key in own:
      found[key] = value  # config.json has another value if the run was resumed with this one
    elif (decided := f"loss.{key.removeprefix(preset)}") in own and key.startswith(preset):
      found[decided] = own[decided]
  return found


def changed_keys(run: reading.Run) -> Markup:
  """Tabulates the keys of `changed` next to the defaults of the preset."""
  preset = run.config.loss.preset
  own, default = flat(run.config.to_dict()), flat(defaults(preset))
  found = changed(run, own)
  rows = [
    [_key(key), _value(value), _value(default[key]) if key in default else "-"]
    for key, value in found.items()
  ]
  command = run.results.get("command")
  what = (
    "differ from the defaults"
    if command is None
    else f"were set in addition to the config {page.shorten(command['config'], 60)}"
  )
  caption = f"The {len(found)} of {len(own)} keys that {what} (defaults of the preset {preset})"
  return page.table(caption, ["key", "value", "default"], rows)


def chosen_keys(run: reading.Run) -> Markup:
  """Tabulates the keys that the run has chosen, with the reasons; empty if there are none."""
  found = run.results.get("chosen", {})
  rows = [
    [_key(key), _value(entry["value"]), page.name(entry["reason"])] for key, entry in found.items()
  ]
  caption = "Keys that the run has chosen by its data and its time"
  return page.table(caption, ["key", "value", "reason"], rows) if rows else Markup("")


def all_keys(own: Mapping[str, Any], changed: Collection[str]) -> Markup:
  """Tabulates all keys of a flat config, with the changed ones highlighted."""
  marked = [i for i, key in enumerate(own) if key in changed]
  rows = [
    [_key(key), _value(value), "changed" if key in changed else ""] for key, value in own.items()
  ]
  return page.table(
    "Every key of the config, with its value",
    ["key", "value", "compared with the default"],
    rows,
    own=marked,
  )


def changes(own: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of a flat config whose values differ from the defaults."""
  return {key: value for key, value in own.items() if default.get(key, object()) != value}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens a config to dotted keys -> values, sorted by key, with tuples as lists.

  >>> flat({"b": {"c": (1, 2)}, "a": 0})
  {'a': 0, 'b.c': [1, 2]}
  """
  found: dict[str, Any] = {}
  for key in sorted(tree):
    value = tree[key]
    if isinstance(value, dict) and value:
      found |= flat(value, f"{prefix}{key}.")
    else:
      found[prefix + key] = json.loads(json.dumps(value, default=list))
  return found


def defaults(preset: str) -> dict[str, Any]:
  """Returns the resolved default config of a preset."""
  config = config_lib.default_config()
  config.loss.preset = preset
  found: dict[str, Any] = config_lib.resolve(config).to_dict()
  return found


def versions(then: Mapping[str, str] | None) -> Markup:
  """Tabulates the software versions of the run (None: not recorded) and of this report."""
  before, now = then or {}, results_lib.software()
  names = dict.fromkeys([*before, *now])
  rows = [[name, page.name(before.get(name, "-")), page.name(now.get(name, "-"))] for name in names]
  return page.table("Versions", ["package", "of the run", "of this report"], rows)


def _key(key: str) -> Markup:
  return page.markup("<code>{}</code>", key)


def _value(value: Any) -> Markup:
  text = value if isinstance(value, str) and value else json.dumps(value)
  return page.markup('<code class="name">{}</code>', text)
