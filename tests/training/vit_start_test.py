"""Tests runs of vision transformers that start from published weights: `vit_start` and its keys."""

import json
import logging
import runpy

import jax
import networks
import numpy as np
import pytest
import runs
import trees
import vits

import soprc_jax
from soprc_jax.models import vit
from soprc_jax.serving import converted
from soprc_jax.training import build, checkpoints, defaults, loop, vit_keys, vit_start
from soprc_jax.training import config as config_lib


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  """Returns (file, folder of its conversion) of a DINO for images of 24 of 32 pixels."""
  folder = tmp_path_factory.mktemp("weights")
  shapes = vits.timm_shapes(width=32, hidden=40)
  config = {"model_args": {"num_heads": 4}}
  config["pretrained_cfg"] = {"input_size": [3, 24, 24], "crop_pct": 0.75}
  (folder / "config.json").write_text(json.dumps(config))
  source = vits.write(folder / "model.safetensors", shapes)
  converted.write(source, folder / "out")
  return source, str(folder / "out")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  return str(trees.folder(tmp_path_factory.mktemp("images"), 12, per_class=4))


def _config(root, init_from="", **values):
  config = runpy.run_path(str(runs.ROOT / "configs" / "folder.py"))["get_config"]("vit")
  small = {"data.root": root, "data.val_share": 0.2, "train.steps": 2, "log.progress": False}
  small |= {"model.init_from": init_from, "eval.every": 2, "eval.baselines": False}
  config.update_from_flattened_dict(small | values)
  return config_lib.resolve(config)


def _chosen(config):
  return {name: choice.value for name, choice in defaults.choose(config, _splits(config)).items()}


def _splits(config):
  return build.datasets.make_splits(config.data)


def test_what_is_known_is_the_same_for_a_file_and_its_conversion(weights):
  found = vit_start.find(weights[0])
  assert found.architecture.heads == 4
  assert (found.image_size, found.interpolation) == (24, "bilinear")
  assert vit_start.find(weights[1]) == found


def test_a_corrupt_description_raises(weights, tmp_path):
  description = vit_start.description(vit_start.find(weights[0]))
  variables = checkpoints.load_variables(converted.Path(weights[1]))
  broken = description | {"image_size": "24"}
  checkpoints.save_variables(tmp_path, variables, broken)
  with pytest.raises(ValueError, match=r"model\.json is corrupt \(image_size must be an integer"):
    vit_start.find(str(tmp_path))


def test_of_a_run_it_is_the_model_of_its_config(tmp_path):
  small = {"model.vit.width": 16, "model.vit.patch": 4, "model.vit.heads": 2, "model.vit.mlp": 8}
  small |= {"model.name": "vit", "model.vit.depth": 1, "model.vit.image_size": 16}
  networks.make(tmp_path / "run", **small)
  found = vit_start.find(str(tmp_path / "run"))
  assert (found.architecture.width, found.architecture.patch, found.image_size) == (16, 4, 16)
  networks.make(tmp_path / "other")
  assert vit_start.find(str(tmp_path / "other")) is None


def test_keys_follow_the_weights(weights, images):
  chosen = _chosen(_config(images, weights[0]))
  arch = vit.Architecture(
    **{name: chosen[f"model.vit.{name}"] for name in vit.Architecture._fields}
  )
  assert arch == vit_start.find(weights[0]).architecture
  assert (chosen["data.image_size"], chosen["eval.image_size"]) == (24, 24)
  assert (chosen["eval.resize"], _chosen(_config(images))["eval.resize"]) == (32, 0)
  assert chosen["optim.learning_rate"] < 5e-5
  # A given key counts.
  given = _chosen(_config(images, weights[0], **{"model.vit.pool": "mean", "data.image_size": 32}))
  assert "model.vit.pool" not in given
  assert (given["eval.image_size"], given["eval.resize"]) == (32, 43)
  with pytest.raises(ValueError, match=r"model\.vit\.heads=2 must be 4, that of the weights in"):
    _chosen(_config(images, weights[0], **{"model.vit.heads": 2}))


def test_without_weights_keys_follow_the_width_and_the_images(images):
  chosen = _chosen(_config(images, **{"model.vit.width": 1024, "model.vit.patch": 8}))
  got = [chosen[f"model.vit.{name}"] for name in ("depth", "heads", "mlp", "image_size")]
  assert got == [24, 16, 4096, 32]  # the images have 24 pixels, and the least are 32
  assert chosen["data.image_size"] == 32
  assert chosen["optim.learning_rate"] > 1e-4


@pytest.mark.parametrize(
  ("native", "patch", "side"), [(224, 16, 224), (256, 16, 256), (518, 14, 224), (384, 16, 224)]
)
def test_training_takes_the_native_side_unless_it_is_large(native, patch, side):
  arch = vit.Architecture(image_size=native, patch=patch)
  published = vit_start.Published(arch, native, native, "bicubic")
  assert defaults.published_side_rule(published).value == side


def test_weights_of_another_model_are_named(images, tmp_path):
  variables = {"params": {"a": np.zeros(3)}, "batch_stats": {}}
  checkpoints.save_variables(tmp_path / "resnet", variables)
  with pytest.raises(ValueError, match=r"resnet has no vision transformer, which model\.name=vit"):
    _chosen(_config(images, str(tmp_path / "resnet")))


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_starts_with_the_features_of_the_weights_and_trains(
  weights, images, which, tmp_path, caplog
):
  config = _config(images, weights[which], **{"optim.learning_rate": 0.0, "model.remat": True})
  loop.train(config, tmp_path / "run")
  model = soprc_jax.load(tmp_path / "run")
  assert vit_keys.architecture(model.config) == vit_start.find(weights[0]).architecture
  pictures = vits.pictures(40)
  want = soprc_jax.load(weights[1]).embed(pictures)
  np.testing.assert_allclose(model.embed(pictures), want, atol=1e-6)
  if which:
    values = {"model.dtype": "bfloat16", "train.microbatch": 4}
    values |= {"data.image_size": 29, "eval.image_size": 24}
    config = _config(images, weights[1], **values)
    caplog.set_level(logging.INFO, "soprc_jax")
    # jax itself promotes dtypes when it compiles the gradient of attention in bfloat16.
    with jax.numpy_dtype_promotion("standard"):
      loop.train(config, tmp_path / "trained")
    trained = soprc_jax.load(tmp_path / "trained").embed(pictures)
    assert 1e-6 < np.abs(trained - want).max() < 0.2
    assert "the last 5 pixels of each row" in caplog.text
    assert "24 and 32 pixels are whole patches" in caplog.text
    assert f"Starting from the weights in {weights[1]}." in caplog.text
