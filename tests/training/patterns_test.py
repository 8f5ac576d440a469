"""Tests relevance by label sets on the devices, and every loss with it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax import losses
from soprc_jax.data import label_sets
from soprc_jax.training import baselines, loss_protocol, objectives, patterns
from soprc_jax.training import config as config_lib

_WORKING = [name for name in objectives.LOSSES if name not in baselines.ONE_CLASS]
_ALL = [set(names) for size in (1, 2, 3) for names in itertools.combinations("abcdefg"[:5], size)]


def _made(least=0.0, *, num_images=200, seed=0):
  """Returns the label sets, the pattern of each training image, and the patterns of the run."""
  sets = label_sets.LabelSets(
    {10 + 3 * i: sorted(one) for i, one in enumerate(_ALL)}, label_sets.Rule(";", least)
  )
  drawn = np.random.default_rng(seed).integers(len(_ALL) - 4, size=num_images)
  labels = 10 + 3 * drawn  # the last four patterns are of other splits
  return sets, labels, patterns.make(sets, labels)


def _wanted(rows, others, least=0.0):
  def relevant(one, other):
    shared, union = len(one & other), len(one | other)
    return shared / union >= least if least else shared > 0

  return np.array([[relevant(_ALL[a], _ALL[b]) for b in others] for a in rows])


@pytest.mark.parametrize("least", [0.0, 1 / 3, 0.5, 2 / 3, 1.0])
def test_relevance_is_that_of_sets(least):
  sets, labels, of_data = _made(least)
  rows, others = np.random.default_rng(1).integers(len(_ALL) - 4, size=(2, 40))
  found = jax.jit(of_data.relevant)(jnp.asarray(rows), jnp.asarray(others[:30]))
  np.testing.assert_array_equal(found, _wanted(rows, others[:30], least))
  np.testing.assert_array_equal(found, sets.relevant(10 + 3 * rows, 10 + 3 * others[:30]))
  everyone = (labels - 10) // 3
  np.testing.assert_array_equal(
    of_data.num_relevant, _wanted(range(len(_ALL) - 4), everyone, least).sum(axis=1)
  )


def test_json_holds_all():
  _, _, of_data = _made(0.5)
  again = patterns.from_json(of_data.to_json())
  for name, value in of_data._asdict().items():
    np.testing.assert_array_equal(getattr(again, name), value)
  assert of_data.overlaps
  assert of_data.smallest == again.smallest > 0


def _objective(name, of_data, *, axis_name=None, batch=16, num_images=200, **values):
  config = config_lib.default_config()
  config.loss.name = name
  config.update_from_flattened_dict({"loss.num_points": 9, "train.batch_size": batch} | values)
  setting = loss_protocol.Setting(
    np.full(len(of_data.members), num_images // len(of_data.members)),
    num_steps=10,
    max_positives=batch - 1,
    axis_name=axis_name,
    embedding_dim=6,
    seed=0,
    patterns=of_data,
  )
  return objectives.make_objective(name, config_lib.resolve(config).loss, setting)


def _batch(seed=2, batch=16):
  rng = np.random.default_rng(seed)
  embeddings = rng.normal(size=(batch, 6)).astype(np.float32)
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  rows = rng.integers(len(_ALL) - 4, size=batch).astype(np.int32)
  where = np.arange(batch) != 5
  return embeddings, rows, where


def _computed(objective, embeddings, rows, where):
  """Returns the loss, its gradient, the metrics, and the carried state after the step."""
  state = objective.tracker.init({})
  params = objective.init_params(jax.random.key(0))

  def loss(embeddings):
    inputs = loss_protocol.Inputs(
      embeddings, rows, where, jnp.zeros([], jnp.int32), (state,), params
    )
    found = objective.compute(inputs)
    return found.loss, found

  (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(embeddings)
  _, after = objective.tracker.update({}, state, {}, **found.update_args)
  return value, gradient, found.metrics, after


@pytest.mark.parametrize("name", _WORKING)
def test_two_devices_equal_one(name):
  _, _, of_data = _made()
  batch = _batch()
  one = jax.jit(functools.partial(_computed, _objective(name, of_data)))(*batch)
  objective = _objective(name, of_data, axis_name="devices")
  parts = [array.reshape(2, -1, *array.shape[1:]) for array in batch]
  value, gradient, metrics, after = jax.pmap(
    functools.partial(_computed, objective), axis_name="devices"
  )(*parts)
  np.testing.assert_allclose(value, np.full(2, one[0]), rtol=1e-5)
  # Each device has the gradient of the whole loss by its own images, times the number of devices.
  np.testing.assert_allclose(np.asarray(gradient).reshape(16, 6) / 2, one[1], rtol=1e-4, atol=1e-6)
  for key, wanted in one[2].items():
    np.testing.assert_allclose(metrics[key], np.full(2, wanted), rtol=1e-5, err_msg=key)
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6),
    after,
    one[3],
  )


@pytest.mark.parametrize("name", _WORKING)
def test_the_loss_takes_the_mask(name):
  """Checks that a label which two images share counts, by another rule with other labels."""
  embeddings, rows, where = _batch()
  found = {
    least: float(_computed(_objective(name, _made(least)[2]), embeddings, rows, where)[0])
    for least in (0.0, 1.0)
  }
  assert found[0.0] != pytest.approx(found[1.0], rel=1e-4)
  # Equal sets only: the patterns are classes.
  plain = _objective(name, _made(1.0)[2])
  labels = _objective_of_classes(name)
  np.testing.assert_allclose(
    _computed(plain, embeddings, rows, where)[0],
    _computed(labels, embeddings, rows, where)[0],
    rtol=1e-5,
  )


def _objective_of_classes(name):
  config = config_lib.default_config()
  config.loss.name = name
  config.update_from_flattened_dict({"loss.num_points": 9, "train.batch_size": 16})
  _, labels, _ = _made()
  counts = np.unique(labels, return_counts=True)[1]
  setting = loss_protocol.Setting(
    counts, num_steps=10, max_positives=15, axis_name=None, embedding_dim=6, seed=0
  )
  return objectives.make_objective(name, config_lib.resolve(config).loss, setting)


def test_the_loss_is_that_of_the_library():
  _, _, of_data = _made()
  embeddings, rows, where = _batch()
  mask = _wanted(rows, rows)
  for name, function in (
    ("contrastive", losses.contrastive_loss),
    ("multi_similarity", losses.multi_similarity_loss),
    ("sup_con", losses.sup_con_loss),
  ):
    found = _computed(_objective(name, of_data), embeddings, rows, where)[0]
    np.testing.assert_allclose(found, function(embeddings, positives=mask, where=where), rtol=1e-6)


def test_xbm_compares_with_its_memory_by_labels():
  """Checks the loss of a second batch against plain loops over the memory of both."""
  _, _, of_data = _made()
  objective = _objective("xbm", of_data, **{"loss.xbm.memory_size": 64})
  first, second = _batch(3), _batch(4)
  state = objective.tracker.init({})
  for embeddings, rows, where in (first, second):
    inputs = loss_protocol.Inputs(
      jnp.asarray(embeddings), jnp.asarray(rows), jnp.asarray(where), jnp.int32(0), (state,)
    )
    found = objective.compute(inputs)
    _, state = objective.tracker.update({}, state, {}, **found.update_args)
  kept = [(e, r) for batch in (first, second) for e, r, w in zip(*batch) if w]
  total = 0.0
  for embedding, row, valid in zip(*second):
    for other, of_other in kept if valid else ():
      score = float(np.float64(embedding) @ np.float64(other))
      if other is embedding or np.array_equal(other, embedding):
        continue
      if _ALL[row] & _ALL[of_other]:
        total += 1 - score
      else:
        total += max(score - 0.5, 0.0)
  np.testing.assert_allclose(found.loss, total / second[2].sum(), rtol=1e-5)


def test_the_prior_is_the_share_of_relevant_images():
  _, labels, of_data = _made()
  wanted = (_wanted((labels - 10) // 3, (labels - 10) // 3).sum(axis=1) - 1) / (len(labels) - 1)
  setting = loss_protocol.Setting(
    np.unique(labels, return_counts=True)[1], 10, 15, None, patterns=of_data
  )
  config = config_lib.ConfigDict(
    {"kind": "frequency", "value": 0.0, "start": 0.0, "shape": "log", "until": 1.0}
  )
  prior = objectives.make_prior(config, setting)
  rows = np.unique(labels, return_inverse=True)[1]
  np.testing.assert_allclose(prior(jnp.int32(0), jnp.asarray(rows), None), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", baselines.ONE_CLASS)
def test_losses_that_need_classes_name_those_that_do_not(name):
  with pytest.raises(ValueError, match=rf"{name} needs one class an image .*choose one of soprc, "):
    _objective(name, _made()[2])


def _by_labels(config, setting):
  """Returns a custom loss that forgets the mask."""

  def compute(inputs):
    loss = losses.sup_con_loss(inputs.embeddings, inputs.labels, where=inputs.where)
    return loss_protocol.Outputs(loss, {}, {})

  del config, setting
  return objectives.Objective(objectives.optax.identity(), compute)


def _by_mask(config, setting):
  del config
  return baselines.stateless(losses.sup_con_loss, setting)


def test_a_custom_loss_must_take_the_mask(monkeypatch):
  _, _, of_data = _made()
  config = config_lib.resolve(config_lib.default_config()).loss
  own = {"own:labels": _by_labels, "own:mask": _by_mask}
  monkeypatch.setattr(objectives, "_factory", own.__getitem__)
  monkeypatch.setattr(objectives, "name_problem", lambda name: None)
  objectives.check("own:mask", config, of_data)
  objectives.check("own:labels", config)
  with pytest.raises(ValueError, match="does not depend on inputs"):
    objectives.check("own:labels", config, of_data)
