"""Computes what must not depend on the number of devices and processes.

The cases are losses with their carried states, trainings and an evaluation.

As a program it computes everything on its devices, and process 0 writes it:
``device_cases.py OUT [COORDINATOR PROCESSES ID]``.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from soprc_jax.data import sources
from soprc_jax.models import EmbeddingNet, ResNet, l2_normalize, vit
from soprc_jax.training import config as config_lib
from soprc_jax.training import evaluation, loss_protocol, objectives, optimizers, parallel
from soprc_jax.training import step as step_lib

BATCH, CLASSES, STEPS = 24, 12, 20  # 1, 2, 3 and 4 devices divide the batch
_FEATURES, _DIM, _SIZE = 10, 6, 8

LOSSES = {
  "soprc": {},
  "soprc_paper": {"loss.preset": "paper"},
  "soprc_graded": {
    "data.source": "csv",
    "data.superclass": "kind",
    "loss.superclass_gain": 0.3,
  },
  "soprc_of_the_batch": {"loss.v": "batch", "loss.prior.kind": "batch"},
  **{name: {"loss.name": name} for name in objectives.LOSSES if name != "soprc"},
  "contrastive_active": {"loss.name": "contrastive", "loss.contrastive.average_active": True},
  "xbm_late": {"loss.name": "xbm", "loss.xbm.start_after": 1},
  "blackbox_margin": {"loss.name": "blackbox", "loss.blackbox.margin": 0.1},
}
TRAININGS = {
  "batch_norm": {"model.freeze_bn": False},
  "frozen": {"model.freeze_bn": True},
  "microbatches": {"model.freeze_bn": True, "train.microbatch": 12},
  "xbm": {"model.freeze_bn": True, "loss.name": "xbm"},
  "proxies": {"model.freeze_bn": True, "loss.name": "proxy_anchor", "loss.proxy_multiplier": 3.0},
  "vit": {"model.name": "vit", "model.freeze_bn": False},
  "vit_microbatches": {"model.name": "vit", "model.freeze_bn": False, "train.microbatch": 12},
}
_SETTINGS = {
  "loss.tau1": 0.1,
  "loss.num_points": 7,
  "loss.prior.kind": "constant",
  "loss.prior.value": 0.3,
  "loss.xbm.memory_size": 60,
  "loss.blackbox.memory_size": 60,
  "optim.learning_rate": 0.05,
  "optim.schedule": "constant",
  "train.batch_size": BATCH,
}


def batches(seed, count):
  """Returns labels and masks, three kinds in turn. They are four images per class; classes of 1 to
  8 over all devices; and devices without a valid list or image.
  """
  rng = np.random.default_rng(seed)
  found = []
  for i in range(count):
    classes = rng.permutation(CLASSES)
    labels, where = np.repeat(classes[:6], 4), np.ones(BATCH, bool)
    if i % 3 == 1:  # with 4 devices, the first one has only classes of one image
      labels = np.r_[classes[:6], rng.permutation(np.repeat(classes[6:10], [2, 3, 5, 8]))]
    elif i % 3 == 2:
      where = np.arange(BATCH) >= 12
      where[15] = False
    found.append({"label": labels.astype(np.int32), "where": where})
  return found


def losses(name, *, mapped):
  """Returns loss, gradient and carried state of three steps of a linear model. It runs on one
  device, or on all.
  """
  axis_name = parallel.AXIS_NAME if mapped else None
  objective = objectives.make_objective(*_name_and_config(LOSSES[name]), _setting(axis_name, _DIM))

  def step(state, batch):
    kernel, carried, count = state

    def loss_fn(kernel, params):
      vectors = jnp.matmul(batch["features"], kernel, precision=jax.lax.Precision.HIGHEST)
      inputs = loss_protocol.Inputs(
        l2_normalize(vectors), batch["label"], batch["where"], count, (carried,), params
      )
      outputs = objective.compute(inputs)
      return outputs.loss, outputs.update_args

    (loss, arguments), gradients = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(
      kernel, objective.init_params(jax.random.key(2))
    )
    # One vector, with the gradient of the parameters of the loss, if it has any.
    gradient = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(gradients)])
    gradient = jax.lax.pmean(gradient, axis_name) if mapped else gradient
    _, carried = objective.tracker.update(gradient, carried, None, **arguments)
    # The model changes independently of the gradient: following it would amplify its rounding from
    # step to step.
    return (jnp.roll(kernel, 1, axis=0), carried, count + 1), {"loss": loss, "gradient": gradient}

  rng = np.random.default_rng(1)
  state = (
    jnp.float32(rng.normal(size=(_FEATURES, _DIM))),
    objective.tracker.init(None),
    jnp.zeros([], jnp.int32),
  )
  values = {}
  run = _runner(step, state, mapped)
  for i, batch in enumerate(batches(2, 3)):
    batch["features"] = np.float32(rng.normal(size=(BATCH, _FEATURES)))
    outputs, state = run(batch)
    values |= {f"{name}/{i}/{key}": value for key, value in outputs.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state[1]):
      values[f"{name}/{i}/state{jax.tree_util.keystr(path)}"] = leaf
  return values


def training(name, *, mapped):
  """Returns parameters and carried states after 20 steps of SGD."""
  axis_name = parallel.AXIS_NAME if mapped else None
  values = _SETTINGS | TRAININGS[name]
  loss_name, loss_config = _name_and_config(values)
  objective = objectives.make_objective(loss_name, loss_config, _setting(axis_name, 8))
  tx = optax.chain(objective.tracker, optimizers.make_optimizer(_config(values)))
  kind = values.get("model.name", "resnet")
  model = _model(values["model.freeze_bn"], axis_name, kind)
  step = functools.partial(
    step_lib.train_step,
    model=model,
    tx=tx,
    objective=objective,
    carrier=objective,
    first_step=0,
    masked=True,
    axis_name=axis_name,
    microbatch=values.get("train.microbatch", 0) // (parallel.num_devices() if mapped else 1),
  )
  variables = {"batch_stats": {}} | _variables(kind)
  loss_params = objective.init_params(jax.random.key(2))
  state = step_lib.TrainState(
    step=jnp.zeros([], jnp.int32),
    **variables,
    opt_state=tx.init(loss_protocol.with_loss_params(variables["params"], loss_params)),
    loss_params=loss_params,
  )
  run = _runner(step, state, mapped)
  rng = np.random.default_rng(3)
  for batch in batches(4, STEPS):
    batch["image"] = rng.integers(0, 256, (BATCH, _SIZE, _SIZE, 3), np.uint8)
    _, state = run(batch)
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


class _Images:
  """Provides 27 random images in classes of five. Neither two processes nor a batch of eight divide
  them, nor the 21 that are one per class.
  """

  def __init__(self):
    self.labels = np.arange(27) // 5
    self.superclasses = {label: f"kind {label % 2}" for label in range(6)}
    self._images = np.random.default_rng(5).integers(0, 256, (27, _SIZE, _SIZE, 3), np.uint8)

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return sources.Example(self._images[index], int(self.labels[index]), str(index))


def evaluated():
  """Returns embeddings and metrics of 27 images, by all devices and processes."""
  config = _config(
    {
      "eval.image_size": _SIZE,
      "eval.batch_size": 8,
      "eval.ks": (1, 3, 26, 27),
      "eval.one_per_class": 2,
    }
  )
  variables = parallel.replicate(_variables())
  embedded = evaluation.make_embed(_model(True, None), config)(variables, _Images())
  found = {
    "all": evaluation.evaluate(embedded, config),
    "one_per_class": evaluation.one_per_class(embedded, config),
  }
  return {"embeddings": embedded.embeddings, "metrics": np.array(json.dumps(found))}


def everything(*, mapped):
  """Returns all of the above by name."""
  values = {}
  for name in LOSSES:
    values |= losses(name, mapped=mapped)
  for name in TRAININGS:
    values |= {f"training/{key}": value for key, value in training(name, mapped=mapped).items()}
  return values | {f"evaluation/{key}": value for key, value in evaluated().items()}


def _runner(step, state, mapped):
  """Returns a function from a joined batch to outputs and state after one more step. Both are on
  the host.
  """
  compiled = parallel.compile_step(step, donate_state=False) if mapped else jax.jit(step)
  held = [parallel.replicate(state) if mapped else state]
  first, count = parallel.process_index(), parallel.num_processes()

  def run(batch):
    if not mapped:
      held[0], outputs = compiled(held[0], batch)
      return jax.device_get((outputs, held[0]))
    mine = {key: np.split(value, count)[first] for key, value in batch.items()}
    held[0], outputs = compiled(held[0], parallel.shard(mine))
    return parallel.unreplicate((outputs, held[0]))

  return run


@functools.cache
def _variables(kind="resnet"):
  images = jnp.zeros((1, _SIZE, _SIZE, 3), jnp.uint8)
  return dict(jax.jit(_model(True, None, kind).init)(jax.random.key(0), images))


def _model(freeze_bn, axis_name, kind="resnet"):
  if kind == "vit":
    # With rotations keys have no bias, whose gradient would be nothing but rounding.
    arch = vit.Architecture(image_size=_SIZE, patch=4, width=8, depth=1, heads=2, mlp=8, rope=9.0)
    return EmbeddingNet(vit.ViT(arch), embedding_dim=8)
  backbone = ResNet((1,), False, width=4, stem="small", freeze_bn=freeze_bn, axis_name=axis_name)
  return EmbeddingNet(backbone, embedding_dim=8)


def _config(values):
  config = config_lib.default_config()
  config.update_from_flattened_dict(_SETTINGS | values)
  return config_lib.resolve(config)


def _name_and_config(values):
  config = _config(values)
  return config.loss.name, config.loss


def _setting(axis_name, dim):
  counts = np.arange(CLASSES) + 5
  return loss_protocol.Setting(
    counts,
    num_steps=STEPS,
    max_positives=7,
    axis_name=axis_name,
    embedding_dim=dim,
    seed=0,
    superclasses=np.arange(CLASSES) % 3,
  )


def main(path, *address):
  if address:
    parallel.join_processes(address[0], int(address[1]), int(address[2]))
    own = {
      "weights": np.float32([0.1, parallel.process_index()]),
      "step": np.int32(parallel.process_index()),
    }
    shared = parallel.from_main(own)
    assert shared["weights"].tolist() == np.float32([0.1, 0]).tolist(), shared
    assert shared["step"] == 0, shared
  values = everything(mapped=True)
  if parallel.is_main():
    np.savez(path, **values)
  parallel.wait_for_all("everything is written")


if __name__ == "__main__":
  main(*sys.argv[1:])
