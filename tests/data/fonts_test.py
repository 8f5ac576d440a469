"""Tests the reading, comparing and drawing of fonts, with small fonts made here."""

import pathlib

import numpy as np
import pytest
import small_fonts

from soprc_jax.data import fonts

A, B, C, D = 0x4E00, 0x4E01, 0x4E02, 0xAC00


def _faces(folder, codes=(A, B, C, D), least=1):
  return fonts.read(fonts.files(folder), codes, least=least)


class TestFiles:
  def test_order_follows_the_names_not_the_folders(self, tmp_path):
    for place in ("z/a.ttf", "a/b.otf", "m/B.TTF", "m/notes.txt"):
      (tmp_path / place).parent.mkdir(exist_ok=True)
      (tmp_path / place).write_bytes(b"")
    assert [path.name for path in fonts.files(tmp_path)] == ["B.TTF", "a.ttf", "b.otf"]

  def test_without_a_folder_they_are_those_of_the_system(self, monkeypatch, tmp_path):
    from matplotlib import font_manager

    paths = [str(tmp_path / "x.ttf"), str(tmp_path / "y.pcf")]
    for path in paths:
      pathlib.Path(path).touch()
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: paths)
    assert [path.name for path in fonts.files(None)] == ["x.ttf"]


class TestRead:
  def test_codes_are_those_asked_for(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: 1, C: 2, ord("x"): 3})
    faces, broken = _faces(tmp_path)
    assert [face.codes.tolist() for face in faces] == [[A, C]]
    assert broken == []

  def test_a_face_with_too_few_is_left_out(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: 1})
    small_fonts.write(tmp_path / "two.ttf", {A: 1, B: 2})
    faces, _ = _faces(tmp_path, least=2)
    assert [face.name for face in faces] == ["two"]

  def test_each_font_of_a_collection_is_a_face(self, tmp_path):
    small_fonts.write_collection(tmp_path / "all.ttc", [{A: 1}, {A: 2, B: 3}])
    faces, _ = _faces(tmp_path)
    assert [(face.name, face.number, len(face.codes)) for face in faces] == [
      ("all-0", 0, 1),
      ("all-1", 1, 2),
    ]

  @pytest.mark.parametrize("content", [b"", b"no font", b"\0\1\0\0" + b"\xff" * 60, b"ttcf"])
  def test_a_corrupt_file_is_named_and_left_out(self, tmp_path, content):
    small_fonts.write(tmp_path / "good.ttf", {A: 1})
    for name in ("bad.ttf", "bad.ttc"):
      (tmp_path / name).write_bytes(content)
    faces, broken = _faces(tmp_path)
    assert [face.name for face in faces] == ["good"]
    assert len(broken) == 2
    assert str(tmp_path / "bad.ttc") in broken[0]

  def test_a_truncated_font_is_named(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: 1})
    content = (tmp_path / "one.ttf").read_bytes()
    for length in range(0, len(content) - 1, 97):
      (tmp_path / "one.ttf").write_bytes(content[:length])
      faces, broken = _faces(tmp_path)
      assert len(faces) + len(broken) == 1


class TestDistinct:
  def test_a_renamed_copy_is_left_out(self, tmp_path):
    codes = range(A, A + 30)
    first = {code: seed for seed, code in enumerate(codes)}
    small_fonts.write(tmp_path / "a.ttf", first)
    small_fonts.write(tmp_path / "b.ttf", first)
    small_fonts.write(tmp_path / "c.ttf", {code: 100 + seed for code, seed in first.items()})
    faces, _ = _faces(tmp_path, codes)
    assert [face.name for face in fonts.distinct(faces, highest=0.75)] == ["a", "c"]

  def test_faces_without_a_common_character_are_different(self, tmp_path):
    small_fonts.write(tmp_path / "han.ttf", {A + n: n for n in range(20)})
    small_fonts.write(tmp_path / "hangul.ttf", {D + n: n for n in range(20)})
    faces, _ = _faces(tmp_path, [*range(A, A + 20), *range(D, D + 20)])
    assert len(fonts.distinct(faces, highest=0.75)) == 2


class TestUnambiguous:
  def test_placeholders_copies_and_blanks_are_left_out(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: 1, B: 1, C: 2, D: None})
    (face,), _ = _faces(tmp_path)
    assert face.codes.tolist() == [A, B, C, D]
    assert fonts.unambiguous(face).codes.tolist() == [C]


class TestDraw:
  def test_a_character_is_white_on_black_and_centered(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: 1})
    (face,), _ = _faces(tmp_path)
    pixels = np.asarray(fonts.draw(fonts.pen_for(face, 64), A, 64))
    assert pixels.shape == (64, 64)
    assert pixels.max() == 255
    rows, columns = np.nonzero(pixels)
    assert abs((rows.min() + rows.max()) / 2 - 31.5) <= 4
    assert abs((columns.min() + columns.max()) / 2 - 31.5) <= 4

  def test_a_blank_character_is_none(self, tmp_path):
    small_fonts.write(tmp_path / "one.ttf", {A: None, B: 1})
    (face,), _ = _faces(tmp_path)
    assert fonts.draw(fonts.pen_for(face, 64), A, 64) is None

  @pytest.mark.parametrize("error", [OSError, fonts.Image.DecompressionBombError])
  def test_a_font_that_fails_to_draw_is_none(self, tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
      raise error("raster overflow")

    small_fonts.write(tmp_path / "one.ttf", {A: 1})
    (face,), _ = _faces(tmp_path)
    monkeypatch.setattr(fonts.ImageDraw.ImageDraw, "text", fail)
    assert fonts.draw(fonts.pen_for(face, 64), A, 64) is None
