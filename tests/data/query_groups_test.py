"""Tests query groups: padded batches equal single lists, and batches follow (seed, step)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

import soprc_jax
from soprc_jax import metrics
from soprc_jax.data import query_groups


@pytest.fixture
def groups():
  """Returns eight queries of 2 to 21 documents, the last one without a relevant document."""
  rng = np.random.default_rng(0)
  sizes = np.array([5, 2, 21, 9, 16, 17, 3, 4])
  relevance = rng.integers(0, 3, sizes.sum()).astype(np.float32)
  relevance[:2], relevance[-4:] = (0, 2), 0
  features = rng.normal(size=(sizes.sum(), 3))
  return query_groups.QueryGroups(features, relevance, sizes, tuple("abcdefgh"))


def _singles(groups):
  starts = [int(start) for start in groups.starts]
  return [slice(start, start + int(size)) for start, size in zip(starts, groups.sizes, strict=True)]


class TestGroups:
  def test_counts(self, groups):
    relevance = [groups.relevance[rows] for rows in _singles(groups)]
    assert groups.relevant.tolist() == [int((one > 0).sum()) for one in relevance]
    assert groups.shares.tolist() == [float((one > 0).mean()) for one in relevance]
    assert groups.graded.tolist() == [bool(one.min() < one.max()) for one in relevance]
    assert groups.relevant[-1] == 0
    assert not groups.graded[-1]


class TestPadding:
  @pytest.mark.parametrize(
    ("chosen", "length"), [([1], 2), ([0, 6], 8), ([4, 1], 16), ([5], 21), ([0, 2], 21)]
  )
  def test_length_is_a_power_of_two_or_the_longest(self, groups, chosen, length):
    rows, where = query_groups.padded_rows(groups, np.array(chosen))
    assert rows.shape == where.shape == (len(chosen), length)
    for query, own, mask in zip(chosen, rows, where, strict=True):
      start, size = groups.starts[query], groups.sizes[query]
      assert own[mask].tolist() == list(range(start, start + size))
      assert not own[~mask].any()

  def test_no_query_is_cut(self, groups):
    with pytest.raises(ValueError, match="length=20 would cut the query 'c' of 21 documents"):
      query_groups.padded_rows(groups, np.arange(8), length=20)

  @pytest.mark.parametrize("loss", ["soprc", "ap"])
  def test_loss_and_gradient_equal_those_of_single_lists_in_float64(self, groups, loss):
    with jax.enable_x64(True):
      weights = jnp.array([0.3, -1.0, 0.5])
      features, relevance = jnp.asarray(groups.features), jnp.asarray(groups.relevance)
      v = np.sort(np.random.default_rng(1).normal(size=(8, 6)))

      def of_lists(scores, relevance, where, v, prior, reduce_fn):
        lists = soprc_jax.binary_lists(scores, relevance, where=where)
        scores, options = (
          (lists.positive_scores, lists.negative_scores),
          {**lists.masks, "tau1": 1.0, "reduce_fn": reduce_fn},
        )
        if loss == "ap":
          return soprc_jax.ap_loss(*scores, **options)
        return soprc_jax.soprc_loss(*scores, v, prior=prior, link="log", **options)

      def padded(weights):
        rows, where = query_groups.padded_rows(groups, np.arange(8))
        prior = jnp.asarray(np.maximum(groups.shares, 0.1))
        return of_lists((features @ weights)[rows], relevance[rows], where, v, prior, jnp.mean)

      def singles(weights):
        values = [
          of_lists(
            (features[rows] @ weights)[None],
            relevance[rows][None],
            None,
            v[query : query + 1],
            np.maximum(groups.shares[query : query + 1], 0.1),
            None,
          )[0]
          for query, rows in enumerate(_singles(groups))
        ]
        both = (groups.relevant > 0) & (groups.relevant < groups.sizes)
        return jnp.sum(jnp.stack(values)) / float(both.sum())

      for ours, theirs in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(padded))(weights)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(singles))(weights)),
        strict=True,
      ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)

  def test_average_precision_equals_scikit_learn(self, groups):
    scores = np.random.default_rng(2).integers(0, 6, len(groups.relevance)).astype(np.float32)
    rows, where = query_groups.padded_rows(groups, np.arange(8))
    found = metrics.auprc(scores[rows], groups.relevance[rows], where=where)
    for value, own in zip(found, _singles(groups), strict=True):
      relevant = groups.relevance[own] > 0
      expected = average_precision_score(relevant, scores[own]) if relevant.any() else 0.0
      assert float(value) == pytest.approx(expected, abs=1e-6)


class TestSampler:
  def test_every_query_once_in_an_epoch_and_a_pure_function_of_seed_and_step(self):
    sampler = query_groups.GroupSampler(12, batch_size=4, seed=3)
    batches = [sampler(step) for step in range(6)]
    for first in (0, 3):
      assert sorted(np.concatenate(batches[first : first + 3]).tolist()) == list(range(12))
    assert np.concatenate(batches[:3]).tolist() != np.concatenate(batches[3:]).tolist()
    again = query_groups.GroupSampler(12, batch_size=4, seed=3)
    np.testing.assert_array_equal(again(5), batches[5])
    other = query_groups.GroupSampler(12, batch_size=4, seed=4)
    assert other(0).tolist() != batches[0].tolist()

  @pytest.mark.parametrize("size", [1, 13])
  def test_wrong_sizes_are_named(self, size):
    with pytest.raises(ValueError, match=rf"a batch must have 2 to 12 queries.* got {size}"):
      query_groups.GroupSampler(12, batch_size=size, seed=0)
