"""Multi-Similarity loss, without pair mining."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions


def multi_similarity_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  alpha: ArrayLike = 2.0,
  beta: ArrayLike = 40.0,
  base: ArrayLike = 0.5,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the Multi-Similarity loss, the mean over anchors of two soft maxima.

  See Wang et al., "Multi-similarity loss with general pair weighting", CVPR 2019.

  .. math:: L = \mathrm{mean}_a \; \tfrac{1}{\alpha} \log\Big(1 + \sum_p e^{-\alpha (s_{ap}
            - b)}\Big)
            + \tfrac{1}{\beta} \log\Big(1 + \sum_n e^{\beta (s_{an} - b)}\Big)

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    alpha: sharpness for positives, > 0.
    beta: sharpness for negatives, > 0 (not the beta of Eq. 10).
    base: similarity b around which pairs are weighted.

  Returns:
    Scalar >= 0; 0 without a valid image.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> print(f"{multi_similarity_loss(embeddings, jnp.array([0, 0, 1])):.4f}")
  0.2128
  """
  checks.check_width("alpha", alpha)
  checks.check_width("beta", beta)
  checks.check_range("base", base)
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  alpha, beta, base = (jnp.asarray(value, found.scores.dtype) for value in (alpha, beta, base))
  centred = found.scores - base
  per_anchor = masks.log1p_sum_exp(-alpha * centred, found.positive) / alpha
  per_anchor += masks.log1p_sum_exp(beta * centred, found.negative) / beta
  return masks.masked_mean(per_anchor, masks.mask_like(where, per_anchor), None, axis_name)
