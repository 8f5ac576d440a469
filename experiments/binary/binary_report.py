"""Writes the results of the study of imbalanced and of multi-label classification.

They are a table, every value as JSON, and two plots.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.binary import binary, binary_losses, binary_runs, multilabel_values
from experiments.compare import tables
from soprc_jax._internal import text_table
from soprc_jax.data import tabular
from soprc_jax.training import plots, workdir

TABLE, PR_CURVES, CONVERGENCE = "table.md", "pr_curves.png", "convergence.png"
# Resamples of the test examples, with one list and with several labels.
_RESAMPLES, _RESAMPLES_OF_LABELS = 200, 60


def write(
  folder: Path,
  config: Any,
  rows: Sequence[binary_runs.Row],
  costs: Mapping[str, float],
  about: Mapping[str, Any],
  groups: np.ndarray | None = None,
) -> str:
  """Writes the four files and returns the table.

  Args:
    folder: folder of the study.
    config: resolved config.
    rows: methods. The first one is compared with the others.
    costs: method -> seconds of a step.
    about: further content of ``results.json``. ``machine`` is also printed below the table. With
      several labels it has ``classes`` (`multilabel_values.classes`).
    groups: ``[n]`` group of each test example, with several labels.
  """
  labels = about.get("classes")
  values = {
    row.method: multilabel_values.test_values(row, labels["positives"])
    if labels
    else _test_values(row)
    for row in rows
  }
  errors = example_errors(rows, groups)
  table = markdown(config, rows, values, errors, costs, about)
  results = {
    "config": config.to_dict(),
    **about,
    "methods": [
      _entry(row, values[row.method], costs)
      | (_of_classes(row) if labels else {})
      | {"difference_error_over_examples": tables.or_none(errors[row.method])}
      for row in rows
    ],
  }
  workdir.write_results(folder, results)
  workdir.write_atomically(folder / TABLE, table)
  curves = {binary_losses.LABELS[row.method]: _mean_pr_curve(row) for row in rows}
  title = f"{config.data.name}, mean over {len(config.seeds)} seeds"
  plots.plot_curves(
    folder / PR_CURVES, curves, title=f"Test: {title}", axes=("recall", "precision")
  )
  steps = config.eval.every * (1 + np.arange(rows[0].convergence.shape[1]))
  curves = {binary_losses.LABELS[row.method]: (steps, row.convergence.mean(axis=0)) for row in rows}
  plots.plot_curves(
    folder / CONVERGENCE,
    curves,
    title=f"Val: {title}",
    axes=("step", "AUPRC"),
    markers=True,
    top=None,
  )
  return table


def markdown(
  config: Any,
  rows: Sequence[binary_runs.Row],
  values: Mapping[str, Mapping[str, np.ndarray]],
  errors: Mapping[str, float],
  costs: Mapping[str, float],
  about: Mapping[str, Any],
) -> str:
  """Returns a table of the methods, the best by the first metric first.

  It has the paired difference of the first method to each other one, with its standard error over
  the seeds and that over the test examples (``errors``, see `example_errors`).
  """
  first, keys = rows[0].method, list(values[rows[0].method])
  main, labels = keys[0], about.get("classes")
  header = [
    "method",
    "rate",
    *(f"test {key}" for key in keys),
    f"{binary_losses.LABELS[first]} minus this",
    "step, ms",
  ]
  lines = []
  for row in sorted(rows, key=lambda row: -np.nan_to_num(values[row.method][main].mean())):
    own = values[row.method]
    cells = [
      binary_losses.LABELS[row.method],
      f"{row.rate:g}{'*' if row.at_edge() else ''}",
      *(tables.mean_and_deviation(own[key]) for key in keys),
      ""
      if row.method == first
      else f"{tables.difference(values[first][main], own[main])} ± {errors[row.method]:.4f}",
      f"{1e3 * costs[row.method]:.2f}",
    ]
    lines.append(cells)
  count = len(config.seeds)
  notes = [
    "",
    f"{config.data.name}: {about['data']} The AUPRC of chance is {about['chance']:.4f}. Mean ± "
    f"standard deviation over {count} seed{'s' if count > 1 else ''} (division into train and "
    "val, weights, batches; one test split for all); learning rate chosen by the mean validation "
    "AUPRC (* at the edge of the grid); the model with the best validation AUPRC is tested. "
    "Difference paired by seed, ± standard error over the seeds, ± standard error over the test "
    + (
      f"groups of examples ({_RESAMPLES_OF_LABELS} bootstrap resamples). "
      f"{multilabel_values.note(labels)}"
      if labels
      else f"examples (of each class, {_RESAMPLES} bootstrap resamples)."
    ),
    f"Step: {config.data.batch_size} examples; the methods take turns (LibAUC in its own process, "
    f"after them). {about['machine']}",
  ]
  return "\n".join([text_table.markdown(header, lines), *notes]) + "\n"


def describe(splits: tabular.Splits) -> str:
  """Returns one sentence about the sizes of a split."""
  parts = {"train": splits.train, "val": splits.val, "test": splits.test}
  sizes = [
    f"{name} {len(part.labels):,} ({part.labels.sum():,} positive)" for name, part in parts.items()
  ]
  return f"{', '.join(sizes)}, {len(splits.feature_names)} features."


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
  """Computes the share of (positive, negative) pairs in the right order, ties one half.

  >>> print(auroc(np.array([0.9, 0.4, 0.4, 0.1]), np.array([1, 1, 0, 0])))
  0.875
  """
  negatives, positives = np.sort(scores[labels <= 0]), scores[labels > 0]
  below = np.searchsorted(negatives, positives, side="left") + np.searchsorted(
    negatives, positives, side="right"
  )
  return float(np.mean(below) / (2 * len(negatives)))


def example_errors(
  rows: Sequence[binary_runs.Row], groups: np.ndarray | None = None
) -> dict[str, float]:
  """Computes how the difference of the first method to each other one varies with the test set.

  The models stay, and the test examples of each class are resampled with replacement. All seeds
  have the same test examples. With several labels, whole groups of examples are resampled.

  Returns:
    method -> bootstrap standard error of the mean difference over the seeds, in AUPRC. It is NaN if
    a training diverged, and 0 for the first method.
  """
  labels, rng = rows[0].labels[0], np.random.default_rng(0)
  groups = np.arange(len(labels)) if groups is None else groups
  weights = _bootstrap(rng, labels) if labels.ndim == 1 else _bootstrap_groups(rng, groups)
  means = {
    row.method: np.mean([_mean_auprc(scores, labels, weights) for scores in row.scores], axis=0)
    if np.isfinite(row.val).all()
    else np.full(len(weights), np.nan)
    for row in rows
  }
  first = means[rows[0].method]
  return {method: float(np.std(first - own, ddof=1)) for method, own in means.items()}


def weighted_auprc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Computes the AUPRC for each row of weights ``[W, n]``, as if example i came ``w_i`` times.

  It is NaN without a positive.
  """
  order = np.argsort(-scores)
  ends = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True])
  positive = np.flatnonzero(labels[order] > 0)
  # Equal scores share the precision at the last of them.
  at = ends[np.searchsorted(ends, positive)]
  found = []
  for own in weights:
    own = own[order].astype(np.float64)
    hits = np.zeros(len(own))
    hits[positive] = own[positive]
    precision = np.cumsum(hits)[at] / np.maximum(np.cumsum(own)[at], 1)
    weight = own[positive]
    found.append(np.average(precision, weights=weight) if weight.any() else np.nan)
  return np.array(found)


def _mean_auprc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Computes `weighted_auprc`, of several labels its mean over those with a positive."""
  found = [weighted_auprc(*own, weights) for own in _lists(scores, labels)]
  return np.nanmean(found, axis=0)


def _lists(scores: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns scores and labels ``[n]`` of the list, or of each label that has a positive."""
  if labels.ndim == 1:
    return [(scores, labels)]
  return [(scores[:, k], labels[:, k]) for k in np.flatnonzero(labels.any(axis=0))]


def _bootstrap_groups(rng: np.random.Generator, groups: np.ndarray) -> np.ndarray:
  """Draws how often each example is in a resample of whole groups, ``[W, n]``."""
  _, member = np.unique(groups, return_inverse=True)
  count = member.max() + 1
  drawn = rng.integers(count, size=(_RESAMPLES_OF_LABELS, count))
  return np.stack([np.bincount(own, minlength=count)[member] for own in drawn])


def _bootstrap(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
  """Draws how often each example is in a resample, ``[W, n]``; each class keeps its number."""
  weights = np.zeros((_RESAMPLES, len(labels)), np.int32)
  for rows in (np.flatnonzero(labels > 0), np.flatnonzero(labels <= 0)):
    for own in weights:
      own[rows] = np.bincount(rng.integers(len(rows), size=len(rows)), minlength=len(rows))
  return weights


def pr_curve(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Computes recall, ascending, and precision at each distinct score."""
  order = np.argsort(-scores)
  ends = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True])
  hits = np.cumsum(labels[order] > 0)[ends]
  return hits / hits[-1], hits / (1 + ends)


def _test_values(row: binary_runs.Row) -> dict[str, np.ndarray]:
  """Returns metric -> ``[S]`` values, NaN where training diverged."""
  broken = ~np.isfinite(row.val)
  found = {
    "AUPRC": np.array(
      [float(binary.auprc(*run)) for run in zip(row.scores, row.labels, strict=True)]
    ),
    "AUROC": np.array([auroc(*run) for run in zip(row.scores, row.labels, strict=True)]),
  }
  return {key: np.where(broken, np.nan, values) for key, values in found.items()}


def _mean_pr_curve(row: binary_runs.Row, *, points: int = 501) -> tuple[np.ndarray, np.ndarray]:
  """Returns recall ``[points]``, and the mean precision there over the seeds and labels.

  Runs that diverged are left out.
  """
  grid = np.linspace(0, 1, points)
  fine = np.isfinite(row.val)
  curves = [
    np.interp(grid, *pr_curve(*own))
    for run in zip(row.scores[fine], row.labels[fine], strict=True)
    for own in _lists(*run)
  ]
  return grid, np.mean(curves, axis=0) if curves else np.full(points, np.nan)


def _entry(
  row: binary_runs.Row, values: Mapping[str, np.ndarray], costs: Mapping[str, float]
) -> dict[str, Any]:
  return {
    "method": row.method,
    "label": binary_losses.LABELS[row.method],
    "learning_rate": row.rate,
    "val_by_rate": {f"{rate:g}": tables.or_none(value) for rate, value in row.val_by_rate.items()},
    "val": [tables.or_none(value) for value in row.val],
    "test": {key: [tables.or_none(value) for value in found] for key, found in values.items()},
    "step_seconds": costs[row.method],
  }


def _of_classes(row: binary_runs.Row) -> dict[str, Any]:
  """Returns the test AUPRC of each label, a mean over the seeds; None without a positive."""
  runs = [multilabel_values.per_class(*run) for run in zip(row.scores, row.labels, strict=True)]
  return {"test_per_class": [tables.or_none(value) for value in np.mean(runs, axis=0)]}
