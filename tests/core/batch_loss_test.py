"""Tests that retrieval_loss and binary_loss equal the loss computed from their parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soprc_jax import (
  binary_lists,
  binary_loss,
  positive_pull,
  retrieval_lists,
  retrieval_loss,
  score_ema,
  semi_variance,
  soprc_loss,
)

pytestmark = pytest.mark.core

B, D, C, M, L = 12, 5, 3, 4, 9
_OPTIONS = {"tau1": 0.3, "tau2": 0.01}
_LAMBDAS = {"lambda1": 0.5, "lambda2": 2.0}


def _images(seed=0):
  rng = np.random.default_rng(seed)
  embeddings = np.float32(rng.normal(size=(B, D)))
  return (
    embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True),
    rng.integers(0, C, B),
    rng.random(B) < 0.8,
  )


def _scores(seed=1):
  rng = np.random.default_rng(seed)
  return np.float32(rng.normal(size=(C, L))), rng.random((C, L)) < 0.4, rng.random((C, L)) < 0.8


def _used(bounds=None):
  """Returns a tracker, and a state whose rows differ."""
  tracker = score_ema(C, M, 0.3, bounds=bounds)
  rng = np.random.default_rng(2)
  scores = {"positive_scores": np.float32(rng.uniform(-1, 1, (C, 3))), "list_ids": np.arange(C)}
  return tracker, tracker.update(None, tracker.init(None), **scores)[1]


def _of_parts(lists, ids, tracker, state, prior, lambdas, link="share"):
  v = tracker.lookahead(state, lists.positive_scores, ids, lists.positive_where)
  scores = lists.positive_scores, lists.negative_scores
  loss = soprc_loss(*scores, v, prior=prior, link=link, **_OPTIONS, **lists.masks)
  return loss + (semi_variance(*scores, **lambdas, **lists.masks) if lambdas else 0.0)


def _assert_equal(got, want):
  (got_loss, got_gradient), (want_loss, want_gradient) = got, want
  assert want_loss > 0
  assert np.any(want_gradient)
  np.testing.assert_allclose(got_loss, want_loss, rtol=1e-6)
  np.testing.assert_allclose(got_gradient, want_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
  ("lambdas", "masked", "rows", "link"),
  [
    ({}, False, "labels", "share"),
    (_LAMBDAS, True, "labels", "share"),
    (_LAMBDAS, True, "given", "share"),
    (_LAMBDAS, True, "labels", "log"),
  ],
)
def test_retrieval_equals_its_parts(lambdas, masked, rows, link):
  embeddings, labels, where = _images()
  where = where if masked else None
  ids = labels if rows == "labels" else (labels + 1) % C
  tracker, state = _used((-1, 1))
  prior = np.linspace(0.05, 0.4, B, dtype=np.float32)

  def in_one_call(embeddings):
    list_ids = None if rows == "labels" else ids
    arguments = {
      "tracker": tracker,
      "opt_state": (state,),
      "prior": prior,
      "where": where,
      "list_ids": list_ids,
      "link": link,
    }
    return retrieval_loss(embeddings, labels, max_positives=3, **arguments, **_OPTIONS, **lambdas)

  def of_parts(embeddings):
    lists = retrieval_lists(embeddings, labels, max_positives=3, where=where)
    return _of_parts(lists, ids, tracker, state, prior, lambdas, link), lists

  (loss, update_args), gradient = jax.jit(jax.value_and_grad(in_one_call, has_aux=True))(embeddings)
  (want, lists), want_gradient = jax.value_and_grad(of_parts, has_aux=True)(embeddings)
  _assert_equal((loss, gradient), (want, want_gradient))
  moved, wanted = (
    tracker.update(None, state, **args)[1] for args in (update_args, lists.update_args(ids))
  )
  np.testing.assert_allclose(moved.v, wanted.v, rtol=1e-6, atol=1e-7)
  assert np.any(moved.v != state.v)


@pytest.mark.parametrize(("lambdas", "link"), [({}, "share"), (_LAMBDAS, "share"), ({}, "log")])
def test_binary_equals_its_parts(lambdas, link):
  scores, labels, where = _scores()
  tracker, state = _used()

  def in_one_call(scores):
    arguments = {"tracker": tracker, "opt_state": state, "prior": 0.1, "where": where}
    return binary_loss(scores, labels, link=link, **arguments, **_OPTIONS, **lambdas)

  def of_parts(scores):
    lists = binary_lists(scores, labels, where=where)
    return _of_parts(lists, np.arange(C), tracker, state, 0.1, lambdas, link), lists

  (loss, update_args), gradient = jax.jit(jax.value_and_grad(in_one_call, has_aux=True))(scores)
  (want, lists), want_gradient = jax.value_and_grad(of_parts, has_aux=True)(scores)
  _assert_equal((loss, gradient), (want, want_gradient))
  moved, wanted = (
    tracker.update(None, state, **args)[1]
    for args in (update_args, lists.update_args(np.arange(C)))
  )
  np.testing.assert_array_equal(moved.v, wanted.v)


def test_binary_rows_may_be_given():
  scores, labels, _ = _scores()
  tracker, state = _used()
  arguments = {"tracker": tracker, "opt_state": state, "prior": 0.1}
  lists = binary_lists(scores[0], labels[0])
  loss, update_args = binary_loss(scores[0], labels[0], list_ids=np.array([2]), **arguments)
  v = tracker.lookahead(state, **lists.update_args(np.array([2])))
  np.testing.assert_allclose(
    loss,
    soprc_loss(lists.positive_scores, lists.negative_scores, v, prior=0.1, **lists.masks),
    rtol=1e-6,
  )
  moved = tracker.update(None, state, **update_args)[1]
  np.testing.assert_array_equal(np.any(moved.v != state.v, axis=1), [False, False, True])


def test_images_that_fill_the_batch_need_no_row():
  embeddings, labels, _ = _images()
  where = np.arange(B) < B - 3
  tracker, state = _used((-1, 1))
  filled = np.where(where, labels, -1)

  def loss_fn(embeddings, labels, where):
    arguments = {"tracker": tracker, "opt_state": state, "prior": 0.1, "where": where}
    return retrieval_loss(embeddings, labels, max_positives=3, **arguments, **_LAMBDAS)

  both = []
  for function in (loss_fn, jax.jit(loss_fn)):
    for args in ((embeddings, filled, where), (embeddings[where], labels[where], where[where])):
      (loss, update_args), gradient = jax.value_and_grad(function, has_aux=True)(*args)
      both.append((loss, gradient[: B - 3], tracker.update(None, state, **update_args)[1].v))
      assert not np.any(gradient[B - 3 :])
  for found in both[1:]:
    jax.tree.map(
      lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), found, both[0]
    )


def test_traced_weights_of_the_semi_variance():
  scores, labels, _ = _scores()
  tracker, state = _used()

  def loss_fn(lambda2):
    return binary_loss(
      scores, labels, tracker=tracker, opt_state=state, prior=0.1, lambda2=lambda2
    )[0]

  for weight in (0.0, 2.0):
    np.testing.assert_allclose(jax.jit(loss_fn)(jnp.float32(weight)), loss_fn(weight), rtol=1e-6)
  assert loss_fn(2.0) > loss_fn(0.0)


def test_a_label_that_is_no_row_is_an_error():
  embeddings, labels, _ = _images()
  tracker, state = _used((-1, 1))
  with pytest.raises(ValueError, match="list_ids"):
    retrieval_loss(embeddings, labels + 1, tracker=tracker, opt_state=state, prior=0.1)


def test_a_chain_or_a_tracker_of_other_devices_is_an_error():
  scores, labels, _ = _scores()
  tracker, state = _used()
  arguments = {"opt_state": state, "prior": 0.1}
  with pytest.raises(TypeError, match="tracker must be what score_ema returned, not the chain"):
    binary_loss(scores, labels, tracker=optax.chain(tracker, optax.sgd(0.1)), **arguments)
  with pytest.raises(ValueError, match=r"the same axis_name.*None and 'batch'"):
    binary_loss(scores, labels, tracker=tracker, axis_name="batch", **arguments)


def test_the_pull_is_added_with_its_weight():
  embeddings, labels, where = _images()
  tracker, state = _used((-1.0, 1.0))
  found = retrieval_lists(embeddings, labels, where=where)
  want = positive_pull(found.positive_scores, positive_where=found.positive_where)
  assert want > 0.1

  def loss(weight):
    return retrieval_loss(
      embeddings, labels, tracker=tracker, opt_state=state, prior=0.1, where=where, pull=weight
    )[0]

  np.testing.assert_allclose(loss(2.0) - loss(0.0), 2.0 * want, rtol=1e-5)
  np.testing.assert_allclose(jax.jit(loss)(2.0), loss(2.0), rtol=1e-5)  # a traced weight
  with pytest.raises(ValueError, match=r"pull must lie in \[0, inf\), got -1"):
    loss(-1.0)
  with pytest.raises(ValueError, match=r"pull must be a single number, got None"):
    loss(None)


def test_wide_is_the_weight_of_the_risk_at_a_tau1_of_1():
  embeddings, labels, where = _images()
  tracker, state = _used((-1.0, 1.0))

  def loss(wide, tau1=0.1, link="log"):
    options = {
      "prior": 0.1,
      "where": where,
      "tau1": tau1,
      "link": link,
      "lambda2": 0.5,
      "pull": 2.0,
    }
    return retrieval_loss(
      embeddings, labels, tracker=tracker, opt_state=state, wide=wide, **options
    )[0]

  for link in ("log", "share"):
    narrow, wide = loss(0.0, link=link), loss(0.0, tau1=1.0, link=link)
    assert abs(wide - narrow) > 0.01
    np.testing.assert_allclose(loss(0.25, link=link), 0.75 * narrow + 0.25 * wide, rtol=1e-5)
    np.testing.assert_allclose(loss(1, link=link), wide, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(loss)(0.25), loss(0.25), rtol=1e-5)  # a traced weight
  with pytest.raises(ValueError, match=r"wide must lie in \[0, 1\], got 1\.5"):
    loss(1.5)
  with pytest.raises(ValueError, match=r"wide must be a single number, got None"):
    loss(None)


def test_bad_arguments_are_told_by_name():
  scores, labels, _ = _scores()
  tracker, state = _used()
  arguments = {"tracker": tracker, "opt_state": state, "prior": 0.1}
  with pytest.raises(ValueError, match="lambda2 must be a single number"):
    binary_loss(scores, labels, lambda2=np.ones(3), **arguments)
  with pytest.raises(ValueError, match="lambda1 must be a single number, got None"):
    binary_loss(scores, labels, lambda1=None, **arguments)
  with pytest.raises(TypeError, match=r"lambda1 must be a number or an array, got '0\.5'"):
    binary_loss(scores, labels, lambda1="0.5", **arguments)
  with pytest.raises(ValueError, match="lambda1 has an integer that is too large for a float"):
    binary_loss(scores, labels, lambda1=10**400, **arguments)
  with pytest.raises(ValueError, match=r"scores must be \[L\], or \[K, L\] of K problems"):
    binary_loss(scores[None], labels[None], **arguments)
  with pytest.raises(ValueError, match="6 problems need a score_ema of num_lists=6 or more, got 3"):
    binary_loss(np.concatenate([scores, scores]), np.concatenate([labels, labels]), **arguments)
  with pytest.raises(ValueError, match=r"link must be one of \('share', 'log'\), got 'odds'"):
    binary_loss(scores, labels, link="odds", **arguments)
  with pytest.raises(TypeError, match="list_ids"):
    binary_loss(scores, labels, list_ids=["a", "b", "c"], **arguments)


def test_labels_may_be_booleans():
  embeddings, labels, _ = _images()
  tracker = score_ema(2, M, 0.3, bounds=(-1, 1))
  arguments = {"tracker": tracker, "opt_state": tracker.init(None), "prior": 0.1}
  found, want = (
    retrieval_loss(embeddings, kind(labels > 0), **arguments)[0] for kind in (np.asarray, np.int32)
  )
  assert found == want


def test_it_trains():
  embeddings, labels, _ = _images()
  tracker = score_ema(C, M, 0.3, bounds=(-1, 1))
  tx = optax.chain(tracker, optax.sgd(0.5))

  @jax.jit
  def step(params, opt_state):
    def loss_fn(params):
      unit = params / jnp.linalg.norm(params, axis=1, keepdims=True)
      return retrieval_loss(unit, labels, tracker=tracker, opt_state=opt_state, prior=0.3, tau1=0.5)

    (loss, update_args), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params, **update_args)
    return optax.apply_updates(params, updates), opt_state, loss

  params, opt_state = jnp.asarray(embeddings), tx.init(embeddings)
  losses = []
  for _ in range(40):
    params, opt_state, loss = step(params, opt_state)
    losses.append(float(loss))
  assert losses[-1] < 0.5 * losses[0]
