"""Tests batches with an exact share of positives, and batches that bring rare labels."""

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


class TestMultilabelSampler:
  # Label 0 has 60 positives, label 3 has 3; examples 0 to 2 have both.
  _LABELS = np.stack([np.arange(80) < count for count in (60, 30, 9, 3)], axis=1)

  def _sampler(self, **values):
    return balanced.MultilabelSampler(
      self._LABELS, **{"batch_size": 20, "num_classes": 2, "per_class": 3, "seed": 0} | values
    )

  def test_each_label_has_its_positives_equally_often(self):
    sampler = self._sampler()
    chosen = sampler.batches(0, 40)[:, :6].reshape(40, 2, 3)
    # Two of four labels a batch: an epoch of the labels is two batches.
    has = self._LABELS[chosen].all(axis=2).reshape(20, 4, 4)  # [epoch, turn, label]
    for label in range(4):
      assert has[:, :, label].any(axis=1).all()
    # An example with the rare label has every label, so its turn is once an epoch or by chance.
    assert has[:, :, 3].sum() < 30

  def test_positives_of_a_rare_label_all_come_before_one_comes_again(self):
    sampler = self._sampler(num_classes=4, per_class=1)
    # All labels are in every batch, in an order that varies.
    rare = [
      next(row for row in batch[:4] if self._LABELS[row, 3]) for batch in sampler.batches(0, 30)
    ]
    assert len(set(rare)) == 3
    labels = np.zeros((12, 2), bool)
    labels[:3, 0], labels[3:, 1] = True, True
    only = balanced.MultilabelSampler(labels, batch_size=4, num_classes=2, per_class=1, seed=1)
    drawn = only.batches(0, 30)[:, :2]
    first = np.array([row[labels[row, 0]][0] for row in drawn]).reshape(10, 3)
    assert (np.sort(first, axis=1) == np.arange(3)).all()
    assert not (first == first[0]).all()

  def test_the_rest_is_every_example_once_an_epoch(self):
    rest = self._sampler(batch_size=16).batches(0, 40)[:, 6:].reshape(5, 80)
    assert (np.sort(rest, axis=1) == np.arange(80)).all()
    uniform = self._sampler(num_classes=0).batches(4, 4)
    assert (np.sort(uniform.ravel()) == np.arange(80)).all()

  def test_a_function_of_seed_and_step(self):
    one, again, other = self._sampler(), self._sampler(), self._sampler(seed=1)
    assert np.array_equal(again.batches(20, 5)[3], one(23))
    assert not np.array_equal(one(23), other(23))
    assert one(23).dtype == np.int32

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"per_class": 4}, "class 3 has 3 training positives, and data.per_class=4 needs as many"),
      ({"batch_size": 6}, "needs 6 positives in a batch of 6, with other examples too"),
      ({"num_classes": 5}, "and 5 of 4 classes: lower one of the two"),
      ({"batch_size": 90}, "data.batch_size=90 must be at most 86, for 80 training examples"),
      ({"per_class": 0}, "data.per_class must be an integer, at least 1; got 0"),
    ],
  )
  def test_refusals(self, values, message):
    with pytest.raises(ValueError, match=message):
      self._sampler(**values)
    with pytest.raises(ValueError, match=r"labels must be \[N, K\], got shape \(80,\)"):
      balanced.MultilabelSampler(
        self._LABELS[:, 0], batch_size=20, num_classes=1, per_class=1, seed=0
      )
