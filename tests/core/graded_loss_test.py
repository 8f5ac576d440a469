"""Tests the graded SOPRC loss against float64 references, H-AP, and the loss of a single level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from soprc_jax import graded_loss, graded_retrieval_loss, metrics, retrieval_loss, score_ema

pytestmark = pytest.mark.core

B, D, C, S, M = 14, 5, 6, 3, 4
_GAINS = (1.0, 0.3)
_OPTIONS = {"tau1": 0.3, "tau2": 0.05}


def _images(seed=0):
  """Returns embeddings, ``[B, 2]`` labels, counts and a mask."""
  rng = np.random.default_rng(seed)
  embeddings = rng.normal(size=(B, D))
  classes = rng.integers(0, C, B)
  labels = np.stack([classes, rng.integers(0, S, C)[classes]], 1)
  counts = rng.integers(3, 6, (B, 2)) + np.array([0, 10])
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  return np.float32(embeddings), labels, counts, rng.random(B) < 0.8


def _used(seed=2):
  tracker = score_ema(C + S, M, 0.3, bounds=(-1, 1))
  rng = np.random.default_rng(seed)
  ids = np.arange(C + S)
  scores = np.float32(rng.uniform(-1, 1, (C + S, 3)))
  state = tracker.update(None, tracker.init(None), positive_scores=scores, list_ids=ids)[1]
  return tracker, state


def _wanted(embeddings, labels, counts, where, v, link="share", rates=None):
  """Returns the loss in float64 and the T of each list, which the gradient does not pass."""
  scores = embeddings.astype(np.float64) @ embeddings.astype(np.float64).T
  steps = np.array([_GAINS[0] - _GAINS[1], _GAINS[1]])
  total, weight, found = 0.0, 0.0, {}
  for level in range(2):
    for query in np.flatnonzero(where):
      others = np.flatnonzero(where & (np.arange(B) != query))
      same = labels[others, level] == labels[query, level]
      positives, negatives = scores[query, others[same]], scores[query, others[~same]]
      if not len(positives) or not len(negatives):
        continue
      found[level, query] = reference.true_positive_rates(
        positives, v[level, query], 1 / (M + 1), _OPTIONS["tau2"]
      )
      rate = (rates or found)[level, query]
      risk = reference.list_risk(
        positives, negatives, rate, (0.1, 0.4)[level], _OPTIONS["tau1"], link, 1e-37
      )
      own = steps[level] * counts[query, level] / (steps * counts[query]).sum()
      total, weight = total + own * risk, weight + own
  return total / weight, found


def _call(embeddings, labels, counts, where, tracker, state, **options):
  return graded_retrieval_loss(
    embeddings,
    labels,
    tracker=tracker,
    opt_state=(state,),
    list_ids=labels + np.array([0, C]),
    gains=_GAINS,
    num_positives=counts,
    prior=np.float32([0.1, 0.4]),
    where=where,
    **_OPTIONS,
    **options,
  )


@pytest.mark.parametrize("link", ["share", "log"])
def test_loss_and_gradient_match_a_reference(link):
  embeddings, labels, counts, where = _images()
  tracker, state = _used()
  (loss, update_args), gradient = jax.jit(
    jax.value_and_grad(
      lambda e: _call(e, labels, counts, where, tracker, state, link=link), has_aux=True
    )
  )(embeddings)
  _, moved = tracker.update(None, state, **update_args)
  rows = labels + np.array([0, C])
  v = np.stack([np.asarray(moved.v, np.float64)[rows[:, level]] for level in range(2)])
  want, rates = _wanted(embeddings, labels, counts, where, v, link)
  assert want > 0
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  change = np.random.default_rng(3).normal(size=embeddings.shape)
  ends = [
    _wanted(embeddings.astype(np.float64) + step, labels, counts, where, v, link, rates)[0]
    for step in (1e-6 * change, -1e-6 * change)
  ]
  np.testing.assert_allclose(np.sum(gradient * change), (ends[0] - ends[1]) / 2e-6, rtol=1e-4)
  assert not np.any(gradient[~where])


def test_the_rows_of_both_levels_move():
  embeddings, labels, counts, where = _images()
  tracker, state = _used()
  _, update_args = _call(embeddings, labels, counts, where, tracker, state)
  moved = tracker.update(None, state, **update_args)[1]
  seen = [np.unique(labels[where, level], return_counts=True) for level in (0, 1)]
  want = np.r_[seen[0][0][seen[0][1] > 1], C + seen[1][0][seen[1][1] > 1]]
  np.testing.assert_array_equal(np.flatnonzero(np.any(moved.v != state.v, axis=1)), np.sort(want))


def test_one_level_is_the_plain_loss():
  embeddings, labels, counts, where = _images()
  tracker, state = _used()
  shared = {"tracker": tracker, "opt_state": state, "where": where, "prior": 0.2, **_OPTIONS}
  got = graded_retrieval_loss(
    embeddings,
    labels[:, :1],
    list_ids=labels[:, :1],
    gains=(0.5,),
    num_positives=counts[:, :1],
    max_positives=3,
    **shared,
  )[0]
  want = retrieval_loss(embeddings, labels[:, 0], max_positives=3, **shared)[0]
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_h_ap_is_the_weighted_mean_of_the_levels():
  """Ties the weights of the loss to the metric of the same gains."""
  embeddings, labels, _, _ = _images()
  found = metrics.graded_metrics(embeddings, labels, gains=_GAINS, per_query=True)
  counts = (labels[:, None] == labels[None]).sum(axis=1) - 1
  weights = np.asarray(graded_loss.level_weights(_GAINS, counts))
  want = np.nansum(weights.T * found["ap_per_level"], axis=0)
  has = counts[:, 1] > 0
  np.testing.assert_allclose(found["h_ap_per_query"][has], want[has], rtol=1e-6)
  np.testing.assert_allclose(weights.sum(axis=1), has, rtol=1e-6)


def test_mistakes():
  embeddings, labels, counts, where = _images()
  tracker, state = _used()
  for gains in ((0.3, 1.0), (1.0, 0.0), (1.0, 1.0), (1.0, np.nan), (), 1.0):
    with pytest.raises(ValueError, match="gains must be decreasing numbers > 0"):
      graded_loss.level_weights(gains, counts)
  for wrong in (np.nan, np.inf, -1.0):
    changed = np.where(np.arange(B)[:, None] == 3, wrong, counts)
    with pytest.raises(ValueError, match=r"num_positives must lie in \[0, inf\), got"):
      graded_loss.level_weights(_GAINS, changed)
    on_device = np.asarray(graded_loss.level_weights(_GAINS, jnp.asarray(changed)))
    np.testing.assert_array_equal(np.isnan(on_device).any(axis=1), np.arange(B) == 3)
  with pytest.raises(AssertionError, match="as many as gains"):
    graded_loss.level_weights((1.0,), counts)
  with pytest.raises(AssertionError, match=r"where must be \[B\]"):
    _call(embeddings, labels, counts, where[:3], tracker, state)
  with pytest.raises(ValueError, match=r"must be \[B, L\]"):
    graded_retrieval_loss(
      embeddings,
      labels[:, 0],
      tracker=tracker,
      opt_state=state,
      list_ids=labels[:, 0],
      gains=(1.0,),
      num_positives=counts,
      prior=0.1,
    )
  with pytest.raises(ValueError, match="same axis_name"):
    _call(embeddings, labels, counts, where, tracker, state, axis_name="devices")


def test_no_valid_list():
  embeddings, labels, counts, _ = _images()
  tracker, state = _used()
  loss, gradient = jax.value_and_grad(
    lambda e: _call(e, labels, counts, np.zeros(B, bool), tracker, state)[0]
  )(jnp.asarray(embeddings))
  assert loss == 0
  assert not np.any(gradient)
