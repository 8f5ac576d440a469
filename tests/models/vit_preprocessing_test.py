"""Tests what the files next to published weights say of their images."""

import logging

import pytest
import vits


@pytest.fixture
def found(tmp_path):
  """Returns a function that finds out what JSON files say next to the weights of a DINO."""
  return lambda **files: vits.find(tmp_path, vits.timm_shapes(), **files)


@pytest.mark.parametrize(
  ("preprocessor", "sizes"),
  [
    ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}, (32, 40)),
    ({"size": 40, "crop_size": 32, "do_center_crop": False}, (40, 40)),
    ({"size": {"height": 16, "width": 16}}, (16, 16)),
    ({}, (24, 24)),
  ],
)
def test_a_preprocessor_gives_sizes_and_normalization(found, preprocessor, sizes):
  values = preprocessor | {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3], "resample": 3}
  for files in (
    {"preprocessor_config": values},
    {"preprocessor_config": None, "processor_config": {"image_processor": values}},
  ):
    files = {name: content for name, content in files.items() if content is not None}
    arch, *got, interpolation = found(**files)
    assert (tuple(got), interpolation) == (sizes, "bicubic")
    assert (arch.mean, arch.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def test_without_a_file_the_log_has_what_is_taken(found, caplog):
  caplog.set_level(logging.INFO, "soprc_jax")
  config = {"num_attention_heads": 2}
  found(config=config)
  told = "taking mean (0.485, 0.456, 0.406), std (0.229, 0.224, 0.225), 24 pixels and bilinear"
  assert told in caplog.text
  caplog.clear()
  found(config=config, preprocessor_config={"size": 24})
  assert not caplog.text


def test_another_interpolation_warns(found, caplog):
  timm = {"architecture": "vit", "pretrained_cfg": {"interpolation": "lanczos"}}
  for files in ({"config": timm}, {"preprocessor_config": {"resample": 1}}):
    caplog.clear()
    assert found(**files).interpolation == "bilinear"
    assert "next to it is not supported: taking bilinear" in caplog.text


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"do_rescale": False}, r"preprocessor_config\.json next to it multiplies pixels by 1;"),
    ({"rescale_factor": 1 / 127.5}, r"multiplies pixels by 0\.00784314; only 1/255 is supported"),
    ({"size": 4}, r"resized to 4 pixels and cropped to 4 .* at least a patch, 8"),
    ({"size": 24, "crop_size": 32}, r"resized to 24 pixels and cropped to 32"),
  ],
)
def test_what_is_not_supported_raises(found, values, message):
  with pytest.raises(ValueError, match=message):
    found(preprocessor_config=values)
