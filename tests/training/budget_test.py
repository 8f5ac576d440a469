"""Tests the number of steps by a time budget, and runs with ``--minutes``."""

import math
import time

import pytest
import runs

from soprc_jax.training import budget, loop
from soprc_jax.training import config as config_lib

_COSTS = budget.Costs(fixed=10.0, step=0.1, evaluation=2.0)


class TestCountSteps:
  @pytest.mark.parametrize(
    ("seconds", "every", "expected"),
    [
      (130.0, None, (1000, 10)),
      (26.0, None, (120, 2)),  # a quarter of 16 s is two evaluations
      (13.0, None, (10, 1)),
      (5.0, None, (0, 1)),
      (62.0, 20, (250, 12)),  # 50 s of 0.1 s a step and 2 s for 20 steps
      (62.0, 0, (500, 1)),
    ],
  )
  def test_fit_into_the_time(self, seconds, every, expected):
    assert budget.count_steps(seconds, _COSTS, every) == expected

  def test_take_the_time(self):
    steps, evaluations = budget.count_steps(77.7, _COSTS)
    total = _COSTS.fixed + steps * _COSTS.step + evaluations * _COSTS.evaluation
    assert 77.7 - _COSTS.step <= total <= 77.7


class TestRefusals:
  @pytest.mark.parametrize("minutes", [0.0, -1.0, math.nan, math.inf])
  def test_no_time(self, minutes):
    with pytest.raises(ValueError, match="--minutes must be a finite number > 0, got"):
      budget.check(minutes)

  def test_steps_are_given_too(self):
    with pytest.raises(ValueError, match=r"--minutes or --config\.train\.steps"):
      budget.open_config(config_lib.default_config(), ["train.steps"])

  def test_given_periods_stay(self):
    config = config_lib.default_config()
    budget.open_config(config, ["eval.every"])
    opened = config_lib.open_keys(config_lib.resolve(config))
    assert sorted(opened) == ["checkpoint.every", "train.steps"]


def _open_config():
  config = config_lib.ConfigDict(runs.tiny_config(warmup_steps=0).to_dict())
  config_lib.leave_open(config, *budget.KEYS)
  return config


def _budget(minutes):
  return budget.Budget(minutes, time.perf_counter())


def test_too_short_a_budget_says_how_long_is_needed(tmp_path):
  with pytest.raises(
    ValueError, match=r"--minutes=0\.001 is too short for 10 steps: .* take \d+ s.*Give --minutes="
  ):
    loop.train(_open_config(), tmp_path / "run", time_budget=_budget(0.001))
  assert not (tmp_path / "run").exists()


def test_a_run_chooses_its_steps_once_and_with_the_bits_of_given_steps(tmp_path):
  folder, costs = tmp_path / "run", []

  def count(seconds, found, every):
    costs.append((seconds, found, every))
    return 12, 3

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(budget, "count_steps", count)
    results = loop.train(_open_config(), folder, time_budget=_budget(5.0))
  ((seconds, found, every),) = costs
  assert 0 < seconds < 300
  assert min(found) > 0
  assert every is None
  chosen = results["chosen"]
  assert {key: chosen[key]["value"] for key in budget.KEYS} == {
    "train.steps": 12,
    "eval.every": 4,
    "checkpoint.every": 2,
  }
  assert (results["steps"], chosen["train.steps"]["minutes"]) == (12, 5.0)
  lines = runs.metrics(folder)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(budget, "measure", lambda *_: pytest.fail("measured again"))
    again = loop.train(_open_config(), folder, time_budget=_budget(5.0))
    with pytest.raises(ValueError, match=r"--minutes=7: .* was started with --minutes=5"):
      loop.train(_open_config(), folder, time_budget=_budget(7.0))
  assert again["chosen"] == chosen

  values = {"eval.every": 4, "checkpoint.every": 2}
  loop.train(runs.tiny_config(warmup_steps=0, steps=12, **values), tmp_path / "given")
  assert runs.metrics(tmp_path / "given") == lines


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--minutes=nan"], "Error: --minutes must be a finite number > 0, got nan"),
    (["--minutes=1", "--config.train.steps=5"], "leave out --minutes or --config.train.steps"),
  ],
)
def test_the_command_rejects(tmp_path, flags, message):
  done = runs.call(
    "experiments.train", f"--config={runs.GLYPHS}", f"--workdir={tmp_path / 'run'}", *flags
  )
  assert done.returncode == 1
  assert message in done.stderr
