"""The group ``config.model.vit``: keys of a vision transformer, one for each field of it."""

from typing import Any

from soprc_jax.models import vit
from soprc_jax.training.config_key import Key

_STANDARD = vit.Architecture()
_MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
  "image_size": (
    "side in pixels that the position embeddings belong to; they are resized for other images",
    {"low": 1, "high": 2**14},
  ),
  "patch": ("side of a patch in pixels", {"low": 1, "high": 2**14}),
  "width": ("width of a token: S 384, B 768, L 1024", {"low": 1, "high": 2**14}),
  "depth": ("blocks: S and B 12, L 24", {"low": 1, "high": 1000}),
  "heads": ("attention heads: S 6, B 12, L 16", {"low": 1, "high": 2**14}),
  "mlp": (
    "width of the hidden layer of a block: S 1536, B 3072, L 4096",
    {"low": 1, "high": 2**16},
  ),
  "activation": (
    "activation; swiglu: a gated hidden layer, whose two halves are mlp wide each",
    {"choices": tuple(vit.ACTIVATIONS)},
  ),
  "pool": (
    "features: the class token, the mean of the patches, or attention of a trained query",
    {"choices": vit.POOLS},
  ),
  "class_token": ("there is a class token", {}),
  "registers": ("register tokens", {"high": 1000}),
  "rope": (
    "> 0: base of rotary position embeddings (DINOv3: 100); 0: trained ones",
    {"low": 0},
  ),
  "antialias": ("position embeddings are resized with antialiasing", {}),
  "layer_scale": ("> 0: initial factor of the output of a block (LayerScale); 0: none", {"low": 0}),
  "pre_norm": ("tokens are normalized before the first block (CLIP)", {}),
  "epsilon": ("added to the variance by each normalization", {"above": 0, "high": 1}),
  "projection": ("width of a projection of the features (CLIP); 0: none", {"high": 2**20}),
  "mean": (
    "mean of the RGB values in [0, 1] that images are normalized with",
    {"must": "3 numbers", "holds": lambda values: len(values) == 3},
  ),
  "std": (
    "standard deviation of these values",
    {"must": "3 numbers > 0", "holds": lambda values: len(values) == 3 and min(values) > 0},
  ),
}
KEYS = tuple(
  Key(
    f"model.vit.{name}",
    getattr(_STANDARD, name),
    meaning,
    used_with=("model.name", ("vit",)),
    may_be_open=True,
    **rules,
  )
  for name, (meaning, rules) in _MEANINGS.items()
)


def architecture(config: Any) -> vit.Architecture:
  """Returns the architecture of ``config.model.vit``; no key is open."""
  values = {name: config.model.vit[name] for name in vit.Architecture._fields}
  return vit.Architecture(**values)


def problems(config: Any) -> list[str]:
  """Returns a line for each combination of keys of ``model.vit`` that does not work.

  Args:
    config: resolved; no key is open.
  """
  if config.model.name != "vit":
    return []
  arch, found = architecture(config), []
  if arch.width % arch.heads:
    found.append(f"model.vit.heads must divide model.vit.width={arch.width}; got {arch.heads}")
  elif arch.rope and arch.width // arch.heads % 4:
    found.append(
      "model.vit.width / model.vit.heads must be a multiple of 4 with model.vit.rope > 0; got "
      f"{arch.width // arch.heads}"
    )
  if arch.pool == "class" and not arch.class_token:
    found.append("model.vit.pool=class needs model.vit.class_token=True: choose mean or attention")
  sides = {
    "model.vit.image_size": arch.image_size,
    "data.image_size": config.data.image_size,
    "eval.image_size": config.eval.image_size,
  }
  return found + [
    f"{name} must be at least model.vit.patch={arch.patch}; got {side}"
    for name, side in sides.items()
    if side < arch.patch
  ]
