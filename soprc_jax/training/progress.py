"""What a person sees while it computes: bars on a terminal, lines in a file."""

import collections
import logging
import statistics
import sys
import time
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from soprc_jax.training import parallel, workdir

_log = logging.getLogger(__name__)

# Steps after which the time that is left is told: the first one has compiled, the others are
# measured.
_MEASURED = 6


def on_terminal(config: ConfigDict) -> bool:
  """Whether this process has a terminal to draw bars on, and may (``config.log.progress``)."""
  return config.log.progress and sys.stderr.isatty() and parallel.is_main()


def bar(config: ConfigDict, *, leave: bool = False, **options: Any) -> Any:
  """A tqdm bar, silent where there is no terminal; ``options`` are tqdm's."""
  return tqdm(disable=not on_terminal(config), leave=leave, dynamic_ncols=True, **options)


class Progress:
  """Steps of a training: a bar on a terminal, plain lines elsewhere; after the first steps, when
  the result will be there.

  Args:
    config: resolved.
    start: steps done before.
    num_steps: steps of the run.
  """

  def __init__(self, config: ConfigDict, start: int, num_steps: int):
    self._line_every, self._num_steps = config.log.line_every, num_steps
    self._batch_size = config.train.batch_size
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
    """One step, by its line of ``metrics.jsonl``."""
    step, now = line["step"], time.perf_counter()
    done = step - self._start
    if done == 1:
      self._after_first = now  # it has compiled
    self._recent.append({"data_wait": line["data_wait"], "seconds": line["seconds"]})
    # Evaluations that were due are in it, as they will be in what is left.
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
        shown | {"images/s": f"{self._rate():.0f}", "data wait": waited}, refresh=False
      )
      self._bar.update()
      return
    if step % self._line_every == 0 or "val_mAUPRC" in line or step == self._num_steps:
      values = [f"{name} {value}" for name, value in shown.items()]
      values += [
        f"{self._rate():.0f} images/s",
        f"data wait {workdir.data_wait_share(self._recent):.0%}",
      ]
      values += [f"{duration(left)} left"] if left is not None and step < self._num_steps else []
      self._recent.clear()
      _log.info("step %d/%d: %s", step, self._num_steps, ", ".join(values))

  def _announce(self, left: float) -> None:
    """When the result will be there, as far as the first steps can tell."""
    at = time.strftime("%H:%M", time.localtime(time.time() + left))
    self._write(
      f"{self._rate():.0f} images/s: the last step in about {duration(left)}, at {at}; evaluations "
      "come on top."
    )

  def _write(self, message: str) -> None:
    if self._bar is not None:
      self._bar.write(message, file=sys.stderr)
    else:
      _log.info("%s", message)

  def _rate(self) -> float:
    """Images a second of the median step since the last line, so that a step that has compiled does
    not count.
    """
    seconds = statistics.median(line["seconds"] for line in self._recent)
    return self._batch_size / seconds if seconds else 0.0

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()


def duration(seconds: float) -> str:
  """A time for people.

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
