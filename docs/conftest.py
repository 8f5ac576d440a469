"""The examples of the pages compile much and compute little: without most of XLA's optimizations they take about half the time."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
