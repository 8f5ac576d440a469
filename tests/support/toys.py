"""Provides a training step of a model of one block, and batches for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from soprc_jax.models import EmbeddingNet, ResNet
from soprc_jax.training import config as config_lib
from soprc_jax.training import loss_protocol, objectives, optimizers, parallel
from soprc_jax.training import step as step_lib

NUM_DEVICES = 2
CLASSES, BATCH, SIZE = 6, 16, 8
_SETTINGS = {
  "loss.num_points": 10,
  "loss.tau1": 0.1,
  "loss.prior.kind": "constant",
  "loss.prior.value": 0.3,
  "optim.name": "adam",
  "optim.schedule": "constant",
  "optim.learning_rate": 0.01,
  "optim.weight_decay": 0.0,
}


def make_config(**values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(
    _SETTINGS | {key.replace("__", "."): value for key, value in values.items()}
  )
  return config_lib.resolve(config)


class Toy:
  """Runs a step of a model of one block, on one device (compiled by jit) or on all (by pmap). It is
  compiled once for each setting.
  """

  def __init__(
    self,
    *,
    devices=1,
    warmup=False,
    masked=False,
    freeze_bn=False,
    dtype="float32",
    microbatch=0,
    **values,
  ):
    config = make_config(**values)
    self.devices = devices
    axis_name = parallel.AXIS_NAME if devices > 1 else None
    setting = objectives.Setting(
      np.full(CLASSES, 5),
      num_steps=30,
      max_positives=3,
      axis_name=axis_name,
      embedding_dim=8,
    )
    main = objectives.make_objective(config.loss.name, config.loss, setting)
    objective = (
      objectives.make_objective(config.warmup.loss, config.loss, setting) if warmup else main
    )
    backbone = ResNet(
      (1,),
      False,
      width=4,
      stem="small",
      freeze_bn=freeze_bn,
      dtype=jnp.dtype(dtype),
      axis_name=axis_name,
    )
    self.model = EmbeddingNet(backbone, embedding_dim=8, dtype=jnp.dtype(dtype))
    self.init_loss_params = main.init_params
    self.tx = optax.chain(main.tracker, optimizers.make_optimizer(config))
    self.function = functools.partial(
      step_lib.train_step,
      model=self.model,
      tx=self.tx,
      objective=objective,
      carrier=main,
      first_step=0,
      masked=masked,
      axis_name=axis_name,
      microbatch=microbatch,
    )
    self.step = jax.jit(self.function) if devices == 1 else parallel.compile_step(self.function)

  def initial(self):
    variables, loss_params = drawn(), self.init_loss_params(jax.random.key(1))
    trained = loss_protocol.with_loss_params(variables["params"], loss_params)
    return step_lib.TrainState(
      step=jnp.zeros([], jnp.int32),
      **variables,
      opt_state=self.tx.init(trained),
      loss_params=loss_params,
    )

  def run(self, batches, state=None):
    """Returns the state and the metrics of every step. With several devices, they are as seen by
    every device.
    """
    state = self.initial() if state is None else state
    if self.devices > 1:
      state = parallel.replicate(state)
    history = []
    for batch in batches:
      state, scalars = self.step(state, batch if self.devices == 1 else parallel.shard(batch))
      history.append(jax.device_get(scalars))
    return jax.device_get(state), history


make = functools.cache(Toy)


@functools.cache
def drawn():
  """Returns random weights of all toys. They are drawn once, since compiling their initialization
  takes seconds.
  """
  net = EmbeddingNet(ResNet((1,), False, width=4, stem="small"), embedding_dim=8)
  return dict(jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3), jnp.uint8)))


def make_batch(seed=0, where=None):
  """Returns four classes of four images, each class with its own color under noise."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(rng.permutation(CLASSES)[:4], 4)
  colours = (
    np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]])[:, None, None]
    * 140
    + 58
  )
  images = np.uint8(colours[labels] + rng.integers(-57, 58, (BATCH, SIZE, SIZE, 3)))
  where = np.ones(BATCH, bool) if where is None else np.array(where, bool)
  return {"image": images, "label": labels.astype(np.int32), "where": where}
