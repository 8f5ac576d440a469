"""Renders undistorted Han and Hangul characters, each in every typeface of a folder of fonts.

The data set ``characters`` distorts its images, and has few of each class. These are undistorted
and many, so that a small network can learn the structure of a character from its pixels.
"""

from collections.abc import Sequence
from concurrent import futures
import os
from pathlib import Path

import numpy as np

from soprc_jax._internal.strings import shown
from soprc_jax.data import characters, fonts, rendered

# Numbers of characters, and the least number of typefaces of each.
HANGUL, HAN, LEAST_FACES = 600, 200, 40
SIDE = 32
_FIRST_HANGUL = 0xAC00
_VERSION = 1  # increment it when the rendering changes, so that old caches are not used
_SEED = 0x91A1


def load(root: str | os.PathLike[str]) -> rendered.Rendered:
  """Loads the images from the user's cache, or renders them.

  Args:
    root: folder of fonts; empty: the fonts of the system.

  Returns:
    The images ``[N, 32, 32]``. A label is a code point, and an id ``U+CODE/TYPEFACE``.

  Raises:
    ValueError: the fonts have too few characters.
    FileNotFoundError: there is no such folder.
  """
  folder, paths, key = characters.font_files(root)
  where = "the fonts of this system" if folder is None else f"data.root={shown(str(folder))}"
  return rendered.cached(f"plain_characters-v{_VERSION}-{key}", lambda: render(paths, where=where))


def render(paths: Sequence[Path], *, where: str) -> rendered.Rendered:
  """Renders the images, a pure function of the fonts for given versions of Pillow and NumPy.

  Args:
    paths: font files.
    where: place of the fonts, for the message.

  Raises:
    ValueError: the fonts have too few characters.
  """
  faces = characters.different_faces(paths)
  chosen = _choose(faces, where)
  with futures.ThreadPoolExecutor() as pool:
    drawn = list(pool.map(lambda face: _draw(face, chosen), faces))
  parts = [
    (code, f"U+{code:04X}/{face.name}", image)
    for face, images in zip(faces, drawn, strict=True)
    for code, image in images.items()
  ]
  parts.sort(key=lambda part: part[:2])
  labels = np.array([code for code, _, _ in parts], np.int64)
  return rendered.Rendered(
    np.stack([image for *_, image in parts]), labels, [i for _, i, _ in parts]
  )


def _choose(faces: Sequence[fonts.Face], where: str) -> np.ndarray:
  """Returns the code points to render, drawn from those that enough typefaces have."""
  codes = np.concatenate([face.codes for face in faces] or [np.zeros(0, np.int64)])
  codes, counts = np.unique(codes, return_counts=True)
  common = codes[counts >= LEAST_FACES]
  rng = np.random.default_rng(_SEED)
  chosen = []
  for name, needed, own in (
    ("Hangul syllables", HANGUL, common[common >= _FIRST_HANGUL]),
    ("Han characters", HAN, common[common < _FIRST_HANGUL]),
  ):
    if len(own) < needed:
      raise ValueError(
        f"{needed} {name} are needed, each in {LEAST_FACES} different typefaces or more. There are "
        f"{len(own)} in {where}, with {len(faces)} usable typefaces. Unpack the packages that "
        "docs/datasets.md lists, and set data.root to their folder of fonts"
      )
    chosen.append(rng.permutation(own)[:needed])
  return np.sort(np.concatenate(chosen))


def _draw(face: fonts.Face, chosen: np.ndarray) -> dict[int, np.ndarray]:
  """Returns the images of the chosen characters that a typeface has, without ambiguous ones."""
  face = fonts.unambiguous(face._replace(codes=np.intersect1d(face.codes, chosen)))
  pen = fonts.pen_for(face, SIDE)
  images = {code: fonts.draw(pen, code, SIDE) for code in face.codes.tolist()}
  return {code: np.asarray(image) for code, image in images.items() if image is not None}
