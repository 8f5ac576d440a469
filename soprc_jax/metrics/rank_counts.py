"""Average precision and ranks of queries, from the scores of their positives and counts."""

from typing import NamedTuple

import numpy as np


class Ranks(NamedTuple):
  """Holds the ranks of some queries.

  Attributes:
    ap: ``[n]`` average precision (Eq. 2); NaN without a positive.
    above: ``[n]`` number of negatives that score at least as high as the best positive; -1 without
      a positive.
  """

  ap: np.ndarray
  above: np.ndarray


def padded(place: np.ndarray, scores: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  """Returns the scores of the positives of each query, ascending and padded by inf, ``[n, P]``.

  ``place`` must be ascending.
  """
  # Powers of two, so that few different shapes are compiled.
  width = 1 << int(numbers.max(initial=1) - 1).bit_length()
  padded = np.full((len(numbers), width), np.inf, scores.dtype)
  padded[place, np.arange(len(place)) - np.repeat(np.cumsum(numbers) - numbers, numbers)] = scores
  return np.sort(padded, axis=1)


def from_counts(positives: np.ndarray, numbers: np.ndarray, retrieved: np.ndarray) -> Ranks:
  """Computes ranks from the number of candidates at or above each positive.

  Args:
    positives: ``[n, P]`` scores, ascending, padded at the end.
    numbers: ``[n]`` number of positives of each query.
    retrieved: ``[n, P]`` number of candidates at or above each positive.
  """
  hits = num_hits(positives, numbers)
  ap, above = np.full(len(numbers), np.nan), np.full(len(numbers), -1)
  for number in np.unique(numbers[numbers > 0]):
    same = numbers == number
    # Queries with the same number of positives are averaged together, so that the numbers are added
    # in the same order as for a single query.
    ap[same] = np.mean(hits[same, :number] / np.maximum(retrieved[same, :number], 1), axis=1)
    above[same] = retrieved[same, number - 1] - hits[same, number - 1]
  return Ranks(ap, above)


def num_hits(positives: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  """Counts the positives that score at least as high as each one, ``[n, P]``, see `from_counts`."""
  is_first = np.concatenate(
    [np.ones((len(positives), 1), bool), positives[:, 1:] != positives[:, :-1]], axis=1
  )
  # All positives from the first equal one on score at least as high.
  below = np.maximum.accumulate(np.where(is_first, np.arange(positives.shape[1]), 0), axis=1)
  return numbers[:, None] - below
