"""Tests which label sets are relevant to each other against Python's sets."""

import time

import numpy as np
import pytest

from soprc_jax.data import label_sets


def _drawn(seed, *, names=7, count=40, most=4):
  """Returns the sets of some patterns with gaps in their numbers."""
  rng = np.random.default_rng(seed)
  found = {
    frozenset(rng.choice(names, rng.integers(1, most + 1), replace=False).tolist())
    for _ in range(count)
  }
  numbers = 3 * rng.permutation(len(found)) + 5
  return {
    int(number): [f"label {name}" for name in one]
    for number, one in zip(numbers, sorted(found, key=sorted))
  }


def _is_relevant(one, other, least):
  one, other = set(one), set(other)
  shared = len(one & other)
  return shared > 0 if not least else shared / len(one | other) >= least


@pytest.mark.parametrize("least", [0.0, 1e-9, 1 / 3, 0.4, 0.5, 2 / 3, 0.75, 1.0])
def test_relevance_is_that_of_sets(least):
  drawn = _drawn(1)
  sets = label_sets.LabelSets(drawn, label_sets.Rule(";", least))
  patterns = np.array(sorted(drawn))
  wanted = np.array([[_is_relevant(drawn[a], drawn[b], least) for b in patterns] for a in patterns])
  np.testing.assert_array_equal(sets.relevant(patterns, patterns), wanted)
  rng = np.random.default_rng(2)
  rows, columns = rng.integers(len(patterns), size=(2, 60))
  np.testing.assert_array_equal(
    sets.relevant(patterns[rows], patterns[columns]), wanted[rows][:, columns]
  )
  others = rng.integers(len(patterns), size=(60, 4))
  np.testing.assert_array_equal(
    sets.relevant(patterns[rows], patterns[others]), wanted[rows[:, None], others]
  )
  np.testing.assert_array_equal(
    sets.count(patterns[rows], patterns[columns]), wanted[rows][:, columns].sum(axis=1)
  )


def test_a_third_counts_as_a_third():
  """Checks that no rounding decides: 1 of 3 labels is shared, and 1/3 is what is needed."""
  sets = label_sets.LabelSets({0: ["a", "b"], 1: ["b", "c"]}, label_sets.Rule(";", 1 / 3))
  assert sets.relevant(np.array([0]), np.array([1])).all()
  above = label_sets.LabelSets({0: ["a", "b"], 1: ["b", "c"]}, label_sets.Rule(";", 0.33334))
  assert not above.relevant(np.array([0]), np.array([1])).any()


def test_thousands_of_labels():
  names = [str(name) for name in range(20_000)]
  sets = label_sets.LabelSets({0: names, 1: names[:10_000]}, label_sets.Rule(";", 0.5))
  # A search from 1 for each number makes the square of these steps.
  began = time.process_time()
  unions = np.arange(1, 40_001)
  np.testing.assert_array_equal(sets.needed[1:], np.ceil(unions / 2))
  assert time.process_time() - began < 2
  assert sets.relevant(np.array([0]), np.array([1])).all()


def test_images_and_names_of_labels():
  sets = label_sets.LabelSets({2: ["b"], 5: ["b", "a"], 9: ["c"]}, label_sets.Rule(";"))
  assert (sets.names, sets.overlaps) == (["a", "b", "c"], True)
  assert sets.labels_of(5) == ["a", "b"]
  found = sets.images_by_label(np.array([5, 2, 5, 2]))  # no image has c
  assert [positions.tolist() for positions in found] == [[0, 2], [0, 1, 2, 3]]
  assert not label_sets.LabelSets({0: ["a"], 1: ["b"]}, label_sets.Rule(";")).overlaps


def test_the_text_of_a_rule():
  rule = label_sets.Rule(" | ", 0.5)
  assert label_sets.Rule.from_text(rule.to_text()) == rule
  for text in ("", "x", "3", "[3]", '["", 0]', '[";", 2]', '[";", "0"]', "[1, 0]", "null"):
    with pytest.raises(ValueError, match="is no separator with a least Jaccard index"):
      label_sets.Rule.from_text(text)
