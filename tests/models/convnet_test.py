"""Tests the plain network and the grid of its last feature map."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax.models import ConvNet, EmbeddingNet, convnet, resnet


def _features(images, **settings):
  net = ConvNet(width=4, **settings)
  variables = net.init(jax.random.key(0), images)
  return net, variables, net.apply(variables, images)


@pytest.mark.parametrize(("side", "grid"), [(32, 4), (32, 1), (40, 3)])
def test_features_have_the_width_of_the_grid(side, grid):
  images = jax.random.normal(jax.random.key(1), (2, side, side, 3))
  _, variables, found = _features(images, pool_grid=grid)
  assert found.shape == (2, 16 * grid**2)
  assert set(variables) == {"params"}  # no batch statistics


def test_training_equals_evaluation():
  images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
  net, variables, found = _features(images)
  np.testing.assert_array_equal(found, net.apply(variables, images, train=True))


def test_where_something_is_matters_with_a_grid_only():
  corner = jnp.zeros((1, 64, 64, 3)).at[:, 16:20, 16:20].set(1.0)
  shifted = jnp.roll(corner, 32, axis=(1, 2))
  for grid, same in ((1, True), (4, False)):
    net, variables, found = _features(corner, pool_grid=grid)
    assert np.allclose(found, net.apply(variables, shifted), atol=1e-6) is same


@pytest.mark.parametrize("shape", [(8, 8), (6, 10), (7, 5)])
def test_cells_are_means_of_their_part(shape):
  x = jax.random.normal(jax.random.key(0), (2, *shape, 3))
  found = resnet.grid_pool(x, 2).reshape(2, 2, 2, 3)
  rows, columns = -(-shape[0] // 2), -(-shape[1] // 2)
  np.testing.assert_allclose(found[:, 0, 0], x[:, :rows, :columns].mean(axis=(1, 2)), rtol=1e-5)
  np.testing.assert_allclose(
    found[:, 1, 0], x[:, shape[0] // 2 :, :columns].mean(axis=(1, 2)), rtol=1e-5
  )
  np.testing.assert_array_equal(resnet.grid_pool(x, 1), x.mean(axis=(1, 2)))


def test_a_map_smaller_than_the_grid_raises():
  with pytest.raises(ValueError, match=r"has 3 x 4 points, fewer than model\.pool_grid=4"):
    resnet.grid_pool(jnp.zeros((1, 3, 4, 2)), 4)


def test_embeddings_have_a_gradient():
  net = EmbeddingNet(ConvNet(width=4), embedding_dim=8)
  images = jax.random.randint(jax.random.key(1), (4, 32, 32, 3), 0, 255).astype(jnp.uint8)
  variables = jax.jit(net.init)(jax.random.key(0), images)
  gradient = jax.jit(jax.grad(lambda params: net.apply({"params": params}, images)[:, 0].sum()))
  grads = gradient(variables["params"])
  assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("shape", [(8, 6), (7, 9)])
def test_max_pool_is_that_of_flax(shape):
  x = jax.random.normal(jax.random.key(0), (2, *shape, 3))
  expected = nn.max_pool(x, (2, 2), strides=(2, 2))
  np.testing.assert_array_equal(convnet._max_pool(x), expected)
