"""Ranks of a few relevant scores among many candidates, counted without sorting the candidates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Up to this many relevant scores are compared directly with each candidate. More are sorted and
# searched.
_FEW = 16


class Places(NamedTuple):
  """Holds the places of K relevant scores among L candidates in descending order.

  At equal scores relevant candidates come after the others.

  Attributes:
    positions: ``[K]`` number of candidates before each relevant one.
    among: ``[K]`` number of relevant candidates before each relevant one.
    above: ``[L]`` number of relevant scores above the score of each candidate.
  """

  positions: jax.Array
  among: jax.Array
  above: jax.Array


def places(scores: jax.Array, others: jax.Array, relevant: jax.Array, columns: jax.Array) -> Places:
  """Computes the `Places` of the relevant scores.

  Args:
    scores: ``[L]`` finite scores of the candidates.
    others: ``[L]`` mask of the candidates that are not relevant.
    relevant: ``[K]`` relevant scores, -inf in unused slots.
    columns: ``[K]`` indices of the relevant scores among the candidates. Equal relevant scores are
      ordered by them.
  """
  count = relevant.shape[0]
  if count <= _FEW:
    reached = scores[None, :] >= relevant[:, None]
    earlier = (relevant[None, :] > relevant[:, None]) | (
      (relevant[None, :] == relevant[:, None]) & (columns[None, :] < columns[:, None])
    )
    among = jnp.sum(earlier, axis=1)
    return Places(
      jnp.sum(reached & others[None, :], axis=1) + among, among, jnp.sum(~reached, axis=0)
    )
  slots = jnp.arange(count, dtype=jnp.int32)
  descending, _, order = jax.lax.sort((-relevant, columns, slots), num_keys=2)
  among = jnp.zeros_like(slots).at[order].set(slots)
  not_above = jnp.searchsorted(-descending[::-1], scores, side="right")
  histogram = jnp.zeros(count + 1, jnp.int32).at[not_above].add(others.astype(jnp.int32))
  # Entry j: number of others that reach the j lowest relevant scores.
  reaching = jnp.cumsum(histogram[::-1])[::-1]
  return Places(reaching[count - among] + among, among, count - not_above)
