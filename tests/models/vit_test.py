"""Tests vision transformers: names, pools, dtypes, gradients. Parity is in vit_weights_test.py."""

import re

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import vits

from soprc_jax.models import EmbeddingNet, vit

_ARCH = vit.Architecture(image_size=16, patch=8, width=16, depth=2, heads=2, mlp=24)


def _network(arch=_ARCH, **values):
  return EmbeddingNet(vit.ViT(arch, **values), embedding_dim=0)


def _variables(arch=_ARCH):
  images = jax.ShapeDtypeStruct((1, 16, 16, 3), np.uint8)
  return networks.drawn(jax.eval_shape(_network(arch).init, jax.random.key(0), images))


def _names(arch):
  leaves = jax.tree_util.tree_leaves_with_path(_variables(arch)["params"]["backbone"])
  return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


def test_names_of_the_parameters_are_stable():
  """Checks the names that checkpoints, learning rates by layer and adapters rely on."""
  block = {f"attn/{name}/{leaf}" for name in ("q", "k", "v", "out") for leaf in ("kernel", "bias")}
  block |= {f"mlp/{name}/{leaf}" for name in ("fc1", "fc2") for leaf in ("kernel", "bias")}
  block |= {f"{name}/{leaf}" for name in ("norm1", "norm2") for leaf in ("scale", "bias")}
  names = {f"blocks_{index}/{name}" for index in range(2) for name in block}
  names |= {"patch_embed/kernel", "patch_embed/bias", "pos_embed", "class_token"}
  names |= {"norm/scale", "norm/bias"}
  assert _names(_ARCH) == names
  more = {"layer_scale": 0.1, "registers": 2, "pre_norm": True, "projection": 4}
  scales = {f"blocks_{index}/layer_scale{part}" for index in range(2) for part in (1, 2)}
  got = _names(_ARCH._replace(activation="swiglu", pool="attention", **more))
  assert scales | {"registers", "pre_norm/scale", "projection/kernel", "pool/probe"} < got
  assert "blocks_1/mlp/gate/kernel" in got
  assert "patch_embed/bias" not in got
  rotary = _names(_ARCH._replace(rope=100.0))
  assert names - rotary == {"pos_embed", "blocks_0/attn/k/bias", "blocks_1/attn/k/bias"}


@pytest.mark.parametrize("pool", vit.POOLS)
def test_every_pool_sees_all_patches_and_no_other_image(pool):
  arch = _ARCH._replace(pool=pool, registers=1)
  variables, images = _variables(arch), vits.pictures(16, 2)
  embed = jax.jit(_network(arch).apply)
  before = embed(variables, images)
  assert before.shape == (2, 16)
  np.testing.assert_allclose(np.linalg.norm(before, axis=1), 1, rtol=1e-5)
  for row, column in ((0, 0), (15, 15)):
    changed = images.copy()
    changed[0, row, column] ^= 255
    after = embed(variables, changed)
    assert np.abs(after[0] - before[0]).max() > 1e-5
    np.testing.assert_allclose(after[1], before[1], atol=1e-7)


def test_mean_is_that_of_the_patches():
  # Without blocks and with a mean of all tokens, the class token and the registers would show.
  arch = _ARCH._replace(pool="mean", depth=0, registers=3)
  variables, images = _variables(arch), vits.pictures(16, 2)
  want = _network(arch).apply(variables, images)
  params = variables["params"]["backbone"]
  params |= {name: 100 * params[name] for name in ("class_token", "registers")}
  np.testing.assert_array_equal(_network(arch).apply(variables, images), want)


def test_normalization_is_that_of_the_architecture():
  images, variables = vits.pictures(16, 2), _variables()
  net = EmbeddingNet(vit.ViT(_ARCH), embedding_dim=0, mean=(0.5,) * 3, std=(0.25,) * 3)
  pixels = jnp.float32((images / 255 - 0.5) / 0.25)
  inner = vit.ViT(_ARCH).apply({"params": variables["params"]["backbone"]}, pixels)
  want = inner / jnp.linalg.norm(inner, axis=1, keepdims=True)
  np.testing.assert_allclose(net.apply(variables, images), want, atol=1e-6)
  other = _network().apply(variables, images)
  assert np.abs(other - want).max() > 1e-3


def test_bfloat16_computes_nearly_the_same_with_float32_parameters():
  arch = _ARCH._replace(layer_scale=1.0, pool="attention", activation="gelu_tanh")
  variables, images = _variables(arch), vits.pictures(16, 4)
  want = _network(arch).apply(variables, images)
  half = vit.ViT(arch, dtype=jnp.bfloat16)
  features = half.apply({"params": variables["params"]["backbone"]}, jnp.ones((1, 16, 16, 3)))
  assert features.dtype == jnp.bfloat16
  got = _network(arch, dtype=jnp.bfloat16).apply(variables, images)
  assert got.dtype == jnp.float32
  assert 0 < np.abs(got - want).max() < 0.05
  made = jax.eval_shape(half.init, jax.random.key(0), jnp.ones((1, 16, 16, 3)))
  assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}


def _gradient(images, **values):
  arch = _ARCH._replace(rope=100.0, depth=3)
  net = _network(arch, **values)

  def loss(params):
    embeddings = net.apply({"params": params}, images)
    return jnp.sum(embeddings[0] * embeddings[1])

  return jax.make_jaxpr(jax.grad(loss))(_variables(arch)["params"]), jax.jit(jax.grad(loss))(
    _variables(arch)["params"]
  )


def test_remat_gives_the_same_gradient():
  images = vits.pictures(16, 2)
  (graph, want), (with_remat, got) = (_gradient(images, remat=remat) for remat in (False, True))
  found = [bool(re.search("remat|checkpoint", str(one))) for one in (graph, with_remat)]
  assert found == [False, True]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
  norms = [float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want)]
  assert min(norms) > 0


def test_images_smaller_than_a_patch_raise():
  with pytest.raises(ValueError, match=r"images of 4 x 16 pixels are smaller.*model\.vit\.patch=8"):
    vit.ViT(_ARCH).init(jax.random.key(0), jnp.zeros((1, 4, 16, 3)))
