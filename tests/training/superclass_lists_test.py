"""Tests the objective with superclasses against the public function, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import graded_retrieval_loss, score_ema
from soprc_jax.training import config as config_lib
from soprc_jax.training import objectives, superclass_lists

_COUNTS, _SUPERCLASSES = np.array([4, 8, 2, 6]), np.array([5, 2, 2, 5])
_LABELS = np.array([0, 1, 0, 3, 1, 1, 2, 3])
_GAIN = 0.3


def _config(**values):
  config = config_lib.default_config()
  values = {f"loss.{key.replace('__', '.')}": value for key, value in values.items()}
  base = {"data.source": "csv", "data.superclass": "kind", "loss.num_points": 6}
  config.update_from_flattened_dict(base | {"loss.superclass_gain": _GAIN} | values)
  return config_lib.resolve(config).loss


def _setting(superclasses=_SUPERCLASSES):
  return objectives.Setting(
    _COUNTS, num_steps=10, max_positives=2, axis_name=None, superclasses=superclasses
  )


def _inputs(state, seed=0):
  vectors = np.random.default_rng(seed).standard_normal((len(_LABELS), 5))
  vectors = jnp.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
  labels, where = jnp.array(_LABELS), jnp.ones(len(_LABELS), bool)
  return objectives.Inputs(vectors, labels, where, jnp.int32(0), (state,))


@pytest.mark.parametrize("link", ["share", "log"])
def test_the_objective_is_the_public_function(link):
  config = _config(link=link, lambda1=0.0, lambda2=0.0, prior__kind="scaled", prior__value=0.4)
  objective = objectives.make_objective("soprc", config, _setting())
  state = objective.tracker.init(None)
  assert state.v.shape == (4 + 2, 6)
  arguments = objective.compute(_inputs(state, 1)).update_args
  _, state = objective.tracker.update(None, state, **arguments)
  inputs = _inputs(state)
  outputs = objective.compute(inputs)
  rows, sizes = np.array([1, 0, 0, 1]), np.array([10, 10])
  levels = np.stack([_LABELS, rows[_LABELS]], axis=1)
  counts = np.stack([_COUNTS[_LABELS], sizes[levels[:, 1]]], axis=1)
  want, want_args = graded_retrieval_loss(
    inputs.embeddings,
    levels,
    tracker=score_ema(6, 6, 0.1, bounds=(-1, 1)),
    opt_state=(state,),
    list_ids=levels + np.array([0, 4]),
    gains=(1.0, _GAIN),
    num_positives=counts - 1,
    prior=np.float32(0.4 * counts / np.array([8, 10])),
    tau1=config.tau1,
    tau2=config.tau2,
    link=link,
  )
  np.testing.assert_allclose(outputs.loss, want, rtol=1e-5)
  moved = objective.tracker.update(None, state, **outputs.update_args)[1]
  wanted = score_ema(6, 6, 0.1, bounds=(-1, 1)).update(None, state, **want_args)[1]
  np.testing.assert_allclose(moved.v, wanted.v, rtol=1e-5, atol=1e-6)
  # What is logged of the classes stays that of the classes.
  plain = _config(superclass_gain=0.0, lambda1=0.0, lambda2=0.0, prior__kind="scaled")
  classes = objectives.make_objective("soprc", plain, _setting())
  assert classes.tracker.init(None).v.shape == (4, 6)
  assert "superclass_soprc" not in classes.compute(_inputs(classes.tracker.init(None))).metrics


def test_idle_arguments_have_the_shapes_of_the_others():
  objective = objectives.make_objective("soprc", _config(), _setting())
  state = objective.tracker.init(None)
  inputs = _inputs(state)
  given, idle = objective.compute(inputs).update_args, objective.idle_args(inputs)
  assert jax.tree.map(jnp.shape, dict(given)) == jax.tree.map(jnp.shape, idle)
  _, moved = objective.tracker.update(None, state, **idle)
  np.testing.assert_array_equal(moved.v, state.v)


def test_v_of_the_batch():
  objective = objectives.make_objective("soprc", _config(v="batch"), _setting())
  outputs = objective.compute(_inputs(optax.EmptyState()))
  assert 0 < outputs.metrics["superclass_soprc"] < 1
  assert np.isfinite(outputs.loss)


def test_weights_count_the_training_images():
  found = superclass_lists.make(_config(), _setting())
  want = np.array([[0.7 * 3, 0.3 * 9], [0.7 * 7, 0.3 * 9], [0.7, 0.3 * 9], [0.7 * 5, 0.3 * 9]])
  np.testing.assert_allclose(found.weights, want / want.sum(axis=1, keepdims=True), rtol=1e-6)
  assert superclass_lists.make(_config(superclass_gain=0.0), _setting()) is None


def test_refusals():
  with pytest.raises(ValueError, match="needs the superclass of each class"):
    objectives.make_objective("soprc", _config(), _setting(None))
  for values in ({"loss.name": "triplet"}, {"data.superclass": ""}):
    config = config_lib.default_config()
    base = {"data.source": "csv", "data.superclass": "kind", "loss.superclass_gain": _GAIN}
    config.update_from_flattened_dict(base | values)
    with pytest.raises(ValueError, match=r"superclass_gain must be 0 without loss\.name=soprc"):
      config_lib.resolve(config)
  for gain in (1.0, -0.1):
    with pytest.raises(ValueError, match="superclass_gain must be 0 or more and below 1"):
      _config(superclass_gain=gain)
