"""Tests image transforms: shapes, and randomness by a generator."""

import numpy as np
from PIL import Image, ImageEnhance
import pytest

from soprc_jax.data import transforms

_RANDOM = ("affine", "resized_crop", "crop")


def _settings(**values):
  """Returns settings with nothing random but what is given."""
  still = transforms.Settings(
    flip=False, min_crop_area=1.0, max_rotation=0.0, max_shift=0.0, max_scale=0.0, max_shear=0.0
  )
  return still._replace(**values)


def _augmented(name, image, size, *, seeds=100, resize_to=256, **values):
  """Returns an image as augmented by the settings with each of some seeds."""
  augment = transforms.make_augmentation(
    name, size, resize_to=resize_to, settings=_settings(**values)
  )
  return [augment(image, np.random.default_rng(seed)) for seed in range(seeds)]


class TestImages:
  picture = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
  wide = np.random.default_rng(0).integers(0, 256, (15, 40, 3), np.uint8)

  def test_resize_to_the_same_size_is_the_identity(self):
    np.testing.assert_array_equal(transforms.centre_crop(self.picture, 20), self.picture)

  def test_resize_is_that_of_pillow(self):
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    for name in ("bilinear", "bicubic"):
      want = Image.fromarray(image).resize((24, 24), Image.Resampling[name.upper()])
      got = transforms.centre_crop(image, 24, interpolation=name)
      np.testing.assert_array_equal(got, np.asarray(want))

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
    settings = transforms.Settings(color_jitter=0.3)
    augment = transforms.make_augmentation(name, size, resize_to=24, settings=settings)
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
    settings = transforms.Settings(color_jitter=0.3)
    for name in transforms.AUGMENTATIONS:
      transforms.make_augmentation(name, 20, settings=settings)(
        self.picture, np.random.default_rng(0)
      )
    np.testing.assert_array_equal(self.picture, before)

  def test_affine_moves_a_little(self):
    # A blob in the upper left corner stays in the upper left half.
    blob = np.zeros((32, 32, 3), np.uint8)
    blob[8:12, 8:12] = 255
    augment = transforms.make_augmentation("affine", 32, settings=transforms.Settings(flip=False))
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
    augment = transforms.make_augmentation("affine", 30, settings=transforms.Settings(flip=False))
    for seed in range(50):
      corners = augment(image, np.random.default_rng(seed))[[0, -1, -1], [-1, 0, -1]]
      np.testing.assert_array_equal(corners, [color] * 3)

  @pytest.mark.parametrize("name", _RANDOM)
  @pytest.mark.parametrize("flip", [True, False])
  def test_half_of_the_images_are_flipped_or_none(self, name, flip):
    ramp = np.repeat(np.repeat(np.arange(0, 240, 8)[None, :, None], 30, 0), 3, 2).astype(np.uint8)
    settings = transforms.Settings(flip=flip)
    augment = transforms.make_augmentation(name, 16, settings=settings)
    rows = [augment(ramp, np.random.default_rng(seed))[8, :, 0].astype(int) for seed in range(200)]
    flipped = sum(row[-1] < row[0] for row in rows)
    assert 70 <= flipped <= 130 if flip else flipped == 0

  @pytest.mark.parametrize("name", _RANDOM)
  def test_neither_flip_nor_colors_change_the_rest(self, name):
    for seed in range(20):
      kept, flipped, colored, both = (
        transforms.make_augmentation(name, 16, settings=settings)(
          self.wide, np.random.default_rng(seed)
        )
        for settings in (
          transforms.Settings(flip=False),
          transforms.Settings(),
          transforms.Settings(flip=False, color_jitter=0.5),
          transforms.Settings(color_jitter=0.5),
        )
      )
      is_flipped = not np.array_equal(kept, flipped)
      np.testing.assert_array_equal(flipped, kept[:, ::-1] if is_flipped else kept)
      np.testing.assert_allclose(both, colored[:, ::-1] if is_flipped else colored)
      assert not np.array_equal(kept, colored)

  @pytest.mark.parametrize("width", [15, 17, 18, 40])
  def test_a_crop_of_the_whole_area_is_the_whole_image(self, width):
    image = self.wide[:, :width]
    whole = transforms.make_augmentation("none", 16)(image, np.random.default_rng(0))
    for cropped in _augmented("resized_crop", image, 16):
      np.testing.assert_array_equal(cropped, whole)

  @pytest.mark.parametrize("min_area", [0.1, 0.2, 0.6])
  def test_area_of_a_crop(self, min_area):
    # Red is the position along the width, green along the height.
    places = np.stack([*np.indices((200, 200))[::-1], np.zeros((200, 200))], -1).astype(np.uint8)
    crops = _augmented("resized_crop", places, 20, seeds=300, min_crop_area=min_area)
    corners = np.array(crops)[:, [0, -1], [0, -1], :2].astype(float)
    shares = np.prod((corners[:, 1] - corners[:, 0]) * 20 / 19 / 200, axis=1)
    assert min_area - 0.02 <= shares.min() <= min_area + 0.05
    assert 0.8 <= shares.max() <= 1.02

  def test_affine_of_no_strength_is_the_center_crop(self):
    tall = np.ascontiguousarray(self.wide.swapaxes(0, 1))
    for image, size in ((self.picture, 12), (self.picture, 20), (self.wide, 15), (tall, 15)):
      want = transforms.centre_crop(image, size).astype(int)
      for got in _augmented("affine", image, size, seeds=3):
        np.testing.assert_allclose(got.astype(int), want, atol=1)

  @pytest.mark.parametrize(
    ("key", "limit"),
    [
      *(("max_rotation", limit) for limit in (10.0, 40.0)),
      *(("max_shift", limit) for limit in (0.05, 0.2)),
      *(("max_scale", limit) for limit in (0.1, 0.4)),
      *(("max_shear", limit) for limit in (0.1, 0.5)),
    ],
  )
  def test_affine_keeps_to_its_limits(self, key, limit):
    # A blob at (-12, -12) from the middle of 64 x 64 pixels.
    blob = np.zeros((64, 64, 3), np.uint8)
    blob[18:22, 18:22] = 255
    found = []
    for image in _augmented("affine", blob, 64, seeds=200, **{key: limit}):
      ink = image[:, :, 0].astype(float)
      y, x = ((ink.sum(1 - axis) * np.arange(-31.5, 32)).sum() / ink.sum() for axis in (0, 1))
      found.append(
        {
          "max_rotation": [np.degrees(np.arctan2(y, x)) + 135],
          "max_shift": [(x + 12) / 64, (y + 12) / 64],
          "max_scale": [x / -12 - 1, y / -12 - 1],
          "max_shear": [(x + 12) / 12],
        }[key]
      )
    found = np.array(found)
    assert np.abs(found).max() <= limit * 1.02 + 1e-3
    assert (found.max(0) >= 0.9 * limit).all()
    assert (found.min(0) <= -0.9 * limit).all()

  def test_colors_are_those_of_pil_in_the_documented_order_of_draws(self):
    image = np.random.default_rng(0).integers(70, 160, (24, 24, 3), np.uint8)
    for seed, got in enumerate(_augmented("crop", image, 24, resize_to=24, color_jitter=0.4)):
      rng = np.random.default_rng(seed)
      rng.random(2)  # the place of the crop
      rng.random()  # the flip
      want = Image.fromarray(image)
      factors = rng.uniform(0.6, 1.4, 3)
      for kind, factor in zip(
        (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness), factors[::-1]
      ):
        want = kind(want).enhance(factor)
      # PIL rounds down after each of the three.
      np.testing.assert_allclose(got.astype(int), np.asarray(want).astype(int), atol=4)

  def test_colors_end_at_white(self):
    # Only brightness changes one gray, and 255 is the brightest.
    gray = np.full((8, 8, 3), 200, np.uint8)
    for seed, got in enumerate(_augmented("crop", gray, 8, resize_to=8, color_jitter=1.0)):
      brightness = np.random.default_rng(seed).uniform(0, 2, 4)[3]  # after place and flip
      np.testing.assert_allclose(got.astype(int), min(200 * brightness, 255), atol=1)

  @pytest.mark.parametrize("key", transforms.HIGHEST)
  def test_settings_out_of_range(self, key):
    high = transforms.HIGHEST[key]
    transforms.make_augmentation("crop", 16, settings=_settings(**{key: high}))
    bad = [-0.1, high * 1.001, float("nan")] + [0.0] * (key == "min_crop_area")
    for value in bad:
      with pytest.raises(ValueError, match=f"{key} must be .* <= {high:g}, got {value}"):
        transforms.make_augmentation("crop", 16, settings=_settings(**{key: value}))

  def test_unknown_augmentation_is_refused(self):
    with pytest.raises(ValueError, match="resized_crop"):
      transforms.make_augmentation("mixup", 16)
