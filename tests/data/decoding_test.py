"""Tests image files of any kind (failures F29, F30).

They give the right pixels, or an error that names the file.
"""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageFile, ImageOps, PngImagePlugin
import pytest

from soprc_jax.data import decoding, transforms

_RAMP = np.linspace(0, 255, 48).astype(np.uint8)
# Three different channels without symmetry: left to right, top to bottom, constant.
_COLOUR = np.stack(
  [
    np.broadcast_to(_RAMP[None, :], (32, 48)),
    np.broadcast_to(_RAMP[:32, None], (32, 48)),
    np.full((32, 48), 90, np.uint8),
  ],
  -1,
)


def _encode(image, kind="PNG", **options):
  stream = io.BytesIO()
  image.save(stream, kind, **options)
  return decoding.Encoded(stream.getvalue(), f"folder/image.{kind.lower()}")


def _pixels(encoded):
  return decoding.pixels(decoding.as_picture(encoded))


def test_rgb_is_what_was_stored():
  np.testing.assert_array_equal(_pixels(_encode(Image.fromarray(_COLOUR))), _COLOUR)


def test_f30_grey_becomes_three_equal_channels():
  grey = _COLOUR[:, :, 0]
  np.testing.assert_array_equal(
    _pixels(_encode(Image.fromarray(grey))), np.repeat(grey[:, :, None], 3, 2)
  )


def test_one_bit():
  bits = Image.fromarray(_COLOUR[:, :, 0] > 127)
  want = np.where(_COLOUR[:, :, :1] > 127, 255, 0).repeat(3, 2)
  np.testing.assert_array_equal(_pixels(_encode(bits)), want)


def test_f30_palette():
  image = Image.fromarray(_COLOUR).quantize(64)
  np.testing.assert_array_equal(_pixels(_encode(image)), np.asarray(image.convert("RGB")))


def test_f30_palette_with_transparency_is_on_white():
  image = Image.new("P", (4, 4), 0)
  image.putpalette([10, 20, 30, 200, 100, 50])
  image.putpixel((1, 0), 1)
  got = _pixels(_encode(image, transparency=0))
  np.testing.assert_array_equal(got[0, 0], [255, 255, 255])
  np.testing.assert_array_equal(got[0, 1], [200, 100, 50])


def test_f30_alpha_is_on_white():
  image = Image.new("RGBA", (3, 1), (100, 0, 50, 255))
  image.putpixel((1, 0), (1, 2, 3, 0))  # an arbitrary color under full transparency
  image.putpixel((2, 0), (0, 0, 0, 128))
  np.testing.assert_array_equal(
    _pixels(_encode(image))[0], [[100, 0, 50], [255, 255, 255], [127, 127, 127]]
  )


def test_f30_grey_with_alpha():
  image = Image.new("LA", (2, 1), (40, 255))
  image.putpixel((1, 0), (40, 0))
  np.testing.assert_array_equal(_pixels(_encode(image))[0], [[40] * 3, [255] * 3])


def test_f30_cmyk_is_not_inverted():
  image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # red
  assert np.abs(_pixels(_encode(image, "JPEG"))[8, 8].astype(int) - [255, 0, 0]).max() <= 8


def _png(depth, colour_type, rows, *more):
  """Writes a PNG by its chunks, for variants that Pillow cannot write. The arguments are bits per
  channel, color type, ``[H, W, channels]`` and chunks before the pixels.
  """

  def chunk(kind, content):
    return (
      struct.pack(">I", len(content))
      + kind
      + content
      + struct.pack(">I", zlib.crc32(kind + content))
    )

  header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], depth, colour_type, 0, 0, 0)
  lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
  parts = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
  return decoding.Encoded(
    b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts), "folder/image.png"
  )


def test_f30_sixteen_bit_colour_keeps_its_high_byte():
  values = (np.arange(6 * 5 * 3) * 700).reshape(6, 5, 3)
  np.testing.assert_array_equal(_pixels(_png(16, 2, values)), values // 256)


def test_f30_sixteen_bit_grey_with_a_transparent_value_is_not_clipped():
  values = (np.arange(6 * 5) * 2000).reshape(6, 5, 1)
  want = np.where(values == 4000, 255, values // 256).repeat(3, 2)
  np.testing.assert_array_equal(
    _pixels(_png(16, 0, values, (b"tRNS", struct.pack(">H", 4000)))), want
  )


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_f30_eight_bit_values_in_sixteen_bits_are_refused_and_not_black(dtype):
  encoded = _encode(Image.fromarray(_COLOUR[:, :, 0].astype(dtype)), "TIFF")
  with pytest.raises(
    decoding.BrokenImageError,
    match=r"folder/image\.tiff: 16-bit pixels of at most 255: .* convert the file",
  ):
    _pixels(encoded)
  black = _pixels(_encode(Image.fromarray(np.zeros((4, 4), dtype)), "TIFF"))
  np.testing.assert_array_equal(black, np.zeros((4, 4, 3), np.uint8))


@pytest.mark.parametrize(
  "array",
  [_COLOUR / 255, _COLOUR.astype(np.int64), _COLOUR[:, :, 0], _COLOUR[:, :, :1], _COLOUR[None]],
)
def test_f30_pixels_in_memory_of_another_range_or_shape_are_refused(array):
  with pytest.raises(ValueError, match=r"pixels must be \[H, W, 3\] uint8, 0 to 255, RGB; got"):
    transforms.centre_crop(array, 32)


def test_f30_sixteen_bit_grey_keeps_its_high_byte():
  values = (
    (np.arange(32 * 48) * 40).reshape(32, 48).astype(np.uint16)
  )  # up to 61,400: clipping at 255 would be white
  got = _pixels(_encode(Image.fromarray(values)))
  np.testing.assert_array_equal(got, np.repeat((values // 256).astype(np.uint8)[:, :, None], 3, 2))


def test_f30_float_pixels_are_refused():
  encoded = _encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
  with pytest.raises(
    decoding.BrokenImageError,
    match=r"folder/image\.tiff: floating-point pixels .* convert the file to 8 bit",
  ):
    _pixels(encoded)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_f30_exif_orientation_is_undone(orientation, kind):
  upright = Image.fromarray(np.repeat(np.repeat(_COLOUR, 4, 0), 4, 1))
  inverse = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
  }
  exif = Image.Exif()
  exif[0x0112] = orientation
  stored = upright.transpose(inverse[orientation]) if orientation > 1 else upright
  picture = decoding.as_picture(
    _encode(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
  )
  assert picture.size == (128, 192)
  # A part of it, also at a reduced scale.
  box = (32, 16, 160, 112)
  for size in ((96, 128), (24, 32)):
    want = np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR, box=box)).astype(int)
    assert np.abs(picture.region(box, size).astype(int) - want).max() <= (
      0 if kind == "PNG" else 12
    )


_ORIENTED = Image.fromarray(np.repeat(np.repeat(_COLOUR, 4, 0), 4, 1))
_XMP = (
  '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
  'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
  '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
  'tiff:Orientation="{}"/></rdf:RDF></x:xmpmeta>'
)


def _oriented(kind, orientation, *, in_xmp=False, **options):
  """Returns a file without symmetry whose EXIF or XMP tag gives its orientation."""
  if in_xmp:
    xmp = _XMP.format(orientation).encode()
    if kind == "PNG":
      options["pnginfo"] = PngImagePlugin.PngInfo()
      options["pnginfo"].add_itxt("XML:com.adobe.xmp", xmp.decode())
    elif kind == "TIFF":
      options["tiffinfo"] = {700: xmp}
    else:
      options["xmp"] = xmp
  else:
    options["exif"] = Image.Exif()
    options["exif"][0x0112] = orientation
  image = _ORIENTED.convert("1") if options.get("compression") == "group4" else _ORIENTED
  return _encode(image, kind, **options)


def _check_upright(encoded):
  """Checks the whole image, parts of it and reduced parts against Pillow's own upright image."""
  with Image.open(io.BytesIO(encoded.data)) as opened:
    upright = ImageOps.exif_transpose(opened).convert("RGB")
  is_jpeg = encoded.data.startswith(b"\xff\xd8")
  picture = decoding.as_picture(encoded)
  assert picture.size == upright.size[::-1]
  width, height = upright.size
  boxes = [(0, 0, width, height), (16, 8, width - 24, height // 2), (0.5, 3.25, width / 3, height)]
  for box in boxes:
    for size in ((height, width), (24, 20)):  # the second region opens the file again
      want = np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR, box=box)).astype(int)
      reduced = is_jpeg and size == (24, 20)  # decoded at a fraction of its size
      assert np.abs(picture.region(box, size).astype(int) - want).max() <= (20 if reduced else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
  ("kind", "options"),
  [
    *(
      ("TIFF", {"compression": name})
      for name in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4")
    ),
    ("TIFF", {"big_tiff": True}),
    *((kind, {}) for kind in ("PNG", "WEBP", "JPEG", "MPO")),
    ("JPEG", {"progressive": True}),
    ("PNG", {"interlace": 1}),
  ],
)
def test_f39_the_orientation_is_applied_once_in_every_format(kind, options, orientation):
  _check_upright(_oriented(kind, orientation, **options))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP", "JPEG"])
def test_f39_an_orientation_that_is_none_changes_nothing(kind, orientation):
  _check_upright(_oriented(kind, orientation))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP", "JPEG"])
def test_f39_an_orientation_in_xmp_is_applied_once(kind, orientation):
  _check_upright(_oriented(kind, orientation, in_xmp=True))


def test_f39_an_orientation_behind_the_pixels_of_a_png_is_applied():
  encoded = _oriented("PNG", 6, in_xmp=True)
  chunk = encoded.data.index(b"iTXt") - 4
  length = 12 + int.from_bytes(encoded.data[chunk : chunk + 4], "big")
  moved, rest = (
    encoded.data[chunk : chunk + length],
    encoded.data[:chunk] + encoded.data[chunk + length :],
  )
  plain = Image.Exif()
  plain[0x010E] = "an EXIF block that says nothing of the orientation"
  with_exif = _encode(_ORIENTED, "PNG", exif=plain).data
  for data in (rest, with_exif):
    _check_upright(encoded._replace(data=data[:-12] + moved + data[-12:]))


def test_f39_animated_and_plain_formats_are_upright():
  frames = {
    "save_all": True,
    "append_images": [_ORIENTED.transpose(Image.Transpose.ROTATE_90).resize(_ORIENTED.size)],
  }
  exif = Image.Exif()
  exif[0x0112] = 6
  for kind, options in (
    ("TIFF", frames),
    ("WEBP", {**frames, "lossless": True}),
    ("PNG", frames),
    ("GIF", frames),
  ):
    _check_upright(_encode(_ORIENTED, kind, **options, **({} if kind == "GIF" else {"exif": exif})))
  for kind in ("BMP", "PPM"):
    _check_upright(_encode(_ORIENTED, kind))


@pytest.mark.parametrize(
  "box", [(0, 0, 1200, 800), (100.5, 50.25, 1100, 700), (600, 400, 700, 500)]
)
def test_reduced_jpeg_is_the_picture(box):
  y, x = np.mgrid[0:800, 0:1200]
  waves = np.stack([np.sin(x / 40), np.sin(y / 60), np.sin((x + y) / 90)], -1) * 100 + 128
  encoded = _encode(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=95)
  got = decoding.as_picture(encoded).region(box, (64, 64))
  whole = Image.open(io.BytesIO(encoded.data))
  want = np.asarray(whole.resize((64, 64), Image.Resampling.BILINEAR, box=box))
  assert np.abs(got.astype(int) - want.astype(int)).max() <= 6


def test_only_as_much_as_needed_is_decoded(monkeypatch):
  encoded = _encode(Image.new("RGB", (1600, 1200)), "JPEG")
  sizes = []
  real = decoding.to_rgb
  monkeypatch.setattr(decoding, "to_rgb", lambda image: sizes.append(image.size) or real(image))
  picture = decoding.as_picture(encoded)
  picture.region((0, 0, 1600, 1200), (150, 150))
  picture.region((0, 0, 400, 300), (150, 150))
  assert sizes == [(200, 150), (800, 600)]


@pytest.mark.parametrize("left", [0.5, 0.98])
@pytest.mark.parametrize(
  ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {})]
)
def test_f29_truncated_file_is_named(kind, options, left):
  pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  whole = _encode(Image.fromarray(pixels), kind, **options)
  size = int(left * len(whole.data))
  # The end is missing, or it is present and empty, as some downloads leave it.
  for data in (whole.data[:size], whole.data[:size] + bytes(len(whole.data) - size)):
    for side in (64, 8):  # decoded whole, or a JPEG at an eighth of its size
      with pytest.raises(decoding.BrokenImageError, match=rf"folder/image\.{kind.lower()}: "):
        transforms.centre_crop(whole._replace(data=data), side)


def test_f29_a_preview_inside_a_truncated_file_is_no_end_of_it():
  pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  preview = _encode(Image.fromarray(pixels[:8, :8]), "JPEG").data
  whole = _encode(
    Image.fromarray(pixels), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + preview
  )
  assert preview in whole.data
  assert _pixels(whole).shape == (64, 64, 3)
  half = len(whole.data) - 1000
  with pytest.raises(decoding.BrokenImageError, match="the end of the file is missing"):
    _pixels(whole._replace(data=whole.data[:half] + bytes(1000)))


def test_f29_a_library_that_lets_pillow_fill_up_broken_files_is_told(monkeypatch):
  monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
  whole = _encode(Image.fromarray(_COLOUR), "JPEG")
  with pytest.raises(
    ValueError, match=r"LOAD_TRUNCATED_IMAGES is on: .* data\.on_broken=skip"
  ) as error:
    _pixels(whole._replace(data=whole.data[: len(whole.data) // 2]))
  assert not isinstance(
    error.value, decoding.BrokenImageError
  )  # which a run would skip, image by image


@pytest.mark.parametrize(
  "data", [b"", b"<html>quota exceeded</html>", b"\x89PNG\r\n\x1a\n" + bytes(50)]
)
def test_what_is_no_image_is_named(data):
  with pytest.raises(decoding.BrokenImageError, match=r"folder/a\.jpg: "):
    _pixels(decoding.Encoded(data, "folder/a.jpg"))


def test_huge_image_is_refused_before_it_is_decoded(monkeypatch):
  encoded = _encode(Image.fromarray(_COLOUR))
  monkeypatch.setattr(decoding, "MAX_PIXELS", 1000)
  monkeypatch.setattr(
    ImageFile.ImageFile, "load", None
  )  # Pillow decodes a PNG to find its orientation
  with pytest.raises(
    decoding.BrokenImageError,
    match=r"folder/image\.png: 48 x 32 pixels are more than 1,000: resize",
  ):
    decoding.as_picture(encoded)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_header_that_claims_a_huge_image_is_refused():
  encoded = _encode(Image.new("1", (8, 8)))
  header = bytearray(encoded.data)
  header[16:24] = (60_000).to_bytes(4, "big") * 2
  with pytest.raises(decoding.BrokenImageError, match=r"folder/image\.png"):
    decoding.as_picture(encoded._replace(data=bytes(header)))


def test_pixels_in_memory_are_taken_as_they_are():
  picture = decoding.as_picture(_COLOUR)
  assert picture.size == (32, 48)
  assert decoding.pixels(picture) is _COLOUR


def test_centre_crop_keeps_the_aspect():
  # A white square in the middle of a wide image stays a square.
  wide = np.zeros((40, 100, 3), np.uint8)
  wide[10:30, 40:60] = 255
  got = transforms.centre_crop(wide, 20)
  want = np.zeros((20, 20, 3), np.uint8)
  want[5:15, 5:15] = 255
  np.testing.assert_array_equal(got > 127, want > 127)  # edges are antialiased
  # With a margin: the shorter side to 40, the middle 20.
  np.testing.assert_array_equal(
    transforms.centre_crop(wide, 20, resize_to=40), np.full((20, 20, 3), 255, np.uint8)
  )
  with pytest.raises(ValueError, match="must be at least the size of the crop, 20 pixels; got 10"):
    transforms.centre_crop(wide, 20, resize_to=10)


def test_random_crop_stays_inside_and_moves():
  ramp = np.broadcast_to(np.arange(100, dtype=np.uint8)[None, :, None], (50, 100, 3)).copy()
  augment = transforms.make_augmentation("crop", 20, resize_to=25)
  starts = []
  for seed in range(200):
    row = augment(ramp, np.random.default_rng(seed))[0, :, 0].astype(int)
    starts.append(min(row[0], row[-1]))
    assert (
      abs(abs(row[-1] - row[0]) - 38) <= 2
    )  # 20 pixels of a side of 25 are 40 of 50, at any position
  assert min(starts) < 10
  assert max(starts) > 50


class TestKept:
  def test_a_file_is_decoded_once_with_the_same_pixels(self, monkeypatch):
    encoded, kept = _encode(Image.fromarray(_COLOUR)), decoding.Kept()
    crops = [
      transforms.centre_crop(image, 24) for image in (encoded, kept(3, encoded), kept(3, encoded))
    ]
    np.testing.assert_array_equal(crops[1], crops[0])
    np.testing.assert_array_equal(crops[2], crops[0])
    monkeypatch.setattr(decoding, "pixels", None)
    np.testing.assert_array_equal(kept(3, encoded), _COLOUR)

  def test_a_jpeg_is_not_kept(self):
    encoded = _encode(Image.fromarray(_COLOUR), "JPEG")
    assert decoding.Kept()(0, encoded) is encoded

  def test_no_more_than_the_limit_is_kept(self):
    encoded, kept = _encode(Image.fromarray(_COLOUR)), decoding.Kept(limit=_COLOUR.nbytes)
    assert isinstance(kept(0, encoded), np.ndarray)
    assert kept(1, encoded) is encoded
    assert isinstance(kept(0, encoded), np.ndarray)

  def test_pixels_in_memory_stay_as_they_are(self):
    assert decoding.Kept()(0, _COLOUR) is _COLOUR

  def test_f29_a_broken_file_is_named(self):
    with pytest.raises(decoding.BrokenImageError, match=r"folder/bad\.png"):
      decoding.Kept()(0, decoding.Encoded(b"no image", "folder/bad.png"))
