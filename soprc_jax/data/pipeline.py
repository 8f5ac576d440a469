"""Loads and prefetches batches with Grain, each a function of (seed, step) only."""

from collections.abc import Iterator, Mapping
import copy
import os
import signal
from typing import Any

from absl import flags
import grain.python as grain
import numpy as np

from soprc_jax.data import decoding, sampler, sources, transforms

Batch = dict[str, np.ndarray]
ON_BROKEN = ("error", "skip")
_AUGMENT_KEY = 0xA06
_REPLACE_KEY = 0xB40


class TrainBatches:
  """Gives random access to training batches: ``batches[step]`` is a pure function of (seed, step).

  Args:
    source: training images.
    plan: assigns images to the batch of a step.
    rows: row of each label, see `sources.label_rows`.
    augmentation: name in `transforms.AUGMENTATIONS`.
    image_size: side of the images in pixels.
    resize_to: shorter side in pixels before the crop, for the augmentation ``crop``.
    augmentation_settings: see `transforms.Settings`.
    on_broken: treatment of images that cannot be decoded. ``"error"`` raises a BrokenImageError
      that names the image. ``"skip"`` takes another image of its class, drawn from (seed, t, i), or
      masks the slot out if the class has no readable image.
    seed: the augmentation of slot i at step t is drawn from (seed, t, i).
    num_steps: number of steps.
    shard: (index, count), the part of every batch that this process loads.

  A batch is ``{"image": [B, H, W, 3] uint8, "label": [B] int32 rows, "where": [B] bool, "position":
  [B] int64, "broken": [B] bool}``. ``broken`` is True if the planned image could not be decoded.
  For stored embeddings ``image`` has the vectors ``[B, F]``.
  """

  def __init__(
    self,
    source: sources.Source,
    plan: sampler.ClassSampler,
    *,
    rows: Mapping[int, int],
    augmentation: str,
    image_size: int,
    seed: int,
    num_steps: int,
    shard: tuple[int, int] = (0, 1),
    resize_to: int = 256,
    augmentation_settings: transforms.Settings = transforms.DEFAULTS,
    on_broken: str = "error",
  ):
    if on_broken not in ON_BROKEN:
      raise ValueError(f"on_broken must be one of {ON_BROKEN}, got {on_broken!r}")
    self._source = source
    self._kept = decoding.Kept()
    self._plan = plan
    self._rows = dict(rows)
    self._augmentation, self._image_size, self._resize_to = augmentation, image_size, resize_to
    self._augmentation_settings = augmentation_settings
    self._skips_broken = on_broken == "skip"
    self._seed = seed
    self._num_steps = num_steps
    self._shard = shard

  def with_plan(self, plan: sampler.ClassSampler) -> "TrainBatches":
    """Returns the batches of another plan; they share the decoded images."""
    other = copy.copy(self)
    other._plan = plan
    return other

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, step: int) -> Batch:
    plan = self._plan(step)
    index, count = self._shard
    size = len(plan.positions) // count
    slots = range(index * size, (index + 1) * size)
    if sources.width(self._source):
      return self._vectors(plan, slice(slots.start, slots.stop))
    # Made here instead of in __init__, since a closure cannot be sent to a worker process.
    augment = transforms.make_augmentation(
      self._augmentation,
      self._image_size,
      resize_to=self._resize_to,
      settings=self._augmentation_settings,
    )
    where, broken = plan.where[slots.start : slots.stop].copy(), np.zeros(size, bool)
    stack, labels = [], []
    for i, slot in enumerate(slots):
      position = int(plan.positions[slot])
      labels.append(self._rows[int(self._source.labels[position])])
      image = self._image(augment, position, step, slot)
      if image is None:
        broken[i] = True
        image = self._replacement(augment, position, step, slot)
        where[i] &= image is not None
      stack.append(
        np.zeros((self._image_size, self._image_size, 3), np.uint8) if image is None else image
      )
    return {
      "image": np.stack(stack),
      "label": np.array(labels, np.int32),
      "where": where,
      "position": plan.positions[slots.start : slots.stop],
      "broken": broken,
    }

  def _vectors(self, plan: sampler.BatchPlan, slots: slice) -> Batch:
    """Returns the batch of a source of vectors, which are not augmented."""
    positions = plan.positions[slots]
    labels = self._source.labels[positions].tolist()
    return {
      "image": sources.vectors(self._source, positions),
      "label": np.array([self._rows[label] for label in labels], np.int32),
      "where": plan.where[slots].copy(),
      "position": positions,
      "broken": np.zeros(len(positions), bool),
    }

  def _image(
    self, augment: transforms.Transform, position: int, step: int, slot: int
  ) -> np.ndarray | None:
    """Returns the augmented image of a slot; None if it is unreadable and may be skipped."""
    # One generator per slot: workers, processes and resuming do not change the result.
    rng = np.random.default_rng([_AUGMENT_KEY, self._seed, step, slot])
    try:
      return augment(self._kept(position, self._source[position].image), rng)
    except decoding.BrokenImageError as error:
      if self._skips_broken:
        return None
      raise decoding.BrokenImageError(
        f"{error} (data.on_broken=skip takes another image of its class)"
      ) from error

  def _replacement(
    self, augment: transforms.Transform, position: int, step: int, slot: int
  ) -> np.ndarray | None:
    """Returns a readable image of the same class, or None if there is none."""
    label = self._source.labels[position]
    others = np.flatnonzero(self._source.labels == label)
    for other in np.random.default_rng([_REPLACE_KEY, self._seed, step, slot]).permutation(
      others[others != position]
    ):
      image = self._image(augment, int(other), step, slot)
      if image is not None:
        return image
    return None


def iterate(
  batches: TrainBatches,
  *,
  start: int,
  stop: int | None = None,
  workers: int = 0,
  prefetch: int = 4,
) -> Iterator[Batch]:
  """Iterates over the batches from step ``start``, prefetched by Grain.

  Args:
    batches: the batches to load.
    start: first step. The position in the data is the step, so no iterator state is saved.
    stop: step before which the iteration ends; None: the last one.
    workers: number of worker processes (spawned, never forked); 0 loads in threads of this process.
      Any number gives the same batches.
    prefetch: number of batches to prefetch.
  """
  end = len(batches) if stop is None else stop
  steps: Any = grain.MapDataset.range(start, end).map(batches.__getitem__)
  data = steps.to_iter_dataset(_read_options(prefetch, processes=max(workers, 1)))
  if workers:
    # Grain's workers read absl flags, which are parsed only in absl programs.
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
    data = data.mp_prefetch(options, worker_init_fn=_ignore_interrupts)
  return iter(data)


def _ignore_interrupts(worker: int, count: int) -> None:
  """Ignores Ctrl-C in a worker: the training process receives it too, and ends its workers."""
  del worker, count
  signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read_options(prefetch: int, *, processes: int = 1) -> grain.ReadOptions:
  """Returns the options of each of ``processes`` processes.

  Together they have one thread per core, since more threads would only wait for each other. A
  process has at most 16 threads, since with more the overhead dominates.
  """
  threads = min(max((os.cpu_count() or 1) // processes, 1), 16)
  return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(prefetch, threads))


def eval_batches(
  source: sources.Source,
  *,
  batch_size: int,
  image_size: int,
  resize_to: int = 0,
  interpolation: str = "bilinear",
  on_broken: str = "error",
  shard: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
  """Yields the center crops of all images in order, in batches of one shape.

  Args:
    source: images.
    batch_size: B.
    image_size: side in pixels.
    resize_to: shorter side in pixels before the crop; 0: ``image_size``.
    interpolation: see `transforms.centre_crop`.
    on_broken: ``"error"`` raises for images that cannot be decoded, ``"skip"`` leaves them out.
    shard: (index, count), the part of every batch that this process loads; count divides B.

  Yields:
    ``{"image": [B / count, H, W, 3] uint8, "where": [B / count] bool}``. ``where`` is False for the
    padding of the last batch and for unreadable images. For stored embeddings ``image`` has the
    vectors ``[B / count, F]``.
  """
  index, count = shard
  size, features = batch_size // count, sources.width(source)

  def load(number: int) -> Batch:
    start = number * batch_size + index * size
    stop = min(start + size, len(source))
    if features:
      there = np.arange(start, start + size)
      padded = np.minimum(there, len(source) - 1)
      return {"image": sources.vectors(source, padded), "where": there < len(source)}
    batch = np.zeros((size, image_size, image_size, 3), np.uint8)
    where = np.arange(size) < stop - start
    for slot, position in enumerate(range(start, stop)):
      try:
        batch[slot] = transforms.centre_crop(
          source[position].image, image_size, resize_to=resize_to, interpolation=interpolation
        )
      except decoding.BrokenImageError as error:
        if on_broken != "skip":
          raise decoding.BrokenImageError(f"{error} (data.on_broken=skip skips it)") from error
        where[slot] = False
    return {"image": batch, "where": where}

  batches: Any = grain.MapDataset.range(-(-len(source) // batch_size)).map(load)
  yield from batches.to_iter_dataset(_read_options(prefetch=2))
