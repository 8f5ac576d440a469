"""Tests the loss that compares carried, batch and exact v in the same batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.ablate import exact_v
from soprc_jax import tracking
from soprc_jax.training import config as config_lib
from soprc_jax.training import objectives

_LABELS = np.repeat([0, 1, 2], 4)
_WHERE = np.arange(12) != 0  # the first image of class 0 is missing
_DIM = 5


def _setting(axis_name=None):
  return objectives.Setting(
    np.full(3, 4), num_steps=10, max_positives=3, axis_name=axis_name, embedding_dim=_DIM
  )


def _config(images, *, exact, v):
  config = config_lib.default_config()
  config.loss.custom.update({"images": images, "exact": exact})
  config.loss.update({"v": v, "pull": 2.0})
  return config_lib.resolve(config).loss


def _compute(images, *, exact=False, v="batch", name=None):
  """Returns the loss, its gradient, and v after one update."""
  config = _config(images, exact=exact, v=v)
  make = objectives.LOSSES[name] if name else exact_v.objective
  objective = make(config, _setting())
  tx = optax.chain(objective.tracker)
  state = tx.init({})
  vectors = np.random.default_rng(0).standard_normal((12, _DIM))
  vectors = jnp.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

  def loss(embeddings):
    inputs = objectives.Inputs(
      embeddings, jnp.array(_LABELS), jnp.array(_WHERE), jnp.int32(5), state
    )
    outputs = objective.compute(inputs)
    return outputs.loss, outputs.update_args

  (value, args), slopes = jax.value_and_grad(loss, has_aux=True)(vectors)
  _, state = tx.update({}, state, **args)
  return value, slopes, state


def test_first_of_class_counts_valid_images():
  labels, where = np.random.default_rng(1).integers(0, 4, 40), np.arange(40) % 3 > 0
  found = exact_v.first_of_class(jnp.array(labels), jnp.array(where), 2)
  wanted, seen = [], {}
  for label, valid in zip(labels, where, strict=True):
    seen[label] = seen.get(label, 0) + bool(valid)
    wanted.append(bool(valid) and seen[label] <= 2)
  assert found.tolist() == wanted


@pytest.mark.parametrize(("exact", "v"), [(False, "carried"), (False, "batch"), (True, "batch")])
def test_with_all_images_it_is_soprc(exact, v):
  value, slopes, _ = _compute(4, exact=exact, v=v)
  wanted, wanted_slopes, _ = _compute(4, v=v, name="soprc")
  np.testing.assert_allclose(value, wanted, rtol=1e-6)
  np.testing.assert_allclose(slopes, wanted_slopes, rtol=1e-5, atol=1e-7)


def test_the_other_images_of_a_class_are_in_v_alone():
  exact, slopes, _ = _compute(2, exact=True)
  batch, batch_slopes, _ = _compute(2)
  assert exact != batch
  used = np.flatnonzero(exact_v.first_of_class(jnp.array(_LABELS), jnp.array(_WHERE), 2))
  for gradient in (slopes, batch_slopes):
    assert set(np.flatnonzero(np.any(gradient, axis=1))) <= set(used)


def test_v_is_carried_only_where_it_is_used():
  states = [_compute(2, v="carried")[2], _compute(2, exact=True)[2]]
  assert tracking.find_state(states[0]).weight.tolist() == [pytest.approx(0.1)] * 3
  with pytest.raises(ValueError, match="found 0"):
    tracking.find_state(states[1])


def test_several_devices_are_refused():
  with pytest.raises(ValueError, match="for one device"):
    exact_v.objective(_config(2, exact=True, v="batch"), _setting("devices"))
