"""Tests shards of embeddings: parts of the images, resuming, and models that must not mix."""

import errno
import importlib.util
import json
import os
import shutil
import tarfile

import networks
import numpy as np
import pytest
import runs

from soprc_jax import metrics
from soprc_jax._internal import file_io
from soprc_jax.data import features
from soprc_jax.serving import (
  embed,
  image_inputs,
  network,
  shard_evaluation,
  shard_formats,
  shard_survey,
  shard_tables,
  shard_writing,
  shards,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(made):
  return network.load(made[1])


def _images(path):
  return image_inputs.find(str(path), flag="--images")


def _index(loaded, path, number, count):
  return embed.of_images(loaded, shard_writing.part_of(_images(path), number, count))


def _found(folder):
  return shards.find(str(folder), flag="--gallery")


def test_parts_are_disjoint_and_complete(made):
  source = _images(made[0])
  for count in (1, 3, 40):
    parts = [shard_writing.part_of(source, number, count) for number in range(count)]
    assert [path for part in parts for path in part.paths] == source.paths
    assert {len(part) for part in parts} <= {40 // count, 40 // count + 1}
  with pytest.raises(ValueError, match=r"--shard=0/41: there are only 40 images"):
    shard_writing.part_of(source, 0, 41)


def test_a_part_of_vectors_and_of_a_split(loaded):
  vectors = np.eye(5, dtype=np.float32)
  source = features.Features(vectors, [0, 1, 0, 1, 0], list("abcde"), {0: "x"}, made_by="m")
  part = shard_writing.part_of(source, 1, 2)
  assert (part.ids, part.labels.tolist(), part.made_by) == (list("cde"), [0, 1, 0], "m")
  np.testing.assert_array_equal(part.vectors(np.arange(3)), vectors[2:])
  split = embed.split_source(loaded, "test")
  part = shard_writing.part_of(split, 1, 3)
  assert part[0].id == split[len(split) // 3].id


def test_the_digest_of_the_inputs_depends_on_names_and_order(tmp_path):
  digests = {
    shard_writing.inputs_digest(image_inputs.Named(tmp_path, paths))
    for paths in (["a", "b"], ["b", "a"], ["a", "b", "c"], ["ab", ""])
  }
  assert len(digests) == 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("has_parquet", [True, False])
def test_shards_hold_what_one_index_holds(made, loaded, tmp_path, monkeypatch, dtype, has_parquet):
  if not has_parquet:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  for number in range(3):
    path = tmp_path / f"{shards.name(number, 3)}.npy"
    part = _index(loaded, made[0], number, 3)
    shard_writing.write(path, part, dtype=dtype, inputs="i")
  suffix = ".parquet" if has_parquet else ".csv"
  assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json", suffix}
  found = _found(tmp_path)
  whole = embed.of_images(loaded, _images(made[0]))
  joined = np.concatenate([shards.read(one, 0, one.rows) for one in found])
  assert joined.dtype == dtype
  np.testing.assert_allclose(joined, whole.embeddings, atol=1e-6 if dtype == "float32" else 1e-3)
  tables = [shard_tables.read(one) for one in found]
  assert [name for table in tables for name in table.ids] == whole.ids.tolist()
  assert {(one.made_by, one.inputs) for one in found} == {(loaded.digest, "i")}


def test_labels_are_those_of_the_list(made, loaded, tmp_path):
  paths = sorted(map(str, made[0].rglob("*.png")))[:4]
  names = ["ä,b", "", "x\ny", "x\ny"]
  lines = [f'{path},"{name}"' for path, name in zip(paths, names, strict=True)]
  (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]) + "\n")
  part = _index(loaded, tmp_path / "list.csv", 0, 1)
  shard_writing.write(tmp_path / "out.npy", part, dtype="float32", inputs="")
  (found,) = _found(tmp_path / "out.npy")
  assert shard_tables.read(found) == shard_tables.Table(paths, part.class_names.tolist())
  assert part.class_names[0] == "ä,b"


def test_tar_files_in_shards(made, loaded, tmp_path):
  paths = sorted(map(str, made[0].rglob("*.png")))[:5]
  for number, part in enumerate((paths[:2], paths[2:])):
    with tarfile.open(tmp_path / f"{number}.tar", "w") as file:
      for path in part:
        file.add(path, arcname=path.removeprefix(f"{made[0]}/"))
  parts = [_index(loaded, tmp_path / "*.tar", number, 2) for number in range(2)]
  whole = embed.of_images(loaded, _images(made[0])).embeddings[:5]
  joined = np.concatenate([part.embeddings for part in parts])
  np.testing.assert_allclose(joined, whole, atol=1e-6)
  assert [len(part.ids) for part in parts] == [2, 3]
  assert parts[1].ids[0] == f"{tmp_path}/1.tar/{paths[2].removeprefix(f'{made[0]}/')}"


def test_finished_and_unfinished_shards(made, loaded, tmp_path, caplog):
  path = tmp_path / f"{shards.name(0, 2)}.npy"
  state = {"dtype": "float32", "inputs": "i", "count": 2}
  assert not shard_writing.is_finished(path, loaded, **state)
  part = _index(loaded, made[0], 0, 2)
  shard_writing.write(path, part, dtype="float32", inputs="i")
  assert shard_writing.is_finished(path, loaded, **state)
  for changed, what in (({"dtype": "float16"}, "dtype"), ({"inputs": "j"}, "list of images")):
    with pytest.raises(
      ValueError, match=rf"shard-00000-of-00002\.npy was made with another {what}"
    ):
      shard_writing.is_finished(path, loaded, **(state | changed))
  with pytest.raises(ValueError, match="was made with another model: choose a new folder"):
    shard_writing.is_finished(path, loaded._replace(digest="0" * 64), **state)
  with pytest.raises(ValueError, match=r"shard-00000-of-00002\.npy is not one of 3 shards"):
    shard_writing.is_finished(
      tmp_path / "shard-00000-of-00003.npy", loaded, **(state | {"count": 3})
    )
  path.write_bytes(path.read_bytes()[:-1])
  assert not shard_writing.is_finished(path, loaded, **state)
  assert "is truncated" in caplog.text
  shard_writing.write(path, part, dtype="float32", inputs="i")
  path.with_suffix(".parquet").unlink()
  assert not shard_writing.is_finished(path, loaded, **state)


def _two(made, loaded, folder, suffix=".npy"):
  """Writes two shards of 20 images, and returns their files of embeddings."""
  paths = [folder / f"{shards.name(number, 2)}{suffix}" for number in range(2)]
  for number, path in enumerate(paths):
    part = _index(loaded, made[0], number, 2)
    shard_writing.write(path, part, dtype="float32", inputs="i")
  return paths


def _swap(first, second):
  aside = first.with_name("aside")
  for old, new in ((first, aside), (second, first), (aside, second)):
    old.rename(new)


def _read_all(folder):
  return [shard_tables.read(shard).ids for shard in _found(folder)]


@pytest.mark.parametrize("has_parquet", [True, False])
@pytest.mark.parametrize("suffix", [".npy", ".fbin", ".h5"])
def test_swapped_files_of_two_shards_are_named(
  made, loaded, tmp_path, monkeypatch, suffix, has_parquet
):
  if not has_parquet:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  paths, table = _two(made, loaded, tmp_path, suffix), (".csv", ".parquet")[has_parquet]
  want, state = _read_all(tmp_path), {"dtype": "float32", "inputs": "i", "count": 2}
  for swapped, message in (
    (table, rf"00000-of-00002\{table} has not the ids of .*00002\{suffix}: .* remove \"ids\" from"),
    (suffix, rf"00000-of-00002\{suffix} has not the embeddings that .*\.json describes"),
    (".json", rf"00000-of-00002\{suffix} has not the embeddings that .*\.json describes"),
  ):
    pair = [path.with_suffix(swapped) for path in paths]
    _swap(*pair)
    with pytest.raises(ValueError, match=message):
      _read_all(tmp_path)
    with pytest.raises(ValueError, match=message):  # a changed table is not overwritten
      shard_writing.is_finished(paths[0], loaded, **state)
    _swap(*pair)
    assert _read_all(tmp_path) == want


def test_new_labels_and_shards_of_earlier_versions_are_read(made, loaded, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  paths = _two(made, loaded, tmp_path)
  want = _read_all(tmp_path)
  lines = paths[0].with_suffix(".csv").read_text().splitlines()
  labeled = [lines[0], *(f"{line}new" for line in lines[1:])]
  paths[0].with_suffix(".csv").write_text("\n".join(labeled))
  assert _read_all(tmp_path) == want
  for path in paths:
    meta = json.loads(path.with_suffix(".json").read_text())
    del meta["ids"], meta["vectors"]
    path.with_suffix(".json").write_text(json.dumps(meta))
  _swap(*(path.with_suffix(".csv") for path in paths))
  assert _read_all(tmp_path) == want[::-1]


def test_a_shard_without_its_origin_is_kept(made, loaded, tmp_path):
  path, _ = _two(made, loaded, tmp_path)
  path.with_suffix(".json").unlink()
  with pytest.raises(ValueError, match=r"00002\.json is missing: .* remove .*00002\.npy, and it"):
    shard_writing.is_finished(path, loaded, dtype="float32", inputs="i", count=2)


@pytest.mark.parametrize(("suffix", "dtype"), [(".fbin", "float32"), (".h5", "float16")])
def test_formats_of_other_programs(made, loaded, tmp_path, caplog, suffix, dtype):
  path = tmp_path / f"{shards.name(0, 2)}{suffix}"
  state = {"dtype": dtype, "inputs": "i", "count": 2}
  part = _index(loaded, made[0], 0, 2)
  shard_writing.write(path, part, dtype=dtype, inputs="i")
  assert {one.suffix for one in tmp_path.iterdir()} == {suffix, ".json", ".parquet"}
  assert shard_writing.is_finished(path, loaded, **state)
  (found,) = shards.find_all([path], flag="--gallery")
  np.testing.assert_array_equal(shards.read(found, 0, 20), part.embeddings.astype(dtype))
  assert shard_tables.read(found).ids == part.ids.tolist()
  if suffix == ".h5":  # without the table too
    assert shard_formats.ids(path) == part.ids.tolist()
  with pytest.raises(ValueError, match=rf"00002\{suffix} has another format than shard-.*\.npy"):
    shard_writing.is_finished(path.with_suffix(".npy"), loaded, **state)
  path.write_bytes(path.read_bytes()[:-1])
  assert not shard_writing.is_finished(path, loaded, **state)
  assert "It is written again" in caplog.text


def test_what_killed_processes_left_is_removed(tmp_path):
  left = [tmp_path / f".a.{suffix}.{'0' * 16}.tmp" for suffix in ("npy", "json", "parquet")]
  other = tmp_path / f".b.npy.{'0' * 16}.tmp"
  for path in (*left, other):
    path.write_text("")
    os.utime(path, (0, 0))
  shard_writing.remove_stale(tmp_path / "a.npy")
  assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stop_or_a_full_disk_leaves_no_shard(made, loaded, tmp_path, monkeypatch, at):
  path = tmp_path / f"{shards.name(0, 1)}.npy"
  part = _index(loaded, made[0], 0, 20)
  shard_writing.write(path, part, dtype="float32", inputs="old")
  number, sync = [0], file_io.os.fsync

  def fail(handle):
    number[0] += 1
    if number[0] > 2 * at:  # each file syncs itself and its folder
      raise OSError(errno.ENOSPC, "No space left on device")
    sync(handle)

  with monkeypatch.context() as patched:
    patched.setattr(file_io.os, "fsync", fail)
    with pytest.raises(OSError, match="shard-00000-of-00001") as caught:
      shard_writing.write(path, part, dtype="float32", inputs="new")
  assert file_io.is_full(caught.value)
  # The old embeddings must not stand next to a new table.
  assert not path.exists()
  shard_writing.write(path, part, dtype="float32", inputs="new")
  assert _found(path)[0].inputs == "new"
  assert not list(tmp_path.glob(".*"))


def test_parts_of_different_lists_do_not_mix(made, loaded, tmp_path):
  for number in range(2):
    shard_writing.write(
      tmp_path / f"{shards.name(number, 2)}.npy",
      _index(loaded, made[0], number, 20),
      dtype="float32",
      inputs=str(number),
    )
  with pytest.raises(ValueError, match="are parts of different lists of images"):
    _found(tmp_path)


def test_embed_and_evaluate_from_the_command_line(made, loaded, tmp_path):
  root, run = made
  images = tmp_path / "images"
  shutil.copytree(root, images)
  (images / "class_000" / "broken.png").write_bytes(b"x")
  names = [f"{path},{path.parent.name}" for path in sorted(images.rglob("*.png"))]
  (tmp_path / "list.csv").write_text("\n".join(["path,label", *names]) + "\n")
  command = [
    f"--workdir={run}",
    f"--images={tmp_path / 'list.csv'}",
    f"--output={tmp_path / 'out'}",
  ]
  done = runs.call("experiments.embed", *command, "--shard=0/2")
  assert done.returncode == 1
  assert "broken.png" in done.stderr
  assert not list((tmp_path / "out").glob("*.npy"))
  for number in (1, 0):
    done = runs.call("experiments.embed", *command, f"--shard={number}/2", "--on_broken=skip")
    assert done.returncode == 0, done.stderr
  assert "Embedded 19 images" in done.stdout
  assert "skipped: 1, e.g." in done.stdout
  meta = json.loads((tmp_path / "out" / "shard-00000-of-00002.json").read_text())
  assert meta["broken_ids"] == [str(images / "class_000" / "broken.png")]
  assert (meta["digest"], meta["step"]) == (loaded.digest, 3)
  done = runs.call("experiments.embed", *command, "--shard=0/2", "--on_broken=skip")
  assert done.stdout == f"{tmp_path / 'out' / 'shard-00000-of-00002.npy'} is finished.\n"
  done = runs.call("experiments.embed", *command, "--shard=0/2", "--format=fbin")
  assert ".npy has another format than shard-00000-of-00002.fbin" in done.stderr
  command[-1] = f"--output={tmp_path / 'broken'}"
  done = runs.call("experiments.embed", *command, "--shard=2/41", "--on_broken=skip")
  assert done.stdout.startswith("Embedded 0 images"), done.stderr
  assert "shard-00002-of-00041.npy is empty" in done.stderr
  out = tmp_path / "results"
  shared = [f"--gallery={tmp_path / 'out'}", f"--output={out}", "--ks=1,10"]
  done = runs.call("experiments.evaluate", f"--queries={tmp_path / 'out'}", *shared)
  assert done.returncode == 0, done.stderr
  vectors = np.concatenate([shards.read(one, 0, one.rows) for one in _found(tmp_path / "out")])
  want = metrics.retrieval_metrics(vectors, np.repeat(np.arange(20), 2), ks=(1, 10))
  values = json.loads((out / "evaluation.json").read_text())
  assert {key: values[key] for key in want} == want
  assert values["num_excluded"] == 40
  assert values["model"] == loaded.digest


@pytest.mark.parametrize("has_parquet", [True, False])
def test_a_shard_of_broken_images_is_empty(made, tmp_path, monkeypatch, caplog, has_parquet):
  if not has_parquet:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  shutil.copytree(made[0], tmp_path / "images")
  for path in (tmp_path / "images" / "class_000").glob("*.png"):
    path.write_bytes(b"x")
  names = [f"{path},{path.parent.name}" for path in sorted((tmp_path / "images").rglob("*.png"))]
  (tmp_path / "list.csv").write_text("\n".join(["path,label", *names[:6]]) + "\n")
  (tmp_path / "out").mkdir()
  skipping = network.load(made[1], on_broken="skip")
  for number in range(3):
    part = shard_writing.part_of(_images(tmp_path / "list.csv"), number, 3)
    shard_writing.write(
      tmp_path / "out" / f"{shards.name(number, 3)}.npy",
      embed.of_images(skipping, part, may_be_empty=True),
      dtype="float32",
      inputs="i",
    )
  assert "shard-00000-of-00003.npy is empty: none of its images can be decoded" in caplog.text
  place = str(tmp_path / "out")
  files = shard_survey.find(place, place, None)
  assert [one.rows for one in files.gallery] == [0, 2, 2]
  prepared = shard_survey.prepare(files)
  shard_evaluation.count(files, prepared, tmp_path, size=32)
  assert shard_evaluation.summarise(files, prepared, tmp_path, ks=[1])[0]["num_queries"] == 4


def test_flags(made, tmp_path):
  shared = [f"--workdir={made[1]}", f"--images={made[0]}", f"--output={tmp_path / 'x.npz'}"]
  for given, message in (
    (["--dtype=float16"], "--dtype is for --shard"),
    (["--format=h5"], "--format is for --shard"),
    (["--shard=0/2", "--format=fbin", "--dtype=float16"], "--format=fbin holds float32"),
    (["--shard=2/2"], "--shard=2/2 must be I/N with 0 <= I < N"),
    (["--shard=0/41"], "--shard=0/41: there are only 40 images"),
  ):
    done = runs.call("experiments.embed", *shared, *given)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
  assert list(tmp_path.iterdir()) == []
  shared[-1] = f"--output={made[1] / 'config.json'}"
  done = runs.call("experiments.embed", *shared, "--shard=0/2")
  assert "config.json: a file is in its place" in done.stderr
