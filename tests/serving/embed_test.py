"""Images to embeddings, and the file that holds them: what is in it, and that nothing in it is trusted."""

import json
import os
import pathlib
import re
import shutil
import socket

import networks
import numpy as np
from PIL import Image
import pytest
import runs
import trees

from soprc_jax.data import decoding
from soprc_jax.serving import embed, image_inputs, index, network
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


def _of_images(loaded, path):
  return embed.of_images(loaded, image_inputs.find(path, flag="--images", on_broken=loaded.config.data.on_broken))


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
  found = _of_images(loaded, "photos")
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
  found = _of_images(loaded, str(place))
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
    image_inputs.find(str(tmp_path / name), flag="--images")


def test_folders_without_an_image(tmp_path):
  with pytest.raises(FileNotFoundError, match="has no image"):
    image_inputs.find(str(tmp_path), flag="--images")
  with pytest.raises(FileNotFoundError, match=r"--images=\S+gone: there is no such file or folder"):
    image_inputs.find(str(tmp_path / "gone"), flag="--images")


def test_broken_images(made, tmp_path):
  (tmp_path / "broken.png").write_bytes(b"x")
  shutil.copytree(made[0] / "class_000", tmp_path / "good")
  with pytest.raises(decoding.BrokenImageError, match=r"broken\.png: this is no image"):
    _of_images(network.load(made[1]), str(tmp_path))
  skipping = network.load(made[1], on_broken="skip")
  found = _of_images(skipping, str(tmp_path))
  assert found.broken_ids.tolist() == [str(tmp_path / "broken.png")]
  assert found.positions.tolist() == [1, 2]
  assert [pathlib.Path(one).name for one in found.ids] == ["0.png", "1.png"]
  assert "left out: 1, e.g." in embed.summary(found, tmp_path / "x.npz")
  with pytest.raises(ValueError, match="none of the 1 images can be decoded"):
    _of_images(skipping, str(tmp_path / "broken.png"))


def _links(folder, made):
  """A folder of two good images and two links that lead nowhere."""
  shutil.copytree(made[0] / "class_000", folder)
  (folder / "dead.png").symlink_to("nowhere")
  (folder / "loop.png").symlink_to("loop.png")
  return folder


@pytest.mark.parametrize("kind", ["folder", "txt", "csv"])
def test_f63_links_that_lead_nowhere_are_skipped_and_counted(made, tmp_path, kind):
  folder = _links(tmp_path / "photos", made)
  names = ["0.png", "1.png", "dead.png", "loop.png"]
  (folder / "list.txt").write_text("\n".join(names))
  (folder / "list.csv").write_text("\n".join(["path", *names]))
  given = str(folder if kind == "folder" else folder / f"list.{kind}")
  with pytest.raises((ValueError, OSError), match=r"dead\.png.*\(.*a link to nothing\)"):
    _of_images(network.load(made[1]), given)
  found = _of_images(network.load(made[1], on_broken="skip"), given)
  assert [pathlib.Path(one).name for one in found.ids] == names[:2]
  assert [pathlib.Path(one).name for one in found.broken_ids] == names[2:]
  assert "left out: 2, e.g." in embed.summary(found, tmp_path / "x.npz")


def test_f63_a_split_with_links_that_lead_nowhere(made, tmp_path):
  shutil.copytree(made[0], tmp_path / "data")
  skipping = network.load(made[1], networks.config(tmp_path / "data"), on_broken="skip")
  whole = embed.of_split(skipping, "all")
  gone = tmp_path / "data" / whole.ids[3]
  gone.unlink()
  gone.symlink_to("nowhere")
  found = embed.of_split(skipping, "all")
  assert found.broken_ids.tolist() == [whole.ids[3]]
  np.testing.assert_array_equal(found.embeddings, np.delete(whole.embeddings, 3, axis=0))
  with pytest.raises(ValueError, match=rf"{gone.name} is no file that can be read"):
    embed.of_split(network.load(made[1], networks.config(tmp_path / "data")), "all")


def test_f52_only_regular_files_of_a_folder_are_images(made, tmp_path, caplog):
  shutil.copytree(made[0] / "class_000", tmp_path / "photos")
  os.mkfifo(tmp_path / "photos" / "pipe.jpg")
  (tmp_path / "photos" / "linked.jpg").symlink_to("pipe.jpg")
  (tmp_path / "photos" / "zero.jpg").symlink_to("/dev/zero")
  (tmp_path / "photos" / "folder.jpg").mkdir()
  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(tmp_path / "photos" / "s.jpg"))
    found = image_inputs.find(str(tmp_path / "photos"), flag="--images")
  assert [pathlib.Path(path).name for path in found.paths] == ["0.png", "1.png"]
  assert "no regular files or linked folders: 4, e.g." in caplog.text
  assert "linked.jpg" in caplog.text


@pytest.mark.parametrize(
  ("name", "why"), [("pipe.jpg", "a named pipe"), ("zero.jpg", "a device"), ("dead.jpg", "a link to nothing")]
)
def test_f52_what_is_named_must_be_a_regular_file(tmp_path, name, why):
  os.mkfifo(tmp_path / "pipe.jpg")
  (tmp_path / "zero.jpg").symlink_to("/dev/zero")
  (tmp_path / "dead.jpg").symlink_to("nowhere")
  with pytest.raises(FileNotFoundError, match=rf"{name}: this is no regular file \({why}\)"):
    image_inputs.find(str(tmp_path / name), flag="--images", on_broken="skip")
  (tmp_path / "list.txt").write_text(name)
  with pytest.raises(FileNotFoundError, match=rf"list\.txt:1: there is no file '{name}' in .*{why}\)"):
    image_inputs.find(str(tmp_path / "list.txt"), flag="--images")


def test_f61_the_home_folder_before_an_image_or_a_list(made, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  shutil.copytree(made[0] / "class_000", tmp_path / "photos")
  (tmp_path / "list.txt").write_text("photos/0.png\n")
  for given, wanted in (("~/photos/0.png", 1), ("~/photos", 2), ("~/list.txt", 1)):
    found = image_inputs.find(given, flag="--images")
    assert len(found) == wanted
    assert all(decoding.as_picture(found[i].image).size == (24, 30) for i in range(wanted))


def test_f61_a_name_that_only_looks_like_a_home_folder(made, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  shutil.copy(made[0] / "class_000" / "0.png", "~lock.png")
  assert decoding.as_picture(image_inputs.find("~lock.png", flag="--images")[0].image).size == (24, 30)
  with pytest.raises(FileNotFoundError, match=r"--images=~nobody here/x\.png: there is no such file"):
    image_inputs.find("~nobody here/x.png", flag="--images")


@pytest.mark.parametrize(
  "name", ["a\u2028b.png", "a\x0cb.png", "a\x85b.png", "a\rb.png", " a.png", "a.png ", "\u00a0a.png", "a\x1b[31m.png"]
)
def test_f64_names_in_a_list_are_taken_as_they_stand(made, tmp_path, name):
  shutil.copy(made[0] / "class_000" / "0.png", tmp_path / name)
  (tmp_path / "list.txt").write_bytes(f"\ufeff{name}\r\n\n".encode())
  (tmp_path / "list.csv").write_bytes(f'\ufeffpath\n"{name}"\n'.encode())
  for kind in ("txt", "csv"):
    found = image_inputs.find(str(tmp_path / f"list.{kind}"), flag="--images")
    assert found.paths == [name]
    assert decoding.as_picture(found[0].image).size == (24, 30)


def test_f64_the_file_that_exists_wins_over_its_name_without_blanks(tmp_path):
  for name in (" a.png", "a.png", "b.png"):
    (tmp_path / name).write_bytes(b"")
  (tmp_path / "list.txt").write_text(" a.png\na.png\n\tb.png \n")
  assert image_inputs.find(str(tmp_path / "list.txt"), flag="--images").paths == [" a.png", "a.png", "b.png"]


def test_f64_names_are_real_in_the_index_and_escaped_in_what_is_printed(made, tmp_path):
  name = "a\n\x1b[31m.png"
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / name).write_bytes(b"x")
  shutil.copy(made[0] / "class_000" / "0.png", tmp_path / "photos" / f"good {name}")
  found = _of_images(network.load(made[1], on_broken="skip"), str(tmp_path / "photos"))
  index.write(tmp_path / "v.npz", found)
  read = index.read(tmp_path / "v.npz")
  assert read.ids.tolist() == [str(tmp_path / "photos" / f"good {name}")]
  assert read.broken_ids.tolist() == [str(tmp_path / "photos" / name)]
  assert r"photos/a\n\x1b[31m.png." in embed.summary(found, tmp_path / "v.npz")


@pytest.mark.parametrize("other", ["./a.png", "sub/../a.png", "linked/a.png", "{}/a.png", ".//a.png"])
@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_f65_one_image_by_two_spellings(tmp_path, kind, other):
  (tmp_path / "sub").mkdir()
  (tmp_path / "linked").symlink_to(tmp_path)
  (tmp_path / "a.png").write_bytes(b"")
  other = other.format(tmp_path)
  head = ["path"] if kind == "csv" else []
  (tmp_path / f"list.{kind}").write_text("\n".join([*head, "a.png", other]))
  line = len(head) + 2
  message = rf"{kind}:{line}: '{re.escape(other)}' is listed twice, first in line {line - 1}, as 'a\.png' too"
  with pytest.raises(ValueError, match=message):
    image_inputs.find(str(tmp_path / f"list.{kind}"), flag="--images")


def test_f65_a_link_is_another_image(tmp_path):
  (tmp_path / "a.png").write_bytes(b"")
  (tmp_path / "b.png").symlink_to("a.png")
  (tmp_path / "list.txt").write_text("a.png\nb.png")
  assert len(image_inputs.find(str(tmp_path / "list.txt"), flag="--images")) == 2


def test_f43_labels_of_a_list_of_images(tmp_path, caplog):
  labels = ["cat", " cat", "caf\u00e9", "cafe\u0301\u00a0", " "]
  for i in range(len(labels)):
    (tmp_path / f"{i}.png").write_bytes(b"")
  (tmp_path / "list.csv").write_text("path, label\n" + "\n".join(f"{i}.png,{one}" for i, one in enumerate(labels)))
  found = image_inputs.find(str(tmp_path / "list.csv"), flag="--images")
  assert [found[i].class_name for i in range(len(found))] == ["cat", "cat", "caf\u00e9", "caf\u00e9", ""]
  assert "4 names of classes are the same" in caplog.text


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
  assert "make it again with soprc embed" in str(error.value)


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


def test_f61_f64_programs_take_the_home_folder_and_print_names_on_one_line(made, tmp_path):
  env = runs.environment(HOME=str(tmp_path))
  (tmp_path / "photos").mkdir()
  for i, name in enumerate(("a\n\x1b[31mb.png", "c\u2028d.png")):
    shutil.copy(made[0] / "class_000" / f"{i}.png", tmp_path / "photos" / name)
  (tmp_path / "photos" / "bad\n.png").symlink_to("nowhere")
  (tmp_path / "photos" / "\x1b.txt").write_text("")
  shared = [f"--workdir={made[1]}", "--on_broken=skip"]
  done = runs.call("experiments.embed", *shared, "--images=~/photos", "--output=~/v.npz", env=env)
  assert done.returncode == 0, done.stderr
  assert "\x1b" not in done.stdout + done.stderr
  assert r"photos/bad\n.png" in done.stdout
  assert r"photos/\x1b.txt" in done.stderr
  flags = ["--index=~/v.npz", "--query=~/photos/[ac]*.png", "--contact_sheet=~/s.png", "--top=2"]
  done = runs.call("experiments.search", *shared, *flags, env=env)
  assert done.returncode == 0, done.stderr
  shown = [f"{tmp_path}/photos/{name}" for name in (r"a\n\x1b[31mb.png", r"c\u2028d.png")]
  lines = done.stdout.split("\n")
  assert [lines[0], lines[5]] == [f"{name}:" for name in shown]
  assert [lines[2].split()[1], lines[7].split()[1]] == shown  # each is the nearest of itself
  assert (tmp_path / "s.png").is_file()


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
