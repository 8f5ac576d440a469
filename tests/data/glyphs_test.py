"""Tests the glyphs source and its cache."""

import collections
import logging
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import runs

from soprc_jax.data import glyphs
from soprc_jax.data import rendered as rendered_lib

# Reference digests of the rendered pixels would change with Pillow and matplotlib. The tests cover
# what must hold with any version.


@pytest.fixture(scope="module")
def rendered():
  return glyphs.render()


@pytest.fixture(scope="module")
def small(rendered):
  """Returns the first 40 images of the glyphs, which are quick to write and read."""
  return rendered_lib.Rendered(rendered.images[:40], rendered.labels[:40], rendered.ids[:40])


class TestGlyphs:
  def test_size_is_that_of_the_design(self, rendered):
    counts = np.unique(rendered.labels, return_counts=True)[1]
    assert 2000 <= len(counts) <= 2300
    assert 28_000 <= len(rendered) <= 30_000
    assert counts.min() == 12
    assert counts.max() == 16

  def test_images_are_three_equal_channels_of_uint8(self, rendered):
    example = rendered[5]
    assert example.image.shape == (glyphs.IMAGE_SIZE, glyphs.IMAGE_SIZE, 3)
    assert example.image.dtype == np.uint8
    assert (example.image == rendered.images[5][:, :, None]).all()
    assert example.label == rendered.labels[5]
    assert isinstance(example.label, int)

  def test_no_image_is_blank(self, rendered):
    assert rendered.images.any(axis=(1, 2)).all()

  def test_glyphs_are_not_cut_to_emptiness(self, rendered):
    # White on black, centered: the center of the ink is near that of the image.
    ink = rendered.images.astype(np.float64)
    total = ink.sum((1, 2))
    middle = (glyphs.IMAGE_SIZE - 1) / 2
    rows = (ink.sum(2) * np.arange(glyphs.IMAGE_SIZE)).sum(1) / total
    columns = (ink.sum(1) * np.arange(glyphs.IMAGE_SIZE)).sum(1) / total
    assert np.quantile(np.abs(rows - middle), 0.95) < 5
    assert np.quantile(np.abs(columns - middle), 0.95) < 5

  def test_no_two_classes_look_the_same_in_a_face(self, rendered):
    seen = collections.defaultdict(set)
    for image, name in zip(rendered.images, rendered.ids):
      face = name.split("/")[1]
      assert image.tobytes() not in seen[face], name
      seen[face].add(image.tobytes())
    assert len(seen) == 16

  def test_ids_are_unique_and_name_the_character(self, rendered):
    ids = [rendered[i].id for i in range(len(rendered))]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(f"U+{label:04X}/") for name, label in zip(ids, rendered.labels))
    assert "U+0062/DejaVuSans" in ids

  def test_look_alikes_keep_one_class(self, rendered):
    labels = set(rendered.labels.tolist())
    assert ord("A") in labels
    assert 0x0391 not in labels  # the Greek capital alpha looks like the Latin A
    assert ord(" ") not in labels

  def test_rendering_is_deterministic_across_processes(self, rendered):
    code = (
      "from soprc_jax.data import glyphs; print(f'value of the test: "
      '"{glyphs.render().digest()}"\')'
    )
    done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=runs.ROOT,
      env=runs.environment(),
      capture_output=True,
      text=True,
      check=True,
    )
    assert runs.value(done.stdout) == rendered.digest()


class TestGlyphCache:
  @pytest.fixture(autouse=True)
  def render_small(self, monkeypatch, small):
    """Replaces rendering, which takes seconds, by 40 images and counts its calls."""
    self.renderings = 0

    def render():
      self.renderings += 1
      return small

    monkeypatch.setattr(glyphs, "render", render)

  def _same(self, found, small):
    np.testing.assert_array_equal(found.images, small.images)
    np.testing.assert_array_equal(found.labels, small.labels)
    assert [found[i].id for i in range(len(found))] == [small[i].id for i in range(len(small))]

  def test_second_load_reads_the_cache(self, tmp_path, small):
    self._same(glyphs.load(tmp_path / "new" / "folder"), small)
    self._same(glyphs.load(tmp_path / "new" / "folder"), small)
    assert self.renderings == 1
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".npz"]

  def test_default_folder_follows_xdg(self, tmp_path, small, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self._same(glyphs.load(), small)
    assert len(list((tmp_path / "soprc_jax").glob("glyphs-*.npz"))) == 1

  @pytest.mark.parametrize(
    "damage", ["empty", "text", "cut", "flipped", "other_pixels", "key_missing"]
  )
  def test_damaged_cache_is_rendered_again_with_a_warning(self, tmp_path, small, caplog, damage):
    glyphs.load(tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "empty":
      path.write_bytes(b"")
    elif damage == "text":
      path.write_text("<html>quota exceeded</html>")
    elif damage == "cut":
      path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
      content[len(content) // 3] ^= 0xFF
      path.write_bytes(content)
    else:
      with np.load(path) as archive:
        arrays = dict(archive)
      if damage == "other_pixels":
        arrays["images"] = 255 - arrays["images"]
      else:
        del arrays["ids"]
      np.savez(path, **arrays)
    with caplog.at_level(logging.WARNING):
      self._same(glyphs.load(tmp_path), small)
    assert re.search("corrupt|damaged", caplog.text)
    assert str(path) in caplog.text
    assert self.renderings == 2
    self._same(glyphs.load(tmp_path), small)
    assert self.renderings == 2  # the corrupt file was replaced

  def test_root_that_cannot_be_written_still_works(self, tmp_path, small, caplog):
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
      self._same(glyphs.load(tmp_path / "file"), small)
    assert "Cannot cache" in caplog.text

  def test_a_failed_write_leaves_nothing_behind(self, tmp_path, small, monkeypatch, caplog):
    def full_disk(file, **arrays):
      file.write(b"PK half a file")
      raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    self._same(glyphs.load(tmp_path), small)
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []

  def test_f35_the_file_appears_only_when_it_is_complete(self, tmp_path, small, monkeypatch):
    seen = []
    replace = os.replace

    def spy(source, target):
      seen.append([path.name for path in tmp_path.glob("*.npz")])
      self._same(rendered_lib.read(pathlib.Path(source)), small)
      replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    glyphs.load(tmp_path)
    assert seen == [[]]


def test_superclasses_are_categories():
  found = glyphs.superclasses(np.array([ord("b"), ord("B"), ord("b"), ord("=")]), "category")
  assert found == {ord("b"): "Ll", ord("B"): "Lu", ord("="): "Sm"}
  assert glyphs.superclasses(np.array([65]), "") == {}
  with pytest.raises(ValueError, match=r"data\.superclass must be category .* got 'block'"):
    glyphs.superclasses(np.array([65]), "block")
