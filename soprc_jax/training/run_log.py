"""Records of a run: its start, each step in log and TensorBoard, and v at each evaluation."""

from collections.abc import Mapping
import contextlib
import logging
import math
from pathlib import Path
import time
from typing import Any

import jax
from ml_collections import ConfigDict
import numpy as np
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from soprc_jax.data import datasets, sources
from soprc_jax.models import RESNETS
from soprc_jax.training import build, finetuning, parallel, v_history
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)

# Wall-clock fields of a line of metrics.jsonl; all other fields are reproducible.
CLOCK_FIELDS = ("seconds", "data_wait")


class Records:
  """The open files of a run, except for its checkpoints.

  Args:
    workdir: folder of the run.
    config: resolved.
    data: data of the run.
    last_step: step of the checkpoint that the run resumes from. Records of later steps are
      dropped, since those steps are repeated.
    visits: see `v_history.VHistory`.
    opened: closes the files.

  Attributes:
    lines: lines of ``metrics.jsonl``.
    v: see `v_history`.
    lacks_evaluation: whether a signal interrupted the evaluation that was due at the last step, see
      `complete`.
  """

  def __init__(
    self,
    workdir: Path,
    config: ConfigDict,
    data: build.Data,
    *,
    last_step: int,
    visits: list[list[int]] | None,
    opened: contextlib.ExitStack,
  ):
    writes = parallel.is_main()
    self._log = workdir_lib.MetricsLog(workdir, last_step=last_step, writes=writes)
    opened.callback(self._log.close)
    self.lines = self._log.lines
    due = last_step > 0 and is_due(last_step, config.eval.every, config)
    self.lacks_evaluation = due and "val" in data.splits and "val_mAUPRC" not in self.lines[-1]
    # Events and v of a step without its evaluation are written with the evaluation.
    kept = last_step - self.lacks_evaluation
    self._board = Board(workdir / "tensorboard", last_step=kept, writes=writes)
    opened.callback(self._board.close)
    self.v = v_history.VHistory(workdir, config, data, last_step=kept, visits=visits, writes=writes)
    opened.callback(self.v.close)

  def val_at(self, step: int | None) -> float:
    """Returns the validation mAUPRC after a step, -1 if there is none."""
    found = next((line.get("val_mAUPRC") for line in self.lines if line["step"] == step), None)
    return -1.0 if found is None else float(found)

  def add(
    self, step: int, values: Mapping[str, float], val: Mapping[str, Any], clock: Mapping[str, float]
  ) -> dict[str, Any]:
    """Records a step, and returns the finite values of its line.

    Args:
      step: >= 1.
      values: scalars of the step.
      val: validation metrics; empty if the step was not evaluated.
      clock: seconds of each of `CLOCK_FIELDS`.
    """
    line = {"step": step, **_json(values), **_val_fields(val), **_json(clock)}
    self._log.write(line)
    return self._tell_board(line)

  def complete(self, val: Mapping[str, Any]) -> None:
    """Adds the missing evaluation to the last line.

    This is the last action of an evaluation: after a kill before it, the evaluation counts as
    missing.
    """
    line = dict(self.lines[-1])
    clock = {name: line.pop(name) for name in CLOCK_FIELDS}
    line |= _val_fields(val) | clock
    self._tell_board(line)
    self._board.sync()
    self._log.replace_last(line)
    self._log.sync()
    self.lacks_evaluation = False

  def sync(self) -> None:
    """Writes everything to disk, before a checkpoint, so that no record of its steps is missing."""
    self._log.sync()
    self._board.sync()
    self.v.sync()

  def _tell_board(self, line: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in line.items() if value is not None}
    tags = {
      name.replace("val_", "val/").replace("@", "_at_"): value
      for name, value in shown.items()
      if name != "step"
    }
    self._board.add(tags, line["step"])
    return shown


class Board:
  """Writes the scalars of a run by step to TensorBoard's event files.

  This thread writes them immediately, so that a full disk raises here and does not end another
  thread silently.

  Args:
    folder: folder of the event files; created if it is missing.
    last_step: step that the run resumes from. TensorBoard drops the later steps that earlier
      processes wrote.
    writes: whether this process writes; if not, the calls do nothing.
  """

  def __init__(self, folder: Path, *, last_step: int, writes: bool = True):
    self._events = None
    if not writes:
      return
    folder.mkdir(parents=True, exist_ok=True)
    # File names only have the second; the counter separates two starts within one second.
    suffix = f".{sum(1 for _ in folder.iterdir())}"
    self._events = event_file_writer.EventsWriter(str(folder / "events"), suffix)
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(event_pb2.Event(session_log=log), last_step + 1)

  def add(self, values: Mapping[str, float], step: int) -> None:
    """Writes the scalars of a step."""
    parts = [
      summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()
    ]
    self._write(event_pb2.Event(summary=summary_pb2.Summary(value=parts)), step)

  def sync(self) -> None:
    """Flushes all events to the operating system."""
    if self._events is not None:
      self._events.flush()

  def close(self) -> None:
    if self._events is not None:
      self._events.close()

  def _write(self, event: event_pb2.Event, step: int) -> None:
    if self._events is None:
      return
    event.wall_time, event.step = time.time(), step
    self._events.write_event(event)


def describe_start(
  config: ConfigDict,
  data: build.Data,
  params: Any,
  first: int,
  num_steps: int,
  workdir: Path,
  *,
  trained: str = "",
) -> None:
  """Logs data, model, devices and the step that the run starts from.

  Args:
    config: resolved.
    data: data of the run.
    params: parameters of the model, abstract or not.
    first: number of steps that are done.
    num_steps: number of steps of the whole run.
    workdir: folder of the run.
    trained: pattern of the trained parameters, see `finetuning.select`.
  """
  unit = datasets.unit(config.data)
  sizes = {name: _size(split, unit) for name, split in data.splits.items()}
  _log.info(
    "Data %s: %s.", config.data.source, "; ".join(f"{n}: {size}" for n, size in sizes.items())
  )
  if data.patterns is not None:
    trained_on, tested = (sources.compared_names(data.splits[name]) for name in ("train", "test"))
    _log.info(
      "Several labels for each of the %s (data.label_separator): the test is one of unseen %s, and "
      "%d of their %d labels are trained on.",
      unit,
      unit,
      len(tested & trained_on),
      len(tested),
    )
  if data.sampler.num_small:
    _log.info(
      "%d training %s have fewer than %d %s: policy data.small_classes=%s.",
      data.sampler.num_small,
      data.sampler.unit,
      config.train.per_class,
      unit,
      config.data.small_classes,
    )
  count = _count(params)
  _log.info(
    "Model %s: %.2f million parameters, %s; on %s.",
    config.model.name,
    count / 1e6,
    config.model.dtype,
    parallel.describe(),
  )
  if trained:
    _log.info(
      "Training %s of %s parameters; the others are frozen.%s",
      f"{_count(finetuning.select(params, trained)):,}",
      f"{count:,}",
      f" Statistics of batch norm are not parameters: model.freeze_bn={config.model.freeze_bn}."
      if config.model.name in RESNETS
      else "",
    )
    if not config.model.init_from:
      _log.warning("The frozen parameters are random: set model.init_from.")
  if 0 < config.train.microbatch < config.train.batch_size:
    _log.info(
      "Microbatches of %d %s: each is embedded twice per step.", config.train.microbatch, unit
    )
  if config.model.name in RESNETS and config.model.freeze_bn and not config.model.init_from:
    _log.warning(
      "Batch norm is frozen at its initial statistics, with random weights: set model.init_from, "
      "or model.freeze_bn=False."
    )
  patch, side = config.model.vit.patch, config.data.image_size
  if config.model.name == "vit" and side % patch:
    _log.warning(
      "data.image_size=%d is not a multiple of model.vit.patch=%d: the last %d pixels of each row "
      "and column are left out; %d and %d pixels are whole patches.",
      side,
      patch,
      side % patch,
      side - side % patch,
      side - side % patch + patch,
    )
  if first:
    _log.info("Resuming from step %d of %d in %s.", first, num_steps, workdir)
  else:
    _log.info("Starting: %d steps into %s. The first step compiles.", num_steps, workdir)


def _size(split: sources.Source, unit: str) -> str:
  """Describes the size of a split."""
  classes, of_class = np.unique(split.labels).tolist(), sources.superclasses(split)
  what = f"{len(classes)} classes"
  if sources.label_sets(split) is not None:
    what = f"{len(sources.compared_names(split))} labels in {len(classes)} patterns"
  elif of_class:
    what += f" of {len({of_class[label] for label in classes})} superclasses"
  return f"{what}, {len(split)} {unit}"


def _count(params: Any) -> int:
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def is_due(step: int, every: int, config: ConfigDict) -> bool:
  """Returns whether a periodic action is due after a step.

  Args:
    step: number of the step, >= 1.
    every: period in steps; 0 means only after the last step. The last step is always due.
    config: resolved.
  """
  return step == config.warmup.steps + config.train.steps or (every > 0 and step % every == 0)


def _val_fields(val: Mapping[str, Any]) -> dict[str, Any]:
  return _json({f"val_{name}": value for name, value in val.items() if not isinstance(value, list)})


def _json(values: Mapping[str, float]) -> dict[str, Any]:
  """Replaces non-finite numbers by None, since JSON has no NaN."""
  return {name: value if math.isfinite(value) else None for name, value in values.items()}
