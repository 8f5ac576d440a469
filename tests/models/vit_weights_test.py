"""Tests published weights of vision transformers against `transformers`, and timm's names of them.

The weights pass through everything that a user's do: file, conversion, checkpoint, embedding.
"""

import re

import jax
import numpy as np
import pytest
from safetensors import numpy
import vits

from soprc_jax.models import pretrained, vit_weights
from soprc_jax.serving import converted, embed, network
from soprc_jax.serving.model import _Arrays
from soprc_jax.training import config as config_lib

pytest.importorskip("torch")
pytest.importorskip("transformers")


def _embedded(folder, images):
  """Returns the embeddings of images at their own size."""
  config = config_lib.default_config()
  config.eval.image_size = images.shape[1]
  config.eval.batch_size = 4
  found = network.load(folder, config_lib.resolve(config))
  return embed.make_index(found, _Arrays(list(images))).embeddings


@pytest.mark.parametrize("name", vits.CASES)
def test_features_equal_those_of_transformers_at_any_size(name, tmp_path):
  model = vits.make(name)
  converted.write(vits.save(model, tmp_path / "file"), tmp_path / "weights")
  for side in (vits.SIDE, 44):  # 44 pixels are five patches, and a rest that is left out
    images = vits.pictures(side)
    wanted = vits.features(model, name, images)
    assert wanted.std(axis=0).mean() > 0.02  # the images have different features
    np.testing.assert_allclose(_embedded(tmp_path / "weights", images), wanted, atol=1e-5)


# Hugging Face's name within a block -> timm's.
_CLASSIC = {
  "layernorm_before": "norm1",
  "layernorm_after": "norm2",
  "norm1": "norm1",
  "norm2": "norm2",
  "attention.output.dense": "attn.proj",
  "intermediate.dense": "mlp.fc1",
  "output.dense": "mlp.fc2",
  "mlp.fc1": "mlp.fc1",
  "mlp.fc2": "mlp.fc2",
  "mlp.weights_in": "mlp.fc1",
  "mlp.weights_out": "mlp.fc2",
  "mlp.up_proj": "mlp.fc1",
  "mlp.down_proj": "mlp.fc2",
  "layer_norm1": "norm1",
  "layer_norm2": "norm2",
  "self_attn.out_proj": "attn.proj",
  "attention.o_proj": "attn.proj",
}
_QUERIES = ("attention.attention.{}", "self_attn.{:.1}_proj", "attention.{:.1}_proj")
_OUTSIDE = {
  "embeddings.cls_token": "cls_token",
  "embeddings.mask_token": "mask_token",
  "embeddings.register_tokens": "reg_token",
  "embeddings.class_embedding": "cls_token",
  "embeddings.position_embeddings": "pos_embed",
  "embeddings.position_embedding.weight": "pos_embed",
  "head.probe": "attn_pool.latent",
}
_LAYERS = {
  "embeddings.patch_embeddings.projection": "patch_embed.proj",
  "embeddings.patch_embeddings": "patch_embed.proj",
  "embeddings.patch_embedding": "patch_embed.proj",
  "pre_layrnorm": "norm_pre",
  "post_layernorm": "norm",
  "layernorm": "norm",
  "norm": "norm",
  "visual_projection": "head",
  "head.attention.out_proj": "attn_pool.proj",
  "head.layernorm": "attn_pool.norm",
  "head.mlp.fc1": "attn_pool.mlp.fc1",
  "head.mlp.fc2": "attn_pool.mlp.fc2",
}


def _timm(weights):
  """Returns weights under timm's names."""
  weights = {name.removeprefix("vision_model."): array for name, array in weights.items()}
  made = {}
  for name, array in weights.items():
    module, _, leaf = name.rpartition(".")
    if name in _OUTSIDE:
      array = array.reshape(1, -1, array.shape[-1])
      made[_OUTSIDE[name]] = array
    elif module in _LAYERS:
      made[f"{_LAYERS[module]}.{leaf}"] = array
    elif name.startswith("head.attention.in_proj_"):
      leaf = name.removeprefix("head.attention.in_proj_")
      made[f"attn_pool.q.{leaf}"] = array[: len(array) // 3]
      made[f"attn_pool.kv.{leaf}"] = array[len(array) // 3 :]
  for index in range(2):
    made |= _timm_block(weights, index)
  return made


def _timm_block(weights, index):
  (start,) = {
    prefix
    for prefix in (f"encoder.layer.{index}.", f"encoder.layers.{index}.", f"layer.{index}.")
    if any(name.startswith(prefix) for name in weights)
  }
  inside = {name.removeprefix(start): a for name, a in weights.items() if name.startswith(start)}
  made = {}
  for name, array in inside.items():
    module, _, leaf = name.rpartition(".")
    if module in _CLASSIC:
      made[f"{_CLASSIC[module]}.{leaf}"] = array
    elif name.endswith("lambda1"):
      made[f"ls{name[11]}.gamma"] = array
  for leaf in ("weight", "bias"):
    for pattern in _QUERIES:
      names = [f"{pattern.format(part)}.{leaf}" for part in ("query", "key", "value")]
      if all(name in inside for name in names):
        made[f"attn.qkv.{leaf}"] = np.concatenate([inside[name] for name in names])
  return {f"blocks.{index}.{name}": array for name, array in made.items()}


@pytest.mark.parametrize(
  "name", ["dino", "dinov2", "dinov2_swiglu", "dinov2_registers", "clip_projection", "siglip"]
)
def test_timm_names_give_the_same_parameters(name):
  published = vits.state_dict(name)
  got = vit_weights.to_flax(_timm(published))
  jax.tree.map(np.testing.assert_array_equal, got, vit_weights.to_flax(published))


def test_positions_without_one_of_the_class_token_are_those_of_the_patches():
  """Checks the files of timm's DINOv2 with registers, where the token has its position in it."""
  published = vits.state_dict("dinov2_registers")
  wanted = vit_weights.to_flax(published)
  timm = _timm(published)
  timm["cls_token"] = timm["cls_token"] + timm["pos_embed"][:, :1]
  timm["pos_embed"] = timm["pos_embed"][:, 1:]
  jax.tree.map(np.testing.assert_array_equal, vit_weights.to_flax(timm), wanted)


def test_a_torch_file_with_the_names_in_memory_and_of_wrappers(tmp_path):
  import torch

  model = vits.make("dino")
  wanted = vit_weights.to_flax(vits.state_dict("dino"))
  torch.save({f"module.vit.{k}": v for k, v in model.state_dict().items()}, tmp_path / "w.pth")
  got = pretrained.load(str(tmp_path / "w.pth"))
  jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_what_does_not_fit_raises():
  published = vits.state_dict("dino")
  with pytest.raises(ValueError, match=r"two weights for class_token, one of them as 'cls_token'"):
    vit_weights.to_flax(published | {"cls_token": published["embeddings.cls_token"]})
  positions = {"embeddings.position_embeddings": np.zeros((1, 12, 32), np.float32)}
  with pytest.raises(ValueError, match="12 position embeddings are not those of a square"):
    vit_weights.to_flax(published | positions)
  token = "embeddings.cls_token"
  for change, message in (
    (
      {token: np.full((1, 1, 32), np.nan)},
      r"'embeddings\.cls_token' has values that are not finite",
    ),
    (
      {token: np.zeros((1, 1, 32), np.int8)},
      r"'embeddings\.cls_token' is int8, as in a quantized model",
    ),
    ({token: np.array(3.0)}, r"'embeddings\.cls_token' is a single number"),
    (
      {"encoder.layer.0.attention.attention.query.bias.x": np.zeros(3)},
      r"'blocks_0\.attn\.q\.bias\.x' is below another weight",
    ),
    ({"blocks.0.attn.qkv.weight": np.zeros((7, 4))}, r"of 7 rows is not that of 3 equal layers"),
  ):
    with pytest.raises(ValueError, match=message):
      vit_weights.to_flax(published | change)
  rest = {name: one for name, one in published.items() if "1.output.dense.weight" not in name}
  with pytest.raises(ValueError, match=r"no matrix blocks_1\.mlp\.fc2\.weight: .* not complete"):
    vit_weights.to_flax(rest)
  assert not vit_weights.is_vit({"conv1.weight": np.zeros(3)})


def _describe(source):
  found = pretrained.load(source)
  # Without the patch embedding they do not look like a vision transformer at all.
  return pretrained.vit_of(found, source) or pretrained.architecture(found, source=source)


@pytest.mark.parametrize("name", ["dino", "dinov3_swiglu", "siglip_vision"])
def test_each_missing_weight_is_found_out(name, tmp_path):
  """Checks weights in one of two blocks and outside of them, with a config.json."""
  source = vits.save(vits.make(name), tmp_path)
  published = numpy.load_file(source)
  needed = [
    one
    for one, array in published.items()
    if array.size and not re.search(r"mask_token|^pooler\.|\.0\.", one)  # the first block is alike
  ]
  for missing in needed:
    numpy.save_file({one: a for one, a in published.items() if one != missing}, source)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
      _describe(source)


def test_a_bias_that_no_block_has_is_zero():
  published = vits.state_dict("dino")
  without = {one: a for one, a in published.items() if not one.endswith("query.bias")}
  found = vit_weights.to_flax(without)["params"]["backbone"]
  for block in ("blocks_0", "blocks_1"):
    np.testing.assert_array_equal(found[block]["attn"]["q"]["bias"], np.zeros(32))
