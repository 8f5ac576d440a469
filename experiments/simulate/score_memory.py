"""Simulates a score memory: F of all stored scores, with the gradient of the batch alone.

A memory of the scores of all training images estimates F and T from many more scores than a batch
has. Stored scores are constants. So it can serve the value of the risk, and with it the weight that
each positive has in the gradient, while the direction of the gradient comes from the batch. The
study compares the bias and the spread of value and gradient with those of the batch.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import surrogates
from soprc_jax._internal import blockwise
from soprc_jax.estimators import LINKS

# The stored scores: none, exact, and of an older model whose negatives scored higher.
MEMORIES = ("batch", "memory", "old memory")
_DRIFT = 0.2
# Three positives and 252 negatives are the list of a query in a batch of 64 classes of 4.
_POSITIVES, _NEGATIVES = 3, 252


class Case(NamedTuple):
  """A population of positives N(separation, 1) and negatives N(0, 1).

  Attributes:
    separation: mean score of the positives.
    prior: share pi of positives.
    link: `soprc_jax.soprc_loss`.
  """

  separation: float
  prior: float
  link: str


CASES = tuple(
  Case(separation, prior, link)
  for link in ("share", "log")
  for prior in (0.01, 0.001)
  for separation in (1.0, 2.0, 3.0)
)
# Schema of an entry of `study`, in the form of `soprc_jax._internal.stored`.
ENTRY: dict[str, Any] = {
  "separation": float,
  "prior": float,
  "link": str,
  "risk": float,
  **{
    name: dict.fromkeys(("bias", "std", "gradient_bias", "gradient_std"), float)
    for name in MEMORIES
  },
}


def study(
  cases: Sequence[Case], *, stored: int, repetitions: int, tau1: float, tau2: float, seed: int
) -> list[dict[str, Any]]:
  """Computes bias and standard deviation of the risk and its gradient, with and without a memory.

  The gradient is the derivative for a common shift of all positives. Its bias and standard
  deviation are relative to the exact derivative. v is the exact quantiles of all positives.

  Args:
    cases: populations.
    stored: number of negatives of a population, all of which the memory holds.
    repetitions: number of batches.
    tau1: width of l1.
    tau2: width of l2.
    seed: seed of all draws.
  """
  return [
    _errors(case, stored, repetitions, tau1, tau2, np.random.default_rng(seed)) for case in cases
  ]


def _errors(
  case: Case, stored: int, repetitions: int, tau1: float, tau2: float, rng: np.random.Generator
) -> dict[str, Any]:
  positives = np.sort(rng.normal(case.separation, 1, 1000)).astype(np.float32)
  negatives = rng.normal(0, 1, stored).astype(np.float32)
  v = np.quantile(positives, (np.arange(100) + 0.5) / 100).astype(np.float32)
  drawn = rng.choice(positives, (repetitions, _POSITIVES))
  others = rng.choice(negatives, (repetitions, _NEGATIVES))
  risk = jax.value_and_grad(functools.partial(_risk, case, v, tau1, tau2))
  zero = jnp.zeros([], jnp.float32)
  exact, exact_slope = risk(zero, positives, negatives, None)

  @jax.jit
  def estimates(memory: Any) -> Any:
    def estimate(positive: jax.Array, negative: jax.Array) -> Any:
      return risk(zero, positive, negative, memory)

    return blockwise.map_rows(estimate, (jnp.asarray(drawn), jnp.asarray(others)), 8 * stored)

  found: dict[str, Any] = {**case._asdict(), "risk": float(exact)}
  for name, memory in zip(MEMORIES, (None, negatives, negatives + _DRIFT), strict=True):
    value, slope = (np.asarray(array, np.float64) for array in estimates(memory))
    found[name] = {
      "bias": float(value.mean() - exact),
      "std": float(value.std(ddof=1)),
      "gradient_bias": float(slope.mean() / exact_slope - 1),
      "gradient_std": float(slope.std(ddof=1) / abs(exact_slope)),
    }
  return found


def _risk(
  case: Case,
  v: np.ndarray,
  tau1: float,
  tau2: float,
  shift: jax.Array,
  positive: Any,
  negative: Any,
  memory: Any,
) -> jax.Array:
  """Returns the risk of one list; with a memory, F has its value and the gradient of the batch."""
  scores = positive + shift

  def mean_l1(others: Any) -> jax.Array:
    return jnp.mean(surrogates.one_sided_huber(scores[:, None] - others[None], tau=tau1), axis=1)

  fpr = mean_l1(negative)
  if memory is not None:
    fpr = fpr + jax.lax.stop_gradient(mean_l1(memory) - fpr)
  below = jnp.mean(surrogates.one_sided_sigmoid(scores[:, None] - v[None], tau=tau2), axis=1)
  tpr = jax.lax.stop_gradient((len(v) * below + 1) / (len(v) + 1))
  return jnp.mean(LINKS[case.link]((1 - case.prior) * fpr, case.prior * tpr))
