"""Finds how published weights of vision transformers want their images: sizes and normalization."""

from collections.abc import Mapping
import logging
import math
from typing import Any

from soprc_jax._internal.strings import shown
from soprc_jax.models import vit, vit_beside

_log = logging.getLogger(__name__)

# Numbers of Pillow.
_RESAMPLE = {2: "bilinear", 3: "bicubic"}


def find(
  architecture: vit.Architecture,
  config: Mapping[str, Any],
  beside: vit_beside.ReadBeside,
  *,
  interpolation: str,
  source: str,
) -> tuple[vit.Architecture, int, int, str]:
  """Finds mean, std, sizes and interpolation in the files next to the weights.

  Without such a file they are those of the family, which the log then tells.

  Args:
    architecture: that of the weights, with the mean and std of the family.
    config: content of ``config.json``.
    beside: reads a file next to the weights.
    interpolation: that of the family.
    source: name of the weights, for messages.

  Returns:
    The fields of `vit_published.Published`.

  Raises:
    ValueError: a file is corrupt, or names what is not supported.
  """
  timm = config.get("pretrained_cfg", {})
  made = vit_beside.preprocessor(beside, source)
  _check_rescaling(made, source)
  mean = timm.get("mean", made.get("image_mean", architecture.mean))
  std = timm.get("std", made.get("image_std", architecture.std))
  if made.get("do_normalize") is False:
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
  architecture = architecture._replace(mean=tuple(map(float, mean)), std=tuple(map(float, std)))
  side, resize = _sides(architecture, timm, made, source)
  given = timm.get("interpolation", made.get("resample"))
  chosen = _RESAMPLE.get(given, given)
  if chosen in _RESAMPLE.values():
    interpolation = chosen
  elif given is not None:
    _log.warning(
      "%s: interpolation %s in the files next to it is not supported: taking %s. Features differ a "
      "little from the published ones.",
      source,
      shown(given),
      interpolation,
    )
  if not made and not timm:
    _log.info(
      "There is no preprocessor_config.json next to %s: taking mean %s, std %s, %d pixels and %s "
      "interpolation.",
      source,
      architecture.mean,
      architecture.std,
      side,
      interpolation,
    )
  return architecture, side, resize, interpolation


def _check_rescaling(made: Mapping[str, Any], source: str) -> None:
  """Raises an error unless pixels from 0 to 255 are mapped to [0, 1] before the mean."""
  factor = made.get("rescale_factor", 1 / 255) if made.get("do_rescale", True) else 1.0
  if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
    raise ValueError(
      f"{source}: the preprocessor_config.json next to it multiplies pixels by {factor:g}; only "
      "1/255 is supported: set do_rescale and rescale_factor to it, and scale image_mean and "
      "image_std"
    )


def _sides(
  arch: vit.Architecture, timm: Mapping[str, Any], made: Mapping[str, Any], source: str
) -> tuple[int, int]:
  """Returns the side of the images, and the shorter side before the center is cropped."""
  side = resize = arch.image_size
  if "input_size" in timm:
    side = vit_beside.side({"input_size": timm["input_size"][1:]}, "input_size", source)
    resize = math.floor(side / timm.get("crop_pct", 1.0))
  elif "size" in made:
    side = resize = vit_beside.side(made, "size", source)
    if made.get("do_center_crop", "crop_size" in made) and "crop_size" in made:
      side = vit_beside.side(made, "crop_size", source)
  if not arch.patch <= side <= resize:
    raise ValueError(
      f"{source}: in the files next to it, images are resized to {resize} pixels and cropped to "
      f"{side} (size, crop_size); these must be at least a patch, {arch.patch}, and the crop not "
      f"larger than the image: {vit_beside.REMEDY}"
    )
  return side, resize
