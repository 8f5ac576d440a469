"""Lists of positive and negative scores of each query, with masks, from embeddings or scores."""

from typing import Any, NamedTuple, TypedDict

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, class_labels, collectives, masks, pair_options

# Rows of a matrix that fits into the caches, so that reading it by columns is as fast.
_SMALL = 128


class Masks(TypedDict):
  """Masks of the valid entries, as keyword arguments of `soprc_loss` and the other estimators."""

  positive_where: jax.Array
  negative_where: jax.Array


class UpdateArgs(TypedDict):
  """Keyword arguments of the ``update`` of a chain that holds a `score_ema`."""

  positive_scores: jax.Array
  list_ids: ArrayLike
  positive_where: jax.Array


class RetrievalLists(NamedTuple):
  """Holds the scores of Q lists with their masks.

  The scores must be used with their masks: pass ``**lists.masks`` to a loss. Invalid entries are
  infinite, so that a loss without the masks is NaN. A custom loss must replace them
  (``jnp.where(mask, scores, 0)``) before it computes with them. A product does not suffice, since 0
  times an infinite score is NaN.

  Attributes:
    positive_scores: ``[Q, P]``; -inf where invalid.
    positive_where: ``[Q, P]`` mask of the valid positives.
    negative_scores: ``[Q, N]``; inf where invalid.
    negative_where: ``[Q, N]`` mask of the valid negatives.
    num_dropped: scalar int32, number of positives dropped because of ``max_positives``, over all
      lists (and devices). It saturates at 2^31 - 1.

  >>> lists = binary_lists(jnp.array([0.9, 0.1, 0.4]), jnp.array([1, 0, 0]))
  >>> print(lists.positive_scores, lists.negative_scores, lists.valid)
  [[ 0.9 -inf -inf]] [[inf 0.1 0.4]] [ True]
  """

  positive_scores: jax.Array
  positive_where: jax.Array
  negative_scores: jax.Array
  negative_where: jax.Array
  num_dropped: jax.Array

  @property
  def valid(self) -> jax.Array:
    """Returns which lists have a valid positive and a valid negative, ``[Q]`` bool.

    >>> print(binary_lists(jnp.array([[0.9, 0.1], [0.4, 0.3]]), jnp.array([[1, 0], [1, 1]])).valid)
    [ True False]
    """
    return masks.has_both(self.positive_where, self.negative_where)

  @property
  def masks(self) -> Masks:
    """Returns the masks as keyword arguments of `soprc_loss`, `ap_loss` and `semi_variance`.

    >>> import soprc_jax
    >>> lists = binary_lists(jnp.array([0.9, 0.1, 0.4]), jnp.array([0, 1, 0]))
    >>> loss = soprc_jax.ap_loss(lists.positive_scores, lists.negative_scores, **lists.masks)
    >>> print(f"{loss:.4f}")
    0.9600
    """
    return {"positive_where": self.positive_where, "negative_where": self.negative_where}

  def update_args(self, list_ids: ArrayLike) -> UpdateArgs:
    """Returns the keyword arguments of the ``update`` of a chain that holds a `score_ema`.

    Args:
      list_ids: ``[Q]`` integers, the row of the auxiliary vector v of each list.

    >>> lists = binary_lists(jnp.array([0.9, 0.1, 0.4]), jnp.array([0, 1, 0]))
    >>> print(sorted(lists.update_args(jnp.zeros(1, int))))
    ['list_ids', 'positive_scores', 'positive_where']
    """
    return {
      "positive_scores": self.positive_scores,
      "list_ids": list_ids,
      "positive_where": self.positive_where,
    }


def _make_lists(
  positive_scores: jax.Array,
  positive_where: jax.Array,
  negative_scores: jax.Array,
  negative_where: jax.Array,
  num_dropped: jax.Array,
) -> RetrievalLists:
  """Builds lists with infinite scores where invalid: -inf for positives, inf for negatives."""
  return RetrievalLists(
    jnp.where(positive_where, positive_scores, jnp.full_like(positive_scores, -jnp.inf)),
    positive_where,
    jnp.where(negative_where, negative_scores, jnp.full_like(negative_scores, jnp.inf)),
    negative_where,
    num_dropped,
  )


def retrieval_lists(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  positives: ArrayLike | None = None,
  ignore: ArrayLike | None = None,
  ignore_above: ArrayLike | None = None,
  max_positives: int | None = None,
  gallery: ArrayLike | None = None,
  gallery_labels: ArrayLike | None = None,
  where: ArrayLike | None = None,
  gallery_where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> RetrievalLists:
  """Builds one list per image from its cosine similarities to the other images.

  Either labels or a relevance mask decides which images are positives, so classes may have any
  order and any size. If ``gallery`` is None, the query itself is excluded by its index.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalized again).
    labels: ``[B]`` integers of any type, or booleans. Without x64 jit cuts host labels to 32 bits
      before they can be checked, so that 2^32 equals 0. Map wider labels to rows before the call.
      Exactly one of ``labels`` and ``positives`` is required.
    positives: ``[B, G]`` relevance mask: which candidates are positives of each query. It need not
      be symmetric. The pair of a query with itself is never used. With ``axis_name`` each device
      passes the rows of its images, with a column for each image of all devices.
    ignore: ``[B, G]`` mask of the pairs of unknown relevance. They are neither positives nor
      negatives.
    ignore_above: similarity above which a negative is ignored, as it may be an unlabeled positive.
      No gradient passes through this decision. None ignores none.
    max_positives: P, static. A query with more positives keeps evenly spaced ones by rank. The
      others are counted and excluded from the list (they are not negatives). ``None`` keeps all,
      with P the size of the gallery. Pass the largest number of positives that a batch can contain,
      since losses cost ``P`` times the gallery.
    gallery: ``[G, D]`` candidates other than the batch. Each device uses its gallery unchanged,
      without joining those of other devices. ``None`` takes the batch.
    gallery_labels: ``[G]`` integers of any type, compared by value; required with ``gallery`` and
      ``labels``.
    where: ``[B]`` mask of the valid images of the batch; ``None`` means all.
    gallery_where: ``[G]`` mask of the valid candidates, only with ``gallery``; ``None`` means all.
    axis_name: name of a mapped axis. The gallery is then the joined batch of all its devices.

  Returns:
    `RetrievalLists` with Q = B, ``P = min(max_positives, G)``, N = G, where G is the size of the
    gallery (of the joined batch).

  Raises:
    AssertionError: when traced, if shapes do not fit.
    TypeError: labels are not integers.
    ValueError: ``max_positives`` < 1; both or neither of ``labels`` and ``positives`` are given;
      only one of ``gallery`` and ``gallery_labels`` is given; a label on the host has more than 32
      bits; a mask on the host contains other numbers than 0 and 1.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> lists = retrieval_lists(embeddings, jnp.array([7, 7, 9]), max_positives=1)
  >>> print(lists.positive_scores[:2, 0], lists.negative_scores[:2, 2], lists.positive_where[:, 0])
  [0.8 0.8] [0.  0.6] [ True  True False]
  """
  if max_positives is not None:
    checks.check_count("max_positives", max_positives)
  found = similarities(
    embeddings,
    labels,
    gallery=gallery,
    gallery_labels=gallery_labels,
    where=where,
    gallery_where=gallery_where,
    axis_name=axis_name,
    pairs={"positives": positives, "ignore": ignore, "ignore_above": ignore_above},
  )
  scores, positive_mask, negative_mask = found.scores, found.positive, found.negative
  positive_scores = scores
  dropped = jnp.zeros([], jnp.int32)
  if max_positives is not None:
    num_positives = jnp.sum(positive_mask, axis=1)
    positive_scores, positive_mask = pick_positives(scores, positive_mask, max_positives)
    dropped = _num_dropped(num_positives, positive_mask.shape[1], axis_name)
  return _make_lists(positive_scores, positive_mask, scores, negative_mask, dropped)


class Similarities(NamedTuple):
  """Holds the scores of all pairs of queries and candidates, with three disjoint masks.

  Attributes:
    scores: ``[B, G]`` inner products.
    positive: ``[B, G]`` mask of the valid relevant pairs, without the query itself.
    negative: ``[B, G]`` mask of the valid pairs that are not relevant.
    itself: ``[B, G]`` mask of the pairs of a valid query with itself.
  """

  scores: jax.Array
  positive: jax.Array
  negative: jax.Array
  itself: jax.Array


class JoinedBatch(NamedTuple):
  """Holds the images of all devices, and the index of the first image of this device in them."""

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  first: Any


def join_devices(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  names: tuple[str, str, str] = ("embeddings", "labels", "where"),
  *,
  constant: bool = False,
) -> JoinedBatch:
  """Joins the images of all devices, in the order of the devices.

  If ``axis_name`` is None, these are the images of this device. Embeddings of masked images become
  0, also if they were NaN, and pass no gradient. Without labels all are 0. ``names`` are the names
  of the arguments in errors. With ``constant`` shard_map knows that the result is equal on all
  devices, as a state must be. It then passes no gradient.
  """
  (vectors,) = masks.promote(embeddings, names=names[:1])
  chex.assert_rank(vectors, 2, custom_message=f"{names[0]} must be [B, D]")
  labels = np.zeros(vectors.shape[:1], np.int32) if labels is None else labels
  rows = class_labels.integer_labels(labels, names[1])
  chex.assert_shape(
    rows,
    vectors.shape[:1],
    custom_message=f"{names[1]} must be [B], one for each row of {names[0]}",
  )
  if where is None:
    mask = masks.mask_like(None, rows)
  else:
    chex.assert_shape(
      jnp.asarray(where),
      rows.shape,
      custom_message=f"{names[2]} must be [B], one for each row of {names[0]}",
    )
    mask = masks.as_mask(where, names[2])
    vectors = jnp.where(mask[:, None], vectors, jnp.zeros_like(vectors))
  parts = vectors, rows, mask
  if axis_name is None:
    return JoinedBatch(*parts, 0)
  first = jax.lax.axis_index(axis_name) * rows.shape[0]
  if constant:
    vectors, rows, mask = collectives.join_equal(jax.lax.stop_gradient(parts), axis_name)
  else:
    vectors, rows, mask = jax.lax.all_gather(parts, axis_name, tiled=True)
  return JoinedBatch(vectors, rows, mask, first)


def similarities(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  gallery: ArrayLike | None = None,
  gallery_labels: ArrayLike | None = None,
  where: ArrayLike | None = None,
  gallery_where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  pairs: pair_options.PairOptions | None = None,
) -> Similarities:
  """Computes the inner products of a batch and its gallery, with masks of the pairs.

  Arguments are those of `retrieval_lists`. The product runs at the highest precision, since tau2 =
  0.001 is finer than TF32 and bfloat16 can resolve.
  """
  options = pair_options.given(pairs)
  pair_options.check_one_given(labels, options.positives)
  pair_options.check_gallery(labels, gallery, gallery_labels)
  if gallery is None and gallery_where is not None:
    raise ValueError("gallery_where needs gallery; pass the mask of the batch as where")
  queries = join_devices(embeddings, labels, where, axis_name=None)
  size = queries.labels.shape[0]
  alone = gallery is None and axis_name is None
  if alone:
    candidates = queries
    itself = jnp.eye(size, dtype=bool)
  elif gallery is None:
    candidates = join_devices(embeddings, labels, where, axis_name)
    itself = (candidates.first + jnp.arange(size))[:, None] == jnp.arange(
      candidates.labels.shape[0]
    )[None, :]
  else:
    names = ("gallery", "gallery_labels", "gallery_where")
    candidates = join_devices(gallery, gallery_labels, gallery_where, None, names)
    chex.assert_equal(
      queries.embeddings.shape[1],
      candidates.embeddings.shape[1],
      custom_message="embeddings and gallery must have the same width",
    )
    itself = jnp.zeros((size, candidates.labels.shape[0]), bool)
  scores = (
    _gram(queries.embeddings)
    if alone
    else _product(*masks.promote(queries.embeddings, candidates.embeddings))
  )
  if options.positives is None:
    relevant = class_labels.same_labels(queries.labels[:, None], candidates.labels[None, :])
  else:
    relevant = pair_options.pair_mask("positives", options.positives, scores.shape)
  usable = queries.where[:, None] & candidates.where[None, :]
  known = usable & ~itself
  if options.ignore is not None:
    known &= ~pair_options.pair_mask("ignore", options.ignore, scores.shape)
  negative = pair_options.not_above(~relevant & known, scores, options.ignore_above)
  return Similarities(scores, relevant & known, negative, itself & usable)


def _product(queries: jax.Array, candidates: jax.Array) -> jax.Array:
  return jnp.matmul(queries, candidates.T, precision=jax.lax.Precision.HIGHEST)


@jax.custom_jvp
def _gram(embeddings: jax.Array) -> jax.Array:
  """Computes all inner products, ``[B, B]``.

  The matrix is symmetric, so its gradient is a single product, ``(G + G^T) E``. Two separate
  factors would take two products: `retrieval_loss` with its gradient would take 1.33 (224 x 512) or
  1.21 (1024 x 512) times as long.
  """
  return _product(embeddings, embeddings)


@_gram.defjvp
def _gram_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  ((embeddings,), (change,)) = primals, tangents
  half = _product(change, embeddings)
  return _gram(embeddings), half + _transposed(half)


def _transposed(matrix: jax.Array) -> jax.Array:
  """Transposes a matrix that is added to its transpose afterwards."""

  def of_a_copy(matrix: jax.Array) -> jax.Array:
    # XLA's CPU backend would fuse the transposition into the sum, since both read the same array.
    # It would then read along the columns, which takes longer than a product of large matrices. A
    # separate array is read in blocks. The copy survives optimization only as the result of a loop
    # whose step is not known to be the identity. Without it `retrieval_loss` with its gradient
    # takes 1.34 times as long at 1024 x 512.
    one = jax.lax.optimization_barrier(jnp.ones([], matrix.dtype))
    return jax.lax.map(lambda row: one * row, matrix, batch_size=matrix.shape[0] // 2).T

  if matrix.shape[0] < _SMALL:
    return matrix.T
  return jax.lax.platform_dependent(matrix, cpu=of_a_copy, default=jnp.transpose)


def binary_lists(
  scores: ArrayLike, labels: ArrayLike, *, where: ArrayLike | None = None
) -> RetrievalLists:
  """Builds lists from scores with binary labels.

  Masks instead of a split into positives and negatives keep all shapes static.

  Args:
    scores: ``[L]`` or ``[..., L]`` scores of any mixture of positives and negatives; ``[K, L]`` for
      K labels with one list each.
    labels: same shape as ``scores``; > 0 (or True) is positive. Without x64 jit cuts host labels to
      32 bits before they can be checked, so that 2^32 is 0. Compare wider labels with 0 before the
      call.
    where: mask of the valid entries, same shape as ``scores``; ``None`` means all.

  Returns:
    `RetrievalLists` with P = N = L and Q = 1 for a single list ``[L]``, or the leading axes of
    ``scores``.

  Raises:
    AssertionError: when traced, if shapes differ.
    TypeError: labels are not numbers.
    ValueError: a host label is NaN; ``where`` has another shape, or contains other numbers than 0
      and 1.

  >>> lists = binary_lists(jnp.array([0.9, 0.1, 0.4]), jnp.array([1, 0, 0]))
  >>> print(lists.positive_where, lists.negative_where)
  [[ True False False]] [[False  True  True]]
  """
  (scores,) = masks.promote(scores)
  positive = class_labels.is_positive(labels)
  chex.assert_equal_shape([scores, positive], custom_message="labels must have the shape of scores")
  checks.check_lists(scores=scores)
  mask = masks.mask_like(where, scores)
  if scores.ndim == 1:
    scores, positive, mask = scores[None], positive[None], mask[None]
  return _make_lists(scores, positive & mask, scores, ~positive & mask, jnp.zeros([], jnp.int32))


def pick_positives(
  scores: jax.Array, positive_mask: jax.Array, max_positives: int
) -> tuple[jax.Array, jax.Array]:
  """Picks at most ``max_positives`` positives of each row, at evenly spaced ranks.

  Returns:
    ``[B, P]`` scores and their mask.
  """
  columns, mask = positive_columns(scores, positive_mask, max_positives)
  return jnp.take_along_axis(scores, columns, axis=1), mask


def positive_columns(
  scores: jax.Array, positive_mask: jax.Array, max_positives: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the columns that `pick_positives` picks, and their mask."""
  width = min(max_positives, scores.shape[1])
  count = jnp.sum(positive_mask, axis=1)
  # Ranks only select columns, so no gradient passes through the order.
  keys = jax.lax.stop_gradient(jnp.where(positive_mask, scores, -jnp.inf))

  def best(keys: jax.Array) -> jax.Array:
    return jax.lax.top_k(keys, width)[1].astype(jnp.int32)

  def evenly_spaced(keys: jax.Array) -> jax.Array:
    order = jnp.argsort(-keys, axis=1)
    ranks = _evenly_spaced_ranks(jnp.arange(width)[None, :], count[:, None], width)
    return jnp.take_along_axis(order, ranks, axis=1).astype(jnp.int32)

  # A full sort is needed only if some query has too many positives.
  columns = jax.lax.cond(jnp.any(count > width), evenly_spaced, best, keys)
  return columns, jnp.arange(width)[None, :] < count[:, None]


def _evenly_spaced_ranks(slots: jax.Array, count: jax.Array, width: int) -> jax.Array:
  """Returns the middle ranks of ``width`` equal parts of ``count``; all ranks if they fit."""
  # (2 slot + 1) count can overflow int32 from 2^30 pairs of a slot and a positive on.
  with jax.enable_x64(True):
    slots, count = slots.astype(jnp.int64), count.astype(jnp.int64)
    middle = (2 * slots + 1) * count // (2 * width)
    return jnp.where(count > width, middle, slots).astype(jnp.int32)


def _num_dropped(count: jax.Array, width: int, axis_name: collectives.AxisName) -> jax.Array:
  """Counts the positives of ``count [B]`` beyond ``width``, over all lists of all devices."""
  # The sum runs over pairs of images, hence int64.
  with jax.enable_x64(True):
    total = collectives.psum(jnp.sum(jnp.maximum(count.astype(jnp.int64) - width, 0)), axis_name)
    return jnp.minimum(total, jnp.iinfo(jnp.int32).max).astype(jnp.int32)
