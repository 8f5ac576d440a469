"""Decodes regions of stored images as upright 8-bit RGB, at no higher resolution than needed."""

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
# A header can claim any size. Larger images are rejected before memory is allocated for them.
MAX_PIXELS = 150_000_000
# Accepted formats, independent of the file's name. Another format of Pillow is PostScript, which it
# passes to Ghostscript. Ghostscript would execute the file.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Errors of the machine, not of one file. A run that skips unreadable files must not skip these.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ORIENTATION_TAG = 0x0112
_UPRIGHT_ALREADY = 1
_START_OF_IMAGE, _START_OF_SCAN, _END_OF_IMAGE = b"\xff\xd8", b"\xda", b"\xff\xd9"
# EXIF orientation -> the operation that turns the stored image upright.
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
  """Signals an image that cannot be used; the message names it."""


class Encoded(NamedTuple):
  """Holds the content of an image file.

  Attributes:
    data: the bytes.
    name: the name in messages.
  """

  data: bytes
  name: str


class Stored(NamedTuple):
  """Refers to an image file, which is read only when it is decoded.

  Attributes:
    path: path of the file.
    name: the name in messages.
  """

  path: str | os.PathLike[str]
  name: str

  @property
  def data(self) -> bytes:
    """The bytes, read from the file at each access.

    Raises:
      BrokenImageError: if it is not a regular file or cannot be read.
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


# How pixels are resized, both as in Pillow.
INTERPOLATIONS = ("bilinear", "bicubic")


class Picture(Protocol):
  """Gives access to regions of an image."""

  @property
  def size(self) -> tuple[int, int]:
    """Height and width in pixels, upright."""

  def region(self, box: Box, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    """Returns a region of the image as ``[h, w, 3]`` uint8, resized with antialiasing.

    Args:
      box: (left, top, right, bottom) of the region, in pixels of the upright image.
      size: (height, width) of the result.
      interpolation: one of `INTERPOLATIONS`.
    """


def as_picture(image: np.ndarray | Encoded | Stored) -> Picture:
  """Returns a `Picture` of pixels ``[H, W, 3]`` uint8 or of an image file.

  Raises:
    BrokenImageError: if the file cannot be read, its content is not an image, or it is too large.
    ValueError: if the array has another type or shape, or if Pillow is set to fill in the missing
      part of truncated files.
  """
  if isinstance(image, Stored):
    image = Encoded(image.data, image.name)
  return _File(image) if isinstance(image, Encoded) else _Pixels(image)


class Kept:
  """Keeps decoded images in memory, so that a run decodes each file of a small folder once.

  Decoding takes two thirds of the time to load a PNG of 64 pixels. A JPEG is not kept, since it is
  decoded at the size that is needed.

  Args:
    limit: bytes that are kept at most. Images beyond that are decoded at each access.
  """

  def __init__(self, limit: int = 2**29):
    self._left, self._images = limit, dict[int, np.ndarray]()

  def __call__(
    self, key: int, image: np.ndarray | Encoded | Stored
  ) -> np.ndarray | Encoded | Stored:
    """Returns the pixels of an image file if they are kept, else the image.

    Args:
      key: number of the image.
      image: the image.

    Raises:
      BrokenImageError: see `as_picture`.
    """
    found = self._images.get(key)
    if found is not None or isinstance(image, np.ndarray) or self._left <= 0:
      return image if found is None else found
    if isinstance(image, Stored):
      image = Encoded(image.data, image.name)
    if image.data.startswith(_START_OF_IMAGE):
      return image
    found = self._images[key] = pixels(as_picture(image))
    self._left -= found.nbytes
    return found


def whole(picture: Picture) -> Box:
  """Returns the box of the whole image."""
  height, width = picture.size
  return 0, 0, width, height


def pixels(picture: Picture) -> np.ndarray:
  """Returns the whole image at its own size, ``[H, W, 3]`` uint8."""
  return picture.region(whole(picture), picture.size)


class _Pixels:
  """Gives access to an image that is in memory."""

  def __init__(self, array: np.ndarray):
    # Values from 0 to 1 would train as a nearly black image, and gray images have no channel axis.
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
      raise ValueError(
        f"pixels must be [H, W, 3] uint8, 0 to 255, RGB; got {array.dtype} {list(array.shape)}"
      )
    self._array = array

  @property
  def size(self) -> tuple[int, int]:
    return self._array.shape[0], self._array.shape[1]

  def region(self, box: Box, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    if size == self.size and box == whole(self):
      return self._array
    return _resized(Image.fromarray(self._array), box, size, interpolation)


class _File:
  """Decodes an image file at each access; a JPEG at 1/2, 1/4 or 1/8 of its size if possible."""

  def __init__(self, encoded: Encoded):
    self._encoded = encoded
    if ImageFile.LOAD_TRUNCATED_IMAGES:
      raise ValueError(
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: the missing part of a truncated file would be "
        "gray without a warning. Turn it off; data.on_broken=skip takes another image of the class"
      )
    with _named(encoded.name):
      image = _open(encoded)
      width, height = image.size
      # Checked before the orientation, for which Pillow decodes some formats completely.
      if width * height > MAX_PIXELS:
        raise BrokenImageError(
          f"{printable(encoded.name)}: {width} x {height} pixels are more than {MAX_PIXELS:,}: "
          "resize the image"
        )
      if image.format in ("JPEG", "MPO"):
        if not _has_end(encoded.data):
          raise ValueError("the end of the file is missing")
      else:
        # Tags may follow the pixels (PNG), and a plugin may turn the image upright while loading it
        # (TIFF). So the orientation is read after loading. A JPEG has its tags in its header, and a
        # region may need a fraction of its pixels.
        image.load()
      self._orientation = _orientation(image)
    # The first region reuses this object: parsing the header again costs a tenth of a small region.
    # After an error it is not reused, since Pillow would take the partly decoded image as complete.
    self._opened: Image.Image | None = image
    width, height = image.size
    self._size = (width, height) if self._orientation in _SIDEWAYS else (height, width)

  @property
  def size(self) -> tuple[int, int]:
    return self._size

  def region(self, box: Box, size: tuple[int, int], interpolation: str = "bilinear") -> np.ndarray:
    # The smallest decoded size that still has a pixel for every pixel of the result.
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
      return _resized(image, box, size, interpolation)


def to_rgb(image: Image.Image) -> Image.Image:
  """Converts a loaded image to 8-bit RGB.

  Transparent pixels become white. 16-bit gray keeps its high byte.

  Raises:
    ValueError: if the mode has no known range of values.
  """
  mode = image.mode
  # Checked before transparency: the conversion with alpha would clip 16 bit to 8.
  if mode.startswith("I"):
    return _from_integers(image)
  if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
  if mode == "F":
    raise ValueError("floating-point pixels have no fixed range: convert the file to 8 bit")
  return image if mode == "RGB" else image.convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
  """Converts 16-bit gray to 8-bit RGB; the value that stands for transparent becomes white."""
  values = np.asarray(image)
  if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
    raise ValueError(
      f"integer pixels from {values.min()} to {values.max()} are not 16 bit: convert the file to 8 "
      "bit"
    )
  if 0 < values.max(initial=0) < 256:
    raise ValueError(
      f"16-bit pixels of at most {values.max()}: the image would be black; convert the file to 8 "
      "bit"
    )
  grey = (values // 256).astype(np.uint8)
  if "transparency" in image.info:
    grey[values == image.info["transparency"]] = 255
  return Image.fromarray(grey).convert("RGB")


def _open(encoded: Encoded) -> Image.Image:
  return Image.open(io.BytesIO(encoded.data), formats=FORMATS)


def _resized(image: Image.Image, box: Box, size: tuple[int, int], interpolation: str) -> np.ndarray:
  # Rounding may have moved an edge outside the image by one unit in the last place.
  box = (max(box[0], 0.0), max(box[1], 0.0), min(box[2], image.size[0]), min(box[3], image.size[1]))
  return np.asarray(
    image.resize((size[1], size[0]), Image.Resampling[interpolation.upper()], box=box)
  )


def _orientation(image: Image.Image) -> int:
  """Returns the orientation still to apply, from EXIF or XMP; 1 if it cannot be read."""
  try:
    orientation = image.getexif().get(_ORIENTATION_TAG)
    return orientation if orientation in _UPRIGHT else _UPRIGHT_ALREADY
  except Exception:  # an unreadable EXIF block: third-party code may raise anything
    return _UPRIGHT_ALREADY


def _has_end(jpeg: bytes) -> bool:
  """Returns whether an end-of-image marker follows the first scan of a JPEG.

  Without the marker libjpeg fills in the missing part, for example with gray. An incompletely
  written file can have its full length, with zeros in place of the rest.
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
  """Converts each error of a decoder to a BrokenImageError that names the image."""
  try:
    yield
  except (BrokenImageError, MemoryError):
    raise
  except (
    Exception
  ) as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and more
    reason = (
      "this is not a readable image"
      if isinstance(error, Image.UnidentifiedImageError)
      else str(error)
    )
    raise BrokenImageError(f"{printable(name)}: {reason or type(error).__name__}") from error
