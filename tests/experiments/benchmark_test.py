"""Tests the benchmark harness: turns, ratios, targets and the report.

Also covers the mistakes that the command reports.
"""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest
import runs

from configs import characters
from experiments.benchmark import gallery, harness, scale, speed_tables


def _row(ratio, *, case="triplet", target=2.0, suffices=False, note=""):
  return harness.row(
    "loss",
    case,
    f"peer {target}",
    [1.0] * 3,
    [ratio] * 3,
    target=target,
    suffices=suffices,
    note=note,
  )


def test_functions_take_turns_and_the_warmup_is_not_timed():
  calls = []

  def slow_at_first(name):
    def run():
      calls.append(name)
      time.sleep(0.2 if calls.count(name) == 1 else 0.01)
      return jnp.zeros(1)

    return run

  seconds = harness.time_together({"a": slow_at_first("a"), "b": slow_at_first("b")}, repetitions=3)
  assert calls == ["a", "b"] * 4
  assert all(
    len(times) == 3 and max(times) < 0.2 and min(times) >= 0.01 for times in seconds.values()
  )


def test_ratio_is_that_of_the_medians():
  row = harness.row("loss", "triplet", "torch", [1.0, 2.0, 9.0], [8.0, 4.0, 0.5], target=2.0)
  assert (row.ours, row.theirs, row.ratio, row.met, row.repetitions) == (2.0, 4.0, 2.0, True, 3)
  assert not row._replace(target=2.01).met


@pytest.mark.parametrize(
  ("rows", "enough"),
  [
    ([_row(2.5), _row(2.0)], True),
    ([_row(2.5), _row(1.9)], False),
    ([_row(1.2), _row(0.7, target=0.67, suffices=True)], True),
    ([_row(2.5), _row(0.6, target=0.67, suffices=True)], True),
    ([_row(1.9), _row(0.6, target=0.67, suffices=True)], False),
    ([_row(0.6, target=0.67, suffices=True)], False),
  ],
)
def test_a_case_is_reached_by_one_row_that_suffices_or_by_all_others(rows, enough):
  assert speed_tables.reached(rows) is enough
  assert ("| yes |" in speed_tables.markdown(rows)) is enough


def test_table_has_a_line_a_case_and_its_notes_once():
  rows = [_row(2.5, note="this is said"), _row(150.0), _row(1.0, case="other", note="this is said")]
  lines = speed_tables.markdown(rows).splitlines()
  assert len(lines) == 2 + 2 + 1 + 1
  assert lines[2].count("[1]") == 1
  assert "**150**" in lines[2]
  assert lines[-1] == "[1] This is said."


def test_json_comes_back():
  rows = [_row(2.5, note="this"), _row(0.7, suffices=True)]
  curves = [harness.Curve("loss", "triplet", "batch size", [1, 2], "seconds", [0.1, 0.4])]
  content = json.loads(json.dumps(speed_tables.as_json(rows, curves, {"date": "today"})))
  assert content["date"] == "today"
  assert content["rows"][0]["ratio"] == 2.5
  back, curves_back = speed_tables.from_json(content)
  assert back == rows
  assert [list(curve) for curve in curves_back] == [list(curve) for curve in curves]


def test_exponent_and_plots(tmp_path):
  sizes = np.array([10, 100, 1000])
  curves = [harness.Curve("loss", "cubic", "batch size", sizes, "seconds", 2.0 * sizes**3.0)]
  curves.append(curves[0]._replace(name="linear", costs=sizes * 1.0))
  curves.append(curves[0]._replace(cost="MiB"))
  assert curves[0].exponent == pytest.approx(3.0)
  names = speed_tables.plot_growth(tmp_path, curves)
  assert sorted(names) == ["growth_loss_batch_size_MiB.png", "growth_loss_batch_size_seconds.png"]
  assert all((tmp_path / name).stat().st_size > 5000 for name in names)


@pytest.mark.parametrize(
  ("arguments", "hint"),
  [
    ([], "missing NAME"),
    (["speed"], "'speed': give one or more of loss, auprc"),
    (["loss", "loss"], "repeated benchmark"),
    (["loss", "--out=/nowhere/x.json"], "there is no folder /nowhere"),
  ],
)
def test_mistakes_are_told(arguments, hint):
  done = runs.call("experiments.benchmark", *arguments)
  assert done.returncode == 1
  assert hint in done.stderr
  assert "Traceback" not in done.stderr


def test_gallery_measures_what_it_names(monkeypatch, tmp_path):
  monkeypatch.setattr(gallery, "_QUERIES", 20)
  monkeypatch.setattr(gallery, "_SIZES", (200, 500))
  monkeypatch.setattr(gallery, "_SMALL", 0)
  asked = []
  monkeypatch.setattr(gallery, "_flat", asked.append)
  found = list(gallery.rows())
  assert [(row.case, row.peer) for row in found] == [
    (f"20 queries in {size} x 128, in files", peer)
    for size in (200, 500)
    for peer in ("product", "IndexFlatIP")
  ]
  assert [files.num_candidates for files in asked] == [200, 200, 500, 500]
  (curve,) = gallery.growth()
  assert (curve.sizes, len(curve.costs)) == ((200, 500), 2)
  values = gallery._evaluate(gallery._find(gallery._write(tmp_path), 500))
  assert values["num_queries"] == 20
  assert values["mAUPRC"] > 0.9


def test_the_peers_of_the_gallery_compute_the_same(monkeypatch, tmp_path):
  pytest.importorskip("pytorch_metric_learning")
  pytest.importorskip("faiss")
  monkeypatch.setattr(gallery, "_QUERIES", 20)
  monkeypatch.setattr(gallery, "_SIZES", (500,))
  files = gallery._find(gallery._write(tmp_path), 500)
  gallery._flat(files)
  theirs = gallery._calculator(files)["mean_average_precision"]
  assert theirs == pytest.approx(gallery._evaluate(files)["mAUPRC"], abs=1e-4)


def test_scale_measures_what_it_names(monkeypatch):
  monkeypatch.setattr(scale, "_ROWS", (70, 210))
  monkeypatch.setattr(scale, "_QUERIES", (40,))
  config = characters.get_config
  monkeypatch.setattr(characters, "get_config", lambda: _small(config()))
  found = list(scale.rows())
  assert [row.case for row in found] == [
    "training step of 16 images, 210 rows of v",
    "retrieval_metrics, 40 queries in 40 x 128",
  ]
  curves = {curve.name: curve for curve in scale.growth()}
  assert list(curves) == [
    "training step",
    "batches of an epoch",
    "checkpoint, save",
    "checkpoint, restore",
    "checkpoint, size",
  ]
  # 140 rows more, of 100 random points and a weight
  small, large = curves["checkpoint, size"].costs
  assert 0.8 * 140 * 101 * 4 < large - small < 1.2 * 140 * 101 * 4


def _small(config):
  config.model.width = 4
  config.train.batch_size = 16
  return config
