"""What the measurements of the stability study say: slopes, Theorems 1 and 2, and the algorithms
beside each other, with standard errors.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import NamedTuple

import numpy as np

from experiments.stability import stability, stability_sweeps, stability_training

Results = Mapping[str, stability.Measured]
MEASURES = ("epsilon_positive", "epsilon_negative", "gap")

# Theorem 2: eps+ <= K (T n+)^a / N+ and eps- <= K (T n-)^a / N- with a = lambda / (lambda + 1) for
# some lambda > 0, which is not known. What holds for every lambda are these bounds of the slopes.
# Where T is fixed, N+ stands in the denominator only: -1, whatever lambda is. Where T = N+ grows
# with it, a - 1 < 0. What does not stand in a formula cannot raise it: 0. K and lambda depend on n+
# through beta = 1 / n+ (the proof has K of the order 1 / beta^2), which the theorem counts as a
# constant, and so do we.
THEOREM_BOUNDS = {
  "epsilon_positive": {
    "T": 1.0,
    "n+": 1.0,
    "n-": 0.0,
    "N+": -1.0,
    "N+ (T = 16)": -1.0,
    "N-": 0.0,
    "N- (T = 16)": 0.0,
    "T = N+": 0.0,
  },
  "epsilon_negative": {
    "T": 1.0,
    "n+": 0.0,
    "n-": 1.0,
    "N+": 0.0,
    "N+ (T = 16)": 0.0,
    "N-": -1.0,
    "N- (T = 16)": -1.0,
    "T = N+": 1.0,
  },
}


class Estimate(NamedTuple):
  """A number and its standard error."""

  value: float
  error: float

  def __str__(self) -> str:
    return f"{self.value:+.2f} ± {self.error:.2f}"


def samples(measured: stability.Measured, measure: str, at: int) -> np.ndarray:
  """``[B]`` means of one measure at the T number ``at`` over blocks of `stability_training.BLOCK`
  repetitions, the units that are independent.
  """
  values = getattr(measured, measure)
  values = values[at] if values.ndim == 2 else values
  # The gap is one number a block already.
  return values if measure == "gap" else values.reshape(-1, stability_training.BLOCK).mean(axis=1)


def jackknife(statistic: Callable[[np.ndarray], float], blocks: np.ndarray) -> Estimate | None:
  """A statistic of means over independent blocks, and its standard error by leaving out one block
  at a time.

  Blocks that have the same number in all settings also have the same examples there, so what they
  share cancels from the error of a slope or of a ratio.

  Args:
    statistic: from means ``[...]``; NaN where it has no value.
    blocks: ``[..., B]``, B >= 2.

  Returns:
    None if the statistic has no value for the means, or for those without some block.
  """
  count = blocks.shape[-1]
  total = blocks.sum(axis=-1)
  value = statistic(total / count)
  without = np.array([statistic((total - blocks[..., b]) / (count - 1)) for b in range(count)])
  if not np.isfinite([value, *without]).all():
    return None
  return Estimate(float(value), float(np.sqrt((count - 1) * np.var(without))))


def power(values: Sequence[float], means: np.ndarray) -> float:
  """Least-squares slope of ``log(means)`` against ``log(values)``; NaN if a mean is not positive.

  >>> print(f"{power((1, 2, 4), 3 * np.array([1, 2, 4]) ** -0.5):.3f}")
  -0.500
  """
  if np.min(means) <= 0:
    return np.nan
  x = np.log(values) - np.mean(np.log(values))
  return float(x @ np.log(means) / (x @ x))


class Slopes(NamedTuple):
  """Slopes of one measure in one sweep, None where a mean is not positive.

  Attributes:
    all: over all points.
    last: between the last two points: an O() is about large values.
  """

  all: Estimate | None
  last: Estimate | None


def slopes(sweep: stability_sweeps.Sweep, results: Results, measure: str) -> Slopes:
  """Slopes of ``measure``, one of `MEASURES`, in the quantity of the sweep."""
  values = [point.value for point in sweep.points]
  blocks = np.stack(
    [
      samples(results[stability_sweeps.name(setting)], measure, at)
      for _, setting, at in sweep.points
    ]
  )
  return Slopes(
    jackknife(lambda means: power(values, means), blocks),
    jackknife(lambda means: power(values[-2:], means), blocks[-2:]),
  )


def agrees(slope: Estimate | None, bound: float) -> bool | None:
  """Whether a slope agrees with an upper bound: it is at most two standard errors above it. None if
  there is no slope.

  >>> agrees(Estimate(-0.9, 0.06), -1.0), agrees(Estimate(-0.9, 0.04), -1.0)
  (True, False)
  """
  return None if slope is None else bool(slope.value <= bound + 2 * slope.error)


class Exponent(NamedTuple):
  """lambda / (lambda + 1) of Theorem 2, from below.

  Attributes:
    smoothness: L, estimated from below: the mean over the repetitions of the largest ratio of
      changes.
    constant: lambda.
    value: lambda / (lambda + 1).
  """

  smoothness: float
  constant: float
  value: float


def exponent(setting: stability.Setting, measured: stability.Measured) -> Exponent:
  """The exponent of Theorem 2 at the constants of a measured setting."""
  smoothness = float(measured.smoothness.mean())
  constant = smoothness * setting.rate * (1 + np.sqrt(1 - setting.beta**2 + setting.beta))
  return Exponent(smoothness, constant, constant / (constant + 1))


class Theorem1(NamedTuple):
  """The gap beside G (n+ eps+ + n- eps-) at every T of every setting.

  Attributes:
    points: how many.
    broken: `stability_sweeps.name` and T of those whose gap is more than two standard errors above
      the bound.
    largest: largest gap over bound.
    median: of gap over bound.
  """

  points: int
  broken: tuple[str, ...]
  largest: float
  median: float


def theorem1(settings: Sequence[stability.Setting], results: Results) -> Theorem1:
  """Theorem 1 with the largest gradient norm that was seen in the setting for G: at most G, so the
  test is stricter than the theorem.
  """
  ratios, broken = [], []
  for setting in settings:
    measured = results[stability_sweeps.name(setting)]
    for at, steps in enumerate(setting.steps):
      gap, bound = bound_and_gap(setting, measured, at)
      ratios.append(gap.value / bound)
      if gap.value - 2 * gap.error > bound:
        broken.append(f"{stability_sweeps.name(setting)}, at T = {steps}")
  return Theorem1(len(ratios), tuple(broken), float(np.max(ratios)), float(np.median(ratios)))


def bound_and_gap(
  setting: stability.Setting, measured: stability.Measured, at: int
) -> tuple[Estimate, float]:
  """The gap, and G (n+ eps+ + n- eps-), of one setting at the T number ``at``."""
  gap = samples(measured, "gap", at)
  moved = setting.batch_positives * measured.epsilon_positive[at].mean()
  moved += setting.batch_negatives * measured.epsilon_negative[at].mean()
  return (
    Estimate(float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))),
    float(measured.gradient.max() * moved),
  )


class Compared(NamedTuple):
  """An algorithm at the end of its training.

  Attributes:
    fall: of the training risk since the start.
    values: each of `MEASURES`, None where it has no value.
    ratios: each over that of the reference.
  """

  fall: float
  values: dict[str, Estimate | None]
  ratios: dict[str, Estimate | None]


def at_same_rate(
  points: Mapping[str, stability_sweeps.Point], results: Results, *, reference: str = "SOPRC"
) -> dict[str, Compared]:
  """Algorithms after the same number of steps at the same rate, from the point of each, beside the
  one that is the reference.
  """
  blocks = {algorithm: _columns([point], results) for algorithm, point in points.items()}
  return {
    algorithm: _compared(blocks[algorithm], blocks[reference], lambda means, k: float(means[0, k]))
    for algorithm in points
  }


def at_equal_fall(
  sweeps: Mapping[str, stability_sweeps.Sweep],
  results: Results,
  fall: float,
  *,
  reference: str = "SOPRC",
) -> dict[str, Compared]:
  """Algorithms after the same number of steps, each at the rate at which its training risk has
  fallen by ``fall``.

  A loss with a smaller gradient moves less, in S and in S^(i) alike, and has a smaller epsilon for
  having learned less. Here each has learned equally much: logarithms are interpolated linearly
  between the rates of a sweep of each algorithm. No value where no rate of it, or of the reference,
  falls so far.
  """
  blocks = {algorithm: _columns(sweep.points, results) for algorithm, sweep in sweeps.items()}
  return {
    algorithm: _compared(
      blocks[algorithm], blocks[reference], lambda means, k: _interpolated(means, k, fall)
    )._replace(fall=fall)
    for algorithm in sweeps
  }


def _columns(points: Sequence[stability_sweeps.Point], results: Results) -> np.ndarray:
  """``[len(points), 4, B]``: the fall of the training risk, and the `MEASURES`."""
  rows = []
  for point in points:
    measured = results[stability_sweeps.name(point.setting)]
    fall = samples(measured, "start_risk", 0) - samples(measured, "train_risk", point.at)
    rows.append([fall, *(samples(measured, measure, point.at) for measure in MEASURES)])
  return np.array(rows)


def _interpolated(means: np.ndarray, k: int, fall: float) -> float:
  """Column k where the fall, which ascends with the rate at first, has the given value; NaN
  outside, or beside a mean that is not positive.
  """
  falls = means[:, 0]
  above = int(np.argmax(falls >= fall))
  if (
    above == 0
    or np.any(np.diff(falls[: above + 1]) <= 0)
    or np.min(means[above - 1 : above + 1, k]) <= 0
  ):
    return np.nan
  share = (fall - falls[above - 1]) / (falls[above] - falls[above - 1])
  return float(np.exp((1 - share) * np.log(means[above - 1, k]) + share * np.log(means[above, k])))


def _compared(own: np.ndarray, reference: np.ndarray, value: Callable[..., float]) -> Compared:
  both = np.stack([own, reference])

  def ratio(means: np.ndarray, k: int) -> float:
    return value(means[0], k) / value(means[1], k)

  columns = {measure: k for k, measure in enumerate(MEASURES, start=1)}
  return Compared(
    float(own[0, 0].mean()),
    {measure: jackknife(functools.partial(value, k=k), own) for measure, k in columns.items()},
    {measure: jackknife(functools.partial(ratio, k=k), both) for measure, k in columns.items()},
  )
