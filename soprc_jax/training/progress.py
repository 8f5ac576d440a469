"""Progress of long computations: bars on a terminal, log lines elsewhere."""

import collections
import logging
import statistics
import sys
import time
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from soprc_jax.data import datasets
from soprc_jax.training import parallel, workdir

_log = logging.getLogger(__name__)

# Number of steps after which the remaining time is logged. The first one compiles, the others are
# measured.
_MEASURED = 6


def on_terminal(config: ConfigDict) -> bool:
  """Returns whether this process draws bars: on a terminal, if ``config.log.progress`` is set."""
  return config.log.progress and sys.stderr.isatty() and parallel.is_main()


def bar(config: ConfigDict, *, leave: bool = False, **options: Any) -> Any:
  """Returns a tqdm bar, disabled without a terminal; ``options`` are passed to tqdm."""
  return tqdm(disable=not on_terminal(config), leave=leave, dynamic_ncols=True, **options)


class Progress:
  """Shows the steps of a training run: a bar on a terminal, log lines elsewhere.

  After the first steps it announces when the last step will be done.

  Args:
    config: resolved.
    start: number of steps done before.
    num_steps: number of steps of the run.
  """

  def __init__(self, config: ConfigDict, start: int, num_steps: int):
    self._line_every, self._num_steps = config.log.line_every, num_steps
    self._batch_size = config.train.batch_size
    self._unit = f"{datasets.unit(config.data)}/s"
    self._start = start
    prior = config.loss.prior
    self._anneals = config.loss.name == "soprc" and prior.start > 0
    self._explanation = (
      f"The prior falls from {prior.start:g}: the loss may rise while the "
      "ranking improves. Watch val_mAUPRC."
    )
    self._after_first = 0.0
    self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=self._line_every)
    self._bar = (
      bar(config, total=num_steps, initial=start, unit="step", leave=True)
      if on_terminal(config)
      else None
    )

  def show(self, line: dict[str, Any]) -> None:
    """Shows a step, given its line of ``metrics.jsonl``."""
    step, now = line["step"], time.perf_counter()
    done = step - self._start
    if done == 1:
      self._after_first = now  # the step has compiled
    self._recent.append({"data_wait": line["data_wait"], "seconds": line["seconds"]})
    # Includes the evaluations so far, as the remaining time will include later ones.
    left = (now - self._after_first) / (done - 1) * (self._num_steps - step) if done > 1 else None
    if done == _MEASURED and left is not None and step < self._num_steps:
      self._announce(left)
    names = ("loss", *(["prior"] if self._anneals else []), "val_mAUPRC", "val_recall@1")
    shown = {name: f"{line[name]:.4g}" for name in names if name in line}
    if "prior" in shown and self._explanation:
      self._write(self._explanation)
      self._explanation = ""
    if self._bar is not None:
      waited = f"{workdir.data_wait_share(self._recent):.0%}"
      self._bar.set_postfix(
        shown | {self._unit: f"{self._rate():.0f}", "data wait": waited}, refresh=False
      )
      self._bar.update()
      return
    if step % self._line_every == 0 or "val_mAUPRC" in line or step == self._num_steps:
      values = [f"{name} {value}" for name, value in shown.items()]
      values += [
        f"{self._rate():.0f} {self._unit}",
        f"data wait {workdir.data_wait_share(self._recent):.0%}",
      ]
      values += [f"{duration(left)} left"] if left is not None and step < self._num_steps else []
      self._recent.clear()
      _log.info("step %d/%d: %s", step, self._num_steps, ", ".join(values))

  def _announce(self, left: float) -> None:
    """Logs when the last step will be done, estimated from the first steps."""
    at = time.strftime("%H:%M", time.localtime(time.time() + left))
    self._write(
      f"{self._rate():.0f} {self._unit}: the last step in about {duration(left)}, at {at}; "
      "evaluations take additional time."
    )

  def _write(self, message: str) -> None:
    if self._bar is not None:
      self._bar.write(message, file=sys.stderr)
    else:
      _log.info("%s", message)

  def _rate(self) -> float:
    """Returns images or vectors per second of the median step since the last line.

    The median excludes a step that compiled.
    """
    seconds = statistics.median(line["seconds"] for line in self._recent)
    return self._batch_size / seconds if seconds else 0.0

  def close(self) -> None:
    """Closes the bar and leaves it on the terminal."""
    if self._bar is not None:
      self._bar.close()


def duration(seconds: float) -> str:
  """Formats a duration in seconds for logs.

  >>> [duration(seconds) for seconds in (0.4, 59.6, 3000, 7260, 180000)]
  ['0 s', '60 s', '50 min', '2 h 1 min', '2 d 2 h']
  """
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes = round(seconds / 60)
  if minutes < 90:
    return f"{minutes} min"
  if minutes < 48 * 60:
    return f"{minutes // 60} h {minutes % 60} min"
  return f"{minutes // 1440} d {minutes % 1440 // 60} h"
