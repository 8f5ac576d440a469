"""Tests weights of torchvision's ResNets: published files and names.

What does not fit is reported.
"""

import hashlib
import json
import subprocess
import sys

import authors
from flax import traverse_util
import jax
import numpy as np
import pytest
import runs
from safetensors import numpy as safetensors
import torchvision_rule

from soprc_jax.models import RESNETS, EmbeddingNet, ResNet, pretrained
from soprc_jax.training import checkpoints

try:
  import torch
except ImportError:
  torch = None
_needs_torch = pytest.mark.skipif(torch is None, reason="torch writes the files that are read here")


@pytest.fixture(scope="module")
def weights():
  """Returns ResNet-18 under torchvision's names, with a head of 512."""
  entries = json.loads(str(authors.archive("resnet")["resnet18/state_dict"]))
  return {name: np.float32(array) for name, array in torchvision_rule.state_dict(entries).items()}


def _network(arch="resnet18", embedding_dim=512, width=64):
  stages, bottleneck = RESNETS[arch]
  return EmbeddingNet(ResNet(stages, bottleneck, width=width), embedding_dim=embedding_dim)


def _like(net):
  """Returns the abstract variables of a model."""
  shapes = jax.eval_shape(
    net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), np.uint8)
  )
  return {"params": shapes["params"], "batch_stats": shapes["batch_stats"]}


def _torch(weights):
  return {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}


def _save(weights, path):
  if path.suffix == ".safetensors":
    safetensors.save_file(
      {name: np.ascontiguousarray(array) for name, array in weights.items()}, path
    )
  else:
    torch.save(_torch(weights), path)
  return str(path)


def _hugging_face(name):
  """Maps torchvision's name to that of `transformers`."""
  if name.startswith("fc."):
    return name.replace("fc", "classifier.1")
  if name.startswith(("conv1.", "bn1.")):
    part = "convolution" if name.startswith("conv1") else "normalization"
    return f"resnet.embedder.embedder.{part}.{name.split('.', 1)[1]}"
  stage, block, module, leaf = name.split(".", 3)
  prefix = f"resnet.encoder.stages.{int(stage[-1]) - 1}.layers.{block}"
  if module == "downsample":
    which, leaf = leaf.split(".", 1)
    return f"{prefix}.shortcut.{'convolution' if which == '0' else 'normalization'}.{leaf}"
  part = "convolution" if module.startswith("conv") else "normalization"
  return f"{prefix}.layer.{int(module[-1]) - 1}.{part}.{leaf}"


def _digest(variables):
  digest = hashlib.sha256()
  for path, leaf in sorted(traverse_util.flatten_dict(variables).items()):
    digest.update(repr((path, np.asarray(leaf).tobytes())).encode())
  return digest.hexdigest()


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("pth", marks=_needs_torch),
    "safetensors",
    "hugging_face",
    "data_parallel",
    pytest.param("wrapped", marks=_needs_torch),
    "converted",
  ],
)
def test_every_form_gives_the_same_network(weights, tmp_path, kind):
  want, has_head = pretrained.fit(pretrained.to_flax(weights), _like(_network()), source="x")
  assert has_head
  source = tmp_path / f"weights.{'pth' if kind in ('pth', 'wrapped') else 'safetensors'}"
  if kind == "hugging_face":
    _save({_hugging_face(name): array for name, array in weights.items()}, source)
  elif kind == "data_parallel":
    _save({f"module.{name}": array for name, array in weights.items()}, source)
  elif kind == "wrapped":
    torch.save({"epoch": 3, "state_dict": _torch(weights)}, source)
  else:
    _save(weights, source)
  if kind == "converted":
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "log").write_text("")  # F66: does not block
    done = runs.call(
      "experiments.convert_weights", f"--input={source}", f"--output={tmp_path / 'converted'}"
    )
    assert done.returncode == 0, done.stderr
    assert (
      f"--config.model.name=resnet18 --config.model.init_from={tmp_path / 'converted'}"
      in done.stdout
    )
    assert "absl" not in done.stderr
    source = tmp_path / "converted"
    again = runs.call("experiments.convert_weights", "--input=x.pth", f"--output={source}")
    assert again.returncode == 1
    assert (
      "holds variables, which this program would overwrite or take for its own: choose a new"
      in again.stderr
    )
  assert _digest(checkpoints.load_network(str(source), _like(_network()))) == _digest(want)


def test_a_head_of_another_size_stays_the_networks_own(weights, tmp_path):
  like = _like(_network(embedding_dim=16))
  got = checkpoints.load_network(_save(weights, tmp_path / "w.safetensors"), like)
  assert got["params"]["head"]["kernel"] is like["params"]["head"]["kernel"]
  np.testing.assert_array_equal(
    got["params"]["backbone"]["bn1"]["bn"]["scale"], weights["bn1.weight"]
  )
  np.testing.assert_array_equal(
    got["batch_stats"]["backbone"]["bn1"]["bn"]["var"], weights["bn1.running_var"]
  )


@pytest.mark.parametrize(
  ("network", "message"),
  [
    ({"arch": "resnet34"}, r"backbone\.layer1_2\.conv1\.kernel is not in it"),
    ({"width": 32}, r"params\.backbone\.\S+: has shape \(.*\), expected \(.*\)"),
  ],
)
def test_another_architecture_is_told_by_its_weights(weights, tmp_path, network, message):
  source = _save(weights, tmp_path / "w.safetensors")
  with pytest.raises(ValueError, match=message) as error:
    checkpoints.load_network(source, _like(_network(**network)))
  assert source in str(error.value)
  assert "more" in str(error.value)


def _names(blocks, convolutions):
  """Returns torchvision's names of the weights of a ResNet."""
  norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
  names = ["conv1.weight", *(f"bn1.{leaf}" for leaf in norm)]
  for layer, count in enumerate(blocks, start=1):
    for block in range(count):
      prefix = f"layer{layer}.{block}"
      for i in range(1, convolutions + 1):
        names += [f"{prefix}.conv{i}.weight", *(f"{prefix}.bn{i}.{leaf}" for leaf in norm)]
      if block == 0 and (layer > 1 or convolutions == 3):
        names += [
          f"{prefix}.downsample.0.weight",
          *(f"{prefix}.downsample.1.{leaf}" for leaf in norm),
        ]
  return [*names, "fc.weight", "fc.bias"]


@pytest.mark.parametrize(
  ("arch", "blocks", "convolutions"),
  [
    ("resnet18", (2, 2, 2, 2), 2),
    ("resnet34", (3, 4, 6, 3), 2),
    ("resnet50", (3, 4, 6, 3), 3),
    pytest.param("resnet101", (3, 4, 23, 3), 3, marks=pytest.mark.slow),
  ],
)
def test_every_weight_of_every_architecture_has_its_place(arch, blocks, convolutions):
  like = _like(_network(arch))
  paths = {
    (collection, *path)
    for name in _names(blocks, convolutions)
    if "batches" not in name
    for collection, path in [pretrained._flax_path(name)]
  }
  assert paths == set(traverse_util.flatten_dict(like))
  assert pretrained.architecture(like, source="x") == arch


class _Evil:
  """Runs a command when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return (subprocess.check_call, ([sys.executable, "-c", f"open({str(self.path)!r}, 'w')"],))


@_needs_torch
def test_nothing_in_a_file_is_executed(tmp_path):
  torch.save({"conv1.weight": _Evil(tmp_path / "executed")}, tmp_path / "evil.pth")
  with pytest.raises(
    ValueError, match="not a file of weights that can be read without executing it"
  ):
    pretrained.read(str(tmp_path / "evil.pth"))
  assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
  ("name", "content", "error", "message"),
  [
    ("missing.pth", None, FileNotFoundError, "there is no such file"),
    pytest.param("html.pth", b"<html>", ValueError, "not a file of weights", marks=_needs_torch),
    ("html.safetensors", b"<html>", ValueError, "not a safetensors file"),
    ("empty.safetensors", b"", ValueError, "not a safetensors file"),
  ],
)
def test_f35_files_that_are_no_weights_are_named(tmp_path, name, content, error, message):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  with pytest.raises(error, match=message) as found:
    pretrained.read(str(tmp_path / name))
  assert name in str(found.value)


@_needs_torch
def test_a_file_without_a_state_dict_is_named(tmp_path):
  torch.save([torch.zeros(2)], tmp_path / "list.pth")
  with pytest.raises(ValueError, match=r"list\.pth contains no state dict"):
    pretrained.read(str(tmp_path / "list.pth"))


def test_weights_of_another_network_are_not_converted(weights, tmp_path):
  for name, content in (
    ("other", {"a": np.zeros(3, np.float32)}),
    ("part", {"conv1.weight": weights["conv1.weight"]}),
  ):
    source = _save(content, tmp_path / f"{name}.safetensors")
    done = runs.call(
      "experiments.convert_weights", f"--input={source}", f"--output={tmp_path / name}"
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
      f"Error: {source} contains the weights of none of resnet8, resnet18,"
    )
    assert not (tmp_path / name).exists()
  done = runs.call("experiments.convert_weights", f"--input={source}")
  assert done.stderr.startswith("Error: missing --output. For example:")


def test_what_a_pth_file_needs_is_told(monkeypatch, tmp_path):
  (tmp_path / "w.pth").write_bytes(b"")
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ValueError, match="reading it needs torch"):
    pretrained.read(str(tmp_path / "w.pth"))


def test_names_on_the_hub(monkeypatch, weights, tmp_path):
  with pytest.raises(ValueError, match="a name like hf://USER/REPOSITORY"):
    pretrained.read("hf://nothing")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ValueError, match="needs the package huggingface_hub"):
    pretrained.read("hf://timm/resnet50.a1_in1k")
  # A stand-in for the package, since tests have no network access.
  asked = []

  class Hub:
    class errors:  # noqa: N801
      HfHubHTTPError = LocalEntryNotFoundError = OSError

    @staticmethod
    def hf_hub_download(repository, file):
      asked.append((repository, file))
      return _save(weights, tmp_path / "model.safetensors")

  monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
  got = pretrained.read("hf://timm/resnet18.a1_in1k")
  pretrained.read("hf://timm/resnet18.a1_in1k/other.safetensors")
  assert asked == [
    ("timm/resnet18.a1_in1k", "model.safetensors"),
    ("timm/resnet18.a1_in1k", "other.safetensors"),
  ]
  np.testing.assert_array_equal(got["conv1.weight"], weights["conv1.weight"])


def test_weights_that_are_not_finite_are_named(tmp_path):
  source = _save(
    {"conv1.weight": np.full((4, 3, 7, 7), np.inf, np.float32)}, tmp_path / "w.safetensors"
  )
  with pytest.raises(
    ValueError, match=r"w\.safetensors: 'conv1\.weight' has values that are not fin"
  ):
    pretrained.load(source)


def test_a_model_in_several_files_is_told(tmp_path):
  path = tmp_path / "model-00001-of-00002.safetensors"
  path.touch()
  with pytest.raises(
    ValueError, match="is a part of a model in several files: write it as one file"
  ):
    pretrained.check(str(path))
  whole = tmp_path / "model-00001-of-00001.safetensors"
  whole.touch()
  pretrained.check(str(whole))
  (tmp_path / "model.safetensors.index.json").touch()
  with pytest.raises(
    FileNotFoundError, match=r"no such file, but the model is in several files next"
  ):
    pretrained.check(str(tmp_path / "model.safetensors"))
