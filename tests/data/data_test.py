"""Data: the glyphs source and its cache, splits, P x K batches as pure functions of (seed, step), images, the pipeline."""

import collections
import errno
import io
import itertools
import logging
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
from PIL import Image
import pytest
import runs
import trees

from soprc_jax._internal import file_io
from soprc_jax.data import decoding, glyphs, image_folder, pipeline, sampler, sources, transforms

# Reference digests of the rendered pixels would change with Pillow and matplotlib; what must hold with any version is tested.


@pytest.fixture(scope="module")
def rendered():
  return glyphs.render()


@pytest.fixture(scope="module")
def small(rendered):
  """The first 40 images of the glyphs: quick to write and read."""
  return glyphs.Glyphs(rendered.images[:40], rendered.labels[:40], rendered._ids[:40])


class _Pictures:
  """A source of random pictures, all different."""

  def __init__(self, labels, size=12):
    self.labels = np.asarray(labels)
    self._images = np.random.default_rng(0).integers(0, 256, (len(labels), size, size, 3), np.uint8)

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), f"picture{index}")


class TestGlyphs:
  def test_size_is_that_of_the_design(self, rendered):
    counts = np.unique(rendered.labels, return_counts=True)[1]
    assert 2000 <= len(counts) <= 2300
    assert 28_000 <= len(rendered) <= 30_000
    assert counts.min() == 12
    assert counts.max() == 16

  def test_images_are_three_equal_channels_of_uint8(self, rendered):
    example = rendered[5]
    assert example.image.shape == (glyphs.IMAGE_SIZE, glyphs.IMAGE_SIZE, 3)
    assert example.image.dtype == np.uint8
    assert (example.image == rendered.images[5][:, :, None]).all()
    assert example.label == rendered.labels[5]
    assert isinstance(example.label, int)

  def test_no_image_is_blank(self, rendered):
    assert rendered.images.any(axis=(1, 2)).all()

  def test_glyphs_are_not_cut_to_emptiness(self, rendered):
    # White on black, in the middle: the ink's centre lies near the image's.
    ink = rendered.images.astype(np.float64)
    total = ink.sum((1, 2))
    middle = (glyphs.IMAGE_SIZE - 1) / 2
    rows = (ink.sum(2) * np.arange(glyphs.IMAGE_SIZE)).sum(1) / total
    columns = (ink.sum(1) * np.arange(glyphs.IMAGE_SIZE)).sum(1) / total
    assert np.quantile(np.abs(rows - middle), 0.95) < 5
    assert np.quantile(np.abs(columns - middle), 0.95) < 5

  def test_no_two_classes_look_the_same_in_a_face(self, rendered):
    seen = collections.defaultdict(set)
    for image, name in zip(rendered.images, rendered._ids):
      face = name.split("/")[1]
      assert image.tobytes() not in seen[face], name
      seen[face].add(image.tobytes())
    assert len(seen) == 16

  def test_ids_are_unique_and_name_the_character(self, rendered):
    ids = [rendered[i].id for i in range(len(rendered))]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith(f"U+{label:04X}/") for name, label in zip(ids, rendered.labels))
    assert "U+0062/DejaVuSans" in ids

  def test_look_alikes_keep_one_class(self, rendered):
    labels = set(rendered.labels.tolist())
    assert ord("A") in labels
    assert 0x0391 not in labels  # the Greek capital alpha is drawn as the Latin A
    assert ord(" ") not in labels

  def test_rendering_is_deterministic_across_processes(self, rendered):
    code = "from soprc_jax.data import glyphs; print(f'value of the test: \"{glyphs.render().digest()}\"')"
    done = subprocess.run(
      [sys.executable, "-c", code], cwd=runs.ROOT, env=runs.environment(), capture_output=True, text=True, check=True
    )
    assert runs.value(done.stdout) == rendered.digest()


class TestGlyphCache:
  @pytest.fixture(autouse=True)
  def render_small(self, monkeypatch, small):
    """Rendering takes seconds: here it gives 40 images, and its calls are counted."""
    self.renderings = 0

    def render():
      self.renderings += 1
      return small

    monkeypatch.setattr(glyphs, "render", render)

  def _same(self, found, small):
    np.testing.assert_array_equal(found.images, small.images)
    np.testing.assert_array_equal(found.labels, small.labels)
    assert [found[i].id for i in range(len(found))] == [small[i].id for i in range(len(small))]

  def test_second_load_reads_the_cache(self, tmp_path, small):
    self._same(glyphs.load(tmp_path / "new" / "folder"), small)
    self._same(glyphs.load(tmp_path / "new" / "folder"), small)
    assert self.renderings == 1
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".npz"]

  def test_default_folder_follows_xdg(self, tmp_path, small, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self._same(glyphs.load(), small)
    assert len(list((tmp_path / "soprc_jax").glob("glyphs-*.npz"))) == 1

  @pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped", "other_pixels", "key_missing"])
  def test_damaged_cache_is_rendered_again_with_a_warning(self, tmp_path, small, caplog, damage):
    glyphs.load(tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "empty":
      path.write_bytes(b"")
    elif damage == "text":
      path.write_text("<html>quota exceeded</html>")
    elif damage == "cut":
      path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
      content[len(content) // 3] ^= 0xFF
      path.write_bytes(content)
    else:
      with np.load(path) as archive:
        arrays = dict(archive)
      if damage == "other_pixels":
        arrays["images"] = 255 - arrays["images"]
      else:
        del arrays["ids"]
      np.savez(path, **arrays)
    with caplog.at_level(logging.WARNING):
      self._same(glyphs.load(tmp_path), small)
    assert "damaged" in caplog.text
    assert str(path) in caplog.text
    assert self.renderings == 2
    self._same(glyphs.load(tmp_path), small)
    assert self.renderings == 2  # the damaged file was replaced

  def test_root_that_cannot_be_written_still_works(self, tmp_path, small, caplog):
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
      self._same(glyphs.load(tmp_path / "file"), small)
    assert "Cannot cache" in caplog.text

  def test_a_failed_write_leaves_nothing_behind(self, tmp_path, small, monkeypatch, caplog):
    def full_disk(file, **arrays):
      file.write(b"PK half a file")
      raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    self._same(glyphs.load(tmp_path), small)
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []

  def test_f35_the_file_appears_only_when_it_is_complete(self, tmp_path, small, monkeypatch):
    seen = []
    replace = os.replace

    def spy(source, target):
      seen.append([path.name for path in tmp_path.glob("*.npz")])
      self._same(glyphs._read(pathlib.Path(source)), small)
      replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    glyphs.load(tmp_path)
    assert seen == [[]]


class TestSources:
  def test_splits_share_no_class_and_cover_all(self):
    labels = np.repeat(np.arange(100, 200), 3)[np.random.default_rng(0).permutation(300)]
    shares = {"train": 0.5, "val": 0.1, "test": 0.4}
    splits = sources.split_by_class(labels, shares, seed=3)
    assert sorted(np.concatenate(list(splits.values()))) == list(range(300))
    classes = {name: set(labels[positions]) for name, positions in splits.items()}
    assert {name: len(found) for name, found in classes.items()} == {"train": 50, "val": 10, "test": 40}
    assert not classes["train"] & classes["val"]
    assert not classes["train"] & classes["test"]
    assert not classes["val"] & classes["test"]
    assert all((np.diff(positions) > 0).all() for positions in splits.values())

  def test_split_is_a_pure_function_of_the_seed(self):
    labels, shares = np.repeat(np.arange(60), 2), {"train": 0.5, "test": 0.5}
    one, same, other = (sources.split_by_class(labels, shares, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["train"], same["train"])
    assert not np.array_equal(one["train"], other["train"])

  def test_split_of_a_class_does_not_depend_on_the_order_of_the_images(self):
    labels = np.repeat(np.arange(60), 2)
    shuffled = np.random.default_rng(0).permutation(labels)
    shares = {"train": 0.5, "test": 0.5}
    one, other = (sources.split_by_class(values, shares, seed=0) for values in (labels, shuffled))
    assert set(labels[one["train"]]) == set(shuffled[other["train"]])

  @pytest.mark.parametrize(
    ("shares", "message"),
    [
      ({"train": 0.5, "test": 0.4}, "sum to 1"),
      ({"train": 1.0, "test": 0.0}, "positive"),
      ({"train": 0.9999, "test": 0.0001}, "'test' is empty"),
    ],
  )
  def test_bad_shares_are_refused(self, shares, message):
    with pytest.raises(ValueError, match=message):
      sources.split_by_class(np.arange(10), shares, seed=0)

  def test_f10_rows_of_labels_that_are_not_contiguous(self):
    labels = np.array([2**40, -7, 11318, 2**40, -7])
    assert sources.label_rows(labels) == {-7: 0, 11318: 1, 2**40: 2}

  def test_subset_keeps_order_labels_and_ids(self):
    source = _Pictures([5, 6, 7, 8])
    subset = sources.Subset(source, [3, 1])
    assert len(subset) == 2
    assert list(subset.labels) == [8, 6]
    assert [subset[i].id for i in range(2)] == ["picture3", "picture1"]

  @pytest.mark.parametrize("positions", [[0, 4], [-1]])
  def test_positions_outside_the_source_are_refused(self, positions):
    with pytest.raises(IndexError, match="4"):
      sources.Subset(_Pictures([5, 6, 7, 8]), positions)


# Class sizes: even ones, ragged ones, one class that dominates, some smaller than K.
_LAYOUTS = {
  "even": [8] * 10,
  "ragged": [4, 5, 7, 9, 4, 6, 11, 4, 5, 13],
  "long_tailed": [100, 30, 12, 6, 5, 4, 4, 4],
  "with_small": [1, 2, 3, 8, 5, 4, 2, 9],
}
_POLICIES = sampler.SMALL_CLASS_POLICIES


def _labels(layout, seed=0):
  """Shuffled labels, far from contiguous."""
  labels = np.repeat(1000 + 17 * np.arange(len(layout)), layout)
  return np.random.default_rng(seed).permutation(labels)


def _sampler(layout, *, batch_size=16, per_class=4, seed=0, **settings):
  return sampler.ClassSampler(_labels(layout), batch_size=batch_size, per_class=per_class, seed=seed, **settings)


def _epoch(plan_of, epoch=0):
  return [plan_of(epoch * plan_of.batches_per_epoch + i) for i in range(plan_of.batches_per_epoch)]


class TestSampler:
  @pytest.mark.parametrize("policy", _POLICIES)
  @pytest.mark.parametrize("layout", _LAYOUTS)
  def test_a_batch_is_p_distinct_classes_of_k_images(self, layout, policy):
    labels, plan_of = _labels(_LAYOUTS[layout]), _sampler(_LAYOUTS[layout], small_classes=policy)
    for epoch in range(3):
      for plan in _epoch(plan_of, epoch):
        assert plan.positions.shape == plan.where.shape == (16,)
        blocks = labels[plan.positions].reshape(4, 4)
        assert (blocks == blocks[:, :1]).all()
        assert len(set(blocks[:, 0])) == 4
        # No image twice among the slots that count, unless its class is repeated by policy.
        if policy != "repeat":
          valid = plan.positions[plan.where]
          assert len(set(valid)) == len(valid)

  @pytest.mark.parametrize("policy", _POLICIES)
  @pytest.mark.parametrize("layout", _LAYOUTS)
  def test_f32_an_epoch_sees_every_image(self, layout, policy):
    sizes = np.array(_LAYOUTS[layout])
    labels, plan_of = _labels(sizes), _sampler(sizes, small_classes=policy)
    in_play = sizes >= 4 if policy == "drop" else np.ones(len(sizes), bool)
    want = np.flatnonzero(np.isin(labels, 1000 + 17 * np.flatnonzero(in_play)))
    for epoch in range(3):
      seen = np.concatenate([plan.positions[plan.where] for plan in _epoch(plan_of, epoch)])
      np.testing.assert_array_equal(np.unique(seen), want)
    assert plan_of.num_classes == in_play.sum()

  @pytest.mark.parametrize(("layout", "count"), [("even", 0), ("with_small", 4)])
  @pytest.mark.parametrize("policy", _POLICIES)
  def test_f11_number_of_small_classes(self, layout, count, policy):
    assert _sampler(_LAYOUTS[layout], small_classes=policy).num_small == count

  def test_f11_policies_on_a_class_of_two_images(self):
    labels = _labels(_LAYOUTS["with_small"])
    small = np.flatnonzero(labels == 1000 + 17 * 1)
    for policy in ("mask", "repeat"):
      for plan in _epoch(_sampler(_LAYOUTS["with_small"], small_classes=policy)):
        slots = np.isin(plan.positions, small)
        if slots.any():
          assert slots.sum() == 4
          assert collections.Counter(plan.positions[slots].tolist()) == {int(small[0]): 2, int(small[1]): 2}
          valid = plan.positions[slots & plan.where]
          assert len(valid) == (2 if policy == "mask" else 4)
          assert set(valid) == set(small)
    plans = _epoch(_sampler(_LAYOUTS["with_small"], small_classes="drop"))
    assert not np.isin(np.concatenate([plan.positions for plan in plans]), small).any()

  def test_an_epoch_is_no_longer_than_it_must_be(self):
    assert _sampler([8] * 10).batches_per_epoch == 5  # 20 groups of 4, 4 a batch
    assert _sampler(_LAYOUTS["long_tailed"]).batches_per_epoch == 25  # the largest class has 25 groups, one a batch

  @pytest.mark.parametrize("seed", [0, 1, 2**32])
  def test_a_batch_depends_on_seed_and_step_only(self, seed):
    # Asked in any order, by a sampler that has seen other steps before or by a new one.
    plan_of = _sampler(_LAYOUTS["ragged"], seed=seed)
    for step in np.random.default_rng(seed).permutation(4 * plan_of.batches_per_epoch):
      got, want = plan_of(int(step)), _sampler(_LAYOUTS["ragged"], seed=seed)(int(step))
      np.testing.assert_array_equal(got.positions, want.positions)
      np.testing.assert_array_equal(got.where, want.where)

  def test_seeds_and_epochs_differ(self):
    plan_of = _sampler(_LAYOUTS["ragged"])
    first, second = (np.stack([plan.positions for plan in _epoch(plan_of, epoch)]) for epoch in (0, 1))
    other = np.stack([plan.positions for plan in _epoch(_sampler(_LAYOUTS["ragged"], seed=1))])
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    labels = _labels(_LAYOUTS["ragged"])

    def meetings(batches):
      return [frozenset(labels[batch].tolist()) for batch in batches]

    # Not only the images: which classes meet is drawn anew as well.
    assert set(meetings(first)) != set(meetings(second))

  def test_f32_neighbours_overlap_as_random_batches_do(self):
    # 200 classes of 12 images, 20 classes a batch: two independent batches share 20 * 20 / 200 = 2 classes. A class that stands in 3 of
    # the 30 batches of an epoch stands in two given ones with probability 3 / 30 * 2 / 29, which makes 1.38.
    labels = np.repeat(np.arange(200), 12)
    plan_of = sampler.ClassSampler(labels, batch_size=80, per_class=4, seed=0)
    classes = [set(labels[plan_of(step).positions]) for step in range(3 * plan_of.batches_per_epoch)]
    overlap = [len(a & b) for a, b in itertools.pairwise(classes)]
    assert 1.1 < np.mean(overlap) < 1.7
    # At the seam of two epochs too.
    seams = [overlap[epoch * plan_of.batches_per_epoch - 1] for epoch in (1, 2)]
    assert max(seams) <= 8

  def test_all_classes_are_seen_about_equally_often(self):
    labels = np.repeat(np.arange(50), 12)
    plan_of = sampler.ClassSampler(labels, batch_size=40, per_class=4, seed=0)
    visits = collections.Counter()
    for step in range(4 * plan_of.batches_per_epoch):
      visits.update(set(labels[plan_of(step).positions].tolist()))
    assert set(visits.values()) == {12}  # 3 groups an epoch, 4 epochs

  @pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
      ([8] * 10, {"per_class": 1}, "per_class"),
      ([8] * 10, {"batch_size": 18}, "multiple of per_class"),
      ([8] * 10, {"batch_size": 4}, "at least 2 classes"),
      ([8] * 3, {}, "the training split has 3: set train.batch_size=12 or less"),
      ([3] * 9, {"small_classes": "drop"}, "the training split has 0: more classes"),
      ([8] * 10, {"small_classes": "ignore"}, "mask"),
    ],
  )
  def test_errors(self, layout, settings, message):
    with pytest.raises(ValueError, match=message):
      _sampler(layout, **settings)


def _batches(num_steps=7, shard=(0, 1), seed=0, **settings):
  source = _Pictures(_labels(_LAYOUTS["with_small"]))
  plan = _sampler(_LAYOUTS["with_small"], seed=seed)
  settings = {"augmentation": "affine", "image_size": 8} | settings
  rows = sources.label_rows(source.labels)
  return pipeline.TrainBatches(source, plan, rows=rows, seed=seed, num_steps=num_steps, shard=shard, **settings)


def _assert_same(batches, others):
  assert len(batches) == len(others)
  for one, other in zip(batches, others):
    assert one.keys() == other.keys()
    for key in one:
      assert one[key].dtype == other[key].dtype
      np.testing.assert_array_equal(one[key], other[key])


_WITH_WORKERS = """
import hashlib
import json
import multiprocessing.context
import warnings
import jax
import data_test
from soprc_jax.data import pipeline
from experiments import malloc

def digests(start, workers):
  found = []
  for batch in pipeline.iterate(data_test._one_picture(0, num_steps=7), start=start, workers=workers):
    rest = [batch[key].tobytes() for key in sorted(batch) if key != "image"]
    found.append([hashlib.sha256(part).hexdigest() for part in (b"".join(rest), *(image.tobytes() for image in batch["image"]))])
  return found

if __name__ == "__main__":
  malloc.keep_pages()  # as in training
  jax.numpy.ones(1).block_until_ready()
  methods = set()
  start = multiprocessing.context.SpawnProcess.start
  def noted(process):
    methods.add(process._start_method)
    start(process)
  multiprocessing.context.SpawnProcess.start = noted
  fork = multiprocessing.context.ForkProcess._Popen
  multiprocessing.context.ForkProcess._Popen = staticmethod(lambda process: methods.add("fork") or fork(process))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = {"alone": digests(0, 0), "by one": digests(2, 1), "by workers": digests(2, 2)}
  found["warnings"] = [str(one.message) for one in caught if "fork" in str(one.message)]
  found["start methods"] = sorted(methods)
  print("value of the test: " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def by_workers():
  """What worker processes have loaded, in a program of its own, as in training."""
  env = runs.environment() | {
    "PYTHONPATH": os.pathsep.join([str(runs.ROOT), *(str(runs.ROOT / "tests" / name) for name in ("data", "support"))])
  }
  command = [sys.executable, "-W", "error::RuntimeWarning", "-c", _WITH_WORKERS]
  done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  return runs.value(done.stdout)


def _one_picture(seed, *, num_steps=2):
  """Training batches of a source in which all pictures are the same."""
  source = _Pictures(np.repeat(np.arange(4), 4))
  source._images[:] = source._images[0]
  plan = sampler.ClassSampler(source.labels, batch_size=16, per_class=4, seed=0)
  rows = sources.label_rows(source.labels)
  return pipeline.TrainBatches(
    source, plan, rows=rows, augmentation="affine", image_size=12, seed=seed, num_steps=num_steps
  )


class TestPipeline:
  def test_batch(self):
    batch = _batches()[2]
    labels = _labels(_LAYOUTS["with_small"])
    assert {key: (value.shape, str(value.dtype)) for key, value in batch.items()} == {
      "image": ((16, 8, 8, 3), "uint8"),
      "label": ((16,), "int32"),
      "where": ((16,), "bool"),
      "position": ((16,), "int64"),
      "broken": ((16,), "bool"),
    }
    np.testing.assert_array_equal(1000 + 17 * batch["label"], labels[batch["position"]])
    assert not batch["where"].all()

  def test_f49_labels_beyond_32_bits_become_rows_before_they_reach_jax(self):
    """As arguments of a jitted function 0, 2^32 and 2^33 would be one class."""
    source = _Pictures(np.repeat([0, 2**32, 2**33], 2))
    plan = sampler.ClassSampler(source.labels, batch_size=6, per_class=2, seed=0)
    rows = sources.label_rows(source.labels)
    settings = {"augmentation": "none", "image_size": 12, "seed": 0, "num_steps": 1}
    batch = pipeline.TrainBatches(source, plan, rows=rows, **settings)[0]
    assert batch["label"].dtype == np.int32
    np.testing.assert_array_equal(2**32 * batch["label"].astype(np.int64), source.labels[batch["position"]])

  def test_images_are_those_of_the_positions(self):
    batches = _batches(augmentation="none", image_size=12)
    batch, source = batches[3], _Pictures(_labels(_LAYOUTS["with_small"]))
    for image, position in zip(batch["image"], batch["position"]):
      np.testing.assert_array_equal(image, source[position].image)

  def test_iteration_from_any_step_gives_the_batches_of_those_steps(self):
    want = [_batches()[step] for step in range(7)]
    for start in (0, 3, 6):
      _assert_same(list(pipeline.iterate(_batches(), start=start)), want[start:])

  def test_iteration_of_a_finished_run_is_empty(self):
    assert list(pipeline.iterate(_batches(), start=7)) == []

  def test_prefetch_changes_nothing(self):
    _assert_same(
      list(pipeline.iterate(_batches(), start=1, prefetch=1)), list(pipeline.iterate(_batches(), start=1, prefetch=9))
    )

  def test_f21_each_step_slot_and_seed_has_its_own_augmentation(self):
    # One picture everywhere: what differs is the augmentation.
    images = [image.tobytes() for seed in (0, 1) for step in range(2) for image in _one_picture(seed)[step]["image"]]
    assert len(set(images)) == 64

  @pytest.mark.parametrize("count", [2, 4])
  def test_f21_shards_make_up_the_whole_batch(self, count):
    parts = [_batches(shard=(index, count))[5] for index in range(count)]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    _assert_same([joined], [_batches()[5]])

  def test_f20_going_on_with_other_workers_gives_the_same_batches(self, by_workers):
    # Two steps in one process, the others by a new one with 1 worker or 2: as if it had not stopped.
    assert len(by_workers["alone"]) == 7
    assert by_workers["by workers"] == by_workers["by one"] == by_workers["alone"][2:]

  def test_f21_workers_have_no_streams_of_their_own(self, by_workers):
    # One picture everywhere: what differs is the augmentation, in each slot of each step, whichever worker made it.
    images = [image for _, *images in by_workers["by workers"] for image in images]
    assert len(set(images)) == len(images) == 5 * 16

  def test_f22_workers_are_spawned_beside_the_threads_of_jax(self, by_workers):
    # The program has used jax before, and a warning of a fork would have ended it.
    assert by_workers["warnings"] == []
    assert by_workers["start methods"] == ["spawn"]

  @pytest.mark.parametrize("count", [1, 9, 10, 11])
  def test_f31_evaluation_pads_the_last_batch_and_says_so(self, count):
    source = _Pictures(np.arange(count))
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=12))
    assert all(batch["image"].shape == (5, 12, 12, 3) for batch in batches)
    kept = np.concatenate([batch["image"][batch["where"]] for batch in batches])
    np.testing.assert_array_equal(kept, source._images)
    assert sum((~batch["where"]).sum() for batch in batches) == -count % 5

  def test_evaluation_loads_in_the_order_of_the_images_though_in_threads(self):
    """The first image takes longest; the batches come in order, and more than one thread has made them."""
    threads = set()

    class Slow(_Pictures):
      def __getitem__(self, index):
        threads.add(threading.get_ident())
        time.sleep(0.05 if index < 5 else 0.005)
        return super().__getitem__(index)

    source = Slow(np.arange(40))
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=12))
    np.testing.assert_array_equal(np.concatenate([batch["image"] for batch in batches]), source._images)
    assert threading.get_ident() not in threads
    assert len(threads) == min(max(os.cpu_count(), 1), 16)


class _Broken(_Pictures):
  """Files, of which those at ``bad`` are cut off."""

  def __init__(self, labels, bad):
    super().__init__(labels, size=24)
    self._bad = set(bad)

  def __getitem__(self, index):
    stream = io.BytesIO()
    Image.fromarray(self._images[index]).save(stream, "PNG")
    data = stream.getvalue()
    name = f"folder/{index}.png"
    return sources.Example(
      decoding.Encoded(data[: len(data) // 2 if index in self._bad else None], name), int(self.labels[index]), name
    )


class TestBrokenImages:
  # Class 5: one of four is broken; class 6: all are; the others none.
  labels, bad = np.repeat([5, 6, 7, 8], 4), (1, 4, 5, 6, 7)

  def _batch(self, **settings):
    source = _Broken(self.labels, self.bad)
    plan = sampler.ClassSampler(self.labels, batch_size=16, per_class=4, seed=0)
    rows = sources.label_rows(self.labels)
    settings = {"augmentation": "none", "image_size": 24, "num_steps": 3} | settings
    return source, pipeline.TrainBatches(source, plan, rows=rows, seed=0, **settings)

  def test_f29_error_names_the_file_and_the_way_out(self):
    with pytest.raises(decoding.BrokenImageError, match=r"folder/\d\.png: .*truncated.*data\.on_broken=skip takes another"):
      self._batch()[1][0]

  def test_f29_another_image_of_the_class_takes_its_place_and_is_counted(self):
    source, batches = self._batch(on_broken="skip")
    for step in range(3):
      batch = batches[step]
      np.testing.assert_array_equal(batch["broken"], np.isin(batch["position"], self.bad))
      np.testing.assert_array_equal(batch["where"], self.labels[batch["position"]] != 6)  # nothing left to take: masked out
      for image, position in zip(batch["image"], batch["position"]):
        label = self.labels[position]
        good = np.setdiff1d(np.flatnonzero(self.labels == label), self.bad) if position in self.bad else [position]
        assert not image.any() if label == 6 else any(np.array_equal(image, source._images[other]) for other in good)

  def test_f29_evaluation_leaves_it_out_or_names_it(self):
    source = _Broken(self.labels, self.bad)
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=24, on_broken="skip"))
    where = np.concatenate([batch["where"] for batch in batches])[:16]
    np.testing.assert_array_equal(where, ~np.isin(np.arange(16), self.bad))
    with pytest.raises(decoding.BrokenImageError, match=r"folder/1\.png: .*data\.on_broken=skip leaves it out"):
      list(pipeline.eval_batches(source, batch_size=5, image_size=24))


class TestFilesThatCannotBeRead:
  """F63: whatever happens to a file after it was listed, it is named, or skipped and counted."""

  @pytest.fixture
  def root(self, tmp_path, monkeypatch):
    """Five classes of four images; the second image of each but the last has gone in its own way."""
    trees.folder(tmp_path, 5)
    source = image_folder.load(str(tmp_path))
    bad = [tmp_path / f"class_00{label}" / "1.png" for label in range(4)]
    for path in bad[:3]:
      path.unlink()
    bad[1].symlink_to("nowhere")
    bad[2].symlink_to(bad[2])
    read = file_io.read_regular

    def read_regular(path):  # root may read what nobody else may
      if path == bad[3]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
      return read(path)

    monkeypatch.setattr(file_io, "read_regular", read_regular)
    return source

  def _batches(self, source, **settings):
    plan = sampler.ClassSampler(source.labels, batch_size=20, per_class=4, seed=0)
    rows = sources.label_rows(source.labels)
    settings = {"augmentation": "none", "image_size": 8, "num_steps": 2, "seed": 0} | settings
    return pipeline.TrainBatches(source, plan, rows=rows, **settings)

  def test_f63_in_training(self, root):
    batch = self._batches(root, on_broken="skip")[0]
    bad = np.arange(1, 16, 4)
    assert sorted(batch["position"]) == list(range(20))
    np.testing.assert_array_equal(batch["broken"], np.isin(batch["position"], bad))
    assert batch["where"].all()  # another image of each class stands in
    with pytest.raises(decoding.BrokenImageError, match=r"class_00\d/1\.png: .*data\.on_broken=skip takes another image"):
      self._batches(root)[0]

  def test_f63_in_evaluation(self, root):
    batch = next(pipeline.eval_batches(root, batch_size=20, image_size=8, on_broken="skip"))
    np.testing.assert_array_equal(np.flatnonzero(~batch["where"]), np.arange(1, 16, 4))
    for label, why in enumerate(("missing", "a link to nothing", "a circular link", "Permission denied")):
      one = sources.Subset(root, [4 * label + 1])
      with pytest.raises(decoding.BrokenImageError, match=rf"class_00{label}/1\.png: .*\({why}\).*on_broken=skip leaves"):
        list(pipeline.eval_batches(one, batch_size=1, image_size=8))

  def test_f63_a_machine_without_file_descriptors_is_no_broken_image(self, root, monkeypatch):
    def read_regular(path):
      raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(file_io, "read_regular", read_regular)
    with pytest.raises(OSError, match="Too many open files"):
      list(pipeline.eval_batches(root, batch_size=20, image_size=8, on_broken="skip"))

  def test_f63_names_and_labels_need_no_file(self, root):
    for path in pathlib.Path(root.root).glob("*/*.png"):
      path.unlink()
    assert [root[i].id for i in (0, 1)] == ["class_000/0.png", "class_000/1.png"]
    assert root[5].shown_class == "class_001"


class TestImages:
  picture = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
  wide = np.random.default_rng(0).integers(0, 256, (15, 40, 3), np.uint8)

  def test_resize_to_the_same_size_is_the_identity(self):
    np.testing.assert_array_equal(transforms.centre_crop(self.picture, 20), self.picture)

  def test_resize_averages(self):
    board = np.indices((32, 32)).sum(0) % 2 * 255
    board = np.repeat(board[:, :, None], 3, 2).astype(np.uint8)
    small = transforms.centre_crop(board, 8)
    assert small.shape == (8, 8, 3)
    assert np.abs(small.astype(int) - 128).max() < 16  # antialiased: grey, not black or white

  @pytest.mark.parametrize("name", transforms.AUGMENTATIONS)
  @pytest.mark.parametrize("source", ["picture", "wide"])
  @pytest.mark.parametrize("size", [12, 20])
  def test_shape_and_type(self, name, source, size):
    augment = transforms.make_augmentation(name, size, resize_to=24)
    for seed in range(10):
      image = augment(getattr(self, source), np.random.default_rng(seed))
      assert image.shape == (size, size, 3)
      assert image.dtype == np.uint8

  @pytest.mark.parametrize("name", ["affine", "resized_crop"])
  def test_randomness_is_the_generators(self, name):
    augment = transforms.make_augmentation(name, 16)
    one, same, other = (augment(self.picture, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)

  def test_the_input_is_left_alone(self):
    before = self.picture.copy()
    for name in transforms.AUGMENTATIONS:
      transforms.make_augmentation(name, 20)(self.picture, np.random.default_rng(0))
    np.testing.assert_array_equal(self.picture, before)

  def test_affine_moves_a_little_and_never_flips(self):
    # A blob in the upper left corner stays in the upper left half.
    blob = np.zeros((32, 32, 3), np.uint8)
    blob[8:12, 8:12] = 255
    augment = transforms.make_augmentation("affine", 32)
    centres = []
    for seed in range(200):
      ink = augment(blob, np.random.default_rng(seed))[:, :, 0].astype(float)
      centres.append([(ink.sum(1 - axis) * np.arange(32)).sum() / ink.sum() for axis in (0, 1)])
    centres = np.array(centres)
    assert (centres < 16).all()
    assert (centres > 3).all()
    np.testing.assert_allclose(centres.mean(0), 9.5, atol=0.7)  # no drift: the mean is where the blob was
    assert (centres.std(0) > 0.5).all()

  def test_crop_flips_half_of_the_images(self):
    ramp = np.repeat(np.repeat(np.arange(0, 240, 8)[None, :, None], 30, 0), 3, 2).astype(np.uint8)
    augment = transforms.make_augmentation("resized_crop", 16)
    slopes = [np.diff(augment(ramp, np.random.default_rng(seed))[0, [0, -1], 0].astype(int))[0] for seed in range(200)]
    assert 70 <= sum(slope < 0 for slope in slopes) <= 130

  def test_unknown_augmentation_is_refused(self):
    with pytest.raises(ValueError, match="resized_crop"):
      transforms.make_augmentation("mixup", 16)
