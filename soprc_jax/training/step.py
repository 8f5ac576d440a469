"""One step of SOPRC (Alg. 1), and of any other objective, as a pure function."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from soprc_jax.training import objectives
from soprc_jax.training.state import TrainState


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
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimisation step (Alg. 1): scores, v_{t+1} (Eq. 10), loss (Eq. 8) plus L_var (Eq. 9), descent.

  Args:
    state: state after t steps.
    batch: ``image [B, H, W, 3]`` uint8, ``label [B]`` int32 rows, ``where [B]`` bool: this device's part.
    model: network, see `soprc_jax.models.EmbeddingNet`.
    tx: ``chain(carrier.tracker, optimizer)``.
    objective: what is minimised.
    carrier: the objective whose state ``tx`` carries; another one than ``objective`` in a warm-up, where its state rests.
    first_step: step at which the phase of ``objective`` begins.
    masked: whether ``where`` may hold False, and masked images must stay out of batch statistics.
    axis_name: mapped axis; the lists are over the batch of all its devices.

  Returns:
    The new state and scalar metrics, equal on all devices.
  """
  where = batch["where"] if masked else None

  def loss_fn(params: Any) -> tuple[jax.Array, Any]:
    embeddings, moved = model.apply(
      {"params": params, "batch_stats": state.batch_stats},
      batch["image"],
      train=True,
      where=where,
      mutable=["batch_stats"],
    )
    inputs = objectives.Inputs(embeddings, batch["label"], batch["where"], state.step - first_step, state.opt_state)
    outputs = objective.compute(inputs)
    update_args = outputs.update_args if objective is carrier else carrier.idle_args(inputs)
    return outputs.loss, (update_args, outputs.metrics, moved.get("batch_stats", state.batch_stats))

  (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
  update_args, metrics, batch_stats = aux
  # Every device holds the same loss of the joined batch; the mean of the gradients is the gradient of that loss.
  if axis_name is not None:
    grads = jax.lax.pmean(grads, axis_name)
  updates, opt_state = tx.update(grads, state.opt_state, state.params, **update_args)
  new_state = TrainState(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
    batch_stats=batch_stats,
    opt_state=opt_state,
  )
  metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}
  return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def embed_step(variables: dict[str, Any], batch: dict[str, jax.Array], *, model: nn.Module) -> jax.Array:
  """Embeddings ``[B, D]`` of this device's images, by the running statistics."""
  embeddings: Any = model.apply(variables, batch["image"], train=False)
  return embeddings
