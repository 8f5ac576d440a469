"""Objectives of the baseline methods: the loss function, its options and its parameters."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from soprc_jax import estimators, lists, losses, memory
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.training.loss_protocol import Inputs, Objective, Outputs, Setting, relevance

LossFn = Callable[..., jax.Array]


def stateless(loss_fn: LossFn, setting: Setting, **options: Any) -> Objective:
  """Returns an objective without carried state from a pure loss function.

  A custom loss needs nothing else; see docs/training_runs.md.

  Args:
    loss_fn: ``loss_fn(embeddings, labels, *, where, axis_name, **options) -> scalar``. Where an
      image has several labels, ``labels`` is None, and the relevance mask ``positives`` is another
      keyword argument, see `soprc_jax.retrieval_lists`.
    setting: properties of the run; its ``axis_name`` is passed to ``loss_fn``.
    options: further keyword arguments of ``loss_fn``.
  """

  def compute(inputs: Inputs) -> Outputs:
    return Outputs(_loss(loss_fn, inputs, setting, **options), {}, {})

  return Objective(optax.identity(), compute)


def _loss(loss_fn: LossFn, inputs: Inputs, setting: Setting, **options: Any) -> jax.Array:
  """Computes the loss of a batch; ``options`` may replace its relevance mask."""
  labels, pairs = relevance(inputs)
  return loss_fn(
    inputs.embeddings,
    labels,
    where=inputs.where,
    axis_name=setting.axis_name,
    **(pairs | options),
  )


def _by_options(
  name: str, loss_fn: LossFn, *, bounded: bool = False
) -> Callable[[Any, Setting], Objective]:
  """Returns a factory of the objective with the options ``config.loss.NAME``, unchanged."""

  def make(config: Any, setting: Setting) -> Objective:
    options = dict(config[name])
    if bounded:
      options["max_positives"] = setting.max_positives
    return stateless(loss_fn, setting, **options)

  return make


def _by_proxies(name: str, loss_fn: LossFn) -> Callable[[Any, Setting], Objective]:
  """Returns a factory of the objective with one learned proxy for each class."""

  def make(config: Any, setting: Setting) -> Objective:
    shape = len(setting.class_counts), setting.embedding_dim

    def init_params(key: jax.Array) -> Any:
      # Entries of about 1 / sqrt(D), for norms of about 1.
      return {"proxies": jax.random.normal(key, shape) / shape[1] ** 0.5}

    def compute(inputs: Inputs) -> Outputs:
      loss = _loss(loss_fn, inputs, setting, proxies=inputs.params["proxies"], **config[name])
      return Outputs(loss, {}, {})

    return Objective(optax.identity(), compute, init_params=init_params)

  return make


def _sigmoid(config: Any, setting: Setting) -> Objective:
  """Returns the sigmoid loss with a learned scale, as its logarithm, and a learned bias."""
  options = config.sigmoid

  def init_params(key: jax.Array) -> Any:
    return {"log_scale": jnp.log(jnp.float32(options.scale)), "bias": jnp.float32(options.bias)}

  def compute(inputs: Inputs) -> Outputs:
    learned = {"scale": jnp.exp(inputs.params["log_scale"]), "bias": inputs.params["bias"]}
    return Outputs(_loss(losses.sigmoid_loss, inputs, setting, **learned), {}, learned)

  return Objective(optax.identity(), compute, init_params=init_params)


def _average_precision(config: Any, setting: Setting) -> Objective:
  """Returns the AP loss of the batch (Eq. 5) with SOPRC's surrogates."""

  def loss_fn(
    embeddings: jax.Array,
    labels: jax.Array | None,
    *,
    where: jax.Array,
    axis_name: str | None,
    **pairs: Unpack[PairOptions],
  ) -> jax.Array:
    found = lists.retrieval_lists(
      embeddings,
      labels,
      max_positives=setting.max_positives,
      where=where,
      axis_name=axis_name,
      **pairs,
    )
    return estimators.ap_loss(
      found.positive_scores,
      found.negative_scores,
      tau1=jnp.asarray(config.tau1),
      tau2=jnp.asarray(config.tau2),
      tpr_gradient=config.tpr_gradient,
      axis_name=axis_name,
      **found.masks,
    )

  return stateless(loss_fn, setting)


def _xbm(config: Any, setting: Setting) -> Objective:
  """Returns the contrastive loss against earlier embeddings, whose memory is carried like v."""
  options = config.xbm
  tracker = memory.embedding_memory(
    options.memory_size,
    setting.embedding_dim,
    axis_name=setting.axis_name,
    start_after=options.start_after,
    overflow=options.overflow,
  )

  def compute(inputs: Inputs) -> Outputs:
    seen = tracker.lookahead(inputs.opt_state, inputs.embeddings, inputs.labels, inputs.where)
    pairs: PairOptions = {}
    if setting.patterns is not None:  # the memory has the rows of its images
      pairs = {"positives": setting.patterns.relevant(inputs.labels, seen.labels)}
    loss = _loss(
      losses.xbm_contrastive_loss,
      inputs,
      setting,
      memory=seen,
      negative_margin=options.negative_margin,
      include_self=options.include_self,
      **pairs,
    )
    filled = jnp.mean(seen.where.astype(jnp.float32))
    return Outputs(loss, _memory_args(inputs, inputs.where), {"memory_filled": filled})

  return Objective(tracker, compute, _idle_memory_args)


def _blackbox(config: Any, setting: Setting) -> Objective:
  """Returns the BlackBox AP loss, with the embeddings of earlier batches in the gallery."""
  options = config.blackbox
  tracker = memory.embedding_memory(
    options.memory_size, setting.embedding_dim, axis_name=setting.axis_name
  )

  def compute(inputs: Inputs) -> Outputs:
    loss = _loss(
      losses.blackbox_ap_loss,
      inputs,
      setting,
      lambda_=options.lambda_,
      margin=options.margin,
      interclass_coef=options.interclass_coef,
      memory=tracker.current(inputs.opt_state),
      key=_step_key(inputs, setting),
      include_self=options.include_self,
      max_positives=setting.max_positives,
    )
    return Outputs(loss, _memory_args(inputs, inputs.where), {})

  return Objective(tracker, compute, _idle_memory_args)


def _recall_at_k(config: Any, setting: Setting) -> Objective:
  """Returns the recall@k surrogate loss, with a random key of each step for its mixup."""

  def compute(inputs: Inputs) -> Outputs:
    loss = _loss(
      losses.recall_at_k_loss,
      inputs,
      setting,
      **config.recall_at_k,
      key=_step_key(inputs, setting),
      max_positives=setting.max_positives,
    )
    return Outputs(loss, {}, {})

  return Objective(optax.identity(), compute)


def _step_key(inputs: Inputs, setting: Setting) -> jax.Array:
  return jax.random.fold_in(jax.random.key(setting.seed), inputs.step)


def _memory_args(inputs: Inputs, where: jax.Array) -> dict[str, Any]:
  return {"embeddings": inputs.embeddings, "labels": inputs.labels, "where": where}


def _idle_memory_args(inputs: Inputs) -> dict[str, Any]:
  return _memory_args(inputs, jnp.zeros_like(inputs.where))


LOSSES: Mapping[str, Callable[[Any, Setting], Objective]] = {
  "ap": _average_precision,
  "contrastive": _by_options("contrastive", losses.contrastive_loss),
  "triplet": _by_options("triplet", losses.triplet_loss, bounded=True),
  "multi_similarity": _by_options("multi_similarity", losses.multi_similarity_loss),
  "smooth_ap": _by_options("smooth_ap", losses.smooth_ap_loss, bounded=True),
  "fast_ap": _by_options("fast_ap", losses.fast_ap_loss),
  "listwise_ap": _by_options("listwise_ap", losses.listwise_ap_loss),
  "auroc": _by_options("auroc", losses.auroc_loss, bounded=True),
  "sup_con": _by_options("sup_con", losses.sup_con_loss),
  "quad_linear_ap": _by_options("quad_linear_ap", losses.quad_linear_ap_loss, bounded=True),
  "sup_ap": _by_options("sup_ap", losses.sup_ap_loss, bounded=True),
  "recall_at_k": _recall_at_k,
  "sigmoid": _sigmoid,
  "proxy_anchor": _by_proxies("proxy_anchor", losses.proxy_anchor_loss),
  "norm_softmax": _by_proxies("norm_softmax", losses.norm_softmax_loss),
  "arc_face": _by_proxies("arc_face", losses.arc_face_loss),
  "xbm": _xbm,
  "blackbox": _blackbox,
}
CARRIED = ("xbm", "blackbox")
# Losses that need one class an image, and why.
ONE_CLASS: Mapping[str, str] = {
  "proxy_anchor": "it has a proxy for each class",
  "norm_softmax": "it has a proxy for each class",
  "arc_face": "it has a proxy for each class",
  "blackbox": "the images of its memory have classes",
}
