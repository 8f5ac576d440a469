"""Tests that the strategies of soprc_jax.testing draw all documented cases, and nothing else."""

import importlib.util
import sys

import hypothesis
import numpy as np
import pytest

from soprc_jax import testing


def _finds(strategy, condition):
  """Returns whether the strategy draws an example that satisfies the condition; raises if not."""
  settings = hypothesis.settings(
    max_examples=2000, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
  )
  hypothesis.find(strategy, condition, settings=settings)


@hypothesis.given(lists=testing.score_lists(dtypes=testing.FLOAT_TYPES, limit=3.4e38))
def test_score_lists_are_finite_and_of_one_dtype(lists):
  positive, negative, positive_where, negative_where = lists
  assert positive.shape == positive_where.shape
  assert negative.shape == negative_where.shape
  assert (positive.shape[0], positive.shape[1], negative.shape[1]) in testing.LIST_SHAPES
  assert positive.dtype == negative.dtype
  assert positive_where.dtype == negative_where.dtype == bool
  assert np.isfinite(positive.astype(np.float64)).all()
  assert np.isfinite(negative.astype(np.float64)).all()


@pytest.mark.parametrize(
  "condition",
  [
    lambda s: np.all(s == s[0]),
    lambda s: np.abs(s).max() > 1e20,
    lambda s: np.any((s != 0) & (np.abs(s) < 1e-38)),
    lambda s: np.any(np.abs(s) == 1),
    lambda s: len(np.unique(s)) == 4,
    lambda s: np.any(np.signbit(s) & (s == 0)),
  ],
  ids=["ties", "huge", "subnormal", "bounds", "distinct", "negative_zero"],
)
def test_scores_hold_what_breaks_losses(condition):
  _finds(testing.scores((4,)), condition)


@pytest.mark.parametrize(
  "condition",
  [
    lambda b: not b.embeddings.any(),
    lambda b: np.any(~b.embeddings.any(axis=1)) and b.embeddings.any(),
    lambda b: len(np.unique(b.embeddings, axis=0)) == 1 and b.embeddings.any(),
    lambda b: len(np.unique(b.embeddings, axis=0)) == 6,
    lambda b: not b.where.any(),
    lambda b: b.where.all(),
    lambda b: len(set(b.labels)) == 6,
    lambda b: len(set(b.labels)) == 1,
    lambda b: b.labels.min() == -(2**31) and b.labels.max() == 2**31 - 1,
    lambda b: len({int(n) for n in np.unique(b.labels, return_counts=True)[1]}) == 3,
  ],
  ids=[
    "zeros",
    "zero_row",
    "equal",
    "distinct",
    "masked",
    "unmasked",
    "singletons",
    "one_class",
    "int32_ends",
    "unequal_classes",
  ],
)
def test_batches_hold_what_breaks_losses(condition):
  _finds(testing.embeddings_and_labels([(6, 3)]), condition)


@hypothesis.given(batch=testing.embeddings_and_labels([(6, 3), (0, 2)]))
def test_embeddings_have_unit_norm_or_are_zero(batch):
  norms = np.linalg.norm(batch.embeddings, axis=1)
  assert np.all((np.abs(norms - 1) < 1e-6) | (norms == 0))
  assert batch.labels.dtype == np.int32
  assert batch.labels.shape == batch.where.shape == norms.shape


@pytest.mark.parametrize("limit", [1.0, np.inf, np.nan])
def test_limit_is_told(limit):
  with pytest.raises(ValueError, match="limit must be a finite number, at least 2"):
    testing.scores(limit=limit)


def test_without_hypothesis_the_remedy_is_told(monkeypatch):
  monkeypatch.setitem(sys.modules, "hypothesis", None)
  spec = importlib.util.spec_from_file_location("testing_alone", testing.__file__)
  with pytest.raises(ImportError, match="pip install hypothesis"):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
