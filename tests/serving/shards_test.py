"""Tests files of embeddings in shards and their tables, and what is reported about bad ones."""

import indexes
import numpy as np
import pytest
import sharded

from soprc_jax.serving import index, shard_formats, shard_tables, shards

_ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def _find(pattern):
  return shards.find(str(pattern), flag="--gallery")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_read_and_gather(tmp_path, dtype, monkeypatch):
  monkeypatch.setattr(shard_formats, "_GATHERED", 2)
  (shard,) = _find(sharded.write(tmp_path / "a.npy", _ROWS.astype(dtype)))
  assert (shard.rows, shard.width, shard.dtype, shard.made_by) == (4, 3, dtype, "")
  np.testing.assert_array_equal(shards.read(shard, 1, 2), _ROWS[1:3])
  assert shards.read(shard, 0, 4).dtype == dtype
  np.testing.assert_array_equal(shards.gather(shard, np.array([0, 1, 3])), _ROWS[[0, 1, 3]])


def test_a_folder_a_pattern_and_a_file_in_order(tmp_path):
  for number in (1, 0):
    sharded.write(tmp_path / f"{shards.name(number, 2)}.npy", _ROWS)
  names = ["shard-00000-of-00002.npy", "shard-00001-of-00002.npy"]
  assert [one.path.name for one in _find(tmp_path)] == names
  assert [one.path.name for one in _find(tmp_path / "*.npy")] == names
  with pytest.raises(FileNotFoundError, match=r"there is no such file; give e\.g\."):
    _find(tmp_path / "x*.npy")


def test_a_missing_shard_is_named(tmp_path):
  for number in (0, 2, 4):
    sharded.write(tmp_path / f"{shards.name(number, 5)}.npy", _ROWS)
  with pytest.raises(FileNotFoundError, match=r"2 of 5.*shard-00001-of-00005\.npy.*--shard=1/5"):
    _find(tmp_path)


def test_numbers_that_do_not_begin_at_0_are_named(tmp_path):
  for number in (1, 2):
    sharded.write(tmp_path / f"{shards.name(number, 2)}.npy", _ROWS)
  with pytest.raises(ValueError, match=r"shard-00002-of-00002\.npy has no number from 0 to 1"):
    _find(tmp_path)


def test_a_huge_number_of_shards_needs_no_memory(tmp_path):
  sharded.write(tmp_path / "x-0-of-99999999999.npy", _ROWS)
  with pytest.raises(FileNotFoundError, match=r"99999999998 of .*, the first is .*x-1-of-9999"):
    _find(tmp_path)


def test_patterns_of_folders(tmp_path):
  path = sharded.write(tmp_path / "[a]" / "b" / "c" / "d.npy", _ROWS)
  assert [one.path for one in _find(tmp_path / "**" / "*.npy")] == [path]
  with pytest.raises(FileNotFoundError, match=r"no such file; .* is written \[\[\] in a pattern"):
    _find(tmp_path / "[a]" / "b" / "c" / "*.npy")
  assert [one.path for one in _find(tmp_path / "[[]a]" / "b" / "c" / "*.npy")] == [path]


def test_bad_files_are_named(tmp_path):
  path = sharded.write(tmp_path / "a.npy", _ROWS)
  whole = path.read_bytes()
  path.write_bytes(whole[:-1])
  with pytest.raises(ValueError, match=r"a\.npy is truncated: it has 175 bytes instead of 176"):
    _find(path)
  path.write_bytes(whole + b"x")
  with pytest.raises(ValueError, match=r"a\.npy is corrupt: it has 177"):
    _find(path)
  path.write_bytes(whole[:20])
  with pytest.raises(ValueError, match=r"a\.npy is not a readable \.npy file"):
    _find(path)
  for old, new in ((b"}", b" "), (b"'descr'", b"0      ")):
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"a\.npy is not a readable .* or write it again"):
      _find(path)
  for wrong, reason in (
    (_ROWS.astype(np.float64), "got float64"),
    (np.asfortranarray(_ROWS), "in Fortran order"),
    (_ROWS[0], r"got float32 \[3\]"),
    (_ROWS.astype(">f4"), "got >f4"),
  ):
    np.save(path, wrong)
    with pytest.raises(ValueError, match=reason):
      _find(path)


def test_a_file_that_becomes_shorter_is_named(tmp_path):
  path = sharded.write(tmp_path / "a.npy", _ROWS)
  (shard,) = _find(path)
  path.write_bytes(path.read_bytes()[:-4])
  shards.read(shard, 0, 3)
  with pytest.raises(ValueError, match=r"a\.npy was truncated"):
    shards.read(shard, 0, 4)


def test_models_and_widths_do_not_mix(tmp_path):
  digests = {"a": "1" * 64, "b": "2" * 64, "c": None}
  found = {
    name: _find(sharded.write(tmp_path / f"{name}.npy", _ROWS, digest=digest))[0]
    for name, digest in digests.items()
  }
  assert [one.made_by for one in found.values()] == ["1" * 64, "2" * 64, ""]
  shards.check_same_model([found["a"], found["a"]])
  with pytest.raises(ValueError, match=r"b\.npy was .* model 2222.*a\.npy by model 1111"):
    shards.check_same_model([found["a"], found["b"]])
  with pytest.raises(ValueError, match=r"c\.npy was computed by an unknown model"):
    shards.check_same_model([found["a"], found["c"]])
  (wide,) = _find(sharded.write(tmp_path / "d.npy", _ROWS.reshape(2, 6)))
  with pytest.raises(ValueError, match=r"d\.npy has width 6, but .*c\.npy has 3"):
    shards.check_same_model([found["c"], wide])


def test_folders_of_images_that_differ_are_named(tmp_path, caplog):
  for number, root in enumerate(("/a", "/a", "/b", "/b")):
    path = tmp_path / f"{shards.name(number, 4)}.npy"
    sharded.write(path, _ROWS, digest="1", root=root)
  _find(tmp_path)
  (told,) = caplog.messages
  assert "shard-00002-of-00004.npy has images of the folder /b, but " in told
  assert "shard-00000-of-00004.npy those of /a: if these are not the same images" in told


def test_an_origin_that_does_not_fit_is_named(tmp_path):
  path = sharded.write(tmp_path / "a.npy", _ROWS, digest="1")
  np.save(path, _ROWS[:3])
  with pytest.raises(ValueError, match=r"a\.json describes .* 4, 3.* but the array is .* 3, 3"):
    _find(path)
  path.with_suffix(".json").write_text("{")
  with pytest.raises(ValueError, match=r"a\.json is corrupt .* of another program needs"):
    _find(path)


@pytest.mark.parametrize("table", ["csv", "parquet"])
def test_tables(tmp_path, table):
  path = tmp_path / "a.npy"
  labels = ["x", "", "é,\n", "y"]
  (shard,) = _find(sharded.write(path, _ROWS, [7, 8, 9, 10], labels, table=table))
  assert shard_tables.read(shard) == shard_tables.Table(["7", "8", "9", "10"], labels)
  sharded.write(path, _ROWS, ["a", "b", "c"], table=table)
  with pytest.raises(
    ValueError, match=rf"a\.{table}: column id has 3 rows for 4 embeddings .* one row"
  ):
    shard_tables.read(shard)
  sharded.write(path, _ROWS, ["a", "b", "", "d"], table=table)
  with pytest.raises(ValueError, match=rf"a\.{table}: the id is empty in row 2"):
    shard_tables.read(shard)
  path.with_suffix(f".{table}").write_bytes(b"\xff\x00")
  remedy = ": save it as UTF-8" if table == "csv" else ""
  with pytest.raises(ValueError, match=rf"a\.{table} cannot be read: .*{remedy}$"):
    shard_tables.read(shard)
  path.with_suffix(f".{table}").unlink()
  assert shard_tables.read(shard) == shard_tables.Table(None, None)


def test_more_bad_tables(tmp_path):
  (shard,) = _find(sharded.write(tmp_path / "a.npy", _ROWS, [0.5, 1, 2, 3], table="parquet"))
  with pytest.raises(ValueError, match=r"an integer, got 0\.5 of type float in row 0"):
    shard_tables.read(shard)
  shard.path.with_suffix(".csv").write_text("id,label\na\n")
  with pytest.raises(ValueError, match=r"both exist"):
    shard_tables.read(shard)
  shard.path.with_suffix(".parquet").unlink()
  with pytest.raises(ValueError, match=r"row 0 has not the 2 columns"):
    shard_tables.read(shard)
  shard.path.with_suffix(".csv").write_text("id,label,id,x,x\n" + "a,b,c,d,e\n" * 4)
  with pytest.raises(ValueError, match=r"a\.csv .* 2 columns id: rename one"):
    shard_tables.read(shard)
  shard.path.with_suffix(".csv").write_text("id\na\n  \nb\nc\n")
  with pytest.raises(ValueError, match=r"a\.csv: the id is empty in row 1"):
    shard_tables.read(shard)


def test_an_index_of_soprc_embed_is_one_shard(tmp_path):
  made = indexes.make(np.eye(3), class_names=["a", "", "b"], digest="d" * 64)
  index.write(tmp_path / "v.npz", made)
  (shard,) = _find(tmp_path / "v.npz")
  assert (shard.rows, shard.width, shard.made_by) == (3, 3, "d" * 64)
  assert shard_tables.read(shard) == shard_tables.Table(made.ids.tolist(), ["a", "", "b"])
  np.testing.assert_array_equal(shards.read(shard, 1, 2), np.eye(3)[1:])
  np.testing.assert_array_equal(shards.gather(shard, np.array([2])), np.eye(3)[2:])
  np.savez(tmp_path / "w.npz", embeddings=np.eye(3, dtype=np.float32))
  with pytest.raises(ValueError, match=r"w\.npz has no ids"):
    _find(tmp_path / "w.npz")


def test_part():
  assert shards.part("3/100", flag="--shard") == (3, 100)
  for wrong in ("3", "100/100", "-1/3", "0/0", "a/b", "1/2/3"):
    with pytest.raises(ValueError, match=rf"--shard={wrong} must be I/N"):
      shards.part(wrong, flag="--shard")
