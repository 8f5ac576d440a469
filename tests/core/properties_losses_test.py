"""Tests the losses of embeddings, and retrieval_lists, on any batch.

Batches have zero rows, duplicates, classes of one image, masks and any labels.
"""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soprc_jax
from soprc_jax import losses, testing

# A quarter of the number of examples in the profile of tests/conftest.py.
_FEW = hypothesis.settings.default.max_examples // 4

B, D = 6, 3


def _xbm(embeddings, labels, *, where):
  memory = soprc_jax.embedding_memory(8, D)
  ahead = memory.lookahead(memory.init(None), embeddings, labels, where)
  return losses.xbm_contrastive_loss(embeddings, labels, ahead, where=where)


_LOSSES = {
  "contrastive": losses.contrastive_loss,
  "contrastive_active": functools.partial(losses.contrastive_loss, average_active=True),
  "triplet": losses.triplet_loss,
  "multi_similarity": losses.multi_similarity_loss,
  "smooth_ap": losses.smooth_ap_loss,
  "sup_con": losses.sup_con_loss,
  "sigmoid": losses.sigmoid_loss,
  "sup_ap": losses.sup_ap_loss,
  "quad_linear_ap": losses.quad_linear_ap_loss,
  "recall_at_k": losses.recall_at_k_loss,
  "fast_ap": losses.fast_ap_loss,
  "listwise_ap": losses.listwise_ap_loss,
  "auroc_huber": losses.auroc_loss,
  "auroc_logistic": functools.partial(losses.auroc_loss, surrogate="logistic"),
  "auroc_sigmoid": functools.partial(losses.auroc_loss, surrogate="sigmoid", include_self=False),
  "xbm": _xbm,
  "blackbox": losses.blackbox_ap_loss,
}
_IN_UNIT_INTERVAL = (
  "smooth_ap",
  "quad_linear_ap",
  "recall_at_k",
  "fast_ap",
  "listwise_ap",
  "auroc_sigmoid",
  "blackbox",
)
# The order decides which of several equal scores gets the gradient of a rank.
_VALUE_ONLY = ("blackbox",)
_each_loss = pytest.mark.parametrize("name", list(_LOSSES))
_batches = testing.embeddings_and_labels([(B, D)])


@functools.cache
def _compiled(name):
  return jax.jit(jax.value_and_grad(lambda e, y, w: _LOSSES[name](e, y, where=w)))


def _run(name, embeddings, labels, where):
  value, gradient = _compiled(name)(embeddings, labels, where)
  return np.asarray(value), np.asarray(gradient)


@_each_loss
@hypothesis.given(
  batch=_batches, scale=st.sampled_from([1.0, 1e-20, 30.0]), seed=st.integers(0, 2**16)
)
def test_any_batch(name, batch, scale, seed):
  """Checks that the loss is finite, in its range and independent of order and of masked images. The
  embeddings have any norm: missing normalization is a mistake, but must not end a run with NaN.
  """
  embeddings, labels, where = batch
  embeddings = np.float32(embeddings * scale)
  value, gradient = _run(name, embeddings, labels, where)
  assert value.dtype == gradient.dtype == np.float32
  assert value.shape == ()
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  # XBM sums 1 - s, which is negative where vectors that are not normalized have s > 1.
  assert value >= 0 or (name == "xbm" and scale > 1)
  if name in _IN_UNIT_INTERVAL:
    assert value <= 1
  assert not gradient[~where].any()
  spoiled = np.where(where[:, None], embeddings, np.nan).astype(np.float32)
  got, got_gradient = _run(name, spoiled, labels, where)
  np.testing.assert_array_equal(got, value)
  np.testing.assert_array_equal(got_gradient, gradient)
  if scale == 1.0:
    order = np.random.default_rng(seed).permutation(B)
    got, _ = _run(name, embeddings[order], labels[order], where[order])
    np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-6)


@_each_loss
@hypothesis.given(batch=_batches, values=st.permutations(testing.LABELS))
@hypothesis.settings(max_examples=_FEW)
def test_names_of_the_classes_mean_nothing(name, batch, values):
  embeddings, labels, where = batch
  renamed = np.array(values, np.int32)[np.unique(labels, return_inverse=True)[1]]
  np.testing.assert_array_equal(
    _run(name, embeddings, renamed, where)[0], _run(name, embeddings, labels, where)[0]
  )


@_each_loss
@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_of_none_or_one_has_loss_zero_without_gradient(name, size):
  embeddings, labels = np.eye(size, D, dtype=np.float32), np.zeros(size, np.int32)
  value, gradient = jax.jit(jax.value_and_grad(lambda e: _LOSSES[name](e, labels, where=None)))(
    embeddings
  )
  assert value == 0
  np.testing.assert_allclose(gradient, np.zeros((size, D)), atol=1e-6)


@functools.cache
def _lists(max_positives):
  return jax.jit(
    lambda e, y, w: soprc_jax.retrieval_lists(e, y, max_positives=max_positives, where=w)
  )


@pytest.mark.parametrize("max_positives", [None, 2, 50])
@hypothesis.given(batch=_batches)
def test_retrieval_lists_count_every_pair_once(max_positives, batch):
  embeddings, labels, where = batch
  spoiled = np.where(where[:, None], embeddings, np.nan).astype(np.float32)
  found = jax.tree.map(np.asarray, _lists(max_positives)(spoiled, labels, where))
  width = B if max_positives is None else min(max_positives, B)
  assert found.positive_scores.shape == found.positive_where.shape == (B, width)
  assert found.negative_scores.shape == found.negative_where.shape == (B, B)
  np.testing.assert_array_equal(np.isfinite(found.positive_scores), found.positive_where)
  np.testing.assert_array_equal(np.isfinite(found.negative_scores), found.negative_where)
  same = (
    (labels[:, None] == labels[None, :]) & where[:, None] & where[None, :] & ~np.eye(B, dtype=bool)
  )
  other = (labels[:, None] != labels[None, :]) & where[:, None] & where[None, :]
  np.testing.assert_array_equal(found.negative_where, other)
  np.testing.assert_array_equal(
    found.positive_where.sum(axis=1), np.minimum(same.sum(axis=1), width)
  )
  assert found.num_dropped == np.maximum(same.sum(axis=1) - width, 0).sum()
  scores = embeddings.astype(np.float64) @ embeddings.T.astype(np.float64)
  np.testing.assert_allclose(found.negative_scores[other], scores[other], atol=1e-6)
  for i in range(B):
    kept, all_ = found.positive_scores[i][found.positive_where[i]], scores[i][same[i]]
    assert all(np.abs(all_ - score).min() < 1e-6 for score in kept)
    if same[i].sum() <= width:
      np.testing.assert_allclose(np.sort(kept), np.sort(all_), atol=1e-6)


@hypothesis.given(data=st.data())
def test_unsigned_labels_are_not_the_negative_ones_of_the_same_bits(data):
  """Checks uint32 next to int32. A comparison in int32 would take 2^32 - 1 as -1."""
  labels = np.array(
    data.draw(st.lists(st.sampled_from([0, 7, 2**31, 2**32 - 1]), min_size=2, max_size=2)),
    np.uint32,
  )
  gallery = np.array(
    data.draw(st.lists(st.sampled_from([0, 7, -1, -(2**31)]), min_size=3, max_size=3)), np.int32
  )
  found = soprc_jax.retrieval_lists(
    np.zeros((2, D)), labels, gallery=np.zeros((3, D)), gallery_labels=gallery
  )
  np.testing.assert_array_equal(
    found.positive_where, labels[:, None].astype(np.int64) == gallery[None, :]
  )


@jax.jit
def _smooth_ap(embeddings, labels, where, tau):
  return losses.smooth_ap_loss(
    embeddings, labels, tau=tau, where=where, include_self=False, max_positives=3
  )


@pytest.mark.parametrize("tau", [1e-30, 1e-12, 1e-3, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_smooth_ap_leaves_masked_images_out_at_any_width(tau, scale):
  """Checks scores where masked ones lie a thousand widths below the others. float32 may not
  distinguish them from the others.
  """
  rows = np.float32(
    scale * np.array([[1, 0, 0], [0.8, 0.6, 0], [0, 1, 0], [0.6, 0.8, 0], [0.6, 0, 0.8], [0, 0, 1]])
  )
  labels = np.array([0, 0, 1, 1, 2, 0])
  padded = _smooth_ap(rows, labels, np.array([1, 1, 1, 1, 0, 0], bool), tau)
  alone = _smooth_ap(rows[:4], labels[:4], np.ones(4, bool), tau)
  assert jnp.isfinite(padded)
  np.testing.assert_allclose(padded, alone, rtol=1e-6)
