"""Confidence intervals for metrics of queries that share classes.

Queries of one class share their positives, so their values are not independent. These functions
therefore resample whole classes (clusters), and seeds where there are several: the interval is for
new classes and new seeds, not for new images of the tested classes.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from soprc_jax._internal import checks

_BLOCK = 1_000_000  # clusters of one block of resamples
# A resample of equal clusters has no standard error, and one of nearly equal ones a tiny one. It
# counts as at least this share of the standard error of all clusters.
_LEAST_ERROR = 0.2


class Interval(NamedTuple):
  """A mean and its confidence interval.

  Attributes:
    mean: mean over all values.
    low: lower limit.
    high: upper limit.
  """

  mean: float
  low: float
  high: float

  @property
  def excludes_zero(self) -> bool:
    """Whether the interval lies on one side of 0, so that the data resolve a difference."""
    return self.low > 0 or self.high < 0

  def __str__(self) -> str:
    return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def cluster_interval(
  values: npt.ArrayLike,
  clusters: npt.ArrayLike,
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int = 0,
) -> Interval:
  """Computes a confidence interval of a mean by the bootstrap over clusters.

  The interval is the studentised one (bootstrap-t; Efron, 1982): the error of each resample is
  divided by the standard error of that resample. So it follows skewed values, which the percentile
  interval does not. docs/statistics.md has its coverage on simulated data: 93 to 97 % from 50
  clusters on, unless few clusters decide the mean. A limit can lie outside the range of the values.

  Args:
    values: ``[n]`` finite values, e.g. the average precision of each query.
    clusters: ``[n]`` integers or text, e.g. the class of each query; at least two different ones.
    confidence: probability in (0, 1) with which the interval covers the mean of new clusters.
    num_resamples: number of resamples, at least 100.
    seed: seed of the resamples. The same seed gives the same interval.

  Returns:
    The mean over all values, so that a large cluster weighs more, and its limits.

  Raises:
    TypeError: a value is not a real number, or a cluster neither an integer nor text.
    ValueError: shapes do not fit, a value is not finite, there is one cluster only, or a setting is
      out of range.

  >>> values = np.random.default_rng(0).uniform(size=300)
  >>> print(cluster_interval(values, np.arange(300) // 3))  # 100 classes of three queries
  0.5403 [0.5062, 0.5723]
  """
  _check_settings(confidence, num_resamples, seed)
  found = _per_cluster(_values(values, "values", dims=1)[None], clusters)
  return _interval(found, confidence, num_resamples, seed)


def cluster_difference(
  a: npt.ArrayLike,
  b: npt.ArrayLike,
  clusters: npt.ArrayLike,
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int = 0,
) -> Interval:
  """Computes a confidence interval of the mean of ``a - b``, paired by query.

  Args:
    a: ``[n]`` values of one model.
    b: ``[n]`` values of the other model on the same queries.
    clusters: see `cluster_interval`, which has the other arguments and errors too.

  >>> a = np.random.default_rng(0).uniform(size=300)
  >>> cluster_difference(a, 0.9 * a, np.arange(300) // 3).excludes_zero
  True
  """
  difference = _difference(a, b, dims=1)
  return cluster_interval(
    difference, clusters, confidence=confidence, num_resamples=num_resamples, seed=seed
  )


def crossed_difference(
  a: npt.ArrayLike,
  b: npt.ArrayLike,
  clusters: npt.ArrayLike,
  *,
  confidence: float = 0.95,
  num_resamples: int = 2000,
  seed: int = 0,
) -> Interval:
  """Computes a confidence interval of the mean of ``a - b`` for new seeds and new clusters.

  Both models were trained with the same seeds and tested on the same queries. Clusters are
  resampled as in `cluster_interval`. Seeds are few, often three, and a resample of three values
  varies too little. So the deviation of the seeds is drawn from Student's t with their standard
  error. The part of that error that comes from the clusters is not counted twice. Its coverage is
  93 to 97 % from three seeds and 50 clusters on, and down to 88 % with two seeds
  (docs/statistics.md).

  Args:
    a: ``[seeds, n]`` values of one model; two seeds or more.
    b: ``[seeds, n]`` values of the other model.
    clusters: ``[n]``; see `cluster_interval`, which has the other arguments and errors too.
  """
  _check_settings(confidence, num_resamples, seed)
  found = _per_cluster(_difference(a, b, dims=2), clusters)
  return _interval(found, confidence, num_resamples, seed)


def probability_ahead(
  a: npt.ArrayLike,
  b: npt.ArrayLike,
  clusters: npt.ArrayLike,
  *,
  num_resamples: int = 2000,
  seed: int = 0,
) -> float:
  """Computes the share of resamples in which ``a`` has the larger mean; a tie counts one half.

  It estimates how likely ``a`` is ahead of ``b`` on new clusters (and new seeds), without knowing
  anything else about the two. 0.5 means that the data do not say.

  Args:
    a: ``[n]``, or ``[seeds, n]`` as for `crossed_difference`.
    b: values of the other model, of the same shape.
    clusters: ``[n]``; see `cluster_interval`, which has the other arguments and errors too.

  >>> a = np.random.default_rng(0).uniform(size=300)
  >>> probability_ahead(a, 0.9 * a, np.arange(300) // 3)
  1.0
  """
  _check_settings(0.95, num_resamples, seed)
  difference = _difference(a, b, dims=2 if np.ndim(a) == 2 else 1)
  found = _per_cluster(np.atleast_2d(difference), clusters)
  means = found.mean + _errors(found, num_resamples, seed)
  means = np.where(np.abs(means) < 1e-12, 0.0, means)  # rounding is no difference
  return float((means > 0).mean() + 0.5 * (means == 0).mean())


class _Clusters(NamedTuple):
  """Values by cluster: their overall mean, and ``[seeds, C]`` sums of deviations from it.

  They are divided by a power of two, 2^exponent, so that no square overflows or underflows.
  """

  exponent: int
  mean: float
  deviations: np.ndarray
  sizes: np.ndarray  # [C]


def _per_cluster(values: np.ndarray, clusters: npt.ArrayLike) -> _Clusters:
  _check_not_masked(clusters, "clusters")
  names = np.asarray(clusters)
  if names.dtype.kind not in "iuUSO" or any(
    not isinstance(name, str) for name in names.flat if names.dtype.kind == "O"
  ):
    raise TypeError(f"clusters must be integers or text, got {names.dtype}")
  if names.shape != values.shape[1:]:
    raise ValueError(
      f"clusters must have one entry for each of the {values.shape[1]} queries, got shape "
      f"{names.shape}"
    )
  found, rows = np.unique(names, return_inverse=True)
  if len(found) < 2:
    raise ValueError(f"an interval needs at least two clusters, got {len(found)}")
  exponent = int(np.frexp(np.abs(values).max())[1])
  values = np.ldexp(values, -exponent)  # exact
  mean = math.fsum(values.mean(axis=0)) / values.shape[1]
  deviations = np.stack([np.bincount(rows, row - mean, len(found)) for row in values])
  sizes = np.bincount(rows).astype(np.float64)
  deviations[np.abs(deviations) < 1e-13 * sizes] = 0.0  # of rounding
  return _Clusters(exponent, mean, deviations, sizes)


def _errors(found: _Clusters, num_resamples: int, seed: int) -> np.ndarray:
  """Returns draws of the true mean minus the measured one, ``[num_resamples]``.

  Each is minus the studentised error of a resample of the clusters, times the standard error. With
  several seeds, a draw for the seeds is added.
  """
  num_seeds, count = found.deviations.shape
  deviations, total = found.deviations.mean(axis=0), found.sizes.sum()
  unbiased = math.sqrt(count / (count - 1))
  error = unbiased * math.sqrt((deviations**2).sum()) / total
  rng, ratios = np.random.default_rng(seed), []
  rows = max(_BLOCK // count, 1)
  for first in range(0, num_resamples, rows):
    drawn = rng.integers(count, size=(min(rows, num_resamples - first), count))
    sums, sizes = deviations[drawn], found.sizes[drawn]
    means = sums.sum(axis=1) / sizes.sum(axis=1)
    left = ((sums - means[:, None] * sizes) ** 2).sum(axis=1)
    errors = unbiased * np.sqrt(left) / sizes.sum(axis=1)
    ratios.append(means / np.maximum(errors, _LEAST_ERROR * error) if error else means)
  draws = -error * np.concatenate(ratios)
  if num_seeds == 1:
    return draws
  # Two-way layout: what is left after the effects of seeds and of clusters is their interaction.
  # The variance of the seeds' means contains its part, and so does that of the clusters' means.
  of_seeds = found.deviations.sum(axis=1) / total
  left = found.deviations - deviations - of_seeds[:, None] * found.sizes
  interaction = (unbiased / total) ** 2 * (left**2).sum() / (num_seeds - 1) / num_seeds
  variance = max(of_seeds.var(ddof=1) / num_seeds - interaction, 0.0)
  # Every 200th of many sorted draws: with few seeds the tails are long, and few draws reach them.
  many = np.sort(rng.standard_t(num_seeds - 1, size=200 * num_resamples))[100::200]
  return draws + math.sqrt(variance) * rng.permutation(many)


def _interval(found: _Clusters, confidence: float, num_resamples: int, seed: int) -> Interval:
  tail = (1 - confidence) / 2
  errors = np.quantile(_errors(found, num_resamples, seed), [tail, 1 - tail])
  limits = np.ldexp([found.mean, *(found.mean + errors)], found.exponent)
  return Interval(*map(float, limits))


def _values(values: npt.ArrayLike, name: str, *, dims: int) -> np.ndarray:
  _check_not_masked(values, name)
  array = np.asarray(values)
  if array.dtype.kind not in "fiub":
    raise TypeError(f"{name} must be real numbers, got {array.dtype}")
  array = array.astype(np.float64)
  if array.ndim != dims or not array.size:
    shape = "[n]" if dims == 1 else "[seeds, n]"
    raise ValueError(f"{name} must be {shape} with n >= 1, got shape {array.shape}")
  if not np.isfinite(array).all():
    place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    raise ValueError(
      f"{name}{list(place)} is {array[place]}: leave out the queries without a finite value (a "
      "query without a positive has none)"
    )
  return array


def _check_not_masked(array: Any, name: str) -> None:
  if isinstance(array, np.ma.MaskedArray):
    raise TypeError(
      f"{name} is a masked array: leave out the masked queries, for example by [~mask]"
    )


def _difference(a: Any, b: Any, *, dims: int) -> np.ndarray:
  a, b = _values(a, "a", dims=dims), _values(b, "b", dims=dims)
  if a.shape != b.shape:
    raise ValueError(f"a and b must be values of the same queries, got {a.shape} and {b.shape}")
  if dims == 2 and len(a) < 2:
    raise ValueError("crossed_difference needs two seeds or more: use cluster_difference for one")
  with np.errstate(over="ignore"):
    difference = a - b
  if not np.isfinite(difference).all():
    raise ValueError("a - b overflows: divide a and b by a common number")
  return difference


def _check_settings(confidence: float, num_resamples: int, seed: int) -> None:
  if not (isinstance(confidence, (float, np.floating)) and 0 < confidence < 1):
    raise ValueError(f"confidence must be in (0, 1), got {confidence!r}")
  checks.check_count("num_resamples", num_resamples, low=100)
  if num_resamples * (1 - confidence) < 4:
    least = math.ceil(4 / (1 - confidence))
    raise ValueError(
      f"confidence={confidence:g} needs num_resamples of {least:,} or more, got {num_resamples:,}"
    )
  checks.check_count("seed", seed, low=0)
