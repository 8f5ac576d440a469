"""The superclass level of SOPRC in a training step: its lists, rows of v, priors and weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import graded_loss, lists
from soprc_jax.training.loss_protocol import Inputs, Setting

# A query has about as many positives of its superclass as the batch has images. More than these
# evenly spaced ones would cost more than they tell.
MAX_POSITIVES = 64


class Superclasses(NamedTuple):
  """Holds what the lists of superclasses depend on.

  Attributes:
    setting: that of the run, with the superclasses in place of the classes.
    rows: ``[C]`` superclass of each class, from 0.
    num_classes: C; the rows of v of the superclasses follow those of the classes.
    weights: ``[C, 2]`` weights of both levels for a query of each class, see
      `graded_loss.level_weights`.
  """

  setting: Setting
  rows: np.ndarray
  num_classes: int
  weights: np.ndarray

  def make_lists(self, inputs: Inputs) -> lists.RetrievalLists:
    """Returns the lists whose positives are the images of the query's superclass."""
    return lists.retrieval_lists(
      inputs.embeddings,
      self.labels(inputs),
      max_positives=MAX_POSITIVES,
      where=inputs.where,
      axis_name=self.setting.axis_name,
    )

  def labels(self, inputs: Inputs) -> jax.Array:
    """Returns the superclass of each image, ``[B]``."""
    return jnp.asarray(self.rows, jnp.int32)[inputs.labels]

  def list_ids(self, inputs: Inputs) -> list[jax.Array]:
    """Returns the rows of v of the lists of both levels."""
    return [inputs.labels, self.num_classes + self.labels(inputs)]

  def update_args(self, levels: list[lists.RetrievalLists], inputs: Inputs) -> lists.UpdateArgs:
    """Returns the arguments that update the rows of v of both levels, of a fixed shape."""
    return graded_loss.joined_update_args(levels, self.list_ids(inputs), width=self.width)

  @property
  def width(self) -> int:
    """The number of positives that the joined lists have room for."""
    return max(MAX_POSITIVES, self.setting.max_positives)

  def mean(
    self, risks: list[jax.Array], levels: list[lists.RetrievalLists], inputs: Inputs
  ) -> jax.Array:
    """Returns the graded loss of the risks ``[B]`` of both levels."""
    weights = jnp.asarray(self.weights)[inputs.labels]
    valid = [found.valid for found in levels]
    return graded_loss.weighted_mean(risks, valid, weights, self.setting.axis_name)


def make(config: Any, setting: Setting) -> Superclasses | None:
  """Returns the superclasses of a run, or None if its loss has no graded gains.

  Args:
    config: ``config.loss``, resolved.
    setting: properties of the run.

  Raises:
    ValueError: the superclasses of the classes are unknown.
  """
  if not config.superclass_gain:
    return None
  if setting.superclasses is None:
    raise ValueError(
      f"loss.superclass_gain={config.superclass_gain:g} needs the superclass of each class, "
      "Setting.superclasses: set data.superclass"
    )
  rows = np.unique(setting.superclasses, return_inverse=True)[1]
  counts = np.bincount(rows, setting.class_counts).astype(np.int64)
  others = np.stack([setting.class_counts, counts[rows]], axis=1) - 1
  # On the host: arrays created under jit must not outlive it.
  with jax.ensure_compile_time_eval():
    weights = np.asarray(graded_loss.level_weights((1.0, config.superclass_gain), others))
  return Superclasses(
    setting._replace(class_counts=counts), rows, len(setting.class_counts), weights
  )


def num_rows(setting: Setting, superclasses: Superclasses | None) -> int:
  """Returns the number of rows of v."""
  more = 0 if superclasses is None else len(superclasses.setting.class_counts)
  return len(setting.class_counts) + more
