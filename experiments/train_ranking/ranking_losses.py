"""The losses of the ranking study, as functions of the scores of whole query groups.

Each takes ``scores [Q, L]``, ``relevance [Q, L]`` and the mask ``where [Q, L]``, and returns a
scalar. All of them see raw scores, in units of 1: tau1 and the temperature of ApproxNDCG are 1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import estimators, interpolation, lists
from soprc_jax.training import baselines
from soprc_jax.training.loss_protocol import Objective, Setting

PIP = 'pip install -e ".[ranking]"'
NUM_POINTS = 50
_TAU1 = 1.0


def soprc(scores: jax.Array, relevance: jax.Array, *, where: jax.Array, **_: Any) -> jax.Array:
  """Computes the SOPRC loss (Eq. 8) of whole groups, with the log link.

  The prior of a group is its share of relevant documents. Its v are the scores of its own relevant
  documents, interpolated (Alg. 2): all of them are in the batch, so no average over steps is
  needed. The best one of P has the true positive rate 1 / P, so that is the self weight.
  """
  found = lists.binary_lists(scores, relevance, where=where)
  count = jnp.sum(found.positive_where, axis=1)
  prior = count / jnp.maximum(jnp.sum(where, axis=1), 1)
  v = interpolation.interpolate_scores(
    jax.lax.stop_gradient(found.positive_scores), num_points=NUM_POINTS, where=found.positive_where
  )
  # A group without a relevant document is left out of the mean, for any prior.
  return estimators.soprc_loss(
    found.positive_scores,
    found.negative_scores,
    v,
    prior=jnp.where(count > 0, prior, 0.5),
    tau1=_TAU1,
    self_weight=1 / jnp.maximum(count, 1),
    link="log",
    **found.masks,
  )


def ap(scores: jax.Array, relevance: jax.Array, *, where: jax.Array, **_: Any) -> jax.Array:
  """Computes the AP loss (Eq. 5) of whole groups, which is not biased there."""
  found = lists.binary_lists(scores, relevance, where=where)
  return estimators.ap_loss(found.positive_scores, found.negative_scores, tau1=_TAU1, **found.masks)


def softmax(scores: jax.Array, relevance: jax.Array, *, where: jax.Array, **_: Any) -> jax.Array:
  """Computes rax's softmax loss: the cross entropy of the graded relevance."""
  value: jax.Array = rax().softmax_loss(scores, relevance, where=where)
  return value


def approx_ndcg(
  scores: jax.Array, relevance: jax.Array, *, where: jax.Array, **_: Any
) -> jax.Array:
  """Computes minus rax's NDCG with approximate ranks (ApproxNDCG) of the graded relevance."""
  value: jax.Array = rax().ndcg_metric(
    scores, relevance, where=where, rank_fn=rax().utils.approx_ranks
  )
  return -value


LOSSES: Mapping[str, Callable[..., jax.Array]] = {
  "soprc": soprc,
  "ap": ap,
  "softmax": softmax,
  "approx_ndcg": approx_ndcg,
}
LABELS: Mapping[str, str] = {
  "soprc": "SOPRC",
  "ap": "AP loss",
  "softmax": "Softmax (rax)",
  "approx_ndcg": "ApproxNDCG (rax)",
}


def make(name: str, num_steps: int) -> Objective:
  """Returns the loss ``name`` of `LOSSES` as an objective without a state."""
  setting = Setting(np.zeros(0, int), num_steps=num_steps, max_positives=0, axis_name=None)
  return baselines.stateless(LOSSES[name], setting)


def rax() -> Any:
  """Returns the package rax.

  Raises:
    ValueError: it is missing.
  """
  try:
    import rax as found
  except ImportError:
    raise ValueError(f"soprc train-ranking needs the package rax: {PIP}") from None
  return found
