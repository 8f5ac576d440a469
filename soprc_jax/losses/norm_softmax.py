"""Normalized softmax: classification by the cosines to one weight vector per class."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives
from soprc_jax.losses import _proxies


def norm_softmax_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  proxies: ArrayLike,
  *,
  temperature: ArrayLike = 0.05,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Computes the normalized softmax loss, the cross entropy of the cosines to the proxies.

  See Zhai and Wu, "Classification is a strong baseline for deep metric learning", BMVC 2019, and
  Wang et al., "NormFace: L2 hypersphere embedding for face verification", ACM MM 2017.

  .. math:: L = \mathrm{mean}_i \Big( -\log \frac{e^{s_{i y_i} / \tau}}{\sum_c e^{s_{ic} / \tau}}
            \Big)

  Args:
    embeddings, labels, proxies, where, axis_name: see `soprc_jax.losses`.
    temperature: tau > 0.

  Returns:
    Scalar >= 0; 0 without a valid image.

  >>> embeddings, proxies = jnp.array([[1.0, 0.0], [0.8, 0.6]]), jnp.array([[2.0, 0.0], [0.0, 1.0]])
  >>> print(f"{norm_softmax_loss(embeddings, jnp.array([0, 1]), proxies):.4f}")
  2.0091
  """
  checks.check_width("temperature", temperature)
  found = _proxies.cosines(embeddings, labels, proxies, where=where)
  logits = found.scores / jnp.asarray(temperature, found.scores.dtype)
  return _proxies.cross_entropy(logits, found, axis_name)
