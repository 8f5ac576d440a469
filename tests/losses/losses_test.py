"""Tests the losses of the paper's comparison.

The stateless ones are checked for parity with the authors' code. All losses answer one list of
questions.

What several share (losses/_counting.py, losses/_histogram.py, losses/_proxies.py,
losses/_ranking.py) is tested with them.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import authors
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import loops
import mapping
import numpy as np
import pytest

import soprc_jax
from soprc_jax import losses
from soprc_jax import memory as memory_lib
from soprc_jax.losses import recall_at_k


class Case(NamedTuple):
  """Maps an archive of golden values to one of our losses.

  Attributes:
    loss_fn: ``(embeddings, labels, **arguments, **static)``.
    arguments: hyperparameters of the archive -> traced arguments.
    static: hyperparameters of the archive -> static arguments.
  """

  loss_fn: Callable[..., Any]
  arguments: Callable[[dict[str, Any]], dict[str, float]] = lambda hparams: {}
  static: Callable[[dict[str, Any]], dict[str, Any]] = lambda hparams: {}


_CASES = {
  "contrastive": Case(
    losses.contrastive_loss,
    lambda h: {"negative_margin": h["thres"][0], "positive_margin": h["thres"][1]},
    lambda h: {"average_active": bool(h.get("norm", False))},
  ),
  "triplet": Case(
    losses.triplet_loss, lambda h: {"margin": h["thres"]}, lambda h: {"max_positives": 3}
  ),
  "multi_similarity": Case(
    losses.multi_similarity_loss,
    lambda h: {"alpha": h["alpha"], "beta": h["beta"], "base": h["thres"]},
  ),
  "smooth_ap": Case(
    losses.smooth_ap_loss, lambda h: {"tau": h["anneal"]}, lambda h: {"max_positives": 3}
  ),
  "fast_ap": Case(losses.fast_ap_loss, static=lambda h: {"num_bins": h["num_bins"]}),
  "list_wise": Case(losses.listwise_ap_loss, static=lambda h: {"num_bins": h["nq"]}),
  "auc_huber": Case(
    losses.auroc_loss,
    lambda h: {"tau": h["temp"]},
    lambda h: {"surrogate": "huber", "max_positives": 3},
  ),
  "auc_lg": Case(losses.auroc_loss, static=lambda h: {"surrogate": "logistic", "max_positives": 3}),
  "auc_sgm": Case(
    losses.auroc_loss,
    lambda h: {"tau": h["temp"]},
    lambda h: {"surrogate": "sigmoid", "max_positives": 3},
  ),
}


@functools.cache
def _compiled(name, static):
  """Compiles once per shape and dtype: everything that can be traced is an argument."""
  return jax.jit(jax.value_and_grad(functools.partial(_CASES[name].loss_fn, **dict(static))))


def _check_golden(name, index, dtype, spoil=1.0):
  """Asserts parity of one case; ``spoil`` scales the hyperparameters to show that this can fail."""
  golden, hparams = authors.arrays(name, index), authors.hparams(name, index)
  case = _CASES[name]
  static = tuple(sorted(case.static(hparams).items()))
  with jax.enable_x64(dtype == jnp.float64):
    embeddings = jnp.asarray(golden["emb"], dtype)
    arguments = {
      key: jnp.asarray(value * spoil, dtype) for key, value in case.arguments(hparams).items()
    }
    value, gradient = _compiled(name, static)(
      embeddings, jnp.asarray(golden["labels"]), **arguments
    )
    assert value.dtype == dtype
    value, gradient = float(value), np.asarray(gradient, np.float64)
  # A query's similarity 1 to itself is the kink of list_wise's first bin. In float32 the radial
  # part is arbitrary.
  authors.assert_matches(
    golden, value, gradient, dtype, radial=(name, dtype) != ("list_wise", jnp.float32)
  )


_ALL_CASES = [(name, index) for name in _CASES for index in range(authors.num_cases(name))]


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "index"), _ALL_CASES)
def test_matches_authors_code(name, index, dtype):
  _check_golden(name, index, dtype)


@pytest.mark.parametrize(
  "name",
  [
    name
    for name in _CASES
    if _CASES[name].arguments(
      {"thres": (1, 1), **dict.fromkeys(("alpha", "beta", "anneal", "temp"), 1)}
    )
  ],
)
def test_a_corrupted_coefficient_is_noticed(name):
  with pytest.raises(AssertionError):
    _check_golden(name, 1, jnp.float64, spoil=1.001)


@pytest.mark.parametrize(("name", "bins"), [("fast_ap", "num_bins"), ("list_wise", "nq")])
def test_a_corrupted_number_of_bins_is_noticed(name, bins, monkeypatch):
  real = _CASES[name]
  monkeypatch.setitem(_CASES, name, real._replace(static=lambda h: {"num_bins": h[bins] + 1}))
  with pytest.raises(AssertionError):
    _check_golden(name, 1, jnp.float64)


def test_a_query_left_out_of_its_own_list_is_noticed(monkeypatch):
  # auc_lg has no coefficient to corrupt.
  real = _CASES["auc_lg"]
  monkeypatch.setitem(
    _CASES, "auc_lg", real._replace(static=lambda h: real.static(h) | {"include_self": False})
  )
  with pytest.raises(AssertionError):
    _check_golden("auc_lg", 1, jnp.float64)


# One list of questions for all losses, with their defaults.


def _xbm(embeddings, labels=None, *, positives=None, where=None, axis_name=None):
  """Computes the loss of a batch with an empty memory."""
  memory = soprc_jax.embedding_memory(16, 4, axis_name=axis_name)
  stored = np.arange(len(embeddings)) if labels is None else labels
  ahead = memory.lookahead(memory.init(None), embeddings, stored, where)
  if positives is not None:
    positives = jnp.asarray(positives)[:, ahead.labels]
  return losses.xbm_contrastive_loss(
    embeddings, labels, ahead, where=where, axis_name=axis_name, positives=positives
  )


def _retrieval(embeddings, labels=None, *, list_ids=None, where=None, axis_name=None, **pairs):
  """Computes the SOPRC loss of a batch with an empty v."""
  tracker = soprc_jax.score_ema(96, 12, 0.1, bounds=(-1, 1), axis_name=axis_name)
  options = {"prior": 0.1, "lambda1": 1.0, "lambda2": 2.0, "max_positives": 4, "pull": 1.0}
  options |= {"tracker": tracker, "opt_state": tracker.init(None), "axis_name": axis_name}
  return soprc_jax.retrieval_loss(
    embeddings, labels, list_ids=list_ids, where=where, **options, **pairs
  )[0]


def _blackbox_with_memory(embeddings, labels, *, where=None, axis_name=None):
  stored = memory_lib.Memory(
    jnp.asarray(_embeddings(6, seed=9)), jnp.array([7, 2, 2, 90, 1, 1]), jnp.arange(6) != 3
  )
  return losses.blackbox_ap_loss(
    embeddings, labels, memory=stored, where=where, axis_name=axis_name
  )


def _with_proxies(loss_fn):
  """Returns the loss with a proxy for each label from -5 to 90. Labels become rows by adding 5."""

  def compute(embeddings, labels, *, where=None, axis_name=None):
    return loss_fn(embeddings, labels + 5, _PROXIES, where=where, axis_name=axis_name)

  return compute


def _loops_with_proxies(loops_fn):
  return lambda embeddings, labels: loops_fn(embeddings, labels + 5, _PROXIES)


_PROXIES = 3 * np.float32(np.random.default_rng(7).standard_normal((96, 4)))
_LOSSES = {
  "contrastive": losses.contrastive_loss,
  "contrastive_active": functools.partial(losses.contrastive_loss, average_active=True),
  "triplet": losses.triplet_loss,
  "multi_similarity": losses.multi_similarity_loss,
  "smooth_ap": losses.smooth_ap_loss,
  "smooth_ap_without_self": functools.partial(losses.smooth_ap_loss, include_self=False),
  "fast_ap": losses.fast_ap_loss,
  "listwise_ap": losses.listwise_ap_loss,
  "auroc_huber": losses.auroc_loss,
  "auroc_logistic": functools.partial(losses.auroc_loss, surrogate="logistic"),
  "auroc_sigmoid": functools.partial(losses.auroc_loss, surrogate="sigmoid"),
  "xbm": _xbm,
  "sup_con": losses.sup_con_loss,
  "quad_linear_ap": losses.quad_linear_ap_loss,
  "sup_ap": losses.sup_ap_loss,
  "recall_at_k": losses.recall_at_k_loss,
  "sigmoid": losses.sigmoid_loss,
  "proxy_anchor": _with_proxies(losses.proxy_anchor_loss),
  "norm_softmax": _with_proxies(losses.norm_softmax_loss),
  "arc_face": _with_proxies(losses.arc_face_loss),
  "blackbox": losses.blackbox_ap_loss,
  "blackbox_memory": _blackbox_with_memory,
}
_LOOPS = {
  "contrastive": loops.contrastive,
  "contrastive_active": functools.partial(loops.contrastive, average_active=True),
  "triplet": loops.triplet,
  "multi_similarity": loops.multi_similarity,
  "smooth_ap": loops.smooth_ap,
  "smooth_ap_without_self": functools.partial(loops.smooth_ap, include_self=False),
  "fast_ap": loops.fast_ap,
  "listwise_ap": loops.listwise_ap,
  "auroc_huber": loops.auroc,
  "auroc_logistic": functools.partial(loops.auroc, surrogate="logistic"),
  "auroc_sigmoid": functools.partial(loops.auroc, surrogate="sigmoid"),
  "xbm": loops.xbm_of_one_batch,
  "sup_con": loops.sup_con,
  "quad_linear_ap": loops.quad_linear_ap,
  "sup_ap": loops.sup_ap,
  "recall_at_k": loops.recall_at_k,
  "sigmoid": loops.sigmoid,
  "proxy_anchor": _loops_with_proxies(loops.proxy_anchor),
  "norm_softmax": _loops_with_proxies(loops.norm_softmax),
  "arc_face": _loops_with_proxies(loops.arc_face),
  "blackbox": loops.blackbox,
}
_LABELS = np.array([7, 2, 7, -5, 2, 7, 90, 2])  # unsorted; three, three, one and one
_each_loss = pytest.mark.parametrize("name", list(_LOSSES))


@functools.cache
def _jitted(name):
  return jax.jit(jax.value_and_grad(lambda e, y, w: _LOSSES[name](e, y, where=w)))


def _run(name, embeddings, labels, where=None):
  where = np.ones(len(labels), bool) if where is None else where
  value, gradient = _jitted(name)(jnp.asarray(embeddings), jnp.asarray(labels), jnp.asarray(where))
  return float(value), np.asarray(gradient)


def _embeddings(count=8, dim=4, seed=0):
  vectors = np.random.default_rng(seed).standard_normal((count, dim)) + 0.5
  return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@pytest.mark.parametrize("name", list(_LOOPS))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
  "labels", [_LABELS, np.array([3, 3, 3, 3, 3, 0, 0, 1])], ids=["unsorted", "five_two_one"]
)
def test_value_by_plain_loops_with_unequal_classes(name, masked, labels):
  where = np.array([1, 1, 0, 1, 1, 1, 1, 0], bool) if masked else np.ones(8, bool)
  value, _ = _run(name, _embeddings(), labels, where)
  assert value > 0
  np.testing.assert_allclose(value, _LOOPS[name](_embeddings()[where], labels[where]), rtol=2e-5)


@_each_loss
def test_permutation_of_the_batch_changes_nothing(name):
  embeddings, order = _embeddings(), np.random.default_rng(1).permutation(8)
  value, gradient = _run(name, embeddings, _LABELS)
  permuted_value, permuted_gradient = _run(name, embeddings[order], _LABELS[order])
  np.testing.assert_allclose(permuted_value, value, rtol=1e-5)
  np.testing.assert_allclose(
    permuted_gradient, gradient[order], atol=1e-5 * max(np.abs(gradient).max(), 1)
  )
  assert value > 0
  assert np.abs(gradient).max() > 0


@_each_loss
def test_masked_images_are_as_if_they_were_not_there(name):
  embeddings, where = _embeddings(), np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
  value, gradient = _run(name, embeddings, _LABELS, where)
  expected_value, expected_gradient = _run(name, embeddings[where], _LABELS[where])
  np.testing.assert_allclose(value, expected_value, rtol=1e-5)
  # Tangential parts: a query's similarity to itself lies on a kink of listwise_ap.
  got = authors.tangential(gradient[where], embeddings[where])
  expected = authors.tangential(expected_gradient, embeddings[where])
  np.testing.assert_allclose(got, expected, atol=1e-5 * max(np.abs(gradient).max(), 1))
  assert not gradient[~where].any()


@_each_loss
def test_masked_images_may_hold_anything(name):
  embeddings, where = _embeddings(), np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
  value, gradient = _run(name, embeddings, _LABELS, where)
  spoiled = np.where(where[:, None], embeddings, np.nan)
  got_value, got_gradient = _run(name, spoiled, _LABELS, where)
  np.testing.assert_array_equal(got_value, value)
  np.testing.assert_array_equal(got_gradient, gradient)


@_each_loss
@pytest.mark.parametrize(
  ("embeddings", "labels", "where", "error", "message"),
  [
    (_LABELS, _LABELS, None, AssertionError, r"embeddings must be \[B, D\]"),
    (None, _LABELS[:5], None, AssertionError, r"labels must be \[B\]"),
    (None, _LABELS[:, None], None, AssertionError, r"labels must be \[B\]"),
    (None, np.float32(_LABELS), None, (TypeError, AssertionError), "labels|float32"),
    (
      None,
      _LABELS.astype(np.int64) + 2**32,
      None,
      (ValueError, AssertionError),
      "labels must fit into 32 bits, map them to rows",
    ),
    (None, _LABELS, np.ones(5, bool), AssertionError, r"where must be \[B\]"),
    (None, _LABELS, np.ones(1, bool), AssertionError, r"where must be \[B\]"),
    (None, _LABELS, np.arange(8), ValueError, "where must be a mask of booleans, got 2"),
  ],
)
def test_bad_batches_are_told_by_name(name, embeddings, labels, where, error, message):
  with pytest.raises(error, match=message):
    _LOSSES[name](_embeddings() if embeddings is None else embeddings, labels, where=where)


@_each_loss
@pytest.mark.parametrize(
  ("labels", "scale"),
  [
    pytest.param(np.zeros(8, int), 1.0, id="one_class"),
    pytest.param(np.arange(8), 1.0, id="no_positives"),
    pytest.param(_LABELS, 0.0, id="zero_embeddings"),
  ],
)
def test_degenerate_batches_are_finite(name, labels, scale):
  value, gradient = _run(name, scale * _embeddings(), labels)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


@_each_loss
def test_all_embeddings_equal_is_finite_and_ranks_nothing_perfectly(name):
  value, gradient = _run(name, np.tile(_embeddings(1), (8, 1)), _LABELS)
  assert value > 0
  assert np.isfinite(gradient).all()


@_each_loss
def test_bfloat16_embeddings_are_promoted(name):
  embeddings = jnp.asarray(_embeddings(), jnp.bfloat16)
  every = jnp.ones(len(_LABELS), bool)
  value, _ = _jitted(name)(embeddings, jnp.asarray(_LABELS), every)
  assert value.dtype == jnp.float32
  np.testing.assert_allclose(
    value, _run(name, embeddings.astype(jnp.float32), _LABELS)[0], rtol=1e-6
  )


@_each_loss
def test_vmap_and_concrete_labels_equal_the_jitted_value(name):
  batches = np.stack([_embeddings(seed=seed) for seed in range(3)])
  mapped = jax.jit(jax.vmap(lambda e: _LOSSES[name](e, jnp.asarray(_LABELS))))(batches)
  np.testing.assert_allclose(
    mapped, [_run(name, batch, _LABELS)[0] for batch in batches], rtol=1e-5
  )


# Proxies and the images of a stored memory have labels.
_OF_MASKS = {
  name: loss_fn
  for name, loss_fn in _LOSSES.items()
  if name not in ("proxy_anchor", "norm_softmax", "arc_face", "blackbox_memory")
} | {"retrieval": functools.partial(_retrieval, list_ids=np.arange(8))}


@functools.cache
def _by_labels_and_by_masks(name):
  loss_fn = _OF_MASKS[name]
  return [
    jax.jit(jax.value_and_grad(lambda e, y, w: loss_fn(e, y, where=w))),
    jax.jit(jax.value_and_grad(lambda e, m, w: loss_fn(e, positives=m, where=w))),
  ]


@pytest.mark.parametrize("name", list(_OF_MASKS))
@hypothesis.given(seed=st.integers(0, 2**16), classes=st.sampled_from([1, 2, 4, 50]))
@hypothesis.settings(max_examples=12)
def test_a_mask_of_labels_equals_labels_bit_for_bit(name, seed, classes):
  rng = np.random.default_rng(seed)
  labels, where = rng.integers(0, classes, 8), rng.random(8) < 0.8
  mask = labels[:, None] == labels
  np.fill_diagonal(mask, rng.random(8) < 0.5)  # a query is never compared with itself by the mask
  by_labels, by_masks = _by_labels_and_by_masks(name)
  embeddings = _embeddings(seed=seed)
  chex.assert_trees_all_equal(
    by_masks(embeddings, mask, where), by_labels(embeddings, labels, where)
  )


@pytest.mark.parametrize("name", list(_OF_MASKS))
def test_a_known_mask_of_labels_equals_known_labels_bit_for_bit(name):
  loss_fn, where = _OF_MASKS[name], np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
  mask = _LABELS[:, None] == _LABELS
  want = jax.jit(jax.value_and_grad(lambda e: loss_fn(e, _LABELS, where=where)))(_embeddings())
  got = jax.jit(jax.value_and_grad(lambda e: loss_fn(e, positives=mask, where=where)))(
    _embeddings()
  )
  chex.assert_trees_all_equal(got, want)


@_each_loss
@pytest.mark.parametrize("kind", ["pmap", "shard_map"])
def test_two_devices_equal_one(name, kind):
  arrays = _embeddings(), _LABELS, np.array([1, 1, 1, 1, 0, 1, 1, 1], bool)

  def scaled(e, y, w, axis_name=None):
    # The gradient of a parameter that every device has: here one scale for each coordinate. The
    # embeddings have unit norm, as those of a model. The similarity 1 of an image to itself is a
    # kink of some losses, and rounding decides on which side it lies.
    def loss_fn(scale):
      e_scaled = e * scale
      return _LOSSES[name](
        e_scaled / jnp.linalg.norm(e_scaled, axis=-1, keepdims=True),
        y,
        where=w,
        axis_name=axis_name,
      )

    return jax.value_and_grad(loss_fn)(jnp.ones((1, 4)))

  def shard(e, y, w):
    loss, grad = scaled(e, y, w, mapping.AXIS)
    return loss, jax.lax.pmean(grad, mapping.AXIS)

  got = mapping.on_devices(shard, kind)(*map(mapping.split, arrays))
  value, expected = jax.jit(scaled)(*arrays)
  np.testing.assert_allclose(got[0], [value, value], rtol=1e-5)
  assert np.abs(expected).max() > 0 or value == 0
  np.testing.assert_allclose(got[1][0], expected, atol=1e-4 * max(np.abs(expected).max(), 1e-3))


def test_info_nce_is_sup_con_with_one_positive():
  # Two views of four images: the cross entropy of finding the other view among the other seven.
  embeddings, labels = _embeddings(), np.tile(np.arange(4), 2)
  logits = np.float64(embeddings) @ np.float64(embeddings).T / 0.2
  np.fill_diagonal(logits, -np.inf)
  other = logits[np.arange(8), (np.arange(8) + 4) % 8]
  want = np.mean(np.log(np.exp(logits).sum(axis=1)) - other)
  np.testing.assert_allclose(
    losses.sup_con_loss(embeddings, labels, temperature=0.2), want, rtol=1e-5
  )


@pytest.mark.parametrize("max_positives", [None, 1])
def test_recall_at_k_with_mixup_is_that_of_the_batch_with_virtual_images(max_positives):
  # Two images of each class: the partner of each is known, and only the shares are random.
  embeddings, labels = _embeddings(), np.array([3, 1, 1, 0, 3, 2, 0, 2])
  key = jax.random.key(5)
  shares = np.float64(jax.random.uniform(jax.random.split(key)[1], [8]))[:, None]
  partners = np.array([4, 2, 1, 6, 0, 7, 3, 5])
  mixed = shares * embeddings + (1 - shares) * embeddings[partners]
  both = np.concatenate([embeddings, mixed]), np.concatenate([labels, labels])
  loss_fn = functools.partial(losses.recall_at_k_loss, mixup=True, key=key, tau2=0.1)
  got = loss_fn(embeddings, labels, max_positives=max_positives)
  np.testing.assert_allclose(got, loops.recall_at_k(*both, tau2=0.1), rtol=1e-5)
  # A masked image is no partner. An image without one has no virtual image.
  where = np.arange(8) != 4
  kept = np.concatenate([where, where & (np.arange(8) != 0)])
  got = loss_fn(embeddings, labels, where=where)
  want = loops.recall_at_k(both[0][kept], both[1][kept], tau2=0.1)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_recall_at_k_with_mixup_draws_partners_of_the_class():
  labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
  keys = jax.random.split(jax.random.key(0), 50)
  make = jax.vmap(
    lambda key: recall_at_k._with_virtual(jnp.eye(8), jnp.asarray(labels), None, key, None)[0][8:]
  )
  mixed = np.asarray(make(keys)) > 0
  np.testing.assert_array_equal(mixed.sum(axis=2), 2)
  # Each image meets every other one of its class, and none of another.
  same = labels[:, None] == labels[None, :]
  np.testing.assert_array_equal(mixed.any(axis=0), same)


def test_arc_face_where_the_angle_with_the_margin_exceeds_pi():
  proxies, rows = np.float32([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 0])
  embeddings = np.float32([[-1.0, 0.0], [-0.96, 0.28]])
  options = {"scale": 2.0, "margin": 0.5}
  got = losses.arc_face_loss(embeddings, rows, proxies, **options)
  np.testing.assert_allclose(got, loops.arc_face(embeddings, rows, proxies, **options), rtol=1e-5)


@pytest.mark.parametrize("name", ["proxy_anchor", "norm_softmax", "arc_face"])
@pytest.mark.parametrize("kind", ["zero", "equal", "huge", "aligned"])
def test_any_proxies_are_finite(name, kind):
  proxies = {
    "zero": np.zeros((96, 4)),
    "equal": np.ones((96, 4)),
    "huge": 1e37 * _PROXIES,
    "aligned": np.resize(_embeddings(), (96, 4)),
  }[kind]
  loss_fn = getattr(losses, f"{name}_loss")
  value, slopes = jax.value_and_grad(loss_fn, (0, 2))(
    _embeddings(), jnp.arange(8), jnp.asarray(proxies, jnp.float32)
  )
  assert np.isfinite(value)
  assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("name", ["proxy_anchor", "norm_softmax", "arc_face"])
def test_labels_that_are_no_rows_are_refused_or_left_out(name):
  loss_fn, embeddings = getattr(losses, f"{name}_loss"), _embeddings()
  for wrong in (-1, 96):
    labels = np.array([3, wrong, 0, 1, 1, 2, 3, 0])
    with pytest.raises(ValueError, match=f"rows of proxies, from 0 to 95; got {wrong}"):
      loss_fn(embeddings, labels, _PROXIES)
    where = labels != wrong
    want = loss_fn(embeddings[where], labels[where], _PROXIES)
    for got in (
      loss_fn(embeddings, labels, _PROXIES, where=where),
      jax.jit(loss_fn)(embeddings, labels, _PROXIES),
    ):
      np.testing.assert_allclose(got, want, rtol=1e-6)
  with pytest.raises(AssertionError, match="with the width D of the embeddings"):
    loss_fn(embeddings, np.zeros(8, int), _PROXIES[:, :3])


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: losses.sup_con_loss(_embeddings(), _LABELS, temperature=0.0), "temperature must lie"),
    (lambda: losses.sigmoid_loss(_embeddings(), _LABELS, scale=-1.0), "scale must lie in"),
    (lambda: losses.quad_linear_ap_loss(_embeddings(), _LABELS, width=0.0), "width must lie in"),
    (lambda: losses.sup_ap_loss(_embeddings(), _LABELS, rho=-1.0), "rho must lie in"),
    (lambda: losses.sup_ap_loss(_embeddings(), _LABELS, lambda_=1.1), "lambda_ must lie in"),
    (lambda: losses.recall_at_k_loss(_embeddings(), _LABELS, ks=()), "ks must have at least one"),
    (lambda: losses.recall_at_k_loss(_embeddings(), _LABELS, ks=(1, 0)), "ks must be an integer"),
    (lambda: losses.recall_at_k_loss(_embeddings(), _LABELS, mixup=True), "mixup needs key"),
    (
      lambda: losses.arc_face_loss(_embeddings(), np.zeros(8, int), _PROXIES, margin=4.0),
      "margin must lie in",
    ),
    (
      lambda: losses.proxy_anchor_loss(_embeddings(), np.zeros(8, int), _PROXIES, alpha=0.0),
      "alpha must lie in",
    ),
    (
      lambda: losses.auroc_loss(_embeddings(), _LABELS, surrogate="hinge"),
      "surrogate must be one of",
    ),
    (
      lambda: losses.auroc_loss(_embeddings(), _LABELS, tau=0.0),
      r"tau must lie in \(0, inf\), got 0",
    ),
    (lambda: losses.smooth_ap_loss(_embeddings(), _LABELS, tau=-1.0), "tau must lie in"),
    (lambda: losses.multi_similarity_loss(_embeddings(), _LABELS, alpha=0.0), "alpha must lie in"),
    (
      lambda: losses.fast_ap_loss(_embeddings(), _LABELS, num_bins=0),
      "num_bins must be an integer, at least 1; got 0",
    ),
    (
      lambda: losses.fast_ap_loss(_embeddings(), _LABELS, num_bins=2.5),
      "num_bins must be an integer, at least 1; got 2.5",
    ),
    (
      lambda: losses.smooth_ap_loss(_embeddings(), _LABELS, max_positives=0),
      "max_positives must be an integer, at least 1; got 0",
    ),
    (
      lambda: losses.auroc_loss(_embeddings(), _LABELS, max_positives=1),
      "max_positives=1 is too small: .* has 2 positives",
    ),
    (
      lambda: losses.contrastive_loss(_embeddings(), _LABELS, negative_margin=np.nan),
      "negative_margin must lie in",
    ),
    (
      lambda: losses.listwise_ap_loss(_embeddings(), _LABELS, num_bins=1),
      "num_bins must be an integer, at least 2; got 1",
    ),
  ],
)
def test_bad_hyperparameters_are_named(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("name", ["smooth_ap", "fast_ap", "listwise_ap"])
@pytest.mark.parametrize("known", [True, False], ids=["concrete_labels", "traced_labels"])
def test_memory_at_batch_1024(name, known):
  labels = np.repeat(np.arange(256), 4)
  embeddings = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
  if known:
    compiled = (
      jax.jit(jax.value_and_grad(lambda e: _LOSSES[name](e, labels))).lower(embeddings).compile()
    )
  else:
    loss = jax.jit(jax.value_and_grad(_LOSSES[name]))
    compiled = loss.lower(embeddings, jax.ShapeDtypeStruct((1024,), jnp.int32)).compile()
  # One cubic tensor would be 4 GiB.
  assert compiled.memory_analysis().temp_size_in_bytes < 2**30


@_each_loss
def test_f58_no_dtype_is_promoted_implicitly(name):
  """Checks that strict promotion gives the values and gradients of standard promotion. This
  includes labels of another width.
  """
  assert jax.config.jax_numpy_dtype_promotion == "strict"  # set for the whole session
  embeddings, where = jnp.asarray(_embeddings(), jnp.bfloat16), jnp.arange(8) != 3
  labels = jnp.asarray(_LABELS, jnp.int16)

  def value_and_grad():
    return jax.jit(jax.value_and_grad(lambda e: _LOSSES[name](e, labels, where=where)))(embeddings)

  strict = value_and_grad()
  with jax.numpy_dtype_promotion("standard"):
    standard = value_and_grad()
  assert (strict[0].dtype, strict[1].dtype) == ("float32", "bfloat16")
  np.testing.assert_array_equal(strict[0], standard[0])
  np.testing.assert_array_equal(strict[1], standard[1])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_f58_estimators_under_strict_promotion(dtype):
  size = 8
  with jax.enable_x64(dtype == "float64"):
    scores = jnp.linspace(-0.9, 0.9, size).astype(dtype)
    lists = soprc_jax.binary_lists(scores, jnp.arange(size, dtype=jnp.int16) % 2)
    v = jnp.linspace(0, 1, 50).astype(dtype)[None]

    def loss_fn(scores, prior):
      masks = lists.masks
      lists_of_scores = (
        jnp.where(lists.positive_where, scores, 0),
        jnp.where(lists.negative_where, scores, 0),
      )
      loss = soprc_jax.soprc_loss(*lists_of_scores, v, prior=prior, **masks)
      return (
        loss
        + soprc_jax.ap_loss(*lists_of_scores, **masks)
        + soprc_jax.semi_variance(*lists_of_scores, **masks)
      )

    for prior in (0.1, jnp.float32(0.1), np.float16(0.1)):
      value, gradient = jax.jit(jax.value_and_grad(loss_fn))(scores, prior)
      assert np.isfinite(value)
      assert gradient.dtype == dtype
