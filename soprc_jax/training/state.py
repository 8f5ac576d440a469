"""The state of a run: everything that the next step depends on."""

from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import optax


@struct.dataclass
class TrainState:
  """State of a run; v is in ``opt_state``, the position in the data is ``step``.

  Attributes:
    step: int32, steps done.
    params: parameters of the network.
    batch_stats: running statistics of batch norm.
    opt_state: state of the optimizer chain, carried states of the loss included.
  """

  step: jax.Array
  params: Any
  batch_stats: Any
  opt_state: optax.OptState


def init_state(model: nn.Module, tx: optax.GradientTransformation, *, key: jax.Array, image_size: int) -> TrainState:
  """State at step 0 with random weights drawn from ``key``."""
  images = jnp.zeros((1, image_size, image_size, 3), jnp.uint8)
  variables = jax.jit(model.init)(key, images)
  params = variables["params"]
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    batch_stats=variables.get("batch_stats", {}),
    opt_state=jax.jit(tx.init)(params),
  )
