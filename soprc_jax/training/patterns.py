"""Relevance between the images of a batch that have several labels, on the devices.

A pattern is a distinct set of labels, see `soprc_jax.data.label_sets`. Each pattern of the training
images is a row: of v, of the prior, of a memory. All images of a pattern have the same relevant
images, so their positive scores have one distribution, which a row of v stands for. Images that
only share a label with them have other relevant images.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax.data.label_sets import LabelSets


class Patterns(NamedTuple):
  """Holds the patterns of the training images.

  Attributes:
    members: ``[C, S]`` int32, the labels of each row, in [0, num_labels). That number itself fills
      the rows of smaller patterns.
    num_labels: number of labels L.
    needed: number of shared labels that two relevant patterns have, by the number of all labels of
      both; see `LabelSets.needed`.
    num_relevant: ``[C]`` training images that are relevant to each row, those of the row included.
    smallest: number of training images of the rarest label.
  """

  members: np.ndarray
  num_labels: int
  needed: np.ndarray
  num_relevant: np.ndarray
  smallest: int

  @property
  def overlaps(self) -> bool:
    """Whether an image has two labels."""
    return bool((self.members < self.num_labels).sum(axis=1).max() > 1)

  def relevant(self, rows: jax.Array, others: jax.Array) -> jax.Array:
    """Returns which rows are relevant to each other, ``[B, G]`` bool.

    The labels that two rows share are counted by a product of indicators ``[B, L]`` and ``[G, L]``.
    So no table of pairs of patterns is needed.

    Args:
      rows: ``[B]`` rows of the queries.
      others: ``[G]`` rows of the candidates.
    """
    shared = jnp.matmul(self._indicators(rows), self._indicators(others).T)
    # Products of 0 and 1 and their sums are exact in any precision of a device.
    shared = shared.astype(jnp.int32)
    sizes = jnp.asarray((self.members < self.num_labels).sum(axis=1).astype(np.int32))
    union = sizes[rows][:, None] + sizes[others][None, :] - shared
    return shared >= jnp.asarray(self.needed)[union]

  def _indicators(self, rows: jax.Array) -> jax.Array:
    members = jnp.asarray(self.members)[rows]
    nothing = jnp.zeros((rows.shape[0], self.num_labels), jnp.float32)
    return nothing.at[jnp.arange(rows.shape[0])[:, None], members].set(1.0, mode="drop")

  def to_json(self) -> dict[str, Any]:
    """Returns what `from_json` takes."""
    return {name: np.asarray(value).tolist() for name, value in self._asdict().items()}


def make(sets: LabelSets, labels: np.ndarray) -> Patterns:
  """Returns the patterns of training images.

  Args:
    sets: labels of each pattern.
    labels: ``[N]`` patterns of the training images.

  Returns:
    The patterns that occur, in ascending order, as `soprc_jax.data.sources.label_rows` has them.
  """
  there = np.unique(labels)
  return Patterns(
    members=sets.members[sets.rows(there)],
    num_labels=len(sets.names),
    needed=sets.needed,
    num_relevant=sets.count(there, labels),
    smallest=min(map(len, sets.images_by_label(labels))),
  )


def from_json(tree: dict[str, Any]) -> Patterns:
  """Returns the patterns that `Patterns.to_json` has written."""
  return Patterns(
    np.array(tree["members"], np.int32),
    int(tree["num_labels"]),
    np.array(tree["needed"], np.int32),
    np.array(tree["num_relevant"], np.int64),
    int(tree["smallest"]),
  )
