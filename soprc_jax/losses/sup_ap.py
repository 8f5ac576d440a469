"""SupAP with calibration (ROADMAP): average precision with an upper bound of the step."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import blockwise, checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _ranking


def sup_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  tau: ArrayLike = 0.01,
  rho: ArrayLike = 100.0,
  delta: ArrayLike = 0.05,
  lambda_: ArrayLike = 0.5,
  alpha: ArrayLike = 0.9,
  beta: ArrayLike = 0.6,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the ROADMAP loss, SupAP and a calibration of the scores.

  See Ramzi et al., "Robust and decomposable average precision for image retrieval", NeurIPS 2021.

  .. math:: L = (1 - \lambda) \Big( 1 - \mathrm{mean}_q\, \mathrm{mean}_{k \in P(q)}
            \frac{R^+(k)}{R^+(k) + \sum_{j \in N(q)} H^-(s_j - s_k)} \Big) + \lambda\,
            \mathrm{mean}_q \Big( \mathrm{mean}_{k \in P(q)} [\alpha - s_k]_+ + \mathrm{mean}_{j
            \in N(q)} [s_j - \beta]_+ \Big)

  R+ is the rank of a positive among the positives, counted without a gradient. For negatives

  .. math:: H^-(d) = \begin{cases} \sigma(d / \tau) & d < 0 \\ \sigma(d / \tau) + 1/2 & 0 \le d \le
            \delta \\ \rho (d - \delta) + \sigma(\delta / \tau) + 1/2 & d > \delta \end{cases}

  bounds the step from above where a negative outranks the positive. Its gradient does not vanish
  there.

  Args:
    embeddings, labels, where, axis_name, max_positives, pairs: see `soprc_jax.losses`.
    tau: temperature > 0 of the sigmoid.
    rho: slope >= 0 beyond ``delta``.
    delta: score difference >= 0 from which on the bound is linear.
    lambda_: weight in [0, 1] of the calibration. 0 leaves SupAP alone.
    alpha: similarity above which a positive has no calibration loss.
    beta: similarity below which a negative has none.

  Returns:
    Scalar >= 0. Queries without a positive or a negative are skipped; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{sup_ap_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.3265
  """
  checks.check_width("tau", tau)
  for name, value in (("rho", rho), ("delta", delta)):
    checks.check_range(name, value, low=0.0)
  checks.check_range("lambda_", lambda_, low=0.0, high=1.0)
  for name, value in (("alpha", alpha), ("beta", beta)):
    checks.check_range(name, value)
  found, positives, mask = _ranking.ranking_in_columns(
    embeddings, labels, where, axis_name, max_positives, pairs, include_self=False
  )
  dtype = found.scores.dtype
  tau, rho, delta, lambda_, alpha, beta = (
    jnp.asarray(value, dtype) for value in (tau, rho, delta, lambda_, alpha, beta)
  )
  negative = found.candidates & ~found.relevant

  def row_loss(
    positives: jax.Array, mask: jax.Array, ranks: jax.Array, scores: jax.Array, negative: jax.Array
  ) -> jax.Array:
    bound = _upper_bound(scores[None, :] - positives[:, None], tau, rho, delta)
    above = jnp.sum(jnp.where(negative[None, :], bound, jnp.zeros_like(bound)), axis=1)
    lost = masks.masked_mean(masks.share(above, ranks), mask)
    pull = masks.masked_mean(jax.nn.relu(alpha - positives), mask)
    push = masks.masked_mean(jax.nn.relu(scores - beta), negative)
    return (1 - lambda_) * lost + lambda_ * (pull + push)

  rows = (positives, mask, _ranking.ranks_among(positives, mask), found.scores, negative)
  # The three parts of the bound need about twice the memory of one sigmoid.
  losses = blockwise.map_rows(row_loss, rows, 2 * positives.shape[1] * found.scores.shape[1])
  return masks.masked_mean(losses, found.valid, None, axis_name)


def _upper_bound(
  difference: jax.Array, tau: jax.Array, rho: jax.Array, delta: jax.Array
) -> jax.Array:
  """Returns H- of score differences, negative minus positive."""
  half = jnp.where(difference >= 0, 0.5, 0.0).astype(difference.dtype)
  beyond = jax.nn.relu(difference - delta)
  return jax.nn.sigmoid(jnp.minimum(difference, delta) / tau) + half + rho * beyond
