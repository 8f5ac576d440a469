"""Tests what is found out of published weights beyond their shapes."""

import logging
import sys

import pytest
import vits

from soprc_jax.models import pretrained, vit_published

_DINO = vits.timm_shapes()
_CLIP = {name: shape for name, shape in _DINO.items() if name != "patch_embed.proj.bias"}
_CLIP |= {"norm_pre.weight": (128,), "norm_pre.bias": (128,)}


@pytest.fixture
def found(tmp_path):
  """Returns a function that finds out what weights of some shapes and JSON files mean."""

  return lambda shapes=_DINO, **files: vits.find(tmp_path, shapes, **files)


def test_without_a_config_the_standard_of_the_family_is_taken_and_logged(found, caplog):
  caplog.set_level(logging.INFO, "soprc_jax")
  arch, image_size, resize, interpolation = found()
  assert interpolation == "bilinear"
  assert (arch.heads, arch.mlp, arch.depth, arch.patch, arch.width) == (2, 200, 1, 8, 128)
  assert (arch.image_size, image_size, resize) == (24, 24, 24)
  assert (arch.mean, arch.std) == vits.IMAGENET
  (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
  assert "standard for DINO (2 heads, epsilon 1e-12, gelu)" in warning.getMessage()
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
  with pytest.raises(
    ValueError, match=r"12 heads \(the default, since its .*\) do not divide the width 128"
  ):
    found(config={"model_type": "vit"})


@pytest.mark.parametrize(
  ("family", "width", "heads"),
  [
    ("DINO", 384, 6),
    ("CLIP", 1280, 16),
    ("DINOv3", 1280, 20),
    ("DINOv2", 1536, 24),
    ("SigLIP", 1536, 16),
    ("DINOv3", 4096, 32),
    ("SigLIP", 1152, 16),
  ],
)
def test_without_a_number_the_heads_are_those_of_the_published_width(family, width, heads):
  """Numbers of timm and of the DINOv3 repository."""
  config = {"architecture": "vit_of_timm"}
  rope = {"has_rope": family == "DINOv3"}
  assert vit_published._heads(config, family, width, source="w", **rope) == heads


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


def test_weights_of_another_architecture_are_named(found):
  with pytest.raises(ValueError, match=r"params\.backbone\.blocks_0\.attn\.q_norm"):
    found(_DINO | {"blocks.0.attn.q_norm.weight": (64,)})
  message = r"do not fit one of DINO, DINOv2, DINOv3, CLIP, SigLIP and ResNets"
  with pytest.raises(ValueError, match=message):
    found(_DINO | {"blocks.0.attn.q_norm.weight": (64,)})
  missing = {name: shape for name, shape in _DINO.items() if "fc1" not in name}
  with pytest.raises(ValueError, match=r"model\.safetensors has no 'fc1' as a vision transformer"):
    found(missing)


def _without(shapes, *parts):
  return {name: shape for name, shape in shapes.items() if not name.startswith(parts)}


_DINO3 = _without(_DINO, "pos_embed", "blocks.0.attn.qkv.bias") | {
  "blocks.0.ls1.gamma": (128,),
  "blocks.0.ls2.gamma": (128,),
}


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (
      {"num_hidden_layers": 2},
      r"its config\.json says num_hidden_layers=2, the arrays say 1: parts",
    ),
    ({"hidden_size": 64}, r"says hidden_size=64, the arrays say 128"),
    ({"patch_size": 16}, r"says patch_size=16, the arrays say 8"),
    ({"intermediate_size": 100}, r"says intermediate_size=100, the arrays say 200"),
    ({"image_size": 32}, r"says image_size=32, the arrays say 24"),
    ({"num_register_tokens": 4}, r"says num_register_tokens=4, the arrays say 0"),
    (
      {"model_type": "dinov2"},
      r"model_type=dinov2 .* DINOv2, but the arrays are like those of DINO:",
    ),
    ({"model_type": "ijepa"}, r"model_type .* must be one of vit, dinov2, .*; got 'ijepa'"),
  ],
)
def test_a_config_that_contradicts_the_arrays_raises(found, config, message):
  with pytest.raises(ValueError, match=message):
    found(config=config)


def test_a_config_that_agrees_counts(found):
  config = {"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 128, "patch_size": 8}
  config |= {"intermediate_size": 200, "num_attention_heads": 4}
  # 30 pixels have three whole patches.
  assert found(config=config | {"image_size": 30}).architecture.image_size == 24


def test_missing_parts_are_named(found):
  with pytest.raises(ValueError, match=r"has no class_token as DINOv3 has: .* not complete"):
    found(_without(_DINO3, "cls_token"))
  with pytest.raises(ValueError, match=r"has no pos_embed as CLIP has"):
    found(_without(_CLIP, "pos_embed"))
  with pytest.raises(ValueError, match=r"has no blocks_0 as DINO has"):
    found(_without(_DINO, "blocks"))
  config = {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 20}
  with pytest.raises(ValueError, match=r"says visual_projection .*=20, the arrays say 0"):
    found(_CLIP, config=config)
  projected = _CLIP | {"head.weight": (20, 128)}
  assert found(projected, config=config).architecture.projection == 20
  with pytest.raises(ValueError, match=r"projection_dim=30, the arrays say 20"):
    found(projected, config=config | {"projection_dim": 30})
  # The config of a tower alone has the key without the projection.
  alone = {"architectures": ["CLIPVisionModel"], "projection_dim": 20}
  assert found(_CLIP, config=alone).architecture.projection == 0


def test_heads_of_rotary_embeddings_are_multiples_of_4_wide(found):
  assert found(_DINO3, config={"model_args": {"num_heads": 4}}).architecture.heads == 4
  with pytest.raises(
    ValueError, match=r"64 heads \(of its .*128 into multiples of 4: give the right"
  ):
    found(_DINO3, config={"num_attention_heads": 64})


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
  published = pretrained.vit_of(pretrained.load(source), source)
  assert published.architecture.heads == 8
  names = ["model.safetensors", "config.json", "preprocessor_config.json", "processor_config.json"]
  assert asked == [("me/vit", f"part/{name}") for name in names]
