"""Tests that any number of devices and processes equals one device on the joined batch.

tests/support/device_cases.py has the cases.
"""

import atexit
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import device_cases
import numpy as np
import pytest
import runs

from soprc_jax import metrics

# (processes, devices of each)
SETUPS = [(1, 2), (1, 3), (1, 4), (2, 2)]
_IDS = [f"{processes}x{devices}" for processes, devices in SETUPS]


@functools.cache
def _folder():
  folder = pathlib.Path(tempfile.mkdtemp(prefix="soprc_jax_devices_"))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  return folder


def _found(processes, devices):
  """Returns the values from a program with this number of devices."""
  path = _folder() / f"{processes}x{devices}.npz"
  program = [sys.executable, str(pathlib.Path(device_cases.__file__)), str(path)]
  env = runs.environment(devices)
  address = [f"localhost:{runs.free_port()}", str(processes)] if processes > 1 else []
  started = [
    subprocess.Popen(
      program + ([*address, str(i)] if address else []),
      env=env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(processes)
  ]
  outputs = [process.communicate(timeout=900)[0] for process in started]
  assert [process.returncode for process in started] == [0] * processes, "\n".join(outputs)
  with np.load(path) as archive:
    return dict(archive)


@functools.cache
def _wanted():
  """Returns the values of one device on the joined batch, without any mapped axis."""
  return device_cases.everything(mapped=False)


# One test per setup, since each starts a program.
@pytest.mark.parametrize(
  ("processes", "devices"),
  [pytest.param(*setup, marks=pytest.mark.slow if setup != (1, 4) else ()) for setup in SETUPS],
  ids=_IDS,
)
def test_f23_equals_one_device(processes, devices, subtests):
  found, wanted = _found(processes, devices), _wanted()
  assert found.keys() == wanted.keys()
  for name in device_cases.LOSSES:
    with subtests.test("loss, gradient, carried state", name=name):
      keys = [key for key in wanted if key.startswith(f"{name}/")]
      assert len(keys) >= 6  # loss and gradient of three steps
      for key in keys:
        _assert_close(found[key], wanted[key], 1e-4 if key.endswith("gradient") else 1e-5, key)
  for name in device_cases.TRAININGS:
    with subtests.test("20 steps of SGD", name=name):
      keys = [key for key in wanted if key.startswith(f"training/{name}.")]
      assert sum(".params" in key for key in keys) >= 8
      for key in keys:
        # The momentum has the rounding of the last gradients, which the parameters average out.
        _assert_close(found[key], wanted[key], 1e-2 if ".trace" in key else 1e-3, key)
  with subtests.test("evaluation"):
    _assert_close(
      found["evaluation/embeddings"], wanted["evaluation/embeddings"], 1e-6, "embeddings"
    )
    metrics = json.loads(str(found["evaluation/metrics"]))
    assert metrics == json.loads(str(wanted["evaluation/metrics"]))
    assert (metrics["all"]["num_queries"], metrics["all"]["num_skipped"]) == (27, 0)
    assert metrics["all"]["ks_beyond_gallery"] == [27]  # each has 26 candidates
    assert metrics["one_per_class"]["num_queries"] == 21


_COUNTS = """
import json
import jax
import device_cases
from soprc_jax.training import parallel

found = {}
for count in (1, 2, 3, 8):
  # pmap takes the first devices where the mapped axis is shorter than there are.
  counts = dict.fromkeys(("device_count", "local_device_count"), staticmethod(lambda: count))
  parallel.jax = type("Jax", (), vars(jax) | counts)
  values = device_cases.evaluated()
  assert values["embeddings"].shape[0] == 27
  found[count] = json.loads(str(values["metrics"])) | {"embeddings": values["embeddings"].tolist()}
print("value of the test: " + json.dumps(found), flush=True)
"""


def test_f05_padding_for_any_number_of_devices_repeats_no_image():
  """Checks 27 images in batches of 8, on 1, 2, 3 and 8 devices. The metrics are those of all 27 in
  one batch, each image once.
  """
  env = runs.environment(8)
  env["PYTHONPATH"] += f"{os.pathsep}{runs.ROOT / 'tests' / 'support'}"
  done = subprocess.run(
    [sys.executable, "-c", _COUNTS],
    env=env,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  images = device_cases._Images()
  embeddings = np.asarray(
    device_cases._model(True, None).apply(device_cases._variables(), images._images)
  )
  for count, found in runs.value(done.stdout).items():
    np.testing.assert_allclose(found["embeddings"], embeddings, atol=1e-5, err_msg=count)
    want = metrics.retrieval_metrics(
      np.float32(found["embeddings"]), images.labels, ks=(1, 3, 26, 27)
    )
    levels = np.stack([images.labels, images.labels % 2], axis=1)
    graded = metrics.graded_metrics(np.float32(found["embeddings"]), levels)
    want |= {name: graded[name] for name in ("H-AP", "NDCG")}
    want |= {"superclass mAUPRC": graded["mAUPRC_per_level"][1], "num_broken": 0}
    assert found["all"] == want, count
    assert want["mAUPRC"] <= 1
    assert (want["num_queries"], want["num_skipped"]) == (27, 0)


def _assert_close(got, want, tolerance, name):
  """Checks equality up to ``tolerance`` times the largest entry; integers and masks exactly."""
  if not np.issubdtype(want.dtype, np.floating):
    np.testing.assert_array_equal(got, want, err_msg=name)
    return
  np.testing.assert_allclose(
    got, want, rtol=0, atol=tolerance * np.abs(want).max(initial=0), err_msg=name
  )


@pytest.mark.parametrize(
  ("name", "whole"), [("microbatches", "frozen"), ("vit_microbatches", "vit")]
)
def test_microbatches_train_as_the_whole_batch_does(name, whole):
  want = _wanted()
  keys = [key for key in want if key.startswith(f"training/{name}.")]
  assert len(keys) > 20
  for key in keys:
    _assert_close(
      want[key],
      want[key.replace(f"/{name}.", f"/{whole}.")],
      1e-2 if ".trace" in key else 1e-3,
      key,
    )
