"""Makes the report on one training run."""

import logging
from pathlib import Path

import numpy as np

from soprc_jax.reports import (
  page,
  panel,
  paper_numbers,
  ranking,
  reading,
  run_charts,
  run_tables,
  tested,
)
from soprc_jax.training import classes, methods, trivial_baselines

_log = logging.getLogger(__name__)
# Tolerance of mAUPRC, since the last digits may differ on other devices.
_SAME = 1e-3


def make(workdir: Path, *, data_root: Path | None = None) -> str:
  """Makes the HTML page on a finished run.

  If the data or the checkpoint are missing, the parts that need the images are left out, and the
  page says so.

  Args:
    workdir: workdir of the run.
    data_root: current place of its data; None: the place at the time of the run.

  Raises:
    ValueError: if there is no run, it has not finished, or a file is corrupt.
    OSError: if a file cannot be read.
  """
  run = reading.read(workdir)
  config, results, own = run.config, run.results, run_tables.flat(run.config.to_dict())
  changed = run_tables.changed(run, own)
  found, missing = _rank(run, data_root)
  return page.document(
    "run.html",
    title=f"{run.workdir.name}: {methods.label(config.loss.name)} on "
    f"{run_tables.data_name(config)}",
    run=run,
    tables=run_tables,
    charts=run_charts,
    headline=run_tables.headline(run),
    step=results.get("tested_step", results["steps"]),
    not_beaten=trivial_baselines.not_beaten(config, results),
    seen=classes.sentence(results["seen_classes"]) if "seen_classes" in results else "",
    beyond=[
      (split, ks)
      for split in reading.splits(results)
      if (ks := results[split].get("ks_beyond_gallery"))
    ],
    in_paper=paper_numbers.has(config.data.source),
    skipped=[line["step"] for line in run.lines if line.get("skipped")],
    history=run_charts.v_by_class(run.v or []),
    keys=own | changed,
    changed_keys=changed,
    noted_versions=results.get("versions"),
    missing=missing,
    tested=found,
    **(_of_images(run, found) if found else {}),
  )


def _rank(run: reading.Run, data_root: Path | None) -> tuple[tested.Tested | None, str]:
  """Returns the rankings of the test images, or the reason why there are none."""
  try:
    return tested.rank(run, data_root=data_root), ""
  except (ArithmeticError, OSError, ValueError) as error:
    _log.warning("The report has no images and no results by class: %s", error)
    return None, str(error)


def _of_images(run: reading.Run, found: tested.Tested) -> dict[str, object]:
  """Returns what the page shows of the ranked test images."""
  by_class = ranking.by_class(found.labels, found.ap)
  there = np.flatnonzero(~np.isnan(by_class.ap))
  count = min(panel.SHOWN_CLASSES, len(there))
  orders = {
    kind: there[np.argsort(sign * by_class.ap[there], kind="stable")][:count]
    for kind, sign in (("lowest", 1), ("highest", -1))
  }
  some = ranking.some_queries(found.ap, panel.SOME)
  worst = ranking.worst_queries(found.labels, found.ap, panel.WORST)
  pairs = ranking.look_alikes(
    found.labels,
    found.nearest,
    right=found.right,
    num_relevant=found.num_relevant,
    count=panel.PAIRS,
    examples=panel.EXAMPLES,
  )
  return {
    "differs": abs(found.metrics["mAUPRC"] - run.results["test"]["mAUPRC"]) > _SAME,
    "num_classes": len(there),
    "num_alone": len(by_class.ap) - len(there),
    "class_chart": run_charts.by_class(by_class),
    "class_tables": [
      panel.class_table(found, by_class, order, f"The {count} classes with the {kind} mean AP")
      for kind, order in orders.items()
    ],
    "some_queries": [panel.query(found, int(position)) for position in some],
    "worst_queries": [panel.query(found, int(position)) for position in worst],
    "pairs": [(pair, panel.pair_rows(found, pair)) for pair in pairs],
    "top": tested.TOP,
    "splits_table": panel.splits_table(found.splits),
    "sample": panel.sample(found.splits["train"]),
  }
