"""Writes the tables and plots of an ablation."""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.ablate import ablation
from experiments.ablate.ablation_stages import PAPER_TABLE_2, Stage
from experiments.compare import comparison, tables
from soprc_jax._internal import stored, text_table
from soprc_jax.metrics import per_query
from soprc_jax.training import plots
from soprc_jax.training import workdir as workdir_lib

_TEST = ("mAUPRC", "recall@1")
# What the training log has on the gradient: key, title, whether on a logarithmic axis.
_SIGNALS = (
  ("grad_norm", "norm of the gradient", True),
  ("saturated_lists", "share of saturated lists", False),
)
_ENDS = 0.1  # share of the run, at each of its two ends, whose mean is reported
_SMOOTHED = 0.05  # share of the run that a point of a curve is the mean of


def write(
  folder: Path, plan: ablation.Plan, results: Mapping[str, Sequence[ablation.Result]]
) -> list[str]:
  """Writes ablation.json, and STAGE.md and STAGE.png of each stage that has results.

  Returns the names of the files.

  Stages that ablation.json has from earlier calls stay in it.
  """
  path = folder / "ablation.json"
  names, content = [], stored.read_json(path, {"stages": dict})["stages"] if path.exists() else {}
  for stage in plan.stages:
    found = results[stage.name]
    if not found:
      continue
    gaps = differences(folder, stage, found)
    workdir_lib.write_atomically(
      folder / f"{stage.name}.md", table(folder, stage, found, gaps, plan.seeds)
    )
    plot(folder / f"{stage.name}.png", folder, stage, found)
    entries = [_entry(folder, result, gaps.get(result.variant.label)) for result in found]
    content[stage.name] = {"title": stage.title, "seeds": plan.seeds, "variants": entries}
    names += [f"{stage.name}.md", f"{stage.name}.png"]
  about = {"init_from": plan.init_from, "stages": content}
  workdir_lib.write_atomically(path, json.dumps(about, indent=1) + "\n")
  return ["ablation.json", *names]


def table(
  folder: Path,
  stage: Stage,
  results: Sequence[ablation.Result],
  gaps: Mapping[str, per_query.Difference | None],
  seeds: Sequence[int],
) -> str:
  """Returns a Markdown table of a stage.

  It has the test metrics over the seeds, the paired differences of `differences`, and the
  gradient's signals.
  """
  paper = stage.name == "table2"
  header = [
    stage.axis or "variant",
    "option",
    "rate",
    "val mAUPRC",
    *_TEST,
    f"minus {stage.reference}",
    "P(ahead of it)",
  ]
  header += [f"{title}, first and last tenth" for _, title, _ in _SIGNALS] + [
    "paper: mAUPRC",
    "recall@1",
  ] * paper
  rows = []
  for result in results:
    gap = gaps.get(result.variant.label)
    cells = [
      result.variant.label,
      result.row.method,
      f"{result.row.rate:g}{'*' if result.row.at_edge() else ''}",
      f"{_values(folder, result, 'val', 'mAUPRC').mean():.4f}",
      *(tables.mean_and_deviation(_values(folder, result, "test", key)) for key in _TEST),
      "" if gap is None else str(gap),
      "" if gap is None else f"{gap.probability:.3f}",
      *(_ends(folder, result, key) for key, _, _ in _SIGNALS),
    ]
    if paper:
      values = PAPER_TABLE_2.get(result.variant.label)
      cells += [f"{value:.2f}" for value in values] if values else ["", ""]
    rows.append(cells)
  notes = [
    f"{stage.title}. Test, {_over(seeds)}; a list is saturated if its risk is above "
    f"0.95.{_choice(results)} {tables.DIFFERENCES if gaps else ''}".rstrip(),
    *tables.unresolved(gaps),
    *(
      [f"{len(stage.variants) - len(results)} of {len(stage.variants)} variants have not finished."]
      * (len(results) < len(stage.variants))
    ),
    *filter(
      None,
      [comparison.seen_classes(folder, (run for result in results for run in result.row.runs))],
    ),
  ]
  return "\n".join([text_table.markdown(header, rows), "", *notes]) + "\n"


def differences(
  folder: Path, stage: Stage, results: Sequence[ablation.Result]
) -> dict[str, per_query.Difference | None]:
  """Returns variant -> its mAUPRC minus that of the stage's reference."""
  reference = next((result for result in results if result.variant.label == stage.reference), None)
  return {
    result.variant.label: tables.difference_of_rows(folder, result.row, reference.row)
    for result in results
    if reference is not None and result is not reference
  }


def _over(seeds: Sequence[int]) -> str:
  if len(seeds) == 1:
    return f"one seed ({seeds[0]})"
  return f"mean ± standard deviation over {len(seeds)} seeds"


def _choice(results: Sequence[ablation.Result]) -> str:
  """Returns a note on how options and learning rates were chosen, if there was a choice."""
  trials = sorted({result.trials for result in results} - {1})
  if not trials:
    return ""
  counted = " or ".join(map(str, trials))
  return (
    " Option and learning rate: the best on the validation split at the first seed, of "
    f"{counted} (* the rate is at the edge of its grid)."
  )


def plot(path: Path, folder: Path, stage: Stage, results: Sequence[ablation.Result]) -> None:
  """Plots all variants of a stage.

  A sweep has test mAUPRC along its axis. All stages have validation mAUPRC and the gradient's
  signals by step.
  """
  panels = 3 + (stage.axis is not None)
  figure, axes = plots.grid(1, panels, size=(4.3, 3.8))
  if stage.axis is not None:
    _plot_sweep(axes[0, 0], folder, stage, results)
  by_step = axes[0, -3:]
  for i, result in enumerate(results):
    style = {
      "color": f"C{i % 10}",
      "linestyle": "-" if i < 10 else "--",
      "label": result.variant.label,
    }
    steps, val = tables.mean_convergence(folder, result.row)
    by_step[0].plot(steps, val, marker="o", markersize=3, **style)
    for axis, (key, _, _) in zip(by_step[1:], _SIGNALS, strict=True):
      signal = _signal(folder, result, key)
      if signal.size:
        width = max(int(_SMOOTHED * signal.size), 1)
        smooth = np.convolve(signal, np.ones(width) / width, mode="valid")
        axis.plot(np.arange(len(smooth)) + width, smooth, linewidth=1.1, **style)
  by_step[0].set(xlabel="step", ylabel="mAUPRC on val")
  for axis, (_, title, is_log) in zip(by_step[1:], _SIGNALS, strict=True):
    axis.set(xlabel="step", ylabel=title, yscale="log" if is_log else "linear")
  by_step[-1].set_ylim(-0.02, 1.02)
  handles, labels = by_step[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right center", fontsize="small", title=stage.axis)
  figure.suptitle(stage.title)
  figure.savefig(path, dpi=110)


def _plot_sweep(axis: Any, folder: Path, stage: Stage, results: Sequence[ablation.Result]) -> None:
  x = np.array([result.variant.value for result in results], float)
  values = [_values(folder, result, "test", "mAUPRC") for result in results]
  means, deviations = (
    np.array([stat(value) for value in values]) for stat in (np.mean, _deviation)
  )
  axis.set(xlabel=stage.axis, ylabel="mAUPRC on test")
  if (x == 0).any():
    # Linear between 0 and the smallest other value.
    axis.set_xscale("symlog", linthresh=min(x[x > 0], default=1.0))
  else:
    axis.set_xscale("log")
  axis.set_xticks(x, [f"{value:g}" for value in x])
  axis.set_xticks([], minor=True)
  axis.errorbar(x, means, yerr=deviations, marker="o", capsize=3, color="black")
  own = [i for i, result in enumerate(results) if result.variant.label == stage.reference]
  axis.plot(x[own], means[own], "s", color="tab:red", markersize=8, label="config", zorder=3)
  axis.legend()


def _deviation(values: np.ndarray) -> float:
  return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _values(folder: Path, result: ablation.Result, split: str, key: str) -> np.ndarray:
  return np.array([comparison.metric(folder, run, split, key) for run in result.row.runs])


def _signal(folder: Path, result: ablation.Result, key: str) -> np.ndarray:
  """Returns the mean over the seeds of a value of the training log, ``[steps]``.

  Empty if the method does not log it.
  """
  steps, values = tables.logged(folder, result.row, key)
  return values.mean(axis=0) if len(values) else steps


def _ends(folder: Path, result: ablation.Result, key: str) -> str:
  """Returns the means of a signal over the first and the last tenth of the run, as text."""
  signal = _signal(folder, result, key)
  if not signal.size:
    return ""
  count = max(int(_ENDS * signal.size), 1)
  return f"{signal[:count].mean():.3f}, {signal[-count:].mean():.3f}"


def _entry(
  folder: Path, result: ablation.Result, gap: per_query.Difference | None
) -> dict[str, Any]:
  """Returns a result for ablation.json; a run that diverged has null."""

  def listed(split: str, key: str) -> list[float | None]:
    return [tables.or_none(value) for value in _values(folder, result, split, key)]

  return {
    "label": result.variant.label,
    "value": result.variant.value,
    "option": result.row.method,
    "learning_rate": result.row.rate,
    "trials": result.trials,
    "val": listed("val", "mAUPRC"),
    "test": {key: listed("test", key) for key in _TEST},
    "minus_reference": None if gap is None else gap._asdict(),
    "signals": {key: _ends(folder, result, key) for key, _, _ in _SIGNALS},
  }
