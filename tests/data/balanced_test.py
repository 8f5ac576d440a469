"""Tests batches with an exact share of positives."""

import numpy as np
import pytest

from soprc_jax.data import balanced


class TestSampler:
  _LABELS = (np.arange(103) % 10 == 0).astype(int)  # 11 positives, 92 negatives

  def test_share_is_exact_and_positives_stand_in_front(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=16, positive_share=0.25, seed=0)
    assert sampler.num_positives == 4
    for step in (0, 7, 1000):
      labels = self._LABELS[sampler(step)]
      assert labels.tolist() == [1] * 4 + [0] * 12

  def test_every_example_once_an_epoch_of_its_class(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=16, positive_share=0.25, seed=0)
    batches = sampler.batches(0, 300)
    orders = []
    for columns, examples in (
      (slice(4), np.flatnonzero(self._LABELS)),
      (slice(4, None), np.flatnonzero(self._LABELS == 0)),
    ):
      stream = batches[:, columns].ravel()
      epochs = stream[: len(stream) // len(examples) * len(examples)].reshape(-1, len(examples))
      assert (np.sort(epochs, axis=1) == examples).all()
      orders.append(epochs)
    assert not np.array_equal(orders[0][0], orders[0][1])  # reshuffled

  def test_a_function_of_seed_and_step(self):
    labels = self._LABELS
    one, other = (
      balanced.BalancedSampler(labels, batch_size=16, positive_share=0.25, seed=seed)
      for seed in (5, 6)
    )
    again = balanced.BalancedSampler(labels, batch_size=16, positive_share=0.25, seed=5)
    assert np.array_equal(again.batches(20, 5)[3], one(23))
    assert not np.array_equal(one(23), other(23))

  def test_uniform(self):
    sampler = balanced.BalancedSampler(self._LABELS, batch_size=10, positive_share=0, seed=0)
    assert sampler.num_positives == 10
    batches = sampler.batches(0, 103)
    assert (np.sort(batches.reshape(10, 103), axis=1) == np.arange(103)).all()
    assert len(np.unique(self._LABELS[batches].sum(axis=1))) > 1

  @pytest.mark.parametrize(
    ("size", "share", "message"),
    [
      (
        16,
        0.01,
        "needs 0 positives in a batch, and the training examples have 11: change one of the two",
      ),
      (64, 0.25, "needs 16 positives in a batch, and the training examples have 11"),
      (101, 0.05, "needs 96 negatives in a batch, and the training examples have 92"),
      (16, 1.5, "data.positive_share must lie in"),
      (1, 0.5, "data.batch_size must be an integer, at least 2; got 1"),
      (200, 0.0, "needs 200 examples in a batch"),
    ],
  )
  def test_refusals(self, size, share, message):
    with pytest.raises(ValueError, match=message):
      balanced.BalancedSampler(self._LABELS, batch_size=size, positive_share=share, seed=0)
