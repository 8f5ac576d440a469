"""Tests how images become embeddings."""

import json
import pathlib
import shutil

import networks
import numpy as np
from PIL import Image
import pytest
import runs

from soprc_jax.data import decoding
from soprc_jax.serving import embed, image_inputs, index, network
from soprc_jax.training import evaluation


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(made):
  return network.load(made[1])


@pytest.fixture(scope="module")
def of_test(loaded):
  return embed.of_split(loaded, "test")


def _of_images(loaded, path):
  return embed.of_images(
    loaded, image_inputs.find(path, flag="--images", on_broken=loaded.config.data.on_broken)
  )


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
  assert len(np.unique(of_test.embeddings, axis=0)) == len(
    want.labels
  )  # otherwise the tests below could not fail


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
  lines = {
    "csv": ["path,label", f"{paths[0]},ä", f"{paths[1]},"],
    "csv_path": ["path", *paths],
    "txt": ["", *paths],
  }[kind]
  place = tmp_path / f"list.{kind[:3]}"
  place.write_text("\n".join(lines) + "\n")
  found = _of_images(loaded, str(place))
  assert found.ids.tolist() == paths
  assert found.class_names.tolist() == (["ä", ""] if kind == "csv" else ["", ""])
  assert found.has_classes == (kind == "csv")
  np.testing.assert_allclose(found.embeddings, of_test.embeddings[:2], atol=1e-6)


def test_broken_images(made, tmp_path):
  (tmp_path / "broken.png").write_bytes(b"x")
  shutil.copytree(made[0] / "class_000", tmp_path / "good")
  with pytest.raises(decoding.BrokenImageError, match=r"broken\.png: this is not a readable image"):
    _of_images(network.load(made[1]), str(tmp_path))
  skipping = network.load(made[1], on_broken="skip")
  found = _of_images(skipping, str(tmp_path))
  assert found.broken_ids.tolist() == [str(tmp_path / "broken.png")]
  assert found.positions.tolist() == [1, 2]
  assert [pathlib.Path(one).name for one in found.ids] == ["0.png", "1.png"]
  assert "skipped: 1, e.g." in embed.summary(found, tmp_path / "x.npz")
  with pytest.raises(ValueError, match="none of the 1 images can be decoded"):
    _of_images(skipping, str(tmp_path / "broken.png"))


def _links(folder, made):
  """Writes a folder of two good images and two broken links."""
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
  assert "skipped: 2, e.g." in embed.summary(found, tmp_path / "x.npz")


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
  with pytest.raises(ValueError, match=rf"{gone.name} is not a readable file"):
    embed.of_split(network.load(made[1], networks.config(tmp_path / "data")), "all")


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
  assert [lines[2].split()[1], lines[7].split()[1]] == shown  # each is its own nearest
  assert (tmp_path / "s.png").is_file()


def test_embed_search_and_export_from_the_command_line(made, tmp_path):
  root, run = made
  vectors, sheet = tmp_path / "v.npz", tmp_path / "s.png"
  done = runs.call(
    "experiments.embed", f"--workdir={run}", f"--images={root}", f"--output={vectors}"
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("Embedded 40 images as vectors of width 8 with step 3 of")
  told = done.stdout.splitlines()[-1].split()
  assert told[:2] == ["soprc", "search"]
  query = root / "class_007" / "1.png"
  command = [word.replace("PHOTO.jpg", str(query)) for word in told[2:]]
  command += [
    f"--query={root / 'class_003'}",
    "--format=json",
    f"--contact_sheet={sheet}",
    "--top=3",
  ]
  done = runs.call("experiments.search", *command)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)["queries"]
  paths = [str(query), *(str(root / "class_003" / f"{i}.png") for i in range(2))]
  assert [one["query"] for one in found] == paths
  assert [one["neighbours"][0]["id"] for one in found] == paths  # each is in the gallery
  with Image.open(sheet) as picture:
    assert picture.width > 4 * 144
  done = runs.call(
    "experiments.export",
    f"--workdir={run}",
    "--format=safetensors",
    f"--output={tmp_path / 'n.safetensors'}",
  )
  assert done.returncode == 1
  assert done.stderr.startswith(
    "Error: this model is not a ResNet of torchvision (model.name is resnet8"
  )
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ["s.png", "v.npz"]
