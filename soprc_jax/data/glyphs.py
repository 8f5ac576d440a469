"""Renders the built-in data set ``glyphs``: characters are classes, typefaces give the images.

Like Stanford Online Products it has many classes with few images each, unseen classes at test time,
and similar characters as hard negatives. Pillow renders it from the fonts that matplotlib ships,
offline and in seconds.
"""

from collections.abc import Callable
import os
from pathlib import Path
import unicodedata

import numpy as np

from soprc_jax.data import rendered

IMAGE_SIZE = 32
_FONT_SIZE = 23
_DEJAVU = [
  f"DejaVu{family}{style}.ttf"
  for family, styles in (
    ("Sans", ("", "-Bold", "-Oblique", "-BoldOblique")),
    ("SansMono", ("", "-Bold", "-Oblique", "-BoldOblique")),
    ("Serif", ("", "-Bold", "-Italic", "-BoldItalic")),
  )
  for style in styles
]
_STIX = [f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")]
_CATEGORY = "category"
_VERSION = 1  # increment it when the rendering changes, so that old caches are not used


def load(root: str | os.PathLike[str] | None = None, *, superclass: str = "") -> rendered.Rendered:
  """Loads the data set from the cache, or renders it (a few seconds) and writes the cache.

  Args:
    root: folder of the cache; ``None`` is the user's cache. See `rendered.cached`.
    superclass: see `superclasses`.

  Raises:
    ValueError: if ``root`` is not a valid path, or there are no such superclasses.
  """
  found = rendered.cached(f"glyphs-v{_VERSION}-{_renderer_key()}", render, root)
  if not superclass:
    return found
  of_class = superclasses(found.labels, superclass)
  return rendered.Rendered(found.images, found.labels, found.ids, superclasses=of_class)


def superclasses(labels: np.ndarray, name: str) -> dict[int, str]:
  """Returns label -> superclass.

  Args:
    labels: ``[N]`` code points.
    name: ``"category"``, the general category of Unicode, such as Lu for an upper-case letter; or
      empty, for none.

  Raises:
    ValueError: there are no such superclasses.

  >>> superclasses(np.array([65, 97, 43]), "category")
  {43: 'Sm', 65: 'Lu', 97: 'Ll'}
  """
  if name not in ("", _CATEGORY):
    raise ValueError(f"data.superclass must be {_CATEGORY} with data.source=glyphs; got {name!r}")
  codes = np.unique(labels).tolist() if name else []
  return {code: unicodedata.category(chr(code)) for code in codes}


def render() -> rendered.Rendered:
  """Renders all glyphs, deterministically for given versions of Pillow and matplotlib.

  The classes are the characters that all 12 DejaVu faces share. Blank characters are left out, and
  so are those that look exactly like a character with a lower code point in some face. The images
  of a class are its 12 DejaVu faces and the STIX faces that contain it.
  """
  draw = {name: _renderer(_font_folder() / name) for name in _DEJAVU + _STIX}
  charmaps = {name: _charmap(_font_folder() / name) for name in draw}
  shared = sorted(set.intersection(*(charmaps[name] for name in _DEJAVU)))
  seen: dict[str, set[bytes]] = {name: set() for name in draw}
  images, labels, ids = [], [], []
  for code in shared:
    faces = {name: draw[name](chr(code)) for name in draw if code in charmaps[name]}
    if any(not faces[name].any() for name in _DEJAVU):
      continue  # blank, like the many kinds of space
    faces = {name: image for name, image in faces.items() if image.any()}
    pixels = {name: image.tobytes() for name, image in faces.items()}
    if any(pixels[name] in seen[name] for name in pixels):
      continue  # the same image under another code point, like the Greek and the Latin A
    for name, image in faces.items():
      seen[name].add(pixels[name])
      images.append(image)
      labels.append(code)
      ids.append(f"U+{code:04X}/{name.removesuffix('.ttf')}")
  return rendered.Rendered(np.stack(images), np.array(labels, np.int64), ids)


def _font_folder() -> Path:
  import matplotlib

  return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def _charmap(path: Path) -> set[int]:
  from matplotlib import ft2font

  return set(ft2font.FT2Font(str(path)).get_charmap())


def _renderer(path: Path) -> Callable[[str], np.ndarray]:
  """Returns a function that draws a character centered in gray, white on black, at a fixed size."""
  from PIL import Image, ImageDraw, ImageFont

  # Basic layout: the result must not depend on whether Raqm is installed.
  font = ImageFont.truetype(str(path), _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)

  def draw(character: str) -> np.ndarray:
    image = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE))
    left, top, right, bottom = font.getbbox(character)
    origin = ((IMAGE_SIZE - right - left) / 2, (IMAGE_SIZE - bottom - top) / 2)
    ImageDraw.Draw(image).text((int(origin[0]), int(origin[1])), character, fill=255, font=font)
    return np.asarray(image)

  return draw


def _renderer_key() -> str:
  import matplotlib

  return rendered.versions_key(matplotlib.__version__)
