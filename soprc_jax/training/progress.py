"""What a person sees while it computes: bars on a terminal, lines in a file."""

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from soprc_jax.training import parallel, workdir

_log = logging.getLogger(__name__)

_SLOW_DATA = 0.05


def on_terminal(config: Any) -> bool:
  """Whether this process has a terminal to draw bars on, and may (``config.log.progress``)."""
  return config.log.progress and sys.stderr.isatty() and parallel.is_main()


def bar(config: Any, *, leave: bool = False, **options: Any) -> Any:
  """A tqdm bar, silent where there is no terminal; ``options`` are tqdm's."""
  return tqdm(disable=not on_terminal(config), leave=leave, dynamic_ncols=True, **options)


class Progress:
  """Steps of a training: a bar on a terminal, plain lines elsewhere.

  Args:
    config: resolved.
    start: steps done before.
    num_steps: steps of the run.
  """

  def __init__(self, config: Any, start: int, num_steps: int):
    self._line_every, self._num_steps = config.log.line_every, num_steps
    self._batch_size = config.train.batch_size
    self._began, self._first = time.perf_counter(), start
    self._waits: list[dict[str, Any]] = []
    self._bar = bar(config, total=num_steps, initial=start, unit="step", leave=True) if on_terminal(config) else None

  def show(self, line: dict[str, Any]) -> None:
    """One step, by its line of ``metrics.jsonl``."""
    shown = {name: f"{line[name]:.4g}" for name in ("loss", "val_mAUPRC", "val_recall@1") if name in line}
    if self._bar is not None:
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update()
      return
    self._waits.append({"data_wait": line["data_wait"], "seconds": line["seconds"]})
    step = line["step"]
    if step % self._line_every == 0 or "val_mAUPRC" in line or step == self._num_steps:
      per_step = (time.perf_counter() - self._began) / (step - self._first)
      left = per_step * (self._num_steps - step)
      values = ", ".join(f"{name} {value}" for name, value in shown.items())
      # Worth a word only where more workers would make the run faster.
      share = workdir.data_wait_share(self._waits)
      if share >= _SLOW_DATA:
        values += f", {share:.0%} of the time waiting for data"
      self._waits.clear()
      _log.info(
        "step %d/%d: %s, %.0f images/s, %.0f s left", step, self._num_steps, values, self._batch_size / per_step, left
      )

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()
