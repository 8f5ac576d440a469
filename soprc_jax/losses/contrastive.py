"""Contrastive loss on cosine similarities."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions


def contrastive_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  positive_margin: ArrayLike = 1.0,
  negative_margin: ArrayLike = 0.5,
  average_active: bool = False,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the contrastive loss, a sum over the ordered pairs of the batch.

  See Hadsell, Chopra & LeCun, "Dimensionality reduction by learning an invariant mapping", CVPR
  2006.

  .. math:: L = \sum_{positive} [m^+ - s]_+ + \sum_{negative} [s - m^-]_+

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    positive_margin: similarity m+ above which a positive pair costs nothing.
    negative_margin: similarity m- below which a negative pair costs nothing.
    average_active: whether each of the two sums is divided by its number of pairs with a loss > 0.

  Returns:
    Scalar >= 0; 0 without pairs. Without ``average_active`` it grows with the
    square of the batch.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> print(f"{contrastive_loss(embeddings, jnp.array([0, 0, 1])):.4f}")
  0.6000
  """
  checks.check_range("positive_margin", positive_margin)
  checks.check_range("negative_margin", negative_margin)
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  dtype = found.scores.dtype
  pull = jax.nn.relu(jnp.asarray(positive_margin, dtype) - found.scores)
  push = jax.nn.relu(found.scores - jnp.asarray(negative_margin, dtype))
  if average_active:
    return masks.masked_mean(
      pull, found.positive & (pull > 0), None, axis_name
    ) + masks.masked_mean(push, found.negative & (push > 0), None, axis_name)
  zero = jnp.zeros_like(pull)
  total = jnp.sum(jnp.where(found.positive, pull, zero)) + jnp.sum(
    jnp.where(found.negative, push, zero)
  )
  return collectives.psum(total, axis_name)
