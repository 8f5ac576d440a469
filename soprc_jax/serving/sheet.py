"""Draws a contact sheet: one row per query, with the query on the left of its nearest images."""

from collections.abc import Callable, Sequence
import functools
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager, ft2font
from ml_collections import ConfigDict
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from soprc_jax.data import datasets, decoding
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import search
from soprc_jax.training import evaluation

# Sizes in pixels.
_TILE, _GAP, _LINE, _SIZE = 144, 12, 19, 15
_ROW = _TILE + 3 * _LINE + 2 * _GAP
_MAX_PIXELS = 100_000_000
_PAPER, _INK, _SOFT, _EDGE = "white", "black", "#5a5a5a", "#c8c8c8"

# Place in the index -> image, or the text to show instead.
Loader = Callable[[int], "Image.Image | str"]


def check_size(num_queries: int, top: int) -> None:
  """Raises a ValueError if a sheet would have too many pixels."""
  width, height = _sheet_size(num_queries, top)
  if width * height > _MAX_PIXELS:
    raise ValueError(
      f"a contact sheet of {num_queries} queries and --top={top} would have {width} x {height} "
      f"pixels, more than {_MAX_PIXELS:,}: use fewer queries or a smaller --top"
    )


def draw(
  index: index_lib.Index,
  paths: Sequence[str],
  found: Sequence[Sequence[search.Neighbour]],
  load: Loader,
) -> Image.Image:
  """Draws the contact sheet.

  Args:
    index: the index that was searched.
    paths: files of the queries.
    found: the nearest images of each query.
    load: loads the images of the index, see `loader`.
  """
  sheet = Image.new("RGB", _sheet_size(len(paths), max(map(len, found))), _PAPER)
  pen = ImageDraw.Draw(sheet)
  for row, (path, neighbours) in enumerate(zip(paths, found, strict=True)):
    top = _GAP + row * _ROW
    _tile(sheet, pen, (_GAP, top), _thumbnail(path), [("query", _INK), (_last_parts(path), _SOFT)])
    line = 2 * _GAP + _TILE + _GAP // 2
    pen.line([(line, top), (line, top + _ROW - 2 * _GAP)], fill=_EDGE, width=2)
    for column, one in enumerate(neighbours):
      left = 4 * _GAP + _TILE + column * (_TILE + _GAP)
      lines = [
        (f"{one.similarity:.4f}", _INK),
        (one.class_name, _INK),
        (_last_parts(one.id), _SOFT),
      ]
      _tile(
        sheet, pen, (left, top), load(one.place), [(text, colour) for text, colour in lines if text]
      )
  return sheet


def write(path: Path, sheet: Image.Image) -> None:
  """Writes a sheet to a new PNG file.

  Raises:
    OSError, ValueError: as `index.check_output`.
  """
  index_lib.check_output(path, flag="--contact_sheet", suffix=".png")
  sheet.save(path, format="PNG")


def loader(index: index_lib.Index, config: ConfigDict) -> Loader:
  """Returns a function that loads the images of an index, from the data or from their files.

  Args:
    index: index of a split of these data, or of the user's own images.
    config: resolved config of the run; ``data.root`` may have changed since.
  """
  if index.split:
    source = evaluation.pick_split(datasets.make_splits(config.data), index.split)

    def of_split(place: int) -> Image.Image | str:
      position = int(index.positions[place])
      if position >= len(source):
        return "no longer in the data"
      example = source[position]
      return _thumbnail(example.image) if example.id == index.ids[place] else "data have changed"

    return of_split
  return lambda place: _thumbnail(str(Path(index.root) / str(index.ids[place])))


def _thumbnail(image: Any) -> Image.Image | str:
  """Returns an image (pixels, the content of a file, or its path) scaled to fit into a tile."""
  try:
    if isinstance(image, str):
      image = decoding.Stored(image, image)
    picture = decoding.as_picture(image)
    height, width = picture.size
    scale = _TILE / max(height, width)
    size = max(round(height * scale), 1), max(round(width * scale), 1)
    return Image.fromarray(np.ascontiguousarray(picture.region(decoding.whole(picture), size)))
  except decoding.BrokenImageError as error:
    return "not found" if isinstance(error.__cause__, FileNotFoundError) else "unreadable image"


def _tile(
  sheet: Image.Image,
  pen: Any,
  corner: tuple[int, int],
  picture: Image.Image | str,
  lines: Sequence[tuple[str, str]],
) -> None:
  left, top = corner
  frame = [left - 1, top - 1, left + _TILE, top + _TILE]
  pen.rectangle(frame, outline=_EDGE)
  if isinstance(picture, str):
    pen.text(
      (left + 6, top + _TILE // 2),
      _fitted(picture, _TILE - 12),
      fill=_SOFT,
      font=_font(picture),
      anchor="lm",
    )
  else:
    sheet.paste(picture, (left + (_TILE - picture.width) // 2, top + (_TILE - picture.height) // 2))
  for number, (text, colour) in enumerate(lines):
    shown = _fitted(_drawable(text), _TILE)
    pen.text(
      (left, top + _TILE + 4 + (number + 1) * _LINE - 5),
      shown,
      fill=colour,
      font=_font(shown),
      anchor="ls",
    )


def _last_parts(path: str) -> str:
  """Returns the folder and the name of a file, since names such as ``0.png`` may repeat."""
  return "/".join(Path(path).parts[-2:])


def _fitted(text: str, width: int) -> str:
  """Returns the text, shortened in its middle if too wide, since names differ at both ends."""
  if _font(text).getlength(text) <= width:
    return text
  for kept in range(len(text) - 1, 0, -1):
    shown = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    if _font(shown).getlength(shown) <= width:
      return shown
  return "…"


def _drawable(text: str) -> str:
  """Returns the text on one line, with characters that no installed font has as ``\\u4e2d``."""
  text = "".join(
    character if character.isprintable() else f"\\x{ord(character):02x}" for character in text
  )
  if _font_path(frozenset(text)) is not None:
    return text
  return "".join(
    one if _covers(_plain_font(), frozenset(one)) else ascii(one)[1:-1] for one in text
  )


def _font(text: str) -> Any:
  return _sized(_font_path(frozenset(text)) or _plain_font())


@functools.cache
def _sized(path: str) -> Any:
  return ImageFont.truetype(path, _SIZE)


def _plain_font() -> str:
  return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


@functools.lru_cache(maxsize=4096)
def _font_path(characters: frozenset[str]) -> str | None:
  """Returns a font with all these characters: matplotlib's, else an installed one, else None."""
  if _covers(_plain_font(), characters):
    return _plain_font()
  return next(
    (path for path in sorted(font_manager.findSystemFonts()) if _covers(path, characters)), None
  )


def _covers(path: str, characters: frozenset[str]) -> bool:
  return _known(path).issuperset(map(ord, characters))


@functools.cache
def _known(path: str) -> frozenset[int]:
  try:
    return frozenset(ft2font.FT2Font(path).get_charmap())
  except (OSError, RuntimeError, ValueError):  # an unreadable font file
    return frozenset()


def _sheet_size(num_queries: int, top: int) -> tuple[int, int]:
  return 4 * _GAP + _TILE + top * (_TILE + _GAP), _GAP + num_queries * _ROW
