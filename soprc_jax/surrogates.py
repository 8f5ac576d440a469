"""Differentiable surrogates of the 0-1 loss (Eq. 7).

With ``l_{0,1}(x) = 1 if x <= 0 else 0``, ``l1 >= l_{0,1} >= l2`` holds everywhere. The loss built
on them is therefore an upper bound (see `soprc_jax.soprc_loss`).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, masks


def one_sided_huber(margin: ArrayLike, *, tau: ArrayLike) -> jax.Array:
  r"""Computes l1, a surrogate of the 0-1 loss from above (Eq. 7).

  .. math:: \ell_1(x) = 1 - 2x/\tau \;(x < 0), \quad (1 - x/\tau)^2 \;(0 \le x < \tau),
            \quad 0 \;(x \ge \tau)

  The paper prints ``-2x/tau`` for ``x < 0``, which jumps at 0 and violates ``l1 >= l_{0,1}``. The
  continuous form here is that of the authors' code (docs/paper.md, errata 1).

  Args:
    margin: array of any shape, ``h(x+) - h(x-)``.
    tau: width ``tau1`` > 0, a number or an array that broadcasts to ``margin``.

  Returns:
    Array of the shape of ``margin``, in [0, inf), at least float32. It is convex and decreasing in
    ``margin``. Values beyond the largest float are inf.

  Raises:
    ValueError: ``tau`` is a plain number that is not > 0 in float32.

  >>> print(one_sided_huber(jnp.array([-0.1, 0.0, 0.05, 0.2]), tau=0.1))
  [3.   1.   0.25 0.  ]
  """
  (margin,) = masks.promote(margin, names=("margin",))
  checks.check_width("tau", tau)
  tau = jnp.asarray(tau, margin.dtype)
  scaled = margin / tau
  negative = scaled < 0
  # The inner `where` prevents an overflow of the square in the branch that is not taken. Not relu,
  # since XLA's maximum drops a NaN in some sums on CPUs.
  zero = jnp.zeros_like(scaled)
  inside = jnp.square(jnp.where(scaled >= 1, zero, 1.0 - jnp.where(negative, zero, scaled)))
  return jnp.where(negative, 1.0 - 2.0 * scaled, inside)


def one_sided_sigmoid(margin: ArrayLike, *, tau: ArrayLike) -> jax.Array:
  r"""Computes l2, a surrogate of the 0-1 loss from below (Eq. 7).

  .. math:: \ell_2(x) = \frac{\exp(-x/\tau) - 1}{\exp(-x/\tau) + 1}
            = \tanh\frac{-x}{2\tau} \;(x < 0), \quad 0 \;(x \ge 0)

  Args:
    margin: array of any shape, ``h(x+) - v``.
    tau: width ``tau2`` > 0, a number or an array that broadcasts to ``margin``. The gradient
      vanishes about ``10 * tau`` below 0.

  Returns:
    Array of the shape of ``margin``, in [0, 1], at least float32. It is decreasing in ``margin``
    and never overflows.

  Raises:
    ValueError: ``tau`` is a plain number that is not > 0 in float32.

  >>> print(one_sided_sigmoid(jnp.array([-1.0, -0.002, 0.0, 1.0]), tau=0.001))
  [1.        0.7615942 0.        0.       ]
  """
  (margin,) = masks.promote(margin, names=("margin",))
  checks.check_width("tau", tau)
  tau = jnp.asarray(tau, margin.dtype)
  # tanh saturates where exp would overflow. The derivative at the kink is 0, as for x > 0. Not
  # relu, for the reason above.
  return jnp.tanh(jnp.where(margin >= 0, jnp.zeros_like(margin), -margin) / (2.0 * tau))
