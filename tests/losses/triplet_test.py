"""Tests triplet_loss beyond the questions of losses_test.py.

A plain loop gives the value for any masks and labels.
"""

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import losses

_value_and_grad = jax.jit(jax.value_and_grad(losses.triplet_loss))


def _embeddings(seed, count, dim=4):
  vectors = np.random.default_rng(seed).standard_normal((count, dim))
  return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _reference(embeddings, labels, margin, where=None):
  """Returns the mean over valid anchors of the sum over their triplets, one triplet at a time."""
  where = np.ones(len(labels), bool) if where is None else where
  scores = np.float64(embeddings) @ np.float64(embeddings).T
  valid = np.flatnonzero(where)
  total = 0.0
  for a in valid:
    for p in valid:
      for n in valid:
        if p != a and labels[p] == labels[a] and labels[n] != labels[a]:
          total += max(scores[a, n] - scores[a, p] + margin, 0.0)
  return total / max(len(valid), 1)


class TripletLossTest(chex.TestCase):
  @chex.all_variants(with_pmap=False)
  @parameterized.parameters(0.0, 0.1, 0.7)
  def test_unsorted_labels_and_unequal_classes(self, margin):
    labels = np.array([7, 2, 7, -5, 2, 7, 90])  # 7 three times, 2 twice, two alone
    embeddings = _embeddings(0, 7)
    got = self.variant(losses.triplet_loss)(embeddings, labels, margin=margin)
    np.testing.assert_allclose(got, _reference(embeddings, labels, margin), rtol=1e-5)

  def test_default_margin(self):
    labels = np.array([0, 0, 1, 1])
    np.testing.assert_allclose(
      losses.triplet_loss(_embeddings(1, 4), labels),
      _reference(_embeddings(1, 4), labels, 0.1),
      rtol=1e-5,
    )

  @hypothesis.given(
    st.permutations(range(7)), st.lists(st.booleans(), min_size=7, max_size=7), st.integers(0, 99)
  )
  def test_order_and_masked_images_change_nothing(self, order, where, seed):
    order, where = np.array(order), np.array(where)
    labels, embeddings = np.random.default_rng(seed).integers(0, 3, 7), _embeddings(seed, 7)
    want, grad = _value_and_grad(embeddings, labels, where=where)
    np.testing.assert_allclose(
      want, _reference(embeddings, labels, 0.1, where), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_array_equal(grad[~where], 0)
    # The content of a masked slot has no effect.
    masked = np.where(where[:, None], embeddings, _embeddings(seed + 1, 7))
    got, _ = _value_and_grad(masked[order], labels[order], where=where[order])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

  @parameterized.named_parameters(
    ("no_positives", [1, 2, 3, 4], None),
    ("no_negatives", [1, 1, 1, 1], None),
    ("all_masked", [1, 1, 2, 2], [False] * 4),
    ("one_image_left", [1, 1, 2, 2], [True, False, False, False]),
  )
  def test_without_a_triplet_it_is_zero_without_gradient(self, labels, where):
    value, grad = _value_and_grad(
      _embeddings(0, 4), jnp.array(labels), where=None if where is None else jnp.array(where)
    )
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(grad, 0)

  def test_zero_and_equal_embeddings_have_finite_gradients(self):
    for embeddings in (jnp.zeros((4, 2)), jnp.ones((4, 2)) / np.sqrt(2)):
      value, grad = _value_and_grad(embeddings, jnp.array([0, 0, 1, 1]), margin=0.1)
      np.testing.assert_allclose(
        value, 0.2, rtol=1e-4
      )  # two triplets per anchor, each short of the margin
      chex.assert_tree_all_finite(grad)

  def test_bound_on_positives_that_no_class_exceeds_changes_nothing(self):
    labels, embeddings = np.array([0, 1, 0, 1, 0, 2]), _embeddings(3, 6)
    np.testing.assert_allclose(
      losses.triplet_loss(embeddings, labels, max_positives=2),
      losses.triplet_loss(embeddings, labels),
      rtol=1e-6,
    )

  def test_negative_margin_is_refused(self):
    with self.assertRaisesRegex(ValueError, "margin"):
      losses.triplet_loss(_embeddings(0, 4), np.array([0, 0, 1, 1]), margin=-0.1)
