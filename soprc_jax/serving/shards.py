"""Embeddings in shards: ``.npy`` files, each with a table of ids and labels and with its origin.

A shard is up to three files of one name:

* ``NAME.npy``: embeddings ``[N, D]``, float32 or float16;
* ``NAME.parquet`` or ``NAME.csv``: a column of ids (id, ids or path), one of labels (label, labels
  or class_names), and any others;
* ``NAME.json``: the model that computed them, if `soprc embed` did.

The ``.npy`` file is written last. So a shard that has it is complete.
"""

from collections.abc import Sequence
import glob
import logging
import os
from pathlib import Path
import re
import tokenize
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import printable
from soprc_jax.data import features

_log = logging.getLogger(__name__)

FORMAT = "soprc_jax shard 1"
# Columns of ids, the preferred one first.
IDS = ("ids", "id", "path")
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)")
_META = {"rows": int, "width": int} | dict.fromkeys(
  ("format", "digest", "inputs", "dtype", "root"), str
)
_REMEDY = "remove the shard, and write it again with soprc embed"
_DTYPES = (np.dtype(np.float16), np.dtype(np.float32))
# Rows that are gathered at a time.
_GATHERED = 1 << 14


class Shard(NamedTuple):
  """Describes a file of embeddings.

  Attributes:
    path: its ``.npy`` or ``.npz`` file.
    rows: number N of embeddings.
    width: number D of their entries.
    dtype: float16 or float32.
    offset: bytes before the first embedding.
    made_by: digest of the model that computed them; empty if unknown.
    inputs: digest of the list of images that it is a part of; empty if unknown.
    root: folder that the ids of these images are relative to; empty if unknown.
    stored: content of an ``.npz`` file, which is in memory.
  """

  path: Path
  rows: int
  width: int
  dtype: np.dtype
  offset: int
  made_by: str
  inputs: str = ""
  root: str = ""
  stored: features.Features | None = None


def name(number: int, count: int) -> str:
  """Returns the name of a shard without its suffix, e.g. ``shard-00003-of-00100``."""
  return f"shard-{number:05d}-of-{count:05d}"


def part(text: str, *, flag: str) -> tuple[int, int]:
  """Returns I and N of "I/N", the shard I of N.

  Raises:
    ValueError: if this is not the text, or not 0 <= I < N.
  """
  match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
  if not match or int(match[1]) >= int(match[2]):
    raise ValueError(f"{flag}={text} must be I/N with 0 <= I < N, e.g. {flag}=0/100")
  return int(match[1]), int(match[2])


def find(pattern: str, *, flag: str, may_be_part: bool = False) -> list[Shard]:
  """Finds shards, sorted by their paths, and checks all but their numbers.

  Args:
    pattern: a file, a folder with ``.npy`` files, or a pattern like ``shards/*.npy``, where ``**``
      stands for any folders. An ``.npz`` file of `soprc embed` is read into memory.
    flag: name of the pattern in messages.
    may_be_part: whether one file of ``NAME-00000-of-00100.npy`` and so on may be given alone.

  Raises:
    FileNotFoundError: if there is none, or if one of ``NAME-00000-of-00100.npy`` and so on is
      missing.
    ValueError: if a file is truncated or no array ``[N, D]`` of float16 or float32, its origin is
      corrupt, or its number is not below the number of shards.
  """
  place = file_io.given(pattern, name=flag)
  where = f"{flag}={printable(pattern)}"
  if place.is_dir():
    place = Path(glob.escape(str(place))) / "*.npy"
  if place.is_file():
    paths = [place]
  else:
    paths = [Path(path) for path in sorted(glob.glob(str(place), recursive=True))]
  if not paths:
    hint = "; a [ in the name of a folder is written [[] in a pattern" if "[" in pattern else ""
    raise FileNotFoundError(f"{where}: there is no such file; give e.g. 'shards/*.npy'{hint}")
  if not (may_be_part and place.is_file()):
    _check_complete(paths, where)
  return find_all(paths, flag=flag)


def find_all(paths: Sequence[Path], *, flag: str) -> list[Shard]:
  """Reads the headers of files, and checks that numbered ones are parts of one list of images.

  Images of different folders may have the same names, which gives a warning.

  Raises:
    FileNotFoundError, ValueError: as `find`.
  """
  found = [_opened(path, flag) for path in paths]
  sets: dict[str, list[Shard]] = {}
  for shard in found:
    if match := _NUMBERED.fullmatch(shard.path.stem):
      sets.setdefault(f"{shard.path.parent}/{match[1]}/{match[3]}", []).append(shard)
  for first, *others in sets.values():
    for other in others:
      if other.inputs != first.inputs:
        raise ValueError(
          f"{printable(other.path)} and {printable(first.path)} are parts of different lists of "
          "images: an image may be missing. Embed all shards from one list"
        )
    moved = next((other for other in others if other.root != first.root), None)
    if moved:
      _log.warning(
        "%s has images of the folder %s, but %s those of %s: if these are not the same images, "
        "embed all shards from one folder.",
        *map(printable, (moved.path, moved.root, first.path, first.root)),
      )
  return found


def _check_complete(paths: list[Path], where: str) -> None:
  """Raises an error if a numbered shard is missing, or is not numbered from 0."""
  numbers: dict[tuple[str, int], set[int]] = {}
  for path in paths:
    if match := _NUMBERED.fullmatch(path.stem):
      key = f"{path.parent / match[1]}-%0{len(match[2])}d-of-{match[3]}{path.suffix}", int(match[3])
      numbers.setdefault(key, set()).add(int(match[2]))
  for (form, count), there in numbers.items():
    if max(there) >= count:
      raise ValueError(
        f"{where}: {printable(form % max(there))} has no number from 0 to {count - 1}: rename it"
      )
    if len(there) < count:
      first = min(set(range(len(there) + 1)) - there)
      raise FileNotFoundError(
        f"{where}: {count - len(there)} of {count} shards are missing, the first is "
        f"{printable(form % first)}: write it with soprc embed --shard={first}/{count}"
      )


def _opened(path: Path, flag: str) -> Shard:
  """Reads the header of an ``.npy`` file, or an ``.npz`` file."""
  why = file_io.why_no_file(path)
  if why:
    raise FileNotFoundError(f"{flag}: {printable(path)} is no regular file ({why})")
  if path.suffix.lower() == ".npz":
    return _in_memory(path, flag)
  with path.open("rb") as file:
    try:
      version = np.lib.format.read_magic(file)
      read = np.lib.format.read_array_header_1_0 if version == (1, 0) else _read_header_2
      shape, is_fortran, dtype = read(file)
    except (ValueError, TypeError, RecursionError, tokenize.TokenError) as error:
      raise ValueError(
        f"{printable(path)} is not a readable .npy file ({error}): give e.g. 'shards/*.npy', or "
        "write it again"
      ) from error
    offset, size = file.tell(), os.fstat(file.fileno()).st_size
  if len(shape) != 2 or not shape[1] or is_fortran or dtype not in _DTYPES:
    raise ValueError(
      f"{printable(path)} must be an array [N, D] of float16 or float32 in C order, got {dtype} "
      f"{list(shape)}{' in Fortran order' if is_fortran else ''}: convert it"
    )
  wanted = offset + shape[0] * shape[1] * dtype.itemsize
  if size != wanted:
    raise ValueError(
      f"{printable(path)} is {'truncated' if size < wanted else 'corrupt'}: it has {size} bytes "
      f"instead of {wanted}. {_REMEDY[0].upper()}{_REMEDY[1:]}"
    )
  return Shard(path, shape[0], shape[1], dtype, offset, *_origin(path, shape, dtype))


def _read_header_2(file: Any) -> Any:
  return np.lib.format.read_array_header_2_0(file)


def _origin(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> tuple[str, str, str]:
  """Returns digests of model and inputs and the root in the ``.json`` of a shard, "" without it."""
  beside = path.with_suffix(".json")
  if not beside.exists():
    return "", "", ""
  remedy = f"{_REMEDY}; a .json file of another program needs another name"
  meta = stored.read_json(beside, _META, remedy=remedy)
  want = (FORMAT, *shape, dtype.name)
  got = tuple(meta[key] for key in ("format", "rows", "width", "dtype"))
  if got != want:
    raise ValueError(f"{printable(beside)} describes {got}, but the array is {want}: {_REMEDY}")
  return meta["digest"], meta["inputs"], meta["root"]


def _in_memory(path: Path, flag: str) -> Shard:
  found = features.load_unlabeled(str(path), name=flag)
  # Without ids, rows get their numbers as ids, which would be those of other vectors too.
  with np.load(path, allow_pickle=False) as arrays:
    if not set(IDS) & set(arrays.files):
      raise ValueError(f"{printable(path)} has no ids ({', '.join(IDS)})")
  return Shard(path, len(found), found.width, np.dtype(np.float32), 0, found.made_by, stored=found)


def check_same_model(shards: list[Shard]) -> None:
  """Raises a ValueError if shards are of different models or widths; the message names two."""
  first = shards[0]
  for one in shards:
    if one.width != first.width:
      raise ValueError(
        f"{printable(one.path)} has width {one.width}, but {printable(first.path)} has "
        f"{first.width}: they are of different models"
      )
    if one.made_by != first.made_by:
      one_model, other = (
        f"model {shard.made_by[:12]}" if shard.made_by else "an unknown model"
        for shard in (one, first)
      )
      raise ValueError(
        f"{printable(one.path)} was computed by {one_model}, but {printable(first.path)} by "
        f"{other}: similarities between models are meaningless. Embed all with one model"
      )


def read(shard: Shard, start: int, count: int) -> np.ndarray:
  """Reads some embeddings of a shard, ``[count, D]``.

  A memory map would keep what it has read in the memory of the process.

  Raises:
    ValueError: if the file has become shorter.
    OSError: if it cannot be read.
  """
  if shard.stored is not None:
    return shard.stored.vectors(np.arange(start, start + count))
  at = shard.offset + start * shard.width * shard.dtype.itemsize
  found = np.fromfile(shard.path, shard.dtype, count * shard.width, offset=at)
  if found.size != count * shard.width:
    raise ValueError(f"{printable(shard.path)} was truncated while it was read: {_REMEDY}")
  return found.reshape(count, shard.width)


def gather(shard: Shard, rows: np.ndarray) -> np.ndarray:
  """Reads the embeddings in some rows, ``[n, D]``."""
  if shard.stored is not None:
    return shard.stored.vectors(rows)
  shape = (shard.rows, shard.width)
  found = np.empty((len(rows), shard.width), shard.dtype)
  for start in range(0, len(rows), _GATHERED):
    part = slice(start, start + _GATHERED)
    # Opened again for each part: closing a map releases the memory of what it has read.
    mapped = np.memmap(shard.path, shard.dtype, "r", shard.offset, shape)
    found[part] = mapped[rows[part]]
  return found
