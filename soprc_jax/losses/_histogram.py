"""Soft histograms of the candidates of each query, one bin at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.losses import _ranking


def histograms(
  position: jax.Array, found: _ranking.Ranking, centres: np.ndarray, *, open_ends: bool
) -> tuple[jax.Array, jax.Array]:
  """Triangular weights of unit width summed over the relevant and over all candidates, ``[L, B]``
  each.

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
      first, last = float(centres[0]), float(centres[-1])
      outside = ((centre == first) & (offset < 0)) | ((centre == last) & (offset > 0))
      weight = jnp.where(outside, jnp.ones_like(weight), weight)
    relevant = jnp.sum(jnp.where(found.relevant, weight, zero), axis=-1)
    return relevant, jnp.sum(jnp.where(found.candidates, weight, zero), axis=-1)

  # One bin at a time, recomputed for the gradient: the weights of all bins would be L times the
  # similarity matrix.
  return jax.lax.map(jax.checkpoint(one_bin), jnp.asarray(centres, position.dtype))
