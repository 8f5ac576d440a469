"""Finds the typefaces of a folder of fonts, leaves out near duplicates, and draws characters."""

from collections.abc import Iterable, Sequence
import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from soprc_jax._internal.strings import printable

_COLLECTIONS = (".otc", ".ttc")
EXTENSIONS = (*_COLLECTIONS, ".otf", ".ttf")
# A face is compared with others on this many characters of each script, at this size.
_COMPARED, _COMPARED_SIDE = 25, 24
# They are chosen, evenly spaced, from this many characters that most faces have.
_COMMON = 1000
# Characters of a face are compared with each other at this side.
_CHECKED_SIDE = 20
# Two faces can be compared if they share this many of them.
_LEAST_SHARED = 8
# Share of the canvas that a line of text takes.
_TEXT_SHARE = 0.74


class Face(NamedTuple):
  """A typeface, which is one font of a file.

  Attributes:
    path: file.
    number: position of the font in its file.
    codes: code points that the face has, of those asked for, ascending.
  """

  path: Path
  number: int
  codes: np.ndarray

  @property
  def name(self) -> str:
    """The name of the file, and the position if the file is a collection."""
    is_collection = self.path.suffix.lower() in _COLLECTIONS
    return f"{self.path.stem}-{self.number}" if is_collection else self.path.stem


def files(folder: Path | None) -> list[Path]:
  """Returns the font files below a folder, by file name; None is the fonts of the system.

  The order depends on the names of the files, not on their folders. So packages that are installed
  and packages that are unpacked elsewhere have the same order. Links to folders are not followed.
  """
  if folder is None:
    from matplotlib import font_manager

    found = {Path(path) for path in font_manager.findSystemFonts()}
  else:
    found = {path for path in folder.rglob("*") if path.is_file()}
  usable = [path for path in found if path.suffix.lower() in EXTENSIONS]
  return sorted(usable, key=lambda path: (path.name, path.stat().st_size, path.as_posix()))


def read(
  paths: Iterable[Path], codes: Iterable[int], *, least: int
) -> tuple[list[Face], list[str]]:
  """Reads the character tables of font files.

  Args:
    paths: font files.
    codes: code points of interest.
    least: a face with fewer of them is left out.

  Returns:
    The faces in the order of the files, and a message for each file that cannot be read.
  """
  wanted, faces, broken = set(codes), list[Face](), list[str]()
  for path in paths:
    try:
      for index, table in enumerate(_tables(path)):
        found = np.array(sorted(wanted & table), np.int64)
        if len(found) >= least:
          font(path, index, 16)
          faces.append(Face(path, index, found))
    except Exception as error:  # fontTools raises a dozen kinds for corrupt files
      broken.append(f"{printable(str(path))} ({type(error).__name__}: {printable(str(error))})")
  return faces, broken


def _tables(path: Path) -> list[set[int]]:
  """Returns the code points of each font of a file."""
  from fontTools import ttLib

  logger = logging.getLogger("fontTools")
  level = logger.level
  logger.setLevel(logging.CRITICAL)  # it warns of small faults in tables that are not used
  try:
    with path.open("rb") as file:  # fontTools does not close the file of a corrupt font
      if path.suffix.lower() in _COLLECTIONS:
        found = ttLib.TTCollection(file, lazy=True).fonts
      else:
        found = [ttLib.TTFont(file, lazy=True)]
      return [set(one.getBestCmap() or {}) for one in found]
  finally:
    logger.setLevel(level)


def unambiguous(face: Face) -> Face:
  """Returns a face with only those characters whose pixels are not blank and not another one's.

  Some fonts have placeholders for characters that they lack. Some Korean fonts show a Han character
  as the syllable that it is read as.
  """
  pen = font(face.path, face.number, _CHECKED_SIDE)
  places: dict[bytes, list[int]] = {}
  for code in face.codes.tolist():
    image = draw(pen, code, 2 * _CHECKED_SIDE)
    if image is not None:
      pixels = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
      places.setdefault(pixels, []).append(code)
  own = sorted(codes[0] for codes in places.values() if len(codes) == 1)
  return face._replace(codes=np.array(own, np.int64))


def distinct(faces: Sequence[Face], *, highest: float) -> list[Face]:
  """Returns the faces without near duplicates: renamed copies, widths and similar weights.

  Faces are compared on characters that many of them have, each cropped to its ink and resized. Two
  faces whose mean correlation of pixels is above ``highest`` look alike. Of these the first one in
  the order is kept.

  Args:
    faces: at least one.
    highest: correlation in [-1, 1].
  """
  sample = _sample(faces)
  kept: list[Face] = []
  pixels = np.zeros((0, len(sample), _COMPARED_SIDE**2), np.float32)
  for face in faces:
    own = _normalized(face, sample)
    shared = np.any(pixels, axis=2) & np.any(own, axis=1)
    counts = shared.sum(1)
    alike = np.einsum("fcp,cp->f", pixels, own) / np.maximum(counts, 1)
    if not np.any((counts >= _LEAST_SHARED) & (alike > highest)):
      kept.append(face)
      pixels = np.concatenate([pixels, own[None]])
  return kept


def _sample(faces: Sequence[Face]) -> list[int]:
  """Returns characters that many faces have, of Han and of the other scripts."""
  codes, counts = np.unique(np.concatenate([face.codes for face in faces]), return_counts=True)
  chosen: list[int] = []
  for part in (codes < 0xA000, codes >= 0xA000):
    common = codes[part][np.argsort(-counts[part], kind="stable")][:_COMMON]
    chosen += common[:: max(len(common) // _COMPARED, 1)].tolist()
  return chosen


def _normalized(face: Face, codes: Sequence[int]) -> np.ndarray:
  """Returns the pixels ``[C, P]`` of characters, of mean 0 and norm 1; else 0."""
  pixels = np.zeros((len(codes), _COMPARED_SIDE**2), np.float32)
  has = set(face.codes.tolist())
  pen = font(face.path, face.number, 2 * _COMPARED_SIDE)
  for row, code in enumerate(codes):
    image = draw(pen, code, 4 * _COMPARED_SIDE) if code in has else None
    if image is not None:
      size = (_COMPARED_SIDE, _COMPARED_SIDE)
      small = image.crop(image.getbbox()).resize(size, Image.Resampling.BOX)
      flat = np.asarray(small, np.float32).ravel()
      flat -= flat.mean()
      pixels[row] = flat / max(float(np.linalg.norm(flat)), 1e-6)
  return pixels


def pen_for(face: Face, side: int) -> ImageFont.FreeTypeFont:
  """Returns the font of a face for a canvas of ``side`` pixels."""
  return font(face.path, face.number, round(_TEXT_SHARE * side))


def font(path: Path, index: int, size: int) -> ImageFont.FreeTypeFont:
  """Opens a font at a size in pixels.

  Raises:
    OSError: the file is no font.
  """
  # Basic layout: the result must not depend on whether Raqm is installed.
  return ImageFont.truetype(str(path), size, index, layout_engine=ImageFont.Layout.BASIC)


def draw(pen: ImageFont.FreeTypeFont, code: int, side: int) -> Image.Image | None:
  """Draws a character centered, white on black, in gray.

  Args:
    pen: font of the face.
    code: code point.
    side: side of the canvas in pixels.

  Returns:
    The image, or None if the font fails to draw the character or draws nothing.
  """
  image = Image.new("L", (side, side))
  try:
    ImageDraw.Draw(image).text((side / 2, side / 2), chr(code), fill=255, font=pen, anchor="mm")
  except (OSError, Image.DecompressionBombError):  # FreeType cannot draw some, or they are huge
    return None
  return image if image.getbbox() else None
