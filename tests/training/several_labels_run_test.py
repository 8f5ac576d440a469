"""Tests runs on images with several labels, from training to evaluation, report and search."""

import json
import logging
import os
import pathlib
import runpy
import signal

import numpy as np
import pytest
import runs
import several_labels

from soprc_jax.data import datasets, sources
from soprc_jax.metrics import per_query
from soprc_jax.reports import run as report
from soprc_jax.serving import (
  embed,
  index,
  network,
  search,
  shard_evaluation,
  shard_survey,
)
from soprc_jax.training import baselines, build, defaults, evaluation, interrupts, loop, replay
from soprc_jax.training import config as config_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib

_CONFIG = str(pathlib.Path(runs.ROOT, "configs", "features.py"))
_NAMES = ("beach", "boat", "cat", "dog", "house", "lake", "snow", "tree")
_WIDTH = 24


def _vectors(most=3, count=600):
  """Returns vectors that have a direction for each label, with strong noise in other directions."""
  rng = np.random.default_rng(0)
  directions = rng.standard_normal((len(_NAMES), 8))
  cells, vectors = [], []
  for _ in range(count):
    chosen = rng.choice(len(_NAMES), rng.integers(1, most + 1), replace=False)
    cells.append(";".join(_NAMES[i] for i in chosen))
    signal = directions[chosen].sum(axis=0) + 0.3 * rng.standard_normal(8)
    vectors.append(np.concatenate([signal, 2.0 * rng.standard_normal(_WIDTH - 8)]))
  turn = np.linalg.qr(rng.standard_normal((_WIDTH, _WIDTH)))[0]
  return np.float32(np.array(vectors) @ turn), np.array(cells)


def _write(path, *, most=3, count=600):
  vectors, cells = _vectors(most, count)
  of = np.array(["train", "train", "train", "val", "test", "test"])[np.arange(count) % 6]
  ids = np.array([f"photos/{row}.jpg" for row in range(count)])
  np.savez(path, embeddings=vectors, labels=cells, splits=of, ids=ids)
  return path


def _config(path, arg="", **values):
  config = runpy.run_path(_CONFIG)["get_config"](arg)
  config.data.root = str(path)
  config.data.label_separator = ";"
  fixed = {
    "train.steps": 80,
    "train.batch_size": 32,
    "eval.every": 40,
    "checkpoint.every": 40,
    "log.progress": False,
    "loss.num_points": 20,
  }
  config.update_from_flattened_dict(fixed | values)
  return config_lib.resolve(config)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns the file of the vectors, the workdir of a run, and its results."""
  folder = tmp_path_factory.mktemp("several")
  path = _write(folder / "f.npz")
  config = _config(path, **{"optim.learning_rate": 0.02})
  return path, folder / "run", loop.train(config, folder / "run")


def _sets(path):
  with np.load(path) as file:
    return dict(
      zip(file["ids"].tolist(), [set(cell.split(";")) for cell in file["labels"].tolist()])
    )


def _relevant(names, sets):
  return np.array([[bool(sets[one] & sets[other]) for other in names] for one in names])


def test_training_helps_and_says_what_it_tests(made):
  _, _, results = made
  before = results["baselines"]["test"]
  assert results["test"]["mAUPRC"] > before["initial"]["mAUPRC"] + 0.15
  assert results["test"]["mAUPRC"] > before["features"]["mAUPRC"] + 0.15
  assert results["seen_classes"] == {
    "count": len(_NAMES),
    "examples": list(_NAMES[:3]),
    "unit": "labels",
  }


def test_the_metrics_are_those_of_shared_labels(made):
  path, folder, results = made
  config = config_lib.from_json(json.loads((folder / workdir_lib.CONFIG).read_text()))
  trained = evaluation.load(config, folder)
  for split in ("test", "val"):
    source = trained.splits[split]
    embedded = trained.embed(trained.variables, source)
    names = [source.ids[i] for i in embedded.positions]
    wanted = several_labels.average_precision(embedded.embeddings, _relevant(names, _sets(path)))
    np.testing.assert_allclose(results[split]["mAUPRC"], np.nanmean(wanted), rtol=1e-9)
    if split == "test":
      found = per_query.read(folder / workdir_lib.per_query("test"))
      np.testing.assert_allclose(found.ap, wanted, rtol=1e-9)
      assert [set(label.split(";")) for label in found.label] == [_sets(path)[n] for n in names]


def test_evaluate_names_the_labels_that_were_trained_on(made, caplog):
  path, folder, results = made
  config = config_lib.from_json(json.loads((folder / workdir_lib.CONFIG).read_text()))
  with caplog.at_level(logging.INFO):
    values, _ = evaluation.evaluate_workdir(config, folder, split="test", newest=False)
  assert values["mAUPRC"] == results["test"]["mAUPRC"]
  assert values["seen_classes"]["count"] == len(_NAMES)
  assert "The test is one of unseen images: 8 of the labels that are tested on" in caplog.text
  whole, _ = evaluation.evaluate_workdir(config, folder, split="all", newest=False)
  assert whole["num_queries"] == len(_sets(path))


def test_stored_embeddings_are_ranked_by_the_same_rule(made, tmp_path):
  _, folder, results = made
  path = tmp_path / "test.npz"
  index.write(path, embed.of_split(network.load(folder), "test"))
  files = shard_survey.find(str(path), str(path), None)
  prepared = shard_survey.prepare(files)
  shard_evaluation.count(files, prepared, tmp_path, size=64)
  values, queries, _ = shard_evaluation.summarise(files, prepared, tmp_path, ks=[1])
  np.testing.assert_allclose(values["mAUPRC"], results["test"]["mAUPRC"], rtol=1e-6)
  stored = per_query.read(folder / workdir_lib.per_query("test"))
  assert queries.label.tolist() == stored.label.tolist()


def test_the_report_has_label_sets_and_relevant_images(made):
  path, folder, _ = made
  page = report.make(folder)
  assert "Not a test of unseen labels: 8 of the labels that are tested on were trained on" in page
  assert "Right images are relevant to the query" in " ".join(page.split())
  assert "Labels and images by split" in page
  assert "Validation (images not seen in training)" in page
  assert "An image without labels below it has those of the query." in page
  assert "beach;boat" in page
  from soprc_jax.reports import panel, reading, tested

  found = tested.rank(reading.read(folder))
  sets, ids = _sets(path), sources.ids(found.source)
  wanted = _relevant(ids, sets)
  np.testing.assert_array_equal(found.num_relevant, wanted.sum(axis=1))
  np.testing.assert_array_equal(
    found.right, np.take_along_axis(wanted, found.nearest.positions, axis=1)
  )
  shown = panel.query(found, 3)
  assert shown["total"] == wanted[3].sum() - 1
  assert shown["right"] == wanted[3][found.nearest.positions[3]].sum()


def test_the_index_has_the_label_text(made):
  path, folder, _ = made
  loaded = network.load(folder)
  gallery = embed.of_split(loaded, "test")
  sets = _sets(path)
  assert [set(name.split(";")) for name in gallery.class_names.tolist()] == [
    sets[name] for name in gallery.ids.tolist()
  ]
  found = search.nearest(gallery, gallery.embeddings[:2], top=3)
  assert set(found[0][1].class_name.split(";")) == sets[found[0][1].id]
  seen = search.check_unseen(loaded, "test", gallery.class_names, allow_seen_classes=False)
  assert (seen["count"], seen["unit"]) == (len(_NAMES), "labels")


def test_v_is_followed_for_patterns(made):
  _, folder, _ = made
  lines = list(workdir_lib.read_lines(folder / "v.jsonl"))
  assert len(lines) == 2
  for one in lines[-1]["classes"]:
    assert one["visits"] > 0
    assert np.all(np.diff(one["true"]) >= 0)


def _same(one, other):
  assert runs.metrics(one) == runs.metrics(other)
  found = [json.loads((folder / "results.json").read_text())["test"] for folder in (one, other)]
  assert found[0] == found[1]


@pytest.mark.parametrize("name", ["soprc", "xbm", "recall_at_k"])
def test_single_labels_give_the_run_of_classes(tmp_path, name):
  """Checks cells of one label each: masks give the bits of labels. Splits share the labels, so the
  plain run has the classes of a split in its own."""
  vectors, _ = _vectors()
  of = np.array(["train", "val", "test"])[np.arange(600) % 3]
  cells = np.array([f"{split} {number % 7}" for number, split in enumerate(of)])
  path = tmp_path / "f.npz"
  np.savez(path, embeddings=vectors, labels=cells, splits=of)
  values = {"train.steps": 6, "eval.every": 3, "checkpoint.every": 6, "loss.name": name}
  values |= {"train.batch_size": 16, "train.per_class": 4, "loss.xbm.memory_size": 64}
  loop.train(_config(path, **values), tmp_path / "several")
  loop.train(_config(path, **values, **{"data.label_separator": ""}), tmp_path / "plain")
  _same(tmp_path / "several", tmp_path / "plain")


def test_resumes_bit_for_bit(made, tmp_path, monkeypatch):
  path, _, _ = made
  values = {"train.steps": 10, "eval.every": 5, "checkpoint.every": 4}
  loop.train(_config(path, **values), tmp_path / "whole")
  write = workdir_lib.MetricsLog.write

  def write_and_terminate(log, line):
    write(log, line)
    if line["step"] == 6:
      os.kill(os.getpid(), signal.SIGTERM)

  with monkeypatch.context() as patch:
    patch.setattr(workdir_lib.MetricsLog, "write", write_and_terminate)
    with pytest.raises(interrupts.InterruptedRunError):
      loop.train(_config(path, **values), tmp_path / "stopped")
  loop.train(_config(path, **values), tmp_path / "stopped")
  _same(tmp_path / "stopped", tmp_path / "whole")


def test_one_device_and_microbatches_give_the_same_training(made, tmp_path):
  """This session has two devices; the other run has one, in a process of its own."""
  path, _, _ = made
  values = {"train.steps": 6, "eval.every": 0, "checkpoint.every": 0, "log.v_classes": 0}
  loop.train(_config(path, **values), tmp_path / "two")
  loop.train(_config(path, **values, **{"train.microbatch": 8}), tmp_path / "parts")
  config = json.loads((tmp_path / "two" / workdir_lib.CONFIG).read_text())
  keys = ("train.per_class", "model.embedding_dim", "model.features", "optim.learning_rate")
  chosen = {key: config_lib.config_key.value_of(config, key) for key in keys}
  values |= chosen | {"train.batch_size": 32, "data.root": path, "data.label_separator": ";"}
  values |= {"loss.num_points": 20}
  done = runs.call(
    "experiments.train",
    f"--config={_CONFIG}",
    f"--workdir={tmp_path / 'one'}",
    *(f"--config.{key}={value}" for key, value in values.items()),
    env=runs.environment(1),
  )
  assert done.returncode == 0, done.stderr
  assert "the test is one of unseen vectors, and 8 of their 8 labels are trained on" in done.stderr
  lines = [workdir_lib.read_metrics(tmp_path / name) for name in ("two", "one", "parts")]
  for two, one, parts in zip(*lines, strict=True):
    for key in ("loss", "soprc", "valid_lists", "grad_norm", "prior"):
      np.testing.assert_allclose(one[key], two[key], rtol=1e-4)
      np.testing.assert_allclose(parts[key], two[key], rtol=1e-4)
  found = [
    json.loads((tmp_path / name / "results.json").read_text())["test"]["mAUPRC"]
    for name in ("two", "one", "parts")
  ]
  np.testing.assert_allclose(found, found[0], atol=1e-4)


def test_a_diverged_step_can_be_repeated(made, tmp_path):
  values = {"optim.name": "sgd", "optim.learning_rate": 1e30, "optim.schedule": "constant"}
  with pytest.raises(step_lib.DivergedError):
    loop.train(_config(made[0], **values), tmp_path / "run")
  found = replay.load(tmp_path / "run")
  assert found.parts is not None
  _, scalars = replay.run(found)
  assert scalars["nonfinite"] > 0
  assert "not finite" in replay.describe(tmp_path / "run")


def test_a_jaccard_index_makes_fewer_images_relevant(made):
  path, _, _ = made
  counts = []
  for least in (0.0, 0.5, 1.0):
    config = _config(path, **{"data.min_jaccard": least})
    chosen = defaults.choose(config, datasets.make_splits(config.data))
    config = config_lib.fill(config, {key: choice.value for key, choice in chosen.items()})
    counts.append(build.make_data(config).patterns.num_relevant)
  assert (counts[0] > counts[1]).all()
  assert (counts[1] >= counts[2]).all()


class TestRefusals:
  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"data.sampler": "confusable"}, "data.sampler must be random with data.label_separator"),
      ({"data.superclass": "kind"}, "data.superclass must be empty with data.label_separator"),
      ({"eval.one_per_class": 3}, "eval.one_per_class must be 0 with data.label_separator"),
      ({"loss.name": "recall_at_k", "loss.recall_at_k.mixup": True}, "mixup must be False"),
      ({"data.min_jaccard": 1.5}, "data.min_jaccard must be >= 0 and <= 1"),
      ({"data.min_jaccard": -0.1}, "data.min_jaccard must be >= 0 and <= 1"),
      (
        {"data.label_separator": "", "data.min_jaccard": 0.5},
        "data.min_jaccard must be 0 without data.label_separator",
      ),
      *(
        ({"loss.name": name}, rf"loss.name={name} needs one class .* choose one of soprc, ap")
        for name in baselines.ONE_CLASS
      ),
      (
        {"warmup.steps": 5, "warmup.loss": "arc_face"},
        "warmup.loss=arc_face needs one class an image",
      ),
    ],
  )
  def test_in_the_config(self, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
      _config(tmp_path / "f.npz", **values)

  def test_other_sources(self):
    with pytest.raises(ValueError, match="label_separator must be empty with data"):
      runs.tiny_config(**{"data.label_separator": ";"})


@pytest.mark.slow
def test_images(tmp_path):
  """Trains three convolutions on images, until they find the images with a shape in common."""
  path = several_labels.make(tmp_path / "d", count=600)
  config = runpy.run_path(str(pathlib.Path(runs.ROOT, "configs", "folder.py")))["get_config"](
    "csv,small"
  )
  config.data.root = str(path)
  values = {"data.label_separator": ";", "data.sampler": "random", "log.progress": False}
  values |= {"train.steps": 200, "train.batch_size": 32, "model.pool_grid": 1, "eval.every": 200}
  config.update_from_flattened_dict(values)
  results = loop.train(config_lib.resolve(config), tmp_path / "run")
  before = max(one["mAUPRC"] for one in results["baselines"]["test"].values())
  assert results["test"]["mAUPRC"] > before + 0.25
  page = report.make(tmp_path / "run")
  assert "blue cross;" in page
