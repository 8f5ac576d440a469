"""Tests ablations: the change of each stage, the remaining runs, and the tables.

The validation split decides. Also covers the direction of the gradient through T.
"""

import fnmatch
import json
import re
import runpy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import runs

from experiments.ablate import ablation, ablation_report, ablation_stages, gradient_through_t
from experiments.ablate.ablation_stages import Option, Stage, Variant
from soprc_jax import soprc_loss
from soprc_jax.metrics import per_query
from soprc_jax.training import config as config_lib
from soprc_jax.training import loop, workdir


def _config(option=ablation.BASE):
  config = runpy.run_path(runs.GLYPHS)["get_config"]("")
  config.update_from_flattened_dict(runs.TINY)
  config.compare.update({"rates": (0.1, 0.2), "sgd_rates": (0.5, 1.0, 2.0)})
  config.update_from_flattened_dict(dict(option.values))
  return config


def _stages():
  return ablation_stages.make(config_lib.resolve(_config()), _config().compare)


def _changes(option):
  """Returns lines that say how an option's config differs from the unchanged config."""
  return config_lib.differences(
    config_lib.resolve(_config(option)).to_dict(), config_lib.resolve(_config()).to_dict()
  )


class TestStages:
  def test_f66_their_names_are_known_without_a_config(self):
    assert tuple(_stages()) == ablation_stages.STAGES

  def test_rows_of_table_2(self):
    rows = [
      config_lib.resolve(_config(variant.options[0])) for variant in _stages()["table2"].variants
    ]
    found = [
      (row.loss.prior.kind, row.loss.v, row.loss.lambda1, row.loss.lambda2, row.optim.name)
      for row in rows
    ]
    assert found == [
      ("batch", "batch", 0.0, 0.0, "sgd"),
      ("constant", "batch", 0.0, 0.0, "sgd"),
      ("frequency", "batch", 0.0, 0.0, "sgd"),
      ("constant", "carried", 0.0, 0.0, "sgd"),
      ("constant", "carried", 1.0, 5.0, "sgd"),
      ("constant", "carried", 1.0, 5.0, "adam"),
    ]
    # Rows 1, 2 and 2t differ in the final prior, not in the initial one.
    assert len({row.loss.prior.start for row in rows}) == 1
    assert [variant.rates for variant in _stages()["table2"].variants] == [(0.5, 1.0, 2.0)] * 5 + [
      (0.1, 0.2)
    ]

  @pytest.mark.parametrize(
    "name", ["batch_size", "tau1", "tau2", "beta", "num_points", "lambda1", "lambda2"]
  )
  def test_a_sweep_changes_one_key_and_has_the_configs_own_value_once(self, name):
    stage = _stages()[name]
    keys = {
      line.split(":")[0] for variant in stage.variants for line in _changes(variant.options[0])
    }
    # The weight of a positive itself, 1 / (M + 1), follows M.
    own = {"loss.self_weight"} if name == "num_points" else set()
    assert keys - own == {f"train.{name}" if name == "batch_size" else f"loss.{name}"}
    own = [variant for variant in stage.variants if not _changes(variant.options[0])]
    assert [variant.label for variant in own] == [stage.reference]
    assert own[0].options[0].name == "soprc"
    values = [variant.value for variant in stage.variants]
    assert values == sorted(set(values))
    assert len(values) >= 3

  def test_a_name_stands_for_the_same_values_in_all_stages_and_no_others(self):
    by_name = {}
    for stage in _stages().values():
      labels = [variant.label for variant in stage.variants]
      assert len(set(labels)) == len(labels)
      assert stage.reference in labels
      names = [option.name for variant in stage.variants for option in variant.options]
      assert len(set(names)) == len(names)
      for variant in stage.variants:
        for option in variant.options:
          assert by_name.setdefault(option.name, dict(option.values)) == dict(option.values)
    changes = {name: tuple(_changes(Option(name, values))) for name, values in by_name.items()}
    rows = {name for name in changes if name.startswith("ablation")}  # with own learning rates
    others = [change for name, change in changes.items() if name not in rows]
    assert len(set(others)) == len(others)

  def test_exact_v_has_the_same_batches_in_every_row(self):
    rows = [variant.options[0] for variant in _stages()["exact_v"].variants]
    assert len(rows) == 6
    changes = [_changes(option) for option in rows]
    own = {"custom", "loss.v"}
    shared = [
      {line for line in lines if not any(key in line.split(": ")[0] for key in own)}
      for lines in changes
    ]
    assert shared[1:] == shared[:-1]
    assert any(line.startswith("train.per_class: ") for line in shared[0])

  def test_equal_effort(self):
    tuned = _stages()["tuned"].variants
    assert [variant.label for variant in tuned] == ["SOPRC", "SmoothAP", "Triplet"]
    assert {(len(variant.options), variant.rates) for variant in tuned} == {(3, (0.1, 0.2))}


# val mAUPRC by (option, learning rate, seed). test is 0.1 above, except for "a" at learning rate 1,
# which would be best on test.
_VAL = {
  ("a", 1.0, 0): 0.3,
  ("a", 2.0, 0): 0.4,
  ("a", 2.0, 1): 0.6,
  ("b", 1.0, 0): 0.2,
  ("b", 2.0, 0): 0.1,
  ("c", 1.0, 0): 0.7,
  ("c", 1.0, 1): 0.5,
}
_STAGE = Stage(
  "first",
  "A stage",
  (
    Variant(
      "tried", (Option("a", {"loss.tau1": 0.1}), Option("b", {"loss.tau1": 0.2})), (1.0, 2.0)
    ),
    Variant("other", (Option("c", {"loss.tau1": 0.3}),), (1.0,), 3.0),
  ),
  "other",
)
_SHARED = Stage(
  "second", "Another", (Variant("again", (Option("c", {"loss.tau1": 0.3}),), (1.0,)),), "again"
)
_PLAN = ablation.Plan((_STAGE, _SHARED), (0, 1), "")


class _Trainer:
  """Replaces `loop.train`: writes the files of a finished run without training."""

  def __init__(self):
    self.made, self.clock = [], 0.0

  def __call__(self, config, folder, *, allow_seen_classes=False):
    workdir.claim(folder, config)
    self.clock += 60.0
    name = (
      {0.1: "a", 0.2: "b", 0.3: "c"}[config.loss.tau1],
      config.optim.learning_rate,
      config.seed,
    )
    self.made.append(name)
    if name == ("b", 2.0, 0):
      raise loop.DivergedError("training broke down at step 3")
    lines = [
      {"step": step, "grad_norm": float(step), "saturated_lists": 1 / step} for step in range(1, 21)
    ]
    lines[-1]["val_mAUPRC"] = _VAL[name]
    (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    test = 0.9 if name == ("a", 1.0, 0) else _VAL[name] + 0.1
    labels = [f"class {i // 4}" for i in range(40)]
    ids = [str(i) for i in range(40)]
    ap = np.full(40, test)
    per_query.write(
      folder / workdir.per_query("test"), per_query.make(ids, labels, ap, np.zeros(40, int))
    )
    workdir.write_results(
      folder, {"val": {"mAUPRC": _VAL[name]}, "test": {"mAUPRC": test, "recall@1": test}}
    )


@pytest.fixture
def trainer(monkeypatch):
  stand_in = _Trainer()
  monkeypatch.setattr(loop, "train", stand_in)
  monkeypatch.setattr(ablation.time, "perf_counter", lambda: stand_in.clock)
  return stand_in


def _run(folder, minutes=1e6):
  return ablation.run(_PLAN, _config, folder, minutes=minutes, seconds=lambda option: 60.0)


class TestRuns:
  def test_val_chooses_option_and_rate_and_shared_runs_are_made_once(self, trainer, tmp_path):
    planned = ablation.planned(_PLAN, tmp_path)
    assert [len(planned[name]) for name in ("first", "second")] == [4 + 1 + 2, 0]
    assert _run(tmp_path)
    assert trainer.made == [
      *[("a", 1.0, 0), ("a", 2.0, 0), ("b", 1.0, 0), ("b", 2.0, 0), ("a", 2.0, 1)],
      *[("c", 1.0, 0), ("c", 1.0, 1)],
    ]
    tried, other = ablation.results(_PLAN, tmp_path)["first"]
    assert (tried.row.method, tried.row.rate, tried.trials, other.row.method) == ("a", 2.0, 4, "c")
    assert all(ended for runs_ in ablation.planned(_PLAN, tmp_path).values() for _, ended in runs_)

  def test_no_run_is_begun_that_would_end_too_late_and_a_later_call_goes_on(
    self, trainer, tmp_path
  ):
    assert not _run(tmp_path, minutes=0.0)
    assert trainer.made == [("a", 1.0, 0)]  # the first run is always made
    assert ablation.results(_PLAN, tmp_path) == {"first": [], "second": []}
    assert not _run(tmp_path, minutes=2.5)  # existing runs take no time
    assert len(trainer.made) == 3
    assert _run(tmp_path)
    assert len(trainer.made) == len(set(trainer.made)) == 7

  def test_runs_of_before_take_no_time(self, trainer, tmp_path):
    _run(tmp_path)
    shutil.rmtree(tmp_path / "a-lr1-seed0")
    assert _run(tmp_path, minutes=0.0)

  def test_another_config_in_the_folder_is_refused(self, trainer, tmp_path):
    ablation.claim(_PLAN, _config, tmp_path)

    def other(option):
      config = _config(option)
      config.loss.tau2 = 0.5
      return config

    with pytest.raises(ValueError, match=r"loss\.tau2: 0\.001 there, 0\.5 here"):
      ablation.claim(_PLAN, other, tmp_path)

  def test_a_batch_with_too_few_classes_is_refused_before_any_run(self, trainer, tmp_path):
    big = Variant("big", (Option("batch_size=9000", {"train.batch_size": 9000}),), (1.0,))
    plan = _PLAN._replace(stages=(_STAGE, Stage("batch_size", "Sizes", (big,), "big")))
    with pytest.raises(
      ValueError,
      match=r"stage batch_size, batch_size=9000: .*train\.batch_size=9000 .*or leave the stage out",
    ):
      ablation.check(plan, _config, tmp_path)

  def test_trainval_is_refused(self, tmp_path):
    def without_val(option):
      config = _config(option)
      config.data.trainval = True
      return config

    with pytest.raises(ValueError, match=r"data\.trainval must be False in an ablation"):
      ablation.check(_PLAN, without_val, tmp_path)


def _table(folder, stage, results):
  gaps = ablation_report.differences(folder, stage, results)
  return ablation_report.table(folder, stage, results, gaps, _PLAN.seeds)


class TestReport:
  def test_tables_and_pictures(self, trainer, tmp_path):
    _run(tmp_path)
    names = ablation_report.write(tmp_path, _PLAN, ablation.results(_PLAN, tmp_path))
    assert names == ["ablation.json", "first.md", "first.png", "second.md", "second.png"]
    _, _, tried, other, *_ = (tmp_path / "first.md").read_text().splitlines()
    cells = [cell.strip() for cell in tried.strip("|").split("|")]
    # Test 0.5 and 0.7 against 0.8 and 0.6: differences -0.3 and 0.1. The gradient norm of 20 steps
    # is the step.
    assert cells == [
      *["tried", "a", "2*", "0.5000", "0.6000 ± 0.1414", "0.6000 ± 0.1414", cells[6]],
      *[cells[7], "1.500, 19.500", "0.750, 0.051"],
    ]
    assert 0.3 < float(cells[7]) < 0.5
    # All classes have the same difference, so only the two seeds matter: Student's t with one
    # degree of freedom, 12.7 times the standard error of 0.2.
    mean, low, high = map(float, re.findall(r"[-+][0-9.]+", cells[6]))
    assert mean == -0.1
    assert (high - low) / 2 == pytest.approx(12.7 * 0.2, rel=0.05)
    assert "These data do not resolve the difference to: " in (tmp_path / "first.md").read_text()
    assert other.startswith("| other | c | 1 | 0.6000 | 0.7000 ± 0.1414 |")
    with Image.open(tmp_path / "first.png") as picture:
      assert picture.size[0] > picture.size[1] > 100
    content = json.loads((tmp_path / "ablation.json").read_text())
    assert content["stages"]["first"]["variants"][0]["test"]["mAUPRC"] == [0.5, 0.7]

  def test_stages_of_earlier_calls_stay_in_the_json(self, trainer, tmp_path):
    _run(tmp_path)
    for stage in _PLAN.stages:
      plan = _PLAN._replace(stages=(stage,))
      ablation_report.write(tmp_path, plan, ablation.results(plan, tmp_path))
    assert list(json.loads((tmp_path / "ablation.json").read_text())["stages"]) == [
      "first",
      "second",
    ]

  def test_what_has_not_finished_is_said(self, trainer, tmp_path):
    _run(tmp_path, minutes=5.5)
    results = ablation.results(_PLAN, tmp_path)
    table = _table(tmp_path, _STAGE, results["first"])
    assert "1 of 2 variants have not finished." in table

  def test_paper_beside_table_2(self, monkeypatch, trainer, tmp_path):
    _run(tmp_path)
    stage = _STAGE._replace(name="table2")
    found = ablation.results(_PLAN._replace(stages=(stage,)), tmp_path)["table2"]
    label = next(iter(ablation_stages.PAPER_TABLE_2))
    found = [found[0]._replace(variant=found[0].variant._replace(label=label))]
    assert "| 34.58 | 66.35 |" in _table(tmp_path, stage, found)
    own = [found[0]._replace(variant=found[0].variant._replace(label="2t: not in the paper"))]
    rows = _table(tmp_path, stage, own).splitlines()
    assert rows[2].endswith("|  |  |")
    assert rows[2].count("|") == rows[0].count("|")


class TestGradientThroughT:
  @pytest.mark.parametrize("tau2", [0.001, 0.1])
  def test_its_part_pushes_no_positive_up_and_that_of_f_none_down(self, tau2):
    rng = np.random.default_rng(0)
    positive, negative, v = (jnp.float32(np.sort(rng.uniform(-1, 1, (6, n)))) for n in (5, 20, 30))

    def gradient(through):
      return jax.grad(
        lambda scores: soprc_loss(scores, negative, v, prior=0.1, tau2=tau2, tpr_gradient=through)
      )(positive)

    without, with_ = np.asarray(gradient(False)), np.asarray(gradient(True))
    assert without.max() <= 0 < -without.min()
    assert (with_ - without).min() >= -1e-6
    assert (with_ - without).max() > 1e-3

  def test_summary(self):
    push = gradient_through_t._summary(
      "start", 0.5, np.array([1.0, 2.0, 2.0]), np.array([1.0, -1.0, 2.0])
    )
    want = ("start", 0.5, 0.0, 1 / 3, 1.0, 5 / 3, 2 / 3)
    np.testing.assert_allclose(push[1:], want[1:])
    assert "| start | 0.5 | 0% | 33% | +1.67 | +0.67 | 1 |" in gradient_through_t.markdown(
      [push], tau2=0.1
    )

  @pytest.mark.slow
  def test_measured_on_a_run(self):
    folder = runs.finished().workdir
    config = runs.tiny_config()
    found = gradient_through_t.measure(config, folder, num_batches=1, priors=(0.5,))
    assert [push.network for push in found] == ["start", "trained"]
    for push in found:
      assert push.down_without == 0 < push.down_with
      assert push.mean_without > push.mean_with


class TestCommand:
  """Tests ``python -m experiments.ablate``."""

  _FLAGS = (
    *runs.tiny_flags("unused", steps=3, warmup_steps=0),
    "--stages=start_of_v,gradient",
    "--seeds=0",
  )

  @pytest.mark.slow
  def test_a_run_its_report_and_what_is_left(self, tmp_path):
    folder = f"--workdir={tmp_path / 'new'}"
    done = runs.call("experiments.ablate", *self._FLAGS, folder, "--minutes=0")
    assert done.returncode == 0, done.stderr
    assert "start_of_v    4 runs, about" in done.stderr
    assert "10 runs left in total" in done.stderr
    assert "9 runs are left" in done.stdout
    assert "| config | soprc | 0.016 |" in done.stdout
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert [
      n for n in written if not any(fnmatch.fnmatch(n, pattern) for pattern in ablation.WRITES)
    ] == []
    assert written >= {
      "soprc-lr0.016-seed0",
      "ablation.json",
      "start_of_v.png",
      "gradient.md",
      "gradient_through_t.md",
    }

  @pytest.mark.parametrize(
    ("flag", "message"),
    [
      ("--stages=beta,beta", "--stages takes one or more of table2, batch_size, tau1, "),
      (
        "--stages=table2 --config.loss.lambda1=3",
        "--config.loss.lambda1 is set by the rows of stage table2: leave it out",
      ),
      ("--config.seed=4", "--config.seed is set by the ablation in every run: use --seeds"),
    ],
  )
  def test_mistakes(self, tmp_path, flag, message):
    folder = f"--workdir={tmp_path / 'new'}"
    done = runs.call("experiments.ablate", *self._FLAGS, folder, *flag.split())
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()
