"""Tests the command that compares the test results of two runs."""

import numpy as np
import pytest
import runs

from soprc_jax import statistics
from soprc_jax.metrics import per_query
from soprc_jax.training import config as config_lib
from soprc_jax.training import workdir

_PROGRAM = "experiments.compare_runs"
_LABELS = np.repeat(np.arange(25), 4)


def _run(folder, draw, gain=0.0, *, file="per_query.npz", **values):
  """Writes the folder of a run whose mean AP is about 0.5 plus ``gain``."""
  rng = np.random.default_rng(draw)
  hard = np.random.default_rng(0).uniform(-0.2, 0.2, size=25)[_LABELS]
  ap = np.clip(0.5 + gain + hard + rng.normal(scale=0.05, size=100), 0, 1)
  config = config_lib.default_config()
  config.update_from_flattened_dict(values)
  workdir.claim(folder, config_lib.resolve(config))
  names = [f"{i}.png" for i in range(100)]
  above = rng.integers(0, 3, size=100)
  queries = per_query.make(names, [f"class {i}" for i in _LABELS], ap, above)
  per_query.write(folder / file, queries)
  return queries


def _call(*flags):
  done = runs.call(_PROGRAM, *flags)
  return done, done.stdout.splitlines()


def test_two_runs(tmp_path):
  a, b = _run(tmp_path / "a", 1, 0.05), _run(tmp_path / "b", 2)
  done, lines = _call(tmp_path / "a", tmp_path / "b")
  assert done.returncode == 0, done.stderr
  want = statistics.cluster_difference(a.ap, b.ap, a.label)
  limits = f"{want.mean:+.4f} [{want.low:+.4f}, {want.high:+.4f}]"
  assert lines[2] == f"| mAUPRC | {a.ap.mean():.4f} | {b.ap.mean():.4f} | {limits} | 1.000 |"
  assert lines[3].startswith("| recall@1 | ")
  assert "100 queries of 25 classes, runs a side: 1." in done.stdout
  assert "These data do not resolve: recall@1." in done.stdout


def test_seeds_in_another_order_are_refused(tmp_path):
  for side in "ab":
    for seed in range(2):
      _run(tmp_path / f"{side}{seed}", seed, seed=seed)
  sides = ["a0,a1", "b1,b0"]
  done, _ = _call(*(",".join(str(tmp_path / name) for name in side.split(",")) for side in sides))
  assert done.returncode == 1
  assert "A has seeds [0, 1], B has [1, 0]: give the runs of both sides in the same" in done.stderr


def test_a_seed_twice_on_a_side_is_refused(tmp_path):
  for name in ("a0", "a1", "b0", "b1"):
    _run(tmp_path / name, 1)
  done, _ = _call(*(f"{tmp_path / side}0,{tmp_path / side}1" for side in "ab"))
  assert done.returncode == 1
  assert "A has seeds [0, 0]: give one run of each seed" in done.stderr


def test_an_empty_name_is_refused(tmp_path):
  done, _ = _call(f"{tmp_path / 'a'},", tmp_path / "b")
  assert done.returncode == 1
  assert "a run has no name: remove a comma from" in done.stderr


def test_few_classes_are_noted(tmp_path):
  for name in "ab":
    queries = _run(tmp_path / name, ord(name))
    per_query.write(tmp_path / name / "per_query.npz", queries.take(np.arange(100) < 40))
  assert (
    "Intervals from fewer than 20 classes are too narrow"
    in _call(tmp_path / "a", tmp_path / "b")[0].stdout
  )


def test_seeds(tmp_path):
  found = [
    [_run(tmp_path / f"{side}{seed}", 2 * seed + i, 0.03 * i, seed=seed) for seed in range(3)]
    for i, side in enumerate("ab")
  ]
  sides = [",".join(str(tmp_path / f"{side}{seed}") for seed in range(3)) for side in "ab"]
  done, lines = _call(*sides)
  assert done.returncode == 0, done.stderr
  values = [[run.ap for run in side] for side in found]
  want = statistics.crossed_difference(*values, found[0][0].label)
  assert f"[{want.low:+.4f}, {want.high:+.4f}]" in lines[2]
  assert "for new classes and seeds." in done.stdout


def test_groups_and_splits(tmp_path):
  rows = [f"{i}.png,class {label},{'big' if label < 9 else ''}" for i, label in enumerate(_LABELS)]
  (tmp_path / "images.csv").write_text("\n".join(["path,label,size", *rows]) + "\n")
  data = {"data.source": "csv", "data.root": str(tmp_path / "images.csv")}
  a, b = (
    _run(tmp_path / name, i, file="evaluation_val.npz", **data) for i, name in enumerate("ab")
  )
  flags = [tmp_path / "a", tmp_path / "b", "--split=val"]
  done, lines = _call(*flags, "--group_by=size")
  assert done.returncode == 0, done.stderr
  want = statistics.cluster_difference(a.ap[:36], b.ap[:36], a.label[:36])
  (line,) = [line for line in lines if line.startswith("| mAUPRC, size = big |")]
  assert f"{want.mean:+.4f} [{want.low:+.4f}, {want.high:+.4f}]" in line
  assert any(line.startswith("| mAUPRC, size = (empty) |") for line in lines)
  (tmp_path / "images.csv").write_text("\n".join(["path,label,size", *rows[:-1]]) + "\n")
  done, _ = _call(*flags, "--group_by=size")
  assert "has no row for 1 of the tested images, for example 99.png: restore" in done.stderr
  done, _ = _call(*flags, "--group_by=colour")
  assert "has no column 'colour': choose one of path, label, size" in done.stderr
  done, _ = _call(*flags[:2])
  assert "per_query.npz is missing. These commands write it: soprc train" in done.stderr


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "give two runs. For example:"),
    (["a"], "give two runs. For example:"),
    (["a", "b", "c"], "unexpected argument 'c'"),
    (["a,b", "b"], "both sides need as many runs, one for each seed; got 2 (a,b) and 1 (b)"),
    (["a", "./a"], "a run is given twice"),
    (["a", "nowhere"], "--workdir=nowhere holds no run"),
    (["a", "b", "--split=val"], "evaluation_val.npz is missing. These commands write it: soprc ev"),
    (["a", "b", "--group_by=size"], "--group_by=size needs images of a CSV file"),
    (["a", "cut"], "cut/per_query.npz is corrupt"),
    (["a", "fewer"], "a and fewer cannot be compared query by query"),
  ],
)
def test_mistakes(tmp_path, arguments, message):
  for i, name in enumerate(("a", "b", "cut", "fewer")):
    queries = _run(tmp_path / name, i)
  (tmp_path / "cut" / "per_query.npz").write_bytes(b"PK")
  per_query.write(tmp_path / "fewer" / "per_query.npz", queries.take(np.arange(50)))
  done = runs.call(_PROGRAM, *arguments, cwd=tmp_path)
  assert done.returncode == 1
  assert done.stderr.startswith("Error: ")
  assert message in done.stderr
