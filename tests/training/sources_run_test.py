"""Tests every kind of data, from files on disk through training and evaluation.

One runs by its commands, the others in this process.
"""

import io
import json
import math
from pathlib import Path
import runpy

import numpy as np
from PIL import Image
import pytest
import runs
import trees

from soprc_jax.data import datasets
from soprc_jax.metrics import per_query
from soprc_jax.training import config as config_lib
from soprc_jax.training import evaluation, loop, workdir

_TINY = {
  "model.name": "resnet8",
  "model.width": 4,
  "model.stem": "small",
  "model.embedding_dim": 16,
  "model.freeze_bn": False,
  "data.image_size": 16,
  "data.workers": 0,
  "data.val_share": 0.25,
  "loss.num_points": 20,
  "train.steps": 2,
  "train.batch_size": 16,
  "eval.image_size": 16,
  "eval.every": 1,
  "checkpoint.every": 2,
}


def _flags(config, root, folder, **values):
  values = _TINY | {"data.root": root} | values
  return [
    f"--config={runs.ROOT / 'configs' / config}",
    f"--workdir={folder}",
    *(f"--config.{key}={value}" for key, value in values.items()),
  ]


def _config(config, root, **values):
  path, _, argument = config.partition(":")
  found = runpy.run_path(str(runs.ROOT / "configs" / path))["get_config"](argument)
  found.update_from_flattened_dict(_TINY | {"data.root": str(root)} | values)
  return config_lib.resolve(found)


def _train_by_command(flags, folder):
  done = runs.call("experiments.train", *flags)
  assert done.returncode == 0, done.stderr
  return json.loads((folder / workdir.RESULTS).read_text())


_CASES = {
  "folder.py": lambda root: trees.folder(root, 24),
  "folder.py:csv": lambda root: trees.csv(root, 24),
  "sop.py": lambda root: trees.sop(root, 12, 3),
  "sop.py:tfds": lambda root: trees.tfds_sop(root, 12, 3),
  "inaturalist.py": lambda root: trees.inaturalist(root, 12, 3),
  "inaturalist.py:tfds": lambda root: trees.tfds_inaturalist(root, 12, 3),
  "vehicle_id.py": lambda root: trees.vehicle_id(root, 12),
}


def _evaluate_by_command(flags, folder, split):
  done = runs.call("experiments.evaluate", *flags, f"--split={split}")
  assert done.returncode == 0, done.stderr
  return json.loads((folder / f"evaluation_{split}.json").read_text())


def test_the_commands_train_and_evaluate(tmp_path):
  flags = _flags("folder.py", trees.folder(tmp_path / "data", 24), tmp_path / "run")
  results = _train_by_command(flags, tmp_path / "run")
  values = _evaluate_by_command(flags, tmp_path / "run", "test")
  assert values.pop("checkpoint_step") == results["tested_step"]
  assert values == results["test"]
  assert values["num_queries"] == trees.PER_CLASS * 6


# Training on the same data sets by TFDS is always tested, and list_files_test.py reads their list
# files.
_SLOW = ("sop.py", "inaturalist.py")


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in _CASES]
)
def test_train_and_evaluate(tmp_path, name):
  config = _config(name, _CASES[name](tmp_path / "data"))
  results = loop.train(config, tmp_path / "run")
  assert results["steps"] == 2
  splits = ["test", "test_medium", "test_small"] if name == "vehicle_id.py" else ["test"]
  for split in ["val", *splits]:
    assert 0 < results[split]["mAUPRC"] <= 1
    assert results[split]["num_broken"] == 0
    for reached in results["baselines"].get(split, {}).values():
      assert reached["num_queries"] == results[split]["num_queries"]
  assert list(results["baselines"]) == splits
  num_classes = {"folder.py": 6, "folder.py:csv": 6, "vehicle_id.py": 6}.get(name, 3)
  assert results["test"]["num_queries"] == trees.PER_CLASS * num_classes
  ks = results["config"]["eval"]["ks"]
  assert all(f"recall@{k}" in results["test"] for k in ks)
  if name == "vehicle_id.py":
    assert results["test_small"]["num_queries"] == 2 * trees.PER_CLASS
    single = results["test_one_per_class"]
    assert single["num_repeats"] == 10
    assert single["num_queries"] == 6 * (trees.PER_CLASS - 1)
    assert single["mAUPRC_std"] >= 0
    assert results["test_small_one_per_class"]["num_queries"] == 2 * (trees.PER_CLASS - 1)
  values, _ = evaluation.evaluate_workdir(config, tmp_path / "run", split=splits[-1], newest=False)
  assert values.pop("checkpoint_step") == results["tested_step"]
  assert values == results[splits[-1]]
  if name == "folder.py:csv":
    _check_groups(config, tmp_path / "run", results)


def _check_groups(config, run, results):
  """Checks evaluation by a column that is added to the CSV of a run."""
  path = Path(config.data.root)
  header, *lines = path.read_text().splitlines()
  with pytest.raises(ValueError, match="has no column 'kind': choose one of path, label"):
    evaluation.evaluate_workdir(config, run, split="test", newest=False, group_by="kind")
  kinds = ["even" if i % 2 else "" for i in range(len(lines))]
  path.write_text("\n".join([f"{header},kind", *map(",".join, zip(lines, kinds))]) + "\n")
  values, queries = evaluation.evaluate_workdir(
    config, run, split="test", newest=False, group_by="kind"
  )
  groups = values.pop("groups")
  assert groups["column"] == "kind"
  assert list(groups["values"]) == ["", "even"]
  kind_of = dict(zip((line.split(",")[0] for line in lines), kinds))
  mine = np.array([kind_of[name] for name in queries.id]) == "even"
  found = groups["values"]["even"]
  assert found["mAUPRC"] == pytest.approx(queries.ap[mine].mean())
  assert found["num_queries"] == mine.sum()
  assert found["prior"] == pytest.approx((trees.PER_CLASS - 1) / (len(queries.id) - 1))
  assert found["intervals"]["mAUPRC"][0] < found["mAUPRC"] < found["intervals"]["mAUPRC"][1]
  saved = per_query.read(run / "per_query.npz")
  np.testing.assert_array_equal(saved.ap, queries.ap)
  assert values["mAUPRC"] == results["test"]["mAUPRC"] == pytest.approx(saved.ap.mean())


def test_a_folder_of_png_gives_the_result_of_the_source_in_memory(tmp_path):
  """Checks a small data set. The slow test below has 200 classes of 6."""
  _compare_with_memory(tmp_path, num_classes=24, per_class=4, steps=3)


@pytest.mark.slow
def test_a_folder_of_200_classes_gives_the_result_of_the_source_in_memory(tmp_path):
  results = _compare_with_memory(
    tmp_path,
    num_classes=200,
    per_class=6,
    steps=40,
    **{"model.width": 16, "train.batch_size": 64, "optim.learning_rate": 0.01},
  )
  assert results["test"]["mAUPRC"] > 0.3


def _compare_with_memory(tmp_path, *, num_classes, per_class, steps, **values):
  """Trains on PNG files and on the arrays that they were written from. Returns the results of both,
  which are equal.
  """
  memory = trees.glyph_folder(tmp_path / "data", num_classes, per_class)
  config = config_lib.ConfigDict(
    runs.tiny_config(
      steps=steps, warmup_steps=0, **{"data.train_share": 0.7, "data.val_share": 0.1} | values
    )
  )
  config.unlock()
  found = {}
  for source in ("folder", "glyphs"):
    config.data.update(
      {"source": source, "root": str(tmp_path / "data") if source == "folder" else ""}
    )
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(datasets.glyphs, "load", lambda root, superclass: memory)
      found[source] = loop.train(config, tmp_path / source)
  lines = [runs.metrics(tmp_path / source) for source in ("folder", "glyphs")]
  assert lines[0] == lines[1]
  assert found["folder"]["test"] == found["glyphs"]["test"]
  return found["folder"]


class TestBrokenImages:
  @pytest.fixture
  def root(self, tmp_path):
    """Writes 24 classes. Every third class has one corrupt file, and one class has corrupt files
    only.
    """
    trees.folder(tmp_path / "data", 24)
    whole = io.BytesIO()
    Image.fromarray(trees.pixels(0, 0)).save(whole, "PNG")
    for label in range(0, 24, 3):
      (tmp_path / "data" / f"class_{label:03d}" / "1.png").write_bytes(whole.getvalue()[:60])
    for index in range(4):
      (tmp_path / "data" / "class_004" / f"{index}.png").write_bytes(b"")
    return tmp_path / "data"

  def test_f29_error_names_the_file_and_the_way_out(self, tmp_path, root):
    done = runs.call("experiments.train", *_flags("folder.py", root, tmp_path / "run"))
    assert done.returncode == 1
    assert "Error: " in done.stderr
    assert ".png: " in done.stderr
    assert "data.on_broken=skip" in done.stderr
    # The suggested fix works on the same folder: nothing that the run has written depends on the
    # policy.
    loop.train(_config("folder.py", root, **{"data.on_broken": "skip"}), tmp_path / "run")

  def test_f29_skip_counts_and_goes_on(self, tmp_path, root):
    results = loop.train(
      _config("folder.py", root, **{"data.on_broken": "skip", "train.steps": 6}), tmp_path / "run"
    )
    lines = list(workdir.read_metrics(tmp_path / "run"))
    assert sum(line["num_broken"] for line in lines) > 0
    assert all(line["num_broken"] == int(line["num_broken"]) for line in lines)
    assert all(math.isfinite(line["loss"]) for line in lines)
    counts = results["test"]["num_queries"] + results["test"]["num_broken"]
    assert counts == 6 * trees.PER_CLASS
    total = results["test"]["num_broken"] + results["val"]["num_broken"]
    assert 0 <= total <= 8 + 4


@pytest.mark.slow
def test_comparison_on_other_data(tmp_path):
  flags = _flags("folder.py", trees.folder(tmp_path / "data", 24), tmp_path / "run")
  done = runs.call(
    "experiments.compare", *flags, "--methods=soprc,triplet", "--rates=0.01", "--seeds=0"
  )
  assert done.returncode == 0, done.stderr
  content = json.loads((tmp_path / "run" / "table.json").read_text())
  assert [entry["method"] for entry in content["methods"]] == ["soprc", "triplet"]
  assert set(content["methods"][0]["test"]) == {
    "mAUPRC",
    "recall@1",
    "recall@5",
  }  # the first two k of the config
  assert content["config"]["data"]["source"] == "folder"


def test_a_network_searches_in_other_images(tmp_path):
  loop.train(_config("folder.py", trees.folder(tmp_path / "data", 24)), tmp_path / "run")
  other = trees.folder(tmp_path / "other", 20)  # fewer classes than rows of v
  query = other / "class_003" / "1.png"
  done = runs.call(
    "experiments.search",
    *_flags("folder.py", other, tmp_path / "run"),
    f"--query={query}",
    "--checkpoint=newest",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[1].split() == ["1.0000", "class_003", "class_003/1.png"]
  query.write_bytes(b"x")
  done = runs.call(
    "experiments.search", *_flags("folder.py", other, tmp_path / "run"), f"--query={query}"
  )
  assert done.stderr == f"Error: {query}: this is not a readable image\n"


@pytest.mark.slow
def test_files_in_two_processes_change_nothing(tmp_path):
  trees.folder(tmp_path / "data", 24)
  for workers in (0, 2):
    folder = tmp_path / str(workers)
    _train_by_command(
      _flags("folder.py", tmp_path / "data", folder, **{"data.workers": workers, "train.steps": 6}),
      folder,
    )
  assert runs.metrics(tmp_path / "0") == runs.metrics(tmp_path / "2")


def test_trainval_has_no_val_and_tests_the_last_network(tmp_path):
  config = _config("folder.py", trees.folder(tmp_path / "data", 24), **{"data.trainval": True})
  results = loop.train(config, tmp_path / "run")
  assert results["val"] == {}
  assert results["tested_step"] == 2
  values, _ = evaluation.evaluate_workdir(config, tmp_path / "run", split="test", newest=False)
  assert values["mAUPRC"] == results["test"]["mAUPRC"]


def test_mistakes_in_the_data_end_with_a_message(tmp_path):
  trees.sop(tmp_path / "data", 12, 3)
  (tmp_path / "data" / "Ebay_test.txt").unlink()
  done = runs.call("experiments.train", *_flags("sop.py", tmp_path / "data", tmp_path / "run"))
  assert done.returncode == 1
  assert done.stderr.startswith("Error: ")
  assert "Ebay_test.txt is missing" in done.stderr
  assert not (tmp_path / "run").exists()
  done = runs.call("experiments.evaluate", *_flags("sop.py", tmp_path / "data", tmp_path / "run"))
  assert done.returncode == 1
  assert "holds no run" in done.stderr
