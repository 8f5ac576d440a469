"""Provides a source of random images, and samplers over labels of classes of many sizes."""

import numpy as np

from soprc_jax.data import sampler, sources


class Pictures:
  """Provides random images, all different."""

  def __init__(self, labels, size=12):
    self.labels = np.asarray(labels)
    self._images = np.random.default_rng(0).integers(0, 256, (len(labels), size, size, 3), np.uint8)

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), f"picture{index}")


# Class sizes: even ones, ragged ones, one class that dominates, some smaller than K.
LAYOUTS = {
  "even": [8] * 10,
  "ragged": [4, 5, 7, 9, 4, 6, 11, 4, 5, 13],
  "long_tailed": [100, 30, 12, 6, 5, 4, 4, 4],
  "with_small": [1, 2, 3, 8, 5, 4, 2, 9],
}


def labels(layout, seed=0):
  """Returns shuffled labels, far from contiguous."""
  labels = np.repeat(1000 + 17 * np.arange(len(layout)), layout)
  return np.random.default_rng(seed).permutation(labels)


def class_sampler(layout, *, batch_size=16, per_class=4, seed=0, **settings):
  return sampler.ClassSampler(
    labels(layout), batch_size=batch_size, per_class=per_class, seed=seed, **settings
  )
