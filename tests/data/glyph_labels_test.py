"""Tests the structural labels of glyphs."""

import numpy as np

from soprc_jax.data import glyph_labels, glyphs


def test_labels_of_characters():
  assert glyph_labels.of_character(ord("Ǖ")) == {
    "category Lu",
    "kind LATIN",
    "with DIAERESIS",
    "with MACRON",
  }
  assert glyph_labels.of_character(0x25A0) == {"category So"}  # BLACK SQUARE
  assert glyph_labels.of_character(ord("가")) == {
    "category Lo",
    "kind HANGUL",
    "with CHOSEONG KIYEOK",
    "with JUNGSEONG A",
  }
  assert glyph_labels.of_character(0x3131) == {"category Lo", "kind HANGUL"}  # a single letter
  assert glyph_labels.of_character(0xE000) == {"category Co"}  # private, without a name


def test_labels_of_images():
  images = glyphs.load()
  labels, names = glyph_labels.labels(images.labels, images.ids)
  own = dict(zip(names, labels.T))
  assert (labels.any(axis=0) & ~labels.all(axis=0)).all()
  characters = [len(np.unique(images.labels[column])) for column in labels.T]
  assert min(characters) >= glyph_labels.LEAST_CHARACTERS
  face = np.array([name.split("/")[1] for name in images.ids])
  assert own["style bold"][face == "DejaVuSans-BoldOblique"].all()
  assert own["style bold"][face == "STIXGeneralBolIta"].all()
  assert not own["style bold"][face == "DejaVuSerif-Italic"].any()
  assert own["style oblique"][face == "DejaVuSerif-Italic"].all()
  assert own["style serif"][face == "STIXGeneral"].all()
  assert not own["style serif"][face == "DejaVuSansMono"].any()
  assert own["style monospace"][face == "DejaVuSansMono"].all()
  assert own["kind LATIN"][images.labels == ord("a")].all()
  assert not own["kind LATIN"][images.labels == ord("!")].any()
