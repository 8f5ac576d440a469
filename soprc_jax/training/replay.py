"""A step that was not finite: kept in ``WORKDIR/diverged/STEP`` (the state before it and its
batch), and described when it is computed again.
"""

from collections.abc import Collection
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
from soprc_jax.training import build, checkpoints, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.step import TrainState

FOLDER = "diverged"
REPORT = "report.json"
_BATCH = "batch_{}.npz"
_STATE = "state"
_SHAPE = {"step": int, "arrays": [str], "class_counts": [int], "config": dict}
_REMEDY = "go on with the run, which keeps the step again, once the folder is removed"


class Found(NamedTuple):
  """A reproduction as it was kept.

  Attributes:
    config: resolved, of the run.
    report: what `save` was given, and ``"step"``, ``"class_counts"``.
    parts: of the run.
    state: before the step.
    batch: of all processes of the run.
    ids: of the batch's images.
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
  about: dict[str, Any],
) -> Path:
  """Writes what the step after ``state`` needs to be made again, and returns the folder; nothing if
  it is there already.

  Args:
    workdir: of the run.
    config: resolved.
    state: before the step; numpy leaves.
    batch: of this process.
    ids: of this process's images, in the order of the batch.
    class_counts: ``[C]``, see `build.make_parts`.
    about: JSON-able, for the reader.
  """
  step = int(state.step) + 1
  folder = workdir / FOLDER / str(step)
  if (folder / REPORT).exists():
    return folder
  folder.mkdir(parents=True, exist_ok=True)
  arrays: dict[str, Any] = {"ids": np.array(ids), **batch}
  np.savez(folder / _BATCH.format(parallel.process_index()), **arrays)
  store = checkpoints.Store(folder / _STATE)
  store.save(state, {})
  store.close()
  parallel.wait_for_all("the step that is not finite is kept")
  if parallel.is_main():
    counts = [int(count) for count in class_counts]
    # Last, since it says that the rest is there.
    content = {
      "step": step,
      **about,
      "arrays": sorted(arrays),
      "class_counts": counts,
      "config": json.loads(config_lib.to_json(config)),
    }
    workdir_lib.write_atomically(folder / REPORT, json.dumps(content, indent=1) + "\n")
  return folder


def steps(workdir: Path) -> list[int]:
  """The steps that are kept in the folder of a run, ascending."""
  return sorted(
    int(path.parent.name)
    for path in (workdir / FOLDER).glob(f"*/{REPORT}")
    if path.parent.name.isdigit()
  )


def load(workdir: Path, step: int | None = None, *, trusted: Collection[str] = ()) -> Found:
  """A step that is kept in the folder of a run; the newest if none is named.

  Args:
    workdir: of the run.
    step: which.
    trusted: losses of one's own, ``package.module:function``, that may be imported: the folder
      alone may not ask for it.

  Raises:
    ValueError: there is none, its files are damaged, or its loss is not trusted.
  """
  there = steps(workdir)
  if not there:
    raise ValueError(
      f"--workdir={workdir} keeps no step that was not finite: every run that breaks down leaves "
      f"one in {FOLDER}/"
    )
  if step is not None and step not in there:
    raise ValueError(f"--step={step}: {workdir / FOLDER} keeps {', '.join(map(str, there))}")
  folder = workdir / FOLDER / str(there[-1] if step is None else step)
  report = stored.read_json(folder / REPORT, _SHAPE, remedy=_REMEDY)
  try:
    config = config_lib.from_json(report["config"])
  except ValueError as error:
    raise ValueError(f"{folder / REPORT} is damaged ({error}): {_REMEDY}") from error
  own = [name for name in own_losses(config) if name not in trusted]
  if own:
    raise ValueError(
      f"the loss of this run is code, {own[0]}, and a folder alone may not run it: if it is yours, "
      f"add --own_loss={own[0]}"
    )
  parts = build.make_parts(config, np.array(report["class_counts"]))
  store = checkpoints.Store(folder / _STATE)
  try:
    state, _ = store.restore(build.abstract_state(config, parts))
  finally:
    store.close()
  batch = _read_batch(folder, report["arrays"])
  ids = [str(name) for name in batch.pop("ids")]
  return Found(config, report, parts, state, batch, ids)


def own_losses(config: ConfigDict) -> list[str]:
  """The losses of a config that are not of this package, ``package.module:function``."""
  return sorted({name for name in (config.loss.name, config.warmup.loss) if ":" in name})


def run(found: Found) -> tuple[TrainState, dict[str, float]]:
  """The step once more, by the compiled function of the run: the state after it, and its
  scalars.
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
  """The parts of all processes, joined in their order."""
  parts: list[dict[str, np.ndarray]] = []
  while (path := folder / _BATCH.format(len(parts))).exists():
    parts.append(stored.read_arrays(path, names))
  if not parts:
    raise ValueError(f"{folder / _BATCH.format(0)} is missing: {_REMEDY}")
  return {name: np.concatenate([part[name] for part in parts]) for name in names}


def largest(tree: Any, count: int) -> list[tuple[str, float, int]]:
  """Arrays of a tree as (name, largest magnitude, numbers that are not finite): those with any such
  first, then the largest.
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
  """Makes a kept step again and tells what was finite: the state before it, the embeddings, the
  gradient, the state that the loss carries.

  Args:
    workdir: of a run that has kept one.
    step: which; None for the last.
    trusted: see `load`.

  Raises:
    ValueError: as `load`.
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
      "It is finite here: the devices, or the versions of jax and XLA, are not those of then.",
    ]
  return "\n".join(lines)


def _table(title: str, tree: Any) -> list[str]:
  rows = [
    (f"  {name}", f"largest {size:.3g}" + (f", {bad} not finite" if bad else ""))
    for name, size, bad in largest(tree, _SHOWN)
  ]
  return [
    f"{title}: arrays with numbers that are not finite, else the largest",
    *text_table.aligned(rows),
  ]


def _embeddings(found: Found) -> list[str]:
  """The images whose embeddings are not finite."""
  variables = {"params": found.state.params, "batch_stats": found.state.batch_stats}
  embeddings = np.asarray(jax.jit(found.parts.model.apply)(variables, found.batch["image"]))
  bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
  lines = [
    f"embeddings (by the running statistics): {len(bad)} of {len(embeddings)} images have some "
    "that are not finite"
  ]
  return lines + [f"  {printable(found.ids[position])}" for position in bad[:_SHOWN]]


def _broken_state(found: Found) -> tuple[Any, Any]:
  """Gradient of the step by the parameters, and the state that the loss carries after it,
  unguarded.
  """
  counts = np.array(found.report["class_counts"])
  parts = build.make_parts(
    found.config, counts, optimizer=optax.trace(decay=0.0), on_nonfinite="keep"
  )
  # A trace without decay holds the gradient itself.
  opt_state = (found.state.opt_state[0], jax.jit(parts.tx.init)(found.state.params)[1])
  after, _ = run(
    found._replace(parts=parts, state=dataclasses.replace(found.state, opt_state=opt_state))
  )
  return after.opt_state[1].trace, after.opt_state[0]
