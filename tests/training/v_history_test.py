"""Tests v.jsonl: the auxiliary vector v of some classes over a run.

It also has the scores that v follows.
"""

import json

import numpy as np
import pytest
import runs

from soprc_jax import interpolation
from soprc_jax.data import sources
from soprc_jax.training import build, evaluation, v_history, workdir


@pytest.fixture(scope="module")
def lines():
  return list(workdir.read_lines(runs.finished().workdir / v_history.FILE))


@pytest.fixture(scope="module")
def data():
  return build.make_data(runs.tiny_config())


def _phi_of_pairs(embeddings, num_points):
  """Returns phi, one image after the other, each with its own list."""
  rows = []
  for query in range(len(embeddings)):
    scores = np.array(
      [embeddings[query] @ embeddings[other] for other in range(len(embeddings)) if other != query]
    )
    rows.append(interpolation.interpolate_scores(scores, num_points=num_points, bounds=(-1.0, 1.0)))
  return np.mean(rows, axis=0)


def test_a_line_an_evaluation_of_four_classes(lines, data):
  assert [line["step"] for line in lines] == [3, 6, 9, 12, 15, 18, 21, 24]
  rows = [[entry["row"] for entry in line["classes"]] for line in lines]
  assert len(rows[0]) == 4
  assert (rows[0][0], rows[0][-1]) == (0, len(data.rows) - 1)
  assert all(row == rows[0] for row in rows)


def test_v_is_that_of_the_checkpoint(lines):
  state = runs.states(runs.finished().workdir)
  (v,) = [
    leaf for path, leaf in state.items() if path.startswith("checkpoints") and path.endswith(".v")
  ]
  (weight,) = [
    leaf
    for path, leaf in state.items()
    if path.startswith("checkpoints") and path.endswith(".weight")
  ]
  for entry in lines[-1]["classes"]:
    np.testing.assert_allclose(entry["v"], v[entry["row"]], atol=1e-6)
    np.testing.assert_allclose(entry["weight"], weight[entry["row"]], atol=1e-6)


def test_true_scores_are_those_of_the_network(lines, data):
  trained = evaluation.load(runs.tiny_config(), runs.finished().workdir, newest=True)
  labels = {row: label for label, row in data.rows.items()}
  for entry in lines[-1]["classes"]:
    positions = np.flatnonzero(data.splits["train"].labels == labels[entry["row"]])
    embedded = trained.embed(trained.variables, sources.Subset(data.splits["train"], positions))
    np.testing.assert_allclose(entry["true"], _phi_of_pairs(embedded.embeddings, 20), atol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_true_scores_of_a_class(seed):
  embeddings = np.random.default_rng(seed).normal(size=(5 + seed, 3))
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  np.testing.assert_allclose(
    v_history.true_scores(embeddings, 7), _phi_of_pairs(embeddings, 7), atol=1e-6
  )


def test_true_scores_of_a_pattern():
  """Checks queries of a pattern against all relevant images, of which they may be some."""
  embeddings = np.random.default_rng(0).normal(size=(7, 3))
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  queries, candidates = np.arange(7) < 2, np.arange(7) > 0
  wanted = [
    interpolation.interpolate_scores(
      np.array([embeddings[q] @ embeddings[i] for i in range(1, 7) if i != q]),
      num_points=5,
      bounds=(-1.0, 1.0),
    )
    for q in range(2)
  ]
  found = v_history.true_scores(embeddings, 5, queries=queries, candidates=candidates)
  np.testing.assert_allclose(found, np.mean(wanted, axis=0), atol=1e-6)
  nothing = v_history.true_scores(embeddings, 5, queries=np.zeros(7, bool), candidates=candidates)
  np.testing.assert_array_equal(nothing, np.zeros(5))


def test_a_class_without_a_pair_has_no_scores():
  np.testing.assert_array_equal(v_history.true_scores(np.ones((1, 3)), 4), np.zeros(4))


def test_a_large_class_is_thinned():
  labels = np.repeat([4, 9], [3, 1000])
  np.testing.assert_array_equal(v_history.images(labels, 4), [0, 1, 2])
  found = v_history.images(labels, 9)
  assert (len(found), found[0], found[-1]) == (200, 3, 1002)


def _visits(folder, data, first, last, **settings):
  """Returns the visits after the steps from ``first`` to ``last`` are counted."""
  history = v_history.VHistory(folder, runs.tiny_config(), data, last_step=first - 1, **settings)
  for step in range(first, last + 1):
    history.count(step, data.sampler)
  history.close()
  return history.visits


def test_visits_are_the_batches_that_held_the_class(tmp_path):
  few = build.make_data(runs.tiny_config(**{"data.train_share": 0.01}))
  labels = few.splits["train"].labels
  followed = v_history.choose(labels, 4)
  expected = np.zeros((2, 4), int)
  for number in range(7, 25):  # after six steps of warm-up
    for place, label in enumerate(followed):
      if label in labels[few.sampler(number - 1).positions]:
        expected[0, place] += 1
        expected[1, place] = number
  assert expected.min() > 0
  assert len(set(expected[1])) > 1
  np.testing.assert_array_equal(_visits(tmp_path, few, 7, 24), expected)
  half = _visits(tmp_path, few, 7, 15)
  np.testing.assert_array_equal(_visits(tmp_path, few, 16, 24, visits=half), expected)


def _write(folder, data, step, **entry):
  rows = [data.rows[label] for label in v_history.choose(data.splits["train"].labels, 4)]
  line = {
    "step": step,
    "classes": [{"row": row, "visits": 5, "last_visit": 2} | entry for row in rows],
  }
  (folder / v_history.FILE).write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("visits", [None, [[5] * 3, [2] * 3]])
def test_other_classes_are_counted_anew(tmp_path, data, visits):
  history = v_history.VHistory(tmp_path, runs.tiny_config(), data, last_step=18, visits=visits)
  history.close()
  assert history.visits == [[0] * 4, [0] * 4]


def test_lines_of_later_steps_are_dropped(tmp_path, data):
  _write(tmp_path, data, 18)
  _visits(tmp_path, data, 13, 13)
  assert (tmp_path / v_history.FILE).read_text() == ""


@pytest.mark.parametrize(
  "values", [{"loss.name": "triplet"}, {"loss.v": "batch"}, {"log.v_classes": 0}]
)
def test_runs_without_v_write_nothing(tmp_path, data, values):
  history = v_history.VHistory(tmp_path, runs.tiny_config(**values), data, last_step=0)
  assert history.measure(3, None, None, None) is None
  history.write(None)
  history.sync()
  history.close()
  assert list(tmp_path.iterdir()) == []
