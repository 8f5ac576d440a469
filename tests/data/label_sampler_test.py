"""Tests batches of P labels x K images, where an image has several labels."""

import numpy as np
import pytest

from soprc_jax.data import label_sampler, label_sets, sampler

_SETTINGS = {"batch_size": 24, "per_class": 4, "seed": 3}


def _images(count=300, *, labels=12, most=3, seed=0):
  """Returns the patterns of images, and the labels of each."""
  rng = np.random.default_rng(seed)
  numbers = dict[tuple[int, ...], int]()
  patterns = []
  for _ in range(count):
    one = rng.choice(labels, rng.integers(1, most + 1), replace=False)
    patterns.append(numbers.setdefault(tuple(sorted(one.tolist())), len(numbers)))
  drawn = {number: [f"{name:02d}" for name in one] for one, number in numbers.items()}
  return np.array(patterns), label_sets.LabelSets(drawn, label_sets.Rule(";"))


def _has(sets, patterns, position, label):
  return label in sets.labels_of(int(patterns[position]))


@pytest.mark.parametrize("policy", sampler.SMALL_CLASS_POLICIES)
def test_single_labels_give_the_batches_of_classes(policy):
  labels = 5 * np.random.default_rng(1).integers(20, size=150) + 2
  drawn = {int(label): [f"{label:03d}"] for label in np.unique(labels)}
  sets = label_sets.LabelSets(drawn, label_sets.Rule(";"))
  settings = {**_SETTINGS, "small_classes": policy}
  plain = sampler.ClassSampler(labels, **settings)
  several = label_sampler.LabelSampler(labels, label_sets=sets, **settings)
  assert several.batches_per_epoch == plain.batches_per_epoch
  for step in range(3 * plain.batches_per_epoch):
    np.testing.assert_array_equal(several(step).positions, plain(step).positions)
    np.testing.assert_array_equal(several(step).where, plain(step).where)


def test_blocks_share_a_label_and_no_image_is_twice():
  patterns, sets = _images()
  plan_of = label_sampler.LabelSampler(patterns, label_sets=sets, **_SETTINGS)
  for epoch in range(2):
    seen = set[int]()
    for step in range(plan_of.batches_per_epoch):
      plan = plan_of(epoch * plan_of.batches_per_epoch + step)
      assert plan.positions.shape == (24,)
      assert plan.where.all()  # every label has enough images
      assert len(set(plan.positions.tolist())) == 24
      chosen = set[str]()
      for block in plan.positions.reshape(6, 4):
        common = set.intersection(*(set(sets.labels_of(int(patterns[i]))) for i in block))
        assert common
        chosen |= common
      assert len(chosen) >= 6
      seen.update(plan.positions.tolist())
    assert seen == set(range(len(patterns)))


def test_a_batch_is_a_function_of_seed_and_step():
  patterns, sets = _images()
  made = [
    label_sampler.LabelSampler(patterns, label_sets=sets, **{**_SETTINGS, "seed": seed})
    for seed in (3, 3, 4)
  ]
  backwards = [made[1](step).positions for step in reversed(range(30))][::-1]
  for step, positions in enumerate(backwards):
    np.testing.assert_array_equal(made[0](step).positions, positions)
  assert any((made[0](step).positions != made[2](step).positions).any() for step in range(30))


@pytest.mark.parametrize("policy", ["mask", "repeat"])
def test_an_image_without_a_substitute(policy):
  """Checks labels that always occur together: a batch of both has no other image to take."""
  sets = label_sets.LabelSets({0: ["a", "b"], 1: ["c"]}, label_sets.Rule(";"))
  patterns = np.array([0, 0, 1, 1, 1])
  plan_of = label_sampler.LabelSampler(
    patterns, label_sets=sets, batch_size=6, per_class=2, seed=0, small_classes=policy
  )
  for step in range(6):
    plan = plan_of(step)
    valid = plan.positions[plan.where].tolist()
    assert {0, 1} <= set(valid)
    if policy == "mask":
      assert len(set(valid)) == len(valid) == 4
    else:
      assert plan.where.all()


def test_rare_labels():
  sets = label_sets.LabelSets({0: ["a"], 1: ["a", "rare"], 2: ["b"]}, label_sets.Rule(";"))
  patterns = np.array([0, 0, 0, 1, 2, 2, 2, 2])
  settings = {"label_sets": sets, "batch_size": 8, "per_class": 4, "seed": 0}
  assert label_sampler.LabelSampler(patterns, **settings).num_small == 1
  dropped = label_sampler.LabelSampler(patterns, **settings, small_classes="drop")
  assert dropped.num_classes == 2
  seen = np.unique([dropped(step).positions for step in range(dropped.batches_per_epoch)])
  assert seen.tolist() == list(range(8))  # the image of the rare label has another one
  with pytest.raises(ValueError, match="needs 4 training labels, the training split has 3"):
    label_sampler.LabelSampler(patterns, **{**settings, "batch_size": 16})
