"""Tests relevance masks and ignored pairs of lists and losses, by loops over pairs in float64."""

import functools
import math

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import pytest
import scipy.sparse

import soprc_jax
from soprc_jax import losses

_B, _LIMIT = 9, 0.6


def _batch(seed, gallery=None):
  """Returns embeddings, and masks that no labels make and that are not symmetric."""
  rng = np.random.default_rng(seed)
  embeddings = rng.normal(size=(_B, 3)) + 0.5
  embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
  shape = (_B, gallery or _B)
  positives, ignore = rng.random(shape) < 0.3, rng.random(shape) < 0.15
  return embeddings, positives, ignore, rng.random(_B) < 0.85


def _lists(embeddings, positives, ignore, where, limit=math.inf, gallery=None):
  """Returns the scores of the positives and of the negatives of each query, pair by pair."""
  found = []
  for i in range(len(embeddings)):
    sides = [], []
    for j in range(positives.shape[1]):
      usable = where[i] and (gallery is not None or (where[j] and i != j))
      score = embeddings[i] @ (embeddings if gallery is None else gallery)[j]
      if usable and not ignore[i, j] and (positives[i, j] or score <= limit):
        sides[0 if positives[i, j] else 1].append(score)
    found.append(sides)
  return found


def _contrastive(rows, where):
  return sum(sum(1 - s for s in p) + sum(max(s - 0.5, 0) for s in n) for p, n in rows)


def _triplet(rows, where):
  total = sum(max(s - h + 0.1, 0) for p, n in rows for h in p for s in n)
  return total / max(where.sum(), 1)


def _sup_con(rows, where):
  losses_ = []
  for p, n in rows:
    if p:
      total = math.log(sum(math.exp(s / 0.07) for s in p + n))
      losses_.append(total - np.mean(p) / 0.07)
  return np.mean(losses_) if losses_ else 0.0


def _smooth_ap(rows, where):
  def sigmoid(x):
    return 0.5 * (1 + math.tanh(x / 2))

  losses_ = []
  for p, n in rows:
    if p and n:
      among = [0.5 + sum(sigmoid((s - h) / 0.01) for s in p) for h in p]
      others = [sum(sigmoid((s - h) / 0.01) for s in n) for h in p]
      losses_.append(1 - np.mean([a / (a + o) for a, o in zip(among, others)]))
  return np.mean(losses_) if losses_ else 0.0


def _blackbox(rows, where):
  """Computes 1 - AP at the ranks of the positives, behind equal negatives."""
  losses_ = []
  for p, n in rows:
    if p and n:
      hits = [sum(s >= h for s in p) for h in p]
      retrieved = [hit + sum(s >= h for s in n) for hit, h in zip(hits, p)]
      losses_.append(1 - sum(h / r for h, r in zip(hits, retrieved)) / (len(p) + 1e-5))
  return np.mean(losses_) if losses_ else 0.0


_LOSSES = {
  "contrastive": (losses.contrastive_loss, _contrastive),
  "triplet": (losses.triplet_loss, _triplet),
  "sup_con": (losses.sup_con_loss, _sup_con),
  "smooth_ap": (functools.partial(losses.smooth_ap_loss, include_self=False), _smooth_ap),
  "blackbox": (
    functools.partial(losses.blackbox_ap_loss, include_self=False, interclass_coef=0.0),
    _blackbox,
  ),
}


@functools.cache
def _compiled(name):
  loss_fn = _LOSSES[name][0]

  def value(embeddings, positives, ignore, where, limit):
    return loss_fn(embeddings, positives=positives, ignore=ignore, where=where, ignore_above=limit)

  return jax.jit(jax.value_and_grad(value))


@pytest.mark.parametrize("name", list(_LOSSES))
@hypothesis.given(seed=st.integers(0, 2**16), limit=st.sampled_from([1.1, _LIMIT]))
@hypothesis.settings(max_examples=10)
def test_losses_by_loops_over_pairs(name, seed, limit):
  embeddings, *masks = _batch(seed)
  with jax.enable_x64(True):
    value, _ = _compiled(name)(embeddings, *masks, limit)
  want = _LOSSES[name][1](_lists(embeddings, *masks, limit), masks[-1])
  np.testing.assert_allclose(value, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["contrastive", "triplet", "sup_con", "smooth_ap"])
def test_gradients_by_differences_of_the_loops(name):
  """Checks that gradients do not assume that the mask is symmetric."""
  embeddings, *masks = _batch(3)

  def loss(change):
    return _LOSSES[name][1](_lists(embeddings + change, *masks, _LIMIT), masks[-1])

  want, step = np.zeros_like(embeddings), 1e-6
  for index in np.ndindex(*embeddings.shape):
    change = np.zeros_like(embeddings)
    change[index] = step
    want[index] = (loss(change) - loss(-change)) / (2 * step)
  with jax.enable_x64(True):
    _, gradient = _compiled(name)(embeddings, *masks, _LIMIT)
  assert np.abs(want).max() > 0
  np.testing.assert_allclose(gradient, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("limit", [None, _LIMIT])
def test_lists_by_loops_over_pairs(own, limit):
  embeddings, positives, ignore, where = _batch(4, gallery=None if own else 13)
  others = None if own else np.random.default_rng(5).normal(size=(13, 3)) / 2
  options = {"positives": positives, "ignore": ignore, "ignore_above": limit, "where": where}
  with jax.enable_x64(True):
    found = soprc_jax.retrieval_lists(embeddings, gallery=others, **options)
  want = _lists(embeddings, positives, ignore, where, limit or math.inf, others)
  for i, sides in enumerate(want):
    for scores, valid, row in zip(found[:4:2], found[1:4:2], sides):
      np.testing.assert_allclose(scores[i][valid[i]], row, rtol=1e-12)


@pytest.mark.parametrize("name", list(_LOSSES))
def test_ignored_negatives_of_labels(name):
  embeddings, _, ignore, where = _batch(6)
  labels = np.arange(_B) % 3
  masks = labels[:, None] == labels, ignore, where
  with jax.enable_x64(True):
    value = _LOSSES[name][0](embeddings, labels, ignore=ignore, where=where, ignore_above=_LIMIT)
  want = _LOSSES[name][1](_lists(embeddings, *masks, _LIMIT), where)
  np.testing.assert_allclose(value, want, rtol=1e-9)


def test_no_gradient_passes_through_the_limit():
  embeddings, positives, ignore, where = _batch(7)
  value_and_grad = jax.jit(jax.value_and_grad(functools.partial(losses.contrastive_loss)))
  above = embeddings @ embeddings.T > _LIMIT
  assert (above & ~positives).any()
  options = {"positives": positives, "where": where}
  with jax.enable_x64(True):
    limited = value_and_grad(embeddings, ignore=ignore, ignore_above=_LIMIT, **options)
    masked = value_and_grad(embeddings, ignore=ignore | (above & ~positives), **options)
  chex.assert_trees_all_equal(limited, masked)


@pytest.mark.parametrize("max_positives", [1, 2])
def test_too_many_positives_are_dropped_and_are_no_negatives(max_positives):
  embeddings, positives, ignore, where = _batch(8)
  found = soprc_jax.retrieval_lists(
    embeddings, positives=positives, ignore=ignore, where=where, max_positives=max_positives
  )
  rows = _lists(embeddings, positives, ignore, where)
  counts = np.array([len(p) for p, _ in rows])
  assert counts.max() > max_positives
  np.testing.assert_array_equal(found.positive_where.sum(axis=1), counts.clip(max=max_positives))
  np.testing.assert_array_equal(found.negative_where.sum(axis=1), [len(n) for _, n in rows])
  assert found.num_dropped == (counts - max_positives).clip(min=0).sum()


def test_width_of_a_known_mask_counts_ignored_and_masked_pairs_out():
  embeddings, where = _batch(9)[0], np.arange(_B) != 8
  positives, ignore = np.zeros((_B, _B), bool), np.zeros((_B, _B), bool)
  positives[0], ignore[0, 1:5] = True, True  # 5, 6 and 7 are left
  options = {"positives": positives, "ignore": ignore, "where": where}
  value = losses.smooth_ap_loss(embeddings, **options)
  np.testing.assert_array_equal(
    losses.smooth_ap_loss(embeddings, max_positives=3, **options), value
  )
  with pytest.raises(ValueError, match=r"max_positives=2 is too small: .* has 3 positives"):
    losses.smooth_ap_loss(embeddings, max_positives=2, **options)


def test_a_query_in_the_memory_is_never_compared_with_itself_by_the_mask():
  embeddings, positives, *_ = _batch(10)
  embeddings = np.float32(embeddings)
  memory = soprc_jax.embedding_memory(12, 3)
  ahead = memory.lookahead(memory.init(None), embeddings, np.arange(_B))
  columns = np.asarray(ahead.labels)
  for diagonal in (False, True):
    np.fill_diagonal(positives, diagonal)
    got = losses.xbm_contrastive_loss(embeddings, None, ahead, positives=positives[:, columns])
    rows = _lists(embeddings, positives, np.zeros_like(positives), np.ones(_B, bool))
    np.testing.assert_allclose(got, _contrastive(rows, None) / _B, rtol=1e-5)


def _on_two_devices(positives):
  embeddings = np.float32(_batch(0)[0][:8])

  def loss(embeddings, positives):
    return losses.sup_con_loss(embeddings, positives=positives, axis_name=mapping.AXIS)

  return mapping.on_devices(loss, "shard_map")(mapping.split(embeddings), mapping.split(positives))


def _memory():
  stored = soprc_jax.memory.Memory(jnp.ones((4, 3)), jnp.arange(4), jnp.ones(4, bool))
  return {"memory": stored, "positives": np.eye(_B)}


_EMBEDDINGS = np.float32(_batch(0)[0])
_NEEDS_V = soprc_jax.score_ema(4, 5, 0.1)


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda e: losses.triplet_loss(e), ValueError, "either labels or positives.*got neither"),
    (
      lambda e: losses.triplet_loss(e, np.arange(_B), positives=np.eye(_B)),
      ValueError,
      "either labels or positives.*got both",
    ),
    (
      lambda e: losses.fast_ap_loss(e, positives=np.eye(4)),
      AssertionError,
      r"positives must be \[B, G\] = \(9, 9\)",
    ),
    (
      lambda e: losses.fast_ap_loss(e, np.arange(_B), ignore=np.ones((1, _B))),
      AssertionError,
      r"ignore must be \[B, G\] = \(9, 9\)",
    ),
    (
      lambda e: losses.sup_ap_loss(e, positives=2 * np.eye(_B)),
      ValueError,
      "positives must be a mask of booleans, got 2.0 in it: compare numbers first",
    ),
    (
      lambda e: losses.auroc_loss(e, np.arange(_B), ignore_above=np.nan),
      ValueError,
      "ignore_above must lie in",
    ),
    (
      lambda e: losses.auroc_loss(e, np.arange(_B), ignore_above=True),
      ValueError,
      "ignore_above must be a number, got True",
    ),
    (
      lambda e: losses.auroc_loss(e, positives=scipy.sparse.csr_matrix(np.eye(_B))),
      TypeError,
      r"positives must be an array \[B, G\] here, got csr_matrix: pass .*toarray\(\)",
    ),
    (
      lambda e: losses.auroc_loss(e, np.arange(_B), ignroe=np.eye(_B)),
      TypeError,
      "unexpected keyword argument 'ignroe'; the options of pairs are positives, ignore, ",
    ),
    (
      lambda e: losses.auroc_loss(e, np.arange(_B), ignore_above=np.ones(_B)),
      ValueError,
      r"ignore_above must be a number, got shape \(9,\)",
    ),
    (
      lambda e: _on_two_devices(np.ones((8, 4), bool)),
      AssertionError,
      r"positives must be \[B, G\] = \(4, 8\).*axis_name.*all devices",
    ),
    (
      lambda e: losses.blackbox_ap_loss(e, **_memory()),
      ValueError,
      "cannot be combined with memory",
    ),
    (
      lambda e: losses.recall_at_k_loss(e, positives=np.eye(_B), mixup=True, key=jax.random.key(0)),
      ValueError,
      "mixup needs labels",
    ),
    (
      lambda e: soprc_jax.retrieval_lists(
        e, positives=np.eye(_B), gallery=e, gallery_labels=np.arange(_B)
      ),
      ValueError,
      "gallery_labels needs labels",
    ),
    (
      lambda e: soprc_jax.retrieval_loss(
        e, positives=np.eye(_B), tracker=_NEEDS_V, opt_state=_NEEDS_V.init(None), prior=0.1
      ),
      ValueError,
      "positives needs list_ids",
    ),
    (
      lambda e: losses.contrastive_loss(e, np.arange(_B), gallery=e),
      TypeError,
      "unexpected keyword argument 'gallery'",
    ),
  ],
)
def test_bad_masks_are_reported(make, error, message):
  with pytest.raises(error, match=f"(?s){message}"):
    make(_EMBEDDINGS)
