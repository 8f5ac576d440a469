"""Draws batches of P labels x K images, where an image has several labels."""

import numpy as np

from soprc_jax.data import sampler
from soprc_jax.data.label_sets import LabelSets


class LabelSampler(sampler.ClassSampler):
  """Draws batches of ``batch_size / per_class`` distinct labels with ``per_class`` images each.

  What `sampler.ClassSampler` does with classes, this does with labels. So every image is seen in an
  epoch through each of its labels. An image that the batch has already is replaced by the next
  image of the label that it does not have. If there is none, the slot counts as one that a small
  class leaves empty: it is masked out, or repeats an image, by ``small_classes``.

  Where each image has one label, the batches are those of `sampler.ClassSampler`.

  Args:
    labels: ``[N]`` patterns of the images.
    label_sets: labels of each pattern.
    batch_size: see `sampler.ClassSampler`.
    per_class: K, see `sampler.ClassSampler`.
    seed: see `sampler.ClassSampler`.
    small_classes: treatment of labels with fewer than K images. ``"drop"`` leaves out the images
      that have no other label.

  Raises:
    ValueError: if the sizes do not match each other or the data.
  """

  unit = "labels"

  def __init__(
    self,
    labels: np.ndarray,
    *,
    label_sets: LabelSets,
    batch_size: int,
    per_class: int,
    seed: int,
    small_classes: str = "mask",
  ):
    self._label_sets = label_sets
    super().__init__(
      labels, batch_size=batch_size, per_class=per_class, seed=seed, small_classes=small_classes
    )

  def _members_of(self, labels: np.ndarray) -> list[np.ndarray]:
    return self._label_sets.images_by_label(labels)

  def __call__(self, step: int) -> sampler.BatchPlan:
    """Returns the batch of ``step`` >= 0."""
    epoch, index = divmod(step, self.batches_per_epoch)
    batches, orders = self._epoch(epoch)
    taken = set[int]()
    positions, where = [], []
    for row, group in batches[index]:
      planned, valid = self._images(orders[row], group)
      slots = _without(taken, planned, orders[row], group * self._per_class)
      for slot, (position, fits) in enumerate(zip(slots, valid.tolist(), strict=True)):
        positions.append(int(planned[slot]) if position is None else position)
        where.append(fits and not (position is None and self._mask_small))
      taken.update(position for position in slots if position is not None)
    return sampler.BatchPlan(np.array(positions, np.int64), np.array(where))


def _without(
  taken: set[int], planned: np.ndarray, order: np.ndarray, start: int
) -> list[int | None]:
  """Returns the planned images of a label, and others of it in place of those that are taken.

  None stands for an image that has no substitute.
  """
  if taken.isdisjoint(planned.tolist()):
    return planned.tolist()
  after = np.roll(order, -(start + len(planned)) % len(order)).tolist()
  used = taken.union(planned.tolist())
  others = iter([position for position in after if position not in used])
  return [next(others, None) if position in taken else position for position in planned.tolist()]
