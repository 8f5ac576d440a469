"""The weights and inputs that goldens/resnet.npz was computed with, made again from their rule, in the tree of `EmbeddingNet`."""

import re

import numpy as np

_SEED = 7
SIZES = [(224, 224), (256, 256), (97, 131)]


def state_dict(entries):
  """Torch's state dict, name -> float64 array, from the ``[name, shape]`` pairs of the golden file."""
  return {name: _draw(name, shape, np.random.default_rng([_SEED, i])) for i, (name, shape) in enumerate(entries)}


def images(height, width):
  """``[2, H, W, 3]`` normalised pixels."""
  rng = np.random.default_rng([_SEED, 10000, SIZES.index((height, width))])
  return np.transpose(rng.standard_normal((2, 3, height, width)), (0, 2, 3, 1))


def cotangent():
  """``[2, 512]`` c, of the scalar sum(head * c) whose gradient is stored."""
  return np.random.default_rng([_SEED, 20000]).standard_normal((2, 512))


def to_flax(weights):
  """``{"params": ..., "batch_stats": ...}`` of an `EmbeddingNet` around a `ResNet`, from torchvision's names."""
  variables = {"params": {}, "batch_stats": {}}
  for name, array in weights.items():
    if name.endswith("num_batches_tracked"):
      continue
    collection, path = flax_path(name)
    node = variables[collection]
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = np.transpose(array, (2, 3, 1, 0)) if array.ndim == 4 else array.T
  return variables


def flax_path(name):
  """The collection and the keys of a torchvision parameter, e.g. layer1.0.bn2.weight."""
  *modules, leaf = name.split(".")
  if modules == ["fc"]:
    return "params", ("head", "kernel" if leaf == "weight" else "bias")
  module = ".".join(modules)
  module = re.sub(r"^(layer\d)\.(\d+)\.", r"\1_\2.", module)
  module = module.replace("downsample.0", "downsample_conv").replace("downsample.1", "downsample_bn")
  path = ("backbone", *module.split("."))
  if re.search(r"bn\d?$", module):
    path += ("bn",)
    moved = {"running_mean": "mean", "running_var": "var"}
    if leaf in moved:
      return "batch_stats", (*path, moved[leaf])
    return "params", (*path, "scale" if leaf == "weight" else "bias")
  return "params", (*path, "kernel")


def _draw(name, shape, rng):
  leaf = name.rsplit(".", 1)[-1]
  if leaf == "num_batches_tracked":
    return np.zeros(shape)
  if leaf == "running_var":
    return rng.uniform(0.5, 1.5, shape)
  if leaf in ("running_mean", "bias"):
    return 0.1 * rng.standard_normal(shape)
  if len(shape) == 1:
    return rng.uniform(0.3, 0.7, shape)
  return rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
