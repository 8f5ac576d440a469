"""Writes small TrueType fonts whose characters are random rectangles."""

import numpy as np


def write(path, glyphs):
  """Writes a font with a glyph for each code point.

  Args:
    path: file to write.
    glyphs: code point -> seed of its rectangles; equal seeds look the same, None is blank.
  """
  _build(glyphs).save(path)


def write_collection(path, fonts):
  """Writes a collection with a font for each dict of `write`."""
  from fontTools import ttLib

  collection = ttLib.TTCollection()
  collection.fonts = [_build(glyphs).font for glyphs in fonts]
  collection.save(str(path))


def _build(glyphs):
  from fontTools import fontBuilder
  from fontTools.pens import ttGlyphPen

  names = {code: f"g{code:05X}" for code in sorted(glyphs)}
  outlines = {".notdef": ttGlyphPen.TTGlyphPen(None).glyph()}
  for code, name in names.items():
    pen = ttGlyphPen.TTGlyphPen(None)
    if glyphs[code] is not None:
      # A frame of fixed size, and rectangles that differ by the seed.
      rng = np.random.default_rng(glyphs[code])
      boxes = [(0, 0, 900, 40), (0, 860, 900, 900)]
      for left, bottom in rng.integers(0, 600, (6, 2)).tolist():
        width, height = rng.integers(60, 250, 2).tolist()
        boxes.append((left, bottom, left + width, bottom + height))
      for left, bottom, right, top in boxes:
        pen.moveTo((left, bottom))
        for point in ((left, top), (right, top), (right, bottom)):
          pen.lineTo(point)
        pen.closePath()
    outlines[name] = pen.glyph()
  builder = fontBuilder.FontBuilder(1000, isTTF=True)
  builder.setupGlyphOrder(list(outlines))
  builder.setupCharacterMap(names)
  builder.setupGlyf(outlines)
  builder.setupHorizontalMetrics(dict.fromkeys(outlines, (1000, 0)))
  builder.setupHorizontalHeader(ascent=900, descent=-100)
  builder.setupNameTable({"familyName": "Small", "styleName": "Regular"})
  builder.setupOS2()
  builder.setupPost()
  return builder
