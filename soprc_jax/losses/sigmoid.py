"""Sigmoid loss of SigLIP: every pair is classified as positive or negative."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions


def sigmoid_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  scale: ArrayLike = 10.0,
  bias: ArrayLike = -10.0,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the sigmoid loss, the logistic loss of every pair of images.

  See Zhai et al., "Sigmoid loss for language image pre-training", ICCV 2023. There a text and an
  image make a pair. Here two images do, and all pairs of one class are positive.

  .. math:: L = \mathrm{mean}_{i \ne j}\, \big( -\log \sigma(z_{ij} (t s_{ij} + b)) \big), \quad
            z_{ij} = \pm 1

  The paper divides the sum by the size of the batch instead of the number of pairs.

  Args:
    embeddings, labels, where, axis_name, pairs: see `soprc_jax.losses`.
    scale: factor t > 0 of the similarities. The paper calls it temperature and learns log t. A
      training run does so too, from this value.
    bias: b. It is learned too. At the start it should be about the log-odds of a positive pair,
      minus t times a usual similarity, since nearly all pairs are negative.

  Returns:
    Scalar >= 0; 0 without a pair.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
  >>> print(f"{sigmoid_loss(embeddings, jnp.array([0, 0, 1])):.4f}")
  0.7150
  """
  checks.check_width("scale", scale)
  checks.check_range("bias", bias)
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  scale, bias = (jnp.asarray(value, found.scores.dtype) for value in (scale, bias))
  logits = scale * found.scores + bias
  losses = jax.nn.softplus(jnp.where(found.positive, -logits, logits))
  return masks.masked_mean(losses, found.positive | found.negative, None, axis_name)
