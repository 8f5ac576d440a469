"""Tests losses computed in blocks: the same values and gradients in bounded memory.

The memory grows with the square of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax import estimators, lists
from soprc_jax._internal import blockwise
from soprc_jax.training import config as config_lib
from soprc_jax.training import loss_protocol, objectives

_NAMES = (
  "soprc",
  "ap",
  "smooth_ap",
  "sup_ap",
  "quad_linear_ap",
  "recall_at_k",
  "fast_ap",
  "listwise_ap",
  "blackbox",
  "auroc",
  "triplet",
)


def _objective(name, *, max_positives):
  config = config_lib.default_config()
  config.loss.update({"name": name, "tau1": 0.3, "tau2": 0.05})
  config.loss.blackbox.memory_size = 1024
  config = config_lib.resolve(config)
  setting = loss_protocol.Setting(
    np.full(16, 5), num_steps=10, max_positives=max_positives, axis_name=None, embedding_dim=512
  )
  return objectives.make_objective(name, config.loss, setting)


def _loss(objective):
  def loss(embeddings, labels, state):
    inputs = loss_protocol.Inputs(
      embeddings, labels, jnp.ones(labels.shape, bool), jnp.int32(0), (state,)
    )
    return objective.compute(inputs).loss

  return jax.value_and_grad(loss)


@pytest.mark.parametrize("name", _NAMES)
def test_blocks_change_nothing(name, monkeypatch):
  rng = np.random.default_rng(0)
  embeddings = rng.normal(size=(30, 512))
  embeddings = np.float32(embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True))
  labels = rng.integers(0, 4, 30)
  objective = _objective(name, max_positives=29)
  state = objective.tracker.init(None)
  want = _loss(objective)(embeddings, labels, state)
  calls = []
  original = jax.lax.map

  def counted(function, rows, **options):
    calls.append(options)
    return original(function, rows, **options)

  monkeypatch.setattr(jax.lax, "map", counted)
  monkeypatch.setattr(
    blockwise, "BLOCK_ENTRIES", 7 * 30 * 30
  )  # of columns: 7 at a time, and 1 or 2 left over
  got = _loss(objective)(embeddings, labels, state)
  assert calls
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5 * np.abs(want[1]).max())


def _temporaries(name, size, *, max_positives=3):
  """Returns the memory that XLA plans for loss and gradient on ``size`` embeddings. The unit is a
  float32 matrix of size x size.
  """
  objective = _objective(name, max_positives=max_positives)
  state = jax.eval_shape(lambda: objective.tracker.init(None))
  shapes = (
    jax.ShapeDtypeStruct((size, 512), np.float32),
    jax.ShapeDtypeStruct((size,), np.int32),
    state,
  )
  plan = jax.jit(_loss(objective)).lower(*shapes).compile().memory_analysis()
  return plan.temp_size_in_bytes / (4 * size**2)


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("name", _NAMES)
def test_memory_of_large_batches(name, size):
  # Scores, their gradient, its transposed copy and masks are needed in any case. BlackBox sorts all
  # pairs, with their indices.
  assert _temporaries(name, size) < (25 if name == "blackbox" else 9)


@pytest.mark.parametrize("name", ["soprc", "ap", "triplet", "smooth_ap", "auroc"])
def test_memory_where_any_image_may_be_a_positive(name):
  # One tensor of all triples would be 2048 matrices.
  assert _temporaries(name, 2048, max_positives=2047) < 60


def test_one_long_list_of_a_classifier():
  # 20,000 scores: one tensor of all pairs would be 1.5 GiB.
  def loss(scores, labels, v):
    found = lists.binary_lists(scores, labels)
    masks = {"positive_where": found.positive_where, "negative_where": found.negative_where}
    return estimators.soprc_loss(
      found.positive_scores, found.negative_scores, v, prior=0.01, **masks
    )

  shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((20_000,), (20_000,), (1, 100))]
  plan = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile().memory_analysis()
  assert plan.temp_size_in_bytes < 2**28
