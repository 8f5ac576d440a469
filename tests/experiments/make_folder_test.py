"""Tests the image folders that recipes are chosen on (experiments/make_folder.py).

The themes are made by Pillow, and the typefaces are those that matplotlib ships.
"""

import hashlib
import pathlib

import matplotlib
import numpy as np
from PIL import Image
import pytest
import runs

from experiments import make_folder

_MODULE = "experiments.make_folder"
_FONTS = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_FACES = sorted(path.name for path in _FONTS.glob("DejaVuS*.ttf") if "Display" not in path.name)


def _icon(packages, path, color, *, pixels=48):
  """Writes a square icon of one color with a transparent border, and returns its path."""
  file = packages / "usr" / "share" / "icons" / path
  file.parent.mkdir(parents=True, exist_ok=True)
  icon = Image.new("RGBA", (pixels, pixels))
  icon.paste(color, (8, 8, pixels - 8, pixels - 8))
  icon.save(file)
  return file


def _themes(packages, *, themes=make_folder.THEMES):
  """Writes the icons ``copy`` and ``paste`` of each theme; returns the folder of the themes."""
  for number, theme in enumerate(themes):
    _icon(packages, f"{theme}/48x48/actions/copy.png", (20 * number, 0, 0, 255))
    _icon(packages, f"{theme}/actions/48/paste.png", (0, 20 * number, 100, 255))
  return packages / "usr" / "share" / "icons"


def _characters(text="ABCDEFGH", *, faces=_FACES, num_classes=5):
  return make_folder.characters(_FONTS, faces, [ord(one) for one in text], num_classes)


def _pixels(made):
  return {
    (name, stem): image.tobytes()
    for name, own in made.images.items()
    for stem, image in own.items()
  }


def _fails(*flags):
  done = runs.call(_MODULE, *flags)
  assert done.returncode == 1, done.stdout + done.stderr
  assert "Traceback" not in done.stderr
  assert any(line.startswith("Error: ") for line in done.stderr.splitlines())
  return done.stderr


class TestIcons:
  def test_a_class_is_a_name_in_three_themes(self, tmp_path):
    folder = _themes(tmp_path, themes=make_folder.THEMES[:3])
    for theme in make_folder.THEMES[:2]:
      _icon(tmp_path, f"{theme}/48x48/actions/cut.png", (len(theme), 1, 2, 255))
    made = make_folder.icons(folder)
    assert {name: list(own) for name, own in made.images.items()} == {
      "copy": list(make_folder.THEMES[:3]),
      "paste": list(make_folder.THEMES[:3]),
    }
    assert made.skipped == [f"{folder / theme} is missing" for theme in make_folder.THEMES[3:]]

  def test_icons_lie_on_white_at_64_pixels(self, tmp_path):
    made = make_folder.icons(_themes(tmp_path))
    image = made.images["copy"]["oxygen"]
    assert (image.mode, image.size, made.skipped) == ("RGB", (64, 64), [])
    assert image.getpixel((1, 1)) == (255, 255, 255)
    assert image.getpixel((32, 32)) == (40, 0, 0)

  @pytest.mark.parametrize(
    ("place", "pixels", "taken"),
    [
      ("128x128/actions", 128, True),
      ("actions/64", 64, True),
      ("256x256/actions", 256, False),
      ("24x24/actions", 24, False),
      ("64x64@2x/actions", 64, False),
      ("scalable/actions", 64, False),
    ],
  )
  def test_icons_of_32_to_128_pixels_count(self, tmp_path, place, pixels, taken):
    folder = _themes(tmp_path)
    (folder / "mate/48x48/actions/copy.png").unlink()
    _icon(tmp_path, f"mate/{place}/copy.png", (0, 0, 255, 255), pixels=pixels)
    assert ("mate" in make_folder.icons(folder).images["copy"]) == taken

  def test_the_largest_icon_of_a_theme_counts(self, tmp_path):
    folder = _themes(tmp_path)
    for pixels in (32, 64, 96, 256):
      _icon(tmp_path, f"mate/actions/{pixels}/copy.png", (0, 0, pixels - 1, 255), pixels=pixels)
    assert make_folder.icons(folder).images["copy"]["mate"].getpixel((32, 32)) == (0, 0, 95)

  def test_equal_images_are_kept_once(self, tmp_path):
    folder = _themes(tmp_path)
    for theme in make_folder.THEMES:  # another name of the same icons, which sorts behind it
      (folder / theme / "48x48" / "actions" / "dup.png").symlink_to("copy.png")
    _icon(tmp_path, "Tango/48x48/actions/copy.png", (0, 0, 0, 255))  # as in the first theme
    made = make_folder.icons(folder)
    assert list(made.images) == ["copy", "paste"]
    assert list(made.images["copy"]) == list(make_folder.THEMES[:-1])

  def test_what_cannot_be_read_is_named_and_skipped(self, tmp_path):
    folder = _themes(tmp_path)
    broken = folder / "mate" / "48x48" / "actions" / "copy.png"
    broken.write_bytes(broken.read_bytes()[:40])
    (folder / "gnome" / "48x48" / "actions" / "gone.png").symlink_to("nowhere.png")
    made = make_folder.icons(folder)
    assert len(made.skipped) == 1
    assert made.skipped[0].startswith(f"{broken} cannot be read (")
    assert set(made.images["copy"]) == set(make_folder.THEMES) - {"mate"}


class TestCharacters:
  def test_four_faces_of_each_character(self):
    made = _characters()
    assert len(made.images) == 5
    assert set(made.images) < {f"U{ord(one):04X}" for one in "ABCDEFGH"}
    assert {len(own) for own in made.images.values()} == {4}
    assert len(set(_pixels(made).values())) == 20
    assert made.skipped == []
    for own in made.images.values():
      for image in own.values():
        assert (image.mode, image.size) == ("RGB", (64, 64))
        border, dark = np.asarray(image)[:4].mean(), np.sort(np.asarray(image).mean(-1), None)[:50]
        assert border > 0.58 * 255  # the lighter color
        assert dark.mean() < 0.42 * 255

  def test_the_same_fonts_give_the_same_pixels(self):
    assert _pixels(_characters()) == _pixels(_characters())

  def test_a_character_of_few_faces_is_no_class(self):
    assert len(_FACES) == 12
    assert _characters("AB", faces=_FACES[:11]).images == {}
    assert set(_characters("A字").images) == {"U0041"}

  def test_blank_characters_give_no_image(self):
    assert set(_characters(" A").images) == {"U0041"}

  def test_a_font_that_cannot_be_read_is_named_and_skipped(self, tmp_path):
    for name in _FACES:
      (tmp_path / name).symlink_to(_FONTS / name)
    (tmp_path / "text.ttf").write_text("no font")
    made = make_folder.characters(tmp_path, ["gone.ttf", "text.ttf", *_FACES], [ord("A")])
    assert [message.split(" (")[0] for message in made.skipped] == [
      f"{tmp_path / name} cannot be read" for name in ("gone.ttf", "text.ttf")
    ]
    assert _pixels(made) == _pixels(_characters("A"))


class TestProgram:
  def test_folder_and_statistics(self, tmp_path):
    _themes(tmp_path / "x")
    (tmp_path / "x/usr/share/icons/mate/48x48/actions/copy.png").write_bytes(b"no image")
    out = tmp_path / "new" / "images"
    done = runs.call(_MODULE, "icons", f"--packages={tmp_path / 'x'}", f"--output={out}")
    assert done.returncode == 0, done.stderr
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png"))
    assert len(files) == 17
    digest = hashlib.sha256()
    for name in files:
      with Image.open(out / name) as image:
        digest.update(f"{name}\0".encode() + image.tobytes())
    assert done.stdout.splitlines()[-1] == (
      "icons: 2 classes of 8 to 9 images, 17 images of 64 x 64 pixels, 1 skipped, digest "
      f"{digest.hexdigest()[:16]}"
    )
    assert "copy.png cannot be read (" in done.stderr
    assert [path.name for path in out.parent.iterdir()] == ["images"]
    assert "is no empty folder" in _fails(
      "icons", f"--packages={tmp_path / 'x'}", f"--output={out}"
    )
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png")) == files

  def test_an_empty_folder_is_filled(self, tmp_path):
    made = make_folder.icons(_themes(tmp_path / "x"))
    (tmp_path / "out").mkdir()
    make_folder.write(made.images, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*/*.png"))) == 18

  def test_a_stopped_run_leaves_nothing(self, tmp_path):
    images = make_folder.icons(_themes(tmp_path / "x")).images
    with pytest.raises(FileNotFoundError):
      make_folder.write(images | {"last": {"no/folder": images["copy"]["mate"]}}, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]

  def test_mistakes(self, tmp_path):
    flags = f"--packages={tmp_path}", f"--output={tmp_path / 'out'}"
    assert "missing --packages and --output" in _fails("icons")
    assert "unknown data set 'icon'. For example:\n  soprc make-folder icons" in _fails(
      "icon", *flags
    )
    assert "unexpected argument 'characters'" in _fails("icons", "characters", *flags)
    for name, folder in (("icons", "icons"), ("characters", "fonts")):
      assert f"there is no folder {tmp_path / 'usr/share' / folder}" in _fails(name, *flags)
    (tmp_path / "usr/share/fonts").mkdir(parents=True)
    message = _fails("characters", *flags)
    assert message.count("Skipped: ") == len(make_folder.FACES)
    assert f"no class of characters found in {tmp_path / 'usr/share/fonts'}" in message
    assert not (tmp_path / "out").exists()

  def test_help_lists_the_packages_and_commands(self):
    text = runs.call(_MODULE, "--help").stdout
    words = set(text.split())
    assert {"apt-get", "dpkg-deb", "fonts-klee", "tango-icon-theme"} <= words
    assert len({word for word in words if word.endswith("-icon-theme")}) == len(make_folder.THEMES)
    # Four packages have two of the faces.
    fonts = {word for word in words if word.startswith("fonts-")}
    assert len(fonts) == len(make_folder.FACES) - 4
