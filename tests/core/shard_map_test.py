"""Tests every function with ``axis_name`` in `jax.shard_map` with its default ``check_vma=True``.

The cases are those of shard_map_cases.py. jax sums the gradients of replicated parameters here.
They are compared as they are, without a mean (_internal/collectives.py).
"""

import functools
import inspect
import re
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
import runs
import shard_map_cases

import soprc_jax
from soprc_jax import losses
from soprc_jax._internal import piecewise

_wanted = functools.cache(shard_map_cases.on_one_device)


@pytest.fixture(scope="module")
def on_four_devices(tmp_path_factory):
  """Returns the values of all cases, from a program that has four devices."""
  path = tmp_path_factory.mktemp("shard_map") / "values.npz"
  done = subprocess.run(
    [sys.executable, shard_map_cases.__file__, str(path), "4"],
    env=runs.environment(4),
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  with np.load(path) as archive:
    return dict(archive)


def _assert_equal(got, want):
  """Checks equality up to rounding, relative to the largest number; integers and masks exactly."""
  assert got.keys() == want.keys()
  for key, wanted in want.items():
    if not np.issubdtype(wanted.dtype, np.floating):
      np.testing.assert_array_equal(got[key], wanted, err_msg=key)
      continue
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    tolerance = 1e-4 if "gradient" in key else 1e-5
    np.testing.assert_allclose(got[key], wanted, rtol=0, atol=tolerance * largest, err_msg=key)


@pytest.mark.parametrize("name", shard_map_cases.CASES)
def test_f51_two_devices_equal_one(name):
  want = _wanted(name)
  assert all(np.any(wanted) for key, wanted in want.items() if "gradient" in key and "/[0]" in key)
  _assert_equal(shard_map_cases.on_devices(name, 2), want)


@pytest.mark.parametrize("name", shard_map_cases.OF_MASKS)
def test_masks_of_labels_equal_labels_on_two_devices(name):
  got = shard_map_cases.on_devices(name, 2, shard_map_cases.OF_MASKS)
  chex.assert_trees_all_equal(got, shard_map_cases.on_devices(name, 2))


@pytest.mark.slow
def test_masks_of_labels_equal_labels_on_four_devices(on_four_devices):
  for name in shard_map_cases.OF_MASKS:
    found = {key: value for key, value in on_four_devices.items() if key.split("/")[0] == name}
    assert found
    for key, value in found.items():
      got = on_four_devices[f"of masks: {key}"]
      if "gradient" in key:
        # XLA may fuse a mask and its comparison of labels differently. In `triplet_loss` with
        # max_positives that changes the last bit of a gradient.
        np.testing.assert_allclose(got, value, rtol=0, atol=1e-6 * np.abs(value).max(), err_msg=key)
      else:
        np.testing.assert_array_equal(got, value, err_msg=key)


@pytest.mark.slow  # tests/training/devices_test.py has the losses on four devices
def test_f51_four_devices_equal_one(on_four_devices, subtests):
  for name in shard_map_cases.CASES:
    with subtests.test(name):
      found = {key: value for key, value in on_four_devices.items() if key.split("/")[0] == name}
      _assert_equal(found, _wanted(name))


def test_f51_every_function_with_axis_name_has_a_case():
  words = set(re.findall(r"\w+", " ".join(shard_map_cases.CASES)))
  functions = [getattr(module, name) for module in (soprc_jax, losses) for name in module.__all__]
  for function in filter(inspect.isfunction, functions):
    if "axis_name" in inspect.signature(function).parameters:
      assert function.__name__ in words


@pytest.mark.parametrize("name", ["soprc_loss long", "ap_loss long"])
def test_long_lists_are_sorted(name, monkeypatch):
  calls, original = [], piecewise.sums_of_lists
  monkeypatch.setattr(
    piecewise, "sums_of_lists", lambda *args: calls.append(args) or original(*args)
  )
  case = shard_map_cases.CASES[name]
  jax.eval_shape(lambda: case.compute(case.shared, case.parts, None))
  assert calls
