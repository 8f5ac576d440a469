"""SmoothAP: average precision with a sigmoid in place of the step."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import blockwise, checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _ranking

# Distance in units of tau, beyond which exp overflows in float64 too.
_FAR = 1000.0


def smooth_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  tau: ArrayLike = 0.01,
  include_self: bool = True,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the SmoothAP loss, the mean over queries of 1 - smoothed AP.

  See Brown et al., "Smooth-AP: smoothing the path towards large-scale image retrieval", ECCV 2020.

  .. math:: R(k) = 1 + \sum_{j \ne k} \sigma\Big(\frac{s_j - s_k}{\tau}\Big), \quad L = 1
            - \mathrm{mean}_q\, \mathrm{mean}_{k \in P(q)} \frac{R^+(k)}{R(k)}

  where R is taken over all candidates, and R+ over the relevant ones.

  Args:
    embeddings, labels, where, axis_name, max_positives, pairs: see `soprc_jax.losses`.
    tau: temperature > 0.
    include_self: whether a query counts as relevant to itself, as in the reference code.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{smooth_ap_loss(embeddings, jnp.array([0, 0, 1, 1]), include_self=False):.4f}")
  0.2500
  """
  checks.check_width("tau", tau)
  found, positive_scores, positive_mask = _ranking.ranking_in_columns(
    embeddings, labels, where, axis_name, max_positives, pairs, include_self=include_self
  )
  inverse = 1.0 / jnp.asarray(tau, found.scores.dtype)

  def row_loss(
    positives: jax.Array, mask: jax.Array, scores: jax.Array, negative: jax.Array
  ) -> jax.Array:
    # Far enough below all positives a sigmoid is exactly 0, so that sums need no additional mask.
    top = jnp.max(scores, initial=0.0)
    lowest = jax.lax.stop_gradient(jnp.min(jnp.where(mask, positives, top), initial=top))
    # At least several floats below, in case tau is less than their spacing.
    lowest = lowest - jnp.maximum(_FAR / inverse, 8 * jnp.finfo(lowest.dtype).eps * jnp.abs(lowest))
    in_class = _sigmoids(jnp.where(mask, positives, lowest), positives, inverse)
    above = _sigmoids(jnp.where(negative, scores, lowest), positives, inverse)
    # Each positive counts itself with sigmoid(0) = 1/2, but its rank counts it with 1. The share is
    # 1 - R+/R without the subtraction, which float32 would lose if hardly any negative is above.
    return masks.masked_mean(
      masks.share(jnp.sum(above, axis=1), 0.5 + jnp.sum(in_class, axis=1)), mask
    )

  rows = (positive_scores, positive_mask, found.scores, found.candidates & ~found.relevant)
  losses = blockwise.map_rows(row_loss, rows, positive_scores.shape[1] * found.scores.shape[1])
  return masks.masked_mean(losses, found.valid, None, axis_name)


def _sigmoids(scores: jax.Array, positives: jax.Array, inverse: jax.Array) -> jax.Array:
  """Returns sigmoids of how far each score is above each positive in units of tau, ``[K, N]``."""
  return jax.nn.sigmoid((scores[None, :] - positives[:, None]) * inverse)
