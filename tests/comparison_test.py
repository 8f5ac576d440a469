"""Comparison of methods: the rate is picked on val, differences are paired by seed."""

import json

import numpy as np
import pytest

from soprc_jax.training import comparison


def _finish(folder, method, rate, seed, *, val, test):
  run = folder / comparison.RunName(method, rate, seed).folder()
  run.mkdir()
  results = {"val": {"mAUPRC": val}, "test": {"mAUPRC": test, "recall@1": 2 * test}}
  (run / "results.json").write_text(json.dumps(results))


@pytest.fixture
def runs_of_two_methods(tmp_path):
  # On test, rate 0.1 of "a" would look better: val decides.
  _finish(tmp_path, "a", 0.1, 0, val=0.3, test=0.49)
  _finish(tmp_path, "a", 0.2, 0, val=0.4, test=0.40)
  _finish(tmp_path, "a", 0.2, 1, val=0.9, test=0.44)
  _finish(tmp_path, "b", 0.1, 0, val=0.5, test=0.30)
  _finish(tmp_path, "b", 0.2, 0, val=0.4, test=0.31)
  _finish(tmp_path, "b", 0.1, 1, val=0.1, test=0.36)
  return tmp_path


def test_rate_is_picked_on_val_at_the_first_seed(runs_of_two_methods):
  assert comparison.best_rate(runs_of_two_methods, "a", [0.1, 0.2], 0) == 0.2
  assert comparison.best_rate(runs_of_two_methods, "b", [0.1, 0.2], 0) == 0.1


def test_rate_of_an_unfinished_grid_is_refused(runs_of_two_methods):
  with pytest.raises(FileNotFoundError, match=r"a-lr0\.4-seed0 has not finished"):
    comparison.best_rate(runs_of_two_methods, "a", [0.1, 0.4], 0)


def test_summary_has_the_test_values_of_all_seeds(runs_of_two_methods):
  summary = comparison.summarize(runs_of_two_methods, "a", 0.2, [0, 1], ["mAUPRC", "recall@1"])
  np.testing.assert_allclose(summary.values["mAUPRC"], [0.40, 0.44])
  np.testing.assert_allclose(summary.values["recall@1"], [0.80, 0.88])


def test_difference_is_paired_by_seed(runs_of_two_methods):
  a = comparison.summarize(runs_of_two_methods, "a", 0.2, [0, 1], ["mAUPRC"])
  b = comparison.summarize(runs_of_two_methods, "b", 0.1, [0, 1], ["mAUPRC"])
  mean, error = comparison.paired_difference(a, b, "mAUPRC")
  gaps = np.array([0.10, 0.08])
  np.testing.assert_allclose(mean, gaps.mean())
  np.testing.assert_allclose(error, gaps.std(ddof=1) / np.sqrt(2))


def test_table_names_methods_rates_and_differences(runs_of_two_methods):
  summaries = [
    comparison.summarize(runs_of_two_methods, method, rate, [0, 1], ["mAUPRC"]) for method, rate in (("a", 0.2), ("b", 0.1))
  ]
  table = comparison.markdown(summaries, 2)
  assert "| a | 0.2 | 0.4200 ± 0.0283 |" in table
  assert "| b | 0.1 | 0.3300 ± 0.0424 |" in table
  assert "a minus b" in table
  assert "+0.0900 ± 0.0100" in table
