"""Evaluation of a network on a split: embed all images on the devices, rank them on the host."""

from collections.abc import Callable
import functools
from pathlib import Path
from typing import Any, NamedTuple

from flax import linen as nn
import numpy as np

from soprc_jax import metrics
from soprc_jax.data import pipeline, sources
from soprc_jax.training import build, checkpoints, parallel
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib


class Embedded(NamedTuple):
  """The images of a source as vectors.

  Attributes:
    embeddings: ``[N, D]`` float32, of the images that could be decoded.
    labels: ``[N]`` theirs.
    positions: ``[N]`` theirs in the source.
    num_broken: images that could not be decoded and were left out (``data.on_broken=skip``).
  """

  embeddings: np.ndarray
  labels: np.ndarray
  positions: np.ndarray
  num_broken: int


EmbedFn = Callable[[Any, sources.Source], Embedded]


def make_embed(model: nn.Module, config: Any) -> EmbedFn:
  """A function ``(replicated variables, source) -> Embedded``, compiled once for one batch shape.

  Args:
    model: network in evaluation mode.
    config: resolved; ``config.eval`` has the transform, ``config.data.on_broken`` the policy.
  """
  count, settings = parallel.num_devices(), config.eval
  batch_size = -(-settings.batch_size // count) * count  # evaluation pads, so any size will do
  compiled = parallel.compile_step(functools.partial(step_lib.embed_step, model=model), donate_state=False)

  def embed(variables: Any, source: sources.Source) -> Embedded:
    parts, kept = [], []
    batches = pipeline.eval_batches(
      source,
      batch_size=batch_size,
      image_size=settings.image_size,
      resize_to=settings.resize,
      on_broken=config.data.on_broken,
    )
    for batch in batches:
      where = batch.pop("where")
      embeddings = parallel.unshard(compiled(variables, parallel.shard(batch)))
      parts.append(embeddings[where])  # padding never reaches a metric
      kept.append(where)
    good = np.concatenate(kept)[: len(source)]
    return Embedded(np.concatenate(parts), source.labels[good], np.flatnonzero(good), int((~good).sum()))

  return embed


def evaluate(embedded: Embedded, settings: Any) -> dict[str, Any]:
  """`soprc_jax.metrics.retrieval_metrics` of a split against itself, by ``config.eval``, and how many images were left out."""
  values = metrics.retrieval_metrics(embedded.embeddings, embedded.labels, ks=settings.ks, block_size=settings.block_size)
  return values | {"num_broken": embedded.num_broken}


def one_per_class(embedded: Embedded, settings: Any, *, repeats: int, seed: int = 0) -> dict[str, Any]:
  """Retrieval from a gallery of one random image of each class, the others as queries: the protocol of VehicleID's authors.

  Args:
    embedded: images and labels.
    settings: ``config.eval``.
    repeats: number of random galleries >= 1.
    seed: of the galleries.

  Returns:
    The mean over the galleries of each metric, and under ``"NAME_std"`` its standard deviation; ``"num_repeats"``.
  """
  rng, found = np.random.default_rng(seed), []
  for _ in range(repeats):
    order = rng.permutation(len(embedded.labels))
    chosen = order[np.unique(embedded.labels[order], return_index=True)[1]]
    queries = np.setdiff1d(order, chosen)
    found.append(
      metrics.retrieval_metrics(
        embedded.embeddings[queries],
        embedded.labels[queries],
        gallery=embedded.embeddings[chosen],
        gallery_labels=embedded.labels[chosen],
        ks=settings.ks,
        block_size=settings.block_size,
      )
    )
  names = [name for name, value in found[0].items() if isinstance(value, float)]
  means = {name: float(np.mean([values[name] for values in found])) for name in names}
  deviations = {f"{name}_std": float(np.std([values[name] for values in found])) for name in names}
  fixed = {name: found[0][name] for name in ("num_queries", "num_skipped", "ks_beyond_gallery")}
  return means | deviations | fixed | {"num_repeats": repeats, "num_broken": embedded.num_broken}


class Trained(NamedTuple):
  """The network of a run, ready to embed.

  Attributes:
    embed: images to vectors.
    variables: of the network, on all devices.
    splits: data of the run.
    step: of the checkpoint.
  """

  embed: EmbedFn
  variables: Any
  splits: dict[str, sources.Source]
  step: int


def load(config: Any, workdir: Path, *, newest: bool = False) -> Trained:
  """The network of the run in ``workdir``: best on val, or the newest.

  Raises:
    ValueError: ``workdir`` holds no run, or one of another config.
    FileNotFoundError: the run has no such checkpoint yet.
  """
  lines = workdir_lib.config_differences(workdir, config)
  if lines:
    raise ValueError("this is not the config of the run in --workdir:\n" + "\n".join(f"  {line}" for line in lines))
  # Without val there is no best network: the last one is what was tested.
  folder = workdir / (checkpoints.NEWEST if newest or config.data.trainval else checkpoints.BEST)
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder} is missing: the run has not reached its first evaluation yet")
  data = build.make_data(config)
  parts = build.make_parts(config, data)
  store = checkpoints.Store(folder)
  try:
    state, _ = store.restore(build.abstract_state(config, parts))
  finally:
    store.close()
  replicated = parallel.replicate(state)
  variables = {"params": replicated.params, "batch_stats": replicated.batch_stats}
  return Trained(make_embed(parts.model, config), variables, data.splits, int(state.step))


def evaluate_workdir(config: Any, workdir: Path, *, split: str, newest: bool) -> dict[str, Any]:
  """Metrics of ``split`` for a checkpoint of the run in ``workdir``, under ``"checkpoint_step"`` its step.

  Raises:
    ValueError: as `load`; or the data have no such split.
    FileNotFoundError: as `load`.
  """
  trained = load(config, workdir, newest=newest)
  images = pick_split(trained.splits, split)
  return evaluate(trained.embed(trained.variables, images), config.eval) | {"checkpoint_step": trained.step}


def pick_split(splits: dict[str, sources.Source], name: str) -> sources.Source:
  """A split by its name; ``all`` joins train, val and test.

  Raises:
    ValueError: there is none of that name.
  """
  if name == "all":
    return sources.Joined([splits[part] for part in ("train", "val", "test") if part in splits])
  if name not in splits:
    raise ValueError(f"there is no split {name!r} here: choose one of {', '.join(splits)}, all")
  return splits[name]
