"""Tests the file that holds embeddings: its content, and that nothing in it is trusted."""

import indexes
import networks
import numpy as np
import pytest

from soprc_jax.serving import embed, index, network


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(made):
  return network.load(made[1])


@pytest.fixture(scope="module")
def of_test(loaded):
  return embed.of_split(loaded, "test")


def test_the_file_is_read_by_numpy_alone_and_read_back(of_test, tmp_path):
  path = tmp_path / "vectors.npz"
  index.write(path, of_test)
  assert [entry.name for entry in tmp_path.iterdir()] == ["vectors.npz"]
  with np.load(path, allow_pickle=False) as file:
    np.testing.assert_array_equal(file["embeddings"], of_test.embeddings)
    assert file["ids"].tolist() == of_test.ids.tolist()
    assert str(file["digest"]) == of_test.digest
    assert int(file["image_size"]) == 16
  again = index.read(path)
  for name, value in of_test._asdict().items():
    np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)
    assert isinstance(getattr(again, name), type(value)), name
  before = path.read_bytes()
  with pytest.raises(FileExistsError, match="exists: choose a new file"):
    index.write(path, of_test)
  assert path.read_bytes() == before
  with pytest.raises(ValueError, match=r"must end in \.npz"):
    index.write(tmp_path / "vectors.txt", of_test)
  with pytest.raises(FileNotFoundError, match="there is no folder"):
    index.write(tmp_path / "gone" / "vectors.npz", of_test)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"ids": np.array([{"a": 1}], object)}, "Object arrays cannot be loaded"),
    ({"ids": None}, "ids is missing"),
    ({"ids": np.arange(3)}, "ids must be text with 1 axes, got int64"),
    ({"ids": np.array(["a"])}, "ids has 1 entries for 16 embeddings"),
    (
      {"embeddings": np.zeros((16, 8))},
      r"embeddings must be float32 with 2 axes, got float64 \[16, 8\]",
    ),
    ({"embeddings": np.zeros((0, 8), np.float32)}, "embeddings is empty"),
    ({"embeddings": np.full((16, 8), np.nan, np.float32)}, "embedding 0 has norm nan"),
    ({"embeddings": np.full((16, 8), 3e38, np.float32)}, "embedding 0 has norm inf"),
    ({"labels": np.zeros(3, np.int64)}, "labels has 3 entries"),
    ({"positions": np.full(16, -1)}, "positions must be >= 0, got -1"),
    ({"step": np.array([1, 2])}, "step must be integers with 0 axes"),
    ({"format": np.array("other")}, "format is 'other' instead of"),
  ],
)
def test_damaged_files_are_named(of_test, tmp_path, changes, message):
  path = tmp_path / "v.npz"
  arrays = {"format": np.array(index.FORMAT)} | {
    name: np.asarray(value) for name, value in of_test._asdict().items()
  }
  np.savez(path, **{name: value for name, value in (arrays | changes).items() if value is not None})
  with pytest.raises(ValueError, match=message) as error:
    index.read(path)
  assert f"--index={path}" in str(error.value)
  assert "recreate it with soprc embed" in str(error.value)


def test_files_that_are_no_archives_are_named(of_test, tmp_path):
  index.write(tmp_path / "good.npz", of_test)
  content = (tmp_path / "good.npz").read_bytes()
  np.save(tmp_path / "one.npy", np.zeros(3))
  one = (tmp_path / "one.npy").read_bytes()
  flipped = bytearray(content)
  flipped[200] ^= 255
  encrypted = content.replace(
    b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"
  ).replace(b"PK\x01\x02-\x03-\x00\x00", b"PK\x01\x02-\x03-\x00\x01")
  assert encrypted != content
  for bad in (
    b"",
    b"PK",
    b"<html>",
    content[: len(content) // 2],
    one,
    bytes(flipped),
    encrypted,
    b"\x80\x04K\x01.",
  ):
    path = tmp_path / "bad.npz"
    path.write_bytes(bad)
    with pytest.raises(ValueError, match=r"--index=\S+bad\.npz is not a readable index") as error:
      index.read(path)
    assert "pickle" not in str(error.value)  # numpy's message would say how to run its content
  with pytest.raises(FileNotFoundError, match=r"gone\.npz: there is no such file"):
    index.read(tmp_path / "gone.npz")


def test_an_index_of_another_network_is_refused(tmp_path):
  config = networks.config()
  here = network.Network(config, tmp_path, {}, 9, "d")
  good = indexes.make(np.eye(3), model=here.architecture)
  index.check_network(good, here, name=f"--index={tmp_path}")
  with pytest.raises(
    ValueError,
    match=r"step 7 of runs/x, but the model here is that of step 9 of \S+: similarities",
  ):
    index.check_network(good._replace(digest="e"), here, name=f"--index={tmp_path}")
  with pytest.raises(ValueError, match=r"with eval\.image_size 32, but here it is 16"):
    index.check_network(good._replace(image_size=32), here, name=f"--index={tmp_path}")
  with pytest.raises(ValueError, match=r"with eval\.resize 20, but here it is 16"):
    index.check_network(good._replace(resize=20), here, name=f"--index={tmp_path}")
  with pytest.raises(ValueError, match="with model "):
    index.check_network(good._replace(model="{}"), here, name=f"--index={tmp_path}")
