"""Tests indexes of galleries in shards: their recall, their files, and faults."""

import json
import os

import flat_engine
import numpy as np
import pytest
import sharded

from soprc_jax._internal import file_io
from soprc_jax.serving import shard_index, shards


@pytest.fixture
def made(tmp_path, monkeypatch):
  """Returns vectors, their shards and the file of an index, which is not built yet."""
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(300, 8)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  (tmp_path / "shards").mkdir()
  for number, rows in enumerate(np.array_split(np.arange(300), 3)):
    path = tmp_path / "shards" / f"{shards.name(number, 3)}.npy"
    sharded.write(path, vectors[rows], rows.tolist(), digest="d" * 64)
  monkeypatch.setattr(shard_index, "_BLOCK", 64)
  return vectors, shard_index.find(str(tmp_path / "shards"), flag="--gallery"), tmp_path / "i.faiss"


def test_an_exact_index_finds_all(made, monkeypatch):
  samples = flat_engine.install(monkeypatch, sample=40)
  vectors, found, path = made
  done = []
  recall = shard_index.build(path, found, "flat", on_rows=done.append)
  assert recall == shard_index.Recall(1.0, 1.0, 300)
  assert sum(done) == 300
  opened = shard_index.read(path)
  want = np.argsort(-vectors[:3] @ vectors.T, axis=1)[:, :5]
  np.testing.assert_array_equal(opened.engine.search(vectors[:3], 5), want)
  assert (opened.num_images, [one.path for one in opened.shards]) == (
    300,
    [one.path for one in found],
  )
  meta = json.loads(path.with_suffix(".json").read_text())
  assert (meta["digest"], meta["kind"], meta["recall"]["alone"]) == ("d" * 64, "flat", 1.0)
  # The sample is 40 different rows.
  (sample,) = samples
  rows = np.argmax(sample @ vectors.T, axis=1)
  np.testing.assert_array_equal(sample, vectors[np.unique(rows)])
  assert len(sample) == 40


def test_the_recall_is_the_share_of_the_nearest_that_are_found(made, monkeypatch):
  flat_engine.install(monkeypatch, is_blind=True)
  vectors, found, path = made
  recall = shard_index.build(path, found, "flat")
  scores = vectors @ vectors.T
  np.fill_diagonal(scores, -np.inf)
  nearest = np.argsort(-scores, axis=1)[:, : shard_index.TOP]
  assert recall.alone == pytest.approx((nearest % 2 == 0).mean())
  assert recall.rescored == pytest.approx((nearest % 2 == 0).mean())


def test_equal_vectors_count_as_found(tmp_path, monkeypatch):
  flat_engine.install(monkeypatch, is_blind=True)
  sharded.write(tmp_path / "a.npy", np.ones((40, 4), np.float32))
  found = shard_index.find(str(tmp_path / "a.npy"), flag="--gallery")
  assert shard_index.build(tmp_path / "i.faiss", found, "flat").alone == 1.0


@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows(tmp_path, monkeypatch, rows):
  flat_engine.install(monkeypatch)
  sharded.write(tmp_path / "a.npy", np.eye(rows, 8, dtype=np.float32))
  found = shard_index.find(str(tmp_path / "a.npy"), flag="--gallery")
  recall = shard_index.build(tmp_path / "i.faiss", found, "flat")
  assert recall.alone == (1.0 if rows > 1 else 0.0)  # one has no other


def test_gather_over_shards(made):
  vectors, found, _ = made
  rows = np.array([0, 99, 100, 250, 299])
  np.testing.assert_array_equal(shard_index.gather(found, rows), vectors[rows])


@pytest.mark.parametrize("sample", [0, 300])
def test_a_value_that_is_not_finite_is_named(made, monkeypatch, sample):
  flat_engine.install(monkeypatch, sample=sample)
  monkeypatch.setattr(shard_index, "QUERIES", 1)
  vectors, found, path = made
  vectors[170, 2] = np.nan
  sharded.write(found[1].path, vectors[100:200], list(range(100)), digest="d" * 64)
  with pytest.raises(ValueError, match=r"shard-00001-of-00003\.npy has a value .* in row 70"):
    shard_index.build(path, found, "flat")
  assert not path.exists()


def test_nothing_is_overwritten(made, monkeypatch):
  flat_engine.install(monkeypatch)
  _, found, path = made
  path.with_suffix(".json").write_text("mine")
  with pytest.raises(FileExistsError, match=r"i\.json exists"):
    shard_index.build(path, found, "flat")
  with pytest.raises(ValueError, match=r"must end in \.faiss"):
    shard_index.build(path.with_suffix(".usearch"), found, "flat")
  path.with_suffix(".json").unlink()
  shard_index.build(path, found, "flat")
  with pytest.raises(FileExistsError, match=r"i\.faiss exists"):
    shard_index.build(path, found, "flat")
  path.rename(path.with_suffix(".USEARCH"))  # whose origin this is
  with pytest.raises(FileExistsError, match=r"i\.json exists"):
    shard_index.build(path, found, "flat")


class _StoppedError(Exception):
  pass


def test_a_stop_leaves_no_index(made, monkeypatch):
  flat_engine.install(monkeypatch)
  _, found, path = made

  def stop(rows):
    raise _StoppedError

  with pytest.raises(_StoppedError):
    shard_index.build(path, found, "flat", on_rows=stop)
  assert [one.name for one in path.parent.iterdir()] == ["shards"]
  assert shard_index.build(path, found, "flat").alone == 1.0


def test_without_its_origin_the_index_is_removed(made, monkeypatch):
  flat_engine.install(monkeypatch)
  _, found, path = made
  with monkeypatch.context() as patched:
    patched.setattr(shard_index.json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      shard_index.build(path, found, "flat")
  assert [one.name for one in path.parent.iterdir()] == ["shards"]
  assert shard_index.build(path, found, "flat").alone == 1.0


def test_the_same_command_after_a_kill_at_any_moment(made, monkeypatch):
  flat_engine.install(monkeypatch)
  _, found, path = made
  replace, kills = file_io.os.replace, []

  def files():
    return {one: one.read_bytes() for one in path.parent.iterdir() if one.is_file()}

  def noted(old, new):
    kills.append(files())
    replace(old, new)

  monkeypatch.setattr(file_io.os, "replace", noted)
  shard_index.build(path, found, "flat")
  assert len(kills) == 2
  for left in kills.copy():
    for one in files():
      one.unlink()
    for one, content in left.items():
      one.write_bytes(content)
      os.utime(one, (0, 0))
    with pytest.raises(FileNotFoundError, match=r"i\.faiss is missing: soprc index writes it"):
      shard_index.read(path)
    assert shard_index.build(path, found, "flat").alone == 1.0
    assert shard_index.read(path).num_images == 300
    assert sorted(files()) == [path, path.with_suffix(".json")]


def test_galleries_without_an_index(tmp_path):
  sharded.write(tmp_path / "a.npy", np.empty((0, 3), np.float32))
  with pytest.raises(ValueError, match=r"--gallery=\S+ has no embedding"):
    shard_index.find(str(tmp_path / "a.npy"), flag="--gallery")
  sharded.write(tmp_path / "b.npy", np.eye(3, dtype=np.float32), digest="1" * 64)
  with pytest.raises(ValueError, match="was computed by model 11111111"):
    shard_index.find(str(tmp_path), flag="--gallery")
  np.savez(tmp_path / "c.npz", embeddings=np.eye(3, dtype=np.float32), ids=["a", "b", "c"])
  with pytest.raises(ValueError, match=r"reads an \.npz file without soprc index"):
    shard_index.find(str(tmp_path / "c.npz"), flag="--gallery")


def test_faults_of_the_tables_are_named_before_the_build(made):
  _, found, _ = made
  folder = found[0].path.parent
  table = found[1].path.with_suffix(".csv")
  table = table if table.exists() else found[1].path.with_suffix(".parquet")
  content = table.read_bytes()
  table.write_bytes(content[: len(content) // 2])
  with pytest.raises(ValueError, match=table.name):
    shard_index.find(str(folder), flag="--gallery")
  table.unlink()
  with pytest.raises(ValueError, match=f"{found[1].path.name} has no ids"):
    shard_index.find(str(folder), flag="--gallery")


def test_faults_of_its_files_are_named(made, monkeypatch):
  flat_engine.install(monkeypatch)
  vectors, found, path = made
  shard_index.build(path, found, "flat")
  beside, whole = path.with_suffix(".json"), path.read_bytes()
  path.write_bytes(whole[:-1])
  with pytest.raises(ValueError, match=rf"has {len(whole) - 1} bytes instead of {len(whole)}"):
    shard_index.read(path)
  path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
  with pytest.raises(ValueError, match=r"i\.faiss is not as it was written: build it again"):
    shard_index.read(path)
  path.write_bytes(whole)
  text = beside.read_text()
  earlier = json.loads(text)
  del earlier["sha256"]
  beside.write_text(json.dumps(earlier))
  with pytest.raises(ValueError, match=r"i\.json is corrupt \(sha256 is missing"):
    shard_index.read(path)
  beside.write_text(text[:-10])
  with pytest.raises(ValueError, match=r"i\.json is corrupt .*: build it again with soprc index"):
    shard_index.read(path)
  beside.write_text(text.replace('"flat"', '"curved"'))
  with pytest.raises(ValueError, match="is not of an index of this version"):
    shard_index.read(path)
  beside.unlink()
  with pytest.raises(FileNotFoundError, match=r"i\.json is missing: soprc index writes it"):
    shard_index.read(path)
  beside.write_text(text)
  shard_index.read(path)
  sharded.write(found[2].path, -vectors[200:], list(range(100)), digest="d" * 64)
  with pytest.raises(ValueError, match=r"00002-of-00003\.npy has changed since .*i\.faiss was"):
    shard_index.read(path)
  found[2].path.unlink()
  with pytest.raises(FileNotFoundError, match=r"00002-of-00003\.npy is no regular file"):
    shard_index.read(path)
