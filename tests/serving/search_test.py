"""Search: exactly the nearest, in a fixed order, by numpy as by faiss; what is printed and drawn."""

import json
import os
import sys

import networks
import numpy as np
from PIL import Image
import pytest

from soprc_jax.serving import image_inputs, index, network, search, sheet
from soprc_jax.training import evaluation


def _index(embeddings, *, class_names=None, **values):
  count = len(embeddings)
  names = np.array([f"photos/{i}.png" for i in range(count)])
  fields = {"ids": names, "class_names": np.array(class_names or [""] * count), "labels": np.empty(0, np.int64)}
  fields |= {
    "positions": np.arange(count),
    "broken_ids": np.empty(0, np.str_),
    "split": "",
    "root": "",
    "workdir": "runs/x",
  }
  fields |= {"step": 7, "digest": "d", "model": "{}", "image_size": 16, "resize": 16}
  return index.Index(np.asarray(embeddings, np.float32), **(fields | values))


def _unit(vectors):
  return np.float32(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _crowd(rng, width=33):
  """Vectors of which many are equal, and many so near to each other that float32 products cannot tell them apart."""
  base = rng.normal(size=(12, width))
  near = base[rng.integers(12, size=400)] + rng.normal(size=(400, width)) * 10.0 ** rng.integers(-9, -3, size=(400, 1))
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
    [gallery[rng.integers(700, size=5)], _unit(rng.normal(size=(2, 33))), np.zeros((1, 33), np.float32)]
  )
  found = search.nearest(_index(gallery), queries, top=top, backend=backend)
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
  gallery = _index(np.eye(3))
  with pytest.raises(ValueError, match="the queries have 2 numbers, the index 3"):
    search.nearest(gallery, np.eye(2, dtype=np.float32), top=1)
  with pytest.raises(ValueError, match="must be one of exact, faiss"):
    search.nearest(gallery, np.eye(3, dtype=np.float32), top=1, backend="annoy")
  monkeypatch.setitem(sys.modules, "faiss", None)
  with pytest.raises(ValueError, match=r"pip install faiss-cpu\); exact gives the same"):
    search.nearest(gallery, np.eye(3, dtype=np.float32), top=1, backend="faiss")


def test_an_index_of_another_network_is_refused(tmp_path):
  config = networks.config()
  here = network.Network(config, tmp_path, {}, 9, "d")
  good = _index(np.eye(3), model=here.architecture)
  index.check_network(good, here, path=tmp_path)
  with pytest.raises(
    ValueError, match=r"step 7 of runs/x, here it is another network, that of step 9 of \S+: similarities"
  ):
    index.check_network(good._replace(digest="e"), here, path=tmp_path)
  with pytest.raises(ValueError, match=r"with eval\.image_size 32, here it is 16"):
    index.check_network(good._replace(image_size=32), here, path=tmp_path)
  with pytest.raises(ValueError, match=r"with eval\.resize 20, here it is 16"):
    index.check_network(good._replace(resize=20), here, path=tmp_path)
  with pytest.raises(ValueError, match="with model "):
    index.check_network(good._replace(model="{}"), here, path=tmp_path)


def test_queries_are_files_folders_and_patterns(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "d" / "e").mkdir(parents=True)
  for name in ("a[1].png", "b.jpg", "c.txt", "d/x.png", "d/e/y.webp"):
    (tmp_path / name).write_bytes(b"")
  assert image_inputs.queries(["a[1].png"], flag="--query") == ["a[1].png"]  # a file of that name is no pattern
  assert image_inputs.queries(["d", "*.*", "d/x.png"], flag="--query") == ["d/e/y.webp", "d/x.png", "a[1].png", "b.jpg"]
  assert image_inputs.queries(["**/*.png"], flag="--query") == ["a[1].png", "d/x.png"]
  for given, message in (
    ("", "--query=: an image file is wanted"),
    ("gone.png", r"--query=gone\.png: there is no such file"),
    ("*.gif", r"--query=\*\.gif: no image has such a name"),
  ):
    with pytest.raises(FileNotFoundError, match=message):
      image_inputs.queries(["b.jpg", given], flag="--query")


def test_f52_only_regular_files_are_queries(tmp_path, monkeypatch, caplog):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "d").mkdir()
  (tmp_path / "d" / "a.jpg").write_bytes(b"")
  os.mkfifo("d/pipe.jpg")
  (tmp_path / "d" / "folder.jpg").mkdir()
  (tmp_path / "d" / "zero.jpg").symlink_to("/dev/zero")
  for given in ("d/*.jpg", "d", "**/*.jpg"):
    caplog.clear()
    assert image_inputs.queries([given], flag="--query") == ["d/a.jpg"]
    assert f"no regular files or linked folders: {2 if given == 'd' else 3}, e.g." in caplog.text
  for name, why in (("pipe", "a named pipe"), ("zero", "a device")):
    with pytest.raises(FileNotFoundError, match=rf"--query=d/{name}\.jpg: this is no regular file \({why}\)"):
      image_inputs.queries([f"d/{name}.jpg"], flag="--query")


def test_f63_a_query_that_leads_nowhere_is_named(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "dead.jpg").symlink_to("nowhere")
  (tmp_path / "loop.jpg").symlink_to("loop.jpg")
  for name, why in (("dead.jpg", "a link to nothing"), ("loop.jpg", "a circular link")):
    with pytest.raises(FileNotFoundError, match=rf"--query={name}: this is no regular file \({why}\)"):
      image_inputs.queries([name], flag="--query")
  found = image_inputs.queries(["."], flag="--query")
  assert found == ["./dead.jpg", "./loop.jpg"]
  with pytest.raises(ValueError, match=r"dead\.jpg: this file cannot be read \(a link to nothing\)"):
    search.check_queries(found)


def test_f63_a_query_that_vanishes_is_named(tmp_path):
  paths = [str(tmp_path / f"{i}.png") for i in range(2)]

  def embed(source):
    return evaluation.Embedded(np.eye(2, dtype=np.float32)[:1], np.zeros(1, int), np.array([0]), 1)

  with pytest.raises(ValueError, match=r"1\.png: this query cannot be read any more"):
    search.embed_queries(None, paths, embed)


def test_f61_queries_below_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "a.png").write_bytes(b"")
  for given in ("~/a.png", "~/*.png", "~"):
    assert image_inputs.queries([given], flag="--query") == [str(tmp_path / "a.png")]
  with pytest.raises(FileNotFoundError, match=r"--query=~no_such_user/a\.png: there is no such file"):
    image_inputs.queries(["~no_such_user/a.png"], flag="--query")


def test_f65_a_query_that_is_given_twice_is_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "d" / "e").mkdir(parents=True)
  (tmp_path / "d" / "a.png").write_bytes(b"")
  (tmp_path / "d" / "b.png").symlink_to("a.png")  # another name, and so another image
  given = ["d", "./d/", "d/e/../a.png", str(tmp_path / "d" / "a.png"), "d/*.png", str(tmp_path / "d")]
  assert image_inputs.queries(given, flag="--query") == ["d/a.png", "d/b.png"]


def test_f64_a_table_keeps_every_name_on_its_line():
  names = ["a\nb", "\x1b[31mred", "c\u2028d\u202e", "r\udcff", "gr\u00f6\u00dfe \u6587 \u200dx"]
  gallery = _index(np.eye(5), class_names=names)._replace(ids=np.array([f"photos/{name}.png" for name in names]))
  found = _found(gallery, [[1, 0.9, 0.8, 0.7, 0.6]], top=5)
  lines = search.table(found[0], classes=True).split("\n")
  shown = [r"a\nb", r"\x1b[31mred", r"c\u2028d\u202e", r"r\udcff", "gr\u00f6\u00dfe \u6587 \u200dx"]
  assert len(lines) == 6
  assert [line[12:].split("  ")[0].rstrip() for line in lines[1:]] == shown
  assert [line.split("photos/")[1] for line in lines[1:]] == [f"{name}.png" for name in shown]
  assert len({line.index("photos/") for line in lines[1:]}) == 1
  content = json.loads(search.to_json(gallery, ["q\n.png"], found))["queries"][0]
  assert content["query"] == "q\n.png"
  assert [one["class"] for one in content["neighbours"]] == names  # the real ones


def test_a_broken_query_is_named(tmp_path):
  Image.new("RGB", (9, 9)).save(tmp_path / "good.png")
  (tmp_path / "bad.png").write_bytes(b"x")
  search.check_queries([str(tmp_path / "good.png")])
  with pytest.raises(ValueError, match=r"bad\.png: this is no image that can be read$"):
    search.check_queries([str(tmp_path / "good.png"), str(tmp_path / "bad.png")])


def _found(gallery, queries, top=2):
  return search.nearest(gallery, np.asarray(queries, np.float32), top=top)


def test_table_and_json():
  gallery = _index([[1, 0], [0.6, 0.8], [0, 1]], class_names=["ä", "", "long name"])
  found = _found(gallery, [[1, 0], [0, 1]])
  assert search.table(found[1], classes=gallery.has_classes).splitlines() == [
    "similarity  class      image",
    "    1.0000  long name  photos/2.png",
    "    0.8000             photos/1.png",
  ]
  assert search.table(found[0], classes=False).splitlines()[:2] == ["similarity  image", "    1.0000  photos/0.png"]
  text = search.to_json(gallery, ["q.png", "r\udcff.png"], found)
  assert text.isascii()
  content = json.loads(text)
  assert content["network"] == {"workdir": "runs/x", "step": 7, "digest": "d"}
  assert [one["query"] for one in content["queries"]] == ["q.png", "r\udcff.png"]
  first, second = content["queries"][0]["neighbours"]
  assert first == {"id": "photos/0.png", "class": "ä", "similarity": 1.0, "place": 0}
  assert (second["class"], second["similarity"]) == (None, float(np.float32(0.6)))


def test_the_query_itself_is_left_out(tmp_path, monkeypatch):
  """By its file, however it is spelled; an equal image in another file stays."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "photos").mkdir()
  for place in range(4):
    (tmp_path / "photos" / f"{place}.png").write_bytes(b"")
  (tmp_path / "link.png").symlink_to("photos/2.png")
  gallery = _index(np.ones((4, 1)), root=str(tmp_path))
  found = search.nearest(gallery, np.ones((3, 1), np.float32), top=3)
  paths = ["photos/../photos/0.png", "link.png", "elsewhere.png"]
  rows = search.without_query(gallery, paths, found, top=2)
  assert [[one.place for one in row] for row in rows] == [[1, 2], [0, 1], [0, 1]]


def test_names_on_a_contact_sheet_have_their_folder():
  assert sheet._last_parts("photos/cat/0.png") == "cat/0.png"
  assert sheet._last_parts("0.png") == "0.png"


def test_contact_sheet(tmp_path):
  (tmp_path / "photos").mkdir()
  colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
  for i, (size, colour) in enumerate(zip([(40, 40), (80, 20), (20, 80)], colours)):
    Image.new("RGB", size, colour).save(tmp_path / "photos" / f"{i}.png")
  gallery = _index([[1, 0], [0.6, 0.8], [0, 1]], class_names=["größe", "", "z" * 80], root=str(tmp_path))
  paths = [str(tmp_path / "photos" / f"{i}.png") for i in (2, 0)]
  found = _found(gallery, [[0, 1], [1, 0]], top=3)
  drawn = sheet.draw(gallery, paths, found, sheet.loader(gallery, None))
  tile, gap = sheet._TILE, sheet._GAP
  for row, order in enumerate(([2, 2, 1, 0], [0, 0, 1, 2])):  # the query, then the nearest
    for column, one in enumerate(order):
      left = gap if column == 0 else 4 * gap + tile + (column - 1) * (tile + gap)
      top = gap + row * sheet._ROW
      assert drawn.getpixel((left + tile // 2, top + tile // 2)) == colours[one]
      # Their own shape: the wide and the tall one have paper at their edges.
      assert drawn.getpixel((left + 3, top + tile // 2)) == (colours[one] if one < 2 else (255, 255, 255))
      assert drawn.getpixel((left + tile // 2, top + 3)) == (colours[one] if one != 1 else (255, 255, 255))
      label = np.asarray(drawn.crop((left, top + tile + 3, left + tile, top + tile + 3 * sheet._LINE + 3)))
      assert 0.01 < np.mean(label < 128) < 0.3  # there is text, and it is dark on light
      beside = np.asarray(drawn.crop((left + tile + 1, top + tile + 3, left + tile + gap - 2, top + tile + 60)))
      assert column == 0 or beside.min() == 255  # and it stays below its picture
  with pytest.raises(ValueError, match=r"must end in \.png"):
    sheet.write(tmp_path / "sheet.jpg", drawn)
  sheet.write(tmp_path / "sheet.png", drawn)
  with pytest.raises(FileExistsError, match="--contact_sheet="):
    sheet.write(tmp_path / "sheet.png", drawn)
  with pytest.raises(ValueError, match=r"100 queries and --top=1000 would have .* pixels"):
    sheet.check_size(100, 1000)


def test_pictures_that_are_gone_or_broken_are_told(tmp_path):
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "1.png").write_bytes(b"x")
  load = sheet.loader(_index(np.eye(2), root=str(tmp_path)), None)
  assert [load(0), load(1)] == ["not found", "broken image"]


def test_f52_a_pipe_in_the_place_of_an_image_is_not_drawn(tmp_path):
  (tmp_path / "photos").mkdir()
  os.mkfifo(tmp_path / "photos" / "0.png")
  assert sheet.loader(_index(np.eye(1), root=str(tmp_path)), None)(0) == "broken image"


def test_names_are_drawn_whole_or_written_out(monkeypatch):
  assert sheet._drawable("größe Жук") == "größe Жук"
  assert sheet._drawable("a\nb\udcff") == r"a\x0ab\xdcff"
  monkeypatch.setattr(sheet.font_manager, "findSystemFonts", lambda: [])
  sheet._font_path.cache_clear()
  assert sheet._drawable("a文") == r"a\u6587"
  sheet._font_path.cache_clear()
  shown = sheet._fitted("a" * 50 + "z" * 50, 100)
  assert shown[0] == "a"
  assert shown[-1] == "z"
  assert "…" in shown
  assert sheet._font(shown).getlength(shown) <= 100
