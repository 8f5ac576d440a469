"""Tests `soprc_jax.load`, which loads a trained model in Python."""

import pathlib
import shutil

import jax
import networks
import numpy as np
from PIL import Image
import pytest

import soprc_jax
from soprc_jax.models import RESNETS, EmbeddingNet, ResNet
from soprc_jax.serving import embed, index, network
from soprc_jax.training import checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture(scope="module")
def model(made):
  return soprc_jax.load(made[1])


@pytest.fixture(scope="module")
def paths(made):
  return sorted(pathlib.Path(made[0]).rglob("*.png"))[:5]


def _pixels(path):
  return np.asarray(Image.open(path).convert("RGB"))


def test_every_way_of_naming_images_gives_the_same(made, model, paths):
  want = model.embed(paths)
  assert want.shape == (5, model.config.model.embedding_dim)
  assert want.dtype == np.float32
  np.testing.assert_allclose(np.linalg.norm(want, axis=1), 1, rtol=1e-5)
  arrays = [_pixels(path) for path in paths]
  for images in ([str(path) for path in paths], arrays, np.stack(arrays)):
    np.testing.assert_array_equal(model.embed(images), want)
  np.testing.assert_array_equal(model.embed(arrays[0]), model.embed(paths[0]))
  np.testing.assert_allclose(model.embed(paths, batch_size=2, progress=True), want, atol=1e-6)
  everything = model.embed(made[0])
  assert len(everything) == len(list(pathlib.Path(made[0]).rglob("*.png")))


def test_it_embeds_as_the_program_does(made, model):
  found = embed.of_split(network.load(made[1]), "test")
  paths = [pathlib.Path(made[0], name) for name in found.ids]
  np.testing.assert_allclose(model.embed(paths), found.embeddings, atol=1e-6)


def test_search(made, model, paths, tmp_path):
  file = tmp_path / "index.npz"
  made_index = embed.make_index(
    model.network, embed.split_source(model.network, "all"), split="all"
  )
  index.write(file, made_index)
  for gallery in (made_index, file, str(file)):
    rows = model.search(paths, gallery, top=3)
    assert [len(row) for row in rows] == [3] * 5
    assert [pathlib.Path(row[0].id).name for row in rows] == [
      path.name for path in paths
    ]  # each finds itself
    assert rows[0][0].similarity == pytest.approx(1, abs=1e-5)
  (row,) = model.search(paths[0], paths, top=100)
  assert len(row) == 5
  assert row[0].place == 0
  assert model.search(_pixels(paths[1]), [_pixels(path) for path in paths], top=1)[0][0].id == "1"


def test_folders_of_a_run(made, model, paths):
  want = model.embed(paths)
  np.testing.assert_array_equal(soprc_jax.load(str(made[1])).embed(paths), want)
  folders = [name for name in (checkpoints.BEST, checkpoints.NEWEST) if (made[1] / name).is_dir()]
  assert folders
  for name in folders:
    found = soprc_jax.load(made[1] / name)
    assert found.network.step == network.load(made[1], newest=name == checkpoints.NEWEST).step
    assert found.embed(paths).shape == want.shape


@pytest.mark.parametrize(("outputs", "width"), [(None, 0), (1000, 0), (32, 32)])
def test_converted_weights(paths, tmp_path, outputs, width):
  """Checks the embeddings of converted weights. A backbone and an ImageNet classifier embed by
  their features. Any other head is an embedding.
  """
  stages, bottleneck = RESNETS["resnet18"]
  net = EmbeddingNet(ResNet(stages, bottleneck), embedding_dim=outputs or 0)
  shapes = jax.eval_shape(
    net.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), np.uint8)
  )
  variables = networks.drawn({"params": shapes["params"], "batch_stats": shapes["batch_stats"]})
  checkpoints.save_variables(tmp_path / "weights", variables)
  found = soprc_jax.load(tmp_path / "weights")
  assert found.config.model.name == "resnet18"
  assert found.config.model.embedding_dim == width
  if outputs == 1000:
    vectors = found.embed(paths[:2], batch_size=2)
    assert vectors.shape == (2, 512)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
  ("images", "error", "message"),
  [
    ([], ValueError, "images is empty"),
    ("nothing", FileNotFoundError, "images=nothing"),
    (["gone.png"], FileNotFoundError, "gone.png is missing"),
    (
      np.zeros((2, 8, 8, 3), np.float32),
      ValueError,
      r"images\[0\] must be a uint8 RGB array .* got float32",
    ),
    (
      np.zeros((8, 8), np.uint8),
      ValueError,
      r"images\[0\] must be a uint8 RGB array .* got uint8\[8\]",
    ),
    (
      [np.zeros((8, 8, 3), np.uint8), "a.png"],
      ValueError,
      r"images\[1\] must be .* or a path, like all others; got str",
    ),
    ([np.zeros((0, 8, 3), np.uint8)], ValueError, r"got uint8\[0, 8, 3\]"),
  ],
)
def test_wrong_images(model, images, error, message):
  with pytest.raises(error, match=message):
    model.embed(images)


def test_a_corrupt_image_is_named_and_never_dropped(made, tmp_path, paths):
  copy = tmp_path / "run"
  shutil.copytree(made[1], copy)
  text = (copy / "config.json").read_text()
  assert '"on_broken": "error"' in text
  (copy / "config.json").write_text(text.replace('"on_broken": "error"', '"on_broken": "skip"'))
  (tmp_path / "bad.png").write_bytes(b"\x89PNG")
  with pytest.raises(ValueError, match=r"bad\.png"):
    soprc_jax.load(copy).embed([paths[0], tmp_path / "bad.png"])


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_wrong_numbers(model, paths, value):
  with pytest.raises(ValueError, match=r"batch_size must be an integer, at least 1"):
    model.embed(paths, batch_size=value)
  with pytest.raises(ValueError, match=r"top must be an integer, at least 1"):
    model.search(paths, paths, top=value)


def test_wrong_folders(tmp_path):
  with pytest.raises(FileNotFoundError, match="give the workdir of a training run"):
    soprc_jax.load(tmp_path / "none")
  with pytest.raises(ValueError, match=r"config\.json"):
    soprc_jax.load(tmp_path)


def test_an_index_of_another_model_raises(made, model, paths, tmp_path):
  """As an object and as a file."""
  other = embed.make_index(model.network, embed.split_source(model.network, "all"), split="all")
  other = other._replace(digest="other")
  index.write(tmp_path / "other.npz", other)
  for gallery in (other, tmp_path / "other.npz"):
    with pytest.raises(ValueError, match=r"gallery.* was made by step"):
      model.search(paths, gallery)


def test_lists_of_any_length_share_their_functions(made, paths):
  found = soprc_jax.load(made[1])
  arrays = [_pixels(path) for path in paths]
  for count in range(1, 6):
    found.embed(arrays[:count], batch_size=64)
  assert found._embed.cache_info().currsize == 4  # of 1, 2, 4 and 8 images


def test_the_config_is_a_copy(made, model, paths):
  before = model.embed(paths)
  model.config.eval.image_size = 8
  assert model.config.eval.image_size == 16
  np.testing.assert_allclose(model.embed(paths, batch_size=3), before, atol=1e-5)


def test_an_empty_best_folder_is_no_checkpoint(made, paths, tmp_path):
  copy = tmp_path / "run"
  shutil.copytree(made[1], copy)
  (copy / checkpoints.BEST).rename(copy / checkpoints.NEWEST)
  (copy / checkpoints.BEST).mkdir()
  np.testing.assert_array_equal(
    soprc_jax.load(copy).embed(paths), soprc_jax.load(made[1]).embed(paths)
  )
  (tmp_path / "link").symlink_to(made[1] / checkpoints.BEST)
  assert soprc_jax.load(tmp_path / "link").network.step == soprc_jax.load(made[1]).network.step


def test_converted_weights_that_are_corrupt_raise(tmp_path):
  """Any file of the folder, by its digest; and without digests, by what cannot be read."""
  checkpoints.save_variables(tmp_path, {"params": {"a": np.arange(100.0)}, "batch_stats": {}})
  files = [path for path in (tmp_path / checkpoints.VARIABLES).rglob("*") if path.is_file()]
  for file in files:
    content = file.read_bytes()
    if not content:
      continue
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    with pytest.raises(checkpoints.DamagedError, match="write it again with soprc convert-weights"):
      checkpoints.load_variables(tmp_path)
    file.write_bytes(content)
  np.testing.assert_array_equal(
    checkpoints.load_variables(tmp_path)["params"]["a"], np.arange(100.0)
  )


@pytest.mark.parametrize("images", ["", [""], None, {"a.png": 1}, {"a.png"}, 3, b"a.png"])
def test_what_names_no_images(model, images):
  with pytest.raises((TypeError, ValueError), match=r"images (is empty|must be)"):
    model.embed(images)


def test_an_empty_path_is_no_model():
  with pytest.raises(ValueError, match="path is empty"):
    soprc_jax.load("")
