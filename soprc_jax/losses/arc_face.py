"""ArcFace: classification by cosines to proxies, with a margin on the angle to the own proxy."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, collectives
from soprc_jax.losses import _proxies


def arc_face_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  proxies: ArrayLike,
  *,
  scale: ArrayLike = 64.0,
  margin: ArrayLike = 0.5,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Computes the ArcFace loss, a cross entropy whose own class has an angular margin.

  See Deng et al., "ArcFace: additive angular margin loss for deep face recognition", CVPR 2019.
  Let theta be the angles between the embedding of an image and the proxies.

  .. math:: L = \mathrm{mean}_i \Big( -\log \frac{e^{a \cos(\theta_{y_i} + m)}}{e^{a
            \cos(\theta_{y_i} + m)} + \sum_{c \ne y_i} e^{a \cos \theta_c}} \Big)

  Beyond theta + m = pi the cosine would rise again. There it is ``cos(theta) - m sin(m)``, as in
  the authors' code.

  Args:
    embeddings, labels, proxies, where, axis_name: see `soprc_jax.losses`.
    scale: factor a > 0 of the cosines.
    margin: m in [0, pi], in radians.

  Returns:
    Scalar >= 0; 0 without a valid image.

  >>> embeddings, proxies = jnp.array([[1.0, 0.0], [0.8, 0.6]]), jnp.array([[2.0, 0.0], [0.0, 1.0]])
  >>> print(f"{arc_face_loss(embeddings, jnp.array([0, 1]), proxies):.4f}")
  21.0237
  """
  checks.check_width("scale", scale)
  checks.check_range("margin", margin, low=0.0, high=np.pi)
  found = _proxies.cosines(embeddings, labels, proxies, where=where)
  scale, margin = (jnp.asarray(value, found.scores.dtype) for value in (scale, margin))
  logits = scale * jnp.where(found.own, _with_margin(found.scores, margin), found.scores)
  return _proxies.cross_entropy(logits, found, axis_name)


def _with_margin(cosines: jax.Array, margin: jax.Array) -> jax.Array:
  """Returns the cosines of the angles plus the margin."""
  # At angle 0 the sine has no slope, and rounding may make its square negative.
  squared = jnp.maximum(1 - cosines * cosines, jnp.finfo(cosines.dtype).eps)
  moved = cosines * jnp.cos(margin) - jnp.sqrt(squared) * jnp.sin(margin)
  return jnp.where(cosines >= -jnp.cos(margin), moved, cosines - margin * jnp.sin(margin))
