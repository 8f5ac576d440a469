"""Auxiliary vector v (Eq. 10), a moving average of interpolated positive scores, in optax."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from soprc_jax import interpolation
from soprc_jax._internal import checks, class_labels, collectives, masks

State = TypeVar("State")


class ScoreEmaState(NamedTuple):
  """Holds the state of `score_ema`.

  Attributes:
    v: ``[C, M]`` auxiliary vector of each row, ready to use.
    weight: ``[C]`` total weight of the scores in the average: 0 before the first visit, 1 - (1 -
      beta)^k after k visits. With an explicit initial v it is always 1.
    count: int32, number of updates so far, the argument of a schedule for beta.
  """

  v: jax.Array
  weight: jax.Array
  count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax's states do


class _Rows(NamedTuple):
  """Holds what a step stores for the lists ``[Q]`` of all devices.

  Lists of the same row have the same values.
  """

  ids: jax.Array
  v: jax.Array
  weight: jax.Array


class ScoreEma(optax.GradientTransformationExtraArgs):
  """Optax transform with the attributes ``lookahead`` and ``axis_name``, see `score_ema`."""

  lookahead: Callable[..., jax.Array]
  axis_name: collectives.AxisName


def score_ema(
  num_lists: int,
  num_points: int,
  beta: optax.ScalarOrSchedule,
  *,
  bounds: tuple[float, float] | None = None,
  grid: interpolation.Grid = "midpoints",
  initial_v: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> ScoreEma:
  r"""Carries the auxiliary vector v, a moving average of scores, in the optimizer state (Eq. 10).

  .. math:: v_{t+1} = (1 - \beta_t)\, v_t + \beta_t\, \phi(h(z^+_t))

  for every row (class, query, task) that has a valid positive in the batch. phi is
  `interpolate_scores`. beta weights the NEW value. Several lists of one row are averaged: the row
  takes the mean of their phi, over all devices, in one write. So the order of the batch does not
  matter. A list without a valid positive does not change its row.

  The transform returns the gradients unchanged, so it can stand anywhere in ``optax.chain``. v is
  part of the optimizer state, so it is saved with that state.

  ``chain(score_ema(...), MultiSteps(opt, k))`` moves v at every mini-step.
  ``MultiSteps(chain(score_ema(...), opt), k)`` moves v at the last mini-step only, with the scores
  of that mini-step. ``inject_hyperparams`` belongs around the optimizer, not around the tracker.
  Make beta a schedule instead.

  Start: with ``initial_v=None`` a row is the weighted average of the phi that it has seen, as the
  remark under Prop. 1 requires. With weight w (0 at first), ``w' = (1 - beta) w + beta`` and ``v' =
  v + (beta / w')(phi - v)``, so the first phi fills the row. An array starts with w = 1, which is
  Eq. 10 taken literally. beta counts the visits of a row: a row seen in k batches keeps ``(1 -
  beta)^k`` of its start.

  Args:
    num_lists: number of rows C >= 1 (1 for a single-query problem, number of classes in retrieval).
    num_points: number of points M >= 1 in each row.
    beta: number in (0, 1], or an optax schedule of the update count.
    bounds: range of the scores, see `interpolate_scores`; (-1, 1) for cosine similarities. None
      means unbounded.
    grid: positions of the points, see `interpolate_scores`.
    initial_v: ``None``, or an array ``[M]`` or ``[C, M]``. It is kept on the host, so it must not
      be traced.
    axis_name: name of a mapped axis whose devices hold the other lists of the batch. Every device
      then stores the same state.

  Returns:
    An ``optax.GradientTransformationExtraArgs``:

    * ``init(params) -> ScoreEmaState``;
    * ``update(updates, state, params=None, *, positive_scores, list_ids, positive_where=None,
      **extra)`` with ``positive_scores [Q, P]`` and ``list_ids [Q]`` integers of any type in [0,
      C). Without x64 jit cuts host ids to 32 bits before they can be checked, so that 2^32 is row
      0. Map labels to rows before the call;
    * ``lookahead(opt_state, positive_scores, list_ids, positive_where=None) -> [Q, M]``: the rows
      ``v_{t+1}[list_ids]`` that ``update`` will store, which Alg. 1 uses in the loss of step t.
      ``opt_state`` is any tree with exactly one state of a ``score_ema``.

  Raises:
    ValueError: a size, beta or ``initial_v`` is out of range; concrete ``list_ids`` are outside [0,
      C). Traced ids outside that range give NaN rows in ``lookahead``, never the row of another
      list.
    TypeError: ``update`` is called without the scores; ``initial_v`` is traced.
    AssertionError: shapes do not fit, or ``list_ids`` are not integers.

  >>> tracker = score_ema(num_lists=2, num_points=4, beta=0.1)
  >>> state = tracker.init(params=None)
  >>> _, state = tracker.update(None, state, positive_scores=jnp.array([[0.2, 0.6]]),
  ...   list_ids=jnp.array([1]))
  >>> print([f"{value:.2f}" for value in state.v[1]], state.weight)
  ['0.10', '0.30', '0.50', '0.70'] [0.  0.1]
  """
  if isinstance(beta, jax.Array) and not isinstance(beta, jax.core.Tracer):
    beta = np.asarray(beta)
  checks.check_count("num_lists", num_lists)
  checks.check_count("num_points", num_points)
  if not callable(beta):
    checks.check_range("beta", beta, low=0.0, high=1.0, open_low=True)
    checks.check_width("beta", beta)
  start, start_weight = _initial(initial_v, num_lists, num_points)
  # Checked here, so that a bad grid or bounds fails now and not at the first step.
  interpolation.check_settings(num_points, bounds, grid)

  def init_fn(params: optax.Params) -> ScoreEmaState:
    del params
    v = jnp.array(start)
    return ScoreEmaState(v, jnp.full([num_lists], start_weight, v.dtype), jnp.zeros([], jnp.int32))

  def advance(
    state: ScoreEmaState,
    positive_scores: ArrayLike,
    list_ids: ArrayLike,
    positive_where: ArrayLike | None,
  ) -> _Rows:
    _check_ids(list_ids, num_lists)
    checks.check_masks_passed(positive_scores=(positive_scores, positive_where))
    (positive_scores,), list_ids = (
      masks.promote(positive_scores, names=("positive_scores",)),
      jnp.asarray(list_ids),
    )
    chex.assert_rank(positive_scores, 2, custom_message="positive_scores must be [Q, P]")
    chex.assert_shape(
      list_ids,
      positive_scores.shape[:1],
      custom_message="list_ids must be [Q], one for each row of positive_scores",
    )
    chex.assert_type(list_ids, int, custom_message="list_ids must be integers")
    chex.assert_shape(
      state.v,
      (num_lists, num_points),
      custom_message="the state must be that of this score_ema: v [num_lists, num_points]",
    )
    mask = masks.mask_like(positive_where, positive_scores, "positive_where")
    # Without a gradient, lookahead and update compute the same, so jit does it only once.
    phi = interpolation.interpolate_scores(
      jax.lax.stop_gradient(positive_scores),
      num_points=num_points,
      bounds=bounds,
      grid=grid,
      where=mask,
    ).astype(state.v.dtype)
    seen = jnp.any(mask, axis=-1)
    lists = (
      _not_wrapped(list_ids, num_lists),
      jnp.where(seen[:, None], phi, jnp.zeros_like(phi)),
      seen,
    )
    if axis_name is not None:
      lists = collectives.join_equal(lists, axis_name)
    step = beta(state.count) if callable(beta) else beta
    return _mix(state, *lists, beta=jnp.asarray(step, state.v.dtype))

  def update_fn(
    updates: optax.Updates,
    state: ScoreEmaState,
    params: optax.Params | None = None,
    *,
    positive_scores: ArrayLike | None = None,
    list_ids: ArrayLike | None = None,
    positive_where: ArrayLike | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, ScoreEmaState]:
    del params, extra
    if positive_scores is None or list_ids is None:
      given = {"positive_scores": positive_scores, "list_ids": list_ids}
      raise missing_arguments("score_ema", "scores", "tracker", given)
    ids, v, weight = jax.lax.stop_gradient(
      advance(state, positive_scores, list_ids, positive_where)
    )
    return updates, ScoreEmaState(
      v=state.v.at[ids].set(v, mode="drop"),
      weight=state.weight.at[ids].set(weight, mode="drop"),
      count=optax.safe_increment(state.count),
    )

  def lookahead(
    opt_state: optax.OptState,
    positive_scores: ArrayLike,
    list_ids: ArrayLike,
    positive_where: ArrayLike | None = None,
  ) -> jax.Array:
    state = find_state(opt_state)
    rows = jax.lax.stop_gradient(advance(state, positive_scores, list_ids, positive_where).v)
    if axis_name is None:
      return rows
    size = jnp.shape(positive_scores)[0]  # of this device
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axis_name) * size, size)

  tracker = ScoreEma(init_fn, update_fn)
  tracker.lookahead, tracker.axis_name = lookahead, axis_name
  return tracker


def missing_arguments(
  maker: str, what: str, kind: str, given: Mapping[str, ArrayLike | None]
) -> TypeError:
  """Returns the error of an update without some of its arguments, which are None in ``given``."""
  missing = ", ".join(name for name, value in given.items() if value is None)
  return TypeError(
    f"{maker} needs the {what} of this batch: call tx.update(grads, opt_state, params, "
    f"{', '.join(f'{name}=...' for name in given)}) on the whole chain. Missing: {missing}. A "
    "training loop that cannot pass extra arguments to update() can call the "
    f"{kind}'s own update() next to the optimizer's."
  )


def find_state(opt_state: optax.OptState) -> ScoreEmaState:
  """Returns the only `ScoreEmaState` in a tree of optimizer states.

  Raises:
    ValueError: the tree contains none, or more than one.
  """
  return find_one(opt_state, ScoreEmaState, "score_ema")


def find_one(opt_state: optax.OptState, state_type: type[State], maker: str) -> State:
  """Returns the only state of one type in a tree of optimizer states.

  Args:
    opt_state: the tree.
    state_type: type of the state.
    maker: name of the transform that creates such states, for messages.

  Raises:
    ValueError: the tree contains none, or more than one.
  """

  def is_state(node: Any) -> bool:
    return isinstance(node, state_type)

  states = [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]
  if len(states) != 1:
    remedy = (
      "pass the sub-state of the intended transform"
      if states
      else "is the transform part of the chain?"
    )
    raise ValueError(
      f"expected exactly one {maker} state in opt_state, found {len(states)}: {remedy}"
    )
  return states[0]


def _mix(
  state: ScoreEmaState, ids: jax.Array, phi: jax.Array, seen: jax.Array, *, beta: jax.Array
) -> _Rows:
  """Mixes the mean ``phi [Q, M]`` of the seen lists of each row into it (Eq. 10).

  The first phi fills a row.
  """
  # Lists of one row share a slot. There are as many slots as lists, for any number of rows.
  slots = jnp.searchsorted(jnp.sort(ids), ids)
  counts = jax.ops.segment_sum(seen.astype(phi.dtype), slots, ids.size)[slots]
  # Divided before the sum, since the sum can overflow where the mean does not.
  mean = jax.ops.segment_sum(phi / jnp.maximum(counts, 1)[:, None], slots, ids.size)[slots]
  old_v, old_weight = (
    rows.at[ids].get(mode="fill", fill_value=jnp.nan) for rows in (state.v, state.weight)
  )
  visited = counts > 0
  weight = jnp.where(visited, (1 - beta) * old_weight + beta, old_weight)
  rate = jnp.where(
    visited, masks.ratio(jnp.broadcast_to(beta, weight.shape), weight), jnp.zeros_like(weight)
  )
  # Not v + rate (phi - v): with rate 1 that keeps a rounding error of the discarded v.
  v = (1 - rate)[:, None] * old_v + rate[:, None] * mean
  return _Rows(ids, v, weight)


def _initial(initial_v: Any, num_lists: int, num_points: int) -> tuple[np.ndarray, float]:
  """Returns the initial v and its weight.

  They stay on the host, since an array created under jit would be a tracer that outlives it.
  """
  dtype = jax.dtypes.canonicalize_dtype(np.float64)
  if initial_v is None:
    return np.broadcast_to(np.zeros([], dtype), (num_lists, num_points)), 0.0
  if isinstance(initial_v, jax.core.Tracer):
    raise TypeError(
      "initial_v must be known when the score_ema is created, got a traced array of shape "
      f"{initial_v.shape}. Create the score_ema outside of the transformed function, or replace v "
      "in the state that init() returns"
    )
  start = np.asarray(initial_v)
  if start.dtype.kind in "OSUc":
    raise TypeError(f"initial_v must be real numbers, got {start.dtype}")
  start = start.astype(dtype if start.dtype == np.float64 else np.float32)
  if start.shape not in ((num_points,), (num_lists, num_points)):
    raise ValueError(
      f"initial_v must have shape [M] = ({num_points},) or [C, M] = ({num_lists}, {num_points}), "
      f"got {start.shape}"
    )
  if not np.isfinite(start).all():
    raise ValueError("initial_v must be finite")
  return np.broadcast_to(start, (num_lists, num_points)), 1.0


def _not_wrapped(list_ids: ArrayLike, num_lists: int) -> jax.Array:
  """Casts ids to a type that can represent ``num_lists``, and moves negative ids out of range.

  Otherwise an index of -1 would select the last row.
  """
  list_ids = class_labels.label_keys(jnp.asarray(list_ids))
  return jnp.where(list_ids < 0, num_lists, list_ids)


def _check_ids(list_ids: ArrayLike, num_lists: int) -> None:
  """Raises an error if concrete ids are out of range.

  It uses numpy, since under jit even constants become traced in jnp.
  """
  if isinstance(list_ids, jax.core.Tracer):
    return
  list_ids = np.asarray(list_ids)
  if list_ids.size == 0 or not np.issubdtype(list_ids.dtype, np.integer):
    return
  low, high = int(list_ids.min()), int(list_ids.max())
  if low < 0 or high >= num_lists:
    raise ValueError(
      f"list_ids must lie in [0, num_lists={num_lists}), got values from {low} to {high}: map "
      "labels to rows first"
    )
