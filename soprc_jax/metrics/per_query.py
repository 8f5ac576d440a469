"""The result of each query of an evaluation: intervals, groups, and the file ``per_query.npz``."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
import types
from typing import Any, NamedTuple

import numpy as np

from soprc_jax import statistics
from soprc_jax._internal import file_io, stored

CONFIDENCE = 0.95
_RECALL = "recall@"


class PerQuery(NamedTuple):
  """Holds the result of each query.

  Attributes:
    id: ``[N]`` names of the queries, unique.
    label: ``[N]`` displayed names of their classes.
    ap: ``[N]`` average precision; NaN for a query without a positive.
    rank: ``[N]`` rank of the first positive, from 1, behind every negative that scores as high; 0
      for a query without a positive.
  """

  id: np.ndarray
  label: np.ndarray
  ap: np.ndarray
  rank: np.ndarray

  def take(self, where: np.ndarray) -> "PerQuery":
    """Returns the queries at the given positions, or where a mask ``[N]`` is True."""
    return PerQuery(*(column[where] for column in self))

  @property
  def counted(self) -> "PerQuery":
    """The queries that have a positive, which the metrics are over."""
    return self.take(self.rank > 0)

  def values(self, metric: str) -> np.ndarray:
    """Returns the ``[N]`` values whose mean is a metric, ``mAUPRC`` or ``recall@k``."""
    if metric.startswith(_RECALL):
      return (self.rank <= int(metric.removeprefix(_RECALL))).astype(np.float64)
    return self.ap


def make(
  ids: Sequence[str], labels: Sequence[str], ap: np.ndarray, negatives_above: np.ndarray
) -> PerQuery:
  """Returns the results of queries.

  Args:
    ids: ``[N]`` names of the queries.
    labels: ``[N]`` displayed names of their classes.
    ap: ``[N]``, ``"ap_per_query"`` of `soprc_jax.metrics.retrieval_metrics`.
    negatives_above: ``[N]``, ``"negatives_above"`` of the same function.
  """
  return PerQuery(np.array(ids, str), np.array(labels, str), ap, negatives_above + 1)


def intervals(queries: PerQuery, metrics: Iterable[str]) -> dict[str, Any]:
  """Computes 95 % confidence intervals of metrics for new classes.

  Args:
    queries: results of the queries.
    metrics: names of metrics, ``mAUPRC`` or ``recall@k``.

  Returns:
    ``"confidence"``, and the limits ``[low, high]`` of each metric, see
    `soprc_jax.statistics.cluster_interval`. A limit beyond 0 or 1 is cut, since no metric lies
    there. Empty if fewer than two classes have a query with a positive, since classes are what is
    resampled.
  """
  found = queries.counted
  if len(np.unique(found.label)) < 2:
    return {}
  limits = {}
  for name in metrics:
    interval = statistics.cluster_interval(found.values(name), found.label)
    limits[name] = [max(interval.low, 0.0), min(interval.high, 1.0)]
  return {"confidence": CONFIDENCE, **limits}


def by_group(
  queries: PerQuery,
  groups: Sequence[str],
  metrics: Sequence[str],
  *,
  num_relevant: np.ndarray | None = None,
) -> dict[str, dict[str, Any]]:
  """Computes metrics of each group of queries, against the whole gallery.

  Groups whose classes are larger have more positives in the gallery, and for that reason alone a
  higher average precision. So each group has its mean share of positives, ``"prior"``.

  Args:
    queries: results of the queries, which are also the gallery.
    groups: ``[N]`` group of each query.
    metrics: names of metrics, ``mAUPRC`` or ``recall@k``.
    num_relevant: ``[N]`` number of relevant images of each query, itself included. None: its class.

  Returns:
    Group, by name -> metrics, ``"intervals"``, ``"num_queries"``, ``"num_classes"``, ``"prior"``.
    Queries without a positive are left out, and so are groups that have no other query.
  """
  if num_relevant is None:
    _, places, counts = np.unique(queries.label, return_inverse=True, return_counts=True)
    num_relevant = counts[places]
  prior = (num_relevant - 1) / max(len(queries.id) - 1, 1)
  found = {}
  for group in sorted(set(groups)):
    own = (np.asarray(groups) == group) & (queries.rank > 0)
    mine = queries.take(own)
    if len(mine.id):
      found[group] = {
        **{name: float(mine.values(name).mean()) for name in metrics},
        "intervals": intervals(mine, metrics),
        "num_queries": len(mine.id),
        "num_classes": len(np.unique(mine.label)),
        "prior": float(prior[own].mean()),
      }
  return found


def write(
  path: Path, queries: PerQuery, others: Mapping[str, np.ndarray] = types.MappingProxyType({})
) -> None:
  """Writes an ``.npz`` file with the arrays ``id``, ``class``, ``ap`` and ``rank``.

  Args:
    path: the file; it is replaced.
    queries: results of the queries.
    others: name -> another array ``[N]``.
  """
  with file_io.whole(path) as file:
    arrays: dict[str, Any] = {"class": queries.label, **others}
    np.savez_compressed(file, id=queries.id, ap=queries.ap, rank=queries.rank, **arrays)


def read(path: Path) -> PerQuery:
  """Reads the file that `write` has written.

  Raises:
    OSError: the file is missing or unreadable.
    ValueError: it is corrupt.
  """
  arrays = stored.read_arrays(path, ("id", "class", "ap", "rank"))
  found = PerQuery(*arrays.values())
  kinds = "".join(column.dtype.kind for column in found)
  shapes = {column.shape for column in found}
  if kinds != "UUfi" or len(shapes) > 1 or found.id.ndim != 1:
    raise ValueError(f"{path} is corrupt (its arrays are not the results of queries)")
  wrong = ~np.where(found.rank > 0, (found.ap >= 0) & (found.ap <= 1), np.isnan(found.ap))
  if wrong.any() or (found.rank < 0).any() or len(set(found.id)) < len(found.id):
    raise ValueError(f"{path} is corrupt (a rank, an average precision or an id is impossible)")
  return found


class Difference(NamedTuple):
  """Holds the difference of a metric between two models.

  Attributes:
    mean: metric of the first model minus that of the second.
    low: lower limit of its 95 % confidence interval.
    high: upper limit.
    probability: of the first model being ahead on new classes, see
      `soprc_jax.statistics.probability_ahead`.
  """

  mean: float
  low: float
  high: float
  probability: float

  @property
  def resolved(self) -> bool:
    """Whether the interval excludes 0."""
    return statistics.Interval(*self[:3]).excludes_zero

  def __str__(self) -> str:
    return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def difference(
  a: Sequence[PerQuery], b: Sequence[PerQuery], metric: str = "mAUPRC"
) -> Difference | None:
  """Computes the difference of a metric between two models, paired by query and by seed.

  With one seed the interval is for new classes, with several for new classes and seeds.

  Args:
    a: results of one model, one entry per seed.
    b: results of the other model, at the same seeds and for the same queries, see `check_paired`.
    metric: ``mAUPRC`` or ``recall@k``.

  Returns:
    The difference, or None if fewer than two classes have a query with a positive.
  """
  where = a[0].rank > 0
  label = a[0].label[where]
  if len(np.unique(label)) < 2:
    return None
  one, other = (np.stack([run.values(metric)[where] for run in runs]) for runs in (a, b))
  if len(one) == 1:
    one, other = one[0], other[0]
    found = statistics.cluster_difference(one, other, label)
  else:
    found = statistics.crossed_difference(one, other, label)
  return Difference(*found, statistics.probability_ahead(one, other, label))


def check_paired(queries: Mapping[str, PerQuery]) -> None:
  """Raises a ValueError unless all results are of the same queries, in the same order.

  Args:
    queries: name of the run -> results of its queries.
  """
  (first, one), *others = queries.items()
  for name, other in others:
    if len(one.id) != len(other.id):
      raise ValueError(
        f"{first} and {name} cannot be compared query by query: they were tested on {len(one.id)} "
        f"and {len(other.id)} images"
      )
    for what in ("id", "label"):
      differs = np.flatnonzero(getattr(one, what) != getattr(other, what))
      if differs.size:
        i = int(differs[0])
        raise ValueError(
          f"{first} and {name} cannot be compared query by query: test image {i} is "
          f"{one.id[i]} of class {one.label[i]} in one and {other.id[i]} of class {other.label[i]} "
          "in the other. Test both on the same split of the same data"
        )
    differs = np.flatnonzero((one.rank > 0) != (other.rank > 0))
    if differs.size:
      raise ValueError(
        f"{first} and {name} cannot be compared query by query: test image {one.id[differs[0]]} "
        "has a positive in only one of them. Test both on the same split of the same data"
      )
