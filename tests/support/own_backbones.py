"""Backbones from outside the package, for tests of ``model.name=package.module:function``."""

import jax
import jax.numpy as jnp

from soprc_jax.models import adapter


@adapter.factory
def linear(config):
  """Returns the images averaged over 4 x 4 cells, times a matrix of ``config.width`` columns."""

  def init(key):
    return {"layer": {"kernel": jax.random.normal(key, (48, config.width)) / 7}}

  def apply(params, images):
    count, side = images.shape[:2]
    cells = images.reshape(count, 4, side // 4, 4, side // 4, 3).mean((2, 4))
    return jnp.tanh(cells.reshape(count, 48) @ params["layer"]["kernel"])

  return adapter.Backbone(init, apply, mean=(0.5,) * 3, std=(0.5,) * 3)


@adapter.factory
def flat(config):
  """Returns a backbone whose features have the wrong shape."""
  return adapter.Backbone(lambda key: {"a": jnp.ones(1)}, lambda params, images: params["a"])


@adapter.factory
def nothing(config):
  """Returns no backbone."""
  return {"init": None}


@adapter.factory
def tiny_equimo(config):
  """Returns a vision transformer of equimo with random weights."""
  return adapter.from_equinox(equimo_model(), class_token)


def equimo_model():
  """Returns the same model as a module of Equinox."""
  try:
    from equimo.vision.models import vit
  except ModuleNotFoundError:  # equimo 1, the newest for Python 3.11
    from equimo.models import vit

  return vit.VisionTransformer(
    img_size=32,
    in_channels=3,
    dim=24,
    patch_size=8,
    num_heads=2,
    depths=[2],
    num_classes=0,
    key=jax.random.PRNGKey(0),
  )


def class_token(model, image):
  """Returns the normalized class token of an image ``[3, H, W]``."""
  return model.forward_features(image, jax.random.PRNGKey(0), inference=True)["x_norm_cls_token"]
