r"""Compares the test results of two runs query by query, with intervals for new classes.

soprc compare-runs runs/a runs/b
soprc compare-runs runs/a-seed0,runs/a-seed1,runs/a-seed2 runs/b-seed0,runs/b-seed1,runs/b-seed2

Both runs must have been tested on the same images. With several runs a side, separated by commas,
the runs at the same place share a seed, and the intervals are for new seeds too. --split=val
compares evaluations that soprc evaluate --split=val has written. With --group_by=COLUMN, a column
of the CSV of the images, the difference is also given for each of its values.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app
from absl import flags as absl_flags
import numpy as np

from experiments import flags

_SPLIT = absl_flags.DEFINE_string(
  "split", "test", "Evaluation to compare: test, or a split that soprc evaluate was run on."
)
_GROUP_BY = absl_flags.DEFINE_string(
  "group_by", "", "Column of the CSV of the images; differences are also given by its values."
)


_EXAMPLE = "runs/a runs/b"


def main(argv: Sequence[str]) -> None:
  flags.require([argv[0], *argv[3:]], _EXAMPLE)
  with flags.errors_as_messages():
    if len(argv) < 3:
      raise ValueError(f"give two runs. For example:\n  soprc compare-runs {_EXAMPLE}")
    if not all(part.strip() for side in argv[1:] for part in side.split(",")):
      raise ValueError(f"a run has no name: remove a comma from {argv[1]!r} or {argv[2]!r}")
    a, b = ([Path(part) for part in side.split(",")] for side in argv[1:])
    if len(a) != len(b):
      raise ValueError(
        f"both sides need as many runs, one for each seed; got {len(a)} ({argv[1]}) and {len(b)} "
        f"({argv[2]})"
      )
    _check_seeds(a, b)
    print(_compare(a, b))


def _check_seeds(a: Sequence[Path], b: Sequence[Path]) -> None:
  """Raises if there is no run, a side has a seed twice, or both have it at different places."""
  from soprc_jax.training import workdir

  seeds = [[workdir.read_config(run)["seed"] for run in side] for side in (a, b)]
  for name, side in zip("AB", seeds, strict=True):
    if len(set(side)) < len(side):
      raise ValueError(f"{name} has seeds {side}: give one run of each seed")
  moved = [seed for seed, other in zip(*seeds, strict=True) if seed != other and seed in seeds[1]]
  if moved:
    raise ValueError(
      f"runs at the same place must share a seed; A has seeds {seeds[0]}, B has {seeds[1]}: give "
      "the runs of both sides in the same order of seeds"
    )


def _compare(a: Sequence[Path], b: Sequence[Path]) -> str:
  from soprc_jax._internal import text_table
  from soprc_jax.metrics import per_query

  runs = {str(path): _read(path) for path in [*a, *b]}
  if len({path.resolve() for path in [*a, *b]}) < len(a) + len(b):
    raise ValueError("a run is given twice: compare different runs")
  per_query.check_paired(runs)
  sides = [[runs[str(path)] for path in side] for side in (a, b)]
  rows, unresolved, few = [], [], False
  for name, where in _parts(a[0], sides[0][0]).items():
    one, other = ([run.take(where).counted for run in side] for side in sides)
    if not len(one[0].id):
      continue
    few |= len(set(one[0].label)) < 20
    for metric in ("mAUPRC", "recall@1"):
      found = per_query.difference(one, other, metric)
      means = [
        f"{np.mean([run.values(metric).mean() for run in side]):.4f}" for side in (one, other)
      ]
      cells = ["-", "-"] if found is None else [str(found), f"{found.probability:.3f}"]
      rows.append([f"{metric}{name}", *means, *cells])
      unresolved += [rows[-1][0]] if found is not None and not found.resolved else []
  counted = sides[0][0].counted
  seeds = "and seeds." if len(a) > 1 else "only: another seed of training can change it by more."
  notes = [
    f"{len(counted.id):,} queries of {len(set(counted.label)):,} classes, runs a side: {len(a)}. "
    f"Differences are paired by query. Their 95 % intervals are for new classes {seeds}",
    *([f"These data do not resolve: {'; '.join(unresolved)}."] if unresolved else []),
    *(["Intervals from fewer than 20 classes are too narrow (docs/statistics.md)."] if few else []),
  ]
  header = [_SPLIT.value, f"A: {a[0]}", f"B: {b[0]}", "A minus B", "P(A ahead)"]
  return "\n".join([text_table.markdown(header, rows), "", *notes])


def _read(run: Path) -> Any:
  """Returns the result of each query of a run.

  Raises:
    ValueError: the run was not evaluated on the split, or the file is corrupt.
  """
  from soprc_jax.metrics import per_query
  from soprc_jax.training import workdir

  split = _SPLIT.value
  path = run / (workdir.per_query(split) if split.startswith("test") else f"evaluation_{split}.npz")
  try:
    return per_query.read(path)
  except FileNotFoundError:
    remedy = (
      f"soprc evaluate --workdir={run} --split={split}"
      if path.name.startswith("evaluation")
      else "soprc train with the flags of the run: it finishes the run, or tests it again if "
      f"{run / workdir.RESULTS} is removed"
    )
    raise ValueError(f"{path} is missing. These commands write it: {remedy}") from None


def _parts(run: Path, queries: Any) -> dict[str, Any]:
  """Returns displayed name -> mask of queries: all of them, and those of each group."""
  from soprc_jax._internal import text_table
  from soprc_jax.serving import network
  from soprc_jax.training import evaluation

  parts = {"": np.ones(len(queries.id), bool)}
  if _GROUP_BY.value:
    values = evaluation.groups_of(network.stored_config(run), _GROUP_BY.value)
    missing = [name for name in queries.id if name not in values]
    if missing:
      raise ValueError(
        f"--group_by={_GROUP_BY.value}: the CSV file of {run} has no row for {len(missing)} of the "
        f"tested images, for example {missing[0]}: restore the file that the run was tested with"
      )
    mine = np.array([values[name] for name in queries.id])
    for value in sorted(set(mine)):
      parts[f", {text_table.cell(_GROUP_BY.value)} = {text_table.cell(value or '(empty)')}"] = (
        mine == value
      )
  return parts


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
