"""Charts of a run over its steps, over recall, and over its classes."""

import numpy as np

from soprc_jax.reports import charts, ranking, reading
from soprc_jax.reports.markup import Markup, join, paragraph, tag

_BINS = 20


def convergence(run: reading.Run) -> Markup:
  """Loss, val metrics, learning rate and prior against the step."""
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
    charts.line_chart("Training loss", loss, x_label="step", y_label="loss", x_range=_steps(run), marked=marked),
    _val(run, marked),
    _scalar(run, "learning_rate", "Learning rate", "learning rate", marked),
  ]
  if run.column("prior")[0].size:
    parts.append(_scalar(run, "prior", "Prior in the loss", "positive rate π", marked))
  return join([*_incidents(run), tag("div", *parts, class_="charts")])


def precision_recall(run: reading.Run) -> Markup:
  """Mean precision against mean recall."""
  if run.curve is None:
    return paragraph("Left out: the folder has no pr_curve.npz.", class_="note")
  recall, precision = run.curve
  curve = charts.Series("test", recall, precision)
  picture = charts.line_chart(
    "Mean precision and recall over the test queries",
    [curve],
    x_label="mean recall",
    y_label="mean precision",
    x_range=(0.0, 1.0),
    y_range=(0.0, 1.0),
  )
  text = paragraph(
    "Each point is a similarity threshold: the mean over all queries of the precision and of the recall of what is at least as similar. A query that "
    "retrieves nothing at a threshold counts with precision 1 and recall 0."
  )
  return join([text, tag("div", picture, class_="charts")])


def by_class(found: ranking.Classes) -> Markup:
  """How many classes have which AP."""
  return charts.histogram(
    "Distribution of the mean AP by class",
    found.ap,
    edges=np.linspace(0.0, 1.0, _BINS + 1),
    x_label="mean AP of a class",
    y_label="number of classes",
  )


def _val(run: reading.Run, marked: tuple[float, str] | None) -> Markup:
  series = []
  for style, key in enumerate(("mAUPRC", "recall@1")):
    steps, values = run.column(f"val_{key}")
    if steps.size:
      series.append(charts.Series(key, steps, values, style, marks=len(steps) <= 60))
  if not series:
    return tag(
      "figure",
      tag("figcaption", "Validation (classes not seen in training)"),
      paragraph("This run has no val, so that nothing was evaluated while it trained.", class_="note"),
      class_="chart",
    )
  return charts.line_chart(
    "Validation (classes not seen in training)",
    series,
    x_label="step",
    y_label="value on val",
    x_range=_steps(run),
    marked=marked,
  )


def _scalar(run: reading.Run, key: str, title: str, label: str, marked: tuple[float, str] | None) -> Markup:
  steps, values = run.column(key)
  x, y, _ = charts.thinned(steps, values)
  return charts.line_chart(
    title, [charts.Series(title, x, y)], x_label="step", y_label=label, x_range=_steps(run), marked=marked
  )


def _steps(run: reading.Run) -> tuple[float, float]:
  """The axis of all charts over the steps."""
  return 0.0, float(max(run.results["steps"], 1))


def _incidents(run: reading.Run) -> list[Markup]:
  """What did not go as planned: steps left out, kept, or not in the log."""
  parts = []
  skipped = [line["step"] for line in run.lines if line.get("skipped")]
  if skipped:
    shown = ", ".join(f"{step:,}" for step in skipped[:10]) + (", ..." if len(skipped) > 10 else "")
    parts.append(
      f"{len(skipped)} of {len(run.lines):,} steps were not finite and left out (train.on_nonfinite=skip): {shown}. The curves have gaps there."
    )
  if run.kept_steps:
    shown = ", ".join(f"{step:,}" for step in run.kept_steps)
    parts.append(f"Kept to be looked at, in diverged/: step {shown} (python -m experiments.replay --workdir=...).")
  if len(run.lines) < run.results["steps"]:
    parts.append(
      f"metrics.jsonl has {len(run.lines):,} of {run.results['steps']:,} steps: it is damaged, and the curves end early."
    )
  return [paragraph(text, class_="warning") for text in parts]
