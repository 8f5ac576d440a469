"""Tests what is found out of published weights beyond their shapes."""

import json
import logging
import sys

import pytest
import vits

from soprc_jax.models import pretrained

_DINO = vits.timm_shapes()
_CLIP = {name: shape for name, shape in _DINO.items() if name != "patch_embed.proj.bias"}
_CLIP |= {"norm_pre.weight": (128,), "norm_pre.bias": (128,)}


@pytest.fixture
def found(tmp_path):
  """Returns a function that finds out what weights of some shapes and JSON files mean."""

  def find(shapes=_DINO, **files):
    source = vits.write(tmp_path / "model.safetensors", shapes)
    for name, content in files.items():
      (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return pretrained.vit_of(pretrained.to_flax(pretrained.read(source)), source)

  return find


def test_without_a_config_the_standard_of_the_family_is_taken_and_logged(found, caplog):
  caplog.set_level(logging.INFO, "soprc_jax")
  arch, image_size, resize, interpolation = found()
  assert interpolation == "bilinear"
  assert (arch.heads, arch.mlp, arch.depth, arch.patch, arch.width) == (2, 200, 1, 8, 128)
  assert (arch.image_size, image_size, resize) == (24, 24, 24)
  assert (arch.mean, arch.std) == vits.IMAGENET
  assert "standard for DINO (2 heads, epsilon 1e-12, gelu)" in caplog.text
  clip = found(_CLIP).architecture
  assert (clip.activation, clip.epsilon, clip.pre_norm) == ("quick_gelu", 1e-5, True)
  assert (clip.mean, clip.std) == vits.CLIP


def test_a_config_of_hugging_face_counts_and_what_it_omits_has_its_default(found):
  given = {"num_attention_heads": 8, "layer_norm_eps": 0.5, "hidden_act": "gelu_pytorch_tanh"}
  arch = found(config={"model_type": "vit"} | given).architecture
  assert (arch.heads, arch.epsilon, arch.activation) == (8, 0.5, "gelu_tanh")
  nested = {"model_type": "clip", "vision_config": {"num_attention_heads": 16}}
  arch = found(_CLIP, config=nested).architecture
  assert (arch.heads, arch.activation) == (16, "quick_gelu")
  with pytest.raises(ValueError, match="12 heads do not divide the width 128"):
    found(config={"model_type": "vit"})


def test_a_config_of_timm_counts(found):
  mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
  more = {"input_size": [3, 32, 32], "crop_pct": 0.9, "mean": mean, "std": std}
  more |= {"interpolation": "bicubic"}
  config = {"architecture": "vit_tiny", "pretrained_cfg": more, "model_args": {"num_heads": 4}}
  arch, image_size, resize, interpolation = found(config=config)
  assert interpolation == "bicubic"
  assert (arch.heads, arch.epsilon, arch.image_size) == (4, 1e-6, 24)
  assert (image_size, resize) == (32, 35)
  assert (arch.mean, arch.std) == (tuple(mean), tuple(std))
  for name, activation in {"quickgelu_224": "quick_gelu", "224": "gelu"}.items():
    config = {"architecture": f"vit_base_patch16_clip_{name}"}
    assert found(_CLIP, config=config).architecture.activation == activation


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


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"config": {"hidden_act": "tanh"}}, r"hidden_act .* must be one of gelu, .*; got 'tanh'"),
    ({"config": {"layer_norm_eps": -1}}, r"layer_norm_eps .* must be > 0; got -1"),
    ({"config": {"vision_config": 3}}, r"vision_config next to it must be an object; got 3"),
    ({"config": [1]}, r"config\.json is corrupt .*download it again"),
    ({"preprocessor_config": {"image_mean": [1]}}, r"mean next to it must be 3 numbers; got \[1\]"),
    ({"preprocessor_config": {"size": "big"}}, r"size next to it must be a number of pixels"),
  ],
)
def test_files_that_do_not_work_are_named(found, files, message):
  with pytest.raises(ValueError, match=message):
    found(**files)


def test_weights_of_another_architecture_are_named(found):
  with pytest.raises(ValueError, match=r"params\.backbone\.blocks_0\.attn\.q_norm"):
    found(_DINO | {"blocks.0.attn.q_norm.weight": (64,)})
  missing = {name: shape for name, shape in _DINO.items() if "fc1" not in name}
  with pytest.raises(ValueError, match=r"model\.safetensors has no 'fc1' as a vision transformer"):
    found(missing)


def test_the_files_of_a_repository_on_the_hub_are_read(found, tmp_path, monkeypatch):
  """Checks the names that are asked for, with a stand-in for the package."""
  found(config={"model_args": {"num_heads": 8}})  # writes the files
  asked = []

  class Hub:
    class errors:  # noqa: N801
      HfHubHTTPError = LocalEntryNotFoundError = OSError

    @staticmethod
    def hf_hub_download(repository, file):
      asked.append((repository, file))
      if not (tmp_path / file.removeprefix("part/")).exists():
        raise OSError("404")
      return str(tmp_path / file.removeprefix("part/"))

  monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
  source = "hf://me/vit/part/model.safetensors"
  published = pretrained.vit_of(pretrained.to_flax(pretrained.read(source)), source)
  assert published.architecture.heads == 8
  names = ["model.safetensors", "config.json", "preprocessor_config.json", "processor_config.json"]
  assert asked == [("me/vit", f"part/{name}") for name in names]
