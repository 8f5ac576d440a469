"""From plans to arrays: batches loaded and prefetched by Grain, each a function of (seed, step) only."""

from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags
import grain.python as grain
import numpy as np

from soprc_jax.data import images, sampler, sources

Batch = dict[str, np.ndarray]
_AUGMENT_KEY = 0xA06


class TrainBatches:
  """Random access to training batches: ``batches[step]`` is a pure function of (seed, step).

  Args:
    source: training images.
    plan: which images make up the batch of a step.
    rows: row of each label, see `sources.label_rows`.
    augmentation: name in `images.AUGMENTATIONS`.
    image_size: side of the images in pixels.
    seed: the augmentation of slot i at step t is drawn from (seed, t, i).
    num_steps: number of steps.
    shard: (index, count): the part of every batch that this process loads.

  A batch is ``{"image": [B, H, W, 3] uint8, "label": [B] int32 rows, "where": [B] bool, "position": [B] int64}``.
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
  ):
    self._source = source
    self._plan = plan
    self._rows = dict(rows)
    self._augmentation, self._image_size = augmentation, image_size
    self._seed = seed
    self._num_steps = num_steps
    self._shard = shard

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, step: int) -> Batch:
    plan = self._plan(step)
    index, count = self._shard
    size = len(plan.positions) // count
    slots = range(index * size, (index + 1) * size)
    # Made here and not in __init__, since a closure cannot be sent to a worker process.
    augment = images.make_augmentation(self._augmentation, self._image_size)
    pictures, labels = [], []
    for slot in slots:
      example = self._source[int(plan.positions[slot])]
      # One generator a slot: workers, processes and resuming change nothing.
      rng = np.random.default_rng([_AUGMENT_KEY, self._seed, step, slot])
      pictures.append(augment(example.image, rng))
      labels.append(self._rows[example.label])
    return {
      "image": np.stack(pictures),
      "label": np.array(labels, np.int32),
      "where": plan.where[slots.start : slots.stop],
      "position": plan.positions[slots.start : slots.stop],
    }


def iterate(batches: TrainBatches, *, start: int, workers: int = 0, prefetch: int = 4) -> Iterator[Batch]:
  """Batches from step ``start`` on, loaded ahead by Grain.

  Args:
    batches: what to load.
    start: first step; the position in the data is the step, so there is no iterator to save.
    workers: worker processes (spawned, never forked); 0 loads in threads of this process. Any number gives the same batches.
    prefetch: batches loaded ahead.
  """
  steps: Any = grain.MapDataset.range(start, len(batches)).map(batches.__getitem__)
  options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=prefetch)
  data = steps.to_iter_dataset(options)
  if workers:
    # Grain's workers read absl flags, which only an absl program has parsed.
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()
    data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch))
  return iter(data)


def eval_batches(source: sources.Source, *, batch_size: int, image_size: int) -> Iterator[Batch]:
  """All images in order, in batches of one shape; ``where`` is False for the padding of the last one."""
  for start in range(0, len(source), batch_size):
    stop = min(start + batch_size, len(source))
    pictures = np.zeros((batch_size, image_size, image_size, 3), np.uint8)
    for slot, index in enumerate(range(start, stop)):
      pictures[slot] = images.resize(source[index].image, image_size)
    yield {"image": pictures, "where": np.arange(batch_size) < stop - start}
