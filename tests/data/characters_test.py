"""Tests the data set of rendered characters, on small fonts made here."""

import logging

import numpy as np
import pytest
import small_fonts

from soprc_jax.data import characters, datasets, fonts, rendered
from soprc_jax.training import config as config_lib

FIRST = 0x4E00
SIZE = characters.Size(
  train_classes=30,
  train_images=140,
  test_classes=20,
  test_images=90,
  min_images=2,
  max_images=12,
  side=24,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Returns a folder of eight fonts with 60 characters."""
  path = tmp_path_factory.mktemp("fonts")
  for number in range(8):
    seeds = {FIRST + n: 1000 * number + n for n in range(60)}
    if number == 0:
      seeds[FIRST + 1] = seeds[FIRST]  # one glyph for two characters
      seeds[FIRST + 2] = None
    small_fonts.write(path / f"face{number}.ttf", seeds)
  return path


@pytest.fixture(scope="module", autouse=True)
def few_codes():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(characters, "_LEAST_CODES", 10)
    yield


@pytest.fixture(scope="module")
def images(folder):
  return characters.render(fonts.files(folder), SIZE)


class TestRender:
  def test_numbers_are_those_asked_for(self, images):
    train = np.array([name.startswith("train/") for name in images.ids])
    for split, classes, count in ((train, 30, 140), (~train, 20, 90)):
      counts = np.unique(images.labels[split], return_counts=True)[1]
      assert (len(counts), counts.sum()) == (classes, count)
      assert counts.min() >= 2
      assert counts.max() <= 12
    assert not set(images.labels[train]) & set(images.labels[~train])

  def test_images_have_the_side_and_are_not_blank(self, images):
    assert images.images.shape == (230, 24, 24)
    assert images.images.dtype == np.uint8
    assert images.images.std((1, 2)).min() > 5

  def test_ids_are_unique_and_name_character_and_face(self, images):
    assert len(set(images.ids)) == len(images)
    for name, label in zip(images.ids, images.labels):
      split, code, face = name.split("/")
      assert split in ("train", "test")
      assert code == f"U+{label:04X}"
      assert face.split("-")[1] in {f"face{number}" for number in range(8)}

  def test_a_class_uses_each_face_before_one_twice(self, images):
    for label in np.unique(images.labels):
      faces = [name.split("-")[1] for name, own in zip(images.ids, images.labels) if own == label]
      assert len(set(faces[:6])) == min(len(faces), 6)

  def test_ambiguous_and_blank_glyphs_are_not_used(self, images):
    bad = {f"U+{FIRST + n:04X}" for n in range(3)}
    assert not [name for name in images.ids if name.split("/")[1] in bad and "face0" in name]

  def test_images_of_a_class_differ(self, images):
    assert len({image.tobytes() for image in images.images}) == len(images)

  def test_the_same_fonts_in_other_folders_give_the_same_digest(self, folder, tmp_path, images):
    for number, path in enumerate(sorted(folder.iterdir())):
      (tmp_path / str(9 - number)).mkdir()
      (tmp_path / str(9 - number) / path.name).write_bytes(path.read_bytes())
    again = characters.render(fonts.files(tmp_path), SIZE)
    assert again.digest() == images.digest()
    assert again.ids == images.ids

  def test_another_side_has_the_same_characters_and_faces(self, folder, images):
    larger = characters.render(fonts.files(folder), SIZE._replace(side=32))
    assert larger.ids == images.ids
    assert larger.images.shape[1:] == (32, 32)

  def test_pretraining_classes_are_in_no_split(self, folder, images):
    found = characters.render(
      fonts.files(folder), SIZE._replace(pretrain_classes=8, pretrain_images=30)
    )
    parts: dict[str, list[str]] = {"train": [], "test": [], "pretrain": []}
    for name in found.ids:
      parts[name.split("/")[0]].append(name)
    assert parts["train"] + parts["test"] == list(images.ids)  # also the same typefaces
    classes = {split: {name.split("/")[1] for name in ids} for split, ids in parts.items()}
    assert (len(parts["pretrain"]), len(classes["pretrain"])) == (30, 8)
    assert not classes["pretrain"] & (classes["train"] | classes["test"])

  def test_too_few_characters_name_the_remedy(self, folder):
    size = SIZE._replace(train_classes=50, train_images=200)
    with pytest.raises(ValueError, match=r"needs 70 .* have 60. Install or unpack") as error:
      characters.render(fonts.files(folder), size, where=folder)
    assert str(folder) in str(error.value)

  def test_a_corrupt_font_is_named(self, folder, tmp_path, caplog):
    (tmp_path / "bad.ttf").write_bytes(b"no font")
    with caplog.at_level(logging.WARNING):
      found = characters.render([*fonts.files(folder), tmp_path / "bad.ttf"], SIZE)
    assert str(tmp_path / "bad.ttf") in caplog.text
    assert len(found) == 230


class TestClassSizes:
  @pytest.mark.parametrize(
    ("classes", "count", "low", "high"),
    [
      (11_318, 59_551, 2, 12),
      (11_316, 60_502, 2, 12),
      (5690, 325_846, 10, 250),
      (2452, 136_093, 10, 250),
      (3, 6, 2, 12),
      (3, 36, 2, 12),
      (5, 20, 4, 4),
      (1, 7, 2, 12),
    ],
  )
  def test_they_sum_and_stay_in_range(self, classes, count, low, high):
    sizes = characters.class_sizes(classes, count, low=low, high=high)
    assert (len(sizes), sizes.sum()) == (classes, count)
    assert sizes.min() >= low
    assert sizes.max() <= high
    assert (np.diff(sizes) <= 0).all()

  def test_the_correction_keeps_the_order(self):
    sizes = characters.class_sizes(49, 1239, low=4, high=31)
    assert sizes.sum() == 1239
    assert (np.diff(sizes) <= 0).all()

  def test_the_shipped_sizes_use_the_whole_range(self):
    sizes = characters.class_sizes(11_318, 59_551, low=2, high=12)
    assert (sizes.min(), sizes.max()) == (2, 12)


class TestLoad:
  def _config(self, folder, **changes):
    config = config_lib.default_config()
    config.data.update({"source": "characters", "root": str(folder)})
    config.data.characters.update(SIZE._asdict() | changes)
    return config

  def test_splits(self, folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = self._config(folder)
    with caplog.at_level(logging.INFO):
      splits = datasets.make_splits(config.data)
    assert {name: len(split) for name, split in splits.items()}.keys() == {"train", "val", "test"}
    assert len(splits["train"]) + len(splits["val"]) == 140
    assert len(splits["test"]) == 90
    example = splits["test"][0]
    assert example.image.shape == (24, 24, 3)
    assert example.class_name == f"U+{example.label:04X}"
    assert "train 30 classes, 140 images" in caplog.text
    assert "digest" in caplog.text

  def test_pretraining_classes_replace_the_training_classes(
    self, folder, tmp_path, monkeypatch, caplog
  ):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = self._config(folder, pretrain_classes=10, pretrain_images=40)
    config.data.val_share = 0.3
    with caplog.at_level(logging.INFO):
      splits = datasets.make_splits(config.data)
    assert len(splits["train"]) + len(splits["val"]) == 40
    assert len(splits["test"]) == 90
    assert "pretrain 10 classes, 40 images" in caplog.text

  def test_the_digest_of_all_pixels_is_not_computed_for_each_image(
    self, folder, tmp_path, monkeypatch
  ):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, plain = [], rendered.Rendered.digest

    def counted(images):
      calls.append(1)
      return plain(images)

    characters.load(str(folder), SIZE)
    monkeypatch.setattr(rendered.Rendered, "digest", counted)
    characters.load(str(folder), SIZE)
    assert len(calls) == 2  # one to check the cache, one for the ids

  def test_the_second_load_reads_the_cache(self, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = characters.load(str(folder), SIZE)
    monkeypatch.setattr(characters, "render", lambda *args, **kwargs: pytest.fail("rendered"))
    again = characters.load(str(folder), SIZE)
    assert (first["train"][0].image == again["train"][0].image).all()

  def test_other_fonts_or_sizes_are_not_taken_from_the_cache(self, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tmp_path / "fonts"
    other.mkdir()
    for path in list(folder.iterdir())[:7]:
      (other / path.name).write_bytes(path.read_bytes())
    characters.load(str(folder), SIZE)
    characters.load(str(folder), SIZE._replace(side=16))
    characters.load(str(other), SIZE)
    assert len(list((tmp_path / "cache" / "soprc_jax").iterdir())) == 3

  def test_other_pixels_have_other_ids(self, folder, tmp_path, monkeypatch):
    # So a run is not resumed or evaluated on fonts that have changed.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = characters.load(str(folder), SIZE)["test"].ids
    other = tmp_path / "fonts"
    other.mkdir()
    for path in folder.iterdir():
      (other / path.name).write_bytes(path.read_bytes())
    assert characters.load(str(other), SIZE)["test"].ids == before
    small_fonts.write(other / "face3.ttf", {FIRST + n: 9000 + n for n in range(60)})
    after = characters.load(str(other), SIZE)["test"].ids
    assert not set(after) & set(before)

  def test_a_missing_folder_is_named(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*folder of fonts"):
      characters.load(str(tmp_path / "nowhere"), SIZE)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"min_images": 13}, "min_images=13 must be at least 2 and at most .*max_images=12"),
      ({"train_images": 59}, "train_images=59 must lie between 60 and 360, for 30 classes"),
      ({"test_images": 241}, "test_images=241 must lie between 40 and 240"),
      ({"pretrain_classes": 5}, "pretrain_images=0 must lie between 10 and 60, for 5 classes"),
      ({"pretrain_images": 9}, "pretrain_images=9 needs data.characters.pretrain_classes > 0"),
    ],
  )
  def test_sizes_that_contradict_each_other(self, folder, changes, message):
    with pytest.raises(ValueError, match=message):
      characters.load(str(folder), SIZE._replace(**changes))
