"""Tests the LETOR format: equal to scikit-learn's reader, and errors that name file and line."""

import gzip

import numpy as np
import pytest
from sklearn import datasets

from soprc_jax.data import letor

_GOOD = """2 qid:10 1:0.5 3:-2e-1 # docid = GX001 inc = 1 prob = 0.5

0 qid:10 2:1
# a comment
1\tqid:b7  1:.25
0 qid:b7
"""


def _read(path, text, **options):
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return letor.read(str(path), name="--train", **options)


class TestText:
  def test_lines_comments_and_features_that_are_left_out(self, tmp_path):
    groups = _read(tmp_path / "train.txt", _GOOD)
    np.testing.assert_array_equal(
      groups.features, np.array([[0.5, 0, -0.2], [0, 1, 0], [0.25, 0, 0], [0, 0, 0]], np.float32)
    )
    assert groups.relevance.tolist() == [2, 0, 1, 0]
    assert groups.sizes.tolist() == [2, 2]
    assert groups.names == ("10", "b7")

  def test_equals_scikit_learn(self, tmp_path):
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(60, 7)).astype(np.float32) * (rng.random((60, 7)) < 0.6)
    relevance, query = rng.integers(0, 3, 60), np.arange(60) // 4
    path = tmp_path / "train.txt"
    datasets.dump_svmlight_file(
      dense, relevance, str(path), query_id=query, zero_based=False, comment="made up"
    )
    groups = letor.read(path, name="--train")
    features, theirs, ids = datasets.load_svmlight_file(
      str(path), n_features=7, query_id=True, zero_based=False, dtype=np.float32
    )
    np.testing.assert_array_equal(groups.features, features.toarray())
    np.testing.assert_array_equal(groups.relevance, theirs)
    np.testing.assert_array_equal(np.repeat(np.array(groups.names, int), groups.sizes), ids)

  def test_zeros_before_an_index_do_not_count(self, tmp_path):
    groups = _read(tmp_path / "train.txt", f"1 qid:1 {'0' * 30}3:2\n0 qid:1 01:1\n")
    assert groups.features.tolist() == [[0, 0, 2], [1, 0, 0]]

  def test_a_test_file_has_the_features_of_training(self, tmp_path):
    assert _read(tmp_path / "test.txt", "1 qid:1 1:2\n", num_features=3).features.shape == (1, 3)

  @pytest.mark.parametrize(
    ("line", "message"),
    [
      ("1 1:2", r"qid:QUERY must follow the relevance, got '1:2'"),
      ("1", "got nothing"),
      ("1 qid: 1:2", "got 'qid:'"),
      ("x qid:1 1:2", "begins with the relevance, a finite number; got 'x'"),
      ("nan qid:1 1:2", "got 'nan'"),
      ("-1 qid:1 1:2", "relevance must be >= 0, got '-1': remove documents"),
      ("1 qid:1 1:x", "feature '1' must be a finite number, got 'x'"),
      ("1 qid:1 1:nan", "got 'nan': leave out a missing value"),
      ("1 qid:1 1:inf", "got 'inf'"),
      ("1 qid:1 1:1_0", "got '1_0'"),
      ("1 qid:1 1:1e39", "feature 1 is '1e39', beyond float32"),
      ("1 qid:1 1:1e400", "feature 1 is '1e400', beyond float32"),
      ("1 qid:1 1:2 3", "got ''"),
      ("1 qid:1 1: 2:3 4", "feature '1' must be a finite number, got ''"),
      ("1 qid:1 1:2:3", "got '2:3'"),
      ("1 qid:1 1.5:2", "INDEX:VALUE with an integer INDEX >= 1, got '1.5:2'"),
      ("1 qid:1 -1:2", "got '-1:2'"),
      ("1 qid:1 0:2", "indices start at 1, add 1 to all"),
      ("1 qid:1 2:1 1:1", "feature 1 comes after feature 2: list each feature once"),
      ("1 qid:1 2:1 2:1", "feature 2 comes after feature 2"),
      ("1 qid:1 100001:1", "at most 100,000 features"),
      ("1 qid:1 99999999999999999999999:1", "at most 100,000 features"),
      ("1 qid:1 +1:2", r"INDEX:VALUE with an integer INDEX >= 1, got '\+1:2'"),
      ("1 qid:1 1:2 +2:2", r"got '\+2:2'"),
      ("1 qid:a#1 1:2", "a query must not contain #, which begins a comment; got 'qid:a#1'"),
      ("1 qid:# 1:2", "got 'qid:#'"),
      ("1e400 qid:1 1:2", "relevance must be below 1e30, got '1e400': scale it"),
      ("1 qid:0 1:2", "query '0' comes again, its documents began at line 1: sort the lines"),
    ],
  )
  def test_a_wrong_line_is_named(self, tmp_path, line, message):
    text = f"1 qid:0 1:1\n\n0 qid:2 1:1\n{line}\n"
    with pytest.raises(ValueError, match=message) as error:
      _read(tmp_path / "train.txt", text)
    assert str(error.value).startswith(f"{tmp_path / 'train.txt'}:4: ")

  def test_a_feature_that_training_lacks_is_named(self, tmp_path):
    with pytest.raises(ValueError, match=r"test.txt:2: feature '4'.*training documents have 3"):
      _read(tmp_path / "test.txt", "1 qid:1 1:2\n0 qid:1 4:1\n", num_features=3)

  @pytest.mark.parametrize("text", ["", "\n# nothing\n"])
  def test_an_empty_file_has_no_documents(self, tmp_path, text):
    with pytest.raises(ValueError, match="no documents: lines look like"):
      _read(tmp_path / "train.txt", text)

  @pytest.mark.parametrize("text", [b"\xef\xbb\xbf1 qid:1 1:2\n", b"\xff\xfe1\x00 \x00", b"PK\x03"])
  def test_other_content_is_named(self, tmp_path, text):
    with pytest.raises(ValueError, match=r"train\.txt:1: a line begins with the relevance"):
      _read(tmp_path / "train.txt", text)

  def test_a_compressed_file_is_named(self, tmp_path):
    with pytest.raises(ValueError, match=r"train\.txt\.gz:1: .* compressed by gzip: unpack it"):
      _read(tmp_path / "train.txt.gz", gzip.compress(_GOOD.encode()))

  def test_a_file_must_exist(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--train=.* must be a file .* missing"):
      letor.read(tmp_path / "no", name="--train")


_ARRAYS = {
  "features": np.eye(4, 3),
  "relevance": np.array([2, 0, 1, 0]),
  "group": np.array(["b", "b", "a", "a"]),
}


class TestNpz:
  def _read(self, path, **changed):
    options = {key: changed.pop(key) for key in ("num_features",) if key in changed}
    np.savez(path / "train.npz", **(_ARRAYS | changed))
    return letor.read(path / "train.npz", name="--train", **options)

  def test_equals_the_text(self, tmp_path):
    groups = self._read(tmp_path, num_features=5)
    text = "2 qid:b 1:1\n0 qid:b 2:1\n1 qid:a 3:1\n0 qid:a\n"
    for ours, theirs in zip(
      groups, _read(tmp_path / "train.txt", text, num_features=5), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)

  @pytest.mark.parametrize(
    ("changed", "message"),
    [
      ({"features": np.eye(4, 3) * np.nan}, "features are not finite in float32 in row 0"),
      ({"features": np.zeros(4)}, r"features must be numbers \[N, D\]"),
      ({"features": np.zeros((0, 3))}, r"features must be numbers \[N, D\]"),
      ({"relevance": np.array([0, 1, -1, 0])}, "relevance must be >= 0, got -1 in row 2"),
      ({"relevance": np.zeros(3)}, r"must be \[4\]"),
      ({"group": np.array([1, 2, 1, 1])}, "group 1 comes again in row 2: sort the rows"),
      ({"group": np.zeros(4)}, "group integers or texts"),
      ({"num_features": 2}, "features have 3 columns, and the training documents have 2"),
    ],
  )
  def test_wrong_arrays_are_named(self, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
      self._read(tmp_path, **changed)
