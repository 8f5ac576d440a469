"""Makes the runs of a ranking study in its folder, and writes its table and results."""

from collections.abc import Mapping, Sequence
import logging
from pathlib import Path
import time
from typing import Any

import numpy as np

from experiments.binary import binary_runs
from experiments.compare import tables
from experiments.train_ranking import ranking, ranking_losses
from soprc_jax import statistics
from soprc_jax._internal import text_table
from soprc_jax.data.query_groups import QueryGroups
from soprc_jax.training import workdir

METRICS = ("AP", "NDCG@10")
_log = logging.getLogger(__name__)


def run_all(
  config: Any, task: ranking.Task, folder: Path, methods: Sequence[str]
) -> list[binary_runs.Row]:
  """Trains every method at every seed, except for runs that the folder has already."""
  (folder / binary_runs.RUNS).mkdir(exist_ok=True)
  for method in methods:
    trainer = None
    for seed in config.seeds:
      path = binary_runs.run_path(folder, method, seed)
      if path.exists():
        _log.info("%s, seed %d (finished before)", method, seed)
        continue
      trainer = trainer or ranking.make_trainer(config, method, task)
      began = time.perf_counter()
      found = trainer(seed)
      binary_runs.save_run(path, found)
      _log.info(
        "%s, seed %d: val MAP %s at rates %s, %.0f s",
        method,
        seed,
        np.array2string(found.best, precision=4),
        ", ".join(f"{rate:g}" for rate in config.rates),
        time.perf_counter() - began,
      )
  labels = np.tile(task.test.relevance, (len(config.seeds), 1))
  return [binary_runs.best_row(config, folder, method, labels) for method in methods]


def write(
  folder: Path,
  config: Any,
  task: ranking.Task,
  rows: Sequence[binary_runs.Row],
  about: Mapping[str, Any],
) -> str:
  """Writes ``results.json`` and ``table.md``, and returns the table.

  Args:
    folder: folder of the study.
    config: config of the study.
    task: its documents.
    rows: methods. The first one is compared with the others.
    about: further content of ``results.json``.
  """
  values = {row.method: query_values(task.test, row) for row in rows}
  first = values[rows[0].method]
  gaps = {
    row.method: {name: difference(first[name], values[row.method][name]) for name in METRICS}
    for row in rows[1:]
  }
  table = markdown(config, rows, values, gaps, about)
  entries = [
    {
      "method": row.method,
      "label": ranking_losses.LABELS[row.method],
      "learning_rate": row.rate,
      "val_by_rate": {f"{rate:g}": tables.or_none(one) for rate, one in row.val_by_rate.items()},
      "test": {
        name: [tables.or_none(ranking.mean(one)) for one in values[row.method][name]]
        for name in METRICS
      },
      "first_minus_this": gaps.get(row.method),
    }
    for row in rows
  ]
  workdir.write_results(folder, {"config": config.to_dict(), **about, "methods": entries})
  workdir.write_atomically(folder / "table.md", table)
  return table


def query_values(test: QueryGroups, row: binary_runs.Row) -> dict[str, np.ndarray]:
  """Returns metric -> ``[S, G]`` values of each test query, NaN where there is none."""
  found = [ranking.per_query(test, scores) for scores in row.scores]
  return {name: np.stack([one[name] for one in found]) for name in METRICS}


def difference(a: np.ndarray, b: np.ndarray) -> statistics.Interval | None:
  """Computes the mean of ``a - b [S, G]`` with its interval for new queries and new seeds.

  Queries without a relevant document are left out. None if a training diverged.
  """
  known = np.isfinite(a).any(axis=0) & np.isfinite(b).any(axis=0)
  a, b = a[:, known], b[:, known]
  if not known.any() or not (np.isfinite(a).all() and np.isfinite(b).all()):
    return None
  queries = np.arange(known.sum())
  if len(a) == 1:
    return statistics.cluster_difference(a[0], b[0], queries)
  return statistics.crossed_difference(a, b, queries)


def markdown(
  config: Any,
  rows: Sequence[binary_runs.Row],
  values: Mapping[str, Mapping[str, np.ndarray]],
  gaps: Mapping[str, Mapping[str, statistics.Interval | None]],
  about: Mapping[str, Any],
) -> str:
  """Returns a table of the methods, best test MAP first."""
  label = ranking_losses.LABELS[rows[0].method]
  means = {
    row.method: {
      name: np.array([ranking.mean(one) for one in values[row.method][name]]) for name in METRICS
    }
    for row in rows
  }
  header = [
    *("method", "learning rate", "test MAP", "test NDCG@10"),
    *(f"{label} minus this, {name}" for name in ("MAP", "NDCG@10")),
  ]
  lines = []
  for row in sorted(rows, key=lambda row: -np.nan_to_num(means[row.method]["AP"].mean())):
    own = gaps.get(row.method)
    shown = ["" if own is None else _signed(own[name]) for name in METRICS]
    lines.append(
      [
        ranking_losses.LABELS[row.method],
        f"{row.rate:g}{'*' if row.at_edge() else ''}",
        *(tables.mean_and_deviation(means[row.method][name]) for name in METRICS),
        *shown,
      ]
    )
  count = len(config.seeds)
  notes = (
    f"{about['data']} Mean ± standard deviation over {count} seed{'s' if count > 1 else ''} "
    "(weights, batches); learning rate chosen by the mean validation MAP (* at the edge of the "
    "grid); the model with the best validation MAP is tested. Differences are paired by query and "
    "seed, with their 95 % interval for new queries and (with several seeds) new seeds."
  )
  return f"{text_table.markdown(header, lines)}\n\n{notes}\n"


def _signed(gap: statistics.Interval | None) -> str:
  return "diverged" if gap is None else f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


def describe(name: str, groups: QueryGroups) -> str:
  """Returns one clause on the size of a split, with the queries that have no value."""
  counts = len(groups.sizes), len(groups.relevance), int(groups.sizes.max())
  without = int((groups.relevant == 0).sum()), int((groups.relevant == groups.sizes).sum())
  return (
    f"{name} {counts[0]:,} queries, {counts[1]:,} documents (at most {counts[2]:,}, "
    f"{groups.shares.mean():.3f} relevant), {without[0]:,} without a relevant and {without[1]:,} "
    "without an irrelevant document"
  )
