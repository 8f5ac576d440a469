"""Tests experiments/benchmark/device.py, the check of an accelerator, on a CPU."""

import types

import numpy as np
import pytest

from experiments.benchmark import device
from soprc_jax import metrics
from soprc_jax.training import loop


@pytest.mark.parametrize("part", ["_parity", "_mappings", "_metrics", "_losses", "_evaluation"])
def test_checks_pass_here(part):
  found = list(getattr(device, part)(device._SMALL._replace(queries=200)))
  assert found
  assert all(one.passed in (True, None) for one in found)


def test_other_bits_of_the_metrics_fail(monkeypatch):
  plain, calls = metrics.retrieval_metrics, []

  def noisy(*args, **kwargs):
    calls.append(1)
    found = plain(*args, **kwargs)
    return found | {"mAUPRC": np.nextafter(found["mAUPRC"], len(calls) - 1)}

  monkeypatch.setattr(metrics, "retrieval_metrics", noisy)
  (found,) = device._metrics(device._SMALL)
  assert found.passed is False


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True])
def test_a_resumed_run_is_compared_with_a_whole_one(monkeypatch, faulty):
  plain, calls = loop.train, []

  def train(*args, **kwargs):
    calls.append(1)
    found = plain(*args, **kwargs)
    return {"test": {"mAUPRC": 0.0}} if faulty and len(calls) == 2 else found

  monkeypatch.setattr(loop, "train", train)
  (found,) = device._resume(device._SMALL)
  assert len(calls) == 2
  assert found.passed is not faulty


def test_an_error_in_a_part_fails_it_and_keeps_the_others(monkeypatch):
  def failing(sizes):
    yield device.Result("first", "1", True)
    raise RuntimeError("out of memory\nmore")

  names = ("_parity", "_mappings", "_metrics", "_resume", "_steps", "_losses", "_evaluation")
  for name in names:
    monkeypatch.setattr(device, name, lambda sizes: iter([device.Result("other", "2")]))
  failing.__name__ = "_steps"
  monkeypatch.setattr(device, "_steps", failing)
  found = list(device.check(device._SMALL))
  assert [one.passed for one in found] == [None] * 4 + [True, False] + [None] * 2
  assert found[5] == device.Result("steps", "RuntimeError: out of memory", False)


def test_a_failed_check_ends_with_its_name(monkeypatch, tmp_path, capsys):
  results = [device.Result("a", "1", True), device.Result("b", "2", False), device.Result("c", "3")]
  monkeypatch.setattr(device, "check", lambda sizes: iter(results))
  monkeypatch.setattr(device, "_TABLE", types.SimpleNamespace(value=str(tmp_path / "table.md")))
  monkeypatch.setattr(device.flags, "require", lambda argv, example: None)
  with pytest.raises(SystemExit, match="failed: b"):
    device.main(["device"])
  assert "| b | 2 | **failed** |" in (tmp_path / "table.md").read_text()
  assert "| a | 1 | passed |" in capsys.readouterr().out
