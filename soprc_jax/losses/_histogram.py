"""Soft histograms of the candidates of each query, computed one bin at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.losses import _ranking


def histograms(
  position: jax.Array, found: _ranking.Ranking, centres: np.ndarray, *, open_ends: bool
) -> tuple[jax.Array, jax.Array]:
  """Sums triangular weights of unit width over the relevant and over all candidates.

  Args:
    position: ``[B, G]`` scores in units of bins.
    found: ranking with the masks.
    centres: ``[L]`` bin centers, ascending integers.
    open_ends: whether the weight of the first and the last bin stays at 1 beyond their centers.

  Returns:
    Histograms of the relevant and of all candidates, ``[L, B]`` each.
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

  # One bin at a time, recomputed for the gradient. The weights of all bins would take L times the
  # memory of the similarity matrix.
  return jax.lax.map(jax.checkpoint(one_bin), jnp.asarray(centres, position.dtype))
