"""FastAP: average precision by a soft histogram of distances."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, collectives, masks
from soprc_jax.losses import _histogram, _ranking


def fast_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  *,
  num_bins: int = 10,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""1 - AP from a soft histogram of squared distances (Cakir et al., "Deep metric learning to
  rank", CVPR 2019).

  With triangular weights of width 4 / L around the L + 1 centres of [0, 4], histograms h (all
  candidates), h+ (positives) and their cumulative sums H, H+:

  .. math:: L = 1 - \mathrm{mean}_q \frac{1}{N^+_q} \sum_l \frac{h^+_l H^+_l}{H_l}

  The gradient is the true derivative; the reference code returns B / 2 times that and ignores a
  loss weight.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalised again).
    labels: ``[B]`` integers in any order, classes of any size. Under jit within 32 bits, see
      `retrieval_lists`.
    num_bins: L >= 1.
    where: ``[B]`` mask of the valid images.
    axis_name: name of a mapped axis: the candidates are then the batch of all its devices.

  Returns:
    Scalar in [0, 1], at least float32. Queries without a positive or a negative are left out; 0 if
    all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{fast_ap_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.2500
  """
  checks.check_count("num_bins", num_bins, low=1)
  found = _ranking.ranking(embeddings, labels, include_self=False, where=where, axis_name=axis_name)
  distances = 2.0 - 2.0 * found.scores
  width = 4.0 / num_bins
  relevant, all_ = _histogram.histograms(
    distances / width, found, np.arange(num_bins + 1), open_ends=False
  )
  in_class, retrieved = jnp.cumsum(relevant, axis=0), jnp.cumsum(all_, axis=0)
  total = jnp.sum(found.relevant, axis=-1).astype(distances.dtype)
  ap = masks.ratio(jnp.sum(relevant * masks.ratio(in_class, retrieved), axis=0), total)
  return masks.masked_mean(1.0 - ap, found.valid, None, axis_name)
