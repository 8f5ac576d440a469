"""Tests the indexes of faiss and usearch; each test is skipped without its package."""

from pathlib import Path
import sys

import numpy as np
import pytest

from soprc_jax.serving import shard_engines

_PACKAGE = {".faiss": "faiss", ".usearch": "usearch"}


def _vectors(rows, width=16):
  rng = np.random.default_rng(0)
  # In groups, as embeddings are: codes of vectors without any structure find nothing.
  vectors = rng.normal(size=(rows // 20 + 1, width))[np.arange(rows) // 20]
  vectors = (vectors + 0.3 * rng.normal(size=vectors.shape)).astype(np.float32)
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(
  ("kind", "least"),
  [("ivfpq", 0.3), ("hnsw", 0.9), ("int8", 0.9), ("binary", 0.2), ("usearch", 0.9)],
)
def test_what_is_added_is_found(tmp_path, kind, least):
  of_kind = shard_engines.KINDS[kind]
  pytest.importorskip(_PACKAGE[of_kind.suffix])
  vectors = _vectors(10_000 if kind == "ivfpq" else 500)
  engine = of_kind.make(16, len(vectors), vectors[: of_kind.sample(len(vectors))])
  for start in range(0, len(vectors), 300):
    engine.add(vectors[start : start + 300], start)
  asked = vectors[-20:]
  want = np.argsort(-asked @ vectors.T, axis=1)[:, :10]
  found = engine.search(asked, 10)
  share = np.mean([np.isin(a, b).mean() for a, b in zip(found, want, strict=True)])
  assert least < share <= 1
  with (tmp_path / "index").open("wb") as file:
    engine.save(file)
  loaded = of_kind.load(tmp_path / "index")
  np.testing.assert_array_equal(loaded.search(asked, 10), found)
  np.testing.assert_array_equal(loaded.search(asked[:1], 10), found[:1])
  if kind != "ivfpq":
    # There are only 500.
    more = loaded.search(asked[:2], 510)
    assert ((more[:, :10] >= 0).all(), (more[:, 500:] == -1).all()) == (True, True)
  content = (tmp_path / "index").read_bytes()
  (tmp_path / "index").write_bytes(content[: len(content) // 3])
  with pytest.raises(ValueError, match=r"is not a readable index .*: build it again with"):
    of_kind.load(tmp_path / "index")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it stands for a full disk")
@pytest.mark.parametrize("rows", [5, 500])
@pytest.mark.parametrize("kind", ["hnsw", "usearch"])
def test_a_full_disk_is_an_error(kind, rows):
  of_kind = shard_engines.KINDS[kind]
  pytest.importorskip(_PACKAGE[of_kind.suffix])
  vectors = _vectors(rows)
  engine = of_kind.make(16, rows, vectors[:0])
  engine.add(vectors, 0)

  def write():
    with open("/dev/full", "wb") as file:
      engine.save(file)

  with pytest.raises(OSError, match=r"No space left|the disk is full"):
    write()


def test_the_bits_are_signs():
  pytest.importorskip("faiss")
  vectors = _vectors(50)
  engine = shard_engines.KINDS["binary"].make(16, 50, vectors)
  engine.add(vectors, 0)
  (row,) = engine.search(vectors[:1], 50)
  equal = ((vectors >= 0) == (vectors[:1] >= 0)).sum(axis=1)
  assert (np.diff(equal[row]) <= 0).all()


def test_too_few_for_codes():
  with pytest.raises(ValueError, match="--kind=ivfpq needs at least 9984 embeddings, got 9983"):
    shard_engines.KINDS["ivfpq"].sample(9983)
  assert shard_engines.KINDS["ivfpq"].sample(9984) == 9984
  assert shard_engines.KINDS["ivfpq"].sample(10**9) == 64 * 2**15


@pytest.mark.parametrize("kind", sorted(shard_engines.KINDS))
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind):
  of_kind = shard_engines.KINDS[kind]
  package = _PACKAGE[of_kind.suffix]
  monkeypatch.setitem(sys.modules, package, None)
  for use in (lambda: of_kind.make(16, 10_000, None), lambda: of_kind.load(tmp_path)):
    with pytest.raises(ValueError, match=f"needs the package {package}: pip install {package}"):
      use()
