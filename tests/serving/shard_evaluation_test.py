"""Tests the metrics of a gallery in shards, and that stops and faults lose and change nothing."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import runs
import sharded

from experiments import gallery
from soprc_jax import metrics
from soprc_jax._internal import file_io
from soprc_jax.metrics import exact_ranks, per_query
from soprc_jax.serving import shard_evaluation, shard_survey, shards

_KS = (1, 5, 500)


class _Evaluation:
  """Evaluates a folder of `sharded.gallery`."""

  def __init__(self, folder, distractors=None, *, suffix=".npy"):
    self.files = shard_survey.find(
      str(folder / f"queries{suffix}"), str(folder / "shards"), distractors and str(distractors)
    )
    self.prepared = shard_survey.prepare(self.files)
    self.counts = folder / "counts"
    self.counts.mkdir(exist_ok=True)

  def count(self, **options):
    options = {"size": 32, "threads": 3} | options
    shard_evaluation.count(self.files, self.prepared, self.counts, **options)

  def summary(self):
    return shard_evaluation.summarise(self.files, self.prepared, self.counts, ks=_KS)


def _expected(vectors, labels, ids, distractors=()):
  numbers = np.unique(labels, return_inverse=True)[1]
  gallery = np.concatenate([vectors[10:], *distractors])
  nobody = np.arange(1000, 1000 + len(gallery) - len(vectors[10:]))
  return metrics.retrieval_metrics(
    vectors[:20],
    numbers[:20],
    gallery=gallery,
    gallery_labels=np.append(numbers[10:], nobody),
    query_ids=np.array(ids[:20]),
    gallery_ids=np.array(ids[10:] + [f"other {i}" for i in nobody]),
    ks=_KS,
    per_query=True,
  )


def _assert_equal(summary, want):
  values, queries, at_k = summary
  np.testing.assert_array_equal(queries.ap, want["ap_per_query"])
  np.testing.assert_array_equal(queries.rank, want["negatives_above"] + 1)
  for name in ("mAUPRC", "num_queries", "num_skipped", "ks_beyond_gallery", "recall@5"):
    assert values[name] == want[name]
  np.testing.assert_allclose(at_k["ap@500"], queries.ap, rtol=1e-14)  # all candidates


@pytest.mark.parametrize("min_products", [0, 2**40])
def test_equal_to_the_joined_gallery(tmp_path, monkeypatch, min_products):
  monkeypatch.setattr(exact_ranks, "MIN_PRODUCTS", min_products)
  made = sharded.gallery(tmp_path)
  others = [np.float32(made[0][::3]), np.float16(made[0][::5] * 1.001)]
  for number, rows in enumerate(others):
    sharded.write(tmp_path / "more" / f"{number}.npy", rows)
  evaluation = _Evaluation(tmp_path, tmp_path / "more")
  done = []
  evaluation.count(on_rows=done.append)
  _assert_equal(evaluation.summary(), _expected(*made, others))
  assert sum(done) == evaluation.files.num_candidates == 120 + 44 + 26
  assert evaluation.summary()[0]["num_excluded"] == 10


@pytest.mark.parametrize(("suffix", "dtype"), [(".fbin", np.float32), (".h5", np.float16)])
def test_formats_of_other_programs(tmp_path, suffix, dtype):
  made = sharded.gallery(tmp_path, dtypes=(dtype,), suffix=suffix)
  sharded.write(tmp_path / "more" / f"x{suffix}", made[0][:7].astype(dtype))
  evaluation = _Evaluation(tmp_path, tmp_path / "more", suffix=suffix)
  assert {shard.path.suffix for shard in evaluation.files.gallery} == {suffix}
  evaluation.count()
  _assert_equal(evaluation.summary(), _expected(*made, [made[0][:7].astype(dtype)]))


def test_processes_with_their_own_shards(tmp_path):
  made = sharded.gallery(tmp_path, num=5)
  evaluation = _Evaluation(tmp_path)
  for number in (2, 0):
    evaluation.count(part=(number, 3), size=32 + number)
  assert len(list(evaluation.counts.iterdir())) == 3
  with pytest.raises(ValueError, match=r"shard-00001-of-00005\.npy has changed"):
    evaluation.summary()
  evaluation.count()  # what is left
  _assert_equal(evaluation.summary(), _expected(*made))


class _StoppedError(Exception):
  pass


def test_a_stopped_evaluation_resumes_after_its_last_shard(tmp_path, monkeypatch):
  made = sharded.gallery(tmp_path)
  evaluation, done = _Evaluation(tmp_path), []

  def stop(rows):
    done.append(rows)
    if len(done) == 3:  # within the second shard
      raise _StoppedError

  with pytest.raises(_StoppedError):
    evaluation.count(on_rows=stop)
  assert len(list(evaluation.counts.iterdir())) == 1
  read, names = shards.read, []
  monkeypatch.setattr(
    shards, "read", lambda shard, *where: names.append(shard.path.name) or read(shard, *where)
  )
  evaluation.count()
  assert sorted(set(names)) == ["shard-00001-of-00003.npy", "shard-00002-of-00003.npy"]
  _assert_equal(evaluation.summary(), _expected(*made))


def test_counts_of_other_data_are_not_used(tmp_path, caplog):
  made = sharded.gallery(tmp_path)
  evaluation = _Evaluation(tmp_path)
  evaluation.count()
  first, *others = sorted(evaluation.counts.iterdir())
  first.write_bytes(first.read_bytes()[:100])
  evaluation.count()
  assert "is corrupt" in caplog.text
  _assert_equal(evaluation.summary(), _expected(*made))
  # Other vectors with the same labels at the same place.
  made = sharded.gallery(tmp_path, geometry="spread")
  evaluation = _Evaluation(tmp_path)
  with pytest.raises(ValueError, match="has changed"):
    evaluation.summary()
  evaluation.count()
  assert sorted(evaluation.counts.iterdir()) == [first, *others]
  _assert_equal(evaluation.summary(), _expected(*made))


def test_a_changed_distractor_is_counted_again(tmp_path):
  made = sharded.gallery(tmp_path)
  for rows in (-made[0][:20], made[0][:20]):  # of the same size
    sharded.write(tmp_path / "more" / "x.npy", rows)
    evaluation = _Evaluation(tmp_path, tmp_path / "more")
    evaluation.count()
    _assert_equal(evaluation.summary(), _expected(*made, [rows]))


@pytest.mark.parametrize("suffix", [".npy", ".fbin", ".h5"])
def test_a_value_that_is_not_finite_is_named(tmp_path, suffix):
  sharded.gallery(tmp_path)
  rows = np.ones((70, 16), np.float32)
  rows[40, 3] = np.nan
  sharded.write(tmp_path / "more" / f"x{suffix}", rows)
  evaluation = _Evaluation(tmp_path, tmp_path / "more")
  with pytest.raises(
    ValueError, match=rf"x\{suffix} has a value that is not finite in row 40: embed"
  ):
    evaluation.count()
  assert len(list(evaluation.counts.iterdir())) == 3


@pytest.mark.parametrize("suffix", [".fbin", ".h5"])
def test_faults_of_other_formats_are_named(tmp_path, suffix):
  sharded.gallery(tmp_path, dtypes=(np.float32,), suffix=suffix)
  place = tmp_path / "shards"
  first, second, third = sorted(place.glob(f"*{suffix}"))
  rows = np.eye(40, 16, dtype=np.float32)
  second.with_suffix(".parquet").unlink()
  sharded.write(second, rows, [f"photos/{i}.jpg" for i in range(51, 91)], ["x"] * 40)
  both = rf"occurs twice: .*00000-of-00003{suffix}, row 39, and .*00001-of-00003{suffix}, row 39"
  with pytest.raises(ValueError, match=rf"'photos/90\.jpg' {both}"):
    _Evaluation(tmp_path, suffix=suffix)
  sharded.write(second, rows, list(range(40)), ["x"] * 40, digest="1" * 64)
  with pytest.raises(ValueError, match=r"different lists|by model 11111111"):
    _Evaluation(tmp_path, suffix=suffix)
  second.with_suffix(".json").unlink()
  third.unlink()
  with pytest.raises(FileNotFoundError, match=rf"1 of 3 .*shard-00002-of-00003\{suffix}"):
    _Evaluation(tmp_path, suffix=suffix)
  first.write_bytes(first.read_bytes()[:-64])
  sharded.write(third, rows, list(range(100, 140)), ["x"] * 40)
  with pytest.raises(ValueError, match="truncated"):
    _Evaluation(tmp_path, suffix=suffix)


def test_a_full_disk_is_named_and_loses_nothing(tmp_path, monkeypatch):
  made = sharded.gallery(tmp_path)
  evaluation = _Evaluation(tmp_path)

  def fail(number):
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patched:
    patched.setattr(file_io.os, "fsync", fail)
    with pytest.raises(OSError, match=r"shard-00000-of-00003") as caught:
      evaluation.count()
  assert file_io.is_full(caught.value)
  assert list(evaluation.counts.iterdir()) == []
  evaluation.count()
  _assert_equal(evaluation.summary(), _expected(*made))


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
  made = sharded.gallery(tmp_path)
  evaluation = _Evaluation(tmp_path)
  evaluation.count()
  name = min(evaluation.counts.iterdir()).name
  left = evaluation.counts / f".{name}.{'0' * 16}.tmp"
  left.write_text("")
  os.utime(left, (0, 0))
  listed = []
  for name in ("listdir", "scandir"):
    real = getattr(os, name)
    monkeypatch.setattr(
      os, name, lambda folder, real=real: listed.append(str(folder)) or real(folder)
    )
  evaluation.count()
  assert listed == [str(evaluation.counts)]  # once, not once a shard
  assert not left.exists()
  _assert_equal(evaluation.summary(), _expected(*made))


def test_memory(tmp_path, monkeypatch):
  sharded.gallery(tmp_path)
  evaluation = _Evaluation(tmp_path)
  cores = len(os.sched_getaffinity(0))
  assert shard_evaluation.plan(evaluation.files, evaluation.prepared, 100.0) == (1 << 13, cores)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))
  rows, threads = shard_evaluation.plan(evaluation.files, evaluation.prepared, 1.0)
  assert 256 <= rows < 1 << 13
  assert 1 <= threads < 1000
  too_little = r"--memory_gb=0.5 is too little: this needs 0\.\d\d"
  with pytest.raises(ValueError, match=too_little) as raised:
    shard_evaluation.plan(evaluation.files, evaluation.prepared, 0.5)
  need = re.search(r"this needs (\S+)", str(raised.value)).group(1)
  assert shard_evaluation.plan(evaluation.files, evaluation.prepared, float(need))[1] == 1


@pytest.mark.parametrize("at_chance", [False, True])
def test_memory_stays_within_the_plan(tmp_path, monkeypatch, at_chance):
  """1,024 queries with 128 positives each, of a good and of a poor model."""
  monkeypatch.setattr(exact_ranks, "MIN_PRODUCTS", 0)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
  rng = np.random.default_rng(0)
  centres = rng.normal(size=(8, 16))
  for name, count in (("queries", 1024), ("gallery", 1024)):
    noise = rng.normal(size=(count, 16))
    vectors = noise if at_chance else np.repeat(centres, count // 8, axis=0) + 0.1 * noise
    ids, labels = [f"{name}{row}" for row in range(count)], np.repeat(np.arange(8), count // 8)
    sharded.write(tmp_path / f"{name}.npy", vectors.astype(np.float32), ids, labels)
  sharded.write(tmp_path / "others.npy", rng.normal(size=(40_000, 16)).astype(np.float32))
  names = ("queries", "gallery", "others")
  files = shard_survey.find(*(str(tmp_path / f"{name}.npy") for name in names))
  prepared = shard_survey.prepare(files)
  memory = shard_evaluation._BASE + (150 << 20)
  size, threads = shard_evaluation.plan(files, prepared, memory / 2**30)
  assert threads > 1
  (tmp_path / "counts").mkdir()
  tracemalloc.start()
  shard_evaluation.count(files, prepared, tmp_path / "counts", size=size, threads=threads)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < memory - shard_evaluation._BASE, (size, threads)


def test_a_value_beyond_float32_is_an_error_that_names_its_rows(tmp_path):
  sharded.gallery(tmp_path)
  evaluation = _Evaluation(tmp_path)
  path = evaluation.files.gallery[0].path
  vectors = np.load(path)
  vectors[-1, 0] = 3e38
  np.save(path, vectors)
  with pytest.raises(ValueError, match=rf"{path.name}, rows 32 to {len(vectors) - 1}: embeddings"):
    evaluation.count()


def test_the_command_after_a_kill(tmp_path):
  made = sharded.gallery(tmp_path, num=6)
  out = tmp_path / "out"
  command = [f"--queries={tmp_path}/queries.npy", f"--gallery={tmp_path}/shards/*.npy"]
  command += [f"--output={out}", "--ks=1,5,500"]
  child = subprocess.Popen(
    [sys.executable, "-m", "experiments.evaluate", *command],
    cwd=runs.ROOT,
    env=runs.environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  limit = time.monotonic() + 120
  while not list(out.glob("counts/[!.]*")) and time.monotonic() < limit and child.poll() is None:
    time.sleep(0.002)
  child.send_signal(signal.SIGKILL)
  child.wait()
  done = runs.call("experiments.evaluate", *command, "--shard=1/2")
  assert done.stdout.startswith("Counted 3 of 6 shards. When all are, omit --shard."), done.stderr
  done = runs.call("experiments.evaluate", *command)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("120 candidates: mAUPRC 0.")
  want = _expected(*made)
  values = json.loads((out / "evaluation.json").read_text())
  assert values["mAUPRC"] == want["mAUPRC"]
  queries = per_query.read(out / "evaluation.npz")
  np.testing.assert_array_equal(queries.ap, want["ap_per_query"])
  with np.load(out / "evaluation.npz") as arrays:
    np.testing.assert_allclose(arrays["ap@500"], queries.ap, rtol=1e-14)


@pytest.mark.parametrize("ks", ["1,x", "", "1,1", "01,1", "0", "-1", "2147483648", "9" * 5000])
def test_wrong_cut_offs(tmp_path, capsys, ks):
  given = {"queries": "q", "gallery": "g", "distractors": None, "output": str(tmp_path / "out")}
  with pytest.raises(SystemExit):
    gallery.evaluate(**given, ks=ks.split(","), memory_gb=4.0, shard=None)
  told = f"Error: --ks={ks} must be different integers from 1 to 2147483647, e.g. --ks=1,10,100\n"
  assert capsys.readouterr().err == told


def test_the_result_of_several_labels_has_the_rule(tmp_path):
  rows, ids, cells = np.eye(4, 16, dtype=np.float32), list("abcd"), ["x;y", "z", "y", "x;z"]
  sharded.write(tmp_path / "queries.npy", rows[:2], ids[:2], cells[:2])
  sharded.write(tmp_path / "shards" / "a.npy", rows, ids, cells)
  gallery.evaluate(
    queries=str(tmp_path / "queries.npy"),
    gallery=str(tmp_path / "shards"),
    distractors=None,
    output=str(tmp_path / "out"),
    ks=["1"],
    memory_gb=4.0,
    shard=None,
    label_separator=";",
    min_jaccard=0.5,
  )
  values = json.loads((tmp_path / "out" / "evaluation.json").read_text())
  # Only c is relevant to a, and d to b. All of the three candidates have the score 0.
  assert (values["mAUPRC"], values["num_queries"]) == (pytest.approx(1 / 3), 2)
  assert (values["label_separator"], values["min_jaccard"]) == (";", 0.5)


def test_an_output_that_is_a_file(tmp_path, capsys):
  sharded.gallery(tmp_path)
  queries = str(tmp_path / "queries.npy")
  given = {"gallery": str(tmp_path / "shards"), "distractors": None, "memory_gb": 4.0}
  with pytest.raises(SystemExit):
    gallery.evaluate(queries=queries, output=queries, ks=["1"], shard=None, **given)
  assert "queries.npy/counts: a file is in its place, choose" in capsys.readouterr().err


def test_flags(tmp_path):
  given = ["--queries=q.npy", "--gallery=g.npy", "--output=o"]
  for flags, message in (
    (given[:1], "missing --gallery and --output. For example:\n  soprc evaluate --queries="),
    (given[1:], "missing --queries"),
    ([*given, "--split=test"], "--queries and --split exclude each other"),
    ([*given, "--memory_gb=nan"], "--memory_gb=nan must be a finite number, e.g. --memory_gb=4"),
    ([*given, "--memory_gb=inf"], "--memory_gb=inf must be a finite number"),
    ([*given, "--shard=2/2"], "--shard=2/2 must be I/N"),
    ([*given, "--min_jaccard=0.5"], "--min_jaccard needs --label_separator"),
    (given, "--queries=q.npy: there is no such file"),
  ):
    done = runs.call("experiments.evaluate", *flags, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
  assert list(tmp_path.iterdir()) == []
