"""XBM: contrastive loss of the batch against a memory of earlier batches."""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives, masks
from soprc_jax.memory import Memory, compare


def xbm_contrastive_loss(
  embeddings: ArrayLike,
  labels: ArrayLike,
  memory: Memory,
  *,
  negative_margin: ArrayLike = 0.5,
  include_self: bool = False,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Contrastive loss against the memory (Wang et al., "Cross-batch memory for embedding learning",
  CVPR 2020).

  .. math:: L = \frac{1}{B} \sum_q \Big( \sum_{k \in P(q)} (1 - s_{qk}) +
            \sum_{k \in N(q)} [s_{qk} - m^-]_+ \Big)

  with P and N the memory's entries of the class of q and of the others. The batch belongs to the
  memory: ``memory`` is ``lookahead`` of `embedding_memory`. It is a constant, so that the gradient
  reaches the queries only, except for the batch itself before ``start_after``.

  Args:
    embeddings: ``[B, D]``, unit norm (not normalised again).
    labels: ``[B]`` integers in any order, classes of any size. Under jit within 32 bits, see
      `retrieval_lists`.
    memory: `Memory` with ``embeddings [S, D]``, ``labels [S]``, ``where [S]`` and ``own [B]``, the
      slots of the batch, or None.
    negative_margin: similarity m- below which a negative costs nothing.
    include_self: whether a query meets its own entry, as in the reference code. With unit norm that
      adds nothing to the loss, and to the gradient a part that a normalisation removes.
    where: ``[B]`` mask of the valid queries.
    axis_name: name of a mapped axis: the mean is then over the queries of all its devices. The
      memory is the same on all of them but for ``own``, as `embedding_memory` with this
      ``axis_name`` returns it.

  Returns:
    Scalar, at least float32; 0 without a valid query. It grows with the number of positives in the
    memory.

  Raises:
    AssertionError: when traced, if shapes do not fit.

  >>> from soprc_jax.memory import embedding_memory
  >>> embeddings, labels, memory = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), jnp.array([0,
  ...   0, 1]), embedding_memory(8, 2)
  >>> state = memory.init(params=None)
  >>> print(f"{xbm_contrastive_loss(embeddings, labels, memory.lookahead(state, embeddings,
  ...   labels)):.4f}")
  0.2000
  """
  checks.check_range("negative_margin", negative_margin)
  pairs = compare(embeddings, labels, memory, where)
  positive = pairs.positive
  if not include_self and memory.own is not None:
    chex.assert_shape(
      memory.own,
      jnp.shape(labels),
      custom_message="memory.own must be [B], the slots of this batch",
    )
    slots = jnp.arange(positive.shape[1], dtype=memory.own.dtype)
    positive = positive & (memory.own[:, None] != slots[None, :])
  pull = jnp.where(positive, 1 - pairs.scores, 0)
  push = jnp.where(
    pairs.negative, jax.nn.relu(pairs.scores - jnp.asarray(negative_margin, pairs.scores.dtype)), 0
  )
  losses = jnp.sum(pull + push, axis=1)
  return masks.masked_mean(losses, masks.mask_like(where, losses), None, axis_name)
