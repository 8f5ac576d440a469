"""The report on one training run."""

import logging
from pathlib import Path

import numpy as np

from soprc_jax.reports import about, curves, page, panel, ranking, reading, run_charts, run_tables, tested
from soprc_jax.reports.markup import Markup, join, paragraph, tag
from soprc_jax.training import methods

_log = logging.getLogger(__name__)
# Recomputed on other devices, the last digits may differ.
_SAME = 1e-3


def make(workdir: Path, *, data_root: Path | None = None) -> str:
  """The page on a finished run.

  What needs the images is left out where the data or the checkpoint are gone; the page says so.

  Args:
    workdir: of the run.
    data_root: where its data are now; None: where they were.

  Raises:
    ValueError: there is no run, it has not finished, or a file is damaged.
    OSError: a file may not be read.
  """
  run = reading.read(workdir)
  found, missing = _rank(run, data_root)
  sections = [
    page.Section("results", "Results", run_tables.section(run)),
    page.Section("convergence", "Convergence", curves.convergence(run)),
    page.Section("pr-curve", "Mean precision-recall curve", curves.precision_recall(run)),
    page.Section("classes", "Average precision by class", _classes(found) if found else missing),
    page.Section("queries", "Queries and what was found", _queries(found) if found else missing),
    page.Section("look-alikes", "Classes taken for each other", _pairs(found) if found else missing),
    page.Section("tracking", "The tracked scores v", run_charts.section(run)),
    page.Section("timing", "Timing", about.timing(run, found)),
    page.Section("config", "Config", about.config(run)),
    page.Section("versions", "Versions and device", about.versions(run.results)),
  ]
  config = run.config
  title = f"{methods.label(config.loss.name)} on {config.data.source}"
  intro = join(
    [
      paragraph(
        f"{config.model.name} (width {config.model.width}), {run_tables.phases(run)} of {config.train.batch_size} images by {config.optim.name}, seed ",
        f"{config.seed}; folder ",
        tag("code", workdir),
      ),
      run_tables.headline(run),
      _changed(run, found),
    ]
  )
  return page.document(title, intro, sections)


def _rank(run: reading.Run, data_root: Path | None) -> tuple[tested.Tested | None, Markup]:
  """The rankings of the test images, or why there are none."""
  try:
    return tested.rank(run, data_root=data_root), Markup()
  except (ArithmeticError, OSError, ValueError) as error:
    _log.warning("The report goes without pictures and results by class: %s", error)
    return None, paragraph(
      f"Left out, since the test images cannot be ranked again here: {error}. Where the data have moved, give --data_root.",
      class_="warning",
    )


def _changed(run: reading.Run, found: tested.Tested | None) -> Markup:
  """A warning where the test images do not give the result of then."""
  there = run.results["test"]["mAUPRC"]
  if found is None or abs(found.metrics["mAUPRC"] - there) <= _SAME:
    return Markup()
  return paragraph(
    f"Ranked again for this report, the test images have an mAUPRC of {found.metrics['mAUPRC']:.4f}, where the run has found {there:.4f}: the data, the "
    "checkpoint or the software have changed since. Pictures and results by class are those of today.",
    class_="warning",
  )


def _classes(found: tested.Tested) -> Markup:
  by_class = ranking.by_class(found.labels, found.ap)
  there = np.flatnonzero(~np.isnan(by_class.ap))
  worst, best = (there[np.argsort(sign * by_class.ap[there], kind="stable")] for sign in (1, -1))
  alone = len(by_class.ap) - len(there)
  count = min(panel.SHOWN_CLASSES, len(there))
  return join(
    [
      paragraph(
        f"Each test image is a query for the others of its class; the AP of a class is the mean over its images. {len(there):,} classes have one"
        + (f", {alone:,} without: a single image has nothing to find." if alone else ".")
      ),
      tag("div", curves.by_class(by_class), class_="charts"),
      tag(
        "div",
        panel.class_table(found, by_class, worst[:count], f"The {count} classes with the lowest mean AP"),
        panel.class_table(found, by_class, best[:count], f"The {count} classes with the highest mean AP"),
        class_="side",
      ),
    ]
  )


def _queries(found: tested.Tested) -> Markup:
  return join(
    [
      paragraph(
        "Right: of the query's class, a plain frame and ✓. Wrong: of another class, a dashed frame and ✗. The query has a double frame; it is left out "
        "of its own ranking."
      ),
      tag("h3", "Some queries, drawn by chance"),
      panel.queries(found, ranking.some_queries(found.ap, panel.SOME)),
      tag("h3", "The queries with the lowest AP, one of a class"),
      panel.queries(found, ranking.worst_queries(found.labels, found.ap, panel.WORST)),
    ]
  )


def _pairs(found: tested.Tested) -> Markup:
  pairs = ranking.look_alikes(found.labels, found.nearest, count=panel.PAIRS, examples=panel.EXAMPLES)
  if not pairs:
    return paragraph("None: every query has the images of its class before all others.")
  return join(
    [
      paragraph(
        f"A query with P other images of its class should have them in its first P places. Counted are the places of these, among the first {tested.TOP}, "
        "that an image of the other class takes, over all queries of both. The first images of each row are among those that were mistaken."
      ),
      panel.look_alikes(found, pairs),
    ]
  )
