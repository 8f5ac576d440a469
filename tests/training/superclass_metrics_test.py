"""Tests the metrics of superclasses of a split, in an evaluation."""

import numpy as np
import toys

from soprc_jax import metrics
from soprc_jax.data import sources
from soprc_jax.training import config as config_lib
from soprc_jax.training import evaluation, parallel, superclass_metrics


class _Source:
  """Provides random images, five of each class; two classes make a superclass."""

  labels = np.arange(30) // 5

  def __init__(self):
    self.superclasses = {label: f"kind {label // 2}" for label in range(6)}

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    rng = np.random.default_rng(index)
    image = rng.integers(0, 256, (toys.SIZE, toys.SIZE, 3), np.uint8)
    return sources.Example(image, int(self.labels[index]), str(index))


def _config():
  config = config_lib.default_config()
  config.eval.update({"image_size": toys.SIZE, "batch_size": 8, "ks": (1, 4), "block_size": 7})
  return config


def _embedded():
  embed = evaluation.make_embed(toys.make().model, _config())
  return embed(parallel.replicate(toys.drawn()), _Source())


def test_both_levels_are_in_the_results_of_an_evaluation():
  embedded, config = _embedded(), _config()
  got, (tested, _) = (
    evaluation.evaluate(embedded, config),
    evaluation.test(embedded, _Source(), config),
  )
  levels = np.stack([_Source.labels, _Source.labels // 2], axis=1)
  want = metrics.graded_metrics(embedded.embeddings, levels)
  plain = metrics.retrieval_metrics(embedded.embeddings, levels[:, 0], ks=(1, 4))
  assert list(got) == [*plain, "superclass mAUPRC", "H-AP", "NDCG", "num_broken"]
  assert {name: got[name] for name in plain} == plain
  assert got["superclass mAUPRC"] == want["mAUPRC_per_level"][1]
  assert (got["H-AP"], got["NDCG"]) == (want["H-AP"], want["NDCG"])
  intervals = tested.pop("intervals")
  assert tested == got
  # The files of queries have no superclasses, so these have no intervals.
  assert list(intervals) == ["confidence", "mAUPRC", "recall@1", "recall@4"]
  assert evaluation.metric_names(got) == ["mAUPRC", "recall@1", "recall@4"]


def test_without_superclasses_nothing_is_added():
  embedded = _embedded()._replace(superclasses=None)
  assert "H-AP" not in evaluation.evaluate(embedded, _config())
  assert superclass_metrics.measure(*embedded.graded, _config()) == {}


def test_shares_of_several_processes_are_joined(monkeypatch):
  embedded, config = _embedded(), _config()
  want = superclass_metrics.measure(*embedded.graded, config)
  shares = []
  monkeypatch.setattr(parallel, "num_processes", lambda: 4)
  for process in range(4):
    monkeypatch.setattr(parallel, "process_index", lambda process=process: process)
    monkeypatch.setattr(parallel, "gather_rows", lambda rows: shares.append(rows) or rows)
    superclass_metrics.measure(*embedded.graded, config)
  monkeypatch.setattr(parallel, "gather_rows", lambda rows: np.concatenate(shares))
  assert superclass_metrics.measure(*embedded.graded, config) == want
