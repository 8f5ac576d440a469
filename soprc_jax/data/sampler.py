"""Batches of P classes x K images, each a pure function of (seed, step)."""

from typing import NamedTuple

import numpy as np

SMALL_CLASS_POLICIES = ("mask", "repeat", "drop")
_EPOCH_KEY = 0x5EED


class BatchPlan(NamedTuple):
  """Which images make up a batch.

  Attributes:
    positions: ``[B]`` positions in the source; classes in blocks of K.
    where: ``[B]`` False for slots that a small class leaves empty (they repeat an image of the
      class).
  """

  positions: np.ndarray
  where: np.ndarray


class ClassSampler:
  """Batches of ``batch_size / per_class`` distinct classes with ``per_class`` images each.

  An epoch deals the images of every class into groups of K, and the groups into batches so that no
  class stands twice in a batch: every image of every class is seen at least once an epoch. A last
  group that is not full takes other images of its class again; a batch that is not full takes
  further classes. Which classes meet is drawn anew each epoch.

  Args:
    labels: ``[N]`` labels of the source, any integers.
    batch_size: B, images in a batch over all devices.
    per_class: K >= 2.
    seed: batch ``step`` is a pure function of (labels, these settings, seed, step).
    small_classes: what happens to a class of fewer than K images: ``"mask"``: its missing slots are
      masked out; ``"repeat"``: its images are used several times in a batch; ``"drop"``: it is left
      out.

  Attributes:
    num_small: number of classes that have fewer than K images.
    num_classes: number of classes that take part.
    batches_per_epoch: batches after which each image has been seen.

  Raises:
    ValueError: the sizes do not fit each other or the data.
  """

  def __init__(
    self,
    labels: np.ndarray,
    *,
    batch_size: int,
    per_class: int,
    seed: int,
    small_classes: str = "mask",
  ):
    if per_class < 2:
      raise ValueError(f"per_class must be at least 2 (a query needs a positive), got {per_class}")
    if batch_size % per_class or batch_size < 2 * per_class:
      raise ValueError(
        f"batch_size must be a multiple of per_class={per_class} with at least 2 classes, got "
        f"{batch_size}"
      )
    if small_classes not in SMALL_CLASS_POLICIES:
      raise ValueError(
        f"small_classes must be one of {SMALL_CLASS_POLICIES}, got {small_classes!r}"
      )
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    members = np.split(order, starts[1:])
    self.num_small = sum(len(images) < per_class for images in members)
    if small_classes == "drop":
      members = [images for images in members if len(images) >= per_class]
    self._classes_per_batch = batch_size // per_class
    if len(members) < self._classes_per_batch:
      raise ValueError(
        f"train.batch_size={batch_size} with train.per_class={per_class} needs "
        f"{self._classes_per_batch} classes to train on, "
        f"the training split has {len(members)}: {_smaller_batch(len(members), per_class)}"
      )
    self._members = members
    self._per_class = per_class
    self._seed = seed
    self._mask_small = small_classes == "mask"
    self._groups = np.array([-(-len(images) // per_class) for images in members])
    self.num_classes = len(members)
    # At least as many batches as the largest class has groups, since a class stands in a batch
    # once.
    self.batches_per_epoch = max(
      -(-int(self._groups.sum()) // self._classes_per_batch), int(self._groups.max())
    )
    self._cache: tuple[int, list[list[tuple[int, int]]], list[np.ndarray]] | None = None

  def __call__(self, step: int) -> BatchPlan:
    """The batch of ``step`` >= 0."""
    epoch, index = divmod(step, self.batches_per_epoch)
    batches, orders = self._epoch(epoch)
    slots = [self._images(orders[row], group) for row, group in batches[index]]
    positions, where = zip(*slots)
    return BatchPlan(np.concatenate(positions), np.concatenate(where))

  def _epoch(self, epoch: int) -> tuple[list[list[tuple[int, int]]], list[np.ndarray]]:
    """The (class, group) pairs of each batch, and the order of the images of each class."""
    cached = self._cache
    if cached is not None and cached[0] == epoch:
      return cached[1], cached[2]
    rng = np.random.default_rng([_EPOCH_KEY, self._seed, epoch])
    orders = [rng.permutation(images) for images in self._members]
    batches: list[list[tuple[int, int]]] = [[] for _ in range(self.batches_per_epoch)]
    load = np.zeros(self.batches_per_epoch, np.int64)
    # Large classes first; each takes the emptiest batches, ties broken at random. Loads then differ
    # by at most one.
    for row in sorted(rng.permutation(self.num_classes), key=lambda row: -self._groups[row]):
      chosen = np.lexsort((rng.random(len(load)), load))[: self._groups[row]]
      load[chosen] += 1
      for group, batch in enumerate(rng.permutation(chosen)):
        batches[batch].append((int(row), group))
    for batch in batches:
      self._fill(batch, rng)
    self._cache = (epoch, batches, orders)
    return batches, orders

  def _fill(self, batch: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Adds classes that are not in the batch until it is full."""
    missing = self._classes_per_batch - len(batch)
    if missing:
      others = np.setdiff1d(np.arange(self.num_classes), [row for row, _ in batch])
      for row in rng.choice(others, missing, replace=False):
        batch.append((int(row), int(rng.integers(self._groups[row]))))

  def _images(self, order: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """K images of a class: the group's own, then those that follow in its order, cyclically."""
    slots = group * self._per_class + np.arange(self._per_class)
    where = np.ones(self._per_class, bool)
    if self._mask_small:
      where = np.arange(self._per_class) < len(order)
    return order[slots % len(order)], where


def _smaller_batch(num_classes: int, per_class: int) -> str:
  """What to do where there are too few classes for a batch."""
  if num_classes < 2:
    return "more classes are needed"
  return f"set train.batch_size={num_classes * per_class} or less"
