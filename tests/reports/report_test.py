"""Tests the HTML reports: numbers, plots, missing parts, rejected input and layout in a browser.

The sources of a page (reports/reading.py, reports/tested.py) are tested with it.
"""

import dataclasses
import html.parser
import json
import pathlib
import re
import shutil

import numpy as np
import pages
import pytest
import runs
import trees

from experiments.compare import comparison_page as comparison
from experiments.report import writing
from soprc_jax.data import sources
from soprc_jax.reports import page, panel, run_charts, run_tables
from soprc_jax.reports import run as run_report
from soprc_jax.training import (
  build,
  checkpoints,
  classes,
  evaluation,
  methods,
  parallel,
  results,
  trivial_baselines,
  v_history,
  workdir,
)

_CHROMIUM = pathlib.Path("/usr/bin/chromium")
_ARGUMENTS = (
  "--no-sandbox --disable-gpu --disable-quic --no-first-run "
  "--disable-background-networking --disable-component-update --disable-sync"
)
_CLASSES = 28


def _v(step, row, name, *, visits=3, M=20):
  true = np.linspace(0.2, 0.8, M)
  v = true - 0.1 if visits else np.zeros(M)
  return {
    "class": name,
    "row": row,
    "weight": 0.5 if visits else 0.0,
    "visits": visits,
    "last_visit": step if visits else 0,
    "v": list(v),
    "true": list(true),
  }


def _lines(config):
  """Returns a log with a warm-up and a skipped step."""
  steps = config.warmup.steps + config.train.steps
  lines = []
  for step in range(1, steps + 1):
    line = {
      "step": step,
      "loss": None if step == 4 else 1.0 / step,
      "skipped": float(step == 4),
      "learning_rate": 0.01,
      "grad_norm": 1.0,
    }
    line |= {"prior": 0.5 / step} if step > config.warmup.steps else {}
    line |= {"val_mAUPRC": 0.1 * step, "val_recall@1": 0.1 * step} if step % 3 == 0 else {}
    lines.append(line | {"seconds": 30.0 if step == 1 else 0.1, "data_wait": 0.01})
  return lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Returns the folder of a run on images with awkward names. Its files are those of a run, its
  model is a random one.
  """
  root, folder = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("runs") / "run"
  for label in range(_CLASSES):
    name = pages.NAMES[label % len(pages.NAMES)] + ("" if label < len(pages.NAMES) else f" {label}")
    for index in range(1 if label == 9 else 4):
      trees.write(root / name / f"{index} <b>&.png", label, index)
  values = {
    "data.source": "folder",
    "data.root": str(root),
    "data.train_share": 0.2,
    "data.val_share": 0.1,
    "log.progress": False,
  }
  config = runs.tiny_config(steps=4, warmup_steps=2, **values)
  data = build.make_data(config)
  parts = build.make_parts(config, data.class_counts())
  state = dataclasses.replace(build.starting_state(config, parts), step=np.int32(6))
  workdir.claim(folder, config)
  lines = _lines(config)
  (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
  embed = evaluation.make_embed(parts.model, config)
  start = parallel.replicate({"params": state.params, "batch_stats": state.batch_stats})
  notes = {"baselines": trivial_baselines.measure(config, data.splits, embed, start)}
  results.write(folder, config, data.splits, embed, state, lines, notes=notes)
  for kind in (checkpoints.BEST, checkpoints.NEWEST):
    store = checkpoints.Store(folder / kind)
    store.save(state, classes.describe(data.splits, data_source=config.data.source))
    store.close()
  history = [
    {
      "step": step,
      "classes": [_v(step, 0, pages.NAMES[0]), _v(step, 3, "x", visits=2 * int(step > 3))],
    }
    for step in (3, 6)
  ]
  (folder / v_history.FILE).write_text("".join(json.dumps(line) + "\n" for line in history))
  return folder


@pytest.fixture(scope="module")
def whole_page(finished):
  return run_report.make(finished)


@pytest.fixture
def folder(finished, tmp_path):
  """Returns a copy without data and checkpoints, to be changed. Its report needs no embedding."""
  shutil.copytree(
    finished, tmp_path / "run", ignore=shutil.ignore_patterns(checkpoints.BEST, checkpoints.NEWEST)
  )
  return tmp_path / "run"


def _change(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def _cells(text, first):
  """Returns the cells of the table row that begins with a text."""
  for row in re.findall(r"<tr.*?</tr>", text, re.S):
    cells = [markup_free(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S)]
    if cells[0] == first:
      return cells[1:]
  raise AssertionError(f"no row {first!r}")


def markup_free(text):
  return html.unescape(re.sub(r"<.*?>", "", text))


class TestPageOfARun:
  def test_stands_alone_and_runs_nothing(self, whole_page):
    found = pages.Page(whole_page)
    assert found.all("script") + found.all("link") + found.all("iframe") == []
    assert all(
      image["src"].startswith(("data:image/png;base64,", "data:image/jpeg;base64,"))
      for image in found.all("img")
    )
    assert not [
      key for _, attributes in found.elements for key in attributes if key.startswith("on")
    ]
    assert "http" not in whole_page
    assert "url(" not in whole_page

  def test_names_show_as_text(self, whole_page):
    text = pages.Page(whole_page).text
    for name in (*pages.NAMES[:5], pages.NAMES[6]):
      assert name in text
    assert "0 <b>&.png" in text

  def test_is_accessible(self, whole_page):
    found = pages.Page(whole_page)
    assert all(image["alt"] for image in found.all("img"))
    pictures = [svg for svg in found.all("svg") if svg.get("aria-hidden") != "true"]
    assert len(pictures) > 8
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in pictures)
    assert all(table["aria-label"] for table in found.all("table"))
    targets = [section["id"] for section in found.all("section")]
    assert [link["href"] for link in found.all("a")] == [f"#{target}" for target in targets]
    assert len(found.all("h1")) == 1

  def test_results_are_those_of_the_run(self, finished, whole_page):
    there = json.loads((finished / workdir.RESULTS).read_text())
    low, high = there["test"]["intervals"]["mAUPRC"]
    assert _cells(whole_page, "mAUPRC") == [
      f"{there['val']['mAUPRC']:.4f}",
      f"{there['test']['mAUPRC']:.4f} [{low:.4f}, {high:.4f}]",
    ]
    assert _cells(whole_page, "queries without a positive, skipped") == [
      "-",
      str(there["test"]["num_skipped"]),
    ]
    assert "have changed since" not in whole_page
    assert "paper: SmoothAP" not in whole_page  # it has no numbers for these data
    data_name = pathlib.Path(there["config"]["data"]["root"]).name
    assert f"<h1>{finished.name}: SOPRC on {data_name}</h1>" in whole_page

  def test_both_levels_of_superclasses(self, folder, whole_page):
    assert "H-AP" not in whole_page
    found = {"superclass mAUPRC": 0.4321, "H-AP": 0.3456, "NDCG": 0.7654}
    _change(folder / workdir.RESULTS, lambda content: content["test"].update(found))
    text = run_report.make(folder)
    for name, value in found.items():
      assert _cells(text, name)[1] == f"{value:.4f}"
      assert f"test {name}" in markup_free(text)

  def test_baselines(self, folder, whole_page):
    there = json.loads((folder / workdir.RESULTS).read_text())
    assert len(there["baselines"]["test"]) == 3
    for name, values in there["baselines"]["test"].items():
      title = trivial_baselines.TITLES[name]
      assert _cells(whole_page, title)[0] == f"{values['mAUPRC']:.4f}"
    assert _cells(whole_page, "trained model")[0] == f"{there['test']['mAUPRC']:.4f}"
    assert "The trained model does not beat the baselines" in whole_page  # it is the initial one
    assert "has random weights" in pages.Page(whole_page).text
    _change(folder / workdir.RESULTS, lambda content: content["test"].update(mAUPRC=1.0))
    _change(folder / workdir.CONFIG, lambda content: content["model"].update(init_from="x.pth"))
    text = run_report.make(folder)
    assert _cells(text, "trained model")[0] == "1.0000"
    assert "does not beat" not in text
    assert "has the weights of model.init_from" in pages.Page(text).text

  def test_runs_of_older_versions_have_no_baselines(self, folder):
    _change(folder / workdir.RESULTS, lambda content: content.pop("baselines"))
    text = run_report.make(folder)
    assert "and the baselines on the same images" not in text
    assert "model before training" not in text

  def test_splits_of_different_size_are_not_to_be_compared(self, folder):
    note = "Do not compare the results on val and test"
    assert note not in run_report.make(folder)  # the numbers of queries are not known
    _change(folder / workdir.RESULTS, lambda content: content["val"].update(num_queries=1234))
    text = run_report.make(folder)
    assert note in text
    assert "1,234" in text
    _change(folder / workdir.RESULTS, lambda content: content.update(test={"mAUPRC": 0.5}))
    text = run_report.make(folder)
    assert note not in text
    assert _cells(text, "mAUPRC")[-1] == "0.5000"

  def test_panel_frames_right_and_wrong(self, whole_page):
    found = pages.Page(whole_page)
    kinds = [item["class"] for item in found.all("li") if "tile" in item.get("class", "")]
    queries = kinds.count("tile is-query")
    assert queries == panel.SOME + panel.WORST
    assert kinds.count("tile is-right") + kinds.count("tile is-wrong") == 10 * queries
    assert kinds.count("tile is-right") > 0
    assert found.text.count("✓ right") == kinds.count("tile is-right")
    for query in whole_page.split('<div class="query"><p>Query ')[1:]:
      own = re.search(r'alt="query: class (.*?), image', query)[1]
      classes_of = re.findall(r'alt="\d+ . (right|wrong): class (.*?), image', query)
      assert len(classes_of) == 10
      assert all((kind == "right") == (name == own) for kind, name in classes_of)
      assert f" {sum(kind == 'right' for kind, _ in classes_of)} of its " in query

  def test_config_and_versions(self, finished, whole_page):
    own = run_tables.flat(workdir.read_config(finished))
    for key in own:
      assert f"<code>{key}</code>" in whole_page
    assert _cells(whole_page, "model.width") == ["4", "64"]
    assert _cells(whole_page, "optax") == [results.software()["optax"]] * 2

  def test_keys_that_were_set_beside_the_config(self, folder):
    command = {"config": "folder:small", "overrides": {"model.width": 4, "data.root": "/x"}}
    _change(folder / workdir.RESULTS, lambda content: content.update(command=command))
    text = run_report.make(folder)
    assert "keys that were set in addition to the config folder:small" in text
    table = text[text.index("were set in addition to the config") :].split("</table>")[0]
    assert re.findall(r"<code>([\w.]+)</code>", table) == ["model.width", "data.root"]

  def test_keys_that_the_run_has_chosen(self, folder):
    assert "has chosen" not in run_report.make(folder)
    chosen = {"train.batch_size": {"value": 80, "reason": "20 <classes>"}}
    _change(folder / workdir.RESULTS, lambda content: content.update(chosen=chosen))
    text = run_report.make(folder)
    table = text[text.index("Keys that the run has chosen") :].split("</table>")[0]
    assert "80" in table
    assert "20 &lt;classes&gt;" in table

  def test_keys_of_the_preset_and_keys_that_changed_on_resume(self, folder):
    overrides = {
      "presets.default.prior.value": 0.07,
      "presets.paper.self_weight": 0.5,  # not the preset of the run
      "log.v_classes": 7,
    }
    _change(
      folder / workdir.RESULTS,
      lambda content: content.update(command={"config": "glyphs", "overrides": overrides}),
    )
    _change(folder / workdir.CONFIG, lambda content: content["loss"]["prior"].update(value=0.07))
    text = run_report.make(folder)
    table = text[text.index("were set in addition to the config") :].split("</table>")[0]
    assert re.findall(r"<code>([\w.]+)</code>", table) == ["loss.prior.value", "log.v_classes"]
    assert _cells(table, "loss.prior.value") == ["0.07", "0.1"]
    assert _cells(table, "log.v_classes") == ["7", "4"]
    everything = text[text.index("Every key of the config") :]
    assert _cells(everything, "log.v_classes") == ["7", "changed"]

  def test_a_long_name_of_the_config_is_shortened(self, folder):
    command = {"config": "c" * 10_000, "overrides": {}}
    _change(folder / workdir.RESULTS, lambda content: content.update(command=command))
    text = run_report.make(folder)
    assert "in addition to the config ccc" in text
    assert "c" * 60 not in text

  def test_incidents(self, whole_page):
    assert "1 of 6 steps were not finite and skipped" in whole_page
    assert "end of the warm-up" in whole_page

  def test_the_tracked_scores(self, whole_page):
    assert "v, median" in whole_page
    assert _cells(whole_page, "x") == ["2", "6", "0.5000", "0.1000"]

  def test_other_data_are_told(self, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    _change(tmp_path / "run" / workdir.RESULTS, lambda content: content["test"].update(mAUPRC=0.01))
    assert "the checkpoint or the software have changed since" in run_report.make(tmp_path / "run")
    found = run_report.make(tmp_path / "run", data_root=tmp_path / "nowhere")
    assert "Not shown, since the test images cannot be ranked again" in found
    assert pages.Page(found).all("img") == []

  def test_data_that_have_moved(self, finished, tmp_path):
    shutil.copytree(workdir.read_config(finished)["data"]["root"], tmp_path / "moved")
    shutil.copytree(finished, tmp_path / "run")
    _change(tmp_path / "run" / workdir.CONFIG, lambda content: content["data"].update(root="/gone"))
    text = run_report.make(tmp_path / "run", data_root=tmp_path / "moved")
    assert len(pages.Page(text).all("img")) > 100
    assert _cells(text, "data.root")[0] == "/gone"
    # One more class gives another split, so training classes might be shown as unseen.
    trees.write(tmp_path / "moved" / "new" / "0.png", 1, 0)
    trees.write(tmp_path / "moved" / "new" / "1.png", 1, 1)
    assert "differ from those the run was trained on" in run_report.make(
      tmp_path / "run", data_root=tmp_path / "moved"
    )


class TestRunsOfOtherKinds:
  def test_what_is_missing_is_told(self, folder):
    for name in (v_history.FILE, workdir.PR_CURVE):
      (folder / name).unlink()
    found = pages.Page(run_report.make(folder)).text
    assert "the folder has no v.jsonl" in found
    assert "the folder has no pr_curve.npz" in found
    assert "best is missing" in found

  def test_losses_without_v(self, folder):
    (folder / v_history.FILE).unlink()
    _change(folder / workdir.CONFIG, lambda content: content["loss"].update(name="triplet"))
    text = run_report.make(folder)
    assert "the loss triplet has no v" in text
    assert "paper: Triplet (the same loss)" not in text  # other data

  def test_f40_seen_classes_are_reported(self, folder):
    seen = {"count": 4, "examples": ["<b>", "cat", "dog"]}
    _change(folder / workdir.RESULTS, lambda content: content.update(seen_classes=seen))
    text = run_report.make(folder)
    assert (
      "Not a test of unseen classes: 4 of the classes that are tested on were trained on" in text
    )
    assert "<b>" not in text
    assert "all queries are of classes not seen in training" not in text
    _change(folder / workdir.RESULTS, lambda content: content.update(seen_classes={"count": "4"}))
    with pytest.raises(ValueError, match="seen_classes"):
      run_report.make(folder)

  def test_without_val(self, folder):
    _change(folder / workdir.CONFIG, lambda content: content["data"].update(trainval=True))
    _change(folder / workdir.RESULTS, lambda content: content.update(val={}))
    lines = [
      {key: value for key, value in line.items() if not key.startswith("val_")}
      for line in workdir.read_metrics(folder)
    ]
    (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = pages.Page(run_report.make(folder)).text
    assert "This run has no validation split" in text
    assert "so there is no validation split" in text

  def test_vehicle_id(self, folder):
    def change(content):
      for k in ("recall@5", "mAUPRC"):
        content["test"][k] = 0.7
      content["test_small"] = dict(content["test"])
      content["baselines"]["test_small"] = {"initial": {"mAUPRC": 0.123}}
      content["test_one_per_class"] = content["test"] | {
        "mAUPRC_std": 0.01,
        "num_repeats": 10,
        "ks_beyond_gallery": [100],
      }

    _change(folder / workdir.RESULTS, change)
    _change(folder / workdir.CONFIG, lambda content: content["data"].update(source="vehicle_id"))
    text = run_report.make(folder)
    assert _cells(text, "mAUPRC_std") == ["-", "-", "-", "0.0100"]
    assert _cells(text, "random galleries")[-1] == "10"
    assert _cells(text, "this run: SOPRC on vehicle_id, test_small")[0] == "70.00"
    assert _cells(text, "paper: SOPRC (the same loss)") == ["74.92", "92.56", "96.43"]
    assert "test_small: the trained model and the baselines on the same images" in text
    assert text.count("0.1230") == 1
    assert "erratum 11" in text
    assert "the gallery is smaller than k = 100" in text

  def test_a_log_that_ends_early(self, folder):
    lines = (folder / workdir.METRICS).read_text().splitlines()
    (folder / workdir.METRICS).write_text("\n".join([*lines[:3], lines[3][:20]]))
    assert "has 3 of 6 steps" in run_report.make(folder)
    (folder / workdir.METRICS).unlink()
    assert "No value has been logged" in run_report.make(folder)

  def test_kept_steps(self, folder):
    (folder / "diverged" / "4").mkdir(parents=True)
    (folder / "diverged" / "4" / "report.json").write_text("{}")
    assert "in diverged/: step 4" in run_report.make(folder)

  def test_long_runs_stay_small(self, folder):
    lines = [
      {
        "step": step,
        "loss": 1.0,
        "prior": 0.1,
        "learning_rate": 0.1,
        "seconds": 0.1,
        "data_wait": 0.0,
      }
      for step in range(1, 20_001)
    ]
    (folder / workdir.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(run_report.make(folder)) < 300_000

  def test_a_class_that_was_not_seen_has_no_v(self):
    unseen = _v(3, 0, "x", visits=0)
    assert np.isnan(run_charts.v_distance(unseen))
    assert run_charts.v_distance(_v(3, 0, "x")) == pytest.approx(0.1)
    assert "v, median (no values)" in run_charts._over_time("x", [{"step": 3, **unseen}], 6.0)
    assert "v (no values)" in run_charts._profile("x", [{"step": 3, **unseen}])

  def test_classes_of_one_name_stay_apart(self):
    found = run_charts.v_by_class([{"step": 1, "classes": [_v(1, 0, "x"), _v(1, 7, "x")]}])
    assert list(found) == ["x (row 0)", "x (row 7)"]

  def test_method_that_the_paper_has(self, folder):
    _change(folder / workdir.CONFIG, lambda content: content["data"].update(source="sop"))
    text = run_report.make(folder)
    there = json.loads((folder / workdir.RESULTS).read_text())
    assert _cells(text, "this run: SOPRC on sop, test")[0] == f"{100 * there['test']['mAUPRC']:.2f}"
    assert _cells(text, "paper: SmoothAP")[0] == "61.65"
    assert _cells(text, "paper: SOPRC (the same loss)")[0] == "62.75"
    assert "Not computed by this run (eval.ks): recall@100, recall@1000" in text


def _with(folder, key, value):
  """Changes one value in the results of a run."""
  return json.loads((folder / workdir.RESULTS).read_text()) | {key: value}


class TestRefusals:
  def _refused(self, folder, message, **options):
    with pytest.raises((OSError, ValueError), match=message):
      writing.write(folder, **options)
    assert not (folder / "report.html").exists()

  def test_run_in_progress(self, folder):
    (folder / workdir.RESULTS).unlink()
    self._refused(
      folder,
      r"has not finished \(results.json is missing; its log has 6 of 6 steps\): resume it with",
    )

  def test_comparison_in_progress(self, tmp_path):
    (tmp_path / "comparison.json").write_text("{}")
    self._refused(tmp_path, "comparison in .* has not finished")

  def test_another_folder(self, tmp_path):
    self._refused(tmp_path, "holds neither a training run")

  def test_place_of_the_page(self, folder, tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    self._refused(folder, "exists and is not a report", output=tmp_path / "mine.html")
    self._refused(folder, "is a folder", output=tmp_path)
    self._refused(folder, "there is no folder", output=tmp_path / "no" / "page.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"

  def test_damaged_files(self, folder):
    for name, content, message in (
      (workdir.RESULTS, '{"steps": 6}', "val is missing"),
      *(
        (workdir.RESULTS, json.dumps(_with(folder, key, value)), message)
        for key, value, message in (
          ("versions", ["x"], "versions must be an object"),
          ("data_wait_share", None, "data_wait_share must be a number"),
          ("baselines", {"test": {"initial": {}}}, "baselines.test.initial.mAUPRC is missing"),
          (
            "baselines",
            {"test": {"initial": {"mAUPRC": 0.5, "recall@1": "x"}}},
            "baselines.test.initial.recall@1 must be a number",
          ),
          ("tested_step", "x", "tested_step must be an integer"),
          ("val", {"mAUPRC": 0.5, "num_queries": "x"}, "val.num_queries must be an integer"),
        )
      ),
      (workdir.METRICS, '{"step": 1, "loss": "high"}\n', "step 1.loss must be a number"),
      (v_history.FILE, '{"step": 3, "classes": [{"class": 1}]}\n', "v.jsonl is corrupt"),
      (
        v_history.FILE,
        json.dumps({"step": 3, "classes": [_v(3, 0, "x") | {"true": [0.5]}]}) + "\n",
        "20 points in v but 1 true",
      ),
      (workdir.PR_CURVE, "PK", "pr_curve.npz is corrupt"),
    ):
      before = (folder / name).read_bytes()
      (folder / name).write_text(content)
      self._refused(folder, message)
      (folder / name).write_bytes(before)

  def test_an_earlier_report_is_replaced(self, folder):
    path = writing.write(folder)
    path.write_text(path.read_text().replace("Results", "Old"))
    assert "Results" in writing.write(folder).read_text()

  def test_command(self, folder):
    done = runs.call("experiments.report", f"--workdir={folder / 'none'}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert "give the folder of a run" in done.stderr


def _comparison(folder, *, with_runs=True):
  """Writes a finished comparison of two methods over two seeds. SmoothAP diverged at one of
  them.
  """
  shared = run_tables.defaults("default")
  config = {key: shared[key] for key in ("data", "train", "model", "eval")} | {
    "data": shared["data"] | {"source": "sop"}
  }
  entries = []
  for method, values in (("soprc", [0.6, 0.7]), ("smooth_ap", [0.5, None])):
    names = [f"{method}-lr0.1-seed{seed}" for seed in (0, 1)]
    mean = None if None in values else float(np.mean(values))
    found = {"mean": mean, "std": None if mean is None else 0.07, "values": values}
    entries.append(
      {
        "method": method,
        "label": methods.label(method),
        "learning_rate": 0.1,
        "val_by_rate": {"0.1": 0.5, "0.2": None},
        "runs": names,
        "test": {"mAUPRC": found, "recall@1": found},
        "step_seconds": 0.25,
        "peak_memory_bytes": 2**21,
      }
    )
    for name, value in zip(names, values, strict=True):
      if with_runs and value is not None:
        (folder / name).mkdir(parents=True)
        (folder / name / workdir.METRICS).write_text(
          json.dumps({"step": 2, "val_mAUPRC": value}) + "\n"
        )
        np.savez(
          folder / name / workdir.PR_CURVE,
          precision=[0.1, 1.0],
          recall=[1.0, 0.0],
          thresholds=[-1.0, 1.0],
        )
        workdir.write_results(
          folder / name,
          {"val": {"mAUPRC": value}, "test": {"mAUPRC": value}, "versions": results.software()},
        )
        (folder / name / workdir.CONFIG).write_text(
          json.dumps(shared | {"loss": shared["loss"] | {"name": method}})
        )
  plan = {"seeds": [0, 1], "rates": [0.1, 0.2], "init_from": "", "methods": ["soprc", "smooth_ap"]}
  content = {
    "plan": plan,
    "trained_on": ["1 x cpu"],
    "costs_on": "1 x cpu",
    "config": config,
    "methods": entries,
  }
  (folder / "table.json").write_text(json.dumps(content, default=list))
  return folder


class TestPageOfAComparison:
  def test_table_paper_and_costs(self, tmp_path):
    text = comparison.make(_comparison(tmp_path))
    pages.Page(text)
    assert _cells(text, "SOPRC") == ["0.1*", "0.6500 ± 0.0700", "0.6500 ± 0.0700", "", ""]
    assert _cells(text, "SmoothAP") == ["0.1*", "-", "-", "-", ""]
    paper_part = text[text.index('id="paper"') :]
    assert _cells(paper_part, "SOPRC") == ["65.00", "65.00", "62.75", "81.91"]
    assert _cells(text[text.index('id="costs"') :], "SmoothAP") == ["250", f"{224 / 0.25:.0f}", "2"]
    assert _cells(text[text.index('id="rates"') :], "SOPRC") == ["0.5000", "broke down"]
    assert "Training diverged (not finite) in a run of SmoothAP" in text
    assert "loss.name=smooth_ap" in text

  def test_f40_seen_classes_are_reported(self, tmp_path):
    note = "Not a test of unseen classes: 4 of the classes"
    assert note not in comparison.make(_comparison(tmp_path))
    _change(tmp_path / "table.json", lambda content: content.update(seen_classes=f"{note}."))
    assert note in comparison.make(tmp_path)

  def test_names_show_as_text(self, tmp_path):
    folder = _comparison(tmp_path)
    label = pages.NAMES[0] + pages.NAMES[1]
    _change(folder / "table.json", lambda content: content["methods"][1].update(label=label))
    found = pages.Page(comparison.make(folder))
    assert label in found.text
    assert found.all("script") + found.all("img") == []

  def test_curves_are_those_of_the_runs(self, tmp_path):
    text = comparison.make(_comparison(tmp_path))
    assert text.count('<path class="curve main"') == 2
    assert (
      "mAUPRC on val, mean over seeds: mAUPRC on val against step; SOPRC from 0.65 to 0.65; "
      "SmoothAP from 0.5 to 0.5" in text
    )

  def test_without_the_runs(self, tmp_path):
    text = comparison.make(_comparison(tmp_path, with_runs=False))
    assert "the folders of the runs are missing" in text

  def test_table_of_the_repository(self, tmp_path):
    shutil.copy(runs.ROOT / "results" / "compare" / "table.json", tmp_path)
    path = writing.write(tmp_path)
    assert "Comparison of 12 methods on glyphs" in path.read_text()
    with pytest.raises(ValueError, match="shows no images"):
      writing.write(tmp_path, data_root=tmp_path)

  def test_damaged_tables(self, tmp_path):
    path = _comparison(tmp_path) / "table.json"
    before = path.read_text()
    for change, message in (
      (lambda content: content["methods"][1]["test"].pop("recall@1"), "other metrics or seeds"),
      (lambda content: content["methods"][1].pop("step_seconds"), "step_seconds is missing"),
      (
        lambda content: content["methods"][0].update(runs=["a", "b"]),
        "are not those of its learning rate and seeds",
      ),
    ):
      _change(path, change)
      with pytest.raises(ValueError, match=message):
        comparison.make(tmp_path)
      path.write_text(before)


def test_f64_names_in_a_page_stay_on_their_line():
  name, shown = "a\n\x1b[31m\u2028b\u202e", r"a\n\x1b[31m\u2028b\u202e"
  assert markup_free(page.name(name, 60)) == shown
  example = sources.Example(np.zeros((2, 2, 3), np.uint8), 0, name, name)
  assert f'alt="class {shown}, image {shown}"' in panel._thumbnail(example)
  lines = [{"step": 1, "classes": [_v(1, 0, name), _v(1, 1, shown)]}]
  assert list(run_charts.v_by_class(lines)) == [
    f"{shown} (row 0)",
    f"{shown} (row 1)",
  ]  # names that look the same are distinguished by their row


# Problems that a reader would notice, as reported by the page itself.
_PROBLEMS = """() => {
  const found = [];
  if (document.scrollingElement.scrollWidth > innerWidth) found.push('the page is wider than the window');
  for (const image of document.images) if (!image.complete || image.naturalWidth === 0) found.push('image not loaded: ' + image.alt);
  const inScroller = element => element.closest('.scroll') !== null;
  for (const element of document.querySelectorAll('body *')) {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (box.width === 0 || element.closest('svg') || element.matches('.picture, .picture *')) continue;
    const clips = ['hidden', 'clip'].includes(style.overflowX) || style.textOverflow === 'ellipsis';
    if (clips && element.scrollWidth > element.clientWidth + 1) found.push('clipped: ' + element.textContent.slice(0, 60));
    if (!inScroller(element) && (box.left < -1 || box.right > innerWidth + 1)) found.push('outside: ' + element.outerHTML.slice(0, 90));
  }
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [name, box] of texts) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1) found.push('label leaves its chart: ' + name);
      if (box.height < 9) found.push('label too small: ' + name + ' ' + box.height);
    }
    const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
    texts.forEach(([name, a], i) => texts.slice(i + 1).forEach(([other, b]) => { if (overlap(a, b)) found.push('labels overlap: ' + name + ', ' + other); }));
  }
  const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  for (const list of document.querySelectorAll('.tiles, .strip, .charts, .pairs, .cards, .side, main, .legend')) {
    const boxes = [...list.children].map(child => child.getBoundingClientRect());
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => { if (overlap(a, b)) found.push('overlap in ' + list.className); }));
  }
  return found;
}"""  # noqa: E501
_CONTRAST = """() => {
  const luminance = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const backdrop = element => {
    for (let node = element; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color) && color !== 'transparent') return color;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const found = {};
  for (const [kind, selector, property, least] of [['text', 'p, td, th, li, figcaption, dt, a, b', 'color', 4.5], ['label', 'svg text', 'fill', 4.5],
      ['curve', 'path.curve', 'stroke', 3]]) {
    for (const element of document.querySelectorAll(selector)) {
      const [a, b] = [luminance(getComputedStyle(element)[property]), luminance(backdrop(element))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < least) found[kind + ' ' + getComputedStyle(element)[property] + ' on ' + backdrop(element)] = ratio;
    }
  }
  return [Object.entries(found), luminance(backdrop(document.body)) < 0.2];
}"""  # noqa: E501


@pytest.fixture(scope="module")
def browser():
  sync_api = pytest.importorskip("playwright.sync_api")
  if not _CHROMIUM.exists():
    pytest.skip(f"{_CHROMIUM} is not installed")
  with sync_api.sync_playwright() as driver:
    opened = driver.chromium.launch(executable_path=str(_CHROMIUM), args=_ARGUMENTS.split())
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_in_a_browser(browser, whole_page, tmp_path, kind):
  path = tmp_path / "report.html"
  text = whole_page if kind == "run" else comparison.make(_comparison(tmp_path))
  path.write_text(text.replace("<details>", "<details open>"), encoding="utf-8")
  for scheme in ("light", "dark"):
    for width in (1280, 390, 360):
      opened, said, asked = (
        browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme),
        [],
        [],
      )
      opened.on("console", lambda message, said=said: said.append(message.text))
      opened.on("pageerror", lambda error, said=said: said.append(str(error)))
      opened.on("dialog", lambda dialog, said=said: said.append(dialog.message))
      opened.on("requestfailed", lambda request, said=said: said.append(request.url))
      opened.on("request", lambda request, asked=asked: asked.append(request.url))
      opened.goto(path.as_uri())
      assert opened.evaluate(_PROBLEMS) == [], (scheme, width)
      faint, is_dark = opened.evaluate(_CONTRAST)
      assert faint == [], (scheme, width)
      assert is_dark == (scheme == "dark")
      assert said == []
      assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
      opened.close()
