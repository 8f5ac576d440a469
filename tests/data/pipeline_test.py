"""Tests batches of arrays as pure functions of (seed, step), and unreadable images."""

import errno
import io
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pictures
from PIL import Image
import pytest
import runs
import trees

from soprc_jax._internal import file_io
from soprc_jax.data import decoding, image_folder, pipeline, sampler, sources


def _batches(num_steps=7, shard=(0, 1), seed=0, **settings):
  source = pictures.Pictures(pictures.labels(pictures.LAYOUTS["with_small"]))
  plan = pictures.class_sampler(pictures.LAYOUTS["with_small"], seed=seed)
  settings = {"augmentation": "affine", "image_size": 8} | settings
  rows = sources.label_rows(source.labels)
  return pipeline.TrainBatches(
    source, plan, rows=rows, seed=seed, num_steps=num_steps, shard=shard, **settings
  )


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
import pipeline_test
from soprc_jax.data import pipeline
from experiments import malloc

def digests(start, workers):
  found = []
  plans = pipeline_test._one_picture(0, num_steps=7)
  for batch in pipeline.iterate(plans, start=start, workers=workers):
    rest = [batch[key].tobytes() for key in sorted(batch) if key != "image"]
    parts = (b"".join(rest), *(image.tobytes() for image in batch["image"]))
    found.append([hashlib.sha256(part).hexdigest() for part in parts])
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
  multiprocessing.context.ForkProcess._Popen = staticmethod(
    lambda process: methods.add("fork") or fork(process)
  )
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = {"alone": digests(0, 0), "by one": digests(2, 1), "by workers": digests(2, 2)}
  found["warnings"] = [str(one.message) for one in caught if "fork" in str(one.message)]
  found["start methods"] = sorted(methods)
  print("value of the test: " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def by_workers():
  """Returns the batches that worker processes load, in a separate program, as in training."""
  env = runs.environment() | {
    "PYTHONPATH": os.pathsep.join(
      [str(runs.ROOT), *(str(runs.ROOT / "tests" / name) for name in ("data", "support"))]
    )
  }
  command = [sys.executable, "-W", "error::RuntimeWarning", "-c", _WITH_WORKERS]
  done = subprocess.run(
    command, cwd=runs.ROOT, env=env, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  return runs.value(done.stdout)


def _one_picture(seed, *, num_steps=2):
  """Returns training batches of a source in which all images are the same."""
  source = pictures.Pictures(np.repeat(np.arange(4), 4))
  source._images[:] = source._images[0]
  plan = sampler.ClassSampler(source.labels, batch_size=16, per_class=4, seed=0)
  rows = sources.label_rows(source.labels)
  return pipeline.TrainBatches(
    source, plan, rows=rows, augmentation="affine", image_size=12, seed=seed, num_steps=num_steps
  )


class TestPipeline:
  def test_batch(self):
    batch = _batches()[2]
    labels = pictures.labels(pictures.LAYOUTS["with_small"])
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
    """Checks labels beyond 32 bits. As arguments of a jitted function, 0, 2^32 and 2^33 would be
    one class.
    """
    source = pictures.Pictures(np.repeat([0, 2**32, 2**33], 2))
    plan = sampler.ClassSampler(source.labels, batch_size=6, per_class=2, seed=0)
    rows = sources.label_rows(source.labels)
    settings = {"augmentation": "none", "image_size": 12, "seed": 0, "num_steps": 1}
    batch = pipeline.TrainBatches(source, plan, rows=rows, **settings)[0]
    assert batch["label"].dtype == np.int32
    np.testing.assert_array_equal(
      2**32 * batch["label"].astype(np.int64), source.labels[batch["position"]]
    )

  def test_images_are_those_of_the_positions(self):
    batches = _batches(augmentation="none", image_size=12)
    batch, source = batches[3], pictures.Pictures(pictures.labels(pictures.LAYOUTS["with_small"]))
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
      list(pipeline.iterate(_batches(), start=1, prefetch=1)),
      list(pipeline.iterate(_batches(), start=1, prefetch=9)),
    )

  def test_f21_each_step_slot_and_seed_has_its_own_augmentation(self):
    # All images are the same, so differences come from the augmentation.
    images = [
      image.tobytes()
      for seed in (0, 1)
      for step in range(2)
      for image in _one_picture(seed)[step]["image"]
    ]
    assert len(set(images)) == 64

  @pytest.mark.parametrize("count", [2, 4])
  def test_f21_shards_make_up_the_whole_batch(self, count):
    parts = [_batches(shard=(index, count))[5] for index in range(count)]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    _assert_same([joined], [_batches()[5]])

  def test_f20_going_on_with_other_workers_gives_the_same_batches(self, by_workers):
    # One process makes two steps, a new one with 1 worker or 2 makes the others, as if nothing had
    # stopped.
    assert len(by_workers["alone"]) == 7
    assert by_workers["by workers"] == by_workers["by one"] == by_workers["alone"][2:]

  def test_f21_workers_have_no_streams_of_their_own(self, by_workers):
    # All images are the same, so differences come from the augmentation. It differs in each slot of
    # each step, for any worker.
    images = [image for _, *images in by_workers["by workers"] for image in images]
    assert len(set(images)) == len(images) == 5 * 16

  def test_f22_workers_are_spawned_beside_the_threads_of_jax(self, by_workers):
    # The program has used jax before, so the warning of a fork would have ended it.
    assert by_workers["warnings"] == []
    assert by_workers["start methods"] == ["spawn"]

  @pytest.mark.parametrize("count", [1, 9, 10, 11])
  def test_f31_evaluation_pads_the_last_batch_and_says_so(self, count):
    source = pictures.Pictures(np.arange(count))
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=12))
    assert all(batch["image"].shape == (5, 12, 12, 3) for batch in batches)
    kept = np.concatenate([batch["image"][batch["where"]] for batch in batches])
    np.testing.assert_array_equal(kept, source._images)
    assert sum((~batch["where"]).sum() for batch in batches) == -count % 5

  def test_evaluation_loads_in_the_order_of_the_images_though_in_threads(self):
    """Checks that batches come in order although the first image takes longest. More than one
    thread has made them.
    """
    threads = set()

    class Slow(pictures.Pictures):
      def __getitem__(self, index):
        threads.add(threading.get_ident())
        time.sleep(0.05 if index < 5 else 0.005)
        return super().__getitem__(index)

    source = Slow(np.arange(40))
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=12))
    np.testing.assert_array_equal(
      np.concatenate([batch["image"] for batch in batches]), source._images
    )
    assert threading.get_ident() not in threads
    assert len(threads) == min(max(os.cpu_count(), 1), 16)


class _Broken(pictures.Pictures):
  """Provides files of which those at ``bad`` are truncated."""

  def __init__(self, labels, bad):
    super().__init__(labels, size=24)
    self._bad = set(bad)

  def __getitem__(self, index):
    stream = io.BytesIO()
    Image.fromarray(self._images[index]).save(stream, "PNG")
    data = stream.getvalue()
    name = f"folder/{index}.png"
    return sources.Example(
      decoding.Encoded(data[: len(data) // 2 if index in self._bad else None], name),
      int(self.labels[index]),
      name,
    )


class TestBrokenImages:
  # Class 5: one of four is corrupt. Class 6: all are. The others have none.
  labels, bad = np.repeat([5, 6, 7, 8], 4), (1, 4, 5, 6, 7)

  def _batch(self, **settings):
    source = _Broken(self.labels, self.bad)
    plan = sampler.ClassSampler(self.labels, batch_size=16, per_class=4, seed=0)
    rows = sources.label_rows(self.labels)
    settings = {"augmentation": "none", "image_size": 24, "num_steps": 3} | settings
    return source, pipeline.TrainBatches(source, plan, rows=rows, seed=0, **settings)

  def test_f29_error_names_the_file_and_the_way_out(self):
    with pytest.raises(
      decoding.BrokenImageError,
      match=r"folder/\d\.png: .*truncated.*data\.on_broken=skip takes another",
    ):
      self._batch()[1][0]

  def test_f29_another_image_of_the_class_takes_its_place_and_is_counted(self):
    source, batches = self._batch(on_broken="skip")
    for step in range(3):
      batch = batches[step]
      np.testing.assert_array_equal(batch["broken"], np.isin(batch["position"], self.bad))
      np.testing.assert_array_equal(
        batch["where"], self.labels[batch["position"]] != 6
      )  # no image is left to take: masked out
      for image, position in zip(batch["image"], batch["position"]):
        label = self.labels[position]
        good = (
          np.setdiff1d(np.flatnonzero(self.labels == label), self.bad)
          if position in self.bad
          else [position]
        )
        assert (
          not image.any()
          if label == 6
          else any(np.array_equal(image, source._images[other]) for other in good)
        )

  def test_f29_evaluation_leaves_it_out_or_names_it(self):
    source = _Broken(self.labels, self.bad)
    batches = list(pipeline.eval_batches(source, batch_size=5, image_size=24, on_broken="skip"))
    where = np.concatenate([batch["where"] for batch in batches])[:16]
    np.testing.assert_array_equal(where, ~np.isin(np.arange(16), self.bad))
    with pytest.raises(
      decoding.BrokenImageError, match=r"folder/1\.png: .*data\.on_broken=skip skips it"
    ):
      list(pipeline.eval_batches(source, batch_size=5, image_size=24))


class TestFilesThatCannotBeRead:
  """Tests F63: a file that becomes unreadable after listing is named, or skipped and counted."""

  @pytest.fixture
  def root(self, tmp_path, monkeypatch):
    """Returns five classes of four images. The second image of each class but the last is
    unreadable in a different way.
    """
    trees.folder(tmp_path, 5)
    source = image_folder.load(str(tmp_path))
    bad = [tmp_path / f"class_00{label}" / "1.png" for label in range(4)]
    for path in bad[:3]:
      path.unlink()
    bad[1].symlink_to("nowhere")
    bad[2].symlink_to(bad[2])
    read = file_io.read_regular

    def read_regular(path):  # root may read files that other users may not
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
    assert batch["where"].all()  # another image of each class replaces it
    with pytest.raises(
      decoding.BrokenImageError,
      match=r"class_00\d/1\.png: .*data\.on_broken=skip takes another image",
    ):
      self._batches(root)[0]

  def test_f63_in_evaluation(self, root):
    batch = next(pipeline.eval_batches(root, batch_size=20, image_size=8, on_broken="skip"))
    np.testing.assert_array_equal(np.flatnonzero(~batch["where"]), np.arange(1, 16, 4))
    for label, why in enumerate(
      ("missing", "a link to nothing", "a circular link", "Permission denied")
    ):
      one = sources.Subset(root, [4 * label + 1])
      with pytest.raises(
        decoding.BrokenImageError,
        match=rf"class_00{label}/1\.png: .*\({why}\).*on_broken=skip skips",
      ):
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
