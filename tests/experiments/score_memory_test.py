"""Tests the simulated score memory against formulas in float64."""

import numpy as np
import pytest

from experiments.simulate import score_memory

_TAUS = {"tau1": 0.5, "tau2": 0.01}


def _l1(margin):
  inside = np.where(margin < 0, 1 - 2 * margin / 0.5, (1 - margin / 0.5) ** 2)
  slope = np.where(margin < 0, -2 / 0.5, -2 / 0.5 * (1 - margin / 0.5))
  return np.where(margin < 0.5, inside, 0), np.where(margin < 0.5, slope, 0)


def _expected(case, positive, negative, memory, v):
  """Returns the risk and its derivative: F from the memory, its derivative from the batch."""
  value, slope = (part.mean(axis=1) for part in _l1(positive[:, None] - negative))
  if memory is not None:
    value = _l1(positive[:, None] - memory)[0].mean(axis=1)
  margins = positive[:, None] - v
  below = np.where(margins < 0, -np.tanh(margins / 0.02), 0)  # 2 sigmoid(-x) - 1
  tpr = (below.sum(axis=1) + 1) / (len(v) + 1)
  a = (1 - case.prior) * value / (case.prior * tpr)
  da = (1 - case.prior) * slope / (case.prior * tpr)
  if case.link == "log":
    return np.log1p(a).mean(), (da / (1 + a)).mean()
  return (a / (1 + a)).mean(), (da / (1 + a) ** 2).mean()


@pytest.mark.parametrize("link", ["share", "log"])
@pytest.mark.parametrize("remembers", [False, True])
def test_risk_and_gradient_are_those_of_the_formula(link, remembers):
  import jax

  rng = np.random.default_rng(3)
  positive, negative, memory = rng.normal(1, 1, 3), rng.normal(0, 1, 20), rng.normal(0, 1, 500)
  v = np.sort(rng.normal(1, 1, 10))
  case = score_memory.Case(1.0, 0.05, link)
  memory = memory if remembers else None
  found = jax.value_and_grad(
    lambda shift: score_memory._risk(case, v, 0.5, 0.01, shift, positive, negative, memory)
  )(0.0)
  np.testing.assert_allclose(found, _expected(case, positive, negative, memory, v), rtol=2e-4)


def test_a_memory_removes_the_bias_and_spreads_the_gradient():
  """The result of the study, where the scores are separated."""
  case = score_memory.Case(3.0, 0.001, "log")
  (entry,) = score_memory.study([case], stored=5000, repetitions=400, seed=1, **_TAUS)
  batch, memory, old = (entry[name] for name in score_memory.MEMORIES)
  assert batch["bias"] < -0.15  # the risk is concave in F
  assert abs(memory["bias"]) < 4 * memory["std"] / 400**0.5
  assert memory["gradient_std"] > 1.5 * batch["gradient_std"]
  assert old["bias"] > 0.2
