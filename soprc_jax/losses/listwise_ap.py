"""Listwise AP ("DIR" in the paper): average precision from a soft histogram of similarities."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _histogram, _ranking


def listwise_ap_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  num_bins: int = 20,
  include_self: bool = True,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the listwise AP loss, 1 - AP from a soft histogram (quantization) of similarities.

  It is "DIR" in the paper's tables (Revaud et al., "Learning with average precision: training image
  retrieval with a listwise loss", ICCV 2019). The centers of the bins go from 1 down to -1. The
  precision and the gain in recall of each bin follow from cumulative sums of triangular weights:

  .. math:: L = 1 - \mathrm{mean}_q \sum_m \frac{H^+_m}{H_m} \frac{h^+_m}{N^+_q}

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    num_bins: number of bin centers >= 2.
    include_self: whether a query counts as relevant to itself, as in the reference code.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{listwise_ap_loss(embeddings, jnp.array([0, 0, 1, 1]), include_self=False):.4f}")
  0.2705
  """
  checks.check_count("num_bins", num_bins, low=2)
  found = _ranking.ranking(
    embeddings, labels, include_self=include_self, where=where, axis_name=axis_name, pairs=pairs
  )
  width = 2.0 / (num_bins - 1)
  position = (1.0 - found.scores) / width
  relevant, all_ = _histogram.histograms(position, found, np.arange(num_bins), open_ends=True)
  precision = jnp.cumsum(relevant, axis=0) / (jnp.cumsum(all_, axis=0) + 1e-16)
  total = jnp.sum(found.relevant, axis=-1).astype(position.dtype)
  ap = masks.ratio(jnp.sum(precision * relevant, axis=0), total)
  return masks.masked_mean(1.0 - ap, found.valid, None, axis_name)
