"""Image transforms on the host: uint8 in, uint8 out, randomness by generator."""

from collections.abc import Callable
import math

import numpy as np
from PIL import Image

Transform = Callable[[np.ndarray, np.random.Generator], np.ndarray]
AUGMENTATIONS = ("none", "affine", "resized_crop")


def make_augmentation(name: str, size: int) -> Transform:
  """The training transform ``name``, from an image to ``[size, size, 3]``.

  * ``none``: resize only;
  * ``affine``: a small rotation (15 degrees at most), scale (0.8 to 1.2), shear and shift, for glyphs (never a flip: b is not d);
  * ``resized_crop``: a random crop of 20 to 100 % of the area at an aspect of 3:4 to 4:3, and a flip in half of the cases.

  Raises:
    ValueError: unknown name.
  """
  if name == "none":
    return lambda image, rng: resize(image, size)
  if name == "affine":
    return lambda image, rng: _affine(image, size, rng)
  if name == "resized_crop":
    return lambda image, rng: _resized_crop(image, size, rng)
  raise ValueError(f"augmentation must be one of {AUGMENTATIONS}, got {name!r}")


def resize(image: np.ndarray, size: int) -> np.ndarray:
  """Resizes to ``[size, size, 3]``, bilinear with antialiasing; the image itself if it has that size."""
  if image.shape[:2] == (size, size):
    return image
  return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))


def _affine(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
  angle = math.radians(rng.uniform(-15, 15))
  scale_x, scale_y = rng.uniform(0.8, 1.2, 2)
  shear = rng.uniform(-0.15, 0.15)
  shift = rng.uniform(-0.06, 0.06, 2) * image.shape[1::-1]
  turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
  # PIL maps output pixels to input pixels, about the centres of both.
  matrix = turn @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag([1 / scale_x, 1 / scale_y])
  matrix = matrix * (image.shape[0] / size)
  centre_in = np.array(image.shape[1::-1]) / 2
  offset = centre_in + shift - matrix @ np.array([size / 2, size / 2])
  data = (*matrix[0], offset[0], *matrix[1], offset[1])
  picture = Image.fromarray(image)
  return np.asarray(picture.transform((size, size), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR))


def _resized_crop(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
  height, width = image.shape[:2]
  box = (0, 0, width, height)
  for _ in range(10):  # as torchvision: a few tries, then the whole image
    area = height * width * rng.uniform(0.2, 1.0)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < crop_width <= width and 0 < crop_height <= height:
      left = int(rng.integers(width - crop_width + 1))
      top = int(rng.integers(height - crop_height + 1))
      box = (left, top, left + crop_width, top + crop_height)
      break
  picture = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
  flipped = rng.random() < 0.5
  return np.asarray(picture)[:, ::-1] if flipped else np.asarray(picture)
