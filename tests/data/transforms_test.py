"""Tests image transforms: shapes, and randomness by a generator."""

import numpy as np
import pytest

from soprc_jax.data import transforms


class TestImages:
  picture = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
  wide = np.random.default_rng(0).integers(0, 256, (15, 40, 3), np.uint8)

  def test_resize_to_the_same_size_is_the_identity(self):
    np.testing.assert_array_equal(transforms.centre_crop(self.picture, 20), self.picture)

  def test_resize_averages(self):
    board = np.indices((32, 32)).sum(0) % 2 * 255
    board = np.repeat(board[:, :, None], 3, 2).astype(np.uint8)
    small = transforms.centre_crop(board, 8)
    assert small.shape == (8, 8, 3)
    assert np.abs(small.astype(int) - 128).max() < 16  # antialiased: gray, not black or white

  @pytest.mark.parametrize("name", transforms.AUGMENTATIONS)
  @pytest.mark.parametrize("source", ["picture", "wide"])
  @pytest.mark.parametrize("size", [12, 20])
  def test_shape_and_type(self, name, source, size):
    augment = transforms.make_augmentation(name, size, resize_to=24)
    for seed in range(10):
      image = augment(getattr(self, source), np.random.default_rng(seed))
      assert image.shape == (size, size, 3)
      assert image.dtype == np.uint8

  @pytest.mark.parametrize("name", ["affine", "resized_crop"])
  def test_randomness_is_the_generators(self, name):
    augment = transforms.make_augmentation(name, 16)
    one, same, other = (augment(self.picture, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)

  def test_the_input_is_left_alone(self):
    before = self.picture.copy()
    for name in transforms.AUGMENTATIONS:
      transforms.make_augmentation(name, 20)(self.picture, np.random.default_rng(0))
    np.testing.assert_array_equal(self.picture, before)

  def test_affine_moves_a_little_and_never_flips(self):
    # A blob in the upper left corner stays in the upper left half.
    blob = np.zeros((32, 32, 3), np.uint8)
    blob[8:12, 8:12] = 255
    augment = transforms.make_augmentation("affine", 32)
    centres = []
    for seed in range(200):
      ink = augment(blob, np.random.default_rng(seed))[:, :, 0].astype(float)
      centres.append([(ink.sum(1 - axis) * np.arange(32)).sum() / ink.sum() for axis in (0, 1)])
    centres = np.array(centres)
    assert (centres < 16).all()
    assert (centres > 3).all()
    np.testing.assert_allclose(
      centres.mean(0), 9.5, atol=0.7
    )  # no drift: the mean is the position of the blob
    assert (centres.std(0) > 0.5).all()

  def test_affine_antialiases_large_images(self):
    board = np.indices((80, 120)).sum(0) % 2 * 255
    board = np.repeat(board[:, :, None], 3, 2).astype(np.uint8)
    augment = transforms.make_augmentation("affine", 10)
    for seed in range(20):
      image = augment(board, np.random.default_rng(seed)).astype(int)
      assert np.abs(image - 128).max() < 16  # gray, not black or white

  @pytest.mark.parametrize("shape", [(20, 60), (60, 20), (100, 300), (300, 100)])
  def test_affine_takes_the_middle_square(self, shape):
    # Thirds of red, green and blue along the longer side.
    axis = int(shape[1] > shape[0])
    thirds = np.eye(3, dtype=np.uint8) * 200
    bands = np.repeat(np.repeat(thirds, max(shape) // 3, 0)[:, None], min(shape), 1)
    augment = transforms.make_augmentation("affine", 20)
    images = [
      augment(np.ascontiguousarray(bands.swapaxes(0, 1) if axis else bands), rng)
      for rng in map(np.random.default_rng, range(100))
    ]
    means = np.mean(images, axis=(0, 1, 2))
    assert means[1] > 140  # mostly the middle, and as much of one side as of the other
    np.testing.assert_allclose(means[0], means[2], atol=6)

  def test_affine_fills_with_the_color_of_the_border(self):
    color = np.array([200, 100, 50], np.uint8)
    image = np.broadcast_to(color, (30, 40, 3)).copy()
    image[:5, 10:20] = 0  # something that touches the border
    augment = transforms.make_augmentation("affine", 30)
    for seed in range(50):
      corners = augment(image, np.random.default_rng(seed))[[0, -1, -1], [-1, 0, -1]]
      np.testing.assert_array_equal(corners, [color] * 3)

  def test_crop_flips_half_of_the_images(self):
    ramp = np.repeat(np.repeat(np.arange(0, 240, 8)[None, :, None], 30, 0), 3, 2).astype(np.uint8)
    augment = transforms.make_augmentation("resized_crop", 16)
    slopes = [
      np.diff(augment(ramp, np.random.default_rng(seed))[0, [0, -1], 0].astype(int))[0]
      for seed in range(200)
    ]
    assert 70 <= sum(slope < 0 for slope in slopes) <= 130

  def test_unknown_augmentation_is_refused(self):
    with pytest.raises(ValueError, match="resized_crop"):
      transforms.make_augmentation("mixup", 16)
