"""Empirical AUPRC of lists (Eq. 2), as a JAX function."""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, class_labels, masks, sorting

# Codes of the entries of a list that is sorted by score; 0 is masked.
_NEGATIVE, _POSITIVE = 1, 2


def auprc(
  scores: ArrayLike,
  labels: ArrayLike,
  *,
  prior: ArrayLike | None = None,
  where: ArrayLike | None = None,
) -> jax.Array:
  r"""Computes the empirical AUPRC, or average precision, of each list (Eq. 2).

  AUPRC is the area under the precision-recall curve.

  .. math:: \mathrm{mean}_i \frac{\pi\, TPR(h_i)}{\pi\, TPR(h_i) + (1 - \pi)\, FPR(h_i)}

  The true and false positive rates count scores ``>= h_i``, so the order of tied scores does not
  matter. For the prior of the list itself, the value equals scikit-learn's
  ``average_precision_score``.

  Args:
    scores: ``[..., L]``, any range. A NaN in a valid entry makes the result of its list NaN.
    labels: ``[..., L]``; > 0 is positive.
    prior: positive rate pi in (0, 1] to which precision is rescaled, broadcastable to ``[...]``.
      ``None`` takes the share of positives in the list. A traced prior outside [0, 1] gives NaN.
    where: ``[..., L]`` mask of the valid entries; ``None`` means all.

  Returns:
    ``[...]`` in [0, 1], at least float32; 0 for a list without a positive.

  Raises:
    AssertionError: when traced, if shapes differ.
    ValueError: ``prior`` is a plain number outside [0, 1]; scores or labels on the host have a NaN
      in a valid entry.

  >>> print(auprc(jnp.array([0.9, 0.8, 0.7, 0.6]), jnp.array([1, 0, 1, 0])))
  0.8333334
  """
  given, given_labels = scores, labels
  (scores,) = masks.promote(scores)
  labels = class_labels.is_positive(labels)
  chex.assert_equal_shape([scores, labels], custom_message="labels must have the shape of scores")
  checks.check_lists(scores=scores)
  checks.check_range("prior", prior, low=0.0, high=1.0)
  mask = masks.mask_like(where, scores)
  _check_no_nan(given, where)
  axis = scores.ndim - 1
  codes = jnp.where(mask, jnp.where(labels, _POSITIVE, _NEGATIVE), 0)
  keys, codes = _sorted_together(jnp.where(mask, -scores, jnp.inf), codes)
  positive, negative = ((codes == kind).astype(jnp.int32) for kind in (_POSITIVE, _NEGATIVE))
  # Counts at the end of each group of equal scores, since these are >= each other.
  is_last = jnp.concatenate(
    [keys[..., 1:] != keys[..., :-1], jnp.ones_like(keys[..., :1], bool)], axis
  )

  def at_group_end(counts: jax.Array) -> jax.Array:
    upper = jnp.where(is_last, counts, jnp.iinfo(counts.dtype).max)
    return jax.lax.cummin(upper, axis=axis, reverse=True)

  true_positives = at_group_end(jnp.cumsum(positive, axis=axis)).astype(scores.dtype)
  false_positives = at_group_end(jnp.cumsum(negative, axis=axis)).astype(scores.dtype)
  if prior is not None:
    prior = checks.prior_per_list(prior, scores)
    num_positives, num_negatives = (
      jnp.sum(kind, axis=axis, keepdims=True).astype(scores.dtype) for kind in (positive, negative)
    )
    true_positives *= prior * num_negatives
    false_positives *= (1 - prior) * num_positives
    # Without negatives every precision is 1, for any prior.
    true_positives = jnp.where(jnp.any(negative > 0, axis=axis, keepdims=True), true_positives, 1.0)
  precision = masks.ratio(true_positives, true_positives + false_positives)
  unknown = jnp.isnan(scores)
  if isinstance(given_labels, jax.Array):
    unknown |= given_labels != given_labels
  return jnp.where(
    jnp.any(mask & unknown, axis=axis), jnp.nan, masks.masked_mean(precision, positive > 0, axis=-1)
  )


def _check_no_nan(scores: ArrayLike, where: ArrayLike | None) -> None:
  """Raises a ValueError if scores on the host have a NaN in a valid entry.

  Device values are not checked, to avoid waiting for the device.
  """
  if isinstance(scores, jax.Array) or isinstance(where, jax.Array):
    return
  scores = np.asarray(scores)
  if np.any((scores != scores) & (True if where is None else np.asarray(where, bool))):
    raise ValueError(
      "scores must be numbers, got nan: fix what computed it, or exclude the entry by where"
    )


def _sorted_together(keys: jax.Array, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sorts ``keys [..., L]`` in ascending order, and ``codes`` of two bits along with them.

  The returned numbers ascend, and are equal, as the sorted keys do. NaN keys may end anywhere.
  """
  axis = keys.ndim - 1
  if keys.dtype != jnp.float32:
    keys, codes = jax.lax.sort((keys, codes), dimension=axis, num_keys=1)
    return keys, codes
  # On a CPU one array of integers sorts in a third of the time of two arrays: `auprc` of [64, 4096]
  # takes 12 ms instead of 41 ms.
  with jax.enable_x64(True):
    packed = sorting.ordered_bits(_with_one_zero(keys)).astype(jnp.int64) << np.int64(
      2
    ) | codes.astype(jnp.int64)
    packed = jax.lax.sort(packed, is_stable=False)
    return (packed >> np.int64(2)).astype(jnp.int32), (packed & np.int64(3)).astype(jnp.int32)


def _with_one_zero(keys: jax.Array) -> jax.Array:
  """Replaces -0.0 by 0.0 in float32 numbers.

  It compares bits, since a float comparison treats subnormal numbers as 0 too.
  """
  bits = jax.lax.bitcast_convert_type(keys, jnp.int32)
  return jax.lax.bitcast_convert_type(
    jnp.where(bits & jnp.iinfo(jnp.int32).max == 0, 0, bits), jnp.float32
  )
