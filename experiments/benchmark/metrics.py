"""Benchmarks evaluation against other packages.

The peers are PyTorch Metric Learning, a plain torch evaluation, scikit-learn, and the product of
the similarities alone.
"""

from collections.abc import Callable, Iterator
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark import harness
from soprc_jax import metrics

_WIDTH, _PER_CLASS, _BLOCK = 512, 5, 1024
# Images in the gallery, how many of them are queries, and timed repetitions. With all queries the
# peers take minutes, and sorted neighbors of all would not fit into 24 GiB.
_SIZES = ((5_000, 5_000, 7), (20_000, 1_024, 7), (60_000, 1_024, 3))
_RETRIEVAL_TARGET, _PRODUCT_TARGET, _AUPRC_TARGET = 3.0, 0.5, 2.0
_SCORES = 1_000_000
_CURVE_SIZES = (2_500, 5_000, 10_000, 20_000)
_CURVE_LENGTHS = (10_000, 100_000, 1_000_000, 10_000_000)


def rows() -> Iterator[harness.Row]:
  """Yields rows of `retrieval_metrics`, `mean_pr_curve` and `auprc` against their peers."""
  for size, num_queries, repetitions in _SIZES:
    yield from _retrieval(size, num_queries, repetitions)
  yield _mean_pr_curve(5_000)
  yield _auprc(_SCORES)


def growth() -> Iterator[harness.Curve]:
  """Yields seconds by size of the gallery and by length of the list.

  All images of the gallery are queries.
  """
  for name, function in (
    ("retrieval_metrics", metrics.retrieval_metrics),
    ("mean_pr_curve", metrics.mean_pr_curve),
  ):
    costs = [
      harness.median_seconds(functools.partial(function, *make_embeddings(size)))
      for size in _CURVE_SIZES
    ]
    yield harness.Curve("metrics", name, "images", _CURVE_SIZES, "seconds", costs)
  auprc = jax.jit(metrics.auprc)
  costs = [
    harness.median_seconds(functools.partial(auprc, *_scores(length))) for length in _CURVE_LENGTHS
  ]
  yield harness.Curve("metrics", "auprc", "scores", _CURVE_LENGTHS, "seconds", costs)


def _retrieval(size: int, num_queries: int, repetitions: int) -> Iterator[harness.Row]:
  import pytorch_metric_learning
  import torch

  torch.set_num_threads(os.cpu_count() or 1)
  embeddings, labels = make_embeddings(size)
  queries, query_labels, ids = embeddings[:num_queries], labels[:num_queries], np.arange(size)

  def ours() -> float:
    found = metrics.retrieval_metrics(
      queries,
      query_labels,
      gallery=embeddings,
      gallery_labels=labels,
      query_ids=ids[:num_queries],
      gallery_ids=ids,
      block_size=_BLOCK,
    )
    return found["mAUPRC"]

  tensors = torch.from_numpy(embeddings), torch.from_numpy(labels)
  learning = f"pytorch-metric-learning {pytorch_metric_learning.__version__}"
  peers: dict[str, Callable[[], Any]] = {
    # The package's own CustomKNN: FaissKNN is a third slower, since faiss is not made for this many
    # neighbors.
    f"{learning}, mAP of all ranks, CustomKNN": _metric_learning(*tensors, num_queries),
    f"torch {torch.__version__}, argsort": lambda: _argsort_evaluation(*tensors, num_queries),
  }
  want = ours()
  for name, evaluate in peers.items():
    if abs(evaluate() - want) > 1e-6:
      raise AssertionError(f"{name} finds {evaluate()}, ours {want}")
  products = make_products(queries, embeddings)
  seconds = harness.time_together(
    {"ours": ours, **peers, **products}, repetitions=repetitions, warmup=0
  )
  case = f"retrieval_metrics, {num_queries} queries in {size} x {_WIDTH}"
  for peer in peers:
    yield harness.row(
      "metrics", case, peer, seconds["ours"], seconds[peer], target=_RETRIEVAL_TARGET
    )
  fastest = min(products, key=lambda name: float(np.median(seconds[name])))
  note = "float32 similarities, not counted or ranked"
  yield harness.row(
    "metrics", case, fastest, seconds["ours"], seconds[fastest], target=_PRODUCT_TARGET, note=note
  )


def make_embeddings(size: int, width: int = _WIDTH) -> tuple[np.ndarray, np.ndarray]:
  """Returns unit vectors around the center of their class, and labels.

  Some classes are tight and some loose.
  """
  rng = np.random.default_rng(0)
  labels = np.arange(size) // _PER_CLASS
  centres = rng.normal(size=(size // _PER_CLASS + 1, width)).astype(np.float32)
  spread = rng.uniform(0.5, 4.0, size=(len(centres), 1)).astype(np.float32)
  vectors = centres[labels] + spread[labels] * rng.normal(size=(size, width)).astype(np.float32)
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def _metric_learning(embeddings: Any, labels: Any, num_queries: int) -> Callable[[], float]:
  """Returns a function for mean average precision by PyTorch Metric Learning."""
  from pytorch_metric_learning import distances
  from pytorch_metric_learning.utils import inference
  from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

  calculator = AccuracyCalculator(
    include=("mean_average_precision",),
    k=len(labels) - 1,
    knn_func=inference.CustomKNN(distances.CosineSimilarity()),
  )

  def evaluate() -> float:
    queries, query_labels = embeddings[:num_queries], labels[:num_queries]
    found = calculator.get_accuracy(
      queries, query_labels, embeddings, labels, ref_includes_query=True
    )
    return found["mean_average_precision"]

  return evaluate


def _argsort_evaluation(embeddings: Any, labels: Any, num_queries: int) -> float:
  """Computes mean average precision by sorting the candidates of each query."""
  import torch

  total, ranks = 0.0, torch.arange(1, len(labels) + 1)
  for start in range(0, num_queries, _BLOCK):
    rows = torch.arange(start, min(start + _BLOCK, num_queries))
    scores = embeddings[rows] @ embeddings.T
    scores[torch.arange(len(rows)), rows] = -torch.inf
    order = torch.argsort(scores, dim=1, descending=True)
    hits = labels[order] == labels[rows, None]
    hits[:, -1] = False  # the query itself
    precision = torch.cumsum(hits, dim=1) / ranks
    total += float(((precision * hits).sum(dim=1) / hits.sum(dim=1)).sum())
  return total / num_queries


def make_products(queries: np.ndarray, gallery: np.ndarray) -> dict[str, Callable[[], Any]]:
  """Returns calls that compute all similarities in float32, block by block, and nothing else."""
  product = jax.jit(lambda q, g: jnp.einsum("qd,gd->qg", q, g, precision=jax.lax.Precision.HIGHEST))
  on_device = jnp.asarray(gallery)
  parts = [queries[start : start + _BLOCK] for start in range(0, len(queries), _BLOCK)]

  def by_numpy() -> None:
    for part in parts:
      part @ gallery.T

  def by_jax() -> None:
    for part in parts:
      product(part, on_device).block_until_ready()

  by_jax()
  return {"numpy, float32 product alone": by_numpy, "jax, float32 product alone": by_jax}


def _mean_pr_curve(size: int) -> harness.Row:
  embeddings, labels = make_embeddings(size)

  def by_sorting() -> tuple[np.ndarray, np.ndarray]:
    """Computes the same curve from the sorted scores of each query."""
    grid = np.linspace(-1, 1, 2001)
    precision, recall = np.zeros(2001), np.zeros(2001)
    for start in range(0, size, _BLOCK):
      scores = (
        embeddings[start : start + _BLOCK].astype(np.float64) @ embeddings.T.astype(np.float64)
      ).astype(np.float32)
      for i, row in enumerate(scores):
        row[start + i] = -np.inf
        positives = np.sort(row[labels == labels[start + i]])[1:]
        retrieved = size - np.searchsorted(np.sort(row), grid)
        hits = len(positives) - np.searchsorted(positives, grid)
        precision += np.where(retrieved > 0, hits / np.maximum(retrieved, 1), 1.0)
        recall += hits / len(positives)
    return precision / size, recall / size

  def ours() -> tuple[np.ndarray, np.ndarray]:
    return metrics.mean_pr_curve(embeddings, labels, block_size=_BLOCK)[:2]

  np.testing.assert_allclose(
    ours(), by_sorting(), atol=1e-4
  )  # linspace moves some thresholds by an ulp
  case = f"mean_pr_curve, {size} x {_WIDTH}, 2001 thresholds"
  (row,) = harness.compare(
    "metrics", case, ours=ours, peers={"numpy, sorted rows": by_sorting}, target=1.0, warmup=0
  )
  return row


def _auprc(length: int) -> harness.Row:
  import sklearn
  from sklearn.metrics import average_precision_score

  scores, labels = _scores(length)
  on_device, auprc = (jnp.asarray(scores), jnp.asarray(labels)), jax.jit(metrics.auprc)
  np.testing.assert_allclose(auprc(*on_device), average_precision_score(labels, scores), rtol=1e-5)
  peer = f"scikit-learn {sklearn.__version__}, average_precision_score"
  (row,) = harness.compare(
    "metrics",
    f"auprc, {length} scores, jitted",
    ours=lambda: auprc(*on_device),
    peers={peer: lambda: average_precision_score(labels, scores)},
    target=_AUPRC_TARGET,
  )
  return row


def _scores(length: int) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  labels = rng.random(length) < 0.1
  return (rng.normal(size=length) + labels).astype(np.float32), labels
