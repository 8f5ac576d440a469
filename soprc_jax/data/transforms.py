"""Transforms images on the host: pixels or files to uint8, with an explicit random generator."""

from collections.abc import Callable
import math

import numpy as np
from PIL import Image as PilImage

from soprc_jax.data import decoding

Image = np.ndarray | decoding.Encoded | decoding.Stored
Transform = Callable[[Image, np.random.Generator], np.ndarray]
AUGMENTATIONS = ("none", "affine", "resized_crop", "crop")


def make_augmentation(name: str, size: int, *, resize_to: int = 256) -> Transform:
  """Returns a training transform from pixels ``[H, W, 3]`` or a file to ``[size, size, 3]`` uint8.

  * ``none``: resizes only, without keeping the aspect ratio.
  * ``affine``: a small rotation (at most 15 degrees), scale (0.8 to 1.2), shear and shift
    of the middle square. Outside of the image is the median color of its border. It never flips,
    since b is not d.
  * ``resized_crop``: a random crop of 20 to 100 % of the area at an aspect ratio of 3:4 to 4:3, and
    a flip with probability 0.5, as in the authors' code.
  * ``crop``: the shorter side resized to ``resize_to``, a random crop of ``size``, and a flip with
    probability 0.5, as in the paper's text.

  Args:
    name: one of `AUGMENTATIONS`.
    size: side of the result in pixels.
    resize_to: shorter side in pixels before the crop, for ``crop``.

  Raises:
    ValueError: if the name is unknown, or ``resize_to`` is smaller than ``size`` for ``crop``.
  """
  if name == "none":
    return lambda image, rng: _squeezed(decoding.as_picture(image), size)
  if name == "affine":
    return lambda image, rng: _affine(decoding.as_picture(image), size, rng)
  if name == "resized_crop":
    return lambda image, rng: _flipped(_resized_crop(decoding.as_picture(image), size, rng), rng)
  if name == "crop":
    _check_sides(size, resize_to)
    return lambda image, rng: _flipped(
      _crop(decoding.as_picture(image), size, resize_to, rng.random(2)), rng
    )
  raise ValueError(f"augmentation must be one of {AUGMENTATIONS}, got {name!r}")


def centre_crop(image: Image, size: int, *, resize_to: int = 0) -> np.ndarray:
  """Returns the center crop ``[size, size, 3]`` uint8 of an image, the transform of evaluation.

  Args:
    image: pixels or a file.
    size: side of the crop in pixels.
    resize_to: shorter side in pixels before the crop; 0: ``size``.

  Raises:
    ValueError: if ``resize_to`` is smaller than ``size``, or if the image is unreadable.
  """
  resize_to = resize_to or size
  _check_sides(size, resize_to)
  return _crop(decoding.as_picture(image), size, resize_to, np.array([0.5, 0.5]))


def _check_sides(size: int, resize_to: int) -> None:
  if resize_to < size:
    raise ValueError(
      f"the shorter side before the crop must be at least the size of the crop, {size} pixels; got "
      f"{resize_to}"
    )


def _squeezed(picture: decoding.Picture, size: int) -> np.ndarray:
  return picture.region(decoding.whole(picture), (size, size))


def _crop(picture: decoding.Picture, size: int, resize_to: int, where: np.ndarray) -> np.ndarray:
  """Crops a square at ``where`` in [0, 1] from the top and from the left, in one resize."""
  height, width = picture.size
  side = min(height, width) * size / resize_to
  top, left = where * (np.array([height, width]) - side)
  return picture.region((left, top, left + side, top + side), (size, size))


def _flipped(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  return image[:, ::-1] if rng.random() < 0.5 else image


def _affine(picture: decoding.Picture, size: int, rng: np.random.Generator) -> np.ndarray:
  angle = math.radians(rng.uniform(-15, 15))
  scale_x, scale_y = rng.uniform(0.8, 1.2, 2)
  shear = rng.uniform(-0.15, 0.15)
  shift = rng.uniform(-0.06, 0.06, 2)
  # A large image is first resized with antialiasing, which the affine transform of PIL lacks.
  height, width = picture.size
  shrink = min(1.0, size / min(height, width))
  image = picture.region(decoding.whole(picture), (round(height * shrink), round(width * shrink)))
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


def _resized_crop(picture: decoding.Picture, size: int, rng: np.random.Generator) -> np.ndarray:
  height, width = picture.size
  box = decoding.whole(picture)
  for _ in range(10):  # as in torchvision: a few attempts, then the whole image
    area = height * width * rng.uniform(0.2, 1.0)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < crop_width <= width and 0 < crop_height <= height:
      left = int(rng.integers(width - crop_width + 1))
      top = int(rng.integers(height - crop_height + 1))
      box = (left, top, left + crop_width, top + crop_height)
      break
  return picture.region(box, (size, size))
