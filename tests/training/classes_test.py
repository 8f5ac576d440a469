"""Tests the class and image metadata of checkpoints (F40, F44). They are compared with the data."""

import gzip
import json
import logging
import runpy
import shutil

import numpy as np
import pytest
import runs
import trees

from soprc_jax.data import datasets, sources
from soprc_jax.training import build, checkpoints, classes, step, workdir
from soprc_jax.training import config as config_lib


def _config(root, source="folder", **values):
  config = runpy.run_path(str(runs.ROOT / "configs" / "folder.py"))["get_config"]("")
  config.update_from_flattened_dict(
    {"data.source": source, "data.root": str(root), "data.val_share": 0.25} | values
  )
  return config_lib.resolve(config)


def _save(folder, meta, config=None):
  """Writes the folder of a run whose checkpoint has these metadata and a model of one number."""
  arrays = {"w": np.zeros(1, np.float32)}
  found = step.TrainState(step=np.int32(1), params=arrays, batch_stats={}, opt_state=arrays)
  folder.mkdir(parents=True)
  store = checkpoints.Store(folder / checkpoints.BEST)
  store.save(found, meta)
  store.close()
  if config is not None:
    workdir.write_atomically(folder / workdir.CONFIG, config_lib.to_json(config))
  return str(folder)


def _run(folder, config):
  """Writes the folder of a run on the data of a config. It starts from the model in its
  ``model.init_from``.
  """
  splits = datasets.make_splits(config.data)
  trained = build.check_unseen(config, splits, allow_seen_classes=True)
  meta = classes.describe(splits, data_source=config.data.source, started_from=trained)
  return _save(folder, meta, config)


def _names(config, *splits):
  found = datasets.make_splits(config.data)
  return {name for split in splits for name in sources.shown_classes(found[split])}


class TestSeen:
  def test_a_name_is_one_class_but_for_ids_of_two_official_data_sets(self):
    trained = {"sop": ["7", "8"], "": ["cat"]}
    for source, names, count in (
      ("tfds_sop", ["8", "9"], 1),
      ("vehicle_id", ["7", "8"], 0),
      ("vehicle_id", ["cat"], 1),
      ("folder", ["7", "cat", "dog"], 2),
      ("csv", ["8"], 1),
    ):
      found = classes.seen(trained, names, data_source=source)
      assert (found or {"count": 0})["count"] == count, (source, names)

  def test_f40_spellings_of_unicode_are_one_name(self):
    splits = {"train": _Named(["caf\u00e9", "x"])}
    trained = classes.trained_on(classes.describe(splits, data_source="folder"), where="")
    assert classes.seen(trained, ["cafe\u0301"], data_source="csv") == {
      "count": 1,
      "examples": ["caf\u00e9"],
    }


class _Named:
  """Provides one image per class."""

  def __init__(self, names):
    self.labels = np.arange(len(names))
    self.class_names = dict(enumerate(names))
    self.ids = [f"{name}/0.png" for name in names]

  def __len__(self):
    return len(self.labels)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  """Returns 24 classes as a folder, a CSV of them, a copy elsewhere, and a run on the folder."""
  place = tmp_path_factory.mktemp("images")
  folder = trees.folder(place / "IMGS", 24)
  rows = [
    f"{path.parent.name}/{path.name},{path.parent.name}" for path in sorted(folder.glob("*/*.png"))
  ]
  (folder / "list.csv").write_text("\n".join(["path,label", *rows]) + "\n")
  shutil.copytree(folder, place / "other disk" / "copy")
  (place / "link").symlink_to(folder)
  _run(place / "run", _config(folder))
  return place


class TestStarts:
  @pytest.mark.parametrize(
    ("source", "root"),
    [
      ("folder", "{}/IMGS"),
      ("folder", "{}/IMGS/"),
      ("folder", "IMGS"),
      ("folder", "./IMGS/../IMGS"),
      ("folder", "~/IMGS"),
      ("folder", "link"),
      ("folder", "other disk/copy"),
      ("csv", "IMGS/list.csv"),
      ("csv", "other disk/copy/list.csv"),
    ],
  )
  def test_f40_test_classes_that_were_trained_on_are_found(self, images, monkeypatch, source, root):
    monkeypatch.chdir(images)
    monkeypatch.setenv("HOME", str(images))
    trained = _names(_config(images / "IMGS"), "train")
    config = _config(
      root.format(images), source, **{"model.init_from": str(images / "run"), "data.split_seed": 3}
    )
    both = sorted(trained & _names(config, "val", "test"))
    assert len(both) > 3
    shown = ", ".join(map(repr, both[:3]))
    with pytest.raises(
      ValueError,
      match=f"^{len(both)} of the classes that are tested on were trained on: {shown} and "
      f"{len(both) - 3} more ",
    ):
      build.check_unseen(config)
    assert build.check_unseen(config, allow_seen_classes=True) == {"": sorted(trained)}
    # The same split has no overlap, for any spelling of the path.
    config = _config(root.format(images), source, **{"model.init_from": str(images / "run")})
    assert build.check_unseen(config) == {"": sorted(trained)}

  def test_f40_a_class_more_moves_the_split(self, images, tmp_path):
    shutil.copytree(images / "IMGS", tmp_path / "IMGS")
    shutil.copytree(images / "IMGS" / "class_000", tmp_path / "IMGS" / "a new class")
    with pytest.raises(ValueError, match="were trained on"):
      build.check_unseen(_config(tmp_path / "IMGS", **{"model.init_from": str(images / "run")}))

  def test_f40_all_networks_before_count(self, images, tmp_path):
    """Checks a chain of three models. The last one was trained on none of its test classes, but the
    first was.
    """
    seeds, start, trained = (0, 1, 2), "", set()
    for seed in seeds:
      config = _config(images / "IMGS", **{"model.init_from": start, "data.split_seed": seed})
      trained |= _names(config, "train")
      start = _run(tmp_path / str(seed), config)
    assert classes.trained_on(checkpoints.find_meta(start), where="") == {"": sorted(trained)}
    first, last = (
      _names(_config(images / "IMGS", **{"data.split_seed": seed}), "train") for seed in (0, 2)
    )
    assert first - last
    with pytest.raises(ValueError, match="were trained on"):
      build.check_unseen(
        _config(images / "IMGS", **{"model.init_from": start, "data.split_seed": 2})
      )

  def test_f40_with_trainval_the_classes_of_val_were_trained_on(self, images, tmp_path):
    start = _run(tmp_path / "run", _config(images / "IMGS", **{"data.trainval": True}))
    config = _config(images / "IMGS", **{"model.init_from": start})
    count = len(_names(config, "val"))
    with pytest.raises(
      ValueError, match=f"^{count} of the classes that are tested on were trained on"
    ):
      build.check_unseen(config)
    config = _config(images / "IMGS", **{"model.init_from": start, "data.trainval": True})
    assert len(build.check_unseen(config)[""]) == count + len(
      _names(_config(images / "IMGS"), "train")
    )

  def test_f40_a_smaller_test_list_counts(self, tmp_path):
    """Checks a class that is only in test_small. A check of test alone would miss it."""
    splits = {name: _Named([name]) for name in ("train", "test", "test_small")}
    start = _save(
      tmp_path / "run",
      classes.describe({"train": _Named(["test_small"])}, data_source="vehicle_id"),
    )
    config = _config(tmp_path, "vehicle_id", **{"model.init_from": start})
    with pytest.raises(
      ValueError, match=r"^1 of the classes that are tested on were trained on: 'test_small' "
    ):
      build.check_unseen(config, splits)

  def test_f40_the_classes_of_a_weights_file_are_not_known(self, images, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
    assert build.check_unseen(_config(images / "IMGS", **{"model.init_from": "resnet18.pth"})) == {}
    assert caplog.text == ""

  @pytest.mark.parametrize(
    ("key", "value", "problem"),
    [("started_from", ["a"], "started_from must be an object"), ("splits", None, "splits must be")],
  )
  def test_f40_corrupt_metadata_are_an_error(self, images, tmp_path, key, value, problem):
    meta = classes.describe({"train": _Named(["a"])}, data_source="folder")
    start = _save(tmp_path / "run", meta | {key: value})
    with pytest.raises(ValueError, match=rf"corrupt \({problem}"):
      build.check_unseen(_config(images / "IMGS", **{"model.init_from": start}))


class TestChanges:
  @pytest.fixture
  def folder(self, tmp_path):
    return trees.folder(tmp_path / "data", 12)

  @pytest.fixture
  def meta(self, folder, tmp_path):
    """Returns the metadata of a run on the folder, whose list of images is in ``run``."""
    splits = datasets.make_splits(_config(folder).data)
    (tmp_path / "run").mkdir()
    classes.write_images(tmp_path / "run", splits)
    return json.loads(json.dumps(classes.describe(splits, data_source="folder")))

  def _changes(self, meta, config, tmp_path):
    splits = datasets.make_splits(config.data)
    now = classes.describe(splits, data_source=config.data.source)
    return classes.changes(meta, now, splits, tmp_path / "run")

  def test_f44_the_same_images_elsewhere_are_no_change(self, folder, meta, tmp_path):
    assert self._changes(meta, _config(folder), tmp_path) == []
    # Copied in another order, next to files that are not images.
    for path in sorted(folder.rglob("*.png"), reverse=True):
      copy = tmp_path / "copy" / path.relative_to(folder)
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_bytes(path.read_bytes())
    (tmp_path / "copy" / ".hidden").write_text("")
    assert self._changes(meta, _config(tmp_path / "copy"), tmp_path) == []

  def test_f44_what_changed_is_named(self, folder, meta, tmp_path):
    image = sorted(datasets.make_splits(_config(folder).data)["val"].ids)[0]
    before = self._count(meta, "val")
    content = (folder / image).read_bytes()
    (folder / image).with_name("new.png").write_bytes(content)
    name = image.replace(image.split("/")[1], "new.png")
    (line,) = self._changes(meta, _config(folder), tmp_path)
    assert line == f"val: {before} images in the checkpoint, {before + 1} now; 1 added ('{name}')"
    (folder / image).unlink()
    (line,) = self._changes(meta, _config(folder), tmp_path)
    assert (
      line
      == f"val: {before} images in the checkpoint, {before} now; 1 added ('{name}'), 1 removed "
      f"('{image}')"
    )

  def test_f44_a_class_more_moves_images_between_splits(self, folder, meta, tmp_path):
    shutil.copytree(folder / "class_000", folder / "zebra")
    lines = self._changes(meta, _config(folder), tmp_path)
    assert any(
      "4 added ('zebra/0.png', 'zebra/1.png', 'zebra/2.png', ...)" in line for line in lines
    )
    assert any("moved to other splits ('class_0" in line for line in lines)
    assert any("moved here from other splits ('class_0" in line for line in lines)

  @staticmethod
  def _count(meta, split):
    return meta["splits"][split]["images"]

  @pytest.mark.parametrize("damage", ["missing", "cut", "of other images", "no list", "no gzip"])
  def test_f44_without_the_list_of_images_the_numbers_are_told(
    self, folder, meta, tmp_path, damage
  ):
    path = tmp_path / "run" / classes.IMAGES
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
      path.write_bytes(content[:40])
    elif damage == "of other images":
      classes.write_images(tmp_path / "run", {"train": _Named(["a"])})
    elif damage == "no list":
      path.write_bytes(gzip.compress(b'{"train": 3, "val": [[1]], "test": null}'))
    elif damage == "no gzip":
      path.write_bytes(b"{}")
    (folder / datasets.make_splits(_config(folder).data)["test"].ids[0]).unlink()
    count = self._count(meta, "test")
    lines = self._changes(meta, _config(folder), tmp_path)
    assert lines == [f"test: {count} images in the checkpoint, {count - 1} now"]

  def _csv(self, folder, rows):
    (folder / "list.csv").write_text("path,label,split\n" + "".join(f"{row}\n" for row in rows))
    return _config(folder / "list.csv", "csv")

  def test_f44_labels_and_order_of_a_csv(self, folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("soprc_jax"), "propagate", True)
    rows = [
      f"class_{label:03d}/{index}.png,thing "
      f"{label},{'train' if label < 6 else 'val' if label < 9 else 'test'}"
      for label in range(12)
      for index in range(trees.PER_CLASS)
    ]
    config = self._csv(folder, rows)
    splits = datasets.make_splits(config.data)
    meta = classes.describe(splits, data_source="csv")
    (tmp_path / "run").mkdir()
    classes.write_images(tmp_path / "run", splits)
    # Two images of one split are swapped: each class has as many as before.
    other = [
      row.replace("thing 0", "thing 9") if row.startswith("class_000/0") else row for row in rows
    ]
    other = [
      row.replace("thing 1", "thing 0") if row.startswith("class_001/0") else row for row in other
    ]
    other = [row.replace("thing 9,train", "thing 1,train") for row in other]
    assert self._changes(meta, self._csv(folder, other), tmp_path) == [
      "train: 24 images in the checkpoint, 24 now; 2 of another class ('class_000/0.png': 'thing "
      "0' is now 'thing 1', 'class_001/0.png': 'thing 1' is now 'thing 0')"
    ]
    # Rows in another order are the same images, but a seed draws other batches.
    config = self._csv(folder, rows[::-1])
    splits = datasets.make_splits(config.data)
    classes.check_unchanged(
      meta, classes.describe(splits, data_source="csv"), splits, tmp_path / "run"
    )
    assert "The images of train, val, test are the same, but listed in another order" in caplog.text

  def test_f44_the_metadata_stay_small(self, meta):
    text = json.dumps(meta["splits"])
    assert "class_" not in text
    assert len(text) < 1000


@pytest.mark.parametrize("name", ["sop", "inaturalist"])
def test_f40_list_files_and_tfds_name_the_same_classes(tmp_path, name):
  roots = {
    source: getattr(trees, source)(tmp_path / source, 12, 3) for source in (name, f"tfds_{name}")
  }
  found = {
    source: datasets.make_splits(_config(root, source).data) for source, root in roots.items()
  }
  names = {
    source: {split: sources.shown_classes(splits[split]) for split in ("train", "val")}
    for source, splits in found.items()
  }
  here, there = ({name for split in splits.values() for name in split} for splits in names.values())
  assert here == there
  assert len(here) == 12
  assert all(("/" in one) == (name == "inaturalist") for one in here)
