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
    class_name: its class, as the data call it.
    similarity: cosine to the query.
  """

  id: str
  class_name: str
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
  one = _OneFile(query)
  pictures.pixels(pictures.as_picture(one[0].image))  # a broken query is no matter of data.on_broken
  vector = trained.embed(trained.variables, one).embeddings
  found = trained.embed(trained.variables, gallery)
  similarities = found.embeddings.astype(np.float64) @ vector[0].astype(np.float64)
  order = np.argsort(-similarities, kind="stable")[:top]
  examples = [gallery[int(found.positions[i])] for i in order]
  return [
    Neighbour(example.id, example.class_name or str(example.label), float(similarities[i]))
    for example, i in zip(examples, order, strict=True)
  ]


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
