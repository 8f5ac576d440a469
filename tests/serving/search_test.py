"""Tests search: exactly the nearest, in a fixed order, with numpy as with faiss, and its output."""

import json
import pathlib
import sys

import indexes
import numpy as np
from PIL import Image
import pytest

from soprc_jax.serving import image_inputs, search
from soprc_jax.training import config as config_lib
from soprc_jax.training import evaluation


def _unit(vectors):
  return np.float32(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _crowd(rng, width=33):
  """Returns vectors of which many are equal. Many others are so close that float32 products cannot
  distinguish them.
  """
  base = rng.normal(size=(12, width))
  near = base[rng.integers(12, size=400)] + rng.normal(size=(400, width)) * 10.0 ** rng.integers(
    -9, -3, size=(400, 1)
  )
  return _unit(np.concatenate([base[rng.integers(12, size=300)], near])[rng.permutation(700)])


def _by_the_definition(gallery, query, top):
  similarities = np.float32([np.dot(np.float64(row), np.float64(query)) for row in gallery])
  return sorted(range(len(gallery)), key=lambda i: (-similarities[i], i))[:top]


@pytest.mark.parametrize("backend", search.BACKENDS)
@pytest.mark.parametrize("top", [1, 10, 60, 700, 1000])
def test_the_nearest_in_their_order(monkeypatch, backend, top):
  if backend == "faiss":
    pytest.importorskip("faiss")
  monkeypatch.setattr(search, "_BLOCK", 700 * 3)  # three queries at a time
  rng = np.random.default_rng(top)
  gallery = _crowd(rng)
  queries = np.concatenate(
    [
      gallery[rng.integers(700, size=5)],
      _unit(rng.normal(size=(2, 33))),
      np.zeros((1, 33), np.float32),
    ]
  )
  found = search.nearest(indexes.make(gallery), queries, top=top, backend=backend)
  for query, neighbours in zip(queries, found, strict=True):
    assert [one.place for one in neighbours] == _by_the_definition(gallery, query, top)
    assert [one.id for one in neighbours] == [f"photos/{one.place}.png" for one in neighbours]
    similarities = [one.similarity for one in neighbours]
    assert similarities == sorted(similarities, reverse=True)


def test_float32_products_alone_would_not_do():
  gallery = _crowd(np.random.default_rng(0))
  query = gallery[0]
  naive = np.argsort(-(gallery @ query), kind="stable")[:60]
  assert naive.tolist() != _by_the_definition(gallery, query, 60)


def test_what_does_not_fit_is_told(monkeypatch):
  gallery = indexes.make(np.eye(3))
  with pytest.raises(ValueError, match="the queries have width 2, the index has width 3"):
    search.nearest(gallery, np.eye(2, dtype=np.float32), top=1)
  with pytest.raises(ValueError, match="must be one of exact, faiss"):
    search.nearest(gallery, np.eye(3, dtype=np.float32), top=1, backend="annoy")
  monkeypatch.setitem(sys.modules, "faiss", None)
  with pytest.raises(ValueError, match=r"pip install faiss-cpu\); exact gives the same"):
    search.nearest(gallery, np.eye(3, dtype=np.float32), top=1, backend="faiss")


def test_f63_a_query_that_vanishes_is_named(tmp_path):
  paths = [str(tmp_path / f"{i}.png") for i in range(2)]

  def embed(source):
    return evaluation.Embedded(np.eye(2, dtype=np.float32)[:1], np.zeros(1, int), np.array([0]), 1)

  with pytest.raises(ValueError, match=r"1\.png: this query can no longer be read"):
    search.embed_queries(None, image_inputs.Named(tmp_path, paths), embed)


def test_f64_a_table_keeps_every_name_on_its_line():
  names = ["a\nb", "\x1b[31mred", "c\u2028d\u202e", "r\udcff", "gr\u00f6\u00dfe \u6587 \u200dx"]
  gallery = indexes.make(np.eye(5), class_names=names)._replace(
    ids=np.array([f"photos/{name}.png" for name in names])
  )
  found = indexes.found(gallery, [[1, 0.9, 0.8, 0.7, 0.6]], top=5)
  lines = search.table(found[0], classes=True).split("\n")
  shown = [r"a\nb", r"\x1b[31mred", r"c\u2028d\u202e", r"r\udcff", "gr\u00f6\u00dfe \u6587 \u200dx"]
  assert len(lines) == 6
  assert [line[12:].split("  ")[0].rstrip() for line in lines[1:]] == shown
  assert [line.split("photos/")[1] for line in lines[1:]] == [f"{name}.png" for name in shown]
  assert len({line.index("photos/") for line in lines[1:]}) == 1
  content = json.loads(search.to_json(gallery, ["q\n.png"], found))["queries"][0]
  assert content["query"] == "q\n.png"
  assert [one["class"] for one in content["neighbours"]] == names  # the unescaped ones


def test_a_broken_query_is_named(tmp_path):
  Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
  (tmp_path / "bad.png").write_bytes(b"x")
  search.find_queries([str(tmp_path / "good.png")])
  with pytest.raises(ValueError, match=r"bad\.png: this is not a readable image$"):
    search.find_queries([str(tmp_path / "good.png"), str(tmp_path / "bad.png")])


def test_table_and_json():
  gallery = indexes.make([[1, 0], [0.6, 0.8], [0, 1]], class_names=["ä", "", "long name"])
  found = indexes.found(gallery, [[1, 0], [0, 1]])
  assert search.table(found[1], classes=gallery.has_classes).splitlines() == [
    "similarity  class      image",
    "    1.0000  long name  photos/2.png",
    "    0.8000             photos/1.png",
  ]
  assert search.table(found[0], classes=False).splitlines()[:2] == [
    "similarity  image",
    "    1.0000  photos/0.png",
  ]
  text = search.to_json(gallery, ["q.png", "r\udcff.png"], found)
  assert text.isascii()
  content = json.loads(text)
  assert content["network"] == {"workdir": "runs/x", "step": 7, "digest": "d"}
  assert [one["query"] for one in content["queries"]] == ["q.png", "r\udcff.png"]
  first, second = content["queries"][0]["neighbours"]
  assert first == {"id": "photos/0.png", "class": "ä", "similarity": 1.0, "place": 0}
  assert (second["class"], second["similarity"]) == (None, float(np.float32(0.6)))


def test_the_query_itself_is_left_out(tmp_path, monkeypatch):
  """Checks a query that is excluded by its file, for any spelling of the path. An equal image in
  another file stays.
  """
  monkeypatch.chdir(tmp_path)
  (tmp_path / "photos").mkdir()
  for place in range(4):
    (tmp_path / "photos" / f"{place}.png").write_bytes(b"")
  (tmp_path / "link.png").symlink_to("photos/2.png")
  gallery = indexes.make(np.ones((4, 1)), root=str(tmp_path))
  found = search.nearest(gallery, np.ones((3, 1), np.float32), top=3)
  (tmp_path / "there").symlink_to("photos")
  paths = ["photos/../there/0.png", "link.png", "elsewhere.png"]  # a link is another image
  folder = search.folder_of(gallery, config_lib.default_config())
  rows, kept = search.without_query(paths, found, top=2, folder=folder)
  assert [[one.place for one in row] for row in rows] == [[1, 2], [0, 1], [0, 1]]
  assert kept == ["link.png", "elsewhere.png"]


def test_the_folder_of_ids(tmp_path, monkeypatch):
  """Follows a data.root that has moved, is a CSV file, or is relative."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "images.csv").write_text("path,label\n")
  config = config_lib.default_config()
  gallery = indexes.make(np.ones((1, 1)), root="gone", split="test")
  for root, want in (("images.csv", tmp_path), ("data", tmp_path / "data"), ("~/x", None)):
    config.data.root = root
    assert search.folder_of(gallery, config) == (want or pathlib.Path.home() / "x")
  named = indexes.make(np.ones((1, 1)), root=str(tmp_path / "photos"))
  assert search.folder_of(named, config) == tmp_path / "photos"
