"""Tests the command line: helpful errors, a run from start to results, and its evaluation."""

import functools
import json
import pathlib
import shutil
import subprocess
import sys

from ml_collections import config_dict
import numpy as np
from PIL import Image
import pytest
import runs

from experiments import flags as flags_lib
from experiments.ablate import ablation
from experiments.binary import binary_config
from experiments.compare import comparison, plans
from soprc_jax.training import (
  build,
  checkpoints,
  loop,
  optimizers,
  trivial_baselines,
  workdir,
)
from soprc_jax.training import config as config_lib

_TRAIN, _EVALUATE = "experiments.train", "experiments.evaluate"


def _fails(module, *flags, cwd=runs.ROOT):
  """Returns the message of a command that must end with one: no traceback, exit status 1."""
  done = runs.call(module, *flags, cwd=cwd)
  assert done.returncode == 1, done.stdout + done.stderr
  assert "Traceback" not in done.stderr
  assert done.stderr.startswith("Error: ")
  return done.stderr


def _fails_late(module, *flags):
  """Returns the last line of a command that fails after its start: no traceback, exit status 1."""
  done = runs.call(module, *flags)
  assert done.returncode == 1, done.stdout + done.stderr
  assert "Traceback" not in done.stderr
  assert done.stderr.splitlines()[-1].startswith("Error: ")
  return done.stderr.splitlines()[-1]


class TestMistakes:
  def test_no_flags(self):
    message = _fails(_TRAIN)
    assert "missing --config and --workdir" in message
    assert "soprc train --config=glyphs --workdir=" in message
    assert "missing --workdir. For example:\n  soprc evaluate --workdir=" in _fails(_EVALUATE)

  @pytest.mark.parametrize(
    ("flags", "message"),
    [
      ([], "missing --workdir"),
      (["--workdir=missing"], "missing does not exist: give the folder of a run"),
    ],
  )
  def test_replay_without_a_run(self, tmp_path, flags, message):
    assert message in _fails("experiments.replay", *flags, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []

  def test_no_workdir(self):
    assert "missing --workdir" in _fails(_TRAIN, f"--config={runs.GLYPHS}")

  @pytest.mark.parametrize(
    ("module", "flags"),
    [
      (_TRAIN, ["--help"]),
      (_EVALUATE, ["--config=nowhere.py", "--help", "--no_such_flag"]),
      (_TRAIN, ["--helpfull"]),
      ("experiments.compare", ["--workdir=gs://bucket/run", "-help"]),
      ("experiments.simulate", ["--helpshort"]),
    ],
  )
  def test_f67_help_is_a_success(self, tmp_path, module, flags):
    done = runs.call(module, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--workdir" in done.stdout
    assert f"soprc {module.removeprefix('experiments.')}" in done.stdout
    # Programs of one process do not list the flags of multi-process runs.
    assert ("--[no]distributed" in done.stdout) == (
      module in (_TRAIN, _EVALUATE) or "--helpfull" in flags
    )

  @pytest.mark.parametrize(
    ("module", "table"),
    [(_TRAIN, config_lib), ("experiments.train_binary", binary_config)],
    ids=["train", "binary"],
  )
  def test_help_lists_the_config_keys(self, module, table):
    short, full = (runs.call(module, flag).stdout for flag in ("--help", "--helpfull"))
    for key in table.KEYS:
      line = (
        f"  --config.{key.name}: {key.meaning}\n    ({key.allowed}; default: {key.default!r})\n"
      )
      assert line in full
      assert (line in short) == key.often
    assert "--config." not in runs.call("experiments.simulate", "--help").stdout

  def test_f67_text_after_two_dashes_is_no_call_for_help(self):
    assert "unexpected argument '--help'" in _fails(_TRAIN, "--", "--help")

  @pytest.mark.parametrize(
    ("flag", "hints"),
    [
      ("--config.model.wdith=8", ["model.wdith", "Did you mean 'model.width'", "embedding_dim"]),
      ("--config.optin.name=adam", ["optin.name", "Did you mean 'optim"]),
      (
        "--config.train.steps=1.5",
        ["--config.train.steps must be a whole number, as 600 in", "invalid literal", "'1.5'"],
      ),
      (
        "--config.loss.prior.value=much",
        ["--config.loss.prior.value must be a number: ", "'much'"],
      ),
      (
        "--config.log.progress=maybe",
        ["--config.log.progress must be true or false, as True in", "maybe"],
      ),
      ("--config.model.width=wide", ["width", "wide"]),
      ("--config.model.width=0", ["model.width", ">= 1", "0"]),
      (
        "--config.loss.prior.kind=true",
        ["loss.prior.kind", "frequency, scaled, batch, constant", "true"],
      ),
      ("--config.train.batch_size=18", ["train.batch_size", "16 or 20"]),
      ("--config.loss.preset=papr", ["loss.preset", "paper", "authors"]),
      ("--config.loss.smooth_ap.tau=0.1", ["loss.smooth_ap.tau is not used by loss.name=soprc"]),
      (
        "--config.loss.triplet={'margin': 0.3}",
        ["loss.triplet.margin is not used by loss.name=soprc"],
      ),
      (
        "--config.data.min_crop_area=0.5",
        ["data.min_crop_area is not used by data.augmentation=affine", "choose resized_crop"],
      ),
      (":ap --config.loss.lambda2=5", ["loss.lambda2 is not used by loss.name=ap: leave it out"]),
      ("--wrkdir=runs/x", ["wrkdir"]),
      ("runs/x", ["unexpected argument 'runs/x'"]),
    ],
  )
  def test_wrong_flag(self, tmp_path, flag, hints):
    argument, *flag = flag.split(" ") if flag[0] == ":" else ("", flag)
    message = _fails(
      _TRAIN, f"--config={runs.GLYPHS}{argument}", f"--workdir={tmp_path / 'new'}", *flag
    )
    assert [hint for hint in hints if hint not in message] == []
    assert not (tmp_path / "new").exists()  # rejected before anything is written

  def test_wrong_argument_of_the_config(self, tmp_path):
    message = _fails(_TRAIN, f"--config={runs.GLYPHS}:tripelt", f"--workdir={tmp_path / 'new'}")
    assert "tripelt" in message
    assert "triplet" in message

  def test_missing_config_file(self, tmp_path):
    message = _fails(_TRAIN, "--config=configs/glifs.py", f"--workdir={tmp_path / 'new'}")
    assert "there is no file 'configs/glifs.py'" in message
    assert (
      "Did you mean 'glyphs'? Names: characters, features, folder, glyphs, imbalanced, "
      "inaturalist, multilabel, sop, vehicle_id" in message
    )
    assert "Did you mean 'glyphs'?" in _fails(
      _TRAIN, "--config=configs/glyphs.py", "--workdir=new", cwd=tmp_path
    )

  def test_a_bare_name_is_a_config(self, tmp_path):
    message = _fails(_TRAIN, "--config=glyphs:tripelt", f"--workdir={tmp_path / 'new'}")
    assert "glyphs.py:tripelt" in message
    assert "triplet" in message

  @pytest.mark.parametrize(
    ("flags", "hints"),
    [
      (["--config", "glyphs:tripelt"], ["glyphs.py:tripelt", "triplet"]),
      (["-config=glyphs:tripelt"], ["glyphs.py:tripelt", "triplet"]),
      (["-config", "glyphs", "-config.model.wdith=8"], ["Did you mean 'model.width'"]),
      (["--config=glyphs", "--config=glyphs:tripelt"], ["glyphs.py:tripelt", "triplet"]),
      (["--config=glyphs:tripelt", "--config.model.width=0", "--config=glyphs"], ["model.width"]),
      (["--config=common"], ["no file 'common'", "Names: characters, features, folder, glyphs"]),
      ([f"--config={'a' * 300}"], ["there is no file 'aaa"]),
      (["--", "--config=glyphs"], ["unexpected argument '--config=glyphs'"]),
      (["runs/x", "--config=glyphs"], ["unexpected argument 'runs/x'"]),
      (["--config"], ["Missing value for flag --config"]),
    ],
  )
  def test_every_form_of_the_flag_of_the_config(self, tmp_path, flags, hints):
    message = _fails(_TRAIN, "--workdir=new", *flags, cwd=tmp_path)
    assert [hint for hint in hints if hint not in message] == []
    assert list(tmp_path.iterdir()) == []

  def test_batch_that_needs_more_classes_than_there_are(self, tmp_path):
    message = _fails(_TRAIN, *runs.tiny_flags(tmp_path / "new", **{"train.batch_size": 9000}))
    assert "needs 2250 training classes" in message
    assert "set train.batch_size=" in message
    # The corrected command must not report that the folder belongs to another config.
    workdir.claim(tmp_path / "new", runs.tiny_config())

  def test_training_that_breaks_down(self, tmp_path):
    flags = runs.tiny_flags(
      tmp_path / "new", steps=4, warmup_steps=0, **{"optim.learning_rate": 1e30, "eval.every": 0}
    )
    message = _fails_late(_TRAIN, *flags)
    assert "training diverged at step" in message
    assert "try a lower optim.learning_rate" in message

  def test_evaluation_of_a_folder_without_a_run(self, tmp_path):
    assert "holds no run" in _fails(_EVALUATE, *runs.tiny_flags(tmp_path))

  @pytest.mark.parametrize(
    ("start", "hint"),
    [
      ("missing", "holds no checkpoint"),
      ("missing.pth", "there is no such file"),
      ("notes.txt", "is a file of unknown type"),
      ("folder.pth", "it is a folder, not a file of weights"),
      ("empty", "holds no checkpoint"),
      ("gs://bucket/run", "remote folders are not supported"),
      ("s3://bucket/weights.pth", "remote folders are not supported"),
      ("hf://nobody", "hf://USER/REPOSITORY"),
    ],
  )
  def test_f67_a_start_that_is_not_there_is_noticed_before_anything_is_built(
    self, tmp_path, monkeypatch, start, hint
  ):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(build, "make_data", lambda config: pytest.fail("the data were read"))
    start = start if "://" in start else str(tmp_path / start)
    with pytest.raises((ValueError, FileNotFoundError), match=hint) as error:
      loop.train(runs.tiny_config(**{"model.init_from": start}), tmp_path / "new")
    assert start in str(error.value)
    assert not (tmp_path / "new").exists()
    # A comparison and an ablation check the same before they read data.
    plan = plans.read_plan(runs.tiny_comparison(init_from=start))
    with pytest.raises((ValueError, FileNotFoundError), match=hint):
      comparison.check(plan, lambda method: pytest.fail("a config was made"), tmp_path / "new")
    with pytest.raises((ValueError, FileNotFoundError), match=hint):
      ablation.check(
        ablation.Plan((), (0,), start),
        lambda option: pytest.fail("a config was made"),
        tmp_path / "new",
      )

  def test_f67_a_start_of_another_shape_leaves_no_folder(self, tmp_path):
    flags = runs.tiny_flags(
      tmp_path / "new", **{"model.init_from": runs.finished().workdir, "model.width": 8}
    )
    done = runs.call(_TRAIN, *flags)
    assert done.returncode == 1
    assert "does not fit model.* of this config" in done.stderr
    assert not (tmp_path / "new").exists()

  @pytest.mark.parametrize(
    ("module", "flags", "hint"),
    [
      (
        _TRAIN,
        [f"--config={runs.GLYPHS}", "--workdir=gs://bucket/run"],
        "--workdir=gs://bucket/run: remote",
      ),
      (
        _TRAIN,
        [f"--config={runs.GLYPHS}", "--workdir=run", "--config.data.root=s3://b"],
        "data.root=s3://b: remote",
      ),
      (
        _TRAIN,
        ["--config=gs://bucket/glyphs.py", "--workdir=run"],
        "--config=gs://bucket/glyphs.py: remote",
      ),
      ("experiments.simulate", ["--workdir=hdfs://host/run"], "--workdir=hdfs://host/run: remote"),
      (
        "experiments.report",
        ["--workdir=.", "--output=gs://b/a.html"],
        "--output=gs://b/a.html: remote",
      ),
      (
        "experiments.embed",
        ["--workdir=.", "--output=gs://b/a.npz"],
        "--output=gs://b/a.npz: remote",
      ),
      (
        "experiments.embed",
        ["--workdir=.", "--output=a.npz", "--images=s3://b"],
        "--images=s3://b: remote",
      ),
      (
        "experiments.search",
        ["--workdir=.", "--query=s3://b/a.png"],
        "--query=s3://b/a.png: remote",
      ),
      (
        "experiments.search",
        ["--workdir=.", "--query=a.png", "--index=s3://a"],
        "--index=s3://a: remote",
      ),
      (
        "experiments.search",
        ["--workdir=.", "--query=a.png", "--contact_sheet=s3://a"],
        "--contact_sheet=s3://a: remote",
      ),
      (
        "experiments.convert_weights",
        ["--input=a.pth", "--output=gs://b"],
        "--output=gs://b: remote",
      ),
      (
        "experiments.convert_weights",
        ["--input=gs://b/a.pth", "--output=new"],
        "--input=gs://b/a.pth: remote",
      ),
      (
        "experiments.export",
        ["--workdir=.", "--output=file:///tmp/a"],
        "--output=file:///tmp/a: give the plain path",
      ),
      ("experiments.report", ["--workdir=.", "--data_root=gs://b"], "--data_root=gs://b: remote"),
      ("experiments.benchmark", ["auprc", "--out=gs://b"], "--out=gs://b: remote"),
      # Missing inputs are reported before the model of the run (missing too) is read.
      (
        "experiments.report",
        ["--workdir=.", "--data_root=gone"],
        "there is no such folder or file",
      ),
      (
        "experiments.embed",
        ["--workdir=.", "--output=a.npz", "--images=gone"],
        "--images=gone: there is no such file",
      ),
      (
        "experiments.search",
        ["--workdir=.", "--query=a.png", "--index=gone.npz"],
        "--index=gone.npz: there is no such",
      ),
      (
        "experiments.convert_weights",
        ["--input=gone.pth", "--output=new"],
        "--input=gone.pth: there is no such file",
      ),
    ],
  )
  def test_f59_f67_a_path_that_cannot_be_used_leaves_nothing_behind(
    self, tmp_path, module, flags, hint
  ):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    before = sorted(tmp_path.rglob("*"))
    message = _fails(module, *flags, cwd=tmp_path)
    assert hint in message
    assert sorted(tmp_path.rglob("*")) == before

  def test_f66_the_log_of_a_run_may_lie_in_its_folder(self, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "log", "w") as log:
      command = [
        sys.executable,
        "-m",
        _TRAIN,
        *runs.tiny_flags(tmp_path / "run", steps=2, warmup_steps=0),
      ]
      done = subprocess.run(command, cwd=runs.ROOT, env=runs.environment(), stdout=log, stderr=log)
    assert done.returncode == 0, (tmp_path / "run" / "log").read_text()
    assert "test: mAUPRC" in (tmp_path / "run" / "log").read_text()
    assert (tmp_path / "run" / "results.json").exists()


_PRINTS = r"""
import logging, os, sys
from experiments import flags

flags.parse(["program"])
logging.basicConfig()
print("one \u00fc \u2192 \udcff" + "." * 100_000)
print("two")
logging.warning("three \u2192")
print("four", file=sys.stderr)
with open(sys.argv[1], "w") as file:
  file.write("done")
"""


class TestStreams:
  """Tests that printing cannot end a run that has succeeded."""

  def _call(self, tmp_path, redirection="", **variables):
    command = [
      "bash",
      "-c",
      f'set -o pipefail; "$0" "$@" {redirection}',
      sys.executable,
      "-c",
      _PRINTS,
      tmp_path / "end",
    ]
    done = subprocess.run(
      command, cwd=runs.ROOT, env=runs.environment(**variables), capture_output=True, timeout=300
    )
    assert (tmp_path / "end").read_text() == "done"
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    return done

  @pytest.mark.parametrize(
    "variables",
    [
      {"PYTHONIOENCODING": "ascii"},
      {"PYTHONIOENCODING": "latin-1"},
      {"PYTHONIOENCODING": "ascii:strict", "PYTHONUNBUFFERED": "1"},
      {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
      {"LC_ALL": "C.UTF-8"},
    ],
  )
  def test_f57_characters_that_the_terminal_lacks_are_escaped(self, tmp_path, variables):
    done = self._call(tmp_path, **variables)
    assert b"\\udcff" in done.stdout
    assert (b"\\u2192" in done.stdout) == (variables.get("LC_ALL") != "C.UTF-8")
    assert done.stdout.splitlines()[1] == b"two"
    assert b"three" in done.stderr
    assert done.stderr.splitlines()[-1] == b"four"

  @pytest.mark.parametrize(
    "redirection", ["| head -c 3", "2>&1 | head -c 3", ">&-", "2>&-", ">&- 2>&-", "| (exec <&-)"]
  )
  @pytest.mark.parametrize("unbuffered", ["", "1"])
  def test_f57_a_reader_that_has_left_ends_no_program(self, tmp_path, redirection, unbuffered):
    self._call(tmp_path, redirection, PYTHONUNBUFFERED=unbuffered)

  @pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no device that is full")
  @pytest.mark.parametrize("unbuffered", ["", "1"])
  def test_f57_results_that_a_full_disk_does_not_take_are_a_message(self, tmp_path, unbuffered):
    command = [
      "bash",
      "-c",
      '"$0" "$@" >/dev/full',
      sys.executable,
      "-c",
      _PRINTS,
      tmp_path / "end",
    ]
    env = runs.environment(PYTHONUNBUFFERED=unbuffered)
    done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, timeout=300)
    assert b"Error: the output cannot be written (No space left on device)" in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.returncode != 0

  def test_f57_a_run_ends_well_without_utf_8(self, tmp_path):
    folder = tmp_path / "l\u00e4uft \u2192"
    env = runs.environment(PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    done = runs.call(_TRAIN, *runs.tiny_flags(folder, steps=2, warmup_steps=0), env=env)
    assert done.returncode == 0, done.stderr
    assert "Results: " in done.stdout
    assert "l\\xe4uft \\u2192" in done.stdout
    assert (folder / workdir.RESULTS).exists()


@functools.cache
def _results():
  return json.loads((runs.finished().workdir / workdir.RESULTS).read_text())


def test_an_override_of_a_group_gives_each_of_its_keys(monkeypatch):
  given = {
    "train": config_dict.ConfigDict({"steps": 1, "batch_size": 8}),
    "loss.prior": config_dict.ConfigDict({"kind": "scaled"}),
    "optim.milestones": (1, 2),
  }
  monkeypatch.setattr(flags_lib.config_flags, "get_override_values", lambda flag: given)
  assert flags_lib.config_overrides() == {
    "train.steps": 1,
    "train.batch_size": 8,
    "loss.prior.kind": "scaled",
    "optim.milestones": (1, 2),
  }


def test_f61_f64_a_config_below_the_home_folder_and_its_message(tmp_path):
  (tmp_path / "c.py").write_text(
    "def get_config():\n  raise ValueError('found, with \\x1b[31m in it')\n"
  )
  env = runs.environment(HOME=str(tmp_path))
  done = runs.call("experiments.train", "--config=~/c.py", f"--workdir={tmp_path / 'run'}", env=env)
  assert done.returncode == 1
  assert done.stderr == f"Error: --config={tmp_path}/c.py: found, with \\x1b[31m in it\n"


class TestRun:
  def test_results(self):
    results = _results()
    assert {"config", "steps", "images_per_second", "val", "test"} <= set(results)
    assert results["steps"] == 24
    assert results["config"] == json.loads((runs.finished().workdir / workdir.CONFIG).read_text())
    assert results["images_per_second"] > 0
    lines = list(workdir.read_metrics(runs.finished().workdir))
    waited, total = (sum(line[name] for line in lines) for name in ("data_wait", "seconds"))
    assert results["data_wait_share"] == round(waited / total, 4)
    for split in ("val", "test"):
      assert set(results[split]) >= {
        "mAUPRC",
        "recall@1",
        "recall@10",
        "num_queries",
        "num_skipped",
      }
      assert 0 < results[split]["mAUPRC"] < 1
      assert results[split]["recall@1"] <= results[split]["recall@10"] <= 1

  def test_last_words(self):
    printed = runs.finished().stdout
    lines = printed[printed.index("test: mAUPRC") :].splitlines()
    found = _results()["test"]
    shown = [
      "{} {:.4f} [{:.4f}, {:.4f}]".format(name, found[name], *found["intervals"][name])
      for name in ("mAUPRC", "recall@1", "recall@10")
    ]
    assert lines[0] == f"test: {', '.join(shown)} ({found['num_queries']} queries)"
    tested = {"trained model": _results()["test"]} | {
      trivial_baselines.TITLES[name]: values
      for name, values in _results()["baselines"]["test"].items()
    }
    assert lines[1].split() == ["mAUPRC", "recall@1", "recall@10"]
    for line, (title, values) in zip(lines[2:6], tested.items(), strict=True):
      assert line.startswith(title)
      assert line.removeprefix(title).split() == [
        f"{values[name]:.4f}" for name in lines[1].split()
      ]
    assert str(runs.finished().workdir / workdir.RESULTS) in lines[6]
    assert lines[7] == f"Report: soprc report --workdir={runs.finished().workdir}"
    assert "\r" not in runs.finished().stderr  # plain lines where there is no terminal
    assert "step 24/24" in runs.finished().stderr

  def test_one_line_a_step(self):
    lines = list(workdir.read_metrics(runs.finished().workdir))
    assert [line["step"] for line in lines] == list(range(1, 25))
    schedule = optimizers.make_schedule(runs.tiny_config())
    np.testing.assert_allclose(
      [line["learning_rate"] for line in lines], [schedule(step) for step in range(24)]
    )
    for line in lines:
      assert all(np.isfinite(value) for value in line.values())
      assert ("val_mAUPRC" in line) == (line["step"] % 3 == 0)
      assert ("soprc" in line) == (line["step"] > 6)

  def test_the_best_network_on_val_is_tested(self):
    lines = list(workdir.read_metrics(runs.finished().workdir))
    best = max(
      (line for line in lines if "val_mAUPRC" in line), key=lambda line: line["val_mAUPRC"]
    )
    assert _results()["tested_step"] == best["step"]
    assert _results()["val"]["mAUPRC"] == best["val_mAUPRC"]

  def test_newest_checkpoints_are_kept(self):
    kept = sorted(
      int(path.name) for path in (runs.finished().workdir / checkpoints.NEWEST).iterdir()
    )
    assert kept == [20, 24]
    assert [path.name for path in (runs.finished().workdir / checkpoints.BEST).iterdir()] == [
      str(_results()["tested_step"])
    ]

  def test_pictures_and_tensorboard(self):
    for name in ("convergence.png", "pr_curve.png"):
      with Image.open(runs.finished().workdir / name) as picture:
        picture.load()
        assert min(picture.size) > 300
        assert (
          len(picture.convert("L").histogram()) > len(set(picture.convert("L").histogram())) > 10
        )
    assert list((runs.finished().workdir / "tensorboard").glob("events.out.tfevents.*"))
    with np.load(runs.finished().workdir / "pr_curve.npz") as curve:
      assert np.all(np.diff(curve["recall"]) <= 0)

  def test_the_command_that_it_names_makes_a_report(self, tmp_path):
    program, *flags = runs.finished().stdout.split("Report: soprc ")[1].splitlines()[0].split()
    done = runs.call(f"experiments.{program}", *flags, f"--output={tmp_path / 'page.html'}")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert f"<dd>{_results()['test']['mAUPRC']:.4f}</dd>" in page
    for absent in ("Not shown", "have changed since", "recorded no software"):
      assert absent not in page

  def test_other_config_is_refused_and_nothing_changes(self):
    folder = runs.finished().workdir
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    message = _fails(_TRAIN, *runs.tiny_flags(folder, **{"loss.tau1": 0.5}))
    assert "loss.tau1: 0.03 there, 0.5 here" in message
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


class TestEvaluate:
  @pytest.fixture
  def folder(self, tmp_path):
    """Returns a copy of the run, since the program writes into it."""
    return shutil.copytree(runs.finished().workdir, tmp_path / "copy")

  def test_gives_the_test_metrics_of_the_run(self, folder):
    done = runs.call(_EVALUATE, f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    values = json.loads((folder / "evaluation_test.json").read_text())
    assert values.pop("checkpoint_step") == _results()["tested_step"]
    assert values == _results()["test"]
    assert "test: mAUPRC" in done.stdout

  def test_other_config_is_refused(self):
    message = _fails(_EVALUATE, *runs.tiny_flags(runs.finished().workdir, **{"model.width": 8}))
    assert "model.width: 4 there, 8 here" in message

  @pytest.mark.slow
  def test_newest_network_on_val(self, folder):
    done = runs.call(_EVALUATE, *runs.tiny_flags(folder), "--split=val", "--checkpoint=newest")
    assert done.returncode == 0, done.stderr
    values = json.loads((folder / "evaluation_val.json").read_text())
    last = list(workdir.read_metrics(folder))[-1]
    assert values["checkpoint_step"] == 24
    assert values["mAUPRC"] == last["val_mAUPRC"]


class TestLargerRuns:
  """Tests runs that take minutes."""

  @pytest.mark.slow
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_resnet50(self, tmp_path, dtype):
    flags = runs.tiny_flags(
      tmp_path,
      steps=3,
      warmup_steps=0,
      **{
        "model.name": "resnet50",
        "model.stem": "imagenet",
        "model.dtype": dtype,
        "data.image_size": 32,
        "eval.image_size": 32,
        "data.val_share": 0.01,
        "data.train_share": 0.98,
      },
    )
    done = runs.call(_TRAIN, *flags)
    assert done.returncode == 0, done.stderr
    lines = list(workdir.read_metrics(tmp_path))
    assert len(lines) == 3
    assert all(np.isfinite(value) for line in lines for value in line.values())

  @pytest.mark.slow
  def test_starting_from_the_network_of_another_run(self, tmp_path):
    flags = runs.tiny_flags(
      tmp_path,
      steps=1,
      warmup_steps=0,
      **{"model.init_from": runs.finished().workdir, "optim.learning_rate": 0.0},
    )
    done = runs.call(_TRAIN, *flags)
    assert done.returncode == 0, done.stderr
    got, want = runs.states(tmp_path), runs.states(runs.finished().workdir)
    params = [path for path in want if path.startswith(f"{checkpoints.BEST}.params")]
    assert params
    for path in params:
      np.testing.assert_array_equal(got[path], want[path])


_IMPORTS = """
import sys
import {module}
from absl import flags
from jax._src import xla_bridge

names = flags.FLAGS.flags_by_module_dict()
defined = [name for name in names if "soprc_jax" in name or "experiments" in name]
assert not defined, defined
assert not flags.FLAGS.is_parsed()
assert not xla_bridge.backends_are_initialized()
heavy = [name for name in {heavy} if name in sys.modules]
assert not heavy, heavy
flags.DEFINE_string("config", None, "")
flags.DEFINE_string("workdir", None, "")
flags.FLAGS(["program", "--workdir=x"])
"""
_TRAIN_ONLY = (
  "flax",
  "orbax",
  "grain",
  "ml_collections",
  "tensorboardX",
  "PIL",
  "matplotlib",
  "tensorflow",
  "torch",
)


_IMPORT_ALL = """
import importlib, json, logging, os, pkgutil, random, signal, sys, threading, warnings
from absl import flags

for name in ("config", "workdir", "seed", "coordinator", "num_processes", "split", "output"):
  flags.DEFINE_string(name, None, "")
# What these do when they are imported is theirs.
import chex, flax.linen, grain.python, jax, matplotlib, ml_collections, numpy, optax
import orbax.checkpoint, tensorboardX, tqdm
import absl.logging, hypothesis, PIL.ImageFile, safetensors.numpy
from jax._src import xla_bridge

def world():
  return {
    "environment": dict(os.environ),
    "root logger": [repr(logging.getLogger().handlers), logging.getLogger().level],
    "signals": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)],
    "warnings": [repr(one) for one in warnings.filters],
    "jax": {key: repr(value) for key, value in jax.config.values.items()},
    "devices": xla_bridge.backends_are_initialized(),
    "flags": sorted(flags.FLAGS),
    "parsed": flags.FLAGS.is_parsed(),
    "random": [repr(random.getstate()), repr(numpy.random.get_state())],
    "matplotlib": repr(matplotlib.get_backend(auto_select=False)),
    "pillow": [PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS],
    "threads": threading.active_count(),
    "folder": os.getcwd(),
    "path": list(sys.path),
  }

before = world()
import soprc_jax
names = [m.name for m in pkgutil.walk_packages(soprc_jax.__path__, "soprc_jax.")]
for name in names:
  importlib.import_module(name)
after = world()
flags.FLAGS(["program", "--workdir=x"])
changed = [key for key in before if before[key] != after[key]]
print("value of the test: " + json.dumps([changed, len(names)]))
"""


class TestImport:
  @pytest.mark.parametrize(
    ("module", "heavy"),
    [
      ("soprc_jax", _TRAIN_ONLY),
      ("soprc_jax.losses", _TRAIN_ONLY),
      ("soprc_jax.models", ("tensorflow",)),
      ("soprc_jax.data.pipeline", ("tensorflow",)),
      ("soprc_jax.training.loop", ("tensorflow",)),
    ],
  )
  def test_f36_library_defines_no_flags_and_touches_no_device(self, module, heavy):
    code = _IMPORTS.format(module=module, heavy=heavy)
    done = subprocess.run(
      [sys.executable, "-W", "error", "-c", code],
      cwd=runs.ROOT,
      env=runs.environment(),
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr

  def test_f36_every_module_can_be_imported_into_a_program_with_flags_of_the_same_names(self):
    done = subprocess.run(
      [sys.executable, "-W", "error", "-c", _IMPORT_ALL],
      cwd=runs.ROOT,
      env=runs.environment(),
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    changed, count = runs.value(done.stdout)
    assert changed == []
    assert count > 80
