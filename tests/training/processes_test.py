"""Tests one run on several processes, and a resume on another number of devices."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs

from soprc_jax.training import checkpoints

# SGD, since Adam turns the rounding of tiny gradients into full-size steps. A device has eight
# images: for four, jax 0.10.2 miscompiles the gradient of this run without most optimizations. Its
# norm is then 25.28 instead of 25.21.
_FLAGS = {
  "optim.name": "sgd",
  "optim.learning_rate": 0.01,
  "train.batch_size": 32,
  "train.steps": 15,
  "warmup.steps": 3,
}


def _flags(folder, **values):
  return runs.tiny_flags(folder, **(_FLAGS | values))


def _start(module, flags, devices, *more, **variables):
  return subprocess.Popen(
    [sys.executable, "-m", module, *flags, *more],
    cwd=runs.ROOT,
    env=runs.environment(devices, **variables),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _together(module, flags_of_each, devices, *, slurm=False):
  """Runs a module in several processes to their end. Returns (return code, stdout, stderr) of
  each.
  """
  started = []
  count, port = str(len(flags_of_each)), runs.free_port()
  for i, flags in enumerate(flags_of_each):
    if slurm:  # set by srun; jax takes the port from the number of the job
      task = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": count}
      variables = task | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
      started.append(_start(module, flags, devices, "--distributed", **variables))
    else:
      address = f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={i}"
      started.append(_start(module, flags, devices, *address))
  outputs = [process.communicate(timeout=600) for process in started]
  return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def _reports(process):
  """Returns whether a process prints its results. jax's collectives print too, from several
  threads, so lines may mix.
  """
  return "mAUPRC" in process[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """Runs on one device."""
  folder = tmp_path_factory.mktemp("alone") / "run"
  done = runs.call("experiments.train", *_flags(folder))
  assert done.returncode == 0, done.stderr
  return folder


def _assert_alike(folder, other):
  """Checks that two runs agree up to rounding in steps, losses, parameters, v and metrics."""
  lines, wanted = (
    [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for path in (folder, other)
  )
  assert [line["step"] for line in lines] == [line["step"] for line in wanted] == list(range(1, 19))
  np.testing.assert_allclose(
    [line["loss"] for line in lines], [line["loss"] for line in wanted], rtol=2e-3
  )
  got, want = runs.states(folder, **_FLAGS), runs.states(other, **_FLAGS)
  assert got.keys() == want.keys()
  for key, value in want.items():
    if (
      key.startswith(checkpoints.NEWEST)
      and np.issubdtype(value.dtype, np.floating)
      and "trace" not in key
    ):
      np.testing.assert_allclose(
        got[key], value, rtol=0, atol=2e-3 * np.abs(value).max(), err_msg=key
      )
  results, wanted = (json.loads((path / "results.json").read_text()) for path in (folder, other))
  assert results["tested_step"] == wanted["tested_step"]
  for split in ("val", "test"):
    assert results[split]["num_queries"] == wanted[split]["num_queries"]
    assert results[split]["mAUPRC"] == pytest.approx(wanted[split]["mAUPRC"], abs=1e-3)
  found, wanted = (content["baselines"]["test"] for content in (results, wanted))
  for name in ("thumbnails_8", "thumbnails_16"):  # computed without the devices
    assert found[name] == wanted[name]
  assert found["initial"]["mAUPRC"] == pytest.approx(wanted["initial"]["mAUPRC"], abs=1e-3)


def test_two_processes_of_two_devices(alone, tmp_path):
  flags = _flags(tmp_path / "run")
  (first, second) = _together("experiments.train", [flags, flags], devices=2)
  assert (first[0], second[0]) == (0, 0), first[2] + second[2]
  _assert_alike(tmp_path / "run", alone)
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert results["device"].startswith("4 x cpu in 2 processes")
  # Only one process prints.
  assert (_reports(first), _reports(second)) == (True, False)
  assert "step 18/18" in first[2]
  assert "step 18/18" not in second[2]
  assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
  # Two processes, one process and the training itself report the same numbers for a checkpoint.
  (first, second) = _together("experiments.evaluate", [flags, flags], devices=1, slurm=True)
  assert (first[0], second[0]) == (0, 0), first[2] + second[2]
  assert (_reports(first), _reports(second)) == (True, False)
  values = json.loads((tmp_path / "run" / "evaluation_test.json").read_text())
  # Embeddings of other batches round differently, which can swap two neighbours of a query.
  assert values["mAUPRC"] == pytest.approx(results["test"]["mAUPRC"], abs=2e-4)
  done = runs.call("experiments.evaluate", *flags)
  assert done.returncode == 0, done.stderr
  alone_values = json.loads((tmp_path / "run" / "evaluation_test.json").read_text())
  intervals, alone_intervals = (found.pop("intervals") for found in (values, alone_values))
  for found, expected in ((values, alone_values), (intervals, alone_intervals)):
    assert {key: pytest.approx(value, abs=1e-6) for key, value in found.items()} == expected


@pytest.mark.slow
def test_goes_on_with_fewer_devices(alone, tmp_path):
  folder = tmp_path / "run"

  def newest():
    names = [path.name for path in (folder / checkpoints.NEWEST).glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)

  assert runs.start_and_kill(_flags(folder), lambda _: newest() >= 4, devices=4)
  assert runs.start_and_kill(_flags(folder), lambda _: newest() >= 12, devices=2)
  assert 12 <= newest() < 18
  done = runs.call("experiments.train", *_flags(folder))
  assert done.returncode == 0, done.stderr
  assert "Resuming from step" in done.stderr
  _assert_alike(folder, alone)


@pytest.mark.slow
def test_a_preemption_of_one_process_stops_both_with_a_checkpoint(alone, tmp_path):
  folder = tmp_path / "run"
  flags, log = _flags(folder), folder / "metrics.jsonl"
  address = f"--coordinator=localhost:{runs.free_port()}", "--num_processes=2"
  started = [_start("experiments.train", flags, 1, *address, f"--process_id={i}") for i in range(2)]
  while not log.exists() or len(log.read_text().splitlines()) < 6:
    assert all(process.poll() is None for process in started)
    time.sleep(0.01)
  started[1].send_signal(signal.SIGTERM)
  outputs = [process.communicate(timeout=600) for process in started]
  assert [process.returncode for process in started] == [143, 143], outputs
  (words,) = re.findall(r"Stopped by SIGTERM after step (\d+) of 18", outputs[0][1])
  assert (folder / checkpoints.NEWEST / words).is_dir()
  assert len(log.read_text().splitlines()) == int(words) < 18
  for code, _, stderr in _together("experiments.train", [flags, flags], devices=1):
    assert code == 0, stderr
  _assert_alike(folder, alone)


@pytest.mark.parametrize(
  ("module", "change", "what"),
  [
    ("train", "--config.seed=1", "the config"),
    ("train", "--workdir=elsewhere", "--workdir"),
    ("evaluate", "--checkpoint=newest", "one of --workdir, --split, --checkpoint"),
  ],
)
def test_processes_with_different_flags_are_refused(tmp_path, module, change, what):
  flags = _flags(tmp_path / "run")
  for code, _, stderr in _together(f"experiments.{module}", [flags, [*flags, change]], devices=1):
    assert code == 1
    assert (
      f"Error: {what} of process 1 is not that of process 0: start all processes with the same "
      "flags" in stderr
    )
  assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow  # jax waits half a minute for the missing process
def test_a_mistake_in_one_process_ends_them_all(tmp_path):
  flags = _flags(tmp_path / "run")
  first, second = _together(
    "experiments.train", [flags, [*flags, "--config.model.width=0"]], devices=1
  )
  assert second[0] == 1
  assert "Error: the config does not work:" in second[2]
  assert first[0] != 0  # it reports an error, or jax's coordinator ends it


@pytest.mark.parametrize(
  ("module", "flags", "message"),
  [
    (
      "train",
      ["--coordinator=localhost:1"],
      "--coordinator, --num_processes and --process_id go together",
    ),
    (
      "train",
      ["--coordinator=a:1", "--num_processes=2", "--process_id=0", "--distributed"],
      "without --distributed",
    ),
    (
      "train",
      ["--coordinator=a:1", "--num_processes=2", "--process_id=2"],
      "--process_id=2 must be below --num_processes=2",
    ),
    ("train", ["--distributed"], "the processes of the run cannot be joined"),
    (
      "compare",
      ["--distributed"],
      "soprc compare runs in one process: leave out --distributed",
    ),
    ("search", ["--process_id=0"], "soprc search runs in one process: leave out --process_id"),
  ],
)
def test_mistakes_in_the_flags(tmp_path, module, flags, message):
  done = runs.call(f"experiments.{module}", *_flags(tmp_path / "run"), *flags)
  assert done.returncode == 1
  assert done.stderr.startswith("Error: ")
  assert message in done.stderr
  assert not (tmp_path / "run").exists()
