"""The protocol between a training step and what it minimises: one for all losses, stateless or
carried.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class Inputs(NamedTuple):
  """What an objective sees of a batch.

  Attributes:
    embeddings: ``[B, D]`` unit norm, float32; of the binary study the logits ``[B]``.
    labels: ``[B]`` rows of the classes; of the binary study 0 or 1.
    where: ``[B]`` valid images.
    step: scalar int32, steps done in this phase.
    opt_state: optimizer state, which holds the carried state.
  """

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  step: jax.Array
  opt_state: Any


class Outputs(NamedTuple):
  """What an objective gives back.

  Attributes:
    loss: scalar, equal on all devices.
    update_args: keyword arguments that ``tx.update`` passes to the carried state.
    metrics: scalars to log, equal on all devices.
  """

  loss: jax.Array
  update_args: Mapping[str, Any]
  metrics: dict[str, jax.Array]


class Objective(NamedTuple):
  """A loss with its carried state.

  Attributes:
    tracker: transform that carries the state; stands before the optimizer in ``optax.chain``.
    compute: `Inputs` -> `Outputs`; pure.
    idle_args: `Inputs` -> arguments of ``tx.update`` that leave the carried state alone, for a
      warm-up with another loss; by default there are none.
  """

  tracker: optax.GradientTransformation
  compute: Callable[[Inputs], Outputs]
  idle_args: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}


class Setting(NamedTuple):
  """What objectives need to know of the run.

  Attributes:
    class_counts: ``[C]`` training images of each class (row).
    num_steps: steps of the phase, for schedules.
    max_positives: largest number of positives of a query in a batch.
    axis_name: mapped axis of the devices.
    embedding_dim: width of the embedding.
    seed: seed of the run, for losses that draw random numbers.
  """

  class_counts: np.ndarray
  num_steps: int
  max_positives: int
  axis_name: str | None
  embedding_dim: int = 512
  seed: int = 0
