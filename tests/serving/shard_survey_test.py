"""Tests what is found before a gallery in shards is counted."""

import json

import numpy as np
import pytest
import sharded

from soprc_jax.data import label_sets
from soprc_jax.serving import shard_survey, shards


def _prepare(folder, distractors=None):
  return shard_survey.prepare(
    shard_survey.find(
      str(folder / "queries.npy"),
      str(folder / "shards"),
      distractors and str(folder / distractors),
    )
  )


def _change(path, row, value):
  rows = np.load(path)
  rows[row, 1] = value
  np.save(path, rows)


def test_queries_positives_and_exclusions(tmp_path):
  _, labels, ids = sharded.gallery(tmp_path)
  found = _prepare(tmp_path)
  assert (found.ids, found.class_names) == (ids[:20], labels[:20])
  # Queries 10 to 19 are the last rows of the gallery.
  *others, (rows, positions) = found.excluded
  assert (rows.tolist(), positions.tolist()) == (list(range(30, 40)), list(range(19, 9, -1)))
  assert [len(rows) for rows, _ in others] == [0, 0]
  names = np.array(labels)
  want = (names[:20, None] == names[10:]).sum(axis=1) - (np.arange(20) >= 10)
  np.testing.assert_array_equal(found.thresholds.numbers, want)


def test_labels_are_compared_without_blanks_and_types(tmp_path):
  rows = np.eye(4, dtype=np.float32)
  sharded.write(tmp_path / "queries.npy", rows[:2], ["a", "b"], [1, 2], table="parquet")
  sharded.write(tmp_path / "shards" / "a.npy", rows, ["c", "d", "e", "f"], [" 1", "2", "2 ", ""])
  assert _prepare(tmp_path).thresholds.numbers.tolist() == [1, 2]


@pytest.mark.parametrize("value", [1.0, float("nan"), b"1", True, [1]])
def test_labels_of_other_types_are_named(tmp_path, value):
  rows = np.eye(4, dtype=np.float32)
  sharded.write(tmp_path / "queries.npy", rows[:2], ["a", "b"], [1, 2])
  path = tmp_path / "shards" / "a.npy"
  sharded.write(path, rows, list("cdef"), [None, value, value, None], table="parquet")
  with pytest.raises(
    ValueError,
    match=rf"a\.npy: a label must be .* {type(value).__name__} in row 1: cast the column to int",
  ):
    _prepare(tmp_path)
  sharded.write(path, rows, list("cdef"), [None, 1, 2, None], table="parquet")
  assert _prepare(tmp_path).thresholds.numbers.tolist() == [1, 1]


def test_ids_are_compared_without_blanks(tmp_path):
  rows = np.eye(4, dtype=np.float32)
  sharded.write(tmp_path / "queries.npy", rows[:2], [" a", "b"], [1, 2])
  sharded.write(tmp_path / "shards" / "a.npy", rows, ["a", "b\t", "c", "d"], [1, 2, 1, 2])
  found = _prepare(tmp_path)
  assert found.ids == ["a", "b"]
  assert [part.tolist() for part in found.excluded[0]] == [[0, 1], [0, 1]]


def test_values_that_are_not_finite_are_named(tmp_path):
  _, labels, _ = sharded.gallery(tmp_path)
  path = tmp_path / "shards" / "shard-00001-of-00003.npy"
  row = next(row for row in range(40) if labels[89 - row] in labels[:20])
  _change(path, row, np.nan)
  with pytest.raises(
    ValueError, match=rf"shard-00001-of-00003\.npy .* not finite in row {row}: embed"
  ):
    _prepare(tmp_path)
  _change(tmp_path / "queries.npy", 3, np.inf)
  with pytest.raises(ValueError, match=r"queries\.npy .* not finite in row 3: embed"):
    _prepare(tmp_path)


def test_an_id_that_occurs_twice_is_named(tmp_path):
  sharded.gallery(tmp_path)
  sharded.write(tmp_path / "more" / "x.npy", np.ones((2, 16), np.float32), ["new", "photos/60.jpg"])
  with pytest.raises(
    ValueError, match=r"'photos/60.jpg' occurs twice: .*shard-00001.*row 29, and .*x\.npy, row 1"
  ):
    _prepare(tmp_path, "more")
  sharded.write(tmp_path / "queries.npy", np.eye(2, 16, dtype=np.float32), ["a", "a"], ["b", "c"])
  with pytest.raises(ValueError, match=r"'a' occurs twice: .*row 0, and .*row 1\. Remove"):
    _prepare(tmp_path)


def test_different_ids_of_one_hash_are_no_error(tmp_path, monkeypatch):
  sharded.gallery(tmp_path)
  monkeypatch.setattr(shard_survey, "_hashes", lambda ids: np.zeros(len(ids), np.int64))
  _prepare(tmp_path)


def test_missing_columns_are_named(tmp_path):
  sharded.gallery(tmp_path)
  rows = np.ones((2, 16), np.float32)
  sharded.write(tmp_path / "shards" / "z.npy", rows, ["x", "y"])
  with pytest.raises(ValueError, match=r"z\.npy has no labels: .* or give it with --distractors"):
    _prepare(tmp_path)
  sharded.write(tmp_path / "shards" / "z.npy", rows, labels=["x", "y"])
  with pytest.raises(ValueError, match=r"z\.npy has no ids"):
    _prepare(tmp_path)
  sharded.write(tmp_path / "queries.npy", rows, ["x", "y"], ["a", ""])
  with pytest.raises(
    ValueError, match=r"queries\.npy: query 1 has no label\. .* columns path,label"
  ):
    _prepare(tmp_path)


def test_one_of_the_shards_has_the_queries(tmp_path):
  _, _, ids = sharded.gallery(tmp_path)
  one = str(tmp_path / "shards" / "shard-00002-of-00003.npy")
  files = shard_survey.find(one, str(tmp_path / "shards"), None)
  assert shard_survey.prepare(files).ids == ids[49:9:-1]
  with pytest.raises(FileNotFoundError, match=r"--gallery=.* 2 of 3 shards are missing"):
    shard_survey.find(one, one, None)


def _labeled(folder, cells, queries=2, **options):
  """Returns what is prepared for the first rows of ``cells`` as queries of all rows."""
  rows, ids = np.eye(len(cells), dtype=np.float32), [f"i{row}" for row in range(len(cells))]
  sharded.write(folder / "queries.npy", rows[:queries], ids[:queries], cells[:queries])
  sharded.write(folder / "shards" / "a.npy", rows[:3], ids[:3], cells[:3])
  sharded.write(folder / "shards" / "b.npy", rows[3:], ids[3:], cells[3:], table="parquet")
  place = str(folder / "queries.npy"), str(folder / "shards"), None
  return shard_survey.prepare(shard_survey.find(*place, **options))


_CELLS = ["a;b", "c ", "b;a", "a", "a;b;d", "c;a;e", None, "x"]


def test_shared_labels_are_positives(tmp_path):
  found = _labeled(tmp_path, _CELLS, label_separator=";")
  assert found.thresholds.numbers.tolist() == [4, 1]  # without itself
  assert found.class_names == ["a;b", "c"]
  found = _labeled(tmp_path, _CELLS, label_separator=";", min_jaccard=0.6)
  assert found.thresholds.numbers.tolist() == [2, 0]
  with pytest.raises(ValueError, match="no query has a positive"):
    _labeled(tmp_path, _CELLS, label_separator="")


def test_mistakes_in_cells_are_named(tmp_path):
  for row, name in ((1, "queries"), (5, "b")):
    cells = [*_CELLS[:row], "a;;b", *_CELLS[row + 1 :]]
    with pytest.raises(ValueError, match=rf"{name}\.npy, row {row % 3}: 'a;;b' has an empty label"):
      _labeled(tmp_path, cells, label_separator=";")


def test_a_separator_that_does_not_occur_is_told(tmp_path, caplog):
  _labeled(tmp_path, ["c", "a", "c", "a"], label_separator="|")
  assert "the separator '|' (data.label_separator) occurs nowhere" in caplog.text
  caplog.clear()
  _labeled(tmp_path, ["c", "a", "c", "a|b"], label_separator="|")
  assert not caplog.text


def test_the_separator_is_that_of_the_run(tmp_path):
  _labeled(tmp_path, _CELLS, label_separator=";")
  origin = {"format": shards.FORMAT, "digest": "d", "inputs": "", "root": "", "dtype": "float32"}
  origin |= {"width": 8, "label_rule": label_sets.Rule(";", 0.6).to_text()}

  def prepare(**options):
    for path, rows in (("queries", 2), ("shards/a", 3), ("shards/b", 5)):
      (tmp_path / f"{path}.json").write_text(json.dumps(origin | {"rows": rows}))
    place = str(tmp_path / "queries.npy"), str(tmp_path / "shards"), None
    return shard_survey.prepare(shard_survey.find(*place, **options))

  assert prepare().thresholds.numbers.tolist() == [2, 0]
  assert prepare(label_separator=";").thresholds.numbers.tolist() == [4, 1]
  origin["label_rule"] = "[3]"
  with pytest.raises(ValueError, match=r"queries\.npy: '\[3\]' is no separator .* --label"):
    prepare()
  del origin["label_rule"]
  with pytest.raises(ValueError, match="no query has a positive"):
    prepare()


def test_no_positive_and_files_given_twice(tmp_path):
  sharded.gallery(tmp_path)
  with pytest.raises(ValueError, match=r"shard-00000.* is in the gallery twice"):
    _prepare(tmp_path, "shards")
  sharded.write(tmp_path / "queries.npy", np.ones((1, 16), np.float32), ["x"], ["of none"])
  with pytest.raises(ValueError, match=r"no query has a positive in --gallery: .*'of none'"):
    _prepare(tmp_path)
