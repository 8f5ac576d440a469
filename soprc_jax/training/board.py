"""TensorBoard's event files, written at once and by this thread: a disk that is full is an error here, not a thread that died in silence."""

from collections.abc import Mapping
from pathlib import Path
import time

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2


class Board:
  """Scalars of a run by step.

  Args:
    folder: of the event files; made if it is missing.
    last_step: step from which the run goes on: TensorBoard drops what earlier processes wrote of later ones.
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
    parts = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
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
