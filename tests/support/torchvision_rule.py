"""Recreates the weights and inputs of goldens/resnet.npz from their rule."""

import numpy as np

_SEED = 7
SIZES = [(224, 224), (256, 256), (97, 131)]


def state_dict(entries):
  """Returns torch's state dict, name -> float64 array. ``entries`` are the ``[name, shape]`` pairs
  of the golden file.
  """
  return {
    name: _draw(name, shape, np.random.default_rng([_SEED, i]))
    for i, (name, shape) in enumerate(entries)
  }


def images(height, width):
  """Returns ``[2, H, W, 3]`` normalized pixels."""
  rng = np.random.default_rng([_SEED, 10000, SIZES.index((height, width))])
  return np.transpose(rng.standard_normal((2, 3, height, width)), (0, 2, 3, 1))


def cotangent():
  """Returns c, ``[2, 512]``, of the scalar sum(head * c) whose gradient is stored."""
  return np.random.default_rng([_SEED, 20000]).standard_normal((2, 512))


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
