"""A fixture for tests that compile much and compute little; importing it into a test module is enough."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """Without most of XLA's optimizations, compilation takes about half the time."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
