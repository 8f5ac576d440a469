"""Memory of the embeddings of earlier batches, an optax transform with the memory as its state."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import optax

from soprc_jax import lists, tracking
from soprc_jax._internal import checks, class_labels, collectives
from soprc_jax._internal.pair_options import PairOptions

Overflow = Literal["ring", "tail"]


class EmbeddingMemoryState(NamedTuple):
  """Holds the state of `embedding_memory`.

  Attributes:
    embeddings: ``[S, D]`` float32; zero in empty slots.
    labels: ``[S]`` int32, or int64 with x64. An unsigned label beyond that type is stored by its
      bits.
    filled: ``[S]`` bool, the slots that contain an image.
    pointer: int32, the slot of the next image.
    count: int32, number of updates so far that had an image, compared with ``start_after``.
  """

  embeddings: jax.Array
  labels: jax.Array
  filled: jax.Array
  pointer: jax.Array
  count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax's states do


class Memory(NamedTuple):
  """Holds the embeddings of earlier batches, as the losses take them.

  Attributes:
    embeddings: ``[S, D]``.
    labels: ``[S]`` integers.
    where: ``[S]`` bool, the slots that contain an image.
    own: ``[B]`` slot of each image of the current batch (of this device), -1 for an image that is
      not in the memory. None if the batch has not been stored.
  """

  embeddings: jax.Array
  labels: jax.Array
  where: jax.Array
  own: jax.Array | None = None


class EmbeddingMemory(optax.GradientTransformationExtraArgs):
  """Optax transform with the attributes ``lookahead`` and ``current``, see `embedding_memory`."""

  lookahead: Callable[..., Memory]
  current: Callable[[Any], Memory]


def embedding_memory(
  size: int,
  dim: int,
  *,
  axis_name: collectives.AxisName = None,
  start_after: int = 0,
  overflow: Overflow = "ring",
) -> EmbeddingMemory:
  """Creates a transform that stores the embeddings of the last images in the optimizer state.

  This is the memory of Wang et al., "Cross-batch memory for embedding learning", CVPR 2020. The
  transform returns the gradients unchanged, so it can stand anywhere in ``optax.chain``. The memory
  is part of the optimizer state, so it is saved with that state. Around or inside
  ``optax.MultiSteps`` it behaves like `score_ema`. It starts empty and records which slots are
  filled.

  Args:
    size: number of slots S >= 1, at least the batch of all devices.
    dim: width D >= 1 of the embeddings.
    axis_name: name of a mapped axis. The batches of all its devices are stored, in the order of the
      devices, and every device stores the same state.
    start_after: number of updates >= 0 during which nothing is stored. Meanwhile ``lookahead``
      returns the current batch alone, with its gradient. Updates without a valid image do not
      count, so an all-False ``where`` does not change the state.
    overflow: where a batch is stored that does not fit behind the pointer. ``"ring"`` wraps around
      and overwrites exactly the oldest images. ``"tail"``, as in the reference code, overwrites the
      last slots regardless of their age, and starts over at slot 0.

  Returns:
    An ``optax.GradientTransformationExtraArgs``:

    * ``init(params) -> EmbeddingMemoryState``;
    * ``update(updates, state, params=None, *, embeddings, labels, where=None, **extra)`` with
      ``embeddings [B, D]`` (unit norm, stored unchanged in float32), ``labels [B]`` integers and
      ``where [B]``, the images to store. Labels have the same type in all batches, and under jit
      fit into 32 bits, see `retrieval_lists`;
    * ``lookahead(opt_state, embeddings, labels, where=None) -> Memory``: the memory that ``update``
      will store, with the slot of each image of the batch, as constants (but see ``start_after``).
      XBM uses it;
    * ``current(opt_state) -> Memory``: the stored memory, without the current batch, as constants.
      BlackBox uses it.

    ``opt_state`` is any tree with exactly one state of an ``embedding_memory``.

  Raises:
    ValueError: a size, ``start_after`` or ``overflow`` is out of range; when traced, if the batch
      of all devices is larger than the memory; ``opt_state`` contains no state of an
      ``embedding_memory``, or several.
    TypeError: ``update`` is called without the embeddings or labels.
    AssertionError: when traced, if shapes do not fit.

  >>> memory = embedding_memory(size=3, dim=1)
  >>> state = memory.init(params=None)
  >>> for label in (5, 6):
  ...   _, state = memory.update(None, state, embeddings=jnp.ones((2, 1)),
  ...     labels=jnp.array([label, label]))
  >>> print(state.labels, state.pointer, memory.lookahead(state, jnp.ones((1, 1)),
  ...   jnp.array([7])).own)
  [6 5 6] 1 [1]
  """
  checks.check_count("size", size)
  checks.check_count("dim", dim)
  checks.check_count("start_after", start_after, low=0)
  if overflow not in get_args(Overflow):
    raise ValueError(f"overflow must be one of {get_args(Overflow)}, got {overflow!r}")

  def init_fn(params: optax.Params) -> EmbeddingMemoryState:
    del params
    return EmbeddingMemoryState(
      embeddings=jnp.zeros([size, dim], jnp.float32),
      labels=class_labels.label_keys(jnp.zeros([size], jnp.int32)),
      filled=jnp.zeros([size], bool),
      pointer=jnp.zeros([], jnp.int32),
      count=jnp.zeros([], jnp.int32),
    )

  def join(
    embeddings: ArrayLike, labels: ArrayLike, where: ArrayLike | None, *, constant: bool = False
  ) -> lists.JoinedBatch:
    batch = lists.join_devices(embeddings, labels, where, axis_name, constant=constant)
    chex.assert_shape(
      batch.embeddings, (None, dim), custom_message=f"embeddings must be [B, dim={dim}]"
    )
    if batch.labels.shape[0] > size:
      raise ValueError(
        f"the memory has size={size} slots, fewer than the {batch.labels.shape[0]} images of a "
        "batch: increase size"
      )
    return batch

  def update_fn(
    updates: optax.Updates,
    state: EmbeddingMemoryState,
    params: optax.Params | None = None,
    *,
    embeddings: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    where: ArrayLike | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, EmbeddingMemoryState]:
    del params, extra
    if embeddings is None or labels is None:
      given = {"embeddings": embeddings, "labels": labels}
      raise tracking.missing_arguments("embedding_memory", "embeddings", "memory", given)
    batch = jax.lax.stop_gradient(join(embeddings, labels, where, constant=True))
    store = batch.where & (state.count >= start_after)
    stored, _ = _place(
      state, batch._replace(embeddings=batch.embeddings.astype(jnp.float32), where=store), overflow
    )
    count = jnp.where(jnp.any(batch.where), optax.safe_increment(state.count), state.count)
    return updates, stored._replace(count=count)

  def lookahead(
    opt_state: optax.OptState,
    embeddings: ArrayLike,
    labels: ArrayLike,
    where: ArrayLike | None = None,
  ) -> Memory:
    state = jax.lax.stop_gradient(
      tracking.find_one(opt_state, EmbeddingMemoryState, "embedding_memory")
    )
    batch = join(embeddings, labels, where)
    constants = jax.lax.stop_gradient(
      batch.embeddings.astype(jnp.float32).astype(batch.embeddings.dtype)
    )
    if start_after > 0:
      early = state.count < start_after
      # Until the start the memory contains the batch alone, from slot 0 on.
      state = jax.tree.map(lambda array: jnp.where(early, jnp.zeros_like(array), array), state)
      constants = jnp.where(early, batch.embeddings, constants)
    ahead, slots = _place(state, batch._replace(embeddings=constants), overflow)
    own = jax.lax.dynamic_slice_in_dim(slots, batch.first, np.shape(labels)[0])
    return Memory(ahead.embeddings, ahead.labels, ahead.filled, jnp.where(own < size, own, -1))

  def current(opt_state: optax.OptState) -> Memory:
    state = tracking.find_one(opt_state, EmbeddingMemoryState, "embedding_memory")
    return jax.lax.stop_gradient(Memory(state.embeddings, state.labels, state.filled))

  transform = EmbeddingMemory(init_fn, update_fn)
  transform.lookahead = lookahead
  transform.current = current
  return transform


def compare(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  memory: Memory,
  where: ArrayLike | None,
  pairs: PairOptions,
) -> lists.Similarities:
  """Computes the similarities between the images of a batch and those of a memory.

  Labels are compared in the type in which the memory stores them. A custom `Memory` may contain
  labels of any integer type.
  """
  stored = None if labels is None else memory.labels
  if labels is not None and not jnp.issubdtype(jnp.asarray(stored).dtype, jnp.unsignedinteger):
    labels = class_labels.label_keys(class_labels.integer_labels(labels))
  return lists.similarities(
    embeddings,
    labels,
    gallery=memory.embeddings,
    gallery_labels=stored,
    where=where,
    gallery_where=memory.where,
    pairs=pairs,
  )


def _place(
  state: EmbeddingMemoryState, batch: lists.JoinedBatch, overflow: Overflow
) -> tuple[EmbeddingMemoryState, jax.Array]:
  """Stores the valid images of the batch.

  Returns:
    The new state, and the slot of each image (S for invalid images).
  """
  size = state.filled.shape[0]
  nth = jnp.cumsum(batch.where, dtype=jnp.int32)  # counts from 1
  number = nth[-1] if batch.where.size else jnp.zeros([], jnp.int32)
  if overflow == "ring":
    slots, pointer = (state.pointer + nth - 1) % size, (state.pointer + number) % size
  else:
    fits = state.pointer + number <= size
    slots = jnp.where(fits, state.pointer, size - number) + nth - 1
    pointer = jnp.where(fits, state.pointer + number, 0)
  slots = jnp.where(batch.where, slots, size)
  keys = class_labels.label_keys(batch.labels)
  placed = EmbeddingMemoryState(
    # A float64 batch that stands in for the memory keeps its precision.
    embeddings=_scatter(state.embeddings.astype(batch.embeddings.dtype), slots, batch.embeddings),
    # A state from before x64 was enabled has 32-bit labels.
    labels=_scatter(state.labels.astype(keys.dtype), slots, keys),
    filled=_scatter(state.filled, slots, batch.where),
    pointer=pointer,
    count=state.count,
  )
  return placed, slots


def _scatter(array: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
  return array.at[slots].set(values, mode="drop")
