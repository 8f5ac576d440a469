"""The training loop: resume, train, evaluate, save checkpoints, test the best, write results."""

from collections.abc import Iterator, Mapping
import contextlib
import copy
import dataclasses
import itertools
import logging
from pathlib import Path
import signal
import time
import types
from typing import Any, NamedTuple, NoReturn

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable
from soprc_jax.data import confusable, datasets, pipeline, sources
from soprc_jax.training import (
  budget,
  build,
  checkpoints,
  classes,
  evaluation,
  interrupts,
  parallel,
  replay,
  results,
  run_log,
  trivial_baselines,
)
from soprc_jax.training import config as config_lib
from soprc_jax.training import progress as progress_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.step import TrainState

_log = logging.getLogger(__name__)

DivergedError = step_lib.DivergedError


def train(
  config: ConfigDict,
  workdir: Path,
  *,
  allow_seen_classes: bool = False,
  command: Mapping[str, Any] | None = None,
  time_budget: budget.Budget | None = None,
) -> dict[str, Any]:
  """Trains by a resolved config, or resumes the run in ``workdir``.

  A new run chooses the open keys of its config by the data and the time budget. A resumed run keeps
  those that it has chosen. The results have them as ``"chosen"``.

  If the process is killed at any moment, the same call resumes from the newest checkpoint. The
  results are the same bit for bit.

  Args:
    config: resolved.
    workdir: folder of the run.
    allow_seen_classes: log a warning instead of raising if the model of ``model.init_from`` was
      trained on validation or test classes. The results then have ``"seen_classes"``, see
      `classes.seen`.
    time_budget: chooses ``train.steps``, which must be open, see `budget`; None: it has a value.
    command: ``{"config": str, "overrides": {key: value}}``, the config file and the keys set on
      the command line; stored in the results for the report.

  Returns:
    The content of ``results.json``.

  Raises:
    ValueError: the config does not fit the data, the devices, or the run in ``workdir``; another
      process uses ``workdir``; its files are corrupt; its data have changed; validation or test
      classes were trained on.
    DivergedError: a step is not finite.
    InterruptedRunError: SIGTERM or Ctrl-C during the steps; a checkpoint has been written.
    OSError: no space, no permission.
  """
  parallel.check_equal("the config", config_lib.to_json(config))
  parallel.check_equal("--workdir", str(workdir))
  workdir = file_io.given(workdir, name="--workdir").absolute()  # Orbax needs an absolute path
  with _disk_errors(workdir), contextlib.ExitStack() as opened:  # closing writes too
    run = _Run(
      config, workdir, opened, allow_seen_classes=allow_seen_classes, time_budget=time_budget
    )
    run.train()
    return run.finish(command)


@contextlib.contextmanager
def _disk_errors(workdir: Path) -> Iterator[None]:
  """Raises an OSError that says how to resume, where the disk is full."""
  try:
    yield
  except Exception as error:
    if not file_io.is_full(error):
      raise
    where = file_io.what_is_full(error, workdir)
    what = "for the run in" if where.startswith(str(workdir)) else "in"
    raise OSError(
      f"no space is left {what} {where}: free some, and the same command resumes from the newest "
      f"checkpoint in {workdir} ({error})"
    ) from error


# This many empty batches in a row are not by chance: the data have nothing to rank.
LIMIT = 20


class EmptyBatchesError(ValueError):
  """Raised when batch after batch has no query with both a positive and a negative."""


class EmptyBatches:
  """Counts consecutive batches without a valid list.

  Args:
    limit: number of consecutive batches at which the run stops.
  """

  def __init__(self, limit: int = LIMIT):
    self._limit, self._in_a_row = limit, 0

  def note(self, step: int, valid_lists: float) -> None:
    """Counts a step by its metric ``valid_lists``. Logs a warning at the first empty one in a row.

    Raises:
      EmptyBatchesError: the step is the ``limit``-th empty one in a row.
    """
    if valid_lists > 0:
      self._in_a_row = 0
      return
    self._in_a_row += 1
    if self._in_a_row == 1:
      _log.warning(
        "Step %d: no image of the batch has both a positive and a negative. There is nothing to "
        "rank, and a loss of 0 means nothing.",
        step,
      )
    if self._in_a_row >= self._limit:
      raise EmptyBatchesError(
        f"no image had both a positive and a negative in {self._in_a_row} batches in a row, up to "
        f"step {step}: there is nothing to rank. Raise train.per_class, or check "
        "data.small_classes, data.on_broken and the labels"
      )


@dataclasses.dataclass
class _Step:
  """A step that has been started.

  Its scalars are fetched after the next step has started, so that the device never waits for the
  host.
  """

  number: int
  batch: dict[str, np.ndarray]
  positions: np.ndarray
  scalars: Any
  data_wait: float
  seconds: float = 0.0
  val: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fetched: dict[str, float] | None = None


class _Evaluation(NamedTuple):
  """Result of an evaluation; empty if a signal interrupted it (``cut``)."""

  v: dict[str, Any] | None = None
  val: Mapping[str, Any] = types.MappingProxyType({})
  cut: bool = False


class _Run:
  """The open files and compiled functions of one run."""

  def __init__(
    self,
    config: ConfigDict,
    workdir: Path,
    opened: contextlib.ExitStack,
    *,
    allow_seen_classes: bool,
    time_budget: budget.Budget | None,
  ):
    self.config, self.workdir, self._allow_seen_classes = config, workdir, allow_seen_classes
    is_new = workdir_lib.check(workdir, config)
    if is_new and config.model.init_from:
      checkpoints.check_start(config.model.init_from)
    splits = datasets.make_splits(config.data)
    started_from = self._check_unseen(splits) if is_new else None
    if is_new:
      self.config, self.chosen = budget.fill(config, splits, time_budget)
    else:
      self.config, self.chosen = workdir_lib.filled(workdir, config), workdir_lib.chosen(workdir)
      budget.check_same(self.chosen, time_budget, workdir)
    config = self.config
    parallel.check_equal("the config with its chosen values", config_lib.to_json(config))
    for key, choice in self.chosen.items():
      _log.info("%s=%s: %s.", key, choice["value"], choice["reason"])
    self.data = build.make_data(config, splits)
    self.parts = build.make_parts(
      config,
      self.data.class_counts(),
      superclasses=self.data.superclasses(),
      of_data=self.data.patterns,
    )
    self.num_steps = config.warmup.steps + config.train.steps
    start = build.starting_state(config, self.parts) if is_new else None
    parallel.wait_for_all("every process has checked the workdir")
    # Only now: after an error above, no folder is left that would reject the corrected command.
    if parallel.is_main():
      workdir.mkdir(parents=True, exist_ok=True)
      opened.enter_context(workdir_lib.hold(workdir))
      workdir_lib.claim(workdir, config, chosen=self.chosen)
    parallel.wait_for_all("the workdir exists")
    # Fails early if another process sees a folder of this name on another disk.
    workdir_lib.read_config(workdir)
    self.newest = checkpoints.Store(workdir / checkpoints.NEWEST, keep=config.checkpoint.keep)
    opened.callback(self.newest.close)
    self.best = checkpoints.Store(workdir / checkpoints.BEST, keep=None)
    opened.callback(self.best.close)
    self.embed = evaluation.make_embed(self.parts.model, config)
    self.like = build.abstract_state(config, self.parts)
    self.meta = classes.describe(self.data.splits, data_source=config.data.source)
    found = self.newest.restore_intact(self.like, check=self._check_unchanged)
    meta: dict[str, Any] = {}
    if found is None:
      state = build.starting_state(config, self.parts) if start is None else start
    else:
      state, meta = found
      started_from = meta.get("started_from")
    self.meta["baselines"] = meta.get("baselines")  # None: not measured
    # Not read again on resuming: model.init_from may be gone, or hold another model.
    self.meta["started_from"] = self._check_unseen(splits) if started_from is None else started_from
    if parallel.is_main() and (found is None or not (workdir / classes.IMAGES).exists()):
      classes.write_images(workdir, self.data.splits)
    self.start = int(state.step)
    # These steps are repeated, with other bits if the devices differ.
    self.best.remove([step for step in self.best.steps() if step > self.start])
    self.best.check()
    self.broken = set[int]()
    self.empty = EmptyBatches()
    self.state = parallel.replicate(parallel.from_main(state))
    self.sampler = self.data.sampler.restored(meta.get("sampler"))
    self.records = run_log.Records(
      workdir,
      config,
      self.data,
      last_step=self.start,
      visits=meta.get("visits"),
      opened=opened,
    )
    self.best_value = self.records.val_at(self.best.latest_step())
    run_log.describe_start(
      config,
      self.data,
      self.like.params,
      self.start,
      self.num_steps,
      workdir,
      trained=self.parts.trained,
    )

  def _check_unseen(self, splits: datasets.Splits) -> classes.Names:
    return build.check_unseen(self.config, splits, allow_seen_classes=self._allow_seen_classes)

  def _check_unchanged(self, meta: dict[str, Any]) -> None:
    classes.check_unchanged(meta, self.meta, self.data.splits, self.workdir)

  def train(self) -> None:
    """Runs all remaining steps."""
    stream = self._batches()
    progress = progress_lib.Progress(self.config, self.start, self.num_steps)
    pending: _Step | None = None
    with interrupts.Requests() as requests:
      if self.start == 0 and self.config.eval.baselines:
        self._measure_baselines(requests)
      if self.records.lacks_evaluation:
        self._evaluate_late(requests)
      began = time.perf_counter()
      for number in range(self.start + 1, self.num_steps + 1):
        try:
          step = self._start_step(number, stream)
        except Exception:
          if requests.number is None:
            raise
          # A signal to the whole process group ends the loader processes before this one.
          self._save_and_stop(pending, progress, requests, number - 1)
        if pending is not None:
          self._write(pending, progress)
        pending = step
        evaluates = run_log.is_due(number, self.config.eval.every, self.config)
        stops = requests.due(number)
        saves = stops or run_log.is_due(number, self.config.checkpoint.every, self.config)
        if evaluates or saves:
          jax.block_until_ready(self.state)
        pending.seconds = time.perf_counter() - began
        # If steps may be skipped, the next one starts after it is known whether this one was.
        if evaluates or saves or self.config.train.on_nonfinite == "skip":
          done = self._evaluate_and_save(pending, progress, requests, evaluates, saves)
          stops, pending = stops or not done, None
        if stops:
          self._stop(requests, number)
        began = time.perf_counter()
      if requests.number is not None:  # the signal came after the last step
        self._stop(requests, self.num_steps)
    progress.close()

  def _batches(self) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of the remaining steps.

    Where the sampler depends on the model, it is renewed at each refresh. The steps before that are
    done then, since their batches have been taken.
    """
    refresh, start = self.sampler.refresh or self.num_steps, self.start
    batches = build.make_batches(self.config, self.data)
    while start < self.num_steps:
      stop = min(start - start % refresh + refresh, self.num_steps)
      if isinstance(self.sampler, confusable.ConfusableSampler) and start % refresh == 0:
        self._refresh(self.sampler, start, stop)
      yield from pipeline.iterate(
        # A copy, since a sampler keeps the plan of one epoch, and the loader is ahead.
        batches.with_plan(copy.copy(self.sampler)),
        start=start,
        stop=stop,
        workers=self.config.data.workers,
        prefetch=self.config.data.prefetch,
      )
      start = stop

  def _refresh(self, plan: confusable.ConfusableSampler, start: int, stop: int) -> None:
    """Finds the neighbours of the steps from ``start`` on by the model of this moment."""
    positions, rows = plan.to_embed(start)
    variables = evaluation.variables_of(self.state)
    embedded = self.embed(variables, sources.Subset(self.data.splits["train"], positions))
    found = plan.find(
      embedded.embeddings, rows[embedded.positions], step=start, num_steps=stop - start
    )
    self.sampler = plan.with_neighbours(parallel.from_main(found))

  def _meta(self) -> dict[str, Any]:
    """Returns the metadata of a checkpoint that a run resumes from."""
    return self.meta | {"visits": self.records.v.visits, "sampler": self.sampler.to_json()}

  def _start_step(self, number: int, stream: Iterator[dict[str, np.ndarray]]) -> _Step:
    """Starts a step with the next batch on the devices."""
    waiting = time.perf_counter()
    batch = next(stream)
    positions = batch.pop("position")
    self._note_broken(positions, batch["broken"])
    if self.config.data.on_broken != "skip":
      batch.pop("broken")
    wait = time.perf_counter() - waiting
    step_fn = self.parts.warmup_step if number <= self.config.warmup.steps else self.parts.main_step
    self.state, scalars = step_fn(
      self.state, parallel.shard(batch) | {"step": parallel.same_everywhere(np.int32(number))}
    )
    # While the devices compute. The sampler is that of this step until the next batch is taken.
    if number > self.config.warmup.steps:
      self.records.v.count(number, self.sampler)
    return _Step(number, batch, positions, scalars, wait)

  def _stop(self, requests: interrupts.Requests, number: int) -> NoReturn:
    """Raises an InterruptedRunError after a saved step, or before the first one."""
    signum = requests.number or 0
    what = f"Stopped by {signal.Signals(signum).name}"
    if number:
      after = (
        f"after step {number} of {self.num_steps}: its checkpoint is in {self.workdir}; the "
        "same command resumes from it."
      )
    else:
      after = f"before the first of {self.num_steps} steps: the same command starts again."
    raise interrupts.InterruptedRunError(signum, f"{what} {after}")

  def _save_and_stop(
    self,
    pending: _Step | None,
    progress: progress_lib.Progress,
    requests: interrupts.Requests,
    number: int,
  ) -> NoReturn:
    """Saves the newest step, which may not be written yet, and ends the run."""
    if pending is not None:
      self._write(pending, progress)
    if number > self.start:
      self.records.sync()
      self.newest.save(parallel.unreplicate(self.state), self._meta())
    self._stop(requests, number)

  def _note_broken(self, positions: np.ndarray, broken: np.ndarray) -> None:
    """Logs each broken image once (``data.on_broken=skip``)."""
    for position in set(positions[broken].tolist()) - self.broken:
      self.broken.add(position)
      name = printable(self.data.splits["train"][position].id)
      _log.warning(
        "Broken image %s: replaced by another one of its class (data.on_broken=skip).", name
      )

  def _evaluate_and_save(
    self,
    step: _Step,
    progress: progress_lib.Progress,
    requests: interrupts.Requests,
    evaluates: bool,
    saves: bool,
  ) -> bool:
    """Evaluates and saves a step where due; returns False if a signal interrupted the evaluation.

    The step is saved then, and evaluated when the run is resumed.
    """
    self._fetch(step)  # raises before a step is evaluated or saved from which no run should resume
    found = self._evaluate(step.number, requests) if evaluates else _Evaluation()
    step.val = found.val
    self._write(step, progress)
    if not (evaluates or saves):
      return True
    self.records.v.write(found.v)
    state = parallel.unreplicate(self.state)
    # This order makes a kill between any two lines harmless: the records of a step are on disk
    # before its checkpoint.
    self.records.sync()
    self._keep_if_best(found, state)
    if saves or found.cut:
      self.newest.save(state, self._meta())
      self._prune_best()
    return not found.cut

  def _evaluate(self, number: int, requests: interrupts.Requests) -> _Evaluation:
    """Measures v and the validation metrics of the model after a step."""
    variables = evaluation.variables_of(self.state)
    if "val" not in self.data.splits:
      return _Evaluation(
        self.records.v.measure(number, self.embed, variables, self.state.opt_state)
      )
    try:
      with requests.may_cut():
        v = self.records.v.measure(number, self.embed, variables, self.state.opt_state)
        val = evaluation.evaluate(self.embed(variables, self.data.splits["val"]), self.config)
    except interrupts.CutShort:
      return _Evaluation(cut=True)
    return _Evaluation(v, val)

  def _measure_baselines(self, requests: interrupts.Requests) -> None:
    """Measures what a trained model should exceed, before the first step.

    Every checkpoint holds the result, since a resumed run no longer has the initial model:
    ``model.init_from`` may be gone. A broken test image is noticed here, not after the training.
    """
    variables = evaluation.variables_of(self.state)
    try:
      with requests.may_cut():
        found = trivial_baselines.measure(self.config, self.data.splits, self.embed, variables)
    except interrupts.CutShort:
      self._stop(requests, 0)
    self.meta["baselines"] = found
    _log.info("%s", trivial_baselines.to_beat(found))

  def _evaluate_late(self, requests: interrupts.Requests) -> None:
    """Evaluates the step that the run resumes from, if its evaluation was interrupted."""
    found = self._evaluate(self.start, requests)
    if found.cut:
      self._stop(requests, self.start)
    self.records.v.write(found.v)
    self.records.sync()
    self._keep_if_best(found, parallel.unreplicate(self.state))
    self.records.complete(found.val)
    _log.info("Step %d is evaluated: val_mAUPRC %.4g", self.start, found.val["mAUPRC"])

  def _keep_if_best(self, found: _Evaluation, state: TrainState) -> None:
    if found.val and found.val["mAUPRC"] > self.best_value:
      self.best_value = found.val["mAUPRC"]
      self.best.save(state, self.meta)
      self._prune_best()

  def _prune_best(self) -> None:
    """Keeps the best model so far, and the one that was best at the newest checkpoint.

    A run that resumes from that checkpoint may need it.
    """
    steps, saved = self.best.steps(), self.newest.latest_step() or 0
    self.best.remove(
      sorted({*steps} - {*steps[-1:], *[step for step in steps if step <= saved][-1:]})
    )

  def _write(self, step: _Step, progress: progress_lib.Progress) -> None:
    scalars = self._fetch(step)
    # Learning rate of this step: the schedule is called with the number of steps before it.
    rate = float(self.parts.schedule(step.number - 1))
    clock = {name: round(getattr(step, name), 4) for name in run_log.CLOCK_FIELDS}
    progress.show(
      self.records.add(step.number, {**scalars, "learning_rate": rate}, step.val, clock)
    )

  def _fetch(self, step: _Step) -> dict[str, float]:
    """Returns the scalars of a step as numbers, from the first device.

    With ``train.on_nonfinite=skip`` they include whether the step was skipped.

    Raises:
      DivergedError: the step was not finite, and the config does not skip it.
    """
    if step.fetched is None:
      scalars = {name: float(value) for name, value in parallel.unreplicate(step.scalars).items()}
      parts = step_lib.nonfinite_names(scalars.pop("nonfinite"))
      if self.config.train.on_nonfinite == "skip":
        scalars["skipped"] = float(bool(parts))
      if parts:
        self._nonfinite(step, scalars, parts)
      else:
        # A custom loss may not count them.
        self.empty.note(step.number, scalars.get("valid_lists", 1.0))
      step.fetched = scalars
    return step.fetched

  def _nonfinite(self, step: _Step, scalars: dict[str, float], parts: list[str]) -> None:
    """Stores a step that was not finite, and logs it or raises.

    Raises:
      DivergedError: unless the config says to skip the step.
    """
    rate, images = float(self.parts.schedule(step.number - 1)), self.data.splits["train"]
    skips = self.config.train.on_nonfinite == "skip"
    in_a_row = 1 + _trailing_skips(self.records.lines)
    goes_on = skips and in_a_row <= self.config.train.max_skipped
    # The state is that before the step; only its count may have advanced. Of the skipped steps, the
    # first one is stored.
    state = dataclasses.replace(parallel.unreplicate(self.state), step=np.int32(step.number - 1))
    about = {
      "nonfinite": parts,
      "loss": repr(scalars["loss"]),
      "grad_norm": repr(scalars["grad_norm"]),
      "learning_rate": rate,
      "device": parallel.describe(),
    }
    ids = [images[int(position)].id for position in step.positions]
    if not goes_on or not replay.steps(self.workdir):
      replay.save(
        self.workdir,
        self.config,
        state,
        step.batch,
        ids=ids,
        class_counts=self.data.class_counts(),
        superclasses=self.data.superclasses(),
        of_data=self.data.patterns,
        about=about,
      )
    found = (
      f"step {step.number} of {self.num_steps}: not finite: {', '.join(parts)} (loss "
      f"{scalars['loss']:g}, gradient norm {scalars['grad_norm']:g}, learning rate {rate:g}; "
      f"images {', '.join(ids[:3])} and {len(ids) - 3} more)"
    )
    if goes_on:
      _log.warning("Skipped %s.", found)
      return
    before = f" after {in_a_row - 1} skipped steps in a row (train.max_skipped)" if skips else ""
    own = "".join(f" --own_loss={name}" for name in replay.own_losses(self.config))
    raise step_lib.DivergedError(
      f"training diverged{before} at {found}. No checkpoint holds this step; reproduce it with: "
      f"soprc replay --workdir={self.workdir}{own}; try a lower optim.learning_rate"
      + ("" if skips else ", or train.on_nonfinite=skip")
    )

  def finish(self, command: Mapping[str, Any] | None) -> dict[str, Any]:
    """Tests the model of the best validation mAUPRC, plots, and writes ``results.json``.

    Args:
      command: see `train`.
    """
    state: TrainState
    if self.best.latest_step() is None:
      state, which = parallel.unreplicate(self.state), "last"
    else:
      state, which = self.best.restore(self.like)[0], "best validation mAUPRC"
    _log.info("Testing the model of step %d (%s).", int(state.step), which)
    splits = self.data.splits
    tested = {
      name for split in splits if split != "train" for name in sources.compared_names(splits[split])
    }
    trained, several = self.meta["started_from"], self.data.patterns is not None
    if several:  # splits share labels
      trained = classes.trained_on(self.meta, where=str(self.workdir))
    seen = classes.seen(
      trained, tested, data_source=self.config.data.source, several_labels=several
    )
    notes = {
      "baselines": self.meta["baselines"],
      "seen_classes": seen,
      "command": command,
      "chosen": self.chosen or None,
    }
    found = results.write(
      self.workdir, self.config, splits, self.embed, state, self.records.lines, notes=notes
    )
    if parallel.is_main() and (problem := trivial_baselines.not_beaten(self.config, found)):
      _log.warning("%s", problem)
    return found


def _trailing_skips(lines: list[dict[str, Any]]) -> int:
  """Returns the number of steps that were skipped in a row at the end."""
  return sum(1 for _ in itertools.takewhile(lambda line: line.get("skipped"), reversed(lines)))
