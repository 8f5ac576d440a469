"""The protocol between a training step and the loss that it minimizes, with or without state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class Inputs(NamedTuple):
  """Inputs of an objective: the embeddings of a batch and the carried state.

  Attributes:
    embeddings: ``[B, D]`` float32 of unit norm; in the binary study the logits ``[B]``.
    labels: ``[B]`` rows of the classes; in the binary study 0 or 1.
    where: ``[B]`` bool, valid images.
    step: scalar int32, number of steps done in this phase.
    opt_state: optimizer state, which includes the carried state.
  """

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  step: jax.Array
  opt_state: Any


class Outputs(NamedTuple):
  """Outputs of an objective.

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
    tracker: transform that carries the state; comes before the optimizer in ``optax.chain``.
    compute: pure function `Inputs` -> `Outputs`.
    idle_args: function `Inputs` -> arguments of ``tx.update`` that do not change a bit of the
      carried state but its scalars, for a warm-up with another loss and for rejected steps. The
      default returns none.
  """

  tracker: optax.GradientTransformation
  compute: Callable[[Inputs], Outputs]
  idle_args: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}


class Setting(NamedTuple):
  """Properties of the run that objectives depend on.

  Attributes:
    class_counts: ``[C]`` number of training images of each class (row of v).
    num_steps: number of steps of the phase, for schedules.
    max_positives: largest number of positives of a query in a batch.
    axis_name: mapped axis of the devices; None for one device.
    embedding_dim: dimension of the embeddings.
    seed: seed of the run, for losses that draw random numbers.
  """

  class_counts: np.ndarray
  num_steps: int
  max_positives: int
  axis_name: str | None
  embedding_dim: int = 512
  seed: int = 0
