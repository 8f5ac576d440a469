"""QuadLinear-AP: average precision with a quadratic-linear surrogate for the negatives."""

from typing import Unpack

import jax
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives, masks, pair_sums
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _ranking


def quad_linear_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  width: ArrayLike = 0.1,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the QuadLinear-AP loss, 1 - AP with a surrogate of the rank among the negatives.

  See Liu et al., "Not all pairs are equal: hierarchical learning for average-precision-oriented
  video retrieval", ACM MM 2024.

  .. math:: L = 1 - \mathrm{mean}_q\, \mathrm{mean}_{i \in P(q)} \frac{R^+(i)}{R^+(i) + \sum_{j \in
            N(q)} R(s_j - s_i)}, \quad R(d) = \begin{cases} 2 d / w + 1 & d > 0 \\ (d / w + 1)^2 &
            -w \le d \le 0 \\ 0 & d < -w \end{cases}

  R+ is the rank of a positive among the positives, counted without a gradient. R is the surrogate
  l1 of Eq. 7 with tau1 = w.

  Args:
    embeddings, labels, where, axis_name, max_positives, pairs: see `soprc_jax.losses`.
    width: w > 0. A negative of a similarity less than that of a positive by w costs nothing.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped; 0 if all are.

  >>> import jax.numpy as jnp
  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{quad_linear_ap_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.4038
  """
  checks.check_width("width", width)
  found, positives, mask = _ranking.ranking_in_columns(
    embeddings, labels, where, axis_name, max_positives, pairs, include_self=False
  )
  negative = found.candidates & ~found.relevant
  above = pair_sums.pair_sums(pair_sums.L1, positives, found.scores, negative, tau=width)
  lost = masks.share(above, _ranking.ranks_among(positives, mask))
  return masks.masked_mean(masks.masked_mean(lost, mask, -1), found.valid, None, axis_name)
