"""Reads and checks the files of a finished run."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import stored
from soprc_jax._internal.strings import shown
from soprc_jax.serving import network
from soprc_jax.training import classes, replay, v_history
from soprc_jax.training import workdir as workdir_lib

_METRICS = {"mAUPRC": float}
_RESULTS = {"steps": int, "val": dict, "test": _METRICS}
# Keys that runs of older versions lack.
_NOTED = {
  "baselines": {str: {str: _METRICS}},
  "seen_classes": classes.SEEN,
  "tested_step": int,
  "command": {"config": str, "overrides": dict},
  "chosen": workdir_lib.CHOICES,
  "versions": {str: str},
  "device": str,
  "convolutions": str,
  "images_per_second": float,
  "data_wait_share": float,
}
_V_ENTRY = {
  "class": str,
  "row": int,
  "weight": float,
  "visits": int,
  "last_visit": int,
  "v": [float],
  "true": [float],
}
_REMEDY = "restore it from a copy, or train again in a new --workdir"


class Run(NamedTuple):
  """Holds the files of a run.

  Attributes:
    workdir: folder of the run.
    config: resolved config.
    results: content of ``results.json``.
    lines: lines of ``metrics.jsonl``, one per step.
    curve: recall ``[T]`` and precision ``[T]``, means over the test queries; None without
      ``pr_curve.npz``.
    v: lines of ``v.jsonl``, see `read_v`; None without the file.
    kept_steps: steps that were not finite and are kept in ``diverged/``.
  """

  workdir: Path
  config: Any
  results: dict[str, Any]
  lines: list[dict[str, Any]]
  curve: tuple[np.ndarray, np.ndarray] | None
  v: list[dict[str, Any]] | None
  kept_steps: list[int]

  def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps whose line has a key, and its values; NaN where a value was not finite."""
    found = [(line["step"], line[key]) for line in self.lines if key in line]
    table = np.array(found, float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def read(workdir: Path) -> Run:
  """Reads the files of a finished run.

  Raises:
    ValueError: if there is no run, it has not finished, or a file is corrupt.
    OSError: if a file cannot be read.
  """
  config = network.stored_config(workdir)
  path = workdir / workdir_lib.RESULTS
  lines = list(workdir_lib.read_metrics(workdir))
  if not path.exists():
    total = config.warmup.steps + config.train.steps
    raise ValueError(
      f"the run in {workdir} has not finished ({workdir_lib.RESULTS} is missing; its log has "
      f"{len(lines)} of {total} steps): resume it with the same soprc train command, then make the "
      "report"
    )
  results = stored.read_json(
    path, _RESULTS, remedy="remove it, and the same soprc train command writes it again"
  )
  for key, shape in _NOTED.items():
    if key in results:
      _raise_if(path, stored.problem(results[key], shape, key))
  tables = {split: results[split] for split in splits(results)}
  for split, table in tables.items():
    _raise_if(path, stored.problem(table, _METRICS if split != "val" else dict, split))
  for split, named in results.get("baselines", {}).items():
    tables |= {f"baselines.{split}.{name}": table for name, table in named.items()}
  for place, table in tables.items():
    for name, value in table.items():
      _raise_if(path, _metric_problem(name, value, f"{place}.{name}"))
  _raise_if(workdir / workdir_lib.METRICS, _lines_problem(lines))
  return Run(
    workdir, config, results, lines, _curve(workdir), read_v(workdir), replay.steps(workdir)
  )


def _metric_problem(name: str, value: Any, place: str) -> str:
  if name == "ks_beyond_gallery":
    return "" if value == [] else stored.problem(value, [int], place)
  if name == "intervals":
    return stored.problem(value, {str: (float, [float])}, place)
  return stored.problem(value, int if name.startswith("num_") else (None, float), place)


def splits(results: dict[str, Any]) -> list[str]:
  """Returns the evaluations in ``results.json``: val if there was one, then those of test."""
  names = [
    name for name, value in results.items() if name.startswith("test") and isinstance(value, dict)
  ]
  return (["val"] if results.get("val") else []) + names


def read_v(workdir: Path) -> list[dict[str, Any]] | None:
  """Reads ``v.jsonl``: v of some classes at each evaluation, and the true scores.

  Returns:
    The lines of the file; None without the file.

  Raises:
    ValueError: if a line is invalid.
  """
  path = workdir / v_history.FILE
  if not path.exists():
    return None
  lines = list(workdir_lib.read_lines(path))
  for line in lines:
    _raise_if(path, _v_problem(line))
  return lines


def _v_problem(line: dict[str, Any]) -> str:
  problem = stored.problem(line, {"classes": list})
  for i, entry in enumerate([] if problem else line["classes"]):
    problem = problem or stored.problem(entry, _V_ENTRY, f"classes[{i}]")
    if not problem and len(entry["v"]) != len(entry["true"]):
      problem = (
        f"class {shown(entry['class'])} has {len(entry['v'])} points in v but "
        f"{len(entry['true'])} true scores"
      )
  return f"step {line['step']}: {problem}" if problem else ""


def _curve(workdir: Path) -> tuple[np.ndarray, np.ndarray] | None:
  path = workdir / workdir_lib.PR_CURVE
  if not path.exists():
    return None
  try:
    found = stored.read_arrays(path, ("recall", "precision"))
    recall, precision = (np.asarray(found[key], float) for key in ("recall", "precision"))
  except (TypeError, ValueError) as error:
    raise ValueError(f"{error}: remove it to make the report without the curve") from error
  if recall.ndim != 1 or recall.shape != precision.shape:
    raise ValueError(
      f"{path} is corrupt (it has no curve): remove it to make the report without the curve"
    )
  return recall, precision


def _lines_problem(lines: list[dict[str, Any]]) -> str:
  return next(
    filter(
      None, (stored.problem(line, {str: (None, float)}, f"step {line['step']}") for line in lines)
    ),
    "",
  )


def _raise_if(path: Path, problem: str) -> None:
  if problem:
    raise ValueError(f"{path} is corrupt ({problem}): {_REMEDY}")
