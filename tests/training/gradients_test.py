"""Tests microbatches: the gradient of the whole batch in the memory of a part of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import estimators, lists
from soprc_jax.models import RESNETS, EmbeddingNet, ResNet
from soprc_jax.training import config as config_lib
from soprc_jax.training import gradients, objectives, optimizers, parallel
from soprc_jax.training import step as step_lib

_BATCH, _SIZE = 224, 8
_NET = EmbeddingNet(ResNet((1, 1), False, width=4, stem="small"), embedding_dim=8)


_LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(56), 4))


def _loss(embeddings, scale, labels):
  embeddings = embeddings * scale
  found = lists.retrieval_lists(embeddings, labels, max_positives=3)
  masks = {"positive_where": found.positive_where, "negative_where": found.negative_where}
  return estimators.ap_loss(found.positive_scores, found.negative_scores, **masks), {
    "scores": found.positive_scores
  }


@functools.cache
def _problem():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (_BATCH, _SIZE, _SIZE, 3), np.uint8)
  variables = jax.jit(_NET.init)(jax.random.key(0), images[:1])

  def embed(params, images):
    return _NET.apply({"params": params, "batch_stats": variables["batch_stats"]}, images)

  params = variables["params"], jnp.linspace(0.9, 1.1, 8)[None]
  return images, params, embed, functools.partial(_loss, labels=_LABELS)


@functools.cache
def _whole():
  images, params, embed, loss_fn = _problem()

  def loss(params, scale):
    return loss_fn(embed(params, images), scale)

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*params)


@pytest.mark.parametrize("size", [1, 8, 32, 224])
def test_gradient_is_that_of_the_whole_batch(size):
  images, params, embed, loss_fn = _problem()
  got = jax.jit(lambda *p: gradients.by_microbatches(embed, loss_fn, *p, images, size=size))(
    *params
  )
  (want_loss, want_aux), want_gradient = _whole()
  (loss, aux), gradient = got
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
  np.testing.assert_allclose(aux["scores"], want_aux["scores"], atol=1e-5)
  for leaf, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
    np.testing.assert_allclose(leaf, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_it_is_not_the_mean_of_the_microbatches_own_losses():
  # Gradient accumulation would descend another loss, since the lists of a microbatch are shorter.
  images, (params, scale), embed, _ = _problem()
  order = np.argsort(_LABELS, kind="stable")  # whole classes in each part
  parts = [
    _loss(embed(params, images[part]), scale, _LABELS[part])[0] for part in np.split(order, 4)
  ]
  assert abs(float(np.mean(parts)) - float(_whole()[0][0])) > 0.02


def test_size_that_does_not_divide_the_batch():
  images, params, embed, loss_fn = _problem()
  with pytest.raises(ValueError, match="microbatches of 9 images do not divide a batch of 224"):
    gradients.by_microbatches(embed, loss_fn, *params, images, size=9)


def _temporaries(batch_size, microbatch, *, side=224):
  """Returns the bytes of temporaries that XLA plans for a step of ResNet-50 with SOPRC. Images
  arrive as uint8.
  """
  config = config_lib.resolve(config_lib.default_config())
  setting = objectives.Setting(
    np.full(1000, 5), num_steps=30, max_positives=3, axis_name=parallel.AXIS_NAME, embedding_dim=512
  )
  objective = objectives.make_objective("soprc", config.loss, setting)
  stages, bottleneck = RESNETS["resnet50"]
  model = EmbeddingNet(ResNet(stages, bottleneck), embedding_dim=512)
  tx = optax.chain(objective.tracker, optimizers.make_optimizer(config))
  step = functools.partial(
    step_lib.train_step,
    model=model,
    tx=tx,
    objective=objective,
    carrier=objective,
    first_step=0,
    masked=False,
    axis_name=parallel.AXIS_NAME,
    microbatch=microbatch,
  )
  like = jax.ShapeDtypeStruct((1, side, side, 3), np.uint8)
  state = jax.eval_shape(lambda: step_lib.init_state(model, tx, key=jax.random.key(0), like=like))
  batch = {
    "image": jax.ShapeDtypeStruct((batch_size, side, side, 3), np.uint8),
    "label": jax.ShapeDtypeStruct((batch_size,), np.int32),
    "where": jax.ShapeDtypeStruct((batch_size,), bool),
  }
  mapped = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), (state, batch)
  )
  compiled = jax.pmap(
    step, axis_name=parallel.AXIS_NAME, devices=jax.devices()[:1], donate_argnums=0
  ).lower(*mapped)
  return compiled.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_resnet50_is_that_of_a_microbatch():
  want = _temporaries(64, 0)
  assert _temporaries(1024, 64) <= 1.2 * want
