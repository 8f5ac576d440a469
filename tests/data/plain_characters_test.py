"""Tests the undistorted characters, on small fonts made here."""

import numpy as np
import pytest
import small_fonts

from soprc_jax.data import characters, fonts, multilabel, plain_characters

HAN, HANGUL, FACES = 0x4E00, 0xAC00, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Returns a folder of six fonts with 20 Han characters and 30 Hangul syllables."""
  path = tmp_path_factory.mktemp("fonts")
  codes = [*range(HAN, HAN + 20), *range(HANGUL, HANGUL + 30)]
  for number in range(FACES):
    seeds: dict[int, int | None] = {code: 1000 * number + code for code in codes}
    if number == 0:
      seeds[HAN + 1] = seeds[HAN]  # one glyph for two characters
      seeds[HAN + 2] = None
    small_fonts.write(path / f"face{number}{'Bold' if number == 1 else ''}.ttf", seeds)
  return path


@pytest.fixture(scope="module", autouse=True)
def small_numbers():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(characters, "_LEAST_CODES", 10)
    patch.setattr(plain_characters, "LEAST_FACES", FACES)
    patch.setattr(plain_characters, "HAN", 20)
    patch.setattr(plain_characters, "HANGUL", 25)
    yield


@pytest.fixture(scope="module")
def images(folder):
  return plain_characters.render(fonts.files(folder), where="here")


def test_each_typeface_draws_each_character(images):
  codes, counts = np.unique(images.labels, return_counts=True)
  assert (codes < HANGUL).sum() == 20
  assert (codes >= HANGUL).sum() == 25
  ambiguous = np.isin(codes, (HAN, HAN + 1, HAN + 2))
  assert counts[~ambiguous].tolist() == [FACES] * 42
  assert counts[ambiguous].tolist() == [FACES - 1] * 3
  assert images.images.shape == (len(images), plain_characters.SIDE, plain_characters.SIDE)
  assert images.images.max((1, 2)).min() > 200


def test_ids_name_character_and_typeface(images):
  assert len(set(images.ids)) == len(images)
  for name, label in zip(images.ids, images.labels):
    code, face = name.split("/")
    assert code == f"U+{label:04X}"
    assert face.startswith("face")


def test_the_order_of_the_files_does_not_matter(folder, images):
  again = plain_characters.render(fonts.files(folder)[::-1], where="here")
  assert again.ids == images.ids
  assert again.digest() == images.digest()


def test_too_few_characters_name_place_and_remedy(folder, monkeypatch):
  monkeypatch.setattr(plain_characters, "HANGUL", 31)
  with pytest.raises(
    ValueError, match=r"31 Hangul syllables .* are 30 in data\.root=.*, with 6 us"
  ):
    plain_characters.load(folder)
  with pytest.raises(
    ValueError, match=r"31 Hangul syllables .* There are 0 in here, with 0 usable typefaces"
  ):
    plain_characters.render([], where="here")
  with pytest.raises(FileNotFoundError, match="must be a folder of fonts"):
    plain_characters.load(folder / "missing")


def test_the_tables_of_several_labels(folder, monkeypatch):
  monkeypatch.setattr(multilabel.glyph_labels, "LEAST_CHARACTERS", 15)
  labels = multilabel.load("character_labels", root=str(folder))
  assert set(labels.names) == {
    "kind CJK",
    "kind HANGUL",
    "with CHOSEONG KIYEOK",
    "with JUNGSEONG A",
    "style bold",
  }
  own = dict(zip(labels.names, labels.labels.T, strict=True))
  assert (own["kind HANGUL"] == (labels.groups >= HANGUL)).all()
  assert 0 < own["style bold"].mean() < 0.2
  classes = multilabel.load("character_classes", root=str(folder))
  assert classes.labels.shape == (len(labels.labels), 45)
  assert (classes.labels.sum(axis=1) == 1).all()
  np.testing.assert_array_equal(classes.features, labels.features)
