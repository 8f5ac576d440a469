"""What is known of the vision transformer that a run starts from, and the keys that follow it."""

from pathlib import Path
from typing import Any

from soprc_jax._internal import stored
from soprc_jax.models import pretrained, vit
from soprc_jax.models.vit_published import Published
from soprc_jax.training import checkpoints, vit_keys
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

# Width of a head, and the width from which a standard model has 24 blocks instead of 12.
_HEAD, _LARGE = 64, 1024


def description(published: Published) -> dict[str, Any]:
  """Returns what `checkpoints.save_variables` writes next to the arrays."""
  return published._asdict() | {"architecture": published.architecture._asdict()}


def stored_description(folder: Path) -> Published | None:
  """Reads what `checkpoints.save_variables` wrote of a `description`; None if it wrote none.

  Raises:
    ValueError: the file is corrupt.
  """
  path = folder / checkpoints.VARIABLES / checkpoints.DESCRIPTION
  if not path.exists():
    return None
  shapes = {name: _shape(value) for name, value in vit.Architecture()._asdict().items()}
  tree = stored.read_json(
    path,
    {"architecture": shapes, "image_size": int, "resize": int, "interpolation": str},
    remedy="write it again with soprc convert-weights",
  )
  names = Published._fields[1:]
  values = (tree["architecture"][name] for name in vit.Architecture._fields)
  # JSON's lists are tuples.
  arch = vit.Architecture._make(tuple(one) if isinstance(one, list) else one for one in values)
  return Published(arch, *(tree[name] for name in names))


def _shape(value: Any) -> Any:
  return [float] if isinstance(value, tuple) else type(value)


def find(source: str) -> Published | None:
  """Returns what is known of the vision transformer in a source; None for other models.

  Args:
    source: see `checkpoints.load_network`. Of a run it is the model of its config, with the sizes
      of its test images.

  Raises:
    FileNotFoundError: there is no checkpoint or file.
    ValueError: the file, or what is next to the weights, is corrupt.
  """
  if pretrained.is_file(source):
    return pretrained.vit_of(pretrained.load(source), source)
  folder = checkpoints.find_folder(source)
  if folder.name == checkpoints.VARIABLES:
    return stored_description(folder.parent)
  tree = workdir_lib.find_config(folder.parent)
  config = None if tree is None else config_lib.from_json(tree)
  if config is None or config.model.name != "vit":
    return None
  size, resize = int(config.eval.image_size), int(config.eval.resize)
  arch = vit_keys.architecture(config)
  return Published(arch, size, resize or size, config.eval.interpolation)


def standard(config: Any) -> vit.Architecture:
  """Returns the architecture for random weights: ViT-S/16, or that of a given width.

  Args:
    config: resolved; keys of ``model.vit`` may be open.
  """
  width = config.model.vit.width or vit.Architecture().width
  return vit.Architecture()._replace(
    width=width,
    depth=24 if width >= _LARGE else 12,
    heads=max(width // _HEAD, 1),
    mlp=4 * width,
  )
