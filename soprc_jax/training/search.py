"""The images of a data set that are nearest to one image."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from soprc_jax.data import pictures, sources
from soprc_jax.training import evaluation


class Neighbour(NamedTuple):
  """An image near a query.

  Attributes:
    id: of the image.
    label: its class.
    similarity: cosine to the query.
  """

  id: str
  label: int
  similarity: float


def nearest(trained: evaluation.Trained, query: Path, *, split: str, top: int) -> list[Neighbour]:
  """The images of a split that are nearest to an image file, the nearest first.

  Args:
    trained: network and data.
    query: image file.
    split: as of `evaluation.pick_split`.
    top: number of images >= 1.

  Raises:
    ValueError: the query is no image; there is no such split.
    FileNotFoundError: there is no such file.
  """
  gallery = evaluation.pick_split(trained.splits, split)
  vector = trained.embed(trained.variables, _OneFile(query)).embeddings
  if not len(vector):
    raise ValueError(f"{query} is no image that can be read")
  found = trained.embed(trained.variables, gallery)
  similarities = found.embeddings.astype(np.float64) @ vector[0].astype(np.float64)
  order = np.argsort(-similarities, kind="stable")[:top]
  return [Neighbour(gallery[int(found.positions[i])].id, int(found.labels[i]), float(similarities[i])) for i in order]


class _OneFile:
  """A source of one image file."""

  labels = np.zeros(1, np.int64)

  def __init__(self, path: Path):
    self._data = path.read_bytes()
    self._path = str(path)

  def __len__(self) -> int:
    return 1

  def __getitem__(self, index: int) -> sources.Example:
    return sources.Example(pictures.Encoded(self._data, self._path), 0, self._path)
