"""What a run tells and notes: its start, a line a step in its log and TensorBoard, v of some
classes at each evaluation.
"""

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

from soprc_jax.training import build, parallel, v_history
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)

# Wall-clock fields of a line of metrics.jsonl; all others repeat exactly.
CLOCK_FIELDS = ("seconds", "data_wait")


class Records:
  """The open files of a run, but for its checkpoints.

  Args:
    workdir: of the run.
    config: resolved.
    data: of the run.
    last_step: step of the checkpoint that the run goes on from: what stands there of later ones is
      dropped, since those steps come again.
    opened: closes the files.

  Attributes:
    lines: of ``metrics.jsonl``.
    v: see `v_history`.
    lacks_evaluation: whether the last step was due to be evaluated, and a signal has cut that
      short: see `complete`.
  """

  def __init__(
    self,
    workdir: Path,
    config: ConfigDict,
    data: build.Data,
    *,
    last_step: int,
    opened: contextlib.ExitStack,
  ):
    writes = parallel.is_main()
    self._log = workdir_lib.MetricsLog(workdir, last_step=last_step, writes=writes)
    opened.callback(self._log.close)
    self.lines = self._log.lines
    due = last_step > 0 and is_due(last_step, config.eval.every, config)
    self.lacks_evaluation = due and "val" in data.splits and "val_mAUPRC" not in self.lines[-1]
    # Events and v of the step whose evaluation is missing come with it.
    kept = last_step - self.lacks_evaluation
    self._board = Board(workdir / "tensorboard", last_step=kept, writes=writes)
    opened.callback(self._board.close)
    self.v = v_history.VHistory(workdir, config, data, last_step=kept, writes=writes)
    opened.callback(self.v.close)

  def val_at(self, step: int | None) -> float:
    """mAUPRC on val after a step, -1 where there is none."""
    found = next((line.get("val_mAUPRC") for line in self.lines if line["step"] == step), None)
    return -1.0 if found is None else float(found)

  def add(
    self, step: int, values: Mapping[str, float], val: Mapping[str, Any], clock: Mapping[str, float]
  ) -> dict[str, Any]:
    """Notes a step, and returns what of its line is finite.

    Args:
      step: >= 1.
      values: scalars of the step.
      val: metrics on val, if it was evaluated.
      clock: seconds of each of `CLOCK_FIELDS`.
    """
    line = {"step": step, **_json(values), **_val_fields(val), **_json(clock)}
    self._log.write(line)
    return self._tell_board(line)

  def complete(self, val: Mapping[str, Any]) -> None:
    """Gives the last line the evaluation that it lacks; the last thing to be done of it, since a
    kill before leaves it missing.
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
    """Puts everything on disk; done before a checkpoint, so that nothing that it stands for can be
    missing.
    """
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
  """Scalars of a run by step, as TensorBoard's event files.

  They are written at once and by this thread: a disk that is full is an error here, not a thread
  that died in silence.

  Args:
    folder: of the event files; made if it is missing.
    last_step: step from which the run goes on: TensorBoard drops what earlier processes wrote of
      later ones.
    writes: whether this process writes; if not, the calls do nothing.
  """

  def __init__(self, folder: Path, *, last_step: int, writes: bool = True):
    self._events = None
    if not writes:
      return
    folder.mkdir(parents=True, exist_ok=True)
    # The name has the second only: with a counter, two starts within one do not share a file.
    suffix = f".{sum(1 for _ in folder.iterdir())}"
    self._events = event_file_writer.EventsWriter(str(folder / "events"), suffix)
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write(event_pb2.Event(session_log=log), last_step + 1)

  def add(self, values: Mapping[str, float], step: int) -> None:
    """The scalars of a step."""
    parts = [
      summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()
    ]
    self._write(event_pb2.Event(summary=summary_pb2.Summary(value=parts)), step)

  def sync(self) -> None:
    """Hands all events to the system."""
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
  config: ConfigDict, data: build.Data, params: Any, first: int, num_steps: int, workdir: Path
) -> None:
  """Logs data, network, devices and where the run begins.

  Args:
    config: resolved.
    data: of the run.
    params: of the network, abstract or not.
    first: steps that are done.
    num_steps: of the whole run.
    workdir: of the run.
  """
  sizes = {
    name: f"{len(np.unique(s.labels))} classes, {len(s)} images" for name, s in data.splits.items()
  }
  _log.info(
    "Data %s: %s.", config.data.source, "; ".join(f"{n}: {size}" for n, size in sizes.items())
  )
  if data.sampler.num_small:
    _log.info(
      "%d training classes have fewer than %d images: policy data.small_classes=%s.",
      data.sampler.num_small,
      config.train.per_class,
      config.data.small_classes,
    )
  count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
  _log.info(
    "Network %s: %.2f million parameters, %s; on %s.",
    config.model.name,
    count / 1e6,
    config.model.dtype,
    parallel.describe(),
  )
  if 0 < config.train.microbatch < config.train.batch_size:
    _log.info(
      "Microbatches of %d images: each image is embedded twice a step.", config.train.microbatch
    )
  if config.model.freeze_bn and not config.model.init_from:
    _log.warning(
      "Batch norm is frozen at its initial statistics, with random weights: set model.init_from, "
      "or model.freeze_bn=False."
    )
  if first:
    _log.info("Going on from step %d of %d in %s.", first, num_steps, workdir)
  else:
    _log.info("Starting: %d steps into %s. The first step compiles.", num_steps, workdir)


def is_due(step: int, every: int, config: ConfigDict) -> bool:
  """Whether something that is done every so many steps, and after the last one, is done after a
  step; 0 is the last one only.
  """
  return step == config.warmup.steps + config.train.steps or (every > 0 and step % every == 0)


def _val_fields(val: Mapping[str, Any]) -> dict[str, Any]:
  return _json({f"val_{name}": value for name, value in val.items() if not isinstance(value, list)})


def _json(values: Mapping[str, float]) -> dict[str, Any]:
  """Numbers for JSON, which has no NaN."""
  return {name: value if math.isfinite(value) else None for name, value in values.items()}
