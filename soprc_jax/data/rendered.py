"""Images that are rendered once and cached: a source in memory, and its file."""

from collections.abc import Callable, Mapping, Sequence
import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np

from soprc_jax._internal import cache, file_io, stored
from soprc_jax.data import sources

_log = logging.getLogger(__name__)


class Rendered:
  """Provides gray images from memory, with three equal channels.

  Args:
    images: ``[N, S, S]`` uint8.
    labels: ``[N]`` integers.
    ids: ``[N]`` names of the images.
    class_names: label -> displayed name; None displays the labels.
    superclasses: label -> superclass; None if they are unknown.
  """

  def __init__(
    self,
    images: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str] | np.ndarray,
    class_names: Mapping[int, str] | None = None,
    superclasses: Mapping[int, str] | None = None,
  ):
    self.class_names = dict(class_names or {})
    self.superclasses = dict(superclasses or {})
    self.images = images
    self.labels = labels
    self.ids = [str(name) for name in ids]

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> sources.Example:
    image = np.repeat(self.images[index][:, :, None], 3, axis=2)
    label = int(self.labels[index])
    return sources.Example(image, label, self.ids[index], self.class_names.get(label, ""))

  def digest(self) -> str:
    """Returns the SHA-256 of all pixels and labels: equal digests mean the same data set."""
    digest = hashlib.sha256(np.ascontiguousarray(self.images).tobytes())
    digest.update(np.ascontiguousarray(self.labels, "<i8").tobytes())
    return digest.hexdigest()


def cached(
  name: str, render: Callable[[], Rendered], root: str | os.PathLike[str] | None = None
) -> Rendered:
  """Returns the images in the cache, or renders them and writes the cache.

  Args:
    name: name of the data set and its version, unique for the pixels that ``render`` returns.
    render: renders the images.
    root: folder of the cache; ``None`` is the user's cache (`soprc_jax._internal.cache`). If it
      cannot be written, a warning is logged and the images are rendered at every start.

  Raises:
    ValueError: ``root`` is not a valid path, or ``render`` raises it.
  """
  what = name.split("-")[0]
  folder = file_io.given(root, name="data.root") if root else None
  try:
    path = cache.file(f"{name}.npz") if folder is None else folder / f"{name}.npz"
  except OSError as error:
    _log.warning("Cannot cache the %s (%s): they will be rendered at every start.", what, error)
    return render()
  if path.exists():
    try:
      return read(path)
    except (OSError, ValueError) as error:
      _log.warning("The cache of %s cannot be used (%s): rendering it again.", what, error)
  images = render()
  try:
    write(path, images)
  except OSError as error:
    _log.warning(
      "Cannot cache the %s in %s (%s): they will be rendered at every start.",
      what,
      path.parent,
      error,
    )
  return images


def versions_key(*more: object) -> str:
  """Returns a hash of the versions that determine the pixels, and of more JSON values."""
  from PIL import features

  versions = [features.version("pil"), features.version("freetype2"), *more]
  return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]


def read(path: Path) -> Rendered:
  """Reads the images that `write` has written.

  Raises:
    OSError: the file is missing or unreadable.
    ValueError: it is corrupt.
  """
  found = stored.read_arrays(path, ("images", "labels", "ids", "digest"))
  images = Rendered(found["images"], found["labels"], found["ids"])
  if images.digest() != str(found["digest"]):
    raise ValueError(f"{path} is corrupt (the checksum does not match)")
  return images


def write(path: Path, images: Rendered) -> None:
  """Writes the images to a file, and creates its folder if it is missing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with file_io.whole(path) as file:
    np.savez(
      file, images=images.images, labels=images.labels, ids=images.ids, digest=images.digest()
    )
