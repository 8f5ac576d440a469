"""A training step (Alg. 1) of SOPRC, or of any other objective, as a pure function."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import linen as nn
from flax import struct
import jax
import jax.numpy as jnp
import optax

from soprc_jax import memory, tracking
from soprc_jax._internal import collectives
from soprc_jax.training import finetuning, gradients, lora, loss_protocol, objectives

# What to do after a step that is not finite: stop the run with the state before that step, or skip
# the step.
NONFINITE_POLICIES = ("stop", "skip")
# Parts that are checked; bit i of the code stands for the i-th.
NONFINITE_PARTS = ("loss", "embeddings", "gradient", "update", "carried state", "batch statistics")


@struct.dataclass
class TrainState:
  """State of a run. ``opt_state`` includes the auxiliary vectors v.

  The position in the data follows from ``step``.

  Attributes:
    step: int32, number of steps done.
    params: parameters of the model, and under ``lora`` its adapters.
    batch_stats: running statistics of batch norm.
    opt_state: state of the optimizer chain, including the carried state of the loss.
    loss_params: parameters of the loss, see `loss_protocol.Objective`.
  """

  step: jax.Array
  params: Any
  batch_stats: Any
  opt_state: optax.OptState
  loss_params: Any = ()


def init_state(
  model: nn.Module,
  tx: optax.GradientTransformation,
  *,
  key: jax.Array,
  like: jax.ShapeDtypeStruct,
  init_loss_params: Callable[[jax.Array], Any] = lambda key: (),
  trained: str = "",
  adapters: Mapping[str, Any] | None = None,
) -> TrainState:
  """Returns the state at step 0, with random weights drawn from ``key``.

  Args:
    model: the model.
    tx: the optimizer.
    key: random key.
    like: shape and dtype of an input of the model.
    init_loss_params: ``init_params`` of the objective.
    trained: pattern of the trained parameters, see `finetuning.select`. ``tx`` has no state for the
      others.
    adapters: ``config.model.lora``, see `lora.add`; None: no adapters.
  """
  variables = jax.jit(model.init)(key, jnp.zeros(like.shape, like.dtype))
  params = variables["params"]
  if adapters is not None:
    params = lora.add(params, **adapters, key=key)
  loss_params = jax.jit(init_loss_params)(jax.random.fold_in(key, 1))
  changed = loss_protocol.with_loss_params(finetuning.select(params, trained), loss_params)
  return TrainState(
    step=jnp.zeros([], jnp.int32),
    params=params,
    batch_stats=variables.get("batch_stats", {}),
    opt_state=jax.jit(tx.init)(changed),
    loss_params=loss_params,
  )


def train_step(
  state: TrainState,
  batch: dict[str, jax.Array],
  *,
  model: nn.Module,
  tx: optax.GradientTransformationExtraArgs,
  objective: objectives.Objective,
  carrier: objectives.Objective,
  first_step: int,
  masked: bool,
  axis_name: str | None,
  microbatch: int = 0,
  trained: str = "",
  on_nonfinite: str = "stop",
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Computes one optimization step (Alg. 1).

  It computes the scores, v_{t+1} (Eq. 10), the loss (Eq. 8) plus L_var (Eq. 9), and the descent.

  Args:
    state: state after t steps.
    batch: this device's part of the batch: ``image [B, H, W, 3]`` uint8, ``label [B]`` int32 rows
      of v, ``where [B]`` bool. Optional: ``broken [B]`` bool, to count broken images; the scalar
      ``step``, the number of this step from 1, to detect a state that an earlier step has stopped.
    model: see `soprc_jax.models.EmbeddingNet`.
    tx: ``chain(carrier.tracker, optimizer)``.
    objective: objective that is minimized.
    carrier: the objective whose state ``tx`` carries. In a warm-up it is not ``objective``, and its
      state does not change.
    first_step: step at which the phase of ``objective`` begins.
    masked: whether ``where`` may contain False, and masked images are excluded from batch
      statistics.
    axis_name: mapped axis; the lists are over the batch of all its devices.
    microbatch: number of this device's images that the model takes at a time, see
      `gradients.by_microbatches`; 0 takes all at once. Batch norm must be frozen.
    trained: pattern of the trained parameters, see `finetuning.select`. The others stay the same,
      and no gradient is computed for them.
    on_nonfinite: what to do at a step with a NaN or an infinity, one of `NONFINITE_POLICIES`. The
      state takes none of these numbers.

  Returns:
    The new state, and scalar metrics that are equal on all devices. The metric ``nonfinite`` is
    explained at `nonfinite_names`.
  """
  where = batch["where"] if masked else None
  batch_stats = state.batch_stats
  part = finetuning.select(state.params, trained)

  def whole_of(part: Any) -> Any:
    return finetuning.join(state.params, part) if trained else part

  def loss_fn(embeddings: jax.Array, loss_params: Any) -> tuple[jax.Array, Any]:
    inputs = objectives.Inputs(
      embeddings,
      batch["label"],
      batch["where"],
      state.step - first_step,
      state.opt_state,
      loss_params,
    )
    outputs, idle_args = objective.compute(inputs), carrier.idle_args(inputs)
    update_args = outputs.update_args if objective is carrier else idle_args
    return outputs.loss, ((update_args, idle_args), outputs.metrics, any_nonfinite(embeddings))

  def whole(part: Any, loss_params: Any) -> tuple[jax.Array, Any]:
    variables = {"params": lora.merge(whole_of(part)), "batch_stats": batch_stats}
    embeddings, moved = model.apply(
      variables, batch["image"], train=True, where=where, mutable=["batch_stats"]
    )
    loss, aux = loss_fn(embeddings, loss_params)
    return loss, (*aux, moved.get("batch_stats", batch_stats))

  def embed(part: Any, images: jax.Array) -> jax.Array:
    variables = {"params": lora.merge(whole_of(part)), "batch_stats": batch_stats}
    embeddings: Any = model.apply(variables, images, train=False)
    return embeddings

  if microbatch:
    # Batch norm is frozen here (the config ensures it): images are independent, and no statistics
    # are updated.
    (loss, (args, metrics, bad_embeddings)), grads = gradients.by_microbatches(
      embed, loss_fn, part, state.loss_params, batch["image"], size=microbatch
    )
  else:
    (loss, (args, metrics, bad_embeddings, batch_stats)), grads = jax.value_and_grad(
      whole, (0, 1), has_aux=True
    )(part, state.loss_params)
  # Every device has the same loss of the joined batch, so the mean of the gradients is the gradient
  # of that loss.
  grads = loss_protocol.with_loss_params(*grads)
  if axis_name is not None:
    grads = jax.lax.pmean(grads, axis_name)
  update_args, idle_args = args
  changed = loss_protocol.with_loss_params(part, state.loss_params)
  updates, opt_state = tx.update(grads, state.opt_state, changed, **update_args)
  # v and memories are tables with many rows. To choose between the old and the new one would copy
  # both at every step, so a rejected step updates them with arguments that change nothing. The
  # state of a custom loss may be of another kind, or the loss may have no such arguments.
  is_table = isinstance(state.opt_state[0], (tracking.ScoreEmaState, memory.EmbeddingMemoryState))
  in_place = is_table and set(update_args) == set(idle_args)
  part, loss_params = loss_protocol.split_params(
    optax.apply_updates(changed, updates), state.loss_params
  )
  new_state = TrainState(
    step=state.step + 1,
    params=whole_of(part),
    batch_stats=batch_stats,
    opt_state=opt_state,
    loss_params=loss_params,
  )
  grad_norm = optax.tree.norm(grads)
  code = nonfinite_code(
    {
      "loss": any_nonfinite(loss),
      "embeddings": bad_embeddings,
      "gradient": any_nonfinite(grad_norm),
      # The norm also overflows where parameters are about to overflow.
      "update": any_nonfinite(optax.tree.norm(updates)),
      # The rest of the optimizer's state is computed from finite gradients.
      # Our losses carry means of scores and copies of embeddings, which are checked above.
      "carried state": any_nonfinite(() if in_place else opt_state[0]),
      "batch statistics": any_nonfinite(batch_stats),
    },
    axis_name,
  )
  keep = is_kept(new_state.step, code, policy=on_nonfinite, step=batch.get("step"))
  if in_place:
    chosen = jax.tree.map(lambda one, other: jnp.where(keep, one, other), update_args, idle_args)
    _, carried = carrier.tracker.update(grads, state.opt_state[0], changed, **chosen)
    new_state = guarded(state, new_state, keep, policy=on_nonfinite, carried=carried)
  else:
    new_state = guarded(state, new_state, keep, policy=on_nonfinite)
  metrics = {"loss": loss, "grad_norm": grad_norm, "nonfinite": code, **metrics}
  if "broken" in batch:
    metrics["num_broken"] = collectives.psum(jnp.sum(batch["broken"]), axis_name)
  return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def embed_step(
  variables: dict[str, Any], batch: dict[str, jax.Array], *, model: nn.Module, axis_name: str | None
) -> tuple[jax.Array, jax.Array]:
  """Computes the embeddings of a batch with the running statistics of batch norm.

  Returns:
    Embeddings ``[B, D]`` and ``where [B]`` of the images of all devices.
  """
  embeddings: Any = model.apply(variables, batch["image"], train=False)
  found = embeddings, batch["where"]
  return found if axis_name is None else jax.lax.all_gather(found, axis_name, tiled=True)


class DivergedError(ArithmeticError):
  """Raised when training produced a number that is not finite, and the run cannot continue."""


def any_nonfinite(tree: Any) -> jax.Array:
  """Returns whether any number of a tree is NaN or infinite, as a scalar bool."""
  leaves = [
    leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)
  ]
  return (
    jnp.any(jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves]))
    if leaves
    else jnp.array(False)
  )


def nonfinite_code(bad: Mapping[str, jax.Array], axis_name: str | None) -> jax.Array:
  """Encodes which parts are not finite on any device, as an int32 with one bit per part.

  Args:
    bad: name of each of `NONFINITE_PARTS` -> scalar bool, whether it is not finite.
    axis_name: mapped axis of the devices.

  Returns:
    Scalar int32, bit i for the i-th part; 0 if all are finite.
  """
  flags = jnp.stack([bad[name] for name in NONFINITE_PARTS]).astype(jnp.int32)
  flags = (collectives.psum(flags, axis_name) > 0).astype(jnp.int32)
  return jnp.sum(flags << jnp.arange(len(NONFINITE_PARTS)))


def nonfinite_names(found: float) -> list[str]:
  """Returns the names of the parts in a code of `nonfinite_code`."""
  return [name for bit, name in enumerate(NONFINITE_PARTS) if int(found) >> bit & 1]


def is_kept(
  number: jax.Array, nonfinite: jax.Array, *, policy: str, step: jax.Array | None = None
) -> jax.Array:
  """Returns whether the state after a step replaces the state before it, a scalar bool.

  Args:
    number: number of steps done in the state after the step.
    nonfinite: code of `nonfinite_code`.
    policy: ``"keep"``: always, to inspect the state. ``"skip"`` or ``"stop"``: if it is finite.
    step: number of the step. With ``"stop"``, a state that an earlier step has stopped rejects all
      later steps, so steps that were dispatched before the host noticed change nothing.
  """
  if policy == "keep":
    return jnp.array(True)
  keep = nonfinite == 0
  return keep & (number == step) if policy == "stop" and step is not None else keep


def guarded(
  old: TrainState, new: TrainState, keep: jax.Array, *, policy: str, carried: Any = None
) -> TrainState:
  """Returns ``new`` if it is kept, else ``old``; all leaves or none.

  Args:
    old: state before the step.
    new: state after the step.
    keep: see `is_kept`.
    policy: ``"skip"``: a step that is not kept is counted, so that the next one gets the next
      batch. Others: it is not counted.
    carried: carried state of a step whose arguments were idle if it is not kept. Only its scalars
      are chosen here. None: the carried state is chosen like the rest.
  """

  def choose(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(keep, one, other)

  table = None
  if carried is not None:
    table = jax.tree.map(
      lambda one, other: one if jnp.ndim(one) else choose(one, other), carried, old.opt_state[0]
    )
    old, new = (dataclasses.replace(one, opt_state=one.opt_state[1:]) for one in (old, new))
  chosen: TrainState = jax.tree.map(choose, new, old)
  if carried is not None:
    chosen = dataclasses.replace(chosen, opt_state=(table, *chosen.opt_state))
  return dataclasses.replace(chosen, step=new.step) if policy == "skip" else chosen
