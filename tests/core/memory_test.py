"""Tests embedding_memory: storage order, masks, initial state, errors, optax and devices."""

import collections
import functools

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import optax
import pytest

from soprc_jax import embedding_memory, losses

S, D, B, STEPS = 7, 2, 4, 5
_MEMORIES = {overflow: embedding_memory(S, D, overflow=overflow) for overflow in ("ring", "tail")}
_PARAMS = {"w": jnp.ones(2)}
_GRADS = {"w": jnp.array([0.5, -1.0])}


def _batch(step, size=B):
  """Returns embeddings that identify their image, and labels."""
  numbers = np.arange(size) + size * step + 1
  return np.stack([numbers, -0.5 * numbers], axis=1).astype(np.float32), np.int32(100 + numbers)


def _update(memory, state, embeddings, labels, where=None):
  return memory.update(None, state, embeddings=embeddings, labels=labels, where=where)[1]


@functools.cache
def _jitted(overflow):
  memory = _MEMORIES[overflow]

  def step(state, embeddings, labels, where):
    ahead = memory.lookahead(state, embeddings, labels, where)
    return ahead, _update(memory, state, embeddings, labels, where)

  return jax.jit(step)


def _ring(slots, pointer, images):
  """Writes one image after the other, each over the oldest."""
  for image in images:
    slots[pointer] = image
    pointer = (pointer + 1) % len(slots)
  return pointer


def _tail(slots, pointer, images):
  """Returns the slots of the reference's rule. A batch that does not fit takes the last slots, then
  the pointer returns to 0.
  """
  if pointer + len(images) > len(slots):
    slots[len(slots) - len(images) :] = images
    return 0
  slots[pointer : pointer + len(images)] = images
  return pointer + len(images)


_MASKS = st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=STEPS, max_size=STEPS)


@pytest.mark.parametrize(("overflow", "rule"), [("ring", _ring), ("tail", _tail)])
@hypothesis.given(masks=_MASKS)
def test_slots_follow_the_rule_and_lookahead_is_what_update_stores(overflow, rule, masks):
  state = _MEMORIES[overflow].init(None)
  slots, pointer, batches = [None] * S, 0, 0
  last = collections.deque(maxlen=S)
  for step, where in enumerate(np.array(masks)):
    embeddings, labels = _batch(step)
    ahead, state = _jitted(overflow)(state, embeddings, labels, where)
    images = list(zip(embeddings[where], labels[where], strict=True))
    pointer = rule(slots, pointer, images)
    last.extend(label for _, label in images)
    batches += any(where)
    filled = np.array([image is not None for image in slots])
    np.testing.assert_array_equal(state.filled, filled)
    np.testing.assert_array_equal(state.labels[filled], [image[1] for image in slots if image])
    np.testing.assert_array_equal(
      np.asarray(state.embeddings)[filled].tolist(), [image[0].tolist() for image in slots if image]
    )
    np.testing.assert_array_equal(np.asarray(state.embeddings)[~filled], 0)
    assert (int(state.pointer), int(state.count)) == (pointer, batches)
    if overflow == "ring":
      assert sorted(state.labels[filled].tolist()) == sorted(last)  # exactly the oldest are gone
    chex.assert_trees_all_equal(ahead[:3], (state.embeddings, state.labels, state.filled))
    own = np.asarray(ahead.own)
    np.testing.assert_array_equal(own >= 0, where)
    np.testing.assert_array_equal(np.asarray(state.labels)[own[where]], labels[where])


def test_current_is_the_memory_before_the_batch():
  memory = _MEMORIES["ring"]
  state = memory.init(None)
  assert not memory.current(state).where.any()
  state = _update(memory, state, *_batch(0))
  got = memory.current((optax.EmptyState(), state))
  np.testing.assert_array_equal(got.labels[:B], _batch(0)[1])
  np.testing.assert_array_equal(got.where, np.arange(S) < B)
  assert got.own is None


def test_a_batch_may_fill_the_memory_exactly():
  for overflow in ("ring", "tail"):
    memory = embedding_memory(B, D, overflow=overflow)
    state = _update(memory, memory.init(None), *_batch(0))
    assert state.filled.all()
    np.testing.assert_array_equal(_update(memory, state, *_batch(1)).labels, _batch(1)[1])


def test_start_after_stores_nothing_and_looks_up_the_batch_with_its_gradient():
  memory = embedding_memory(S, D, start_after=2)
  step = jax.jit(functools.partial(_update, memory))

  def look(state, step_, where):
    embeddings, labels = _batch(step_)
    total = lambda e: jnp.sum(memory.lookahead(state, e, labels, where).embeddings)  # noqa: E731
    return memory.lookahead(state, embeddings, labels, where), jax.grad(total)(embeddings)

  state = memory.init(None)
  where = np.array([True, False, True, True])
  for t in range(2):
    ahead, gradient = look(state, t, where)
    np.testing.assert_array_equal(ahead.where, np.arange(S) < 3)
    np.testing.assert_array_equal(ahead.labels[:3], _batch(t)[1][where])
    np.testing.assert_array_equal(ahead.own, [0, -1, 1, 2])
    np.testing.assert_array_equal(
      gradient, np.float32(where)[:, None] * np.ones((1, D), np.float32)
    )
    idle = step(state, *_batch(9), np.zeros(B, bool))  # no valid image: equivalent to no call
    chex.assert_trees_all_equal(idle, state)
    state = step(state, *_batch(t), where)
    assert not state.filled.any()
    assert int(state.count) == t + 1
  ahead, gradient = look(state, 2, where)
  state = step(state, *_batch(2), where)
  np.testing.assert_array_equal(ahead.labels, state.labels)
  np.testing.assert_array_equal(state.filled, np.arange(S) < 3)
  np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("start_after", [0, 1])
def test_no_gradient_once_it_stores(start_after):
  memory = embedding_memory(S, D, start_after=start_after)
  state = _update(memory, memory.init(None), *_batch(0))
  embeddings, labels = _batch(1)
  ahead = jax.grad(lambda e: jnp.sum(memory.lookahead(state, e, labels).embeddings))(embeddings)
  stored = jax.grad(lambda e: jnp.sum(_update(memory, state, e, labels).embeddings))(embeddings)
  np.testing.assert_array_equal(ahead, 0)
  np.testing.assert_array_equal(stored, 0)


def test_dtypes_of_the_state_do_not_move():
  for x64, dtype in ((False, jnp.bfloat16), (False, jnp.float32), (True, jnp.float64)):
    with jax.enable_x64(x64):
      memory = embedding_memory(S, D)
      start = memory.init(None)
      embeddings, labels = jnp.asarray(_batch(0)[0], dtype), jnp.asarray(_batch(0)[1], int)
      state = _update(memory, start, embeddings, labels)
      chex.assert_trees_all_equal_shapes_and_dtypes(state, start)
      assert memory.lookahead(start, embeddings, labels).embeddings.dtype == (
        dtype if x64 else jnp.float32
      )


@pytest.mark.parametrize(
  ("make", "name"),
  [
    (lambda: embedding_memory(0, D), "size"),
    (lambda: embedding_memory(2.0, D), "size"),
    (lambda: embedding_memory(S, 0), "dim"),
    (lambda: embedding_memory(S, D, start_after=-1), "start_after"),
    (lambda: embedding_memory(S, D, start_after=True), "start_after"),
    (lambda: embedding_memory(S, D, overflow="head"), "overflow"),
  ],
)
def test_bad_settings_are_named(make, name):
  with pytest.raises(ValueError, match=name):
    make()


def test_a_batch_larger_than_the_memory_is_refused():
  memory = _MEMORIES["ring"]
  embeddings, labels = _batch(0, size=S + 1)
  with pytest.raises(ValueError, match="size=7 slots, fewer than the 8 images"):
    _update(memory, memory.init(None), embeddings, labels)
  with pytest.raises(ValueError, match="size=7 slots"):
    memory.lookahead(memory.init(None), embeddings, labels)


def test_shapes_and_types_are_checked():
  embeddings, labels = _batch(0)
  memory = _MEMORIES["ring"]
  state = memory.init(None)
  for bad in ((embeddings[0], labels), (embeddings, labels[:2]), (embeddings[:, :1], labels)):
    with pytest.raises(AssertionError):
      _update(memory, state, *bad)
  with pytest.raises(TypeError, match="labels must be integers, got float32"):
    _update(memory, state, embeddings, np.float32(labels))


def test_a_missing_argument_is_named():
  tx = optax.chain(_MEMORIES["ring"], optax.sgd(0.1))
  embeddings, labels = _batch(0)
  with pytest.raises(TypeError, match=r"embedding_memory.*Missing: embeddings, labels"):
    tx.update(_GRADS, tx.init(_PARAMS), _PARAMS)
  with pytest.raises(TypeError, match=r"Missing: labels\."):
    tx.update(_GRADS, tx.init(_PARAMS), _PARAMS, embeddings=embeddings)
  with pytest.raises(TypeError, match=r"Missing: embeddings\."):
    tx.update(_GRADS, tx.init(_PARAMS), _PARAMS, labels=labels)


def test_exactly_one_state_in_the_tree():
  memory = _MEMORIES["ring"]
  embeddings, labels = _batch(0)
  without = optax.adam(0.1).init(_PARAMS)
  for call in (
    lambda: memory.current(without),
    lambda: memory.lookahead(without, embeddings, labels),
  ):
    with pytest.raises(ValueError, match="one embedding_memory state in opt_state, found 0"):
      call()
  two = optax.chain(memory, embedding_memory(S, D), optax.sgd(0.1)).init(_PARAMS)
  with pytest.raises(ValueError, match=r"found 2.*sub-state"):
    memory.current(two)
  chex.assert_trees_all_equal(memory.current(two[0]), memory.current(memory.init(None)))


def test_is_a_transform_that_leaves_the_gradients_alone():
  memory = _MEMORIES["ring"]
  assert isinstance(memory, optax.GradientTransformationExtraArgs)
  assert len(tuple(memory)) == 2  # chain unpacks the fields: lookahead must not be one
  tx = optax.chain(memory, optax.sgd(0.1))
  embeddings, labels = _batch(0)
  update = jax.jit(tx.update)
  updates, state = update(
    _GRADS, tx.init(_PARAMS), _PARAMS, embeddings=embeddings, labels=labels, value=1.0
  )
  chex.assert_trees_all_close(updates, {"w": -0.1 * _GRADS["w"]})
  chex.assert_trees_all_equal(state[0], _update(memory, memory.init(None), embeddings, labels))
  np.testing.assert_array_equal(
    memory.lookahead(state, *_batch(1)).labels, _update(memory, state[0], *_batch(1)).labels
  )


def test_states_can_be_scanned_and_do_not_share_buffers():
  for memory in (_MEMORIES["ring"], _MEMORIES["tail"], embedding_memory(S, D, start_after=1)):
    embeddings, labels = (
      np.stack(part) for part in zip(*(_batch(t) for t in range(STEPS)), strict=True)
    )
    body = lambda state, batch, memory=memory: (_update(memory, state, *batch), None)  # noqa: E731
    state = memory.init(None)
    scanned, _ = jax.lax.scan(body, state, (embeddings, labels))
    step = jax.jit(functools.partial(_update, memory), donate_argnums=0)
    for t in range(STEPS):
      state = step(state, *_batch(t))
    chex.assert_trees_all_close(scanned, state)
    assert not memory.current(memory.init(None)).where.any()


@pytest.mark.parametrize("kind", [kind for _, kind in mapping.KINDS])
def test_two_devices_store_what_one_does(kind):
  make = functools.partial(embedding_memory, 2 * B + 1, D)
  local, shared = make(), make(axis_name=mapping.AXIS)

  def on_each(state, embeddings, labels, where):
    return shared.lookahead(state, embeddings, labels, where), _update(
      shared, state, embeddings, labels, where
    )

  mapped = mapping.on_devices(on_each, kind)
  expected = local.init(None)
  state = mapping.replicate(expected)
  where = np.array([1, 0, 1, 1, 1, 1, 0, 1], bool)
  for t in range(3):
    batch = (*_batch(t, size=2 * B), where)
    expected_ahead = local.lookahead(expected, *batch)
    expected = _update(local, expected, *batch)
    ahead, state = mapped(state, *map(mapping.split, batch))
    chex.assert_trees_all_equal(state, mapping.replicate(expected))
    chex.assert_trees_all_equal(ahead[:3], mapping.replicate(expected_ahead[:3]))
    np.testing.assert_array_equal(np.reshape(ahead.own, -1), expected_ahead.own)


def test_two_devices_refuse_a_joined_batch_that_is_too_large():
  memory = embedding_memory(2 * B - 1, D, axis_name=mapping.AXIS)
  step = mapping.on_devices(functools.partial(_update, memory), "pmap")
  embeddings, labels = _batch(0, size=2 * B)
  with pytest.raises(ValueError, match="8 images of a batch"):
    step(mapping.replicate(memory.init(None)), mapping.split(embeddings), mapping.split(labels))


def test_training_loop_with_the_memory_in_the_optimizer_state():
  """Checks that XBM looks ahead and that the same memory is stored."""
  memory = embedding_memory(12, 3)
  tx = optax.chain(memory, optax.sgd(0.01))
  rng = np.random.default_rng(0)
  inputs, labels = np.float32(rng.normal(size=(5, 6, 4))), np.array([0, 1, 0, 2, 1, 2])
  params = np.float32(rng.normal(size=(4, 3)))
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, inputs):
    def loss_fn(params):
      embeddings = inputs @ params
      embeddings /= jnp.linalg.norm(embeddings, axis=1, keepdims=True)
      ahead = memory.lookahead(opt_state, embeddings, labels)
      return losses.xbm_contrastive_loss(embeddings, labels, ahead), (embeddings, ahead)

    grads, (embeddings, ahead) = jax.grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params, embeddings=embeddings, labels=labels)
    return optax.apply_updates(params, updates), opt_state, ahead

  for t in range(5):
    params, opt_state, ahead = step(params, opt_state, inputs[t])
    np.testing.assert_allclose(ahead.embeddings, opt_state[0].embeddings, rtol=1e-6)
  assert opt_state[0].filled.all()
  chex.assert_tree_all_finite(params)


_F41_EMBEDDINGS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
_F41_EMBEDDINGS /= np.linalg.norm(_F41_EMBEDDINGS, axis=1, keepdims=True)
_F41_LABELS = np.arange(12) % 4


def _xbm(memory, embeddings, labels):
  ahead = memory.lookahead(
    _update(memory, memory.init(None), embeddings[::-1], labels), embeddings, labels
  )
  return losses.xbm_contrastive_loss(embeddings, labels, ahead)


def _blackbox(memory, embeddings, labels):
  # Other images than the batch, since rounding decides the ranks of equal scores.
  stored = memory.current(_update(memory, memory.init(None), embeddings[:, ::-1], labels))
  return losses.blackbox_ap_loss(
    embeddings, labels, memory=stored, max_positives=11, interclass_coef=0.0
  )


_WITH_MEMORY = {"xbm": _xbm, "blackbox": _blackbox}


_F41_TYPES = (
  ("int8", 124),
  ("uint8", 250),
  ("int16", -(2**15)),
  ("uint16", 2**16 - 4),
  ("int32", -(2**31)),
  ("uint32", 3_000_000_000),
  ("uint32", 2**31 - 2),
  ("int64", 2**32),
  ("int64", -(2**40)),
  ("uint64", 2**63 - 2),
)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize(
  ("name", "dtype", "shift"),
  [("xbm", *case) for case in _F41_TYPES] + [("blackbox", *case) for case in _F41_TYPES[5::2]],
)
def test_f41_labels_of_any_type_and_size_mean_the_same_to_a_memory(name, dtype, shift, x64):
  labels = (_F41_LABELS.astype(object) + shift).astype(dtype)
  with jax.enable_x64(x64):
    loss = functools.partial(_WITH_MEMORY[name], embedding_memory(24, 3), _F41_EMBEDDINGS)
    if not x64 and dtype in ("int64", "uint64"):
      with pytest.raises(ValueError, match="labels must fit into 32 bits, map them to rows"):
        loss(labels)
      return
    want = loss(_F41_LABELS.astype(np.int32))
    np.testing.assert_allclose(loss(labels), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(labels), want, rtol=1e-6)


def test_f41_a_state_of_32_bits_takes_labels_of_64():
  memory, labels = embedding_memory(24, 3), _F41_LABELS + 2**40
  state = memory.init(None)
  assert state.labels.dtype == jnp.int32
  with jax.enable_x64(True):
    stored = _update(memory, state, _F41_EMBEDDINGS, labels)
    np.testing.assert_array_equal(stored.labels[:12], labels)


@pytest.mark.parametrize("name", _WITH_MEMORY)
@pytest.mark.parametrize("dtype", ["uint32", "int16", "uint8", "bool"])
def test_f54_labels_that_a_jitted_function_closes_over_have_any_type(name, dtype):
  labels = jnp.asarray(_F41_LABELS % 2, dtype)
  loss = functools.partial(_WITH_MEMORY[name], embedding_memory(24, 3))
  got = jax.jit(lambda embeddings: loss(embeddings, labels))(_F41_EMBEDDINGS)
  np.testing.assert_allclose(got, loss(_F41_EMBEDDINGS, np.int32(_F41_LABELS % 2)), rtol=1e-6)
