"""SOPRC loss of a batch in one call: lists, auxiliary vector v, loss, and optimizer arguments."""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from soprc_jax import estimators, tracking
from soprc_jax import lists as lists_lib
from soprc_jax._internal import checks, class_labels, collectives, masks
from soprc_jax._internal.pair_options import PairOptions


def retrieval_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  tracker: tracking.ScoreEma,
  opt_state: optax.OptState,
  prior: ArrayLike,
  list_ids: ArrayLike | None = None,
  max_positives: int | None = None,
  tau1: ArrayLike = 0.1,
  tau2: ArrayLike = 0.001,
  lambda1: ArrayLike = 0.0,
  lambda2: ArrayLike = 0.0,
  pull: ArrayLike = 0.0,
  wide: ArrayLike = 0.0,
  link: estimators.Link = "share",
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> tuple[jax.Array, lists_lib.UpdateArgs]:
  """Computes the SOPRC loss of a batch of embeddings for retrieval (Alg. 1).

  The loss is Eq. 8 with the auxiliary vector v of this step, plus Eq. 9. Each image is a query. The
  other images of the batch are its list.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalized again).
    labels: ``[B]`` integers or booleans.
    tracker: the result of `score_ema`, created with the same ``axis_name`` and, for cosine
      similarities, ``bounds=(-1, 1)``.
    opt_state: any tree with exactly one state of a `score_ema`.
    prior: number or ``[B]``, in [0, 1]: the share of positives in a list of the whole data set.
    list_ids: ``[B]`` integers in [0, C), the row of v of each query. Defaults to its label.
      Required without labels.
    max_positives: limit on the positives of a query, see `retrieval_lists`. None keeps all.
    tau1: width of the surrogate of negatives, > 0, see `soprc_loss`.
    tau2: width of the surrogate of positives, > 0.
    lambda1: weight of the positive part of `semi_variance`, >= 0.
    lambda2: weight of the negative part of `semi_variance`, >= 0.
    pull: weight of `soprc_jax.positive_pull`, >= 0.
    wide: weight of the same risk at tau1 = 1, in [0, 1]; that at ``tau1`` has the weight 1 - wide.
    link: ``"share"`` (Eq. 8) or ``"log"``, see `soprc_loss`.
    where: ``[B]`` mask of the valid images. The rows of invalid images are not used. None means
      that all are valid.
    axis_name: name of a mapped axis whose devices hold the other images of the batch.
    **pairs: ``positives`` (in place of ``labels``), ``ignore`` and ``ignore_above``, masks of pairs
      and a limit, see `retrieval_lists`.

  Returns:
    The scalar loss, and the keyword arguments for the ``update`` of the chain that holds the
    tracker.

  Raises:
    AssertionError, TypeError, ValueError: as in `retrieval_lists`, `score_ema` and `soprc_loss`.

  >>> import optax, soprc_jax
  >>> tracker = soprc_jax.score_ema(num_lists=2, num_points=4, beta=0.1, bounds=(-1, 1))
  >>> tx = optax.chain(tracker, optax.sgd(0.1))
  >>> embeddings, labels = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), jnp.array([0, 0, 1])
  >>> opt_state = tx.init(embeddings)
  >>> def loss_fn(embeddings):
  ...   return soprc_jax.retrieval_loss(embeddings, labels, tracker=tracker, opt_state=opt_state,
  ...     prior=0.1, tau1=0.5)
  >>> (loss, update_args), grads = jax.value_and_grad(loss_fn, has_aux=True)(embeddings)
  >>> updates, opt_state = tx.update(grads, opt_state, embeddings, **update_args)
  >>> print(f"{loss:.3f}", opt_state[0].weight)
  0.471 [0.1 0. ]
  """
  _check(tracker, axis_name, lambda1=lambda1, lambda2=lambda2, pull=pull, wide=wide)
  checks.check_range("pull", pull, low=0.0)
  lists = lists_lib.retrieval_lists(
    embeddings, labels, max_positives=max_positives, where=where, axis_name=axis_name, **pairs
  )
  if list_ids is None:
    if labels is None:
      raise ValueError("positives needs list_ids, the row of v of each query: pass them")
    list_ids = labels
  rows, lambdas = rows_of_v(list_ids, where), (lambda1, lambda2)
  loss, update_args = _loss(
    lists, rows, tracker, opt_state, prior, tau1, tau2, lambdas, link, axis_name, wide
  )
  if _can_count(pull):
    loss += pull * estimators.positive_pull(
      lists.positive_scores, positive_where=lists.positive_where, axis_name=axis_name
    )
  return loss, update_args


def binary_loss(
  scores: ArrayLike,
  labels: ArrayLike,
  *,
  tracker: tracking.ScoreEma,
  opt_state: optax.OptState,
  prior: ArrayLike,
  list_ids: ArrayLike | None = None,
  tau1: ArrayLike = 0.1,
  tau2: ArrayLike = 0.001,
  lambda1: ArrayLike = 0.0,
  lambda2: ArrayLike = 0.0,
  link: estimators.Link = "share",
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> tuple[jax.Array, lists_lib.UpdateArgs]:
  """Computes the SOPRC loss of a batch of scores with binary labels (Alg. 1).

  The loss is Eq. 8 with the auxiliary vector v of this step, plus Eq. 9.

  Args:
    scores: ``[L]``, or ``[K, L]`` for K binary problems.
    labels: same shape as ``scores``; > 0 (or True) is positive.
    prior: number or ``[K]``, in [0, 1]: the share of positives in the whole data set.
    list_ids: ``[K]`` integers in [0, C), the row of v of each problem. Defaults to 0, ..., K - 1.
    tracker, opt_state, tau1, tau2, lambda1, lambda2, link: see `retrieval_loss`.
    where: mask of the valid entries, same shape as ``scores``. None means that all are valid.
    axis_name: name of a mapped axis whose devices hold other entries of the same problems, as in
      data-parallel training. Each device ranks its own entries. All devices share the rows of v.
      Pass ``list_ids`` if the devices hold different problems.

  Returns:
    The scalar loss, and the keyword arguments for the ``update`` of the chain that holds the
    tracker.

  Raises:
    AssertionError, TypeError, ValueError: as in `binary_lists`, `score_ema` and `soprc_loss`.

  >>> import soprc_jax
  >>> tracker = soprc_jax.score_ema(num_lists=1, num_points=4, beta=0.1)
  >>> state = tracker.init(params=None)
  >>> scores, labels = jnp.array([0.5, 0.1, 0.45]), jnp.array([1, 0, 0])
  >>> loss, update_args = soprc_jax.binary_loss(scores, labels, tracker=tracker, opt_state=state,
  ...   prior=0.01)
  >>> _, state = tracker.update(None, state, **update_args)
  >>> print(f"{loss:.4f}", state.v[0])
  0.9841 [0.5 0.5 0.5 0.5]
  """
  _check(tracker, axis_name, lambda1=lambda1, lambda2=lambda2)
  if jnp.ndim(scores) not in (1, 2):
    raise ValueError(f"scores must be [L], or [K, L] of K problems, got shape {jnp.shape(scores)}")
  lists = lists_lib.binary_lists(scores, labels, where=where)
  if list_ids is None:
    num_problems, num_rows = (
      lists.positive_scores.shape[0],
      tracking.find_state(opt_state).v.shape[0],
    )
    if num_problems > num_rows:
      raise ValueError(
        f"{num_problems} problems need a score_ema of num_lists={num_problems} or more, got "
        f"{num_rows}. Scores of a single problem have shape [L]"
      )
    list_ids = jnp.arange(num_problems)
  rows, lambdas = class_labels.integer_labels(list_ids, "list_ids"), (lambda1, lambda2)
  return _loss(lists, rows, tracker, opt_state, prior, tau1, tau2, lambdas, link, axis_name)


def check_tracker(tracker: Any, axis_name: collectives.AxisName) -> None:
  """Raises an error if a tracker is no `score_ema`, or has another axis than the loss."""
  if not isinstance(tracker, tracking.ScoreEma):
    raise TypeError(
      "tracker must be what score_ema returned, not the chain that contains it; got "
      f"{type(tracker).__name__}"
    )
  if tracker.axis_name != axis_name:
    raise ValueError(
      "the tracker and the loss need the same axis_name, otherwise v does not cover all devices; "
      f"got {tracker.axis_name!r} and {axis_name!r}"
    )


def rows_of_v(list_ids: ArrayLike, where: ArrayLike | None) -> jax.Array:
  """Returns the rows of v of the images of a batch, with 0 for padding.

  Raises:
    TypeError: they are not integers.
  """
  rows = class_labels.integer_labels(list_ids, "list_ids")
  if rows.dtype == bool:
    rows = rows.astype(jnp.int32)
  if where is None:
    return rows
  # The label of a padding image may not be a valid row.
  return jnp.where(masks.as_mask(where, "where"), rows, jnp.zeros_like(rows))


def _check(tracker: Any, axis_name: collectives.AxisName, **weights: Any) -> None:
  """Raises an error if the tracker does not fit, or if a weight is not a number."""
  check_tracker(tracker, axis_name)
  for name, weight in weights.items():
    if weight is None or jnp.ndim(weight):
      raise ValueError(f"{name} must be a single number, got {weight!r}")


def _loss(
  lists: lists_lib.RetrievalLists,
  list_ids: ArrayLike,
  tracker: tracking.ScoreEma,
  opt_state: optax.OptState,
  prior: ArrayLike,
  tau1: ArrayLike,
  tau2: ArrayLike,
  lambdas: tuple[ArrayLike, ArrayLike],
  link: estimators.Link,
  axis_name: collectives.AxisName,
  wide: ArrayLike = 0.0,
) -> tuple[jax.Array, lists_lib.UpdateArgs]:
  update_args = lists.update_args(list_ids)
  v = tracker.lookahead(opt_state, **update_args)
  scores = lists.positive_scores, lists.negative_scores
  risk_fn = functools.partial(
    estimators.soprc_loss,
    *scores,
    v,
    prior=prior,
    tau2=tau2,
    link=link,
    axis_name=axis_name,
    **lists.masks,
  )
  loss = estimators.with_wide(risk_fn(tau1=tau1), risk_fn, wide=wide)
  if any(map(_can_count, lambdas)):
    loss += estimators.semi_variance(
      *scores, lambda1=lambdas[0], lambda2=lambdas[1], axis_name=axis_name, **lists.masks
    )
  return loss, update_args


def _can_count(weight: Any) -> bool:
  """Returns whether a weight is not 0; a traced one can be 0 in some steps."""
  return isinstance(weight, jax.Array) or weight != 0
