"""Tests that wrong values in the files next to published weights are named."""

import math

import pytest
import vits


@pytest.fixture
def found(tmp_path):
  """Returns a function that finds out what JSON files say next to the weights of a DINO."""
  return lambda **files: vits.find(tmp_path, vits.timm_shapes(), **files)


def test_null_is_as_a_missing_key(found):
  values = {"num_attention_heads": 4, "hidden_act": None, "vision_config": {"hidden_act": None}}
  assert found(config=values, preprocessor_config={"crop_size": None}).architecture.heads == 4


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"hidden_act": "tanh"}, r"hidden_act .* must be one of gelu, .*; got 'tanh'"),
    ({"hidden_act": ["gelu"]}, r"config\.json .* hidden_act must be a text, it is \['gelu'\]"),
    ({"layer_norm_eps": -1}, r"layer_norm_eps must be > 0 and at most 1, it is -1: correct it"),
    ({"layer_norm_eps": 5}, r"layer_norm_eps must be > 0 and at most 1, it is 5"),
    ({"layer_norm_eps": math.nan}, r"layer_norm_eps must be > 0 .* it is nan"),
    ({"num_attention_heads": [3]}, r"num_attention_heads must be an integer, it is \[3\]"),
    ({"num_attention_heads": 3.7}, r"num_attention_heads must be an integer, it is 3\.7"),
    ({"num_attention_heads": True}, r"num_attention_heads must be an integer, it is True"),
    ({"num_attention_heads": math.inf}, r"num_attention_heads must be an integer, it is inf"),
    ({"num_attention_heads": "abc"}, r"num_attention_heads must be an integer, it is 'abc'"),
    ({"num_attention_heads": 0}, r"num_attention_heads must be > 0 .* it is 0"),
    ({"vision_config": 3}, r"vision_config must be an object, it is 3"),
    ({"vision_config": {"hidden_size": "a"}}, r"vision_config\.hidden_size must be an integer"),
    ({"model_args": 3}, r"model_args must be an object, it is 3"),
    ({"pretrained_cfg": {"input_size": 3}}, r"pretrained_cfg\.input_size must be a list"),
    ({"pretrained_cfg": {"input_size": []}}, r"pretrained_cfg\.input_size must be a list"),
    ({"pretrained_cfg": {"input_size": None}}, r"pretrained_cfg\.input_size must be a list"),
    ({"pretrained_cfg": {"input_size": [8]}}, r"input_size must be 3 numbers, it is \[8\]"),
    ({"pretrained_cfg": {"input_size": [3, -8, -8]}}, r"pretrained_cfg\.input_size must be > 0"),
    ({"pretrained_cfg": {"input_size": [3, 24, 32]}}, r"input_size .* the side of a square"),
    ({"pretrained_cfg": {"crop_pct": None}}, r"pretrained_cfg\.crop_pct must be a number"),
    ({"pretrained_cfg": {"crop_pct": 0}}, r"pretrained_cfg\.crop_pct must be > 0"),
    ({"pretrained_cfg": {"crop_pct": "a"}}, r"pretrained_cfg\.crop_pct must be a number"),
    ([1], r"config\.json is corrupt .*download it again"),
  ],
)
def test_wrong_values_of_a_config_are_named(found, values, message):
  with pytest.raises(ValueError, match=message):
    found(config=values)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"image_mean": [1]}, r"image_mean must be 3 numbers, it is \[1\]"),
    ({"image_std": [1, 0, 1]}, r"processor_config\.json .*image_std must be > 0"),
    ({"image_std": [1, math.nan, 1]}, r"image_std must be > 0 .* it is \[1, nan, 1\]"),
    ({"image_std": [1, -1, 1]}, r"image_std must be > 0"),
    ({"resample": [2]}, r"resample must be an integer, it is \[2\]"),
    ({"size": "big"}, r"size in the files next to it must be a number of pixels"),
    ({"size": {"longest_edge": 24}}, r"size in the files next to it must be a number of pixels"),
    ({"size": {"height": 24, "width": 32}}, r"the side of a square; got .*: correct it"),
  ],
)
def test_wrong_values_of_a_preprocessor_are_named(found, values, message):
  for files in (
    {"processor_config": {"image_processor": values}},
    {"preprocessor_config": values},  # counts from now on
  ):
    with pytest.raises(ValueError, match=message):
      found(**files)
