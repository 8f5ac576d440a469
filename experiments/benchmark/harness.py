"""Times two implementations in turns, and defines the results of a benchmark."""

from collections.abc import Callable, Mapping, Sequence
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

REPETITIONS = 7


class Row(NamedTuple):
  """One comparison of ours with a peer, timed in turns in one run.

  Attributes:
    benchmark: name of the benchmark, e.g. ``"loss"``.
    case: what was computed, with its sizes.
    peer: what ours is compared with, with its version.
    ours: median time of ours, in seconds.
    theirs: median time of the peer, in seconds.
    target: ratio ``theirs / ours`` to reach.
    repetitions: number of timed repetitions of each.
    spread: half the interquartile range of the ratios of the single repetitions.
    note: a remark for the table; empty for none.
    suffices: whether this row alone decides that the case is fast enough. If it meets its target,
      the other rows do not matter.
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
    """Returns the time of the peer over ours: higher is better."""
    return self.theirs / self.ours

  @property
  def met(self) -> bool:
    """Returns whether the target is reached."""
    return self.ratio >= self.target


class Curve(NamedTuple):
  """The cost of ours by size, for the log-log plots.

  Attributes:
    benchmark: as in `Row`.
    name: what was computed.
    size: what the sizes count, e.g. ``"negatives"``.
    sizes: ascending.
    cost: what the costs are, with their unit, e.g. ``"seconds"``.
    costs: one cost per size.
  """

  benchmark: str
  name: str
  size: str
  sizes: Sequence[float]
  cost: str
  costs: Sequence[float]

  @property
  def exponent(self) -> float:
    """Returns the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(self.sizes), np.log(self.costs), 1)[0])


def time_together(
  functions: Mapping[str, Callable[[], Any]], *, repetitions: int = REPETITIONS, warmup: int = 1
) -> dict[str, list[float]]:
  """Times functions that take turns, so that a busy machine slows all of them alike.

  Args:
    functions: name -> function without arguments. Results of jax are waited for. A peer must wait
      for its own results.
    repetitions: number of timed calls of each.
    warmup: number of calls of each before, not timed.

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
  """Returns the median seconds of one function alone, after one untimed call.

  It is for costs by size.
  """
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
  """Returns one row for each peer, all timed in turns with ours.

  The arguments are those of `Row` and `time_together`.
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
  """Returns the `Row` of seconds that were measured in turns."""
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
