"""Differentiable surrogates of the 0-1 loss (Eq. 7).

With ``l_{0,1}(x) = 1 if x <= 0 else 0`` they hold ``l1 >= l_{0,1} >= l2`` everywhere, which makes
the loss built on them an upper bound (see `soprc_jax.soprc_loss`).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, masks


def one_sided_huber(margin: ArrayLike, *, tau: ArrayLike) -> jax.Array:
  r"""Surrogate l1 of the 0-1 loss from above (Eq. 7).

  .. math:: \ell_1(x) = 1 - 2x/\tau \;(x < 0), \quad (1 - x/\tau)^2 \;(0 \le x < \tau),
            \quad 0 \;(x \ge \tau)

  The paper prints ``-2x/tau`` for ``x < 0``, which jumps at 0 and breaks ``l1 >= l_{0,1}``; the
  continuous form here is the one that its authors' code uses (README, errata 1).

  Args:
    margin: array of any shape, ``h(x+) - h(x-)``.
    tau: width ``tau1`` > 0, a number or an array that broadcasts.

  Returns:
    Array like ``margin``, in [0, inf), at least float32; convex and decreasing. Beyond the largest
    float it is inf.

  Raises:
    ValueError: ``tau`` is a plain number that is no width > 0 in float32.

  >>> print(one_sided_huber(jnp.array([-0.1, 0.0, 0.05, 0.2]), tau=0.1))
  [3.   1.   0.25 0.  ]
  """
  (margin,) = masks.promote(margin, names=("margin",))
  checks.check_width("tau", tau)
  tau = jnp.asarray(tau, margin.dtype)
  scaled = margin / tau
  negative = scaled < 0
  # The inner `where` keeps the square from overflowing in the branch that is not taken. Not relu:
  # on CPUs XLA's maximum drops a NaN in some sums.
  zero = jnp.zeros_like(scaled)
  inside = jnp.square(jnp.where(scaled >= 1, zero, 1.0 - jnp.where(negative, zero, scaled)))
  return jnp.where(negative, 1.0 - 2.0 * scaled, inside)


def one_sided_sigmoid(margin: ArrayLike, *, tau: ArrayLike) -> jax.Array:
  r"""Surrogate l2 of the 0-1 loss from below (Eq. 7).

  .. math:: \ell_2(x) = \frac{\exp(-x/\tau) - 1}{\exp(-x/\tau) + 1}
            = \tanh\frac{-x}{2\tau} \;(x < 0), \quad 0 \;(x \ge 0)

  Args:
    margin: array of any shape, ``h(x+) - v``.
    tau: width ``tau2`` > 0, a number or an array that broadcasts. The gradient has faded out
      about ``10 * tau`` below 0.

  Returns:
    Array like ``margin``, in [0, 1], at least float32; decreasing. No overflow for any ``margin``.

  Raises:
    ValueError: ``tau`` is a plain number that is no width > 0 in float32.

  >>> print(one_sided_sigmoid(jnp.array([-1.0, -0.002, 0.0, 1.0]), tau=0.001))
  [1.        0.7615942 0.        0.       ]
  """
  (margin,) = masks.promote(margin, names=("margin",))
  checks.check_width("tau", tau)
  tau = jnp.asarray(tau, margin.dtype)
  # tanh saturates where exp would overflow; the derivative at the kink is 0, as for x > 0. Not
  # relu, as above.
  return jnp.tanh(jnp.where(margin >= 0, jnp.zeros_like(margin), -margin) / (2.0 * tau))
