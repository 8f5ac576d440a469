"""Tests the positions of patches; vit_weights_test.py compares whole models with torch."""

import numpy as np
import pytest

from soprc_jax.models import vit_positions

_SIZES = [(4, 6), (6, 4), (16, 37), (37, 16), (5, 1), (1, 5)]


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("size", "new_size"), _SIZES)
def test_resizing_is_that_of_torch(size, new_size, antialias):
  torch = pytest.importorskip("torch")
  points = np.float32(np.random.default_rng(0).normal(size=(size, size)))
  want = torch.nn.functional.interpolate(
    torch.from_numpy(points)[None, None],
    size=(new_size, new_size),
    mode="bicubic",
    align_corners=False,
    antialias=antialias,
  )
  matrix = vit_positions.resizing(size, new_size, antialias=antialias)
  np.testing.assert_allclose(matrix @ points @ matrix.T, want[0, 0].numpy(), atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("size", "new_size"), _SIZES)
def test_constants_stay_and_the_same_size_changes_nothing(size, new_size, antialias):
  matrix = vit_positions.resizing(size, new_size, antialias=antialias)
  assert matrix.dtype == np.float32
  np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-6)
  same = vit_positions.resizing(size, size, antialias=antialias)
  np.testing.assert_array_equal(same, np.eye(size))


def test_products_of_turned_vectors_depend_on_the_difference_of_places():
  """Checks the property of rotary embeddings, with places from -1 to 1."""
  cos, sin = (one.reshape(3, 5, 8) for one in vit_positions.rotations((3, 5), 8, 100.0))
  np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
  vectors = np.random.default_rng(0).normal(size=(2, 8))

  def turned(vector, row, column):
    other = np.concatenate([-vector[4:], vector[:4]])
    return vector * cos[row, column] + other * sin[row, column]

  products = [
    turned(vectors[0], row, column) @ turned(vectors[1], row + 1, column + 2)
    for row in range(2)
    for column in range(3)
  ]
  np.testing.assert_allclose(products, products[0], rtol=1e-5)
  assert abs(turned(vectors[0], 0, 0) @ turned(vectors[1], 0, 1) - products[0]) > 1e-3
