"""XBM (cross-batch memory): contrastive loss of the batch against a memory of earlier batches."""

from typing import Unpack

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.memory import Memory, compare


def xbm_contrastive_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  memory: Memory,
  *,
  negative_margin: ArrayLike = 0.5,
  include_self: bool = False,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the XBM loss, a contrastive loss of the batch against a memory of earlier batches.

  See Wang et al., "Cross-batch memory for embedding learning", CVPR 2020.

  .. math:: L = \frac{1}{B} \sum_q \Big( \sum_{k \in P(q)} (1 - s_{qk}) +
            \sum_{k \in N(q)} [s_{qk} - m^-]_+ \Big)

  where P(q) are the entries of the memory of the class of q, and N(q) those of other classes. The
  memory includes the batch: pass ``lookahead`` of `embedding_memory`. It is a constant, so the
  gradient reaches the queries only. The exception is the batch itself before ``start_after``.

  Args:
    embeddings, labels: see `soprc_jax.losses`.
    memory: `Memory` with ``embeddings [S, D]``, ``labels [S]``, ``where [S]`` and ``own``. The
      latter holds the slots of the batch, ``[B]``, or is None.
    negative_margin: similarity m- below which a negative costs nothing.
    include_self: whether a query is compared with its own entry, as in the reference code. With
      unit norm that adds nothing to the loss. It adds a part to the gradient that a normalization
      of the embeddings removes.
    where: ``[B]`` mask of the valid queries; None means all.
    axis_name: name of a mapped axis. The mean is then over the queries of all its devices. Except
      for ``own`` the memory is the same on all devices, as `embedding_memory` with this
      ``axis_name`` returns it.
    **pairs: ``positives`` (in place of ``labels``), ``ignore`` and ``ignore_above``, see
      `retrieval_lists`. The masks are ``[B, S]`` here, with a column for each slot. To know what is
      in a slot, give the memory indices of images as labels, and read ``memory.labels``.

  Returns:
    Scalar; 0 without a valid query. It grows with the number of positives in the memory.

  >>> from soprc_jax.memory import embedding_memory
  >>> embeddings, labels = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), jnp.array([0, 0, 1])
  >>> memory = embedding_memory(8, 2)
  >>> ahead = memory.lookahead(memory.init(params=None), embeddings, labels)
  >>> print(f"{xbm_contrastive_loss(embeddings, labels, ahead):.4f}")
  0.2000
  """
  checks.check_range("negative_margin", negative_margin)
  found = compare(embeddings, labels, memory, where, pairs)
  positive, negative = found.positive, found.negative
  if memory.own is not None:
    chex.assert_shape(
      memory.own,
      jnp.shape(embeddings)[:1],
      custom_message="memory.own must be [B], the slots of this batch",
    )
    slots = jnp.arange(positive.shape[1], dtype=memory.own.dtype)
    itself = (memory.own[:, None] == slots[None, :]) & jnp.asarray(memory.where)[None, :]
    positive = positive | itself if include_self else positive & ~itself
    negative = negative & ~itself
  pull = jnp.where(positive, 1 - found.scores, 0)
  push = jnp.where(
    negative, jax.nn.relu(found.scores - jnp.asarray(negative_margin, found.scores.dtype)), 0
  )
  losses = jnp.sum(pull + push, axis=1)
  return masks.masked_mean(losses, masks.mask_like(where, losses), None, axis_name)
