"""Encoded images in tar files (WebDataset) and Parquet files, as sources without splits.

Nothing is unpacked: an image is read from its place in the file when it is needed.
"""

from collections.abc import Iterator, Sequence
import os
from pathlib import Path
import tarfile
from typing import Any

import numpy as np

from soprc_jax._internal import strings
from soprc_jax._internal.strings import printable
from soprc_jax.data import decoding, features, image_files, sources

SUFFIXES = (".tar", ".parquet")
# Columns of Parquet files, the preferred one first.
_IMAGES = ("image", "img", "jpg", "png")
_IDS = ("id", "ids", "path")
_LABELS = ("label", "labels", "class_name")


class Tar:
  """Provides the images of a tar file; the class of ``KEY.jpg`` is the text of ``KEY.cls``.

  Args:
    path: path of the file.

  Raises:
    OSError: it cannot be read.
    ValueError: it is compressed, corrupt or truncated, or has no image.
  """

  def __init__(self, path: Path):
    self._path = path
    # Keys, and the first byte and size of each content.
    keys, classes, self._images = list[str](), dict[str, tuple[int, int]](), list[tuple[int, int]]()
    self.ids: list[str] = []
    for member in members(path):
      (key, suffix), place = os.path.splitext(member.name), (member.offset_data, member.size)
      if suffix.lower() in image_files.EXTENSIONS:
        keys.append(key)
        self.ids.append(f"{path}/{member.name}")
        self._images.append(place)
      elif suffix == ".cls":
        classes[key] = place
    if not self.ids:
      raise ValueError(f"{printable(path)} has no image ({', '.join(image_files.EXTENSIONS)})")
    texts = {key: self._read(*place).decode("utf-8", "replace") for key, place in classes.items()}
    self._classes = [strings.class_name(texts.get(key, "")) for key in keys]
    self.labels = np.zeros(len(keys), np.int64)  # a class has no number here

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, index: int) -> sources.Example:
    name = self.ids[index]
    image = decoding.Encoded(self._read(*self._images[index]), name)
    return sources.Example(image, 0, name, self._classes[index])

  def _read(self, offset: int, size: int) -> bytes:
    with self._path.open("rb") as file:
      file.seek(offset)
      return file.read(size)


def members(path: Path) -> Iterator[tarfile.TarInfo]:
  """Yields the regular files of a tar file in their order, without reading them.

  Raises:
    OSError: it cannot be read.
    ValueError: it is compressed, corrupt or truncated.
  """
  with path.open("rb") as file:
    end, at = os.fstat(file.fileno()).st_size, 0
    try:
      with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
        while (member := tar.next()) is not None:
          stop, at = member.offset_data + member.size, tar.offset
          if stop > end:
            break
          if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield member
          # Otherwise they stay in memory.
          tar.members.clear()  # type: ignore[attr-defined]
        at = tar.offset
    except (tarfile.TarError, ValueError, OverflowError):
      member = None
    if member is not None:
      raise ValueError(f"{printable(path)} is truncated: a file in it ends at {stop}")
    file.seek(at)
    if any(file.read(tarfile.BLOCKSIZE)):  # the archive ends with zeros
      raise ValueError(
        f"{printable(path)} is no uncompressed tar file, or is corrupt at byte {at}: give a plain "
        ".tar"
      )


class Parquet:
  """Provides the encoded images of a Parquet file: bytes, or structs with ``bytes``.

  Args:
    path: file with a column ``image`` (or img, jpg, png), optionally ids (``id``, ``path``) and
      labels (``label``).

  Raises:
    ValueError: it is unreadable or has no images, or pyarrow is missing.
  """

  def __init__(self, path: Path):
    self._path = path
    try:
      from pyarrow import parquet

      with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        groups = range(file.num_row_groups)
        self._ends = np.cumsum([file.metadata.row_group(i).num_rows for i in groups])
        self._column = _first(names, _IMAGES)
        ids, labels = _first(names, _IDS), _first(names, _LABELS)
        table = file.read(columns=[name for name in (ids, labels) if name])
    except ImportError:
      raise ValueError(f"{printable(path)} needs pyarrow: pip install pyarrow") from None
    except Exception as error:  # a corrupt file can raise many kinds
      raise ValueError(f"{printable(path)} cannot be read: {error}") from error
    count = int(self._ends[-1]) if len(self._ends) else 0
    if not (self._column and count):
      raise ValueError(f"{printable(path)} has no images ({', '.join(_IMAGES)}), but {names}")
    rows = table[ids].to_pylist() if ids else range(count)
    self.ids = [str(one) if ids else f"{path}/{one}" for one in rows]
    classes = table[labels].to_pylist() if labels else [None] * count
    self._classes = ["" if one is None else strings.class_name(str(one)) for one in classes]
    self._group: tuple[int, list[Any]] = (-1, [])
    self.labels = np.zeros(len(self.ids), np.int64)  # a class has no number here

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, index: int) -> sources.Example:
    group = int(np.searchsorted(self._ends, index, side="right"))
    number, content = self._group  # read at once, since threads share it
    if number != group:
      content = self._read(group)
      self._group = group, content
    value = content[index - int(self._ends[group])]  # negative: from the end of the group
    value = value["bytes"] if isinstance(value, dict) else value
    image = decoding.Encoded(value or b"", self.ids[index])
    return sources.Example(image, 0, self.ids[index], self._classes[index])

  def _read(self, group: int) -> list[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(self._path) as file:
      rows: list[Any] = file.read_row_group(group, columns=[self._column])[0].to_pylist()
    return rows


def _first(names: Sequence[str], known: Sequence[str]) -> str:
  return next((name for name in known if name in names), "")


def has_images(path: Path) -> bool:
  """Returns whether a file is a tar file, or a Parquet file of images but not of embeddings."""
  if path.suffix.lower() == ".tar":
    return True
  if path.suffix.lower() != ".parquet":
    return False
  try:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
      names = file.schema_arrow.names
    return bool(_first(names, _IMAGES) and not _first(names, features.VECTORS))
  except Exception:  # `features` says what is wrong with it
    return False


def load(paths: Sequence[Path]) -> sources.Source:
  """Returns the images of tar and Parquet files, one file after the other.

  Raises:
    OSError, ValueError: as `Tar` and `Parquet`.
  """
  parts = [Tar(path) if path.suffix.lower() == ".tar" else Parquet(path) for path in paths]
  return parts[0] if len(parts) == 1 else sources.Joined(parts)
