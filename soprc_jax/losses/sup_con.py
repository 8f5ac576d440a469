"""SupCon, the supervised contrastive loss; InfoNCE with one positive per query."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions


def sup_con_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  temperature: ArrayLike = 0.07,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the supervised contrastive loss (SupCon), a softmax over the other images.

  See Khosla et al., "Supervised contrastive learning", NeurIPS 2020, the form with the mean outside
  of the logarithm (L_out). With one positive per query it is InfoNCE (van den Oord et al.,
  "Representation learning with contrastive predictive coding", 2018).

  .. math:: L = \mathrm{mean}_q\, \mathrm{mean}_{p \in P(q)} \Big( -\log \frac{e^{s_{qp} / \tau}}
            {\sum_{a \ne q} e^{s_{qa} / \tau}} \Big)

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    temperature: tau > 0.

  Returns:
    Scalar >= 0. Queries without a positive are skipped; 0 if all are.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> print(f"{sup_con_loss(embeddings, jnp.array([0, 0, 1])):.4f}")
  0.0279
  """
  checks.check_width("temperature", temperature)
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  logits = found.scores / jnp.asarray(temperature, found.scores.dtype)
  total = masks.log_sum_exp(logits, found.positive | found.negative)
  per_query = total - masks.masked_mean(logits, found.positive, -1)
  return masks.masked_mean(per_query, jnp.any(found.positive, axis=-1), None, axis_name)
