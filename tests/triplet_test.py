"""triplet_loss: value by a plain loop, parity with the authors' code, masks, degenerate batches, devices."""

import functools
import json
import pathlib

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import mapping
import numpy as np

from soprc_jax import losses

_GOLDENS = pathlib.Path(__file__).parent / "goldens"
_NUM_CASES = 10
_value_and_grad = jax.jit(jax.value_and_grad(losses.triplet_loss))


@functools.cache
def _archive(name):
  with np.load(_GOLDENS / f"{name}.npz") as archive:
    return {key: archive[key] for key in archive.files}


def _case(index):
  prefix = f"case{index}/"
  arrays = {key[len(prefix) :]: array for key, array in _archive("triplet").items() if key.startswith(prefix)}
  arrays.setdefault("emb", _archive("batch_large")["emb"])
  return arrays


def _embeddings(seed, count, dim=4):
  vectors = np.random.default_rng(seed).standard_normal((count, dim))
  return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _reference(embeddings, labels, margin, where=None):
  """The mean over valid anchors of the sum over their triplets, one triplet at a time."""
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
      losses.triplet_loss(_embeddings(1, 4), labels), _reference(_embeddings(1, 4), labels, 0.1), rtol=1e-5
    )

  @hypothesis.given(st.permutations(range(7)), st.lists(st.booleans(), min_size=7, max_size=7), st.integers(0, 99))
  def test_order_and_masked_images_change_nothing(self, order, where, seed):
    order, where = np.array(order), np.array(where)
    labels, embeddings = np.random.default_rng(seed).integers(0, 3, 7), _embeddings(seed, 7)
    want, grad = _value_and_grad(embeddings, labels, where=where)
    np.testing.assert_allclose(want, _reference(embeddings, labels, 0.1, where), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(grad[~where], 0)
    # What stands in a masked slot plays no role.
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
    value, grad = _value_and_grad(_embeddings(0, 4), jnp.array(labels), where=None if where is None else jnp.array(where))
    self.assertEqual(value, 0)
    np.testing.assert_array_equal(grad, 0)

  def test_zero_and_equal_embeddings_have_finite_gradients(self):
    for embeddings in (jnp.zeros((4, 2)), jnp.ones((4, 2)) / np.sqrt(2)):
      value, grad = _value_and_grad(embeddings, jnp.array([0, 0, 1, 1]), margin=0.1)
      np.testing.assert_allclose(value, 0.2, rtol=1e-4)  # two triplets an anchor, each short of the margin
      chex.assert_tree_all_finite(grad)

  @parameterized.parameters(jnp.bfloat16, jnp.float16, jnp.float32)
  def test_half_precision_is_computed_in_float32(self, dtype):
    embeddings, labels = jnp.asarray(_embeddings(0, 6), dtype), np.array([0, 0, 1, 1, 2, 2])
    value = losses.triplet_loss(embeddings, labels)
    self.assertEqual(value.dtype, jnp.float32)
    np.testing.assert_allclose(value, _reference(np.float32(embeddings), labels, 0.1), rtol=1e-5)

  def test_bound_on_positives_that_no_class_exceeds_changes_nothing(self):
    labels, embeddings = np.array([0, 1, 0, 1, 0, 2]), _embeddings(3, 6)
    np.testing.assert_allclose(
      losses.triplet_loss(embeddings, labels, max_positives=2), losses.triplet_loss(embeddings, labels), rtol=1e-6
    )

  def test_negative_margin_is_refused(self):
    with self.assertRaisesRegex(ValueError, "margin"):
      losses.triplet_loss(_embeddings(0, 4), np.array([0, 0, 1, 1]), margin=-0.1)

  @parameterized.product(kind=("pmap", "shard_map"), masked=(False, True))
  def test_two_devices_equal_one_on_the_joined_batch(self, kind, masked):
    embeddings, labels = _embeddings(4, 8), np.array([3, 1, 0, 1, 3, 0, 2, 1])
    where = np.array([1, 1, 1, 1, 0, 1, 0, 0], bool) if masked else np.ones(8, bool)

    def local(embeddings, labels, where):
      def loss(embeddings):
        return losses.triplet_loss(embeddings, labels, where=where, axis_name=mapping.AXIS)

      return jax.value_and_grad(loss)(embeddings)

    values, grads = mapping.on_devices(local, kind)(*map(mapping.split, (embeddings, labels, where)))
    want, want_grad = _value_and_grad(embeddings, labels, where=where)
    np.testing.assert_allclose(values, [want, want], rtol=1e-5)
    # Each device holds the whole loss, so a gradient counts the copies: train_step takes the mean over devices.
    np.testing.assert_allclose(grads.reshape(8, -1) / mapping.NUM_DEVICES, want_grad, rtol=1e-4, atol=1e-6)


class AuthorsCodeTest(chex.TestCase):
  """goldens/triplet.npz."""

  def _compute(self, index, dtype):
    case = _case(index)
    margin = json.loads(str(case["info"]))["hparams"]["thres"]
    value, grad = _value_and_grad(jnp.asarray(case["emb"], dtype), case["labels"], margin=margin)
    return case, value, np.float64(grad)

  @parameterized.parameters(*range(_NUM_CASES))
  def test_float64(self, index):
    with jax.enable_x64(True):
      case, value, grad = self._compute(index, jnp.float64)
    self.assertEqual(value.dtype, jnp.float64)
    np.testing.assert_allclose(value, case["loss64"], rtol=1e-9, atol=1e-12)
    _assert_rows_close(grad, case, case["grad_stable"], 1e-7)

  @parameterized.parameters(*range(_NUM_CASES))
  def test_float32(self, index):
    case, value, grad = self._compute(index, jnp.float32)
    np.testing.assert_allclose(value, case["loss64"], rtol=1e-4, atol=1e-6)
    _assert_rows_close(grad, case, case["grad_stable_f32"], 1e-4)


def _assert_rows_close(grad, case, stable, tolerance):
  want = case["grad64"]
  np.testing.assert_allclose(grad[stable], want[stable], rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-12))
