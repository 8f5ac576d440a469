"""Tests runs, in this process, whose data change between two calls.

The metadata of the checkpoint are compared with the data (F10, F11, F15, F19, F33, F40, F44).
"""

import json
import logging
import pathlib
import runpy
import shutil

import numpy as np
import pytest
import runs
import trees

from soprc_jax.data import sources
from soprc_jax.reports import run as run_report
from soprc_jax.serving import embed, network, search
from soprc_jax.training import build, checkpoints, evaluation, loop, workdir
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
  "train.per_class": 4,
  "optim.schedule": "step",
  "optim.ramp_steps": 0,
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
  """Returns a run on 24 classes, four of them with two images, and its log messages."""
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
  counts = np.unique(
    build.make_data(_config(finished[0] / "data")).splits["train"].labels, return_counts=True
  )[1]
  small = np.sum(counts < 4)
  assert 0 < small < 4
  assert (
    f"{small} training classes have fewer than 4 images: policy data.small_classes=mask."
    in finished[1]
  )


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
    # The labels of a folder are positions in the sorted names: all of them stay the same.
    moved = path.with_name(f"{name}_of_another_kind")
  else:
    moved = tmp_path / name  # one class fewer: other labels in train
  path.rename(moved)
  try:
    with pytest.raises(
      ValueError, match=r"the data are not those that the run in .* was trained on"
    ):
      loop.train(_config(folder / "data"), folder / "run")
    # Evaluation too: with a class fewer, some training classes would become test classes.
    with pytest.raises(
      ValueError, match=r"the data are not those that the run in .* was trained on"
    ):
      evaluation.evaluate_workdir(
        _config(folder / "data"), folder / "run", split="test", newest=True
      )
  finally:
    moved.rename(path)
  values, _ = evaluation.evaluate_workdir(
    _config(folder / "data"), folder / "run", split="test", newest=True
  )
  assert values["checkpoint_step"] == 5


def _first_of(folder, split):
  """Returns the first image of a split of the run, as ``CLASS/IMAGE``."""
  return build.make_data(_config(folder / "data")).splits[split].ids[0]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_f44_an_image_less_is_reported_on_resuming_and_evaluating(finished, split):
  folder, _ = finished
  name = _first_of(folder, split)
  path = folder / "data" / name
  content = path.read_bytes()
  path.unlink()
  message = (
    rf"(?s)the data are not those .*\n  {split}: (\d+) images in the checkpoint, \d+ now; "
    rf"1 removed \('{name}'\)$"
  )
  try:
    with pytest.raises(ValueError, match=message):
      loop.train(_config(folder / "data"), folder / "run")
    with pytest.raises(ValueError, match=message):
      evaluation.evaluate_workdir(
        _config(folder / "data"), folder / "run", split="test", newest=True
      )
  finally:
    path.write_bytes(content)
  assert loop.train(_config(folder / "data"), folder / "run")["tested_step"] == 5


def test_f44_fewer_classes_are_reported_and_not_arrays_of_another_shape(finished, tmp_path):
  """Checks fewer classes. Each training class has a row of v, so the checkpoint has arrays of
  another shape too.
  """
  folder, _ = finished
  shutil.copytree(folder / "data", tmp_path / "data")
  for label in (0, 2, 3):
    shutil.rmtree(tmp_path / "data" / f"class_{label:03d}")
  assert len(_meta(folder / "run")["labels"]) == 12
  with pytest.raises(ValueError, match=r"(?s)the data are not those .* removed \('class_00"):
    loop.train(_config(tmp_path / "data"), folder / "run")


@pytest.fixture(scope="module")
def resumed(finished, tmp_path_factory):
  """Returns the same run, stopped after the milestone at step 2. It is resumed with its data in
  another place.
  """
  folder = tmp_path_factory.mktemp("resumed")
  shutil.copytree(finished[0] / "data", folder / "data")
  save = checkpoints.Store.save

  def save_and_stop(store, state, meta):
    save(store, state, meta)
    if int(state.step) == 3:
      raise RuntimeError("stopped behind the milestone")

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(checkpoints.Store, "save", save_and_stop)
    with pytest.raises(RuntimeError, match="behind the milestone"):
      loop.train(_config(folder / "data"), folder / "run")
  (folder / "data").rename(folder / "moved")
  loop.train(_config(folder / "moved"), folder / "run")
  return folder / "run"


def test_f44_a_moved_folder_resumes_bit_for_bit(finished, resumed):
  there = finished[0] / "run"
  assert runs.metrics(resumed) == runs.metrics(there)
  results = [json.loads((path / workdir.RESULTS).read_text()) for path in (resumed, there)]
  assert results[0]["test"] == results[1]["test"]
  assert _meta(resumed) == _meta(there)


def test_f40_evaluating_elsewhere_needs_classes_that_were_not_trained_on(
  finished, tmp_path, caplog, monkeypatch
):
  """Checks a copy with one class fewer, whose split is another one."""
  monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
  folder, _ = finished
  shutil.copytree(folder / "data", tmp_path / "data")
  shutil.rmtree(tmp_path / "data" / "class_000")
  config = _config(tmp_path / "data")
  trained = {
    _meta(folder / "run")["class_names"][str(label)] for label, _ in _meta(folder / "run")["labels"]
  }
  both = sorted(trained & set(sources.shown_classes(build.make_data(config).splits["test"])))
  assert len(both) > 3
  first = ", ".join(map(repr, both[:3]))
  message = (
    f"{len(both)} of the classes that are tested on were trained on: {first} and "
    f"{len(both) - 3} more .*--allow_seen_classes"
  )
  for split in ("test", "all"):
    with pytest.raises(ValueError, match=message if split == "test" else "were trained on"):
      evaluation.evaluate_workdir(config, folder / "run", split=split, newest=True)
  values, _ = evaluation.evaluate_workdir(
    config, folder / "run", split="test", newest=True, allow_seen_classes=True
  )
  assert values["seen_classes"] == {"count": len(both), "examples": both[:3]}
  assert "Evaluating on other data than those that the run in" in caplog.text
  # A user who names the training split of the run knows that its classes were seen.
  for split in ("train", "all"):
    values, _ = evaluation.evaluate_workdir(
      _config(folder / "data"), folder / "run", split=split, newest=True
    )
    assert "seen_classes" not in values


def _from_seen(finished):
  folder, _ = finished
  values = {"model.init_from": str(folder / "run"), "data.split_seed": 7, "train.steps": 1}
  return _config(f"{folder / 'data'}/.", **values)


@pytest.fixture(scope="module")
def fine_tuned(finished, tmp_path_factory):
  """Returns a run from the model of another one. Its val and test classes include training classes
  of that one.
  """
  folder = tmp_path_factory.mktemp("fine_tuned")
  loop.train(_from_seen(finished), folder / "run", allow_seen_classes=True)
  return folder / "run"


class TestStartFromSeenClasses:
  def _note(self, finished):
    there = _meta(finished[0] / "run")
    trained = {there["class_names"][str(label)] for label, _ in there["labels"]}
    splits = build.make_data(_from_seen(finished)).splits
    both = sorted(
      trained & {name for key in ("val", "test") for name in sources.shown_classes(splits[key])}
    )
    return {"count": len(both), "examples": both[:3]}

  def test_f40_training_from_them_is_an_error(self, finished, tmp_path):
    with pytest.raises(
      ValueError, match="of the classes that are tested on were trained on: 'class_"
    ):
      loop.train(_from_seen(finished), tmp_path / "run")
    assert not (tmp_path / "run").exists()

  def test_f40_the_flag_makes_it_a_note_in_the_results_and_the_report(self, finished, fine_tuned):
    note = self._note(finished)
    assert note["count"] > 3
    assert json.loads((fine_tuned / workdir.RESULTS).read_text())["seen_classes"] == note
    page = run_report.make(fine_tuned)
    assert (
      f"Not a test of unseen classes: {note['count']} of the classes that are tested on were "
      "trained on" in page
    )
    assert all(name in page for name in note["examples"])
    assert "all queries are of classes not seen in training" not in page
    assert "seen_classes" not in json.loads((finished[0] / "run" / workdir.RESULTS).read_text())
    assert "all queries are of classes not seen in training" in run_report.make(finished[0] / "run")

  def test_f40_resuming_needs_no_flag_and_keeps_the_note(self, finished, fine_tuned):
    (fine_tuned / workdir.RESULTS).unlink()
    assert loop.train(_from_seen(finished), fine_tuned)["seen_classes"] == self._note(finished)

  def test_f40_evaluating_needs_the_flag(self, finished, fine_tuned):
    config = _from_seen(finished)
    with pytest.raises(ValueError, match="were trained on"):
      evaluation.evaluate_workdir(config, fine_tuned, split="test", newest=True)
    values, _ = evaluation.evaluate_workdir(
      config, fine_tuned, split="test", newest=True, allow_seen_classes=True
    )
    assert 3 < values["seen_classes"]["count"] < self._note(finished)["count"]

  def test_f40_searching_in_a_test_split_needs_the_flag(self, finished, fine_tuned):
    found = network.load(fine_tuned)
    names = sources.shown_classes(embed.split_source(found, "test"))
    with pytest.raises(ValueError, match="were trained on"):
      search.check_unseen(found, "test", names, allow_seen_classes=False)
    assert search.check_unseen(found, "test", names, allow_seen_classes=True)["count"] > 3
    for split in ("", "train", "all"):
      assert search.check_unseen(found, split, names, allow_seen_classes=False) is None

  def test_f40_a_network_of_the_fine_tuned_one_knows_the_first_classes(self, finished, fine_tuned):
    """Checks the lineage: both splits were trained on by then."""
    folder, _ = finished
    config = _config(folder / "data", **{"model.init_from": str(fine_tuned), "data.split_seed": 7})
    with pytest.raises(ValueError, match="were trained on"):
      build.check_unseen(config)
    trained = build.check_unseen(config, allow_seen_classes=True)
    own = {
      seed: set(
        sources.shown_classes(
          build.make_data(_config(folder / "data", **{"data.split_seed": seed})).splits["train"]
        )
      )
      for seed in (0, 7)
    }
    assert trained == {"": sorted(own[0] | own[7])}

  @pytest.mark.parametrize("module", ["train", "evaluate", "search", "compare", "ablate"])
  def test_f40_the_flag_of_the_commands(self, module):
    done = runs.call(f"experiments.{module}", "--allow_seen_classes")
    assert done.stderr.startswith("Error: missing --"), done.stderr
    other = runs.call(f"experiments.{module}", "--allow_seen")
    assert "Unknown command line flag" in other.stderr

  def test_f40_the_command_without_the_flag(self, finished, tmp_path):
    values = _TINY | {
      "data.root": finished[0] / "data",
      "data.split_seed": 1,
      "model.init_from": finished[0] / "run",
    }
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    config = f"--config={runs.ROOT / 'configs' / 'folder.py'}"
    done = runs.call("experiments.train", config, *flags, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert "of the classes that are tested on were trained on: 'class_" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_f19_a_relative_workdir_is_that_of_the_current_folder(finished, monkeypatch):
  monkeypatch.chdir(finished[0])
  again = loop.train(_config(finished[0] / "data"), pathlib.Path("run"))
  assert again["tested_step"] == 5
  assert sorted(path.name for path in finished[0].iterdir()) == ["data", "run"]


def _meta(folder):
  step = max(
    int(path.name) for path in (folder / checkpoints.NEWEST).iterdir() if path.name.isdigit()
  )
  return json.loads((folder / checkpoints.NEWEST / str(step) / "meta" / "metadata").read_text())


def test_f15_going_on_after_a_milestone_takes_the_rate_of_the_step(finished, resumed):
  """Checks a run that was stopped after a milestone and resumed. The learning rate that is logged
  and used is that of the step.
  """
  assert runs.metrics(resumed) == runs.metrics(finished[0] / "run")
  lines = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
  np.testing.assert_allclose(
    [line["learning_rate"] for line in lines], [0.02, 0.02, 0.002, 0.002, 0.0002], rtol=1e-5
  )
