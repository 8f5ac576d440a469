"""Tests the workdir of a run: its owner, and its log across kills."""

import fnmatch
import json
import re

import pytest
import runs

from soprc_jax.training import checkpoints, replay, v_history, workdir
from soprc_jax.training import config as config_lib


def _config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(
    {key.replace("__", "."): value for key, value in values.items()}
  )
  return config_lib.resolve(config)


class TestClaim:
  def test_new_folder_receives_the_config(self, tmp_path):
    workdir.claim(tmp_path / "a" / "b", _config(seed=7))
    assert workdir.read_config(tmp_path / "a" / "b")["seed"] == 7
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [workdir.CONFIG]

  def test_check_tells_a_free_folder_and_changes_nothing(self, tmp_path):
    assert workdir.check(tmp_path / "new", _config())
    assert workdir.check(tmp_path, _config())
    assert list(tmp_path.iterdir()) == []
    workdir.claim(tmp_path, _config())
    assert not workdir.check(tmp_path, _config())
    with pytest.raises(ValueError, match="another config"):
      workdir.check(tmp_path, _config(seed=1))

  def test_same_config_goes_on(self, tmp_path):
    workdir.claim(tmp_path, _config())
    before = (tmp_path / workdir.CONFIG).read_text()
    workdir.claim(tmp_path, _config())
    workdir.claim(tmp_path, _config(data__workers=4))  # does not change the results
    assert (tmp_path / workdir.CONFIG).read_text() == before

  def test_a_config_of_an_older_version_goes_on(self, tmp_path):
    tree = json.loads(config_lib.to_json(_config()))
    del tree["loss"]["prior"]["until"], tree["log"]
    (tmp_path / workdir.CONFIG).write_text(json.dumps(tree))
    assert not workdir.check(tmp_path, _config())
    with pytest.raises(ValueError, match=r"loss\.prior\.until: 1\.0 there, 0\.5 here"):
      workdir.check(tmp_path, _config(loss__prior__until=0.5))

  def test_other_config_is_refused_with_the_keys(self, tmp_path):
    workdir.claim(tmp_path, _config())
    before = (tmp_path / workdir.CONFIG).read_text()
    with pytest.raises(ValueError, match="another config") as error:
      workdir.claim(tmp_path, _config(optim__learning_rate=0.5, model__width=8))
    lines = str(error.value).splitlines()
    assert "optim.learning_rate: 0.01 there, 0.5 here" in map(str.strip, lines)
    assert "model.width: 64 there, 8 here" in map(str.strip, lines)
    assert len(lines) == 3
    assert str(tmp_path) in lines[0]
    assert (tmp_path / workdir.CONFIG).read_text() == before

  @pytest.mark.parametrize(
    "name",
    [
      *(
        workdir.METRICS,
        workdir.RESULTS,
        workdir.PR_CURVE,
        "pr_curve.png",
        "convergence.png",
        v_history.FILE,
      ),
      *(
        checkpoints.NEWEST,
        checkpoints.BEST,
        checkpoints.DAMAGED,
        checkpoints.VARIABLES,
        replay.FOLDER,
      ),
      *(
        "tensorboard",
        "evaluation_test.json",
        "comparison.json",
        "simulation.json",
        "stability.json",
        "benchmark.json",
      ),
    ],
  )
  def test_f66_what_the_run_would_overwrite_is_an_error(self, tmp_path, name):
    (tmp_path / name).write_text("do not lose me")
    (tmp_path / "thesis.tex").write_text("nor me")
    with pytest.raises(
      ValueError, match=rf"holds {re.escape(name)}, which .*: choose a new folder"
    ):
      workdir.claim(tmp_path, _config())
    assert {path.name for path in tmp_path.iterdir()} == {name, "thesis.tex"}
    assert (tmp_path / name).read_text() == "do not lose me"

  def test_f66_other_files_are_no_obstacle(self, tmp_path):
    (tmp_path / "log").write_text("a scheduler writes here")
    (tmp_path / "code").mkdir()
    (tmp_path / "latest.log").symlink_to(tmp_path / "log")
    (tmp_path / "code" / "data").symlink_to(tmp_path)
    workdir.claim(tmp_path, _config())
    assert not workdir.check(tmp_path, _config())  # a second time, to resume
    assert (tmp_path / "log").read_text() == "a scheduler writes here"

  @pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
  def test_f66_a_link_in_the_place_of_what_the_run_writes_is_an_error(self, tmp_path, name):
    workdir.claim(tmp_path, _config())
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a link"):
      workdir.check(tmp_path, _config())

  def test_f66_the_names_are_those_of_a_run(self):
    """Checks that `workdir.WRITES` lists every file and folder that a run writes."""
    names = {path.name for path in runs.finished().workdir.iterdir()} - {
      workdir.LOCK,
      workdir.HOLDER,
    }
    assert names == {
      name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in workdir.WRITES)
    }

  def test_what_a_kill_before_the_first_write_leaves_is_no_obstacle(self, tmp_path):
    (tmp_path / f".{workdir.CONFIG}.0123456789abcdef.tmp").write_text("{")
    workdir.claim(tmp_path, _config())
    assert workdir.read_config(tmp_path)["seed"] == 0

  @pytest.mark.parametrize("text", ["", "{", "\0\0\0"])
  def test_damaged_config_is_told(self, tmp_path, text):
    (tmp_path / workdir.CONFIG).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is corrupt"):
      workdir.claim(tmp_path, _config())

  def test_folder_without_a_run_is_told(self, tmp_path):
    with pytest.raises(ValueError, match=r"holds no run \(config\.json is missing\)$"):
      workdir.read_config(tmp_path)
    (tmp_path / "variables").mkdir()
    with pytest.raises(ValueError, match="the output of soprc convert-weights, which has no data"):
      workdir.read_config(tmp_path)


def _lines(*steps):
  return [{"step": step, "loss": step / 3, "val_mAUPRC": 0.1} for step in steps]


def _write(folder, lines, tail=""):
  (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def _read(folder):
  return [json.loads(line) for line in (folder / workdir.METRICS).read_text().splitlines()]


class TestMetricsLog:
  def test_lines_arrive_in_order(self, tmp_path):
    log = workdir.MetricsLog(tmp_path, last_step=0)
    for line in _lines(1, 2, 3):
      log.write(line)
    log.close()
    assert _read(tmp_path) == _lines(1, 2, 3)

  def test_sync_puts_lines_on_disk(self, tmp_path):
    log = workdir.MetricsLog(tmp_path, last_step=0)
    log.write(_lines(1)[0])
    log.sync()
    assert _read(tmp_path) == _lines(1)
    log.close()

  @pytest.mark.parametrize("tail", ["", '{"step": 6, "lo', '{"step": 6', "\0\0\0"])
  def test_resuming_drops_later_and_broken_lines(self, tmp_path, tail):
    _write(tmp_path, _lines(1, 2, 3, 4, 5), tail)
    log = workdir.MetricsLog(tmp_path, last_step=3)
    assert log.lines == _lines(1, 2, 3)
    log.write(_lines(4)[0])
    log.close()
    assert _read(tmp_path) == log.lines == _lines(1, 2, 3, 4)

  def test_a_line_that_only_lacks_its_end_is_kept_whole(self, tmp_path):
    (tmp_path / workdir.METRICS).write_text(json.dumps(_lines(1)[0]))
    log = workdir.MetricsLog(tmp_path, last_step=1)
    log.write(_lines(2)[0])
    log.close()
    assert _read(tmp_path) == _lines(1, 2)

  def test_reading_ends_at_a_line_that_was_cut_off(self, tmp_path):
    _write(tmp_path, _lines(1, 2), '{"step": 3, ')
    assert list(workdir.read_metrics(tmp_path)) == _lines(1, 2)

  def test_reading_a_missing_file(self, tmp_path):
    assert list(workdir.read_metrics(tmp_path)) == []

  def test_writing_results_replaces_them_whole(self, tmp_path):
    workdir.write_results(tmp_path, {"test": {"mAUPRC": 0.5}, "ks": (1, 10)})
    workdir.write_results(tmp_path, {"test": {"mAUPRC": 0.6}, "ks": (1, 10)})
    assert json.loads((tmp_path / workdir.RESULTS).read_text()) == {
      "test": {"mAUPRC": 0.6},
      "ks": [1, 10],
    }
    assert [path.name for path in tmp_path.iterdir()] == [workdir.RESULTS]

  @pytest.mark.parametrize("steps", [(1, 2, 4, 5), (1, 2), (1, 2, 3, 3, 4, 5), ()])
  def test_a_log_that_lacks_steps_of_the_checkpoint_is_told_and_left_alone(self, tmp_path, steps):
    _write(tmp_path, _lines(*steps))
    before = (tmp_path / workdir.METRICS).read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl .*it is corrupt"):
      workdir.MetricsLog(tmp_path, last_step=5)
    assert (tmp_path / workdir.METRICS).read_bytes() == before
