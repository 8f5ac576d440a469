"""Recall@k surrogate: two sigmoids in place of the steps of recall@k, with similarity mixup."""

from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax import lists
from soprc_jax._internal import blockwise, checks, collectives, masks
from soprc_jax._internal.pair_options import PairOptions
from soprc_jax.losses import _ranking


def recall_at_k_loss(
  embeddings: ArrayLike,
  labels: ArrayLike | None = None,
  *,
  ks: Sequence[int] = (1, 2, 4, 8, 16),
  tau1: ArrayLike = 1.0,
  tau2: ArrayLike = 0.01,
  mixup: bool = False,
  key: jax.Array | None = None,
  where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
  max_positives: int | None = None,
  **pairs: Unpack[PairOptions],
) -> jax.Array:
  r"""Computes the recall@k surrogate loss, 1 - smoothed recall, the mean over several k.

  See Patel et al., "Recall@k surrogate loss with large batches and similarity mixup", CVPR 2022.

  .. math:: L = 1 - \mathrm{mean}_q\, \mathrm{mean}_k\, \mathrm{mean}_{x \in P(q)}\, \sigma\Big(
            \frac{k - R(x)}{\tau_1} \Big), \quad R(x) = 1 + \sum_{z \ne q, x} \sigma\Big(
            \frac{s_z - s_x}{\tau_2} \Big)

  The query itself is no candidate, as in the paper. As there, the recall is the share of the
  positives that are among the first k. So the loss of a query with more than k positives stays
  above 0.

  With ``mixup`` (SiMix) every image also gets a virtual one: its embedding mixed with that of a
  random other image of its class, ``a x + (1 - a) z`` with a uniform in [0, 1]. Its similarities
  are then mixed in the same way. Virtual images are queries and candidates like all others. The
  paper makes one of every pair of a class.

  Args:
    embeddings, labels, where, axis_name: see `soprc_jax.losses`.
    ks: static, the values of k >= 1.
    tau1: temperature > 0 of the sigmoid on ranks.
    tau2: temperature > 0 of the sigmoid on similarities.
    mixup: whether virtual images are added.
    key: random key, required for ``mixup``; the same on all devices.
    max_positives: static bound on the positives of a query in the batch, without virtual images,
      see `soprc_jax.losses`.
    **pairs: likewise. With ``mixup`` only ``ignore_above`` is possible, since a mask does not say
      what is relevant to a virtual image.

  Returns:
    Scalar in [0, 1]. Queries without a positive or a negative are skipped; 0 if all are.

  Raises:
    ValueError: an option is a plain number out of range; ``mixup`` comes without ``key``.

  >>> embeddings = jnp.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
  >>> print(f"{recall_at_k_loss(embeddings, jnp.array([0, 0, 1, 1])):.4f}")
  0.2170
  """
  for k in ks:
    checks.check_count("ks", k)
  if not ks:
    raise ValueError("ks must have at least one value")
  checks.check_width("tau1", tau1)
  checks.check_width("tau2", tau2)
  if mixup:
    if key is None:
      raise ValueError("mixup needs key, since virtual images are random: pass a random key")
    if labels is None or pairs.get("ignore") is not None:
      raise ValueError("mixup needs labels, and allows no ignore: a virtual image has no mask")
    embeddings, labels, where = _with_virtual(embeddings, labels, where, key, axis_name)
    max_positives = None if max_positives is None else 2 * max_positives + 1
  found, positives, mask = _ranking.ranking_in_columns(
    embeddings, labels, where, axis_name, max_positives, pairs, include_self=False
  )
  dtype = found.scores.dtype
  tau1, tau2 = (jnp.asarray(value, dtype) for value in (tau1, tau2))
  bounds = jnp.asarray(ks, dtype)

  def row_loss(
    positives: jax.Array, mask: jax.Array, scores: jax.Array, candidates: jax.Array
  ) -> jax.Array:
    above = jax.nn.sigmoid((scores[None, :] - positives[:, None]) / tau2)
    above = jnp.where(candidates[None, :], above, jnp.zeros_like(above))
    # A positive counts itself with sigmoid(0) = 1/2 in this sum, but with 1 in its rank.
    ranks = 0.5 + jnp.sum(above, axis=1)
    missed = jax.nn.sigmoid((ranks[:, None] - bounds[None, :]) / tau1)
    return masks.masked_mean(jnp.mean(missed, axis=1), mask)

  rows = (positives, mask, found.scores, found.candidates)
  losses = blockwise.map_rows(row_loss, rows, positives.shape[1] * found.scores.shape[1])
  return masks.masked_mean(losses, found.valid, None, axis_name)


def _with_virtual(
  embeddings: ArrayLike,
  labels: ArrayLike,
  where: ArrayLike | None,
  key: jax.Array,
  axis_name: collectives.AxisName,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the images of this device and a virtual one for each, ``[2 B, ...]``.

  A virtual image is masked if its image has no other one of its class on any device. The numbers
  drawn are the same for any number of devices.
  """
  own = lists.join_devices(embeddings, labels, where, None)
  batch = lists.join_devices(embeddings, labels, where, axis_name)
  size, whole = own.labels.shape[0], batch.labels.shape[0]
  partner_key, share_key = jax.random.split(key)
  numbers = jax.random.uniform(partner_key, [whole, whole], own.embeddings.dtype)
  shares = jax.random.uniform(share_key, [whole], own.embeddings.dtype)
  numbers, shares = (
    jax.lax.dynamic_slice_in_dim(drawn, batch.first, size) for drawn in (numbers, shares)
  )
  positive = lists.similarities(embeddings, labels, where=where, axis_name=axis_name).positive
  partners = batch.embeddings[jnp.argmax(jnp.where(positive, numbers, -1), axis=1)]
  mixed = shares[:, None] * own.embeddings + (1 - shares[:, None]) * partners
  return (
    jnp.concatenate([own.embeddings, mixed]),
    jnp.concatenate([own.labels, own.labels]),
    jnp.concatenate([own.where, jnp.any(positive, axis=1)]),
  )
