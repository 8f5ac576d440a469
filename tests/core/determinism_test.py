"""Tests that the same seed on the same machine gives the same bits.

This holds for any number of loader processes. pipeline_test covers the batches alone.
"""

import pytest
import runs


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_run_has_the_same_bits_for_any_number_of_workers(tmp_path, workers):
  done = runs.call("experiments.train", *runs.tiny_flags(tmp_path, **{"data.workers": workers}))
  assert done.returncode == 0, done.stderr
  wanted, found = runs.states(runs.finished().workdir), runs.states(tmp_path)
  assert found.keys() == wanted.keys()
  assert [name for name in wanted if not _same_bits(found[name], wanted[name])] == []
  assert runs.metrics(tmp_path) == runs.metrics(runs.finished().workdir)


@pytest.mark.slow
def test_another_seed_has_other_bits(tmp_path):
  """Shows that the test above can fail."""
  done = runs.call("experiments.train", *runs.tiny_flags(tmp_path, seed=1))
  assert done.returncode == 0, done.stderr
  wanted, found = runs.states(runs.finished().workdir), runs.states(tmp_path, seed=1)
  kernel = next(name for name in wanted if "params" in name and name.endswith("['kernel']"))
  assert not _same_bits(found[kernel], wanted[kernel])


def _same_bits(one, other):
  return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
