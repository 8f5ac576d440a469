"""Reads weights of ResNets and vision transformers as variables of `EmbeddingNet`.

Those of ResNets may have the names of torchvision, timm, Hugging Face, or a data-parallel wrapper;
for vision transformers see `vit_weights`.
"""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from soprc_jax._internal import file_io, stored
from soprc_jax.models import vit_published, vit_weights
from soprc_jax.models.embedding import EmbeddingNet
from soprc_jax.models.resnet import RESNETS, ResNet
from soprc_jax.models.vit import ViT

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
HUB = "hf://"
Variables = dict[str, Any]
# Before this version a file could run code despite weights_only: CVE-2025-32434, CVE-2026-24747.
SAFE_TORCH = (2, 10)

_ONE_FILE = "write it as one file, with model.save_pretrained(FOLDER, max_shard_size='100GB')"
_STATISTICS = {"running_mean": "mean", "running_var": "var"}
# Names of Hugging Face's ResNet -> torchvision's. timm has the names of torchvision.
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
  """Returns whether `read` accepts a source: a weights file, or a name on the Hugging Face hub."""
  return source.startswith(HUB) or source.endswith(SUFFIXES)


def check(source: str, *, name: str = "model.init_from") -> None:
  """Raises an error if there is no file that `read` could read.

  For a name on the hub only the format is checked.

  Args:
    source: see `read`.
    name: name of the flag or the config key, for messages.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the source is neither a local path nor a name on the hub; it is one of several files
      of a model.
  """
  if source.startswith(HUB):
    _hub_parts(source)
    return
  path = file_io.given(source, name=name)
  if not path.is_file():
    what = "it is a folder, not a file of weights" if path.is_dir() else "there is no such file"
    if path.with_name(f"{path.name}.index.json").exists():
      what += f", but the model is in several files next to it: {_ONE_FILE}"
    raise FileNotFoundError(f"{name}={source}: {what}")
  if re.search(r"-\d+-of-(?!0*1\.)\d+\.", path.name):
    raise ValueError(f"{name}={source} is a part of a model in several files: {_ONE_FILE}")


def read(source: str) -> dict[str, np.ndarray]:
  """Reads the state dict of a file, name -> array, and converts it to torchvision's names.

  Args:
    source: a ``.pth``, ``.pt`` or ``.bin`` file (requires torch 2.10; read with ``weights_only``,
      so that nothing in it is executed), a ``.safetensors`` file, or a name
      ``hf://USER/REPOSITORY[/FILE]`` (requires ``huggingface_hub``; FILE defaults to
      ``model.safetensors``).

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file contains no weights, or two with the same name, or the package that reads
      it is not installed.
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
        f"{source} has two weights for {torchvision_name(name)!r}, one of them as {name!r}: remove "
        "one of them"
      )
    renamed[torchvision_name(name)] = array
  return renamed


def torchvision_name(name: str) -> str:
  """Returns torchvision's name of a weight.

  Args:
    name: name in torchvision, timm, Hugging Face, or a data-parallel wrapper.

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


def load(source: str) -> Variables:
  """Reads a file as variables: `read` and `to_flax`, whose errors then name the file."""
  weights = read(source)
  try:
    return to_flax(weights)
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error


def to_flax(weights: Mapping[str, np.ndarray]) -> Variables:
  """Converts weights to the variables of an `EmbeddingNet` with a `ResNet` or a `ViT`.

  Args:
    weights: state dict with torchvision's names, where ``fc`` is the head; or see `vit_weights`.

  Returns:
    ``{"params": ..., "batch_stats": ...}``.

  Raises:
    ValueError: a name is both that of a weight and that of a module; a weight is not finite; see
      `vit_weights.to_flax`.
  """
  if vit_weights.is_vit(weights):
    return vit_weights.to_flax(weights)
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
        f"{name!r} is the name of both a weight and a module: these are weights of none of "
        f"{', '.join(RESNETS)}"
      )
    vit_weights.check_finite(name, array)
    # Torch stores kernels as [out, in, height, width] and as [out, in].
    node[path[-1]] = np.transpose(array, (2, 3, 1, 0)) if array.ndim == 4 else array.T
  return variables


def vit_of(variables: Variables, source: str) -> vit_published.Published | None:
  """Returns what is known of a file with the weights of a vision transformer; None for a ResNet.

  Args:
    variables: as `to_flax` returns them.
    source: the file, see `read`. JSON files next to it are read too.

  Raises:
    ValueError: see `vit_published.describe`; the weights do not fit the architecture.
  """
  params = variables["params"].get("backbone", {})
  if "patch_embed" not in params:
    return None
  found = vit_published.describe(params, lambda name: _beside(source, name), source=source)
  network = EmbeddingNet(ViT(found.architecture), embedding_dim=0)
  images = jax.ShapeDtypeStruct((1, found.image_size, found.image_size, 3), np.uint8)
  like = jax.eval_shape(network.init, jax.random.key(0), images)
  fit(variables, like, source=source, what="one of DINO, DINOv2, DINOv3, CLIP, SigLIP and ResNets")
  return found


def _beside(source: str, name: str) -> dict[str, Any] | None:
  """Returns the content of a JSON file next to a weights file, None if there is none."""
  if source.startswith(HUB):
    user, repository, *file = _hub_parts(source)
    try:
      path = _from_hub("/".join([HUB + user, repository, *file[:-1], name]))
    except ValueError:
      return None
  else:
    path = file_io.given(source, name="model.init_from").parent / name
  if not path.is_file():
    return None
  content: dict[str, Any] = stored.read_json(path, dict, remedy="download it again, or remove it")
  return content


def architecture(variables: Variables, *, source: str) -> str:
  """Returns the name in `RESNETS` (with torchvision's stem) of the model of the variables.

  Args:
    variables: as `to_flax` returns them.
    source: name of the weights, for messages.

  Raises:
    ValueError: they belong to none of these models.
  """
  found = {
    path: array.shape
    for path, array in traverse_util.flatten_dict(variables).items()
    if not _is_head(path)
  }
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.uint8)
  for name, (stages, bottleneck) in RESNETS.items():
    network = EmbeddingNet(ResNet(stages, bottleneck), embedding_dim=1)
    wanted = traverse_util.flatten_dict(jax.eval_shape(network.init, jax.random.key(0), images))
    if found == {path: leaf.shape for path, leaf in wanted.items() if not _is_head(path)}:
      return name
  names = ", ".join(".".join(path[1:]) for path in list(found)[:3]) or "nothing"
  raise ValueError(
    f"{source} contains the weights of none of {', '.join(RESNETS)} with torchvision's, timm's or "
    f"Hugging Face's names, nor of a vision transformer; it has {names}, ..."
  )


def fit(
  variables: Variables,
  like: Variables,
  *,
  source: str,
  what: str = "model.* of this config (check name, width, stem, vit)",
) -> tuple[Variables, bool]:
  """Returns the variables as float32 in the structure of a model.

  If the stored head has another size, the model keeps its own head.

  Args:
    variables: as `to_flax` returns them.
    like: ``{"params": ..., "batch_stats": ...}`` of the model.
    source: name of the weights, for messages.
    what: name of the model, for messages.

  Returns:
    The variables, and whether the head is the stored one.

  Raises:
    ValueError: the backbone has another architecture. The message lists the first names and shapes
      that differ.
  """
  found, wanted = traverse_util.flatten_dict(variables), traverse_util.flatten_dict(like)
  body = [path for path in wanted if not _is_head(path)]
  has_head = all(
    path in found and found[path].shape == wanted[path].shape for path in wanted if _is_head(path)
  )
  problems = [f"{'.'.join(path)} is not in it" for path in body if path not in found]
  problems += [
    f"{'.'.join(path)} is not in the model"
    for path in found
    if not _is_head(path) and not _is_pool(path) and path not in wanted
  ]
  problems += [
    f"{'.'.join(path)}: has shape {found[path].shape}, expected {wanted[path].shape}"
    for path in body
    if path in found and found[path].shape != wanted[path].shape
  ]
  if problems:
    more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise ValueError(
      f"the weights in {source} do not fit {what}:\n  " + "\n  ".join(problems[:5]) + more
    )
  # A leaf of the model may be abstract if the caller only checks the fit.
  arrays = {
    path: leaf if _is_head(path) and not has_head else np.asarray(found[path], np.float32)
    for path, leaf in wanted.items()
  }
  return traverse_util.unflatten_dict(arrays), has_head


def _is_head(path: tuple[str, ...]) -> bool:
  return path[:2] == ("params", "head")


def _is_pool(path: tuple[str, ...]) -> bool:
  """Returns whether a weight belongs to what pools features, which a model may leave out."""
  return path[:3] in {("params", "backbone", name) for name in ("pool", "projection")}


def _flax_path(name: str) -> tuple[str, tuple[str, ...]]:
  """Returns the collection and the keys of a torchvision weight, e.g. ``layer1.0.bn2.weight``."""
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
    raise ValueError(f"{path} is not a safetensors file ({error}): download it again") from error
  except (AttributeError, KeyError, TypeError) as error:  # types that numpy lacks
    raise ValueError(
      f"{path} has weights of an unsupported type ({error}): save them as float32 or float16"
    ) from error


def _read_torch(path: Path) -> dict[str, np.ndarray]:
  try:
    import torch
  except ImportError:
    raise ValueError(
      f"{path}: reading it needs torch (pip install torch --index-url "
      "https://download.pytorch.org/whl/cpu) once: soprc convert-weights writes a checkpoint "
      "that does not need torch. A .safetensors file of the weights does not need it either"
    ) from None
  if tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH:
    raise ValueError(
      f"{path}: torch {torch.__version__} may execute code in such a file; install torch >= "
      f"{'.'.join(map(str, SAFE_TORCH))}, or use a .safetensors file of the weights"
    )
  try:
    content = torch.load(path, map_location="cpu", weights_only=True)
  except Exception as error:  # pickle, zip and torch errors; the file is never executed
    raise ValueError(
      f"{path} is not a file of weights that can be read without executing it "
      f"({str(error).splitlines()[0] if str(error) else 'empty'}): "
      "use one that torch.save(model.state_dict(), FILE) wrote, or a .safetensors file"
    ) from error
  for key in ("state_dict", "model"):
    if isinstance(content, dict) and isinstance(content.get(key), dict):
      content = content[key]
  if not isinstance(content, dict) or not all(
    isinstance(value, torch.Tensor) for value in content.values()
  ):
    raise ValueError(
      f"{path} contains no state dict (names and tensors): save model.state_dict() of the model"
    )
  return {str(name): _array(name, value.detach(), path) for name, value in content.items()}


def _array(name: str, tensor: Any, path: Path) -> np.ndarray:
  try:
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
  except (RuntimeError, TypeError) as error:  # sparse, quantized or without data
    raise ValueError(
      f"{path}: {name!r} is not a plain tensor ({error}): save model.state_dict() of the float32 "
      "model"
    ) from error


def _hub_parts(source: str) -> list[str]:
  """Returns user, repository and file of a name on the hub."""
  parts = source.removeprefix(HUB).split("/")
  if len(parts) < 2 or not all(parts) or ".." in parts:
    raise ValueError(
      f"{source}: expected a name like hf://USER/REPOSITORY or hf://USER/REPOSITORY/FILE"
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
      f"{source} could not be downloaded ({error}): download the file by other means and pass its "
      "path"
    ) from error
