"""How two implementations are timed side by side, and what a benchmark says."""

from collections.abc import Callable, Mapping, Sequence
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

REPETITIONS = 7


class Row(NamedTuple):
  """One comparison: ours and a peer, interleaved in one run.

  Attributes:
    benchmark: name of the benchmark, e.g. ``"loss"``.
    case: what was computed, with its sizes.
    peer: what ours is compared with, with its version.
    ours: median seconds of ours.
    theirs: median seconds of the peer.
    target: ratio ``theirs / ours`` to reach.
    repetitions: timed repetitions of each.
    spread: half the distance between the quartiles of the ratios of the single repetitions.
    note: a remark for the table; empty for none.
    suffices: whether the case is good enough where this row alone meets its target, whatever its
      other rows say.
  """

  benchmark: str
  case: str
  peer: str
  ours: float
  theirs: float
  target: float
  repetitions: int
  spread: float = 0.0
  note: str = ""
  suffices: bool = False

  @property
  def ratio(self) -> float:
    """Time of the peer over ours: higher is better."""
    return self.theirs / self.ours

  @property
  def met(self) -> bool:
    """Whether the target is reached."""
    return self.ratio >= self.target


class Curve(NamedTuple):
  """Cost of ours by size, for the log-log plots.

  Attributes:
    benchmark: as in `Row`.
    name: what was computed.
    size: what the sizes count, e.g. ``"negatives"``.
    sizes: ascending.
    cost: what the costs are, with unit, e.g. ``"seconds"``.
    costs: one for each size.
  """

  benchmark: str
  name: str
  size: str
  sizes: Sequence[float]
  cost: str
  costs: Sequence[float]

  @property
  def exponent(self) -> float:
    """Slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(self.sizes), np.log(self.costs), 1)[0])


def time_together(
  functions: Mapping[str, Callable[[], Any]], *, repetitions: int = REPETITIONS, warmup: int = 1
) -> dict[str, list[float]]:
  """Seconds of each function in each repetition, the functions taking turns, so that a busy machine
  slows all alike.

  Args:
    functions: name -> function without arguments. What jax returns is waited for; a peer must wait
      for itself.
    repetitions: timed calls of each.
    warmup: calls of each before, not timed.

  Returns:
    name -> ``[repetitions]`` seconds.
  """
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for repetition in range(warmup + repetitions):
    for name, function in functions.items():
      began = time.perf_counter()
      jax.block_until_ready(function())
      if repetition >= warmup:
        seconds[name].append(time.perf_counter() - began)
  return seconds


def median_seconds(function: Callable[[], Any], *, repetitions: int = 3) -> float:
  """Median seconds of a function by itself, after one call that is not timed; for costs by size."""
  return statistics.median(time_together({"ours": function}, repetitions=repetitions)["ours"])


def compare(
  benchmark: str,
  case: str,
  *,
  ours: Callable[[], Any],
  peers: Mapping[str, Callable[[], Any]],
  target: float,
  repetitions: int = REPETITIONS,
  warmup: int = 1,
  note: str = "",
) -> list[Row]:
  """One row for each peer, all timed in turns with ours; arguments as in `Row` and
  `time_together`.
  """
  seconds = time_together({"ours": ours, **peers}, repetitions=repetitions, warmup=warmup)
  return [
    row(benchmark, case, peer, seconds["ours"], seconds[peer], target=target, note=note)
    for peer in peers
  ]


def row(
  benchmark: str,
  case: str,
  peer: str,
  ours: Sequence[float],
  theirs: Sequence[float],
  *,
  target: float,
  note: str = "",
  suffices: bool = False,
) -> Row:
  """The `Row` of seconds that were measured in turns."""
  quartiles = np.percentile(np.array(theirs) / np.array(ours), [25, 75])
  return Row(
    benchmark,
    case,
    peer,
    statistics.median(ours),
    statistics.median(theirs),
    target,
    len(ours),
    float(quartiles[1] - quartiles[0]) / 2,
    note,
    suffices,
  )
