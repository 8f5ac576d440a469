"""Tabulates the results of a comparison: a table in Markdown and JSON, and mean curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.compare import comparison, plans, step_cost
from soprc_jax._internal import stored, text_table
from soprc_jax.metrics import per_query
from soprc_jax.training import methods
from soprc_jax.training import workdir as workdir_lib


class Summary(NamedTuple):
  """Test results of one method over the seeds, at its best learning rate.

  Attributes:
    row: the method and its runs.
    values: metric name -> ``[seeds]``, NaN where a run diverged.
    cost: cost of a training step.
    behind: mAUPRC of the first method minus that of this one, see `difference_of_rows`.
  """

  row: comparison.Row
  values: dict[str, np.ndarray]
  cost: step_cost.Cost
  behind: per_query.Difference | None


Curve = tuple[np.ndarray, np.ndarray]


def summarize(
  folder: Path,
  row: comparison.Row,
  metrics: Sequence[str],
  cost: step_cost.Cost,
  *,
  first: comparison.Row,
) -> Summary:
  """Returns the test metrics of a method over the seeds, and its difference to the first one."""
  values = {
    key: np.array([comparison.metric(folder, run, "test", key) for run in row.runs])
    for key in metrics
  }
  behind = None if row is first else difference_of_rows(folder, first, row)
  return Summary(row, values, cost, behind)


def difference_of_rows(
  folder: Path, first: comparison.Row, other: comparison.Row
) -> per_query.Difference | None:
  """Returns the test mAUPRC of ``first`` minus that of ``other``, by query, class and seed.

  None if a run diverged, or if there are too few test classes for an interval.

  Raises:
    ValueError: a run has no result of each query, or those of two runs are of other queries.
  """
  queries = {run.folder(): _queries(folder, run) for row in (first, other) for run in row.runs}
  found = {name: one for name, one in queries.items() if one is not None}
  if len(found) < len(queries):
    return None
  per_query.check_paired(found)
  a, b = ([found[run.folder()] for run in row.runs] for row in (first, other))
  return per_query.difference(a, b)


def _queries(folder: Path, run: plans.RunName) -> per_query.PerQuery | None:
  """Returns the result of each test query of a run that has ended, or None if it diverged."""
  path = folder / run.folder() / workdir_lib.per_query("test")
  if "diverged" in (comparison.finished(folder, run) or {}):
    return None
  try:
    return per_query.read(path)
  except (FileNotFoundError, ValueError) as error:
    raise ValueError(
      f"{path} is missing or corrupt: remove {path.with_name(workdir_lib.RESULTS)}, and the same "
      "command tests the run again"
    ) from error


def mean_and_deviation(values: np.ndarray) -> str:
  """Formats ``mean ± standard deviation`` over seeds; only the mean for one seed.

  >>> mean_and_deviation(np.array([0.5, 0.7]))
  '0.6000 ± 0.1414'
  """
  deviation = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
  return f"{values.mean():.4f}{deviation}"


def paired_difference(first: np.ndarray, other: np.ndarray) -> tuple[float, float]:
  """Computes the mean over the seeds of first minus other, and its standard error.

  The error is NaN for one seed.

  >>> print([f"{value:.2f}" for value in paired_difference(np.array([0.5, 0.7]), np.array([0.4,
  ...   0.5]))])
  ['0.15', '0.05']
  """
  gaps = first - other
  error = gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else float("nan")
  return float(gaps.mean()), float(error)


def difference(first: np.ndarray, other: np.ndarray) -> str:
  """Formats `paired_difference` for a cell, without the error for one seed.

  >>> difference(np.array([0.5, 0.7]), np.array([0.4, 0.5]))
  '+0.1500 ± 0.0500'
  """
  gap, error = paired_difference(first, other)
  return f"{gap:+.4f}" + ("" if np.isnan(error) else f" ± {error:.4f}")


def markdown(summaries: Sequence[Summary], device: str) -> str:
  """Returns a table of the methods, best mAUPRC first.

  It has the paired difference of the first method to each other one.

  Args:
    summaries: results of the methods.
    device: device on which the costs were measured.
  """
  metrics = list(summaries[0].values)
  header = [
    "method",
    "learning rate",
    *metrics,
    f"{methods.label(summaries[0].row.method)} minus this",
    "P(ahead)",
    "step, ms",
    "memory, MiB",
  ]
  rows, main = [], metrics[0]
  for summary in sorted(summaries, key=lambda summary: -np.nan_to_num(summary.values[main].mean())):
    cells = [
      methods.label(summary.row.method),
      f"{summary.row.rate:g}{'*' if summary.row.at_edge() else ''}",
      *(mean_and_deviation(summary.values[key]) for key in metrics),
      "" if summary.behind is None else str(summary.behind),
      "" if summary.behind is None else f"{summary.behind.probability:.3f}",
      f"{1e3 * summary.cost.step_seconds:.0f}",
      f"{summary.cost.peak_bytes / 2**20:.0f}",
    ]
    rows.append(cells)
  count = len(summaries[0].row.runs)
  lines = [
    text_table.markdown(header, rows),
    "",
    f"Test, mean ± standard deviation over {count} seed{'s' if count > 1 else ''}; "
    f"{_chosen(summaries)}.",
    f"{DIFFERENCES} P(ahead): probability of the first method being ahead on them.",
    *unresolved({methods.label(one.row.method): one.behind for one in summaries}),
    "Step: median time of a training step of the whole batch without loading, measured with the "
    f"methods taking turns. Memory: XLA's plan for that step on one device. Both on {device}.",
  ]
  broken = _broken(summaries)
  if broken:
    lines.append(
      "Training diverged (loss or gradient not finite; left out of the curves): "
      f"{', '.join(broken)}."
    )
  return "\n".join(lines) + "\n"


def search_markdown(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of the random trials of each method, and what it says."""
  searches = as_search(rows)
  table = text_table.markdown(search_header(searches), search_cells(searches))
  return f"{table}\n\n{SEARCH_NOTE}\n"


SEARCH_NOTE = (
  "Random trials with one seed on one split, which are not those of the test: the same number for "
  "each method. The second half is drawn from a larger space if the best trial of the first half "
  "lies in the outer tenth of a range. Expected: mean best validation mAUPRC of this many trials."
)


def as_search(rows: Sequence[comparison.Row]) -> list[dict[str, Any]]:
  """Returns the searches of all methods for table.json."""
  entries = []
  for row in rows:
    found = row.trials
    assert found is not None
    entries.append(
      {
        "label": methods.label(row.method),
        "spaces": [[str(one) for one in space] for space in found.spaces],
        "trials": [
          {**trial, "val": or_none(value)}
          for trial, value in zip(found.trials, found.val, strict=True)
        ],
        "best": found.best,
        "at_edge": found.edges,
        "expected_best": {str(count): value for count, value in found.expected_best().items()},
      }
    )
  return entries


def search_header(searches: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the header of a table of searches, see `as_search`."""
  counts = [f"expected, {count} trials" for count in searches[0]["expected_best"]]
  return ["method", "searched", "best trial", "at an edge", *counts]


def search_cells(searches: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """Returns the rows of a table of searches, see `as_search`."""
  return [
    [
      entry["label"],
      "; ".join(entry["spaces"][-1]),
      "; ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in entry["best"].items()
      ),
      ", ".join(entry["at_edge"]) or "no",
      *(f"{value:.4f}" for value in entry["expected_best"].values()),
    ]
    for entry in searches
  ]


def _chosen(summaries: Sequence[Summary]) -> str:
  """Returns how the hyperparameters were chosen."""
  if summaries[0].row.trials is None:
    return (
      "learning rate chosen on the validation split at the first seed (* at the edge of its grid)"
    )
  return "hyperparameters chosen by random trials, see below (* at the edge of the searched space)"


DIFFERENCES = (
  "Difference of mAUPRC paired by query and seed, with its 95 % interval for new classes and (with "
  "several seeds) new seeds."
)


def unresolved(differences: Mapping[str, per_query.Difference | None]) -> list[str]:
  """Returns a sentence that names the differences whose interval contains 0, if there are any.

  Args:
    differences: displayed name -> difference, None where there is none.
  """
  names = [name for name, one in differences.items() if one is not None and not one.resolved]
  return [f"These data do not resolve the difference to: {', '.join(names)}."] if names else []


def _broken(summaries: Sequence[Summary]) -> list[str]:
  """Returns the names of the runs that diverged."""
  names = []
  for summary in summaries:
    row, values = summary.row, next(iter(summary.values.values()))
    runs = [
      plans.RunName(row.method, rate, row.runs[0].seed)
      for rate, value in row.val.items()
      if np.isnan(value)
    ]
    runs += [run for run, value in zip(row.runs, values, strict=True) if np.isnan(value)]
    names += [
      f"{methods.label(run.method)} at {run.rate:g}, seed {run.seed}" for run in dict.fromkeys(runs)
    ]
  return names


def or_none(value: float | None) -> float | None:
  """Returns the value as a float, or None for NaN, which JSON lacks."""
  return None if value is None or np.isnan(value) else float(value)


def as_json(summaries: Sequence[Summary], about: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the same results for table.json; ``about`` describes the comparison."""

  def entry(summary: Summary) -> dict[str, Any]:
    row = summary.row
    return {
      "method": row.method,
      "label": methods.label(row.method),
      "learning_rate": row.rate,
      "at_edge": row.at_edge(),
      "val_by_rate": {f"{rate:g}": or_none(value) for rate, value in row.val.items()},
      "runs": [run.folder() for run in row.runs],
      "test": {
        key: {
          "mean": or_none(values.mean()),
          "std": or_none(values.std(ddof=1)) if len(values) > 1 else None,
          "values": [or_none(value) for value in values],
        }
        for key, values in summary.values.items()
      },
      "first_minus_this": None if summary.behind is None else summary.behind._asdict(),
      "step_seconds": summary.cost.step_seconds,
      "peak_memory_bytes": summary.cost.peak_bytes,
    }

  found = {**about, "methods": [entry(summary) for summary in summaries]}
  if summaries[0].row.trials is not None:
    found["searches"] = as_search([summary.row for summary in summaries])
  return found


def mean_pr_curve(folder: Path, row: comparison.Row, *, points: int = 501) -> Curve:
  """Returns recall ``[points]`` from 0 to 1, and the mean precision there.

  The mean is over the runs' mean precision. Runs that diverged are left out.

  Raises:
    ValueError: the file of a run is corrupt.
  """
  recall = np.linspace(0.0, 1.0, points)
  curves = []
  for run in row.runs:
    path = folder / run.folder() / workdir_lib.PR_CURVE
    if path.exists():
      found, precision = _pr_curve(path)
      curves.append(np.interp(recall, found, precision))
  return recall, np.mean(curves, axis=0) if curves else np.full(points, np.nan)


def _pr_curve(path: Path) -> Curve:
  """Returns recall, ascending, and precision there.

  Raises:
    ValueError: the file is corrupt.
  """
  try:
    curve = stored.read_arrays(path, ("recall", "precision"))
    recall, precision = curve["recall"], curve["precision"]
    if (
      recall.ndim != 1
      or recall.shape != precision.shape
      or not recall.size
      or {recall.dtype.kind, precision.dtype.kind} != {"f"}
    ):
      raise ValueError(
        f"{path} is corrupt (recall {list(recall.shape)} and precision {list(precision.shape)} are "
        "not a curve)"
      )
  except ValueError as error:
    raise ValueError(f"{error}: remove {path.parent}, and the run is repeated") from error
  # Recall falls as the threshold rises.
  return recall[::-1], precision[::-1]


def mean_convergence(folder: Path, row: comparison.Row) -> Curve:
  """Returns the steps of evaluation, and the mean validation mAUPRC over the seeds.

  Runs that diverged are left out.
  """
  steps, values = logged(folder, row, "val_mAUPRC")
  return steps, values.mean(axis=0) if len(values) else steps


def logged(folder: Path, row: comparison.Row, key: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns ``[N]`` steps whose log line has a key, and its values ``[runs, N]``.

  Runs that diverged are left out. N is 0 if the key is in no log.

  Raises:
    ValueError: the logs of the runs do not have the key at the same steps: one of them is corrupt.
  """
  found: dict[Path, list[tuple[float, float]]] = {}
  for run in row.runs:
    if (folder / run.folder() / workdir_lib.RESULTS).exists():
      path = folder / run.folder() / workdir_lib.METRICS
      lines = [
        (line["step"], line[key]) for line in workdir_lib.read_metrics(path.parent) if key in line
      ]
      problem = stored.problem(
        [{"step": step, key: value} for step, value in lines] or None,
        (None, [{key: (None, float)}]),
      )
      if problem:
        raise ValueError(
          f"{path} is corrupt ({problem}): remove {path.parent}, and the run is repeated"
        )
      found[path] = lines
  sizes = {path: len(lines) for path, lines in found.items()}
  fewest, most = (min(sizes.values()), max(sizes.values())) if sizes else (0, 0)
  if fewest < most:
    path = min(sizes, key=lambda path: sizes[path])
    raise ValueError(
      f"{path} has {key} at {fewest} steps, the log of another seed at {most}: it is corrupt. "
      f"Remove {path.parent}, and the run is repeated"
    )
  values = np.array(list(found.values()), float).reshape(len(found), most, 2)
  return values[0, :, 0] if len(values) else np.zeros(0), values[:, :, 1]
