"""Average precision by histogram binning: FastAP, and listwise AP with quantization (DIR)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import _arrays
from soprc_jax.losses import _ranking


def fast_ap_loss(
  embeddings: Any,
  labels: Any,
  *,
  num_bins: int = 10,
  where: Any = None,
  axis_name: _arrays.AxisName = None,
) -> jax.Array:
  r"""1 - AP from a soft histogram of squared distances (Cakir et al., "Deep metric learning to rank", CVPR 2019).

  With triangular weights of width 4 / L around the L + 1 centres of [0, 4], histograms h (all candidates), h+ (positives) and their cumulative sums H, H+:

  .. math:: L = 1 - \mathrm{mean}_q \frac{1}{N^+_q} \sum_l \frac{h^+_l H^+_l}{H_l}

  The gradient is the true derivative; the reference code returns B / 2 times that and ignores a loss weight.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalised again).
    labels: ``[B]`` integers in any order, classes of any size.
    num_bins: L >= 1.
    where: ``[B]`` mask of the valid images.
    axis_name: name of a mapped axis: the candidates are then the batch of all its devices.

  Returns:
    Scalar in [0, 1], at least float32. Queries without a positive or a negative are left out; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{fast_ap_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.2500
  """
  if num_bins < 1:
    raise ValueError(f"num_bins must be at least 1, got {num_bins}")
  found = _ranking.ranking(embeddings, labels, include_self=False, where=where, axis_name=axis_name)
  distances = 2.0 - 2.0 * found.scores
  width = 4.0 / num_bins
  relevant, all_ = _histograms(distances / width, found, np.arange(num_bins + 1), open_ends=False)
  in_class, retrieved = jnp.cumsum(relevant, axis=0), jnp.cumsum(all_, axis=0)
  total = jnp.sum(found.relevant, axis=-1).astype(distances.dtype)
  ap = _arrays.ratio(jnp.sum(relevant * _arrays.ratio(in_class, retrieved), axis=0), total)
  return _arrays.masked_mean(1.0 - ap, found.valid, None, axis_name)


def listwise_ap_loss(
  embeddings: Any,
  labels: Any,
  *,
  num_bins: int = 20,
  include_self: bool = True,
  where: Any = None,
  axis_name: _arrays.AxisName = None,
) -> jax.Array:
  r"""1 - AP from a soft histogram of similarities, "DIR" in the paper's tables (Revaud et al., "Learning with average precision: training image retrieval with a listwise loss", ICCV 2019).

  The centres go from 1 down to -1; precision and the gain in recall of each bin follow from cumulative sums of its triangular weights:

  .. math:: L = 1 - \mathrm{mean}_q \sum_m \frac{H^+_m}{H_m} \frac{h^+_m}{N^+_q}

  Args:
    embeddings: ``[B, D]``, unit norm (not normalised again).
    labels: ``[B]`` integers in any order, classes of any size.
    num_bins: number of centres >= 2.
    include_self: whether a query is relevant to itself, as in the reference code.
    where: ``[B]`` mask of the valid images.
    axis_name: name of a mapped axis: the candidates are then the batch of all its devices.

  Returns:
    Scalar in [0, 1], at least float32. Queries without a positive or a negative are left out; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{listwise_ap_loss(embeddings, jnp.array([0, 0, 1, 1]), include_self=False):.4f}")
  0.2705
  """
  if num_bins < 2:
    raise ValueError(f"num_bins must be at least 2, got {num_bins}")
  found = _ranking.ranking(embeddings, labels, include_self=include_self, where=where, axis_name=axis_name)
  width = 2.0 / (num_bins - 1)
  position = (1.0 - found.scores) / width
  relevant, all_ = _histograms(position, found, np.arange(num_bins), open_ends=True)
  precision = jnp.cumsum(relevant, axis=0) / (jnp.cumsum(all_, axis=0) + 1e-16)
  total = jnp.sum(found.relevant, axis=-1).astype(position.dtype)
  ap = _arrays.ratio(jnp.sum(precision * relevant, axis=0), total)
  return _arrays.masked_mean(1.0 - ap, found.valid, None, axis_name)


def _histograms(
  position: jax.Array, found: _ranking.Ranking, centres: np.ndarray, *, open_ends: bool
) -> tuple[jax.Array, jax.Array]:
  """Triangular weights of unit width summed over the relevant and over all candidates, ``[L, B]`` each.

  Args:
    position: ``[B, G]`` scores in units of bins.
    found: masks.
    centres: bin centres, ascending integers.
    open_ends: whether the first and the last bin stay at 1 outside of the centres.
  """
  zero = jnp.zeros_like(position)

  def one_bin(centre: jax.Array) -> tuple[jax.Array, jax.Array]:
    offset = position - centre
    weight = jax.nn.relu(1.0 - jnp.abs(offset))
    if open_ends:
      outside = ((centre == centres[0]) & (offset < 0)) | ((centre == centres[-1]) & (offset > 0))
      weight = jnp.where(outside, jnp.ones_like(weight), weight)
    relevant = jnp.sum(jnp.where(found.relevant, weight, zero), axis=-1)
    return relevant, jnp.sum(jnp.where(found.candidates, weight, zero), axis=-1)

  # One bin at a time, recomputed for the gradient: the weights of all bins would be L times the similarity matrix.
  return jax.lax.map(jax.checkpoint(one_bin), jnp.asarray(centres, position.dtype))
