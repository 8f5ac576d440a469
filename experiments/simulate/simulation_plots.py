"""Plots the simulation study: densities, estimation errors, interpolation errors, tracking."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.simulate import simulation
from soprc_jax.training import plots

_STYLES = {
  "SOPRC": ("tab:blue", "SOPRC, v of Eq. 10"),
  "all positives": ("tab:green", "SOPRC, T of all positives"),
  "AP": ("tab:orange", "AP"),
}


def plot_all(folder: Path, results: Mapping[str, Any], settings: simulation.Settings) -> list[str]:
  """Plots all results of `simulation.run` and returns the names of the files."""
  pictures = {
    "densities.png": _densities(),
    "estimation_zero_one.png": _estimation(results, settings, "zero_one", "l01"),
    "estimation_surrogate.png": _estimation(
      results,
      settings,
      "surrogate",
      f"surrogates, tau1 = {settings.tau1:g}, tau2 = {settings.tau2:g}",
    ),
    "interpolation.png": _interpolation(results),
    "tracking.png": _tracking(results["tracking"], settings),
  }
  for name, figure in pictures.items():
    figure.savefig(folder / name, dpi=110)
  return list(pictures)


def _densities() -> Any:
  figure, axes = plots.grid(1, len(simulation.DISTRIBUTIONS), size=(4.2, 3.2))
  for axis, distribution in zip(axes[0], simulation.DISTRIBUTIONS.values(), strict=True):
    x = np.linspace(*distribution.support, 800)
    positive, negative = distribution.densities(x)
    axis.plot(x, positive, color="tab:blue", label="positives")
    axis.plot(x, negative, "--", color="tab:orange", label="negatives")
    axis.set(title=distribution.title, xlabel="score", ylabel="density", ylim=(0, None))
  axes[0, 0].legend()
  return figure


def _estimation(
  results: Mapping[str, Any], settings: simulation.Settings, kind: str, title: str
) -> Any:
  """Plots the mean error and one standard deviation against the batch size.

  There is a row per distribution and a column per share of positives.
  """
  figure, axes = plots.grid(len(simulation.DISTRIBUTIONS), len(settings.shares), size=(3.4, 2.9))
  for row, name in zip(axes, simulation.DISTRIBUTIONS, strict=True):
    for axis, share in zip(row, settings.shares, strict=True):
      entries = [entry for entry in results[name]["estimation"] if entry["share"] == share]
      sizes = np.array([entry["batch_size"] for entry in entries])
      for estimator, (colour, label) in _STYLES.items():
        mean, std = (
          np.array([entry[kind][estimator][key] for entry in entries]) for key in ("mean", "std")
        )
        axis.plot(sizes, mean, "o-", color=colour, label=label, markersize=3)
        axis.fill_between(sizes, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
      axis.axhline(0, color="black", linewidth=0.8)
      axis.set(xscale="log", title=f"{name}, pi_0 = {share:g}", xlabel="batch size")
    row[0].set_ylabel("estimate minus risk")
    _same_range(row)
  axes[0, 0].legend()
  figure.suptitle(
    f"Error of the estimators ({title}), pi = {settings.prior:g}: mean and standard deviation"
  )
  return figure


def _interpolation(results: Mapping[str, Any]) -> Any:
  figure, axes = plots.grid(1, len(simulation.DISTRIBUTIONS), size=(4.4, 3.6))
  for axis, name in zip(axes[0], simulation.DISTRIBUTIONS, strict=True):
    entries = results[name]["interpolation"]
    count = np.array([entry["num_positives"] for entry in entries])
    one, mean, ideal = (
      np.array([entry[key] for entry in entries]) for key in ("of_one", "of_mean", "at_quantiles")
    )
    axis.plot(count, one, "s-", color="tab:green", label="one draw", markersize=3)
    axis.plot(count, mean, "o-", color="tab:blue", label="mean of all draws", markersize=3)
    if name != "uniform":  # which has no error but that of float32
      axis.plot(
        count, ideal, "^-", color="tab:red", label="scores at quantiles, largest", markersize=3
      )
      axis.plot(count, ideal[-1] * (count[-1] / count) ** 2, ":", color="tab:red", label="slope -2")
    axis.plot(
      count, one[-1] * (count[-1] / count) ** 0.5, ":", color="tab:green", label="slope -1/2"
    )
    at = min(2, len(count) - 1)
    axis.plot(count, mean[at] * count[at] / count, ":", color="tab:blue", label="slope -1")
    axis.set(xscale="log", yscale="log", title=name, xlabel="positives in the batch")
  axes[0, 0].set_ylabel("absolute error of phi")
  axes[0, 0].legend(fontsize=7)
  figure.suptitle("Interpolated scores against the quantiles of the distribution")
  return figure


def _tracking(entries: Sequence[Mapping[str, Any]], settings: simulation.Settings) -> Any:
  """Plots measured points on the lines of Prop. 1."""
  figure, axes = plots.grid(1, 3, size=(4.4, 3.6))
  panels = (
    (axes[0, 0], "given", "bias", "Mean of v, start v = 0", "E v - E phi"),
    (axes[0, 1], "given", "variance", "Variance of v, start v = 0", "Var v / Var phi"),
    (axes[0, 2], "debiased", "variance", "Variance of v, debiased start", "Var v / Var phi"),
  )
  for axis, start, key, title, label in panels:
    for i, beta in enumerate(settings.betas):
      chosen = [entry for entry in entries if entry["start"] == start and entry["beta"] == beta]
      steps = [entry["steps"] for entry in chosen]
      axis.plot(
        steps,
        [entry[f"expected_{key}"] for entry in chosen],
        "-",
        color=f"C{i}",
        label=f"beta = {beta:g}, Prop. 1",
      )
      axis.plot(steps, [entry[key] for entry in chosen], "o", color=f"C{i}", markersize=5)
    axis.set(xscale="log", title=title, xlabel="steps T", ylabel=label)
    if key == "variance":
      axis.set_yscale("log")
  axes[0, 0].legend()
  return figure


def _same_range(row: Sequence[Any]) -> None:
  """Sets one range of values for a row of plots, so that they can be compared."""
  limits = [axis.get_ylim() for axis in row]
  for axis in row:
    axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
