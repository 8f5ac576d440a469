"""SIGTERM (a pre-emption) and Ctrl-C amid the steps: the step is finished and a checkpoint written
before the process ends; an evaluation is left for later.
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
  """The run was asked to stop and has left a checkpoint.

  Attributes:
    exit_status: of the process, 128 plus the number of the signal, as shells tell it.
  """

  def __init__(self, number: int, message: str):
    super().__init__(message)
    self.exit_status = 128 + number


class CutShort(BaseException):
  """A signal has come within `Requests.may_cut`. No ``except Exception`` on its way keeps it."""


class Requests:
  """Context in which SIGTERM and SIGINT are noted instead of obeyed; a second one is obeyed.

  With several processes jax notes a SIGTERM to any of them, and all agree on the step after which
  they stop.

  Attributes:
    number: of the signal, None if there was none.
  """

  def __init__(self) -> None:
    self.number: int | None = None
    self._cuts = False
    self._before: dict[int, Any] = {}

  def __enter__(self) -> "Requests":
    # Only the main thread may set handlers; a process that was told to ignore a signal goes on
    # ignoring it.
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
    """Whether the run is to stop after this step; to be asked after each of them."""
    if parallel.num_processes() > 1 and parallel.preempted(step):
      self.number = signal.SIGTERM
    return self.number is not None

  @contextlib.contextmanager
  def may_cut(self) -> Iterator[None]:
    """Context of work that can be done again: a signal, noted before or coming within, ends it by a
    `CutShort`.

    A pre-emption leaves half a minute, and an evaluation may take longer. Of several processes none
    is cut: they would not agree where.
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
    # Not by logging, which the handler may have broken into.
    where = "the evaluation is left for later" if self._cuts else "stopping after this step"
    with contextlib.suppress(OSError):  # nobody reads it any more
      os.write(
        sys.__stderr__.fileno() if sys.__stderr__ else 2,
        f"\n{name}: {where}; once more stops at once.\n".encode(),
      )
    if self._cuts:
      raise CutShort
