"""Finds the architecture of published weights of vision transformers.

Shapes give most of it. A ``config.json`` next to the weights gives the rest, that of Hugging Face
or timm, and must not contradict them. Without it, the standard of the family is taken.
"""

from collections.abc import Mapping
import logging
import math
from typing import Any, NamedTuple

from soprc_jax._internal.strings import shown
from soprc_jax.models import embedding, vit, vit_beside, vit_preprocessing
from soprc_jax.models.vit_beside import ReadBeside

_log = logging.getLogger(__name__)

# Widths whose heads are not 64 wide: SigLIP so400m, ViT-H, DINOv2 giant of OpenCLIP's size, CLIP
# bigG, DINOv3 7B.
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 4096: 32}
# The same for one family: ViT-H+ of DINOv3, giant of SigLIP 2.
_FAMILY_HEADS = {("DINOv3", 1280): 20, ("SigLIP", 1536): 16}
_ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "gelu_tanh": "gelu_tanh",
  "quick_gelu": "quick_gelu",
}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


class _Family(NamedTuple):
  """Holds what the weights of a family have in common.

  Attributes:
    heads: default of ``num_attention_heads`` in its Hugging Face config.
    epsilon: epsilon of its normalizations.
    activation: its activation.
    mean: mean of its images.
    std: standard deviation of its images.
    interpolation: how its images are resized.
    parts: what all of its models have beside patches and blocks.
  """

  heads: int
  epsilon: float
  activation: str = "gelu"
  mean: tuple[float, ...] = embedding.IMAGE_MEAN
  std: tuple[float, ...] = embedding.IMAGE_STD
  interpolation: str = "bicubic"
  parts: tuple[str, ...] = ("class_token", "pos_embed")


_FAMILIES = {
  "DINO": _Family(12, 1e-12, interpolation="bilinear"),
  "DINOv2": _Family(12, 1e-6),
  "DINOv3": _Family(6, 1e-5, interpolation="bilinear", parts=("class_token",)),
  "CLIP": _Family(12, 1e-5, "quick_gelu", _CLIP_MEAN, _CLIP_STD),
  "SigLIP": _Family(12, 1e-6, "gelu_tanh", _HALF, _HALF, parts=("pos_embed",)),
}
# model_type of a Hugging Face config -> family.
_MODEL_TYPES = {
  "vit": "DINO",
  "dinov2": "DINOv2",
  "dinov2_with_registers": "DINOv2",
  "dinov3_vit": "DINOv3",
  "clip": "CLIP",
  "clip_vision_model": "CLIP",
  "siglip": "SigLIP",
  "siglip_vision_model": "SigLIP",
}
_CONTRADICTION = "parts are missing, or it belongs to other weights: download both again"
# Classes of Hugging Face with a projection of the features.
_PROJECTED = {"CLIPModel", "CLIPVisionModelWithProjection"}


class Published(NamedTuple):
  """Describes published weights.

  Attributes:
    architecture: architecture of the tower.
    image_size: side in pixels of the images that it takes.
    resize: shorter side in pixels before the center is cropped to ``image_size``.
    interpolation: how they are resized, ``"bilinear"`` or ``"bicubic"``.
  """

  architecture: vit.Architecture
  image_size: int
  resize: int
  interpolation: str


def describe(params: Mapping[str, Any], beside: ReadBeside, *, source: str) -> Published:
  """Finds the architecture and the preprocessing of weights.

  Args:
    params: the backbone of `vit_weights.to_flax`.
    beside: reads a file next to the weights.
    source: name of the weights, for messages.

  Raises:
    ValueError: the weights are not those of a supported tower, or lack a part of it; a file next to
      them is corrupt, or contradicts them.
  """
  whole = vit_beside.config(beside, source)
  config = whole | whole.get("vision_config", {})
  name = _family(params)
  _check_parts(params, name, whole.get("model_type", config.get("model_type")), source)
  _check_projection(params, whole, source)
  family = _FAMILIES[name]
  try:
    patch, *_, width = map(int, params["patch_embed"]["kernel"].shape)
    mlp = params["blocks_0"]["mlp"]
    hidden = int(mlp["fc1"]["kernel"].shape[-1])
  except (KeyError, IndexError, ValueError) as error:
    raise ValueError(f"{source} has no {error} as a vision transformer has") from error
  has_rope = "pos_embed" not in params
  native = vit_beside.side({"image_size": 224} | config, "image_size", source)
  if not has_rope:
    native = math.isqrt(params["pos_embed"].shape[1]) * patch
  heads = _heads(config, name, width, has_rope=has_rope, source=source)
  if not config:
    _log.warning(
      "There is no config.json next to %s: taking what is standard for %s (%d heads, epsilon %g, "
      "%s).",
      source,
      name,
      heads,
      family.epsilon,
      family.activation,
    )
  architecture = vit.Architecture(
    image_size=native,
    patch=patch,
    width=width,
    depth=sum(key.startswith("blocks_") for key in params),
    heads=heads,
    mlp=hidden,
    activation="swiglu" if "gate" in mlp else _activation(config, family, source),
    pool="class" if "class_token" in params else "attention" if "pool" in params else "mean",
    class_token="class_token" in params,
    registers=params["registers"].shape[1] if "registers" in params else 0,
    rope=float(config.get("rope_theta", 100.0)) if has_rope else 0.0,
    # Of the transformers package, only DINOv2 with registers resizes with antialiasing.
    antialias=name == "DINOv2" and "registers" in params,
    layer_scale=1.0 if "layer_scale1" in params["blocks_0"] else 0.0,
    pre_norm="pre_norm" in params,
    epsilon=float(config.get("layer_norm_eps", _epsilon(config, family))),
    projection=int(params["projection"]["kernel"].shape[-1]) if "projection" in params else 0,
    mean=family.mean,
    std=family.std,
  )
  _check_sizes(architecture, config, source)
  found = vit_preprocessing.find(
    architecture, config, beside, interpolation=family.interpolation, source=source
  )
  return Published(*found)


def _family(params: Mapping[str, Any]) -> str:
  if "pre_norm" in params:
    return "CLIP"
  if "pos_embed" not in params:
    return "DINOv3"
  if "class_token" not in params:
    return "SigLIP"
  return "DINOv2" if "layer_scale1" in params.get("blocks_0", {}) else "DINO"


def _check_parts(params: Mapping[str, Any], name: str, model_type: Any, source: str) -> None:
  """Raises an error if the arrays are not those of a whole model of a family.

  Args:
    params: the backbone.
    name: the family that the arrays look like.
    model_type: that of ``config.json``, None without one.
    source: name of the weights, for messages.
  """
  if model_type is not None and model_type not in _MODEL_TYPES:
    raise ValueError(
      f"{source}: model_type of its config.json must be one of {', '.join(_MODEL_TYPES)}; got "
      f"{shown(model_type)}, whose models compute something else: take weights of one of these"
    )
  wanted = _MODEL_TYPES.get(model_type, name)
  if wanted != name:
    raise ValueError(
      f"{source}: model_type={model_type} of its config.json belongs to {wanted}, but the arrays "
      f"are like those of {name}: {_CONTRADICTION}"
    )
  for part in ("patch_embed", "blocks_0", *_FAMILIES[name].parts):
    if part not in params:
      raise ValueError(
        f"{source} has no {part} as {name} has: the weights are not complete, or not of one of "
        f"{', '.join(_FAMILIES)}"
      )


def _check_projection(params: Mapping[str, Any], whole: Mapping[str, Any], source: str) -> None:
  """Raises an error if the projection of CLIP is missing, or not as ``config.json`` says."""
  found = int(params["projection"]["kernel"].shape[-1]) if "projection" in params else 0
  if not found and not _PROJECTED.intersection(whole.get("architectures", ())):
    return
  if found != whole.get("projection_dim", found or None):
    raise ValueError(
      f"{source}: its config.json says visual_projection with "
      f"projection_dim={whole.get('projection_dim')}, the arrays say {found}: {_CONTRADICTION}"
    )


def _check_sizes(arch: vit.Architecture, config: Mapping[str, Any], source: str) -> None:
  """Raises an error if ``config.json`` contradicts the arrays, e.g. those of a part of a file."""
  found = {
    "num_hidden_layers": arch.depth,
    "hidden_size": arch.width,
    "num_register_tokens": arch.registers,
    "patch_size": arch.patch,
  }
  if arch.activation != "swiglu":
    found["intermediate_size"] = arch.mlp
  if not arch.rope:
    found["image_size"] = arch.image_size
  for name, value in found.items():
    if name not in config:
      continue
    is_side = name in ("patch_size", "image_size")
    given = vit_beside.side(config, name, source) if is_side else config[name]
    # The pixels beyond the last whole patch have no position embedding.
    if given != value and (name != "image_size" or given // arch.patch * arch.patch != value):
      raise ValueError(
        f"{source}: its config.json says {name}={given}, the arrays say {value}: {_CONTRADICTION}"
      )


def _heads(
  config: Mapping[str, Any], family: str, width: int, *, has_rope: bool, source: str
) -> int:
  """Returns the number of heads: the given one, Hugging Face's default, or that of the width."""
  heads = config.get("num_attention_heads", config.get("model_args", {}).get("num_heads"))
  origin = "of its config.json"
  if heads is None and "model_type" in config:
    heads, origin = (
      _FAMILIES[family].heads,
      "the default, since its config.json has no num_attention_heads",
    )
  elif heads is None:
    heads = _HEADS.get(width, max(width // 64, 1))
    heads, origin = _FAMILY_HEADS.get((family, width), heads), "the usual number for the width"
  unit = 4 if has_rope else 1  # rotary embeddings turn by rows and columns, and in pairs
  if width % heads or width // heads % unit:
    raise ValueError(
      f"{source}: {heads} heads ({origin}) do not divide the width {width}"
      f"{' into multiples of 4' if has_rope else ''}: give the right number as num_attention_heads "
      "in a config.json next to it"
    )
  return int(heads)


def _epsilon(config: Mapping[str, Any], family: _Family) -> float:
  """Returns the epsilon of a family; timm's DINO has another one than Hugging Face's."""
  return max(family.epsilon, 1e-6) if "architecture" in config else family.epsilon


def _activation(config: Mapping[str, Any], family: _Family, source: str) -> str:
  # timm names the activation only in the name of the architecture.
  if "architecture" in config and family.activation == "quick_gelu":
    return "quick_gelu" if "quickgelu" in str(config["architecture"]) else "gelu"
  name = config.get("hidden_act")
  if name is None:
    return family.activation
  if name not in _ACTIVATIONS:
    raise ValueError(
      f"{source}: hidden_act of its config.json must be one of {', '.join(_ACTIVATIONS)}; got "
      f"{shown(name)}"
    )
  return _ACTIVATIONS[name]
