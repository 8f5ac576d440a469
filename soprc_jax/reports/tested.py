"""Embeds and ranks the test images of a run again, so that a report can show them."""

from collections.abc import Mapping
import logging
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np

from soprc_jax import metrics
from soprc_jax.data import sources
from soprc_jax.reports import ranking, reading
from soprc_jax.training import evaluation, parallel, progress

_log = logging.getLogger(__name__)
TOP = 10


class Tested(NamedTuple):
  """Holds the rankings of the test images.

  Attributes:
    source: the images that could be decoded, in the order of all arrays.
    labels: ``[N]`` labels of the images.
    ap: ``[N]`` average precision of each query; NaN if its class has no other image.
    nearest: nearest images of each query.
    right: ``[N, k]`` bool, which of these are relevant.
    num_relevant: ``[N]`` images that are relevant to each query, itself included.
    metrics: metrics over all queries.
    step: step of the checkpoint.
    embedding_seconds: time to embed all images.
    ranking_seconds: time to compute all metrics of this split.
    device: the device that was used.
    splits: the images of all splits, by name.
  """

  source: sources.Source
  labels: np.ndarray
  ap: np.ndarray
  nearest: ranking.Nearest
  right: np.ndarray
  num_relevant: np.ndarray
  metrics: dict[str, Any]
  step: int
  embedding_seconds: float
  ranking_seconds: float
  device: str
  splits: Mapping[str, sources.Source]

  def class_name(self, label: int) -> str:
    """Returns the displayed name of a class."""
    return self.source[int(np.flatnonzero(self.labels == label)[0])].shown_class


def rank(run: reading.Run, *, data_root: Path | None = None) -> Tested:
  """Embeds and ranks the split ``test`` of a run with the model that was tested.

  Args:
    run: a finished run.
    data_root: current place of its data; None: the place at the time of the run.

  Raises:
    ValueError: if the data differ or are corrupt, or if there is no checkpoint of this config.
    OSError: if the data or the checkpoint are missing.
    ArithmeticError: if embeddings are not finite.
  """
  config = run.config.copy_and_resolve_references()  # the page shows the config of the run
  if data_root is not None:
    with config.unlocked():
      config.data.root = str(data_root)
  trained = evaluation.load(config, run.workdir)
  lines = evaluation.changes(trained, config, run.workdir)
  if lines:
    raise ValueError(f"the data differ from those the run was trained on ({'; '.join(lines)})")
  source = trained.splits["test"]
  _log.info("Embedding %d test images with the model of step %d.", len(source), trained.step)
  began = time.perf_counter()
  embedded = trained.embed(trained.variables, source)
  ranked = time.perf_counter()
  _log.info("Ranking the test images.")
  with progress.bar(config, total=2 * len(embedded.labels), desc="ranking", unit="query") as bar:
    everyone = np.arange(len(embedded.labels))
    found = metrics.retrieval_metrics(
      embedded.embeddings,
      **embedded.relevance(everyone, everyone),
      ks=config.eval.ks,
      block_size=config.eval.block_size,
      per_query=True,
      on_block=bar.update,
    )
    seconds = time.perf_counter() - ranked
    nearest = ranking.nearest(embedded.embeddings, embedded.labels, k=TOP, on_block=bar.update)
  ap = found.pop("ap_per_query")
  return Tested(
    sources.Subset(source, embedded.positions),
    embedded.labels,
    ap,
    nearest,
    *_relevance(embedded, nearest),
    found,
    trained.step,
    ranked - began,
    seconds,
    parallel.describe(),
    trained.splits,
  )


def _relevance(
  embedded: evaluation.Embedded, nearest: ranking.Nearest
) -> tuple[np.ndarray, np.ndarray]:
  """Returns which of the nearest images are relevant, and the number of relevant ones."""
  labels, sets = embedded.labels, embedded.label_sets
  others = labels[nearest.positions]
  if sets is not None:
    return sets.relevant(labels, others), sets.count(labels, labels)
  _, places, sizes = np.unique(labels, return_inverse=True, return_counts=True)
  return others == labels[:, None], sizes[places]
