"""Draws the charts of a run: over steps, recall and classes, and of v against the true scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
import numpy as np

from soprc_jax._internal.strings import printable
from soprc_jax.reports import charts, page, ranking, reading

# Class -> its entries in v.jsonl, each with its step.
History = dict[str, list[dict[str, Any]]]

_BINS = 20
# Number of classes whose v is drawn, and maximum number of characters of their names in a title.
V_CLASSES = 6
_NAME = 40
_QUANTILES = {"10 %": 0.1, "median": 0.5, "90 %": 0.9}


def convergence(run: reading.Run) -> list[Markup]:
  """Draws loss, validation metrics, learning rate and prior against the step."""
  warmup = run.config.warmup.steps
  marked = (float(warmup), "end of the warm-up") if warmup else None
  steps, losses = run.column("loss")
  x, y, size = charts.thinned(steps, losses)
  smooths = len(steps) >= 100
  loss = [charts.Series("each step" if size == 1 else f"mean of {size} steps", x, y, faint=smooths)]
  if smooths:
    smooth = charts.thinned(steps, losses, most=50)
    loss.append(charts.Series(f"mean of {smooth[2]} steps", smooth[0], smooth[1]))
  parts = [
    charts.line_chart(
      "Training loss", loss, x_label="step", y_label="loss", x_range=_axis(run), marked=marked
    ),
    _val(run, marked),
    _scalar(run, "learning_rate", "Learning rate", "learning rate", marked),
  ]
  if run.column("prior")[0].size:
    parts.append(_scalar(run, "prior", "Prior in the loss", "share of positives π", marked))
  return parts


def precision_recall(run: reading.Run) -> Markup | None:
  """Draws mean precision against mean recall; None if the run has no curve."""
  if run.curve is None:
    return None
  return charts.line_chart(
    "Mean precision and recall over the test queries",
    [charts.Series("test", *run.curve)],
    x_label="mean recall",
    y_label="mean precision",
    x_range=(0.0, 1.0),
    y_range=(0.0, 1.0),
  )


def by_class(found: ranking.Classes) -> Markup:
  """Draws the distribution of the mean AP by class."""
  return charts.histogram(
    "Distribution of the mean AP by class",
    found.ap,
    edges=np.linspace(0.0, 1.0, _BINS + 1),
    x_label="mean AP of a class",
    y_label="number of classes",
  )


def time(run: reading.Run) -> list[Markup]:
  """Draws the seconds of each step; returns an empty list if none was logged."""
  steps, seconds = run.column("seconds")
  kept = seconds[np.isfinite(seconds)]
  if not kept.size:
    return []
  x, y, size = charts.thinned(steps, seconds)
  waits = charts.thinned(*run.column("data_wait"))
  # Without this limit one slow step, the first, would hide the differences of the others.
  top = float(np.quantile(kept, 0.99)) * 1.15
  title = "Seconds per step" + (f", means of {size} steps" if size > 1 else "")
  series = [
    charts.Series("whole step", x, np.where(y <= top, y, np.nan)),
    charts.Series("waiting for images", waits[0], np.where(waits[1] <= top, waits[1], np.nan), 1),
  ]
  above = int((y > top).sum())
  note = f"{above} slower point{'s' * (above > 1)} outside the plot." if above else ""
  return [
    charts.line_chart(
      title,
      series,
      x_label="step",
      y_label="seconds",
      x_range=_axis(run),
      y_range=(0.0, top),
      note=note,
    )
  ] * (top > 0)


def v(run: reading.Run, history: History) -> tuple[Markup, list[Markup]]:
  """Draws the distance of v to the true scores, and v of each class over time and at the end.

  Args:
    run: the run of the report.
    history: result of `v_by_class`; its first `V_CLASSES` classes are drawn.
  """
  last = _axis(run)[1]
  drawn = dict(list(history.items())[:V_CLASSES])
  pictures = [
    (_over_time(name, entries, last), _profile(name, entries)) for name, entries in drawn.items()
  ]
  return _distances(drawn, last), [picture for pair in pictures for picture in pair]


def v_by_class(lines: Sequence[Mapping[str, Any]]) -> History:
  """Groups the lines of ``v.jsonl`` by class; adds the row to names that occur several times."""
  rows: dict[int, list[dict[str, Any]]] = {}
  for line in lines:
    for entry in line["classes"]:
      rows.setdefault(entry["row"], []).append({"step": line["step"], **entry})
  names = [printable(entries[0]["class"]) for entries in rows.values()]
  return {
    name if names.count(name) == 1 else f"{name} (row {row})": entries
    for name, (row, entries) in zip(names, rows.items(), strict=True)
  }


def v_distance(entry: Mapping[str, Any]) -> float:
  """Returns the mean of ``|v - true|`` over the points; NaN for a class that was not seen yet.

  >>> v_distance({"weight": 1.0, "v": [0.0, 0.5], "true": [0.25, 0.75]})
  0.25
  """
  if not entry["weight"] > 0:
    return float("nan")
  return float(np.mean(np.abs(np.array(entry["v"]) - np.array(entry["true"]))))


def _val(run: reading.Run, marked: tuple[float, str] | None) -> Markup:
  unseen = "images" if run.config.data.label_separator else "classes"
  title, series = f"Validation ({unseen} not seen in training)", []
  for style, key in enumerate(("mAUPRC", "recall@1")):
    steps, values = run.column(f"val_{key}")
    if steps.size:
      series.append(charts.Series(key, steps, values, style, marks=len(steps) <= 60))
  if not series:
    return charts.empty(
      title, "This run has no validation split, so nothing was evaluated during training."
    )
  return charts.line_chart(
    title, series, x_label="step", y_label="value on validation", x_range=_axis(run), marked=marked
  )


def _scalar(
  run: reading.Run, key: str, title: str, label: str, marked: tuple[float, str] | None
) -> Markup:
  steps, values = run.column(key)
  x, y, _ = charts.thinned(steps, values)
  return charts.line_chart(
    title,
    [charts.Series(title, x, y)],
    x_label="step",
    y_label=label,
    x_range=_axis(run),
    marked=marked,
  )


def _axis(run: reading.Run) -> tuple[float, float]:
  """Returns the range of the x axis of all charts over the steps."""
  return 0.0, float(max(run.results["steps"], 1))


def _steps(entries: list[dict[str, Any]]) -> np.ndarray:
  return np.array([entry["step"] for entry in entries], float)


def _over_time(name: str, entries: list[dict[str, Any]], last: float) -> Markup:
  series = []
  for style, (label, share) in enumerate(_QUANTILES.items()):
    seen = [np.quantile(entry["v"], share) if entry["weight"] > 0 else np.nan for entry in entries]
    true = [np.quantile(entry["true"], share) for entry in entries]
    series.append(
      charts.Series(
        f"v, {label}", _steps(entries), np.array(seen, float), style, dash=0, marks=True
      )
    )
    series.append(
      charts.Series(f"true, {label}", _steps(entries), np.array(true, float), style, dash=1)
    )
  return charts.line_chart(
    f"Class {page.shorten(name, _NAME)}: quantiles over time",
    series,
    x_label="step",
    x_range=(0.0, last),
    y_label="cosine similarity",
  )


def _profile(name: str, entries: list[dict[str, Any]]) -> Markup:
  last = entries[-1]
  at = (np.arange(len(last["v"])) + 0.5) / len(last["v"])
  v = np.array(last["v"], float) if last["weight"] > 0 else np.full(len(at), np.nan)
  series = [
    charts.Series("v", at, v, 0),
    charts.Series("true", at, np.array(last["true"], float), 1, dash=1),
  ]
  title = f"Class {page.shorten(name, _NAME)}: all points at step {last['step']:,}"
  return charts.line_chart(
    title,
    series,
    x_label="share of the positive pairs below",
    y_label="cosine similarity",
    x_range=(0.0, 1.0),
  )


def _distances(history: History, last: float) -> Markup:
  series = [
    charts.Series(
      f"class {page.shorten(name, _NAME)}",
      _steps(entries),
      np.array([v_distance(entry) for entry in entries]),
      style,
      marks=True,
    )
    for style, (name, entries) in enumerate(history.items())
  ]
  return charts.line_chart(
    "Distance of v to the true scores",
    series,
    x_label="step",
    x_range=(0.0, last),
    y_label="mean of |v - true|",
  )
