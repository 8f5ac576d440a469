"""Tests batches of P classes x K images as pure functions of (seed, step)."""

import collections
import itertools
import time

import numpy as np
import pictures
import pytest

from soprc_jax.data import sampler

_POLICIES = sampler.SMALL_CLASS_POLICIES


def _epoch(plan_of, epoch=0):
  return [plan_of(epoch * plan_of.batches_per_epoch + i) for i in range(plan_of.batches_per_epoch)]


class TestSampler:
  @pytest.mark.parametrize("policy", _POLICIES)
  @pytest.mark.parametrize("layout", pictures.LAYOUTS)
  def test_a_batch_is_p_distinct_classes_of_k_images(self, layout, policy):
    labels, plan_of = (
      pictures.labels(pictures.LAYOUTS[layout]),
      pictures.class_sampler(pictures.LAYOUTS[layout], small_classes=policy),
    )
    for epoch in range(3):
      for plan in _epoch(plan_of, epoch):
        assert plan.positions.shape == plan.where.shape == (16,)
        blocks = labels[plan.positions].reshape(4, 4)
        assert (blocks == blocks[:, :1]).all()
        assert len(set(blocks[:, 0])) == 4
        # No image is twice among the valid slots, unless the policy repeats its class.
        if policy != "repeat":
          valid = plan.positions[plan.where]
          assert len(set(valid)) == len(valid)

  @pytest.mark.parametrize("policy", _POLICIES)
  @pytest.mark.parametrize("layout", pictures.LAYOUTS)
  def test_f32_an_epoch_sees_every_image(self, layout, policy):
    sizes = np.array(pictures.LAYOUTS[layout])
    labels, plan_of = pictures.labels(sizes), pictures.class_sampler(sizes, small_classes=policy)
    in_play = sizes >= 4 if policy == "drop" else np.ones(len(sizes), bool)
    want = np.flatnonzero(np.isin(labels, 1000 + 17 * np.flatnonzero(in_play)))
    for epoch in range(3):
      seen = np.concatenate([plan.positions[plan.where] for plan in _epoch(plan_of, epoch)])
      np.testing.assert_array_equal(np.unique(seen), want)
    assert plan_of.num_classes == in_play.sum()

  @pytest.mark.parametrize(("layout", "count"), [("even", 0), ("with_small", 4)])
  @pytest.mark.parametrize("policy", _POLICIES)
  def test_f11_number_of_small_classes(self, layout, count, policy):
    assert pictures.class_sampler(pictures.LAYOUTS[layout], small_classes=policy).num_small == count

  def test_f11_policies_on_a_class_of_two_images(self):
    labels = pictures.labels(pictures.LAYOUTS["with_small"])
    small = np.flatnonzero(labels == 1000 + 17 * 1)
    for policy in ("mask", "repeat"):
      for plan in _epoch(
        pictures.class_sampler(pictures.LAYOUTS["with_small"], small_classes=policy)
      ):
        slots = np.isin(plan.positions, small)
        if slots.any():
          assert slots.sum() == 4
          assert collections.Counter(plan.positions[slots].tolist()) == {
            int(small[0]): 2,
            int(small[1]): 2,
          }
          valid = plan.positions[slots & plan.where]
          assert len(valid) == (2 if policy == "mask" else 4)
          assert set(valid) == set(small)
    plans = _epoch(pictures.class_sampler(pictures.LAYOUTS["with_small"], small_classes="drop"))
    assert not np.isin(np.concatenate([plan.positions for plan in plans]), small).any()

  def test_an_epoch_is_no_longer_than_it_must_be(self):
    assert pictures.class_sampler([8] * 10).batches_per_epoch == 5  # 20 groups of 4, 4 per batch
    assert (
      pictures.class_sampler(pictures.LAYOUTS["long_tailed"]).batches_per_epoch == 25
    )  # the largest class has 25 groups, one per batch

  @pytest.mark.parametrize("seed", [0, 1, 2**32])
  def test_a_batch_depends_on_seed_and_step_only(self, seed):
    # Called in any order, on a sampler that has seen other steps or on a new one.
    plan_of = pictures.class_sampler(pictures.LAYOUTS["ragged"], seed=seed)
    for step in np.random.default_rng(seed).permutation(4 * plan_of.batches_per_epoch):
      got, want = (
        plan_of(int(step)),
        pictures.class_sampler(pictures.LAYOUTS["ragged"], seed=seed)(int(step)),
      )
      np.testing.assert_array_equal(got.positions, want.positions)
      np.testing.assert_array_equal(got.where, want.where)

  def test_seeds_and_epochs_differ(self):
    plan_of = pictures.class_sampler(pictures.LAYOUTS["ragged"])
    first, second = (
      np.stack([plan.positions for plan in _epoch(plan_of, epoch)]) for epoch in (0, 1)
    )
    other = np.stack(
      [
        plan.positions
        for plan in _epoch(pictures.class_sampler(pictures.LAYOUTS["ragged"], seed=1))
      ]
    )
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    labels = pictures.labels(pictures.LAYOUTS["ragged"])

    def meetings(batches):
      return [frozenset(labels[batch].tolist()) for batch in batches]

    # Not only the images: the classes that share a batch are drawn again too.
    assert set(meetings(first)) != set(meetings(second))

  def test_f32_neighbours_overlap_as_random_batches_do(self):
    # 200 classes of 12 images, 20 classes per batch: two independent batches share 20 * 20 / 200 =
    # 2 classes. A class that is in 3 of the 30 batches of an epoch is in two given ones with
    # probability 3 / 30 * 2 / 29, which gives 1.38.
    labels = np.repeat(np.arange(200), 12)
    plan_of = sampler.ClassSampler(labels, batch_size=80, per_class=4, seed=0)
    classes = [
      set(labels[plan_of(step).positions]) for step in range(3 * plan_of.batches_per_epoch)
    ]
    overlap = [len(a & b) for a, b in itertools.pairwise(classes)]
    assert 1.1 < np.mean(overlap) < 1.7
    # Across the boundary of two epochs too.
    seams = [overlap[epoch * plan_of.batches_per_epoch - 1] for epoch in (1, 2)]
    assert max(seams) <= 8

  def test_all_classes_are_seen_about_equally_often(self):
    labels = np.repeat(np.arange(50), 12)
    plan_of = sampler.ClassSampler(labels, batch_size=40, per_class=4, seed=0)
    visits = collections.Counter()
    for step in range(4 * plan_of.batches_per_epoch):
      visits.update(set(labels[plan_of(step).positions].tolist()))
    assert set(visits.values()) == {12}  # 3 groups per epoch, 4 epochs

  @pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
      ([8] * 10, {"per_class": 1}, "per_class"),
      ([8] * 10, {"batch_size": 18}, "multiple of per_class"),
      ([8] * 10, {"batch_size": 4}, "at least 2 classes"),
      ([8] * 3, {}, "the training split has 3: set train.batch_size=12 or less"),
      ([3] * 9, {"small_classes": "drop"}, "the training split has 0: more classes"),
      ([8] * 10, {"small_classes": "ignore"}, "mask"),
    ],
  )
  def test_errors(self, layout, settings, message):
    with pytest.raises(ValueError, match=message):
      pictures.class_sampler(layout, **settings)


def test_an_epoch_of_many_classes_is_planned_in_linear_time():
  # 0.3 s on two cores; 18 s when each class sorted all batches.
  labels = np.repeat(np.arange(100_000), 5)
  began = time.process_time()
  plan_of = sampler.ClassSampler(labels, batch_size=256, per_class=4, seed=0)
  assert len(set(labels[plan_of(0).positions].tolist())) == 64
  assert time.process_time() - began < 6
