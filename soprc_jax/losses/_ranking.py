"""Shared parts of the ranking losses: relevant images, and their scores in few columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax import lists
from soprc_jax._internal import blockwise, checks, collectives, masks, pair_options
from soprc_jax._internal.pair_options import PairOptions


class Ranking(NamedTuple):
  """Holds the scores of each query, with masks of its relevant and valid candidates.

  Attributes:
    scores: ``[B, G]``.
    relevant: ``[B, G]`` mask of the relevant candidates.
    candidates: ``[B, G]`` mask of the valid candidates, including the relevant ones.
    valid: ``[B]`` mask of the queries with a positive (other than themselves) and a negative.
  """

  scores: jax.Array
  relevant: jax.Array
  candidates: jax.Array
  valid: jax.Array


def ranking(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  *,
  include_self: bool,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  pairs: PairOptions,
) -> Ranking:
  """Computes the ranking of the batch for each of its images.

  With ``include_self`` each image is relevant to itself.
  """
  found = lists.similarities(embeddings, labels, where=where, axis_name=axis_name, pairs=pairs)
  relevant = found.positive | found.itself if include_self else found.positive
  valid = masks.has_both(found.positive, found.negative)
  return Ranking(found.scores, relevant, relevant | found.negative, valid)


def ranking_in_columns(
  embeddings: ArrayLike,
  labels: ArrayLike | None,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  max_positives: int | None,
  pairs: PairOptions,
  *,
  include_self: bool,
) -> tuple[Ranking, jax.Array, jax.Array]:
  """Returns `ranking`, the relevant scores of each query in K columns, ``[B, K]``, and their mask.

  K is as small as is known to suffice. It follows from ``max_positives``, or from the largest class
  if the labels (or the relevance mask) are concrete. Otherwise K is the size of the gallery, which
  costs time, but no memory thanks to blocks.
  """
  found = ranking(
    embeddings, labels, include_self=include_self, where=where, axis_name=axis_name, pairs=pairs
  )
  width = relevant_width(labels, where, axis_name, max_positives, pairs, include_self=include_self)
  if width is None:
    return found, found.scores, found.relevant
  return found, *lists.pick_positives(found.scores, found.relevant, width)


def ranks_among(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """Counts the valid scores of the same row that are at least as high, ``[B, K]``.

  These are ranks from 1 on, without a gradient. At equal scores each counts the other.
  """

  def of_row(scores: jax.Array, mask: jax.Array) -> jax.Array:
    reaching = (scores[None, :] >= scores[:, None]) & mask[None, :]
    return jnp.sum(reaching, axis=1).astype(scores.dtype)

  return blockwise.map_rows(of_row, (scores, mask), scores.shape[1] ** 2)


def relevant_width(
  labels: ArrayLike | None,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  max_positives: int | None,
  pairs: PairOptions,
  *,
  include_self: bool,
) -> int | None:
  """Returns how many columns suffice for the relevant images of any query; None if unknown."""
  largest = _most_relevant(labels, where, axis_name, pair_options.given(pairs))
  if max_positives is None:
    return largest
  checks.check_count("max_positives", max_positives)
  if largest is not None and largest > max_positives + 1:
    raise ValueError(
      f"max_positives={max_positives} is too small: an image has {largest - 1} positives"
    )
  return max_positives + include_self


def _most_relevant(
  labels: ArrayLike | None,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  pairs: pair_options.Pairs,
) -> int | None:
  """Returns the largest number of relevant images of a query, with itself; None if unknown."""
  given = labels, where, pairs.positives, pairs.ignore
  if axis_name is not None or any(isinstance(array, jax.core.Tracer) for array in given):
    return None
  if pairs.positives is None and pairs.ignore is None:
    labels = np.asarray(labels)
    if where is not None:
      labels = labels[np.asarray(where, bool)]
    return int(np.unique(labels, return_counts=True)[1].max(initial=1))
  if pairs.positives is None:
    labels = np.asarray(labels)
    relevant = labels[:, None] == labels
  else:
    relevant = np.array(pairs.positives, bool)
  if where is not None:
    relevant &= np.asarray(where, bool)[:, None] & np.asarray(where, bool)
  if pairs.ignore is not None:
    relevant &= ~np.asarray(pairs.ignore, bool)
  np.fill_diagonal(relevant, True)
  return int(relevant.sum(axis=1).max(initial=1))
