"""Tests data sets by name."""

import numpy as np
import pytest
import trees

from soprc_jax.data import datasets
from soprc_jax.training import config as config_lib


def test_unknown_source_lists_the_known_ones(tmp_path):
  with pytest.raises(
    ValueError,
    match="glyphs, characters, folder, csv, features, sop, inaturalist, vehicle_id, tfds_sop",
  ):
    trees.splits("imagenet", tmp_path)


def test_shares_leave_classes_for_the_test_where_there_is_no_test_split(tmp_path):
  config = config_lib.default_config()
  vectors, labels = np.random.default_rng(0).standard_normal((96, 2)), np.repeat(np.arange(32), 3)
  np.savez(tmp_path / "f.npz", embeddings=vectors, labels=labels)
  config.data.update({"source": "features", "root": str(tmp_path / "f.npz")})
  config.data.update({"train_share": 0.5, "val_share": 0.5})
  with pytest.raises(ValueError, match=r"train_share=0\.5 \+ data\.val_share=0\.5 must be below 1"):
    datasets.make_splits(config.data)
  parts = np.where(labels < 8, "test", "train")
  np.savez(tmp_path / "f.npz", embeddings=vectors, labels=labels, splits=parts)
  found = datasets.make_splits(config.data)  # here val_share is a share of the training classes
  assert {name: len(split) for name, split in found.items()} == {"train": 36, "val": 36, "test": 24}
  config.data.val_share = 1.0
  with pytest.raises(ValueError, match=r"data\.val_share must be below 1, got 1"):
    datasets.make_splits(config.data)
