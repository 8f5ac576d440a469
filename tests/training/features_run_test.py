"""Tests a head on stored embeddings from training to report, search and export."""

import json
import pathlib
import runpy

import jax
import numpy as np
import pytest
import runs

import soprc_jax
from soprc_jax.reports import run as report
from soprc_jax.serving import embed, export, image_inputs, index, network, search
from soprc_jax.training import config as config_lib
from soprc_jax.training import defaults, evaluation, loop, workdir

_CONFIG = str(pathlib.Path(runs.ROOT, "configs", "features.py"))
CLASSES, EACH, WIDTH = 120, 5, 16


def _vectors():
  """Returns vectors whose class is in four directions, with strong noise in the others."""
  rng = np.random.default_rng(0)
  labels = np.repeat(np.arange(CLASSES), EACH)
  signal = rng.standard_normal((CLASSES, 4))[labels] + 0.3 * rng.standard_normal((len(labels), 4))
  noise = 1.5 * rng.standard_normal((len(labels), WIDTH - 4))
  turn = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
  return np.float32(np.hstack([signal, noise]) @ turn), labels


def _config(path, arg="", **values):
  config = runpy.run_path(_CONFIG)["get_config"](arg)
  config.data.root = str(path)
  config.update_from_flattened_dict(
    {"train.steps": 120, "eval.every": 120, "checkpoint.every": 120, "model.hidden": 64} | values
  )
  return config_lib.resolve(config)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns the file of the vectors, the workdir of a run, and its results."""
  folder = tmp_path_factory.mktemp("features")
  vectors, labels = _vectors()
  names = np.array([f"class {label}" for label in labels])
  ids = np.array([f"photos/{row}.jpg" for row in range(len(labels))])
  np.savez(folder / "f.npz", embeddings=vectors, labels=names, ids=ids)
  # 120 steps are few for the default rate.
  config = _config(folder / "f.npz", **{"optim.learning_rate": 0.004})
  results = loop.train(config, folder / "run")
  return folder / "f.npz", folder / "run", results


def test_the_head_beats_the_features(made):
  _, folder, results = made
  reached = {name: values["mAUPRC"] for name, values in results["baselines"]["test"].items()}
  assert set(reached) == {"features", "initial"}
  assert results["test"]["mAUPRC"] > 1.5 * max(reached.values())
  config = json.loads((folder / workdir.CONFIG).read_text())
  assert (config["model"]["features"], config["model"]["embedding_dim"]) == (WIDTH, WIDTH)


def test_the_features_are_ranked_as_they_are(made):
  _, folder, results = made
  vectors, labels = _vectors()
  config = config_lib.from_json(json.loads((folder / workdir.CONFIG).read_text()))
  positions = evaluation.datasets.make_splits(config.data)["test"].positions
  unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  wanted = soprc_jax.metrics.retrieval_metrics(unit[positions], labels[positions], ks=(1,))
  found = results["baselines"]["test"]["features"]
  np.testing.assert_allclose(found["mAUPRC"], wanted["mAUPRC"], rtol=1e-6)


@pytest.mark.parametrize("arg", ["mlp", "residual"])
def test_other_heads_train(made, tmp_path, arg):
  results = loop.train(_config(made[0], arg), tmp_path / "run")
  reached = results["baselines"]["test"]
  assert results["test"]["mAUPRC"] > reached["features"]["mAUPRC"]
  if arg == "residual":  # it starts at the features
    np.testing.assert_allclose(
      reached["initial"]["mAUPRC"], reached["features"]["mAUPRC"], rtol=1e-3
    )


def test_changed_vectors_are_noticed(made, tmp_path):
  vectors, labels = _vectors()
  path = tmp_path / "f.npz"
  np.savez(path, embeddings=vectors, labels=labels)
  loop.train(_config(path, **{"train.steps": 2}), tmp_path / "run")
  vectors[0, 0] += 1
  np.savez(path, embeddings=vectors, labels=labels)
  with pytest.raises(ValueError, match="images in the checkpoint"):
    loop.train(_config(path, **{"train.steps": 2}), tmp_path / "run")


def test_search_and_python(made):
  file, folder, _ = made
  loaded = network.load(folder)
  gallery = embed.of_images(loaded, image_inputs.find(str(file), flag="--images"))
  assert gallery.ids[3] == "photos/3.jpg"
  assert gallery.class_names[3] == "class 0"
  assert (gallery.image_size, gallery.resize) == (0, 0)
  vectors, _ = _vectors()
  model = soprc_jax.load(folder)
  np.testing.assert_allclose(model.embed(vectors), gallery.embeddings, atol=1e-6)
  with pytest.raises(ValueError, match=r"is one vector: give an array \[N, F\]"):
    model.embed(vectors[0])
  queries = search.find_queries([str(file)])
  found = search.nearest(gallery, search.embed_queries(loaded, queries), top=1)
  assert [row[0].id for row in found] == gallery.ids.tolist()
  of_split = embed.of_split(loaded, "test")
  wanted = dict(zip(gallery.ids.tolist(), gallery.embeddings, strict=True))
  np.testing.assert_allclose(
    of_split.embeddings, np.stack([wanted[name] for name in of_split.ids.tolist()]), atol=1e-6
  )


def test_the_index_can_be_written_and_read(made, tmp_path):
  loaded = network.load(made[1])
  gallery = embed.of_images(loaded, image_inputs.find(str(made[0]), flag="--images"))
  index.write(tmp_path / "v.npz", gallery)
  read = index.read(tmp_path / "v.npz")
  index.check_network(read, loaded, name="v.npz")
  # It is a file of stored embeddings itself, for another model.
  again = image_inputs.find(str(tmp_path / "v.npz"), flag="--images")
  np.testing.assert_array_equal(again.vectors(np.arange(3)), gallery.embeddings[:3])
  with pytest.raises(ValueError, match=r"embeddings by the model of .* already"):
    embed.of_images(loaded, again)


def test_python_searches_in_features_and_in_an_index(made, tmp_path):
  model = soprc_jax.load(made[1])
  gallery = embed.of_images(model.network, image_inputs.find(str(made[0]), flag="--images"))
  index.write(tmp_path / "v.npz", gallery)
  vectors, _ = _vectors()
  of_index, of_features = (
    model.search(vectors[:2], path, top=3) for path in (tmp_path / "v.npz", made[0])
  )
  assert [[one.place for one in row] for row in of_index] == [
    [one.place for one in row] for row in of_features
  ]


def test_an_exported_head_takes_vectors(made, tmp_path):
  loaded = network.load(made[1])
  described = export.write(tmp_path / "head.shlo", loaded, "stablehlo")
  told = json.loads(described.read_text())
  assert told["input"] == {
    "shape": ["b", WIDTH],
    "dtype": "float32",
    "values": "stored embeddings",
  }
  assert "preprocessing" not in told
  called = jax.export.deserialize(bytearray((tmp_path / "head.shlo").read_bytes())).call
  vectors, _ = _vectors()
  np.testing.assert_allclose(
    called(vectors[:7]), soprc_jax.load(made[1]).embed(vectors[:7]), atol=1e-6
  )
  with pytest.raises(ValueError, match="not a ResNet of torchvision"):
    export.write(tmp_path / "head.safetensors", loaded, "safetensors")


def test_inputs_of_another_kind_are_refused(made):
  model = soprc_jax.load(made[1])
  with pytest.raises(ValueError, match="embeddings of width 16; got stored embeddings of width 3"):
    model.embed(np.zeros((2, 3), np.float32))
  with pytest.raises(ValueError, match="embeddings of width 16; got images"):
    model.embed(np.zeros((4, 4, 3), np.uint8))


def test_the_report_names_vectors_instead_of_showing_them(made):
  page = report.make(made[1])
  assert 'class="vector"' in page
  assert "linear head on 16 features, embedding of\n16" in page
  assert "Thumbnails" not in page
  assert "batch norm" not in page.split("Baselines")[0].split("compared by their cosine")[1][:200]


def test_what_does_not_go_together_is_refused(made):
  with pytest.raises(ValueError, match=r"model\.name must be one of linear, mlp, residual"):
    _config(made[0], **{"model.name": "conv3"})
  with pytest.raises(ValueError, match=r"data\.augmentation must be none"):
    _config(made[0], **{"data.augmentation": "crop"})
  with pytest.raises(ValueError, match="embedding_dim must be that of the features"):
    _config(
      made[0],
      "residual",
      **{
        "model.features": WIDTH,
        "model.embedding_dim": 3,
        "train.per_class": 4,
        "train.batch_size": 64,
        "optim.learning_rate": 0.1,
      },
    )
  with pytest.raises(ValueError, match=r"model\.features=3, but the vectors .* have 16 entries"):
    loop.train(_config(made[0], **{"model.features": 3}), made[1].parent / "other")


def test_widths_and_batch_follow_the_vectors(made):
  config = _config(made[0])
  chosen = defaults.choose(config, evaluation.datasets.make_splits(config.data))
  assert {key: choice.value for key, choice in chosen.items()} == {
    "model.features": WIDTH,
    "model.embedding_dim": WIDTH,
    "train.per_class": 4,
    "train.batch_size": 240,
    "optim.learning_rate": pytest.approx(9.68e-4, rel=1e-2),
  }
