"""Tests the reader of yeast, on a database of R that the test writes."""

import gzip
import sys
import types
import zlib

import numpy as np
import pytest

from soprc_jax.data import yeast


@pytest.fixture
def package(tmp_path):
  """Returns a folder with the files of a package: two environments, each before its task."""
  path = tmp_path / f"{yeast._FILES}.rdb"
  path.parent.mkdir(parents=True)
  records = [b"env other", b"task other", b"env yeast", b"task yeast"]
  content, places = b"", []
  for record in records:
    packed = len(record).to_bytes(4, "big") + zlib.compress(record)
    places.append((len(content), len(packed)))
    content += packed
  path.write_bytes(content)
  path.with_suffix(".rdx").write_bytes(gzip.compress(b"index"))
  return tmp_path, places


def _use_rdata(monkeypatch, places, frame, task="yeast.task"):
  """Installs a module rdata that knows what the records mean."""
  index = {
    "variables": {"other.task": places[1], task: places[3]},
    "references": {"env::1": places[0], "env::2": places[2]},
    "compressed": 1,
  }
  known = {b"index": index, b"env yeast": {"bindings": {"data": frame}}}
  module = types.ModuleType("rdata")
  module.parser = types.SimpleNamespace(parse_data=lambda packed: packed)
  module.conversion = types.SimpleNamespace(convert=lambda packed: known[packed])
  monkeypatch.setitem(sys.modules, "rdata", module)


def _frame(**values):
  pd = pytest.importorskip("pandas")
  columns = {"label1": [True, False], "label2": [True, True], "x1": [0.5, 1.5], "x2": [2.5, 3.5]}
  return pd.DataFrame(columns | values)


def test_features_labels_and_names(package, monkeypatch):
  folder, places = package
  _use_rdata(monkeypatch, places, _frame())
  features, labels, names = yeast.load(str(folder))
  np.testing.assert_array_equal(features, [[0.5, 2.5], [1.5, 3.5]])
  np.testing.assert_array_equal(labels, [[True, True], [False, True]])
  assert (features.dtype, labels.dtype, names) == (np.float32, bool, ("label1", "label2"))


def test_missing_value(package, monkeypatch):
  folder, places = package
  _use_rdata(monkeypatch, places, _frame(x2=[None, 3.5]))
  with pytest.raises(ValueError, match="yeast has a missing value"):
    yeast.load(str(folder))


def test_messages_have_the_remedy(package, monkeypatch, tmp_path):
  folder, places = package
  with pytest.raises(ValueError, match=r"yeast needs data.root.*apt-get download r-cran-mlr"):
    yeast.load("")
  with pytest.raises(FileNotFoundError, match=r"Rdata.rdx is missing: apt-get download"):
    yeast.load(str(tmp_path / "empty"))
  _use_rdata(monkeypatch, places, _frame(), task="sonar.task")
  with pytest.raises(ValueError, match=r"has no yeast.task as in version 2.19.1"):
    yeast.load(str(folder))
  monkeypatch.setitem(sys.modules, "rdata", None)
  with pytest.raises(ValueError, match="needs the package rdata: pip install"):
    yeast.load(str(folder))
