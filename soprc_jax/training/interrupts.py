"""SIGTERM and Ctrl-C during training: finish the step, write a checkpoint, then end the process.

An evaluation in progress is postponed until the run is resumed.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from soprc_jax.training import parallel

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class InterruptedRunError(Exception):
  """Raised when a signal stopped the run, after a checkpoint was written.

  Attributes:
    exit_status: exit status of the process, 128 plus the number of the signal, as in shells.
  """

  def __init__(self, number: int, message: str):
    super().__init__(message)
    self.exit_status = 128 + number


class CutShort(BaseException):
  """Raised by a signal within `Requests.may_cut`. No ``except Exception`` catches it."""


class Requests:
  """Context that records SIGTERM and SIGINT instead of ending the process. A second one ends it.

  With several processes, jax records a SIGTERM to any of them, and all agree on the step after
  which they stop.

  Attributes:
    number: number of the signal, None if there was none.
  """

  def __init__(self) -> None:
    self.number: int | None = None
    self._cuts = False
    self._before: dict[int, Any] = {}

  def __enter__(self) -> "Requests":
    # Only the main thread may set handlers. A process that ignores a signal continues to ignore it.
    if parallel.num_processes() == 1 and threading.current_thread() is threading.main_thread():
      for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
          self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def due(self, step: int) -> bool:
    """Returns whether the run must stop after this step. Call it after every step."""
    if parallel.num_processes() > 1 and parallel.preempted(step):
      self.number = signal.SIGTERM
    return self.number is not None

  @contextlib.contextmanager
  def may_cut(self) -> Iterator[None]:
    """Returns a context of repeatable work, in which a signal raises `CutShort`.

    A signal that was recorded before raises it immediately. A preempted machine has about half a
    minute left, and an evaluation may take longer. With several processes nothing is interrupted,
    since they would not agree where.
    """
    if self.number is not None and self._before:
      raise CutShort
    self._cuts = True
    try:
      yield
    finally:
      self._cuts = False

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self.number is not None:
      self.__exit__()
      os.kill(os.getpid(), number)
      return
    self.number = number
    name = signal.Signals(number).name
    # Not by logging, which this handler may have interrupted.
    where = "the evaluation is postponed" if self._cuts else "stopping after this step"
    with contextlib.suppress(OSError):  # stderr is closed
      os.write(
        sys.__stderr__.fileno() if sys.__stderr__ else 2,
        f"\n{name}: {where}; a second signal stops at once.\n".encode(),
      )
    if self._cuts:
      raise CutShort
