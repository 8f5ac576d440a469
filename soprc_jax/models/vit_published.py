"""Finds the architecture and the preprocessing of published weights of vision transformers.

Shapes give most of it. A ``config.json`` next to the weights gives the rest: that of Hugging Face
or timm. Without it, the standard of the family is taken.
"""

from collections.abc import Callable, Mapping
import logging
import math
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import stored
from soprc_jax._internal.strings import shown
from soprc_jax.models import embedding, vit

_log = logging.getLogger(__name__)

# Returns the content of a JSON file next to the weights, None if there is none.
ReadBeside = Callable[[str], dict[str, Any] | None]

# Widths whose heads are not 64 wide: SigLIP so400m, DINOv2 giant of OpenCLIP's size, CLIP bigG.
_HEADS = {1152: 16, 1408: 16, 1664: 16}
_ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "gelu_tanh": "gelu_tanh",
  "quick_gelu": "quick_gelu",
}
# Numbers of Pillow.
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
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
  """

  heads: int
  epsilon: float
  activation: str = "gelu"
  mean: tuple[float, ...] = embedding.IMAGE_MEAN
  std: tuple[float, ...] = embedding.IMAGE_STD
  interpolation: str = "bicubic"


_FAMILIES = {
  "DINO": _Family(12, 1e-12, interpolation="bilinear"),
  "DINOv2": _Family(12, 1e-6),
  "DINOv3": _Family(6, 1e-5, interpolation="bilinear"),
  "CLIP": _Family(12, 1e-5, "quick_gelu", _CLIP_MEAN, _CLIP_STD),
  "SigLIP": _Family(12, 1e-6, "gelu_tanh", _HALF, _HALF),
}


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
    ValueError: the weights are not those of a supported tower; a file next to them is corrupt.
  """
  config = beside("config.json") or {}
  config = config | _object(config, "vision_config", source)
  name = _family(params)
  family = _FAMILIES[name]
  try:
    width = int(params["patch_embed"]["kernel"].shape[-1])
    patch = int(params["patch_embed"]["kernel"].shape[0])
    mlp = params["blocks_0"]["mlp"]
    hidden = int(mlp["fc1"]["kernel"].shape[-1])
  except (KeyError, IndexError) as error:
    raise ValueError(f"{source} has no {error} as a vision transformer has") from error
  heads = _heads(config, family, width)
  if not 0 < heads <= width or width % heads:
    raise ValueError(f"{source}: {heads} heads do not divide the width {width}")
  has_rope = "pos_embed" not in params
  native = _side(config.get("image_size", 224), "image_size", source)
  if not has_rope:
    native = math.isqrt(params["pos_embed"].shape[1]) * patch
  if not config:
    _log.info(
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
    rope=_number(config, "rope_theta", 100.0, source) if has_rope else 0.0,
    # Of the transformers package, only DINOv2 with registers resizes with antialiasing.
    antialias=name == "DINOv2" and "registers" in params,
    layer_scale=1.0 if "layer_scale1" in params["blocks_0"] else 0.0,
    pre_norm="pre_norm" in params,
    epsilon=_number(config, "layer_norm_eps", _epsilon(config, family), source),
    projection=int(params["projection"]["kernel"].shape[-1]) if "projection" in params else 0,
    mean=family.mean,
    std=family.std,
  )
  return _with_preprocessing(architecture, config, beside, family.interpolation, source)


def _family(params: Mapping[str, Any]) -> str:
  if "pre_norm" in params:
    return "CLIP"
  if "class_token" not in params:
    return "SigLIP"
  if "pos_embed" not in params:
    return "DINOv3"
  return "DINOv2" if "layer_scale1" in params.get("blocks_0", {}) else "DINO"


def _heads(config: Mapping[str, Any], family: _Family, width: int) -> int:
  """Returns the number of heads: the given one, Hugging Face's default, or 64 channels each."""
  given = config.get("num_attention_heads", config.get("model_args", {}).get("num_heads"))
  if given is None:
    given = family.heads if "model_type" in config else _HEADS.get(width, max(width // 64, 1))
  return int(given)


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


def _with_preprocessing(
  architecture: vit.Architecture,
  config: Mapping[str, Any],
  beside: ReadBeside,
  interpolation: str,
  source: str,
) -> Published:
  """Adds mean, std, sizes and interpolation of the files next to the weights.

  Without such a file they are those of the family.
  """
  timm = _object(config, "pretrained_cfg", source)
  made = beside("preprocessor_config.json")
  if made is None:
    made = _object(beside("processor_config.json") or {}, "image_processor", source)
  mean: Any = timm.get("mean", made.get("image_mean", architecture.mean))
  std: Any = timm.get("std", made.get("image_std", architecture.std))
  if made.get("do_normalize") is False:
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
  for name, values in {"mean": mean, "std": std}.items():
    if (
      not isinstance(values, (list, tuple))
      or stored.problem([*values], [float])
      or len(values) != 3
    ):
      raise ValueError(f"{source}: the {name} next to it must be 3 numbers; got {shown(values)}")
  architecture = architecture._replace(mean=tuple(map(float, mean)), std=tuple(map(float, std)))
  side = resize = architecture.image_size
  if "input_size" in timm:
    side = resize = int(timm["input_size"][-1])
    resize = math.floor(side / float(timm.get("crop_pct", 1.0)))
  elif "size" in made:
    side = resize = _side(made["size"], "size", source)
    if made.get("do_center_crop", "crop_size" in made) and made.get("crop_size"):
      side = _side(made["crop_size"], "crop_size", source)
  given: Any = timm.get("interpolation", _RESAMPLE.get(made.get("resample", 0)))
  if given in _RESAMPLE.values():  # others, such as Lanczos, are those of no family
    interpolation = given
  return Published(architecture, side, max(resize, side), interpolation)


def _side(value: Any, name: str, source: str) -> int:
  """Returns the side of a square image that a config gives in one of many forms."""
  if isinstance(value, dict):
    value = value.get("shortest_edge", value.get("height"))
  if isinstance(value, (list, tuple)) and value:
    value = value[-1]
  if not isinstance(value, int) or value < 1:
    raise ValueError(f"{source}: {name} next to it must be a number of pixels; got {shown(value)}")
  return value


def _number(config: Mapping[str, Any], name: str, default: float, source: str) -> float:
  value = config.get(name, default)
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < np.inf:
    raise ValueError(f"{source}: {name} of its config.json must be > 0; got {shown(value)}")
  return float(value)


def _object(tree: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
  """Returns the object under a name; an empty one if there is none."""
  found = tree.get(name, {})
  if not isinstance(found, dict):
    raise ValueError(f"{source}: {name} next to it must be an object; got {shown(found)}")
  return found
