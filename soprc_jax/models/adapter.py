"""Uses a model of another JAX library as a backbone: two pure functions, or an Equinox module."""

from collections.abc import Callable
import functools
import importlib
import json
import sys
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from soprc_jax.models import embedding

Params = dict[str, Any]


class Backbone(NamedTuple):
  """Describes a backbone by pure functions.

  Attributes:
    init: random key -> parameters, a dict of arrays or of such dicts. It may also ignore the key
      and return pretrained parameters.
    apply: (parameters, normalized images ``[B, H, W, 3]`` float32) -> features ``[B, F]``. It
      treats each image independently, and training and evaluation are the same.
    mean: mean of the RGB values in [0, 1] that images are normalized with.
    std: standard deviation of these values.
  """

  init: Callable[[jax.Array], Params]
  apply: Callable[[Params, jax.Array], jax.Array]
  mean: tuple[float, ...] = embedding.IMAGE_MEAN
  std: tuple[float, ...] = embedding.IMAGE_STD


def factory(function: Callable[[Any], Backbone]) -> Callable[[Any], Backbone]:
  """Marks a function ``config.model -> Backbone`` as one that ``model.name`` may name.

  Without the mark the config of a run, which is data, could have any function called.
  """
  function.makes_backbone = True  # type: ignore[attr-defined]
  return function


class Adapter(nn.Module):
  """A `Backbone` as a Flax module. Its parameters are under ``adapted``.

  Attributes:
    backbone: the model.
  """

  backbone: Backbone

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False, where: jax.Array | None = None
  ) -> jax.Array:
    """Computes the features of normalized images.

    Args:
      images: ``[B, H, W, 3]``.
      train: not used.
      where: not used.

    Returns:
      ``[B, F]``.

    Raises:
      ValueError: the backbone returns another shape.
    """
    del train, where
    # Other libraries rely on implicit promotion of dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      params = self.param("adapted", self.backbone.init)
      features = jnp.asarray(self.backbone.apply(params, images))
    if features.ndim != 2 or features.shape[0] != images.shape[0]:
      raise ValueError(
        f"the backbone must return features [B, F], B={images.shape[0]}; got {features.shape}"
      )
    return features


def from_equinox(model: Any, features: Callable[[Any, jax.Array], jax.Array]) -> Backbone:
  """Returns an Equinox module as a `Backbone`, with ImageNet's normalization.

  It needs the package equinox. ``_replace(mean=..., std=...)`` changes the normalization.

  Args:
    model: Equinox module. Its arrays of floats are the parameters.
    features: (module, one image ``[3, H, W]``) -> features ``[F]``.
  """
  import equinox

  arrays, static = equinox.partition(model, equinox.is_inexact_array)
  leaves, tree = jax.tree_util.tree_flatten_with_path(arrays)
  # Dots, since a slash separates the names of modules in paths of parameters.
  names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]

  def apply(params: Params, images: jax.Array) -> jax.Array:
    whole = equinox.combine(jax.tree.unflatten(tree, [params[name] for name in names]), static)
    return jax.vmap(functools.partial(features, whole))(jnp.transpose(images, (0, 3, 1, 2)))

  values = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
  return Backbone(lambda key: values, apply)


def name_problem(name: str, *, imports: bool = True) -> str | None:
  """Returns what is wrong with ``package.module:function``, None if nothing is.

  Args:
    name: name of a `factory`.
    imports: whether the module may be imported. Otherwise it must have been imported already, so
      that the files of a run do not choose what code runs.
  """
  module, _, function = name.partition(":")
  if not imports and module not in sys.modules:
    return (
      f"{name!r} is code outside soprc_jax, which a run does not import on its own: import "
      f"{module} first, or give the --config of the run"
    )
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:  # importing the user's module may raise anything
    return f"{name!r} cannot be imported: {type(error).__name__}: {error}"
  if getattr(found, "makes_backbone", False):
    return None
  return f"{name!r} is no function that is marked with @soprc_jax.models.adapter.factory"


def make(config: Any) -> Backbone:
  """Returns the backbone of ``config.model.name``, made once for equal configs.

  Args:
    config: ``config.model``, resolved; its name is ``package.module:function``.

  Raises:
    TypeError: the function returns no `Backbone`.
  """
  return _made(config.to_json(sort_keys=True))


@functools.lru_cache(maxsize=2)
def _made(text: str) -> Backbone:
  config = ConfigDict(json.loads(text))
  module, _, function = str(config.name).partition(":")
  found = getattr(importlib.import_module(module), function)(config)
  if not isinstance(found, Backbone):
    raise TypeError(
      f"model.name={config.name} must return a soprc_jax.models.adapter.Backbone; got "
      f"{type(found).__name__}"
    )
  return found
