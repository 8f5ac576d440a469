"""Tests that another program computes the same embeddings with an exported model as evaluation."""

import json
import sys

import authors
import jax
import networks
import numpy as np
import pytest
import torchvision_rule

from soprc_jax.data import sources
from soprc_jax.models import pretrained
from soprc_jax.serving import export, image_inputs, network


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """Returns a model with all kinds of layers, including the max pool."""
  folder = networks.make(
    tmp_path_factory.mktemp("run") / "run", **{"model.stem": "imagenet", "eval.image_size": 40}
  )
  return network.load(folder)


def _pixels(count, size=40):
  return np.random.default_rng(count).integers(0, 256, (count, size, size, 3), np.uint8)


@pytest.fixture(scope="module")
def want(loaded):
  """Returns the embeddings that evaluation computes of five images."""

  class Pixels(image_inputs.Named):
    def __getitem__(self, at):
      return sources.Example(_pixels(5)[at], 0, self.paths[at])

  return network.make_embed(loaded)(Pixels(loaded.workdir, list("01234"))).embeddings


def test_stablehlo(loaded, want, tmp_path):
  described = export.write(tmp_path / "net.stablehlo", loaded, "stablehlo")
  content = json.loads(described.read_text())
  assert described.name == "net.stablehlo.json"
  assert content["input"] == {
    "shape": ["b", 40, 40, 3],
    "dtype": "uint8",
    "values": "RGB, 0 to 255",
  }
  assert content["output"]["shape"] == ["b", 8]
  assert content["platforms"] == ["cpu", "cuda", "tpu"]
  assert content["network"]["digest"] == loaded.digest
  assert content["versions"]["jax"] == jax.__version__
  # Needs nothing but the file and jax.
  exported = jax.export.deserialize(bytearray((tmp_path / "net.stablehlo").read_bytes()))
  assert exported.platforms == ("cpu", "cuda", "tpu")
  for count in (1, 5):
    got = exported.call(_pixels(5)[:count])
    assert got.shape == (count, 8)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want[:count], atol=2e-6)
  with pytest.raises(ValueError, match="uint8"):
    exported.call(np.float32(_pixels(1)))
  # Convolutions stay convolutions, which other compilers and devices optimize themselves.
  text, num_layers = (
    exported.mlir_module(),
    sum(leaf.ndim == 4 for leaf in jax.tree.leaves(loaded.variables["params"])),
  )
  assert text.count("stablehlo.convolution") >= num_layers
  assert text.count("stablehlo.convolution") == num_layers * text.count(
    "stablehlo.dot_general"
  )  # the head


def test_stablehlo_of_a_vision_transformer(tmp_path):
  small = {"model.name": "vit", "model.embedding_dim": 0, "eval.image_size": 24}
  small |= {"model.vit.mean": (0.5, 0.5, 0.5), "eval.interpolation": "bicubic"}
  sizes = {"image_size": 16, "patch": 4, "width": 16, "depth": 1, "heads": 2, "mlp": 8}
  small |= {f"model.vit.{name}": size for name, size in sizes.items()}
  loaded = network.load(networks.make(tmp_path / "run", **small))
  described = json.loads(export.write(tmp_path / "net.hlo", loaded, "stablehlo").read_text())
  assert described["output"]["shape"] == ["b", 16]
  assert described["normalisation"]["mean"] == [0.5, 0.5, 0.5]
  assert "24 pixels, bicubic with antialiasing" in described["preprocessing"][1]
  exported = jax.export.deserialize(bytearray((tmp_path / "net.hlo").read_bytes()))
  images = _pixels(3, 24)
  np.testing.assert_allclose(exported.call(images), export._embedder(loaded)(images), atol=2e-6)


def test_an_output_that_exists_is_refused(loaded, tmp_path):
  (tmp_path / "a").write_text("mine")
  (tmp_path / "b.json").write_text("mine")
  for name, exists in (("a", "a"), ("b", "b.json")):
    with pytest.raises(FileExistsError, match=f"{exists} exists: choose a new file"):
      export.write(tmp_path / name, loaded, "stablehlo")
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b.json"]


def _torchvision(arch, tmp_path, **values):
  """Returns (weights of torchvision's rule, the model with these weights)."""
  entries = json.loads(str(authors.archive("resnet")[f"{arch}/state_dict"]))
  weights = {
    name: np.float32(array) for name, array in torchvision_rule.state_dict(entries).items()
  }
  settings = {
    "model.name": arch,
    "model.width": 64,
    "model.stem": "imagenet",
    "model.embedding_dim": 512,
  } | values
  variables = pretrained.to_flax(weights)
  return weights, network.Network(
    networks.config(**settings), tmp_path, variables, 1, network.digest(variables)
  )


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_safetensors_are_torchvisions_weights(arch, tmp_path):
  weights, loaded = _torchvision(arch, tmp_path)
  content = json.loads(
    export.write(tmp_path / "net.safetensors", loaded, "safetensors").read_text()
  )
  got = pretrained.read(str(tmp_path / "net.safetensors"))
  assert set(got) == set(weights)
  for name, array in weights.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert got[name].shape == array.shape
  again = pretrained.to_flax(got)
  assert jax.tree.structure(again) == jax.tree.structure(loaded.variables)
  assert network.digest(again) == loaded.digest
  assert f"torchvision.models.{arch}(num_classes=512)" in content["load"]
  assert content["input"]["shape"] == ["b", 3, 16, 16]
  assert "by the caller" in content["normalisation"]["where"]


@pytest.mark.slow
def test_safetensors_in_torchvision(tmp_path):
  torchvision, torch = pytest.importorskip("torchvision"), pytest.importorskip("torch")
  from safetensors import torch as safetensors

  _, loaded = _torchvision("resnet18", tmp_path, **{"eval.image_size": 64})
  export.write(tmp_path / "net.safetensors", loaded, "safetensors")
  model = torchvision.models.resnet18(num_classes=512).eval()
  model.load_state_dict(safetensors.load_file(tmp_path / "net.safetensors"))
  content = json.loads((tmp_path / "net.safetensors.json").read_text())["normalisation"]
  pixels = _pixels(2, 64)
  normal = np.float32((pixels / 255 - content["mean"]) / content["std"]).transpose(0, 3, 1, 2)
  with torch.no_grad():
    got = torch.nn.functional.normalize(model(torch.from_numpy(normal))).numpy()
  np.testing.assert_allclose(got, export._embedder(loaded)(pixels), atol=1e-5)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (
      {"model.name": "resnet8"},
      "model.name is resnet8, none of resnet18, resnet34, resnet50, resnet101",
    ),
    ({"model.width": 32}, "model.width is 32, not 64"),
    ({"model.stem": "small"}, "model.stem is small, not imagenet"),
    ({"model.embedding_dim": 0}, "model.embedding_dim is 0, so it has no last layer"),
  ],
)
def test_networks_that_torchvision_does_not_have_are_refused(tmp_path, values, message):
  settings = {"model.name": "resnet18", "model.width": 64, "model.stem": "imagenet"} | values
  loaded = network.Network(networks.config(**settings), tmp_path, {}, 1, "")
  with pytest.raises(
    ValueError, match=f"not a ResNet of torchvision .{message}.: use --format=stablehlo"
  ):
    export.write(tmp_path / "net.safetensors", loaded, "safetensors")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("default")  # of the conversion packages
def test_onnx(loaded, want, tmp_path):
  pytest.importorskip("jax2onnx")
  onnxruntime = pytest.importorskip("onnxruntime")
  content = json.loads(export.write(tmp_path / "net.onnx", loaded, "onnx").read_text())
  assert content["opset"] >= 17
  session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
  (inputs,) = session.get_inputs()
  assert (inputs.name, inputs.type, inputs.shape) == ("images", "tensor(uint8)", ["b", 40, 40, 3])
  for count in (1, 5):
    (got,) = session.run(["embeddings"], {"images": _pixels(5)[:count]})
    np.testing.assert_allclose(got, want[:count], atol=2e-6)


def test_what_onnx_needs_is_told(loaded, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "jax2onnx", None)
  with pytest.raises(
    ValueError, match=r"needs the package jax2onnx \(pip install -e '\.\[onnx\]'\)"
  ):
    export.write(tmp_path / "net.onnx", loaded, "onnx")
