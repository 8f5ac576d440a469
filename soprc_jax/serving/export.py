"""Exports the model of a run for other programs: StableHLO, ONNX, or torchvision weights."""

from collections.abc import Callable
import json
import logging
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np

from soprc_jax import version
from soprc_jax._internal import file_io
from soprc_jax.models import RESNETS, convolutions, embedding
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import build, workdir
from soprc_jax.training import config as config_lib

FORMATS = ("stablehlo", "safetensors", "onnx")
PLATFORMS = ("cpu", "cuda", "tpu")
_TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101")
# Name of a parameter in Flax -> its name in torch.
_LEAVES = {
  "kernel": "weight",
  "scale": "weight",
  "bias": "bias",
  "mean": "running_mean",
  "var": "running_var",
}


def write(path: Path, network: network_lib.Network, kind: str) -> Path:
  """Writes a model, and a description next to it.

  Args:
    path: new file.
    network: model of a run.
    kind: one of `FORMATS`.

  Returns:
    The path of the description, a JSON file: ``path`` with ``.json`` appended.

  Raises:
    ValueError: if the model cannot be written in this format, or a package is missing.
    OSError: if the file or its description exists, or cannot be written.
  """
  described = path.with_name(path.name + ".json")
  for output in (path, described):
    index_lib.check_output(
      output, suffix=".safetensors" if kind == "safetensors" and output is path else ""
    )
  data, more = {"stablehlo": _stablehlo, "safetensors": _safetensors, "onnx": _onnx}[kind](network)
  content = {"format": kind, "file": path.name, **_description(network), **more}
  with file_io.whole(path) as file:
    file.write(data)
  workdir.write_atomically(described, json.dumps(content, indent=2) + "\n")
  return described


def to_torchvision(variables: dict[str, Any]) -> dict[str, np.ndarray]:
  """Converts variables to the state dict of a torchvision ResNet, with the head as ``fc``.

  This is the inverse of `soprc_jax.models.pretrained.to_flax`.

  Args:
    variables: ``{"params", "batch_stats"}`` of an `EmbeddingNet` around a `ResNet`.
  """
  weights: dict[str, np.ndarray] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
    _, *modules, name = (entry.key for entry in path)
    array = np.asarray(leaf, np.float32)
    # Torch stores kernels as [out, in, height, width] and [out, in].
    array = np.transpose(array, (3, 2, 0, 1)) if array.ndim == 4 else array.T
    module = _torch_module(modules)
    weights[f"{module}.{_LEAVES[name]}"] = np.ascontiguousarray(array)
    if name == "mean":
      weights[f"{module}.num_batches_tracked"] = np.zeros(
        [], np.int64
      )  # torch requires it; nothing depends on its value
  return weights


def _torch_module(modules: list[str]) -> str:
  """Returns torchvision's name of a layer: ``layer1.0.bn2`` for ``backbone/layer1_0/bn2/bn``."""
  if modules == ["head"]:
    return "fc"
  names = modules[1:-1] if modules[-1] == "bn" else modules[1:]
  name = re.sub(r"^layer(\d)_(\d+)\.", r"layer\1.\2.", ".".join(names))
  return name.replace("downsample_conv", "downsample.0").replace("downsample_bn", "downsample.1")


def _embedder(network: network_lib.Network, *, dtype: str = "") -> Callable[[Any], Any]:
  """Returns a function from images ``[b, S, S, 3]`` uint8 to embeddings ``[b, D]``.

  It uses only operations that every device and converter supports.

  Args:
    network: model of a run.
    dtype: dtype of the computation; empty: ``model.dtype``.
  """
  config = config_lib.ConfigDict(network.config.to_dict())
  config.model.dtype = dtype or config.model.dtype
  model: Any = build.make_model(config, freeze_bn=True)
  if network.config.model.name in ("conv3", *RESNETS):
    model = model.clone(backbone=model.backbone.clone(convolve=convolutions.by_xla))
  return lambda images: model.apply(network.variables, images, train=False)


def _stablehlo(network: network_lib.Network) -> tuple[bytes, dict[str, Any]]:
  from jax import export

  (batch,) = export.symbolic_shape("b")
  images = build.example_input(network.config, batch, side=network.image_size)
  exported = export.export(jax.jit(_embedder(network)), platforms=PLATFORMS)(images)
  more = {
    "platforms": list(exported.platforms),
    "calling_convention_version": exported.calling_convention_version,
    "load": "jax.export.deserialize(bytearray(open(FILE, 'rb').read())).call(images)",
  }
  return bytes(exported.serialize()), more


def _onnx(network: network_lib.Network) -> tuple[bytes, dict[str, Any]]:
  try:
    import jax2onnx
  except ImportError:
    raise ValueError(
      "--format=onnx needs the package jax2onnx (pip install -e '.[onnx]')"
    ) from None
  images = build.example_input(network.config, "b", side=network.image_size)
  name = "features" if network.features else "images"
  # Runtimes support few operations in bfloat16.
  embed = _embedder(network, dtype="float32")
  # jax2onnx logs a traceback for each of its plugins that does not support this jax version. An
  # operation of the model without a plugin still raises.
  logger = logging.getLogger("jax2onnx")
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    model = jax2onnx.to_onnx(
      embed,
      inputs=[images],
      model_name="soprc_jax",
      input_names=[name],
      output_names=["embeddings"],
    )
  finally:
    logger.setLevel(level)
  more = {
    "computed_in": "float32",
    "opset": max(entry.version for entry in model.opset_import if entry.domain == ""),
    "load": f"onnxruntime.InferenceSession(FILE).run(['embeddings'], {{'{name}': {name}}})[0]",
  }
  return model.SerializeToString(), more


def _safetensors(network: network_lib.Network) -> tuple[bytes, dict[str, Any]]:
  from safetensors import numpy as safetensors

  model = network.config.model
  wanted = {"model.width": (model.width, 64), "model.stem": (model.stem, "imagenet")}
  wrong = [
    f"{name} is {found}, not {want}" for name, (found, want) in wanted.items() if found != want
  ]
  if model.name not in _TORCHVISION:
    wrong.insert(0, f"model.name is {model.name}, none of {', '.join(_TORCHVISION)}")
  if not model.embedding_dim:
    wrong.append("model.embedding_dim is 0, so it has no last layer")
  if wrong:
    raise ValueError(
      f"this model is not a ResNet of torchvision ({'; '.join(wrong)}): use --format=stablehlo, "
      "which takes any model"
    )
  more = {
    "input": _input(network)
    | {"dtype": "float32", "shape": ["b", 3, network.image_size, network.image_size]},
    "normalisation": {
      "where": "by the caller: (pixels / 255 - mean) / std, then channels first",
      "mean": list(embedding.IMAGE_MEAN),
      "std": list(embedding.IMAGE_STD),
    },
    "output": {
      "shape": ["b", int(model.embedding_dim)],
      "dtype": "float32",
      "norm": "not normalized: use torch.nn.functional.normalize(model(images))",
    },
    "head": "fc.weight [D, F] and fc.bias [D] in the same file: torchvision's last layer, with "
    "num_classes = D",
    "load": f"model = torchvision.models.{model.name}(num_classes={model.embedding_dim}).eval(); "
    "model.load_state_dict(safetensors.torch.load_file(FILE))",
  }
  return safetensors.save(to_torchvision(network.variables), metadata={"format": "pt"}), more


def _input(network: network_lib.Network) -> dict[str, Any]:
  if network.features:
    return {"shape": ["b", network.features], "dtype": "float32", "values": "stored embeddings"}
  size = network.image_size
  return {"shape": ["b", size, size, 3], "dtype": "uint8", "values": "RGB, 0 to 255"}


def _preprocessing(network: network_lib.Network) -> dict[str, Any]:
  """Describes what happens to the input before the first layer."""
  if network.features:
    where = "inside the model, which divides each vector by its norm: give the features as they are"
    return {"normalisation": {"where": where}}
  model: Any = build.make_model(network.config, freeze_bn=True)
  interpolation = network.config.eval.interpolation
  return {
    "preprocessing": [
      "turn the image upright by its EXIF orientation; transparent pixels become white; 8-bit RGB",
      f"resize the shorter side to {network.resize} pixels, {interpolation} with antialiasing "
      f"(Pillow's {interpolation.upper()})",
      f"crop the center, {network.image_size} x {network.image_size} pixels",
    ],
    "normalisation": {
      "where": "inside the model",
      "mean": list(model.mean),
      "std": list(model.std),
    },
  }


def _description(network: network_lib.Network) -> dict[str, Any]:
  return {
    "input": _input(network),
    **_preprocessing(network),
    "output": {
      "shape": ["b", build.embedding_width(network.config)],
      "dtype": "float32",
      "norm": "1: inner products are cosine similarities",
    },
    "network": {
      "workdir": str(network.workdir),
      "step": network.step,
      "digest": network.digest,
      "model": json.loads(network.architecture),
    },
    "versions": {"soprc_jax": version.__version__, "jax": jax.__version__},
  }
