"""Provides models of one block, quick to compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.models import EmbeddingNet, ResNet


def tiny(width=4, **settings):
  """Returns a model of one block with all kinds of layers but the strided shortcut."""
  return EmbeddingNet(ResNet((1,), False, width=width, stem="small", **settings), embedding_dim=8)


def images(count, seed=0):
  return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), np.uint8)


@functools.cache
def variables():
  variables = jax.jit(tiny().init)(jax.random.key(0), images(1))
  # Running statistics other than 0 and 1, so that their use shows.
  stats = jax.tree.map(
    lambda leaf: leaf + 0.1 + 0.1 * jnp.arange(leaf.size, dtype=leaf.dtype),
    variables["batch_stats"],
  )
  return {"params": variables["params"], "batch_stats": stats}
