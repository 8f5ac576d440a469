"""Tests score_ema, which tracks the auxiliary vector v (Eq. 10), as an optax transform."""

import functools
import os
import re

from absl.testing import parameterized
import chex
from flax.training import train_state
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import mapping
import numpy as np
import optax
import pytest
import reference

from soprc_jax import ScoreEmaState, interpolate_scores, retrieval_lists, score_ema, soprc_loss

C, M, Q, P, STEPS = 3, 4, 5, 3, 3
_BETA = 0.3
_STARTS = {
  "debiased": None,
  "row": np.arange(M) / M,
  "table": np.arange(C * M).reshape(C, M) / (C * M),
}
_TRACKERS = {
  name: score_ema(C, M, _BETA, bounds=(-1, 1), initial_v=start) for name, start in _STARTS.items()
}
_PARAMS = {"a": jnp.ones(2), "b": jnp.full(3, 2.0)}
_GRADS = {"a": jnp.array([0.5, -1.0]), "b": jnp.array([1.0, 2.0, 3.0])}


def _step(tracker, state, scores, ids, mask=None):
  _, state = tracker.update(None, state, positive_scores=scores, list_ids=ids, positive_where=mask)
  return state


def _sequence(tracker, scores, ids, masks):
  """Returns states and lookahead rows of ``[T, Q, P]`` scores, one update after the other."""
  state, rows = tracker.init(None), []
  for t in range(scores.shape[0]):
    rows.append(tracker.lookahead(state, scores[t], ids[t], masks[t]))
    state = _step(tracker, state, scores[t], ids[t], masks[t])
  return state, jnp.stack(rows)


_SEQUENCES = {name: functools.partial(_sequence, tracker) for name, tracker in _TRACKERS.items()}
_SCORES = hnp.arrays(np.float32, (STEPS, Q, P), elements=st.floats(-1, 1, width=32))
_IDS = hnp.arrays(np.int32, (STEPS, Q), elements=st.integers(0, C - 1))
_MASKS = hnp.arrays(bool, (STEPS, Q, P))


def _phi(scores, mask):
  return [
    reference.interpolate(s[m], M, (-1, 1)) if m.any() else None
    for s, m in zip(scores, mask, strict=True)
  ]


def _batch(seed, lists=Q):
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (lists, P)).astype(np.float32), rng.integers(0, C, lists)


def _extra(seed):
  scores, ids = _batch(seed)
  return {"positive_scores": scores, "list_ids": ids}


def _expected_state(seeds):
  """Returns the state after these batches, by the tracker alone."""
  state = _TRACKERS["debiased"].init(None)
  for seed in seeds:
    state = _step(_TRACKERS["debiased"], state, *_batch(seed))
  return state


def _assert_same_state(got, expected):
  np.testing.assert_allclose(got.v, expected.v, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-6)


class UpdateTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @parameterized.named_parameters([(name, name) for name in _STARTS])
  @hypothesis.given(scores=_SCORES, ids=_IDS, masks=_MASKS)
  @hypothesis.settings(max_examples=20)
  def test_matches_the_loops_and_the_lookahead(self, start, scores, ids, masks):
    """Checks that a row takes the mean of its valid lists in one write. Rows without a valid list
    stay. update stores exactly what lookahead shows.
    """
    state, rows = self.variant(_SEQUENCES[start])(scores, ids, masks)
    table = reference.Table(C, M, _STARTS[start])
    for t in range(STEPS):
      table.update(_phi(scores[t], masks[t]), ids[t], _BETA)
      np.testing.assert_allclose(rows[t], table.v[ids[t]], rtol=0, atol=2e-6)
    np.testing.assert_allclose(state.v, table.v, rtol=0, atol=2e-6)
    np.testing.assert_allclose(state.weight, table.weight, rtol=1e-5)
    self.assertEqual(int(state.count), STEPS)

  @chex.all_variants(with_pmap=False)
  @hypothesis.given(scores=_SCORES, ids=_IDS, masks=_MASKS, seed=st.integers(0, 2**16))
  @hypothesis.settings(max_examples=20)
  def test_f12_order_of_the_batch_changes_nothing(self, scores, ids, masks, seed):
    order, columns = (np.random.default_rng(seed).permutation(n) for n in (Q, P))
    sequence = self.variant(_SEQUENCES["debiased"])
    expected, _ = sequence(scores, ids, masks)
    got, _ = sequence(
      scores[:, order][:, :, columns], ids[:, order], masks[:, order][:, :, columns]
    )
    _assert_same_state(got, expected)

  @hypothesis.given(
    scores=_SCORES, ids=_IDS, masks=_MASKS, filler=st.sampled_from([0.0, 9.0, np.inf, np.nan])
  )
  @hypothesis.settings(max_examples=20)
  def test_padding_changes_nothing(self, scores, ids, masks, filler):
    expected, rows = _jitted_sequence(scores, ids, masks)
    pad = [(0, 0), (0, 2), (0, 1)]  # two more lists, one more positive, all masked
    padded = np.pad(scores, pad, constant_values=filler)
    state, padded_rows = _jitted_sequence(
      padded, np.pad(ids, pad[:2], constant_values=1), np.pad(masks, pad)
    )
    np.testing.assert_array_equal(state.v, expected.v)
    np.testing.assert_array_equal(state.weight, expected.weight)
    np.testing.assert_array_equal(padded_rows[:, :Q], rows)

  def test_f12_several_lists_of_one_row_take_their_mean(self):
    scores = np.float32([[0.1, 0.3, 0.5], [0.2, 0.2, 0.9], [-0.5, 0.0, 0.4]])
    state = _step(
      _TRACKERS["debiased"], _TRACKERS["debiased"].init(None), scores, np.array([1, 1, 2])
    )
    phi = interpolate_scores(scores, num_points=M, bounds=(-1, 1))
    np.testing.assert_allclose(state.v[1], (phi[0] + phi[1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(state.v[2], phi[2], rtol=1e-6)
    np.testing.assert_array_equal(state.v[0], np.zeros(M))
    # One write: the weight of a row does not depend on the number of its lists.
    np.testing.assert_allclose(state.weight, [0, _BETA, _BETA], rtol=1e-6)

  @parameterized.named_parameters([(name, name) for name in _STARTS])
  def test_a_list_without_a_positive_leaves_row_and_weight_alone(self, start):
    tracker = _TRACKERS[start]
    before = _step(tracker, tracker.init(None), *_batch(0))
    scores, _ = _batch(1)
    mask = np.ones((Q, P), bool)
    mask[[0, 2]] = False
    # Row 0 has only a list without positives. Row 1 has one with and one without. Row 2 is not in
    # the batch.
    ids = np.array([0, 1, 1, 1, 1])
    after = _step(tracker, before, scores, ids, mask)
    for row in (0, 2):
      np.testing.assert_array_equal(after.v[row], before.v[row])
      np.testing.assert_array_equal(after.weight[row], before.weight[row])
    without = _step(tracker, before, scores[[1, 3, 4]], ids[[1, 3, 4]])
    np.testing.assert_allclose(after.v[1], without.v[1], rtol=1e-6)
    rows = tracker.lookahead(before, scores, ids, mask)
    np.testing.assert_array_equal(rows[0], before.v[0])  # looks up the current row
    np.testing.assert_array_equal(rows[2], after.v[1])

  def test_an_empty_batch_changes_nothing_but_the_count(self):
    tracker = _TRACKERS["debiased"]
    before = _step(tracker, tracker.init(None), *_batch(0))
    for scores in (np.zeros((0, P), np.float32), np.zeros((Q, 0), np.float32)):
      after = _step(tracker, before, scores, np.zeros(len(scores), int))
      np.testing.assert_array_equal(after.v, before.v)
      np.testing.assert_array_equal(after.weight, before.weight)
      self.assertEqual(int(after.count), 2)

  def test_erratum_4_debiased_start(self):
    """Checks that the first phi fills the row exactly. Then v is the average with weights beta (1 -
    beta)^(k - i) / w.
    """
    tracker = score_ema(1, M, _BETA)
    state = tracker.init(None)
    np.testing.assert_array_equal(state.weight, [0.0])
    phis = []
    for k in range(1, 6):
      scores = np.random.default_rng(k).uniform(-1, 1, (1, P)).astype(np.float32)
      phis.append(np.asarray(interpolate_scores(scores, num_points=M)[0], np.float64))
      state = _step(tracker, state, scores, np.zeros(1, int))
      if k == 1:
        np.testing.assert_array_equal(state.v[0], np.float32(phis[0]))
      weights = _BETA * (1 - _BETA) ** np.arange(k)[::-1]
      np.testing.assert_allclose(state.weight, [1 - (1 - _BETA) ** k], rtol=1e-5)
      np.testing.assert_allclose(
        state.v[0], weights @ np.stack(phis) / weights.sum(), rtol=0, atol=1e-6
      )

  def test_erratum_4_explicit_start_is_equation_10(self):
    start = np.arange(M) / M
    tracker = score_ema(2, M, _BETA, initial_v=start)
    state = tracker.init(None)
    np.testing.assert_allclose(state.v, np.stack([start, start]), rtol=1e-6)
    np.testing.assert_array_equal(state.weight, [1.0, 1.0])
    scores = np.float32([[0.2, -0.1, 0.7]])
    phi = np.asarray(interpolate_scores(scores, num_points=M)[0], np.float64)
    for k in range(1, 4):
      state = _step(tracker, state, scores, np.array([1]))
      q = (1 - _BETA) ** k  # a row keeps (1 - beta)^k of its start
      np.testing.assert_allclose(state.v[1], q * start + (1 - q) * phi, rtol=0, atol=1e-6)
      np.testing.assert_allclose(state.weight, [1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(state.v[0], start, rtol=1e-6)

  @parameterized.named_parameters(("debiased", None), ("explicit", np.arange(M) / M))
  def test_beta_weights_the_new_value(self, start):
    scores = [np.full((1, P), value, np.float32) for value in (0.25, 0.75)]
    for beta in (1.0, 1e-3):
      tracker = score_ema(1, M, beta, initial_v=start)
      state = _step(tracker, tracker.init(None), scores[0], np.zeros(1, int))
      moved = _step(tracker, state, scores[1], np.zeros(1, int))
      if beta == 1.0:
        np.testing.assert_array_equal(moved.v, np.full((1, M), 0.75, np.float32))
      elif start is not None:
        np.testing.assert_allclose(moved.v, 0.999 * state.v + 0.001 * 0.75, rtol=1e-6)

  def test_erratum_5_the_order_of_the_queries_does_not_decide(self):
    scores = np.float32([[0.1, 0.3, 0.5], [0.7, 0.8, 0.9]])
    tracker = score_ema(1, M, 0.5, initial_v=np.zeros(M))
    states = [
      _step(tracker, tracker.init(None), scores[order], np.zeros(2, int))
      for order in ([0, 1], [1, 0])
    ]
    np.testing.assert_allclose(states[0].v, states[1].v, rtol=1e-6)
    last = 0.5 * interpolate_scores(scores[1:], num_points=M)  # as in the authors' CPU code
    self.assertGreater(np.abs(np.asarray(states[0].v) - np.asarray(last)).max(), 0.05)

  def test_beta_schedule(self):
    betas = (1.0, 0.5, 0.25)
    calls = []

    def schedule(count):
      calls.append(count)
      return jnp.asarray(betas)[count]

    tracker = score_ema(C, M, schedule, bounds=(-1, 1))
    state, table = tracker.init(None), reference.Table(C, M)
    for t, beta in enumerate(betas):
      scores, ids = _batch(t)
      ahead = tracker.lookahead(state, scores, ids)
      state = _step(tracker, state, scores, ids)
      table.update(_phi(scores, np.ones((Q, P), bool)), ids, beta)
      np.testing.assert_allclose(state.v, table.v, rtol=0, atol=2e-6)
      np.testing.assert_array_equal(ahead, state.v[ids])
    self.assertEqual([int(count) for count in calls], [0, 0, 1, 1, 2, 2])

  def test_beta_may_be_an_optax_schedule_or_an_array(self):
    scores, ids = _batch(0)
    expected = _step(_TRACKERS["row"], _TRACKERS["row"].init(None), scores, ids)
    for beta in (optax.constant_schedule(_BETA), jnp.float32(_BETA), np.float64(_BETA)):
      tracker = score_ema(C, M, beta, bounds=(-1, 1), initial_v=_STARTS["row"])
      _assert_same_state(_step(tracker, tracker.init(None), scores, ids), expected)

  def test_state_is_a_stable_carry(self):
    """Checks that structure, shapes and types stay the same after a step. The state can then be
    scanned, donated and saved.
    """
    for tracker in (*_TRACKERS.values(), score_ema(C, M, optax.linear_schedule(0.5, 0.1, 10))):
      scores, ids = (np.stack(part) for part in zip(*(_batch(t) for t in range(4)), strict=True))

      def body(state, batch, tracker=tracker):
        return _step(tracker, state, *batch), None

      state = tracker.init(None)
      self.assertIsInstance(state, ScoreEmaState)
      after, _ = jax.lax.scan(body, state, (scores, ids))
      self.assertEqual(jax.tree.map(jnp.shape, after), jax.tree.map(jnp.shape, state))
      self.assertEqual(int(after.count), 4)
      chex.assert_tree_all_finite(after)

  def test_states_do_not_share_buffers(self):
    """Checks that donating one state invalidates neither another state nor the tracker."""
    tracker = _TRACKERS["row"]
    step = jax.jit(functools.partial(_step, tracker), donate_argnums=0)
    kept = tracker.init(None)
    step(tracker.init(None), *_batch(0))
    np.testing.assert_array_equal(tracker.init(None).v, kept.v)

  @parameterized.named_parameters(
    ("equal", np.full((Q, P), 0.5)),
    ("zeros", np.zeros((Q, P))),
    ("bounds", np.array([[-1.0, 1.0, -1.0]] * Q)),
    ("huge", np.array([[-1e30, 1e30, 0.0]] * Q)),
  )
  def test_finite(self, scores):
    for dtype in (jnp.float32, jnp.bfloat16):
      state = _step(
        _TRACKERS["debiased"],
        _TRACKERS["debiased"].init(None),
        jnp.asarray(scores, dtype),
        np.arange(Q) % C,
      )
      chex.assert_tree_all_finite(state)

  def test_dtypes(self):
    tracker = _TRACKERS["debiased"]
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
      state = _step(tracker, tracker.init(None), jnp.asarray(_batch(0)[0], dtype), _batch(0)[1])
      self.assertEqual(
        (state.v.dtype, state.weight.dtype, state.count.dtype),
        (jnp.float32, jnp.float32, jnp.int32),
      )
    with jax.enable_x64(True):
      wide = score_ema(C, M, _BETA, initial_v=np.arange(M, dtype=np.float64) / M)
      state = _step(wide, wide.init(None), _batch(0)[0].astype(np.float64), _batch(0)[1])
      self.assertEqual(state.v.dtype, jnp.float64)
    self.assertEqual(score_ema(C, M, _BETA, initial_v=np.arange(M)).init(None).v.dtype, jnp.float32)

  def test_no_gradient(self):
    scores, ids = _batch(0)
    tracker = _TRACKERS["debiased"]
    state = tracker.init(None)
    ahead = jax.grad(lambda s: jnp.sum(tracker.lookahead(state, s, ids)))(scores)
    stored = jax.grad(lambda s: jnp.sum(_step(tracker, state, s, ids).v))(scores)
    np.testing.assert_array_equal(ahead, np.zeros_like(scores))
    np.testing.assert_array_equal(stored, np.zeros_like(scores))


_jitted_sequence = jax.jit(_SEQUENCES["debiased"])


class ErrorsTest(chex.TestCase):
  @parameterized.named_parameters(
    ("no_lists", (0, M, 0.1), {}, "num_lists"),
    ("float_lists", (2.0, M, 0.1), {}, "num_lists"),
    ("no_points", (C, 0, 0.1), {}, "num_points"),
    ("beta_zero", (C, M, 0.0), {}, "beta"),
    ("beta_negative", (C, M, -0.1), {}, "beta"),
    ("beta_like_a_decay_in_percent", (C, M, 99), {}, "beta"),
    ("beta_nan", (C, M, float("nan")), {}, "beta"),
    ("grid", (C, M, 0.1), {"grid": "centers"}, "grid"),
    ("bounds", (C, M, 0.1), {"bounds": (1.0, 0.0)}, "bounds"),
    ("initial_v_shape", (C, M, 0.1), {"initial_v": np.zeros(M + 1)}, "initial_v"),
    ("initial_v_table", (C, M, 0.1), {"initial_v": np.zeros((C + 1, M))}, "initial_v"),
    ("initial_v_scalar", (C, M, 0.1), {"initial_v": 0.5}, "initial_v"),
    ("initial_v_nan", (C, M, 0.1), {"initial_v": np.full(M, np.nan)}, "initial_v"),
  )
  def test_bad_settings(self, arguments, options, name):
    with self.assertRaisesRegex(ValueError, name):
      score_ema(*arguments, **options)

  @parameterized.named_parameters(("too_large", C), ("negative", -1))
  def test_f10_concrete_ids_out_of_range(self, bad):
    tracker = _TRACKERS["debiased"]
    scores, ids = _batch(0)
    ids[2] = bad
    with self.assertRaisesRegex(ValueError, "list_ids"):
      _step(tracker, tracker.init(None), scores, ids)
    with self.assertRaisesRegex(ValueError, "list_ids"):
      tracker.lookahead(tracker.init(None), scores, ids)

  @parameterized.named_parameters(
    ("too_large", C), ("far", 10**6), ("negative", -1), ("very_negative", -(10**6))
  )
  def test_f10_traced_ids_out_of_range(self, bad):
    """Checks for NaN rows in the lookahead, never another list's row. The table stays unchanged."""
    tracker = _TRACKERS["table"]
    scores, ids = _batch(0)
    kept = np.arange(Q) != 2
    expected = _step(tracker, tracker.init(None), scores[kept], ids[kept])
    ids[2] = bad
    rows = jax.jit(tracker.lookahead)(tracker.init(None), scores, ids)
    state = jax.jit(functools.partial(_step, tracker))(tracker.init(None), scores, ids)
    with self.subTest("update"):
      _assert_same_state(state, expected)
    with self.subTest("lookahead"):
      np.testing.assert_allclose(rows[kept], expected.v[ids[kept]], rtol=1e-6)
      self.assertTrue(np.isnan(rows[2]).all(), rows[2])

  @parameterized.named_parameters(("numpy", np.asarray), ("jax", jnp.asarray))
  def test_concrete_ids_inside_jit(self, convert):
    """Checks concrete ids that a jitted step closes over (one row: all zeros). They are checked and
    cause no tracing error.
    """
    tracker = _TRACKERS["debiased"]
    scores, ids = _batch(0)
    good, bad = convert(ids), convert(ids + C)
    state = tracker.init(None)
    got = jax.jit(lambda state, scores: _step(tracker, state, scores, good))(state, scores)
    _assert_same_state(got, _step(tracker, state, scores, ids))
    rows = jax.jit(lambda state, scores: tracker.lookahead(state, scores, good))(state, scores)
    np.testing.assert_allclose(rows, got.v[ids], rtol=1e-6)
    with self.assertRaisesRegex(ValueError, "list_ids"):
      jax.jit(lambda state, scores: _step(tracker, state, scores, bad))(state, scores)

  def test_shapes_and_types(self):
    tracker = _TRACKERS["debiased"]
    state = tracker.init(None)
    scores, ids = _batch(0)
    for bad_scores, bad_ids in (
      (scores[0], ids),
      (scores, ids[0]),
      (scores[:2], ids),
      (scores, ids.astype(np.float32)),
    ):
      with self.assertRaises(AssertionError):
        _step(tracker, state, bad_scores, bad_ids)
    with self.assertRaises(AssertionError):  # the state of another tracker
      _step(tracker, score_ema(C + 1, M, 0.1).init(None), scores, ids)

  @parameterized.named_parameters(("scores", "positive_scores"), ("ids", "list_ids"))
  def test_f37_a_missing_argument_is_named(self, missing):
    tx = optax.chain(_TRACKERS["debiased"], optax.sgd(0.1))
    extra = _extra(0)
    del extra[missing]
    with self.assertRaisesRegex(TypeError, missing):
      tx.update(_GRADS, tx.init(_PARAMS), _PARAMS, **extra)
    other = ({"positive_scores", "list_ids"} - {missing}).pop()
    with self.assertRaisesRegex(TypeError, f"Missing: (?!.*{other})"):
      tx.update(_GRADS, tx.init(_PARAMS), _PARAMS, **extra)

  def test_f37_both_missing(self):
    tx = optax.chain(_TRACKERS["debiased"], optax.sgd(0.1))
    with self.assertRaisesRegex(TypeError, "positive_scores, list_ids"):
      tx.update(_GRADS, tx.init(_PARAMS), _PARAMS)


class OptaxTest(chex.TestCase):
  """Tests the transform together with others of optax. Everything is compared with the tracker and
  the optimizer used separately.
  """

  def run_steps(self, tx, seeds=(0, 1, 2), **more):
    params, state = _PARAMS, tx.init(_PARAMS)
    for seed in seeds:
      updates, state = tx.update(_GRADS, state, params, **_extra(seed), **more)
      params = optax.apply_updates(params, updates)
    return params, state

  def plain(self, optimizer, steps=3):
    params, state = _PARAMS, optimizer.init(_PARAMS)
    for _ in range(steps):
      updates, state = optimizer.update(_GRADS, state, params)
      params = optax.apply_updates(params, updates)
    return params

  def test_is_a_transform_with_extra_arguments(self):
    tracker = _TRACKERS["debiased"]
    self.assertIsInstance(tracker, optax.GradientTransformationExtraArgs)
    self.assertLen(tuple(tracker), 2)  # chain unpacks the fields: lookahead must not be one
    updates, _ = tracker.update(
      _GRADS, tracker.init(_PARAMS), _PARAMS, **_extra(0), value=1.0, unknown=None
    )
    chex.assert_trees_all_equal(updates, _GRADS)

  @parameterized.named_parameters(("before", True), ("after", False))
  def test_f37_chain(self, first):
    tracker, optimizer = _TRACKERS["debiased"], optax.adam(0.1)
    tx = optax.chain(tracker, optimizer) if first else optax.chain(optimizer, tracker)
    params, state = self.run_steps(tx, value=0.0)
    chex.assert_trees_all_close(params, self.plain(optimizer), rtol=1e-6)
    _assert_same_state(state[0 if first else 1], _expected_state((0, 1, 2)))
    _, after = tx.update(_GRADS, state, params, **_extra(3))
    scores, ids = _batch(3)
    np.testing.assert_array_equal(
      tracker.lookahead(state, scores, ids), after[0 if first else 1].v[ids]
    )

  def test_chain_under_jit(self):
    tx = optax.chain(_TRACKERS["debiased"], optax.sgd(0.1))
    update = jax.jit(tx.update)
    state = tx.init(_PARAMS)
    for seed in (0, 1):
      updates, state = update(_GRADS, state, _PARAMS, **_extra(seed))
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.1 * g, _GRADS))
    _assert_same_state(state[0], _expected_state((0, 1)))

  def test_f37_chain_before_multi_steps_moves_at_every_mini_step(self):
    tx = optax.chain(
      _TRACKERS["debiased"], optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    )
    for seeds in ((0,), (0, 1), (0, 1, 2)):
      params, state = self.run_steps(tx, seeds)
      _assert_same_state(state[0], _expected_state(seeds))
      chex.assert_trees_all_close(params, self.plain(optax.sgd(0.1), len(seeds) // 2), rtol=1e-6)

  def test_f37_multi_steps_around_the_chain_sees_the_last_mini_step_only(self):
    tx = optax.MultiSteps(optax.chain(_TRACKERS["debiased"], optax.sgd(0.1)), 2)
    seen = {(0,): (), (0, 1): (1,), (0, 1, 2): (1,), (0, 1, 2, 3): (1, 3)}
    for seeds, expected in seen.items():
      params, state = self.run_steps(tx, seeds)
      _assert_same_state(state.inner_opt_state[0], _expected_state(expected))
      chex.assert_trees_all_close(params, self.plain(optax.sgd(0.1), len(seeds) // 2), rtol=1e-6)
    scores, ids = _batch(4)
    rows = _TRACKERS["debiased"].lookahead(state, scores, ids)
    np.testing.assert_allclose(
      rows, _step(_TRACKERS["debiased"], _expected_state((1, 3)), scores, ids).v[ids], rtol=1e-6
    )

  def test_f37_partition(self):
    tracker = _TRACKERS["debiased"]
    tx = optax.partition(
      {"tracked": optax.chain(tracker, optax.sgd(0.1)), "plain": optax.sgd(0.01)},
      {"a": "tracked", "b": "plain"},
    )
    params, state = self.run_steps(tx)
    np.testing.assert_allclose(params["a"], self.plain(optax.sgd(0.1))["a"], rtol=1e-6)
    np.testing.assert_allclose(params["b"], self.plain(optax.sgd(0.01))["b"], rtol=1e-6)
    scores, ids = _batch(3)
    expected = _step(tracker, _expected_state((0, 1, 2)), scores, ids).v[ids]
    np.testing.assert_allclose(tracker.lookahead(state, scores, ids), expected, rtol=1e-6)

  def test_f37_inject_hyperparams_around_the_optimizer(self):
    tracker = _TRACKERS["debiased"]
    tx = optax.chain(tracker, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    params, state = self.run_steps(tx)
    chex.assert_trees_all_close(params, self.plain(optax.sgd(0.1)), rtol=1e-6)
    state[1].hyperparams["learning_rate"] = jnp.float32(0.5)
    updates, state = tx.update(_GRADS, state, params, **_extra(3))
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -0.5 * g, _GRADS), rtol=1e-6)
    _assert_same_state(state[0], _expected_state((0, 1, 2, 3)))

  def test_f37_inject_hyperparams_around_the_tracker_is_told(self):
    """Checks that inject_hyperparams, which would trace num_lists, raises an error that names it.
    The error comes at the start, not a wrong table later.
    """
    tx = optax.inject_hyperparams(score_ema)(num_lists=C, num_points=M, beta=_BETA)
    with self.assertRaisesRegex(ValueError, "num_lists must be an integer"):
      tx.init(_PARAMS)

  @parameterized.named_parameters(("outside", True), ("inside", False))
  def test_f37_masked(self, outside):
    tracker, mask = _TRACKERS["debiased"], {"a": True, "b": False}
    both = optax.chain(tracker, optax.sgd(0.1))
    tx = (
      optax.masked(both, mask)
      if outside
      else optax.chain(tracker, optax.masked(optax.sgd(0.1), mask))
    )
    params, state = self.run_steps(tx, (0, 1))
    np.testing.assert_allclose(params["a"], self.plain(optax.sgd(0.1), 2)["a"], rtol=1e-6)
    scores, ids = _batch(2)
    expected = _step(tracker, _expected_state((0, 1)), scores, ids).v[ids]
    np.testing.assert_allclose(tracker.lookahead(state, scores, ids), expected, rtol=1e-6)

  def test_f37_a_trainer_that_passes_no_arguments_is_told(self):
    """Checks Flax's TrainState, which does not pass on the keywords of ``apply_gradients``."""
    state = train_state.TrainState.create(
      apply_fn=None, params=_PARAMS, tx=optax.chain(_TRACKERS["debiased"], optax.sgd(0.1))
    )
    with self.assertRaisesRegex(
      TypeError, r"positive_scores, list_ids.*cannot pass extra arguments.*next to the optimizer's"
    ):
      state.apply_gradients(grads=_GRADS)
    for wrapped in (optax.MultiSteps(state.tx, 2), optax.apply_if_finite(state.tx, 3)):
      with self.assertRaisesRegex(TypeError, "positive_scores"):
        wrapped.update(_GRADS, wrapped.init(_PARAMS), _PARAMS)

  def test_f37_apply_if_finite_leaves_v_of_a_bad_step_alone(self):
    tx = optax.apply_if_finite(optax.chain(_TRACKERS["debiased"], optax.sgd(0.1)), 3)
    state = tx.init(_PARAMS)
    for seed, factor in ((0, 1.0), (1, jnp.nan), (2, 1.0)):
      _, state = tx.update(
        jax.tree.map(lambda g, f=factor: g * f, _GRADS), state, _PARAMS, **_extra(seed)
      )
    _assert_same_state(state.inner_state[0], _expected_state((0, 2)))

  def test_lookahead_needs_exactly_one_state(self):
    tracker = _TRACKERS["debiased"]
    scores, ids = _batch(0)
    with self.assertRaisesRegex(ValueError, "found 0"):
      tracker.lookahead(optax.adam(0.1).init(_PARAMS), scores, ids)
    two = optax.chain(tracker, score_ema(C, M, 0.5, bounds=(-1, 1)), optax.sgd(0.1))
    state = two.init(_PARAMS)
    with self.assertRaisesRegex(ValueError, "found 2.*sub-state"):
      tracker.lookahead(state, scores, ids)
    np.testing.assert_array_equal(
      tracker.lookahead(state[0], scores, ids), _step(tracker, state[0], scores, ids).v[ids]
    )

  def test_two_trackers_share_the_arguments(self):
    other = score_ema(C, M, 0.5, bounds=(-1, 1))
    _, state = self.run_steps(optax.chain(_TRACKERS["debiased"], other, optax.sgd(0.1)))
    _assert_same_state(state[0], _expected_state((0, 1, 2)))
    self.assertGreater(np.abs(state[0].weight - state[1].weight).max(), 0.1)

  def test_training_loop_of_the_docs(self):
    """Checks the loop of design.md section 3: v_{t+1} in the loss, the same v in the state."""
    tracker = score_ema(num_lists=1, num_points=8, beta=0.1)
    tx = optax.chain(tracker, optax.adam(0.1))
    features = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    features[:5] += np.float32([1.0, 0.0, 0.0])
    params = jnp.array([0.0, 1.0, 0.0])
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
      ids = jnp.zeros(1, int)

      def loss_fn(params):
        scores = jnp.tanh(features @ params)
        positive, negative = scores[None, :5], scores[None, 5:]
        v = tracker.lookahead(opt_state, positive, ids)
        return soprc_loss(positive, negative, v, prior=0.1), (positive, v)

      (loss, (positive, v)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
      updates, opt_state_ = tx.update(
        grads, opt_state, params, positive_scores=positive, list_ids=ids
      )
      return optax.apply_updates(params, updates), opt_state_, loss, v

    losses = []
    for _ in range(30):
      params, opt_state, loss, v = step(params, opt_state)
      np.testing.assert_allclose(v, opt_state[0].v, rtol=1e-6)
      losses.append(float(loss))
    self.assertLess(losses[-1], losses[0] - 0.1)


class DevicesTest(chex.TestCase):
  """Tests that the table on two devices equals that of one device with the joined batch. The masks
  of the devices are unequal.
  """

  @parameterized.product(kind=("pmap", "shard_map"), start=("debiased", "table"))
  def test_equals_one_device(self, kind, start):
    scores, _ = _batch(0, lists=8)
    # Row 0 has three lists on device 0 and one on device 1: a mean of means would be wrong. Row 2
    # is on device 1 only.
    ids = np.array([0, 0, 0, 1, 0, 1, 2, 2])
    mask = np.random.default_rng(1).random((8, P)) < 0.7
    mask[:, 0], mask[3], mask[7] = True, False, False
    local = score_ema(C, M, _BETA, bounds=(-1, 1), initial_v=_STARTS[start])
    shared = score_ema(
      C, M, _BETA, bounds=(-1, 1), initial_v=_STARTS[start], axis_name=mapping.AXIS
    )
    expected = local.init(None)

    def on_each(state, scores, ids, mask):
      return _step(shared, state, scores, ids, mask), shared.lookahead(state, scores, ids, mask)

    mapped, state = mapping.on_devices(on_each, kind), mapping.replicate(shared.init(None))
    for _ in range(2):
      ahead = local.lookahead(expected, scores, ids, mask)
      expected = _step(local, expected, scores, ids, mask)
      state, rows = mapped(state, *map(mapping.split, (scores, ids, mask)))
      np.testing.assert_array_equal(state.v[0], state.v[1])
      np.testing.assert_allclose(state.v[0], expected.v, rtol=0, atol=1e-6)
      np.testing.assert_allclose(state.weight, mapping.replicate(expected.weight), rtol=1e-6)
      np.testing.assert_allclose(np.reshape(rows, (8, M)), ahead, rtol=0, atol=1e-6)

  @parameterized.named_parameters(mapping.KINDS)
  def test_whole_step_equals_one_device(self, kind):
    """Checks embeddings to lists to v to loss to gradient. The list of a query spans the batch of
    all devices.
    """
    rng = np.random.default_rng(3)
    inputs, kernel = (
      rng.normal(size=(12, 5)).astype(np.float32),
      rng.normal(size=(5, 4)).astype(np.float32),
    )
    labels = np.array([2, 0, 1, 0, 2, 1, 0, 0, 2, 2, 1, 0])
    where = np.array([True] * 6 + [False, True, True, False, False, True])

    def step(kernel, state, inputs, labels, where, axis_name=None):
      tracker = score_ema(C, M, _BETA, bounds=(-1, 1), axis_name=axis_name)

      def loss_fn(kernel):
        embeddings = inputs @ kernel
        embeddings /= jnp.linalg.norm(embeddings, axis=1, keepdims=True)
        lists = retrieval_lists(
          embeddings, labels, max_positives=3, where=where, axis_name=axis_name
        )
        v = tracker.lookahead(state, lists.positive_scores, labels, lists.positive_where)
        loss = soprc_loss(
          lists.positive_scores,
          lists.negative_scores,
          v,
          prior=0.1,
          positive_where=lists.positive_where,
          negative_where=lists.negative_where,
          axis_name=axis_name,
        )
        return loss, lists

      (loss, lists), gradient = jax.value_and_grad(loss_fn, has_aux=True)(kernel)
      if axis_name is not None:
        gradient = jax.lax.pmean(gradient, axis_name)
      state = _step(tracker, state, lists.positive_scores, labels, lists.positive_where)
      return loss, gradient, state

    state = score_ema(C, M, _BETA).init(None)
    expected = jax.jit(step)(kernel, state, inputs, labels, where)
    mapped = mapping.on_devices(functools.partial(step, axis_name=mapping.AXIS), kind)
    got = mapped(*mapping.replicate((kernel, state)), *map(mapping.split, (inputs, labels, where)))
    chex.assert_trees_all_close(got, mapping.replicate(expected), rtol=1e-5, atol=1e-6)
    self.assertGreater(np.abs(np.asarray(expected[1])).max(), 1e-2)


def test_a_step_touches_only_the_rows_of_its_batch():
  """Checks that a donated table is only gathered from and scattered to. What both functions need is
  computed once.
  """
  rows, points, lists = 5003, 7, 6
  tracker = score_ema(rows, points, _BETA, bounds=(-1, 1))

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, scores, ids, mask):
    def loss_fn(scores):
      v = tracker.lookahead(state, scores, ids, mask)
      return soprc_loss(scores, -scores, v, prior=0.1, positive_where=mask, negative_where=mask)

    gradient = jax.grad(loss_fn)(scores)
    return gradient, tracker.update(
      None, state, positive_scores=scores, list_ids=ids, positive_where=mask
    )[1]

  batch = jnp.ones((lists, P)), jnp.arange(lists) // 2, jnp.ones((lists, P), bool)
  # As for a user: conftest.py leaves these emitters out, and then the scatter is a loop.
  off = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
  options = {"xla_cpu_use_fusion_emitters": True} if off else None
  program = step.lower(tracker.init(None), *batch).compile(options).as_text()
  of_table = set(re.findall(rf"f32\[{rows},{points}\]\S* ([\w-]+)\(", program))
  assert "parameter" in of_table
  assert of_table <= {"parameter", "scatter", "gather", "fusion"}
  assert len(re.findall(rf"f32\[{lists},{P}\]\S* sort\(", program)) == 1


def test_an_axis_of_vmap_joins_the_lists_too():
  rng = np.random.default_rng(0)
  scores, ids = np.float32(rng.normal(size=(2, Q, P))), rng.integers(0, C, (2, Q))
  tracker, alone = score_ema(C, M, _BETA, axis_name="part"), score_ema(C, M, _BETA)

  def step(scores, ids):
    state = tracker.init(None)
    return tracker.lookahead(state, scores, ids), _step(tracker, state, scores, ids)

  rows, state = jax.vmap(step, axis_name="part")(scores, ids)
  joined = scores.reshape(-1, P), ids.reshape(-1)
  _assert_same_state(
    jax.tree.map(lambda leaf: leaf[1], state), _step(alone, alone.init(None), *joined)
  )
  np.testing.assert_allclose(
    rows.reshape(-1, M), alone.lookahead(alone.init(None), *joined), rtol=1e-6, atol=1e-7
  )


_F60_SCORES = np.float32([[0.1, 0.2], [0.3, 0.4]])


@pytest.mark.parametrize(
  "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize("num_lists", [300, 70_000])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_f60_list_ids_have_any_integer_type(dtype, num_lists, x64):
  with jax.enable_x64(x64):
    tracker = score_ema(num_lists, 2, 0.5)
    last = min(num_lists - 1, np.iinfo(dtype).max)
    given = _F60_SCORES[1:], np.array([last], dtype)
    for run in (lambda function: function, jax.jit):
      rows = run(tracker.lookahead)(tracker.init(None), *given)
      np.testing.assert_allclose(rows, [[0.3, 0.4]], rtol=1e-6)
      _, state = run(tracker.update)(
        None, tracker.init(None), positive_scores=given[0], list_ids=given[1]
      )
      np.testing.assert_allclose(state.v[last], rows[0], rtol=1e-6)
      np.testing.assert_array_equal(np.flatnonzero(state.weight), [last])


@pytest.mark.parametrize(
  ("dtype", "outside"), [("int8", -1), ("uint8", 255), ("uint32", 3_000_000_000)]
)
def test_f60_ids_outside_are_an_error_or_nan_in_any_type(dtype, outside):
  tracker, ids = score_ema(200, 2, 0.5), np.array([outside, 1], dtype)
  rows = jax.jit(tracker.lookahead)(tracker.init(None), _F60_SCORES, ids)
  np.testing.assert_array_equal(np.isnan(rows), [[True, True], [False, False]])
  with pytest.raises(ValueError, match=f"list_ids must lie in .*{outside}"):
    tracker.lookahead(tracker.init(None), _F60_SCORES, ids)


def test_f60_booleans_are_no_list_ids():
  tracker = score_ema(2, 2, 0.5)
  with pytest.raises(AssertionError, match="list_ids must be integers"):
    tracker.lookahead(tracker.init(None), _F60_SCORES, np.array([True, False]))


@pytest.mark.parametrize(
  "initial_v", [None, np.arange(3.0), [0.1, 0.2, 0.3], jnp.arange(6.0).reshape(2, 3)]
)
def test_f53_a_tracker_made_under_jit_outlives_it(initial_v):
  made = []

  @jax.jit
  def make(x):
    made.append(score_ema(2, 3, 0.5, initial_v=initial_v))
    return x

  make(1.0)
  state = made[0].init(None)
  np.testing.assert_allclose(
    state.v, np.broadcast_to(np.zeros(3) if initial_v is None else np.asarray(initial_v), (2, 3))
  )
  np.testing.assert_array_equal(state.weight, np.full(2, 0.0 if initial_v is None else 1.0))


def test_f53_a_traced_initial_v_is_an_error_that_says_so():
  with pytest.raises(TypeError, match="initial_v must be known when the score_ema is created"):
    jax.jit(lambda start: score_ema(2, 3, 0.5, initial_v=start).init(None).v)(jnp.zeros(3))
