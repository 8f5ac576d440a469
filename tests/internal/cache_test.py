"""Tests where user files are cached, including systems without a home folder."""

import logging
import os
import pathlib
import tempfile

import numpy as np
import pytest

from experiments import flags
from soprc_jax._internal import cache
from soprc_jax.data import glyphs
from soprc_jax.data import rendered as rendered_lib


def _no_home():
  raise RuntimeError("Could not determine home directory.")


@pytest.fixture
def temporary(tmp_path, monkeypatch, caplog):
  """Returns a new temporary folder. The session has no cache folder, and no warning has been given
  yet.
  """
  folder = tmp_path / "temporary"
  folder.mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(folder))
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setenv("HOME", str(tmp_path))
  cache._warn.cache_clear()
  cache._of_process.cache_clear()
  caplog.set_level(logging.WARNING)
  return folder


def _no_home_at_all(monkeypatch, tmp_path):
  monkeypatch.setattr(pathlib.Path, "home", _no_home)


def _missing_home(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path / "gone"))


def _relative_home(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", "here")


def _home_is_a_file(monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("HOME", str(tmp_path / "file"))


def _cache_is_a_file(monkeypatch, tmp_path):
  (tmp_path / ".cache").write_text("")


def _no_right_to_write(monkeypatch, tmp_path):
  monkeypatch.setattr(os, "access", lambda *_: False)


def _xdg_is_a_file(monkeypatch, tmp_path):
  (tmp_path / "xdg").write_text("")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


_WITHOUT = [
  _no_home_at_all,
  _missing_home,
  _relative_home,
  _home_is_a_file,
  _cache_is_a_file,
  _no_right_to_write,
  _xdg_is_a_file,
]


@pytest.mark.parametrize("without", _WITHOUT)
def test_f55_without_a_cache_folder_a_private_temporary_one_is_used(
  temporary, monkeypatch, tmp_path, caplog, without
):
  monkeypatch.chdir(temporary)
  without(monkeypatch, tmp_path)
  folder = temporary / f"soprc_jax-{os.geteuid()}"
  assert cache.file("one") == folder / "one"
  assert cache.file("two") == folder / "two"
  assert folder.stat().st_mode & 0o777 == 0o700
  assert [str(folder) in record.getMessage() for record in caplog.records] == [True]
  assert [path.name for path in temporary.iterdir()] == [folder.name]
  assert not (tmp_path / "gone").exists()


def test_f55_glyphs_and_compiled_functions_do_without_a_home(
  temporary, monkeypatch, tmp_path, caplog
):
  _no_home_at_all(monkeypatch, tmp_path)
  small = rendered_lib.Rendered(
    np.zeros((1, 2, 2), np.uint8), np.zeros(1, np.int64), np.array(["a"])
  )
  monkeypatch.setattr(glyphs, "render", lambda: small)
  monkeypatch.setattr(glyphs, "_renderer_key", lambda: "key")  # without matplotlib, which warns too
  assert len(glyphs.load()) == 1
  first = cache.private_folder("jax")
  assert cache.private_folder("jax") == first  # the next process uses it too
  names = sorted(path.suffix for path in (temporary / f"soprc_jax-{os.geteuid()}").iterdir())
  assert names == ["", ".npz"]
  assert len(caplog.records) == 1


@pytest.mark.parametrize("planted", ["open folder", "link", "file", "folder of another user"])
def test_f55_a_planted_folder_is_not_used(temporary, monkeypatch, tmp_path, planted):
  _no_home_at_all(monkeypatch, tmp_path)
  folder = temporary / f"soprc_jax-{os.geteuid()}"
  if planted == "link":
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
  elif planted == "file":
    folder.write_text("")
  else:
    folder.mkdir()
    folder.chmod(0o777 if planted == "open folder" else 0o700)
  if planted == "folder of another user":
    if os.geteuid():
      pytest.skip("only root can give a folder away")
    os.chown(folder, 54321, 54321)
  found = cache.file("compiled.key").parent
  assert found != folder
  assert found.parent == temporary
  assert found.stat().st_mode & 0o777 == 0o700
  assert cache.file("other").parent == found


def test_f55_a_file_in_a_cache_that_cannot_be_written_is_read_there(
  temporary, monkeypatch, tmp_path, caplog
):
  there = tmp_path / ".cache" / "soprc_jax"
  there.mkdir(parents=True)
  (there / "made").write_text("")
  monkeypatch.setattr(os, "access", lambda *_: False)
  assert cache.file("made") == there / "made"
  assert caplog.records == []
  assert cache.file("new").parent.parent == temporary


def test_f55_a_relative_xdg_folder_is_ignored(temporary, monkeypatch, tmp_path, caplog):
  monkeypatch.chdir(temporary)
  monkeypatch.setenv("XDG_CACHE_HOME", "cache")
  for name in ("a", "b"):
    assert cache.file(name) == tmp_path / ".cache" / "soprc_jax" / name
  assert list(temporary.iterdir()) == []
  assert [
    "XDG_CACHE_HOME=cache is ignored" in record.getMessage() for record in caplog.records
  ] == [True]


def test_f55_nowhere_to_write_is_a_warning(temporary, monkeypatch, tmp_path, caplog):
  _no_home_at_all(monkeypatch, tmp_path)

  def full():
    raise FileNotFoundError("No usable temporary directory found")

  monkeypatch.setattr(tempfile, "gettempdir", full)
  monkeypatch.setattr(glyphs, "render", lambda: "rendered")
  monkeypatch.setattr(glyphs, "_renderer_key", lambda: "key")
  assert glyphs.load() == "rendered"
  with pytest.raises(FileNotFoundError, match="No usable temporary directory"):
    cache.private_folder("jax")
  assert [record.getMessage().split("(")[0] for record in caplog.records] == [
    "Cannot cache the glyphs "
  ]


@pytest.mark.parametrize("planted", ["of another user", "open to others", "link"])
def test_f55_a_folder_for_code_that_is_not_private_is_not_used(
  temporary, monkeypatch, tmp_path, caplog, planted
):
  """Checks a shared home, where another user may have put compiled functions into the folder."""
  first = cache.private_folder("jax")
  assert first == tmp_path / ".cache" / "soprc_jax" / "jax"
  assert first.stat().st_mode & 0o777 == 0o700
  if planted == "of another user":
    monkeypatch.setattr(os, "geteuid", lambda: first.stat().st_uid + 1)
  elif planted == "open to others":
    first.chmod(0o777)
  else:
    first.rename(tmp_path / "theirs")
    first.symlink_to(tmp_path / "theirs")
  found = cache.private_folder("jax")
  assert found.parent == temporary
  assert ["is not private to this user" in record.getMessage() for record in caplog.records] == [
    True
  ]


@pytest.mark.parametrize("has_home", [True, False])
def test_f55_matplotlib_gets_a_folder_where_there_is_no_home(
  temporary, monkeypatch, tmp_path, has_home
):
  monkeypatch.setenv("MPLCONFIGDIR", "")
  monkeypatch.delenv("MPLCONFIGDIR")
  if not has_home:
    _no_home_at_all(monkeypatch, tmp_path)
  flags._prepare_matplotlib()
  wanted = None if has_home else str(temporary / f"soprc_jax-{os.geteuid()}" / "matplotlib")
  assert os.environ.get("MPLCONFIGDIR") == wanted
