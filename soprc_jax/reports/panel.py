"""Pictures of queries and of what was found for them, of classes, and of classes that are taken for each other."""

import base64
from collections.abc import Sequence
import io

import numpy as np
from PIL import Image

from soprc_jax._internal.strings import printable
from soprc_jax.data import decoding, sources
from soprc_jax.reports import page, ranking
from soprc_jax.reports.markup import Markup, join, paragraph, tag
from soprc_jax.reports.tested import Tested

# Longer side of a thumbnail in pixels.
SIDE = 80
_QUALITY = 80
# Characters of a name in a line of text, and below a picture.
_LONG, _SHORT = 80, 32
# Images of a class in a table, and in a pair of classes.
_IN_TABLE, _IN_PAIR = 3, 5
# Errors of a pair of classes whose images are shown.
EXAMPLES = 2
SHOWN_CLASSES = 8
SOME, WORST, PAIRS = 6, 6, 8


def thumbnail(image: np.ndarray | decoding.Encoded | decoding.Stored) -> str:
  """A small copy of a whole picture as a ``data:`` address, JPEG or PNG, whichever is shorter; small pictures keep their size.

  Raises:
    BrokenImageError: it cannot be decoded.
  """
  picture = decoding.as_picture(image)
  height, width = picture.size
  scale = min(SIDE / max(height, width), 1.0)
  pixels = picture.region(decoding.whole(picture), (max(round(height * scale), 1), max(round(width * scale), 1)))
  written = []
  for kind, options in (("jpeg", {"quality": _QUALITY}), ("png", {"optimize": True})):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    written.append((len(file.getvalue()), kind, file.getvalue()))
  _, kind, content = min(written)
  return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def queries(tested: Tested, positions: np.ndarray) -> Markup:
  """Queries, each with its nearest images: right ones in a plain frame with a tick, wrong ones in a dashed frame with a cross."""
  return join(_query(tested, int(position)) for position in positions)


def look_alikes(tested: Tested, pairs: Sequence[ranking.Pair]) -> Markup:
  """Pairs of classes with images of both."""
  return tag("div", *(_pair(tested, pair) for pair in pairs), class_="pairs")


def class_table(tested: Tested, found: ranking.Classes, order: np.ndarray, caption: str) -> Markup:
  """Classes with their AP, size and some images."""
  rows = []
  for i in order:
    label = int(found.labels[i])
    shown = np.flatnonzero(tested.labels == label)[:_IN_TABLE]
    rows.append(
      [
        page.name(tested.class_name(label)),
        page.number(float(found.ap[i])),
        page.number(int(found.sizes[i])),
        tag("div", *(_image(tested, int(position)) for position in shown), class_="strip"),
      ]
    )
  return page.table(caption, ["class", "mean AP", "images", "some of them"], rows)


def _query(tested: Tested, position: int) -> Markup:
  example, ap = tested.source[position], tested.ap[position]
  total = int((tested.labels == tested.labels[position]).sum()) - 1
  found, scores = tested.nearest.positions[position], tested.nearest.scores[position]
  right = tested.labels[found] == tested.labels[position]
  about = paragraph(
    "Query ",
    page.label(example.id, _LONG),
    ", class ",
    tag("b", page.label(example.shown_class, _LONG)),
    f": AP {ap:.3f}; {int(right.sum())} of its {total} other images among the first {len(found)}.",
  )
  tiles = [_tile(tested, position, "is-query", "query", None)]
  for rank, (other, score) in enumerate(zip(found, scores, strict=True), start=1):
    is_right = tested.labels[other] == tested.labels[position]
    kind, badge = ("is-right", "✓ right") if is_right else ("is-wrong", "✗ wrong")
    tiles.append(_tile(tested, int(other), kind, f"{rank} {badge}", float(score)))
  return tag("div", about, tag("ul", *tiles, class_="tiles"), class_="query")


def _tile(tested: Tested, position: int, kind: str, badge: str, score: float | None) -> Markup:
  example = tested.source[position]
  name = example.shown_class
  image = _thumbnail(example, f"{badge}: ")
  shown = page.label(name, _SHORT) if kind == "is-wrong" else None  # the others are of the class that is named above
  similarity = None if score is None else tag("span", f"cosine {score:.3f}")
  return tag(
    "li",
    tag("span", image, class_="picture"),
    tag("b", badge),
    similarity,
    shown,
    class_=f"tile {kind}",
  )


def _pair(tested: Tested, pair: ranking.Pair) -> Markup:
  names = [tested.class_name(label) for label in pair.labels]
  about = paragraph(
    tag("b", page.label(names[0], _LONG)),
    " and ",
    tag("b", page.label(names[1], _LONG)),
    f": {pair.errors} of {pair.places} places ({pair.errors / pair.places:.0%})",
  )
  examples = dict.fromkeys(position for example in pair.examples for position in example)
  rows = []
  for label, name in zip(pair.labels, names, strict=True):
    of_class = [position for position in examples if tested.labels[position] == label]
    rest = [int(position) for position in np.flatnonzero(tested.labels == label) if position not in examples]
    shown = (of_class + rest)[:_IN_PAIR]
    rows += [
      tag("p", page.label(name, _LONG), class_="note"),
      tag("div", *(_image(tested, position) for position in shown), class_="strip"),
    ]
  return tag("div", about, *rows, class_="query")


def _image(tested: Tested, position: int) -> Markup:
  example = tested.source[position]
  return _thumbnail(example)


def _thumbnail(example: sources.Example, badge: str = "") -> Markup:
  name = printable(example.id)
  alt = f"{badge}class {printable(example.shown_class)}, image {name}"
  return tag("img", src=thumbnail(example.image), alt=alt, title=name)
