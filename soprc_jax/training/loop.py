"""The run: resume, train, evaluate, keep checkpoints, test the best one, leave results."""

from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import logging
import math
from pathlib import Path
import signal
import time
from typing import Any

import jax
import numpy as np

from soprc_jax.data import pipeline
from soprc_jax.training import (
  board,
  build,
  checkpoints,
  classes,
  describe,
  empty,
  evaluation,
  guard,
  interrupts,
  lock,
  parallel,
  reproduction,
  results,
  v_history,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import progress as progress_lib
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.state import TrainState

_log = logging.getLogger(__name__)

DivergedError = guard.DivergedError
# Wall-clock fields of a line of metrics.jsonl; all others repeat exactly.
CLOCK_FIELDS = ("seconds", "data_wait")


def train(config: Any, workdir: Path) -> dict[str, Any]:
  """Trains by a resolved config, or goes on with the run in ``workdir``; returns what ``results.json`` holds.

  At a kill at any moment, the same call goes on from the newest checkpoint and ends with the same bits.

  Raises:
    ValueError: the config does not fit the data, the devices, or the run in ``workdir``; another process is at it; its files are damaged.
    DivergedError: a step is not finite.
    InterruptedRunError: SIGTERM or Ctrl-C while steps were made; a checkpoint has been written.
    OSError: no space, no permission.
  """
  parallel.check_equal("the config", config_lib.to_json(config))
  parallel.check_equal("--workdir", str(workdir))
  workdir = workdir.expanduser().absolute()  # Orbax takes no other
  with _disk_errors(workdir), contextlib.ExitStack() as opened:  # closing writes too
    run = _Run(config, workdir, opened)
    run.train()
    return run.finish()


@contextlib.contextmanager
def _disk_errors(workdir: Path) -> Iterator[None]:
  """Says what a full disk means for the run."""
  try:
    yield
  except Exception as error:
    if not workdir_lib.is_full(error):
      raise
    raise OSError(
      f"no space is left for the run in {workdir}: make some, and the same command goes on from its newest checkpoint ({error})"
    ) from error


@dataclasses.dataclass
class _Step:
  """A step that has been started; its scalars are fetched when the next one is under way, so the device never waits for the host."""

  number: int
  batch: dict[str, np.ndarray]
  positions: np.ndarray
  scalars: Any
  data_wait: float
  seconds: float = 0.0
  val: dict[str, Any] = dataclasses.field(default_factory=dict)
  fetched: dict[str, float] | None = None


class _Run:
  """The open files and compiled functions of one run."""

  def __init__(self, config: Any, workdir: Path, opened: contextlib.ExitStack):
    self.config, self.workdir = config, workdir
    is_new = workdir_lib.check(workdir, config)
    self.data = build.make_data(config)
    self.parts = build.make_parts(config, self.data.class_counts())
    self.num_steps = config.warmup.steps + config.train.steps
    start = build.starting_state(config, self.parts) if is_new else None
    parallel.wait_for_all("every process has checked the workdir")
    # Only now: a mistake above leaves no folder behind that would refuse the corrected command.
    if parallel.is_main():
      workdir.mkdir(parents=True, exist_ok=True)
      opened.enter_context(lock.hold(workdir))
      workdir_lib.claim(workdir, config)
    parallel.wait_for_all("the workdir is there")
    workdir_lib.read_config(workdir)  # a folder of the same name on another disk would be found out at the end
    self.newest = checkpoints.Store(workdir / checkpoints.NEWEST, keep=config.checkpoint.keep)
    opened.callback(self.newest.close)
    self.best = checkpoints.Store(workdir / checkpoints.BEST)
    opened.callback(self.best.close)
    self.embed = evaluation.make_embed(self.parts.model, config)
    self.like = build.abstract_state(config, self.parts)
    self.meta = classes.describe(self.data.splits["train"])
    self.best.check()
    found = self.newest.restore_intact(self.like)
    if found is None:
      state = build.starting_state(config, self.parts) if start is None else start
    else:
      state, meta = found
      if classes.differ(meta, self.meta):
        raise ValueError(
          f"the classes of the data are not those that the run in {workdir} was trained on: give it the data of before, or choose another --workdir"
        )
    self.start = int(state.step)
    self.broken = set[int]()
    self.empty = empty.EmptyBatches()
    self.state = parallel.replicate(parallel.from_main(state))
    self.log = workdir_lib.MetricsLog(workdir, last_step=self.start, writes=parallel.is_main())
    opened.callback(self.log.close)
    self.board = board.Board(workdir / "tensorboard", last_step=self.start, writes=parallel.is_main())
    opened.callback(self.board.close)
    self.v_history = v_history.VHistory(workdir, config, self.data, last_step=self.start, writes=parallel.is_main())
    opened.callback(self.v_history.close)
    self.best_value = max((line["val_mAUPRC"] for line in self.log.lines if "val_mAUPRC" in line), default=-1.0)
    describe.start(config, self.data, self.like.params, self.start, self.num_steps, workdir)

  def train(self) -> None:
    """All steps that are left."""
    batches = build.make_batches(self.config, self.data)
    stream = pipeline.iterate(
      batches, start=self.start, workers=self.config.data.workers, prefetch=self.config.data.prefetch
    )
    progress = progress_lib.Progress(self.config, self.start, self.num_steps)
    pending: _Step | None = None
    began = time.perf_counter()
    with interrupts.Requests() as requests:
      for number in range(self.start + 1, self.num_steps + 1):
        step = self._start_step(number, stream)
        if pending is not None:
          self._write(pending, progress)
        pending = step
        evaluates = _due(number, self.config.eval.every, self.num_steps)
        stops = requests.due(number)
        saves = stops or _due(number, self.config.checkpoint.every, self.num_steps)
        if evaluates or saves:
          jax.block_until_ready(self.state)
        pending.seconds = time.perf_counter() - began
        # Where steps may be left out, nothing is started before it is known whether this one was.
        if evaluates or saves or self.config.train.on_nonfinite == "skip":
          self._evaluate_and_save(pending, progress, evaluates, saves)
          pending = None
        if stops and number < self.num_steps:
          self._stop(requests, number)
        began = time.perf_counter()
    progress.close()

  def _start_step(self, number: int, stream: Iterator[dict[str, np.ndarray]]) -> _Step:
    """Hands the next batch to the devices."""
    waiting = time.perf_counter()
    batch = next(stream)
    positions = batch.pop("position")
    self._note_broken(positions, batch["broken"])
    if self.config.data.on_broken != "skip":
      batch.pop("broken")
    wait = time.perf_counter() - waiting
    step_fn = self.parts.warmup_step if number <= self.config.warmup.steps else self.parts.main_step
    self.state, scalars = step_fn(self.state, parallel.shard(batch) | {"step": parallel.same_everywhere(np.int32(number))})
    return _Step(number, batch, positions, scalars, wait)

  def _stop(self, requests: interrupts.Requests, number: int) -> None:
    """Ends the run after a step whose checkpoint is written."""
    signum = requests.number or 0
    raise interrupts.InterruptedRunError(
      signum,
      f"Stopped by {signal.Signals(signum).name} after step {number} of {self.num_steps}: its checkpoint is in {self.workdir}; "
      "the same command goes on from there.",
    )

  def _note_broken(self, positions: np.ndarray, broken: np.ndarray) -> None:
    """Names each broken image once (``data.on_broken=skip``)."""
    for position in set(positions[broken].tolist()) - self.broken:
      self.broken.add(position)
      name = self.data.splits["train"][position].id
      _log.warning("Broken image %s: another one of its class takes its place (data.on_broken=skip).", name)

  def _evaluate_and_save(self, step: _Step, progress: progress_lib.Progress, evaluates: bool, saves: bool) -> None:
    self._fetch(step)  # before anything is evaluated or saved that no run should go on from
    improved = False
    if evaluates:
      variables = {"params": self.state.params, "batch_stats": self.state.batch_stats}
      self.v_history.add(step.number, self.embed, variables, self.state.opt_state)
      if "val" in self.data.splits:
        step.val = evaluation.evaluate(self.embed(variables, self.data.splits["val"]), self.config)
        improved = step.val["mAUPRC"] > self.best_value
    self._write(step, progress)
    if not (evaluates or saves):
      return
    state = parallel.unreplicate(self.state)
    # This order makes a kill between any two lines harmless: what a checkpoint stands for is on disk before it is.
    self.log.sync()
    self.board.sync()
    self.v_history.sync()
    if improved:
      self.best_value = step.val["mAUPRC"]
      self.best.save(state, self.meta)
    if saves:
      self.newest.save(state, self.meta)

  def _write(self, step: _Step, progress: progress_lib.Progress) -> None:
    scalars = self._fetch(step)
    # Rate of the update that made this step: the schedule is called with the number of steps before it.
    line: dict[str, Any] = {"step": step.number, **scalars, "learning_rate": float(self.parts.schedule(step.number - 1))}
    line |= {f"val_{name}": value for name, value in step.val.items() if not isinstance(value, list)}
    line |= {name: round(getattr(step, name), 4) for name in CLOCK_FIELDS}
    # JSON has no NaN.
    line = {name: value if math.isfinite(value) else None for name, value in line.items()}
    self.log.write(line)
    shown = {name: value for name, value in line.items() if value is not None}
    tags = {name.replace("val_", "val/").replace("@", "_at_"): value for name, value in shown.items() if name != "step"}
    self.board.add(tags, step.number)
    progress.show(shown)

  def _fetch(self, step: _Step) -> dict[str, float]:
    """The scalars of a step as numbers, the first device's; with ``train.on_nonfinite=skip`` also whether it was skipped.

    Raises:
      DivergedError: the step was not finite, and must be.
    """
    if step.fetched is None:
      scalars = {name: float(value) for name, value in parallel.unreplicate(step.scalars).items()}
      nonfinite = guard.names(scalars.pop("nonfinite"))
      if self.config.train.on_nonfinite == "skip":
        scalars["skipped"] = float(bool(nonfinite))
      if nonfinite:
        self._nonfinite(step, scalars, nonfinite)
      else:
        self.empty.note(step.number, scalars.get("valid_lists", 1.0))  # a loss of one's own may not count them
      step.fetched = scalars
    return step.fetched

  def _nonfinite(self, step: _Step, scalars: dict[str, float], parts: list[str]) -> None:
    """Keeps a step that was not finite, and tells it.

    Raises:
      DivergedError: unless the config says to go on.
    """
    rate, images = float(self.parts.schedule(step.number - 1)), self.data.splits["train"]
    skips = self.config.train.on_nonfinite == "skip"
    in_a_row = 1 + _trailing_skips(self.log.lines)
    goes_on = skips and in_a_row <= self.config.train.max_skipped
    # The state stands as it was before the step; only its count may have moved on. Of those that are skipped the first one is kept.
    state = dataclasses.replace(parallel.unreplicate(self.state), step=np.int32(step.number - 1))
    about = {
      "nonfinite": parts,
      "loss": repr(scalars["loss"]),
      "grad_norm": repr(scalars["grad_norm"]),
      "learning_rate": rate,
    }
    about |= {"device": parallel.describe()}
    ids = [images[int(position)].id for position in step.positions]
    if not goes_on or not reproduction.steps(self.workdir):
      reproduction.save(
        self.workdir, self.config, state, step.batch, ids=ids, class_counts=self.data.class_counts(), about=about
      )
    found = (
      f"step {step.number} of {self.num_steps}: not finite: {', '.join(parts)} (loss {scalars['loss']:g}, gradient norm "
      f"{scalars['grad_norm']:g}, learning rate {rate:g}; images {', '.join(ids[:3])} and {len(ids) - 3} more)"
    )
    if goes_on:
      _log.warning("Skipped %s.", found)
      return
    before = f" after {in_a_row - 1} skipped steps in a row (train.max_skipped)" if skips else ""
    raise guard.DivergedError(
      f"training broke down{before} at {found}. No checkpoint holds it; see it again with: python -m experiments.replay "
      f"--workdir={self.workdir}; try a lower optim.learning_rate" + ("" if skips else ", or train.on_nonfinite=skip")
    )

  def finish(self) -> dict[str, Any]:
    """Test metrics of the best checkpoint on val, pictures, ``results.json``."""
    state: TrainState
    if self.best.latest_step() is None:
      state, which = parallel.unreplicate(self.state), "last"
    else:
      state, which = self.best.restore(self.like)[0], "best on val"
    _log.info("Testing the network of step %d (%s).", int(state.step), which)
    return results.write(self.workdir, self.config, self.data.splits, self.embed, state, self.log.lines)


def _due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


def _trailing_skips(lines: list[dict[str, Any]]) -> int:
  """How many of the last steps were skipped, one after another."""
  return sum(1 for _ in itertools.takewhile(lambda line: line.get("skipped"), reversed(lines)))
