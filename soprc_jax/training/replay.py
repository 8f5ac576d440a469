"""Stores a step that was not finite in ``WORKDIR/diverged/STEP``, and reproduces it.

The state before the step and its batch are stored.
"""

from collections.abc import Collection
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np
import optax

from soprc_jax._internal import stored, text_table
from soprc_jax._internal.strings import printable
from soprc_jax.training import (
  build,
  checkpoints,
  finetuning,
  lora,
  loss_protocol,
  parallel,
  patterns,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.step import TrainState

FOLDER = "diverged"
REPORT = "report.json"
_BATCH = "batch_{}.npz"
_STATE = "state"
_SHAPE = {"step": int, "arrays": [str], "class_counts": [int], "config": dict}
_OPTIONAL = {
  "superclasses": [int],
  "patterns": {
    "members": [[int]],
    "num_labels": int,
    "needed": [int],
    "num_relevant": [int],
    "smallest": int,
  },
}
_REMEDY = "remove the folder and resume the run, which stores the step again"


class Found(NamedTuple):
  """A stored step.

  Attributes:
    config: config of the run, resolved.
    report: the ``about`` of `save`, and ``"step"``, ``"class_counts"``; ``"patterns"`` where an
      image has several labels.
    parts: model, optimizer and steps of the run.
    state: state before the step.
    batch: batch of all processes of the run.
    ids: ids of the batch's images.
  """

  config: ConfigDict
  report: dict[str, Any]
  parts: build.Parts
  state: TrainState
  batch: dict[str, np.ndarray]
  ids: list[str]


def save(
  workdir: Path,
  config: ConfigDict,
  state: TrainState,
  batch: dict[str, np.ndarray],
  *,
  ids: list[str],
  class_counts: np.ndarray,
  superclasses: np.ndarray | None = None,
  of_data: patterns.Patterns | None = None,
  about: dict[str, Any],
) -> Path:
  """Stores what is needed to repeat the step after ``state``. Does nothing if it is stored already.

  Args:
    workdir: folder of the run.
    config: resolved.
    state: state before the step; numpy leaves.
    batch: batch of this process.
    ids: ids of this process's images, in the order of the batch.
    class_counts: ``[C]``, see `build.make_parts`.
    superclasses: ``[C]``, likewise.
    of_data: see `build.make_parts`.
    about: JSON-able description for the user.

  Returns:
    The folder of the stored step.
  """
  step = int(state.step) + 1
  folder = workdir / FOLDER / str(step)
  if (folder / REPORT).exists():
    return folder
  folder.mkdir(parents=True, exist_ok=True)
  arrays: dict[str, Any] = {"ids": np.array(ids), **batch}
  np.savez(folder / _BATCH.format(parallel.process_index()), **arrays)
  with contextlib.closing(checkpoints.Store(folder / _STATE)) as store:
    store.save(state, {})
  parallel.wait_for_all("the step that is not finite is stored")
  if parallel.is_main():
    counts = [int(count) for count in class_counts]
    # Last, since its presence marks the step as complete.
    content = {
      "step": step,
      **about,
      "arrays": sorted(arrays),
      "class_counts": counts,
      **({} if superclasses is None else {"superclasses": superclasses.tolist()}),
      **({} if of_data is None else {"patterns": of_data.to_json()}),
      "config": json.loads(config_lib.to_json(config)),
    }
    workdir_lib.write_atomically(folder / REPORT, json.dumps(content, indent=1) + "\n")
  return folder


def steps(workdir: Path) -> list[int]:
  """Returns the steps that are stored in the folder of a run, ascending."""
  return sorted(
    int(path.parent.name)
    for path in (workdir / FOLDER).glob(f"*/{REPORT}")
    if path.parent.name.isdigit()
  )


def load(workdir: Path, step: int | None = None, *, trusted: Collection[str] = ()) -> Found:
  """Loads a step that is stored in the folder of a run.

  Args:
    workdir: folder of the run.
    step: number of the step; None loads the newest.
    trusted: custom losses, ``package.module:function``, that may be imported. Those that only the
      folder names are rejected.

  Raises:
    ValueError: there is no such step, its files are corrupt, or its loss is not trusted.
  """
  there = steps(workdir)
  if not there:
    raise ValueError(
      f"--workdir={workdir} stores no step that was not finite: every run that diverges stores one "
      f"in {FOLDER}/"
    )
  if step is not None and step not in there:
    raise ValueError(f"--step={step}: {workdir / FOLDER} stores only {', '.join(map(str, there))}")
  folder = workdir / FOLDER / str(there[-1] if step is None else step)
  report = stored.read_json(folder / REPORT, _SHAPE, remedy=_REMEDY)
  try:
    config = config_lib.from_json(report["config"])
  except ValueError as error:
    raise ValueError(f"{folder / REPORT} is corrupt ({error}): {_REMEDY}") from error
  for key, shape in _OPTIONAL.items():
    problem = stored.problem({key: report[key]}, {key: shape}) if key in report else ""
    if problem:
      raise ValueError(f"{folder / REPORT} is corrupt ({key}): {problem}; {_REMEDY}")
  if len(report.get("superclasses", report["class_counts"])) != len(report["class_counts"]):
    raise ValueError(f"{folder / REPORT} is corrupt (superclasses): {_REMEDY}")
  own = [name for name in own_losses(config) if name not in trusted]
  if own:
    raise ValueError(
      f"the loss of this run is code, {own[0]}, and a folder alone may not run it: if it is yours, "
      f"add --own_loss={own[0]}"
    )
  parts = build.make_parts(config, **_classes(report))
  with contextlib.closing(checkpoints.Store(folder / _STATE)) as store:
    state, _ = store.restore(build.abstract_state(config, parts))
  batch = _read_batch(folder, report["arrays"])
  ids = [str(name) for name in batch.pop("ids")]
  return Found(config, report, parts, state, batch, ids)


def _classes(report: dict[str, Any]) -> dict[str, Any]:
  """Returns the classes of a stored step, as arguments of `build.make_parts`."""
  superclasses, found = report.get("superclasses"), report.get("patterns")
  return {
    "class_counts": np.array(report["class_counts"]),
    "superclasses": None if superclasses is None else np.array(superclasses),
    "of_data": None if found is None else patterns.from_json(found),
  }


def own_losses(config: ConfigDict) -> list[str]:
  """Returns the custom losses of a config, ``package.module:function``."""
  return sorted({name for name in (config.loss.name, config.warmup.loss) if ":" in name})


def run(found: Found) -> tuple[TrainState, dict[str, float]]:
  """Repeats the step with the compiled function of the run.

  Returns:
    The state after the step, and its scalars.
  """
  step_fn = (
    found.parts.warmup_step
    if found.report["step"] <= found.config.warmup.steps
    else found.parts.main_step
  )
  state, scalars = step_fn(parallel.replicate(found.state), parallel.shard(found.batch))
  return parallel.unreplicate(state), {
    name: float(value) for name, value in parallel.unreplicate(scalars).items()
  }


def _read_batch(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
  """Reads the batches of all processes and joins them in order."""
  parts: list[dict[str, np.ndarray]] = []
  while (path := folder / _BATCH.format(len(parts))).exists():
    parts.append(stored.read_arrays(path, names))
  if not parts:
    raise ValueError(f"{folder / _BATCH.format(0)} is missing: {_REMEDY}")
  return {name: np.concatenate([part[name] for part in parts]) for name in names}


def largest(tree: Any, count: int) -> list[tuple[str, float, int]]:
  """Returns up to ``count`` arrays of a tree: first non-finite ones, then those of largest numbers.

  Each is (name, largest finite magnitude, count of numbers that are not finite).
  """
  rows = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    if array.size and np.issubdtype(array.dtype, np.floating):
      bad = int((~np.isfinite(array)).sum())
      finite = array[np.isfinite(array)]
      rows.append(
        (
          jax.tree_util.keystr(path, simple=True, separator="."),
          float(np.abs(finite).max(initial=0.0)),
          bad,
        )
      )
  return sorted(rows, key=lambda row: (-row[2], -row[1]))[:count]


_SHOWN = 8


def describe(workdir: Path, step: int | None = None, *, trusted: Collection[str] = ()) -> str:
  """Repeats a stored step and reports which of its numbers are finite.

  The report covers the state before the step, the embeddings, the gradient, and the carried state
  of the loss.

  Args:
    workdir: folder of a run that has stored a step.
    step: number of the step; None for the newest.
    trusted: see `load`.

  Raises:
    ValueError: see `load`.
  """
  found = load(workdir, step, trusted=trusted)
  _, scalars = run(found)
  parts = step_lib.nonfinite_names(scalars["nonfinite"])
  gradient, carried = _broken_state(found)
  report = found.report
  lines = [
    f"Step {report['step']} of {workdir}, on {parallel.describe()} (then: "
    f"{report.get('device', '?')}).",
    f"then: not finite: {', '.join(report.get('nonfinite', []))}; loss {report.get('loss')}, "
    f"gradient norm {report.get('grad_norm')}",
    f"now:  {'not finite: ' + ', '.join(parts) if parts else 'finite'}; loss {scalars['loss']:g}, "
    f"gradient norm {scalars['grad_norm']:g}",
    f"learning rate {report.get('learning_rate')}",
    "",
    *_table("state before the step", found.state),
    "",
    *_embeddings(found),
    "",
    *_table("gradient", gradient),
    "",
    *_table("carried state of the loss after the step", carried),
  ]
  if not parts:
    lines += [
      "",
      "It is finite here: the devices, or the versions of jax and XLA, differ from the run's.",
    ]
  return "\n".join(lines)


def _table(title: str, tree: Any) -> list[str]:
  rows = [
    (f"  {name}", f"largest {size:.3g}" + (f", {bad} not finite" if bad else ""))
    for name, size, bad in largest(tree, _SHOWN)
  ]
  return [
    f"{title}: arrays with numbers that are not finite first, then the largest",
    *text_table.aligned(rows),
  ]


def _embeddings(found: Found) -> list[str]:
  """Lists the images whose embeddings are not finite."""
  variables = {"params": lora.merged(found.state.params), "batch_stats": found.state.batch_stats}
  embeddings = np.asarray(jax.jit(found.parts.model.apply)(variables, found.batch["image"]))
  bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
  lines = [
    f"embeddings (with the running statistics): {len(bad)} of {len(embeddings)} images have "
    "numbers that are not finite"
  ]
  return lines + [f"  {printable(found.ids[position])}" for position in bad[:_SHOWN]]


def _broken_state(found: Found) -> tuple[Any, Any]:
  """Returns the gradient of the step, and the carried state of the loss after it.

  Both are unguarded: they may contain non-finite numbers.
  """
  parts = build.make_parts(
    found.config,
    **_classes(found.report),
    optimizer=optax.trace(decay=0.0),
    on_nonfinite="keep",
  )
  # A trace without decay holds the gradient itself.
  part = loss_protocol.with_loss_params(
    finetuning.select(found.state.params, parts.trained), found.state.loss_params
  )
  opt_state = (found.state.opt_state[0], jax.jit(parts.tx.init)(part)[1])
  after, _ = run(
    found._replace(parts=parts, state=dataclasses.replace(found.state, opt_state=opt_state))
  )
  return after.opt_state[1].trace, after.opt_state[0]
