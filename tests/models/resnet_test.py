"""Tests ResNets: torchvision's architecture and numbers, and the modes of batch norm."""

import functools
import json

from absl.testing import parameterized
import authors
import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import pytest
import tiny_nets
import torchvision_rule

from soprc_jax.models import RESNETS, EmbeddingNet, ResNet, embedding, pretrained

_ARCHS = ("resnet18", "resnet50")
# torchvision's documented number of parameters with the 1000 classes of ImageNet, and the width of
# the features.
_TORCHVISION = {
  "resnet18": (11_689_512, 512),
  "resnet34": (21_797_672, 512),
  "resnet50": (25_557_032, 2048),
  "resnet101": (44_549_160, 2048),
}


def _json(key):
  return json.loads(str(authors.archive("resnet")[key]))


@functools.cache
def _golden_variables(arch):
  return pretrained.to_flax(torchvision_rule.state_dict(_json(f"{arch}/state_dict")))


def _backbone_variables(variables):
  return {name: tree["backbone"] for name, tree in variables.items()}


def _net(arch, **settings):
  stages, bottleneck = RESNETS[arch]
  return EmbeddingNet(ResNet(stages, bottleneck, **settings))


def _shapes(net, size=(64, 64)):
  images = jax.ShapeDtypeStruct((2, *size, 3), jnp.uint8)
  return jax.eval_shape(net.init, jax.random.key(0), images)


def _num_parameters(tree):
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _raw_pixels(normalised):
  """Returns the pixel values that `EmbeddingNet` turns into the given normalized ones."""
  return (normalised * np.array(embedding.IMAGE_STD) + np.array(embedding.IMAGE_MEAN)) * 255


def _head(net, variables, images):
  """Returns the output of the linear head, before the normalization."""
  _, state = net.apply(
    variables, images, capture_intermediates=lambda module, _: module.name == "head"
  )
  return state["intermediates"]["head"]["__call__"][0]


def _assert_close(got, want, tolerance):
  """Checks an error relative to the largest entry."""
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


class ArchitectureTest(chex.TestCase):
  @parameterized.parameters(*_TORCHVISION)
  def test_number_of_parameters_is_torchvisions(self, arch):
    total, width = _TORCHVISION[arch]
    want = total - (width + 1) * 1000 + (width + 1) * 512
    self.assertEqual(_num_parameters(_shapes(_net(arch))["params"]), want)

  def test_number_of_parameters_of_the_small_network(self):
    stem = 7 * 7 * 3 * 64 + 2 * 64

    def block(width_in, width):
      shortcut = (width_in * width + 2 * width) if width_in != width else 0
      return 9 * width_in * width + 9 * width * width + 4 * width + shortcut

    want = stem + block(64, 64) + block(64, 128) + block(128, 256) + (256 + 1) * 512
    self.assertEqual(_num_parameters(_shapes(_net("resnet8"))["params"]), want)

  @parameterized.parameters(*_ARCHS)
  def test_parameter_names_and_shapes_are_torchvisions(self, arch):
    want = jax.tree.map(np.shape, _golden_variables(arch))
    got = jax.tree.map(lambda leaf: leaf.shape, _shapes(_net(arch)))
    self.assertEqual(got, want)

  @parameterized.named_parameters(
    ("224", "resnet50", (224, 224), {}, (7, 7, 2048)),
    ("odd", "resnet18", (97, 131), {}, (4, 5, 512)),
    ("small_stem", "resnet8", (32, 32), {"stem": "small", "width": 8}, (8, 8, 32)),
    (
      "small_stem_stride_2",
      "resnet8",
      (33, 32),
      {"stem": "small", "stem_stride": 2, "width": 8},
      (5, 4, 32),
    ),
  )
  def test_shapes(self, arch, size, settings, last_map):
    net = _net(arch, **settings)
    stages, _ = RESNETS[arch]
    last = f"layer{len(stages)}_{stages[-1] - 1}"
    images = jax.ShapeDtypeStruct((2, *size, 3), jnp.uint8)
    embeddings, state = jax.eval_shape(
      functools.partial(net.apply, capture_intermediates=True), _shapes(net, size), images
    )
    inner = state["intermediates"]["backbone"]
    self.assertEqual(embeddings.shape, (2, 512))
    self.assertEqual(embeddings.dtype, jnp.float32)
    self.assertEqual(inner[last]["__call__"][0].shape, (2, *last_map))
    self.assertEqual(inner["__call__"][0].shape, (2, last_map[-1]))

  def test_convolutions_start_by_fan_out(self):
    # He initialization as in torchvision: variance 2 / (kernel area * output channels).
    variables = jax.jit(tiny_nets.tiny(width=32).init)(jax.random.key(0), tiny_nets.images(1))
    kernel = variables["params"]["backbone"]["conv1"]["kernel"]  # 3 -> 32 channels
    np.testing.assert_allclose(np.std(kernel), np.sqrt(2 / (9 * 32)), rtol=0.1)

  def test_unknown_stem_is_refused(self):
    with self.assertRaisesRegex(ValueError, "imagenet"):
      _shapes(_net("resnet8", stem="imgnet"))


class TorchvisionParityTest(chex.TestCase):
  """Tests against goldens/resnet.npz: padding, stride, epsilon and the order of the layers. The
  sizes halve evenly and oddly.
  """

  @parameterized.product(arch=_ARCHS, size=torchvision_rule.SIZES)
  def test_features_float64(self, arch, size):
    with jax.enable_x64(True):
      stages, bottleneck = RESNETS[arch]
      net = ResNet(stages, bottleneck, dtype=jnp.float64)
      variables = _backbone_variables(_golden_variables(arch))
      got = jax.jit(net.apply)(variables, torchvision_rule.images(*size))
    _assert_close(got, authors.archive("resnet")[f"{arch}/{size[0]}x{size[1]}/features"], 1e-10)

  @parameterized.product(arch=_ARCHS, size=torchvision_rule.SIZES)
  def test_f27_embedding_float32(self, arch, size):
    net = _net(arch)
    variables = jax.tree.map(jnp.float32, _golden_variables(arch))
    images = jnp.float32(_raw_pixels(torchvision_rule.images(*size)))
    want = authors.archive("resnet")[f"{arch}/{size[0]}x{size[1]}/head"]
    _assert_close(jax.jit(functools.partial(_head, net))(variables, images), want, 1e-4)

  @parameterized.parameters(*_ARCHS)
  @pytest.mark.slow
  def test_gradients_float32(self, arch):
    net = _net(arch)
    variables = jax.tree.map(jnp.float32, _golden_variables(arch))
    images = jnp.float32(_raw_pixels(torchvision_rule.images(224, 224)))
    grads = self._gradients(
      arch, lambda params: _head(net, {**variables, "params": params}, images), variables
    )
    # In float32, sums over millions of entries of both signs keep too few digits.
    _assert_close(
      [np.linalg.norm(grad) for grad in grads],
      authors.archive("resnet")[f"{arch}/224x224/grad_norm"],
      1e-4,
    )

  @parameterized.parameters(*_ARCHS)
  @pytest.mark.slow
  def test_gradients_float64(self, arch):
    with jax.enable_x64(True):
      stages, bottleneck = RESNETS[arch]
      net = ResNet(stages, bottleneck, dtype=jnp.float64)
      variables, images = _golden_variables(arch), torchvision_rule.images(224, 224)

      def head(params):
        features = net.apply(_backbone_variables({**variables, "params": params}), images)
        return features @ params["head"]["kernel"] + params["head"]["bias"][None]

      grads = self._gradients(arch, head, variables)
    _assert_close(
      [np.linalg.norm(grad) for grad in grads],
      authors.archive("resnet")[f"{arch}/224x224/grad_norm"],
      1e-10,
    )
    _assert_close(
      [np.sum(grad) for grad in grads], authors.archive("resnet")[f"{arch}/224x224/grad_sum"], 1e-10
    )

  def _gradients(self, arch, head, variables):
    """Returns gradients of sum(head * c), in the order of the golden file."""
    grads = jax.jit(jax.grad(lambda params: jnp.sum(head(params) * torchvision_rule.cotangent())))(
      variables["params"]
    )
    names = _json(f"{arch}/224x224/grad_names")
    self.assertLen(names, len(jax.tree.leaves(grads)))
    paths = [pretrained._flax_path(name)[1] for name in names]
    return [
      np.float64(functools.reduce(lambda node, key: node[key], path, grads)).ravel()
      for path in paths
    ]


@functools.partial(jax.jit, static_argnames=("freeze_bn",))
def _forward(variables, images, where=None, *, freeze_bn=False):
  net = tiny_nets.tiny(freeze_bn=freeze_bn)
  return net.apply(variables, images, train=True, where=where, mutable=["batch_stats"])


@functools.partial(jax.jit, static_argnames=("freeze_bn",))
def _descend(variables, images, *, freeze_bn):
  """Makes one step of gradient descent on a linear function of the embeddings."""
  direction = np.random.default_rng(1).standard_normal((len(images), 8)).astype(np.float32)

  def loss(params):
    embeddings, moved = _forward({**variables, "params": params}, images, freeze_bn=freeze_bn)
    return jnp.sum(embeddings * direction), moved["batch_stats"]

  grads, stats = jax.grad(loss, has_aux=True)(variables["params"])
  params = jax.tree.map(lambda param, grad: param - 0.1 * grad, variables["params"], grads)
  return {"params": params, "batch_stats": stats}


class BatchNormTest(chex.TestCase):
  def test_f26_frozen_statistics_never_move_while_scale_and_bias_train(self):
    before = after = tiny_nets.variables()
    for seed in range(3):
      after = _descend(after, tiny_nets.images(6, seed), freeze_bn=True)
    chex.assert_trees_all_equal(after["batch_stats"], before["batch_stats"])  # bit for bit
    for path, param in jax.tree_util.tree_leaves_with_path(after["params"]):
      start = functools.reduce(lambda node, key: node[key.key], path, before["params"])
      self.assertTrue(np.any(param != start), jax.tree_util.keystr(path))

  def test_frozen_training_mode_equals_evaluation_mode(self):
    images = tiny_nets.images(6)
    embeddings, _ = _forward(tiny_nets.variables(), images, freeze_bn=True)
    want = jax.jit(tiny_nets.tiny().apply)(tiny_nets.variables(), images)
    np.testing.assert_allclose(embeddings, want, atol=1e-6)

  def test_unfrozen_statistics_all_move(self):
    before, after = tiny_nets.variables(), _forward(tiny_nets.variables(), tiny_nets.images(6))[1]
    for old, new in zip(
      jax.tree.leaves(before["batch_stats"]), jax.tree.leaves(after["batch_stats"]), strict=True
    ):
      self.assertTrue(np.all(old != new))

  def test_a_batch_without_a_valid_image_moves_no_statistics(self):
    before = tiny_nets.variables()
    _, after = _forward(before, tiny_nets.images(6), where=jnp.zeros(6, bool))
    chex.assert_trees_all_equal(after["batch_stats"], before["batch_stats"])

  def test_running_mean_moves_by_a_tenth(self):
    # torch's momentum 0.1: new = 0.9 old + 0.1 batch, with the mean of the convolution's output.
    images, variables = tiny_nets.images(6), tiny_nets.variables()
    _, moved = _forward(variables, images)
    pixels = jnp.float32((images / 255.0 - embedding.IMAGE_MEAN) / embedding.IMAGE_STD)
    kernel = variables["params"]["backbone"]["conv1"]["kernel"]
    out = nn.Conv(4, (3, 3), padding=1, use_bias=False).apply(
      {"params": {"kernel": kernel}}, pixels
    )
    old = variables["batch_stats"]["backbone"]["bn1"]["bn"]["mean"]
    got = moved["batch_stats"]["backbone"]["bn1"]["bn"]["mean"]
    np.testing.assert_allclose(
      got, 0.9 * old + 0.1 * jnp.mean(out, (0, 1, 2)), rtol=1e-5, atol=1e-6
    )

  def test_masked_images_do_not_enter_the_statistics(self):
    images, where = tiny_nets.images(6), np.array([1, 1, 0, 1, 0, 1], bool)
    other = np.where(where[:, None, None, None], images, 255 - images)
    got, moved = _forward(tiny_nets.variables(), images, where)
    got_other, moved_other = _forward(tiny_nets.variables(), other, where)
    want, moved_alone = _forward(tiny_nets.variables(), images[where])
    chex.assert_trees_all_close(moved, moved_other, atol=1e-6)
    chex.assert_trees_all_close(moved, moved_alone, atol=1e-6)
    np.testing.assert_allclose(got[where], want, atol=1e-5)
    np.testing.assert_allclose(got_other[where], want, atol=1e-5)

  @parameterized.named_parameters(
    ("no_mask", None),
    ("as_many_on_each_device", [1, 1, 0, 1, 1, 0, 1, 1]),
    ("fewer_on_one_device", [1, 1, 1, 1, 1, 0, 0, 0]),
    ("none_on_one_device", [1, 1, 1, 1, 0, 0, 0, 0]),
  )
  def test_two_devices_have_the_statistics_of_the_joined_batch(self, where):
    images, variables = tiny_nets.images(8), tiny_nets.variables()
    net = tiny_nets.tiny(freeze_bn=False, axis_name=mapping.AXIS)
    mask = np.ones(8, bool) if where is None else np.array(where, bool)

    def forward(variables, images, mask):
      return net.apply(
        variables,
        images,
        train=True,
        where=None if where is None else mask,
        mutable=["batch_stats"],
      )

    per_device = (mapping.replicate(variables), mapping.split(images), mapping.split(mask))
    got, moved = mapping.on_devices(forward, "pmap")(*per_device)
    want, want_moved = _forward(variables, images[mask])
    chex.assert_trees_all_close(moved, mapping.replicate(want_moved), atol=1e-5)
    np.testing.assert_allclose(got.reshape(8, -1)[mask], want, atol=1e-5)
