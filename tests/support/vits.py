"""Makes tiny vision transformers of `transformers` with random weights, and embeds images with them."""

import numpy as np

SIDE, PATCH = 32, 8
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"image_size": SIDE, "patch_size": PATCH}
_MLP = {"intermediate_size": 48}
_TEXT = _SIZES | _MLP | {"vocab_size": 99}
_CLIP = [(0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)]
_IMAGENET = [(0.485, 0.456, 0.406), (0.229, 0.224, 0.225)]
_HALF = [(0.5, 0.5, 0.5)] * 2


def _text():
  return {key: one for key, one in _TEXT.items() if key not in ("image_size", "patch_size")}


# name -> (class of the model, class of its config, values of the config, mean and std).
CASES = {
  "dino": ("ViTModel", "ViTConfig", _SIZES | _MLP, _IMAGENET),
  "dinov2": ("Dinov2Model", "Dinov2Config", _SIZES | {"mlp_ratio": 2}, _IMAGENET),
  "dinov2_swiglu": ("Dinov2Model", "Dinov2Config", _SIZES | {"use_swiglu_ffn": True}, _IMAGENET),
  "dinov2_registers": (
    "Dinov2WithRegistersModel",
    "Dinov2WithRegistersConfig",
    _SIZES | {"num_register_tokens": 3},
    _IMAGENET,
  ),
  "dinov3": (
    "DINOv3ViTModel",
    "DINOv3ViTConfig",
    _SIZES | _MLP | {"num_register_tokens": 3, "rope_theta": 50.0},
    _IMAGENET,
  ),
  "dinov3_swiglu": (
    "DINOv3ViTModel",
    "DINOv3ViTConfig",
    _SIZES | _MLP | {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False},
    _IMAGENET,
  ),
  "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", _SIZES | _MLP, _CLIP),
  "clip_projection": (
    "CLIPVisionModelWithProjection",
    "CLIPVisionConfig",
    _SIZES | _MLP | {"projection_dim": 24, "hidden_act": "gelu"},
    _CLIP,
  ),
  "clip": (
    "CLIPModel",
    "CLIPConfig",
    {"vision_config": _SIZES | _MLP, "text_config": _text(), "projection_dim": 24},
    _CLIP,
  ),
  "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", _SIZES | _MLP, _HALF),
  "siglip": (
    "SiglipModel",
    "SiglipConfig",
    {"vision_config": _SIZES | _MLP, "text_config": _text()},
    _HALF,
  ),
}


def make(name, seed=0):
  """Returns the model of a case; every weight is random, also factors, biases and tokens."""
  import torch
  import transformers

  model_class, config_class, values, _ = CASES[name]
  model = getattr(transformers, model_class)(getattr(transformers, config_class)(**values)).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for key, weight in model.named_parameters():
      is_factor = weight.ndim < 2 and ("norm" in key or "scale" in key) and "bias" not in key
      spread = 0.3 if weight.ndim < 2 or "embed" in key else weight[0].numel() ** -0.5
      weight.copy_(is_factor + spread * torch.randn(weight.shape, generator=generator))
  return model


def features(model, name, images):
  """Returns the pooled features of images ``[n, S, S, 3]`` uint8 by the model, of norm 1."""
  import torch

  mean, std = (np.array(values) for values in CASES[name][3])
  pixels = torch.tensor(((images / 255 - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
  model = {
    "clip": lambda: model.get_image_features,
    "siglip": lambda: model.get_image_features,
  }.get(name, lambda: model)()
  resized = {} if name.startswith("dinov") else {"interpolate_pos_encoding": True}
  with torch.no_grad():
    out = model(pixel_values=pixels, **resized)
  if name == "clip_projection":
    out = out.image_embeds
  elif name.startswith("dino"):
    out = out.last_hidden_state[:, 0]
  elif not torch.is_tensor(out):
    out = out.pooler_output
  out = out.numpy()
  return out / np.linalg.norm(out, axis=1, keepdims=True)


def pictures(side, count=3, seed=0):
  """Returns random images ``[count, side, side, 3]`` uint8."""
  return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
