"""Plots the stability study.

Epsilon and gap are plotted against each quantity, and the algorithms where they have learned
equally much.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.stability import stability_slopes, stability_sweeps
from experiments.stability.stability_slopes import Results
from experiments.stability.stability_sweeps import CONSTANT, THEOREM, Sweep
from soprc_jax.training import plots

_STYLES: Mapping[str, dict[str, Any]] = {
  "SOPRC": {"color": "tab:blue", "marker": "o", "linestyle": "-"},
  "SOPRC without v": {"color": "tab:green", "marker": "s", "linestyle": "--"},
  "AP loss": {"color": "tab:orange", "marker": "^", "linestyle": "-."},
  "SOPRC, gradient through T": {"color": "tab:purple", "marker": "v", "linestyle": ":"},
  "SOPRC, self weight 1/n+": {"color": "tab:red", "marker": "D", "linestyle": ":"},
}
_MEASURES = {
  "epsilon_positive": "eps+ (distance of parameters)",
  "epsilon_negative": "eps- (distance of parameters)",
  "gap": "gap (risk on other sets minus own)",
}
_AXES = {
  "T": "T (steps)",
  "n+": "n+ (positives in a batch)",
  "n-": "n- (negatives in a batch)",
  "N+": "N+ (positives in S)",
  "N-": "N- (negatives in S)",
  "T = N+": "T = N+ (steps, positives in S)",
  "beta": "beta (weight of new scores)",
}
_FILES = {CONSTANT: "constant_rate.png", THEOREM: "theorem2.png"}
_TITLES = {
  CONSTANT: "constant rate",
  THEOREM: "conditions of Theorem 2 (eta_t = C / t, beta = 1 / n+)",
}
# Slopes that Theorem 2 allows, drawn as lines. A bound of 0 means that the curve does not rise.
_LINES = stability_slopes.THEOREM_BOUNDS


def plot_all(folder: Path, sweeps: Sequence[Sweep], results: Results) -> list[str]:
  """Plots all measurements and returns the names of the files."""
  pictures = {}
  for conditions, file in _FILES.items():
    chosen = [
      sweep for sweep in sweeps if sweep.conditions == conditions and sweep.quantity in _AXES
    ]
    if chosen:
      pictures[file] = _sweeps(chosen, results)
  by_rate = [sweep for sweep in sweeps if sweep.quantity == "rate"]
  if by_rate:
    pictures["progress.png"] = _progress(by_rate, results)
  pictures["theorem1.png"] = _theorem1(sweeps, results)
  for name, figure in pictures.items():
    figure.savefig(folder / name, dpi=110)
  return list(pictures)


def _sweeps(sweeps: Sequence[Sweep], results: Results) -> Any:
  """Plots a row per measure and a column per quantity."""
  quantities = list(dict.fromkeys(sweep.quantity for sweep in sweeps))
  # Wide enough for the title if there is only one column.
  figure, axes = plots.grid(
    len(_MEASURES), len(quantities), size=(max(3.5, 10.0 / len(quantities)), 3.0)
  )
  for row, (measure, label) in zip(axes, _MEASURES.items(), strict=True):
    for axis, quantity in zip(row, quantities, strict=True):
      for sweep in sweeps:
        if sweep.quantity == quantity:
          _curve(axis, sweep, results, measure)
      if sweeps[0].conditions == THEOREM:
        _bound(axis, quantity, measure)
      axis.set(xscale="log", xlabel=_AXES[quantity])
      if measure != "gap":
        axis.set_yscale("log")
      ticks = sorted(
        {point.value for sweep in sweeps if sweep.quantity == quantity for point in sweep.points}
      )
      axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
      axis.minorticks_off()
    row[0].set_ylabel(label)
  _same_range(axes)
  _legend(figure, axes)
  figure.suptitle(
    f"Stability and generalization gap, {_TITLES[sweeps[0].conditions]}; mean ± standard error"
  )
  return figure


def _curve(axis: Any, sweep: Sweep, results: Results, measure: str) -> None:
  blocks = [
    stability_slopes.samples(results[stability_sweeps.name(setting)], measure, at)
    for _, setting, at in sweep.points
  ]
  means = np.array([values.mean() for values in blocks])
  errors = np.array([values.std(ddof=1) / np.sqrt(len(values)) for values in blocks])
  x = [point.value for point in sweep.points]
  axis.errorbar(
    x, means, errors, markersize=4, linewidth=1.2, label=sweep.algorithm, **_STYLES[sweep.algorithm]
  )


def _bound(axis: Any, quantity: str, measure: str) -> None:
  """Draws the largest slope that Theorem 2 allows, from the first point of SOPRC."""
  bound = _LINES.get(measure, {}).get(quantity)
  lines = [line for line in axis.containers if line.get_label() == "SOPRC"]
  if bound is None or not lines:
    return
  x, y = (np.asarray(values, np.float64) for values in lines[0][0].get_data())
  axis.plot(
    x,
    y[0] * (x / x[0]) ** bound,
    color="black",
    linewidth=0.9,
    linestyle=(0, (1, 2)),
    label="largest slope of Theorem 2",
  )


def _same_range(axes: np.ndarray) -> None:
  """Sets one range of values in each row, so that the quantities can be compared."""
  for row in axes:
    limits = [axis.get_ylim() for axis in row]
    for axis in row:
      axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _legend(figure: Any, axes: np.ndarray) -> None:
  """Draws one legend under all plots."""
  found: dict[str, Any] = {}
  for axis in axes.flat:
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
      found.setdefault(label, handle)
  figure.legend(
    found.values(),
    found.keys(),
    loc="outside lower center",
    ncols=min(len(found), int(figure.get_figwidth() / 2.2)),
  )


def _progress(sweeps: Sequence[Sweep], results: Results) -> Any:
  """Plots each measure against the fall of the training risk.

  There is a row per kind of conditions and a point per learning rate.
  """
  conditions = list(dict.fromkeys(sweep.conditions for sweep in sweeps))
  figure, axes = plots.grid(len(conditions), len(_MEASURES), size=(4.4, 3.4))
  for row, name in zip(axes, conditions, strict=True):
    for axis, (measure, label) in zip(row, _MEASURES.items(), strict=True):
      for sweep in sweeps:
        if sweep.conditions == name:
          falls, means = zip(
            *(_fall(point, results, measure) for point in sweep.points), strict=True
          )
          axis.plot(
            falls,
            means,
            markersize=4,
            linewidth=1.2,
            label=sweep.algorithm,
            **_STYLES[sweep.algorithm],
          )
      axis.set(xlabel="fall of the training risk since the start", ylabel=label, title=name)
      if measure != "gap":
        axis.set_yscale("log")
  _legend(figure, axes)
  figure.suptitle("Algorithms where they have learned equally much (T = 256, a point per rate)")
  return figure


def _fall(point: stability_sweeps.Point, results: Results, measure: str) -> tuple[float, float]:
  measured = results[stability_sweeps.name(point.setting)]
  fall = measured.start_risk.mean() - measured.train_risk[point.at].mean()
  return float(fall), float(getattr(measured, measure)[point.at].mean())


def _theorem1(sweeps: Sequence[Sweep], results: Results) -> Any:
  """Plots the gap against its bound, with a point for each T of each setting.

  Gaps that are not above their standard error are left out.
  """
  figure, axes = plots.grid(1, 1, size=(6.0, 4.6))
  axis = axes[0, 0]
  for algorithm, style in _STYLES.items():
    settings = stability_sweeps.settings_of(
      [sweep for sweep in sweeps if sweep.algorithm == algorithm]
    )
    pairs = [
      stability_slopes.bound_and_gap(setting, results[stability_sweeps.name(setting)], at)
      for setting in settings
      for at in range(len(setting.steps))
    ]
    shown = [(bound, gap.value) for gap, bound in pairs if gap.value > gap.error]
    if shown:
      axis.scatter(
        *zip(*shown, strict=True),
        s=16,
        alpha=0.7,
        color=style["color"],
        marker=style["marker"],
        label=algorithm,
      )
  axis.set(
    xscale="log",
    yscale="log",
    xlabel="G (n+ eps+ + n- eps-)",
    ylabel="gap of Eq. 6 (risk on other sets minus own)",
  )
  ends = np.array(axis.get_xlim())
  axis.plot(ends, ends, color="black", linewidth=0.9, label="gap = bound")
  axis.set(title="Theorem 1: a point for each T of each setting")
  axis.legend(fontsize="small")
  return figure
