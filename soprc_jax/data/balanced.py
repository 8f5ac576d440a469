"""Draws batches with a chosen share of positives, each a pure function of (seed, step)."""

import numpy as np

from soprc_jax._internal import checks

_STREAM_KEY = 0xBA1A


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
    examples, size = self._streams[stream], self._sizes[stream]
    begin, end = first * size, (first + count) * size
    epochs = range(begin // len(examples), -(-end // len(examples)))
    orders = [
      np.random.default_rng([_STREAM_KEY, self._seed, stream, epoch]).permutation(examples)
      for epoch in epochs
    ]
    drawn = np.concatenate(orders)[begin - epochs.start * len(examples) :][: end - begin]
    return drawn.reshape(count, size).astype(np.int32)
