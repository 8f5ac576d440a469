"""Maps floats to integers in the same order, which sort faster."""

import jax
import jax.numpy as jnp


def ordered_bits(array: jax.Array) -> jax.Array:
  """Maps float32 numbers to int32 in the same order, with -0.0 below 0.0.

  XLA's CPU backend sorts integers faster than floats: the loss of a list of 20,000 takes half the
  time. The integers also distinguish subnormal floats, which float comparisons treat as 0.
  """
  bits = jax.lax.bitcast_convert_type(array, jnp.int32)
  return _mirrored(bits)


def from_ordered_bits(bits: jax.Array) -> jax.Array:
  """Maps the integers of `ordered_bits` back to float32."""
  return jax.lax.bitcast_convert_type(_mirrored(bits), jnp.float32)


def _mirrored(bits: jax.Array) -> jax.Array:
  """Reverses the order of the bits of negative floats, which descend as integers; self-inverse."""
  return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
