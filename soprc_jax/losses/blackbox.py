"""BlackBox AP: exact average precision, with the gradient of a perturbed ranking."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax import lists
from soprc_jax._internal import blockwise, checks, collectives, masks, pair_options
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _counting, _ranking
from soprc_jax.memory import Memory, compare

# Added to the number of relevant items, as in the public code of the method. A perfect ranking then
# costs 1e-5 / number.
_EPSILON = 1e-5


class _Rankings(NamedTuple):
  """Holds Q rankings of L candidates.

  Attributes:
    scores: ``[Q, L]``.
    relevant: ``[Q, L]`` mask of the relevant candidates.
    where: ``[Q, L]`` mask of the valid candidates, including the relevant ones.
    columns: ``[Q, K]`` indices of the relevant candidates, L in unused slots. None if their number
      is not bounded.
  """

  scores: jax.Array
  relevant: jax.Array
  where: jax.Array
  columns: jax.Array | None = None


def blackbox_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  lambda_: ArrayLike = 5.0,
  margin: ArrayLike = 0.0,
  interclass_coef: ArrayLike = 0.9,
  memory: Memory | None = None,
  key: jax.Array | None = None,
  include_self: bool = True,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the BlackBox AP loss, 1 - AP of the ranks with an interpolated gradient.

  See Rolinek et al., "Optimizing rank-based metrics with blackbox differentiation", CVPR 2020.

  .. math:: L = (1 - c)\, \mathrm{mean}_q\, (1 - AP_q) + c\, (1 - AP_{all}), \quad AP
            = \frac{\sum_{k \in P} R^+(k) / R(k)}{|P| + 10^{-5}}

  R(k) is the rank of k among all candidates, R+(k) the rank among the relevant ones. AP_q ranks the
  candidates of query q. AP_all ranks all B x B pairs of the batch at once.

  Let r(x) be the ranks 1, 2, ... n in descending order of the scores, divided by n, and g the
  derivative of the loss with respect to them. The gradient with respect to the scores is (Pogancic
  et al., "Differentiation of blackbox combinatorial solvers", ICLR 2020)

  .. math:: -\frac{r(x) - r(x + \lambda g)}{\lambda + 10^{-8}}

  At equal scores relevant candidates rank last. So the loss does not depend on the order of the
  batch, and a collapsed batch is not optimal. The order still decides which of several equal
  relevant entries receives a gradient.

  With a weight on the loss, g is still the derivative of the unweighted loss, and the result is
  multiplied by the weight. So lambda has the same meaning for any weight and any number of devices.

  Args:
    embeddings, labels, where, axis_name: see `soprc_jax.losses`.
    lambda_: width > 0 of the interpolation.
    margin: m >= 0. Scores are shifted by ``-m |z| / 2`` for relevant candidates and by ``m |z| /
      2`` for the others, with z standard normal, drawn from ``key``.
    interclass_coef: c in [0, 1], the weight of AP_all.
    memory: additional candidates for AP_q, treated as constants: earlier images, from ``current``
      of `embedding_memory`. None adds none.
    key: random key, required for ``margin`` > 0; the same on all devices.
    include_self: whether a query is a candidate that is relevant to itself, as in the reference
      code.
    max_positives: static bound on the positives of a query in the batch (itself not counted). If
      this bound or the labels are known at compile time, ranks are counted instead of sorted. That
      takes a fraction of the time. With a memory its candidates are always sorted.
    pairs: see `soprc_jax.losses`. With a memory only ``ignore_above`` is possible, since its
      images have labels.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped in the mean. The second
    term is 0 if the batch has no positive or no negative pair.

  Raises:
    ValueError: an option is a plain number out of range; there are more than 46,340 images on all
      devices; ``margin`` is given without ``key``; ``memory`` comes from ``lookahead``, which would
      count the batch twice.
    AssertionError: when traced, if shapes do not fit.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{blackbox_ap_loss(embeddings, jnp.array([0, 0, 1, 1]), interclass_coef=0.0):.4f}")
  0.0833
  """
  checks.check_width("lambda_", lambda_)
  checks.check_range("margin", margin, low=0.0)
  checks.check_range("interclass_coef", interclass_coef, low=0.0, high=1.0)
  if not _is_zero(margin) and key is None:
    raise ValueError("margin needs key, since the shift of the scores is random: pass a random key")
  batch = lists.join_devices(embeddings, labels, where, axis_name)
  size, whole_size = jnp.shape(embeddings)[0], batch.labels.shape[0]
  whole = lists.similarities(
    batch.embeddings,
    None if labels is None else batch.labels,
    where=batch.where,
    pairs=pair_options.joined(pairs, (size, whole_size), axis_name),
  )

  def of_this_device(rows: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, batch.first, size)

  relevant = whole.positive | whole.itself if include_self else whole.positive
  width = _ranking.relevant_width(
    labels, where, axis_name, max_positives, pairs, include_self=include_self
  )
  columns = None
  if width is not None:
    columns, used = lists.positive_columns(whole.scores, relevant, width)
    columns = jnp.where(used, columns, whole_size)
  rankings = _Rankings(whole.scores, relevant, relevant | whole.negative, columns)
  queries, positive = jax.tree.map(of_this_device, (rankings, whole.positive))
  if memory is not None:
    more = _candidates(embeddings, labels, where, memory, pairs)
    queries = jax.tree.map(
      lambda ours, theirs: jnp.concatenate([ours, theirs.astype(ours.dtype)], axis=1),
      queries._replace(columns=None),
      more,
    )
    positive = jnp.concatenate([positive, more.relevant], axis=1)
  valid = masks.has_both(positive, queries.where & ~queries.relevant)
  rankable = jnp.any(whole.positive) & jnp.any(whole.negative)
  flat = _flattened(rankings)
  if not _is_zero(margin):
    own, of_all = _absolute_noise(key, queries.scores, batch.first, whole_size)
    queries, flat = _shift(queries, own, margin), _shift(flat, of_all, margin)
  # The derivative with respect to the ranks enters a second ranking, so the weights of the overall
  # mean must be applied inside.
  dtype = queries.scores.dtype
  coef, lambda_ = jnp.asarray(interclass_coef, dtype), jnp.asarray(lambda_, dtype)
  share = masks.ratio(1 - coef, collectives.psum(jnp.sum(valid).astype(dtype), axis_name))
  within = _weighted_loss(queries, lambda_, jnp.where(valid, share, 0))
  across = _weighted_loss(flat, lambda_, jnp.where(rankable, coef, 0)[None])
  # Every device has computed the ranking of all pairs, so each counts for an equal share of it.
  return collectives.psum(within + across / collectives.psum(1, axis_name), axis_name)


@jax.custom_vjp
def _weighted_loss(rankings: _Rankings, lambda_: jax.Array, weights: jax.Array) -> jax.Array:
  """Sums weight * (1 - AP) over the rankings."""
  return _weighted_loss_forward(rankings, lambda_, weights)[0]


def _weighted_loss_forward(
  rankings: _Rankings, lambda_: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the loss, and the factor of its gradient with respect to each score."""

  def of_one(ranking: _Rankings, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    if ranking.columns is not None:
      return _by_counting(ranking, ranking.columns, lambda_, weight)
    return _by_sorting(ranking, lambda_, weight)

  # Sorting needs several arrays of the size of the ranking.
  losses, factors = blockwise.map_rows(of_one, (rankings, weights), 8 * rankings.scores.shape[1])
  return jnp.sum(losses), factors


def _by_sorting(
  ranking: _Rankings, lambda_: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the loss of one ranking and its gradient factor, for any number of relevant ones."""
  scores, where = ranking.scores, ranking.where
  positions = _positions(ranking)
  ranks = _normalise(positions, where, scores.dtype)
  relevant = ranking.relevant
  above = jnp.cumsum(_reorder(relevant.astype(jnp.int32), positions), axis=-1) - 1
  among = _normalise(jnp.take_along_axis(above, positions, axis=-1), where, scores.dtype)
  loss, slope = jax.value_and_grad(_loss_of_ranks)(ranks, among, relevant, weight)
  moved = _positions(ranking._replace(scores=scores + lambda_ * slope))
  # The difference of integers is exactly 0 for an unchanged rank.
  step = (moved - positions).astype(scores.dtype) / _count(where, scores.dtype)
  return loss, step / (lambda_ + 1e-8)


def _by_counting(
  ranking: _Rankings, columns: jax.Array, lambda_: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the same as `_by_sorting` by counting.

  Only relevant candidates move. The rank of any other candidate changes by those that pass it.
  """
  scores, size = ranking.scores, _count(ranking.where, ranking.scores.dtype)
  others, used = ranking.where & ~ranking.relevant, columns < scores.shape[0]
  relevant = jnp.where(used, scores[jnp.minimum(columns, scores.shape[0] - 1)], -jnp.inf)
  found = _counting.places(scores, others, relevant, columns)
  ranks, among = (
    (jnp.where(used, place + 1, 0)).astype(scores.dtype) / size
    for place in (found.positions, found.among)
  )
  loss, slope = jax.value_and_grad(_loss_of_ranks)(ranks, among, used, weight)
  moved = _counting.places(scores, others, relevant + lambda_ * slope, columns)
  step = jnp.where(others, moved.above - found.above, 0)
  step = step.at[columns].set(moved.positions - found.positions, mode="drop")
  return loss, step.astype(scores.dtype) / size / (lambda_ + 1e-8)


def _weighted_loss_backward(gradient: jax.Array, scale: jax.Array) -> Any:
  return _Rankings(scale * gradient, None, None, None), None, None  # type: ignore[arg-type]


_weighted_loss.defvjp(_weighted_loss_forward, _weighted_loss_backward)


def _loss_of_ranks(
  ranks: jax.Array, among: jax.Array, relevant: jax.Array, weight: jax.Array
) -> jax.Array:
  """Computes weight * (1 - AP) from the ranks.

  The ranks ``among`` the relevant candidates are constants.
  """
  precision = jnp.where(relevant, masks.ratio(among, ranks), 0)
  number = jnp.sum(relevant, axis=-1).astype(ranks.dtype)
  average = jnp.sum(precision, axis=-1) / (number + _EPSILON)
  return weight * (1 - average)


def _flattened(pairs: _Rankings) -> _Rankings:
  """Returns all pairs as one ranking."""
  if pairs.scores.size > np.iinfo(np.int32).max:
    raise ValueError(
      "blackbox_ap_loss ranks all pairs of the batch, at most 2^31 - 1; got "
      f"{pairs.scores.shape[0]:,} images, which are {pairs.scores.size:,} pairs: use at most "
      "46,340 images"
    )
  flat = jax.tree.map(lambda matrix: matrix.reshape(1, -1), pairs)
  if pairs.columns is None:
    return flat
  count, width = pairs.scores.shape
  columns = pairs.columns + width * jnp.arange(count, dtype=pairs.columns.dtype)[:, None]
  return flat._replace(
    columns=jnp.where(pairs.columns < width, columns, count * width).reshape(1, -1)
  )


def _positions(rankings: _Rankings) -> jax.Array:
  """Returns the position of each entry in descending order, from 0.

  Relevant entries come after equal ones, masked entries after all others.
  """
  scores, relevant, where, _ = rankings
  axis = scores.ndim - 1
  index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis)
  keys = jnp.where(where, -scores, jnp.inf), relevant.astype(jnp.int32), index
  order = jax.lax.sort(keys, dimension=axis, num_keys=2)[2]
  return _reorder(index, order)


def _reorder(values: jax.Array, positions: jax.Array) -> jax.Array:
  """Moves entry j of each row to ``positions[j]``, a permutation of the row."""
  return jnp.put_along_axis(jnp.zeros_like(values), positions, values, axis=-1, inplace=False)


def _normalise(positions: jax.Array, where: jax.Array, dtype: Any) -> jax.Array:
  """Returns ranks 1 to n, divided by the number n of valid candidates; 0 for masked ones."""
  return jnp.where(where, (positions + 1).astype(dtype) / _count(where, dtype), 0)


def _count(where: jax.Array, dtype: Any) -> jax.Array:
  return jnp.maximum(jnp.sum(where, axis=-1, keepdims=True), 1).astype(dtype)


def _candidates(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  where: ArrayLike | None,
  memory: Memory,
  pairs: PairOptions,
) -> _Rankings:
  """Returns the candidates that the memory adds to the queries of this device."""
  if memory.own is not None:
    raise ValueError(
      "the memory already contains the current batch: pass current(opt_state) of the memory, not "
      "lookahead"
    )
  given = pair_options.given(pairs)
  if given.positives is not None or given.ignore is not None:
    raise ValueError(
      "positives and ignore cannot be combined with memory, whose images have labels: pass labels, "
      "or leave the memory out"
    )
  constants = memory._replace(embeddings=jax.lax.stop_gradient(memory.embeddings))
  found = compare(embeddings, labels, constants, where, {"ignore_above": given.ignore_above})
  return _Rankings(found.scores, found.positive, found.positive | found.negative)


def _absolute_noise(
  key: Any, scores: jax.Array, first: Any, whole_size: int
) -> tuple[jax.Array, jax.Array]:
  """Draws ``|z|`` for the candidates of this device's queries, and for all pairs.

  The numbers are the same for any number of devices.
  """
  own_key, all_key = jax.random.split(key)
  (count, width), dtype = scores.shape, scores.dtype
  rows = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(own_key, i), [width], dtype))(
    first + jnp.arange(count)
  )
  return jnp.abs(rows), jnp.abs(jax.random.normal(all_key, [whole_size, whole_size], dtype))


def _shift(rankings: _Rankings, noise: Any, margin: ArrayLike) -> _Rankings:
  scores = rankings.scores
  step = jnp.asarray(margin, scores.dtype) * jnp.asarray(noise, scores.dtype).reshape(scores.shape)
  return rankings._replace(
    scores=jnp.where(rankings.relevant, scores - step / 2, scores + step / 2)
  )


def _is_zero(margin: ArrayLike) -> bool:
  return isinstance(margin, (int, float, np.generic)) and margin == 0
