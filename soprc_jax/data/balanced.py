"""Draws batches with a chosen number of positives, each a pure function of (seed, step).

`BalancedSampler` is for one class against the rest, `MultilabelSampler` for many labels.
"""

import numpy as np

from soprc_jax._internal import checks

_STREAM_KEY = 0xBA1A
_CLASS_KEY = 0xC1A5


class BalancedSampler:
  """Draws positives and negatives as two streams, each shuffled again in every epoch.

  Every positive is seen once in ``N+ / n+`` steps and every negative once in ``N- / n-`` steps, for
  every share. A batch in which an epoch ends may contain an example twice. With
  ``positive_share=0`` there is one stream of all examples (uniform sampling without replacement).
  The number of positives then varies, and may be 0.

  Args:
    labels: ``[N]`` numbers; a label > 0 is positive.
    batch_size: B, an integer >= 2.
    positive_share: share pi_0 of positives in a batch, in [0, 1); 0 for uniform sampling.
    seed: integer >= 0.

  Attributes:
    num_positives: n+, the number of positives in each batch. They come first. For uniform sampling
      it is B, since any example may be positive.

  Raises:
    ValueError: if a batch would contain no positive or no negative, or more than the data have.

  >>> sampler = BalancedSampler(np.array([0, 0, 1, 0, 1, 0]), batch_size=3, positive_share=0.33,
  ...   seed=0)
  >>> positives = [int(sampler(step)[0]) for step in range(4)]
  >>> print(sampler.num_positives, sorted(positives[:2]), sorted(positives[2:]))
  1 [2, 4] [2, 4]
  """

  def __init__(self, labels: np.ndarray, *, batch_size: int, positive_share: float, seed: int):
    labels = np.asarray(labels) > 0
    checks.check_count("data.batch_size", batch_size, low=2)
    checks.check_range("data.positive_share", positive_share, low=0.0, high=1.0)
    self._seed = seed
    if positive_share:
      self.num_positives = round(batch_size * positive_share)
      self._streams = [np.flatnonzero(labels), np.flatnonzero(~labels)]
      self._sizes = [self.num_positives, batch_size - self.num_positives]
    else:
      self.num_positives = batch_size
      self._streams, self._sizes = [np.arange(len(labels))], [batch_size]
    for name, stream, size in zip(
      ("positives", "negatives") if positive_share else ("examples",), self._streams, self._sizes
    ):
      if not 0 < size <= len(stream):
        raise ValueError(
          f"data.batch_size={batch_size} with data.positive_share={positive_share:g} needs {size} "
          f"{name} in a batch, and the training examples have {len(stream)}: change one of the two "
          f"options so that the number is between 1 and {len(stream)}"
        )

  def __call__(self, step: int) -> np.ndarray:
    """Returns the ``[B]`` int32 positions of the examples in the batch of ``step`` >= 0."""
    return self.batches(step, 1)[0]

  def batches(self, first: int, count: int) -> np.ndarray:
    """Returns ``count`` batches from step ``first`` as ``[count, B]`` int32 positions."""
    return np.concatenate(
      [self._draw(stream, first, count) for stream in range(len(self._streams))], axis=1
    )

  def _draw(self, stream: int, first: int, count: int) -> np.ndarray:
    size = self._sizes[stream]
    key = [_STREAM_KEY, self._seed, stream]
    drawn = _in_epochs(self._streams[stream], first * size, (first + count) * size, key)
    return drawn.reshape(count, size).astype(np.int32)


class MultilabelSampler:
  """Draws batches that have positives of some classes, so that rare classes are seen too.

  The classes take turns: each is drawn once in an epoch of the classes, in an order that is
  shuffled again in every epoch. So every class is drawn equally often, however rare it is. Its
  positives are a stream of their own, shuffled again whenever all of them have been drawn. The rest
  of the batch is a uniform stream of all examples. An example can come twice in a batch, from two
  streams.

  The share of a class among the examples of a batch is therefore not its share in the data. A loss
  that depends on the share needs the latter as its prior, as `soprc_jax.binary_loss` takes it.

  Args:
    labels: ``[N, K]`` numbers; a label > 0 is positive.
    batch_size: B, an integer >= 2.
    num_classes: classes with chosen positives in each batch, >= 0; 0 draws uniformly.
    per_class: positives of each of these classes, >= 1.
    seed: integer >= 0.

  Raises:
    ValueError: if a class has fewer than ``per_class`` positives, or a batch has no room for them.

  >>> labels = np.eye(3)[[0, 0, 0, 0, 0, 0, 1, 1, 2, 2]]
  >>> sampler = MultilabelSampler(labels, batch_size=8, num_classes=3, per_class=2, seed=0)
  >>> print((labels[sampler(0)].sum(axis=0) >= 2).all(), sampler(0).shape)
  True (8,)
  """

  def __init__(
    self, labels: np.ndarray, *, batch_size: int, num_classes: int, per_class: int, seed: int
  ):
    labels = np.asarray(labels) > 0
    if labels.ndim != 2:
      raise ValueError(f"labels must be [N, K], got shape {labels.shape}")
    checks.check_count("data.batch_size", batch_size, low=2)
    checks.check_count("data.classes_per_batch", num_classes, low=0)
    checks.check_count("data.per_class", per_class)
    chosen = num_classes * per_class
    if not chosen < batch_size or num_classes > labels.shape[1]:
      raise ValueError(
        f"data.classes_per_batch={num_classes} with data.per_class={per_class} needs {chosen} "
        f"positives in a batch of {batch_size}, with other examples too, and {num_classes} "
        f"of {labels.shape[1]} classes: lower one of the two, or raise data.batch_size"
      )
    counts = labels.sum(axis=0)
    if num_classes and counts.min() < per_class:
      raise ValueError(
        f"class {int(counts.argmin())} has {counts.min()} training positives, and "
        f"data.per_class={per_class} needs as many in a batch: lower it, or leave the class out"
      )
    if batch_size - chosen > len(labels):
      raise ValueError(
        f"data.batch_size={batch_size} must be at most {len(labels) + chosen}, for "
        f"{len(labels)} training examples"
      )
    self._positives = [np.flatnonzero(column) for column in labels.T]
    self._all = np.arange(len(labels))
    self._num_classes, self._per_class, self._seed = num_classes, per_class, seed
    self._rest = batch_size - chosen

  def __call__(self, step: int) -> np.ndarray:
    """Returns the ``[B]`` int32 positions of the examples in the batch of ``step`` >= 0."""
    return self.batches(step, 1)[0]

  def batches(self, first: int, count: int) -> np.ndarray:
    """Returns ``count`` batches from step ``first`` as ``[count, B]`` int32 positions."""
    begin, end = first * self._num_classes, (first + count) * self._num_classes
    key = [_CLASS_KEY, self._seed]
    classes = _in_epochs(np.arange(len(self._positives)), begin, end, [*key, 0])
    # A class comes once in an epoch of the classes, which is therefore its number of turns so far.
    turns = np.arange(begin, end) // len(self._positives)
    chosen = [self._turn(*place) for place in zip(classes.tolist(), turns.tolist(), strict=True)]
    rest = _in_epochs(self._all, first * self._rest, (first + count) * self._rest, [*key, 1])
    parts = [np.array(chosen, np.int64), rest]
    return np.concatenate([part.reshape(count, -1) for part in parts], axis=1).astype(np.int32)

  def _turn(self, label: int, turn: int) -> np.ndarray:
    """Returns the ``[per_class]`` positives of a class at its turn."""
    begin = turn * self._per_class
    key = [_CLASS_KEY, self._seed, 2, label]
    return _in_epochs(self._positives[label], begin, begin + self._per_class, key)


def _in_epochs(examples: np.ndarray, begin: int, end: int, key: list[int]) -> np.ndarray:
  """Returns positions ``begin`` to ``end`` of a stream that shuffles the examples every epoch."""
  epochs = range(begin // len(examples), -(-end // len(examples)))
  orders = [np.random.default_rng([*key, epoch]).permutation(examples) for epoch in epochs]
  drawn = np.concatenate([examples[:0], *orders])
  return drawn[begin - epochs.start * len(examples) :][: end - begin]
