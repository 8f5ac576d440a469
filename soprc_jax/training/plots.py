"""Plots: convergence and mean precision-recall curve of a run, curves of several methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plot_convergence(path: Path, lines: list[dict[str, Any]], *, warmup_steps: int) -> None:
  """Plots training loss and validation metrics by step, from the lines of ``metrics.jsonl``."""
  figure, axes = _figure(2)
  steps = np.array([line["step"] for line in lines])
  # null, the loss of a skipped step, becomes NaN: a gap.
  losses = np.array([line["loss"] for line in lines], float)
  axes[0].plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
  width = max(len(losses) // 50, 1)
  if width > 1:
    kept, weights = np.isfinite(losses), np.ones(width)
    counts = np.convolve(kept, weights, mode="valid")
    sums = np.convolve(np.where(kept, losses, 0), weights, mode="valid")
    mean = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    axes[0].plot(steps[width - 1 :], mean, color="tab:blue", label=f"mean of {width} steps")
  axes[0].set(xlabel="step", ylabel="training loss", title="Training loss")
  val = [
    (line["step"], line["val_mAUPRC"], line.get("val_recall@1"))
    for line in lines
    if "val_mAUPRC" in line
  ]
  if val:
    at, auprc, recall = zip(*val)
    axes[1].plot(at, auprc, "o-", color="tab:orange", label="mAUPRC")
    if None not in recall:
      axes[1].plot(at, recall, "s--", color="tab:green", label="recall@1")
  axes[1].set(
    xlabel="step", ylabel="validation metric", title="Validation (unseen classes)", ylim=(0, 1)
  )
  for axis in axes:
    if warmup_steps:
      axis.axvline(warmup_steps, color="grey", linestyle=":", label="end of the warm-up")
    if axis.get_legend_handles_labels()[0]:
      axis.legend()
  _save(figure, path)


def plot_pr_curve(path: Path, precision: np.ndarray, recall: np.ndarray, *, title: str) -> None:
  """Plots mean precision against mean recall over the queries."""
  figure, (axis,) = _figure(1)
  axis.plot(recall, precision, color="tab:blue")
  axis.set(xlabel="mean recall", ylabel="mean precision", title=title, xlim=(0, 1), ylim=(0, 1.02))
  _save(figure, path)


def plot_curves(
  path: Path,
  curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
  *,
  title: str,
  axes: tuple[str, str],
  markers: bool = False,
  top: float | None = 1.02,
) -> None:
  """Plots one curve (x, y) per method.

  The first curve is the thickest. The legend is sorted from the best to the worst mean of y.

  Args:
    path: file of the plot.
    curves: name -> x and y.
    title: title of the plot.
    axes: labels of x and y.
    markers: whether each point is marked.
    top: upper end of the y axis, which begins at 0; None: the largest value.
  """
  figure, (axis,) = _figure(1)
  figure.set_size_inches(8.5, 5.5)
  lines = {}
  for i, (name, (x, y)) in enumerate(curves.items()):
    style = (
      {"color": "black", "linewidth": 2.4, "zorder": 3}
      if i == 0
      else {"color": f"C{(i - 1) % 10}", "linewidth": 1.3}
    )
    # There are ten colors; their second use is dashed.
    lines[name] = axis.plot(
      x, y, "--" if i > 10 else "-", marker="o" if markers else None, markersize=3, **style
    )[0]
  ranked = sorted(
    curves,
    key=lambda name: -np.nan_to_num(np.mean(curves[name][1])) if len(curves[name][1]) else 0.0,
  )
  axis.legend(
    [lines[name] for name in ranked],
    ranked,
    fontsize="small",
    loc="center left",
    bbox_to_anchor=(1.0, 0.5),
  )
  axis.set(xlabel=axes[0], ylabel=axes[1], title=title, ylim=(0, top))
  _save(figure, path)


def grid(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Any, np.ndarray]:
  """Creates a figure and its axes ``[rows, columns]``, each of ``size`` in inches."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # Without pyplot: no global state, no display.
  figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, columns, squeeze=False)
  for axis in axes.flat:
    axis.grid(alpha=0.3)
  return figure, axes


def _figure(columns: int) -> tuple[Any, np.ndarray]:
  figure, axes = grid(1, columns, size=(5.5, 4.2))
  return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
  figure.savefig(path, dpi=130)
