"""Tests that no NaN and no infinity enters the state of a run."""

import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax.training import step as step_lib
from soprc_jax.training.step import TrainState


def _old_and_new(value):
  old = TrainState(jnp.int32(4), {"w": jnp.ones(2)}, {}, (jnp.zeros(3),))
  new = TrainState(jnp.int32(5), {"w": jnp.array([2.0, value])}, {}, (jnp.ones(3),))
  return old, new


class TestGuard:
  @pytest.mark.parametrize(
    ("policy", "bad", "step", "kept", "count"),
    [
      ("stop", 0, 5, "new", 5),
      ("stop", 4, 5, "old", 4),
      ("stop", 0, 6, "old", 4),  # the state was kept at the step before
      ("stop", 0, None, "new", 5),
      ("skip", 0, 5, "new", 5),
      ("skip", 4, 5, "old", 5),
      ("keep", 4, 5, "new", 5),
    ],
  )
  def test_what_is_kept(self, policy, bad, step, kept, count):
    old, new = _old_and_new(3.0)
    keep = step_lib.is_kept(new.step, jnp.int32(bad), policy=policy, step=step)
    found = step_lib.guarded(old, new, keep, policy=policy)
    want = {"old": old, "new": new}[kept]
    assert int(found.step) == count
    np.testing.assert_array_equal(found.params["w"], want.params["w"])
    np.testing.assert_array_equal(found.opt_state[0], want.opt_state[0])

  @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
  def test_any_nonfinite(self, value, dtype):
    tree = {"a": jnp.ones(3, dtype), "b": (jnp.arange(3), jnp.array([0.0, value], dtype))}
    assert bool(step_lib.any_nonfinite(tree))
    assert not bool(step_lib.any_nonfinite({"a": jnp.array([3e38, -3e38]), "b": jnp.arange(3)}))
    assert not bool(step_lib.any_nonfinite({}))

  def test_codes_name_their_parts(self):
    flags = {
      name: jnp.array(name in ("gradient", "carried state")) for name in step_lib.NONFINITE_PARTS
    }
    assert step_lib.nonfinite_names(float(step_lib.nonfinite_code(flags, None))) == [
      "gradient",
      "carried state",
    ]
    assert step_lib.nonfinite_names(0.0) == []
