"""Writes the results of the benchmarks: Markdown table, JSON, and plots of cost against size."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import os
from pathlib import Path
import platform
from typing import Any

import jax

from experiments.benchmark import harness
from soprc_jax._internal import text_table
from soprc_jax.training import plots


def machine() -> str:
  """Describes where the times were measured: processor, cores, versions."""
  return (
    f"{_processor()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}; Python "
    f"{platform.python_version()}, jax {jax.__version__}"
  )


def _processor() -> str:
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  return next(
    (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
    platform.machine(),
  )


def reached(rows: Sequence[harness.Row]) -> bool:
  """Returns whether one case, given by its rows, is as fast as its targets.

  Either one row that suffices meets its target, or all other rows do.
  """
  others = [row for row in rows if not row.suffices]
  return any(row.met for row in rows if row.suffices) or (
    bool(others) and all(row.met for row in others)
  )


def cases(rows: Iterable[harness.Row]) -> list[list[harness.Row]]:
  """Groups the rows by case, in order."""
  return [
    list(group) for _, group in itertools.groupby(rows, key=lambda row: (row.benchmark, row.case))
  ]


def markdown(rows: Sequence[harness.Row]) -> str:
  """Returns a table with one line per case.

  It has our time, the ratio to each peer with its target, and whether the target is reached.

  >>> row = harness.row("loss", "triplet", "torch", [0.5, 0.5], [1.0, 1.0], target=2.0)
  >>> print(markdown([row]).splitlines()[2])
  | loss | triplet | 500 ms | torch: **2.00** ± 0.00 (2.00) | yes |
  """
  header = [
    "benchmark",
    "case",
    "ours",
    "peer: time / ours ± half the quartile range (target)",
    "reached",
  ]
  lines, notes = [], dict[str, int]()
  for group in cases(rows):
    cells = []
    for row in group:
      mark = f" [{notes.setdefault(row.note, len(notes) + 1)}]" if row.note else ""
      cells.append(
        f"{row.peer}: **{_number(row.ratio)}** ± {_number(row.spread)} "
        f"({_number(row.target)}){mark}"
      )
    first = group[0]
    answer = "yes" if reached(group) else "**no**"
    lines.append([first.benchmark, first.case, _seconds(first.ours), "; ".join(cells), answer])
  told = [f"[{number}] {note[0].upper()}{note[1:]}.  " for note, number in notes.items()]
  return "\n".join([text_table.markdown(header, lines), "", *told]).rstrip() + "\n"


def _number(value: float) -> str:
  return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _seconds(value: float) -> str:
  return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def as_json(
  rows: Sequence[harness.Row], curves: Sequence[harness.Curve], about: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the same results for JSON; ``about`` says where and when they were measured."""
  return {
    **about,
    "rows": [{**row._asdict(), "ratio": row.ratio, "met": row.met} for row in rows],
    "curves": [{**curve._asdict(), "exponent": curve.exponent} for curve in curves],
  }


def from_json(content: Mapping[str, Any]) -> tuple[list[harness.Row], list[harness.Curve]]:
  """Returns the rows and curves of `as_json`."""
  rows = [
    harness.Row(**{name: entry[name] for name in harness.Row._fields}) for entry in content["rows"]
  ]
  curves = [
    harness.Curve(**{name: entry[name] for name in harness.Curve._fields})
    for entry in content["curves"]
  ]
  return rows, curves


def plot_growth(folder: Path, curves: Sequence[harness.Curve]) -> list[str]:
  """Draws one log-log plot per benchmark, size and cost, with the fitted exponents.

  Returns the names of the files.
  """
  names = []
  for (benchmark, size, cost), group in itertools.groupby(
    sorted(curves, key=_axes_of), key=_axes_of
  ):
    figure, axes = plots.grid(1, 1, size=(6.5, 4.5))
    axis = axes[0, 0]
    for curve in group:
      axis.loglog(
        curve.sizes,
        curve.costs,
        "o-",
        markersize=4,
        label=f"{curve.name}: exponent {curve.exponent:.2f}",
      )
    axis.set(xlabel=size, ylabel=cost, title=f"benchmark {benchmark}: growth")
    axis.legend(fontsize="small")
    names.append(f"growth_{benchmark}_{size}_{cost}.png".replace(" ", "_").replace("/", "_"))
    figure.savefig(folder / names[-1], dpi=110)
  return names


def _axes_of(curve: harness.Curve) -> tuple[str, str, str]:
  return curve.benchmark, curve.size, curve.cost
