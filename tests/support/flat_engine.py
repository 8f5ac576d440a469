"""Provides a kind of index that compares all vectors, so that tests need no package."""

import numpy as np

from soprc_jax.serving import shard_engines


class _Flat:
  def __init__(self, rows=()):
    self._rows = list(rows)

  def add(self, vectors, first):
    assert first == len(self._rows)
    self._rows += list(vectors)

  def search(self, queries, count):
    products = queries @ np.array(self._rows).T
    found = np.argsort(-products, axis=1, kind="stable")[:, :count]
    return np.pad(found, ((0, 0), (0, count - found.shape[1])), constant_values=-1)

  def save(self, file):
    np.save(file, np.array(self._rows))


class _Blind(_Flat):
  """Finds none of the rows with an odd number."""

  def search(self, queries, count):
    found = super().search(queries, len(self._rows))
    found = np.array([row[row % 2 == 0] for row in found])[:, :count]
    return np.pad(found, ((0, 0), (0, count - found.shape[1])), constant_values=-1)


def install(monkeypatch, *, is_blind=False, sample=0):
  """Adds the kind ``flat``; returns a list to which the samples that it is trained on are added."""
  make, samples = _Blind if is_blind else _Flat, []

  def made(width, rows, given):
    samples.append(given)
    return make()

  kind = shard_engines.Kind(
    ".faiss", lambda rows: min(rows, sample), made, lambda path: make(np.load(path))
  )
  monkeypatch.setitem(shard_engines.KINDS, "flat", kind)
  return samples
