"""Tests the convolutions that CPUs compute as products, and the pooling.

XLA's own ones are the reference, gradients included.
"""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax.models import RESNETS, EmbeddingNet, ResNet, convolutions, resnet

_LAYERS = (  # height, width, channels in and out, size, stride
  ("1x1", 5, 7, 6, 4, 1, 1),
  ("1x1_wider", 5, 7, 4, 6, 1, 1),
  ("1x1_stride_2", 7, 6, 4, 6, 1, 2),
  ("winograd_of_4", 8, 8, 16, 20, 3, 1),
  ("winograd_of_4_cut", 7, 9, 20, 16, 3, 1),
  ("winograd_of_2", 4, 4, 16, 16, 3, 1),
  ("winograd_of_2_cut", 3, 1, 16, 16, 3, 1),
  ("few_channels", 6, 5, 3, 16, 3, 1),
  ("stride_2", 8, 8, 4, 6, 3, 2),
  ("stride_2_odd", 9, 7, 16, 6, 3, 2),
  ("one_pixel", 1, 1, 4, 6, 3, 2),
  ("stem", 16, 15, 3, 8, 7, 2),
  ("stem_odd", 9, 12, 3, 8, 7, 2),
)


def _reference_pool(x):
  margin = ((0, 0), (1, 1), (1, 1), (0, 0))
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), margin)


def _arrays(height, width, channels_in, channels_out, size, dtype=np.float32):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, height, width, channels_in)).astype(dtype)
  return x, rng.standard_normal((size, size, channels_in, channels_out)).astype(dtype)


def _value_and_pull_back(function, *args):
  value, pull_back = jax.vjp(function, *args)
  slopes = np.random.default_rng(1).standard_normal(value.shape).astype(value.dtype)
  return value, *pull_back(jnp.asarray(slopes))


def _assert_close(got, want, tolerance):
  """Checks an error relative to the largest entry."""
  np.testing.assert_allclose(
    np.asarray(got, np.float64),
    np.asarray(want, np.float64),
    rtol=0,
    atol=tolerance * np.abs(want).max(),
  )


class ConvolveTest(chex.TestCase):
  @parameterized.named_parameters(*_LAYERS)
  def test_value_and_gradients_float32(
    self, height, width, channels_in, channels_out, size, stride
  ):
    arrays = _arrays(height, width, channels_in, channels_out, size)
    got = _value_and_pull_back(functools.partial(convolutions.convolve, stride=stride), *arrays)
    want = _value_and_pull_back(functools.partial(convolutions.by_xla, stride=stride), *arrays)
    for one, other in zip(got, want, strict=True):
      self.assertEqual((one.shape, one.dtype), (other.shape, jnp.float32))
      _assert_close(one, other, 1e-5)

  @parameterized.named_parameters(*_LAYERS)
  def test_value_and_gradients_float64(
    self, height, width, channels_in, channels_out, size, stride
  ):
    with jax.enable_x64(True):
      arrays = _arrays(height, width, channels_in, channels_out, size, np.float64)
      got = _value_and_pull_back(functools.partial(convolutions.convolve, stride=stride), *arrays)
      want = _value_and_pull_back(functools.partial(convolutions.by_xla, stride=stride), *arrays)
    for one, other in zip(got, want, strict=True):
      _assert_close(one, other, 1e-13)

  def test_bfloat16_is_not_winograds(self):
    # Winograd's tiles in bfloat16 would be wrong in the first digit.
    x, kernel = (jnp.asarray(array, jnp.bfloat16) for array in _arrays(8, 8, 16, 16, 3))
    got = convolutions.convolve(x, kernel)
    self.assertEqual(got.dtype, jnp.bfloat16)
    _assert_close(got, convolutions.by_xla(x, kernel), 1e-6)

  def test_on_cpus_they_are_no_convolutions(self):
    x, kernel = _arrays(8, 8, 16, 16, 3)
    for name, function in (("products", convolutions.convolve), ("xla", convolutions.by_xla)):
      text = jax.make_jaxpr(function)(x, kernel).pretty_print()
      self.assertEqual("conv_general_dilated" in text, name == "xla")
    self.assertEqual(convolutions.implementation("float32"), "products")
    self.assertEqual(convolutions.implementation("bfloat16"), "xla")

  def test_winograd_saves_multiplications(self):
    # 36 products per tile instead of 144, plus the transforms.
    x, kernel = _arrays(16, 16, 128, 128, 3)
    ours = jax.jit(convolutions.convolve).lower(x, kernel).compile().cost_analysis()["flops"]
    self.assertLess(ours, 0.4 * 2 * 9 * x.size * kernel.shape[3])


class MaxPoolTest(chex.TestCase):
  @parameterized.product(size=((8, 8), (7, 9), (1, 1), (2, 5)), levels=(2, 1000))
  def test_value_and_gradient_with_and_without_ties(self, size, levels):
    x = np.random.default_rng(0).integers(0, levels, (2, *size, 3)).astype(np.float32)
    got, got_grad = _value_and_pull_back(resnet._max_pool, x)
    want, want_grad = _value_and_pull_back(_reference_pool, x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got_grad, want_grad, atol=1e-6)

  def test_the_whole_gradient_of_a_tie_goes_to_the_first_pixel(self):
    _, pull_back = jax.vjp(resnet._max_pool, jnp.ones((1, 4, 4, 1)))
    (grad,) = pull_back(jnp.array([[[[1.0], [2.0]], [[3.0], [4.0]]]]))
    want = [[1, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(grad[0, :, :, 0], want)

  def test_negative_pixels_at_the_border(self):
    np.testing.assert_array_equal(resnet._max_pool(-jnp.ones((1, 3, 3, 1))), -np.ones((1, 2, 2, 1)))


def _net(**settings):
  return EmbeddingNet(ResNet(*RESNETS["resnet50"], **settings), embedding_dim=8)


def _variables(images):
  """Returns random weights, with the statistics of the batch as running statistics. 50 layers then
  keep their scale.
  """
  net = _net(freeze_bn=False)
  old = jax.jit(net.init)(jax.random.key(0), images[:1])
  _, moved = jax.jit(functools.partial(net.apply, train=True, mutable=["batch_stats"]))(old, images)
  stats = jax.tree.map(
    lambda new, start: 10 * (new - 0.9 * start), moved["batch_stats"], old["batch_stats"]
  )
  return {"params": old["params"], "batch_stats": stats}


def _embeddings_and_gradients(net, variables, images):
  def loss(params):
    embeddings = net.apply({**variables, "params": params}, images, train=True)
    slopes = np.random.default_rng(2).standard_normal(embeddings.shape).astype(np.float32)
    return jnp.sum(embeddings * slopes), embeddings

  (_, embeddings), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
  return embeddings, grads


@pytest.mark.slow
def test_resnet50_has_the_gradient_of_xlas_convolutions():
  # In float64. In float32, fifty layers of random weights turn rounding into other signs of relu,
  # for any convolutions.
  with jax.enable_x64(True):
    images = np.random.default_rng(1).integers(0, 256, (3, 40, 40, 3), np.uint8)
    variables, net = _variables(images), _net(dtype=jnp.float64)
    embeddings, grads = _embeddings_and_gradients(net, variables, images)
    plain = _net(dtype=jnp.float64, convolve=convolutions.by_xla)
    want_embeddings, want_grads = _embeddings_and_gradients(plain, variables, images)
  assert np.abs(want_embeddings).max() > 0.1
  np.testing.assert_allclose(embeddings, want_embeddings, atol=1e-5)
  chex.assert_trees_all_equal_structs(grads, want_grads)
  for path, want in jax.tree_util.tree_leaves_with_path(want_grads):
    got = functools.reduce(lambda node, key: node[key.key], path, grads)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 1e-4, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("quantity", ["flops", "temp"])
def test_cost_of_a_step_is_linear_in_the_batch(quantity):
  net = EmbeddingNet(ResNet((1, 1), True, width=16), embedding_dim=8)
  variables = jax.eval_shape(
    net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.uint8)
  )

  def cost(count):
    images = jax.ShapeDtypeStruct((count, 64, 64, 3), jnp.uint8)
    step = jax.grad(
      lambda params, stats, x: jnp.sum(net.apply({"params": params, "batch_stats": stats}, x)[:, 0])
    )
    compiled = jax.jit(step).lower(variables["params"], variables["batch_stats"], images).compile()
    return (
      compiled.cost_analysis()["flops"]
      if quantity == "flops"
      else compiled.memory_analysis().temp_size_in_bytes
    )

  small, middle, large = cost(16), cost(32), cost(64)
  # Each image adds the same cost. A constant part (of the kernels) is allowed, superlinear growth
  # is not.
  assert middle < large <= 2.05 * middle
  np.testing.assert_allclose(large - middle, 2 * (middle - small), rtol=0.05)
