"""Tests the promises of SECURITY.md: files are data and never code.

Paths stay where they belong, and nothing uses the network unless asked.
"""

import ast
import json
import logging
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import jax
import numpy as np
from PIL import EpsImagePlugin
import pytest
import runs
import trees

from experiments import flags, malloc
from soprc_jax._internal import stored
from soprc_jax.data import decoding, glyphs, image_folder, list_files, tfds_source
from soprc_jax.data import rendered as rendered_lib
from soprc_jax.models import pretrained
from soprc_jax.serving import network
from soprc_jax.training import build, checkpoints, checksums, replay, workdir
from soprc_jax.training import config as config_lib

try:
  import torch
except ImportError:
  torch = None
_needs_torch = pytest.mark.skipif(torch is None, reason="torch reads these files")


class _Evil:
  """Creates a file when it is unpickled."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return open, (self.path, "w")


def _evil(path):
  """Writes an array that is stored as a pickle, which numpy would run on loading."""
  return np.array([_Evil(path)], object)


# Allowed sources of code: the user's own config file or loss, and parts of this package.
_IMPORTS = {
  "soprc_jax/training/objectives.py": "loss.name=package.module:function",
  "soprc_jax/models/adapter.py": "model.name=package.module:function",
  "soprc_jax/data/tabular.py": "scikit-learn, where it is installed",
  "experiments/benchmark/__main__.py": "a benchmark of this package, by its name",
  "experiments/flags.py": "the file of --config",
  "experiments/train_binary.py": "experiments.binary, by another name",
  "soprc_jax/cli.py": "the program of that name in its own folder, on the command line",
}
# Modules that run what they read, or use the network. tarfile may list an archive: unpacking one is
# found by its calls.
_NEVER = {
  *("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"),
  *("ftplib", "http", "requests", "smtplib", "telnetlib", "urllib", "webbrowser"),
}


def _offences(source, name):
  """Returns code of a module that could run file content, unpack an archive or use the network."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import | ast.ImportFrom):
      modules = (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [node.module or ""]
      )
      found += [module for module in modules if module.split(".")[0] in _NEVER]
    elif isinstance(node, ast.Call):
      call = ast.unparse(node.func)
      options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
      found += [call] * (
        call
        in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp")
      )
      found += [call] * (call.endswith((".extractall", ".extract", ".unpack_archive")))
      found += [call] * (
        call in ("np.load", "numpy.load") and options.get("allow_pickle") != "False"
      )
      found += [call] * (call == "torch.load" and options.get("weights_only") != "True")
      found += [f"{call}(shell=...)"] * ("shell" in options)
      found += [call] * (call.startswith("socket.") and call != "socket.gethostname")
      found += [call] * (
        call.startswith(("importlib.import_module", "runpy.")) and name not in _IMPORTS
      )
  return found


@pytest.mark.parametrize(
  "source",
  [
    "import pickle",
    "from urllib import request",
    "import os.path, requests.adapters",
    "eval(text)",
    "os.system(command)",
    "np.load(path)",
    "np.load(path, allow_pickle=True)",
    "torch.load(path)",
    "subprocess.run(command, shell=True)",
    "importlib.import_module(config.name)",
    "archive.extractall(folder)",
    "tarfile.open(path).extract(name)",
    "tempfile.mktemp()",
    "socket.create_connection(address)",
  ],
)
def test_offences_are_found(source):
  assert _offences(source, "soprc_jax/any.py")


def test_no_module_could_run_what_a_file_holds():
  paths = [
    path
    for folder in ("soprc_jax", "experiments", "configs")
    for path in sorted((runs.ROOT / folder).rglob("*.py"))
  ]
  names = {path: path.relative_to(runs.ROOT).as_posix() for path in paths}
  assert len(paths) > 50
  assert {
    names[path]: found for path in paths if (found := _offences(path.read_text(), names[path]))
  } == {}


class TestArrays:
  """Tests arrays of objects, which are pickles."""

  def test_glyph_cache(self, tmp_path, monkeypatch, caplog):
    small = rendered_lib.Rendered(
      np.zeros((2, 32, 32), np.uint8), np.array([65, 66]), np.array(["a", "b"])
    )
    monkeypatch.setattr(glyphs, "render", lambda: small)
    glyphs.load(tmp_path)
    (path,) = tmp_path.iterdir()
    np.savez(
      path,
      images=small.images,
      labels=small.labels,
      ids=_evil(tmp_path / "executed"),
      digest=small.digest(),
    )
    with caplog.at_level(logging.WARNING):
      assert glyphs.load(tmp_path).digest() == small.digest()
    assert "is corrupt (Object arrays cannot be loaded when allow_pickle=False)" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

  def test_labels_beside_the_records_of_tfds(self, tmp_path, caplog):
    path = tmp_path / ".soprc_jax-sop-class_id-1.npy"
    for content in (_evil(tmp_path / "executed"), np.array(7)):
      np.save(path, content)
      with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(
          tfds_source._column([{"class_id": 7}], "class_id", tmp_path, "sop"), [7]
        )
      assert f"{path} is corrupt" in caplog.text
      np.testing.assert_array_equal(np.load(path), [7])
      caplog.clear()
    assert not (tmp_path / "executed").exists()

  def test_files_of_runs(self, tmp_path):
    np.savez(tmp_path / "run.npz", val=_evil(tmp_path / "executed"))
    with pytest.raises(ValueError, match=r"run\.npz is corrupt \(Object arrays cannot be loaded"):
      stored.read_arrays(tmp_path / "run.npz", ["val"])
    assert not (tmp_path / "executed").exists()

  @pytest.mark.parametrize("shape", ["(1099511627776,)", "(9,)"])
  def test_a_header_that_promises_more_than_there_is(self, tmp_path, caplog, shape):
    path = tmp_path / ".soprc_jax-sop-class_id-1.npy"
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    with caplog.at_level(logging.WARNING):
      np.testing.assert_array_equal(
        tfds_source._column([{"class_id": 7}], "class_id", tmp_path, "sop"), [7]
      )
    assert f"{path} is corrupt" in caplog.text


class TestWeights:
  """Tests files of weights; a pickle under the name of one is tested in pretrained_test."""

  @_needs_torch
  @pytest.mark.parametrize("version", ["2.5.1", "2.9.1+cpu", "1.13.0"])
  def test_a_torch_that_could_run_them_reads_none(self, tmp_path, monkeypatch, version):
    torch.save({"conv1.weight": torch.zeros(2)}, tmp_path / "w.pth")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
      ValueError,
      match=rf"w\.pth: torch {re.escape(version)} may execute code in .*; install torch >= 2\.10",
    ):
      pretrained.read(str(tmp_path / "w.pth"))
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git1")
    assert list(pretrained.read(str(tmp_path / "w.pth"))) == ["conv1.weight"]

  @_needs_torch
  def test_tensors_without_plain_data_are_named(self, tmp_path):
    torch.save({"fc.bias": torch.nn.Parameter(torch.ones(2))}, tmp_path / "parameter.pth")
    np.testing.assert_array_equal(
      pretrained.read(str(tmp_path / "parameter.pth"))["fc.bias"], [1, 1]
    )
    for name, tensor in {
      "sparse": torch.eye(2).to_sparse(),
      "meta": torch.zeros(2, device="meta"),
    }.items():
      torch.save({"fc.weight": tensor}, tmp_path / f"{name}.pth")
      with pytest.raises(ValueError, match=rf"{name}\.pth: 'fc\.weight' is not a plain tensor"):
        pretrained.read(str(tmp_path / f"{name}.pth"))

  @pytest.mark.parametrize(
    ("header", "length", "message"),
    [
      ({}, 2**64 - 1, "not a safetensors file"),  # -1 as a signed number
      ({}, 2**63, "not a safetensors file"),
      ({}, 90_000_000, "not a safetensors file"),
      ({"a": ("F32", [4], [0, 2**50])}, None, "not a safetensors file"),
      ({"a": ("F32", [2**62, 4], [0, 16])}, None, "not a safetensors file"),
      ({"a": ("F8_E4M3", [16], [0, 16])}, None, "weights of an unsupported type"),
      (
        {"x": ("F32", [2], [0, 8]), "module.x": ("F32", [2], [8, 16])},
        None,
        "has two weights for 'x'",
      ),
    ],
  )
  def test_broken_headers(self, tmp_path, header, length, message):
    entries = {
      name: dict(zip(("dtype", "shape", "data_offsets"), entry)) for name, entry in header.items()
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(16))
    with pytest.raises(ValueError, match=message) as error:
      pretrained.read(str(path))
    assert str(path) in str(error.value)

  @pytest.mark.parametrize("names", [("a.b", "a.b.c"), ("a.b.c", "a.b")])
  def test_a_weight_in_a_weight(self, names):
    with pytest.raises(ValueError, match="is the name of both a weight and a module"):
      pretrained.to_flax({name: np.zeros(1) for name in names})

  def test_a_name_on_the_hub_stays_in_its_repository(self):
    with pytest.raises(ValueError, match="a name like hf://USER/REPOSITORY"):
      pretrained.read("hf://user/repository/../../other/file")


class TestImages:
  def test_postscript_is_not_given_to_ghostscript(self, tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(
      decoding.BrokenImageError, match=r"photo\.jpg: this is not a readable image"
    ):
      decoding.pixels(decoding.as_picture(decoding.Encoded(content, "photo.jpg")))
    assert not (tmp_path / "executed").exists()

  @pytest.mark.parametrize("kind", ["pipe", "link"])
  def test_what_is_no_file_is_told_before_it_is_read(self, tmp_path, kind):
    trees.folder(tmp_path, 2)
    path = tmp_path / "class_000" / "x.jpg"
    if kind == "pipe":
      os.mkfifo(path)  # reading it would wait forever
    else:
      path.symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(ValueError, match=r"x\.jpg is not a readable file"):
      image_folder.load(str(tmp_path))


_OUTSIDE = [
  "/etc/Aves/2820/x.jpg",
  "a/../../../x.jpg",
  "../a/b/x.jpg",
  "a\\..\\..\\b/c/x.jpg",
  "a\0/b/c/x.jpg",
]


class TestPathsInLists:
  @pytest.mark.parametrize("path", _OUTSIDE)
  @pytest.mark.parametrize("source", ["csv", "sop", "inaturalist"])
  def test_they_stay_below_the_root(self, tmp_path, source, path):
    if source == "csv":
      trees.csv(tmp_path, 2)
      changed, line = tmp_path / "images.csv", f"{path},thing 0"
    elif source == "sop":
      trees.sop(tmp_path, 2, 2)
      changed, line = tmp_path / "Ebay_train.txt", f"99 1 1 {path}"
    else:
      trees.inaturalist(tmp_path, 2, 2)
      changed, line = tmp_path / list_files.BENCHMARKS[source].lists["train"], path
    changed.write_text(changed.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"must be a path relative to .* and inside it") as error:
      list_files.load_csv(str(changed)) if source == "csv" else list_files.load(
        source, str(tmp_path)
      )
    assert changed.name in str(error.value)
    assert repr(path) in str(error.value)

  def test_numbers_are_no_paths(self, tmp_path):
    trees.vehicle_id(tmp_path, 8)
    path = tmp_path / list_files.BENCHMARKS["vehicle_id"].lists["train"]
    path.write_text(path.read_text() + "../1 5\n")
    with pytest.raises(ValueError, match="expected two numbers 'image vehicle'"):
      list_files.load("vehicle_id", str(tmp_path))

  def test_a_tilde_is_not_the_home_folder(self, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trees.write(tmp_path / "home" / "x.png", 0, 0)
    path = trees.csv(tmp_path / "data", 2)
    path.write_text(path.read_text() + "~/x.png,thing 0\n")
    with pytest.raises(FileNotFoundError, match=r"there is no file ~/x\.png in"):
      list_files.load_csv(str(path))

  def test_a_link_that_the_user_made_is_followed(self, tmp_path):
    trees.csv(tmp_path / "data", 2)
    (tmp_path / "data" / "class_000").rename(tmp_path / "disk")
    (tmp_path / "data" / "class_000").symlink_to(tmp_path / "disk")
    assert list_files.load_csv(str(tmp_path / "data" / "images.csv"))["all"][0].image.data


class TestFoldersOfOthers:
  """Tests that the config.json of a run is compared and never run."""

  @pytest.fixture
  def foreign(self, tmp_path, monkeypatch):
    """Returns a run whose config names a loss in a module that could be imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "soprc_jax_evil.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "run"
    folder.mkdir()
    config = json.loads(config_lib.to_json(runs.tiny_config()))
    config["loss"]["name"] = "soprc_jax_evil:loss"
    (folder / workdir.CONFIG).write_text(json.dumps(config))
    return folder

  def test_nothing_is_imported(self, foreign):
    with pytest.raises(ValueError, match=r"loss\.name: 'soprc_jax_evil:loss' there, 'soprc' here"):
      workdir.check(foreign, runs.tiny_config())
    build.check_unseen(runs.tiny_config(**{"model.init_from": str(foreign)}))
    assert "soprc_jax_evil" not in sys.modules

  def test_nothing_is_imported_where_the_folder_alone_is_asked(self, foreign):
    assert network.stored_config(foreign).loss.name == "soprc_jax_evil:loss"
    kept = foreign / replay.FOLDER / "3"
    kept.mkdir(parents=True)
    config = json.loads((foreign / workdir.CONFIG).read_text())
    report = {"step": 3, "arrays": ["ids"], "class_counts": [2], "config": config}
    (kept / replay.REPORT).write_text(json.dumps(report))
    with pytest.raises(ValueError, match="a folder alone may not run it"):
      replay.load(foreign)
    assert "soprc_jax_evil" not in sys.modules

  def test_nothing_is_written_through_a_link(self, foreign, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (foreign / "report.html").symlink_to(mine)
    workdir.write_atomically(foreign / "report.html", "theirs")
    assert (foreign / "report.html").read_text() == "theirs"
    assert not (foreign / "report.html").is_symlink()
    assert mine.read_text() == "mine"
    (foreign / "tensorboard").mkdir()
    (foreign / "tensorboard" / "events").symlink_to(mine)
    with pytest.raises(
      ValueError, match="events is a link, and a run does not write through links"
    ):
      workdir.check(foreign, runs.tiny_config())

  @pytest.mark.parametrize("content", ["[]", "3", '"x"', "{}", '{"data": 3}', '{"data": {}}', "["])
  def test_a_config_that_is_none_is_told(self, foreign, content):
    (foreign / workdir.CONFIG).write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
      build.check_unseen(runs.tiny_config(**{"model.init_from": str(foreign)}))
    with pytest.raises(ValueError, match=r"config\.json|holds a run of another config"):
      workdir.check(foreign, runs.tiny_config())


class TestCheckpoints:
  def test_a_link_in_one_is_not_followed(self, tmp_path):
    """Checks a link in a checkpoint. The array format would read the bytes of any file that it
    names into the weights.
    """
    like = {"params": {"w": np.arange(4.0, dtype=np.float32)}, "batch_stats": {}}
    checkpoints.save_variables(tmp_path, like)
    np.testing.assert_array_equal(
      checkpoints.load_network(str(tmp_path), like)["params"]["w"], like["params"]["w"]
    )
    (chunk,) = (tmp_path / checkpoints.VARIABLES / "d").iterdir()
    chunk.rename(tmp_path / "secret")
    chunk.symlink_to(tmp_path / "secret")
    with pytest.raises(checkpoints.DamagedError, match=rf"d/{chunk.name} is a link"):
      checkpoints.load_network(str(tmp_path), like)
    checksums.write(tmp_path / checkpoints.VARIABLES)  # as from someone who also writes digests
    with pytest.raises(checkpoints.DamagedError, match="is a link"):
      checkpoints.load_network(str(tmp_path), like)


class TestCompiled:
  """Tests jax's cache of compiled functions, whose content jax runs."""

  @pytest.fixture
  def used(self, tmp_path, monkeypatch):
    """Returns a function from a user to the folder that `flags.prepare_jax` gives to jax."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(malloc, "keep_pages", lambda: False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def of(user):
      found.clear()
      monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user))
      flags.prepare_jax()
      return found.get("jax_compilation_cache_dir")

    return of

  def test_every_user_has_one_of_their_own(self, used, tmp_path):
    for user in ("me", "you"):
      folder = pathlib.Path(used(user))
      assert folder == tmp_path / user / "soprc_jax" / "jax"
      assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)  # another user could put a program there
    assert pathlib.Path(used("you")).parent != folder.parent

  def test_none_where_it_cannot_be_made(self, used, tmp_path, caplog, monkeypatch):
    (tmp_path / "me").write_text("not a folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "me"))
    with caplog.at_level(logging.WARNING):
      assert used("me") is None
    assert "Compiled functions cannot be cached" in caplog.text


class TestNetwork:
  def test_processes_of_tests_have_none(self):
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=0.1)"
    done = subprocess.run(
      [sys.executable, "-c", code],
      env=runs.environment(),
      capture_output=True,
      text=True,
      check=False,
    )
    assert "no network unless asked" in done.stderr
    code = "import socket; socket.getaddrinfo('example.org', 80)"
    done = subprocess.run(
      [sys.executable, "-c", code],
      env=runs.environment(),
      capture_output=True,
      text=True,
      check=False,
    )
    assert "no network unless asked" in done.stderr

  def test_what_could_reach_it_is_not_loaded(self):
    code = (
      "import runpy, sys\n"
      "import soprc_jax\n"
      "from soprc_jax.data import datasets\n"
      "from soprc_jax.training import config, loop, evaluation\n"
      f"resolved = config.resolve(runpy.run_path({runs.GLYPHS!r})['get_config'](''))\n"
      "assert set(datasets.make_splits(resolved.data)) == {'train', 'val', 'test'}\n"
      "print('value of the test:', len({'huggingface_hub', 'tensorflow', 'tensorflow_datasets', "
      "'comet_ml', 'boto3', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run(
      [sys.executable, "-c", code],
      env=runs.environment(),
      capture_output=True,
      text=True,
      check=False,
    )
    assert (done.returncode, runs.value(done.stdout)) == (0, 0), done.stderr


@pytest.mark.slow
def test_a_run_writes_into_its_workdir_and_the_caches_alone(tmp_path):
  folders = {
    name: tmp_path / name
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "here")
  }
  for folder in folders.values():
    folder.mkdir()
  there = {name: str(folder) for name, folder in folders.items()}
  flags_of_run = runs.tiny_flags(tmp_path / "run", steps=2, warmup_steps=0, **{"data.workers": 1})
  done = runs.call(
    "experiments.train", *flags_of_run, cwd=folders["here"], env=runs.environment(**there)
  )
  assert done.returncode == 0, done.stderr
  written = {
    name: sorted(entry.name for entry in folder.iterdir()) for name, folder in folders.items()
  }
  # matplotlib stores its list of fonts there.
  assert set(written.pop("XDG_CACHE_HOME")) <= {"matplotlib", "soprc_jax"}
  assert set(written.pop("XDG_CONFIG_HOME")) <= {"matplotlib"}
  assert written == {"HOME": [], "TMPDIR": [], "here": []}
