"""No NaN and no infinity enters the state of a run: what a step has computed is looked at before it is kept."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from soprc_jax._internal import collectives
from soprc_jax.training.state import TrainState

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


def guarded(
  old: TrainState, new: TrainState, nonfinite: jax.Array, *, policy: str, step: jax.Array | None = None
) -> TrainState:
  """``new`` if it may be kept, else ``old``; all leaves or none.

  Args:
    old: state before the step.
    new: state after it.
    nonfinite: of `code`.
    policy: ``"keep"``: ``new`` whatever it holds, for those who want to look at it; ``"skip"``: the step is counted all the same, so that the next one gets the next batch; ``"stop"``: the count stands still too.
    step: number of the step. With ``"stop"`` a state that an earlier step has left standing takes no later one: the steps that were
      under way before anybody knew change nothing.
  """
  if policy == "keep":
    return new
  keep = nonfinite == 0
  if policy == "stop" and step is not None:
    keep &= new.step == step
  chosen = jax.tree.map(lambda one, other: jnp.where(keep, one, other), new, old)
  return dataclasses.replace(chosen, step=new.step) if policy == "skip" else chosen
