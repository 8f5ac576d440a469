"""Multilayer perceptron with one logit per example."""

from collections.abc import Sequence

from flax import linen as nn
import jax


class MLP(nn.Module):
  """Maps features to one logit, by dense layers with ReLU and a linear layer of width 1.

  Attributes:
    widths: widths of the hidden layers. An empty sequence gives a linear model.
  """

  widths: Sequence[int]

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    """Computes the logits ``[B]`` of ``features [B, D]``."""
    x = features
    for width in self.widths:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(1)(x)[:, 0]
