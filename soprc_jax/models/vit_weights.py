"""Converts published weights of vision transformers to parameters of `vit.ViT`.

The weights may have the names of Hugging Face's DINO, DINOv2, DINOv3, CLIP and SigLIP, those of
timm, or those of the authors of DINO.
"""

from collections.abc import Mapping
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

Variables = dict[str, Any]

# Name in a file -> name here, one rule after the other.
_NAMES = (
  (r"^(model|vit|dinov2|dinov2_with_registers|vision_model|backbone)\.", ""),
  (r"^(model|vision_model)\.", ""),
  (r"^embeddings\.(patch_embeddings\.projection|patch_embeddings?)\.", "patch_embed."),
  (r"^patch_embed\.proj\.", "patch_embed."),
  (r"^(embeddings\.)?(cls_token|class_embedding)$", "class_token"),
  (r"^embeddings\.(position_embeddings|position_embedding\.weight)$", "pos_embed"),
  (r"^(embeddings\.)?(register_tokens|reg_token|storage_tokens)$", "registers"),
  (r"^(pre_layrnorm|norm_pre)\.", "pre_norm."),
  (r"^(layernorm|post_layernorm)\.", "norm."),
  (r"^visual_projection\.", "projection."),
  (r"^(encoder\.layers?|layers?|blocks)\.(\d+)\.", r"blocks_\2."),
  (r"^head\.probe$", "pool.probe"),
  (r"^head\.attention\.in_proj_", "pool.attn.qkv."),
  (r"^head\.attention\.out_proj\.", "pool.attn.out."),
  (r"^head\.layernorm\.", "pool.norm."),
  (r"^head\.mlp\.", "pool.mlp."),
  (r"^attn_pool\.latent$", "pool.probe"),
  (r"^attn_pool\.(q|kv|proj)\.", r"pool.attn.\1."),
  (r"^attn_pool\.", "pool."),
  (r"\.attention\.output\.dense\.", ".attn.out."),
  (r"\.(attention\.attention|self_attn|attention)\.", ".attn."),
  (r"\.attn\.(q|k|v)(uery|ey|alue|_proj)\.", r".attn.\1."),
  (r"\.attn\.(q|v)_bias$", r".attn.\1.bias"),
  (r"\.attn\.(out_proj|o_proj|proj)\.", ".attn.out."),
  (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
  (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
  (r"\.(layer_scale|ls)(\d)\.(lambda1|gamma)$", r".layer_scale\2"),
  (r"\.gamma_(\d)$", r".layer_scale\1"),
  (r"\.intermediate\.dense\.", ".mlp.fc1."),
  (r"\.output\.dense\.", ".mlp.fc2."),
  (r"\.mlp\.(weights_in|w12)\.", ".mlp.fc1."),
  (r"\.mlp\.(weights_out|w3|down_proj)\.", ".mlp.fc2."),
  (r"\.mlp\.(gate_proj|fc1_g)\.", ".mlp.gate."),
  (r"\.mlp\.(up_proj|fc1_x)\.", ".mlp.fc1."),
)
# Text towers, heads of other tasks, and what only training needs.
_LEFT_OUT = re.compile(
  r"^(text_model|text_projection|logit_scale|logit_bias|pooler|classifier|head|head_dist)\b"
  r"|mask_token$|position_ids$|^rope|rope_embed|\.bias_mask$"
)

_NO_FAMILY = "these are weights of none of DINO, DINOv2, DINOv3, CLIP and SigLIP"


def check_finite(name: str, array: np.ndarray) -> None:
  """Raises a ValueError if a weight has values that are NaN or infinite."""
  if not np.isfinite(array).all():
    raise ValueError(f"{name!r} has values that are not finite: take another file of the weights")


def is_vit(weights: Mapping[str, np.ndarray]) -> bool:
  """Returns whether weights belong to a vision transformer, by their names."""
  return any(_name(name) == "patch_embed.weight" for name in weights)


def to_flax(weights: Mapping[str, np.ndarray]) -> Variables:
  """Converts weights to the variables of an `EmbeddingNet` with a `vit.ViT` and no head.

  The position embedding of a class token is added to the token. A bias that no block has is 0. Text
  towers and classifiers are left out.

  Args:
    weights: name -> array.

  Returns:
    ``{"params": {"backbone": ...}, "batch_stats": {}}``.

  Raises:
    ValueError: two weights have the same place; one is not finite or no array; a block lacks a bias
      that others have; position embeddings are not those of a square.
  """
  tree: Variables = {}
  for name, array in _canonical(weights).items():
    *modules, leaf = name.split(".")
    node = tree
    for part in modules:
      node = node.setdefault(part, {})
      if not isinstance(node, dict):
        raise ValueError(f"{name!r} is below another weight: {_NO_FAMILY}")
    if modules and leaf == "weight":
      is_norm = "norm" in modules[-1]
      leaf = "scale" if is_norm else "kernel"
      # Torch stores kernels as [out, in, height, width] and as [out, in].
      array = np.transpose(array, (2, 3, 1, 0)) if array.ndim == 4 else array.T
    if leaf in node:
      raise ValueError(f"{name!r} is both a weight and a module: {_NO_FAMILY}")
    node[leaf] = array
  return {"params": {"backbone": tree}, "batch_stats": {}}


def _name(name: str) -> str:
  """Returns the name here of a weight, with dots, e.g. ``blocks_0.attn.q.weight``.

  >>> _name("vision_model.encoder.layers.3.self_attn.k_proj.bias")
  'blocks_3.attn.k.bias'
  """
  for pattern, replacement in _NAMES:
    name = re.sub(pattern, replacement, name)
  return name


def _canonical(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the weights of the tower by their names here; every array is that of one module."""
  found: dict[str, np.ndarray] = {}
  for name, array in weights.items():
    place = _name(name)
    if _LEFT_OUT.search(place) or not np.size(array):  # DINOv3 can have registers of number 0
      continue
    if place in found:
      raise ValueError(f"there are two weights for {place}, one of them as {name!r}: remove one")
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
      raise ValueError(
        f"{name!r} is {array.dtype}, as in a quantized model, whose scales are not applied here: "
        "take weights of float32, float16 or bfloat16"
      )
    found[place] = np.asarray(array, np.float32)
    check_finite(name, found[place])
    if not found[place].ndim:
      raise ValueError(f"{name!r} is a single number, not an array: {_NO_FAMILY}")
  is_clip = "pre_norm.weight" in found
  if is_clip and "projection.weight" not in found:
    found |= _timm_projection(weights)
  found = _split(found)
  for token in ("class_token", "registers", "pos_embed", "pool.probe"):
    if token in found:
      found[token] = found[token].reshape(1, -1, found[token].shape[-1])
  _fold_class_position(found)
  return found | _zero_biases(found)


def _timm_projection(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the projection of timm's CLIP towers, their head. A classifier has a bias."""
  head, bias = weights.get("head.weight"), weights.get("head.bias")
  if head is None or (bias is not None and np.any(bias)):
    return {}
  return {"projection.weight": np.asarray(head, np.float32)}


def _split(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Splits layers that are stored as one: queries, keys and values, or a gate and its layer."""
  parts: dict[str, np.ndarray] = {}
  for name, array in found.items():
    module, _, leaf = name.rpartition(".")
    start, _, last = module.rpartition(".")
    width = _inputs(found, f"{start}.fc2.weight") if last == "fc1" else 0
    names = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}.get(last, (last,))
    if last == "fc1" and len(array) == 2 * width:
      names = ("gate", "fc1")
    if len(names) == 1:
      parts[name] = array
    elif len(array) % len(names):
      raise ValueError(f"{name} of {len(array)} rows is not that of {len(names)} equal layers")
    else:
      pieces = np.split(array, len(names))
      parts |= {f"{start}.{one}.{leaf}": piece for one, piece in zip(names, pieces)}
  return parts


def _inputs(found: Mapping[str, np.ndarray], name: str) -> int:
  """Returns the number of inputs of the weight of a linear layer."""
  if name not in found or found[name].ndim != 2:
    raise ValueError(f"there is no matrix {name}: the weights are not complete; {_NO_FAMILY}")
  return found[name].shape[1]


def _fold_class_position(found: dict[str, np.ndarray]) -> None:
  """Adds the first position embedding to the class token, in place, if it is that of the token."""
  positions = found.get("pos_embed")
  if positions is None:
    return
  count, has_class = positions.shape[1], "class_token" in found
  if has_class and math.isqrt(count - 1) ** 2 == count - 1:
    found["class_token"] = found["class_token"] + positions[:, :1]
    found["pos_embed"] = positions[:, 1:]
  elif math.isqrt(count) ** 2 != count:
    raise ValueError(f"{count} position embeddings are not those of a square of patches")


def _zero_biases(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns zeros for each layer of a block without a bias that has one in `vit.ViT`.

  Only a layer whose bias no block has can be one without. Others are left: their absence is an
  error.
  """
  has_rope = "pos_embed" not in found
  somewhere = {_in_block(name) for name in found}
  zeros: dict[str, np.ndarray] = {}
  for name, array in found.items():
    layer = _in_block(name).removesuffix(".weight")
    if not layer.startswith(("attn.", "mlp.")) or layer == _in_block(name):
      continue
    bias = name.removesuffix("weight") + "bias"
    if f"{layer}.bias" not in somewhere and not (has_rope and layer == "attn.k"):
      zeros[bias] = np.zeros(len(array), np.float32)
  return zeros


def _in_block(name: str) -> str:
  """Returns the name within its block; outside of blocks the name itself.

  >>> _in_block("blocks_3.attn.k.bias")
  'attn.k.bias'
  """
  return re.sub(r"^blocks_\d+\.", "", name)
