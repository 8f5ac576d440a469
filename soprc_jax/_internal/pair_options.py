"""Options of pairs of images: relevance masks in place of labels, and ignored pairs."""

from typing import NamedTuple, TypedDict

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from soprc_jax._internal import checks, collectives, masks


class PairOptions(TypedDict, total=False):
  """Keyword arguments of the losses that compare pairs, see `soprc_jax.retrieval_lists`."""

  positives: ArrayLike | None
  ignore: ArrayLike | None
  ignore_above: ArrayLike | None


class Pairs(NamedTuple):
  """Holds `PairOptions` with their defaults."""

  positives: ArrayLike | None = None
  ignore: ArrayLike | None = None
  ignore_above: ArrayLike | None = None


def given(pairs: PairOptions | None) -> Pairs:
  """Returns options of pairs with their defaults.

  Raises:
    TypeError: an option is unknown.
  """
  unknown = sorted(set(pairs or ()) - set(Pairs._fields))
  if unknown:
    raise TypeError(
      f"unexpected keyword argument {unknown[0]!r}; the options of pairs are "
      f"{', '.join(Pairs._fields)}"
    )
  return Pairs(**(pairs or {}))


def check_one_given(labels: object, mask: object, name: str = "positives") -> None:
  """Raises a ValueError unless exactly one of labels and a relevance mask is given."""
  if (labels is None) == (mask is None):
    given = "neither" if mask is None else "both"
    raise ValueError(f"pass either labels or {name}, which decides for each pair; got {given}")


def check_gallery(labels: object, gallery: object, gallery_labels: object) -> None:
  """Raises a ValueError unless a gallery comes with labels if and only if the queries do."""
  if labels is None and gallery_labels is not None:
    raise ValueError("gallery_labels needs labels: leave it out, or pass both")
  if labels is not None and (gallery is None) != (gallery_labels is None):
    raise ValueError("gallery and gallery_labels must be given together: one of them is missing")


def pair_mask(name: str, mask: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
  """Casts a mask of pairs to bool.

  Raises:
    AssertionError: it is not ``[B, G]``.
    TypeError: it is a sparse matrix or a function, which only metrics take.
    ValueError: its concrete values are not all 0 or 1.
  """
  if callable(mask) or hasattr(mask, "toarray"):
    raise TypeError(
      f"{name} must be an array [B, G] here, got {type(mask).__name__}: pass the array of the "
      "batch, e.g. matrix.toarray()"
    )
  chex.assert_equal(
    jnp.shape(mask),
    shape,
    custom_message=f"{name} must be [B, G] = {shape}: a row for each image of this device, and a "
    "column for each candidate. With axis_name the candidates are the images of all devices",
  )
  return masks.as_mask(mask, name)


def not_above(negative: jax.Array, scores: jax.Array, above: ArrayLike | None) -> jax.Array:
  """Excludes the negatives ``[B, G]`` whose score is above a limit. None excludes none."""
  if above is None:
    return negative
  if isinstance(above, (bool, str)):
    raise ValueError(f"ignore_above must be a number, got {above!r}")
  checks.check_range("ignore_above", above)
  if jnp.ndim(above):
    raise ValueError(f"ignore_above must be a number, got shape {jnp.shape(above)}")
  return negative & ~(scores > jnp.asarray(above, scores.dtype))


def joined(
  pairs: PairOptions, shape: tuple[int, int], axis_name: collectives.AxisName
) -> PairOptions:
  """Joins the rows of the masks ``[B, G]`` of all devices, ``[G, G]``."""
  if axis_name is None:
    return pairs
  options = given(pairs)

  def join(name: str, mask: ArrayLike | None) -> jax.Array | None:
    if mask is None:
      return None
    return jax.lax.all_gather(pair_mask(name, mask, shape), axis_name, tiled=True)

  return {
    "positives": join("positives", options.positives),
    "ignore": join("ignore", options.ignore),
    "ignore_above": options.ignore_above,
  }
