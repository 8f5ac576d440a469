"""FastAP: average precision from a soft histogram of distances."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _histogram, _ranking


def fast_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  num_bins: int = 10,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the FastAP loss, 1 - AP from a soft histogram of squared distances.

  See Cakir et al., "Deep metric learning to rank", CVPR 2019. The histograms have triangular
  weights of width 4 / L around the L + 1 centers of [0, 4]. Let h be the histogram of all
  candidates, h+ that of the positives, and H, H+ their cumulative sums:

  .. math:: L = 1 - \mathrm{mean}_q \frac{1}{N^+_q} \sum_l \frac{h^+_l H^+_l}{H_l}

  The gradient is the true derivative. The reference code returns B / 2 times that, and ignores a
  weight on the loss.

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    num_bins: number of bins L >= 1.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{fast_ap_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.2500
  """
  checks.check_count("num_bins", num_bins, low=1)
  found = _ranking.ranking(
    embeddings, labels, include_self=False, where=where, axis_name=axis_name, pairs=pairs
  )
  distances = 2.0 - 2.0 * found.scores
  width = 4.0 / num_bins
  relevant, all_ = _histogram.histograms(
    distances / width, found, np.arange(num_bins + 1), open_ends=False
  )
  in_class, retrieved = jnp.cumsum(relevant, axis=0), jnp.cumsum(all_, axis=0)
  total = jnp.sum(found.relevant, axis=-1).astype(distances.dtype)
  ap = masks.ratio(jnp.sum(relevant * masks.ratio(in_class, retrieved), axis=0), total)
  return masks.masked_mean(1.0 - ap, found.valid, None, axis_name)
