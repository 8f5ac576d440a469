"""Tests that the stability study measures Def. 1 and Theorem 1.

Its slopes and verdicts follow the numbers, and its command resumes where it was stopped.
"""

import functools
import itertools
import json

import jax
import numpy as np
from PIL import Image
import pytest
import runs

from experiments import flags as flags_lib
from experiments.stability import (
  stability,
  stability_report,
  stability_slopes,
  stability_sweeps,
  stability_training,
)
from soprc_jax import estimators, interpolation

_SMALL = stability.Setting(
  num_positives=6,
  num_negatives=12,
  batch_positives=2,
  batch_negatives=3,
  steps=(2, 4),
  rate=0.5,
  beta=0.3,
)
_LOSS = stability_training.LOSS


def _model(weights, x):
  """Computes the model again, for one example, in numpy."""
  d, h = stability_training.FEATURES, stability_training.HIDDEN
  hidden = np.tanh(x @ weights[: d * h].reshape(d, h) + weights[d * h : d * h + h])
  return np.tanh(hidden @ weights[d * h + h :])


@functools.cache
def _gradient_fn(algorithm):
  def score(weights, x):
    d, h = stability_training.FEATURES, stability_training.HIDDEN
    hidden = jax.numpy.tanh(x @ weights[: d * h].reshape(d, h) + weights[d * h : d * h + h])
    return jax.numpy.tanh(hidden @ weights[d * h + h :])

  def loss_fn(weights, batch, v):
    positive, negative = (jax.vmap(functools.partial(score, weights))(part) for part in batch)
    if algorithm == "AP loss":
      return estimators.ap_loss(positive, negative, tau1=_LOSS["tau1"], tau2=_LOSS["tau2"])
    self_weight = 1 / 2 if "self weight" in algorithm else 1 / (stability_training.POINTS + 1)
    return estimators.soprc_loss(
      positive, negative, v, tpr_gradient="through" in algorithm, self_weight=self_weight, **_LOSS
    )

  return jax.jit(jax.grad(loss_fn))


def _slow_training(setting, draw, examples):
  """Computes Alg. 1 again: one model, v as a plain array, Eq. 10 with the debiased start. Returns
  the last parameters.
  """
  weights, v, filled = draw.start, np.zeros(stability_training.POINTS), 0.0
  for t in range(setting.steps[-1]):
    batch = [
      np.stack([part[i] for i in at[t]]) for part, at in zip(examples, draw.batches, strict=True)
    ]
    scores = np.array([_model(weights, x) for x in batch[0]], np.float32)
    phi = np.asarray(
      interpolation.interpolate_scores(scores, num_points=stability_training.POINTS, bounds=(-1, 1))
    )
    filled = (1 - setting.beta) * filled + setting.beta
    v = v + setting.beta / filled * (phi - v)
    used = phi if setting.algorithm == "SOPRC without v" else v
    eta = setting.rate / (t + 1) if setting.decays else setting.rate
    gradient = _gradient_fn(setting.algorithm)(weights, batch, used.astype(np.float32))
    weights = weights - np.float32(eta) * np.asarray(gradient)
  return weights


def _slow_risk(weights, examples):
  """Returns Eq. 4 with the surrogates of Eq. 7, pair by pair."""
  positive, negative = (
    np.array([_model(weights, x) for x in part], np.float64) for part in examples
  )
  prior, tau1, tau2 = _LOSS["prior"], _LOSS["tau1"], _LOSS["tau2"]
  self_weight = 1 / (len(positive) + 1)
  total = 0.0
  for h in positive:
    l1 = [1 - 2 * (h - g) / tau1 if h < g else max(1 - (h - g) / tau1, 0) ** 2 for g in negative]
    l2 = [np.tanh(max(other - h, 0) / (2 * tau2)) for other in positive]
    f, t = np.mean(l1), (1 - self_weight) * np.mean(l2) + self_weight
    total += (1 - prior) * f / ((1 - prior) * f + prior * t)
  return total / len(positive)


def _slow_batch_risk(weights, positive, negative):
  """Returns f-hat of Eq. 8 in float64, with v = phi of the batch, linear between midpoints."""
  h, g = (np.array([_model(weights, x) for x in part]) for part in (positive, negative))
  u = np.sort(h)
  ends = np.maximum(2 * u[0] - u[1], -1), np.minimum(2 * u[-1] - u[-2], 1)
  u = np.concatenate([ends[:1], u, ends[1:]])
  m = stability_training.POINTS
  phi = np.interp((np.arange(m) + 0.5) / m * len(h), np.arange(len(h) + 1), (u[1:] + u[:-1]) / 2)
  prior, tau1, tau2 = _LOSS["prior"], _LOSS["tau1"], _LOSS["tau2"]
  margins = h[:, None] - g
  l1 = np.where(margins < 0, 1 - 2 * margins / tau1, np.maximum(1 - margins / tau1, 0) ** 2)
  l2 = np.tanh(np.maximum(phi - h[:, None], 0) / (2 * tau2))
  f, t = (1 - prior) * l1.mean(axis=1), prior * (m * l2.mean(axis=1) + 1) / (m + 1)
  return np.mean(f / (f + t))


def _replaced(examples, other, part, i):
  """Returns S^(i)."""
  changed = [array.copy() for array in examples]
  changed[part][i] = other[part][i]
  return changed


def _measure(seed=0, **change):
  """Measures with one shape for all tests, so that each algorithm compiles once."""
  return stability.measure(_SMALL._replace(**change), repetitions=4, replaced=24, seed=seed)


class TestMeasurement:
  @pytest.mark.parametrize(
    "algorithm",
    [
      pytest.param(name, marks=[] if name in ("SOPRC", "AP loss") else pytest.mark.slow)
      for name in stability.ALGORITHMS
    ],
  )
  def test_equals_a_slow_loop_over_all_examples(self, algorithm):
    # T = 4 draws 8 positives and 12 negatives. With one T and 24 replaced examples, each draw is
    # chosen equally often, so nothing is random.
    setting = _SMALL._replace(algorithm=algorithm, steps=(4,), decays=algorithm == "AP loss")
    found = stability.measure(setting, repetitions=4, replaced=24, seed=3)
    models, sets = [], []
    for r in range(4):
      draw = stability.draw(setting, replaced=24, seed=3, repetition=r)
      weights = _slow_training(setting, draw, draw.data)
      for part, epsilon in (
        enumerate((found.epsilon_positive, found.epsilon_negative)) if r < 2 else ()
      ):
        distances = [
          np.linalg.norm(
            _slow_training(setting, draw, _replaced(draw.data, draw.other, part, i)) - weights
          )
          for i in range(len(draw.data[part]))
        ]
        undrawn = np.setdiff1d(np.arange(len(distances)), draw.batches[part])
        assert not np.any(np.array(distances)[undrawn])
        assert epsilon[0, r] == pytest.approx(np.mean(distances), rel=1e-3)
      models.append(weights)
      sets.append(draw.data)
    risks = np.array([[_slow_risk(model, examples) for examples in sets] for model in models])
    assert found.gap.shape == (1, 1)
    assert found.gap[0, 0] == pytest.approx(
      risks[~np.eye(4, dtype=bool)].mean() - np.diag(risks).mean(), abs=1e-5
    )
    assert found.train_risk[0] == pytest.approx(np.diag(risks), rel=1e-4)
    assert found.start_risk[3] == pytest.approx(_slow_risk(draw.start, draw.data), rel=1e-4)

  def test_risk_of_eq_6_is_the_mean_over_all_batches(self):
    draws = [stability.draw(_SMALL, replaced=1, seed=0, repetition=r) for r in range(4)]
    models, data = (
      np.stack([draw.start for draw in draws]),
      stability._stack([draw.data for draw in draws]),
    )
    pairs = list(
      itertools.product(itertools.combinations(range(6), 2), itertools.combinations(range(12), 3))
    )
    positions = [np.array([pair[part] for pair in pairs], np.int32) for part in range(2)]
    every = stability_training.Examples(*(np.stack([part] * 4) for part in positions))
    whole, batched = stability_training.risks(models, data, every)
    expected = np.mean(
      [
        _slow_batch_risk(models[1], data.positive[2][list(p)], data.negative[2][list(n)])
        for p, n in pairs
      ]
    )
    assert batched[0, 1, 2] == pytest.approx(expected, rel=1e-4)
    assert abs(whole[0, 1, 2] - expected) > 1e-2

  def test_gradient_is_that_of_the_whole_batch_risk(self):
    """Checks the largest norm by numerical derivatives, which know no constants."""
    setting = _SMALL._replace(steps=(4,))
    draws = [stability.draw(setting, replaced=24, seed=0, repetition=r) for r in range(4)]
    inputs = stability._stack([stability._inputs(draw) for draw in draws])
    trained = stability_training.train(inputs, algorithm="SOPRC", beta=0.3, rate=0.5, decays=False)
    norms = []
    for t in range(4):
      weights = np.float64(trained.weights[0, t - 1] if t else draws[0].start)
      batch = inputs.batches.positive[0, t], inputs.batches.negative[0, t]
      change = 1e-5 * np.eye(len(weights))
      norms.append(
        np.linalg.norm(
          [
            (_slow_batch_risk(weights + d, *batch) - _slow_batch_risk(weights - d, *batch)) / 2e-5
            for d in change
          ]
        )
      )
    assert trained.gradient[0] == pytest.approx(max(norms), rel=1e-3)

  def test_one_training_serves_every_t(self):
    both, last = _measure(), _measure(steps=(4,))
    np.testing.assert_array_equal(both.train_risk[1], last.train_risk[0])
    np.testing.assert_array_equal(both.gap[1], last.gap[0])
    assert (both.epsilon_positive[0] < both.epsilon_positive[1]).all()

  def test_same_seed_same_numbers(self):
    for one, same, different in zip(_measure(), _measure(), _measure(seed=1), strict=True):
      np.testing.assert_array_equal(one, same)
      assert not np.array_equal(one, different)

  def test_beta_of_one_is_without_v(self):
    with_v, without, other = _measure(beta=1.0), _measure(algorithm="SOPRC without v"), _measure()
    np.testing.assert_allclose(with_v.epsilon_positive, without.epsilon_positive, rtol=1e-4)
    np.testing.assert_allclose(with_v.train_risk, without.train_risk, rtol=1e-5)
    assert np.abs(with_v.train_risk - other.train_risk).max() > 1e-4

  def test_an_example_has_no_effect_before_it_is_drawn(self):
    setting = _SMALL._replace(steps=(4,))
    draws = [stability.draw(setting, replaced=24, seed=0, repetition=r) for r in range(4)]
    inputs = stability._stack([stability._inputs(draw) for draw in draws])
    trained = stability_training.train(inputs, algorithm="SOPRC", beta=0.3, rate=0.5, decays=False)
    for r, draw in enumerate(draws):
      for part in range(2):
        distances = np.asarray(trained.distances)[r, :, 24 * part : 24 * (part + 1)]
        for k, i in enumerate(draw.replaced[part].positions):
          first = np.argmax((draw.batches[part] == i).any(axis=1))
          assert (distances[:first, k] == 0).all()
        # Not all of them change at their first draw: a negative far below the positives has no
        # gradient.
        assert distances[-1].mean() > 0.01
    # A position that no batch has drawn.
    inputs.replaced.negative[:, -1] = 12
    trained = stability_training.train(inputs, algorithm="SOPRC", beta=0.3, rate=0.5, decays=False)
    assert (np.asarray(trained.distances)[:, :, -1] == 0).all()

  def test_epsilon_shrinks_with_the_data_and_bounds_the_gap(self):
    base = stability.Setting(
      num_negatives=400, batch_negatives=16, steps=(64,), rate=1.0, decays=True, beta=0.25
    )
    settings = [base._replace(num_positives=count) for count in (64, 1024)]
    small, large = (
      stability.measure(setting, repetitions=16, replaced=8, seed=0) for setting in settings
    )
    assert (
      1 / 32 < large.epsilon_positive.mean() / small.epsilon_positive.mean() < 1 / 8
    )  # 1 / 16 by Theorem 2
    assert small.train_risk.mean() < small.start_risk.mean() - 0.02
    for setting, measured in zip(settings, (small, large), strict=True):
      gap, bound = stability_slopes.bound_and_gap(setting, measured, 0)
      assert gap.value - 2 * gap.error < bound

  @pytest.mark.parametrize(
    ("change", "message"),
    [
      ({"algorithm": "SGD"}, "algorithm must be one of SOPRC, SOPRC without v, AP loss"),
      ({"batch_positives": 7}, "batch_positives is 7, more than num_positives = 6"),
      ({"steps": (4, 2)}, r"steps must be ascending numbers of at least 1, got \(4, 2\)"),
      ({"beta": 0.0}, r"beta must lie in \(0, 1\]"),
      ({"repetitions": 6}, "repetitions must be a multiple of 4, got 6"),
      ({"replaced": 0}, "replaced must be an integer, at least 1"),
    ],
  )
  def test_refuses(self, change, message):
    effort = {"repetitions": 4, "replaced": 1, "seed": 0}
    kept = {key: change[key] for key in change if key in effort}
    setting = _SMALL._replace(**{key: change[key] for key in change if key not in effort})
    with pytest.raises(ValueError, match=message):
      stability.measure(setting, **(effort | kept))


class TestDraws:
  def test_batches_are_distinct_and_uniform(self):
    drawn = stability.draw_batches(np.random.default_rng(0), 30_000, 3, 5)
    assert all(len(set(row)) == 3 for row in drawn[:1000])
    sets, counts = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)
    assert len(sets) == 10
    assert np.abs(counts - 3000).max() < 4.5 * np.sqrt(3000 * 0.9)
    np.testing.assert_array_equal(
      np.sort(stability.draw_batches(np.random.default_rng(0), 2, 5, 5), axis=1), [range(5)] * 2
    )

  def test_batches_that_estimate_a_risk_hold_all_examples_equally_often(self):
    drawn = stability.partition(np.random.default_rng(0), 8, 3, 12)
    assert drawn.shape == (8, 3)
    assert (np.bincount(drawn.ravel()) == 2).all()
    # 5 is no multiple of 2: each example is left out in a fifth of the draws.
    counts = sum(
      np.bincount(stability.partition(np.random.default_rng(seed), 3, 2, 5).ravel(), minlength=5)
      for seed in range(2000)
    )
    assert np.abs(counts / 2000 - 6 / 5).max() < 0.1

  def test_weighted_sum_is_unbiased_for_every_t(self):
    # Each drawn example has some distance, and more if it is drawn often.
    batches = stability.draw_batches(np.random.default_rng(1), 32, 2, 40)
    steps = (4, 32)
    expected = [
      np.mean([np.sum(batches[:last] == i) * (1 + i) for i in range(40)]) for last in steps
    ]
    found = []
    for seed in range(400):
      chosen = stability.replace(np.random.default_rng(seed), batches, 40, 5, steps)
      assert np.isin(chosen.positions, batches).all()
      found.append(
        [
          sum(w * np.sum(batches[:last] == i) * (1 + i) for i, w in zip(*chosen, strict=True))
          for last in steps
        ]
      )
    error = np.std(found, axis=0, ddof=1) / np.sqrt(400)
    assert (np.abs(np.mean(found, axis=0) - expected) < 4.5 * error).all()
    assert (error < 0.05 * np.array(expected)).all()


def _made_up(slope, *, noise=0.02, quantity="N+", repetitions=32):
  """Returns a sweep of Theorem 2 with results that follow a power law."""
  (sweep,) = stability_sweeps.plan(["SOPRC"], [quantity])[-1:]
  rng = np.random.default_rng(0)
  results = {}
  for point in sweep.points:
    shape = (len(point.setting.steps), repetitions)
    values = np.array(point.setting.steps)[:, None] if quantity == "T" else point.value
    epsilon = values**slope * np.exp(noise * rng.standard_normal(shape))
    results[stability_sweeps.name(point.setting)] = stability.Measured(
      epsilon,
      epsilon,
      1e-3 * epsilon[:, ::4],
      1e-3 * epsilon[:, ::4],
      np.full(shape, 0.8),
      np.full(repetitions, 0.9),
      np.ones(repetitions),
      np.ones(repetitions),
    )
  return sweep, results


class TestSlopes:
  @pytest.mark.parametrize("slope", [-1.0, 0.4])
  def test_power_law_is_recovered(self, slope):
    found = stability_slopes.slopes(*_made_up(slope), "epsilon_positive")
    for estimate in found:
      assert abs(estimate.value - slope) < 4.5 * estimate.error
      assert 0 < estimate.error < 0.05
    exact = stability_slopes.slopes(*_made_up(slope, noise=0.0), "epsilon_positive").all
    assert exact.value == pytest.approx(slope)

  def test_standard_error_is_that_of_the_slope(self):
    rng = np.random.default_rng(0)
    x = np.array([1, 2, 4, 8])
    found = [
      stability_slopes.jackknife(
        lambda means: stability_slopes.power(x, means), 1 + 0.2 * rng.standard_normal((4, 16))
      )
      for _ in range(300)
    ]
    assert np.mean([one.error for one in found]) == pytest.approx(
      np.std([one.value for one in found]), rel=0.15
    )

  def test_what_blocks_share_cancels(self):
    rng = np.random.default_rng(0)
    luck = np.exp(0.5 * rng.standard_normal(16))
    blocks = np.array([[1.0], [0.5]]) * luck[None]
    found = stability_slopes.jackknife(lambda means: stability_slopes.power((1, 2), means), blocks)
    assert found == pytest.approx((-1, 0), abs=1e-9)

  def test_no_slope_without_positive_means(self):
    sweep, results = _made_up(0.0)
    broken = {key: value._replace(gap=-value.gap) for key, value in results.items()}
    assert stability_slopes.slopes(sweep, broken, "gap") == (None, None)

  def test_verdicts_follow_the_numbers(self):
    for slope, quantity, verdict in (
      (-1.2, "N+", "agrees"),
      (-0.8, "N+", "does not agree"),
      (0.9, "T", "agrees"),
      (1.1, "T", "does not agree"),
    ):
      sweep, results = _made_up(slope, quantity=quantity)
      claims = {claim.paper: claim.verdict for claim in stability_report.claims([sweep], results)}
      wanted = next(paper for paper in claims if paper.startswith(f"Theorem 2: eps+ in {quantity}"))
      assert claims[wanted] == verdict
    sweep, results = _made_up(-1.0)
    assert stability_report.claims([sweep], results)[0].verdict == "agrees"
    large = {
      key: value._replace(batch_gap=1000 * value.gap + 100) for key, value in results.items()
    }
    first = stability_report.claims([sweep], large)[0]
    assert (first.paper[:9], first.verdict) == ("Theorem 1", "does not agree")
    assert "holds in 0 of 11 points" in first.measured

  def test_bound_of_theorem_1(self):
    setting = stability.Setting(batch_positives=3, batch_negatives=5)
    gap = np.array([[0.1, 0.2, 0.3]])
    measured = stability.Measured(
      np.full((1, 12), 0.5),
      np.full((1, 12), 0.1),
      10 * gap,
      gap,
      gap,
      gap[0],
      np.array([1.0, 7.0]),
      np.ones(2),
    )
    found, bound = stability_slopes.bound_and_gap(setting, measured, 0)
    assert bound == pytest.approx(7 * (3 * 0.5 + 5 * 0.1))
    assert found == pytest.approx((0.2, 0.1 / np.sqrt(3)))

  def test_equal_progress_is_not_the_same_rate(self):
    # The AP loss moves four times as far at each learning rate and is otherwise the same.
    sweeps = {
      sweep.algorithm: sweep
      for sweep in stability_sweeps.plan(stability.ALGORITHMS[:3], ["rate"])[:3]
    }
    results = {}
    for algorithm, sweep in sweeps.items():
      for point in sweep.points:
        moved = point.value * (4 if algorithm == "AP loss" else 1)
        shape = (len(point.setting.steps), 8)
        epsilon = np.full(shape, moved**1.5)
        results[stability_sweeps.name(point.setting)] = stability.Measured(
          epsilon,
          epsilon,
          epsilon[:, :2],
          epsilon[:, :2],
          np.full(shape, 0.9 - moved),
          np.full(8, 0.9),
          np.ones(8),
          np.ones(8),
        )
    same = stability_slopes.at_same_rate(
      {name: sweep.points[-1] for name, sweep in sweeps.items()}, results
    )
    assert same["AP loss"].ratios["epsilon_positive"].value == pytest.approx(8)
    equal = stability_slopes.at_equal_fall(sweeps, results, 0.06)
    for measure in stability_slopes.MEASURES:
      assert equal["AP loss"].ratios[measure].value == pytest.approx(1, rel=0.1)
    assert (
      stability_slopes.at_equal_fall(sweeps, results, 0.5)["SOPRC"].values["epsilon_positive"]
      is None
    )
    other = stability_slopes.at_equal_fall(sweeps, results, 0.06, reference="AP loss")
    assert other["AP loss"].ratios["gap"].value == 1
    # The square of epsilon more than doubles from a learning rate to the next.
    steep = {key: value._replace(gap=value.gap**2) for key, value in results.items()}
    found = stability_slopes.at_equal_fall(sweeps, steep, 0.014)["SOPRC"].values
    assert found["gap"] is None
    assert found["epsilon_positive"] is not None

  def test_what_was_not_compared_at_the_same_rate_is_not_told_as_such(self, monkeypatch):
    # Without the sweep over T there is only the comparison at equal decrease.
    monkeypatch.setattr(stability_report, "_FALLS", (0.06,))
    sweeps = stability_sweeps.plan(stability.ALGORITHMS[:3], ["rate"])[:3]
    results = {}
    for sweep in sweeps:
      for point in sweep.points:
        shape = (len(point.setting.steps), 8)
        epsilon = np.full(shape, point.value**2)
        results[stability_sweeps.name(point.setting)] = stability.Measured(
          epsilon,
          epsilon,
          epsilon[:, :2],
          epsilon[:, :2],
          np.full(shape, 0.9 - point.value),
          np.full(8, 0.9),
          np.ones(8),
          np.ones(8),
        )
    told = [
      claim.paper
      for claim in stability_report.claims(sweeps, results)
      if "less stable" in claim.paper
    ]
    assert told
    assert all("where the risk has fallen equally" in paper for paper in told)


class TestSweeps:
  def test_plan(self):
    sweeps = stability_sweeps.plan(stability.ALGORITHMS, stability_sweeps.QUANTITIES)
    for sweep in sweeps:
      values = [point.value for point in sweep.points]
      assert values == sorted(set(values))
      for point in sweep.points:
        stability.check(point.setting, 4, 1)
        if sweep.conditions == stability_sweeps.THEOREM:
          assert point.setting.decays
          assert point.setting.steps[-1] <= point.setting.num_positives
          assert point.setting.beta == 1 / point.setting.batch_positives
    settings = stability_sweeps.settings_of(sweeps)
    assert len({stability_sweeps.name(setting) for setting in settings}) == len(settings)
    with pytest.raises(ValueError, match=r"sweeps must be some of T; .* got none"):
      stability_sweeps.plan(["SOPRC"], [])

  def test_goes_on_with_what_was_measured(self, tmp_path, monkeypatch):
    measured = []
    settings = stability_sweeps.settings_of(stability_sweeps.plan(["SOPRC"], ["beta"]))[:4]

    def measure(setting, **effort):
      measured.append(setting)
      if setting == settings[2] and measured.count(setting) == 1:
        raise ArithmeticError
      values = np.full((len(setting.steps), 8), 1 / 3)
      return stability.Measured(
        values, values, values[:, :2], values[:, :2], values, values[0], values[0], values[0]
      )

    monkeypatch.setattr(stability, "measure", measure)
    path, effort = tmp_path / "new" / "stability.json", stability_sweeps.Effort(8, 1, 0)
    with pytest.raises(ValueError, match="repetitions must be a multiple of 4, got 10"):
      stability_sweeps.run(path, settings, effort._replace(repetitions=10), told=lambda line: None)
    assert not path.parent.exists()
    with pytest.raises(ArithmeticError):
      stability_sweeps.run(path, settings, effort, told=lambda line: None)
    lines = []
    results = stability_sweeps.run(path, settings, effort, told=lines.append)
    assert [measured.count(setting) for setting in settings[:3]] == [1, 1, 2]
    assert lines[0].startswith("4 settings, 2 of them measured before")
    assert len(lines) == 3
    assert set(results) == {stability_sweeps.name(setting) for setting in settings}
    assert results[stability_sweeps.name(settings[0])].gap[-1] == pytest.approx(
      [1 / 3] * 2, rel=1e-5
    )
    with pytest.raises(ValueError, match=r"seed is 0 there, 1 here\): choose another --workdir"):
      stability_sweeps.run(path, settings, effort._replace(seed=1), told=lambda line: None)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"stability.json is corrupt"):
      stability_sweeps.run(path, settings, effort, told=lambda line: None)


def test_command(tmp_path):
  flags = [
    f"--workdir={tmp_path / 'run'}",
    "--repetitions=8",
    "--replaced=1",
    "--algorithms=SOPRC",
    "--sweeps=T",
  ]
  done = runs.call("experiments.stability", *flags)
  assert done.returncode == 0, done.stderr
  assert "2 settings, 0 of them measured before" in done.stderr
  assert "minutes left" in done.stderr
  content = json.loads((tmp_path / "run" / "stability.json").read_text())
  assert len(content["measured"]) == 2
  assert (tmp_path / "run" / "table.md").read_text() in done.stdout
  written = {path.name for path in (tmp_path / "run").iterdir()}
  assert written <= {"stability.json", *flags_lib.WRITES["stability.json"]}
  pictures = sorted(path.name for path in (tmp_path / "run").glob("*.png"))
  assert pictures == ["constant_rate.png", "theorem1.png", "theorem2.png"]
  for name in pictures:
    with Image.open(tmp_path / "run" / name) as picture:
      assert picture.size[0] > 600
