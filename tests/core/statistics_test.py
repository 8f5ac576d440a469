"""Intervals over classes and seeds: coverage, pairing, determinism, and bad input."""

import time

import interval_coverage
import numpy as np
import pytest

from soprc_jax import statistics

_CLASSES = np.repeat(np.arange(60), 5)


def _queries(seed=0, shape=(300,)):
  rng = np.random.default_rng(seed)
  return rng.uniform(size=shape) * 0.2 + 0.8 * rng.uniform(size=60)[_CLASSES]


class TestCoverage:
  """The share of intervals that cover the true mean; 3 standard errors around 0.93 to 0.97."""

  @pytest.mark.parametrize("kind", ["normal", "AP", "recall@1"])
  def test_one_model(self, kind):
    share = interval_coverage.one_model(kind, 50, 400, num_resamples=400)
    assert 0.92 <= share <= 0.98

  def test_many_classes(self):
    assert 0.92 <= interval_coverage.one_model("AP", 2000, 300, num_resamples=300) <= 0.98

  @pytest.mark.parametrize("effects", [(0.3, 0.0, 0.0), (0.1, 1.0, 1.0)])
  def test_three_seeds(self, effects):
    assert 0.91 <= interval_coverage.two_models(3, 50, effects, 300, num_resamples=1000) <= 0.985

  def test_of_queries_alone_would_not_do(self):
    # The check can fail: with each query its own cluster the interval is much too narrow.
    values = _queries()
    right = statistics.cluster_interval(values, _CLASSES)
    wrong = statistics.cluster_interval(values, np.arange(300))
    assert right.high - right.low > 1.8 * (wrong.high - wrong.low)

  def test_confidence_is_the_width(self):
    narrow, wide = (
      statistics.cluster_interval(_queries(), _CLASSES, confidence=level) for level in (0.5, 0.99)
    )
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    assert wide.high - wide.low == pytest.approx(3.8 * (narrow.high - narrow.low), rel=0.2)


class TestDifferences:
  def test_pairing_removes_what_two_models_share(self):
    a = _queries()
    b = a - 0.01 - 0.01 * np.random.default_rng(1).uniform(size=300)
    paired = statistics.cluster_difference(a, b, _CLASSES)
    assert paired.excludes_zero
    assert paired.low < 0.015 < paired.high
    alone = statistics.cluster_interval(a, _CLASSES)
    assert alone.high - alone.low > 20 * (paired.high - paired.low)

  def test_is_the_interval_of_the_difference(self):
    a, b = _queries(), _queries(1)
    assert statistics.cluster_difference(a, b, _CLASSES, seed=3) == statistics.cluster_interval(
      a - b, _CLASSES, seed=3
    )

  def test_seeds_widen_it(self):
    rng = np.random.default_rng(0)
    a = _queries(shape=(3, 300)) + np.array([0.0, 0.1, -0.1])[:, None]
    b = a - 0.02 + 0.05 * rng.normal(size=(3, 1))
    crossed = statistics.crossed_difference(a, b, _CLASSES)
    means = statistics.cluster_difference(a.mean(0), b.mean(0), _CLASSES)
    assert crossed.mean == pytest.approx(means.mean)
    assert crossed.high - crossed.low > 10 * (means.high - means.low)

  def test_equal_seeds_change_nothing(self):
    a, b = (np.tile(_queries(seed), (3, 1)) for seed in (0, 1))
    crossed = statistics.crossed_difference(a, b, _CLASSES)
    np.testing.assert_allclose(
      crossed, statistics.cluster_difference(a[0], b[0], _CLASSES), atol=1e-9
    )

  def test_probability_agrees_with_the_interval(self):
    a = _queries()
    noise = np.random.default_rng(1).normal(size=60)[_CLASSES] * 0.05
    noise -= noise.mean()
    probabilities = []
    for gain in (-0.02, 0.0, 0.02):
      b = a - noise - gain
      found = statistics.cluster_difference(a, b, _CLASSES)
      share = statistics.probability_ahead(a, b, _CLASSES)
      assert (found.low > 0) == (share > 0.975)
      assert (found.high < 0) == (share < 0.025)
      probabilities.append(share)
    assert probabilities[0] < 0.025
    assert probabilities[2] > 0.975
    assert probabilities[1] == pytest.approx(0.5, abs=0.06)
    assert statistics.probability_ahead(a, a, _CLASSES) == 0.5
    seeds = np.stack([a, a])
    assert statistics.probability_ahead(seeds, seeds - 0.1, _CLASSES) == 1.0


class TestProperties:
  def test_mean_is_over_queries(self):
    assert statistics.cluster_interval([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]).mean == 0.75

  def test_names_order_and_shifts_do_not_matter(self):
    values = _queries()
    first = statistics.cluster_interval(values, _CLASSES)
    names = np.array([f"class {label:02d}" for label in _CLASSES])
    assert statistics.cluster_interval(values, names) == first
    assert statistics.cluster_interval(values, list(names.astype(object))) == first
    order = np.random.default_rng(0).permutation(300)
    np.testing.assert_allclose(
      statistics.cluster_interval(values[order], _CLASSES[order]), first, rtol=1e-12
    )
    np.testing.assert_allclose(
      statistics.cluster_interval(7 - 2 * values, _CLASSES)[0], 7 - 2 * first.mean, rtol=1e-12
    )

  def test_one_seed_one_interval(self):
    values = _queries()
    same = [statistics.cluster_interval(values, _CLASSES, seed=seed) for seed in (0, 0, 1)]
    assert same[0] == same[1] != same[2]
    assert same[2].low == pytest.approx(same[0].low, abs=0.02)

  @pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1e-9, 12345.678])
  def test_equal_values_have_no_width(self, value):
    found = statistics.cluster_interval(np.full(300, value), _CLASSES)
    assert found == (pytest.approx(value), found.mean, found.mean)

  def test_one_hard_class_among_perfect_ones(self):
    # Most resamples without the hard class have no spread at all.
    values = np.ones(300)
    values[:5] = 0.0
    found = statistics.cluster_interval(values, _CLASSES)
    assert 0.85 < found.low < found.mean < found.high <= 1.02

  def test_two_clusters(self):
    found = statistics.cluster_interval([0.2, 0.4], [0, 1])
    assert found.low < 0.2
    assert found.high > 0.4
    assert np.isfinite(found).all()

  def test_hundred_thousand_queries_take_less_than_two_seconds(self):
    rng = np.random.default_rng(0)
    values, classes = rng.uniform(size=100_000), rng.integers(10_000, size=100_000)
    start = time.process_time()
    statistics.cluster_interval(values, classes)
    assert time.process_time() - start < 2

  def test_prints(self):
    assert str(statistics.Interval(0.5, 0.25, 0.75)) == "0.5000 [0.2500, 0.7500]"


class TestBadInput:
  @pytest.mark.parametrize(
    ("values", "clusters", "options", "error", "message"),
    [
      ([0.5, np.nan], [0, 1], {}, ValueError, r"values\[1\] is nan: leave out"),
      ([0.5, np.inf], [0, 1], {}, ValueError, r"values\[1\] is inf"),
      ([], [], {}, ValueError, r"values must be \[n\] with n >= 1"),
      ([[0.5, 0.1]], [0, 1], {}, ValueError, r"values must be \[n\]"),
      (["a", "b"], [0, 1], {}, TypeError, "values must be real numbers"),
      ([0.5, 0.1], [0], {}, ValueError, "one entry for each of the 2 queries"),
      ([0.5, 0.1], [0.0, 1.0], {}, TypeError, "clusters must be integers or text"),
      ([0.5, 0.1], [None, "a"], {}, TypeError, "clusters must be integers or text"),
      ([0.5, 0.1], [4, 4], {}, ValueError, "at least two clusters, got 1"),
      ([0.5, 0.1], [0, 1], {"confidence": 1.0}, ValueError, r"confidence must be in \(0, 1\)"),
      ([0.5, 0.1], [0, 1], {"confidence": 95}, ValueError, "got 95"),
      ([0.5, 0.1], [0, 1], {"num_resamples": 10}, ValueError, "num_resamples .* at least 100"),
      ([0.5, 0.1], [0, 1], {"seed": -1}, ValueError, "seed must be an integer"),
    ],
  )
  def test_one_model(self, values, clusters, options, error, message):
    with pytest.raises(error, match=message):
      statistics.cluster_interval(values, clusters, **options)

  def test_two_models(self):
    with pytest.raises(ValueError, match=r"same queries, got \(2,\) and \(3,\)"):
      statistics.cluster_difference([0.1, 0.2], [0.1, 0.2, 0.3], [0, 1])
    with pytest.raises(ValueError, match=r"b\[0\] is nan"):
      statistics.cluster_difference([0.1, 0.2], [np.nan, 0.2], [0, 1])
    with pytest.raises(ValueError, match="two seeds or more"):
      statistics.crossed_difference([[0.1, 0.2]], [[0.1, 0.2]], [0, 1])
    with pytest.raises(ValueError, match=r"a must be \[seeds, n\]"):
      statistics.crossed_difference([0.1, 0.2], [0.1, 0.2], [0, 1])


class TestScales:
  @pytest.mark.parametrize("scale", [2.0**-600, 2.0**500, 2.0**1000])
  def test_a_power_of_two_scales_the_interval(self, scale):
    values, classes = np.random.default_rng(0).uniform(size=60), np.arange(60) // 3
    one, other = (statistics.cluster_interval(v, classes) for v in (values, scale * values))
    assert [limit * scale for limit in one] == [*other]
    assert statistics.probability_ahead(scale * values, 0 * values, classes) == 1

  def test_a_common_offset_moves_the_interval(self):
    values, classes = np.random.default_rng(0).uniform(size=60), np.arange(60) // 3
    one, other = (statistics.cluster_interval(v, classes) for v in (values, values + 1e9))
    np.testing.assert_allclose(np.subtract(other, 1e9), one, atol=1e-6)

  def test_an_overflow_of_the_difference_is_named(self):
    values = np.array([1.7e308, 1.7e308])
    with pytest.raises(ValueError, match="a - b overflows"):
      statistics.cluster_difference(values, -values, [0, 1])


def test_more_confidence_needs_more_resamples():
  with pytest.raises(ValueError, match=r"confidence=0.9999 needs num_resamples of 40,00\d or more"):
    statistics.cluster_interval([0.0, 1.0], [0, 1], confidence=0.9999)


def test_masked_arrays_are_refused():
  masked = np.ma.array([0.0, 1.0, 2.0], mask=[True, False, False])
  with pytest.raises(TypeError, match="values is a masked array"):
    statistics.cluster_interval(masked, [0, 1, 2])
  with pytest.raises(TypeError, match="clusters is a masked array"):
    statistics.cluster_interval([0.0, 1.0, 2.0], np.ma.array([0, 1, 2], mask=[1, 0, 0]))
