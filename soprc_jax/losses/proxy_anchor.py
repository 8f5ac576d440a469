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
    embeddings: ``[B, D]``, unit norm (not normalized again).
    labels: ``[B]`` integers, the row of each image's class in ``proxies``.
    proxies: ``[C, D]``, one vector for each class, of any norm > 0. They are normalized here, and
      learned with the model.
    alpha: sharpness > 0.
    margin: delta >= 0.
    where: ``[B]`` mask of the valid images; None means all.
    axis_name: name of a mapped axis. The images are then the joined batch of all its devices. The
      proxies are the same on all of them.

  Returns:
    Scalar >= 0, at least float32; 0 without a valid image.

  Raises:
    AssertionError: when traced, if shapes do not fit.
    ValueError: an option is a plain number out of range; a label on the host is no row. An image
      with a traced label that is no row is left out.

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
