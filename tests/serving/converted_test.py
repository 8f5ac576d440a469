"""Tests converted weights as models: by the commands, and with a config of the data and sizes."""

import json
import shutil

import jax
import networks
import numpy as np
from PIL import Image
import pytest
import runs
import vits

import soprc_jax
from soprc_jax.models import RESNETS, EmbeddingNet, ResNet, vit
from soprc_jax.serving import converted, network
from soprc_jax.training import checkpoints
from soprc_jax.training import config as config_lib


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  """Returns the file of a small DINO for images of 24 pixels."""
  folder = tmp_path_factory.mktemp("weights")
  (folder / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4}}))
  return vits.write(folder / "model.safetensors", vits.timm_shapes(width=32, hidden=40))


def _photos(folder, side):
  folder.mkdir()
  images = vits.pictures(side)
  for number, image in enumerate(images):
    Image.fromarray(image).save(folder / f"{number}.png")
  return images


def _config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(values)
  return config_lib.resolve(config)


def _eval(config):
  return config.eval.image_size, config.eval.resize, config.eval.interpolation


def test_the_commands_from_a_file_to_embeddings(weights, tmp_path):
  out = tmp_path / "out"
  done = runs.call("experiments.convert_weights", f"--input={weights}", f"--output={out}")
  assert done.returncode == 0, done.stderr
  assert f"--config=folder:vit --config.model.init_from={out}" in done.stdout
  assert f"soprc embed --workdir={out} --images=PHOTOS" in done.stdout
  for side, flags in {
    24: (),  # the native size
    40: (
      f"--config={runs.ROOT / 'configs' / 'folder.py'}:vit",
      "--config.eval.image_size=40",
      "--config.eval.batch_size=2",
    ),
  }.items():
    images = _photos(tmp_path / str(side), side)
    made = tmp_path / f"{side}.npz"
    call = [f"--workdir={out}", f"--images={tmp_path / str(side)}", f"--output={made}", *flags]
    done = runs.call("experiments.embed", *call)
    assert done.returncode == 0, done.stderr
    found, config = np.load(made)["embeddings"], _config(**{"eval.image_size": side})
    arch = vit.Architecture(**converted.load(out, config)[0].model.vit)
    net = EmbeddingNet(vit.ViT(arch), embedding_dim=0)
    want = net.apply(checkpoints.load_variables(out), images)
    np.testing.assert_allclose(found, want, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_a_config_gives_data_and_sizes_and_the_folder_the_model(weights, tmp_path):
  preprocessor = {"size": 30, "crop_size": 24, "resample": 3}
  (tmp_path / "file").mkdir()
  (tmp_path / "file" / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4}}))
  (tmp_path / "file" / "preprocessor_config.json").write_text(json.dumps(preprocessor))
  shutil.copy(weights, tmp_path / "file")
  converted.write(str(tmp_path / "file" / "model.safetensors"), tmp_path)
  config, _ = converted.load(tmp_path)
  own = (24, 30, "bicubic")
  assert _eval(config) == own
  given = _config(**{"data.source": "folder", "data.root": "here", "eval.resize": 300})
  config, _ = converted.load(tmp_path, given)
  assert _eval(config) == (224, 300, "bilinear")
  assert (config.data.root, config.model.name, config.model.vit.heads) == ("here", "vit", 4)
  still_open = config_lib.default_config()
  config_lib.leave_open(still_open, "eval.image_size", "eval.interpolation")
  config, _ = converted.load(tmp_path, config_lib.resolve(still_open))
  assert _eval(config) == own
  scaled = config_lib.default_config()
  scaled.eval.image_size = 48
  config_lib.leave_open(scaled, "eval.interpolation", "eval.resize")
  config, _ = converted.load(tmp_path, config_lib.resolve(scaled))
  assert _eval(config) == (48, 60, "bicubic")


def test_a_resnet_is_embedded_by_the_commands_too(tmp_path):
  stages, bottleneck = RESNETS["resnet18"]
  net = EmbeddingNet(ResNet(stages, bottleneck), embedding_dim=1000)
  images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.uint8)
  checkpoints.save_variables(
    tmp_path, networks.drawn(jax.eval_shape(net.init, jax.random.key(0), images))
  )
  found = network.load(tmp_path, on_broken="skip")
  assert (found.config.model.name, found.config.model.embedding_dim) == ("resnet18", 0)
  assert found.config.data.on_broken == "skip"
  assert "head" not in found.variables["params"]
  assert found.digest == soprc_jax.load(tmp_path).network.digest


def test_a_description_that_does_not_fit_the_arrays_raises(weights, tmp_path):
  converted.write(weights, tmp_path / "right")
  variables = checkpoints.load_variables(tmp_path / "right")
  tree = json.loads((tmp_path / "right" / "variables" / "model.json").read_text())
  for change, message in (
    ({"depth": 2}, r"params\.backbone\.blocks_1\.\S+ is not in it"),
    ({"heads": 5}, r"model\.vit\.heads must divide model\.vit\.width=32; got 5"),
  ):
    folder = tmp_path / str(change["depth" if "depth" in change else "heads"])
    checkpoints.save_variables(
      folder, variables, tree | {"architecture": tree["architecture"] | change}
    )
    with pytest.raises(ValueError, match=message):
      converted.load(folder)


def test_a_changed_description_is_found_out(weights, tmp_path):
  converted.write(weights, tmp_path)
  path = tmp_path / "variables" / "model.json"
  path.write_text(path.read_text().replace('"heads": 4', '"heads": 8'))
  with pytest.raises(checkpoints.DamagedError, match=r"model\.json is not as it was written"):
    converted.load(tmp_path)


@pytest.mark.parametrize(
  "head",
  [
    {"kernel": np.zeros((512, 8), np.float32)},
    {"bias": np.zeros(8, np.float32)},
    {"kernel": np.zeros((1, 1, 512, 8), np.float32), "bias": np.zeros(8, np.float32)},
    {"kernel": np.zeros((512, 8), np.float32), "bias": np.zeros(9, np.float32)},
    {"kernel": np.zeros((512, 8), np.int32), "bias": np.zeros(8, np.int32)},
  ],
)
def test_another_head_raises(tmp_path, head):
  with pytest.raises(
    ValueError, match=r"the head of the weights must have a kernel \[features, D\]"
  ):
    converted._head_width(head, tmp_path)
