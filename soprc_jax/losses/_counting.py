"""Ranks of few relevant scores among many candidates, by counting: the candidates are not
sorted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# So many relevant scores are compared one by one with each candidate; more are searched for in
# their order.
_FEW = 16


class Places(NamedTuple):
  """Where K relevant scores stand among L candidates in descending order; they come behind others
  of the same score.

  Attributes:
    positions: ``[K]`` candidates before each relevant one.
    among: ``[K]`` relevant ones before each relevant one.
    above: ``[L]`` relevant scores above each candidate's.
  """

  positions: jax.Array
  among: jax.Array
  above: jax.Array


def places(scores: jax.Array, others: jax.Array, relevant: jax.Array, columns: jax.Array) -> Places:
  """The `Places` of the relevant scores.

  Args:
    scores: ``[L]``, finite.
    others: ``[L]`` mask of the candidates that are not relevant.
    relevant: ``[K]`` relevant scores, -inf in unused slots.
    columns: ``[K]`` their indices among the candidates: equal relevant scores stand in this order.
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
  # Entry j: the others that reach the j lowest relevant scores.
  reaching = jnp.cumsum(histogram[::-1])[::-1]
  return Places(reaching[count - among] + among, among, count - not_above)
