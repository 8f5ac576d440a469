"""Tests that input documented as invalid raises an error that names the argument.

It must never give a silent wrong result (_internal/checks.py).
"""

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import soprc_jax
from soprc_jax import losses, metrics

# A quarter of the number of examples in the profile of tests/conftest.py.
_FEW = hypothesis.settings.default.max_examples // 4

Q, P, N, M, B, D = 2, 3, 4, 5, 4, 2
_POSITIVE, _NEGATIVE, _V = np.zeros((Q, P)), np.zeros((Q, N)), np.zeros((Q, M))
_EMBEDDINGS, _LABELS = np.float32(np.eye(B)[:, :D]), np.array([0, 0, 1, 1])
_MEMORY = soprc_jax.embedding_memory(8, D)
_TRACKER = soprc_jax.score_ema(3, M, 0.1)


def _soprc(**changes):
  return soprc_jax.soprc_loss(
    **{"positive_scores": _POSITIVE, "negative_scores": _NEGATIVE, "v": _V, "prior": 0.1} | changes
  )


def _ap(**changes):
  return soprc_jax.ap_loss(**{"positive_scores": _POSITIVE, "negative_scores": _NEGATIVE} | changes)


def _variance(**changes):
  return soprc_jax.semi_variance(
    **{"positive_scores": _POSITIVE, "negative_scores": _NEGATIVE} | changes
  )


def _interpolate(**changes):
  return soprc_jax.interpolate_scores(**{"scores": _POSITIVE, "num_points": M} | changes)


def _track(**changes):
  batch = {"positive_scores": _POSITIVE, "list_ids": np.arange(Q)} | changes
  _TRACKER.update(None, _TRACKER.init(None), **batch)


def _look_ahead(**changes):
  batch = {"positive_scores": _POSITIVE, "list_ids": np.arange(Q)} | changes
  _TRACKER.lookahead(_TRACKER.init(None), **batch)


def _tracker(**changes):
  return soprc_jax.score_ema(**{"num_lists": 3, "num_points": M, "beta": 0.1} | changes)


def _memory(**changes):
  return soprc_jax.embedding_memory(**{"size": 8, "dim": D} | changes)


def _store(**changes):
  _MEMORY.update(
    None, _MEMORY.init(None), **{"embeddings": _EMBEDDINGS, "labels": _LABELS} | changes
  )


def _on_batch(function):
  return lambda **changes: function(**{"embeddings": _EMBEDDINGS, "labels": _LABELS} | changes)


def _auprc(**changes):
  return metrics.auprc(**{"scores": _POSITIVE, "labels": _POSITIVE > 0} | changes)


def _binary(**changes):
  return soprc_jax.binary_lists(**{"scores": _POSITIVE, "labels": _POSITIVE > 0} | changes)


def _ranks(**changes):
  return metrics.summarise_ranks(
    **{
      "ap_per_query": np.ones(3),
      "negatives_above": np.array([0, 2, -1]),
      "ks": (1, 2),
      "num_candidates": 9,
    }
    | changes
  )


def _xbm(**changes):
  ahead = _MEMORY.lookahead(_MEMORY.init(None), _EMBEDDINGS, _LABELS)
  return losses.xbm_contrastive_loss(
    **{"embeddings": _EMBEDDINGS, "labels": _LABELS, "memory": ahead} | changes
  )


def _floats(**limits):
  return st.one_of(st.floats(**limits), st.just(np.nan))


_COUNTS = st.one_of(st.integers(-(2**40), 0), st.floats(0.5, 9.5), st.just(True), st.just("3"))
# Widths and shares, including values that are positive in float64 and 0 in float32.
_WIDTHS = st.one_of(
  _floats(max_value=0.0), st.sampled_from([np.inf, 1e-46, np.float64(1e-300), 1e300])
)
_SHARES = st.one_of(_floats(max_value=-1e-3), st.floats(1.001, 1e30), st.just([0.1, 2.0]))
_WEIGHTS = st.one_of(_floats(max_value=-1e-3), st.just(np.inf))
_NUMBERS = st.sampled_from([np.nan, np.inf, -np.inf])
_SCALAR = st.just(np.float32(0.5))
_COMPLEX = st.just(np.zeros((Q, P), np.complex64))


def _lists_of(width, *, rank_too=True):
  """Returns scores with other leading axes."""
  shapes = [(Q + 1, width), (1, width), (2, Q, width)] + [(width,)] * rank_too
  return st.sampled_from(shapes).map(np.zeros)


def _not_masks(*shape):
  """Returns indices, weights and NaN instead of booleans, and shapes that do not fit."""
  numbers = st.sampled_from([2, -1, 0.5, np.nan]).map(lambda number: np.full(shape, number))
  arrays = st.sampled_from([jnp.full(shape, 3), jnp.full(shape, 0.5)])
  wrong = st.sampled_from([(*shape[:-1], shape[-1] + 1), (5, *shape)]).map(
    lambda size: np.ones(size, bool)
  )
  return st.one_of(numbers, arrays, wrong)


_LABELS_BAD = st.sampled_from(
  [
    np.zeros(B),
    np.zeros(B + 1, int),
    np.zeros((B, 1), int),
    np.array(["a"] * B),
    np.array([0, 1, 2, 2**40]),
    np.array(0),
  ]
)
_EMBEDDINGS_BAD = st.sampled_from(
  [np.zeros(B), np.zeros((B, 1, D)), np.zeros((B + 1, D)), np.zeros((B, D), complex)]
)

_CASES = {
  "soprc": (
    _soprc,
    {
      "positive_scores": st.one_of(_SCALAR, _COMPLEX),
      "negative_scores": st.one_of(_lists_of(N), _SCALAR),
      "v": st.one_of(_lists_of(M), _SCALAR, st.just(np.zeros(Q))),
      "prior": st.one_of(_SHARES, st.just(np.full(Q + 1, 0.1))),
      "tau1": _WIDTHS,
      "tau2": _WIDTHS,
      "self_weight": st.one_of(_SHARES, st.just(np.full(Q + 1, 0.1))),
      "positive_where": _not_masks(Q, P),
      "negative_where": _not_masks(Q, N),
      "algorithm": st.just("fast"),
      "link": st.sampled_from(["odds", "Log", None]),
    },
  ),
  "ap": (
    _ap,
    {
      "negative_scores": st.one_of(_lists_of(N), _SCALAR),
      "tau1": _WIDTHS,
      "tau2": _WIDTHS,
      "self_weight": _SHARES,
      "positive_where": _not_masks(Q, P),
    },
  ),
  "variance": (
    _variance,
    {
      "negative_scores": st.one_of(_lists_of(N), _SCALAR),
      "lambda1": _WEIGHTS,
      "lambda2": _WEIGHTS,
      "negative_where": _not_masks(Q, N),
      "average_over": st.just("mean"),
      "pool": st.just("lists"),
    },
  ),
  "huber": (
    lambda **changes: soprc_jax.one_sided_huber(**{"margin": 0.0, "tau": 0.1} | changes),
    {"tau": _WIDTHS},
  ),
  "sigmoid": (
    lambda **changes: soprc_jax.one_sided_sigmoid(**{"margin": 0.0, "tau": 0.1} | changes),
    {"tau": _WIDTHS},
  ),
  "interpolate": (
    _interpolate,
    {
      "scores": st.one_of(_SCALAR, _COMPLEX),
      "num_points": _COUNTS,
      "bounds": st.sampled_from(
        [(1.0, 1.0), (0.5, -0.5), (np.nan, 1.0), (0.0, np.nan), (1.0,), (0, 1, 2), 3.0]
      ),
      "grid": st.just("mid"),
      "where": _not_masks(Q, P),
    },
  ),
  "score_ema": (
    _tracker,
    {
      "num_lists": _COUNTS,
      "num_points": _COUNTS,
      "beta": st.one_of(_floats(max_value=0.0), st.floats(1.001, 1e9), st.just(1e-46)),
      "bounds": st.just((1.0, -1.0)),
      "grid": st.just("mid"),
      "initial_v": st.sampled_from([np.zeros(M + 1), np.zeros((2, M)), np.full(M, np.nan), 0.0]),
    },
  ),
  "update": (
    _track,
    {
      "positive_scores": st.one_of(_lists_of(P), _SCALAR),
      "list_ids": st.sampled_from(
        [[0, 3], [-1, 0], [0.0, 1.0], [True, False], [0], [[0, 1]], 0, [2**33, 0]]
      ).map(np.array),
      "positive_where": _not_masks(Q, P),
    },
  ),
  "lookahead": (
    _look_ahead,
    {
      "positive_scores": st.one_of(_lists_of(P), _SCALAR),
      "list_ids": st.sampled_from([[0, 3], [-1, 0], [0.0, 1.0], [0], [2**33, 0]]).map(np.array),
      "positive_where": _not_masks(Q, P),
    },
  ),
  "embedding_memory": (
    _memory,
    {
      "size": _COUNTS,
      "dim": _COUNTS,
      "start_after": st.sampled_from([-1, 0.5]),
      "overflow": st.just("fifo"),
    },
  ),
  "store": (
    _store,
    {
      "embeddings": st.one_of(_EMBEDDINGS_BAD, st.just(np.zeros((B, D + 1)))),
      "labels": _LABELS_BAD,
      "where": _not_masks(B),
    },
  ),
  "retrieval_lists": (
    _on_batch(soprc_jax.retrieval_lists),
    {
      "embeddings": _EMBEDDINGS_BAD,
      "labels": _LABELS_BAD,
      "max_positives": _COUNTS,
      "where": _not_masks(B),
      "gallery": st.sampled_from([np.zeros((3, D)), np.zeros(3)]),
      "gallery_labels": st.just(np.zeros(3, int)),
      "gallery_where": st.just(np.ones(B, bool)),
    },
  ),
  "gallery": (
    _on_batch(
      lambda **changes: soprc_jax.retrieval_lists(
        **{"gallery": np.zeros((3, D)), "gallery_labels": np.zeros(3, int)} | changes
      )
    ),
    {
      "gallery": st.sampled_from([np.zeros((3, D + 1)), np.zeros((4, D)), np.zeros(3), None]),
      "gallery_labels": st.sampled_from(
        [np.zeros(3), np.zeros(4, int), np.array([0, 1, 2**40]), None]
      ),
      "gallery_where": _not_masks(3),
    },
  ),
  "binary_lists": (
    _binary,
    {
      "scores": st.one_of(_SCALAR, _COMPLEX),
      "labels": st.sampled_from([np.zeros(3), np.full((Q, P), np.nan), np.full((Q, P), "a")]),
      "where": _not_masks(Q, P),
    },
  ),
  "auprc": (
    _auprc,
    {
      "scores": st.one_of(_SCALAR, _COMPLEX),
      "labels": st.sampled_from([np.zeros(3), np.full((Q, P), np.nan)]),
      "prior": st.one_of(_SHARES, st.just(np.full(Q + 1, 0.1))),
      "where": _not_masks(Q, P),
    },
  ),
  "summarise_ranks": (
    _ranks,
    {
      "ks": st.one_of(_COUNTS.map(lambda k: (1, k)), st.just(3)),
      "ap_per_query": st.sampled_from([np.ones(2), np.array([1.0, np.nan, 0.0])]),
      "negatives_above": st.sampled_from(
        [np.array([0, -2, 1]), np.array([0.5, 1, 2]), np.zeros((3, 1), int)]
      ),
      "num_candidates": st.sampled_from([-1, 2.5]),
    },
  ),
  "mean_pr_curve": (
    _on_batch(metrics.mean_pr_curve),
    {"thresholds": st.sampled_from([1, 0, -5, 2.5]), "block_size": _COUNTS},
  ),
  "retrieval_metrics": (
    _on_batch(metrics.retrieval_metrics),
    {
      "embeddings": st.sampled_from(
        [
          np.zeros(B),
          np.full((B, D), np.nan),
          np.zeros((B, D), complex),
          np.full((B, D), 1e30, np.float32),
          np.full((B, D), 1e300),
          np.full((B, D), "a"),
        ]
      ),
      "labels": st.sampled_from(
        [np.zeros(B), np.zeros(3, int), np.full(B, np.nan), np.full(B, "a")]
      ),
      "ks": st.one_of(_COUNTS.map(lambda k: (1, k)), st.just(3)),
      "block_size": _COUNTS,
      "query_ids": st.sampled_from([np.zeros(3, int), np.full(B, np.nan)]),
      "gallery_ids": st.just(np.zeros(B, int)),
    },
  ),
  "xbm": (_xbm, {"negative_margin": _NUMBERS}),
  "contrastive": (
    _on_batch(losses.contrastive_loss),
    {"positive_margin": _NUMBERS, "negative_margin": _NUMBERS},
  ),
  "triplet": (_on_batch(losses.triplet_loss), {"margin": _WEIGHTS, "max_positives": _COUNTS}),
  "multi_similarity": (
    _on_batch(losses.multi_similarity_loss),
    {"alpha": _WIDTHS, "beta": _WIDTHS, "base": _NUMBERS},
  ),
  "smooth_ap": (_on_batch(losses.smooth_ap_loss), {"tau": _WIDTHS, "max_positives": _COUNTS}),
  "sup_con": (_on_batch(losses.sup_con_loss), {"temperature": _WIDTHS}),
  "sigmoid_loss": (_on_batch(losses.sigmoid_loss), {"scale": _WIDTHS, "bias": _NUMBERS}),
  "quad_linear_ap": (
    _on_batch(losses.quad_linear_ap_loss),
    {"width": _WIDTHS, "max_positives": _COUNTS},
  ),
  "sup_ap": (
    _on_batch(losses.sup_ap_loss),
    {"tau": _WIDTHS, "alpha": _NUMBERS, "beta": _NUMBERS, "max_positives": _COUNTS},
  ),
  "recall_at_k": (
    _on_batch(losses.recall_at_k_loss),
    {"tau1": _WIDTHS, "tau2": _WIDTHS, "max_positives": _COUNTS},
  ),
  "fast_ap": (_on_batch(losses.fast_ap_loss), {"num_bins": _COUNTS}),
  "listwise_ap": (_on_batch(losses.listwise_ap_loss), {"num_bins": st.one_of(_COUNTS, st.just(1))}),
  "auroc": (
    _on_batch(losses.auroc_loss),
    {"tau": _WIDTHS, "surrogate": st.just("hinge"), "max_positives": _COUNTS},
  ),
  "blackbox": (
    _on_batch(losses.blackbox_ap_loss),
    {
      "lambda_": _WIDTHS,
      "margin": _WEIGHTS,
      "interclass_coef": _SHARES.filter(lambda share: not isinstance(share, list)),
      "max_positives": _COUNTS,
    },
  ),
}


@pytest.mark.parametrize(
  ("name", "argument"), [(name, argument) for name in _CASES for argument in _CASES[name][1]]
)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=_FEW)
def test_is_told_by_name(name, argument, data):
  call, arguments = _CASES[name]
  value = data.draw(arguments[argument])
  with pytest.raises(
    (TypeError, ValueError, AssertionError), match=argument.removesuffix("_").replace("query_", "")
  ):
    call(**{argument: value})


# The losses of a run are checked with the same batch in losses_test.
@pytest.mark.parametrize("name", list(_CASES)[: list(_CASES).index("xbm")])
def test_the_same_call_without_the_bad_value_works(name):
  _CASES[name][0]()
