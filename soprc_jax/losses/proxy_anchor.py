"""Proxy-Anchor: a soft maximum over the images for each proxy of a class."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives, masks
from soprc_jax.losses import _proxies


def proxy_anchor_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  proxies: ArrayLike,
  *,
  alpha: ArrayLike = 32.0,
  margin: ArrayLike = 0.1,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Computes the Proxy-Anchor loss, the mean over proxies of two soft maxima over the images.

  See Kim et al., "Proxy anchor loss for deep metric learning", CVPR 2020.

  .. math:: L = \mathrm{mean}_{c \in C^+} \log\Big(1 + \sum_{i: y_i = c} e^{-\alpha (s_{ic} - \delta
            )}\Big) + \mathrm{mean}_{c \in C} \log\Big(1 + \sum_{i: y_i \ne c} e^{\alpha (s_{ic} +
            \delta)}\Big)

  where C+ are the classes of the batch.

  Args:
    embeddings, labels, proxies, where, axis_name: see `soprc_jax.losses`.
    alpha: sharpness > 0.
    margin: delta >= 0.

  Returns:
    Scalar >= 0; 0 without a valid image.

  >>> embeddings, proxies = jnp.array([[1.0, 0.0], [0.8, 0.6]]), jnp.array([[2.0, 0.0], [0.0, 1.0]])
  >>> print(f"{proxy_anchor_loss(embeddings, jnp.array([0, 1]), proxies):.4f}")
  16.0200
  """
  checks.check_width("alpha", alpha)
  checks.check_range("margin", margin, low=0.0)
  found = _proxies.cosines(embeddings, labels, proxies, where=where)
  scores, own, others = found.scores.T, found.own.T, (found.valid[:, None] & ~found.own).T
  alpha, margin = (jnp.asarray(value, scores.dtype) for value in (alpha, margin))
  pull = masks.log1p_sum_exp(-alpha * (scores - margin), own, axis_name)
  push = masks.log1p_sum_exp(alpha * (scores + margin), others, axis_name)
  present = collectives.psum(jnp.any(own, axis=1).astype(jnp.int32), axis_name) > 0
  return masks.masked_mean(pull, present) + jnp.mean(push)
