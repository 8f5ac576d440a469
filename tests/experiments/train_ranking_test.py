"""Tests the ranking study: losses of groups, runs that resume, a table, and errors of its flags."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rax
import runs

from experiments.train_ranking import flights_groups, ranking, ranking_losses, ranking_report
import soprc_jax
from soprc_jax import interpolation
from soprc_jax.data import flights, letor, query_groups

_PROGRAM = "experiments.train_ranking"


def _write(path, *, queries, seed):
  """Writes queries whose first two of five features say the relevance, with noise."""
  rng, lines = np.random.default_rng(seed), []
  for query in range(queries):
    for _ in range(int(rng.integers(5, 12))):
      features = rng.normal(size=5)
      relevance = int(np.clip(round(features[0] + features[1] + 0.3 * rng.normal()), 0, 3))
      pairs = " ".join(f"{column + 1}:{value:.4f}" for column, value in enumerate(features))
      lines.append(f"{relevance} qid:{query} {pairs} 6:1\n")
  path.write_text("".join(lines))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("letor")
  for seed, (name, queries) in enumerate({"train": 40, "val": 12, "test": 14}.items()):
    _write(folder / f"{name}.txt", queries=queries, seed=seed)
  # Queries that count, but have no average precision or nothing to rank.
  with (folder / "test.txt").open("a") as file:
    file.write("0 qid:none 1:1\n0 qid:none 1:2\n1 qid:all 1:3\n")
  return folder


@pytest.fixture(scope="module")
def task(files):
  splits = {
    name: letor.read(files / f"{name}.txt", name=name, num_features=6)
    for name in ("train", "val", "test")
  }
  return ranking.prepare(**splits)


def _batch(task):
  rows, where = query_groups.padded_rows(task.train, np.arange(6))
  scores = jnp.asarray(np.random.default_rng(0).normal(size=rows.shape), jnp.float32)
  return scores, jnp.asarray(task.train.relevance[rows]), jnp.asarray(where)


@pytest.fixture
def promoting():
  """Allows what rax does inside: promotion of ranks and dtypes."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


class TestLosses:
  @pytest.mark.parametrize("name", list(ranking_losses.LOSSES))
  def test_padding_does_not_count(self, task, promoting, name):
    del promoting
    scores, relevance, where = _batch(task)
    loss = jax.value_and_grad(functools.partial(ranking_losses.LOSSES[name]))
    longer = [jnp.pad(one, ((0, 0), (0, 5))) for one in (scores + 0, relevance, where)]
    longer[0] = jnp.where(longer[2], longer[0], 1e3)
    value, grad = loss(scores, relevance, where=where)
    other, wide = loss(*longer[:2], where=longer[2])
    np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(grad, wide[:, : grad.shape[1]], atol=1e-6)
    assert not np.asarray(wide[:, grad.shape[1] :]).any()

  @pytest.mark.parametrize("name", list(ranking_losses.LOSSES))
  def test_a_step_against_the_gradient_lowers_it(self, task, promoting, name):
    del promoting
    scores, relevance, where = _batch(task)
    loss = ranking_losses.LOSSES[name]
    grad = jax.grad(loss)(scores, relevance, where=where)
    assert loss(scores - 0.05 * grad, relevance, where=where) < loss(scores, relevance, where=where)

  def test_soprc_is_that_of_each_list_with_its_own_prior_and_v(self, task):
    scores, relevance, where = _batch(task)
    values = []
    for own, grades, mask in zip(scores, relevance, where, strict=True):
      positives, negatives = own[mask & (grades > 0)], own[mask & (grades <= 0)]
      v = interpolation.interpolate_scores(positives[None], num_points=ranking_losses.NUM_POINTS)
      prior = len(positives) / (len(positives) + len(negatives))
      values.append(
        soprc_jax.soprc_loss(
          positives[None],
          negatives[None],
          v,
          prior=prior,
          tau1=1.0,
          self_weight=1 / len(positives),
          link="log",
        )
      )
    found = ranking_losses.soprc(scores, relevance, where=where)
    np.testing.assert_allclose(found, np.mean(values), rtol=1e-5)


class TestTraining:
  def test_prepare_standardizes_by_train_and_draws_queries_that_can_be_ranked(self, task):
    np.testing.assert_allclose(task.train.features[:, :5].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(task.train.features[:, :5].std(axis=0), 1, atol=1e-4)
    assert not task.test.features[:, 5].any()  # constant in train
    assert task.train.graded[task.drawn].all()

  def test_a_split_without_relevant_documents_is_named(self, task):
    none = task.val._replace(relevance=np.zeros_like(task.val.relevance))
    with pytest.raises(ValueError, match="--val has no relevant document"):
      ranking.prepare(task.train, none, task.test)
    none = task.train._replace(relevance=np.zeros_like(task.train.relevance))
    with pytest.raises(ValueError, match="--train has no query whose documents differ"):
      ranking.prepare(none, task.val, task.test)

  def test_a_test_split_without_an_interval_is_named(self, task):
    one = np.arange(len(task.test.relevance)) == 0
    with pytest.raises(ValueError, match="--test has one query with a relevant document"):
      ranking.prepare(task.train, task.val, task.test._replace(relevance=1.0 * one))

  @pytest.mark.parametrize("name", ["train", "val", "test"])
  def test_a_relevance_whose_gain_is_too_large_is_named(self, task, name):
    splits = {one: getattr(task, one) for one in ("train", "val", "test")}
    splits[name] = splits[name]._replace(relevance=splits[name].relevance + 101)
    with pytest.raises(ValueError, match=f"--{name} has a relevance of 10.: .* at most 100"):
      ranking.prepare(**splits)

  def test_the_largest_relevance_has_an_ndcg(self, task, promoting):
    del promoting
    largest = task.val._replace(relevance=np.full_like(task.val.relevance, 100))
    found = ranking.per_query(largest, np.zeros(len(largest.relevance), np.float32))
    np.testing.assert_allclose(found["NDCG@10"], 1, rtol=1e-5)

  def test_values_of_queries(self, task, promoting):
    del promoting
    scores = np.random.default_rng(0).normal(size=len(task.test.relevance))
    found = ranking.per_query(task.test, scores)
    assert np.isnan(found["AP"]).tolist() == [False] * 14 + [True, False]
    assert found["AP"][-1] == 1  # of one relevant document alone
    rows = slice(0, int(task.test.sizes[0]))
    ndcg = rax.ndcg_metric(scores[rows], task.test.relevance[rows], topn=10)
    assert found["NDCG@10"][0] == pytest.approx(float(ndcg), abs=1e-6)
    broken = ranking.per_query(task.test, np.where(scores > 1, np.nan, scores))
    assert np.isnan(broken["AP"]).all()
    assert np.isnan(ranking.mean(broken["AP"]))

  def test_differences(self):
    rng = np.random.default_rng(0)
    a = rng.uniform(size=(3, 40))
    a[:, 0] = np.nan
    found = ranking_report.difference(a, 0.8 * a)
    assert found.mean == pytest.approx(0.2 * np.nanmean(a))
    assert found.low < found.mean < found.high
    assert ranking_report.difference(a[:1], 0.8 * a[:1]).mean > 0
    broken = np.vstack([a[:2], np.full((1, 40), np.nan)])
    assert ranking_report.difference(a, broken) is None


def _command(files, folder, **flags):
  paths = {name: files / f"{name}.txt" for name in ("train", "val", "test")}
  given = paths | {"workdir": folder, "steps": 60, "queries": 8, "widths": 8} | flags
  return [f"--{name}={value}" for name, value in given.items()]


class TestCommand:
  def test_trains_and_resumes(self, files, tmp_path):
    folder = tmp_path / "run"
    few = {"seeds": "0,1", "rates": "0.003,0.03"}
    done = runs.call(_PROGRAM, *_command(files, folder, methods="soprc,softmax", **few))
    assert done.returncode == 0, done.stderr
    kept = {path: path.read_bytes() for path in (folder / "runs").iterdir()}
    assert len(kept) == 4
    done = runs.call(_PROGRAM, *_command(files, folder, **few))
    assert done.returncode == 0, done.stderr
    assert len(list((folder / "runs").iterdir())) == 8
    assert all(path.read_bytes() == content for path, content in kept.items())
    content = json.loads((folder / "results.json").read_text())
    assert "1 without a relevant and 1 without an irrelevant document" in content["data"]
    for entry in content["methods"]:
      assert min(entry["test"]["AP"]) > 0.7, entry["label"]  # chance is about 0.5
    table = (folder / "table.md").read_text()
    assert all(label in table for label in ranking_losses.LABELS.values())
    done = runs.call(_PROGRAM, *_command(files, folder, rates="0.1"))
    assert done.returncode == 1
    assert "holds a run of another config" in done.stderr

  @pytest.mark.parametrize(
    ("flags", "message"),
    [
      ({"methods": "soprc,triplet"}, "--methods must be different names of soprc, ap, softmax"),
      ({"rates": "0.1,x"}, "--rates must be different numbers from 1e-12"),
      ({"steps": 25}, "--steps must be a multiple of 10, got 25"),
      ({"queries": 41}, "--queries=41, and only"),
      ({"val": "nowhere.txt"}, "--val=nowhere.txt must be a file in the LETOR format"),
    ],
  )
  def test_wrong_flags_are_named_before_the_folder_is_claimed(
    self, files, tmp_path, flags, message
  ):
    done = runs.call(_PROGRAM, *_command(files, tmp_path / "run", **flags))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()

  def test_a_file_that_is_given_twice_is_named(self, files, tmp_path):
    done = runs.call(_PROGRAM, *_command(files, tmp_path / "run", test=files / "train.txt"))
    assert done.returncode == 1
    assert "Error: --train and --test have the same content: give different queries" in done.stderr
    assert not (tmp_path / "run").exists()


class TestFlights:
  def test_days_become_queries(self, tmp_path):
    table, weather = flights.read("")
    days = (table["month"] == 1) & (table["day"] <= 4)
    splits = {"train": 2, "val": 1, "test": 1}
    flights_groups.write(tmp_path, (table[days], weather), splits=splits)
    train = letor.read(tmp_path / "train.txt", name="--train")
    test = letor.read(
      tmp_path / "test.txt", name="--test", num_features=train.features.shape[1] + 100
    )
    assert len(train.sizes) == 2
    assert not set(train.names) & set(test.names)
    there = table[days & (table["origin"] == "JFK") & table["arr_delay"].notna()]
    for name, size in zip(train.names, train.sizes, strict=True):
      assert size == (there["day"] == int(name.removeprefix("01-"))).sum()
    with pytest.raises(ValueError, match=r"train.txt exists already"):
      flights_groups.write(tmp_path, (table[days], weather), splits=splits)
    with pytest.raises(ValueError, match="are of 4 days"):
      flights_groups.write(tmp_path / "other", (table[days], weather), splits={"train": 3})
