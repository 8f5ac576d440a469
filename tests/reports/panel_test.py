"""Tests small copies of images."""

import base64
import re

import numpy as np
from PIL import Image
import pytest

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
