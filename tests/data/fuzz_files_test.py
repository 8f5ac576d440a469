"""Tests external data files that are corrupt in every way.

A file is read right, or an error names it. Nothing else is raised.
"""

import io
import logging
import struct
import zlib

import hypothesis
from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest

from soprc_jax._internal import stored, strings
from soprc_jax.data import decoding, glyphs, image_folder, list_files, transforms
from soprc_jax.data import rendered as rendered_lib

# Content that breaks text readers: other encodings and line ends, NUL, quotes, digits outside
# ASCII, names too long for a file system.
TOKENS = (
  *(
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b"\r\n",
    b"\n",
    b'"',
    b",",
    b" ",
    b"\t",
    b"../",
    b"//",
    b"./",
    b"\\",
  ),
  *(
    b"-1",
    b"1.5",
    b"nan",
    b"1" * 5000,
    b"\xc2\xb2",
    b"\xd9\xa3",
    b"a" * 300,
    b"a/" * 3000,
    b"\xe2\x80\xa8",
    b"\x1c",
  ),
  b"c" * 140_000,
)


@st.composite
def damaged(draw, good):
  """Returns the bytes of a file with some cut off, changed or inserted, or in another encoding."""
  content = bytearray(good)
  for _ in range(draw(st.integers(1, 3))):
    at = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(["put", "put", "cut", "flip", "drop", "encode", "none"]))
    if kind == "put":
      content[at:at] = draw(st.sampled_from(TOKENS) | st.binary(max_size=6))
    elif kind == "cut":
      del content[at:]
    elif kind == "flip" and at < len(content):
      content[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "drop":
      del content[at : at + draw(st.integers(1, 30))]
    elif kind == "encode":
      content = bytearray(
        content.decode("latin-1").encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-16-le"])))
      )
  return bytes(content)


def _png(size=(3, 4)):
  stream = io.BytesIO()
  Image.new("RGB", size, "red").save(stream, "PNG")
  return stream.getvalue()


TRAIN, TEST = range(8), range(8, 16)
_HEADER = "image_id class_id super_class_id path\n"
# Name of the data set -> its lists.
LISTS = {
  "sop": {
    name: _HEADER + "".join(f"{i} {i // 2} 1 a/{i}.JPG\n" for i in rows)
    for name, rows in (("Ebay_train.txt", TRAIN), ("Ebay_test.txt", TEST))
  },
  "inaturalist": {
    f"Inat_dataset_splits/Inaturalist_{name}_set1.txt": "".join(
      f"train_val2018/Aves/{i // 2}/{i}.jpg\n" for i in rows
    )
    for name, rows in (("train", TRAIN), ("test", TEST))
  },
  "vehicle_id": {
    f"train_test_split/{name}.txt": "".join(f"{i:07d} {i // 2}\n" for i in rows)
    for name, rows in (
      ("train_list", TRAIN),
      ("test_list_800", TEST[:4]),
      ("test_list_1600", TEST[:6]),
      ("test_list_2400", TEST),
    )
  },
  "csv": {
    "split.csv": "path,label,split\n"
    + "".join(f"{i}.png,c{i // 2},{'train' if i in TRAIN else 'test'}\n" for i in range(16)),
    "plain.csv": "path,label\n" + "".join(f"{i}.png,c{i // 2}\n" for i in range(16)),
  },
}
IMAGES = {
  "sop": "a/{}.JPG",
  "inaturalist": "train_val2018/Aves/{2}/{0}.jpg",
  "vehicle_id": "image/{1}.jpg",
  "csv": "{}.png",
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
  """Writes the four data sets, each with 16 images."""
  root = tmp_path_factory.mktemp("lists")
  for name, texts in LISTS.items():
    for file, text in texts.items():
      (root / name / file).parent.mkdir(parents=True, exist_ok=True)
      (root / name / file).write_text(text)
    for i in range(16):
      image = root / name / IMAGES[name].format(i, f"{i:07d}", i // 2)
      image.parent.mkdir(parents=True, exist_ok=True)
      image.write_bytes(_png())
  return root


def _load(roots, name, file):
  return (
    list_files.load_csv(str(roots / name / file))
    if name == "csv"
    else list_files.load(name, str(roots / name))
  )


class TestLists:
  CASES = tuple((name, file) for name, texts in LISTS.items() for file in texts)

  @pytest.mark.parametrize(("name", "file"), CASES)
  def test_as_they_should_be(self, roots, name, file):
    _load(roots, name, file)

  @pytest.mark.parametrize(("name", "file"), CASES)
  @hypothesis.given(data=st.data())
  def test_damaged(self, roots, name, file, data):
    good = LISTS[name][file].encode()
    content = data.draw(damaged(good))
    told = ""
    (roots / name / file).write_bytes(content)
    try:
      _load(roots, name, file)
    except (ValueError, OSError) as error:
      told = str(error)
    finally:
      (roots / name / file).write_bytes(good)
    assert not told or file.split("/")[-1] in told or str(roots / name) in told
    assert len(told) < 3000

  @pytest.mark.parametrize("line", ["9" * 5000 + " 1", "1 " + "9" * 5000, "9" * 18 + " 1"])
  def test_numbers_of_thousands_of_digits(self, roots, line):
    file = roots / "vehicle_id" / "train_test_split" / "train_list.txt"
    good = file.read_text()
    file.write_text(good + line)
    with pytest.raises(
      ValueError, match=r"train_list.txt:9: expected two numbers 'image vehicle', got '"
    ) as raised:
      list_files.load("vehicle_id", str(roots / "vehicle_id"))
    file.write_text(good)
    assert len(str(raised.value)) < 600

  def test_a_name_too_long_for_the_file_system_is_a_missing_file(self, roots):
    file = roots / "csv" / "plain.csv"
    good = file.read_text()
    file.write_text(good + "a/" * 3000 + "b.png,c9\n")
    with pytest.raises(FileNotFoundError, match=r"plain.csv: there is no file a/a/a/a.*\.\.\. in "):
      list_files.load_csv(str(file))
    file.write_text(good)


@hypothesis.given(
  names=st.lists(
    st.text(
      st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=5
    )
  )
)
def test_image_folders_with_any_names(tmp_path_factory, names):
  root = tmp_path_factory.mktemp("folder")
  for i, name in enumerate(names):
    if name not in (".", ".."):
      (root / name).mkdir(exist_ok=True)
      (root / name / f"{name}{i}.png").write_bytes(_png())
  told = ""
  try:
    source = image_folder.load(str(root))
    wanted = {strings.class_name(name) for name in names if not name.startswith(".")}
    assert {source[i].class_name for i in range(len(source))} == wanted
  except (ValueError, OSError) as error:
    told = str(error)
  assert not told or str(root) in told


def _encoded(mode, kind, **options):
  """Returns a small encoded image of random pixels."""
  bands = len(Image.new(mode, (1, 1)).getbands())
  pixels = np.random.default_rng(0).integers(0, 256, (6, 5, bands), np.uint8)
  stream = io.BytesIO()
  Image.frombytes(mode, (5, 6), pixels.tobytes()).save(stream, kind, **options)
  return stream.getvalue()


_EXIF = Image.Exif()
_EXIF[0x0112] = 6
PICTURES = {
  "png": _encoded("RGB", "PNG"),
  "png_rgba": _encoded("RGBA", "PNG"),
  "png_exif": _encoded("RGB", "PNG", exif=_EXIF),
  "jpeg": _encoded("RGB", "JPEG", exif=_EXIF),
  "jpeg_cmyk": _encoded("CMYK", "JPEG"),
  "gif": _encoded("P", "GIF", save_all=True, append_images=[Image.new("P", (5, 6))]),
  "webp": _encoded("RGB", "WEBP", exif=_EXIF),
  "bmp": _encoded("RGB", "BMP"),
  "tiff": _encoded("CMYK", "TIFF"),
  "tiff_lzw": _encoded("RGB", "TIFF", compression="tiff_lzw"),
  "ppm": _encoded("RGB", "PPM"),
}


def _decode(content):
  """Returns the message for an unusable image, or an empty string for a usable one."""
  encoded = decoding.Encoded(content, "the name")
  try:
    cropped = transforms.centre_crop(encoded, 4)
  except decoding.BrokenImageError as error:
    return str(error)
  assert cropped.shape == (4, 4, 3)
  assert cropped.dtype == np.uint8
  return ""


class TestPictures:
  @pytest.mark.parametrize("name", PICTURES)
  def test_cut_at_every_length(self, name):
    good = PICTURES[name]
    assert not _decode(good)
    told = [_decode(good[:size]) for size in range(0, len(good), 1 + len(good) // 150)]
    assert all(not message or message.startswith("the name: ") for message in told)
    assert "" not in told[: len(told) // 2]

  @pytest.mark.parametrize("name", PICTURES)
  @hypothesis.given(data=st.data())
  def test_bits_flipped(self, name, data):
    content = bytearray(PICTURES[name])
    for at in data.draw(
      st.lists(st.integers(0, 60) | st.integers(0, len(content) - 1), min_size=1, max_size=4)
    ):
      content[at % len(content)] = data.draw(st.integers(0, 255))
    message = _decode(bytes(content))
    assert not message or message.startswith("the name: ")

  @pytest.mark.parametrize("side", [0, 1 << 16, (1 << 31) - 1])
  def test_sizes_that_only_the_header_claims(self, side):
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    good = PICTURES["png"]
    content = good[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + good[33:]
    assert _decode(content).startswith("the name: ")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """Yields a glyph cache of two images: the data set, and the path of its file."""
  folder = tmp_path_factory.mktemp("glyphs")
  small = rendered_lib.Rendered(
    np.arange(2 * 32 * 32, dtype=np.uint8).reshape(2, 32, 32),
    np.array([1, 2]),
    np.array(["a", "b"]),
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(glyphs, "render", lambda: small)
    patch.setattr(logging.getLogger(rendered_lib.__name__), "disabled", True)
    glyphs.load(folder)
    yield small, next(folder.glob("*.npz"))


class TestArrays:
  @hypothesis.given(data=st.data())
  def test_a_damaged_cache_never_gives_another_data_set(self, cache, data):
    small, path = cache
    good = path.read_bytes()
    content = bytearray(good)
    # For headers of the archive and of its arrays, numpy and zipfile fail in other ways than by a
    # checksum.
    for at in data.draw(
      st.lists(
        st.integers(0, 150) | st.integers(len(good) - 400, len(good) - 1), min_size=1, max_size=3
      )
    ):
      content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(content[: data.draw(st.just(len(good)) | st.integers(0, len(good)))]))
    found = glyphs.load(path.parent)
    assert found.digest() == small.digest()
    path.write_bytes(good)

  @pytest.mark.parametrize(
    ("at", "value", "message"),
    [(8, 99, "compression method is not supported"), (6, 1, "encrypted"), (None, 0, "is corrupt")],
  )
  def test_what_a_flipped_bit_can_claim(self, tmp_path, at, value, message):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(3))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    if at is None:
      del content[20:]
    else:
      content[at] = content[entry + at + 2] = value
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=rf"x.npz is corrupt(.|\n)*{message}|x.npz {message}"):
      stored.read_arrays(path, ["a"])

  def test_arrays_that_are_missing_or_pickled(self, tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(3), b=np.array([{}], object))
    assert stored.read_arrays(path, ["a"])["a"].tolist() == [0, 1, 2]
    with pytest.raises(
      ValueError, match=r"x.npz is corrupt \(it has no .*c is not a file in the archive"
    ):
      stored.read_arrays(path, ["a", "c"])
    with pytest.raises(ValueError, match=r"x.npz is corrupt \(Object arrays cannot be loaded"):
      stored.read_arrays(path, ["b"])
    with pytest.raises(FileNotFoundError):
      stored.read_arrays(tmp_path / "y.npz", ["a"])
