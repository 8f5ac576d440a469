"""Tests the rules of keys that follow the data, and runs whose configs leave them open."""

import json
import runpy

import numpy as np
import pytest
import runs
import trees

from configs import folder as folder_config
from soprc_jax.data import datasets, decoding, sources
from soprc_jax.training import config as config_lib
from soprc_jax.training import defaults, evaluation, loop, workdir

_TINY = {
  "model.width": 4,
  "model.embedding_dim": 16,
  "loss.num_points": 20,
  "data.val_share": 0.25,
  "train.steps": 2,
  "eval.every": 2,
  "eval.batch_size": 16,
}


def _config(root, argument="small", **values):
  config = runpy.run_path(str(runs.ROOT / "configs" / "folder.py"))["get_config"](argument)
  config.update_from_flattened_dict(_TINY | {"data.root": str(root)} | values)
  return config_lib.resolve(config)


class TestRules:
  @pytest.mark.parametrize(
    ("counts", "batch_size", "expected"),
    [
      ([6, 6, 6], None, 4),
      ([3, 3, 9], None, 3),
      ([1, 1, 9], None, 2),
      ([6, 6], 14, 2),  # the largest divisor of the given batch
      ([6, 6], 13, 4),  # none: the check of the config reports it
    ],
  )
  def test_per_class(self, counts, batch_size, expected):
    assert defaults.per_class_rule(np.array(counts), batch_size).value == expected

  @pytest.mark.parametrize(
    ("sides", "stem", "expected"),
    [
      ([90, 100, 500], "imagenet", 96),
      ([1000], "imagenet", 224),
      ([20], "imagenet", 64),
      ([20], "small", 32),
      ([500], "small", 64),
    ],
  )
  def test_image_size(self, sides, stem, expected):
    assert defaults.image_size_rule(np.array(sides), stem).value == expected

  @pytest.mark.parametrize(
    ("num_classes", "per_class", "side", "unit", "expected"),
    [
      (1000, 4, 64, 4, 256),
      (1000, 4, 128, 4, 64),
      (20, 4, 64, 4, 80),
      (20, 3, 64, 24, 48),  # 8 devices
      (1000, 3, 64, 3, 255),
      (2, 4, 64, 4, 8),
      (1, 4, 64, 4, 8),  # the sampler reports that there are too few classes
    ],
  )
  def test_batch_size(self, num_classes, per_class, side, unit, expected):
    assert defaults.batch_size_rule(num_classes, per_class, side, unit).value == expected

  def test_learning_rate_grows_with_the_root_of_the_batch(self):
    assert defaults.learning_rate_rule("adam", "random weights", 256).value == 4e-3
    for key in defaults.RATES:
      low, high = (defaults.learning_rate_rule(*key, size).value for size in (16, 64))
      assert high == pytest.approx(2 * low, rel=0.01)

  @pytest.mark.parametrize(
    ("values", "expected"),
    [
      ({}, "random weights of conv3"),
      ({"model.name": "resnet18"}, "random weights"),
      ({"model.init_from": "runs/one"}, "pretrained weights"),
      ({"model.name": "resnet18", "model.freeze_bn": True}, "pretrained weights"),
    ],
  )
  def test_the_weights_at_the_start(self, values, expected):
    config = folder_config.get_config("small")
    config.update_from_flattened_dict(values)
    assert defaults.start(config) == expected


class TestChoose:
  def test_open_keys_follow_the_data_and_others_are_kept(self, tmp_path):
    config = _config(trees.folder(tmp_path, 24), **{"train.per_class": 2})
    splits = datasets.make_splits(config.data)
    found = defaults.choose(config, splits)
    assert set(found) == set(defaults.KEYS) - {"train.per_class"}
    num_classes = len(np.unique(splits["train"].labels))
    assert found["train.batch_size"].value == 2 * num_classes
    assert str(num_classes) in found["train.batch_size"].reason
    assert found["data.image_size"].value == found["eval.image_size"].value == 32
    assert defaults.choose(config, splits) == found

  def test_classes_that_are_dropped_do_not_count(self):
    labels = np.repeat(np.arange(10), [4] * 6 + [1] * 4)
    pixels = np.zeros((40, 50, 3), np.uint8)
    source = _Source(labels, [pixels] * len(labels))
    config = _config("", **{"data.small_classes": "drop"})
    assert defaults.choose(config, {"train": source})["train.batch_size"].value == 6 * 4

  def test_unreadable_images_are_left_out_unless_all_are(self):
    broken = decoding.Encoded(b"", "empty.png")
    good = np.zeros((40, 50, 3), np.uint8)
    assert defaults.short_sides(_Source(np.zeros(3, int), [broken, good, broken])).tolist() == [40]
    with pytest.raises(decoding.BrokenImageError, match=r"empty\.png"):
      defaults.short_sides(_Source(np.zeros(1, int), [broken]))


class _Source:
  def __init__(self, labels, images):
    self.labels, self._images = labels, images

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), str(index))


def test_a_run_keeps_what_it_has_chosen(tmp_path):
  root, folder = trees.folder(tmp_path / "data", 24), tmp_path / "run"
  config = _config(root)
  results = loop.train(config, folder)
  chosen = results["chosen"]
  assert set(chosen) == set(defaults.KEYS)
  stored = json.loads((folder / workdir.CONFIG).read_text())
  assert stored["chosen"] == chosen
  assert stored["train"]["batch_size"] == chosen["train.batch_size"]["value"]
  lines = runs.metrics(folder)
  # Other rules, as after the data have moved: the run is resumed with its own values.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(defaults, "choose", lambda *_, **__: pytest.fail("chosen again"))
    again = loop.train(config, folder)
    assert (
      evaluation.evaluate_workdir(config, folder, split="test", newest=False)[0]["mAUPRC"]
      == (results["test"]["mAUPRC"])
    )
  assert again["chosen"] == chosen
  assert runs.metrics(folder) == lines
  with pytest.raises(ValueError, match=r"train\.batch_size: \d+ there, 8 here"):
    loop.train(_config(root, **{"train.batch_size": 8}), folder)


def test_a_key_without_a_rule_must_have_a_value(tmp_path):
  config = config_lib.ConfigDict(_config(trees.folder(tmp_path / "data", 24)).to_dict())
  config_lib.leave_open(config, "train.steps")
  with pytest.raises(ValueError, match=r"train\.steps must have a value"):
    loop.train(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()
