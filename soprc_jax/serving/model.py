"""Loads a trained model in Python to embed images and to search among them."""

from collections.abc import Sequence
import functools
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from soprc_jax._internal import checks, file_io
from soprc_jax.data import features, sources
from soprc_jax.serving import converted, image_inputs, search
from soprc_jax.serving import embed as embed_lib
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import checkpoints, parallel
from soprc_jax.training import workdir as workdir_lib

PathLike = str | os.PathLike[str]
Images = PathLike | np.ndarray | Sequence[PathLike] | Sequence[np.ndarray]


class Model:
  """Embeds images with a trained model; `load` makes one.

  Attributes:
    network: the variables of the model and their origin.
  """

  def __init__(self, network: network_lib.Network):
    self.network = network
    self._embed = functools.cache(self._compiled)

  @functools.cached_property
  def _variables(self) -> Any:
    """The variables on the devices, once for all batch sizes."""
    return parallel.replicate(self.network.variables)

  @property
  def config(self) -> ConfigDict:
    """A copy of the run's resolved config; for converted weights, the defaults with their model."""
    return ConfigDict(self.network.config.to_dict())

  def embed(
    self, images: Images, *, batch_size: int | None = None, progress: bool = False
  ) -> np.ndarray:
    """Embeds images with the test transform of the run.

    Args:
      images: a folder, a list (CSV or text file) or one image file; a sequence of paths of files;
        an array ``[H, W, 3]`` or ``[n, H, W, 3]``, uint8 RGB; or a sequence of arrays
        ``[H, W, 3]`` of any sizes. For a head on stored embeddings: a file of them, or an array
        ``[n, F]`` of floats.
      batch_size: images per batch, >= 1; default: ``eval.batch_size``, at most the number of
        images.
      progress: show a progress bar on a terminal; default: False.

    Returns:
      ``[n, D]`` float32 of norm 1 (or 0), in the order of the images. Images of a folder are sorted
      by name.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if there is no image, an image is corrupt, an array is not uint8 RGB, or
        ``batch_size`` is < 1.
    """
    source = _source(images)
    return self._embed(_size(batch_size, self.config, len(source)), progress)(source).embeddings

  def search(
    self, queries: Images, gallery: Images | index_lib.Index, *, top: int = 10
  ) -> list[list[search.Neighbour]]:
    """Finds the images of a gallery that are most similar to each query.

    Args:
      queries: images as in `embed`.
      gallery: images as in `embed`, an index, or the path of an index (``.npz`` file of
        ``soprc embed``).
      top: number of images per query, >= 1; all images if there are fewer.

    Returns:
      For each query its neighbors, the most similar first. Each has an ``id``, a ``class_name``, a
      ``similarity`` (cosine) and a ``place`` (row in the gallery). The id of an array is its place
      as text.

    Raises:
      FileNotFoundError: as `embed`.
      ValueError: as `embed`, or if the index was made by another model.
    """
    checks.check_count("top", top)
    index = self._index(gallery)
    return search.nearest(index, self.embed(queries), top=int(top))

  def _index(self, gallery: Images | index_lib.Index) -> index_lib.Index:
    if isinstance(gallery, index_lib.Index):
      index_lib.check_network(gallery, self.network, name="gallery")
      return gallery
    if isinstance(gallery, (str, os.PathLike)) and index_lib.is_index(Path(gallery)):
      path = file_io.given(gallery, name="gallery")
      index = index_lib.read(path)
      index_lib.check_network(index, self.network, name=f"gallery={path}")
      return index
    source = _source(gallery)
    return embed_lib.make_index(
      self.network, source, embed=self._embed(_size(None, self.config, len(source)), False)
    )

  def _compiled(self, batch_size: int, progress: bool) -> network_lib.EmbedFn:
    config = self.config  # a copy
    config.data.on_broken = "error"  # the result has one row for every image
    config.eval.batch_size = batch_size
    config.log.progress = progress
    return network_lib.make_embed(self.network._replace(config=config), variables=self._variables)


def load(path: PathLike) -> Model:
  """Loads a trained model or converted weights.

  Args:
    path: workdir of a training run (its best checkpoint, else its newest one), the folder
      ``best/`` or ``checkpoints/`` in it, or the output of ``soprc convert-weights``, see
      `soprc_jax.serving.converted`.

  Raises:
    FileNotFoundError: if the folder or its checkpoint does not exist.
    ValueError: if the folder is corrupt or of another kind.
  """
  folder = _given(path, name="path").absolute()
  if folder.is_symlink():  # to best/, for one
    folder = folder.resolve()
  if file_io.why_no_file(folder) == "missing" or not folder.is_dir():
    raise FileNotFoundError(
      f"{folder} is not a folder: give the workdir of a training run, or of soprc convert-weights"
    )
  if converted.is_converted(folder):
    return Model(network_lib.load(folder))
  newest = folder.name == checkpoints.NEWEST
  if (
    folder.name in (checkpoints.BEST, checkpoints.NEWEST)
    and (folder.parent / workdir_lib.CONFIG).exists()
  ):
    return Model(network_lib.load(folder.parent, newest=newest))
  if not newest and not _has_checkpoint(folder / checkpoints.BEST):
    newest = _has_checkpoint(folder / checkpoints.NEWEST)
  return Model(network_lib.load(folder, newest=newest))


def _has_checkpoint(folder: Path) -> bool:
  return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())


def _given(path: PathLike, *, name: str) -> Path:
  if not os.fspath(path):
    raise ValueError(f"{name} is empty: give a path")
  return file_io.given(path, name=name)


def _size(batch_size: int | None, config: ConfigDict, num_images: int) -> int:
  """Returns the batch size, at most the number of images rounded up to a power of two.

  So lists of any length share few compiled functions.
  """
  enough = 1 << max(num_images - 1, 0).bit_length()
  if batch_size is None:
    return min(int(config.eval.batch_size), enough)
  checks.check_count("batch_size", batch_size)
  return min(int(batch_size), enough)


class _Arrays:
  """Provides images in memory; the id of an example is its position."""

  def __init__(self, images: Sequence[np.ndarray]):
    self._images = images
    self.labels = np.zeros(len(images), np.int64)

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> sources.Example:
    return sources.Example(self._images[index], 0, str(index))


def _source(images: Images) -> sources.Source:
  """Returns the source of the given images."""
  if isinstance(images, (str, os.PathLike)):
    return image_inputs.find(str(_given(images, name="images")), flag="images")
  if not isinstance(images, (Sequence, np.ndarray)) or isinstance(images, (bytes, memoryview)):
    raise TypeError(
      f"images must be a path, an array, or a sequence of these, got {type(images).__name__}"
    )
  if isinstance(images, np.ndarray) and images.dtype.kind == "f" and images.ndim in (1, 2):
    if images.ndim == 1:
      raise ValueError(
        f"images of shape {list(images.shape)} is one vector: give an array [N, F], as images[None]"
      )
    return features.from_array(images, name="images")
  given: list[Any] = (
    [images] if isinstance(images, np.ndarray) and images.ndim == 3 else list(images)
  )
  if not given:
    raise ValueError("images is empty: give paths or arrays")
  if all(isinstance(one, (str, os.PathLike)) for one in given):
    paths = [str(_given(one, name="images")) for one in given]
    for path in paths:
      why = file_io.why_no_file(path)
      if why:
        raise FileNotFoundError(
          f"images: {path} is {why if why != 'missing' else 'missing: there is no such file'}"
        )
    return image_inputs.Named(Path.cwd(), paths)
  for place, one in enumerate(given):
    if (
      not isinstance(one, np.ndarray)
      or one.dtype != np.uint8
      or one.ndim != 3
      or one.shape[2] != 3
      or 0 in one.shape
    ):
      what = f"{one.dtype}{list(one.shape)}" if isinstance(one, np.ndarray) else type(one).__name__
      raise ValueError(
        f"images[{place}] must be a uint8 RGB array [H, W, 3] or a path, like all "
        f"others; got {what}"
      )
  return _Arrays(given)
