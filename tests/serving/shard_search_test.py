"""Tests the search in a gallery in shards by an index."""

import json
import os

import flat_engine
import networks
import numpy as np
import pytest
import runs

from soprc_jax.serving import (
  embed,
  image_inputs,
  index,
  network,
  search,
  shard_index,
  shard_search,
  shard_writing,
  shards,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns a folder of images, a run, its network, and a folder of three shards."""
  root, run = networks.with_images(tmp_path_factory)
  loaded, folder = network.load(run), tmp_path_factory.mktemp("shards")
  _write(loaded, root, folder)
  return root, run, loaded, folder


def _write(loaded, images, folder, count=3, **changed):
  source = image_inputs.find(str(images), flag="--images")
  for number in range(count):
    part = embed.of_images(loaded, shard_writing.part_of(source, number, count))
    path = folder / f"{shards.name(number, count)}.npy"
    shard_writing.write(path, part._replace(**changed), dtype="float32", inputs="i")


@pytest.fixture
def opened(made, tmp_path, monkeypatch):
  flat_engine.install(monkeypatch)
  shard_index.build(tmp_path / "i.faiss", _find(made[3]), "flat")
  return shard_index.read(tmp_path / "i.faiss")


def _find(folder):
  return shard_index.find(str(folder), flag="--gallery")


def test_the_results_are_those_of_one_index(made, opened):
  root, _, loaded, _ = made
  whole = embed.of_images(loaded, image_inputs.find(str(root), flag="--images"))
  about = shard_search.described(opened)
  index.check_network(about, loaded, name="i.faiss")
  queries = whole.embeddings[[3, 17, 39]]
  found, rows = shard_search.nearest(opened, about, queries, top=5, candidates=20)
  want = search.nearest(whole, queries, top=5)
  for ours, theirs in zip(rows, want, strict=True):
    assert [one.id for one in ours] == [one.id for one in theirs]
    np.testing.assert_allclose(
      [one.similarity for one in ours], [one.similarity for one in theirs], atol=1e-6
    )
    # Positions are rows of the joined shards.
    assert [found.positions[one.place] for one in ours] == [one.place for one in theirs]
  assert found.root == whole.root
  text = json.loads(search.to_json(found, ["a", "b", "c"], rows, num_images=opened.num_images))
  assert text["gallery"]["images"] == 40
  assert text["queries"][1]["neighbours"][0]["place"] == want[1][0].place


def test_a_query_gets_its_own_candidates(opened, monkeypatch):
  rows = np.array([[7, 0, -1], [2, 39, 7]])
  monkeypatch.setattr(opened.engine, "search", lambda queries, count: rows)
  queries, about = shards.read(opened.shards[0], 2, 2), shard_search.described(opened)
  hits, found = shard_search.nearest(opened, about, queries, top=3, candidates=3)
  got = [sorted(int(hits.positions[one.place]) for one in row) for row in found]
  assert got == [[0, 7], [2, 7, 39]]


def test_exact_similarities_decide_among_the_candidates(made, tmp_path, monkeypatch):
  flat_engine.install(monkeypatch, is_blind=True)
  shard_index.build(tmp_path / "i.faiss", _find(made[3]), "flat")
  opened = shard_index.read(tmp_path / "i.faiss")
  queries = shards.read(opened.shards[0], 0, 1)
  about = shard_search.described(opened)
  found, ((*rows,),) = shard_search.nearest(opened, about, queries, top=40, candidates=40)
  assert len(rows) == 20  # the index finds no more
  assert (found.positions % 2 == 0).all()
  scores = [one.similarity for one in rows]
  assert scores == sorted(scores, reverse=True)
  for given, message in (
    ({"top": 9, "candidates": 8}, "--candidates=8 must be at least --top, here 9"),
    ({"top": 1, "candidates": 8, "queries": np.ones((1, 3))}, "queries have width 3, the index"),
  ):
    with pytest.raises(ValueError, match=message):
      shard_search.nearest(opened, about, **({"queries": queries} | given))


def test_another_network_is_named(opened, made):
  about = shard_search.described(opened)
  with pytest.raises(ValueError, match="similarities between the two models are meaningless"):
    index.check_network(about, made[2]._replace(digest="0" * 64), name="i.faiss")


def test_an_unknown_model_is_named(opened):
  unknown = [shard._replace(made_by="") for shard in opened.shards]
  with pytest.raises(ValueError, match="by an unknown model: soprc search needs shards of soprc"):
    shard_search.described(opened._replace(shards=unknown))


def test_several_splits_are_named(made, tmp_path, monkeypatch):
  root, _, loaded, _ = made
  flat_engine.install(monkeypatch)
  for split in ("test", "val"):
    (tmp_path / split).mkdir()
    _write(loaded, root, tmp_path / split, count=1, split=split)
  found = _find(tmp_path / "*" / "*.npy")
  shard_index.build(tmp_path / "i.faiss", found, "flat")
  with pytest.raises(ValueError, match="of several splits, test, val"):
    shard_search.described(shard_index.read(tmp_path / "i.faiss"))


def test_ids_of_several_folders_are_absolute(made, tmp_path, monkeypatch):
  root, _, loaded, _ = made
  flat_engine.install(monkeypatch)
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    ids = np.array([f"{number}.png" for number in range(40)])
    _write(loaded, root, tmp_path / name, count=1, root=f"/{name}", ids=ids)
  shard_index.build(tmp_path / "i.faiss", _find(tmp_path / "*" / "*.npy"), "flat")
  opened = shard_index.read(tmp_path / "i.faiss")
  about = shard_search.described(opened)
  queries = shards.read(opened.shards[0], 7, 1)
  _, ((first, second),) = shard_search.nearest(opened, about, queries, top=2, candidates=9)
  assert about.root == ""
  assert [first.id, second.id] == ["/a/7.png", "/b/7.png"]


def test_classes_of_all_shards(made, tmp_path, monkeypatch):
  root, _, loaded, _ = made
  flat_engine.install(monkeypatch)
  _write(loaded, root, tmp_path, count=1, class_names=np.array(["a", "b", "", "a"] * 10))
  shard_index.build(tmp_path / "i.faiss", _find(tmp_path), "flat")
  opened = shard_index.read(tmp_path / "i.faiss")
  assert sorted(shard_search.class_names(opened)) == ["a", "b"]
  about = shard_search.described(opened)
  queries = shards.read(opened.shards[0], 5, 2)
  _, rows = shard_search.nearest(opened, about, queries, top=1, candidates=3)
  assert [row[0].class_name for row in rows] == ["b", ""]


@pytest.mark.parametrize(("package", "kind"), [("faiss", "hnsw"), ("usearch", "usearch")])
def test_index_and_search_from_the_command_line(made, tmp_path, package, kind):
  pytest.importorskip(package)
  root, run, _, folder = made
  env = runs.environment()
  env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
  path = tmp_path / f"i.{package}"
  done = runs.call(
    "experiments.index", f"--gallery={folder}", f"--kind={kind}", f"--output={path}", env=env
  )
  assert done.returncode == 0, done.stderr
  assert "Recall of the index for 40 images of the gallery: " in done.stdout
  query = sorted(root.rglob("*.png"))[5]
  command = [f"--workdir={run}", f"--query={query}", f"--index={path}", "--top=2"]
  done = runs.call("experiments.search", *command, "--format=json", "--skip_query", env=env)
  assert done.returncode == 0, done.stderr
  whole = runs.call(
    "experiments.search", *command[:2], "--top=3", "--split=all", "--format=json", env=env
  )
  ours, theirs = (json.loads(one.stdout)["queries"][0]["neighbours"] for one in (done, whole))
  want = [one for one in theirs if not str(query).endswith(one["id"])]
  assert [one["similarity"] for one in ours] == pytest.approx(
    [one["similarity"] for one in want][:2], abs=1e-6
  )
  done = runs.call("experiments.search", *command, "--backend=exact", env=env)
  assert "--backend is for other galleries" in done.stderr
  other = networks.make(tmp_path / "run", root, seed=1)
  done = runs.call("experiments.search", f"--workdir={other}", *command[1:], env=env)
  assert (done.returncode, "between the two models are meaningless" in done.stderr) == (1, True)


def test_flags(made, tmp_path):
  given = [f"--gallery={made[3]}", "--kind=hnsw", f"--output={tmp_path / 'i.faiss'}"]
  for flags, message in (
    (given[:1], "missing --kind and --output. For example:\n  soprc index --gallery="),
    ([*given[:2], f"--output={tmp_path / 'i.bin'}"], "i.bin: the name must end in .faiss"),
    ([f"--gallery={tmp_path}/x", *given[1:]], "there is no such file"),
  ):
    done = runs.call("experiments.index", *flags)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
  command = [f"--workdir={made[1]}", f"--query={made[0]}", "--candidates=5"]
  done = runs.call("experiments.search", *command)
  assert "--candidates is for an --index of soprc index" in done.stderr
  assert list(tmp_path.iterdir()) == []
