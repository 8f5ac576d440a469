"""Tests the comparison of methods: its plan, runs and table.

The validation split chooses the learning rate. Differences are paired by query and by seed.

Its Markdown is that of _internal/text_table.py.
"""

import fnmatch
import json
import math
import runpy
import shutil

import numpy as np
from PIL import Image
import pytest
import runs
import trees

from experiments.compare import comparison, plans, random_search, step_cost, tables
from soprc_jax import statistics
from soprc_jax.data import datasets
from soprc_jax.metrics import per_query
from soprc_jax.training import classes, loop, methods, plots, workdir
from soprc_jax.training import config as config_lib

_COMPARE = "experiments.compare"


def _settings(**changes):
  settings = plans.default_settings()
  settings.update(
    {"methods": ("soprc", "triplet"), "rates": (0.1, 0.2), "sgd_rates": (1.0,), "seeds": (0, 1)}
    | changes
  )
  return settings


def _make_config(method):
  config = runpy.run_path(runs.GLYPHS)["get_config"]("")
  config.update_from_flattened_dict(runs.TINY)
  methods.choose(config, method)
  return config


def _claim(plan, make_config, folder):
  first = plans.run_config(
    plan, make_config, plans.RunName(plan.methods[0], plan.rates[0], plan.seeds[0])
  )
  comparison.claim(plans.shared(first), plan.starts(), folder)


# val mAUPRC by run. On test, learning rate 0.1 of soprc would look better, but val decides.
_VAL = {
  ("soprc", 0.1, 0): 0.3,
  ("soprc", 0.2, 0): 0.4,
  ("soprc", 0.2, 1): 0.9,
  ("triplet", 0.1, 0): 0.5,
  ("triplet", 0.2, 0): 0.4,
  ("triplet", 0.1, 1): 0.1,
}
_TEST = dict(zip(_VAL, (0.49, 0.40, 0.44, 0.30, 0.31, 0.36)))


def _queries(mean):
  """Returns the results of 80 queries of 20 classes whose mean AP is ``mean``."""
  labels = np.repeat(np.arange(20), 4)
  effects = np.random.default_rng(int(1e4 * mean)).normal(scale=0.02, size=20)
  ap = mean + (effects - effects.mean())[labels]
  return per_query.make([str(i) for i in range(80)], labels.astype(str), ap, np.zeros(80, int))


class _Trainer:
  """Replaces `loop.train`: writes the files of a finished run without training."""

  def __init__(self):
    self.made, self.configs, self.allowed = [], {}, []

  def __call__(self, config, folder, *, allow_seen_classes=False):
    workdir.claim(folder, config)
    self.allowed.append(allow_seen_classes)
    name = (config.loss.name, config.optim.learning_rate, config.seed)
    self.made.append(name)
    self.configs[name] = config
    if _VAL[name] is None:
      raise loop.DivergedError("training broke down at step 3")
    for step in (2, 4):
      with (folder / workdir.METRICS).open("a") as file:
        file.write(json.dumps({"step": step, "val_mAUPRC": _VAL[name] * step / 4}) + "\n")
    thresholds = np.linspace(-1, 1, 5)
    np.savez(
      folder / workdir.PR_CURVE,
      precision=[0.1, 0.2, 0.5, 1, 1],
      recall=[1, 0.8, 0.5, 0.2, 0],
      thresholds=thresholds,
    )
    per_query.write(folder / workdir.per_query("test"), _queries(_TEST[name]))
    test = {"mAUPRC": _TEST[name], "recall@1": 2 * _TEST[name]}
    workdir.write_results(folder, {"val": {"mAUPRC": _VAL[name]}, "test": test})


@pytest.fixture
def trainer(monkeypatch):
  stand_in = _Trainer()
  monkeypatch.setattr(loop, "train", stand_in)
  return stand_in


@pytest.fixture
def rows(trainer, tmp_path):
  return comparison.run_all(plans.read_plan(_settings()), _make_config, tmp_path)


def test_a_run_that_broke_down_goes_on_with_more_patience(tmp_path, monkeypatch):
  name, config = plans.RunName("soprc", 0.2, 0), runs.tiny_config()
  folder = tmp_path / name.folder()
  made = []

  def train(config, folder, **options):
    made.append((config.train.on_nonfinite, config.train.max_skipped))
    workdir.claim(folder, config)
    raise loop.DivergedError("training broke down at step 3")

  monkeypatch.setattr(loop, "train", train)
  for values in ({}, {}, *2 * ({"train.on_nonfinite": "skip", "train.max_skipped": 3},), {}):
    comparison.run_one(runs.tiny_config(**values), tmp_path, name, comparison.Progress(1))
  assert made == [(config.train.on_nonfinite, config.train.max_skipped), ("skip", 3)]
  assert comparison.finished(tmp_path, name)["diverged"] == "training broke down at step 3"
  assert json.loads((folder / "diverged.json").read_text())["patience"] == 3


class TestPlan:
  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"methods": ()}, "compare.methods must have at least one entry"),
      ({"methods": ("soprc", "soprc")}, "none twice"),
      ({"rates": (0.1, 0.0)}, "compare.rates must be numbers > 0"),
      ({"rates": (0.1, math.inf)}, "compare.rates must be numbers > 0"),
      ({"rates": (0.1, 1e39)}, "compare.rates must be numbers > 0"),  # inf in float32
      ({"rates": (0.1, None)}, "compare.rates must be numbers > 0"),
      ({"rates": (0.01, 0.010000001)}, "compare.rates .* none twice"),  # one name for both folders
      ({"methods": (1, 2)}, "compare.methods must be names"),
      (
        {"seeds": (2**32,)},
        "compare.seeds must be integers >= 0",
      ),  # would draw the weights of seed 0
      ({"sgd_rates": (-1.0,)}, "compare.sgd_rates must be numbers > 0"),
      ({"seeds": (-1,)}, "compare.seeds must be integers >= 0"),
      ({"seeds": (1, 1)}, "none twice"),
    ],
  )
  def test_what_does_not_work_is_named(self, changes, message):
    with pytest.raises(ValueError, match=message):
      plans.read_plan(_settings(**changes))

  def test_of_the_config_file_is_the_papers_table_in_sixty_runs(self):
    config = runpy.run_path(runs.GLYPHS)["get_config"]("compare")
    plan = plans.read_plan(config.compare)
    assert len(plan.methods) == 12
    assert plan.methods[0] == "soprc"
    assert len(plan.seeds) >= 3
    assert len(plan.methods) * (len(plan.rates) + len(plan.seeds) - 1) <= 60
    assert plans.describe(plan).startswith("60 runs: 12 methods")

  def test_methods_differ_in_the_loss_alone(self):
    plan = plans.read_plan(_settings(methods=plans.default_settings().methods))
    name = plans.RunName("soprc", 0.1, 1)
    reference = plans.run_config(plan, _make_config, name).to_dict()
    assert reference["optim"]["learning_rate"] == 0.1
    assert reference["seed"] == 1
    for method in plans.default_settings().methods[1:]:
      other = plans.run_config(plan, _make_config, name._replace(method=method)).to_dict()
      lines = config_lib.differences(other, reference)
      assert lines
      assert all(line.startswith("loss.") for line in lines)

  def test_start_by_seed(self):
    plan = plans.read_plan(_settings(init_from="runs/triplet-seed{seed}"))
    config = plans.run_config(plan, _make_config, plans.RunName("xbm", 0.1, 1))
    assert config.model.init_from == "runs/triplet-seed1"

  def test_config_that_chooses_a_method_already_is_refused(self, tmp_path):
    plan = plans.read_plan(_settings())
    with pytest.raises(ValueError, match="already chooses a loss or a preset"):
      comparison.check(plan, lambda method: _make_config("authors"), tmp_path / "new")

  def test_methods_with_another_budget_or_network_are_refused(self, tmp_path):
    def make_config(method):
      config = _make_config(method)
      if method == "triplet":
        config.train.steps = 7
        config.model.width = 9
      return config

    with pytest.raises(
      ValueError, match=r"'triplet' differs .*\n  model.width: .*\n  train.steps: 600 there, 7 here"
    ):
      comparison.check(plans.read_plan(_settings()), make_config, tmp_path / "new")

  @pytest.mark.parametrize(
    "name", ["table.md", "costs.json", "convergence.png", "soprc-lr0.1-seed0", "stability.json"]
  )
  def test_f66_what_it_would_overwrite_is_an_error(self, tmp_path, name):
    (tmp_path / "slurm-1.out").write_text("")
    comparison.check(plans.read_plan(_settings()), _make_config, tmp_path)
    (tmp_path / name).write_text("of something else")
    with pytest.raises(ValueError, match=f"holds {name}, which this program would overwrite"):
      comparison.check(plans.read_plan(_settings()), _make_config, tmp_path)

  def test_f67_missing_data_are_noticed_before_the_folder_is_made(self, tmp_path):
    def make_config(method):
      config = _make_config(method)
      config.data.update({"source": "folder", "root": str(tmp_path / "gone")})
      return config

    with pytest.raises(FileNotFoundError, match=r"data\.root=\S+gone"):
      comparison.check(plans.read_plan(_settings()), make_config, tmp_path / "new")

  def test_folder_of_a_training_run_is_refused(self, tmp_path):
    workdir.claim(tmp_path / "run", config_lib.resolve(_make_config("soprc")))
    with pytest.raises(ValueError, match="is the folder of a training run: choose a new folder"):
      comparison.check(plans.read_plan(_settings()), _make_config, tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: choose a new folder"):
      comparison.check(plans.read_plan(_settings()), _make_config, tmp_path / "file")

  def test_a_start_without_a_network_is_told_before_the_first_run(self, tmp_path):
    plan = plans.read_plan(_settings(init_from=str(tmp_path / "start{seed}")))
    with pytest.raises(FileNotFoundError, match=r"start0'? holds no checkpoint"):
      comparison.check(plan, _make_config, tmp_path / "new")

  def test_sgd_for_soprc_and_adam_for_the_others(self):
    plan = plans.read_plan(_settings(soprc_with_sgd=True, methods=("soprc", "paper", "triplet")))
    used = {
      method: plans.run_config(plan, _make_config, plans.RunName(method, 0.1, 0)).optim.name
      for method in plan.methods
    }
    assert used == {"soprc": "sgd", "paper": "sgd", "triplet": "adam"}
    assert plans.describe(plan).startswith("7 runs")  # 1 + 1 for the two by SGD, 2 + 1


class TestStarts:
  """Tests that all methods start from one model per seed. It has seen no class of val or test."""

  @pytest.fixture
  def start(self, tmp_path):
    copy = tmp_path / "start0"
    shutil.copytree(runs.finished().workdir, copy)
    return copy

  def _check(self, folder, start, **values):
    def make_config(method):
      config = _make_config(method)
      config.update_from_flattened_dict(values)
      return config

    plan = plans.read_plan(_settings(init_from=str(start.parent / "start{seed}"), seeds=(0,)))
    comparison.check(plan, make_config, folder)
    _claim(plan, make_config, folder)

  def test_a_finished_run_is_taken_again_and_again(self, tmp_path, start):
    self._check(tmp_path / "new", start)
    self._check(tmp_path / "new", start)

  def test_a_run_that_has_not_finished_is_refused(self, tmp_path, start):
    (start / workdir.RESULTS).unlink()
    with pytest.raises(ValueError, match="has not finished"):
      self._check(tmp_path / "new", start)

  def test_another_network_in_its_place_is_refused(self, tmp_path, start):
    self._check(tmp_path / "new", start)
    shutil.rmtree(start / "best")  # the newest model is used instead
    with pytest.raises(ValueError, match=r"is not the one that earlier runs .* started from"):
      self._check(tmp_path / "new", start)

  def test_random_weights_behind_networks_are_refused(self, tmp_path, start):
    self._check(tmp_path / "new", start)
    plan = plans.read_plan(_settings(seeds=(0,)))
    with pytest.raises(ValueError, match="started from models: choose another folder"):
      _claim(plan, _make_config, tmp_path / "new")

  def test_other_classes_are_refused(self, tmp_path, start):
    with pytest.raises(ValueError, match=r"of the classes that are tested on were trained on: '\d"):
      self._check(tmp_path / "new", start, **{"data.split_seed": 5})

  def test_another_network_is_refused(self, tmp_path, start):
    with pytest.raises(ValueError, match=r"does not fit model\.\*"):
      self._check(tmp_path / "new", start, **{"model.width": 8})

  def test_another_config_in_the_folder_is_refused(self, tmp_path):
    plan = plans.read_plan(_settings())
    _claim(plan, _make_config, tmp_path / "new")

    def wider(method):
      config = _make_config(method)
      config.model.width = 9
      return config

    with pytest.raises(
      ValueError, match=r"holds a comparison of another config; .*\n  model\.width: 4 there, 9 here"
    ):
      _claim(plan, wider, tmp_path / "new")
    more = plans.read_plan(_settings(methods=("soprc", "xbm"), rates=(0.5,)))
    _claim(more, _make_config, tmp_path / "new")


def test_f40_the_flag_reaches_every_run_and_its_note_the_table(trainer, tmp_path):
  plan = plans.read_plan(_settings())
  rows = comparison.run_all(plan, _make_config, tmp_path, allow_seen_classes=True)
  assert trainer.allowed == [True] * 6
  path = tmp_path / rows[1].runs[1].folder() / workdir.RESULTS
  content = json.loads(path.read_text()) | {
    "seen_classes": {"count": 4, "examples": ["65", "66", "67"]}
  }
  path.write_text(json.dumps(content))
  note = (
    "Not a test of unseen classes: 4 of the classes that are tested on were trained on: '65', "
    "'66', '67' and 1 more."
  )
  assert comparison.seen_classes(tmp_path, rows[1].runs) == note
  content["seen_classes"]["unit"] = "labels"
  path.write_text(json.dumps(content))
  told = comparison.seen_classes(tmp_path, rows[1].runs)
  assert told == note.replace("classes", "labels")
  assert comparison.seen_classes(tmp_path, rows[0].runs) == ""


def test_f44_runs_on_other_data_do_not_enter_a_comparison(tmp_path):
  trees.folder(tmp_path / "data", 12)
  values = {
    "data.source": "folder",
    "data.root": str(tmp_path / "data"),
    "data.train_share": 0.5,
    "data.val_share": 0.25,
  }
  data = runs.tiny_config(**values).data
  folder = tmp_path / "comparison"
  comparison.claim({}, {}, folder, data=data)
  (folder / classes.IMAGES).unlink()  # a kill before it was written
  comparison.claim({}, {}, folder, data=data)
  image = tmp_path / "data" / datasets.make_splits(data)["val"].ids[0]
  image.rename(image.with_name("other.png"))
  with pytest.raises(
    ValueError,
    match=r"(?s)the data are not those .*\n  val: .* 1 added \('.*other.png'\), 1 removed \('",
  ):
    comparison.claim({}, {}, folder, data=data)
  (folder / "comparison.json").write_text('{"shared": {}, "starts": {}, "data": {"train": 3}}')
  with pytest.raises(
    ValueError, match=r"comparison.json is corrupt \(data.train must be an object"
  ):
    comparison.claim({}, {}, folder, data=data)
  (folder / "comparison.json").write_text('{"shared": {}, "starts": {}}')
  with pytest.raises(ValueError, match=r"comparison.json is corrupt \(data is missing"):
    comparison.claim({}, {}, folder, data=data)


class TestMethods:
  def test_choose_changes_the_loss(self):
    config = _make_config("smooth_ap")
    assert config.loss.name == "smooth_ap"
    assert _make_config("paper").loss.preset == "paper"
    assert (_make_config("authors").loss.lambda1, _make_config("authors").loss.lambda2) == (
      1.0,
      5.0,
    )

  def test_every_loss_is_a_method(self):
    assert {method.loss for method in methods.METHODS.values()} == set(methods.objectives.LOSSES)

  def test_a_loss_of_ones_own_is_a_method(self):
    name = "soprc_jax.training.baselines:stateless"
    assert methods.is_method(name)
    assert _make_config(name).loss.name == name
    assert (
      plans.RunName(name, 0.1, 0).folder() == "soprc_jax.training.baselines.stateless-lr0.1-seed0"
    )

  def test_unknown_name_lists_the_right_ones(self):
    assert not methods.is_method("tripelt")
    with pytest.raises(ValueError, match=r"triplet, .*'tripelt'"):
      methods.choose(config_lib.default_config(), "tripelt")


class TestRuns:
  def test_every_rate_at_the_first_seed_and_the_best_at_the_others(self, trainer, rows):
    assert trainer.made == list(_VAL)
    assert [(row.method, row.rate) for row in rows] == [("soprc", 0.2), ("triplet", 0.1)]
    assert rows[0].val == {0.1: 0.3, 0.2: 0.4}
    assert rows[0].runs == (plans.RunName("soprc", 0.2, 0), plans.RunName("soprc", 0.2, 1))

  def test_edge_of_the_grid(self):
    row = comparison.Row("soprc", 0.2, {0.1: 0.1, 0.2: 0.3, 0.4: 0.2}, ())
    assert not row.at_edge()
    assert row._replace(rate=0.4).at_edge()
    assert row._replace(rate=0.1).at_edge()

  def test_same_call_goes_on_where_it_stopped(self, trainer, rows, tmp_path):
    del rows
    made = len(trainer.made)
    (tmp_path / "soprc-lr0.2-seed1" / "results.json").unlink()
    comparison.run_all(plans.read_plan(_settings()), _make_config, tmp_path)
    assert trainer.made[made:] == [("soprc", 0.2, 1)]

  def test_finished_run_of_another_config_is_refused(self, trainer, rows, tmp_path):
    del rows
    made = len(trainer.made)

    def changed(method):
      config = _make_config(method)
      config.loss.tau1 = 0.7
      return config

    with pytest.raises(ValueError, match=r"loss\.tau1: 0\.03 there, 0\.7 here"):
      comparison.run_all(plans.read_plan(_settings()), changed, tmp_path)
    assert len(trainer.made) == made

  def test_a_rate_at_which_training_breaks_down_is_not_picked_and_not_repeated(
    self, trainer, tmp_path, monkeypatch
  ):
    monkeypatch.setitem(_VAL, ("soprc", 0.2, 0), None)
    monkeypatch.setitem(_VAL, ("soprc", 0.1, 1), 0.35)
    monkeypatch.setitem(_TEST, ("soprc", 0.1, 1), 0.5)
    plan = plans.read_plan(_settings())
    row = comparison.run_all(plan, _make_config, tmp_path)[0]
    assert row.rate == 0.1
    assert math.isnan(row.val[0.2])
    made = len(trainer.made)
    comparison.run_all(plan, _make_config, tmp_path)
    assert len(trainer.made) == made

  def test_unfinished_run_has_no_metrics(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"soprc-lr0\.4-seed0 has not finished"):
      comparison.metric(tmp_path, plans.RunName("soprc", 0.4, 0), "val", "mAUPRC")


class TestTrials:
  """Runs the random search with a stand-in for training."""

  @pytest.fixture
  def made(self, monkeypatch):
    """Returns the configs of the runs that were made; val is best near the learning rate 0.3."""
    made = {}

    def train(config, folder, *, allow_seen_classes=False):
      workdir.claim(folder, config)
      assert folder not in made
      made[folder] = config
      value = 0.5 - 0.1 * abs(math.log(config.optim.learning_rate / 0.3))
      per_query.write(folder / workdir.per_query("test"), _queries(round(value, 4)))
      metrics = {"mAUPRC": value, "recall@1": value}
      workdir.write_results(folder, {"val": metrics, "test": metrics})

    monkeypatch.setattr(loop, "train", train)
    return made

  def test_tuning_seeds_and_splits_are_never_reported(self, made, tmp_path):
    plan = plans.read_plan(_settings(rates=(0.1, 1.0), trials=5))
    rows = comparison.run_all(plan, _make_config, tmp_path)
    assert len(made) == plans.num_runs(plan) == 2 * (5 + 2)
    tuned = [config for config in made.values() if config.seed == plans.TUNING_SEED]
    assert len(tuned) == 10
    assert {config.data.split_seed for config in tuned} == {plans.TUNING_SEED}
    for row in rows:
      assert [run.seed for run in row.runs] == [0, 1]
      best = row.trials.best
      for run in row.runs:
        config = made[tmp_path / run.folder()]
        assert config.data.split_seed == 0
        assert config.optim.learning_rate == row.rate == best[random_search.RATE]
        group = best[random_search.SAMPLER]
        assert config.data.sampler == ("random" if group == "random" else "confusable")
        assert group in ("random", config.data.confusable.group)
    assert made[tmp_path / rows[0].runs[0].folder()].loss.tau1 == rows[0].trials.best["loss.tau1"]

  def test_resumes(self, made, tmp_path):
    plan = plans.read_plan(_settings(rates=(0.1, 1.0), trials=4))
    rows = comparison.run_all(plan, _make_config, tmp_path)
    assert comparison.num_finished(tmp_path, plan, "soprc") == 6
    removed = tmp_path / rows[0].runs[1].folder()
    shutil.rmtree(removed)
    del made[removed]
    again = comparison.run_all(plan, _make_config, tmp_path)
    assert [row.rate for row in again] == [row.rate for row in rows]
    assert len(made) == 12

  def test_the_split_of_the_trials_cannot_be_reported(self, tmp_path):
    plan = plans.read_plan(_settings(trials=4))

    def make_config(method):
      config = _make_config(method)
      config.data.split_seed = plans.TUNING_SEED
      return config

    with pytest.raises(ValueError, match=r"data.split_seed=20000 is the split of the trials"):
      comparison.check(plan, make_config, tmp_path)

    def with_few_neighbours(method):
      config = _make_config(method)
      config.data.confusable.pool = 3
      return config

    with pytest.raises(ValueError, match=r"groups of 8 classes, and data.confusable.pool=3 has"):
      comparison.check(plan, with_few_neighbours, tmp_path)
    with pytest.raises(ValueError, match="method 'optax:adam' has none"):
      comparison.check(plan._replace(methods=("soprc", "optax:adam")), _make_config, tmp_path)


class TestTable:
  @pytest.fixture
  def summaries(self, rows, tmp_path):
    cost = {"soprc": step_cost.Cost(0.123, 5 * 2**20), "triplet": step_cost.Cost(0.1, 2**20)}
    return [
      tables.summarize(tmp_path, row, ["mAUPRC", "recall@1"], cost[row.method], first=rows[0])
      for row in rows
    ]

  def test_summary_has_the_test_values_of_all_seeds(self, summaries):
    np.testing.assert_allclose(summaries[0].values["mAUPRC"], [0.40, 0.44])
    np.testing.assert_allclose(summaries[0].values["recall@1"], [0.80, 0.88])

  def test_difference_is_paired_by_query_and_seed(self, summaries):
    assert summaries[0].behind is None
    ap = [[_queries(value).ap for value in values] for values in ((0.40, 0.44), (0.30, 0.36))]
    want = statistics.crossed_difference(*ap, _queries(0.4).label)
    assert summaries[1].behind[:3] == want
    assert want.mean == pytest.approx(0.09)

  def test_a_run_without_results_of_each_query_is_named(self, rows, tmp_path):
    path = tmp_path / rows[1].runs[0].folder() / "per_query.npz"
    path.unlink()
    with pytest.raises(ValueError, match=r"per_query.npz is missing or corrupt: remove .*results"):
      tables.difference_of_rows(tmp_path, *rows)
    other = _queries(0.3)
    per_query.write(path, other._replace(id=other.id[::-1]))
    with pytest.raises(ValueError, match="cannot be compared query by query: test image 0 is"):
      tables.difference_of_rows(tmp_path, *rows)

  def test_of_the_binary_study_is_paired_by_seed(self, summaries):
    mean, error = tables.paired_difference(*(summary.values["mAUPRC"] for summary in summaries))
    gaps = np.array([0.10, 0.08])
    np.testing.assert_allclose(mean, gaps.mean())
    np.testing.assert_allclose(error, gaps.std(ddof=1) / np.sqrt(2))

  def test_markdown(self, summaries):
    lines = tables.markdown(summaries, "one device").splitlines()
    assert lines[2] == "| SOPRC | 0.2* | 0.4200 ± 0.0283 | 0.8400 ± 0.0566 |  |  | 123 | 5 |"
    gap = summaries[1].behind
    cells = f"{gap} | {gap.probability:.3f}"
    assert lines[3] == f"| Triplet | 0.1* | 0.3300 ± 0.0424 | 0.6600 ± 0.0849 | {cells} | 100 | 1 |"
    assert cells.startswith(f"+0.0900 [{gap.low:+.4f}, {gap.high:+.4f}] | ")
    assert len({line.count("|") for line in lines[:4]}) == 1

  def test_names_what_the_data_do_not_resolve(self, summaries):
    wide = summaries[1].behind._replace(low=-0.01)
    told = "These data do not resolve the difference to: Triplet."
    table = tables.markdown([summaries[0], summaries[1]._replace(behind=wide)], "x")
    assert told in table.splitlines()
    narrow = wide._replace(low=0.01)
    assert told not in tables.markdown([summaries[0], summaries[1]._replace(behind=narrow)], "x")

  def test_markdown_names_what_broke_down(self, summaries):
    row = summaries[1].row._replace(val={0.1: 0.5, 0.2: math.nan})
    values = {"mAUPRC": np.array([0.3, math.nan]), "recall@1": np.array([0.3, math.nan])}
    broken = [summaries[0], summaries[1]._replace(row=row, values=values)]
    table = tables.markdown(broken, "x")
    assert (
      "not finite; left out of the curves): Triplet at 0.2, seed 0, Triplet at 0.1, seed 1."
      in table
    )
    content = json.loads(json.dumps(tables.as_json(broken, {}), allow_nan=False))
    assert content["methods"][1]["test"]["mAUPRC"] == {
      "mean": None,
      "std": None,
      "values": [0.3, None],
    }
    assert content["methods"][1]["val_by_rate"] == {"0.1": 0.5, "0.2": None}

  def test_one_seed_has_no_deviation(self, summaries, tmp_path):
    runs_of = [summary.row._replace(runs=summary.row.runs[:1]) for summary in summaries]
    behind = tables.difference_of_rows(tmp_path, *runs_of)
    assert behind.mean == pytest.approx(0.1)
    one = [
      summary._replace(
        row=summary.row._replace(runs=summary.row.runs[:1]),
        values={"mAUPRC": summary.values["mAUPRC"][:1]},
        behind=summary.behind and behind,
      )
      for summary in summaries
    ]
    cells = f"{behind} | {behind.probability:.3f}"
    assert f"| Triplet | 0.1* | 0.3000 | {cells} | 100 | 1 |" in tables.markdown(one, "x")

  def test_json(self, summaries):
    content = json.loads(json.dumps(tables.as_json(summaries, {"device": "x"})))
    assert content["device"] == "x"
    entry = content["methods"][0]
    assert entry["test"]["mAUPRC"]["values"] == [0.40, 0.44]
    np.testing.assert_allclose(entry["test"]["mAUPRC"]["mean"], 0.42)
    assert entry["val_by_rate"] == {"0.1": 0.3, "0.2": 0.4}
    assert entry["peak_memory_bytes"] == 5 * 2**20
    assert entry["runs"] == ["soprc-lr0.2-seed0", "soprc-lr0.2-seed1"]
    assert entry["first_minus_this"] is None
    gap = content["methods"][1]["first_minus_this"]
    assert per_query.Difference(**gap) == summaries[1].behind

  def test_mean_curves(self, rows, tmp_path):
    recall, precision = tables.mean_pr_curve(tmp_path, rows[0], points=6)
    np.testing.assert_allclose(recall, [0, 0.2, 0.4, 0.6, 0.8, 1])
    np.testing.assert_allclose(precision, [1, 1, 0.5 + 0.5 / 3, 0.4, 0.2, 0.1])
    steps, val = tables.mean_convergence(tmp_path, rows[0])
    np.testing.assert_allclose(steps, [2, 4])
    np.testing.assert_allclose(val, [0.65 / 2, 0.65])

  def test_curves_of_runs_that_broke_down_are_left_out(self, rows, tmp_path):
    row = rows[0]._replace(runs=(rows[0].runs[1], plans.RunName("soprc", 9.0, 0)))
    np.testing.assert_allclose(tables.mean_convergence(tmp_path, row)[1], [0.45, 0.9])
    nothing = row._replace(runs=row.runs[1:])
    assert np.isnan(tables.mean_pr_curve(tmp_path, nothing)[1]).all()
    curves = {
      "a": tables.mean_convergence(tmp_path, row),
      "b": tables.mean_convergence(tmp_path, nothing),
    }
    plots.plot_curves(tmp_path / "curves.png", curves, title="", axes=("x", "y"))
    with Image.open(tmp_path / "curves.png") as picture:
      assert min(picture.size) > 300


class TestCosts:
  def test_memory_has_what_the_loss_carries(self):
    def config(size):
      config = _make_config("xbm")
      config.loss.xbm.memory_size = size
      config.data.sampler = "confusable"  # without the classes that a run would find
      return config_lib.resolve(config)

    found = step_cost.measure({"small": config(64), "large": config(4096)}, rounds=1)
    assert all(cost.step_seconds > 0 for cost in found.values())
    # At least the embeddings: 16 float32 per slot, plus label and mask.
    assert found["large"].peak_bytes - found["small"].peak_bytes >= (4096 - 64) * (16 * 4 + 4 + 1)


def _flags(folder, **values):
  flags = runs.tiny_flags(folder, steps=4, warmup_steps=0, **{"eval.every": 2} | values)
  return [*flags, "--methods=soprc,xbm", "--rates=0.01,1e30", "--seeds=0"]


class TestCommand:
  def test_from_runs_to_table(self, tmp_path):
    done = runs.call(_COMPARE, *_flags(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert "4 runs: 2 methods (soprc, xbm), learning rates 0.01, 1e+30 at seed 0" in done.stderr
    assert "4/4 xbm-lr1e+30-seed0: training diverged" in done.stderr
    table = (tmp_path / "runs" / "table.md").read_text()
    assert table in done.stdout
    assert f"\nReport: soprc report --workdir={tmp_path / 'runs'}\n" in done.stdout
    assert "4 steps of 16 images, adam, from random weights; trained on 1 x cpu, jax " in table
    results = json.loads((tmp_path / "runs" / "soprc-lr0.01-seed0" / "results.json").read_text())
    assert (
      f"| SOPRC | 0.01* | {results['test']['mAUPRC']:.4f} | {results['test']['recall@1']:.4f} |"
      in table
    )
    content = json.loads((tmp_path / "runs" / "table.json").read_text())
    assert [entry["method"] for entry in content["methods"]] == ["soprc", "xbm"]
    for name in ("pr_curves.png", "convergence.png"):
      with Image.open(tmp_path / "runs" / name) as picture:
        assert min(picture.size) > 300
    written = [path.name for path in (tmp_path / "runs").iterdir()]
    assert [
      n for n in written if not any(fnmatch.fnmatch(n, pattern) for pattern in comparison.WRITES)
    ] == []
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*")}
    (tmp_path / "runs" / "costs.json").write_text('{"key"')  # a corrupt cache is made again
    again = runs.call(_COMPARE, *_flags(tmp_path / "runs"))
    assert again.returncode == 0, again.stderr
    assert "Starting" not in again.stderr
    assert "costs.json is corrupt" in again.stderr
    assert [line.split("|")[:6] for line in again.stdout.splitlines()[:5]] == [
      line.split("|")[:6] for line in done.stdout.splitlines()[:5]
    ]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*")} == before

  def test_the_plan_alone(self, tmp_path):
    done = runs.call(_COMPARE, *_flags(tmp_path / "new"), "--list")
    assert done.returncode == 0, done.stderr
    assert (
      "| soprc | 0.01, 1e+30 | 2 | 0 |\n| xbm | 0.01, 1e+30 | 2 | 0 |\n4 runs are left, about "
      in done.stdout
    )
    assert done.stdout.endswith("Nothing was started.\n")
    assert not (tmp_path / "new").exists()

  @pytest.mark.parametrize(
    ("flag", "message"),
    [
      ("--config.optim.learning_rate=0.1", "use --rates"),
      ("--config.seed=3", "use --seeds"),
      ("--methods=soprc,tripelt", "triplet"),
      ("--methods=soprc,no_such_module:make", "cannot be imported: ModuleNotFoundError"),
      ("--methods=soprc,soprc_jax.training.baselines:stateless", "does not work as a loss"),
      ("--rates=0.1,fast", "--rates: could not convert string to float: 'fast'"),
      ("--rates=0", "compare.rates must be numbers > 0"),
      ("--seeds=0.5", "--seeds"),
      ("--init_from=nowhere/seed{seed}", "holds no checkpoint"),
    ],
  )
  def test_mistakes_end_with_a_message(self, tmp_path, flag, message):
    done = runs.call(_COMPARE, *_flags(tmp_path / "new"), flag)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("Error: ")
    assert message in done.stderr
    assert not (tmp_path / "new").exists()
