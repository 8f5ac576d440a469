"""Runs whose data change between two calls, in this process: what a checkpoint knows of the classes is compared with what is there (F10, F11, F15, F19, F33)."""

import json
import logging
import pathlib
import runpy

import numpy as np
import pytest
from quick import quick_compilation  # noqa: F401
import runs
import trees

from soprc_jax.training import build, checkpoints, evaluation, loop
from soprc_jax.training import config as config_lib

_TINY = {
  "model.name": "resnet8",
  "model.width": 4,
  "model.stem": "small",
  "model.embedding_dim": 8,
  "model.freeze_bn": False,
  "data.image_size": 16,
  "data.workers": 0,
  "data.val_share": 0.25,
  "loss.num_points": 6,
  "train.steps": 5,
  "train.batch_size": 16,
  "optim.schedule": "step",
  "optim.milestones": (2, 4),
  "optim.decay_factor": 0.1,
  "optim.learning_rate": 0.02,
  "eval.image_size": 16,
  "eval.every": 0,
  "checkpoint.every": 1,
}


def _config(root, **values):
  config = runpy.run_path(str(runs.ROOT / "configs" / "folder.py"))["get_config"]("")
  config.update_from_flattened_dict(_TINY | {"data.root": str(root)} | values)
  return config_lib.resolve(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run on a folder of 24 classes, four of them with two images, and what it logged."""
  folder = tmp_path_factory.mktemp("failures")
  trees.folder(folder / "data", 24)
  for name in ("class_001", "class_004", "class_010", "class_020"):
    for index in (2, 3):
      (folder / "data" / name / f"{index}.png").unlink()
  records = []
  handler = logging.Handler()
  handler.emit = lambda record: records.append(record.getMessage())
  logger = logging.getLogger("soprc_jax")
  level = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    loop.train(_config(folder / "data"), folder / "run")
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
  return folder, records


def test_f11_the_number_of_small_classes_is_logged_with_the_policy(finished):
  counts = np.unique(build.make_data(_config(finished[0] / "data")).splits["train"].labels, return_counts=True)[1]
  small = np.sum(counts < 4)
  assert 0 < small < 4
  assert f"{small} training classes have fewer than 4 images: policy data.small_classes=mask." in finished[1]


def test_f10_the_rows_of_the_labels_are_in_the_checkpoint(finished):
  meta = _meta(finished[0] / "run")
  labels = [label for label, _ in meta["labels"]]
  assert [row for _, row in meta["labels"]] == list(range(len(labels)))
  assert labels == sorted(labels)
  assert len(labels) == 12  # of 24
  assert {int(label) for label in meta["class_names"]} == set(labels)


@pytest.mark.parametrize("change", ["another class in the place of one", "another image list"])
def test_f33_classes_that_have_moved_to_other_rows_are_refused(finished, change, tmp_path):
  folder, _ = finished
  meta = _meta(folder / "run")
  name = meta["class_names"][str(meta["labels"][3][0])]
  path = folder / "data" / name
  if change == "another class in the place of one":
    # The labels of a folder are places in the sorted names: all of them stay as they are.
    moved = path.with_name(f"{name}_of_another_kind")
  else:
    moved = tmp_path / name  # one class fewer: other labels in train
  path.rename(moved)
  try:
    with pytest.raises(ValueError, match=r"the classes of the data are not those that the run in .* was trained on"):
      loop.train(_config(folder / "data"), folder / "run")
    # And evaluation: a class fewer, and others of the training classes would be test classes.
    with pytest.raises(ValueError, match=r"the classes of the data are not those .* some of test may have been among them"):
      evaluation.evaluate_workdir(_config(folder / "data"), folder / "run", split="test", newest=True)
  finally:
    moved.rename(path)
  assert (
    evaluation.evaluate_workdir(_config(folder / "data"), folder / "run", split="test", newest=True)["checkpoint_step"] == 5
  )


def test_f33_an_image_less_keeps_the_rows(finished):
  folder, _ = finished
  name = next(iter(_meta(folder / "run")["class_names"].values()))
  path = folder / "data" / name / "1.png"
  content = path.read_bytes()
  path.unlink()
  try:
    again = loop.train(_config(folder / "data"), folder / "run")  # at its end: nothing is trained
  finally:
    path.write_bytes(content)
  assert again["tested_step"] == 5


def test_f19_a_relative_workdir_is_that_of_the_current_folder(finished, monkeypatch):
  monkeypatch.chdir(finished[0])
  again = loop.train(_config(finished[0] / "data"), pathlib.Path("run"))
  assert again["tested_step"] == 5
  assert sorted(path.name for path in finished[0].iterdir()) == ["data", "run"]


def _meta(folder):
  step = max(int(path.name) for path in (folder / checkpoints.NEWEST).iterdir() if path.name.isdigit())
  return json.loads((folder / checkpoints.NEWEST / str(step) / "meta" / "metadata").read_text())


def test_f15_going_on_after_a_milestone_takes_the_rate_of_the_step(finished, tmp_path, monkeypatch):
  """Stopped behind a milestone and started again: the rate that is logged, and the one that is taken, is that of the step."""
  config = _config(finished[0] / "data")
  save = checkpoints.Store.save

  def save_and_stop(store, state, meta):
    save(store, state, meta)
    if int(state.step) == 3:
      raise RuntimeError("stopped behind the milestone at step 2")

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints.Store, "save", save_and_stop)
    with pytest.raises(RuntimeError, match="behind the milestone"):
      loop.train(config, tmp_path / "run")
  loop.train(config, tmp_path / "run")
  assert runs.metrics(tmp_path / "run") == runs.metrics(finished[0] / "run")
  lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  np.testing.assert_allclose([line["learning_rate"] for line in lines], [0.02, 0.02, 0.002, 0.002, 0.0002], rtol=1e-5)
