"""Writes the folder of a run of a small model with random weights, without training.

This takes a fraction of a second.
"""

import jax
import numpy as np
import runs
import trees

from soprc_jax.training import build, checkpoints, workdir
from soprc_jax.training.step import TrainState

NUM_CLASSES = 20


def config(root="", **values):
  """Returns the resolved config of a small model on a folder of 20 classes or more."""
  small = {
    "data.source": "folder",
    "data.root": str(root),
    "data.train_share": 0.5,
    "data.val_share": 0.1,
  }
  small |= {"eval.batch_size": 2, "model.embedding_dim": 8, "log.progress": False}
  return runs.tiny_config(**(small | values))


def make(folder, root="", *, seed=0, step=3, **values):
  """Writes the run into a new folder, and returns that folder."""
  made = config(root, **values)
  variables = drawn(build.abstract_network(made), seed)
  workdir.claim(folder, made)
  store = checkpoints.Store(folder / checkpoints.BEST)
  store.save(TrainState(step=np.int32(step), opt_state=(), **variables), {})
  store.close()
  return folder


def with_images(tmp_path_factory):
  """Returns (folder of images, run), both new."""
  root = trees.folder(tmp_path_factory.mktemp("data"), NUM_CLASSES, per_class=2)
  return root, make(tmp_path_factory.mktemp("run") / "run", root)


def drawn(abstract, seed=0):
  """Returns variables of a model with random values, from their shapes."""
  rng = np.random.default_rng(seed)
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: _draw(path[-1].key, leaf, rng), abstract
  )


def _draw(name, leaf, rng):
  if name == "kernel":
    return np.float32(rng.normal(size=leaf.shape) * np.sqrt(2 / np.prod(leaf.shape[:-1])))
  return np.float32(
    rng.uniform(0.5, 1.5, leaf.shape)
    if name in ("scale", "var")
    else rng.normal(size=leaf.shape) / 10
  )
