"""Tests heads on stored embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax.models import HEADS, Head, l2_normalize

FEATURES = jax.random.normal(jax.random.key(1), (5, 8))


def _made(kind, features=FEATURES, **settings):
  net = Head(kind, hidden=16, embedding_dim=6, **settings)
  variables = net.init(jax.random.key(0), features)
  return net, variables


@pytest.mark.parametrize("kind", HEADS)
def test_embeddings_have_norm_1_whatever_the_scale_of_the_features(kind):
  net, variables = _made(kind)
  found = net.apply(variables, FEATURES)
  assert found.shape == (5, 8 if kind == "residual" else 6)
  np.testing.assert_allclose(jnp.linalg.norm(found, axis=1), 1, rtol=1e-5)
  for factor in (1e-30, 1e-3, 1e4, 1e30):
    np.testing.assert_allclose(net.apply(variables, factor * FEATURES), found, atol=1e-5)
  half = net.apply(variables, FEATURES.astype(jnp.float16))
  np.testing.assert_allclose(half, found, atol=1e-2)


def test_residual_starts_at_the_features():
  net, variables = _made("residual")
  np.testing.assert_allclose(net.apply(variables, FEATURES), l2_normalize(FEATURES), atol=1e-6)
  # The hidden layer has no gradient while the layer behind it is 0; that layer has one.
  slopes = jax.grad(lambda params: jnp.sum(net.apply({"params": params}, FEATURES)[:, 0]))(
    variables["params"]
  )
  assert np.any(slopes["shift"]["kernel"])


def test_layers():
  shapes = {kind: jax.tree.map(jnp.shape, _made(kind)[1]["params"]) for kind in HEADS}
  assert shapes["linear"] == {"head": {"kernel": (8, 6), "bias": (6,)}}
  assert shapes["mlp"] == {
    "hidden": {"kernel": (8, 16), "bias": (16,)},
    "head": {"kernel": (16, 6), "bias": (6,)},
  }
  assert set(shapes["residual"]) == {"branch", "shift"}
  assert shapes["residual"]["shift"]["kernel"] == (16, 8)


def test_a_vector_of_zeros_is_finite():
  net, variables = _made("linear")
  zeros = jnp.zeros((1, 8))
  assert np.isfinite(net.apply(variables, zeros)).all()
  slopes = jax.grad(lambda x: jnp.sum(net.apply(variables, x)))(zeros)
  assert np.isfinite(slopes).all()
