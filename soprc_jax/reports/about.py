"""How a run was made: its config, its software, its time."""

import json
from typing import Any

import numpy as np

from soprc_jax.reports import charts, page, reading
from soprc_jax.reports.markup import Markup, join, paragraph, tag
from soprc_jax.reports.tested import Tested
from soprc_jax.training import config as config_lib
from soprc_jax.training import results as results_lib


def config(run: reading.Run) -> Markup:
  """Every key; those that differ from the defaults first."""
  own, default = flat(run.config.to_dict()), flat(defaults(run.config.loss.preset))
  changed = [key for key, value in own.items() if default.get(key, object()) != value]
  return join(
    [
      page.table(
        f"The {len(changed)} of {len(own)} keys that differ from the defaults (of the preset {run.config.loss.preset})",
        ["key", "value", "default"],
        [[tag("code", key), _value(own[key]), _value(default[key]) if key in default else "-"] for key in changed],
      ),
      page.details(f"All {len(own)} keys", all_keys(own, changed)),
    ]
  )


def all_keys(own: dict[str, Any], changed: list[str]) -> Markup:
  """A table of all keys of a config, some of them marked."""
  marked = [i for i, key in enumerate(own) if key in changed]
  rows = [[tag("code", key), _value(value), "changed" if key in changed else ""] for key, value in own.items()]
  return page.table("Every key of the config, with its value", ["key", "value", "from the default"], rows, own=marked)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Keys with dots -> values, in order; tuples as lists.

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
  """The resolved default config with a preset."""
  config = config_lib.default_config()
  config.loss.preset = preset
  found: dict[str, Any] = config_lib.resolve(config).to_dict()
  return found


def versions(results: dict[str, Any]) -> Markup:
  """Software and device of the run, and those of this report."""
  then, now = results.get("versions"), results_lib.software()
  names = list(dict.fromkeys([*(then or {}), *now]))
  rows = [[name, page.name((then or {}).get(name, "-")), page.name(now.get(name, "-"))] for name in names]
  note = (
    ""
    if then
    else "The run is of an earlier version, which did not note its software but for what stands beside the device."
  )
  return join(
    [
      paragraph(f"Trained on: {results.get('device', 'not noted')}."),
      paragraph(note, class_="note") if note else "",
      page.table("Versions", ["package", "of the run", "of this report"], rows),
    ]
  )


def timing(run: reading.Run, found: Tested | None) -> Markup:
  """Speed of training, of loading, and of the evaluation."""
  seconds = np.array([line.get("seconds") or np.nan for line in run.lines], float)
  kept = seconds[np.isfinite(seconds)]
  rows = [["images per second (median step)", page.number(float(run.results.get("images_per_second", np.nan)), 1)]]
  if "data_wait_share" in run.results:
    rows.append(["share of the time waiting for images", page.Cell(f"{run.results['data_wait_share']:.1%}", True)])
  if kept.size:
    rows += [
      ["seconds of a step, median", page.number(float(np.median(kept)))],
      ["seconds of a step, 95th percentile", page.number(float(np.quantile(kept, 0.95)))],
      ["seconds of the slowest step (the first compiles)", page.number(float(kept.max()))],
      ["minutes of all steps together, without evaluation and checkpoints", page.number(float(kept.sum() / 60), 1)],
    ]
  if found is not None:
    images = len(found.labels)
    rows += [
      [f"seconds to embed {images:,} test images, for this report, with start-up", page.number(found.embedding_seconds, 1)],
      [f"seconds to rank them, for this report on {found.device}", page.number(found.ranking_seconds, 1)],
    ]
  return join([page.table("Time", ["", "value"], rows), tag("div", *_time_charts(run, seconds), class_="charts")])


def _time_charts(run: reading.Run, seconds: np.ndarray) -> list[Markup]:
  kept = seconds[np.isfinite(seconds)]
  if not kept.size:
    return []
  steps = np.array([line["step"] for line in run.lines], float)
  x, y, size = charts.thinned(steps, seconds)
  waits = charts.thinned(steps, np.array([line.get("data_wait") or 0.0 for line in run.lines], float))
  # One slow step, the first, would press all others flat.
  top = float(np.quantile(kept, 0.99)) * 1.15
  title = "Seconds of a step" + (f", means of {size} steps" if size > 1 else "")
  series = [
    charts.Series("whole step", x, np.where(y <= top, y, np.nan)),
    charts.Series("waiting for images", waits[0], np.where(waits[1] <= top, waits[1], np.nan), 1),
  ]
  above = int((y > top).sum())
  note = f"{above} slower point{'s' * (above > 1)} left out of the picture." if above else ""
  last = float(max(run.results["steps"], 1))
  return [
    charts.line_chart(title, series, x_label="step", y_label="seconds", x_range=(0.0, last), y_range=(0.0, top), note=note)
  ] * (top > 0)


def _value(value: Any) -> Markup:
  return tag("code", value if isinstance(value, str) and value else json.dumps(value), class_="name")
