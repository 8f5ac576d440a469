"""Custom loss that compares ways to get v: carried, of the batch, or exact.

The batch has all images of its classes: ``train.per_class`` is the size of the largest class, and
``data.small_classes=mask``. Only ``loss.custom.images`` of each class are in the lists. The others
are there for the exact v alone. So all ways see the same batches, and the loss has as many
positives and negatives in each.
"""

from typing import Any

import jax
import jax.numpy as jnp

from soprc_jax import estimators, interpolation, lists
from soprc_jax.training import objectives
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting

NAME = "experiments.ablate.exact_v:objective"
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
  soprc = objectives.LOSSES["soprc"](config, setting)
  prior_fn = objectives.make_prior(config.prior, setting)

  def carried_or_batch(inputs: Inputs) -> Outputs:
    where = first_of_class(inputs.labels, inputs.where, config.custom.images)
    return soprc.compute(inputs._replace(where=where))

  def exact(inputs: Inputs) -> Outputs:
    def found(where: jax.Array) -> lists.RetrievalLists:
      return lists.retrieval_lists(
        inputs.embeddings, inputs.labels, max_positives=setting.max_positives, where=where
      )

    used = found(first_of_class(inputs.labels, inputs.where, config.custom.images))
    everyone = found(inputs.where)
    v = interpolation.interpolate_scores(
      jax.lax.stop_gradient(everyone.positive_scores),
      num_points=config.num_points,
      bounds=_BOUNDS,
      grid=config.grid,
      where=everyone.positive_where,
    )
    scores = used.positive_scores, used.negative_scores
    loss = estimators.soprc_loss(
      *scores,
      v,
      prior=prior_fn(inputs.step, inputs.labels, used),
      tau1=config.tau1,
      tau2=config.tau2,
      self_weight=config.self_weight,
      tpr_gradient=config.tpr_gradient,
      link=config.link,
      **used.masks,
    )
    loss += estimators.semi_variance(
      *scores,
      lambda1=config.lambda1,
      lambda2=config.lambda2,
      average_over=config.average_over,
      pool=config.pool,
      mean_gradient=config.mean_gradient,
      **used.masks,
    )
    if config.pull:
      loss += objectives.make_pull(config, setting)(inputs.step) * estimators.positive_pull(
        used.positive_scores, positive_where=used.positive_where
      )
    return Outputs(loss, soprc.idle_args(inputs), {})

  return soprc._replace(compute=exact if config.custom.exact else carried_or_batch)


def first_of_class(labels: jax.Array, where: jax.Array, count: int) -> jax.Array:
  """Returns which valid images are among the first ``count`` of their class, ``[B]`` bool.

  >>> labels, where = jnp.array([3, 3, 4, 3]), jnp.array([False, True, True, True])
  >>> first_of_class(labels, where, 1)
  Array([False,  True,  True, False], dtype=bool)
  """
  same = (labels[:, None] == labels[None, :]) & where[None, :]
  before = jnp.sum(jnp.tril(same, -1), axis=1)
  return where & (before < count)
