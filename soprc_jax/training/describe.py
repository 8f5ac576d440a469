"""What a run tells of itself before its first step."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from soprc_jax.training import build, parallel

_log = logging.getLogger(__name__)


def start(config: Any, data: build.Data, params: Any, first: int, num_steps: int, workdir: Path) -> None:
  """Logs data, network, devices and where the run begins.

  Args:
    config: resolved.
    data: of the run.
    params: of the network, abstract or not.
    first: steps that are done.
    num_steps: of the whole run.
    workdir: of the run.
  """
  sizes = {name: f"{len(np.unique(s.labels))} classes, {len(s)} images" for name, s in data.splits.items()}
  _log.info("Data %s: %s.", config.data.source, "; ".join(f"{n}: {size}" for n, size in sizes.items()))
  if data.sampler.num_small:
    _log.info(
      "%d training classes have fewer than %d images: policy data.small_classes=%s.",
      data.sampler.num_small,
      config.train.per_class,
      config.data.small_classes,
    )
  count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
  _log.info(
    "Network %s: %.2f million parameters, %s; on %s.",
    config.model.name,
    count / 1e6,
    config.model.dtype,
    parallel.describe(),
  )
  if 0 < config.train.microbatch < config.train.batch_size:
    _log.info("Microbatches of %d images: each image is embedded twice a step.", config.train.microbatch)
  if config.model.freeze_bn and not config.model.init_from:
    _log.warning(
      "Batch norm is frozen at its initial statistics, with random weights: set model.init_from, or model.freeze_bn=False."
    )
  if first:
    _log.info("Going on from step %d of %d in %s.", first, num_steps, workdir)
  else:
    _log.info("Starting: %d steps into %s. The first step compiles.", num_steps, workdir)
