"""Renders the data set ``characters``: Han and Hangul characters are classes, from many typefaces.

It has the scale of the paper's data sets without their photographs: thousands of classes with few
images each, unseen classes at test time, and similar characters as hard negatives. The fonts are
those of a folder; none are shipped. Each image is distorted by its own random numbers, so that its
pixels alone do not give its class away.
"""

from collections.abc import Sequence
from concurrent import futures
import logging
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFilter

from soprc_jax._internal import file_io
from soprc_jax._internal.strings import shown
from soprc_jax.data import fonts, rendered, sources

_log = logging.getLogger(__name__)

# Han (extension A and the basic block) and the Hangul syllables.
CODES = (*range(0x3400, 0x4DC0), *range(0x4E00, 0xA000), *range(0xAC00, 0xD7A4))
# A class has at least this many typefaces.
LEAST_FACES = 6
# A face with fewer of `CODES` is left out, and so is one that looks like another one (`fonts`).
_LEAST_CODES, _HIGHEST_LIKENESS = 1000, 0.75
_VERSION = 1  # increment it when the rendering changes, so that old caches are not used
_SEED = 0xC4A2


class Size(NamedTuple):
  """Numbers of classes and images.

  Attributes:
    train_classes: training classes, of which the validation classes are a part.
    train_images: images of the training classes.
    test_classes: test classes.
    test_images: images of the test classes.
    min_images: fewest images of a class, >= 2.
    max_images: most images of a class.
    side: side of the images in pixels.
    pretrain_classes: classes that are in neither split, to train a network on that others start
      from. They then replace the training classes.
    pretrain_images: images of these classes.
  """

  train_classes: int
  train_images: int
  test_classes: int
  test_images: int
  min_images: int
  max_images: int
  side: int
  pretrain_classes: int = 0
  pretrain_images: int = 0


class _Pick(NamedTuple):
  """An image to render: a code point and the position of a face."""

  code: int
  face: int


def load(root: str | os.PathLike[str], size: Size) -> dict[str, sources.Source]:
  """Loads the splits ``train`` and ``test`` from the user's cache, or renders them.

  With ``pretrain_classes`` the training split has the images of these.

  Args:
    root: folder of fonts; empty: the fonts of the system.
    size: numbers of classes and images.

  Raises:
    ValueError: the sizes contradict each other, or the fonts have too few characters.
    FileNotFoundError: there is no such folder.
  """
  check(size)
  folder, paths, key = font_files(root, size)
  found = rendered.cached(
    f"characters-v{_VERSION}-{key}", lambda: render(paths, size, where=folder)
  )
  digest = found.digest()  # of all pixels, so only once
  _log.info("characters: %s; digest %s.", statistics(found), digest[:16])
  # With the digest in each id, a run notices that it is resumed or evaluated on other pixels.
  ids = [f"{digest[:8]}/{name}" for name in found.ids]
  names = {int(code): f"U+{code:04X}" for code in np.unique(found.labels)}
  images = rendered.Rendered(found.images, found.labels, ids, names)
  split_of = np.array([name.split("/")[0] for name in found.ids])
  train = "pretrain" if size.pretrain_classes else "train"
  return {
    name: sources.Subset(images, np.flatnonzero(split_of == split))
    for name, split in (("train", train), ("test", "test"))
  }


def font_files(root: str | os.PathLike[str], *more: object) -> tuple[Path | None, list[Path], str]:
  """Returns the folder of ``data.root``, its font files, and a key for the cache of their pixels.

  Args:
    root: folder of fonts; empty: the fonts of the system, and the folder is None.
    *more: JSON values that the pixels depend on too.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  folder = file_io.given(root, name="data.root") if root else None
  if folder is not None and not folder.is_dir():
    raise FileNotFoundError(
      f"data.root={root!r} must be a folder of fonts. docs/datasets.md lists packages to unpack"
    )
  paths = fonts.files(folder)
  listing = [[path.name, path.stat().st_size, int(path.stat().st_mtime)] for path in paths]
  return folder, paths, rendered.versions_key(np.__version__, listing, *more)


def check(size: Size) -> None:
  """Raises a ValueError if the numbers of a size contradict each other."""
  if not 2 <= size.min_images <= size.max_images:
    raise ValueError(
      f"data.characters.min_images={size.min_images} must be at least 2 and at most "
      f"data.characters.max_images={size.max_images}"
    )
  if size.pretrain_images and not size.pretrain_classes:
    raise ValueError(
      f"data.characters.pretrain_images={size.pretrain_images} needs "
      "data.characters.pretrain_classes > 0"
    )
  for split in _splits(size):
    classes, images = getattr(size, f"{split}_classes"), getattr(size, f"{split}_images")
    low, high = classes * size.min_images, classes * size.max_images
    if not low <= images <= high:
      raise ValueError(
        f"data.characters.{split}_images={images} must lie between {low} and {high}, for "
        f"{classes} classes of {size.min_images} to {size.max_images} images"
      )


def _splits(size: Size) -> tuple[str, ...]:
  """Returns the splits of a size."""
  return ("train", "test", "pretrain") if size.pretrain_classes else ("train", "test")


def render(paths: Sequence[Path], size: Size, *, where: Path | None = None) -> rendered.Rendered:
  """Renders the data set.

  It is a pure function of the fonts and the size, for given versions of Pillow and NumPy.

  Args:
    paths: font files.
    size: numbers of classes and images.
    where: folder of the fonts, for messages; None is the system.

  Returns:
    The images, those of the training classes first. An id begins with the name of its split.

  Raises:
    ValueError: the fonts have too few characters.
  """
  with futures.ThreadPoolExecutor() as pool:
    faces = list(pool.map(fonts.unambiguous, different_faces(paths)))
  rng = np.random.default_rng(_SEED)
  counts = np.concatenate(
    [
      # Another generator, so that the classes of the other splits stay what they are without it.
      (np.random.default_rng([_SEED, 1]) if split == "pretrain" else rng).permutation(
        class_sizes(
          getattr(size, f"{split}_classes"),
          getattr(size, f"{split}_images"),
          low=size.min_images,
          high=size.max_images,
        )
      )
      for split in _splits(size)
    ]
  ).tolist()
  chosen = _choose(faces, counts, rng, where)
  splits = [split for split in _splits(size) for _ in range(getattr(size, f"{split}_images"))]
  ids = [
    f"{split}/U+{pick.code:04X}/{number}-{faces[pick.face].name}"
    for split, (number, pick) in zip(splits, chosen, strict=True)
  ]
  images = _images([pick for _, pick in chosen], faces, size.side, rng)
  return rendered.Rendered(images, np.array([pick.code for _, pick in chosen], np.int64), ids)


def different_faces(paths: Sequence[Path]) -> list[fonts.Face]:
  """Reads the typefaces of font files that have many of `CODES` and do not look alike."""
  found, broken = fonts.read(paths, CODES, least=_LEAST_CODES)
  for message in broken:
    _log.warning("Left out a font that cannot be read: %s", message)
  different = fonts.distinct(found, highest=_HIGHEST_LIKENESS) if found else []
  _log.info(
    "characters: %d files have %d typefaces with %d characters or more; %d of them look different.",
    len(paths),
    len(found),
    _LEAST_CODES,
    len(different),
  )
  return different


def class_sizes(num_classes: int, num_images: int, *, low: int, high: int) -> np.ndarray:
  """Returns the number of images of each class, from the largest to the smallest.

  They are ``low (high / low)^(u^a)`` for evenly spaced u, with a such that they sum to
  ``num_images``: many small classes and a tail of large ones.

  >>> class_sizes(4, 20, low=2, high=12)
  array([8, 6, 4, 2])
  """
  u = (np.arange(num_classes, 0, -1) - 0.5) / num_classes
  small, large = 1e-3, 1e3
  for _ in range(100):
    a = math.sqrt(small * large)
    sizes = np.rint(low * (high / low) ** (u**a)).astype(np.int64)
    small, large = (a, large) if sizes.sum() > num_images else (small, a)
  # The rounded sizes can miss the sum by some images.
  while (missing := num_images - int(sizes.sum())) != 0:
    room = np.flatnonzero(sizes < high if missing > 0 else sizes > low)
    sizes[room[: abs(missing)]] += 1 if missing > 0 else -1
  return np.sort(sizes)[::-1]


def _choose(
  faces: Sequence[fonts.Face], counts: Sequence[int], rng: np.random.Generator, where: Path | None
) -> list[tuple[int, _Pick]]:
  """Chooses a character for each class, and a face for each of its images.

  Args:
    faces: distinct faces.
    counts: images of each class.
    rng: draws characters and the order of their faces.
    where: folder of the fonts, for messages.

  Returns:
    For each image its number in its class, and what to render. A class with fewer faces than images
    uses its faces again, with other distortions.

  Raises:
    ValueError: there are too few characters.
  """
  having: dict[int, list[int]] = {}
  for index, face in enumerate(faces):
    for code in face.codes.tolist():
      having.setdefault(code, []).append(index)
  candidates = sorted(code for code, own in having.items() if len(own) >= LEAST_FACES)
  if len(candidates) < len(counts):
    raise ValueError(_too_few(len(candidates), len(counts), len(faces), where))
  classes = rng.permutation(candidates)[: len(counts)].tolist()
  orders = [rng.permutation(having[code]).tolist() for code in classes]
  return [
    (number, _Pick(code, order[number % len(order)]))
    for code, order, count in zip(classes, orders, counts)
    for number in range(count)
  ]


def _too_few(found: int, needed: int, num_faces: int, where: Path | None) -> str:
  place = (
    "the fonts of this system" if where is None else f"the fonts in data.root={shown(str(where))}"
  )
  return (
    f"characters needs {needed} Han or Hangul characters that {LEAST_FACES} different typefaces "
    f"draw. With {num_faces} typefaces, {place} have {found}. Install or unpack more of the "
    "packages that docs/datasets.md lists, or choose smaller data.characters.train_classes, "
    "test_classes or pretrain_classes"
  )


# Distortions: half the range of the entries of the linear map, of the shift as a share of the side,
# and of the other numbers their range. Only sums and products are computed, which round alike on
# all machines.
_MAP, _SHIFT, _BLUR = 0.16, 0.08, (0.4, 1.3)
_CONTRAST, _RAMP, _NOISE = (70, 190), 60, (0, 32)
_STROKE_SHARE = 0.35  # of the images have thicker strokes


class _Distortions(NamedTuple):
  """Random numbers of N images, see the constants above."""

  linear: np.ndarray
  shift: np.ndarray
  blur: np.ndarray
  is_thick: np.ndarray
  light: np.ndarray
  dark: np.ndarray
  inverted: np.ndarray
  ramp: np.ndarray
  noise: np.ndarray


def _distortions(count: int, rng: np.random.Generator) -> _Distortions:
  contrast = rng.integers(*_CONTRAST, count)
  dark = (rng.random(count) * (256 - contrast)).astype(np.int64)
  return _Distortions(
    linear=np.eye(2) + _MAP * (2 * rng.random((count, 2, 2)) - 1),
    shift=_SHIFT * (2 * rng.random((count, 2)) - 1),
    blur=_BLUR[0] + (_BLUR[1] - _BLUR[0]) * rng.random(count),
    is_thick=rng.random(count) < _STROKE_SHARE,
    light=dark + contrast,
    dark=dark,
    inverted=rng.random(count) < 0.5,
    ramp=rng.integers(-_RAMP, _RAMP + 1, (count, 2)),
    noise=rng.integers(*_NOISE, count),
  )


def _images(
  picks: Sequence[_Pick], faces: Sequence[fonts.Face], side: int, rng: np.random.Generator
) -> np.ndarray:
  """Renders the images ``[N, S, S]`` uint8, in threads, one face at a time."""
  distortions = _distortions(len(picks), rng)
  images = np.zeros((len(picks), side, side), np.uint8)
  of_face = np.array([pick.face for pick in picks])

  def render_face(index: int) -> None:
    where, pen = np.flatnonzero(of_face == index), fonts.pen_for(faces[index], 2 * side)
    noise = np.random.default_rng([_SEED, index])
    for rows in np.array_split(where, max(len(where) // 1024, 1)):
      own = _Distortions(*(numbers[rows] for numbers in distortions))
      ink = np.stack(
        [_moved(pen, picks[row].code, side, own, place) for place, row in enumerate(rows)]
      )
      images[rows] = _colored(ink, own, noise)

  with futures.ThreadPoolExecutor() as pool:
    for _ in pool.map(render_face, np.unique(of_face).tolist()):
      pass
  return images


def _moved(
  pen: fonts.ImageFont.FreeTypeFont, code: int, side: int, by: _Distortions, place: int
) -> np.ndarray:
  """Returns a character ``[S, S]`` thickened, blurred, mapped linearly and shifted."""
  image = fonts.draw(pen, code, 2 * side)
  if image is None:  # `fonts.unambiguous` has drawn it at another size
    raise ValueError(
      f"{pen.path!s} cannot draw U+{code:04X} on {2 * side} pixels: remove this font from data.root"
    )
  if by.is_thick[place]:
    image = image.filter(ImageFilter.MaxFilter(3))
  # Twice the side, so that the map does not alias.
  image = image.filter(ImageFilter.GaussianBlur(float(by.blur[place]) * side / 32))
  rows = 2 * by.linear[place]
  origin = side * (1 + 2 * by.shift[place]) - rows.sum(1) * (side / 2)
  data = (*rows[0], origin[0], *rows[1], origin[1])
  affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
  return np.asarray(image.transform((side, side), affine, data, bilinear))


def _colored(ink: np.ndarray, by: _Distortions, rng: np.random.Generator) -> np.ndarray:
  """Returns images ``[n, S, S]`` of ink on a ramp, light or dark, with noise, in integers."""
  side = ink.shape[1]
  along = 2 * np.arange(side) - (side - 1)  # from -(side - 1) to side - 1

  def column(numbers: np.ndarray) -> np.ndarray:
    return numbers[:, None, None].astype(np.int64)

  ramp = column(by.ramp[:, 0]) * along[:, None] + column(by.ramp[:, 1]) * along
  back, front = (
    column(np.where(by.inverted, one, other))
    for one, other in ((by.dark, by.light), (by.light, by.dark))
  )
  shades = back + (front - back) * ink.astype(np.int64) // 255 + ramp // (2 * side)
  noise = rng.integers(-128, 129, ink.shape, np.int16) * column(by.noise) // 128
  return np.clip(shades + noise, 0, 255).astype(np.uint8)


def statistics(images: rendered.Rendered) -> str:
  """Returns numbers of classes and images by split, in one line."""
  parts = []
  ids = np.array([name.split("/")[0] for name in images.ids])
  for split in dict.fromkeys(ids):
    counts = np.unique(images.labels[ids == split], return_counts=True)[1]
    parts.append(
      f"{split} {len(counts)} classes, {counts.sum()} images, {counts.min()} to {counts.max()} a "
      "class"
    )
  return "; ".join(parts)
