"""Embeddings of many images with all that a search among them needs, in one ``.npz`` file that
numpy reads without pickle.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax import version
from soprc_jax._internal import file_io
from soprc_jax._internal.strings import shown
from soprc_jax.serving import network as network_lib

FORMAT = "soprc_jax embeddings 1"
_REMEDY = "make it again with soprc embed"
# Name of an array -> kind of its dtype (U text, i integers, f float32) and number of axes.
_ARRAYS = {
  "format": ("U", 0),
  "embeddings": ("f", 2),
  "ids": ("U", 1),
  "class_names": ("U", 1),
  "labels": ("i", 1),
  "positions": ("i", 1),
  "broken_ids": ("U", 1),
  "split": ("U", 0),
  "root": ("U", 0),
  "workdir": ("U", 0),
  "step": ("i", 0),
  "digest": ("U", 0),
  "model": ("U", 0),
  "image_size": ("i", 0),
  "resize": ("i", 0),
  "soprc_jax_version": ("U", 0),
}
_ARCHIVE = b"PK\x03\x04"
_KINDS = {"U": "text", "i": "integers", "f": "float32"}


class Index(NamedTuple):
  """Images as vectors, and what made these.

  Attributes:
    embeddings: ``[N, D]`` float32, of norm 1 (or 0).
    ids: ``[N]`` texts: paths as they were given, or what the data set calls the images.
    class_names: ``[N]`` texts, empty where no class is known.
    labels: ``[N]`` int64, those of the data set; ``[0]`` where there are none.
    positions: ``[N]`` int64, places of the images in what was embedded.
    broken_ids: texts, images that could not be decoded and were left out.
    split: of the data set, empty for images of one's own.
    root: folder that ids of images of one's own are relative to; of a data set, what ``data.root``
      was.
    workdir: of the run of the network.
    step: of its checkpoint.
    digest: of its variables.
    model: its architecture, JSON.
    image_size: side of its images.
    resize: shorter side of a picture before the middle is taken.
    soprc_jax_version: that embedded.
  """

  embeddings: np.ndarray
  ids: np.ndarray
  class_names: np.ndarray
  labels: np.ndarray
  positions: np.ndarray
  broken_ids: np.ndarray
  split: str
  root: str
  workdir: str
  step: int
  digest: str
  model: str
  image_size: int
  resize: int
  soprc_jax_version: str = version.__version__

  @property
  def has_classes(self) -> bool:
    """Whether the class of any image is known."""
    return bool((self.class_names != "").any())


def check_output(path: Path, *, flag: str = "--output", suffix: str = "") -> None:
  """Raises an error if a file cannot be written because of its name, its folder, or another file in
  its place.

  Raises:
    ValueError: not this suffix.
    FileExistsError: it exists.
    FileNotFoundError: its folder does not.
  """
  if suffix and path.suffix.lower() != suffix:
    raise ValueError(f"{flag}={path}: the name must end in {suffix}")
  if path.exists() or path.is_symlink():
    raise FileExistsError(f"{flag}={path} exists: choose a new file")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{flag}={path}: there is no folder {path.parent}")


def write(path: Path, index: Index) -> None:
  """Writes a new file, whole or not at all.

  Raises:
    ValueError, OSError: as `check_output`.
  """
  check_output(path, suffix=".npz")
  arrays = {name: np.asarray(value) for name, value in index._asdict().items()}
  with file_io.whole(path) as file:
    np.savez(file, allow_pickle=False, format=np.asarray(FORMAT), **arrays)


def read(path: Path) -> Index:
  """What `write` has written; nothing in the file is executed, and its shapes and types are
  checked.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is none of `write`, or damaged; the message says where.
  """
  if not path.is_file():
    raise FileNotFoundError(f"--index={path}: there is no such file; soprc embed writes one")
  try:
    with path.open("rb") as stream:
      if (
        stream.read(len(_ARCHIVE)) != _ARCHIVE
      ):  # numpy would take it for a pickle, and say how to load that
        raise ValueError("no .npz file")
      stream.seek(0)
      file = np.load(stream, allow_pickle=False)
      arrays = {name: file[name] for name in _ARRAYS if name in file.files}
  except (
    Exception
  ) as error:  # of zip, of zlib, of headers: whatever a damaged file makes them raise
    raise ValueError(f"--index={path} is no index that can be read ({error}): {_REMEDY}") from error
  problem = _problem(arrays)
  if problem:
    raise ValueError(f"--index={path} is no index of this version ({problem}): {_REMEDY}")
  del arrays["format"]
  return Index(**{name: _plain(array) for name, array in arrays.items()})


def check_network(index: Index, network: network_lib.Network, *, path: Path) -> None:
  """Raises a ValueError if an index was not made by a network."""
  made = f"--index={path} was made by step {index.step} of {index.workdir}"
  if index.digest != network.digest:
    raise ValueError(
      f"{made}, here it is another network, that of step {network.step} of {network.workdir}: "
      "similarities between the two would mean nothing. "
      "Give the --workdir and --checkpoint of then, or make the index again with soprc embed"
    )
  here = (network.architecture, network.image_size, network.resize)
  for name, there, value in zip(
    ("model", "eval.image_size", "eval.resize"), (index.model, index.image_size, index.resize), here
  ):
    if there != value:
      raise ValueError(f"{made} with {name} {shown(there)}, here it is {shown(value)}: {_REMEDY}")


def _plain(array: np.ndarray) -> Any:
  """A scalar as Python's own, text as objects would be: arrays stay."""
  return array if array.ndim else array.item()


def _problem(arrays: dict[str, np.ndarray]) -> str:
  """What is wrong with the arrays of a file; empty if they are those of an index."""
  for name, (kind, ndim) in _ARRAYS.items():
    if name not in arrays:
      return f"{name} is missing"
    array = arrays[name]
    fits = array.dtype == np.float32 if kind == "f" else array.dtype.kind == kind
    if not fits or array.ndim != ndim:
      return (
        f"{name} must be {_KINDS[kind]} of {ndim} axes, it is {array.dtype} {list(array.shape)}"
      )
  if arrays["format"].item() != FORMAT:
    return f"format {shown(arrays['format'].item())} instead of {FORMAT!r}"
  embeddings = arrays["embeddings"]
  count, width = embeddings.shape
  if not (count and width):
    return f"embeddings is empty, {list(embeddings.shape)}"
  for name in ("ids", "class_names", "positions"):
    if len(arrays[name]) != count:
      return f"{name} has {len(arrays[name])} entries for {count} embeddings"
  if len(arrays["labels"]) not in (0, count):
    return f"labels has {len(arrays['labels'])} entries for {count} embeddings"
  if arrays["positions"].min() < 0:
    return f"positions has {arrays['positions'].min()}"
  with np.errstate(over="ignore", invalid="ignore"):
    norms = np.linalg.norm(embeddings, axis=1)
  bad = np.flatnonzero(~((np.abs(norms - 1) < 1e-3) | (norms == 0)))
  return f"embedding {bad[0]} has norm {norms[bad[0]]:g} instead of 1" if bad.size else ""
