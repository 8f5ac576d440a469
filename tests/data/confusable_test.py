"""Tests of batches of confusable classes."""

import collections

import numpy as np
import pytest

from soprc_jax.data import confusable

_SIZES = {"batch_size": 32, "per_class": 4, "seed": 0, "group": 4, "pool": 6, "refresh": 5}


def _sampler(num_classes=30, size=4, **settings):
  labels = np.repeat(np.arange(num_classes) * 3 + 7, size)
  return confusable.ConfusableSampler(
    labels,
    **(_SIZES | settings),
  )


def _on_a_line(plan, step=0, num_steps=5):
  """Returns the sampler with the neighbours of a model that maps class c to the angle c degrees."""
  _, rows = plan.to_embed(step)
  angles = np.radians(rows)
  embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
  return plan.with_neighbours(plan.find(embeddings, rows, step=step, num_steps=num_steps))


def _classes(plan, step):
  """Returns the classes of a batch, in the order of its groups."""
  return plan(step).positions.reshape(-1, 4)[:, 0] // 4


def test_a_group_is_an_anchor_and_its_nearest_classes():
  plan = _on_a_line(_sampler())
  for step in range(5):
    groups = _classes(plan, step).reshape(2, 4)
    np.testing.assert_array_equal(groups[:, 0], plan.anchors(step))
    # The six nearest classes, or those that are left at the ends and next to the other anchor.
    distances = np.abs(groups - groups[:, :1])
    assert distances.max() <= 6
    assert len(np.unique(groups)) == 8


def test_every_class_is_an_anchor_once_an_epoch():
  plan = _sampler()
  assert plan.batches_per_epoch == 15
  for epoch in range(2):
    steps = range(epoch * 15, epoch * 15 + 15)
    seen = collections.Counter(int(row) for step in steps for row in plan.anchors(step))
    assert set(seen) == set(range(30))
    assert set(seen.values()) == {1}
  assert not np.array_equal(plan.anchors(0), plan.anchors(15))


def test_a_batch_has_distinct_classes_with_images_of_their_own():
  plan = _on_a_line(_sampler(size=6))
  found = plan(3)
  labels = np.repeat(np.arange(30), 6)[found.positions].reshape(8, 4)
  assert (labels == labels[:, :1]).all()
  assert len(np.unique(labels[:, 0])) == 8
  assert len(np.unique(found.positions)) == 32
  assert found.where.all()


def test_small_classes_are_masked():
  plan = _on_a_line(_sampler(size=3))
  found = plan(0)
  np.testing.assert_array_equal(found.where.reshape(8, 4).sum(axis=1), np.full(8, 3))


def test_a_batch_is_a_function_of_seed_and_step():
  one, other = _on_a_line(_sampler()), _on_a_line(_sampler())
  other(0)
  np.testing.assert_array_equal(one(3).positions, other(3).positions)
  assert not np.array_equal(one(3).positions, _on_a_line(_sampler(seed=1))(3).positions)
  assert not np.array_equal(one(3).positions, one(4).positions)


def test_groups_that_do_not_divide_the_batch():
  plan = _on_a_line(_sampler(group=3))
  chosen = _classes(plan, 0)
  assert len(np.unique(chosen)) == 8
  np.testing.assert_array_equal(chosen[[0, 3, 6]], plan.anchors(0))


def test_random_classes_fill_the_batch_where_neighbours_are_too_few():
  plan = _sampler(pool=3)
  near = np.zeros((5, 2, 3), np.int32)
  near[:] = plan.anchors(0)[0]  # all neighbours are in the batch already
  plan = plan.with_neighbours(confusable.Neighbours(0, near))
  assert len(np.unique(_classes(plan, 0))) == 8


def test_neighbours_survive_a_checkpoint():
  plan = _on_a_line(_sampler(), step=5)
  tree = plan.to_json()
  again = _sampler().restored(tree)
  np.testing.assert_array_equal(plan(7).positions, again(7).positions)
  assert _sampler().to_json() is None
  assert _sampler().restored(None).to_json() is None


@pytest.mark.parametrize("step", [4, 10])
def test_steps_without_neighbours_raise(step):
  plan = _on_a_line(_sampler(), step=5)
  with pytest.raises(ValueError, match=f"no neighbours for step {step} .known: steps 5 to 9"):
    plan(step)
  with pytest.raises(ValueError, match="known: none"):
    _sampler()(0)


@pytest.mark.parametrize("settings", [{"group": 1}, {"group": 8, "pool": 6}])
def test_bad_sizes_raise(settings):
  with pytest.raises(ValueError, match=r"confusable\.group must be >= 2 .* got"):
    _sampler(**settings)


def test_the_pool_is_at_most_all_other_classes():
  assert _on_a_line(_sampler(num_classes=9, pool=16))._near(0).shape == (2, 8)


@pytest.mark.parametrize(
  ("num_classes", "batch_size", "expected"), [(30, 32, 50), (1000, 64, 167), (2000, 256, 79)]
)
def test_a_refresh_embeds_at_most_a_fifth_of_the_images_trained_on(
  num_classes, batch_size, expected
):
  plan = _sampler(num_classes, batch_size=batch_size, refresh=None)
  assert plan.refresh == expected
  assert len(plan.to_embed(0)[0]) <= plan.refresh * batch_size / 5


def test_the_smallest_batch_is_refreshed_too():
  plan = _sampler(batch_size=4, per_class=2, group=2, refresh=None)
  assert plan.refresh == 60  # two images of 30 classes, one a step


def test_to_embed_draws_two_images_of_each_class():
  plan = _sampler(size=5)
  positions, rows = plan.to_embed(0)
  np.testing.assert_array_equal(rows, np.repeat(np.arange(30), 2))
  np.testing.assert_array_equal(positions // 5, rows)
  assert (positions[::2] != positions[1::2]).all()
  assert not np.array_equal(positions, plan.to_embed(5)[0])


def test_dropped_classes_are_neither_anchors_nor_neighbours():
  labels = np.repeat(np.arange(12), [2, *[4] * 11])
  plan = confusable.ConfusableSampler(
    labels, batch_size=32, per_class=4, seed=0, small_classes="drop", group=4, pool=6, refresh=5
  )
  assert plan.num_classes == 11
  plan = _on_a_line(plan)
  assert all(labels[plan(step).positions].min() > 0 for step in range(5))


def test_nearest_in_blocks_equals_a_full_sort():
  rng = np.random.default_rng(0)
  means = rng.normal(size=(50, 8)).astype(np.float32)
  means /= np.linalg.norm(means, axis=1, keepdims=True)
  scores = means @ means.T
  np.fill_diagonal(scores, -np.inf)
  rows = np.arange(3, 40)
  expected = np.argsort(-scores, axis=1, kind="stable")[rows, :7]
  np.testing.assert_array_equal(confusable.nearest(means, rows, 7, block=8), expected)


def test_missing_images_do_not_matter():
  plan = _sampler()
  _, rows = plan.to_embed(0)
  embeddings = np.random.default_rng(0).normal(size=(len(rows), 4)).astype(np.float32)
  found = plan.find(embeddings[5:], rows[5:], step=0, num_steps=5)  # two classes have none
  assert np.isfinite(found.classes).all()
  assert plan.with_neighbours(found)(0).positions.shape == (32,)
