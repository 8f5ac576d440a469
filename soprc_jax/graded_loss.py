"""SOPRC loss of a batch for a hierarchy of labels: the weighted mean of Eq. 8 over its levels."""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from soprc_jax import batch_loss, estimators, tracking
from soprc_jax import lists as lists_lib
from soprc_jax._internal import checks, collectives, masks


def graded_retrieval_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  *,
  tracker: tracking.ScoreEma,
  opt_state: optax.OptState,
  list_ids: ArrayLike,
  gains: Sequence[float],
  num_positives: ArrayLike,
  prior: ArrayLike,
  max_positives: int | None = None,
  tau1: ArrayLike = 0.1,
  tau2: ArrayLike = 0.001,
  link: estimators.Link = "share",
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> tuple[jax.Array, lists_lib.UpdateArgs]:
  r"""Computes the SOPRC loss of a batch whose labels have levels, for example superclasses.

  It estimates one minus the H-AP of `soprc_jax.metrics.graded_metrics` with the same ``gains``.
  H-AP is a mean of the average precisions of the levels, with known weights (docs/howto/graded.md).
  So each query has a list for each level, with a row of v and a prior of its own:

  .. math:: L = \frac{\sum_{q, l} w_{ql}\, L_{ql}}{\sum_{q, l} w_{ql}}, \quad
            w_{ql} = \frac{(r_l - r_{l + 1})\, n_{ql}}{\sum_k (r_k - r_{k + 1})\, n_{qk}}

  ``L_ql`` is Eq. 8 of the list of query q at level l, r_l the gain of level l, and n_ql the number
  of positives in the data. The sums are over the lists with a positive and a negative.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalized again).
    labels: ``[B, L]`` integers, one column for each level, the finest first. Images of one label
      must have the same label at every coarser level.
    list_ids: ``[B, L]`` integers in [0, C), the rows of v. Labels of different levels need
      different rows.
    gains: L decreasing numbers > 0, the relevance of a candidate by the finest level that it shares
      with the query.
    num_positives: ``[B, L]`` number of images in the data that share the label of a level, without
      the query itself.
    prior: broadcastable to ``[B, L]``, in [0, 1]: the share of positives in a list of the whole
      data set.
    tracker, opt_state, max_positives, tau1, tau2, link, where, axis_name: see `retrieval_loss`.

  Returns:
    The scalar loss, and the keyword arguments for the ``update`` of the chain that holds the
    tracker.

  Raises:
    AssertionError: when traced, if shapes do not fit.
    TypeError, ValueError: as in `retrieval_lists`, `score_ema` and `soprc_loss`; ``gains`` are not
      L decreasing numbers > 0; the tracker has another ``axis_name``.

  >>> import soprc_jax
  >>> tracker = soprc_jax.score_ema(num_lists=5, num_points=4, beta=0.1, bounds=(-1, 1))
  >>> state = tracker.init(None)
  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
  >>> labels = np.array([[0, 0], [0, 0], [1, 0], [2, 1]])
  >>> loss, update_args = soprc_jax.graded_retrieval_loss(embeddings, labels, tracker=tracker,
  ...   opt_state=state, list_ids=labels + np.array([0, 3]), gains=(1.0, 0.5),
  ...   num_positives=np.array([[1, 2], [1, 2], [0, 2], [0, 0]]), prior=0.3, tau1=0.5)
  >>> _, state = tracker.update(None, state, **update_args)
  >>> print(f"{loss:.3f}", state.weight)
  0.571 [0.1 0.  0.  0.1 0. ]
  """
  batch_loss.check_tracker(tracker, axis_name)
  columns, own_ids = _columns(labels), _columns(list_ids)
  chex.assert_equal(len(columns), len(own_ids), custom_message="list_ids must be [B, L], as labels")
  weights = level_weights(gains, num_positives)
  levels = [
    lists_lib.retrieval_lists(
      embeddings, column, max_positives=max_positives, where=where, axis_name=axis_name
    )
    for column in columns
  ]
  rows = [batch_loss.rows_of_v(part, where) for part in own_ids]
  update_args = joined_update_args(levels, rows)
  v = jnp.split(tracker.lookahead(opt_state, **update_args), len(levels))
  (priors,) = masks.promote(prior, names=("prior",))
  priors = jnp.broadcast_to(priors, (rows[0].shape[0], len(levels)))
  risks = [
    estimators.soprc_loss(
      lists.positive_scores,
      lists.negative_scores,
      v[level],
      prior=priors[:, level],
      tau1=tau1,
      tau2=tau2,
      link=link,
      reduce_fn=None,
      axis_name=axis_name,
      **lists.masks,
    )
    for level, lists in enumerate(levels)
  ]
  valid_lists = [lists.valid for lists in levels]
  return weighted_mean(risks, valid_lists, weights, axis_name), update_args


def level_weights(gains: Sequence[float], num_positives: ArrayLike) -> jax.Array:
  """Returns the weight of the average precision of each level in H-AP.

  Args:
    gains: L decreasing numbers > 0, the finest level first.
    num_positives: ``[B, L]`` number of positives of each query at each level.

  Returns:
    ``[B, L]`` float32. They sum to 1 for each query, or are 0 for a query without a positive.

  Raises:
    AssertionError: ``num_positives`` are not ``[B, L]``.
    ValueError: the gains are not decreasing numbers > 0, or a number of positives on the host is
      negative or not finite. On a device it makes the weights of its query NaN.

  >>> print(level_weights((1.0, 0.5), np.array([[2, 6], [0, 3]])))
  [[0.25 0.75]
   [0.   1.  ]]
  """
  values = np.asarray(gains, np.float64)
  good = values.ndim == 1 and values.size > 0 and np.isfinite(values).all()
  steps = -np.diff(values, append=0.0) if good else values
  if not good or not (steps > 0).all():
    raise ValueError(f"gains must be decreasing numbers > 0, one for each level; got {gains}")
  checks.check_range("num_positives", num_positives, low=0.0)
  counts = jnp.asarray(num_positives, jnp.float32)
  chex.assert_shape(
    counts, (None, len(steps)), custom_message="num_positives must be [B, L], as many as gains"
  )
  counts = jnp.where(counts >= 0, counts, jnp.nan)
  weights = counts * steps[None].astype(np.float32)
  return masks.ratio(
    weights, jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), weights.shape)
  )


def weighted_mean(
  risks: Sequence[jax.Array],
  valid: Sequence[jax.Array],
  weights: jax.Array,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  """Averages the risks of the valid lists of all levels and devices; 0 if there are none.

  Args:
    risks: risk of the lists of each level, ``[B]``.
    valid: which lists are valid, ``[B]`` bool for each level.
    weights: ``[B, L]``, see `level_weights`.
    axis_name: name of a mapped axis whose devices hold the other lists of the batch.
  """
  kept = jnp.where(jnp.stack(valid, axis=1), weights, jnp.zeros_like(weights))
  values = jnp.stack(risks, axis=1)
  total = jnp.sum(jnp.where(kept > 0, kept.astype(values.dtype) * values, jnp.zeros_like(values)))
  weight = jnp.sum(kept).astype(values.dtype)
  return masks.ratio(*collectives.psum((total, weight), axis_name))


def joined_update_args(
  levels: Sequence[lists_lib.RetrievalLists], list_ids: Sequence[jax.Array], *, width: int = 0
) -> lists_lib.UpdateArgs:
  """Joins the lists of all levels for one `score_ema`, level after level.

  Args:
    levels: Q lists of each level.
    list_ids: ``[Q]`` rows of v of each level.
    width: lists are padded to at least this number of positives.

  Returns:
    Keyword arguments of ``update`` and ``lookahead`` with ``L * Q`` lists.
  """
  width = max(width, *(lists.positive_scores.shape[1] for lists in levels))

  def padded(values: jax.Array, filler: float | bool) -> jax.Array:
    missing = width - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=filler)

  return {
    "positive_scores": jnp.concatenate(
      [padded(lists.positive_scores, -jnp.inf) for lists in levels]
    ),
    "list_ids": jnp.concatenate(list_ids),
    "positive_where": jnp.concatenate([padded(lists.positive_where, False) for lists in levels]),
  }


def _columns(labels: ArrayLike) -> list[ArrayLike]:
  if np.ndim(labels) != 2 or not np.shape(labels)[1]:
    raise ValueError(
      f"labels and list_ids must be [B, L], one column for each level; got {np.shape(labels)}"
    )
  labels = labels if isinstance(labels, jax.Array) else np.asarray(labels)
  return [labels[:, level] for level in range(labels.shape[1])]
