"""Transforms images on the host: pixels or files to uint8, with an explicit random generator."""

from collections.abc import Callable
import math
from typing import NamedTuple

import numpy as np
from PIL import Image as PilImage

from soprc_jax.data import decoding

Image = np.ndarray | decoding.Encoded | decoding.Stored
Transform = Callable[[Image, np.random.Generator], np.ndarray]
AUGMENTATIONS = ("none", "affine", "resized_crop", "crop")
# Largest value of each number in `Settings`. At a scale near 0 an image would shrink to a point.
HIGHEST = {
  "min_crop_area": 1.0,
  "color_jitter": 1.0,
  "max_rotation": 180.0,
  "max_shift": 1.0,
  "max_scale": 0.9,
  "max_shear": 1.0,
}


class Settings(NamedTuple):
  """Holds the settings of an augmentation, each with its key in ``config.data``.

  Attributes:
    flip: whether an image is mirrored, left to right, with probability 0.5.
    min_crop_area: smallest share of the area that ``resized_crop`` keeps, in (0, 1]. 1: the whole
      image.
    color_jitter: s in [0, 1]: brightness, contrast and saturation are multiplied by factors in
      [1 - s, 1 + s]. 0: the colors stay.
    max_rotation: largest rotation of ``affine`` in degrees, in either direction; 0 to 180.
    max_shift: largest shift of ``affine`` along each axis, as a share of the shorter side; 0 to 1.
    max_scale: width and height are scaled by ``affine`` by factors in [1 - it, 1 + it]; 0 to 0.9.
    max_shear: largest horizontal shear of ``affine``, as a share of the height; 0 to 1.
  """

  flip: bool = True
  min_crop_area: float = 0.2
  color_jitter: float = 0.0
  max_rotation: float = 15.0
  max_shift: float = 0.06
  max_scale: float = 0.2
  max_shear: float = 0.15


DEFAULTS = Settings()


def make_augmentation(
  name: str, size: int, *, resize_to: int = 256, settings: Settings = DEFAULTS
) -> Transform:
  """Returns a training transform from pixels ``[H, W, 3]`` or a file to ``[size, size, 3]`` uint8.

  * ``none``: resizes only, without keeping the aspect ratio. It uses no setting.
  * ``affine``: a small rotation, scale, shear and shift of the middle square. Outside of the image
    is the median color of its border.
  * ``resized_crop``: a random crop of ``min_crop_area`` to 1 of the area at an aspect ratio of 3:4
    to 4:3, resized to a square, as in the authors' code. It is the whole image if no crop fits
    within ten attempts, or if ``min_crop_area`` is 1.
  * ``crop``: the shorter side resized to ``resize_to`` and a random crop of ``size``, as in the
    paper's text.

  The generator draws the geometry first, then the flip, then the three factors of the color jitter.
  The flip is drawn even if it is off, and the factors only if ``color_jitter`` is above 0. So
  neither changes what the others draw.

  Args:
    name: one of `AUGMENTATIONS`.
    size: side of the result in pixels.
    resize_to: shorter side in pixels before the crop, for ``crop``.
    settings: flip, color jitter, and the strength of ``affine`` and ``resized_crop``.

  Raises:
    ValueError: if the name is unknown, a setting is out of range, or ``resize_to`` is smaller than
      ``size`` for ``crop``.
  """
  _check_settings(settings)
  shapes: dict[str, Callable[[decoding.Picture, np.random.Generator], np.ndarray]] = {
    "affine": lambda picture, rng: _affine(picture, size, settings, rng),
    "resized_crop": lambda picture, rng: _resized_crop(picture, size, settings.min_crop_area, rng),
    "crop": lambda picture, rng: _crop(picture, size, resize_to, rng.random(2)),
  }
  if name == "none":
    return lambda image, rng: _whole(decoding.as_picture(image), (size, size))
  if name not in shapes:
    raise ValueError(f"augmentation must be one of {AUGMENTATIONS}, got {name!r}")
  if name == "crop":
    _check_sides(size, resize_to)

  def augment(image: Image, rng: np.random.Generator) -> np.ndarray:
    pixels = shapes[name](decoding.as_picture(image), rng)
    if rng.random() < 0.5 and settings.flip:
      pixels = pixels[:, ::-1]
    return _recolored(pixels, settings.color_jitter, rng) if settings.color_jitter else pixels

  return augment


def centre_crop(
  image: Image, size: int, *, resize_to: int = 0, interpolation: str = "bilinear"
) -> np.ndarray:
  """Returns the center crop ``[size, size, 3]`` uint8 of an image, the transform of evaluation.

  Args:
    image: pixels or a file.
    size: side of the crop in pixels.
    resize_to: shorter side in pixels before the crop; 0: ``size``.
    interpolation: one of `decoding.INTERPOLATIONS`.

  Raises:
    ValueError: if ``resize_to`` is smaller than ``size``, or if the image is unreadable.
  """
  resize_to = resize_to or size
  _check_sides(size, resize_to)
  return _crop(decoding.as_picture(image), size, resize_to, np.array([0.5, 0.5]), interpolation)


def _check_settings(settings: Settings) -> None:
  for name, high in HIGHEST.items():
    value, is_share = getattr(settings, name), name == "min_crop_area"  # a share of 0 is no crop
    if not 0 <= value <= high or (is_share and value == 0):
      raise ValueError(f"{name} must be {'>' if is_share else '>='} 0 and <= {high:g}, got {value}")


def _check_sides(size: int, resize_to: int) -> None:
  if resize_to < size:
    raise ValueError(
      f"the shorter side before the crop must be at least the size of the crop, {size} pixels; got "
      f"{resize_to}"
    )


def _whole(picture: decoding.Picture, size: tuple[int, int]) -> np.ndarray:
  return picture.region(decoding.whole(picture), size)


def _crop(
  picture: decoding.Picture,
  size: int,
  resize_to: int,
  where: np.ndarray,
  interpolation: str = "bilinear",
) -> np.ndarray:
  """Crops a square at ``where`` in [0, 1] from the top and from the left, in one resize."""
  height, width = picture.size
  side = min(height, width) * size / resize_to
  top, left = where * (np.array([height, width]) - side)
  return picture.region((left, top, left + side, top + side), (size, size), interpolation)


def _recolored(image: np.ndarray, jitter: float, rng: np.random.Generator) -> np.ndarray:
  """Multiplies saturation, contrast and brightness by random factors, with one rounding."""
  brightness, contrast, saturation = rng.uniform(1 - jitter, 1 + jitter, 3).astype(np.float32)
  pixels = image.astype(np.float32)
  red, green, blue = np.moveaxis(pixels, -1, 0)
  # Not a matrix product: the threads of BLAS would compete with those that load the images.
  gray = np.float32(0.299) * red + np.float32(0.587) * green + np.float32(0.114) * blue
  # brightness * (contrast * (saturation * pixel + (1 - saturation) * gray) + (1 - contrast) * mean)
  pixels *= brightness * contrast * saturation
  pixels += (
    brightness * contrast * (1 - saturation) * gray + brightness * (1 - contrast) * gray.mean()
  )[..., None]
  return np.clip(np.rint(pixels, out=pixels), 0, 255, out=pixels).astype(np.uint8)


def _affine(
  picture: decoding.Picture, size: int, settings: Settings, rng: np.random.Generator
) -> np.ndarray:
  angle = math.radians(rng.uniform(-settings.max_rotation, settings.max_rotation))
  scale_x, scale_y = rng.uniform(1 - settings.max_scale, 1 + settings.max_scale, 2)
  shear = rng.uniform(-settings.max_shear, settings.max_shear)
  shift = rng.uniform(-settings.max_shift, settings.max_shift, 2)
  # A large image is first resized with antialiasing, which the affine transform of PIL lacks.
  height, width = picture.size
  shrink = min(1.0, size / min(height, width))
  image = _whole(picture, (round(height * shrink), round(width * shrink)))
  side = min(image.shape[:2])
  turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
  # PIL maps output pixels to input pixels, relative to the centers of both.
  matrix = turn @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag([1 / scale_x, 1 / scale_y])
  matrix = matrix * (side / size)
  centre_in = np.array(image.shape[1::-1]) / 2
  offset = centre_in + shift * side - matrix @ np.array([size / 2, size / 2])
  data = (*matrix[0], offset[0], *matrix[1], offset[1])
  return np.asarray(
    PilImage.fromarray(image).transform(
      (size, size),
      PilImage.Transform.AFFINE,
      data,
      PilImage.Resampling.BILINEAR,
      fillcolor=_border_color(image),
    )
  )


def _border_color(image: np.ndarray) -> tuple[int, ...]:
  """Returns the median of each channel over the outermost pixels.

  It is the background of icons, glyphs and product images, where something touches the border too.
  """
  border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
  return tuple(map(int, np.sort(border, axis=0)[len(border) // 2]))


def _resized_crop(
  picture: decoding.Picture, size: int, min_area: float, rng: np.random.Generator
) -> np.ndarray:
  height, width = picture.size
  box = decoding.whole(picture)
  # A few attempts, then the whole image. Of a crop of the whole area, rounding could cut a pixel.
  for _ in range(10 if min_area < 1 else 0):
    area = height * width * rng.uniform(min_area, 1.0)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < crop_width <= width and 0 < crop_height <= height:
      left = int(rng.integers(width - crop_width + 1))
      top = int(rng.integers(height - crop_height + 1))
      box = (left, top, left + crop_width, top + crop_height)
      break
  return picture.region(box, (size, size))
