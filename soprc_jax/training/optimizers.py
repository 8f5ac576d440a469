"""Optimizers and learning-rate schedules by name, as the paper uses them."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import optax

from soprc_jax.training import finetuning, loss_protocol

OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("constant", "cosine", "step")


def make_schedule(config: Any) -> optax.Schedule:
  """Returns the learning rate as a function of the number of steps done, including the warm-up.

  The warm-up phase has its own constant learning rate. The main phase follows ``optim.schedule``,
  after a linear ramp of ``optim.ramp_steps``. The schedule is a pure function of the step, so
  resuming cannot shift it.
  """
  optim, num_steps = config.optim, config.train.steps
  if optim.schedule == "cosine":
    main = optax.cosine_decay_schedule(optim.learning_rate, max(num_steps, 1))
  elif optim.schedule == "step":
    decays = {int(step): optim.decay_factor for step in optim.milestones}
    main = optax.piecewise_constant_schedule(optim.learning_rate, decays)
  elif optim.schedule == "constant":
    main = optax.constant_schedule(optim.learning_rate)
  else:
    raise ValueError(f"optim.schedule must be one of {SCHEDULES}, got {optim.schedule!r}")
  if optim.ramp_steps:
    flat, ramp_steps = main, optim.ramp_steps

    def main(step: Any) -> Any:
      return flat(step) * jax.numpy.minimum(1.0, (step + 1) / ramp_steps)

  if config.warmup.steps:
    warmup = optax.constant_schedule(config.warmup.learning_rate)
    main = optax.join_schedules([warmup, main], [config.warmup.steps])
  return _promoting(main)


def make_optimizer(
  config: Any, factors: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
  """Returns SGD with momentum, or Adam.

  Weight decay is added to the gradient of all parameters of the model (L2), as in the authors'
  code. Parameters of the loss are not decayed: the norm of a proxy has no meaning. So those that a
  loss does not use, as in a warm-up by another loss, do not change. The updates of proxies are
  multiplied by ``loss.proxy_multiplier``.

  Args:
    config: has ``optim``, ``loss.proxy_multiplier``, ``warmup.steps`` and ``train.steps``.
    factors: path of a parameter of the model -> factor of its learning rate, see
      `finetuning.rate_factors`; empty or None: all have the same learning rate.
  """
  optim = config.optim
  if optim.name == "sgd":
    direction = optax.trace(decay=optim.momentum)
  elif optim.name == "adam":
    direction = optax.scale_by_adam()
  else:
    raise ValueError(f"optim.name must be one of {OPTIMIZERS}, got {optim.name!r}")
  parts = [_weight_decay(optim.weight_decay), direction]
  if optim.head_multiplier != 1.0:
    parts.append(optax.masked(optax.scale(optim.head_multiplier), _is_head))
  if factors:
    parts.append(optax.stateless(functools.partial(_scaled, factors=factors)))
  parts.append(optax.scale_by_learning_rate(make_schedule(config)))
  optimizer = optax.chain(*parts)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(updates, state, params, **extra)
    return _scaled_proxies(updates, config.loss.proxy_multiplier), state

  # Not a part of the chain, whose state would have another structure.
  return optax.GradientTransformationExtraArgs(optimizer.init, _promoting(update))


def _weight_decay(weight: float) -> optax.GradientTransformation:
  """Adds weight decay to the gradient of the parameters of the model."""

  def add(updates: Any, params: Any) -> Any:
    def leaf(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
      return update if _top(path) == loss_protocol.LOSS_PARAMS else update + weight * param

    return jax.tree_util.tree_map_with_path(leaf, updates, params)

  return optax.stateless(add)


def _scaled_proxies(updates: Any, multiplier: float) -> Any:
  """Multiplies the updates of parameters of the loss that are named ``proxies``."""

  def leaf(path: Any, update: jax.Array) -> jax.Array:
    is_proxies = _top(path) == loss_protocol.LOSS_PARAMS and _name(path[-1]) == "proxies"
    return multiplier * update if is_proxies else update

  return jax.tree_util.tree_map_with_path(leaf, updates)


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a function of optax to work under ``jax_numpy_dtype_promotion="strict"`` too.

  optax relies on promotion: its schedules and Adam compute floats from int32 counts.
  """

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
      return function(*args, **kwargs)

  return call


def _scaled(updates: Any, _: Any, *, factors: Mapping[str, float]) -> Any:
  flat = finetuning.flat(updates)
  return finetuning.nested(
    {path: leaf * factors[path] if path in factors else leaf for path, leaf in flat.items()}
  )


def _is_head(params: Any) -> Any:
  """Returns a tree of bools, True for the parameters of the linear head."""
  return jax.tree_util.tree_map_with_path(lambda path, _: _top(path) == "head", params)


def _top(path: Any) -> Any:
  return _name(path[0]) if path else None


def _name(entry: Any) -> Any:
  return getattr(entry, "key", None)
