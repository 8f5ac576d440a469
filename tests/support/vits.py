"""Makes tiny vision transformers of `transformers` with random weights; embeds images with them."""

import json
import pathlib
import tempfile

import numpy as np
from safetensors import numpy

from soprc_jax.models import pretrained

SIDE, PATCH = 32, 8
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"image_size": SIDE, "patch_size": PATCH}
_MLP = {"intermediate_size": 48}
_TEXT = _SIZES | _MLP | {"vocab_size": 99}
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = ((0.5, 0.5, 0.5),) * 2


def _text():
  return {key: one for key, one in _TEXT.items() if key not in ("image_size", "patch_size")}


# name -> (class of the model, class of its config, values of the config, mean and std).
CASES = {
  "dino": ("ViTModel", "ViTConfig", _SIZES | _MLP, IMAGENET),
  "dinov2": ("Dinov2Model", "Dinov2Config", _SIZES | {"mlp_ratio": 2}, IMAGENET),
  "dinov2_swiglu": ("Dinov2Model", "Dinov2Config", _SIZES | {"use_swiglu_ffn": True}, IMAGENET),
  "dinov2_registers": (
    "Dinov2WithRegistersModel",
    "Dinov2WithRegistersConfig",
    _SIZES | {"num_register_tokens": 3},
    IMAGENET,
  ),
  "dinov3": (
    "DINOv3ViTModel",
    "DINOv3ViTConfig",
    _SIZES | _MLP | {"num_register_tokens": 3, "rope_theta": 50.0},
    IMAGENET,
  ),
  "dinov3_swiglu": (
    "DINOv3ViTModel",
    "DINOv3ViTConfig",
    _SIZES | _MLP | {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False},
    IMAGENET,
  ),
  "clip_vision": ("CLIPVisionModel", "CLIPVisionConfig", _SIZES | _MLP, CLIP),
  "clip_projection": (
    "CLIPVisionModelWithProjection",
    "CLIPVisionConfig",
    _SIZES | _MLP | {"projection_dim": 24, "hidden_act": "gelu"},
    CLIP,
  ),
  "clip": (
    "CLIPModel",
    "CLIPConfig",
    {"vision_config": _SIZES | _MLP, "text_config": _text(), "projection_dim": 24},
    CLIP,
  ),
  "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", _SIZES | _MLP, HALF),
  "siglip": (
    "SiglipModel",
    "SiglipConfig",
    {"vision_config": _SIZES | _MLP, "text_config": _text()},
    HALF,
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


def save(model, folder):
  """Writes a model as users find it, and returns the path of the file of weights."""
  model.save_pretrained(folder)
  return str(folder / "model.safetensors")


def state_dict(name):
  """Returns the weights of a case by the names of their file, name -> array."""
  with tempfile.TemporaryDirectory() as folder:
    # The names in memory are others in some versions of `transformers`.
    return numpy.load_file(save(make(name), pathlib.Path(folder)))


def timm_shapes(width=128, patch=8, grid=3, hidden=200):
  """Returns name -> shape of the weights of a DINO of one block under timm's names."""
  block = {
    "attn.qkv.weight": (3 * width, width),
    "attn.qkv.bias": (3 * width,),
    "attn.proj.weight": (width, width),
    "attn.proj.bias": (width,),
    "mlp.fc1.weight": (hidden, width),
    "mlp.fc1.bias": (hidden,),
    "mlp.fc2.weight": (width, hidden),
    "mlp.fc2.bias": (width,),
  }
  block |= {f"norm{i}.{leaf}": (width,) for i in (1, 2) for leaf in ("weight", "bias")}
  return {
    "cls_token": (1, 1, width),
    "pos_embed": (1, grid * grid + 1, width),
    "patch_embed.proj.weight": (width, 3, patch, patch),
    "patch_embed.proj.bias": (width,),
    "norm.weight": (width,),
    "norm.bias": (width,),
    **{f"blocks.0.{name}": shape for name, shape in block.items()},
  }


def write(path, shapes, seed=0):
  """Writes random weights of some shapes, and returns the path as a text."""
  rng = np.random.default_rng(seed)
  weights = {}
  for name, shape in shapes.items():
    spread = 0.3 if len(shape) < 2 or "embed" in name else np.prod(shape[1:]) ** -0.5
    weights[name] = np.float32(
      ("norm" in name and len(shape) == 1) + spread * rng.normal(size=shape)
    )
  numpy.save_file(weights, path)
  return str(path)


def find(folder, shapes, **files):
  """Returns what is found out of weights of some shapes, with JSON files next to them."""
  source = write(folder / "model.safetensors", shapes)
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
  return pretrained.vit_of(pretrained.load(source), source)
