"""The protocol between a training step and the loss that it minimizes, with or without state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.training.patterns import Patterns

# Name of the parameters of the loss among those that the optimizer changes.
LOSS_PARAMS = "loss"


class Inputs(NamedTuple):
  """Inputs of an objective: the embeddings of a batch and the carried state.

  Attributes:
    embeddings: ``[B, D]`` float32 of unit norm; in the binary study the logits ``[B]``.
    labels: ``[B]`` rows of the classes, or of the patterns where an image has several labels; in
      the binary study 0 or 1.
    where: ``[B]`` bool, valid images.
    step: scalar int32, number of steps done in this phase.
    opt_state: optimizer state, which includes the carried state.
    params: parameters of the loss, a tree as `Objective.init_params` returns it.
    positives: ``[B, G]`` relevance mask, where an image has several labels: a row for each image of
      this device, a column for each image of all devices. `relevance` returns it in the form that
      the losses on pairs take. None: images of one label are relevant to each other.
  """

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  step: jax.Array
  opt_state: Any
  params: Any = ()
  positives: jax.Array | None = None


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
  """A loss with its carried state and its parameters.

  Attributes:
    tracker: transform that carries the state; comes before the optimizer in ``optax.chain``.
    compute: pure function `Inputs` -> `Outputs`.
    idle_args: function `Inputs` -> arguments of ``tx.update`` that do not change a bit of the
      carried state but its scalars, for a warm-up with another loss and for rejected steps. The
      default returns none.
    init_params: function of a random key that returns the parameters of the loss, a tree of
      arrays. They are trained with those of the model, by the same optimizer. The default returns
      none.
  """

  tracker: optax.GradientTransformation
  compute: Callable[[Inputs], Outputs]
  idle_args: Callable[[Inputs], dict[str, Any]] = lambda inputs: {}
  init_params: Callable[[jax.Array], Any] = lambda key: ()


def with_loss_params(params: Any, loss_params: Any) -> Any:
  """Returns the parameters that the optimizer changes: those of the model and of the loss.

  Without parameters of the loss these are ``params`` itself.
  """
  return {**params, LOSS_PARAMS: loss_params} if jax.tree.leaves(loss_params) else params


def split_params(trained: Any, loss_params: Any) -> tuple[Any, Any]:
  """Splits what `with_loss_params` has joined.

  Args:
    trained: parameters of the model and of the loss.
    loss_params: parameters of the loss before the step; returned if there are none.
  """
  if not jax.tree.leaves(loss_params):
    return trained, loss_params
  return {key: value for key, value in trained.items() if key != LOSS_PARAMS}, trained[LOSS_PARAMS]


class Setting(NamedTuple):
  """Properties of the run that objectives depend on.

  Attributes:
    class_counts: ``[C]`` number of training images of each class (row of v).
    num_steps: number of steps of the phase, for schedules.
    max_positives: largest number of positives of a query in a batch.
    axis_name: mapped axis of the devices; None for one device.
    embedding_dim: dimension of the embeddings.
    seed: seed of the run, for losses that draw random numbers.
    superclasses: ``[C]`` integers, the superclass of each class; None if they are unknown.
    patterns: labels of each row, where an image has several; None: an image has one class.
  """

  class_counts: np.ndarray
  num_steps: int
  max_positives: int
  axis_name: str | None
  embedding_dim: int = 512
  seed: int = 0
  superclasses: np.ndarray | None = None
  patterns: Patterns | None = None


def relevance(inputs: Inputs) -> tuple[jax.Array | None, PairOptions]:
  """Returns what decides which images are positives: labels, or the mask as an option of pairs.

  A loss that compares pairs takes both: ``labels, pairs = relevance(inputs)``, then
  ``loss_fn(embeddings, labels, **pairs)``.
  """
  if inputs.positives is None:
    return inputs.labels, {}
  return None, {"positives": inputs.positives}
