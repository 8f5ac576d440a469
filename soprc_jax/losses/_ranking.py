"""Shared parts of the ranking losses: relevant images, and their scores in few columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax import lists
from soprc_jax._internal import blockwise, checks, collectives, masks


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
  labels: ArrayLike,
  *,
  include_self: bool,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
) -> Ranking:
  """Computes the ranking of the batch for each of its images.

  With ``include_self`` each image is relevant to itself.
  """
  pairs = lists.similarities(embeddings, labels, where=where, axis_name=axis_name)
  relevant = pairs.positive | pairs.itself if include_self else pairs.positive
  valid = masks.has_both(pairs.positive, pairs.negative)
  return Ranking(pairs.scores, relevant, relevant | pairs.negative, valid)


def relevant_scores(
  found: Ranking,
  labels: ArrayLike,
  *,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  max_positives: int | None,
  include_self: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns the relevant scores of each query in K columns, ``[B, K]``, and their mask.

  K is as small as is known to suffice. It follows from ``max_positives``, or from the largest class
  if the labels are concrete. With traced labels K is the size of the gallery, which costs time, but
  no memory thanks to blocks.
  """
  width = relevant_width(
    labels, where=where, axis_name=axis_name, max_positives=max_positives, include_self=include_self
  )
  if width is None:
    return found.scores, found.relevant
  return lists.pick_positives(found.scores, found.relevant, width)


def ranks_among(scores: jax.Array, mask: jax.Array) -> jax.Array:
  """Counts the valid scores of the same row that are at least as high, ``[B, K]``.

  These are ranks from 1 on, without a gradient. At equal scores each counts the other.
  """

  def of_row(scores: jax.Array, mask: jax.Array) -> jax.Array:
    reaching = (scores[None, :] >= scores[:, None]) & mask[None, :]
    return jnp.sum(reaching, axis=1).astype(scores.dtype)

  return blockwise.map_rows(of_row, (scores, mask), scores.shape[1] ** 2)


def relevant_width(
  labels: ArrayLike,
  *,
  where: ArrayLike | None,
  axis_name: collectives.AxisName,
  max_positives: int | None,
  include_self: bool,
) -> int | None:
  """Returns how many columns suffice for the relevant images of any query; None if unknown."""
  largest = _largest_class(labels, where, axis_name)
  if max_positives is None:
    return largest
  checks.check_count("max_positives", max_positives)
  if largest is not None and largest > max_positives + 1:
    raise ValueError(
      f"max_positives={max_positives} is too small: an image of the largest class has "
      f"{largest - 1} positives"
    )
  return max_positives + include_self


def _largest_class(
  labels: ArrayLike, where: ArrayLike | None, axis_name: collectives.AxisName
) -> int | None:
  if (
    axis_name is not None
    or isinstance(labels, jax.core.Tracer)
    or isinstance(where, jax.core.Tracer)
  ):
    return None
  labels = np.asarray(labels)
  if where is not None:
    labels = labels[np.asarray(where, bool)]
  return int(np.unique(labels, return_counts=True)[1].max(initial=1))
