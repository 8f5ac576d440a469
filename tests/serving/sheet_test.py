"""Tests a contact sheet: its drawing, and the report about images that cannot be drawn."""

import os

import indexes
import numpy as np
from PIL import Image
import pytest

from soprc_jax.serving import sheet


def test_contact_sheet(tmp_path):
  (tmp_path / "photos").mkdir()
  colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
  for i, (size, colour) in enumerate(zip([(40, 40), (80, 20), (20, 80)], colours)):
    Image.new("RGB", size, colour).save(tmp_path / "photos" / f"{i}.png")
  gallery = indexes.make(
    [[1, 0], [0.6, 0.8], [0, 1]], class_names=["größe", "", "z" * 80], root=str(tmp_path)
  )
  paths = [str(tmp_path / "photos" / f"{i}.png") for i in (2, 0)]
  found = indexes.found(gallery, [[0, 1], [1, 0]], top=3)
  drawn = sheet.draw(gallery, paths, found, sheet.loader(gallery, None))
  tile, gap = sheet._TILE, sheet._GAP
  for row, order in enumerate(([2, 2, 1, 0], [0, 0, 1, 2])):  # the query, then the nearest
    for column, one in enumerate(order):
      left = gap if column == 0 else 4 * gap + tile + (column - 1) * (tile + gap)
      top = gap + row * sheet._ROW
      assert drawn.getpixel((left + tile // 2, top + tile // 2)) == colours[one]
      # Images keep their shape: the wide and the tall one have paper at their edges.
      assert drawn.getpixel((left + 3, top + tile // 2)) == (
        colours[one] if one < 2 else (255, 255, 255)
      )
      assert drawn.getpixel((left + tile // 2, top + 3)) == (
        colours[one] if one != 1 else (255, 255, 255)
      )
      label = np.asarray(
        drawn.crop((left, top + tile + 3, left + tile, top + tile + 3 * sheet._LINE + 3))
      )
      assert 0.01 < np.mean(label < 128) < 0.3  # there is text, dark on light
      beside = np.asarray(
        drawn.crop((left + tile + 1, top + tile + 3, left + tile + gap - 2, top + tile + 60))
      )
      assert column == 0 or beside.min() == 255  # the text stays below its image
  with pytest.raises(ValueError, match=r"must end in \.png"):
    sheet.write(tmp_path / "sheet.jpg", drawn)
  sheet.write(tmp_path / "sheet.png", drawn)
  with pytest.raises(FileExistsError, match="--contact_sheet="):
    sheet.write(tmp_path / "sheet.png", drawn)
  with pytest.raises(ValueError, match=r"100 queries and --top=1000 would have .* pixels"):
    sheet.check_size(100, 1000)


def test_pictures_that_are_gone_or_broken_are_told(tmp_path):
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "1.png").write_bytes(b"x")
  load = sheet.loader(indexes.make(np.eye(2), root=str(tmp_path)), None)
  assert [load(0), load(1)] == ["not found", "unreadable image"]


def test_f52_a_pipe_in_the_place_of_an_image_is_not_drawn(tmp_path):
  (tmp_path / "photos").mkdir()
  os.mkfifo(tmp_path / "photos" / "0.png")
  assert sheet.loader(indexes.make(np.eye(1), root=str(tmp_path)), None)(0) == "unreadable image"


def test_names_are_drawn_whole_or_written_out(monkeypatch):
  assert sheet._drawable("größe Жук") == "größe Жук"
  assert sheet._drawable("a\nb\udcff") == r"a\x0ab\xdcff"
  monkeypatch.setattr(sheet.font_manager, "findSystemFonts", lambda: [])
  sheet._font_path.cache_clear()
  assert sheet._drawable("a文") == r"a\u6587"
  sheet._font_path.cache_clear()
  shown = sheet._fitted("a" * 50 + "z" * 50, 100)
  assert shown[0] == "a"
  assert shown[-1] == "z"
  assert "…" in shown
  assert sheet._font(shown).getlength(shown) <= 100


def test_names_have_their_folder():
  assert sheet._last_parts("photos/cat/0.png") == "cat/0.png"
  assert sheet._last_parts("0.png") == "0.png"
