"""Draws batches of classes that the model confuses: groups of an anchor and its nearest classes."""

import copy
from typing import Any, NamedTuple

import numpy as np

from soprc_jax.data import sampler

_ANCHOR_KEY, _DRAW_KEY, _IMAGE_KEY = 0xA4C, 0xD4A, 0x1A6E
# Images of each class that are embedded to find its nearest classes.
_IMAGES = 2
# Images that are embedded at a refresh, at most, for each image that was trained on since the last
# one. A forward pass costs about a third of a training step, so a refresh costs below a tenth.
_EMBEDDED_SHARE = 0.2
_SHORTEST = 50


class Neighbours(NamedTuple):
  """Nearest classes of the anchors of the steps between two refreshes.

  Attributes:
    step: first step that they are for, counted from 0.
    classes: ``[S, G, L]`` int32 for S steps of G anchors: the L nearest classes of each, nearest
      first, as indices of `sampler.ClassSampler`.
  """

  step: int
  classes: np.ndarray


class ConfusableSampler(sampler.ClassSampler):
  """Draws batches of groups of similar classes, so that a ranking loss sees hard negatives.

  A batch has groups of ``group`` classes. The first class of a group is its anchor. The others are
  drawn from the ``pool`` nearest classes of the anchor that are not in the batch yet. If there are
  too few, random classes fill the batch. Every class is an anchor once per epoch. Of each class
  ``per_class`` random images are drawn.

  The nearest classes come from the model: `to_embed` chooses the images to embed, `find` compares
  them, and `with_neighbours` returns a sampler that uses the result. A batch is a pure function of
  (labels, settings, neighbours, seed, step).

  Args:
    labels: ``[N]`` labels of the source, any integers.
    batch_size: see `sampler.ClassSampler`.
    per_class: see `sampler.ClassSampler`.
    seed: see `sampler.ClassSampler`.
    small_classes: see `sampler.ClassSampler`.
    group: classes of a group, >= 2.
    pool: nearest classes that a group is drawn from, at least ``group - 1``.
    refresh: steps between two refreshes of the neighbours. None: the shortest time, but at least
      50 steps, in which the model embeds at most a fifth of the number of images that it trains on.

  Attributes:
    refresh: steps between two refreshes.

  Raises:
    ValueError: a size is out of range.
  """

  def __init__(
    self,
    labels: np.ndarray,
    *,
    batch_size: int,
    per_class: int,
    seed: int,
    small_classes: str = "mask",
    group: int = 8,
    pool: int = 16,
    refresh: int | None = None,
  ):
    super().__init__(
      labels, batch_size=batch_size, per_class=per_class, seed=seed, small_classes=small_classes
    )
    if not 2 <= group <= pool + 1:
      raise ValueError(
        "data.confusable.group must be >= 2 and at most data.confusable.pool + 1 = "
        f"{pool + 1}, got {group}"
      )
    self._group, self._pool = group, min(pool, self.num_classes - 1)
    self._num_anchors = -(-self._classes_per_batch // group)
    self.batches_per_epoch = -(-self.num_classes // self._num_anchors)
    # At least one image a step, which is more than a fifth of a batch of four.
    per_step = max(int(_EMBEDDED_SHARE * batch_size), 1)
    needed = -(-_IMAGES * self.num_classes // per_step)
    self.refresh: int = max(_SHORTEST, needed) if refresh is None else refresh
    self._neighbours: Neighbours | None = None
    self._orders = dict[int, np.ndarray]()  # epoch -> order of the anchors, of the last epoch used

  def __call__(self, step: int) -> sampler.BatchPlan:
    """Returns the batch of ``step`` >= 0.

    Raises:
      ValueError: the sampler has no neighbours for this step.
    """
    rng = np.random.default_rng([_DRAW_KEY, self._seed, step])
    chosen: list[int] = []
    anchors = [int(row) for row in self.anchors(step)]
    taken = set(anchors)
    for anchor, near in zip(anchors, self._near(step)):
      free = rng.permutation([row for row in near if int(row) not in taken])
      group = [int(row) for row in free[: self._group - 1]]
      # The last group is smaller if groups do not divide the batch.
      group = [anchor, *group][: self._classes_per_batch - len(chosen)]
      chosen += group
      taken.update(group)
    missing = self._classes_per_batch - len(chosen)
    if missing:
      others = np.setdiff1d(np.arange(self.num_classes), chosen)
      chosen += [int(row) for row in rng.choice(others, missing, replace=False)]
    slots = [self._images(rng.permutation(self._members[row]), 0) for row in chosen]
    positions, where = zip(*slots)
    return sampler.BatchPlan(np.concatenate(positions), np.concatenate(where))

  def anchors(self, step: int) -> np.ndarray:
    """Returns the anchors ``[G]`` of the batch of a step, different classes."""
    epoch, index = divmod(step, self.batches_per_epoch)
    order = self._orders.get(epoch)
    if order is None:
      rng = np.random.default_rng([_ANCHOR_KEY, self._seed, epoch])
      order = rng.permutation(self.num_classes)
      self._orders = {epoch: order}
    # The last batch of an epoch takes the missing anchors from its start.
    return order[(index * self._num_anchors + np.arange(self._num_anchors)) % self.num_classes]

  def to_embed(self, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images to embed at the refresh before a step.

    Returns:
      Positions ``[n]`` in the source, two random images of each class, or its only one; and the
      class ``[n]`` of each.
    """
    rng = np.random.default_rng([_IMAGE_KEY, self._seed, step])
    chosen = [
      rng.choice(images, min(len(images), _IMAGES), replace=False) for images in self._members
    ]
    return np.concatenate(chosen), np.repeat(np.arange(self.num_classes), [len(c) for c in chosen])

  def find(
    self, embeddings: np.ndarray, classes: np.ndarray, *, step: int, num_steps: int
  ) -> Neighbours:
    """Finds the nearest classes of the anchors of some steps, by the mean of their embeddings.

    Args:
      embeddings: ``[n, D]`` of the images of `to_embed`. Images that could not be read are missing.
      classes: ``[n]`` class of each.
      step: first of the steps, >= 0.
      num_steps: number of steps S >= 1.
    """
    means = np.zeros((self.num_classes, embeddings.shape[1]), np.float32)
    np.add.at(means, classes, embeddings)
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    anchors = np.stack([self.anchors(number) for number in range(step, step + num_steps)])
    rows, places = np.unique(anchors, return_inverse=True)
    found = nearest(means, rows, self._pool)
    return Neighbours(step, found[places.reshape(anchors.shape)])

  def with_neighbours(self, neighbours: Neighbours) -> "ConfusableSampler":
    """Returns a sampler for the steps of ``neighbours``."""
    other = copy.copy(self)
    other._neighbours = neighbours
    return other

  def to_json(self) -> dict[str, Any] | None:
    """Returns the neighbours for a checkpoint; None before the first refresh."""
    found = self._neighbours
    return None if found is None else {"step": int(found.step), "classes": found.classes.tolist()}

  def restored(self, tree: dict[str, Any] | None) -> "ConfusableSampler":
    """Returns the sampler with the neighbours of `to_json`."""
    if tree is None:
      return self
    return self.with_neighbours(Neighbours(tree["step"], np.array(tree["classes"], np.int32)))

  def _near(self, step: int) -> np.ndarray:
    """Returns the nearest classes ``[G, L]`` of the anchors of a step."""
    found = self._neighbours
    if found is None or not 0 <= step - found.step < len(found.classes):
      known = (
        "none" if found is None else f"steps {found.step} to {found.step + len(found.classes) - 1}"
      )
      raise ValueError(f"the sampler has no neighbours for step {step} (known: {known})")
    near: np.ndarray = found.classes[step - found.step]
    return near


def nearest(means: np.ndarray, rows: np.ndarray, count: int, *, block: int = 1024) -> np.ndarray:
  """Returns the classes nearest to some classes by cosine similarity, without the class itself.

  Args:
    means: ``[C, D]``, a vector of norm 1 for each class.
    rows: ``[n]`` classes whose neighbours are searched.
    count: number of neighbours L < C.
    block: rows that are compared at a time, which bounds the memory.

  Returns:
    ``[n, L]`` int32, nearest first; equal ones by their number.

  >>> nearest(np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), np.array([0, 2]), 2)
  array([[1, 2],
         [1, 0]], dtype=int32)
  """
  found = np.zeros((len(rows), count), np.int32)
  for start in range(0, len(rows), block):
    part = rows[start : start + block]
    scores = means[part] @ means.T
    scores[np.arange(len(part)), part] = -np.inf
    best = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    found[start : start + block] = np.take_along_axis(best, order, axis=1)
  return found
