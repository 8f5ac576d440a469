"""Tests embeddings: normalization that is safe at zero, and float32 in any precision."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import tiny_nets

from soprc_jax.models import EmbeddingNet, ResNet, l2_normalize


class PrecisionTest(chex.TestCase):
  def test_bfloat16_computes_in_bfloat16_and_embeds_in_float32(self):
    images, variables = tiny_nets.images(6), tiny_nets.variables()
    net = EmbeddingNet(
      ResNet((1,), False, width=4, stem="small", dtype=jnp.bfloat16), 8, jnp.bfloat16
    )
    fresh = jax.eval_shape(net.init, jax.random.key(0), images)
    self.assertEqual({leaf.dtype for leaf in jax.tree.leaves(fresh)}, {jnp.dtype(jnp.float32)})
    embeddings, state = jax.jit(functools.partial(net.apply, capture_intermediates=True))(
      variables, images
    )
    inner = state["intermediates"]
    self.assertEqual(inner["backbone"]["__call__"][0].dtype, jnp.bfloat16)
    self.assertEqual(inner["head"]["__call__"][0].dtype, jnp.bfloat16)
    self.assertEqual(embeddings.dtype, jnp.float32)
    np.testing.assert_allclose(
      np.linalg.norm(embeddings, axis=1), 1, atol=1e-6
    )  # normalized after the cast
    np.testing.assert_allclose(
      embeddings, jax.jit(tiny_nets.tiny().apply)(variables, images), atol=0.03
    )


class NormalizeTest(chex.TestCase):
  def test_unit_norm_in_any_range(self):
    vectors = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32)
    for scale in (1e-8, 1.0, 1e8, 1e25, 1e37):  # the square of the last two is infinite
      got = l2_normalize(jnp.asarray(vectors * np.float32(scale)))
      np.testing.assert_allclose(
        got, vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), rtol=1e-5
      )

  @parameterized.parameters(jnp.float32, jnp.bfloat16, jnp.float16)
  def test_f25_zero_vector_has_value_and_gradient_zero(self, dtype):
    vectors = jnp.array([[0.0, 0.0], [3.0, 4.0]], dtype)
    np.testing.assert_array_equal(l2_normalize(vectors)[0], 0)
    jacobian = jax.jacobian(l2_normalize)(vectors).astype(jnp.float32)
    np.testing.assert_array_equal(jacobian[0], 0)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    np.testing.assert_allclose(
      jacobian[1, :, 1], np.array([[16, -12], [-12, 9]]) / 125, rtol=tolerance
    )
    # Masked later: 0 times the gradient.
    masked = jax.grad(
      lambda x: jnp.sum(jnp.where(jnp.array([[False], [True]]), l2_normalize(x), 0)[:, 0])
    )(vectors)
    self.assertTrue(np.isfinite(np.float32(masked)).all())
    np.testing.assert_array_equal(np.float32(masked)[0], 0)

  def test_f25_zero_embedding_of_a_network_trains_on(self):
    # A head of zeros embeds every image at 0: finite values and gradients, masked or not.
    variables = tiny_nets.variables()
    params = {
      **variables["params"],
      "head": jax.tree.map(jnp.zeros_like, variables["params"]["head"]),
    }

    def loss(params):
      return jnp.sum(tiny_nets.tiny().apply({**variables, "params": params}, tiny_nets.images(2)))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    self.assertEqual(value, 0)
    chex.assert_tree_all_finite(grads)
