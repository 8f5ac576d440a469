"""Multilayer perceptron with one logit per example, or one per example and class."""

from collections.abc import Sequence

from flax import linen as nn
import jax


class MLP(nn.Module):
  """Maps features to logits, by dense layers with ReLU and a linear layer.

  Attributes:
    widths: widths of the hidden layers. An empty sequence gives a linear model.
    num_classes: K, the number of logits; None gives one logit without an axis of classes.
  """

  widths: Sequence[int]
  num_classes: int | None = None

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    """Computes the logits ``[B]`` or ``[B, K]`` of ``features [B, D]``."""
    x = features
    for width in self.widths:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(1)(x)[:, 0] if self.num_classes is None else nn.Dense(self.num_classes)(x)
