"""The losses of the study of imbalanced classification, as objectives of logits.

`soprc_jax/training/loss_protocol.py` defines objectives.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from soprc_jax import estimators, lists, surrogates, tracking
from soprc_jax._internal import masks
from soprc_jax.training import baselines, objectives
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting

_BOUNDS = {"none": None, "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
SCORES = tuple(_BOUNDS)


def make(name: str, config: Any, setting: Setting) -> Objective:
  """Returns the objective ``name`` of `LABELS` with the options of ``config.loss``.

  Its inputs are logits ``[B]`` or ``[B, K]`` and labels 0 or 1 of the same shape. Of K labels each
  is a list with its own row of v and its own prior. A label without a positive in the batch is left
  out of SOPRC and the AP loss, and its row of v stays.

  Args:
    name: name of a method.
    config: ``config.loss``, resolved.
    setting: ``class_counts``, ``[2]`` or ``[K, 2]``, are the numbers of negatives and positives of
      the training data. Only the first ``max_positives`` examples of a batch may be positive. Of K
      labels each may have that many positives in a batch, at any place.
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


def ranked(name: str, logits: jax.Array) -> jax.Array:
  """Computes what the examples are ranked by from the logits: the logits, but for softmax.

  Its logits ``[n, K]`` mean something among the classes of an example only. They become the
  log-odds of the probabilities, which order examples without ties.
  """
  if name != "softmax":
    return logits
  own = jnp.eye(logits.shape[1], dtype=bool)
  others = jnp.where(own, -jnp.inf, logits[:, None, :])
  return logits - jax.nn.logsumexp(others, axis=-1)


def asymmetric_loss(
  logits: jax.Array,
  labels: jax.Array,
  *,
  gamma_positive: float = 0.0,
  gamma_negative: float = 4.0,
  margin: float = 0.05,
) -> jax.Array:
  r"""Computes the asymmetric loss, a mean over examples and labels.

  See Ridnik et al., "Asymmetric loss for multi-label classification", ICCV 2021. The paper has the
  sum over the labels. With p the sigmoid of a logit and m the margin:

  .. math:: L_+ = -(1 - p)^{\gamma_+} \log p, \quad
            L_- = -p_m^{\gamma_-} \log(1 - p_m), \quad p_m = \max(p - m, 0)

  Args:
    logits: ``[...]``.
    labels: same shape; > 0 is positive.
    gamma_positive: exponent of the positives, >= 0.
    gamma_negative: exponent of the negatives, >= 0. A negative below the margin has no gradient.
    margin: m in (0, 1), by which the probability of a negative is shifted.

  >>> logits, labels = jnp.array([0.0, 0.0]), jnp.array([1, 0])
  >>> print(f"{asymmetric_loss(logits, labels):.4f}")
  0.3588
  """
  positive = -jnp.exp(gamma_positive * jax.nn.log_sigmoid(-logits)) * jax.nn.log_sigmoid(logits)
  shifted = jax.nn.sigmoid(logits) - margin
  # A power of 0 would have a gradient that is not finite, also where it is not selected.
  inside = jnp.where(shifted > 0, shifted, 0.5)
  negative = jnp.where(shifted > 0, -(inside**gamma_negative) * jnp.log1p(-inside), 0.0)
  return jnp.mean(jnp.where(labels > 0, positive, negative))


def _soprc(config: Any, setting: Setting) -> Objective:
  """Returns the SOPRC objective (Eq. 8, 10) at the true priors, or annealed to them."""
  num_points = config.num_points or int(setting.class_counts[..., 1].max())
  rows = jnp.arange(setting.class_counts.size // 2)
  tracker = tracking.score_ema(len(rows), num_points, config.beta, bounds=_BOUNDS[config.scores])
  prior = objectives.anneal(config.prior_start, _prior(setting), setting.num_steps)

  def compute(inputs: Inputs) -> Outputs:
    found = _lists(inputs.embeddings, inputs.labels, config.scores, setting)
    update_args = found.update_args(rows)
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
  """Returns the cross entropy with weights that give the positives of each label a fixed share.

  The share 0 means that of the data.
  """
  share = config.weighted_cross_entropy.share or _prior(setting)

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    values, positive = optax.sigmoid_binary_cross_entropy(logits, labels), labels > 0
    sides = (masks.masked_mean(values, where, axis=0) for where in (positive, ~positive))
    return jnp.mean(share * next(sides) + (1 - share) * next(sides))

  return baselines.stateless(loss, setting)


def _focal(config: Any, setting: Setting) -> Objective:
  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return jnp.mean(optax.sigmoid_focal_loss(logits, labels, gamma=config.focal.gamma))

  return baselines.stateless(loss, setting)


def _asl(config: Any, setting: Setting) -> Objective:
  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return asymmetric_loss(logits, labels, **config.asl)

  return baselines.stateless(loss, setting)


def _softmax(config: Any, setting: Setting) -> Objective:
  """Returns the softmax cross entropy, for examples that have one label."""
  del config

  def loss(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy(logits, jnp.asarray(labels, logits.dtype)))

  return baselines.stateless(loss, setting)


_FACTORIES: Mapping[str, Callable[[Any, Setting], Objective]] = {
  "soprc": _soprc,
  "cross_entropy": _cross_entropy,
  "weighted_cross_entropy": _weighted_cross_entropy,
  "focal": _focal,
  "auroc": _auroc,
  "ap": _ap,
  "asl": _asl,
  "softmax": _softmax,
}
PEER = "libauc"
LABELS: Mapping[str, str] = {
  "soprc": "SOPRC",
  "cross_entropy": "Cross entropy",
  "weighted_cross_entropy": "Weighted cross entropy",
  "focal": "Focal",
  "auroc": "AUROC",
  "ap": "AP loss (batch)",
  "asl": "ASL",
  "softmax": "Softmax cross entropy",
  PEER: "LibAUC APLoss, SOAP",
}
METHODS = tuple(_FACTORIES)
# Losses of examples with one label only, and losses of a single list.
ONE_LABEL, ONE_LIST = ("softmax",), ("auroc",)


def _prior(setting: Setting) -> Any:
  """Returns the share pi of positives in the training data, a number or ``[K]``."""
  counts = setting.class_counts
  shares = counts[..., 1] / counts.sum(axis=-1)
  return np.float32(shares) if shares.ndim else float(shares)


def _lists(
  logits: jax.Array, labels: jax.Array, kind: str, setting: Setting
) -> lists.RetrievalLists:
  """Makes the batch one list, or one a label, with columns for ``max_positives`` positives."""
  found = lists.binary_lists(bound(logits, kind).T, labels.T)
  if labels.ndim == 1:  # the positives are in front
    columns: Any = jnp.arange(setting.max_positives)[None]
  else:
    columns = jax.lax.top_k(jnp.float32(labels.T > 0), setting.max_positives)[1]
  return found._replace(
    positive_scores=jnp.take_along_axis(found.positive_scores, columns, axis=1),
    positive_where=jnp.take_along_axis(found.positive_where, columns, axis=1),
  )
