"""Triplet loss over all triplets of the batch."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax._internal.pair_sums import HINGE, pair_sums


def triplet_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  margin: ArrayLike = 0.1,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the triplet loss, the mean over anchors of the sum over all triplets.

  See Hoffer & Ailon, "Deep metric learning using triplet network", 2015.

  .. math:: L = \mathrm{mean}_a \sum_{p, n} [s_{an} - s_{ap} + m]_+

  Triplets are not mined. Anchors with no positive or no negative in the batch count with 0, like
  any other satisfied anchor.

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    margin: m >= 0.
    max_positives: static bound on the positives of an anchor, to save memory, see
      `retrieval_lists`. None keeps all.

  Returns:
    Scalar >= 0; 0 without a valid image.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> print(f"{triplet_loss(embeddings, jnp.array([0, 0, 1]), margin=0.5):.4f}")
  0.1000
  """
  checks.check_range("margin", margin, low=0.0)
  if max_positives is not None:
    checks.check_count("max_positives", max_positives)
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  positives, positive_where = found.scores, found.positive
  if max_positives is not None:
    positives, positive_where = lists.pick_positives(found.scores, found.positive, max_positives)

  reach = positives - jnp.asarray(margin, positives.dtype)
  costs = pair_sums(HINGE, reach, found.scores, found.negative, tau=1.0)
  per_anchor = jnp.sum(jnp.where(positive_where, costs, jnp.zeros_like(costs)), axis=1)
  anchors = masks.mask_like(where, per_anchor)
  return masks.masked_mean(per_anchor, anchors, None, axis_name)
