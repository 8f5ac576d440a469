"""Embeddings in shards: files, each with a table of ids and labels and with its origin.

A shard is up to three files of one name:

* ``NAME.npy``, ``.fbin`` or ``.h5``: embeddings ``[N, D]``, see `shard_formats`;
* ``NAME.parquet`` or ``NAME.csv``: a column of ids (id, ids or path), one of labels (label, labels
  or class_names), and any others;
* ``NAME.json``: the model that computed them, if `soprc embed` did, and digests of the ids and of
  some embeddings, which a file of another shard does not fit.

The embeddings are written last. So a shard that has them is complete.
"""

from collections.abc import Callable, Sequence
import functools
import glob
import hashlib
import logging
from pathlib import Path
import re
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import printable
from soprc_jax.data import features
from soprc_jax.serving import shard_formats

_log = logging.getLogger(__name__)

FORMAT = "soprc_jax shard 1"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)")
_META = {"rows": int, "width": int} | dict.fromkeys(
  ("format", "digest", "inputs", "dtype", "root"), str
)
# Embeddings in a digest: some, evenly spaced, so that a shard of any size is opened at once.
_SAMPLED = 16


class MixedError(ValueError):
  """Is raised when the files of a shard do not belong together."""


class Shard(NamedTuple):
  """Describes a file of embeddings.

  Attributes:
    path: its file of embeddings.
    layout: where the embeddings are in the file.
    made_by: digest of the model that computed them; empty if unknown.
    inputs: digest of the list of images that it is a part of; empty if unknown.
    root: folder that the ids of these images are relative to; empty if unknown.
    label_rule: how its labels are written, see `soprc_jax.serving.index.Index`; empty if unknown.
    ids: `ids_digest` of them; empty if unknown.
    stored: content of an ``.npz`` file, which is in memory.
  """

  path: Path
  layout: shard_formats.Layout
  made_by: str = ""
  inputs: str = ""
  root: str = ""
  label_rule: str = ""
  ids: str = ""
  stored: features.Features | None = None

  @property
  def rows(self) -> int:
    """The number N of embeddings."""
    return self.layout.rows

  @property
  def width(self) -> int:
    """The number D of their entries."""
    return self.layout.width

  @property
  def dtype(self) -> np.dtype:
    """The type of their entries: float16 or float32."""
    return self.layout.dtype


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
    pattern: a file, a folder with files of one format, or a pattern like ``shards/*.npy``, where
      ``**`` stands for any folders. An ``.npz`` file of `soprc embed` is read into memory.
    flag: name of the pattern in messages.
    may_be_part: whether one file of ``NAME-00000-of-00100.npy`` and so on may be given alone.

  Raises:
    FileNotFoundError: if there is none, or if one of ``NAME-00000-of-00100.npy`` and so on is
      missing.
    ValueError: if a file is truncated or no array ``[N, D]`` of float16 or float32, its origin is
      corrupt, its number is not below the number of shards, or a folder has several formats.
  """
  place = file_io.given(pattern, name=flag)
  where = f"{flag}={printable(pattern)}"
  if place.is_dir():
    place = Path(glob.escape(str(place))) / f"*{_only_suffix(place, where)}"
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


def _only_suffix(folder: Path, where: str) -> str:
  """Returns the suffix of the embeddings in a folder."""
  found = {path.suffix for path in folder.iterdir() if path.suffix in shard_formats.SUFFIXES}
  if len(found) > 1:
    raise ValueError(
      f"{where} has files of several formats, {', '.join(sorted(found))}: give a pattern, e.g. "
      f"'{printable(folder)}/*{min(found)}'"
    )
  return found.pop() if found else ".npy"


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
  """Reads the header of a file, or an ``.npz`` file."""
  why = file_io.why_no_file(path)
  if why:
    raise FileNotFoundError(f"{flag}: {printable(path)} is no regular file ({why})")
  if path.suffix.lower() == ".npz":
    return _in_memory(path, flag)
  found = shard_formats.layout(path)
  return Shard(path, found, **_origin(path, found))


def ids_digest(ids: Sequence[str]) -> str:
  """Returns a hash of the ids of a shard, as `shard_tables.read` returns them."""
  return hashlib.sha256("\n".join(ids).encode(errors="surrogateescape")).hexdigest()


def vectors_digest(gather: Callable[[np.ndarray], np.ndarray], rows: int) -> str:
  """Returns a hash of some embeddings of a shard, which ``gather`` returns for the rows given."""
  sampled = np.unique(np.linspace(0, rows - 1, min(rows, _SAMPLED)).astype(np.int64))
  return hashlib.sha256(gather(sampled).tobytes()).hexdigest()


def _origin(path: Path, found: shard_formats.Layout) -> dict[str, Any]:
  """Returns the attributes of a shard that its ``.json`` has. Earlier versions wrote fewer."""
  beside = path.with_suffix(".json")
  if not beside.exists():
    return {}
  remedy = f"{shard_formats.REMEDY}; a .json file of another program needs another name"
  meta = stored.read_json(beside, _META, remedy=remedy)
  want = (FORMAT, found.rows, found.width, found.dtype.name)
  got = tuple(meta[key] for key in ("format", "rows", "width", "dtype"))
  if got != want:
    raise ValueError(f"{printable(beside)} describes {got}, but the array is {want}: {remedy}")
  gather = functools.partial(shard_formats.gather, path, found)
  if "vectors" in meta and meta["vectors"] != vectors_digest(gather, found.rows):
    raise MixedError(
      f"{printable(path)} has not the embeddings that {beside.name} describes: one of them is of "
      f"another shard. Put the right file there, or {shard_formats.REMEDY}"
    )
  there = {key: str(meta.get(key, "")) for key in ("inputs", "root", "label_rule", "ids")}
  return {"made_by": meta["digest"], **there}


def _in_memory(path: Path, flag: str) -> Shard:
  found = features.load_unlabeled(str(path), name=flag)
  # Without ids, rows get their numbers as ids, which would be those of other vectors too.
  with np.load(path, allow_pickle=False) as arrays:
    if not set(shard_formats.IDS) & set(arrays.files):
      raise ValueError(f"{printable(path)} has no ids ({', '.join(shard_formats.IDS)})")
  layout = shard_formats.Layout(len(found), found.width, np.dtype(np.float32), None)
  return Shard(path, layout, found.made_by, label_rule=found.label_rule, stored=found)


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


def state(shard: Shard) -> str:
  """Returns size and time of the file of a shard. A changed file has another state."""
  found = shard.path.stat()
  return f"{found.st_size} {found.st_mtime_ns}"


def read(shard: Shard, start: int, count: int) -> np.ndarray:
  """Reads some embeddings of a shard, ``[count, D]``.

  Raises:
    ValueError, OSError: as `shard_formats.read`.
  """
  if shard.stored is not None:
    return shard.stored.vectors(np.arange(start, start + count))
  return shard_formats.read(shard.path, shard.layout, start, count)


def gather(shard: Shard, rows: np.ndarray) -> np.ndarray:
  """Reads the embeddings in some rows, ``[n, D]``."""
  if shard.stored is not None:
    return shard.stored.vectors(rows)
  return shard_formats.gather(shard.path, shard.layout, rows)
