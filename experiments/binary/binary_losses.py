"""The losses of the study of imbalanced classification, as objectives of logits.

`soprc_jax/training/loss_protocol.py` defines objectives.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from soprc_jax import estimators, lists, surrogates, tracking
from soprc_jax._internal import masks
from soprc_jax.training import baselines, objectives
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting

_BOUNDS = {"none": None, "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
SCORES = tuple(_BOUNDS)


def make(name: str, config: Any, setting: Setting) -> Objective:
  """Returns the objective ``name`` of `LABELS` with the options of ``config.loss``.

  Its inputs are logits ``[B]`` and labels 0 or 1.

  Args:
    name: name of a method.
    config: ``config.loss``, resolved.
    setting: ``class_counts`` are the numbers of negatives and positives of the training data. Only
      the first ``max_positives`` examples of a batch may be positive.
  """
  return _FACTORIES[name](config, setting)


def bound(logits: jax.Array, kind: str) -> jax.Array:
  """Computes scores from logits: the logits, or bounded values of them.

  With bounds, a width tau keeps its meaning as the logits grow. The order does not change.
  Evaluation uses the logits, since bounded scores near their ends tie in float32.
  """
  if kind == "none":
    return logits
  return jax.nn.sigmoid(logits) if kind == "sigmoid" else jnp.tanh(logits)


def _soprc(config: Any, setting: Setting) -> Objective:
  """Returns the SOPRC objective (Eq. 8, 10) at the true prior, or annealed to it."""
  num_points = config.num_points or int(setting.class_counts[1])
  tracker = tracking.score_ema(1, num_points, config.beta, bounds=_BOUNDS[config.scores])
  prior = objectives.log_linear(config.prior_start, _prior(setting), setting.num_steps)

  def compute(inputs: Inputs) -> Outputs:
    found = _lists(inputs.embeddings, inputs.labels, config.scores, setting)
    update_args = found.update_args(jnp.zeros(1, jnp.int32))
    v = tracker.lookahead(inputs.opt_state, **update_args)
    loss = estimators.soprc_loss(
      found.positive_scores,
      found.negative_scores,
      v,
      prior=prior(inputs.step),
      tau1=config.tau1,
      tau2=config.tau2,
      self_weight=config.self_weight,
      tpr_gradient=config.tpr_gradient,
      link=config.link,
      **found.masks,
    )
    return Outputs(loss, update_args, {})

  return Objective(tracker, compute)


def _ap(config: Any, setting: Setting) -> Objective:
  """Returns the AP loss of the batch (Eq. 5), whose prior is the batch's."""

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    found = _lists(logits, labels, config.scores, setting)
    taus = {"tau1": config.ap.tau1, "tau2": config.tau2}
    return estimators.ap_loss(found.positive_scores, found.negative_scores, **taus, **found.masks)

  return baselines.stateless(loss, setting)


def _auroc(config: Any, setting: Setting) -> Objective:
  """Returns the AUROC surrogate, a mean over the pairs of a positive and a negative.

  It is l1 of the difference of the scores, or the logistic loss of that of the logits.
  """
  kind = "none" if config.auroc.surrogate == "logistic" else config.scores

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    found = _lists(logits, labels, kind, setting)
    positive_scores, positive_where = masks.masked(
      found.positive_scores[0], found.positive_where[0]
    )
    negative_scores, negative_where = masks.masked(
      found.negative_scores[0], found.negative_where[0]
    )
    margin = positive_scores[:, None] - negative_scores[None, :]
    if config.auroc.surrogate == "logistic":
      values = jax.nn.softplus(-margin)
    else:
      values = surrogates.one_sided_huber(margin, tau=config.auroc.tau)
    return masks.masked_mean(values, positive_where[:, None] & negative_where[None, :])

  return baselines.stateless(loss, setting)


def _cross_entropy(config: Any, setting: Setting) -> Objective:
  """Returns the cross entropy of the batch without weights."""
  del config

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

  return baselines.stateless(loss, setting)


def _weighted_cross_entropy(config: Any, setting: Setting) -> Objective:
  """Returns the cross entropy with weights that give the positives a fixed share.

  The share 0 means that of the data.
  """
  share = config.weighted_cross_entropy.share or _prior(setting)

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    values, positive = optax.sigmoid_binary_cross_entropy(logits, labels), labels > 0
    return share * masks.masked_mean(values, positive) + (1 - share) * masks.masked_mean(
      values, ~positive
    )

  return baselines.stateless(loss, setting)


def _focal(config: Any, setting: Setting) -> Objective:
  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return jnp.mean(optax.sigmoid_focal_loss(logits, labels, gamma=config.focal.gamma))

  return baselines.stateless(loss, setting)


_FACTORIES: Mapping[str, Callable[[Any, Setting], Objective]] = {
  "soprc": _soprc,
  "cross_entropy": _cross_entropy,
  "weighted_cross_entropy": _weighted_cross_entropy,
  "focal": _focal,
  "auroc": _auroc,
  "ap": _ap,
}
PEER = "libauc"
LABELS: Mapping[str, str] = {
  "soprc": "SOPRC",
  "cross_entropy": "Cross entropy",
  "weighted_cross_entropy": "Weighted cross entropy",
  "focal": "Focal",
  "auroc": "AUROC",
  "ap": "AP loss (batch)",
  PEER: "LibAUC APLoss, SOAP",
}
METHODS = tuple(_FACTORIES)


def _prior(setting: Setting) -> float:
  """Returns the share pi of positives in the training data."""
  return float(setting.class_counts[1] / setting.class_counts.sum())


def _lists(
  logits: jax.Array, labels: jax.Array, kind: str, setting: Setting
) -> lists.RetrievalLists:
  """Makes the batch one list, with positives only in the columns that may have one."""
  found = lists.binary_lists(bound(logits, kind), labels)
  columns = slice(None, setting.max_positives)
  return found._replace(
    positive_scores=found.positive_scores[:, columns],
    positive_where=found.positive_where[:, columns],
  )
