"""Tests small copies of images."""

import base64
import re

import numpy as np
from PIL import Image
import pytest

from soprc_jax.data import decoding, rendered
from soprc_jax.reports import panel


class TestThumbnails:
  @pytest.mark.parametrize("size", [(500, 300), (1, 400), (20, 10)])
  def test_small_copies_of_the_whole_picture(self, size, tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    source = panel.thumbnail(image)
    kind, content = re.fullmatch(r"data:image/(png|jpeg);base64,(.*)", source).groups()
    path = tmp_path / f"x.{kind}"
    path.write_bytes(base64.b64decode(content))
    with Image.open(path) as small:
      assert max(small.size) == min(max(size), panel.SIDE)
      assert min(small.size) == max(round(min(size) * min(panel.SIDE / max(size), 1)), 1)


class TestSample:
  def _source(self, counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None] + np.zeros((1, 4, 4), np.uint8)
    return rendered.Rendered(images, labels, np.array([f"image {i}" for i in range(len(labels))]))

  def test_it_has_the_first_images_of_classes_from_first_to_last(self):
    rows = panel.sample(self._source([9, 2] * 10))
    assert [name for name, _ in rows] == ["0", "2", "5", "8", "10", "13", "16", "19"]
    assert [images.count("<img") for _, images in rows] == [8, 8, 2, 8, 8, 2, 8, 2]
    assert "image 0" in rows[0][1]

  def test_few_classes_are_all_shown_once(self):
    assert [name for name, _ in panel.sample(self._source([2, 3]))] == ["0", "1"]

  def test_an_unreadable_image_is_left_out(self, tmp_path):
    source = self._source([3])
    bad = decoding.Stored(tmp_path / "missing.png", "missing.png")

    class Broken(rendered.Rendered):
      def __getitem__(self, index):
        found = super().__getitem__(index)
        return found._replace(image=bad) if index == 1 else found

    ((_, images),) = panel.sample(Broken(source.images, source.labels, source.ids))
    assert images.count("<img") == 2

  def test_the_table_counts_classes_and_images_of_each_split(self):
    table = str(panel.splits_table({"train": self._source([9, 2, 4]), "test": self._source([3])}))
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", table)
    assert cells[6:] == ["train", "3", "15", "2", "4", "9", "test", "1", "3", "3", "3", "3"]
