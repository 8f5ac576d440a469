"""Draws batches of P classes x K images, each a pure function of (seed, step)."""

from typing import Any, NamedTuple

import numpy as np

SAMPLERS = ("random", "confusable")
SMALL_CLASS_POLICIES = ("mask", "repeat", "drop")
_EPOCH_KEY = 0x5EED


class BatchPlan(NamedTuple):
  """Lists the images of a batch.

  Attributes:
    positions: ``[B]`` positions in the source, in blocks of K images per class.
    where: ``[B]`` bool, False for slots that a small class leaves empty. Such slots repeat an image
      of the class.
  """

  positions: np.ndarray
  where: np.ndarray


class ClassSampler:
  """Draws batches of ``batch_size / per_class`` distinct classes with ``per_class`` images each.

  Each epoch divides the images of every class into groups of K, and assigns the groups to batches.
  No class occurs twice in a batch, and every image is seen at least once per epoch. An incomplete
  last group is filled with images of its class. An incomplete batch is filled with other classes.
  Every epoch draws a new assignment.

  Args:
    labels: ``[N]`` labels of the source, any integers.
    batch_size: B, number of images in a batch over all devices.
    per_class: K >= 2.
    seed: batch ``step`` is a pure function of (labels, these settings, seed, step).
    small_classes: treatment of classes with fewer than K images. ``"mask"`` masks the missing
      slots out, ``"repeat"`` repeats images within a batch, ``"drop"`` leaves the class out.

  Attributes:
    num_small: number of classes with fewer than K images.
    num_classes: number of classes that are drawn.
    batches_per_epoch: number of batches after which each image has been seen.
    refresh: steps after which the sampler needs embeddings of the model; None: never.
    unit: what the images of a batch have in common, in messages.

  Raises:
    ValueError: if the sizes do not match each other or the data.
  """

  unit = "classes"

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
    members = self._members_of(labels)
    self.num_small = sum(len(images) < per_class for images in members)
    if small_classes == "drop":
      members = [images for images in members if len(images) >= per_class]
    self._classes_per_batch = batch_size // per_class
    if len(members) < self._classes_per_batch:
      remedy = f"set train.batch_size={len(members) * per_class} or less"
      if len(members) < 2:
        remedy = f"more {self.unit} are needed"
      raise ValueError(
        f"train.batch_size={batch_size} with train.per_class={per_class} needs "
        f"{self._classes_per_batch} training {self.unit}, the training split has {len(members)}: "
        f"{remedy}"
      )
    self._members = members
    self._per_class = per_class
    self._seed = seed
    self._mask_small = small_classes == "mask"
    self._groups = np.array([-(-len(images) // per_class) for images in members])
    self.num_classes = len(members)
    # At least the number of groups of the largest class, since a class occurs once in a batch.
    self.batches_per_epoch = max(
      -(-int(self._groups.sum()) // self._classes_per_batch), int(self._groups.max())
    )
    self.refresh: int | None = None
    self._cache: tuple[int, list[list[tuple[int, int]]], list[np.ndarray]] | None = None

  def _members_of(self, labels: np.ndarray) -> list[np.ndarray]:
    """Returns the positions of the images of each class, in the order of the labels."""
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    return np.split(order, starts[1:])

  def to_json(self) -> dict[str, Any] | None:
    """Returns what a checkpoint must hold of the sampler; None if that is nothing."""
    return None

  def restored(self, tree: dict[str, Any] | None) -> "ClassSampler":
    """Returns the sampler with what `to_json` has returned."""
    del tree
    return self

  def __call__(self, step: int) -> BatchPlan:
    """Returns the batch of ``step`` >= 0."""
    epoch, index = divmod(step, self.batches_per_epoch)
    batches, orders = self._epoch(epoch)
    slots = [self._images(orders[row], group) for row, group in batches[index]]
    positions, where = zip(*slots)
    return BatchPlan(np.concatenate(positions), np.concatenate(where))

  def _epoch(self, epoch: int) -> tuple[list[list[tuple[int, int]]], list[np.ndarray]]:
    """Returns the (class, group) pairs of each batch, and the image order of each class."""
    cached = self._cache
    if cached is not None and cached[0] == epoch:
      return cached[1], cached[2]
    rng = np.random.default_rng([_EPOCH_KEY, self._seed, epoch])
    orders = [rng.permutation(images) for images in self._members]
    batches: list[list[tuple[int, int]]] = [[] for _ in range(self.batches_per_epoch)]
    # Large classes come first. Each takes the next batches of a random order. The loads then differ
    # by at most one.
    waiting: list[int] = []
    for row in sorted(rng.permutation(self.num_classes), key=lambda row: -self._groups[row]):
      number = int(self._groups[row])
      if len(waiting) < number:
        # Another round, at whose end the rest of the last one stands: no class gets a batch twice.
        others = np.setdiff1d(np.arange(self.batches_per_epoch), waiting)
        waiting = waiting + rng.permutation(others).tolist() + waiting
      for group in range(number):
        batches[waiting.pop()].append((int(row), group))
    for batch in batches:
      self._fill(batch, rng)
    self._cache = (epoch, batches, orders)
    return batches, orders

  def _fill(self, batch: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Fills the batch with classes that are not yet in it."""
    has = {row for row, _ in batch}
    while len(batch) < self._classes_per_batch:
      row = int(rng.integers(self.num_classes))
      if row not in has:
        has.add(row)
        batch.append((row, int(rng.integers(self._groups[row]))))

  def _images(self, order: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns K images of a class: those of the group, then the following ones, cyclically."""
    slots = group * self._per_class + np.arange(self._per_class)
    where = np.ones(self._per_class, bool)
    if self._mask_small:
      where = np.arange(self._per_class) < len(order)
    return order[slots % len(order)], where
