"""Results of each query: file, intervals, groups, and paired differences."""

import numpy as np
import pytest

from soprc_jax import metrics, statistics
from soprc_jax.metrics import per_query


def _some(seed=0, classes=30):
  """Returns results of random embeddings; the last query has no positive."""
  rng = np.random.default_rng(seed)
  labels = np.append(np.repeat(np.arange(classes), 4), classes)
  embeddings = rng.normal(size=(classes + 1, 8))[labels] + rng.normal(size=(len(labels), 8))
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  found = metrics.retrieval_metrics(embeddings, labels, ks=(1, 10), per_query=True)
  names = [f"image {i}" for i in range(len(labels))]
  queries = per_query.make(
    names, [f"class {i}" for i in labels], found["ap_per_query"], found["negatives_above"]
  )
  return found, queries


class TestValues:
  def test_their_means_are_the_metrics(self):
    found, queries = _some()
    assert len(queries.counted.id) == found["num_queries"] == 120
    for name in ("mAUPRC", "recall@1", "recall@10"):
      assert queries.counted.values(name).mean() == pytest.approx(found[name])
    assert queries.rank[-1] == 0
    assert queries.rank[:-1].min() == 1

  def test_intervals_are_over_classes(self):
    found, queries = _some()
    limits = per_query.intervals(queries, ["mAUPRC", "recall@1"])
    counted = queries.counted
    want = statistics.cluster_interval(counted.ap, counted.label)
    assert limits == {
      "confidence": 0.95,
      "mAUPRC": [want.low, want.high],
      "recall@1": limits["recall@1"],
    }
    assert limits["recall@1"][0] < found["recall@1"] < limits["recall@1"][1]

  def test_limits_stay_in_the_range_of_a_metric(self):
    classes = np.repeat(np.arange(16), 6)
    ap = np.where(classes < 2, 0.985, 1.0)
    queries = per_query.PerQuery(
      np.arange(96).astype(str), classes.astype(str), ap, np.ones(96, np.int64)
    )
    assert statistics.cluster_interval(ap, classes).high > 1
    low, high = per_query.intervals(queries, ["mAUPRC"])["mAUPRC"]
    assert 0.98 < low < ap.mean()
    assert high == 1

  def test_one_class_has_no_interval(self):
    _, queries = _some()
    one = queries.take(queries.label == "class 3")
    assert per_query.intervals(one, ["mAUPRC"]) == {}
    assert per_query.difference([one], [one]) is None


class TestGroups:
  def test_are_ranked_against_the_whole_gallery(self):
    found, queries = _some()
    groups = ["a" if i % 3 else "b" for i in range(len(queries.id))]
    got = per_query.by_group(queries, groups, ["mAUPRC", "recall@1"])
    assert list(got) == ["a", "b"]
    assert sum(one["num_queries"] for one in got.values()) == 120
    mean = sum(one["mAUPRC"] * one["num_queries"] for one in got.values()) / 120
    assert mean == pytest.approx(found["mAUPRC"])
    assert got["a"]["prior"] == pytest.approx(3 / 120)
    assert got["a"]["intervals"]["mAUPRC"][0] < got["a"]["mAUPRC"]

  def test_have_the_prior_of_their_own_classes(self):
    labels = ["a"] * 2 + ["b"] * 6
    queries = per_query.make(list("12345678"), labels, np.full(8, 0.5), np.zeros(8, int))
    got = per_query.by_group(queries, labels, ["mAUPRC"])
    assert got["a"]["prior"] == pytest.approx(1 / 7)
    assert got["b"]["prior"] == pytest.approx(5 / 7)
    assert got["a"]["intervals"] == {}

  def test_have_the_prior_of_their_relevant_images(self):
    queries = per_query.make(
      list("1234"), ["a", "a;b", "b", "c"], np.full(4, 0.5), np.zeros(4, int)
    )
    got = per_query.by_group(
      queries, ["x", "x", "y", "y"], ["mAUPRC"], num_relevant=np.array([2, 3, 2, 4])
    )
    assert got["x"]["prior"] == pytest.approx(1.5 / 3)
    assert got["y"]["prior"] == pytest.approx(2 / 3)

  def test_without_a_positive_are_left_out(self):
    _, queries = _some()
    groups = ["alone" if name == "image 120" else "rest" for name in queries.id]
    assert list(per_query.by_group(queries, groups, ["mAUPRC"])) == ["rest"]


class TestDifference:
  def test_one_seed_is_for_new_classes(self):
    (_, a), (_, b) = _some(0), _some(1)
    found = per_query.difference([a], [b], "recall@1")
    one, other = (run.counted for run in (a, b))
    values = [run.values("recall@1") for run in (one, other)]
    assert found[:3] == statistics.cluster_difference(*values, one.label)
    assert found.probability == statistics.probability_ahead(*values, one.label)
    assert not found.resolved

  def test_several_seeds_are_for_new_seeds_too(self):
    a, b = ([_some(seed)[1] for seed in seeds] for seeds in ((0, 1, 2), (3, 4, 5)))
    found = per_query.difference(a, b)
    values = [[run.counted.ap for run in runs] for runs in (a, b)]
    assert found[:3] == statistics.crossed_difference(*values, a[0].counted.label)

  def test_prints_and_resolves(self):
    found = per_query.Difference(0.02, 0.01, 0.03, 0.99)
    assert str(found) == "+0.0200 [+0.0100, +0.0300]"
    assert found.resolved
    assert not found._replace(low=-0.01).resolved
    assert per_query.Difference(-0.02, -0.03, -0.01, 0.01).resolved

  def test_only_of_the_same_queries(self):
    _, a = _some()
    per_query.check_paired({"A": a, "B": a})
    with pytest.raises(ValueError, match=r"A and B .* tested on 121 and 120 images"):
      per_query.check_paired({"A": a, "B": a.take(np.arange(120))})
    with pytest.raises(ValueError, match=r"test image 0 is image 0 .* and image 120 of class"):
      per_query.check_paired({"A": a, "B": a.take(np.arange(120, -1, -1))})
    alone = a._replace(rank=np.where(a.id == "image 7", 0, a.rank))
    with pytest.raises(ValueError, match="test image image 7 has a positive in only one of them"):
      per_query.check_paired({"A": a, "B": alone})
    changed = a._replace(label=np.where(a.label == "class 0", "class other", a.label))
    with pytest.raises(
      ValueError, match=r"A and C .* of class class 0 in one and .* of class class other"
    ):
      per_query.check_paired({"A": a, "B": a, "C": changed})


class TestFile:
  def test_holds_everything(self, tmp_path):
    _, queries = _some()
    queries = queries._replace(label=np.char.add(queries.label, " é"))
    per_query.write(tmp_path / "per_query.npz", queries)
    for one, other in zip(per_query.read(tmp_path / "per_query.npz"), queries):
      np.testing.assert_array_equal(one, other)
    assert set(np.load(tmp_path / "per_query.npz")) == {"id", "class", "ap", "rank"}

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"ap": np.full(121, 0.5)}, "is impossible"),
      ({"ap": np.full(121, 2.0)}, "is impossible"),
      ({"rank": np.full(121, -1)}, "is impossible"),
      ({"id": np.full(121, "same")}, "is impossible"),
      ({"id": np.arange(121)}, "are not the results of queries"),
      ({"ap": np.zeros(7)}, "are not the results of queries"),
    ],
  )
  def test_a_corrupt_one_is_refused(self, tmp_path, changes, message):
    path = tmp_path / "per_query.npz"
    per_query.write(path, _some()[1]._replace(**changes))
    with pytest.raises(ValueError, match=message):
      per_query.read(path)

  def test_a_cut_one_is_refused(self, tmp_path):
    path = tmp_path / "per_query.npz"
    per_query.write(path, _some()[1])
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="is corrupt"):
      per_query.read(path)
