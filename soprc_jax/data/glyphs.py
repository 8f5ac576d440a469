"""Renders the built-in data set ``glyphs``: characters are classes, typefaces give the images.

Like Stanford Online Products it has many classes with few images each, unseen classes at test time,
and similar characters as hard negatives. Pillow renders it from the fonts that matplotlib ships,
offline and in seconds.
"""

from collections.abc import Callable
import hashlib
import json
import logging
import os
from pathlib import Path
import uuid

import numpy as np

from soprc_jax._internal import cache, file_io, stored
from soprc_jax.data import sources

_log = logging.getLogger(__name__)

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
_VERSION = 1  # increment it when the rendering changes, so that old caches are not used


class Glyphs:
  """Provides all glyph images from memory.

  The classes are the characters that all 12 DejaVu faces share. Blank characters are left out, and
  so are those that look exactly like a character with a lower code point in some face. The images
  of a class are its 12 DejaVu faces and the STIX faces that contain it.
  """

  def __init__(self, images: np.ndarray, labels: np.ndarray, ids: np.ndarray):
    self.images = images
    self._labels = labels
    self._ids = ids

  @property
  def labels(self) -> np.ndarray:
    return self._labels

  @property
  def ids(self) -> list[str]:
    return [str(name) for name in self._ids]

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> sources.Example:
    image = np.repeat(self.images[index][:, :, None], 3, axis=2)
    return sources.Example(image, int(self._labels[index]), str(self._ids[index]))

  def digest(self) -> str:
    """Returns the SHA-256 of all pixels and labels: equal digests mean the same data set."""
    return _digest(self.images, self._labels)


def load(root: str | os.PathLike[str] | None = None) -> Glyphs:
  """Loads the data set from the cache, or renders it (a few seconds) and writes the cache.

  Args:
    root: folder of the cache; ``None`` is the user's cache (`soprc_jax._internal.cache`). If it
      cannot be written, a warning is logged and the data set is rendered at every start.

  Raises:
    ValueError: if ``root`` is not a valid path.
  """
  name = f"glyphs-v{_VERSION}-{_renderer_key()}.npz"
  folder = file_io.given(root, name="data.root") if root else None
  try:
    path = cache.file(name) if folder is None else folder / name
  except OSError as error:
    _log.warning("Cannot cache the glyphs (%s): they will be rendered at every start.", error)
    return render()
  if path.exists():
    try:
      return _read(path)
    except (OSError, ValueError) as error:
      _log.warning("The glyph cache cannot be used (%s): rendering it again.", error)
  glyphs = render()
  try:
    _write(path, glyphs)
  except OSError as error:
    _log.warning(
      "Cannot cache the glyphs in %s (%s): they will be rendered at every start.",
      path.parent,
      error,
    )
  return glyphs


def render() -> Glyphs:
  """Renders all glyphs, deterministically for given versions of Pillow and matplotlib."""
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
  return Glyphs(np.stack(images), np.array(labels, np.int64), np.array(ids))


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
  """Returns a hash of the versions that determine the pixels, so that each has its own cache."""
  import matplotlib
  from PIL import features

  versions = [matplotlib.__version__, features.version("pil"), features.version("freetype2")]
  return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]


def _digest(images: np.ndarray, labels: np.ndarray) -> str:
  digest = hashlib.sha256(np.ascontiguousarray(images).tobytes())
  digest.update(np.ascontiguousarray(labels, "<i8").tobytes())
  return digest.hexdigest()


def _read(path: Path) -> Glyphs:
  found = stored.read_arrays(path, ("images", "labels", "ids", "digest"))
  glyphs = Glyphs(found["images"], found["labels"], found["ids"])
  if glyphs.digest() != str(found["digest"]):
    raise ValueError(f"{path} is corrupt (the checksum does not match)")
  return glyphs


def _write(path: Path, glyphs: Glyphs) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  # Written to a temporary file and renamed: a killed run leaves no partial file, and two runs at
  # once do not mix. A file of `tempfile` would be unreadable for others, who may share the cache.
  aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
  try:
    with aside.open("xb") as file:
      np.savez(
        file, images=glyphs.images, labels=glyphs.labels, ids=glyphs._ids, digest=glyphs.digest()
      )
    os.replace(aside, path)
  except BaseException:
    aside.unlink(missing_ok=True)
    raise
