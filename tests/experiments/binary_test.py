"""Tests imbalanced classification: SOPRC learns, and its v is that of the tracker.

All methods share what they should, and the command keeps its results.
"""

import functools
import json
import pathlib
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
import runs

from experiments import flags as flags_lib
from experiments.binary import __main__ as train_binary
from experiments.binary import (
  binary,
  binary_config,
  binary_losses,
  binary_peer,
  binary_report,
  binary_runs,
)
from experiments.compare import plans
import soprc_jax
from soprc_jax.data import tabular
from soprc_jax.models import mlp
from soprc_jax.training.loss_protocol import Inputs, Setting

CONFIG = str(runs.ROOT / "configs" / "imbalanced.py")
_SMALL = {
  "seeds": (0, 1),
  "rates": (0.003, 0.03),
  "data.share": 0.1,
  "data.batch_size": 40,
  "model.widths": (8,),
  "loss.tau1": 0.3,
  "loss.num_points": 20,
  "loss.prior_start": 0.0,
  "train.steps": 60,
  "eval.every": 20,
}


def _config(**values):
  config = binary_config.default_config()
  config.update_from_flattened_dict(_SMALL | values)
  return binary_config.resolve(config)


@pytest.fixture(scope="module")
def table():
  """Returns a table in which two of five features separate the classes, not perfectly."""
  rng = np.random.default_rng(0)
  labels = np.arange(1200) < 240
  numbers = rng.normal(size=(1200, 5)).astype(np.float32)
  numbers[labels, :2] += 1.2
  return tabular.Table(numbers, tuple("abcde"), {}, labels)


@pytest.fixture(scope="module")
def task(table):
  return binary.prepare(_config(), table, 0)


@pytest.fixture(scope="module")
def found(task):
  """Trains every method once."""
  config = _config()
  return {name: binary.make_trainer(config, name, task)(task) for name in config.methods}


class TestTraining:
  def test_every_method_beats_chance(self, task, found):
    chance = task.splits.test.labels.mean()
    for name, result in found.items():
      values = [float(binary.auprc(scores, task.splits.test.labels)) for scores in result.scores]
      assert max(values) > 2.5 * chance, name
      assert result.val.shape == (2, 3)
      np.testing.assert_array_equal(result.best, result.val.max(axis=1))
      assert np.isfinite(result.losses).all()

  def test_rates_side_by_side_equal_single_steps(self, task, found):
    config = _config()
    stepper = binary.make_stepper(config, "soprc", task, config.rates[1])
    state = binary.first_state(config, "soprc", task)
    for chunk, expected in zip(task.batches, found["soprc"].val[1], strict=True):
      state = stepper(state, chunk)
      logits = mlp.MLP((8,)).apply(state.params, task.splits.val.features)
      assert float(binary.auprc(logits, task.splits.val.labels)) == pytest.approx(
        expected, abs=1e-3
      )

  def test_v_has_the_length_of_the_positives_and_is_what_the_tracker_makes_of_their_scores(
    self, task
  ):
    config = _config(**{"loss.num_points": 0})
    length = int(task.splits.train.labels.sum())
    stepper = binary.make_stepper(config, "soprc", task, 0.01)
    state = binary.first_state(config, "soprc", task)
    tracker = soprc_jax.score_ema(1, length, 0.1, bounds=(0.0, 1.0))
    expected = tracker.init(None)

    @jax.jit
    def follow(params, expected, features):
      scores = jax.nn.sigmoid(mlp.MLP((8,)).apply(params, features))
      return tracker.update(
        None, expected, positive_scores=scores[None], list_ids=jnp.zeros(1, int)
      )[1]

    for rows in task.batches[0][:4]:
      positives = rows[task.splits.train.labels[rows] > 0]
      assert len(positives) == 10  # a quarter of the batch
      expected = follow(state.params, expected, task.splits.train.features[positives])
      state = stepper(state, rows[None])
    held = soprc_jax.tracking.find_state(state.opt_state)
    assert held.v.shape == (1, length)
    np.testing.assert_allclose(held.v, expected.v, atol=1e-5)
    np.testing.assert_allclose(held.weight, expected.weight, rtol=1e-6)

  def test_first_weights_and_batches_are_the_seeds(self, table, task):
    again, other = (binary.prepare(_config(), table, seed) for seed in (0, 1))
    assert np.array_equal(again.batches, task.batches)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, task.params))
    assert not np.array_equal(other.batches, task.batches)
    assert not np.array_equal(other.splits.val.rows, task.splits.val.rows)
    assert not jax.tree.all(jax.tree.map(np.array_equal, other.params, task.params))

  def test_test_examples_are_the_split_seeds_alone(self, table, task):
    held_out = task.splits.test.rows
    for seed in range(1, 6):
      splits = binary.prepare(_config(), table, seed).splits
      assert np.array_equal(splits.test.rows, held_out)
      assert not np.isin(np.concatenate([splits.train.rows, splits.val.rows]), held_out).any()
    other = binary.prepare(_config(**{"data.split_seed": 1}), table, 0).splits
    assert not np.array_equal(other.test.rows, held_out)

  def test_logits_that_are_not_finite_are_no_result(self, task):
    logits = jnp.zeros(len(task.splits.val.labels)).at[3].set(jnp.nan)
    assert np.isnan(binary.auprc(logits, task.splits.val.labels))
    assert plans.best({0.1: np.nan, 0.2: 0.3, 0.4: 0.3}) == 0.2


class TestLosses:
  _LABELS = jnp.array([1, 1, 0, 0, 0, 0, 0, 0])
  _LOGITS = jnp.array([0.3, -1.0, 0.5, -0.2, -0.4, -1.5, 0.0, -2.0])
  _SETTING = Setting(np.array([1470, 30]), num_steps=10, max_positives=2, axis_name=None)

  def _compute(self, name, steps=(0,), setting=_SETTING, **values):
    """Returns the loss of the batch at each step."""
    loss = binary_losses.make(name, _config(**values).loss, setting)
    state = (loss.tracker.init(None),)

    @jax.jit
    def compute(step):
      return loss.compute(Inputs(self._LOGITS, self._LABELS, jnp.ones(8, bool), step, state)).loss

    return np.array([compute(step) for step in steps]).squeeze()

  def test_soprc_is_the_librarys_at_the_true_prior(self):
    @functools.partial(jax.jit, static_argnames="link")
    def expected(prior, link="share"):
      scores = jax.nn.sigmoid(self._LOGITS)
      v = soprc_jax.interpolate_scores(scores[:2], num_points=20, bounds=(0.0, 1.0))
      return soprc_jax.soprc_loss(scores[:2], scores[2:], v, prior=prior, tau1=0.3, link=link)

    assert self._compute("soprc") == pytest.approx(float(expected(0.02)), abs=1e-5)
    log = self._compute("soprc", **{"loss.link": "log"})
    assert log == pytest.approx(float(expected(0.02, link="log")), rel=1e-5)
    annealed = self._compute("soprc", (0, 5, 10), **{"loss.prior_start": 0.5})
    np.testing.assert_allclose(annealed, [expected(prior) for prior in (0.5, 0.1, 0.02)], atol=1e-5)

  def test_only_what_may_be_positive_is_looked_at_as_one(self):
    # Uniform sampling: any example may be positive, with the same loss.
    anywhere = self._SETTING._replace(max_positives=8)
    for name in ("soprc", "auroc"):
      assert self._compute(name, setting=anywhere) == pytest.approx(
        float(self._compute(name)), rel=1e-6
      )

  def test_weighted_cross_entropy_at_the_batchs_share_is_cross_entropy(self):
    plain = float(self._compute("cross_entropy"))
    assert self._compute(
      "weighted_cross_entropy", **{"loss.weighted_cross_entropy.share": 0.25}
    ) == pytest.approx(plain)
    values = jax.nn.softplus(jnp.where(self._LABELS > 0, -self._LOGITS, self._LOGITS))
    expected = 0.02 * values[:2].mean() + 0.98 * values[2:].mean()
    assert self._compute(
      "weighted_cross_entropy", **{"loss.weighted_cross_entropy.share": 0.0}
    ) == pytest.approx(float(expected))
    assert self._compute("focal", **{"loss.focal.gamma": 0.0}) == pytest.approx(plain)

  def test_auroc_is_the_mean_over_pairs(self):
    margins = np.subtract.outer(np.asarray(self._LOGITS[:2]), np.asarray(self._LOGITS[2:]))
    assert self._compute("auroc") == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-5)
    scores = np.asarray(jax.nn.sigmoid(self._LOGITS))
    expected = soprc_jax.one_sided_huber(np.subtract.outer(scores[:2], scores[2:]), tau=0.2).mean()
    values = {"loss.auroc.surrogate": "huber", "loss.auroc.tau": 0.2}
    assert self._compute("auroc", **values) == pytest.approx(float(expected), rel=1e-5)

  def test_scores_keep_the_order(self):
    for kind, (low, high) in (("none", (-9, 9)), ("sigmoid", (0, 1)), ("tanh", (-1, 1))):
      scores = binary_losses.bound(self._LOGITS, kind)
      assert np.array_equal(np.argsort(scores), np.argsort(self._LOGITS))
      assert low < scores.min()
      assert scores.max() < high


class TestReport:
  def test_auroc_and_curve_agree_with_scikit_learn(self):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels = np.arange(200) < 20
    scores = np.round(rng.normal(size=200) + labels, 1)
    assert binary_report.auroc(scores, labels) == pytest.approx(
      sklearn_metrics.roc_auc_score(labels, scores)
    )
    precision, recall, _ = sklearn_metrics.precision_recall_curve(labels, scores)
    found = binary_report.pr_curve(scores, labels)
    np.testing.assert_allclose(found[0], recall[:-1][::-1])
    np.testing.assert_allclose(found[1], precision[:-1][::-1])

  def test_weighted_auprc_is_that_of_repeated_examples(self):
    rng = np.random.default_rng(0)
    labels = (np.arange(60) < 12).astype(np.int32)
    scores = np.round(rng.normal(size=60) + labels, 1).astype(np.float32)  # with ties
    weights = np.stack([np.ones(60, np.int32), rng.integers(0, 3, 60)])
    expected = [float(binary.auprc(np.repeat(scores, w), np.repeat(labels, w))) for w in weights]
    np.testing.assert_allclose(
      binary_report.weighted_auprc(scores, labels, weights), expected, rtol=1e-5
    )

  def test_error_over_test_examples_is_that_of_new_test_sets(self):
    rng = np.random.default_rng(0)
    labels = np.arange(600) < 100

    def scores(methods=2, seeds=3):
      """Returns scores whose noise is mostly the example's own."""
      shared = rng.normal(size=600)
      return shared + 0.3 * rng.normal(size=(methods, seeds, 600)) + [[[2.0]], [[1.8]]] * labels

    def row(method, scores):
      none = np.ones(len(scores))
      return binary_runs.Row(method, 0.1, {}, none, none, scores, np.stack([labels] * len(scores)))

    def difference(scores):
      ones = np.ones((1, 600))
      found = [[binary_report.weighted_auprc(s, labels, ones) for s in own] for own in scores]
      return np.mean(found[0]) - np.mean(found[1])

    expected = np.std([difference(scores()) for _ in range(200)])
    found = [
      binary_report.example_errors([row("soprc", own[0]), row("ap", own[1])])
      for own in (scores() for _ in range(10))
    ]
    assert np.mean([one["ap"] for one in found]) == pytest.approx(expected, rel=0.2)
    assert found[0]["soprc"] == 0


class TestConfig:
  def test_arguments(self):
    file = runpy.run_path(CONFIG)
    for name in file["ARGUMENTS"]:
      binary_config.resolve(file["get_config"](name))
    assert file["get_config"]() == file["get_config"]("digits")
    with pytest.raises(
      ValueError, match="arguments are digits, breast_cancer, flights, smoke; got 'mnist'"
    ):
      file["get_config"]("mnist")

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"loss.tau1": 0.0}, "loss.tau1 must be > 0; got 0.0"),
      ({"loss.beta": 1.5}, "loss.beta must be > 0 and <= 1; got 1.5"),
      ({"loss.scores": "softmax"}, "loss.scores must be one of none, sigmoid, tanh; got 'softmax'"),
      (
        {"data.name": "iris"},
        "data.name must be one of digits, breast_cancer, flights, yeast, glyph_labels, "
        "glyph_classes, character_labels, character_classes; got 'iris'",
      ),
      ({"methods": ("soprc", "svm")}, "methods must be different names of soprc, cross_entropy"),
      (
        {"rates": (0.1, 0.1)},
        "rates must be different numbers from 1e-12 to 1e+12, at least one; got (0.1, 0.1)",
      ),
      ({"seeds": ()}, "seeds must be different integers >= 0, at least one; got ()"),
      ({"data.val_share": 0.7}, "data.val_share + data.test_share must be below 1"),
      ({"train.steps": 50}, "train.steps must be a multiple of eval.every=20, e.g. 40; got 50"),
      ({"model.widths": (0,)}, "model.widths must be integers >= 1 and <= 16384; got (0,)"),
      ({"optim.name": "lion"}, "optim.name must be one of sgd, adam; got 'lion'"),
      ({"optim.weight_decay": float("nan")}, "optim.weight_decay must be >= 0; got nan"),
    ],
  )
  def test_wrong_values_name_the_key_and_what_is_allowed(self, values, message):
    with pytest.raises(ValueError, match="the config does not work") as raised:
      _config(**values)
    assert message in str(raised.value)

  def test_the_config_of_another_program(self):
    config = runpy.run_path(runs.GLYPHS)["get_config"]()
    with pytest.raises(ValueError, match=r"soprc train-binary takes configs/imbalanced.py"):
      binary_config.resolve(config)


class TestPeer:
  def test_an_interpreter_without_libauc(self, tmp_path):
    with pytest.raises(
      ValueError,
      match=r"cannot be started \(No such file or directory\): give the python of a separate",
    ):
      binary_peer.versions(str(tmp_path / "python"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named libauc' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(
      ValueError, match=r"cannot import libauc \(ModuleNotFoundError: No module named libauc\)"
    ):
      binary_peer.versions(str(broken))
    with pytest.raises(ChildProcessError, match="failed: ModuleNotFoundError"):
      binary_peer.train(_config(), _tiny_task(), str(broken))

  def test_the_script_trains_the_same_network_on_the_same_batches(self, monkeypatch, task, found):
    """Checks the script with cross entropy and torch's Adam instead of libauc's loss and optimizer.
    It must give our own run.
    """
    torch = pytest.importorskip("torch")
    config = _config()
    _stub_libauc(monkeypatch, torch)
    monkeypatch.setattr(sys, "path", [str(runs.ROOT / "experiments" / "binary"), *sys.path])
    monkeypatch.setattr(binary_peer.subprocess, "run", _in_this_process)
    threads = torch.get_num_threads()
    result, seconds = binary_peer.train(config, task, "python")
    torch.set_num_threads(threads)
    np.testing.assert_allclose(result.losses, found["cross_entropy"].losses, rtol=1e-3)
    np.testing.assert_allclose(result.val, found["cross_entropy"].val, atol=5e-3)
    assert np.corrcoef(result.scores[0], found["cross_entropy"].scores[0])[0, 1] > 0.999
    assert seconds > 0


def _tiny_task():
  rng = np.random.default_rng(0)
  table = tabular.Table(
    rng.normal(size=(400, 2)).astype(np.float32), ("a", "b"), {}, np.arange(400) < 80
  )
  return binary.prepare(_config(), table, 0)


def _stub_libauc(monkeypatch, torch):
  """Installs modules with libauc's names. The loss is cross entropy of probabilities, the optimizer
  Adam.
  """

  class Loss:
    def __init__(self, data_len, gamma, margin, device):
      assert (data_len, gamma, margin) == (43, 0.9, 1.0)
      self.data_len = data_len

    def __call__(self, probabilities, labels, index):
      assert labels.sum() == 10
      assert index.max() < self.data_len
      return torch.nn.functional.binary_cross_entropy(probabilities[:, 0], labels)

  def optimizer(params, *, lr, mode, weight_decay, **options):
    assert mode == "adam"
    return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay)

  modules = {
    "libauc": {},
    "libauc.losses": {},
    "libauc.losses.auc": {"APLoss": Loss, "mAPLoss": None},
    "libauc.optimizers": {"SOAP": optimizer},
  }
  for name, content in modules.items():
    module = types.ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def _in_this_process(command, **options):
  assert pathlib.Path(command[1]) == binary_peer.SCRIPT
  runpy.run_path(command[1])["main"](*command[2:])
  return types.SimpleNamespace(returncode=0, stderr="")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Returns the command's folder, with two methods on breast cancer, and its output."""
  folder = tmp_path_factory.mktemp("binary") / "run"
  flags = [
    f"--config={CONFIG}:breast_cancer,smoke",
    f"--workdir={folder}",
    "--config.methods=('soprc','focal')",
  ]
  done = runs.call("experiments.train_binary", *flags)
  assert done.returncode == 0, done.stderr
  return folder, done


class TestStudy:
  def _study_config(self, methods=("soprc", "focal"), **values):
    config = runpy.run_path(CONFIG)["get_config"]("breast_cancer,smoke")
    config.update_from_flattened_dict({"methods": methods} | values)
    return config

  def test_command_writes_results_table_and_pictures(self, finished):
    folder, done = finished
    results = json.loads((folder / "results.json").read_text())
    assert [entry["method"] for entry in results["methods"]] == ["soprc", "focal"]
    for entry in results["methods"]:
      assert len(entry["test"]["AUPRC"]) == len(entry["val"]) == 2
      assert all(0 < value <= 1 for key in ("AUPRC", "AUROC") for value in entry["test"][key])
      assert entry["learning_rate"] in (0.003, 0.01)
      assert entry["step_seconds"] > 0
    written = {path.name for path in folder.iterdir()}
    assert written <= {"config.json", *flags_lib.WRITES["config.json"]}
    table = (folder / "table.md").read_text()
    assert table in done.stdout
    assert "| SOPRC |" in table
    assert (
      "breast_cancer: train 150 (7 positive), val 75 (4 positive), test 151 (8 positive), 30 "
      "features." in table
    )
    for name in ("pr_curves.png", "convergence.png"):
      with Image.open(folder / name) as picture:
        assert picture.size[0] > 500

  def test_goes_on_where_it_stopped(self, finished, monkeypatch):
    folder, _ = finished
    kept = folder / "runs" / "soprc-seed0.npz"
    content, table = kept.read_bytes(), (folder / "table.md").read_text()
    (folder / "runs" / "focal-seed1.npz").unlink()
    trained = []
    make = binary.make_trainer

    def spy(config, name, task):
      trained.append(name)
      return make(config, name, task)

    monkeypatch.setattr(binary, "make_trainer", spy)
    study = train_binary.prepare(self._study_config(), folder, "")
    assert _without_times(train_binary.make(study, folder, "")) == _without_times(table)
    assert trained == ["focal"]
    assert kept.read_bytes() == content
    assert not list((folder / "runs").glob(".*"))

  def test_takes_further_methods_and_refuses_another_config(self, finished):
    folder, _ = finished
    study = train_binary.prepare(
      self._study_config(("soprc", "focal", "cross_entropy")), folder, ""
    )
    assert study.methods == ["soprc", "focal", "cross_entropy"]
    with pytest.raises(
      ValueError, match=r"holds a run of another config(.|\n)*loss.tau1: 0\.\d+ there, 7.0 here"
    ):
      train_binary.prepare(self._study_config(**{"loss.tau1": 7.0}), folder, "")

  def test_mistakes_leave_no_folder(self, tmp_path):
    for values, message in (
      ({"data.share": 0.001}, "train would have 0 positives"),
      ({"data.batch_size": 64}, "needs 16 positives in a batch, and the training examples have 7"),
      ({"data.positive": 2}, "data.positive must be a class of breast_cancer, 0 to 1; got 2"),
    ):
      with pytest.raises(ValueError, match=message):
        train_binary.prepare(self._study_config(**values), tmp_path / "run", "")
    assert not (tmp_path / "run").exists()

  def test_broken_runs_are_no_number(self, tmp_path):
    """Checks runs that diverge. A learning rate that diverges at one seed is not chosen; a method
    that always diverges has NaN.
    """
    config = _config()
    (tmp_path / "runs").mkdir()
    labels = np.array([[1, 0, 0], [0, 1, 0]])
    for seed in config.seeds:
      fine = binary.Found(
        np.full((2, 3), 0.5), np.ones((2, 3)), np.array([[1.0, 0, 0]] * 2), np.array([0.5, 0.4])
      )
      broken = fine._replace(
        val=np.full((2, 3), np.nan), best=np.full(2, np.nan), scores=np.full((2, 3), np.nan)
      )
      half = fine._replace(best=np.array([np.nan if seed else 0.5, 0.4]))
      for name, result in (("soprc", half), ("focal", broken)):
        binary_runs.save_run(binary_runs.run_path(tmp_path, name, seed), result)
    rows = [binary_runs.best_row(config, tmp_path, name, labels) for name in ("soprc", "focal")]
    assert rows[0].rate == 0.03
    about = {"data": "", "chance": 1 / 3, "machine": ""}
    table = binary_report.write(tmp_path, config, rows, {"soprc": 1e-3, "focal": 1e-3}, about)
    assert "| Focal | 0.003* | nan ± nan |" in table
    assert json.loads((tmp_path / "results.json").read_text())["methods"][1]["test"]["AUPRC"] == [
      None,
      None,
    ]


def _without_times(table):
  """Returns the table without the column of times."""
  return [line.rsplit("|", 2)[0] for line in table.splitlines() if line.startswith("|")]
