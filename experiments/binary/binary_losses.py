"""The losses that the study of imbalanced classification compares, from the logits of a batch to a number."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from soprc_jax import estimators, lists, surrogates, tracking
from soprc_jax._internal import masks
from soprc_jax.training import objectives

_BOUNDS = {"none": None, "sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
SCORES = tuple(_BOUNDS)


class Inputs(NamedTuple):
  """What a loss sees of a batch.

  Attributes:
    logits: ``[B]``.
    labels: ``[B]`` 0 or 1.
    step: scalar int32, steps done.
    opt_state: optimizer state, which holds what the loss carries.
  """

  logits: jax.Array
  labels: jax.Array
  step: jax.Array
  opt_state: Any


class Setting(NamedTuple):
  """What a loss needs to know of the run.

  Attributes:
    prior: share pi of positives in the training data.
    train_positives: their number N+.
    num_positives: only the first so many of a batch may be positive.
    num_steps: of the run, for schedules.
  """

  prior: float
  train_positives: int
  num_positives: int
  num_steps: int


class Loss(NamedTuple):
  """A loss with its carried state.

  Attributes:
    tracker: transform that carries the state; stands before the optimizer in ``optax.chain``.
    compute: `Inputs` -> (loss, keyword arguments of ``tx.update``); pure.
  """

  tracker: optax.GradientTransformation
  compute: Callable[[Inputs], tuple[jax.Array, Mapping[str, Any]]]


def make(name: str, config: Any, setting: Setting) -> Loss:
  """The loss ``name`` of `LABELS` with the options of ``config.loss``."""
  return _FACTORIES[name](config, setting)


def bound(logits: jax.Array, kind: str) -> jax.Array:
  """Scores of logits: themselves, or bounded, so that a width tau keeps its meaning as the network grows.

  The order stays; evaluation takes the logits, since bounded scores near their ends tie in float32.
  """
  if kind == "none":
    return logits
  return jax.nn.sigmoid(logits) if kind == "sigmoid" else jnp.tanh(logits)


def num_points(config: Any, setting: Setting) -> int:
  """M: ``loss.num_points``, or N+ for 0, the paper's own v."""
  return config.num_points or setting.train_positives


def _soprc(config: Any, setting: Setting) -> Loss:
  """SOPRC (Eq. 8, 10) at the true prior, to which it may go from a larger one."""
  tracker = tracking.score_ema(1, num_points(config, setting), config.beta, bounds=_BOUNDS[config.scores])
  prior = objectives.log_linear(config.prior_start, setting.prior, setting.num_steps)
  self_weight = None if config.self_weight == -1 else config.self_weight

  def compute(inputs: Inputs) -> tuple[jax.Array, Mapping[str, Any]]:
    found = _lists(inputs, config, setting)
    update_args = found.update_args(jnp.zeros(1, jnp.int32))
    v = tracker.lookahead(inputs.opt_state, **update_args)
    loss = estimators.soprc_loss(
      found.positive_scores,
      found.negative_scores,
      v,
      prior=prior(inputs.step),
      tau1=config.tau1,
      tau2=config.tau2,
      self_weight=self_weight,
      tpr_gradient=config.tpr_gradient,
      **found.masks,
    )
    return loss, update_args

  return Loss(tracker, compute)


def _ap(config: Any, setting: Setting) -> Loss:
  """The AP loss of the batch (Eq. 5), whose prior is the batch's."""

  def loss(inputs: Inputs) -> jax.Array:
    found = _lists(inputs, config, setting)
    taus = {"tau1": config.ap.tau1, "tau2": config.tau2}
    return estimators.ap_loss(found.positive_scores, found.negative_scores, **taus, **found.masks)

  return _stateless(loss)


def _auroc(config: Any, setting: Setting) -> Loss:
  """Mean over the pairs of a positive and a negative, of l1 of the scores' difference or of the logistic loss of the logits'."""
  kind = "none" if config.auroc.surrogate == "logistic" else config.scores

  def loss(inputs: Inputs) -> jax.Array:
    found = _lists(inputs, config, setting, kind)
    positive_scores, positive_where = masks.masked(found.positive_scores[0], found.positive_where[0])
    negative_scores, negative_where = masks.masked(found.negative_scores[0], found.negative_where[0])
    margin = positive_scores[:, None] - negative_scores[None, :]
    if config.auroc.surrogate == "logistic":
      values = jax.nn.softplus(-margin)
    else:
      values = surrogates.one_sided_huber(margin, tau=config.auroc.tau)
    return masks.masked_mean(values, positive_where[:, None] & negative_where[None, :])

  return _stateless(loss)


def _cross_entropy(config: Any, setting: Setting) -> Loss:
  """Of the batch as it comes."""
  del config, setting
  return _stateless(lambda inputs: jnp.mean(optax.sigmoid_binary_cross_entropy(inputs.logits, inputs.labels)))


def _weighted_cross_entropy(config: Any, setting: Setting) -> Loss:
  """With weights that make a share of positives of any batch, or the data's for 0."""
  share = config.weighted_cross_entropy.share or setting.prior

  def loss(inputs: Inputs) -> jax.Array:
    values = optax.sigmoid_binary_cross_entropy(inputs.logits, inputs.labels)
    positive = inputs.labels > 0
    return share * masks.masked_mean(values, positive) + (1 - share) * masks.masked_mean(values, ~positive)

  return _stateless(loss)


def _focal(config: Any, setting: Setting) -> Loss:
  del setting
  gamma = config.focal.gamma
  return _stateless(lambda inputs: jnp.mean(optax.sigmoid_focal_loss(inputs.logits, inputs.labels, gamma=gamma)))


_FACTORIES: Mapping[str, Callable[[Any, Setting], Loss]] = {
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


def _stateless(loss: Callable[[Inputs], jax.Array]) -> Loss:
  return Loss(optax.identity(), lambda inputs: (loss(inputs), {}))


def _lists(inputs: Inputs, config: Any, setting: Setting, kind: str | None = None) -> lists.RetrievalLists:
  """Makes the batch one list; positives only in the columns that may hold one."""
  found = lists.binary_lists(bound(inputs.logits, kind or config.scores), inputs.labels)
  columns = slice(None, setting.num_positives)
  return found._replace(positive_scores=found.positive_scores[:, columns], positive_where=found.positive_where[:, columns])
