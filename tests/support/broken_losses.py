"""Computes SOPRC with a NaN at the steps ``loss.custom.steps`` of the main phase, from 0.

Its v is tracked as usual.
"""

import jax.numpy as jnp

from soprc_jax.training import objectives


def soprc(config, setting):
  inner = objectives.make_objective("soprc", config, setting)
  steps = jnp.array(config.custom.get("steps", (-1,)))

  def compute(inputs):
    outputs = inner.compute(inputs)
    return outputs._replace(
      loss=outputs.loss * jnp.where(jnp.any(steps == inputs.step), jnp.nan, 1.0)
    )

  return inner._replace(compute=compute)
