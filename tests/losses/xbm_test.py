"""Tests xbm_contrastive_loss: parity with the authors' code and values by plain loops.

Also covers masks, degenerate batches and devices.
"""

import functools

import authors
import chex
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import pytest

from soprc_jax import embedding_memory, losses
from soprc_jax.memory import Memory

_NUM_CASES = authors.num_cases("xbm_contrastive")
_LABELS = np.array([7, 2, 7, -5, 2, 7])
_STORED_LABELS = np.array([2, 7, 90, 7, 2, 0, 0])
_STORED = np.array([1, 1, 1, 0, 1, 1, 0], bool)


@functools.cache
def _sequence_step(size, dim, start_after):
  memory = embedding_memory(size, dim, start_after=start_after, overflow="tail")

  def step(state, embeddings, labels, negative_margin):
    def loss_fn(embeddings):
      ahead = memory.lookahead(state, embeddings, labels)
      return losses.xbm_contrastive_loss(
        embeddings, labels, ahead, negative_margin=negative_margin, include_self=True
      )

    value, gradient = jax.value_and_grad(loss_fn)(embeddings)
    return value, gradient, memory.update(None, state, embeddings=embeddings, labels=labels)[1]

  return memory.init(None), jax.jit(step)


def _check_golden(case, dtype, spoil=1.0):
  hparams = authors.hparams("xbm_contrastive", case)
  state, step = _sequence_step(hparams["mem_size"], hparams["feat_dim"], hparams["start_it"])
  with jax.enable_x64(dtype == jnp.float64):
    for t in range(authors.num_steps("xbm_contrastive", case)):
      golden = authors.arrays("xbm_contrastive", case, t)
      margin = jnp.asarray(hparams["thres"] * spoil, dtype)
      value, gradient, state = step(
        state, jnp.asarray(golden["emb"], dtype), jnp.asarray(golden["labels"]), margin
      )
      assert value.dtype == dtype
      authors.assert_matches(golden, float(value), np.asarray(gradient, np.float64), dtype)
      # The reference counts down the calls before the start. It does not detect a memory that is
      # already full.
      assert int(state.pointer) == golden["ptr_after"]
      assert bool(state.filled.all()) == golden["is_full_after"]
      assert max(hparams["start_it"] - int(state.count), 0) == golden["start_it_after"]
      np.testing.assert_array_equal(state.labels, golden["mem_targets_after"])
      if "mem_feats_after" in golden:
        np.testing.assert_array_equal(state.embeddings, golden["mem_feats_after"])


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", range(_NUM_CASES))
def test_matches_authors_code(case, dtype):
  _check_golden(case, dtype)


def test_a_corrupted_margin_is_noticed():
  with pytest.raises(AssertionError):
    _check_golden(0, jnp.float64, spoil=1.001)


def _unit(seed, count, dim=4):
  vectors = np.random.default_rng(seed).standard_normal((count, dim)) + 0.5
  return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _memory(own=None):
  return Memory(_unit(1, len(_STORED)), _STORED_LABELS, _STORED, own)


def _reference(embeddings, labels, memory, margin=0.5, where=None):
  """Returns value and gradient, one pair at a time; the gradient reaches the query only."""
  valid = np.flatnonzero(np.ones(len(labels), bool) if where is None else where)
  value, gradient = 0.0, np.zeros(embeddings.shape)
  stored = np.float64(memory.embeddings)
  for q in valid:
    for k in np.flatnonzero(memory.where):
      score = np.float64(embeddings[q]) @ stored[k]
      if memory.own is not None and memory.own[q] == k:
        continue
      if memory.labels[k] == labels[q]:
        value += 1 - score
        gradient[q] -= stored[k]
      elif score > margin:
        value += score - margin
        gradient[q] += stored[k]
  count = max(len(valid), 1)
  return value / count, gradient / count


_value_and_grad = jax.jit(jax.value_and_grad(losses.xbm_contrastive_loss))


def _check(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("margin", [0.5, 0.0, -0.3])
def test_value_and_gradient_by_loops(margin):
  _check(
    _value_and_grad(_unit(0, 6), _LABELS, _memory(), negative_margin=margin),
    _reference(_unit(0, 6), _LABELS, _memory(), margin),
  )


def test_masks_and_own_slots_by_loops():
  where, own = np.array([1, 1, 0, 1, 1, 1], bool), np.array([1, -1, -1, 2, 4, 5])
  embeddings, memory = _unit(0, 6), _memory(own)
  want = _reference(embeddings, _LABELS, memory, where=where)
  got = _value_and_grad(embeddings, _LABELS, memory, where=where)
  _check(got, want)
  np.testing.assert_array_equal(got[1][2], 0)
  # The content of masked slots has no effect.
  other = memory._replace(
    embeddings=np.where(_STORED[:, None], memory.embeddings, 9),
    labels=np.where(_STORED, memory.labels, 7),
  )
  _check(
    _value_and_grad(np.where(where[:, None], embeddings, 9), _LABELS, other, where=where), want
  )


def test_default_leaves_the_own_entry_out_and_include_self_only_adds_a_radial_part():
  memory = embedding_memory(8, 4)
  state = memory.init(None)
  embeddings = _unit(0, 6)
  ahead = memory.lookahead(state, embeddings, _LABELS)
  got = _value_and_grad(embeddings, _LABELS, ahead)
  _check(got, _reference(embeddings, _LABELS, ahead))
  meets = jax.jit(
    jax.value_and_grad(functools.partial(losses.xbm_contrastive_loss, include_self=True))
  )(embeddings, _LABELS, ahead)
  np.testing.assert_allclose(meets[0], got[0], atol=1e-6)
  np.testing.assert_allclose(meets[1] - got[1], -embeddings / 6, atol=1e-6)
  # The first batch alone gives the contrastive loss of the batch with half of its gradient.
  plain = losses.contrastive_loss(embeddings, _LABELS)
  np.testing.assert_allclose(got[0], plain / 6, rtol=1e-5)
  whole = jax.grad(losses.contrastive_loss)(embeddings, _LABELS)
  np.testing.assert_allclose(got[1], whole / 12, rtol=1e-4, atol=1e-6)


def test_before_the_start_it_is_the_contrastive_loss_of_the_batch():
  memory = embedding_memory(8, 4, start_after=1)
  embeddings, state = _unit(0, 6), memory.init(None)
  where = np.array([1, 1, 1, 0, 1, 1], bool)

  def loss_fn(embeddings):
    return losses.xbm_contrastive_loss(
      embeddings, _LABELS, memory.lookahead(state, embeddings, _LABELS, where), where=where
    )

  got = jax.value_and_grad(loss_fn)(embeddings)
  _check(
    got,
    jax.value_and_grad(lambda e: losses.contrastive_loss(e, _LABELS, where=where) / 5)(embeddings),
  )


def test_memory_of_several_batches_holds_earlier_batches_but_not_the_own_entry():
  memory = embedding_memory(10, 4)
  state = memory.init(None)
  for seed in range(3):
    embeddings = _unit(seed, 6)
    ahead = memory.lookahead(state, embeddings, _LABELS)
    _check(_value_and_grad(embeddings, _LABELS, ahead), _reference(embeddings, _LABELS, ahead))
    state = memory.update(None, state, embeddings=embeddings, labels=_LABELS)[1]
  assert ahead.where.all()
  np.testing.assert_array_equal(ahead.own, [2, 3, 4, 5, 6, 7])


def test_order_of_batch_and_memory_changes_nothing():
  rng = np.random.default_rng(5)
  order, slots = rng.permutation(6), rng.permutation(7)
  own = np.array([1, -1, -1, -1, 4, -1])
  memory, embeddings = _memory(own), _unit(0, 6)
  value, gradient = _value_and_grad(embeddings, _LABELS, memory)
  moved_own = np.array([np.flatnonzero(slots == slot)[0] if slot >= 0 else -1 for slot in own])
  moved = Memory(
    memory.embeddings[slots], memory.labels[slots], memory.where[slots], moved_own[order]
  )
  _check(_value_and_grad(embeddings[order], _LABELS[order], moved), (value, gradient[order]))


@pytest.mark.parametrize(
  ("labels", "stored", "where"),
  [
    pytest.param(_LABELS, np.zeros(7, bool), np.ones(6, bool), id="empty_memory"),
    pytest.param(_LABELS, _STORED, np.zeros(6, bool), id="no_query"),
  ],
)
def test_without_a_pair_it_is_zero_without_gradient(labels, stored, where):
  value, gradient = _value_and_grad(
    _unit(0, 6), labels, _memory()._replace(where=stored), where=where
  )
  assert value == 0
  np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
  ("labels", "embeddings"),
  [
    pytest.param(np.arange(1000, 1006), _unit(0, 6), id="no_positives"),
    pytest.param(np.full(6, 7), _unit(0, 6), id="one_class"),
    pytest.param(_LABELS, np.zeros((6, 4), np.float32), id="zero"),
    pytest.param(_LABELS, np.full((6, 4), 0.5, np.float32), id="all_equal"),
  ],
)
def test_degenerate_batches(labels, embeddings):
  _check(_value_and_grad(embeddings, labels, _memory()), _reference(embeddings, labels, _memory()))


def test_half_precision_is_computed_in_float32():
  for dtype in (jnp.bfloat16, jnp.float16):
    embeddings = jnp.asarray(_unit(0, 6), dtype)
    value = losses.xbm_contrastive_loss(embeddings, _LABELS, _memory())
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(
      value, _reference(np.float32(embeddings), _LABELS, _memory())[0], rtol=1e-5
    )


def test_vmap_over_batches():
  batches = np.stack([_unit(seed, 6) for seed in range(3)])
  got = jax.vmap(lambda e: losses.xbm_contrastive_loss(e, _LABELS, _memory()))(batches)
  np.testing.assert_allclose(
    got, [_reference(e, _LABELS, _memory())[0] for e in batches], rtol=1e-5
  )


def test_own_must_be_that_of_the_batch():
  with pytest.raises(AssertionError):
    losses.xbm_contrastive_loss(_unit(0, 6), _LABELS, _memory(np.zeros(12, int)))


@pytest.mark.parametrize(("kind", "start_after"), [("pmap", 0), ("pmap", 1), ("shard_map", 1)])
def test_two_devices_equal_one(kind, start_after):
  """Checks loss, parameter gradient and memory over three steps, with unequal masks."""
  rng = np.random.default_rng(0)
  inputs, kernel = np.float32(rng.normal(size=(3, 8, 5))), np.float32(rng.normal(size=(5, 4)))
  labels = np.array([2, 0, 1, 0, 2, 1, 0, 0])
  where = np.array([1, 1, 1, 1, 0, 1, 0, 1], bool)

  def step(kernel, state, inputs, labels, where, axis_name=None):
    memory = embedding_memory(11, 4, axis_name=axis_name, start_after=start_after)

    def loss_fn(kernel):
      embeddings = inputs @ kernel
      embeddings /= jnp.linalg.norm(embeddings, axis=1, keepdims=True)
      ahead = memory.lookahead(state, embeddings, labels, where)
      loss = losses.xbm_contrastive_loss(
        embeddings, labels, ahead, where=where, axis_name=axis_name
      )
      return loss, embeddings

    (loss, embeddings), gradient = jax.value_and_grad(loss_fn, has_aux=True)(kernel)
    if axis_name is not None:
      gradient = jax.lax.pmean(gradient, axis_name)
    _, state = memory.update(None, state, embeddings=embeddings, labels=labels, where=where)
    return loss, gradient, state

  single, mapped = (
    jax.jit(step),
    mapping.on_devices(functools.partial(step, axis_name=mapping.AXIS), kind),
  )
  expected = state = embedding_memory(11, 4).init(None)
  state = mapping.replicate(state)
  for t in range(3):
    loss, gradient, expected = single(kernel, expected, inputs[t], labels, where)
    got = mapped(
      mapping.replicate(kernel),
      state,
      mapping.split(inputs[t]),
      *map(mapping.split, (labels, where)),
    )
    state = got[2]
    chex.assert_trees_all_close(
      got, mapping.replicate((loss, gradient, expected)), rtol=1e-4, atol=1e-6
    )
  assert np.abs(gradient).max() > 1e-2
