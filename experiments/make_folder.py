r"""Makes one of two image folders that recipes are chosen on, from Debian packages.

soprc make-folder icons --packages=UNPACKED --output=IMAGES
soprc make-folder characters --packages=UNPACKED --output=IMAGES

icons: a class is a name that at least three icon themes have, such as edit-copy. Its images are the
icons of these themes. Packages: paper-icon-theme obsidian-icon-theme oxygen-icon-theme
moka-icon-theme faenza-icon-theme elementary-xfce-icon-theme mate-icon-theme gnome-icon-theme
tango-icon-theme

characters: a class is one of 2,000 Han characters. Its images are 4 typefaces, slightly distorted,
in random colors. Packages: fonts-horai-umefont fonts-arphic-gbsn00lp fonts-cns11643-kai
fonts-cns11643-sung fonts-wqy-zenhei fonts-wqy-microhei fonts-hanazono fonts-kouzan-mouhitsu
fonts-aoyagi-soseki fonts-aoyagi-kouzan-t fonts-seto fonts-lxgw-wenkai fonts-motoya-l-cedar
fonts-klee fonts-konatu fonts-mplus fonts-noto-cjk fonts-arphic-ukai

These commands download and unpack packages of Debian 12 without installing them:

apt-get download PACKAGE ...
for file in *.deb; do dpkg-deb -x "$file" UNPACKED; done

IMAGES gets one subfolder a class, with PNG files of 64 x 64 pixels. What is missing or cannot be
read is named, skipped and counted. The last line has a digest of all names and pixels, to compare
with docs/datasets.md.
"""

from collections.abc import Mapping, Sequence
import hashlib
import logging
import math
from pathlib import Path
import re
import tempfile
from typing import NamedTuple

from absl import app
from absl import flags as absl_flags
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments import flags

# fmt: off
# Of equal icons of a name, that of the first theme is kept.
THEMES = (
  "Paper", "Obsidian", "oxygen", "Moka", "Faenza", "elementary-xfce", "mate", "gnome", "Tango",
)
# Typefaces of different design. Their order decides the file names and the random numbers.
FACES = (
  "truetype/horai-umefont/ume-tmo3.ttf", "truetype/arphic-gbsn00lp/gbsn00lp.ttf",
  "truetype/cns11643/TW-Kai-98_1.ttf", "truetype/cns11643/TW-Sung-98_1.ttf",
  "truetype/wqy/wqy-zenhei.ttc", "truetype/wqy/wqy-microhei.ttc", "truetype/hanazono/HanaMinA.ttf",
  "truetype/kouzan-mouhitsu/kouzan-mouhitsu.ttf",
  "truetype/kouzan-mouhitsu/kouzan-mouhitsu-gyosho.ttf", "truetype/aoyagi-soseki/aoyagi-soseki.ttf",
  "truetype/aoyagi-kouzan-t/AoyagiKouzanT.ttf", "truetype/seto/setofont.ttf",
  "truetype/lxgw-wenkai/LXGWWenKai-Bold.ttf", "truetype/lxgw-wenkai/LXGWWenKai-Light.ttf",
  "truetype/motoya-l-cedar/MTLc3m.ttf", "truetype/klee/KleeOne-Regular.ttf",
  "truetype/konatu/Konatu.ttf", "opentype/mplus/Mplus1-Black.otf", "opentype/mplus/Mplus1-Thin.otf",
  "opentype/noto/NotoSerifCJK-Bold.ttc", "opentype/noto/NotoSansCJK-Bold.ttc",
  "truetype/arphic/ukai.ttc",
)
# fmt: on
_HAN = range(0x4E00, 0x9FA6)
_MIN_THEMES, _ICON_SIZES = 3, range(32, 129)  # themes of a class, pixels by the name of the folder
_MIN_FACES, _PER_CLASS = 12, 4  # typefaces that must have a character, and that draw it
_SIZE, _CANVAS, _FONT_SIZE = 64, 96, 52  # pixels; a rotated character fits on the canvas
_REMEDY = "Unpack the packages that soprc make-folder --help lists"
_EXAMPLE = "icons --packages=UNPACKED --output=IMAGES"
_PACKAGES = absl_flags.DEFINE_string(
  "packages", None, "Folder that the packages were unpacked to; it has usr/share."
)
_OUTPUT = absl_flags.DEFINE_string("output", None, "Folder of the images; must be new or empty.")


class Made(NamedTuple):
  """Images of a data set, and what was skipped.

  images: class -> name -> RGB image of 64 x 64 pixels.
  skipped: one message for each theme or file that is missing or unreadable.
  """

  images: dict[str, dict[str, Image.Image]]
  skipped: list[str]


def main(argv: Sequence[str]) -> None:
  flags.require([argv[0], *argv[2:]], _EXAMPLE, packages=_PACKAGES.value, output=_OUTPUT.value)
  from soprc_jax._internal import file_io

  with flags.errors_as_messages():
    name = argv[1] if len(argv) > 1 else ""
    if name not in ("icons", "characters"):
      raise ValueError(f"unknown data set {name!r}. For example:\n  soprc make-folder {_EXAMPLE}")
    packages = file_io.given(str(_PACKAGES.value), name="--packages")
    output = file_io.given(str(_OUTPUT.value), name="--output").absolute()
    if output.is_symlink() or (output.exists() and (output.is_file() or any(output.iterdir()))):
      raise ValueError(f"--output={output} exists and is no empty folder: choose a new one")
    folder = packages / "usr" / "share" / ("icons" if name == "icons" else "fonts")
    if not folder.is_dir():
      raise ValueError(f"--packages={packages}: there is no folder {folder}. {_REMEDY}")
    made = icons(folder) if name == "icons" else characters(folder)
    for message in made.skipped:
      logging.getLogger("soprc_jax.make_folder").warning("Skipped: %s", message)
    if not made.images:
      raise ValueError(f"--packages={packages}: no class of {name} found in {folder}. {_REMEDY}")
    write(made.images, output)
  print(f"Written to {output}.\n{name}: {statistics(made)}")


def icons(folder: Path) -> Made:
  """Returns the icons of ``usr/share/icons`` whose name is in three or more themes.

  Of equal images only the first is kept, since many names are links to the same icon.
  """
  images, skipped = dict[str, dict[str, Image.Image]](), list[str]()
  paths: dict[str, dict[str, Path]] = {}
  for theme in THEMES:
    if not (folder / theme).is_dir():
      skipped.append(f"{folder / theme} is missing")
    for name, path in _largest(folder / theme).items():
      paths.setdefault(name, {})[theme] = path
  seen = set[bytes]()
  for name, by_theme in sorted(paths.items()):
    own = {}
    for theme, path in by_theme.items():
      try:
        image = _on_white(path)
      except (OSError, SyntaxError, ValueError) as error:  # Pillow raises each for corrupt files
        skipped.append(f"{path} cannot be read ({error})")
        continue
      if image.tobytes() not in seen:
        seen.add(image.tobytes())
        own[theme] = image
    if len(own) >= _MIN_THEMES:
      images[name] = own
  return Made(images, skipped)


def _largest(theme: Path) -> dict[str, Path]:
  """Returns the largest icon of each name, of 32 to 128 pixels by the name of its folder."""
  found: dict[str, tuple[int, Path]] = {}
  for path in sorted(theme.rglob("*.png")):
    place = path.relative_to(theme).as_posix()
    sizes = re.findall(r"(?:^|/)(\d+)(?:x\d+)?(?=/)", place)  # 48x48/apps/, apps/48/; not @2x/
    size = max(map(int, sizes), default=0)
    usable = size in _ICON_SIZES and path.is_file()  # no link to nothing
    if usable and size > found.get(path.stem, (0,))[0]:
      found[path.stem] = size, path
  return {name: path for name, (_, path) in found.items()}


def _on_white(path: Path) -> Image.Image:
  with Image.open(path) as file:
    icon = file.convert("RGBA")
  white = Image.new("RGBA", icon.size, "white")
  white.alpha_composite(icon)
  return white.convert("RGB").resize((_SIZE, _SIZE), Image.Resampling.LANCZOS)


def characters(
  folder: Path, faces: Sequence[str] = FACES, codes: Sequence[int] = _HAN, num_classes: int = 2000
) -> Made:
  """Returns random characters in 4 random faces each. The random numbers have a fixed seed.

  A face that draws a character blank is replaced by another one.

  Args:
    folder: folder of the fonts, ``usr/share/fonts``.
    faces: font files in the folder, of a collection the first face; 12 must have a character.
    codes: code points to choose from.
    num_classes: largest number of classes.
  """
  from matplotlib import ft2font

  fonts, have, skipped = [], [], []
  basic = ImageFont.Layout.BASIC  # the result must not depend on whether Raqm is installed
  for path in [str(folder / face) for face in faces]:
    try:
      font = ImageFont.truetype(path, _FONT_SIZE, layout_engine=basic)
      have.append(set(ft2font.FT2Font(path).get_charmap()))
      fonts.append(font)
    except (OSError, RuntimeError) as error:
      skipped.append(f"{path} cannot be read ({error})")
  drawn_by = {code: [i for i, found in enumerate(have) if code in found] for code in codes}
  rng = np.random.default_rng(0)
  common = [code for code in codes if len(drawn_by[code]) >= _MIN_FACES]
  images: dict[str, dict[str, Image.Image]] = {}
  for code in sorted(map(int, rng.permutation(common)[:num_classes])):
    own: dict[str, Image.Image] = {}
    for index in rng.permutation(drawn_by[code]):
      drawn = _drawn(chr(code), fonts[index]) if len(own) < _PER_CLASS else None
      if drawn is not None:
        own[f"{index:02d}"] = _distorted(drawn, rng)
    if own:
      images[f"U{code:04X}"] = own
  return Made(images, skipped)


def _drawn(character: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
  """Returns a character in gray, black on white, or None if the font draws it blank."""
  image, center = Image.new("L", (_CANVAS, _CANVAS), 255), (_CANVAS / 2, _CANVAS / 2)
  ImageDraw.Draw(image).text(center, character, font=font, fill=0, anchor="mm")
  return image if np.asarray(image).min() <= 100 else None


def _distorted(image: Image.Image, rng: np.random.Generator) -> Image.Image:
  """Returns an image turned, scaled, sheared, shifted and cropped, in two colors, with noise."""
  angle, scale = math.radians(rng.uniform(-5, 5)), rng.uniform(0.9, 1.1, 2)
  shear, shift = rng.uniform(-0.08, 0.08), rng.uniform(-3, 3, 2)
  cos, sin = math.cos(angle), math.sin(angle)
  matrix = np.array([[cos, cos * shear - sin], [sin, sin * shear + cos]]) / scale
  origin = _CANVAS / 2 + shift - matrix.sum(1) * (_SIZE / 2)
  affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
  rows = (*matrix[0], origin[0], *matrix[1], origin[1])
  moved = image.transform((_SIZE, _SIZE), affine, rows, bilinear, fillcolor=255)
  light_share = np.asarray(moved, float)[..., None] / 255
  dark, light = rng.uniform(0, 0.4, 3), rng.uniform(0.6, 1, 3)
  colors = light_share * light + (1 - light_share) * dark + rng.normal(0, 0.03, (_SIZE, _SIZE, 1))
  return Image.fromarray((np.clip(colors, 0, 1) * 255).astype(np.uint8))


def write(images: Mapping[str, Mapping[str, Image.Image]], output: Path) -> None:
  """Writes ``CLASS/NAME.png`` to a new or empty folder, at once when all images are complete."""
  output.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
    root = Path(aside) / "images"  # the temporary folder is closed to other users
    for name, own in images.items():
      (root / name).mkdir(parents=True)
      for stem, image in own.items():
        image.save(root / name / f"{stem}.png")
    root.replace(output)


def statistics(made: Made) -> str:
  """Returns classes, images, sizes, skipped files and a digest of names and pixels, in one line."""
  counts = [len(own) for own in made.images.values()]
  digest = hashlib.sha256()
  for name, own in sorted(made.images.items()):
    for stem, image in sorted(own.items()):
      digest.update(f"{name}/{stem}.png\0".encode() + image.tobytes())
  return (
    f"{len(counts)} classes of {min(counts)} to {max(counts)} images, {sum(counts)} images of "
    f"{_SIZE} x {_SIZE} pixels, {len(made.skipped)} skipped, digest {digest.hexdigest()[:16]}"
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
