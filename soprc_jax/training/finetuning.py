"""Chooses which parameters of a model are trained, and each layer's share of the learning rate."""

from collections.abc import Iterable
import re
from typing import Any

from flax import traverse_util

# Folder of the adapters among the parameters (`lora`). The rest of their path is that of a kernel.
ADAPTERS = "lora"
# The layers of a backbone, in order: blocks of transformers, blocks of ResNets, stages of conv3.
# The first pattern that any path matches counts: conv1 of a ResNet is not a layer but its stem.
_LAYERS = (r"^backbone/blocks_(\d+)/", r"^backbone/layer(\d+)_(\d+)/", r"^backbone/conv(\d+)_")
# What comes after the layers, with the learning rate of the head.
_LAST = re.compile(r"^(backbone/(norm|pool|projection)|head)/")
_SHOWN = 6  # paths that a message names


def flat(params: Any) -> dict[str, Any]:
  """Returns path -> array, e.g. ``backbone/layer1_0/conv1/kernel``."""
  found: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
  return found


def nested(leaves: dict[str, Any]) -> Any:
  """Returns the tree of the arrays of `flat`."""
  return traverse_util.unflatten_dict(leaves, sep="/")


def select(params: Any, pattern: str) -> Any:
  """Returns the subtree of the trained parameters.

  Args:
    params: parameters of a run.
    pattern: regular expression that is searched in each path; empty: all parameters are trained.
  """
  if not pattern:
    return params
  return nested({path: leaf for path, leaf in flat(params).items() if re.search(pattern, path)})


def join(params: Any, part: Any) -> Any:
  """Returns the parameters with those of a subtree of `select` replaced."""
  return nested(flat(params) | flat(part))


def check(params: Any, pattern: str) -> None:
  """Raises a ValueError if ``optim.train_only`` leaves no parameter to train.

  Args:
    params: parameters of the model, abstract or not.
    pattern: see `select`.
  """
  if not flat(select(params, pattern)):
    raise ValueError(
      f"optim.train_only={pattern!r} matches no parameter, so nothing would be trained: give a "
      f"regular expression of paths such as {examples(flat(params))}"
    )


def examples(paths: Iterable[str]) -> str:
  """Returns some of the paths, evenly spaced, for a message."""
  paths = list(paths)
  return ", ".join(paths[:: -(-len(paths) // _SHOWN)]) if paths else "none"


def depths(paths: Iterable[str]) -> dict[str, int]:
  """Returns path -> depth of its layer: 0 for stem and embeddings, the largest for the head.

  The depths between are those of the layers in order. Norm, pooling and projection after the blocks
  of a transformer have the depth of the head. An adapter has that of its kernel.

  Args:
    paths: all paths of the parameters of a model, also of frozen ones.

  Raises:
    ValueError: the model has no layers.

  >>> depths(["backbone/conv1/kernel", "backbone/layer1_0/bn1/bn/bias", "head/bias"])
  {'backbone/conv1/kernel': 0, 'backbone/layer1_0/bn1/bn/bias': 1, 'head/bias': 2}
  """
  names = {path: path.removeprefix(f"{ADAPTERS}/") for path in paths}
  for pattern in _LAYERS:
    found = {path: re.search(pattern, name) for path, name in names.items()}
    layers = {path: tuple(map(int, match.groups())) for path, match in found.items() if match}
    if layers:
      break
  else:
    raise ValueError(
      "optim.layer_decay needs a model with layers (blocks_0, layer1_0 or conv1_kernel); this one "
      f"has the parameters {examples(names)}. Set it to 1"
    )
  order = {layer: depth for depth, layer in enumerate(sorted(set(layers.values())), start=1)}
  return {
    path: order[layers[path]] if path in layers else (len(order) + 1) * bool(_LAST.search(name))
    for path, name in names.items()
  }


def rate_factors(paths: Iterable[str], decay: float) -> dict[str, float]:
  """Returns path -> factor of its learning rate: decay^(n - i) for depth i, n that of the head.

  Layer-wise decay of Howard and Ruder, "Universal language model fine-tuning for text
  classification", 2018, as in BEiT.

  Args:
    paths: see `depths`.
    decay: factor from one layer to the one before, in (0, 1].

  Raises:
    ValueError: see `depths`.
  """
  found = depths(paths)
  top = max(found.values())
  return {path: decay ** (top - depth) for path, depth in found.items()}
