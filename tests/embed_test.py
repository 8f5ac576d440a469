"""Images to embeddings, and the file that holds them: what is in it, and that nothing in it is trusted."""

import json
import pathlib
import shutil

import networks
import numpy as np
from PIL import Image
import pytest
import runs
import trees

from soprc_jax.data import pictures
from soprc_jax.serving import embed, images, index, network
from soprc_jax.training import evaluation


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(folder of images, run)."""
  root = trees.folder(tmp_path_factory.mktemp("data"), networks.NUM_CLASSES, per_class=2)
  return root, networks.make(tmp_path_factory.mktemp("run") / "run", root)


@pytest.fixture(scope="module")
def loaded(made):
  return network.load(made[1])


@pytest.fixture(scope="module")
def of_test(loaded):
  return embed.of_split(loaded, "test")


def test_a_split_is_embedded_as_evaluation_does(made, loaded, of_test):
  trained = evaluation.load(networks.config(made[0]), made[1])
  want = trained.embed(trained.variables, trained.splits["test"])
  np.testing.assert_array_equal(of_test.embeddings, want.embeddings)
  assert of_test.embeddings.dtype == np.float32
  np.testing.assert_array_equal(of_test.labels, trained.splits["test"].labels)
  examples = [trained.splits["test"][i] for i in range(len(want.labels))]
  assert of_test.ids.tolist() == [example.id for example in examples]
  assert of_test.class_names.tolist() == [example.class_name for example in examples]
  assert (of_test.step, of_test.split, of_test.workdir) == (3, "test", str(made[1]))
  assert json.loads(of_test.model)["embedding_dim"] == 8
  assert len(np.unique(of_test.embeddings, axis=0)) == len(want.labels)  # else the tests below would show nothing


def test_a_folder_without_classes(made, loaded, of_test, tmp_path, caplog, monkeypatch):
  monkeypatch.chdir(tmp_path)
  first, second = of_test.ids[:2]
  (tmp_path / "photos" / "a" / "b").mkdir(parents=True)
  (tmp_path / "photos" / ".hidden").mkdir()
  shutil.copy(made[0] / first, "photos/z.PNG")
  shutil.copy(made[0] / second, "photos/a/b/größe 文.png")
  shutil.copy(made[0] / second, "photos/.hidden/x.png")
  (tmp_path / "photos" / "notes.txt").write_text("")
  found = embed.of_images(loaded, "photos")
  assert found.ids.tolist() == ["photos/a/b/größe 文.png", "photos/z.PNG"]
  np.testing.assert_allclose(found.embeddings, of_test.embeddings[[1, 0]], atol=1e-6)
  assert not found.has_classes
  assert len(found.labels) == 0
  assert found.root == str(tmp_path)
  assert "photos/notes.txt" in caplog.text


@pytest.mark.parametrize("kind", ["csv", "csv_path", "txt"])
def test_a_list(made, loaded, of_test, tmp_path, kind):
  paths = [str(made[0] / of_test.ids[0]), "here.png"]
  shutil.copy(made[0] / of_test.ids[1], tmp_path / "here.png")
  lines = {"csv": ["path,label", f"{paths[0]},ä", f"{paths[1]},"], "csv_path": ["path", *paths], "txt": ["", *paths]}[kind]
  place = tmp_path / f"list.{kind[:3]}"
  place.write_text("\n".join(lines) + "\n")
  found = embed.of_images(loaded, str(place))
  assert found.ids.tolist() == paths
  assert found.class_names.tolist() == (["ä", ""] if kind == "csv" else ["", ""])
  assert found.has_classes == (kind == "csv")
  np.testing.assert_allclose(found.embeddings, of_test.embeddings[:2], atol=1e-6)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("l.csv", "path,class\na.png,b\n", "the columns are"),
    ("l.csv", "path,label\na.png\n", r"l\.csv:2: 2 fields wanted"),
    ("l.csv", "path\n", "lists no image"),
    ("l.csv", b"path\n\xff\n", "not UTF-8"),
    ("l.txt", "gone.png\n", r"l\.txt:1: there is no file 'gone\.png'"),
    ("l.txt", "l.txt\n\nl.txt\n", r"l\.txt:3: 'l\.txt' is listed twice, first in line 1"),
    ("l.txt", "\n", "lists no image"),
    ("l.npz", b"PK\x03\xff", "no list that can be read"),
  ],
)
def test_lists_that_are_none(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises((ValueError, OSError), match=message):
    images.find(str(tmp_path / name), flag="--images")


def test_folders_without_an_image(tmp_path):
  with pytest.raises(FileNotFoundError, match="has no image"):
    images.find(str(tmp_path), flag="--images")
  with pytest.raises(FileNotFoundError, match=r"--images=\S+gone: there is no such file or folder"):
    images.find(str(tmp_path / "gone"), flag="--images")


def test_broken_images(made, tmp_path):
  (tmp_path / "broken.png").write_bytes(b"x")
  shutil.copytree(made[0] / "class_000", tmp_path / "good")
  with pytest.raises(pictures.BrokenImageError, match=r"broken\.png: this is no image"):
    embed.of_images(network.load(made[1]), str(tmp_path))
  skipping = network.load(made[1], on_broken="skip")
  found = embed.of_images(skipping, str(tmp_path))
  assert found.broken_ids.tolist() == [str(tmp_path / "broken.png")]
  assert found.positions.tolist() == [1, 2]
  assert [pathlib.Path(one).name for one in found.ids] == ["0.png", "1.png"]
  assert "left out: 1, e.g." in embed.summary(found, tmp_path / "x.npz")
  with pytest.raises(ValueError, match="none of the 1 images can be decoded"):
    embed.of_images(skipping, str(tmp_path / "broken.png"))


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
    ({"ids": np.arange(3)}, "ids must be text of 1 axes, it is int64"),
    ({"ids": np.array(["a"])}, "ids has 1 entries for 16 embeddings"),
    ({"embeddings": np.zeros((16, 8))}, r"embeddings must be float32 of 2 axes, it is float64 \[16, 8\]"),
    ({"embeddings": np.zeros((0, 8), np.float32)}, "embeddings is empty"),
    ({"embeddings": np.full((16, 8), np.nan, np.float32)}, "embedding 0 has norm nan"),
    ({"embeddings": np.full((16, 8), 3e38, np.float32)}, "embedding 0 has norm inf"),
    ({"labels": np.zeros(3, np.int64)}, "labels has 3 entries"),
    ({"positions": np.full(16, -1)}, "positions has -1"),
    ({"step": np.array([1, 2])}, "step must be integers of 0 axes"),
    ({"format": np.array("other")}, "format 'other' instead of"),
  ],
)
def test_damaged_files_are_named(of_test, tmp_path, changes, message):
  path = tmp_path / "v.npz"
  arrays = {"format": np.array(index.FORMAT)} | {name: np.asarray(value) for name, value in of_test._asdict().items()}
  np.savez(path, **{name: value for name, value in (arrays | changes).items() if value is not None})
  with pytest.raises(ValueError, match=message) as error:
    index.read(path)
  assert f"--index={path}" in str(error.value)
  assert "make it again with experiments.embed" in str(error.value)


def test_files_that_are_no_archives_are_named(of_test, tmp_path):
  index.write(tmp_path / "good.npz", of_test)
  content = (tmp_path / "good.npz").read_bytes()
  np.save(tmp_path / "one.npy", np.zeros(3))
  one = (tmp_path / "one.npy").read_bytes()
  flipped = bytearray(content)
  flipped[200] ^= 255
  encrypted = content.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01").replace(
    b"PK\x01\x02-\x03-\x00\x00", b"PK\x01\x02-\x03-\x00\x01"
  )
  assert encrypted != content
  for bad in (b"", b"PK", b"<html>", content[: len(content) // 2], one, bytes(flipped), encrypted, b"\x80\x04K\x01."):
    path = tmp_path / "bad.npz"
    path.write_bytes(bad)
    with pytest.raises(ValueError, match=r"--index=\S+bad\.npz is no index") as error:
      index.read(path)
    assert "pickle" not in str(error.value)  # numpy would say how to run what is in it
  with pytest.raises(FileNotFoundError, match=r"gone\.npz: there is no such file"):
    index.read(tmp_path / "gone.npz")


def test_the_digest_knows_every_array(loaded):
  params = loaded.variables["params"]
  kernel = params["head"]["kernel"].copy()
  kernel.view(np.uint8)[0, 0] ^= 1
  for changed in (
    {**params, "head": {**params["head"], "kernel": kernel}},
    {**params, "head": {**params["head"], "kernel": params["head"]["kernel"].reshape(8, -1)}},
    {**params, "tail": params["head"]},
  ):
    assert network.digest({**loaded.variables, "params": changed}) != loaded.digest
  again = {key: loaded.variables[key] for key in sorted(loaded.variables, reverse=True)}
  assert network.digest(again) == loaded.digest


def test_the_config_is_that_of_the_run(made, loaded, tmp_path):
  assert loaded.config.to_dict() == networks.config(made[0]).to_dict()
  assert network.load(made[1], networks.config(tmp_path)).config.data.root == str(tmp_path)  # other images
  with pytest.raises(ValueError, match=r"not the config of the run(.|\n)*model\.embedding_dim: 8 there, 4 here"):
    network.load(made[1], networks.config(**{"model.embedding_dim": 4}))
  with pytest.raises(ValueError, match="holds no run"):
    network.load(tmp_path)
  (tmp_path / "config.json").write_text('{"model": {"width": "wide"}}')
  with pytest.raises(ValueError, match=r"config\.json: this is no config of a run|config\.json: the config does not work"):
    network.load(tmp_path)


def test_embed_search_and_export_from_the_command_line(made, tmp_path):
  root, run = made
  vectors, sheet = tmp_path / "v.npz", tmp_path / "s.png"
  done = runs.call("experiments.embed", f"--workdir={run}", f"--images={root}", f"--output={vectors}")
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("40 images as vectors of 8 numbers, by step 3 of")
  told = done.stdout.splitlines()[-1].split()
  assert told[:3] == ["python", "-m", "experiments.search"]
  query = root / "class_007" / "1.png"
  command = [word.replace("PHOTO.jpg", str(query)) for word in told[3:]]
  command += [f"--query={root / 'class_003'}", "--format=json", f"--contact_sheet={sheet}", "--top=3"]
  done = runs.call("experiments.search", *command)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)["queries"]
  paths = [str(query), *(str(root / "class_003" / f"{i}.png") for i in range(2))]
  assert [one["query"] for one in found] == paths
  assert [one["neighbours"][0]["id"] for one in found] == paths  # each is in the gallery
  with Image.open(sheet) as picture:
    assert picture.width > 4 * 144
  done = runs.call(
    "experiments.export", f"--workdir={run}", "--format=safetensors", f"--output={tmp_path / 'n.safetensors'}"
  )
  assert done.returncode == 1
  assert done.stderr.startswith("Error: this network is no ResNet of torchvision (model.name is resnet8")
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s.png", "v.npz"]
