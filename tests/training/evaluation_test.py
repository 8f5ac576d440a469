"""Tests the evaluation of a model on a split."""

import math

import numpy as np
import pytest
import toys

from soprc_jax import metrics, statistics
from soprc_jax.data import sources
from soprc_jax.training import config as config_lib
from soprc_jax.training import evaluation, parallel
from soprc_jax.training import step as step_lib


class _Source:
  """Provides random images, five of each class."""

  def __init__(self, count):
    self.labels = np.arange(count) // 5
    self._images = np.random.default_rng(0).integers(
      0, 256, (count, toys.SIZE, toys.SIZE, 3), np.uint8
    )

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), str(index))


def _eval_config(**values):
  config = config_lib.default_config()
  config.eval.update({"image_size": toys.SIZE, **values})
  return config


class TestEvaluation:
  @pytest.mark.parametrize("batch_size", [3, 26, 100])
  def test_f31_padding_and_batch_size_change_nothing_and_compile_once(
    self, batch_size, monkeypatch
  ):
    source, toy, traced = _Source(26), toys.make(), []
    embed_step = step_lib.embed_step
    monkeypatch.setattr(
      step_lib,
      "embed_step",
      lambda *args, **options: traced.append(1) or embed_step(*args, **options),
    )
    embed = evaluation.make_embed(toy.model, _eval_config(batch_size=batch_size))
    got = embed(parallel.replicate(toys.drawn()), source)
    assert len(traced) == 1  # the last batch, of 2 or of all 26, has the shape of the others
    want = toy.model.apply(toys.drawn(), source._images)
    assert got.embeddings.shape == (26, 8)  # the last images are not dropped
    np.testing.assert_allclose(got.embeddings, want, atol=1e-5)
    np.testing.assert_array_equal(got.labels, source.labels)
    assert got.num_broken == 0
    embed(parallel.replicate(toys.drawn()), _Source(7))
    assert len(traced) == 1

  def test_metrics_are_those_of_all_images(self):
    source, toy = _Source(26), toys.make()
    config = _eval_config(batch_size=8, ks=(1, 4), block_size=7)
    embedded = evaluation.make_embed(toy.model, config)(parallel.replicate(toys.drawn()), source)
    got = evaluation.evaluate(embedded, config)
    want = metrics.retrieval_metrics(embedded.embeddings, source.labels, ks=(1, 4))
    assert got == want | {"num_broken": 0}
    assert (got["num_queries"], got["num_skipped"]) == (25, 1)
    tested, queries = evaluation.test(embedded, source, config)
    limits = tested.pop("intervals")
    assert tested == got
    assert limits["mAUPRC"] == list(
      statistics.cluster_interval(queries.ap[:25], source.labels[:25])[1:]
    )
    assert list(queries.id) == [str(i) for i in range(26)]
    assert list(queries.label) == [str(i // 5) for i in range(26)]
    assert math.isnan(queries.ap[25])
    assert (queries.rank[:25] <= 4).mean() == got["recall@4"]
