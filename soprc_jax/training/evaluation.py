"""Evaluation of a network on a split: embed all images on the devices, rank them on the host."""

from collections.abc import Callable, Sequence
import functools
import json
from pathlib import Path
from typing import Any

from flax import linen as nn
import numpy as np

from soprc_jax import metrics
from soprc_jax.data import pipeline, sources
from soprc_jax.training import build, checkpoints, parallel
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib

EmbedFn = Callable[[Any, sources.Source], np.ndarray]


def make_embed(model: nn.Module, *, batch_size: int, image_size: int) -> EmbedFn:
  """A function ``(replicated variables, source) -> [N, D]`` float32, compiled once for one batch shape."""
  count = parallel.num_devices()
  batch_size = -(-batch_size // count) * count  # evaluation pads, so any size will do
  compiled = parallel.compile_step(functools.partial(step_lib.embed_step, model=model), donate_state=False)

  def embed(variables: Any, source: sources.Source) -> np.ndarray:
    parts = []
    for batch in pipeline.eval_batches(source, batch_size=batch_size, image_size=image_size):
      where = batch.pop("where")
      embeddings = parallel.unshard(compiled(variables, parallel.shard(batch)))
      parts.append(embeddings[where])  # padding never reaches a metric
    return np.concatenate(parts)

  return embed


def evaluate(
  embed: EmbedFn, variables: Any, source: sources.Source, *, ks: Sequence[int], block_size: int
) -> dict[str, Any]:
  """`soprc_jax.metrics.retrieval_metrics` of a split against itself."""
  embeddings = embed(variables, source)
  return metrics.retrieval_metrics(embeddings, source.labels, ks=ks, block_size=block_size)


def evaluate_workdir(config: Any, workdir: Path, *, split: str, newest: bool) -> dict[str, Any]:
  """Metrics of ``split`` for a checkpoint of the run in ``workdir``, under ``"checkpoint_step"`` its step.

  Raises:
    ValueError: ``workdir`` holds no run, or one of another config.
    FileNotFoundError: the run has no such checkpoint yet.
  """
  lines = config_lib.differences(json.loads(config_lib.to_json(config)), workdir_lib.read_config(workdir))
  if lines:
    raise ValueError("this is not the config of the run in --workdir:\n" + "\n".join(f"  {line}" for line in lines))
  folder = workdir / (checkpoints.NEWEST if newest else checkpoints.BEST)
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
  embed = make_embed(parts.model, batch_size=config.eval.batch_size, image_size=config.eval.image_size)
  values = evaluate(embed, variables, data.splits[split], ks=config.eval.ks, block_size=config.eval.block_size)
  return values | {"checkpoint_step": int(state.step)}
