"""The network of a training run, without its data."""

from collections.abc import Callable, Mapping
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import sources
from soprc_jax.training import build, evaluation, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir as workdir_lib

EmbedFn = Callable[[sources.Source], evaluation.Embedded]


class Network(NamedTuple):
  """A network and where it comes from.

  Attributes:
    config: of its run, resolved.
    workdir: of its run.
    variables: ``{"params", "batch_stats"}``, numpy arrays.
    step: of the checkpoint.
    digest: of the variables, see `digest`.
    meta: what the checkpoint knows of its data, see `soprc_jax.training.classes.describe`.
  """

  config: ConfigDict
  workdir: Path
  variables: dict[str, Any]
  step: int
  digest: str
  meta: Mapping[str, Any] = {}

  @property
  def image_size(self) -> int:
    """Side of the images in pixels."""
    return int(self.config.eval.image_size)

  @property
  def resize(self) -> int:
    """Shorter side of a picture before the middle of it is taken."""
    return int(self.config.eval.resize or self.config.eval.image_size)

  @property
  def architecture(self) -> str:
    """What of the config decides, with the variables, what is computed: sorted JSON."""
    model = self.config.model.to_dict()
    return json.dumps(
      {key: value for key, value in model.items() if key not in ("init_from", "freeze_bn")},
      sort_keys=True,
    )


def load(
  workdir: Path, config: ConfigDict = None, *, newest: bool = False, on_broken: str | None = None
) -> Network:
  """The network of the run in ``workdir``: best on val, or the newest.

  Args:
    workdir: of the run, which holds its config.
    config: resolved, to be that of the run but for what changes no result (the place of the data,
      for one); None takes the run's own.
    newest: take the newest checkpoint.
    on_broken: instead of ``data.on_broken``, see `soprc_jax.data.pipeline.eval_batches`.

  Raises:
    ValueError: there is no run, or one of another config.
    FileNotFoundError: the run has no such checkpoint yet.
  """
  if config is None:
    config = stored_config(workdir)
  else:
    lines = workdir_lib.config_differences(workdir, config)
    if lines:
      told = "\n".join(f"  {line}" for line in lines)
      raise ValueError(
        "this is not the config of the run in --workdir (without --config its own is "
        f"taken):\n{told}"
      )
  if on_broken is not None:
    config.data.on_broken = on_broken
  variables, step, meta = evaluation.restore(config, workdir, newest=newest)
  return Network(config, workdir, variables, step, digest(variables), meta)


def stored_config(workdir: Path) -> Any:
  """The resolved config that a run keeps in its folder.

  Raises:
    ValueError: there is none, or it is damaged.
  """
  tree = workdir_lib.read_config(workdir)
  try:
    return config_lib.from_json(tree)
  except ValueError as error:
    raise ValueError(f"{workdir / workdir_lib.CONFIG}: {error}") from error


def digest(variables: Mapping[str, Any]) -> str:
  """SHA-256 of the names, types, shapes and values of the arrays of a network."""
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(dict(variables)):  # by their sorted names
    array = np.ascontiguousarray(leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    found.update(array.tobytes())
  return found.hexdigest()


def make_embed(network: Network, *, at_most: int | None = None) -> EmbedFn:
  """A function from a source to its `evaluation.Embedded`, compiled once.

  Args:
    network: of a run.
    at_most: images that there will be, where the batch of the config would be mostly padding.
  """
  config = config_lib.ConfigDict(network.config.to_dict())
  if at_most is not None:
    config.eval.batch_size = min(config.eval.batch_size, max(at_most, 1))
  embed = evaluation.make_embed(build.make_model(config, freeze_bn=True), config)
  variables = parallel.replicate(network.variables)

  def embed_source(source: sources.Source) -> evaluation.Embedded:
    return embed(variables, source)

  return embed_source
