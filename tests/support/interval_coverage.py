"""Simulated queries with class effects, and how often an interval covers the true mean.

``python tests/support/interval_coverage.py`` prints the tables of docs/statistics.md.
"""

from collections.abc import Iterator
import functools

import numpy as np

from soprc_jax import statistics
from soprc_jax._internal import text_table

# Values of the queries given the effects of their classes. "AP": most queries are easy, some
# classes are hard. "recall@1": 0 or 1, and few classes have the failures. "log-normal": heavy tail.
KINDS = ("normal", "AP", "recall@1", "log-normal")


def values(kind: str, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns a value of each query, ``[n]``, with an effect of its class."""
  count = classes.max() + 1
  if kind == "normal":
    return rng.normal(size=count)[classes] + rng.normal(size=len(classes))
  if kind == "AP":
    means = rng.beta(1.2, 0.4, size=count)[classes]
    return rng.beta(5 * means + 0.01, 5 * (1 - means) + 0.01)
  if kind == "recall@1":
    return (rng.random(len(classes)) > rng.beta(0.1, 2, size=count)[classes]).astype(float)
  return rng.lognormal(size=count)[classes]


@functools.cache
def true_mean(kind: str) -> float:
  """Returns the mean of ``kind``; that of the APs by 10^6 draws."""
  if kind == "AP":
    return float(values(kind, np.arange(1_000_000), np.random.default_rng(9)).mean())
  return {"normal": 0.0, "recall@1": 1 - 0.1 / 2.1, "log-normal": float(np.exp(0.5))}[kind]


def sizes(num_clusters: int, rng: np.random.Generator) -> np.ndarray:
  """Returns the class of each query, 2 to 12 queries a class."""
  return np.repeat(np.arange(num_clusters), rng.integers(2, 13, size=num_clusters))


def one_model(kind: str, num_clusters: int, repeats: int, **options: int) -> float:
  """Returns the share of ``repeats`` intervals that cover the true mean."""

  def covered() -> Iterator[bool]:
    for repeat in range(repeats):
      rng = np.random.default_rng([repeat, num_clusters])
      classes = sizes(num_clusters, rng)
      found = statistics.cluster_interval(
        values(kind, classes, rng), classes, seed=repeat, **options
      )
      yield found.low <= true_mean(kind) <= found.high

  return float(np.mean(list(covered())))


def two_models(
  num_seeds: int,
  num_clusters: int,
  effects: tuple[float, float, float],
  repeats: int,
  **options: int,
) -> float:
  """Returns the share of intervals of a difference that cover it.

  Args:
    num_seeds: number of seeds.
    num_clusters: number of classes.
    effects: standard deviations of the effects of seeds, of classes, and of their interaction;
      that of the queries is 1.
    repeats: number of intervals.
    **options: passed on.
  """
  of_seeds, of_classes, both, hits = *effects, 0
  for repeat in range(repeats):
    rng = np.random.default_rng([repeat, num_seeds, num_clusters])
    classes = sizes(num_clusters, rng)
    difference = (
      of_seeds * rng.normal(size=(num_seeds, 1))
      + of_classes * rng.normal(size=num_clusters)[classes]
      + both * rng.normal(size=(num_seeds, num_clusters))[:, classes]
      + rng.normal(size=(num_seeds, len(classes)))
    )
    found = statistics.crossed_difference(
      difference, np.zeros_like(difference), classes, seed=repeat, **options
    )
    hits += found.low <= 0 <= found.high
  return hits / repeats


def main() -> None:
  def repeats(kind: str, count: int) -> int:
    return 1000 if count < 5000 else 1200 if kind == "normal" else 400

  rows = [
    [str(count), *(f"{one_model(kind, count, repeats(kind, count)):.3f}" for kind in KINDS)]
    for count in (10, 20, 50, 200, 1000, 5000)
  ]
  print(text_table.markdown(["classes", *KINDS], rows), flush=True)
  effects = {
    "classes only": (0.0, 1.0, 0.0),
    "seeds only": (0.3, 0.0, 0.0),
    "interaction only": (0.0, 0.0, 3.0),
    "all": (0.1, 1.0, 1.0),
  }
  rows = [
    [f"{seeds}", *(f"{two_models(seeds, 50, e, 500):.3f}" for e in effects.values())]
    for seeds in (2, 3, 5)
  ]
  print(text_table.markdown(["seeds", *effects], rows))


if __name__ == "__main__":
  main()
