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
from experiments.simulate import score_memory, simulation
import soprc_jax
from soprc_jax import metrics, surrogates

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


def _batches(population, sizes, *, repetitions=500, visits=30, seed=1):
  return simulation.draw_batches(
    population, sizes, repetitions=repetitions, beta=0.1, visits=visits, seed=seed
  )


class TestBatches:
  def test_v_is_phi_of_the_batch_at_its_first_visit(self, population):
    batches = _batches(population, simulation.Batch(7, 3), repetitions=5, visits=1)
    assert batches.negative.shape == (5, 3)
    np.testing.assert_array_equal(batches.positive, population.positive[batches.rows])
    phi = soprc_jax.interpolate_scores(batches.positive, num_points=100)
    np.testing.assert_allclose(batches.v, phi, rtol=1e-6)

  def test_mean_and_variance_of_v_are_those_of_prop_1(self, population):
    sizes, visits = simulation.Batch(20, 1), 10
    first, last = (
      _batches(population, sizes, repetitions=4000, visits=count).v for count in (1, visits)
    )
    spread = first.std(axis=0)
    assert np.all(abs(last.mean(axis=0) - first.mean(axis=0)) < 6 * spread / np.sqrt(4000))
    q = 0.9**visits
    factor = 0.1 / 1.9 * (1 + q) / (1 - q)  # of the debiased start
    assert last.var(axis=0).sum() / first.var(axis=0).sum() == pytest.approx(factor, rel=0.1)

  def test_the_batch_is_a_tenth_of_its_v(self, population):
    batches = _batches(population, simulation.Batch(1, 1), repetitions=4000)
    slope = np.polyfit(batches.positive[:, 0], batches.v[:, 0], 1)[0]
    assert slope == pytest.approx(0.1 / (1 - 0.9**30), abs=0.03)


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
          population, _batches(population, simulation.batch(size, share)), risk=risk, **options
        )
        for size in (100, 1000)
      )
      for name in ("SOPRC", "all positives"):
        error = large[name].std(ddof=1) / np.sqrt(500)
        # The rest at n = 1000 is the curvature of the risk, of order 1 / n.
        assert abs(large[name].mean()) < _ERRORS * error + 0.01
        assert large[name].std() < 0.5 * small[name].std()
      ap = large["AP"].mean()
      if share == population.prior:
        assert abs(ap) < 0.03
      else:
        assert np.sign(ap) == np.sign(population.prior - share)
        assert abs(ap) > 0.05
        assert abs(ap) > 5 * abs(large["SOPRC"].mean())

  def test_with_one_positive_v_is_biased_and_all_positives_are_not(self, population):
    risk = simulation.surrogate_risk(population, **_TAUS)
    batches = _batches(population, simulation.Batch(1, 1999), visits=100)
    errors = simulation.surrogate_errors(population, batches, risk=risk, **_TAUS)
    own, whole = (errors[name] for name in ("SOPRC", "all positives"))
    assert own.mean() - whole.mean() > 0.05
    assert abs(whole.mean()) < _ERRORS * whole.std(ddof=1) / np.sqrt(500) + 0.002

  def test_the_target_of_surrogates_is_eq_4(self):
    population = simulation.draw_population("binormal", size=2000)
    positive, negative = (np.float64(scores) for scores in population)
    fpr = np.float64(surrogates.one_sided_huber(positive[:, None] - negative, tau=0.5)).mean(axis=1)
    tpr = np.float64(surrogates.one_sided_sigmoid(positive[:, None] - positive, tau=0.01))
    part, rest = 0.9 * fpr, 0.1 * tpr.mean(axis=1)
    expected = np.mean(part / (part + rest))
    assert simulation.surrogate_risk(population, **_TAUS) == pytest.approx(expected, abs=1e-6)

  def test_ap_is_the_batchs_own(self, population):
    # A batch with the whole population's share and size: both estimators are near the risk. For one
    # positive and one negative their values are known.
    risk = simulation.zero_one_risk(population)
    batches = _batches(population, simulation.Batch(1, 1), repetitions=300, seed=2)
    errors = simulation.zero_one_errors(population, batches, risk=risk)
    assert set(np.round(errors["AP"] + risk, 5)) == {0.0, 0.5}  # 1 - AP of two scores
    scores = np.concatenate(population)
    assert float(
      metrics.auprc(scores, (np.arange(len(scores)) < 2000).astype(int))
    ) == pytest.approx(1 - risk)


class TestInterpolation:
  def test_means_of_sorted_draws(self):
    normal = simulation.expected_order_statistics(scipy.stats.norm.ppf, 5)
    # From tables of normal order statistics.
    np.testing.assert_allclose(normal, [-1.16296, -0.49502, 0, 0.49502, 1.16296], atol=1e-5)
    uniform = simulation.expected_order_statistics(lambda shares: shares, 1000)
    np.testing.assert_allclose(uniform, np.arange(1, 1001) / 1001, rtol=1e-9)

  @pytest.mark.parametrize("name", _NAMES)
  def test_rates(self, name):
    counts = np.array([32, 64, 256])
    found = [simulation.interpolation_errors(name, int(n), repetitions=100, seed=0) for n in counts]

    def slope(key):
      errors = [getattr(one, key) for one in found]
      return np.polyfit(np.log(counts), np.log(errors), 1)[0]

    assert -1.2 < slope("of_mean") < -0.9
    assert -0.6 < slope("of_one") < -0.4
    if name == "uniform":  # interpolation by lines is exact, up to float32
      assert max(one.at_quantiles for one in found) < 1e-6
    else:
      assert -2.1 < slope("at_quantiles") < -1.8


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
    "--batch_sizes=100",
  ]
  done = runs.call("experiments.simulate", *flags)
  assert done.returncode == 0, done.stderr
  content = json.loads((tmp_path / "run" / "simulation.json").read_text())
  assert {"binormal", "bibeta", "uniform", "tracking", "score_memory"} == set(content["results"])
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
  assert done.stdout.count("old memory ") == len(score_memory.CASES)
  (tmp_path / "run" / "tracking.png").unlink()
  again = runs.call("experiments.simulate", *flags)
  assert again.stdout == done.stdout
  assert (tmp_path / "run" / "tracking.png").exists()
  other = runs.call("experiments.simulate", *flags, "--seed=1")
  assert other.returncode == 1
  assert "has results of other settings, or of another version: choose another" in other.stderr


def test_results_of_another_version_are_not_called_corrupt(tmp_path):
  older = {"settings": {"population": 100_000}, "results": {"binormal": {}}}
  (tmp_path / "simulation.json").write_text(json.dumps(older))
  done = runs.call("experiments.simulate", f"--workdir={tmp_path}")
  assert done.returncode == 1
  assert "has results of other settings, or of another version: choose another" in done.stderr


def test_a_link_in_the_folder_is_refused(tmp_path):
  (tmp_path / "simulation.json").write_text("{}")
  (tmp_path / "tracking.png").symlink_to(tmp_path / "elsewhere")
  done = runs.call("experiments.simulate", f"--workdir={tmp_path}")
  assert done.returncode == 1
  assert "tracking.png is a link, and a run does not write through links" in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["tracking.png", "stability.json"])
def test_f66_what_it_would_overwrite_is_an_error(tmp_path, name):
  (tmp_path / name).write_text("of another study")
  (tmp_path / "log").write_text("")
  done = runs.call("experiments.simulate", f"--workdir={tmp_path}")
  assert done.returncode == 1
  assert f"holds {name}, which this program would overwrite" in done.stderr
  assert {path.name for path in tmp_path.iterdir()} == {name, "log"}
  assert (tmp_path / name).read_text() == "of another study"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "missing --workdir. For example:\n  soprc simulate --workdir=runs/simulation"),
    (["--batch_sizes=10,x"], "--batch_sizes: invalid literal"),
    (["--batch_sizes=10,10"], "--batch_sizes must be different numbers of at least 100, got 10,10"),
    (["--batch_sizes=1"], "--batch_sizes must be different numbers of at least 100, got 1"),
    (["--repetitions=1"], "--repetitions"),
  ],
)
def test_mistakes(tmp_path, flags, message):
  done = runs.call(
    "experiments.simulate", *([f"--workdir={tmp_path / 'run'}"] if flags else []), *flags
  )
  assert done.returncode == 1
  assert done.stderr.startswith("Error: ")
  assert message in done.stderr
  assert not (tmp_path / "run").exists()
