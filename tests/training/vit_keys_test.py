"""Tests the keys of vision transformers and what is wrong with combinations of them."""

import pytest

from soprc_jax.models import vit
from soprc_jax.training import config as config_lib
from soprc_jax.training import vit_keys


def _config(**values):
  config = config_lib.default_config()
  config.model.name = "vit"
  config.update_from_flattened_dict(
    {name.replace("__", "."): value for name, value in values.items()}
  )
  return config_lib.resolve(config)


def test_each_field_of_an_architecture_has_its_key():
  assert [key.name.rpartition(".")[2] for key in vit_keys.KEYS] == list(vit.Architecture._fields)
  assert vit_keys.architecture(_config()) == vit.Architecture()
  changed = _config(model__vit__patch=8, model__vit__mean=(0.5, 0.5, 0.5))
  assert vit_keys.architecture(changed) == vit.Architecture(patch=8, mean=(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"model__vit__heads": 7}, r"model\.vit\.heads must divide model\.vit\.width=384; got 7"),
    (
      {"model__vit__width": 36, "model__vit__rope": 100.0},
      r"model\.vit\.width / model\.vit\.heads must be a multiple of 4 .*; got 6",
    ),
    ({"model__vit__class_token": False}, r"pool=class needs model\.vit\.class_token=True"),
    ({"eval__image_size": 15}, r"eval\.image_size must be at least model\.vit\.patch=16; got 15"),
    ({"model__vit__std": (1.0, 1.0, 0.0)}, r"model\.vit\.std must be 3 numbers > 0"),
    ({"model__vit__pool": "max"}, r"model\.vit\.pool must be one of class, mean, attention"),
  ],
)
def test_combinations_that_do_not_work_are_named(values, message):
  with pytest.raises(ValueError, match=message):
    _config(**values)


def test_other_models_do_not_care():
  config = config_lib.default_config()
  config.model.vit.heads = 7
  assert vit_keys.problems(config_lib.resolve(config)) == []
  unused = config_lib.unused_problems(config_lib.resolve(config), ["model.vit.heads"])
  assert unused == [
    "model.vit.heads is not used by model.name=resnet50: leave it out, or choose vit"
  ]


def test_microbatches_need_no_frozen_batch_norm():
  config = _config(model__freeze_bn=False, train__microbatch=56)
  assert config.train.microbatch == 56
