"""Tests that the simulation study confirms the paper's claims.

The sign of Prop. 2 is the proved one. The command is run too.
"""

import json

import numpy as np
from PIL import Image
import pytest
import runs
import scipy.stats

from experiments import flags as flags_lib
from experiments.simulate import simulation
from soprc_jax import metrics

_NAMES = tuple(simulation.DISTRIBUTIONS)
_SHARES = (0.02, 0.1, 0.2)
_ERRORS = 4.5  # standard errors, as in propositions_test.py
_TAUS = {"tau1": 0.5, "tau2": 0.01}


@pytest.fixture(scope="module", params=_NAMES)
def population(request):
  return simulation.draw_population(request.param, size=20_000)


class TestPopulation:
  @pytest.mark.parametrize("name", _NAMES)
  def test_scores_follow_their_densities(self, name):
    drawn = simulation.draw_population(name, size=20_000)
    assert drawn.prior == 0.1
    distribution = simulation.DISTRIBUTIONS[name]
    x = np.linspace(*distribution.support, 4001)
    for scores, density in zip(drawn, distribution.densities(x), strict=True):
      cumulative = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
      assert cumulative[-1] == pytest.approx(1, abs=1e-3)
      test = scipy.stats.kstest(scores, lambda s, c=cumulative: np.interp(s, x, c))
      assert test.pvalue > 1e-4

  def test_risk_is_one_minus_auprc(self, population):
    scores = np.concatenate(population)
    labels = np.arange(len(scores)) < len(population.positive)
    rank = [np.sum(scores >= score) for score in population.positive]
    precision = [
      np.sum(population.positive >= score) / at
      for score, at in zip(population.positive, rank, strict=True)
    ]
    assert simulation.zero_one_risk(population) == pytest.approx(1 - np.mean(precision), abs=1e-5)
    assert labels.sum() == 2000


class TestEstimation:
  """Tests Prop. 2."""

  @pytest.mark.parametrize(
    ("name", "kind"), [*((name, "zero_one") for name in _NAMES), ("binormal", "surrogate")]
  )
  def test_soprc_goes_to_zero_and_ap_to_the_sign_of_prior_minus_share(self, name, kind):
    population = simulation.draw_population(name, size=20_000)
    if kind == "zero_one":
      risk, function, options = simulation.zero_one_risk(population), simulation.zero_one_errors, {}
    else:
      risk, function, options = (
        simulation.surrogate_risk(population, **_TAUS),
        simulation.surrogate_errors,
        _TAUS,
      )
    for share in _SHARES if kind == "zero_one" else _SHARES[::2]:
      small, large = (
        function(
          population, simulation.batch(size, share), risk=risk, repetitions=500, seed=1, **options
        )
        for size in (100, 1000)
      )
      error = large["SOPRC"].std(ddof=1) / np.sqrt(500)
      # The rest at n = 1000 is the curvature of the risk, of order 1 / n.
      assert abs(large["SOPRC"].mean()) < _ERRORS * error + 0.01
      assert large["SOPRC"].std() < 0.5 * small["SOPRC"].std()
      ap = large["AP"].mean()
      if share == population.prior:
        assert abs(ap) < 0.03
      else:
        assert np.sign(ap) == np.sign(population.prior - share)
        assert abs(ap) > 0.05
        assert abs(ap) > 5 * abs(large["SOPRC"].mean())

  def test_ap_is_the_batchs_own(self, population):
    # A batch with the whole population's share and size: both estimators are near the risk. For one
    # positive and one negative their values are known.
    risk = simulation.zero_one_risk(population)
    errors = simulation.zero_one_errors(
      population, simulation.Batch(1, 1), risk=risk, repetitions=300, seed=2
    )
    assert set(np.round(errors["AP"] + risk, 5)) == {0.0, 0.5}  # 1 - AP of two scores
    scores = np.concatenate(population)
    assert float(
      metrics.auprc(scores, (np.arange(len(scores)) < 2000).astype(int))
    ) == pytest.approx(1 - risk)


class TestInterpolation:
  @pytest.mark.parametrize("name", _NAMES)
  def test_mean_shrinks_as_one_over_n_a_draw_as_its_root(self, name):
    smooth = simulation.draw_population(name, size=1_000_000, prior=0.5)
    counts = np.array([4, 16, 64])
    found = [
      simulation.interpolation_errors(smooth, int(n), repetitions=20_000, seed=0) for n in counts
    ]
    slope = np.polyfit(np.log(counts), np.log([errors.of_mean for errors in found]), 1)[0]
    assert slope < -0.9
    slope = np.polyfit(np.log(counts), np.log([errors.of_one for errors in found]), 1)[0]
    assert -0.6 < slope < -0.4


class TestTracking:
  """Tests Prop. 1 with the tolerances of 2000 chains."""

  @pytest.mark.parametrize("beta", [0.1, 0.5])
  @pytest.mark.parametrize("initial_v", [0.0, None])
  def test_mean_and_variance(self, beta, initial_v):
    population = simulation.draw_population("binormal", size=20_000)
    for steps in (1, 10):
      found = simulation.tracked(
        population, 20, beta=beta, steps=steps, initial_v=initial_v, chains=2000, seed=0
      )
      assert found.bias == pytest.approx(found.expected_bias, abs=0.02)
      assert found.variance == pytest.approx(found.expected_variance, rel=0.1)
    if initial_v is not None:
      assert found.expected_variance < beta / (2 - beta)  # the bound as printed


def test_command(tmp_path):
  flags = [
    f"--workdir={tmp_path / 'run'}",
    "--population=5000",
    "--repetitions=20",
    "--batch_sizes=60",
  ]
  done = runs.call("experiments.simulate", *flags)
  assert done.returncode == 0, done.stderr
  content = json.loads((tmp_path / "run" / "simulation.json").read_text())
  assert {"binormal", "bibeta", "uniform", "tracking"} == set(content["results"])
  assert len(content["results"]["bibeta"]["estimation"]) == 5
  pictures = sorted(path.name for path in (tmp_path / "run").glob("*.png"))
  assert pictures == [
    "densities.png",
    "estimation_surrogate.png",
    "estimation_zero_one.png",
    "interpolation.png",
    "tracking.png",
  ]
  for name in pictures:
    with Image.open(tmp_path / "run" / name) as picture:
      assert picture.size[0] > 1000
  assert {path.name for path in (tmp_path / "run").iterdir()} == {
    "simulation.json",
    *flags_lib.WRITES["simulation.json"],
  }
  assert "SOPRC" in done.stdout
  (tmp_path / "run" / "tracking.png").unlink()
  again = runs.call("experiments.simulate", *flags)
  assert again.stdout == done.stdout
  assert (tmp_path / "run" / "tracking.png").exists()
  other = runs.forked("experiments.simulate", *flags, "--seed=1")
  assert other.returncode == 1
  assert "has results of other settings: choose another --workdir" in other.stderr


def test_a_link_in_the_folder_is_refused(tmp_path):
  (tmp_path / "simulation.json").write_text("{}")
  (tmp_path / "tracking.png").symlink_to(tmp_path / "elsewhere")
  done = runs.forked("experiments.simulate", f"--workdir={tmp_path}")
  assert done.returncode == 1
  assert "tracking.png is a link, and a run does not write through links" in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tracking.png", "stability.json"])
def test_f66_what_it_would_overwrite_is_an_error(tmp_path, name):
  (tmp_path / name).write_text("of another study")
  (tmp_path / "log").write_text("")
  done = runs.forked("experiments.simulate", f"--workdir={tmp_path}")
  assert done.returncode == 1
  assert f"holds {name}, which this program would overwrite" in done.stderr
  assert {path.name for path in tmp_path.iterdir()} == {name, "log"}
  assert (tmp_path / name).read_text() == "of another study"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "missing --workdir. For example:\n  soprc simulate --workdir=runs/simulation"),
    (["--batch_sizes=10,x"], "--batch_sizes: invalid literal"),
    (["--batch_sizes=10,10"], "--batch_sizes must be different numbers of at least 2, got 10,10"),
    (["--batch_sizes=1"], "--batch_sizes must be different numbers of at least 2, got 1"),
    (["--repetitions=1"], "--repetitions"),
  ],
)
def test_mistakes(tmp_path, flags, message):
  done = runs.forked(
    "experiments.simulate", *([f"--workdir={tmp_path / 'run'}"] if flags else []), *flags
  )
  assert done.returncode == 1
  assert done.stderr.startswith("Error: ")
  assert message in done.stderr
  assert not (tmp_path / "run").exists()
