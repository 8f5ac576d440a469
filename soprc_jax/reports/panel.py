"""Shows images: queries with their nearest images, classes, and pairs of confusable classes."""

import base64
from collections.abc import Iterable, Mapping
import io

from markupsafe import Markup
import numpy as np
from PIL import Image

from soprc_jax._internal.strings import printable
from soprc_jax.data import decoding, sources
from soprc_jax.reports import page, ranking
from soprc_jax.reports.tested import Tested

# Longer side of a thumbnail in pixels.
SIDE = 80
_QUALITY = 80
# Maximum number of characters of a name below an image.
_SHORT = 32
# Number of images of a class in a table, and in a pair of classes.
_IN_TABLE, _IN_PAIR = 3, 5
# Number of errors of a pair of classes whose images are shown.
EXAMPLES = 2
SHOWN_CLASSES = 8
SOME, WORST, PAIRS = 6, 6, 8
# Classes and images of a class in the sample of the training images.
_SAMPLED, _IN_SAMPLE = 8, 8


def thumbnail(image: np.ndarray | decoding.Encoded | decoding.Stored) -> str:
  """Returns a small copy of a whole image as a ``data:`` URL, as JPEG or PNG, the shorter one.

  Small images keep their size.

  Raises:
    BrokenImageError: if the image cannot be decoded.
  """
  picture = decoding.as_picture(image)
  height, width = picture.size
  scale = min(SIDE / max(height, width), 1.0)
  pixels = picture.region(
    decoding.whole(picture), (max(round(height * scale), 1), max(round(width * scale), 1))
  )
  written = []
  for kind, options in (("jpeg", {"quality": _QUALITY}), ("png", {"optimize": True})):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    written.append((len(file.getvalue()), kind, file.getvalue()))
  _, kind, content = min(written)
  return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def query(tested: Tested, position: int) -> dict[str, object]:
  """Returns what the page shows of a query: its nearest images, marked right or wrong."""
  example = tested.source[position]
  found, scores = tested.nearest.positions[position], tested.nearest.scores[position]
  right = tested.right[position]
  tiles = [{"kind": "is-query", "badge": "query", "image": _thumbnail(example, "query: ")}]
  for rank, (other, score, is_right) in enumerate(zip(found, scores, right, strict=True), start=1):
    kind, badge = ("is-right", f"{rank} ✓ right") if is_right else ("is-wrong", f"{rank} ✗ wrong")
    there = tested.source[int(other)]
    # An image of the query's class, or of its pattern, is named above.
    same = tested.labels[other] == tested.labels[position]
    name = "" if same else page.name(there.shown_class, _SHORT)
    tile = {"kind": kind, "badge": badge, "image": _thumbnail(there, f"{badge}: ")}
    tiles.append(tile | {"score": f"cosine {score:.3f}", "name": name})
  return {
    "id": example.id,
    "class": example.shown_class,
    "ap": float(tested.ap[position]),
    "right": int(right.sum()),
    "total": int(tested.num_relevant[position]) - 1,
    "shown": len(found),
    "tiles": tiles,
  }


def splits_table(splits: Mapping[str, sources.Source]) -> Markup:
  """Tabulates classes, images, and images per class of each split.

  Where an image has several labels, these are labels.
  """
  rows: list[list[page.Cell]] = []
  for name, source in splits.items():
    counts = sources.class_sizes(source)
    middle = float(np.median(counts))
    median = int(middle) if middle.is_integer() else middle
    sizes: list[page.Cell] = [int(counts.min()), median, int(counts.max())]
    rows.append([name, len(counts), len(source), *sizes])
  several = any(sources.label_sets(source) is not None for source in splits.values())
  one, many = ("label", "labels") if several else ("class", "classes")
  header = ["split", many, "images", f"smallest {one}", "median", "largest"]
  return page.table(f"{many.capitalize()} and images by split", header, rows)


def sample(source: sources.Source) -> list[tuple[str, Markup]]:
  """Returns names and first images of some classes, evenly spaced by label."""
  labels = np.unique(source.labels)
  chosen = labels[np.linspace(0, len(labels) - 1, min(len(labels), _SAMPLED)).astype(int)]
  rows = []
  for label in chosen:
    there = np.flatnonzero(source.labels == label)[:_IN_SAMPLE]
    examples = [source[int(position)] for position in there]
    images = Markup().join(map(_thumbnail, filter(_is_readable, examples)))
    rows.append((examples[0].shown_class, page.markup('<div class="strip">{}</div>', images)))
  return rows


def _is_vector(example: sources.Example) -> bool:
  """Returns whether an example is a stored embedding, which cannot be shown."""
  return isinstance(example.image, np.ndarray) and example.image.ndim == 1


def _is_readable(example: sources.Example) -> bool:
  if _is_vector(example):
    return True
  try:
    decoding.as_picture(example.image)
  except decoding.BrokenImageError:
    return False
  return True


def pair_rows(tested: Tested, pair: ranking.Pair) -> list[tuple[str, Markup]]:
  """Returns the name and images of both classes of a pair; confused images come first."""
  examples = dict.fromkeys(position for example in pair.examples for position in example)
  rows = []
  for label in pair.labels:
    of_class = [position for position in examples if tested.labels[position] == label]
    rest = [
      int(position)
      for position in np.flatnonzero(tested.labels == label)
      if position not in examples
    ]
    rows.append((tested.class_name(label), _strip(tested, (of_class + rest)[:_IN_PAIR])))
  return rows


def class_table(tested: Tested, found: ranking.Classes, order: np.ndarray, caption: str) -> Markup:
  """Tabulates classes with their mean AP, size and some images, in the given order."""
  rows: list[list[page.Cell]] = []
  for i in order:
    label = int(found.labels[i])
    shown = np.flatnonzero(tested.labels == label)[:_IN_TABLE]
    name = page.name(tested.class_name(label))
    rows.append([name, float(found.ap[i]), int(found.sizes[i]), _strip(tested, shown)])
  return page.table(caption, ["class", "mean AP", "images", "examples"], rows)


def _strip(tested: Tested, positions: Iterable[int]) -> Markup:
  images = Markup().join(_thumbnail(tested.source[int(position)]) for position in positions)
  return page.markup('<div class="strip">{}</div>', images)


def _thumbnail(example: sources.Example, badge: str = "") -> Markup:
  name, class_name = printable(example.id), printable(example.shown_class)
  if _is_vector(example):
    html = '<span class="vector" title="{}">{}</span>'
    return page.markup(html, name, page.name(name, _SHORT))
  html = '<img src="{}" alt="{}class {}, image {}" title="{}"/>'
  return page.markup(html, thumbnail(example.image), badge, class_name, name, name)
