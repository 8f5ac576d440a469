"""The methods that the paper compares with, as objectives: which loss, which options."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from soprc_jax import estimators, lists, losses
from soprc_jax.training.protocol import Inputs, Objective, Outputs, Setting

LossFn = Callable[..., jax.Array]


def stateless(loss_fn: LossFn, setting: Setting, **options: Any) -> Objective:
  """An objective from a pure function ``loss_fn(embeddings, labels, *, where, axis_name, **options) -> scalar``.

  This is all that a loss of your own needs; see the README.
  """

  def compute(inputs: Inputs) -> Outputs:
    loss = loss_fn(inputs.embeddings, inputs.labels, where=inputs.where, axis_name=setting.axis_name, **options)
    return Outputs(loss, {}, {})

  return Objective(optax.identity(), compute, lambda inputs: {})


def _by_options(name: str, loss_fn: LossFn, *, bounded: bool = False) -> Callable[[Any, Setting], Objective]:
  """The objective whose options are the sub-config ``config.loss.NAME``, as they are."""

  def make(config: Any, setting: Setting) -> Objective:
    options = dict(config[name])
    if bounded:
      options["max_positives"] = setting.max_positives
    return stateless(loss_fn, setting, **options)

  return make


def _average_precision(config: Any, setting: Setting) -> Objective:
  """The AP loss of the batch (Eq. 5) with SOPRC's surrogates."""

  def loss_fn(embeddings: jax.Array, labels: jax.Array, *, where: jax.Array, axis_name: str | None) -> jax.Array:
    found = lists.retrieval_lists(embeddings, labels, max_positives=setting.max_positives, where=where, axis_name=axis_name)
    return estimators.ap_loss(
      found.positive_scores,
      found.negative_scores,
      tau1=jnp.asarray(config.tau1),
      tau2=jnp.asarray(config.tau2),
      positive_where=found.positive_where,
      negative_where=found.negative_where,
      tpr_gradient=config.tpr_gradient,
      axis_name=axis_name,
    )

  return stateless(loss_fn, setting)


LOSSES: Mapping[str, Callable[[Any, Setting], Objective]] = {
  "ap": _average_precision,
  "contrastive": _by_options("contrastive", losses.contrastive_loss),
  "triplet": _by_options("triplet", losses.triplet_loss, bounded=True),
  "multi_similarity": _by_options("multi_similarity", losses.multi_similarity_loss),
  "smooth_ap": _by_options("smooth_ap", losses.smooth_ap_loss, bounded=True),
  "fast_ap": _by_options("fast_ap", losses.fast_ap_loss),
  "listwise_ap": _by_options("listwise_ap", losses.listwise_ap_loss),
  "auroc": _by_options("auroc", losses.auroc_loss, bounded=True),
}
CARRIED: tuple[str, ...] = ()
