"""Tests the study with several labels: losses of K lists, their rows of v, and the report."""

import json
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from experiments.binary import __main__ as train_binary
from experiments.binary import (
  binary,
  binary_config,
  binary_losses,
  binary_peer,
  binary_report,
  binary_runs,
  multilabel_values,
)
import soprc_jax
from soprc_jax.data import multilabel
from soprc_jax.training.loss_protocol import Inputs, Setting

CONFIG = str(runs.ROOT / "configs" / "multilabel.py")
_COUNTS = np.array([[70, 30], [90, 10], [98, 2]])


def _config(**values):
  config = runpy.run_path(CONFIG)["get_config"]("glyph_labels,smoke")
  small = {"rates": (0.01, 0.03), "data.batch_size": 48, "data.classes_per_batch": 2}
  steps = {"train.steps": 60, "eval.every": 20, "loss.num_points": 20, "loss.prior_start": 0.0}
  config.update_from_flattened_dict(small | steps | values)
  return binary_config.resolve(config)


def _table(one_label=False):
  """Returns a table in which each of three labels shows in a feature of its own."""
  rng = np.random.default_rng(0)
  labels = rng.random((900, 3)) < (0.4, 0.15, 0.05)
  if one_label:
    labels = np.eye(3, dtype=bool)[np.arange(900) % 3]
  features = rng.normal(size=(900, 5)).astype(np.float32)
  features[:, :3] += 1.5 * labels
  return multilabel.Table(features, labels, ("a", "b", "c"), np.arange(900) // 3)


@pytest.fixture(scope="module")
def task():
  return binary.prepare(_config(), _table(), 0)


@pytest.fixture(scope="module")
def found(task):
  config = _config()
  return {name: binary.make_trainer(config, name, task)(task) for name in config.methods}


class TestLosses:
  _RNG = np.random.default_rng(1)
  _LOGITS = _RNG.normal(size=(12, 3)).astype(np.float32) * 2
  # Label 2 has no positive in the batch.
  _LABELS = np.stack([np.arange(12) % 2, np.arange(12) % 4 == 1, np.zeros(12)], axis=1).astype(int)

  def _run(self, name, **values):
    """Returns the loss of the batch and the state after it."""
    setting = Setting(_COUNTS, num_steps=10, max_positives=8, axis_name=None)
    loss = binary_losses.make(name, _config(**values).loss, setting)
    state = (loss.tracker.init(None),)

    @jax.jit
    def step(state):
      inputs = Inputs(
        jnp.asarray(self._LOGITS), jnp.asarray(self._LABELS), jnp.ones(12, bool), 0, state
      )
      outputs = loss.compute(inputs)
      return outputs.loss, loss.tracker.update(None, state[0], **outputs.update_args)[1]

    value, state = step(state)
    return float(value), state

  def test_soprc_is_the_librarys_at_the_prior_of_each_label(self):
    tracker = soprc_jax.score_ema(3, 20, 0.1, bounds=(0.0, 1.0))

    @jax.jit
    def expected(logits, labels, state):
      scores = jax.nn.sigmoid(logits).T
      return soprc_jax.binary_loss(
        scores, labels.T, tracker=tracker, opt_state=state, prior=jnp.float32([0.3, 0.1, 0.02])
      )[0]

    want = expected(self._LOGITS, self._LABELS, tracker.init(None))
    assert self._run("soprc")[0] == pytest.approx(float(want), abs=1e-6)

  def test_a_label_without_a_positive_is_left_out_and_its_row_of_v_stays(self):
    _, state = self._run("soprc")
    np.testing.assert_allclose(state.weight, [0.1, 0.1, 0], rtol=1e-6)
    np.testing.assert_array_equal(state.v[2], 0)
    scores = jax.nn.sigmoid(self._LOGITS)
    each = [
      float(soprc_jax.ap_loss(scores[own > 0, k], scores[own == 0, k]))
      for k, own in enumerate(self._LABELS.T[:2])
    ]
    assert self._run("ap")[0] == pytest.approx(np.mean(each), abs=1e-6)

  @pytest.mark.parametrize("gammas", [(0.0, 4.0, 0.05), (1.0, 2.0, 0.2), (0.0, 0.0, 1e-6)])
  def test_asl_is_the_papers_formula(self, gammas):
    positive, negative, margin = gammas
    values = {"gamma_positive": positive, "gamma_negative": negative, "margin": margin}
    p = 1 / (1 + np.exp(-self._LOGITS.astype(np.float64)))
    shifted = np.maximum(p - margin, 0)
    losses = np.where(
      self._LABELS > 0,
      -((1 - p) ** positive) * np.log(p),
      -(shifted**negative) * np.log(1 - shifted),
    )
    config = {f"loss.asl.{key}": value for key, value in values.items()}
    assert self._run("asl", **config)[0] == pytest.approx(losses.mean(), rel=1e-5)

  def test_asl_has_a_gradient_at_any_logit(self):
    logits = jnp.array([-200.0, -3.0, 0.0, 3.0, 200.0])
    for label in (0, 1):
      slopes = jax.grad(lambda x, label=label: binary_losses.asymmetric_loss(x, jnp.full(5, label)))
      assert np.isfinite(slopes(logits)).all()
    # An easy negative is below the margin.
    negatives = jax.grad(lambda x: binary_losses.asymmetric_loss(x, jnp.zeros(5)))(logits)
    np.testing.assert_array_equal(negatives[:2], 0)

  def test_weighted_cross_entropy_weighs_each_label(self):
    values = np.logaddexp(0, np.where(self._LABELS > 0, -self._LOGITS, self._LOGITS))
    sides = [
      [values[own == side, k].mean() if (own == side).any() else 0 for side in (0, 1)]
      for k, own in enumerate(self._LABELS.T)
    ]
    assert self._run("weighted_cross_entropy")[0] == pytest.approx(np.mean(sides), rel=1e-5)

  def test_softmax_ranks_by_the_log_odds_of_the_probability(self):
    ranked = binary_losses.ranked("softmax", jnp.asarray(self._LOGITS))
    p = np.asarray(jax.nn.softmax(self._LOGITS.astype(np.float64), axis=1), np.float64)
    np.testing.assert_allclose(ranked, np.log(p / (1 - p)), rtol=1e-4, atol=1e-5)
    assert binary_losses.ranked("asl", self._LOGITS) is self._LOGITS


class TestTraining:
  def test_every_method_beats_chance(self, task, found):
    chance = task.splits.test.labels.mean()
    for name, result in found.items():
      assert result.scores.shape == (2, *task.splits.test.labels.shape), name
      assert max(result.val.max(axis=1)) > 1.5 * chance, name
      assert np.isfinite(result.losses).all(), name

  def test_columns_hold_all_positives_of_a_label(self, task):
    rows = task.batches.reshape(-1, task.batches.shape[-1])
    most = task.splits.train.labels[rows].sum(axis=1).max()
    assert most <= task.num_positives < most + 16
    assert task.num_positives % 16 == 0

  def test_auprc_leaves_out_a_label_without_a_positive(self):
    logits, labels = TestLosses._LOGITS, TestLosses._LABELS
    each = [float(binary.auprc(logits[:, k], labels[:, k])) for k in range(2)]
    assert float(binary.auprc(logits, labels)) == pytest.approx(np.mean(each), rel=1e-6)

  def test_long_tail(self):
    values = {
      "data.long_tail.head": 60,
      "data.long_tail.num_classes": 3,
      "methods": ("soprc", "softmax"),
    }
    config = _config(**values)
    task = binary.prepare(config, _table(one_label=True), 0)
    assert task.splits.train.labels.sum(axis=0).tolist() == [60, 7, 2]
    for name in config.methods:
      assert np.nanmax(binary.make_trainer(config, name, task)(task).val) > 0.4

  def test_the_peer_leaves_out_labels_without_a_positive(self, task, monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []

    class Loss:
      def __init__(self, *, data_len, num_labels, gamma, margin, device):
        assert (data_len, num_labels) == (len(task.splits.train.labels), 3)

      def __call__(self, probabilities, labels, index, task_id):
        assert labels.any(dim=0).nonzero()[:, 0].tolist() == task_id.tolist()
        assert index.max() < len(task.splits.train.labels)
        seen.append(len(task_id))
        return torch.nn.functional.binary_cross_entropy(probabilities, labels)

    def optimizer(params, *, lr, weight_decay, **_):
      return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay)

    for name, content in {
      "libauc": {},
      "libauc.losses": {},
      "libauc.losses.auc": {"APLoss": None, "mAPLoss": Loss},
      "libauc.optimizers": {"SOAP": optimizer},
    }.items():
      module = types.ModuleType(name)
      module.__dict__.update(content)
      monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", [str(runs.ROOT / "experiments" / "binary"), *sys.path])

    def run(command, **_):
      runpy.run_path(command[1])["main"](*command[2:])
      return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(binary_peer.subprocess, "run", run)
    threads = torch.get_num_threads()
    result, seconds = binary_peer.train(_config(), task, "python")
    torch.set_num_threads(threads)
    ours = binary.make_trainer(_config(), "cross_entropy", task)(task)
    np.testing.assert_allclose(result.val, ours.val, atol=5e-3)
    assert result.scores.shape == ours.scores.shape
    assert set(seen) <= {2, 3}
    assert seconds > 0


class TestReport:
  def _row(self, method="soprc", noise=0.5):
    rng = np.random.default_rng(0)
    labels = np.arange(120)[:, None] < [60, 30, 6, 0]
    labels = np.stack([labels] * 2).astype(int)
    scores = labels + noise * rng.normal(size=labels.shape)
    ones = np.ones(2)
    return binary_runs.Row(method, 0.1, {0.1: 1.0}, ones, np.ones((2, 3)), scores, labels)

  def test_values_agree_with_scikit_learn(self):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    row = self._row()
    values = multilabel_values.test_values(row, [600, 300, 60, 2])
    scores, labels = row.scores[0], row.labels[0]
    score = sklearn_metrics.average_precision_score
    each = [score(labels[:, k], scores[:, k]) for k in range(3)]
    assert values["mAP"][0] == pytest.approx(np.mean(each), rel=1e-5)
    assert values["micro AP"][0] == pytest.approx(score(labels.ravel(), scores.ravel()), rel=1e-5)
    assert values["many"][0] == pytest.approx(np.mean(each[:2]), rel=1e-5)
    assert values["medium"][0] == pytest.approx(each[2], rel=1e-5)
    assert np.isnan(values["few"][0])  # its only label has no test positive

  def test_a_run_that_diverged_has_no_value(self):
    row = self._row()._replace(val=np.array([1.0, np.nan]))
    assert np.isnan(multilabel_values.test_values(row, [4, 3, 2, 1])["mAP"]).tolist() == [
      False,
      True,
    ]

  def test_whole_groups_are_resampled(self):
    rows = [self._row(), self._row("ap", 0.9)]
    alone = binary_report.example_errors(rows)["ap"]
    groups = np.arange(120) // 2
    weights = binary_report._bootstrap_groups(np.random.default_rng(0), groups)
    assert (weights[:, ::2] == weights[:, 1::2]).all()
    assert (weights.sum(axis=1) == 120).all()
    assert 0 < alone < 0.2


class TestConfig:
  def test_arguments(self):
    file = runpy.run_path(CONFIG)
    for name in file["ARGUMENTS"]:
      binary_config.resolve(file["get_config"](name))
    with pytest.raises(ValueError, match="name 2 data sets, yeast and glyph_labels: choose one"):
      file["get_config"]("yeast,glyph_labels")

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"methods": ("soprc", "auroc")}, "methods must be without auroc here: it needs a data set"),
      ({"methods": ("softmax",)}, "methods must be without softmax here: it needs one label"),
      (
        {"data.name": "digits", "data.long_tail.head": 9},
        "data.long_tail.head must be 0 for a data set of configs/imbalanced.py",
      ),
      (
        {"data.long_tail.head": 1},
        "data.long_tail.tail=2 must be at most data.long_tail.head=1",
      ),
      ({"data.root": "fonts"}, "data.root is not used by data.name=glyph_labels: leave it out"),
      ({"data.positive": 3}, "data.positive is not used by data.name=glyph_labels: leave it out"),
      ({"data.share": 0.2}, "data.share is not used by data.name=glyph_labels: leave it out"),
      (
        {"data.long_tail.num_classes": 9},
        "data.long_tail.num_classes is not used by data.long_tail.head=0: leave it out",
      ),
      (
        {"data.long_tail.head": 9, "data.test_share": 0.3},
        "data.test_share is not used by data.long_tail.head > 0: leave it out",
      ),
      (
        {"data.name": "digits", "data.per_class": 3},
        "data.per_class is not used by data.name=digits: leave it out",
      ),
      ({"loss.asl.margin": 0.0}, "loss.asl.margin must be > 0 and <= 0.99; got 0.0"),
    ],
  )
  def test_wrong_values(self, values, message):
    with pytest.raises(ValueError, match="the config does not work") as raised:
      _config(**values)
    assert message in str(raised.value)


def test_the_study_writes_its_results(tmp_path, monkeypatch):
  monkeypatch.setattr(multilabel, "DATA_SETS", {"glyph_labels": lambda root: _table()})
  config = _config(methods=("soprc", "asl"))
  study = train_binary.prepare(config, tmp_path / "run", "")
  table = train_binary.make(study, tmp_path / "run", "")
  assert (
    "| method | rate | test mAP | test micro AP | test many | test medium | test few |" in table
  )
  assert "3 labels, 0.6 an example" in table
  results = json.loads((tmp_path / "run" / "results.json").read_text())
  assert results["classes"]["names"] == ["a", "b", "c"]
  first = results["methods"][0]
  assert np.mean(first["test"]["mAP"]) == pytest.approx(np.mean(first["test_per_class"]))


def test_a_study_does_not_go_on_with_other_data(tmp_path, monkeypatch):
  table = _table()
  monkeypatch.setattr(multilabel, "DATA_SETS", {"glyph_labels": lambda root: table})
  config = _config(methods=("asl",))
  train_binary.prepare(config, tmp_path, "")
  train_binary.prepare(config, tmp_path, "")
  table.features[3, 1] += 1e-3
  with pytest.raises(ValueError, match=r"holds a study of other data \(.*: restore the data, or"):
    train_binary.prepare(config, tmp_path, "")
