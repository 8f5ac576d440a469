"""Tests score_ema and embedding_memory on any batches.

update stores exactly what lookahead shows, and no value is ever NaN.
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
from soprc_jax import memory as memories

# A quarter of the number of examples in the profile of tests/conftest.py.
_FEW = hypothesis.settings.default.max_examples // 4

C, M, Q, P, S = 3, 4, 6, 3, 7
_STARTS = {"debiased": None, "explicit": np.linspace(-1, 1, M)}


@functools.cache
def _tracker(start):
  # beta is a schedule, so that one compilation covers every beta: count is an index into a list of
  # all of them.
  return soprc_jax.score_ema(
    C, M, lambda count: jnp.asarray(_BETAS)[count % len(_BETAS)], initial_v=_STARTS[start]
  )


_BETAS = (1.0, 1e-6, 0.5, 0.01)


@functools.cache
def _step(start):
  tracker = _tracker(start)

  def step(state, scores, ids, where):
    ahead = tracker.lookahead(state, scores, ids, where)
    updates, state = tracker.update(
      {"w": scores}, state, positive_scores=scores, list_ids=ids, positive_where=where
    )
    return ahead, state, updates

  return jax.jit(step)


def _ids(size):
  return st.lists(st.integers(0, C - 1), min_size=size, max_size=size).map(
    lambda ids: np.array(ids, np.int32)
  )


@st.composite
def _batches(draw, steps=3, shapes=((Q, P),), **options):
  found = []
  for _ in range(steps):
    shape = draw(st.sampled_from(list(shapes)))
    found.append(
      (draw(testing.scores(shape, **options)), draw(_ids(shape[0])), draw(testing.masks(shape)))
    )
  return found


@pytest.mark.parametrize("start", list(_STARTS))
@hypothesis.given(
  batches=_batches(shapes=[(Q, P), (1, 1), (0, P), (Q, 0)]),
  garbage=st.sampled_from([0.0, np.nan, np.inf]),
)
def test_v_is_finite_and_the_lookahead_is_what_is_stored(start, batches, garbage):
  state = _tracker(start).init(None)
  for t, (scores, ids, where) in enumerate(batches):
    spoiled = np.where(where, scores, garbage).astype(np.float32)
    ahead, after, updates = _step(start)(state, spoiled, ids, where)
    np.testing.assert_array_equal(updates["w"], spoiled)
    v, weight = np.asarray(after.v), np.asarray(after.weight)
    np.testing.assert_array_equal(ahead, v[ids])
    assert np.isfinite(v).all()
    assert np.all((weight >= 0) & (weight <= 1))
    assert np.all(weight >= np.asarray(state.weight) - 1e-7)
    assert (v.dtype, weight.dtype, int(after.count)) == (np.float32, np.float32, t + 1)
    visited = np.isin(np.arange(C), ids[where.any(axis=1)])
    np.testing.assert_array_equal(v[~visited], np.asarray(state.v)[~visited])
    np.testing.assert_array_equal(weight[~visited], np.asarray(state.weight)[~visited])
    # phi ascends, and so does every mixture of ascending rows, up to rounding.
    assert np.all(np.diff(v, axis=1) >= -1e-5 * np.abs(v).max(initial=0.0))
    state = after


@hypothesis.given(batches=_batches(steps=1, limit=3.4e38))
def test_rows_of_the_largest_scores_are_finite(batches):
  """Checks six lists of one row. Their sum overflows float32, their mean does not."""
  ((scores, _, where),) = batches
  _, state, _ = _step("debiased")(
    _tracker("debiased").init(None), scores, np.zeros(Q, np.int32), where
  )
  assert np.isfinite(state.v).all()


@pytest.mark.parametrize("dtype", testing.FLOAT_TYPES, ids=lambda dtype: np.dtype(dtype).name)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=_FEW)
def test_tracker_promotes_every_dtype(dtype, data):
  ((scores, ids, where),) = data.draw(_batches(steps=1, dtypes=[dtype]))
  step, state = _step("debiased"), _tracker("debiased").init(None)
  ahead, after, _ = step(state, scores, ids, where)
  expected_ahead, expected, _ = step(state, scores.astype(np.float32), ids, where)
  np.testing.assert_array_equal(ahead, expected_ahead)
  np.testing.assert_array_equal(after.v, expected.v)
  assert after.v.dtype == jnp.float32


_B, _D = 3, 2


@functools.cache
def _memory_step(overflow):
  memory = soprc_jax.embedding_memory(S, _D, overflow=overflow)

  def step(state, embeddings, labels, where):
    ahead = memory.lookahead(state, embeddings, labels, where)
    _, state = memory.update(None, state, embeddings=embeddings, labels=labels, where=where)
    return ahead, memory.current(state), state

  return memory, jax.jit(step)


def _entries(memory):
  """Returns the sorted rows of the filled slots of a memory."""
  where = np.asarray(memory.where)
  return sorted(
    (int(label), *map(float, row))
    for label, row in zip(memory.labels[where], memory.embeddings[where], strict=True)
  )


@pytest.mark.parametrize("overflow", ["ring", "tail"])
@hypothesis.given(
  batches=st.lists(testing.embeddings_and_labels([(_B, _D)]), min_size=1, max_size=4),
  seed=st.integers(0, 2**16),
)
def test_memory_holds_valid_images_only_in_any_order_of_the_batch(overflow, batches, seed):
  memory, step = _memory_step(overflow)
  state = memory.init(None)
  for embeddings, labels, where in batches:
    spoiled = np.where(where[:, None], embeddings, np.nan).astype(np.float32)
    ahead, now, after = step(state, spoiled, labels, where)
    assert _entries(ahead) == _entries(now)
    assert np.isfinite(after.embeddings).all()
    own = np.asarray(ahead.own)
    np.testing.assert_array_equal(own >= 0, where)
    np.testing.assert_array_equal(np.asarray(now.embeddings)[own[where]], embeddings[where])
    np.testing.assert_array_equal(np.asarray(now.labels)[own[where]], labels[where])
    assert len(set(own[where])) == where.sum()
    order = np.random.default_rng(seed).permutation(_B)
    assert _entries(step(state, spoiled[order], labels[order], where[order])[0]) == _entries(now)
    state = after


@functools.cache
def _users():
  """Returns the functions that take a memory, applied to a batch and the stored state."""

  def lists(embeddings, labels, where, stored):
    found = soprc_jax.retrieval_lists(
      embeddings,
      labels,
      gallery=stored.embeddings,
      gallery_labels=stored.labels,
      where=where,
      gallery_where=stored.where,
    )
    return soprc_jax.ap_loss(
      found.positive_scores,
      found.negative_scores,
      positive_where=found.positive_where,
      negative_where=found.negative_where,
    )

  def xbm(embeddings, labels, where, stored):
    return losses.xbm_contrastive_loss(embeddings, labels, stored, where=where)

  def blackbox(embeddings, labels, where, stored):
    return losses.blackbox_ap_loss(embeddings, labels, memory=stored, where=where)

  return {
    name: jax.jit(jax.value_and_grad(user))
    for name, user in {"lists": lists, "xbm": xbm, "blackbox": blackbox}.items()
  }


@pytest.mark.parametrize("name", ["lists", "xbm", "blackbox"])
@hypothesis.given(
  batch=testing.embeddings_and_labels([(_B, _D)]),
  stored=testing.embeddings_and_labels([(S, _D)]),
  seed=st.integers(0, 2**16),
)
def test_users_of_a_memory_see_its_filled_slots_only_in_any_order(name, batch, stored, seed):
  order = np.random.default_rng(seed).permutation(S)
  slots = memories.Memory(*stored)
  spoiled = slots._replace(
    embeddings=np.where(stored.where[:, None], stored.embeddings, np.nan).astype(np.float32)
  )
  shuffled = memories.Memory(*(part[order] for part in stored))
  results = [_users()[name](*batch, memory) for memory in (slots, spoiled, shuffled)]
  value, gradient = results[0]
  assert value.dtype == jnp.float32
  assert value >= 0
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert not np.asarray(gradient)[~batch.where].any()
  for other, _ in results[1:]:
    np.testing.assert_allclose(other, value, rtol=1e-5, atol=1e-6)
