"""Writes the files of a finished comparison.

They are table.md, table.json, pr_curves.png and convergence.png.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from experiments.compare import comparison, plans, step_cost, tables
from soprc_jax._internal import stored
from soprc_jax.training import methods, parallel, plots
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)
_COSTS = "costs.json"


def write(
  folder: Path, plan: plans.Plan, rows: Sequence[comparison.Row], configs: Mapping[str, Any]
) -> str:
  """Writes the files of a finished comparison and returns the table.

  Args:
    folder: folder of the comparison.
    plan: what was compared.
    rows: its methods. The first one is compared with the others.
    configs: method -> resolved config of one of its runs.
  """
  config = configs[rows[0].method]
  found = _costs(folder, configs)
  metrics = ["mAUPRC", *(f"recall@{k}" for k in config.eval.ks[:2])]
  summaries = [
    tables.summarize(folder, row, metrics, found[row.method], first=rows[0]) for row in rows
  ]
  devices = sorted({comparison.device(folder, run) for row in rows for run in row.runs})
  seen = comparison.seen_classes(folder, (run for row in rows for run in row.runs))
  title = f"{_title(plan, configs)}; trained on {' and '.join(devices)}" + (
    f"\n\n{seen}" if seen else ""
  )
  table = f"{title}\n\n{tables.markdown(summaries, parallel.describe())}"
  if plan.trials:
    table += f"\n{tables.search_markdown(rows)}"
  about = {
    "plan": plan._asdict(),
    "trained_on": devices,
    "costs_on": parallel.describe(),
    "config": plans.shared(config, with_trials=bool(plan.trials)),
  } | ({"seen_classes": seen} if seen else {})
  content = tables.as_json(summaries, about)
  workdir_lib.write_atomically(folder / "table.md", table)
  workdir_lib.write_atomically(
    folder / "table.json", json.dumps(content, indent=2, default=list, allow_nan=False) + "\n"
  )
  labels = {row.method: methods.label(row.method) for row in rows}
  plots.plot_curves(
    folder / "pr_curves.png",
    {labels[row.method]: tables.mean_pr_curve(folder, row) for row in rows},
    title="Mean precision-recall curves, test",
    axes=("recall", "precision"),
  )
  plots.plot_curves(
    folder / "convergence.png",
    {labels[row.method]: tables.mean_convergence(folder, row) for row in rows},
    title="Convergence",
    axes=("step", "mAUPRC on val"),
    markers=True,
  )
  return table


def _costs(folder: Path, configs: Mapping[str, Any]) -> dict[str, step_cost.Cost]:
  """Returns the costs of all methods, measured in one go.

  Those of an earlier call are reused if its configs and device were the same.
  """
  path = folder / _COSTS
  key = {
    "device": parallel.describe(),
    "configs": {name: _digest(config) for name, config in configs.items()},
  }
  if path.exists():
    try:
      content = stored.read_json(
        path, {"key": dict, "costs": {str: [float]}}, remedy="measuring again"
      )
      if content["key"] == key:
        return {name: step_cost.Cost(*content["costs"][name]) for name in configs}
    except ValueError as error:
      _log.warning("%s", error)
    except (KeyError, TypeError) as error:
      _log.warning("%s is corrupt (it lacks costs: %s): measuring again", path, error)
  _log.info("Measuring time and memory of one training step of each method.")
  found = step_cost.measure(configs)
  workdir_lib.write_atomically(path, json.dumps({"key": key, "costs": found}, indent=2) + "\n")
  return found


def _digest(config: Any) -> str:
  tree = config.to_dict()
  return hashlib.sha256(
    json.dumps([tree["loss"], plans.shared(config)], sort_keys=True, default=list).encode()
  ).hexdigest()


def _title(plan: plans.Plan, configs: Mapping[str, Any]) -> str:
  """Returns what all runs share, for the title of the table."""
  config = next(iter(configs.values()))
  optimizers = " or ".join(sorted({config.optim.name for config in configs.values()}))
  start = f"from the models in {plan.init_from}" if plan.init_from else "from random weights"
  return (
    f"{config.data.source}, {config.model.name} (width {config.model.width}), {config.train.steps} "
    f"steps of {config.train.batch_size} images, {optimizers}, {start}"
  )
