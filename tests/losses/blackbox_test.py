"""Tests blackbox_ap_loss: parity with the authors' code, and value and gradient by plain loops.

Also covers memories, ties, masks and devices.
"""

import functools

import authors
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import pytest

from soprc_jax import embedding_memory, losses
from soprc_jax.losses import blackbox
from soprc_jax.memory import Memory

_NUM_CASES = authors.num_cases("black_box")
_CASE_OF_TIES = 3  # equal scores: the loss ranks them by relevance, the authors' code by position
_LABELS = np.array([7, 2, 7, -5, 2, 7, 90, 2])  # three, three, one and one
_STORED_LABELS = np.array([2, 7, 90, 7, 2])


@jax.jit
def _authors_loss(embeddings, labels, earlier, lambda_, coef, margin, noise):
  """Returns the loss as in the authors' code. Query q also ranks row q of every earlier batch,
  independent of the image in that row, with the relevance that it had there. Noise is given. Equal
  scores are ranked by position.
  """

  def rankings(scores, relevant, noise):
    if noise is not None:
      scores -= margin * noise.astype(scores.dtype) * (relevant.astype(scores.dtype) - 0.5)
    scores -= 1e-14 * jnp.arange(scores.shape[1], dtype=scores.dtype)[None]
    return blackbox._Rankings(scores, relevant, jnp.ones_like(relevant))

  batch = embeddings @ embeddings.T, labels[:, None] == labels[None]
  rows = [jnp.concatenate(parts, axis=1) for parts in zip(batch, *earlier, strict=True)]
  of_rows, of_all = (None, None) if noise is None else (noise[0], noise[1].reshape(1, -1))
  queries = rankings(*rows, of_rows)
  pairs = rankings(*(part.reshape(1, -1) for part in batch), of_all)
  within = blackbox._weighted_loss(
    queries, lambda_, jnp.broadcast_to((1 - coef) / len(labels), labels.shape)
  )
  return within + blackbox._weighted_loss(pairs, lambda_, coef[None])


def _check_golden(case, dtype, spoil=None):
  hparams = authors.hparams("black_box", case)
  hparams |= {spoil: hparams[spoil] * 1.01} if spoil else {}
  step, earlier = jax.jit(jax.value_and_grad(_authors_loss)), []
  with jax.enable_x64(dtype == jnp.float64):
    values = [
      jnp.asarray(hparams[name], dtype) for name in ("lambda_val", "interclass_coef", "margin")
    ]
    for t in range(authors.num_steps("black_box", case)):
      golden = authors.arrays("black_box", case, t)
      noise = (
        (golden["absnoise_cross"], golden["absnoise_flat"]) if "absnoise_flat" in golden else None
      )
      embeddings, labels = jnp.asarray(golden["emb"], dtype), jnp.asarray(golden["labels"])
      value, gradient = step(embeddings, labels, earlier, *values, noise)
      assert value.dtype == dtype
      authors.assert_matches(golden, float(value), np.asarray(gradient, np.float64), dtype)
      if not earlier and noise is None and case != _CASE_OF_TIES:
        loss = functools.partial(
          losses.blackbox_ap_loss, lambda_=values[0], interclass_coef=values[1]
        )
        value, gradient = jax.jit(jax.value_and_grad(loss))(embeddings, labels)
        authors.assert_matches(golden, float(value), np.asarray(gradient, np.float64), dtype)
      earlier = [*earlier, (embeddings @ embeddings.T, labels[:, None] == labels[None])][
        -hparams["batch_memory"] :
      ]
      assert len(earlier) == golden["stored_batches_after"]


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", range(_NUM_CASES))
def test_matches_authors_code(case, dtype):
  _check_golden(case, dtype)


@pytest.mark.parametrize(
  ("case", "spoil"), [(1, "lambda_val"), (1, "interclass_coef"), (5, "margin")]
)
def test_a_corrupted_coefficient_is_noticed(case, spoil):
  with pytest.raises(AssertionError):
    _check_golden(case, jnp.float64, spoil)


_value_and_grad = jax.jit(jax.value_and_grad(losses.blackbox_ap_loss))


def _ranks(scores, relevant):
  """Returns 1 to n in descending order, divided by n; relevant ones are last among equals."""
  order = sorted(range(len(scores)), key=lambda i: (-scores[i], relevant[i]))
  ranks = np.empty(len(scores))
  for place, i in enumerate(order):
    ranks[i] = (place + 1) / len(scores)
  return ranks


def _ranking(scores, relevant, weight, lambda_):
  """Returns weight * (1 - AP) of one ranking, and its gradient by the scores (Pogancic et al.)."""
  ranks, number = _ranks(scores, relevant), relevant.sum() + 1e-5
  incoming, total = np.zeros(len(scores)), 0.0
  for i in np.flatnonzero(relevant):
    within = sum(ranks[j] <= ranks[i] for j in np.flatnonzero(relevant)) / len(scores)
    total += within / ranks[i]
    incoming[i] = weight * within / ranks[i] ** 2 / number
  return weight * (1 - total / number), -(ranks - _ranks(scores + lambda_ * incoming, relevant)) / (
    lambda_ + 1e-8
  )


def _reference(
  embeddings,
  labels,
  where=None,
  memory=None,
  lambda_=5.0,
  coef=0.9,
  include_self=True,
  noise=None,
  margin=0.0,
):
  """Returns value and gradient, one query at a time, on the valid images only."""
  kept = np.arange(len(labels)) if where is None else np.flatnonzero(where)
  stored = () if memory is None else np.flatnonzero(memory.where)
  x, memory_x = np.float64(embeddings), None if memory is None else np.float64(memory.embeddings)
  queries, gradient, total = [], np.zeros(x.shape), 0.0
  for q in kept:
    others = [i for i in kept if include_self or i != q]
    scores = np.array([x[q] @ x[i] for i in others] + [x[q] @ memory_x[i] for i in stored])
    relevant = np.array(
      [labels[i] == labels[q] for i in others] + [memory.labels[i] == labels[q] for i in stored]
    )
    if noise is not None:
      scores = scores - margin * noise[0][q][[*others, *(len(labels) + i for i in stored)]] * (
        relevant - 0.5
      )
    if relevant.sum() > include_self and not relevant.all():
      queries.append((q, others, scores, relevant))
  for q, others, scores, relevant in queries:
    value, slope = _ranking(scores, relevant, (1 - coef) / len(queries), lambda_)
    total += value
    for i, s in zip(others, slope, strict=False):
      gradient[q] += s * x[i]
      gradient[i] += s * x[q]
    for i, s in zip(stored, slope[len(others) :], strict=True):
      gradient[q] += s * memory_x[i]
  pairs = [(i, j) for i in kept for j in kept if include_self or i != j]
  relevant = np.array([labels[i] == labels[j] for i, j in pairs], bool)
  if any(labels[i] == labels[j] and i != j for i, j in pairs) and not relevant.all():
    scores = np.array([x[i] @ x[j] for i, j in pairs])
    if noise is not None:
      scores = scores - margin * np.array([noise[1][i, j] for i, j in pairs]) * (relevant - 0.5)
    value, slope = _ranking(scores, relevant, coef, lambda_)
    total += value
    for (i, j), s in zip(pairs, slope, strict=True):
      gradient[i] += s * x[j]
      gradient[j] += s * x[i]
  return total, gradient


@functools.cache
def _jitted(**options):
  def loss_fn(embeddings, labels, where, memory, lambda_, coef, margin, key):
    more = {} if key is None else {"margin": margin, "key": key}
    return losses.blackbox_ap_loss(
      embeddings,
      labels,
      where=where,
      memory=memory,
      lambda_=lambda_,
      interclass_coef=coef,
      **more,
      **options,
    )

  return jax.jit(jax.value_and_grad(loss_fn))


def _run(
  embeddings,
  labels,
  where=None,
  memory=None,
  lambda_=5.0,
  coef=0.9,
  margin=0.0,
  key=None,
  **options,
):
  """Runs in float64, so that near ties are ordered as in the loops."""
  where = np.ones(len(labels), bool) if where is None else where
  with jax.enable_x64(True):
    arguments = (
      np.float64(embeddings),
      labels,
      where,
      memory,
      np.float64(lambda_),
      np.float64(coef),
      margin,
      key,
    )
    value, gradient = _jitted(**options)(*jax.tree.map(jnp.asarray, arguments))
    return float(value), np.asarray(gradient)


def _check(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-12)
  np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-12)


def _unit(seed=0, count=8, dim=4):
  vectors = np.random.default_rng(seed).standard_normal((count, dim)) + 0.5
  return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _memory(where=(1, 1, 1, 0, 1)):
  return Memory(_unit(9, 5), _STORED_LABELS, np.array(where, bool))


@pytest.mark.parametrize("include_self", [True, False])
@hypothesis.given(
  seed=st.integers(0, 10**6),
  where=st.lists(st.booleans(), min_size=8, max_size=8),
  lambda_=st.sampled_from([0.1, 1.0, 5.0]),
  coef=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
)
@hypothesis.settings(max_examples=20)
def test_value_and_gradient_by_loops(include_self, seed, where, lambda_, coef):
  labels, where = np.random.default_rng(seed).integers(0, 3, 8), np.array(where)
  got = _run(_unit(seed), labels, where, lambda_=lambda_, coef=coef, include_self=include_self)
  _check(
    got,
    _reference(_unit(seed), labels, where, lambda_=lambda_, coef=coef, include_self=include_self),
  )
  np.testing.assert_array_equal(got[1][~where], 0)


def test_defaults():
  value, gradient = _value_and_grad(_unit(), _LABELS)
  want = _reference(_unit(), _LABELS)
  np.testing.assert_allclose(value, want[0], rtol=1e-5)
  np.testing.assert_allclose(gradient, want[1], atol=1e-6)
  assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("stored", [(0, 0, 0, 0, 0), (1, 1, 1, 0, 1)], ids=["empty", "filled"])
def test_embedding_memory_extends_the_gallery_of_the_current_queries(stored):
  memory, where = _memory(stored), np.array([1, 1, 1, 1, 0, 1, 1, 1], bool)
  got = _run(_unit(), _LABELS, where, memory, coef=0.3)
  _check(got, _reference(_unit(), _LABELS, where, memory, coef=0.3))
  # An image of class 90 that is alone in the batch finds its positive in the memory.
  alone = _run(_unit(), _LABELS, where, coef=0.3)
  assert (abs(alone[0] - got[0]) > 1e-3) == any(stored)


def test_batches_one_after_the_other_with_the_carried_memory():
  memory = embedding_memory(12, 4)
  state, seen = memory.init(None), np.zeros((0, 4), np.float32)
  for seed in range(3):
    embeddings = _unit(seed)
    current = memory.current(state)
    earlier = seen[-12:]
    by_hand = Memory(
      earlier,
      np.tile(_LABELS, 3)[len(seen) - len(earlier) : len(seen)],
      np.ones(len(earlier), bool),
    )
    _check(
      _run(embeddings, _LABELS, memory=current, coef=0.5),
      _reference(embeddings, _LABELS, memory=by_hand, coef=0.5),
    )
    state = memory.update(None, state, embeddings=embeddings, labels=_LABELS)[1]
    seen = np.concatenate([seen, embeddings])


def test_no_gradient_into_the_memory():
  @jax.jit
  def loss_fn(stored):
    return losses.blackbox_ap_loss(_unit(), _LABELS, memory=_memory()._replace(embeddings=stored))

  np.testing.assert_array_equal(jax.grad(loss_fn)(_unit(9, 5)), 0)


@pytest.mark.parametrize("memory", [None, _memory()], ids=["batch", "memory"])
def test_margin_shifts_the_scores_by_noise(memory):
  with jax.enable_x64(True):
    scores, key = jnp.zeros((8, 8 if memory is None else 13)), jax.random.key(0)
    noise = [np.asarray(part) for part in blackbox._absolute_noise(key, scores, 0, 8)]
  assert [part.shape for part in noise] == [scores.shape, (8, 8)]
  assert min(part.min() for part in noise) >= 0
  where = np.array([1, 1, 1, 1, 0, 1, 1, 1], bool)
  got = _run(_unit(), _LABELS, where, memory, coef=0.4, margin=0.7, key=key)
  _check(got, _reference(_unit(), _LABELS, where, memory, coef=0.4, margin=0.7, noise=noise))
  assert abs(got[0] - _run(_unit(), _LABELS, where, memory, coef=0.4)[0]) > 1e-3


def test_margin_draws_from_the_key_alone():
  loss_fn = jax.jit(losses.blackbox_ap_loss)

  def run(seed, margin):
    return float(loss_fn(_unit(), _LABELS, margin=margin, key=jax.random.key(seed)))

  assert run(0, 0.5) == run(0, 0.5)
  assert run(0, 0.5) != run(1, 0.5)
  np.testing.assert_allclose(
    [run(0, 0.0), run(1, 0.0)], _value_and_grad(_unit(), _LABELS)[0], rtol=1e-6
  )
  assert run(0, 50.0) > 0.4  # only the noise is left, and it always ranks negatives first


def test_a_weight_on_the_loss_scales_the_gradient():
  _, plain = _value_and_grad(_unit(), _LABELS)
  weighted = jax.jit(jax.grad(lambda e: 7 * losses.blackbox_ap_loss(e, _LABELS)))(_unit())
  np.testing.assert_allclose(weighted, 7 * plain, rtol=1e-5)


@hypothesis.given(order=st.permutations(range(8)), seed=st.integers(0, 10**6))
@hypothesis.settings(max_examples=20)
def test_order_of_the_batch_changes_nothing(order, seed):
  order, labels = np.array(order), np.random.default_rng(seed).integers(0, 3, 8)
  value, gradient = _run(_unit(seed), labels)
  _check(_run(_unit(seed)[order], labels[order]), (value, gradient[order]))
  # Also with many exact ties (scores 0 and 1), for the value only.
  axes = np.eye(4)[np.random.default_rng(seed).integers(0, 4, 8)]
  value, gradient = _run(axes, labels)
  np.testing.assert_allclose(_run(axes[order], labels[order])[0], value, rtol=0, atol=1e-12)
  np.testing.assert_allclose(value, _reference(axes, labels)[0], rtol=0, atol=1e-12)
  assert np.isfinite(gradient).all()


@pytest.mark.parametrize("labels", [[0, 0, 1], [0, 1, 0]])
def test_ties_are_pessimistic(labels):
  """Checks queries 0 and 1 or 2, which have one positive each. For query 0 a negative has the same
  score, for the other query a higher one.
  """
  embeddings = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
  value, _ = _run(embeddings, np.array(labels), coef=0.0, include_self=False)
  np.testing.assert_allclose(value, 0.5, atol=1e-4)


@pytest.mark.parametrize(
  ("labels", "where"),
  [
    pytest.param(np.arange(8), np.ones(8, bool), id="no_positives"),
    pytest.param(np.zeros(8, int), np.ones(8, bool), id="one_class"),
    pytest.param(_LABELS, np.zeros(8, bool), id="all_masked"),
    pytest.param(_LABELS, np.arange(8) == 2, id="one_image_left"),
  ],
)
def test_without_a_ranking_it_is_zero_without_gradient(labels, where):
  for memory in (None, _memory((0, 0, 0, 0, 0))):
    value, gradient = _run(_unit(), labels, where, memory)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
  "embeddings", [np.zeros((8, 4)), np.full((8, 4), 0.5)], ids=["zero", "all_equal"]
)
def test_a_collapsed_batch_is_finite_and_not_perfect(embeddings):
  value, gradient = _run(embeddings, _LABELS)
  np.testing.assert_allclose(value, _reference(embeddings, _LABELS)[0], atol=1e-12)
  assert value > 0.5
  assert np.isfinite(gradient).all()


def test_a_perfect_ranking_costs_nothing_but_the_constant_of_the_denominator():
  embeddings, labels = np.eye(4)[[0, 0, 1, 1, 2, 2, 3, 3]], np.array([0, 0, 1, 1, 2, 2, 3, 3])
  value, gradient = _run(embeddings, labels, coef=0.5)
  np.testing.assert_allclose(value, 0.5 * (1e-5 / 2 + 1e-5 / 16), rtol=1e-4)
  np.testing.assert_array_equal(gradient, 0)


def test_half_precision_is_computed_in_float32():
  for dtype in (jnp.bfloat16, jnp.float16):
    embeddings = jnp.asarray(_unit(), dtype)
    value, _ = _value_and_grad(embeddings, _LABELS)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(
      value, _value_and_grad(embeddings.astype(jnp.float32), _LABELS)[0], rtol=1e-6
    )


def test_vmap_over_batches():
  batches = np.stack([_unit(seed) for seed in range(3)])
  value, gradient = jax.jit(jax.vmap(_value_and_grad, in_axes=(0, None)))(batches, _LABELS)
  for got, grad, batch in zip(value, gradient, batches, strict=True):
    want = _reference(batch, _LABELS)
    np.testing.assert_allclose(got, want[0], rtol=1e-5)
    np.testing.assert_allclose(grad, want[1], atol=1e-6)


def test_bad_options_are_named():
  embeddings, memory = _unit(), embedding_memory(8, 4)
  for options, message in (
    ({"lambda_": 0.0}, "lambda_"),
    ({"margin": -0.1}, "margin must lie"),
    ({"margin": 0.1}, "margin needs key"),
    ({"interclass_coef": 1.5}, "interclass_coef"),
    ({"memory": memory.lookahead(memory.init(None), embeddings, _LABELS)}, "pass current"),
  ):
    with pytest.raises(ValueError, match=message):
      losses.blackbox_ap_loss(embeddings, _LABELS, **options)


@pytest.mark.parametrize(("kind", "margin"), [("pmap", 0.1), ("shard_map", 0.0)])
def test_two_devices_equal_one(kind, margin):
  """Checks loss, parameter gradient and memory over two steps. The masks are unequal and the shifts
  random.
  """
  rng = np.random.default_rng(0)
  inputs, kernel = np.float32(rng.normal(size=(2, 8, 5))), np.float32(rng.normal(size=(5, 4)))
  where = np.array([1, 1, 1, 1, 0, 1, 0, 1], bool)

  def make(axis_name=None):
    return embedding_memory(11, 4, axis_name=axis_name)

  def step(kernel, state, inputs, labels, where, axis_name=None):
    memory = make(axis_name)

    def loss_fn(kernel):
      embeddings = inputs @ kernel
      embeddings /= jnp.linalg.norm(embeddings, axis=1, keepdims=True)
      loss = losses.blackbox_ap_loss(
        embeddings,
        labels,
        interclass_coef=0.5,
        margin=margin,
        key=jax.random.key(3),
        memory=memory.current(state),
        where=where,
        axis_name=axis_name,
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
  expected = make().init(None)
  state = mapping.replicate(expected)
  for batch in inputs:
    loss, gradient, expected = single(kernel, expected, batch, _LABELS, where)
    got = mapped(mapping.replicate(kernel), state, *map(mapping.split, (batch, _LABELS, where)))
    state = got[2]
    chex.assert_trees_all_close(
      (got[0], state), mapping.replicate((loss, expected)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
      got[1], mapping.replicate(gradient), rtol=0, atol=1e-4 * np.abs(gradient).max()
    )
    assert np.abs(gradient).max() > 1e-4


@pytest.mark.parametrize("jitted", [False, True])
def test_f67_labels_may_be_booleans(jitted):
  embeddings, labels = _unit(0, 8), _LABELS == 7
  loss = functools.partial(losses.blackbox_ap_loss, embeddings)
  got = (jax.jit(loss) if jitted else loss)(labels)
  np.testing.assert_array_equal(got, (jax.jit(loss) if jitted else loss)(np.int32(labels)))


def test_f46_more_pairs_than_int32_counts_are_an_error():
  images = (
    jax.ShapeDtypeStruct((46_341, 2), jnp.float32),
    jax.ShapeDtypeStruct((46_341,), jnp.int32),
  )
  with pytest.raises(ValueError, match="got 46,341 images"):
    jax.eval_shape(functools.partial(losses.blackbox_ap_loss, max_positives=3), *images)
