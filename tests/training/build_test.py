"""Tests how a config becomes the parts of a run."""

import chex
import jax
import numpy as np
import pytest
import runs
import toys

from soprc_jax.data import transforms
from soprc_jax.models import EmbeddingNet, ResNet
from soprc_jax.training import build, optimizers
from soprc_jax.training import step as step_lib


class TestBuild:
  def test_splits_rows_and_counts(self):
    config = runs.tiny_config()
    data = build.make_data(config)
    classes = {name: set(split.labels.tolist()) for name, split in data.splits.items()}
    assert (
      not classes["train"] & classes["val"]
      | classes["train"] & classes["test"]
      | classes["val"] & classes["test"]
    )
    assert sorted(data.rows) == sorted(classes["train"])
    counts = data.class_counts()
    for label, row in list(data.rows.items())[:20]:
      assert counts[row] == (data.splits["train"].labels == label).sum()

  def test_batches_have_the_augmentation_of_the_config(self):
    values = {
      "flip": True,
      "min_crop_area": 0.9,
      "color_jitter": 0.5,
      "max_rotation": 90.0,
      "max_shift": 0.3,
      "max_scale": 0.5,
      "max_shear": 0.4,
    }
    assert values.keys() == set(transforms.Settings._fields)

    def image(**changed):
      config = runs.tiny_config(**{f"data.{name}": value for name, value in changed.items()})
      return build.make_batches(config, build.make_data(config))[0]["image"]

    for name, value in values.items():
      chosen = {"augmentation": "resized_crop" if name == "min_crop_area" else "affine"}
      assert not np.array_equal(image(**chosen), image(**chosen, **{name: value})), name

  def test_phases_have_their_own_batch_norm_mode(self):
    # The warm-up trains batch norm from random weights. The main phase may freeze it.
    config = runs.tiny_config(**{"warmup.freeze_bn": False, "model.freeze_bn": True})
    for name, want in (("warmup", False), ("model", True)):
      assert build.make_model(config, freeze_bn=config[name].freeze_bn).backbone.freeze_bn is want

  def test_the_loss_of_a_warmup_has_no_parameters_of_its_own(self):
    counts = np.full(5, 4)
    values = {"warmup.loss": "proxy_anchor"}
    with pytest.raises(ValueError, match=r"warmup\.loss=proxy_anchor has parameters of its own"):
      build.make_parts(runs.tiny_config(**values), counts)
    build.make_parts(runs.tiny_config(**values, warmup_steps=0), counts)
    config = runs.tiny_config(**values, **{"loss.name": "proxy_anchor"})
    state = build.abstract_state(config, build.make_parts(config, counts))
    assert state.loss_params["proxies"].shape == (5, config.model.embedding_dim)

  def test_seed_decides_the_weights(self):
    net = EmbeddingNet(ResNet((1,), False, width=4, stem="small"), embedding_dim=8)
    tx = optimizers.make_optimizer(toys.make_config())
    like = jax.ShapeDtypeStruct((1, toys.SIZE, toys.SIZE, 3), np.uint8)
    one, same, other = (
      step_lib.init_state(net, tx, key=jax.random.key(seed), like=like).params for seed in (0, 0, 1)
    )
    chex.assert_trees_all_equal(one, same)
    assert np.any(one["head"]["kernel"] != other["head"]["kernel"])
