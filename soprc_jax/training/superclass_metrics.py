"""Metrics of a split whose classes have superclasses, by all processes of a run."""

from ml_collections import ConfigDict
import numpy as np

from soprc_jax import metrics
from soprc_jax.metrics import graded
from soprc_jax.training import parallel, progress

# In the order of the columns that `measure` gathers.
NAMES = ("superclass mAUPRC", "H-AP", "NDCG")


def measure(
  embeddings: np.ndarray, labels: np.ndarray, superclasses: np.ndarray | None, config: ConfigDict
) -> dict[str, float]:
  """Computes the graded metrics of images against each other.

  Each process ranks its share of the queries.

  Args:
    embeddings: ``[N, D]``.
    labels: ``[N]`` integers.
    superclasses: ``[N]`` integers; None if they are unknown.
    config: resolved.

  Returns:
    A value for each of `NAMES`, with the relevance of the authors of H-AP, see
    `soprc_jax.metrics.graded_metrics`; empty without superclasses.
  """
  if superclasses is None:
    return {}
  levels = np.stack([labels, superclasses], axis=1)
  size = -(-len(labels) // parallel.num_processes())
  first = parallel.process_index() * size
  everyone = np.arange(len(labels))
  mine = everyone[first : first + size]
  with progress.bar(config, total=len(mine), desc="superclasses", unit="query") as bar:
    found = metrics.graded_metrics(
      embeddings[mine],
      levels[mine],
      gallery=embeddings,
      gallery_labels=levels,
      query_ids=mine,
      gallery_ids=everyone,
      block_size=config.eval.block_size,
      per_query=True,
      on_block=bar.update,
    )
  values = np.full((size, len(NAMES)), np.nan)
  of_queries = found["ap_per_level"][1], found["h_ap_per_query"], found["ndcg_per_query"]
  values[: len(mine)] = np.stack(of_queries, axis=1)
  values = parallel.gather_rows(values)[: len(labels)]
  return {name: graded.mean(values[:, place]) for place, name in enumerate(NAMES)}
