"""Analyzes the measurements of the stability study, with standard errors.

It computes slopes, tests Theorems 1 and 2, and compares the algorithms.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import NamedTuple

import numpy as np

from experiments.stability import stability, stability_sweeps, stability_training

Results = Mapping[str, stability.Measured]
MEASURES = ("epsilon_positive", "epsilon_negative", "gap")
# Nothing is interpolated between learning rates whose measures differ by more than this factor.
LARGEST_STEP = 2.0

# Theorem 2: eps+ <= K (T n+)^a / N+ and eps- <= K (T n-)^a / N- with a = lambda / (lambda + 1) for
# some unknown lambda > 0. These bounds of the slopes hold for every lambda. If T is fixed, N+ is in
# the denominator only: -1 for any lambda. If T = N+ grows with it, a - 1 < 0. A quantity that is
# not in a formula cannot raise it: 0. K and lambda depend on n+ through beta = 1 / n+ (in the proof
# K is of the order 1 / beta^2). The theorem treats that as a constant, and so do we.
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
  """Returns ``[B]`` block means of one measure at the T number ``at``.

  The blocks have `stability_training.BLOCK` repetitions and are independent.
  """
  values = getattr(measured, measure)
  values = values[at] if values.ndim == 2 else values
  # The gaps already are one number per block.
  return (
    values if measure.endswith("gap") else values.reshape(-1, stability_training.BLOCK).mean(axis=1)
  )


def jackknife(statistic: Callable[[np.ndarray], float], blocks: np.ndarray) -> Estimate | None:
  """Computes a statistic of means over independent blocks, and its standard error.

  The error is from leaving out one block at a time.

  Blocks with the same number have the same examples in all settings, so what they share cancels
  from the error of a slope or of a ratio.

  Args:
    statistic: function of means ``[...]``; NaN where it has no value.
    blocks: ``[..., B]``, B >= 2.

  Returns:
    None if the statistic has no value for the means, or for the means without some block.
  """
  count = blocks.shape[-1]
  total = blocks.sum(axis=-1)
  value = statistic(total / count)
  without = np.array([statistic((total - blocks[..., b]) / (count - 1)) for b in range(count)])
  if not np.isfinite([value, *without]).all():
    return None
  return Estimate(float(value), float(np.sqrt((count - 1) * np.var(without))))


def power(values: Sequence[float], means: np.ndarray) -> float:
  """Computes the least-squares slope of ``log(means)`` against ``log(values)``.

  NaN if a mean is not positive.

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
    all: slope over all points.
    last: slope between the last two points, since O() is about large values.
  """

  all: Estimate | None
  last: Estimate | None


def slopes(sweep: stability_sweeps.Sweep, results: Results, measure: str) -> Slopes:
  """Computes slopes of ``measure``, one of `MEASURES`, in the quantity of the sweep."""
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
  """Returns whether a slope agrees with an upper bound; None if there is no slope.

  It agrees if it is at most two standard errors above the bound.

  >>> agrees(Estimate(-0.9, 0.06), -1.0), agrees(Estimate(-0.9, 0.04), -1.0)
  (True, False)
  """
  return None if slope is None else bool(slope.value <= bound + 2 * slope.error)


class Exponent(NamedTuple):
  """lambda / (lambda + 1) of Theorem 2, estimated from below.

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
  """Computes the exponent of Theorem 2 with the constants of a measured setting."""
  smoothness = float(measured.smoothness.mean())
  constant = smoothness * setting.rate * (1 + np.sqrt(1 - setting.beta**2 + setting.beta))
  return Exponent(smoothness, constant, constant / (constant + 1))


class Theorem1(NamedTuple):
  """The gap compared with G (n+ eps+ + n- eps-) at every T of every setting.

  Attributes:
    points: number of comparisons.
    broken: `stability_sweeps.name` and T of violations, with a gap more than two standard errors
      above the bound.
    largest: largest ratio of gap over bound.
    median: median ratio of gap over bound.
  """

  points: int
  broken: tuple[str, ...]
  largest: float
  median: float


def theorem1(settings: Sequence[stability.Setting], results: Results) -> Theorem1:
  """Tests Theorem 1 with the largest norm of a full gradient seen in the setting instead of G.

  That norm is at most G, so the test is stricter than the theorem. The gap is that of Eq. 6.
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
  """Returns the gap of Eq. 6 and G (n+ eps+ + n- eps-), of a setting at the T number ``at``."""
  gap = samples(measured, "batch_gap", at)
  moved = setting.batch_positives * measured.epsilon_positive[at].mean()
  moved += setting.batch_negatives * measured.epsilon_negative[at].mean()
  return (
    Estimate(float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))),
    float(measured.gradient.max() * moved),
  )


class Compared(NamedTuple):
  """An algorithm at the end of its training.

  Attributes:
    fall: fall of the training risk since the start.
    values: each of `MEASURES`, None where it has no value.
    ratios: each value over that of the reference.
  """

  fall: float
  values: dict[str, Estimate | None]
  ratios: dict[str, Estimate | None]


def at_same_rate(
  points: Mapping[str, stability_sweeps.Point], results: Results, *, reference: str = "SOPRC"
) -> dict[str, Compared]:
  """Compares algorithms with a reference at the same learning rate and number of steps.

  ``points`` has the point of each.
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
  """Compares algorithms at the learning rates where their training risk falls by ``fall``.

  The number of steps is the same.

  A loss with a smaller gradient moves less, in S and in S^(i) alike, and has a smaller epsilon
  because it has learned less. Here each algorithm has learned equally much. Logarithms are
  interpolated linearly between the learning rates of its sweep. There is no value if the training
  risk of the algorithm, or of the reference, never falls that far. Nor is there one if the measure
  differs by more than `LARGEST_STEP` between the two learning rates.
  """
  blocks = {algorithm: _columns(sweep.points, results) for algorithm, sweep in sweeps.items()}
  return {
    algorithm: _compared(
      blocks[algorithm], blocks[reference], lambda means, k: _interpolated(means, k, fall)
    )._replace(fall=fall)
    for algorithm in sweeps
  }


def _columns(points: Sequence[stability_sweeps.Point], results: Results) -> np.ndarray:
  """Returns the fall of the training risk and the `MEASURES`, ``[len(points), 4, B]``."""
  rows = []
  for point in points:
    measured = results[stability_sweeps.name(point.setting)]
    fall = samples(measured, "start_risk", 0) - samples(measured, "train_risk", point.at)
    rows.append([fall, *(samples(measured, measure, point.at) for measure in MEASURES)])
  return np.array(rows)


def _interpolated(means: np.ndarray, k: int, fall: float) -> float:
  """Interpolates column k at the given fall, which at first ascends with the learning rate.

  NaN outside, next to a mean that is not positive, and across more than `LARGEST_STEP`.
  """
  falls = means[:, 0]
  above = int(np.argmax(falls >= fall))
  ends = means[above - 1 : above + 1, k]
  if (
    above == 0
    or np.any(np.diff(falls[: above + 1]) <= 0)
    or np.min(ends) <= 0
    or np.max(ends) > LARGEST_STEP * np.min(ends)
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
