"""v of some classes over time, against the scores that it tracks."""

from typing import Any

import numpy as np

from soprc_jax._internal.strings import printable
from soprc_jax.reports import charts, page, reading
from soprc_jax.reports.markup import Markup, join, paragraph, tag

_CLASSES = 6
_NAME = 40
_QUANTILES = {"10 %": 0.1, "median": 0.5, "90 %": 0.9}


def section(run: reading.Run) -> Markup:
  """Charts of v and of the true scores, by class, and how far they are apart."""
  if run.v is None or not any(line["classes"] for line in run.v):
    return paragraph(_why_not(run), class_="note")
  history = by_class(run.v)
  shown = dict(list(history.items())[:_CLASSES])
  last = float(max(run.results["steps"], 1))
  about = paragraph(
    "Eq. 10 keeps a moving average v of the scores of the positive pairs of each class, interpolated to "
    f"{run.config.loss.num_points} points. Here it stands beside the scores of all positive pairs of the class among the training images, by the network of the "
    "same step. A solid line is v, a dashed one the true scores: the closer they are, the better the loss sees the whole class. v is made of training images, augmented and with the batch's own statistics where batch norm is not frozen, and lags "
    "behind; the true scores are of the images and the network as in evaluation. A class that no batch has held yet has no v."
  )
  pictures = [
    picture for name, lines in shown.items() for picture in (_over_time(name, lines, last), _profile(name, lines))
  ]
  rest = (
    f" Of {len(history)} classes that were logged, the first {len(shown)} are drawn." if len(history) > len(shown) else ""
  )
  return join(
    [
      about,
      paragraph(rest) if rest else "",
      tag("div", _distance_chart(history, last), class_="charts"),
      tag("div", *pictures, class_="charts"),
      _table(history),
    ]
  )


def by_class(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
  """Class -> its entries, each with its step, in the order of the file; a class is told by its row, since two may have one name."""
  rows: dict[int, list[dict[str, Any]]] = {}
  for line in lines:
    for entry in line["classes"]:
      rows.setdefault(entry["row"], []).append({"step": line["step"], **entry})
  names = [printable(entries[0]["class"]) for entries in rows.values()]
  return {
    name if names.count(name) == 1 else f"{name} (row {row})": entries
    for name, (row, entries) in zip(names, rows.items(), strict=True)
  }


def distance(entry: dict[str, Any]) -> float:
  """Mean over the points of ``|v - true|``; NaN for a class that was not seen yet.

  >>> distance({"weight": 1.0, "v": [0.0, 0.5], "true": [0.25, 0.75]})
  0.25
  """
  if not entry["weight"] > 0:
    return float("nan")
  return float(np.mean(np.abs(np.array(entry["v"]) - np.array(entry["true"]))))


def _why_not(run: reading.Run) -> str:
  loss = run.config.loss
  if loss.name != "soprc":
    return f"Left out: the loss {loss.name} has no v."
  if loss.v != "carried":
    return f"Left out: with loss.v={loss.v} nothing is tracked from step to step."
  return "Left out: the folder has no v.jsonl, in which later versions of experiments.train note v of some classes at each evaluation."


def _steps(entries: list[dict[str, Any]]) -> np.ndarray:
  return np.array([entry["step"] for entry in entries], float)


def _over_time(name: str, entries: list[dict[str, Any]], last: float) -> Markup:
  series = []
  for style, (label, share) in enumerate(_QUANTILES.items()):
    seen = [np.quantile(entry["v"], share) if entry["weight"] > 0 else np.nan for entry in entries]
    true = [np.quantile(entry["true"], share) for entry in entries]
    series.append(charts.Series(f"v, {label}", _steps(entries), np.array(seen, float), style, dash=0, marks=True))
    series.append(charts.Series(f"true, {label}", _steps(entries), np.array(true, float), style, dash=1))
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
    title, series, x_label="share of the positive pairs below", y_label="cosine similarity", x_range=(0.0, 1.0)
  )


def _distance_chart(history: dict[str, list[dict[str, Any]]], last: float) -> Markup:
  series = [
    charts.Series(
      f"class {page.shorten(name, _NAME)}",
      _steps(entries),
      np.array([distance(entry) for entry in entries]),
      style,
      marks=True,
    )
    for style, (name, entries) in enumerate(list(history.items())[:_CLASSES])
  ]
  return charts.line_chart(
    "Distance of v to the true scores", series, x_label="step", x_range=(0.0, last), y_label="mean of |v - true|"
  )


def _table(history: dict[str, list[dict[str, Any]]]) -> Markup:
  rows = []
  for name, entries in history.items():
    last = entries[-1]
    apart = distance(last)
    rows.append(
      [
        page.name(name),
        page.number(last["visits"]),
        page.number(last["last_visit"] or None),
        page.number(float(last["weight"])),
        page.number(None if np.isnan(apart) else apart),
      ]
    )
  return page.table(
    "State of the logged classes at the last evaluation",
    ["class", "batches that held a pair of it", "the last of them at step", "weight of v", "mean of |v - true|"],
    rows,
  )
