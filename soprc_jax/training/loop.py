"""The run: resume, train, evaluate, keep checkpoints, test the best one, leave results."""

import logging
import math
from pathlib import Path
import time
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from soprc_jax import metrics as metrics_lib
from soprc_jax.data import pipeline
from soprc_jax.training import build, checkpoints, evaluation, parallel, plots
from soprc_jax.training import config as config_lib
from soprc_jax.training import progress as progress_lib
from soprc_jax.training import workdir as workdir_lib
from soprc_jax.training.state import TrainState

_log = logging.getLogger(__name__)

# Wall-clock fields of a line of metrics.jsonl; all others repeat exactly.
CLOCK_FIELDS = ("seconds", "data_wait")


def train(config: Any, workdir: Path) -> dict[str, Any]:
  """Trains by a resolved config, or goes on with the run in ``workdir``; returns what ``results.json`` holds.

  At a kill at any moment, the same call goes on from the newest checkpoint and ends with the same bits.

  Raises:
    ValueError: the config does not fit the data, the devices, or the run in ``workdir``.
    DivergedError: the loss or its gradient is not finite.
  """
  parallel.check_equal("the config", config_lib.to_json(config))
  parallel.check_equal("--workdir", str(workdir))
  run = _Run(config, workdir)
  try:
    run.train()
    return run.finish()
  finally:
    run.close()


class DivergedError(ArithmeticError):
  """The loss or its gradient is not finite: the run cannot go on."""


class _Run:
  """The open files and compiled functions of one run."""

  def __init__(self, config: Any, workdir: Path):
    self.config, self.workdir = config, workdir
    is_new = workdir_lib.check(workdir, config)
    self.data = build.make_data(config)
    self.parts = build.make_parts(config, self.data)
    self.num_steps = config.warmup.steps + config.train.steps
    start = build.starting_state(config, self.parts) if is_new else None
    parallel.wait_for_all("every process has checked the workdir")
    # Only now: a mistake above leaves no folder behind that would refuse the corrected command.
    if parallel.is_main():
      workdir_lib.claim(workdir, config)
    parallel.wait_for_all("the workdir is there")
    workdir_lib.read_config(workdir)  # a folder of the same name on another disk would be found out at the end
    self.newest = checkpoints.Store(workdir / checkpoints.NEWEST, keep=config.checkpoint.keep)
    self.best = checkpoints.Store(workdir / checkpoints.BEST)
    self.embed = evaluation.make_embed(self.parts.model, config)
    self.like = build.abstract_state(config, self.parts)
    self.meta = {"labels": [[label, row] for label, row in self.data.rows.items()]}
    if self.newest.latest_step() is None:
      state = build.starting_state(config, self.parts) if start is None else start
    else:
      state, meta = self.newest.restore(self.like)
      if meta["labels"] != self.meta["labels"]:
        raise ValueError(f"the classes of the data are not those that the run in {workdir} was trained on")
    self.start = int(state.step)
    self.broken = set[int]()
    self.state = parallel.replicate(parallel.from_main(state))
    self.log = workdir_lib.MetricsLog(workdir, last_step=self.start, writes=parallel.is_main())
    self.board = SummaryWriter(str(workdir / "tensorboard"), purge_step=self.start + 1, write_to_disk=parallel.is_main())
    self.best_value = max((line["val_mAUPRC"] for line in self.log.lines if "val_mAUPRC" in line), default=-1.0)
    self._describe()

  def train(self) -> None:
    """All steps that are left."""
    batches = build.make_batches(self.config, self.data)
    stream = pipeline.iterate(
      batches, start=self.start, workers=self.config.data.workers, prefetch=self.config.data.prefetch
    )
    progress = progress_lib.Progress(self.config, self.start, self.num_steps)
    pending: dict[str, Any] | None = None
    began = time.perf_counter()
    for step in range(self.start + 1, self.num_steps + 1):
      waiting = time.perf_counter()
      batch = next(stream)
      self._note_broken(batch.pop("position"), batch["broken"])
      if self.config.data.on_broken != "skip":
        batch.pop("broken")
      wait = time.perf_counter() - waiting
      step_fn = self.parts.warmup_step if step <= self.config.warmup.steps else self.parts.main_step
      self.state, scalars = step_fn(self.state, parallel.shard(batch))
      # The scalars of a step are fetched after the next step is under way, so the device never waits for the host.
      if pending is not None:
        self._write(pending, progress)
      pending = {"step": step, "scalars": scalars, "data_wait": wait}
      evaluates = "val" in self.data.splits and _due(step, self.config.eval.every, self.num_steps)
      saves = _due(step, self.config.checkpoint.every, self.num_steps)
      if evaluates or saves:
        jax.block_until_ready(self.state)
      pending["seconds"] = time.perf_counter() - began
      if evaluates or saves:
        self._evaluate_and_save(pending, progress, evaluates, saves)
        pending = None
      began = time.perf_counter()
    progress.close()

  def _note_broken(self, positions: np.ndarray, broken: np.ndarray) -> None:
    """Names each broken image once (``data.on_broken=skip``)."""
    for position in set(positions[broken].tolist()) - self.broken:
      self.broken.add(position)
      name = self.data.splits["train"][position].id
      _log.warning("Broken image %s: another one of its class takes its place (data.on_broken=skip).", name)

  def _evaluate_and_save(
    self, pending: dict[str, Any], progress: progress_lib.Progress, evaluates: bool, saves: bool
  ) -> None:
    self._fetch(pending)  # before anything is evaluated or saved that no run should go on from
    state = parallel.unreplicate(self.state)
    improved = False
    if evaluates:
      pending["val"] = self._evaluate_on_val()
      improved = pending["val"]["mAUPRC"] > self.best_value
    self._write(pending, progress)
    # This order makes a kill between any two lines harmless: what a checkpoint stands for is on disk before it is.
    self.log.sync()
    if improved:
      self.best_value = pending["val"]["mAUPRC"]
      self.best.save(state, self.meta)
    if saves:
      self.newest.save(state, self.meta)

  def _evaluate_on_val(self) -> dict[str, Any]:
    variables = {"params": self.state.params, "batch_stats": self.state.batch_stats}
    return evaluation.evaluate(self._embedded(variables, "val"), self.config)

  def _embedded(self, variables: Any, split: str) -> evaluation.Embedded:
    """The images of a split as vectors.

    Raises:
      DivergedError: they are not finite.
    """
    embedded = self.embed(variables, self.data.splits[split])
    if not np.isfinite(embedded.embeddings).all():
      raise DivergedError(f"training broke down: the embeddings of {split} are not finite; try a lower optim.learning_rate")
    return embedded

  def _write(self, pending: dict[str, Any], progress: progress_lib.Progress) -> None:
    step, scalars = pending["step"], self._fetch(pending)
    # Rate of the update that made this step: the schedule is called with the number of steps before it.
    line = {"step": step, **scalars, "learning_rate": float(self.parts.schedule(step - 1))}
    line |= {f"val_{name}": value for name, value in pending.get("val", {}).items() if not isinstance(value, list)}
    line |= {name: round(pending[name], 4) for name in CLOCK_FIELDS}
    self.log.write(line)
    for name, value in line.items():
      if name != "step":
        self.board.add_scalar(name.replace("val_", "val/").replace("@", "_at_"), value, step)
    progress.show(line)

  def _fetch(self, pending: dict[str, Any]) -> dict[str, float]:
    """The scalars of a step as numbers, the first device's.

    Raises:
      DivergedError: the loss or its gradient is not finite.
    """
    scalars = {name: float(value) for name, value in parallel.unreplicate(pending["scalars"]).items()}
    if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["grad_norm"])):
      step = pending["step"]
      raise DivergedError(
        f"training broke down at step {step} of {self.num_steps}: loss {scalars['loss']:g}, gradient norm "
        f"{scalars['grad_norm']:g} at learning rate {float(self.parts.schedule(step - 1)):g}; try a lower optim.learning_rate"
      )
    return scalars

  def finish(self) -> dict[str, Any]:
    """Test metrics of the best checkpoint on val, pictures, ``results.json``."""
    state: TrainState
    if self.best.latest_step() is None:
      state, which = parallel.unreplicate(self.state), "last"
    else:
      state, which = self.best.restore(self.like)[0], "best on val"
    replicated = parallel.replicate(state)
    _log.info("Testing the network of step %d (%s).", int(state.step), which)
    variables = {"params": replicated.params, "batch_stats": replicated.batch_stats}
    values: dict[str, Any] = {}
    for name in (name for name in self.data.splits if name.startswith("test")):
      embedded = self._embedded(variables, name)
      values[name] = evaluation.evaluate(embedded, self.config)
      if self.config.eval.one_per_class:
        values[f"{name}_one_per_class"] = evaluation.one_per_class(embedded, self.config)
      if name == "test" and parallel.is_main():
        self._draw(embedded)
    results = {
      "config": self.config.to_dict(),
      "steps": self.num_steps,
      "tested_step": int(state.step),
      "images_per_second": self._images_per_second(),
      "data_wait_share": workdir_lib.data_wait_share(self.log.lines),
      "device": parallel.describe(),
      "val": _val_at(self.log.lines, int(state.step)),
      **values,
    }
    if parallel.is_main():
      workdir_lib.write_results(self.workdir, results)
    parallel.wait_for_all("the results are written")
    return results

  def _draw(self, embedded: evaluation.Embedded) -> None:
    """The pictures of the run, and the data of its mean precision-recall curve on test."""
    precision, recall, thresholds = metrics_lib.mean_pr_curve(
      embedded.embeddings, embedded.labels, block_size=self.config.eval.block_size
    )
    np.savez(self.workdir / workdir_lib.PR_CURVE, precision=precision, recall=recall, thresholds=thresholds)
    plots.plot_pr_curve(self.workdir / "pr_curve.png", precision, recall, title="Mean precision-recall curve, test")
    plots.plot_convergence(self.workdir / "convergence.png", self.log.lines, warmup_steps=self.config.warmup.steps)

  def _images_per_second(self) -> float:
    """Median over all steps of the run, whichever process made them."""
    seconds = [line["seconds"] for line in self.log.lines]
    median = float(np.median(seconds)) if seconds else 0.0
    return round(self.config.train.batch_size / median, 1) if median else 0.0

  def _describe(self) -> None:
    sizes = {name: f"{len(np.unique(s.labels))} classes, {len(s)} images" for name, s in self.data.splits.items()}
    _log.info("Data %s: %s.", self.config.data.source, "; ".join(f"{n}: {size}" for n, size in sizes.items()))
    if self.data.sampler.num_small:
      _log.info(
        "%d training classes have fewer than %d images: policy data.small_classes=%s.",
        self.data.sampler.num_small,
        self.config.train.per_class,
        self.config.data.small_classes,
      )
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.like.params))
    _log.info(
      "Network %s: %.2f million parameters, %s; on %s.",
      self.config.model.name,
      count / 1e6,
      self.config.model.dtype,
      parallel.describe(),
    )
    if 0 < self.config.train.microbatch < self.config.train.batch_size:
      _log.info("Microbatches of %d images: each image is embedded twice a step.", self.config.train.microbatch)
    if self.config.model.freeze_bn and not self.config.model.init_from:
      _log.warning(
        "Batch norm is frozen at its initial statistics, with random weights: set model.init_from, or model.freeze_bn=False."
      )
    if self.start:
      _log.info("Going on from step %d of %d in %s.", self.start, self.num_steps, self.workdir)
    else:
      _log.info("Starting: %d steps into %s. The first step compiles.", self.num_steps, self.workdir)

  def close(self) -> None:
    self.log.close()
    self.board.close()
    self.newest.close()
    self.best.close()


def _due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


def _val_at(lines: list[dict[str, Any]], step: int) -> dict[str, Any]:
  for line in lines:
    if line["step"] == step:
      return {name.removeprefix("val_"): value for name, value in line.items() if name.startswith("val_")}
  return {}
