"""Tests images that a user names by files, folders, patterns and lists."""

import os
import pathlib
import re
import shutil
import socket

import networks
import pytest

from soprc_jax.data import decoding
from soprc_jax.serving import image_inputs, search


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  return networks.with_images(tmp_path_factory)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("l.csv", "path,class\na.png,b\n", "the columns are"),
    ("l.csv", "path,label\na.png\n", r"l\.csv:2: expected 2 fields"),
    ("l.csv", "path\n", "lists no image"),
    ("l.csv", b"path\n\xff\n", "not UTF-8"),
    ("l.txt", "gone.png\n", r"l\.txt:1: there is no file 'gone\.png'"),
    ("l.txt", "l.txt\n\nl.txt\n", r"l\.txt:3: 'l\.txt' is listed twice, first in line 1"),
    ("l.txt", "\n", "lists no image"),
    ("l.dat", b"PK\x03\xff", "not a readable list"),
    ("l.npz", b"PK\x03\xff", "it is not an .npz file"),
  ],
)
def test_lists_that_are_none(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises((ValueError, OSError), match=message):
    image_inputs.find(str(tmp_path / name), flag="--images")


def test_folders_without_an_image(tmp_path):
  with pytest.raises(FileNotFoundError, match="has no image"):
    image_inputs.find(str(tmp_path), flag="--images")
  with pytest.raises(FileNotFoundError, match=r"--images=\S+gone: there is no such file or folder"):
    image_inputs.find(str(tmp_path / "gone"), flag="--images")


def test_f52_only_regular_files_of_a_folder_are_images(made, tmp_path, caplog):
  shutil.copytree(made[0] / "class_000", tmp_path / "photos")
  os.mkfifo(tmp_path / "photos" / "pipe.jpg")
  (tmp_path / "photos" / "linked.jpg").symlink_to("pipe.jpg")
  (tmp_path / "photos" / "zero.jpg").symlink_to("/dev/zero")
  (tmp_path / "photos" / "folder.jpg").mkdir()
  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(tmp_path / "photos" / "s.jpg"))
    found = image_inputs.find(str(tmp_path / "photos"), flag="--images")
  assert [pathlib.Path(path).name for path in found.paths] == ["0.png", "1.png"]
  assert ": 4 entries that are linked folders, not regular files" in caplog.text
  assert "linked.jpg" in caplog.text


@pytest.mark.parametrize(
  ("name", "why"),
  [("pipe.jpg", "a named pipe"), ("zero.jpg", "a device"), ("dead.jpg", "a link to nothing")],
)
def test_f52_what_is_named_must_be_a_regular_file(tmp_path, name, why):
  os.mkfifo(tmp_path / "pipe.jpg")
  (tmp_path / "zero.jpg").symlink_to("/dev/zero")
  (tmp_path / "dead.jpg").symlink_to("nowhere")
  with pytest.raises(FileNotFoundError, match=rf"{name}: this is not a regular file \({why}\)"):
    image_inputs.find(str(tmp_path / name), flag="--images", on_broken="skip")
  (tmp_path / "list.txt").write_text(name)
  with pytest.raises(
    FileNotFoundError, match=rf"list\.txt:1: there is no file '{name}' in .*{why}\)"
  ):
    image_inputs.find(str(tmp_path / "list.txt"), flag="--images")


def test_f61_the_home_folder_before_an_image_or_a_list(made, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  shutil.copytree(made[0] / "class_000", tmp_path / "photos")
  (tmp_path / "list.txt").write_text("photos/0.png\n")
  for given, wanted in (("~/photos/0.png", 1), ("~/photos", 2), ("~/list.txt", 1)):
    found = image_inputs.find(given, flag="--images")
    assert len(found) == wanted
    assert all(decoding.as_picture(found[i].image).size == (24, 30) for i in range(wanted))


def test_f61_a_name_that_only_looks_like_a_home_folder(made, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  shutil.copy(made[0] / "class_000" / "0.png", "~lock.png")
  assert decoding.as_picture(image_inputs.find("~lock.png", flag="--images")[0].image).size == (
    24,
    30,
  )
  with pytest.raises(
    FileNotFoundError, match=r"--images=~nobody here/x\.png: there is no such file"
  ):
    image_inputs.find("~nobody here/x.png", flag="--images")


@pytest.mark.parametrize(
  "name",
  [
    "a\u2028b.png",
    "a\x0cb.png",
    "a\x85b.png",
    "a\rb.png",
    " a.png",
    "a.png ",
    "\u00a0a.png",
    "a\x1b[31m.png",
  ],
)
def test_f64_names_in_a_list_are_taken_as_they_stand(made, tmp_path, name):
  shutil.copy(made[0] / "class_000" / "0.png", tmp_path / name)
  (tmp_path / "list.txt").write_bytes(f"\ufeff{name}\r\n\n".encode())
  (tmp_path / "list.csv").write_bytes(f'\ufeffpath\n"{name}"\n'.encode())
  for kind in ("txt", "csv"):
    found = image_inputs.find(str(tmp_path / f"list.{kind}"), flag="--images")
    assert found.paths == [name]
    assert decoding.as_picture(found[0].image).size == (24, 30)


def test_f64_the_file_that_exists_wins_over_its_name_without_blanks(tmp_path):
  for name in (" a.png", "a.png", "b.png"):
    (tmp_path / name).write_bytes(b"")
  (tmp_path / "list.txt").write_text(" a.png\na.png\n\tb.png \n")
  assert image_inputs.find(str(tmp_path / "list.txt"), flag="--images").paths == [
    " a.png",
    "a.png",
    "b.png",
  ]


@pytest.mark.parametrize(
  "other", ["./a.png", "sub/../a.png", "linked/a.png", "{}/a.png", ".//a.png"]
)
@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_f65_one_image_by_two_spellings(tmp_path, kind, other):
  (tmp_path / "sub").mkdir()
  (tmp_path / "linked").symlink_to(tmp_path)
  (tmp_path / "a.png").write_bytes(b"")
  other = other.format(tmp_path)
  head = ["path"] if kind == "csv" else []
  (tmp_path / f"list.{kind}").write_text("\n".join([*head, "a.png", other]))
  line = len(head) + 2
  message = (
    rf"{kind}:{line}: '{re.escape(other)}' is listed twice, first in line {line - 1}, "
    r"also as 'a\.png'"
  )
  with pytest.raises(ValueError, match=message):
    image_inputs.find(str(tmp_path / f"list.{kind}"), flag="--images")


def test_f65_a_link_is_another_image(tmp_path):
  (tmp_path / "a.png").write_bytes(b"")
  (tmp_path / "b.png").symlink_to("a.png")
  (tmp_path / "list.txt").write_text("a.png\nb.png")
  assert len(image_inputs.find(str(tmp_path / "list.txt"), flag="--images")) == 2


def test_f43_labels_of_a_list_of_images(tmp_path, caplog):
  labels = ["cat", " cat", "caf\u00e9", "cafe\u0301\u00a0", " "]
  for i in range(len(labels)):
    (tmp_path / f"{i}.png").write_bytes(b"")
  (tmp_path / "list.csv").write_text(
    "path, label\n" + "\n".join(f"{i}.png,{one}" for i, one in enumerate(labels))
  )
  found = image_inputs.find(str(tmp_path / "list.csv"), flag="--images")
  assert [found[i].class_name for i in range(len(found))] == [
    "cat",
    "cat",
    "caf\u00e9",
    "caf\u00e9",
    "",
  ]
  assert "4 class names differ only in" in caplog.text


def test_queries_are_files_folders_and_patterns(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "d" / "e").mkdir(parents=True)
  for name in ("a[1].png", "b.jpg", "c.txt", "d/x.png", "d/e/y.webp"):
    (tmp_path / name).write_bytes(b"")
  assert image_inputs.queries(["a[1].png"], flag="--query") == [
    "a[1].png"
  ]  # an existing file of that name is not a pattern
  assert image_inputs.queries(["d", "*.*", "d/x.png"], flag="--query") == [
    "d/e/y.webp",
    "d/x.png",
    "a[1].png",
    "b.jpg",
  ]
  assert image_inputs.queries(["**/*.png"], flag="--query") == ["a[1].png", "d/x.png"]
  for given, message in (
    ("", "--query= is empty: give an image file"),
    ("gone.png", r"--query=gone\.png: there is no such file"),
    ("*.gif", r"--query=\*\.gif: no image matches the pattern"),
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
    assert f": {2 if given == 'd' else 3} entries that are linked folders" in caplog.text
  for name, why in (("pipe", "a named pipe"), ("zero", "a device")):
    with pytest.raises(
      FileNotFoundError, match=rf"--query=d/{name}\.jpg: this is not a regular file \({why}\)"
    ):
      image_inputs.queries([f"d/{name}.jpg"], flag="--query")


def test_f63_a_query_that_leads_nowhere_is_named(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "dead.jpg").symlink_to("nowhere")
  (tmp_path / "loop.jpg").symlink_to("loop.jpg")
  for name, why in (("dead.jpg", "a link to nothing"), ("loop.jpg", "a circular link")):
    with pytest.raises(
      FileNotFoundError, match=rf"--query={name}: this is not a regular file \({why}\)"
    ):
      image_inputs.queries([name], flag="--query")
  found = image_inputs.queries(["."], flag="--query")
  assert found == ["./dead.jpg", "./loop.jpg"]
  with pytest.raises(
    ValueError, match=r"dead\.jpg: this file cannot be read \(a link to nothing\)"
  ):
    search.find_queries(["."])


def test_f61_queries_below_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "a.png").write_bytes(b"")
  for given in ("~/a.png", "~/*.png", "~"):
    assert image_inputs.queries([given], flag="--query") == [str(tmp_path / "a.png")]
  with pytest.raises(
    FileNotFoundError, match=r"--query=~no_such_user/a\.png: there is no such file"
  ):
    image_inputs.queries(["~no_such_user/a.png"], flag="--query")


def test_f65_a_query_that_is_given_twice_is_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "d" / "e").mkdir(parents=True)
  (tmp_path / "d" / "a.png").write_bytes(b"")
  (tmp_path / "d" / "b.png").symlink_to("a.png")  # another name, so another image
  given = [
    "d",
    "./d/",
    "d/e/../a.png",
    str(tmp_path / "d" / "a.png"),
    "d/*.png",
    str(tmp_path / "d"),
  ]
  assert image_inputs.queries(given, flag="--query") == ["d/a.png", "d/b.png"]
