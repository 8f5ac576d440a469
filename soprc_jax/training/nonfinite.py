"""No NaN and no infinity enters the state of a run: what a step has computed is looked at before it is kept."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from soprc_jax._internal import collectives

# What follows a step that is not finite: the run stops, its state as it was before that step; or the step is left out.
POLICIES = ("stop", "skip")
# What is looked at, in this order: bit i of the code stands for the i-th.
PARTS = ("loss", "embeddings", "gradient", "update", "carried state", "batch statistics")


class DivergedError(ArithmeticError):
  """Training has made a number that is not finite: the run cannot go on."""


def any_nonfinite(tree: Any) -> jax.Array:
  """Whether any number of a tree is a NaN or infinite; scalar bool."""
  leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)]
  return jnp.any(jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.array(False)


def code(bad: Mapping[str, jax.Array], axis_name: str | None) -> jax.Array:
  """The parts that are not finite on any device, as one int32 with a bit for each of `PARTS`; 0 if all are finite."""
  flags = jnp.stack([bad[name] for name in PARTS]).astype(jnp.int32)
  flags = (collectives.psum(flags, axis_name) > 0).astype(jnp.int32)
  return jnp.sum(flags << jnp.arange(len(PARTS)))


def names(found: float) -> list[str]:
  """The parts that a code of `code` stands for."""
  return [name for bit, name in enumerate(PARTS) if int(found) >> bit & 1]
