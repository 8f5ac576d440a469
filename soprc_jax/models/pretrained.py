"""Weights of torchvision's ResNets, by whatever name they are published, as the variables of
`EmbeddingNet`.
"""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np

from soprc_jax._internal import file_io
from soprc_jax.models.embedding import EmbeddingNet
from soprc_jax.models.resnet import RESNETS, ResNet

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
HUB = "hf://"
Variables = dict[str, Any]
# Before this version a file could run code in spite of weights_only: CVE-2025-32434,
# CVE-2026-24747.
SAFE_TORCH = (2, 10)

_STATISTICS = {"running_mean": "mean", "running_var": "var"}
# Hugging Face's ResNet -> torchvision's names; timm's are torchvision's.
_HUGGING_FACE = (
  (r"^resnet\.", ""),
  (r"^embedder\.embedder\.convolution\.", "conv1."),
  (r"^embedder\.embedder\.normalization\.", "bn1."),
  (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.convolution\.", r"layer\1.\2.downsample.0."),
  (
    r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.normalization\.",
    r"layer\1.\2.downsample.1.",
  ),
  (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.convolution\.", r"layer\1.\2.conv\3."),
  (r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.normalization\.", r"layer\1.\2.bn\3."),
  (r"^classifier\.1\.", "fc."),
)


def is_file(source: str) -> bool:
  """Whether `read` takes the source: a weights file, or a name on the Hugging Face hub."""
  return source.startswith(HUB) or source.endswith(SUFFIXES)


def check(source: str, *, name: str = "model.init_from") -> None:
  """Raises an error if there is no file that `read` could read; of a name on the hub only the form
  is checked.

  Args:
    source: see `read`.
    name: of the flag or the config key, for messages.

  Raises:
    FileNotFoundError: no such file.
    ValueError: no path of this machine, or no name on the hub.
  """
  if source.startswith(HUB):
    _hub_parts(source)
    return
  path = file_io.given(source, name=name)
  if not path.is_file():
    what = "it is a folder, not a file of weights" if path.is_dir() else "there is no such file"
    raise FileNotFoundError(f"{name}={source}: {what}")


def read(source: str) -> dict[str, np.ndarray]:
  """The state dict in a file, name -> array, under torchvision's names.

  Args:
    source: a ``.pth``, ``.pt`` or ``.bin`` file (needs torch 2.10; read with ``weights_only``, so
      that nothing in it is executed), a ``.safetensors`` file, or ``hf://USER/REPOSITORY[/FILE]``
      (needs ``huggingface_hub``; FILE is ``model.safetensors`` by default).

  Raises:
    FileNotFoundError: no such file.
    ValueError: the file holds no weights, or two of one name, or the package that reads it is not
      installed.
  """
  check(source)
  path = (
    _from_hub(source) if source.startswith(HUB) else file_io.given(source, name="model.init_from")
  )
  weights = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
  renamed: dict[str, np.ndarray] = {}
  for name, array in weights.items():
    if torchvision_name(name) in renamed:
      raise ValueError(
        f"{source} has two weights for {torchvision_name(name)!r}, one of them as {name!r}: leave "
        "one of them out"
      )
    renamed[torchvision_name(name)] = array
  return renamed


def torchvision_name(name: str) -> str:
  """The name of a weight in torchvision, from timm's, Hugging Face's or a data-parallel wrapper's
  name.

  >>> torchvision_name("resnet.encoder.stages.1.layers.0.layer.2.convolution.weight")
  'layer2.0.conv3.weight'
  """
  name = name.removeprefix("module.")
  renamed = name
  for pattern, replacement in _HUGGING_FACE:
    renamed = re.sub(pattern, replacement, renamed)
  if renamed == name or not name.startswith(("resnet.", "embedder.", "encoder.")):
    return renamed
  # Hugging Face counts stages and convolutions from 0.
  renamed = re.sub(r"^layer(\d+)", lambda match: f"layer{int(match[1]) + 1}", renamed)
  return re.sub(r"\.(conv|bn)(\d+)\.", lambda match: f".{match[1]}{int(match[2]) + 1}.", renamed)


def to_flax(weights: Mapping[str, np.ndarray]) -> Variables:
  """``{"params": ..., "batch_stats": ...}`` of an `EmbeddingNet` around a `ResNet`; ``fc`` becomes
  its head.

  Args:
    weights: state dict under torchvision's names.

  Raises:
    ValueError: a name is both that of a weight and that of a module.
  """
  variables: Variables = {"params": {}, "batch_stats": {}}
  for name, array in weights.items():
    if name.endswith("num_batches_tracked"):
      continue
    collection, path = _flax_path(name)
    node = variables[collection]
    for part in path[:-1]:
      node = node.setdefault(part, {})
      if not isinstance(node, dict):
        break
    if not isinstance(node, dict) or path[-1] in node:
      raise ValueError(
        f"{name!r} names a weight and what is in another one: these are weights of none of "
        f"{', '.join(RESNETS)}"
      )
    # Torch stores kernels as [out, in, height, width] and [out, in].
    node[path[-1]] = np.transpose(array, (2, 3, 1, 0)) if array.ndim == 4 else array.T
  return variables


def architecture(variables: Variables, *, source: str) -> str:
  """The network in `RESNETS` (with torchvision's stem) that the variables are of.

  Args:
    variables: as `to_flax` returns them.
    source: what names the weights in messages.

  Raises:
    ValueError: they are of none of them.
  """
  found = {path: array.shape for path, array in _flat(variables).items() if not _is_head(path)}
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.uint8)
  for name, (stages, bottleneck) in RESNETS.items():
    network = EmbeddingNet(ResNet(stages, bottleneck), embedding_dim=1)
    wanted = _flat(jax.eval_shape(network.init, jax.random.key(0), images))
    if found == {path: leaf.shape for path, leaf in wanted.items() if not _is_head(path)}:
      return name
  names = ", ".join(".".join(path[1:]) for path in list(found)[:3]) or "nothing"
  raise ValueError(
    f"{source} holds the weights of none of {', '.join(RESNETS)} with torchvision's, timm's or "
    f"Hugging Face's names; it has {names}, ..."
  )


def fit(variables: Variables, like: Variables, *, source: str) -> tuple[Variables, bool]:
  """The variables as float32 in the structure of a network; the head stays the network's own where
  the stored one is of another size.

  Args:
    variables: as `to_flax` returns them.
    like: ``{"params": ..., "batch_stats": ...}`` of the network.
    source: what names the weights in messages.

  Returns:
    The variables, and whether the head is the stored one.

  Raises:
    ValueError: the backbone is of another architecture; the first names and shapes that differ are
      told.
  """
  found, wanted = _flat(variables), _flat(like)
  head = {path: leaf for path, leaf in wanted.items() if _is_head(path)}
  has_head = all(path in found and found[path].shape == leaf.shape for path, leaf in head.items())
  problems = [
    f"{'.'.join(path)} is not in it" for path in wanted if not _is_head(path) and path not in found
  ]
  problems += [
    f"{'.'.join(path)} is not in the network"
    for path in found
    if not _is_head(path) and path not in wanted
  ]
  problems += [
    f"{'.'.join(path)}: {found[path].shape} there, {leaf.shape} wanted"
    for path, leaf in wanted.items()
    if not _is_head(path) and path in found and found[path].shape != leaf.shape
  ]
  if problems:
    more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise ValueError(
      f"the weights in {source} are not those of model.* of this config (name, width, stem?):\n  "
      + "\n  ".join(problems[:5])
      + more
    )
  taken = {
    path: (leaf if _is_head(path) and not has_head else found[path])
    for path, leaf in wanted.items()
  }
  # A leaf of the network itself may be abstract, where only the fit is asked for.
  arrays = {
    path: leaf if leaf is wanted[path] else np.asarray(leaf, np.float32)
    for path, leaf in taken.items()
  }
  return _nested(arrays), has_head


def _is_head(path: tuple[str, ...]) -> bool:
  return path[:2] == ("params", "head")


def _flax_path(name: str) -> tuple[str, tuple[str, ...]]:
  """The collection and the keys of a torchvision weight, e.g. of ``layer1.0.bn2.weight``."""
  *modules, leaf = name.split(".")
  if modules == ["fc"]:
    return "params", ("head", "kernel" if leaf == "weight" else "bias")
  module = re.sub(r"^(layer\d)\.(\d+)\.", r"\1_\2.", ".".join(modules))
  module = module.replace("downsample.0", "downsample_conv").replace(
    "downsample.1", "downsample_bn"
  )
  path = ("backbone", *module.split("."))
  if re.search(r"bn\d?$", module):
    path += ("bn",)
    if leaf in _STATISTICS:
      return "batch_stats", (*path, _STATISTICS[leaf])
    return "params", (*path, "scale" if leaf == "weight" else leaf)
  return "params", (*path, "kernel" if leaf == "weight" else leaf)


def _flat(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
  leaves: dict[tuple[str, ...], Any] = {}
  for key, value in tree.items():
    leaves |= _flat(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
  return leaves


def _nested(leaves: Mapping[tuple[str, ...], Any]) -> Variables:
  tree: Variables = {}
  for path, leaf in leaves.items():
    node = tree
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = leaf
  return tree


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
  try:
    from safetensors import SafetensorError, numpy
  except ImportError:
    raise ValueError(
      f"{path}: reading it needs the package safetensors (pip install safetensors)"
    ) from None
  try:
    return numpy.load_file(path)
  except SafetensorError as error:
    raise ValueError(f"{path} is no safetensors file ({error}): fetch it again") from error
  except (AttributeError, KeyError, TypeError) as error:  # what numpy has no type for
    raise ValueError(
      f"{path} has weights of a type that cannot be read ({error}): write them as float32 or "
      "float16"
    ) from error


def _read_torch(path: Path) -> dict[str, np.ndarray]:
  try:
    import torch
  except ImportError:
    raise ValueError(
      f"{path}: reading it needs torch (pip install torch --index-url "
      "https://download.pytorch.org/whl/cpu), once: "
      "experiments.convert_weights writes a checkpoint that does not need it; a .safetensors file "
      "of the weights does not either"
    ) from None
  if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH:
    raise ValueError(
      f"{path}: torch {torch.__version__} may run what is in such a file; install torch >= "
      f"{'.'.join(map(str, SAFE_TORCH))}, or give a "
      ".safetensors file of the weights"
    )
  try:
    content = torch.load(path, map_location="cpu", weights_only=True)
  except (
    Exception
  ) as error:  # pickle, zip and torch errors: whatever is in the file, it is not executed
    raise ValueError(
      f"{path} is no file of weights that can be read without executing it "
      f"({str(error).splitlines()[0] if str(error) else 'empty'}): "
      "give one that torch.save(model.state_dict(), FILE) wrote, or a .safetensors file"
    ) from error
  for key in ("state_dict", "model"):
    if isinstance(content, dict) and isinstance(content.get(key), dict):
      content = content[key]
  if not isinstance(content, dict) or not all(
    isinstance(value, torch.Tensor) for value in content.values()
  ):
    raise ValueError(f"{path} holds no state dict (names and tensors)")
  return {str(name): _array(name, value.detach(), path) for name, value in content.items()}


def _array(name: str, tensor: Any, path: Path) -> np.ndarray:
  try:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
  except (RuntimeError, TypeError) as error:  # sparse, quantized or without data
    raise ValueError(
      f"{path}: {name!r} is no plain tensor ({error}): save model.state_dict() of the float32 model"
    ) from error


def _hub_parts(source: str) -> list[str]:
  """Returns user, repository and file of a name on the hub."""
  parts = source.removeprefix(HUB).split("/")
  if len(parts) < 2 or not all(parts) or ".." in parts:
    raise ValueError(
      f"{source}: a name like hf://USER/REPOSITORY or hf://USER/REPOSITORY/FILE wanted"
    )
  return parts


def _from_hub(source: str) -> Path:
  parts = _hub_parts(source)
  try:
    from huggingface_hub import errors, hf_hub_download
  except ImportError:
    raise ValueError(
      f"{source}: this needs the package huggingface_hub (pip install huggingface_hub)"
    ) from None
  try:
    return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:]) or "model.safetensors"))
  except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
    raise ValueError(
      f"{source} could not be fetched ({error}): fetch the file by other means and give its path"
    ) from error
