"""Tests images in tar and Parquet files, and what is reported about bad files."""

import io
import tarfile

import numpy as np
from PIL import Image
import pyarrow
from pyarrow import parquet
import pytest

from soprc_jax.data import archives, decoding, sources


def _png(value):
  file = io.BytesIO()
  Image.new("RGB", (4, 3), (value, 0, 0)).save(file, "PNG")
  return file.getvalue()


def _tar(path, content, form=tarfile.USTAR_FORMAT):
  with tarfile.open(path, "w", format=form) as file:
    for name, data in content.items():
      member = tarfile.TarInfo(name)
      member.size = len(data)
      file.addfile(member, io.BytesIO(data))
  return path


def _value(source, index):
  return int(decoding.pixels(decoding.as_picture(source[index].image))[0, 0, 0])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_file(tmp_path, form):
  long = "folder/" * 12 + "é" * (40 if form == tarfile.USTAR_FORMAT else 90)
  content = {"a/0.png": _png(7), "a/0.cls": b" cat\n", "a/0.json": b"{}", f"{long}.PNG": _png(8)}
  path = _tar(tmp_path / "x.tar", content | {"last.png": _png(9)}, form)
  source = archives.load([path])
  assert source.ids == [f"{path}/{name}" for name in ("a/0.png", f"{long}.PNG", "last.png")]
  assert [_value(source, index) for index in range(3)] == [7, 8, 9]
  assert [source[index].class_name for index in range(3)] == ["cat", "", ""]
  assert source[1].id == source.ids[1]
  assert len(source) == len(source.labels) == 3


def test_links_and_folders_in_a_tar_file_are_skipped(tmp_path):
  with tarfile.open(tmp_path / "x.tar", "w") as file:
    for name, kind in (("d.png", tarfile.DIRTYPE), ("l.png", tarfile.SYMTYPE)):
      member = tarfile.TarInfo(name)
      member.type, member.linkname = kind, "/etc/passwd"
      file.addfile(member)
  with pytest.raises(ValueError, match=r"x\.tar has no image"):
    archives.load([tmp_path / "x.tar"])


def test_bad_tar_files_are_named(tmp_path):
  path = _tar(tmp_path / "x.tar", {"0.png": bytes(2000), "1.png": bytes(2000)})
  whole = path.read_bytes()
  path.write_bytes(whole[:4000])
  with pytest.raises(ValueError, match=r"x\.tar is truncated: a file in it ends at 5072"):
    archives.load([path])
  path.write_bytes(whole[:2560] + b"?" + whole[2561:])
  with pytest.raises(ValueError, match=r"x\.tar is no uncompressed tar .* corrupt at byte 2560"):
    archives.load([path])
  path.write_bytes(b"\x1f\x8b" + bytes(20))
  with pytest.raises(ValueError, match=r"at byte 0: give a plain \.tar"):
    archives.load([path])


@pytest.mark.parametrize("as_struct", [True, False])
def test_a_parquet_file(tmp_path, as_struct):
  images = [_png(value) for value in range(5)]
  column = [{"bytes": one, "path": None} for one in images] if as_struct else images
  table = pyarrow.table({"image": column, "label": [3, 3, 4, None, 5], "path": list("abcde")})
  path = tmp_path / "x.parquet"
  parquet.write_table(table, path, row_group_size=2)
  assert archives.has_images(path)
  source = archives.load([path])
  assert source.ids == list("abcde")
  order = [4, 0, 3, 1, 2]
  assert [_value(source, index) for index in order] == order
  assert [source[index].class_name for index in range(5)] == ["3", "3", "4", "", "5"]
  parquet.write_table(table.select(["image"]), path)
  assert archives.load([path]).ids == [f"{path}/{row}" for row in range(5)]


def test_bad_parquet_files_are_named(tmp_path):
  path = tmp_path / "x.parquet"
  parquet.write_table(pyarrow.table({"embedding": [[1.0]], "label": [1]}), path)
  assert not archives.has_images(path)
  with pytest.raises(ValueError, match=r"x\.parquet has no images .* but \['embedding', 'label'\]"):
    archives.load([path])
  both = pyarrow.table({"embedding": [[1.0]], "image": [b"x"]})
  parquet.write_table(both, path)
  assert not archives.has_images(path)  # it is a file of `features`
  path.write_bytes(b"PAR1")
  assert not archives.has_images(path)
  with pytest.raises(ValueError, match=r"x\.parquet cannot be read"):
    archives.load([path])
  parquet.write_table(pyarrow.table({"image": [b"x", None]}), path)
  source = archives.load([path])
  for index in range(2):
    with pytest.raises(decoding.BrokenImageError, match=f"x.parquet/{index}"):
      _value(source, index)


def test_several_files(tmp_path):
  paths = [_tar(tmp_path / f"{i}.tar", {"0.png": _png(i), "1.png": _png(9)}) for i in range(2)]
  source = archives.load(paths)
  assert sources.ids(source) == [f"{path}/{i}.png" for path in paths for i in range(2)]
  assert [_value(source, index) for index in range(4)] == [0, 9, 1, 9]
  assert np.array_equal(source.labels, np.zeros(4))
