"""AUROC loss: pairwise surrogates of the area under the ROC curve."""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import blockwise, checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax._internal.pair_sums import L1, PairFunction, pair_sums
from soprc_jax.losses import _ranking

SURROGATES = {
  "huber": L1,
  "logistic": PairFunction(
    lambda margins, tau: jax.nn.softplus(-margins) / jnp.log(2.0).astype(margins.dtype)
  ),
  "sigmoid": PairFunction(lambda margins, tau: jax.nn.sigmoid(-margins / tau)),
}


def auroc_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  surrogate: Literal["huber", "logistic", "sigmoid"] = "huber",
  tau: ArrayLike = 0.1,
  include_self: bool = True,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the AUROC loss, a mean surrogate over all (positive, negative) pairs of each query.

  See Gao & Zhou, "On the consistency of AUC pairwise optimization", IJCAI 2015.

  .. math:: L = \mathrm{mean}_q\, \mathrm{mean}_{p, n}\, f(s_{qp} - s_{qn})

  where f(x) is l1 of Eq. 7 (``huber``), log2(1 + exp(-x)) (``logistic``, without tau), or
  sigmoid(-x / tau) (``sigmoid``).

  Args:
    embeddings, labels, where, axis_name, max_positives, pairs: see `soprc_jax.losses`.
    surrogate: the function f, one of the above.
    tau: width > 0 of ``huber`` and ``sigmoid``; ``logistic`` ignores it.
    include_self: whether a query counts as relevant to itself, as in the reference code.

  Returns:
    Scalar >= 0. Queries without a positive or a negative are left out; 0 if all are.

  Raises:
    ValueError: unknown surrogate, or tau <= 0.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{auroc_loss(embeddings, jnp.array([0, 0, 1, 1]), include_self=False):.4f}")
  1.0500
  """
  if surrogate not in SURROGATES:
    raise ValueError(f"surrogate must be one of {tuple(SURROGATES)}, got {surrogate!r}")
  checks.check_width("tau", tau)
  found, positive_scores, positive_mask = _ranking.ranking_in_columns(
    embeddings, labels, where, axis_name, max_positives, pairs, include_self=include_self
  )

  def row_loss(
    positives: jax.Array, mask: jax.Array, scores: jax.Array, negative: jax.Array
  ) -> jax.Array:
    sums = pair_sums(SURROGATES[surrogate], positives, scores, negative, tau=tau)
    total = jnp.sum(jnp.where(mask, sums, jnp.zeros_like(sums)))
    # The number of pairs is a product of two counts. A mask of all pairs would take longer than the
    # losses themselves.
    return masks.ratio(
      total, jnp.sum(mask).astype(total.dtype) * jnp.sum(negative).astype(total.dtype)
    )

  rows = (positive_scores, positive_mask, found.scores, found.candidates & ~found.relevant)
  losses = blockwise.map_rows(row_loss, rows, positive_scores.shape[1] * found.scores.shape[1])
  return masks.masked_mean(losses, found.valid, None, axis_name)
