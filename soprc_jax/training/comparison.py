"""A fair comparison of methods: same start, batches and budget, each with its learning rate picked on val."""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax.training import workdir as workdir_lib


class RunName(NamedTuple):
  """One run of a comparison."""

  method: str
  rate: float
  seed: int

  def folder(self) -> str:
    """Name of its folder, e.g. ``triplet-lr0.004-seed1``."""
    return f"{self.method}-lr{self.rate:g}-seed{self.seed}"


class Summary(NamedTuple):
  """Test results of one method over the seeds, at its best learning rate.

  Attributes:
    method: its name.
    rate: the learning rate with the best val mAUPRC at the first seed.
    values: metric name -> ``[seeds]``.
  """

  method: str
  rate: float
  values: dict[str, np.ndarray]


def read(workdir: Path, name: RunName) -> dict[str, Any] | None:
  """``results.json`` of a run, None if it has not finished."""
  path = workdir / name.folder() / workdir_lib.RESULTS
  return json.loads(path.read_text()) if path.exists() else None


def _finished(workdir: Path, name: RunName) -> dict[str, Any]:
  results = read(workdir, name)
  if results is None:
    raise FileNotFoundError(f"{name.folder()} has not finished in {workdir}")
  return results


def best_rate(workdir: Path, method: str, rates: Sequence[float], seed: int) -> float:
  """The rate whose run at ``seed`` has the highest val mAUPRC; all of them must have finished."""

  return max(rates, key=lambda rate: _finished(workdir, RunName(method, rate, seed))["val"]["mAUPRC"])


def summarize(workdir: Path, method: str, rate: float, seeds: Sequence[int], metrics: Sequence[str]) -> Summary:
  """Test metrics of a method over the seeds."""
  found = [_finished(workdir, RunName(method, rate, seed)) for seed in seeds]
  values = {name: np.array([results["test"][name] for results in found]) for name in metrics}
  return Summary(method, rate, values)


def mean_and_error(values: np.ndarray) -> str:
  """``mean ± standard deviation`` over seeds."""
  deviation = values.std(ddof=1) if len(values) > 1 else float("nan")
  return f"{values.mean():.4f} ± {deviation:.4f}"


def paired_difference(first: Summary, other: Summary, metric: str) -> tuple[float, float]:
  """Mean over the seeds of first minus other, and its standard error (NaN for one seed).

  >>> a, b = (Summary("a", 1.0, {"m": np.array([0.5, 0.7])}), Summary("b", 1.0, {"m": np.array([0.4, 0.5])}))
  >>> print([f"{value:.2f}" for value in paired_difference(a, b, "m")])
  ['0.15', '0.05']
  """
  gaps = first.values[metric] - other.values[metric]
  error = gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else float("nan")
  return float(gaps.mean()), float(error)


def markdown(summaries: Sequence[Summary], num_seeds: int) -> str:
  """A table of the methods, and the paired difference of the first to each other one."""
  metrics = list(summaries[0].values)
  lines = [
    f"| method | learning rate | {' | '.join(metrics)} |",
    f"|---|---|{'---|' * len(metrics)}",
  ]
  for summary in summaries:
    cells = " | ".join(mean_and_error(summary.values[name]) for name in metrics)
    lines.append(f"| {summary.method} | {summary.rate:g} | {cells} |")
  lines.append(f"\nTest, mean ± standard deviation over {num_seeds} seeds; learning rate picked on val at the first seed.")
  for other in summaries[1:]:
    gaps = []
    for name in metrics:
      mean, error = paired_difference(summaries[0], other, name)
      gaps.append(f"{name} {mean:+.4f} ± {error:.4f}")
    lines.append(f"{summaries[0].method} minus {other.method}, paired by seed, ± standard error: {', '.join(gaps)}.")
  return "\n".join(lines) + "\n"
