"""Tests data sets by name."""

import pytest
import trees


def test_unknown_source_lists_the_known_ones(tmp_path):
  with pytest.raises(
    ValueError, match="glyphs, characters, folder, csv, sop, inaturalist, vehicle_id, tfds_sop"
  ):
    trees.splits("imagenet", tmp_path)
