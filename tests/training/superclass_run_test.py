"""Tests a run with superclasses from its files to its results: SOPRC of both levels on a CSV."""

import json

import numpy as np
import pytest
import runs
import trees

from soprc_jax.training import build, evaluation, loop, replay, superclass_metrics, workdir

_VALUES = {
  "data.source": "csv",
  "data.superclass": "kind",
  "data.train_share": 0.5,
  "data.val_share": 0.25,
  "loss.superclass_gain": 0.2,
  "eval.every": 1,
  "checkpoint.every": 1,
  "log.progress": False,
}


def _csv(root, kinds):
  path = trees.csv(root, 24)
  header, *lines = path.read_text().splitlines()
  rows = [f"{line},{kinds[i // trees.PER_CLASS % len(kinds)]}" for i, line in enumerate(lines)]
  path.write_text("\n".join([f"{header},kind", *rows]) + "\n")
  return path


def _config(path, **values):
  return runs.tiny_config(steps=2, warmup_steps=1, **_VALUES, **{"data.root": str(path), **values})


def test_a_run_with_superclasses(tmp_path):
  path = _csv(tmp_path / "data", ["b", "a", "c"])
  config, run = _config(path), tmp_path / "run"
  results = loop.train(config, run)
  for split in ("val", "test"):
    for name in superclass_metrics.NAMES:
      assert 0 < results[split][name] <= 1
  for values in results["baselines"]["test"].values():
    assert set(superclass_metrics.NAMES) <= values.keys()
  assert 0 < list(workdir.read_metrics(run))[-1]["superclass_soprc"] < 1
  values, _ = evaluation.evaluate_workdir(config, run, split="test", newest=False, group_by="kind")
  assert values["groups"]["values"].keys() == {"a", "b", "c"}
  assert "H-AP" not in values["groups"]["values"]["a"]
  assert {name: values[name] for name in results["test"]} == results["test"]
  # The order of the superclasses gives the rows of v, so a run notices another one.
  _csv(tmp_path / "data", ["a", "b", "c"])
  with pytest.raises(ValueError, match=r"are not those that the run in .* was trained on"):
    loop.train(config, run)


def test_the_rows_of_the_superclasses_follow_those_of_the_classes(tmp_path):
  config = _config(_csv(tmp_path / "data", ["b", "a", "c"]))
  data = build.make_data(config)
  rows = data.superclasses()
  assert set(rows.tolist()) == {0, 1, 2}
  parts = build.make_parts(config, data.class_counts(), superclasses=rows)
  v = build.abstract_state(config, parts).opt_state[0].v
  assert v.shape[0] == len(data.rows) + len(np.unique(rows))
  with pytest.raises(ValueError, match="needs the superclass of each class"):
    build.make_parts(config, data.class_counts())


def test_a_step_that_is_not_finite_is_computed_again(tmp_path):
  config = _config(
    _csv(tmp_path / "data", ["b", "a"]), **{"optim.learning_rate": 1e30, "warmup.steps": 0}
  )
  with pytest.raises(loop.DivergedError):
    loop.train(config, tmp_path / "run")
  found = replay.load(tmp_path / "run")
  _, scalars = replay.run(found)
  assert scalars["nonfinite"] > 0
  assert replay.describe(tmp_path / "run")  # it computes the carried state, of both levels
  folder = tmp_path / "run" / replay.FOLDER / str(replay.steps(tmp_path / "run")[0])
  report = json.loads((folder / replay.REPORT).read_text())
  for wrong in ("x", [1.5], report["superclasses"][1:]):
    text = json.dumps(report | {"superclasses": wrong})
    (folder / replay.REPORT).write_text(text)
    with pytest.raises(ValueError, match=r"is corrupt \(superclasses\)"):
      replay.load(tmp_path / "run")
