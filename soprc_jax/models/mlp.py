"""A multilayer perceptron that gives one logit an example."""

from collections.abc import Sequence

from flax import linen as nn
import jax


class MLP(nn.Module):
  """Dense layers with ReLU, then a linear one of width 1.

  Attributes:
    widths: of the hidden layers; none gives a linear model.
  """

  widths: Sequence[int]

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    """Logits ``[B]`` of ``features [B, D]``."""
    x = features
    for width in self.widths:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(1)(x)[:, 0]
