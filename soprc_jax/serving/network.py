"""Loads the model of a training run without its data."""

from collections.abc import Callable, Mapping
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import sources
from soprc_jax.models import HEADS
from soprc_jax.serving import converted
from soprc_jax.training import build, evaluation, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

EmbedFn = Callable[[sources.Source], evaluation.Embedded]


class Network(NamedTuple):
  """Holds a model and its origin.

  Attributes:
    config: resolved config of its run.
    workdir: workdir of its run.
    variables: ``{"params", "batch_stats"}``, numpy arrays.
    step: step of the checkpoint.
    digest: hash of the variables, see `digest`.
    meta: class metadata of the checkpoint, see `soprc_jax.training.classes.describe`.
  """

  config: ConfigDict
  workdir: Path
  variables: dict[str, Any]
  step: int
  digest: str
  meta: Mapping[str, Any] = {}

  @property
  def features(self) -> int:
    """The width of the vectors that the model takes; 0 if it takes images."""
    return int(self.config.model.features) if self.config.model.name in HEADS else 0

  @property
  def image_size(self) -> int:
    """The side of the input images in pixels; 0 for vectors."""
    return 0 if self.features else int(self.config.eval.image_size)

  @property
  def resize(self) -> int:
    """The shorter side of an image in pixels before its center is cropped; 0 for vectors."""
    return 0 if self.features else int(self.config.eval.resize or self.config.eval.image_size)

  @property
  def architecture(self) -> str:
    """The part of the config that determines the computation, as sorted JSON."""
    model = self.config.model.to_dict()
    left_out = {"init_from", "freeze_bn", "remat", "lora"} | ({"vit"} - {model["name"]})
    return json.dumps(
      {key: value for key, value in model.items() if key not in left_out}, sort_keys=True
    )


def load(
  workdir: Path, config: ConfigDict = None, *, newest: bool = False, on_broken: str | None = None
) -> Network:
  """Loads the model of a run: the best on the validation split, or the newest.

  Converted weights are loaded too, see `soprc_jax.serving.converted`.

  Args:
    workdir: workdir of the run, which contains its config; or output of ``soprc convert-weights``.
    config: resolved config. It must equal that of the run, except for keys that do not change
      results (such as the place of the data). Open keys take the values of the run. None takes the
      config of the run.
    newest: load the newest checkpoint instead of the best.
    on_broken: replaces ``data.on_broken``, see `soprc_jax.data.pipeline.eval_batches`; None keeps
      it.

  Raises:
    ValueError: if there is no run, or if its config differs.
    FileNotFoundError: if the run has no such checkpoint yet.
  """
  if converted.is_converted(workdir):
    config, variables = converted.load(workdir, config)
    if on_broken is not None:
      config.data.on_broken = on_broken
    return Network(config, workdir, variables, 0, digest(variables))
  if config is None:
    config = stored_config(workdir)
  else:
    lines = workdir_lib.config_differences(workdir, config)
    config = workdir_lib.filled(workdir, config)
    if lines:
      told = "\n".join(f"  {line}" for line in lines)
      raise ValueError(
        "the config differs from that of the run in --workdir (omit --config to use the config of "
        f"the run):\n{told}"
      )
  if on_broken is not None:
    config.data.on_broken = on_broken
  variables, step, meta = evaluation.restore(config, workdir, newest=newest)
  return Network(config, workdir, variables, step, digest(variables), meta)


def stored_config(workdir: Path) -> Any:
  """Reads the resolved config that a run stores in its workdir.

  Raises:
    ValueError: if there is none, or if it is corrupt.
  """
  tree = workdir_lib.read_config(workdir)
  try:
    return config_lib.from_json(tree)
  except ValueError as error:
    raise ValueError(f"{workdir / workdir_lib.CONFIG}: {error}") from error


def digest(variables: Mapping[str, Any]) -> str:
  """Returns the SHA-256 of the names, types, shapes and values of the arrays of a model."""
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(dict(variables)):  # sorted by name
    array = np.ascontiguousarray(leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    found.update(array.tobytes())
  return found.hexdigest()


def make_embed(network: Network, *, at_most: int | None = None, variables: Any = None) -> EmbedFn:
  """Returns a function that embeds a source as `evaluation.Embedded`, compiled once.

  Args:
    network: model of a run.
    at_most: largest number of images that will be embedded. It limits the batch size, since a
      larger batch would be mostly padding. None keeps ``eval.batch_size``.
    variables: those of the model on the devices, as `parallel.replicate` returns them. None copies
      them there.
  """
  config = config_lib.ConfigDict(network.config.to_dict())
  if at_most is not None:
    config.eval.batch_size = min(config.eval.batch_size, max(at_most, 1))
  embed = evaluation.make_embed(build.make_model(config, freeze_bn=True), config)
  variables = parallel.replicate(network.variables) if variables is None else variables

  def embed_source(source: sources.Source) -> evaluation.Embedded:
    width = sources.width(source)
    if getattr(source, "made_by", "") == network.digest:
      raise ValueError(
        f"these vectors are embeddings by the model of {network.workdir} already: give its input, "
        "the features; or use the file as --index"
      )
    if width != network.features:
      raise ValueError(
        f"the model of {network.workdir} takes {_inputs(network.features)}; got {_inputs(width)}"
      )
    return embed(variables, source)

  return embed_source


def _inputs(width: int) -> str:
  return f"stored embeddings of width {width}" if width else "images"
