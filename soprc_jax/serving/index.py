"""Stores embeddings and image names in one ``.npz`` file, which numpy reads without pickle."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from soprc_jax import version
from soprc_jax._internal import file_io
from soprc_jax._internal.strings import shown
from soprc_jax.serving import network as network_lib

FORMAT = "soprc_jax embeddings 1"
_REMEDY = "recreate it with soprc embed"
# Name of an array -> kind of its dtype (U: text, i: integers, f: float32) and number of axes.
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
  "label_rule": ("U", 0),
}
_ARCHIVE = b"PK\x03\x04"
_KINDS = {"U": "text", "i": "integers", "f": "float32"}


class Index(NamedTuple):
  """Holds embeddings of images, and the model that computed them.

  Attributes:
    embeddings: ``[N, D]`` float32, of norm 1 (or 0).
    ids: ``[N]`` text: paths as given, or the ids of the images in the data set.
    class_names: ``[N]`` text, empty where no class is known.
    labels: ``[N]`` int64 labels of the data set; ``[0]`` if there are none.
    positions: ``[N]`` int64 positions of the images in the embedded source.
    broken_ids: ids of images that could not be decoded and were skipped.
    split: split of the data set; empty for the user's own images.
    root: folder that the ids of the user's own images are relative to; for a data set, the value of
      ``data.root``.
    workdir: workdir of the model's run.
    step: step of its checkpoint.
    digest: digest of its variables.
    model: its architecture as JSON.
    image_size: side of its input images in pixels.
    resize: shorter side in pixels before the center crop.
    soprc_jax_version: version that computed the embeddings.
    label_rule: `soprc_jax.data.label_sets.Rule` of the class names as text; empty: an image has one
      class.
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
  label_rule: str = ""

  @property
  def has_classes(self) -> bool:
    """Whether the class of any image is known."""
    return bool((self.class_names != "").any())


def check_output(path: Path, *, flag: str = "--output", suffix: str = "") -> None:
  """Raises an error if a new file cannot be written because of its name, its folder or a file.

  Args:
    path: the new file.
    flag: its flag, for messages.
    suffix: required suffix; empty: any.

  Raises:
    ValueError: if the name has another suffix.
    FileExistsError: if the file exists.
    FileNotFoundError: if its folder does not exist.
  """
  if suffix and path.suffix.lower() != suffix:
    raise ValueError(f"{flag}={path}: the name must end in {suffix}")
  if path.exists() or path.is_symlink():
    raise FileExistsError(f"{flag}={path} exists: choose a new file")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{flag}={path}: there is no folder {path.parent}")


def write(path: Path, index: Index) -> None:
  """Writes an index to a new file atomically.

  Raises:
    ValueError, OSError: as `check_output`.
  """
  check_output(path, suffix=".npz")
  arrays = {name: np.asarray(value) for name, value in index._asdict().items()}
  with file_io.whole(path) as file:
    np.savez(file, allow_pickle=False, format=np.asarray(FORMAT), **arrays)


def is_index(path: Path) -> bool:
  """Returns whether a path is to be read as an index: ``.npz``, but not of features alone."""
  if path.suffix.lower() != ".npz":
    return False
  try:
    with np.load(path, allow_pickle=False) as file:
      return not ("embeddings" in file.files and "format" not in file.files)
  except Exception:  # `read` says what is wrong with it
    return True


def read(path: Path) -> Index:
  """Reads an index that `write` has written, and checks its shapes and types.

  Nothing in the file is executed.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file is corrupt or was not written by `write`; the message says where.
  """
  if not path.is_file():
    raise FileNotFoundError(f"--index={path}: there is no such file; soprc embed writes one")
  try:
    with path.open("rb") as stream:
      if (
        stream.read(len(_ARCHIVE)) != _ARCHIVE
      ):  # numpy would report a pickle, and explain how to load it
        raise ValueError("it is not an .npz file")
      stream.seek(0)
      file = np.load(stream, allow_pickle=False)
      arrays = {name: file[name] for name in _ARRAYS if name in file.files}
  except Exception as error:  # a corrupt file can raise many errors: of zip, of zlib, of headers
    raise ValueError(f"--index={path} is not a readable index ({error}): {_REMEDY}") from error
  problem = _problem(arrays)
  if problem:
    raise ValueError(f"--index={path} is not an index of this version ({problem}): {_REMEDY}")
  del arrays["format"]
  return Index(**{name: array if array.ndim else array.item() for name, array in arrays.items()})


def check_network(index: Index, network: network_lib.Network, *, name: str) -> None:
  """Raises a ValueError if an index, which ``name`` names in the message, is of another model."""
  made = f"{name} was made by step {index.step} of {index.workdir}"
  if index.digest != network.digest:
    raise ValueError(
      f"{made}, but the model here is that of step {network.step} of {network.workdir}: "
      "similarities between the two models are meaningless. "
      "Give the --workdir and --checkpoint of the index, or recreate the index with soprc embed"
    )
  here = (network.architecture, network.image_size, network.resize)
  for key, there, value in zip(
    ("model", "eval.image_size", "eval.resize"), (index.model, index.image_size, index.resize), here
  ):
    if there != value:
      raise ValueError(
        f"{made} with {key} {shown(there)}, but here it is {shown(value)}: {_REMEDY}"
      )


def _problem(arrays: dict[str, np.ndarray]) -> str:
  """Returns what is wrong with the arrays of a file; empty if they are a valid index."""
  for name, (kind, ndim) in _ARRAYS.items():
    if name not in arrays:
      return f"{name} is missing"
    array = arrays[name]
    fits = array.dtype == np.float32 if kind == "f" else array.dtype.kind == kind
    if not fits or array.ndim != ndim:
      return (
        f"{name} must be {_KINDS[kind]} with {ndim} axes, got {array.dtype} {list(array.shape)}"
      )
  if arrays["format"].item() != FORMAT:
    return f"format is {shown(arrays['format'].item())} instead of {FORMAT!r}"
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
    return f"positions must be >= 0, got {arrays['positions'].min()}"
  with np.errstate(over="ignore", invalid="ignore"):
    norms = np.linalg.norm(embeddings, axis=1)
  bad = np.flatnonzero(~((np.abs(norms - 1) < 1e-3) | (norms == 0)))
  return f"embedding {bad[0]} has norm {norms[bad[0]]:g} instead of 1" if bad.size else ""
