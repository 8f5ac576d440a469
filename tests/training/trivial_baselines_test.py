"""Tests what thumbnails and the model before training reach, and the warning of a poor run."""

import json

import numpy as np
import pytest
import runs

from soprc_jax.data import decoding, sources, transforms
from soprc_jax.training import checkpoints, evaluation, loop, trivial_baselines, workdir


class _Source:
  """Provides given images; None cannot be decoded."""

  def __init__(self, images, labels):
    self.labels, self._images = np.array(labels), images

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    image = self._images[index]
    if image is None:
      raise decoding.BrokenImageError(f"{index}: this is not a readable image")
    return sources.Example(image, int(self.labels[index]), str(index))


def _images(count, seed=0, shape=(40, 30, 3)):
  return list(np.random.default_rng(seed).integers(60, 190, (count, *shape), np.uint8))


def _config(**values):
  return runs.tiny_config(**{"eval.batch_size": 4, **values})


def _metrics(images, labels, **values):
  """Returns the metrics of thumbnails of 8 and of 16 pixels."""
  config = _config(**values)
  return [
    evaluation.evaluate(each, config)
    for _, each in trivial_baselines.thumbnails(config, _Source(images, labels))
  ]


class TestThumbnails:
  def test_equal_images_of_a_class_come_first(self):
    images = _images(3) * 2
    for found in _metrics(images, [0, 1, 2] * 2):
      assert (found["mAUPRC"], found["recall@1"], found["num_queries"]) == (1.0, 1.0, 6)

  def test_brightness_does_not_matter(self):
    dark = _images(3)
    for found in _metrics([*dark, *(image + np.uint8(50) for image in dark)], [0, 1, 2] * 2):
      assert found["mAUPRC"] == 1.0

  def test_images_of_one_color_tie(self):
    images = [np.full((20, 20, 3), value, np.uint8) for value in (0, 0, 90, 90, 255, 255)]
    for found in _metrics(images, [0, 0, 1, 1, 2, 2]):
      # Of the five other images, all at the similarity 0, one is a positive.
      assert (found["mAUPRC"], found["recall@1"]) == (pytest.approx(1 / 5), 0.0)

  @pytest.mark.parametrize(
    ("image_size", "resize", "scaled"), [(16, 0, 16), (16, 24, 24), (48, 60, 20), (224, 256, 18)]
  )
  def test_the_crop_is_that_of_evaluation(self, image_size, resize, scaled):
    images = _images(6)
    config = _config(**{"eval.image_size": image_size, "eval.resize": resize})
    found = dict(trivial_baselines.thumbnails(config, _Source(images, range(6))))
    for side in (8, 16):
      for image, got in zip(images, found[side].embeddings, strict=True):
        crop = transforms.centre_crop(image, 16, resize_to=scaled)
        want = transforms.centre_crop(crop, side).astype(float).ravel()
        want -= want.mean()
        np.testing.assert_allclose(got, want / np.linalg.norm(want), atol=1e-6)

  def test_unreadable_images_are_treated_as_in_evaluation(self):
    images, labels = _images(3) * 3, [0, 1, 2] * 3
    images[1] = images[5] = None
    for found in _metrics(images, labels, **{"data.on_broken": "skip"}):
      assert (found["num_broken"], found["num_queries"], found["mAUPRC"]) == (2, 7, 1.0)
    with pytest.raises(decoding.BrokenImageError, match="1: this is not a readable image"):
      _metrics(images, labels)


def _results(own, config, **reached):
  return {
    "config": config.to_dict(),
    "test": {"mAUPRC": own, "recall@1": own / 2, "num_queries": 5},
    "baselines": {"test": {name: {"mAUPRC": value} for name, value in reached.items()}},
  }


class TestNotBeaten:
  def test_names_the_best_baseline_and_the_values_of_the_run(self):
    config = _config(**{"data.augmentation": "affine", "optim.learning_rate": 3e-5})
    results = _results(0.25, config, thumbnails_8=0.2, thumbnails_16=0.26, initial=0.1)
    assert trivial_baselines.not_beaten(config, results) == (
      "The trained model does not beat the baselines: its test mAUPRC of 0.2500 is not above the "
      "0.2600 of the 16 x 16 thumbnails. Likely causes: too few steps (train.steps=18 after "
      "warmup.steps=6), too small a batch (train.batch_size=16), too strong an augmentation "
      "(data.augmentation=affine), too high or too low a learning rate (optim.learning_rate=3e-05)."
    )

  def test_without_augmentation_and_warm_up_neither_is_a_cause(self):
    config = _config(warmup_steps=0, **{"data.augmentation": "none"})
    found = trivial_baselines.not_beaten(config, _results(0.1, config, initial=0.2))
    assert "0.2000 of the model before training" in found
    assert "(train.steps=18)," in found
    assert "augmentation" not in found

  def test_only_a_higher_value_beats_them(self):
    config = _config()
    for own, beaten in ((0.2, False), (0.2001, True), (0.9, True)):
      found = trivial_baselines.not_beaten(config, _results(own, config, initial=0.2, other=0.1))
      assert (found == "") == beaten

  def test_results_without_baselines(self):
    config = _config()
    results = {"test": {"mAUPRC": 0.0}}
    assert trivial_baselines.not_beaten(config, results) == ""
    assert trivial_baselines.table(results, "test") == (["mAUPRC"], [])


def test_table_has_the_run_first():
  results = _results(0.4, _config(), thumbnails_8=0.1, initial=0.2)
  assert trivial_baselines.table(results, "test") == (
    ["mAUPRC", "recall@1"],
    [
      ("trained model", [0.4, 0.2]),
      ("8 x 8 thumbnails", [0.1, None]),
      ("model before training", [0.2, None]),
    ],
  )


class TestRun:
  def test_a_learning_rate_of_0_is_noticed(self, tmp_path, caplog):
    config = runs.tiny_config(
      steps=2, warmup_steps=0, **{"optim.learning_rate": 0.0, "model.freeze_bn": True}
    )
    results = loop.train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / workdir.RESULTS).read_text()) == json.loads(
      json.dumps(results)
    )
    found = results["baselines"]["test"]
    assert list(found) == ["thumbnails_8", "thumbnails_16", "initial"]
    # Nothing has changed, so the tested model is the one before training.
    tested = {key: value for key, value in results["test"].items() if key != "intervals"}
    assert found["initial"] == tested
    assert found["thumbnails_8"] != found["thumbnails_16"]
    assert all(
      values["num_queries"] == found["initial"]["num_queries"] for values in found.values()
    )
    warning = caplog.records[-1].message
    assert warning == trivial_baselines.not_beaten(config, results)
    assert "(optim.learning_rate=0)" in warning

  def test_a_run_without_them(self, tmp_path, monkeypatch):
    monkeypatch.setattr(trivial_baselines, "measure", None)
    config = runs.tiny_config(steps=2, warmup_steps=0, **{"eval.baselines": False})
    assert "baselines" not in loop.train(config, tmp_path / "run")

  def test_a_resumed_run_keeps_them(self, tmp_path, monkeypatch):
    """Checks that the initial model is not needed again, and checkpoints of an older version."""
    config = runs.tiny_config(steps=2, warmup_steps=0, **{"checkpoint.every": 1, "eval.every": 0})
    first = loop.train(config, tmp_path / "run")
    monkeypatch.setattr(trivial_baselines, "measure", None)
    again = loop.train(config, tmp_path / "run")
    assert again["baselines"] == first["baselines"]
    restore = checkpoints.Store.restore_intact

    def without(*args, **options):
      state, meta = restore(*args, **options)
      return state, {name: value for name, value in meta.items() if name != "baselines"}

    monkeypatch.setattr(checkpoints.Store, "restore_intact", without)
    assert "baselines" not in loop.train(config, tmp_path / "run")
