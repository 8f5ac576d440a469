"""Tests the random search of `soprc compare --trials`: equal effort, its edges, its table."""

import math

import numpy as np
import pytest

from experiments.compare import comparison, plans, random_search, tables
from soprc_jax.training import config as config_lib
from soprc_jax.training import methods

_RATES = (0.001, 0.01)


def _smooth(best_rate):
  """Returns a validation result that is highest at a learning rate."""
  return lambda trial: 1 - 0.1 * abs(math.log(trial[random_search.RATE] / best_rate))


class TestSpaces:
  def test_have_the_same_number_of_dimensions_for_every_method(self):
    spaces = [random_search.space(method, _RATES) for method in methods.METHODS]
    assert {len(space) for space in spaces} == {3}
    assert all(
      [one.key for one in space[:2]] == [random_search.RATE, random_search.SAMPLER]
      for space in spaces
    )

  @pytest.mark.parametrize("method", methods.METHODS)
  def test_give_valid_configs_at_their_ends(self, method):
    def make_config(name):
      config = config_lib.default_config()
      methods.choose(config, name)
      return config

    plan = plans.read_plan(_settings())
    for position in (0.0, 0.3, 0.999):
      trial = {one.key: one.value(position) for one in random_search.space(method, _RATES)}
      name = plans.RunName(method, trial[random_search.RATE], plans.TUNING_SEED)
      found = plans.run_config(plan, make_config, name, random_search.config_values(trial))
      assert found.data.split_seed == found.seed == plans.TUNING_SEED
      assert config_lib.unused_problems(found, random_search.config_values(trial)) == []

  def test_of_custom_losses_are_refused(self):
    with pytest.raises(
      ValueError, match=r"'own:loss' has none in .*random_search.py: choose from soprc,"
    ):
      random_search.space("own:loss", _RATES)
    with pytest.raises(ValueError, match=r"of --rates: give two, .* twice the other; got 0.01"):
      random_search.space("soprc", (0.01,))


class TestDimension:
  def test_is_drawn_on_a_logarithmic_scale(self):
    one = random_search.Dimension("x", 0.01, 1.0)
    np.testing.assert_allclose([one.value(p) for p in (0.0, 0.25, 0.5)], [0.01, 0.0316228, 0.1])
    assert random_search.Dimension("x", 5, 50, integer=True).value(0.5) == 16

  def test_grows_beyond_the_edge_only(self):
    one = random_search.Dimension("x", 0.01, 1.0)
    assert [one.edge(value) for value in (0.011, 0.1, 0.9)] == ["low", "", "high"]
    assert one.grown(0.1) == one
    assert one.grown(0.011) == one._replace(low=pytest.approx(0.001))
    assert one.grown(0.9) == one._replace(high=pytest.approx(10.0))
    choices = random_search.Dimension("x", choices=("a", "b"))
    assert choices.grown("a") == choices


class TestRun:
  def test_every_dimension_is_stratified_and_equal_for_all_methods(self):
    positions = []
    for method in ("soprc", "triplet"):
      found = random_search.run(random_search.space(method, _RATES), 8, 0, _smooth(0.003))
      assert len(found.trials) == len(found.val) == 8
      rate = found.spaces[0][0]
      shares = [math.log(trial[random_search.RATE] / rate.low) for trial in found.trials[:4]]
      parts = np.floor(4 * np.array(shares) / math.log(rate.high / rate.low))
      assert sorted(parts) == [0, 1, 2, 3]
      assert {trial[random_search.SAMPLER] for trial in found.trials[:4]} == {"random", 2, 4, 8}
      positions.append([trial[random_search.RATE] for trial in found.trials])
    assert positions[0] == positions[1]

  def test_the_second_half_goes_beyond_the_edge_of_the_first(self):
    found = random_search.run(random_search.space("soprc", _RATES), 40, 0, _smooth(1.0))
    assert found.spaces[0][0].high == 0.01
    assert found.spaces[1][0].high == pytest.approx(0.01 * math.sqrt(10))
    assert max(trial[random_search.RATE] for trial in found.trials[20:]) > 0.01
    assert found.best[random_search.RATE] == max(
      trial[random_search.RATE] for trial in found.trials
    )
    assert random_search.RATE in found.edges

  def test_no_edge_no_growth(self):
    found = random_search.run(random_search.space("soprc", _RATES), 12, 0, _smooth(0.003))
    assert found.spaces[1][0] == found.spaces[0][0]
    assert random_search.RATE not in found.edges

  def test_one_that_diverged_is_not_the_best(self):
    val = iter([math.nan, 0.2, 0.1, math.nan])
    found = random_search.run(random_search.space("soprc", _RATES), 4, 0, lambda trial: next(val))
    assert found.best is found.trials[1]


def test_expected_best_of_fewer_trials():
  found = random_search.Found(((),), ({},) * 4, (0.4, 0.1, math.nan, 0.3))
  want = {1: np.mean([0, 0.1, 0.3, 0.4])}
  pairs = [max(a, b) for a in (0, 0.1, 0.3, 0.4) for b in (0, 0.1, 0.3, 0.4)]
  want |= {2: np.mean(pairs)}
  got = found.expected_best()
  assert list(got) == [1, 2, 4]
  assert got[1] == pytest.approx(want[1])
  assert got[2] == pytest.approx(want[2])


def _settings(**changes):
  settings = plans.default_settings()
  settings.update(
    {"methods": ("soprc", "triplet"), "rates": (0.1, 1.0), "seeds": (0, 1), "trials": 4} | changes
  )
  return settings


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"trials": 1}, "compare.trials must be 0 or at least 2; got 1"),
    ({"trials": -1}, "compare.trials"),
    ({"seeds": (0, plans.TUNING_SEED)}, "must not have 20000, the seed of the trials"),
    ({"soprc_with_sgd": True}, "use soprc_with_sgd=False"),
    ({"init_from": "runs/{seed}"}, "compare.init_from must not have {seed}"),
  ],
)
def test_plans_that_make_no_sense_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    plans.read_plan(_settings(**changes))


def test_search_table():
  found = random_search.run(random_search.space("soprc", _RATES), 40, 0, _smooth(1.0))
  row = comparison.Row("soprc", found.best[random_search.RATE], {}, (), found)
  assert row.at_edge()
  lines = tables.search_markdown([row]).splitlines()
  assert lines[0].startswith("| method | searched | best trial | at an edge | expected, 1 trials |")
  assert "| optim.learning_rate 0.001 to 0.0316; data.sampler random, 2, 4, 8; " in lines[2]
  assert f"optim.learning_rate {found.best[random_search.RATE]:.3g}; " in lines[2]
  (entry,) = tables.as_search([row])
  assert len(entry["trials"]) == 40
  assert entry["best"] == found.best
  assert entry["at_edge"] == found.edges
