"""Custom loss that compares ways to get v: carried, of the batch, or exact.

The batch has all images of its classes: ``train.per_class`` is the size of the largest class, and
``data.small_classes=mask``. Only ``loss.custom.images`` of each class are in the lists. The others
are there for the exact v alone. So all ways see the same batches, and the loss has as many
positives and negatives in each.
"""

from typing import Any

import jax
import jax.numpy as jnp

from soprc_jax import interpolation, lists
from soprc_jax.training import objectives
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting

_BOUNDS = (-1.0, 1.0)


def objective(config: Any, setting: Setting) -> Objective:
  """Returns SOPRC on ``config.custom.images`` images of each class.

  With ``config.custom.exact`` v holds the query's scores to all other images of its class in the
  batch. Otherwise it is that of ``config.v``.

  Args:
    config: ``config.loss``, resolved.
    setting: properties of the run. One device only.

  Raises:
    ValueError: there are several devices.
  """
  if setting.axis_name is not None:
    raise ValueError("this study is for one device: the images of a class must lie on one")
  soprc = objectives.soprc(config, setting)

  def compute(inputs: Inputs) -> Outputs:
    where = first_of_class(inputs.labels, inputs.where, config.custom.images)
    objective = soprc
    if config.custom.exact:
      objective = objectives.soprc(config, setting, v=_exact_v(config, setting, inputs))
    return objective.compute(inputs._replace(where=where))

  return soprc._replace(compute=compute)


def _exact_v(config: Any, setting: Setting, inputs: Inputs) -> jax.Array:
  """Returns phi of the scores of each image to all others of its class, ``[B, M]``."""
  found = lists.retrieval_lists(
    inputs.embeddings, inputs.labels, max_positives=setting.max_positives, where=inputs.where
  )
  return interpolation.interpolate_scores(
    jax.lax.stop_gradient(found.positive_scores),
    num_points=config.num_points,
    bounds=_BOUNDS,
    grid=config.grid,
    where=found.positive_where,
  )


def first_of_class(labels: jax.Array, where: jax.Array, count: int) -> jax.Array:
  """Returns which valid images are among the first ``count`` of their class, ``[B]`` bool.

  >>> labels, where = jnp.array([3, 3, 4, 3]), jnp.array([False, True, True, True])
  >>> first_of_class(labels, where, 1)
  Array([False,  True,  True, False], dtype=bool)
  """
  same = (labels[:, None] == labels[None, :]) & where[None, :]
  before = jnp.sum(jnp.tril(same, -1), axis=1)
  return where & (before < count)
