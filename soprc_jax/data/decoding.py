"""Pictures as they are stored: any part of one as upright 8-bit RGB, decoded no finer than
needed.
"""

from collections.abc import Iterator
import contextlib
import errno
import io
import math
import os
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, ImageFile

from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable

Box = tuple[float, float, float, float]
# A header can claim any size: what is larger than this is refused before memory is taken for it.
MAX_PIXELS = 150_000_000
# What a file may be, whatever its name says. Of Pillow's other formats, PostScript would be given
# to Ghostscript, which runs what is in it.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Errors of the machine and not of one file: a run that skips files must not skip these.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ORIENTATION_TAG = 0x0112
_UPRIGHT_ALREADY = 1
_START_OF_SCAN, _END_OF_IMAGE = b"\xda", b"\xff\xd9"
# EXIF orientation -> what makes the stored picture upright.
_UPRIGHT = {
  2: Image.Transpose.FLIP_LEFT_RIGHT,
  3: Image.Transpose.ROTATE_180,
  4: Image.Transpose.FLIP_TOP_BOTTOM,
  5: Image.Transpose.TRANSPOSE,
  6: Image.Transpose.ROTATE_270,
  7: Image.Transpose.TRANSVERSE,
  8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


class BrokenImageError(ValueError):
  """An image that cannot be used; the message names it."""


class Encoded(NamedTuple):
  """The content of an image file.

  Attributes:
    data: the bytes.
    name: what names it in messages.
  """

  data: bytes
  name: str


class Stored(NamedTuple):
  """An image file, read when its picture is made: its names are known without reading it.

  Attributes:
    path: of the file.
    name: what names it in messages.
  """

  path: str | os.PathLike[str]
  name: str

  @property
  def data(self) -> bytes:
    """The bytes, read at each access.

    Raises:
      BrokenImageError: it is no regular file, or cannot be read.
    """
    try:
      return file_io.read_regular(self.path)
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
      if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        raise
      reason = file_io.why_no_file(self.path) or getattr(error, "strerror", None) or str(error)
      raise BrokenImageError(
        f"{printable(self.name)}: this file cannot be read ({reason})"
      ) from error


class Picture(Protocol):
  """A picture of which parts can be taken."""

  @property
  def size(self) -> tuple[int, int]:
    """Height and width in pixels, upright."""

  def region(self, box: Box, size: tuple[int, int]) -> np.ndarray:
    """The part ``box`` = (left, top, right, bottom) resized to ``size`` = (height, width): ``[h, w,
    3]`` uint8, bilinear, antialiased.
    """


def as_picture(image: np.ndarray | Encoded | Stored) -> Picture:
  """A picture of pixels ``[H, W, 3]`` uint8, or of the content of a file.

  Raises:
    BrokenImageError: the file cannot be read, its content is no image, or too large.
    ValueError: the array has another type or shape; Pillow is set to fill broken files up.
  """
  if isinstance(image, Stored):
    image = Encoded(image.data, image.name)
  return _File(image) if isinstance(image, Encoded) else _Pixels(image)


def whole(picture: Picture) -> Box:
  """The box of all of a picture."""
  height, width = picture.size
  return 0, 0, width, height


def pixels(picture: Picture) -> np.ndarray:
  """All of a picture at its own size, ``[H, W, 3]`` uint8."""
  return picture.region(whole(picture), picture.size)


class _Pixels:
  """A picture that is in memory."""

  def __init__(self, array: np.ndarray):
    # Numbers from 0 to 1 would train as a nearly black picture, and grey ones have no channels.
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
      raise ValueError(
        f"pixels must be [H, W, 3] uint8, 0 to 255, RGB; got {array.dtype} {list(array.shape)}"
      )
    self._array = array

  @property
  def size(self) -> tuple[int, int]:
    return self._array.shape[0], self._array.shape[1]

  def region(self, box: Box, size: tuple[int, int]) -> np.ndarray:
    if size == self.size and box == whole(self):
      return self._array
    return _resized(Image.fromarray(self._array), box, size)


class _File:
  """A picture that is decoded at each access: JPEG at 1/2, 1/4 or 1/8 of its size where that is
  fine enough.
  """

  def __init__(self, encoded: Encoded):
    self._encoded = encoded
    if ImageFile.LOAD_TRUNCATED_IMAGES:
      raise ValueError(
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: the missing part of a broken file would be "
        "grey without a word. Leave it off; "
        "data.on_broken=skip takes another image of the class"
      )
    with _named(encoded.name):
      image = _open(encoded)
      width, height = image.size
      # Before the orientation, for which Pillow decodes some formats whole.
      if width * height > MAX_PIXELS:
        raise BrokenImageError(
          f"{printable(encoded.name)}: {width} x {height} pixels are more than {MAX_PIXELS:,}: "
          "resize the file"
        )
      if image.format in ("JPEG", "MPO"):
        if not _has_end(encoded.data):
          raise ValueError("the end of the file is missing")
      else:
        # Tags may follow the pixels (PNG), and a plugin may turn the picture upright as it loads it
        # (TIFF): only a loaded picture says what is left to do. A JPEG has its tags in its header,
        # and a region may need a fraction of its pixels.
        image.load()
      self._orientation = _orientation(image)
    # The first region needs no second reading of the header, which costs a tenth of a small region.
    # But not after an error: what has been decoded until then, Pillow would take for all.
    self._opened: Image.Image | None = image
    width, height = image.size
    self._size = (width, height) if self._orientation in _SIDEWAYS else (height, width)

  @property
  def size(self) -> tuple[int, int]:
    return self._size

  def region(self, box: Box, size: tuple[int, int]) -> np.ndarray:
    # The smallest picture that still has a pixel for every pixel that is asked for.
    scale = max(size[0] / (box[3] - box[1]), size[1] / (box[2] - box[0]))
    with _named(self._encoded.name):
      file, self._opened = self._opened or _open(self._encoded), None
      if scale < 1:
        file.draft(file.mode, (math.ceil(file.size[0] * scale), math.ceil(file.size[1] * scale)))
      file.load()
      image = to_rgb(file)
      if self._orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[self._orientation])
      shrunk_x, shrunk_y = image.size[0] / self._size[1], image.size[1] / self._size[0]
      box = (box[0] * shrunk_x, box[1] * shrunk_y, box[2] * shrunk_x, box[3] * shrunk_y)
      return _resized(image, box, size)


def to_rgb(image: Image.Image) -> Image.Image:
  """8-bit RGB of a loaded picture: what is transparent becomes white, 16-bit grey keeps its high
  byte.

  Raises:
    ValueError: a mode whose range of values is not known.
  """
  mode = image.mode
  # Before transparency: Pillow would clip 16 bit to 8 in the conversion with alpha.
  if mode.startswith("I"):
    return _from_integers(image)
  if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
  if mode == "F":
    raise ValueError("floating-point pixels have no fixed range: convert the file to 8 bit")
  return image if mode == "RGB" else image.convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
  """8-bit RGB of 16-bit grey; the value that stands for transparent becomes white."""
  values = np.asarray(image)
  if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
    raise ValueError(
      f"integer pixels from {values.min()} to {values.max()} are not 16 bit: convert the file to 8 "
      "bit"
    )
  if 0 < values.max(initial=0) < 256:
    raise ValueError(
      f"16-bit pixels of at most {values.max()}: the picture would be black; convert the file to 8 "
      "bit"
    )
  grey = (values // 256).astype(np.uint8)
  if "transparency" in image.info:
    grey[values == image.info["transparency"]] = 255
  return Image.fromarray(grey).convert("RGB")


def _open(encoded: Encoded) -> Image.Image:
  return Image.open(io.BytesIO(encoded.data), formats=FORMATS)


def _resized(image: Image.Image, box: Box, size: tuple[int, int]) -> np.ndarray:
  # Rounding may have moved an edge past the picture by the last bit.
  box = (max(box[0], 0.0), max(box[1], 0.0), min(box[2], image.size[0]), min(box[3], image.size[1]))
  return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box))


def _orientation(image: Image.Image) -> int:
  """Returns the orientation that is left to apply, by EXIF or XMP; 1 if it cannot be read."""
  try:
    orientation = image.getexif().get(_ORIENTATION_TAG)
    return orientation if orientation in _UPRIGHT else _UPRIGHT_ALREADY
  except (
    Exception
  ):  # an EXIF block that cannot be read, in any way that third-party code fails at it
    return _UPRIGHT_ALREADY


def _has_end(jpeg: bytes) -> bool:
  """Whether an end-of-image marker follows the first scan of a JPEG; without one libjpeg makes up
  what is missing, grey or worse.

  A file that was not written to its end can have its full length, zeros in place of the rest.
  """
  place, marker = 2, b""
  while (
    jpeg[place : place + 1] == b"\xff" and marker != _START_OF_SCAN
  ):  # segments: a marker, its length, its content
    marker = jpeg[place + 1 : place + 2]
    place += 1 if marker == b"\xff" else 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
  return jpeg.find(_END_OF_IMAGE, place if marker == _START_OF_SCAN else 0) >= 0


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """Whatever a decoder raises becomes a BrokenImageError that names the image."""
  try:
    yield
  except BrokenImageError:
    raise
  except MemoryError:
    raise
  except (
    Exception
  ) as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and more
    reason = (
      "this is no image that can be read"
      if isinstance(error, Image.UnidentifiedImageError)
      else str(error)
    )
    raise BrokenImageError(f"{printable(name)}: {reason or type(error).__name__}") from error
