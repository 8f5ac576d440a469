"""Tests that work and memory of the losses grow with the square of the batch size.

The costs are read from the compiled XLA program, not timed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soprc_jax import estimators, lists, losses

_DIM, _PER_CLASS = 16, 4
_MAX_POSITIVES = _PER_CLASS - 1


def _of_lists(estimator):
  def loss(embeddings, labels):
    found = lists.retrieval_lists(embeddings, labels, max_positives=_MAX_POSITIVES)
    masks = {"positive_where": found.positive_where, "negative_where": found.negative_where}
    return estimator(found, masks)

  return loss


def _soprc(found, masks):
  v = jnp.broadcast_to(jnp.linspace(0.0, 0.5, 100), (found.positive_scores.shape[0], 100))
  return estimators.soprc_loss(found.positive_scores, found.negative_scores, v, prior=0.1, **masks)


_BOUNDED = {"max_positives": _MAX_POSITIVES}
_LOSSES = {
  "soprc": _of_lists(_soprc),
  "ap": _of_lists(
    lambda found, masks: estimators.ap_loss(found.positive_scores, found.negative_scores, **masks)
  ),
  "semi_variance": _of_lists(
    lambda found, masks: estimators.semi_variance(
      found.positive_scores, found.negative_scores, **masks
    )
  ),
  "contrastive": losses.contrastive_loss,
  "triplet": functools.partial(losses.triplet_loss, **_BOUNDED),
  "multi_similarity": losses.multi_similarity_loss,
  "smooth_ap": functools.partial(losses.smooth_ap_loss, **_BOUNDED),
  "sup_con": losses.sup_con_loss,
  "sigmoid": losses.sigmoid_loss,
  "sup_ap": functools.partial(losses.sup_ap_loss, **_BOUNDED),
  "quad_linear_ap": functools.partial(losses.quad_linear_ap_loss, **_BOUNDED),
  "recall_at_k": functools.partial(losses.recall_at_k_loss, **_BOUNDED),
  "fast_ap": losses.fast_ap_loss,
  "listwise_ap": losses.listwise_ap_loss,
  "auroc": functools.partial(losses.auroc_loss, **_BOUNDED),
  "blackbox": functools.partial(losses.blackbox_ap_loss, **_BOUNDED),
}


@functools.cache
def _costs(name, size):
  """Returns the FLOPs and the bytes of temporaries of value and gradient. Labels are unknown at
  compilation.
  """
  shapes = jax.ShapeDtypeStruct((size, _DIM), np.float32), jax.ShapeDtypeStruct((size,), np.int32)
  compiled = jax.jit(jax.value_and_grad(_LOSSES[name])).lower(*shapes).compile()
  return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", list(_LOSSES))
def test_twice_the_batch_costs_four_times(name):
  # A cubic term would show: operations or temporaries of all triples would grow by a factor of 8.
  # At these sizes they are not computed in blocks, whose operations XLA would count once.
  for small, large in zip(_costs(name, 128), _costs(name, 256), strict=True):
    assert large < 4.6 * small


@pytest.mark.parametrize("name", ["soprc", "contrastive"])
def test_gradient_of_the_scores_is_one_product(name):
  # 2 B^2 D operations per product: one forward and one backward. Separate gradients for both
  # factors would make it three products.
  size, dim = 256, 512
  shapes = jax.ShapeDtypeStruct((size, dim), np.float32), jax.ShapeDtypeStruct((size,), np.int32)
  text = jax.jit(jax.value_and_grad(_LOSSES[name])).lower(*shapes).as_text()
  assert text.count("stablehlo.dot_general") == 2
