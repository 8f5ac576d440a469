"""Tests files read back from a folder of results, corrupt or of another shape.

An error names the file and the remedy.
"""

import json

import broken_json
import hypothesis
import numpy as np
import pytest

from experiments.ablate import ablation_report
from experiments.benchmark import __main__ as benchmark
from experiments.binary import binary_config, binary_runs
from experiments.compare import comparison, plans, tables
from experiments.compare import outputs as report
from experiments.compare import step_cost as costs
from experiments.simulate import simulation
from experiments.stability import stability, stability_sweeps
from soprc_jax._internal import stored
from soprc_jax.training import parallel, workdir

# JSON of other shapes.
OTHER = (b"[]", b"{}", b"null", b"3", b'"x"', b"NaN", b'{"val": 3}', b"[[]]")
# A run of the binary study: two evaluations, five test examples.
GOOD = {
  "val": np.zeros((1, 2)),
  "losses": np.zeros((1, 2)),
  "scores": np.zeros((1, 5)),
  "best": np.zeros(1),
}
NAME = plans.RunName("triplet", 0.01, 0)
PLAN = plans.Plan(("triplet",), (0.01,), (0,), "", False, (0.01,))
ROW = comparison.Row("triplet", 0.01, {0.01: 0.5}, (NAME,))


def _in_run(folder, file, content, name=NAME):
  path = folder / name.folder() / file
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)


class TestComparison:
  @pytest.mark.parametrize("content", broken_json.BROKEN + OTHER)
  def test_results_of_a_run(self, tmp_path, content):
    _in_run(tmp_path, "results.json", content)
    with pytest.raises(
      ValueError,
      match=r"triplet-lr0.01-seed0.results.json is corrupt (.|\n)*the same command resumes",
    ):
      comparison.metric(tmp_path, NAME, "test", "recall@1")

  def test_results_of_another_evaluation(self, tmp_path):
    _in_run(tmp_path, "results.json", b'{"val": {"mAUPRC": 0.5}, "test": {"mAUPRC": 0.5}}')
    assert comparison.metric(tmp_path, NAME, "test", "mAUPRC") == 0.5
    with pytest.raises(
      ValueError,
      match=r"triplet-lr0.01-seed0 are corrupt or of another .*: test.recall@1 is missing",
    ):
      comparison.metric(tmp_path, NAME, "test", "recall@1")

  @pytest.mark.parametrize("content", broken_json.BROKEN + OTHER)
  def test_note(self, tmp_path, content):
    (tmp_path / "comparison.json").write_bytes(content)
    with pytest.raises(
      ValueError,
      match=r"comparison.json is corrupt (.|\n)*: restore it from a copy, or choose another",
    ):
      comparison.claim({}, {}, tmp_path)

  @pytest.mark.parametrize("content", [*broken_json.BROKEN, *OTHER, b"no costs", b"too few"])
  def test_costs_are_measured_again(self, tmp_path, monkeypatch, caplog, content):
    found = {"triplet": costs.Cost(0.5, 3)}
    monkeypatch.setattr(costs, "measure", lambda configs: found)
    monkeypatch.setattr(report, "_digest", lambda config: "x")
    key = {"device": parallel.describe(), "configs": {"triplet": "x"}}
    if content in (b"no costs", b"too few"):
      entries = {} if content == b"no costs" else {"triplet": [1]}
      content = json.dumps({"key": key, "costs": entries}).encode()
    (tmp_path / "costs.json").write_bytes(content)
    with caplog.at_level("WARNING"):
      assert report._costs(tmp_path, {"triplet": None}) == found
    assert "costs.json is corrupt" in caplog.text
    caplog.clear()
    assert report._costs(tmp_path, {"triplet": None}) == found
    assert not caplog.text

  @pytest.mark.parametrize(
    "arrays",
    [
      {},
      {"recall": [0.5, 0.1]},
      {"recall": [0.5], "precision": [0.1, 0.2]},
      {"recall": [1], "precision": [1]},
    ],
  )
  def test_pr_curve(self, tmp_path, arrays):
    _in_run(tmp_path, workdir.PR_CURVE, b"")
    np.savez(tmp_path / NAME.folder() / workdir.PR_CURVE, **arrays)
    with pytest.raises(
      ValueError, match=r"pr_curve.npz is corrupt .*: remove .*seed0, and the run is repeated"
    ):
      tables.mean_pr_curve(tmp_path, ROW)

  @pytest.mark.parametrize("content", broken_json.BROKEN + OTHER)
  def test_log(self, tmp_path, content):
    """Checks that an invalid line ends a log. A finished run then has fewer lines than the
    others.
    """
    line = b'{"step": %d, "loss": 0.5, "val_mAUPRC": 0.25}\n'
    other = plans.RunName("triplet", 0.01, 1)
    for name in (NAME, other):
      _in_run(tmp_path, "results.json", b"{}", name)
      _in_run(tmp_path, workdir.METRICS, line % 1 + line % 2, name)
    row = ROW._replace(runs=(NAME, other))
    assert tables.logged(tmp_path, row, "saturated_lists")[1].shape == (2, 0)
    steps, values = tables.mean_convergence(tmp_path, row)
    assert (list(steps), list(values)) == ([1, 2], [0.25, 0.25])
    _in_run(tmp_path, workdir.METRICS, line % 1 + content + b"\n" + line % 2, other)
    with pytest.raises(
      ValueError,
      match=r"seed1.metrics.jsonl has val_mAUPRC at 1 steps, .* Remove .*seed1, and the run is",
    ):
      tables.mean_convergence(tmp_path, row)

  def test_no_run_has_finished(self, tmp_path):
    assert [len(found) for found in tables.logged(tmp_path, ROW, "loss")] == [0, 0]

  def test_log_of_other_values(self, tmp_path):
    _in_run(tmp_path, "results.json", b"{}")
    _in_run(tmp_path, workdir.METRICS, b'{"step": 1, "val_mAUPRC": "high"}\n')
    with pytest.raises(
      ValueError,
      match=r"metrics.jsonl is corrupt \(\[0\].val_mAUPRC must be a number, it is 'high'\)",
    ):
      tables.mean_convergence(tmp_path, ROW)

  @pytest.mark.parametrize("content", broken_json.BROKEN + OTHER)
  def test_ablation(self, tmp_path, content):
    (tmp_path / "ablation.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"ablation.json is corrupt"):
      ablation_report.write(tmp_path, PLAN, {})


class TestStability:
  SETTING = stability.Setting(
    steps=(2,), num_positives=8, num_negatives=8, batch_positives=2, batch_negatives=2
  )
  EFFORT = stability_sweeps.Effort(4, 1, 0)

  def _content(self):
    shapes = ((1, 4), (1, 4), (1, 1), (1, 1), (1, 4), (4,), (4,), (4,))
    values = {
      key: np.zeros(shape).tolist()
      for key, shape in zip(stability.Measured._fields, shapes, strict=True)
    }
    about = {**self.EFFORT._asdict(), "model": stability_sweeps._model()}
    return {"about": about, "measured": {stability_sweeps.name(self.SETTING): values}}

  def _run(self, folder):
    return stability_sweeps.run(
      folder / "stability.json", [self.SETTING], self.EFFORT, told=lambda line: None
    )

  def test_whole(self, tmp_path):
    (tmp_path / "stability.json").write_text(json.dumps(self._content()))
    assert self._run(tmp_path)[stability_sweeps.name(self.SETTING)].gap.shape == (1, 1)

  @pytest.mark.parametrize(
    "content", [*broken_json.BROKEN, *OTHER, b'{"about": {}}', b'{"about": {}, "measured": []}']
  )
  def test_broken(self, tmp_path, content):
    (tmp_path / "stability.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"stability.json is corrupt"):
      self._run(tmp_path)

  @pytest.mark.parametrize(
    ("key", "value"),
    [
      ("gap", []),
      ("gap", [[1, 2]]),
      ("gradient", "x"),
      ("gap", [["x"]]),
      ("epsilon_positive", [[1], [2, 3]]),
    ],
  )
  def test_values_of_another_shape(self, tmp_path, key, value):
    content = self._content()
    content["measured"][stability_sweeps.name(self.SETTING)][key] = value
    (tmp_path / "stability.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"stability.json is corrupt \(.*{key}.*\): remove it"):
      self._run(tmp_path)

  def test_a_file_of_an_older_version(self, tmp_path):
    content = self._content()
    del content["measured"][stability_sweeps.name(self.SETTING)]["batch_gap"]
    (tmp_path / "stability.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"batch_gap.*: remove it, and it is computed again"):
      self._run(tmp_path)


@hypothesis.given(
  content=broken_json.replaced(
    {
      name: {
        "estimation": [
          {"share": 0.5, "batch_size": 9}
          | {
            kind: {one: {"mean": 0.1, "std": 0.1} for one in ("SOPRC", "AP")}
            for kind in ("zero_one", "surrogate")
          }
        ],
        "interpolation": [{"num_positives": 3, "of_mean": 0.5, "of_one": 0.5}],
      }
      for name in simulation.DISTRIBUTIONS
    }
  )
)
def test_simulation(content):
  """Checks results without the part ``tracking``, which are always corrupt. Other errors are
  reported before that one.
  """
  assert stored.problem(content, simulation.RESULTS)


class TestBinary:
  @pytest.fixture
  def config(self):
    config = binary_config.default_config()
    config.train.steps, config.rates = 100, (0.1,)
    return binary_config.resolve(config)

  @pytest.mark.parametrize(
    "changes",
    [
      {},
      {"val": np.zeros((1, 3))},
      {"scores": np.zeros(5)},
      {"best": np.array(["x"])},
      {"best": np.array([{}], object)},
    ],
  )
  def test_run(self, tmp_path, config, changes):
    path = tmp_path / "run.npz"
    np.savez(path, **GOOD | changes)
    if not changes:
      assert binary_runs.load_run(path, config, (5,)).best.shape == (1,)
      return
    with pytest.raises(ValueError, match=r"run.npz(.|\n)*: remove it, and the run is repeated"):
      binary_runs.load_run(path, config, (5,))

  @pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + b"\0" * 99])
  def test_run_that_is_no_archive(self, tmp_path, config, content):
    (tmp_path / "run.npz").write_bytes(content)
    with pytest.raises(
      ValueError, match=r"run.npz is corrupt(.|\n)*: remove it, and the run is repeated"
    ):
      binary_runs.load_run(tmp_path / "run.npz", config, (5,))


@pytest.mark.parametrize(
  "content",
  [content for content in broken_json.BROKEN + OTHER if content not in (b"{}", b'{"val": 3}')],
)
def test_config_of_a_run(tmp_path, content):
  (tmp_path / "config.json").write_bytes(content)
  with pytest.raises(ValueError, match=r"config.json is corrupt"):
    workdir.read_config(tmp_path)


@pytest.mark.parametrize(
  "content", [b'{"date": "2026-01-01", "machine": "another machine"}', *broken_json.BROKEN, *OTHER]
)
def test_figures_of_an_earlier_benchmark_are_kept(tmp_path, content):
  (tmp_path / "benchmark.json").write_bytes(content)
  assert benchmark._told(tmp_path / "benchmark.json") in (
    "the benchmark.json of 2026-01-01, another machine",
    "a benchmark.json that cannot be read",
  )
