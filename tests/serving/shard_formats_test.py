"""Tests the files of embeddings that other programs read and write: .fbin and HDF5."""

import sys

import h5py
import numpy as np
import pytest
import sharded

from soprc_jax.serving import shard_formats, shard_tables, shards

_ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def _find(path):
  (found,) = shards.find(str(path), flag="--gallery")
  return found


@pytest.mark.parametrize("suffix", [".npy", ".fbin", ".h5"])
@pytest.mark.parametrize("rows", [0, 4])
def test_what_is_written_is_read(tmp_path, monkeypatch, suffix, rows):
  monkeypatch.setattr(shard_formats, "_GATHERED", 2)
  shard = _find(sharded.write(tmp_path / f"a{suffix}", _ROWS[:rows]))
  assert (shard.rows, shard.width, shard.dtype) == (rows, 3, np.float32)
  np.testing.assert_array_equal(shards.read(shard, 0, rows), _ROWS[:rows])
  if rows:
    np.testing.assert_array_equal(shards.read(shard, 1, 2), _ROWS[1:3])
    np.testing.assert_array_equal(shards.gather(shard, np.array([3, 0, 1])), _ROWS[[3, 0, 1]])


def test_the_bytes_of_fbin(tmp_path):
  path = sharded.write(tmp_path / "a.fbin", _ROWS)
  # As big-ann-benchmarks writes it: two uint32, then the rows.
  assert path.read_bytes() == b"\4\0\0\0\3\0\0\0" + _ROWS.astype("<f4").tobytes()


def test_bad_fbin_files_are_named(tmp_path):
  path = sharded.write(tmp_path / "a.fbin", _ROWS)
  whole = path.read_bytes()
  for content, message in (
    (whole[:-1], r"a\.fbin is truncated: it has 55 bytes instead of 56\. Remove the shard"),
    (whole + b"x", r"a\.fbin is corrupt: it has 57 bytes instead of 56"),
    (whole[:7], r"a\.fbin is not a readable \.fbin file: it must begin with two uint32"),
    (whole[:4] + bytes(4) + whole[8:], r"a\.fbin is not a readable \.fbin file"),
    (b"\xff" * 8 + whole[8:], r"a\.fbin is truncated: .* instead of 73786976260478468108"),
  ):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
      _find(path)


def _ilias(path, vectors=_ROWS, names=("a", "b", "c", "d"), **options):
  """Writes features as the tools of ILIAS do."""
  with h5py.File(path, "w") as file:
    file.create_dataset("index", data=list(names), dtype=h5py.string_dtype("ascii"))
    options = {"compression": "gzip", "compression_opts": 0} | options
    file.create_dataset("features", data=vectors, **options)


def test_compressed_features_with_their_ids(tmp_path, monkeypatch):
  monkeypatch.setattr(shard_formats, "_GATHERED", 2)
  _ilias(tmp_path / "a.hdf5", _ROWS.astype(np.float16), chunks=(1, 2))
  shard = _find(tmp_path / "a.hdf5")
  assert (shard.rows, shard.width, shard.dtype) == (4, 3, np.float16)
  np.testing.assert_array_equal(shards.read(shard, 1, 2), _ROWS[1:3])
  np.testing.assert_array_equal(shards.gather(shard, np.array([3, 0])), _ROWS[[3, 0]])
  assert shard_tables.read(shard) == shard_tables.Table(["a", "b", "c", "d"], None)
  (tmp_path / "a.csv").write_text("id,label\n" + "x,y\n" * 4)  # a table comes first
  assert shard_tables.read(shard) == shard_tables.Table(["x"] * 4, ["y"] * 4)


def test_other_names_of_datasets(tmp_path):
  with h5py.File(tmp_path / "a.h5", "w") as file:
    file.create_dataset("ids", data=[7, 8, 9, 10])
    file.create_dataset("embeddings", data=_ROWS)
    file.create_dataset("features", data=_ROWS + 1)
  shard = _find(tmp_path / "a.h5")
  np.testing.assert_array_equal(shards.read(shard, 0, 4), _ROWS)
  assert shard_tables.read(shard).ids == ["7", "8", "9", "10"]


def test_bad_hdf5_files_are_named(tmp_path):
  path = tmp_path / "a.h5"
  _ilias(path, _ROWS.astype(np.float64))
  with pytest.raises(ValueError, match=r"a\.h5: features must be an array .* got float64 \[4, 3\]"):
    _find(path)
  _ilias(path, names=["a", "b"])
  with pytest.raises(ValueError, match=r"a\.h5 has 2 ids for 4 embeddings"):
    shard_tables.read(_find(path))
  _ilias(path)
  path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(ValueError, match=r"a\.h5 is not a readable HDF5 file .*truncated"):
    _find(path)
  path.write_bytes(b"x" * 3000)
  with pytest.raises(ValueError, match=r"a\.h5 is not a readable HDF5 file"):
    _find(path)
  with h5py.File(path, "w") as file:
    file.create_dataset("vectors", data=_ROWS)
  with pytest.raises(ValueError, match=r"no dataset embeddings or .* features, but 'vectors'"):
    _find(path)


def test_nothing_is_read_from_other_files(tmp_path):
  _ilias(tmp_path / "secret.h5")
  (tmp_path / "raw").write_bytes(_ROWS.tobytes())
  source = h5py.VirtualSource(str(tmp_path / "secret.h5"), "features", _ROWS.shape)
  layout = h5py.VirtualLayout(_ROWS.shape, _ROWS.dtype)
  layout[:] = source
  raw = [(str(tmp_path / "raw"), 0, _ROWS.nbytes)]
  with h5py.File(tmp_path / "0.h5", "w") as file:
    file["features"] = h5py.ExternalLink("secret.h5", "features")
  with h5py.File(tmp_path / "1.h5", "w") as file:
    file.create_virtual_dataset("features", layout)
  with h5py.File(tmp_path / "2.h5", "w") as file:
    file.create_dataset("features", _ROWS.shape, _ROWS.dtype, external=raw)
  for number in range(3):
    with pytest.raises(ValueError, match=f"{number}.h5 has no dataset"):
      _find(tmp_path / f"{number}.h5")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
  path = sharded.write(tmp_path / "a.h5", _ROWS)
  monkeypatch.setitem(sys.modules, "h5py", None)
  with pytest.raises(ValueError, match=r"a\.h5 needs the package h5py: pip install h5py"):
    _find(path)
  with pytest.raises(ValueError, match="--format=h5 needs the package h5py"):
    shard_formats.check_written(".h5", "float32")


def test_formats_and_types():
  for suffix, dtype in ((".npy", "float16"), (".h5", "float16"), (".fbin", "float32")):
    shard_formats.check_written(suffix, dtype)
  with pytest.raises(ValueError, match="--format=fbin holds float32: leave out --dtype=float16"):
    shard_formats.check_written(".fbin", "float16")


def test_a_folder_of_two_formats_is_named(tmp_path):
  for suffix in (".npy", ".h5"):
    sharded.write(tmp_path / f"a{suffix}", _ROWS)
  with pytest.raises(ValueError, match=r"several formats, \.h5, \.npy: give .*/\*\.h5'"):
    shards.find(str(tmp_path), flag="--gallery")
