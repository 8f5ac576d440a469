"""Makes a small set of images with several labels: colored shapes at random places."""

import itertools

import numpy as np
from PIL import Image

SIDE = 32
_COLORS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (60, 80, 230)}
_SHAPES = ("square", "cross", "ring")
LABELS = [f"{color} {shape}" for color, shape in itertools.product(_COLORS, _SHAPES)]


def make(folder, *, count=240, seed=0, split=True, most=3):
  """Writes images and ``list.csv``, and returns its path. A cell has 1 to ``most`` labels."""
  rng = np.random.default_rng(seed)
  (folder / "images").mkdir(parents=True)
  lines = ["path,label,split" if split else "path,label"]
  for number in range(count):
    names = rng.choice(LABELS, rng.integers(1, most + 1), replace=False)
    Image.fromarray(_picture(names, rng)).save(folder / "images" / f"{number:03d}.png")
    cell = ";".join(names)
    of = ("train", "train", "train", "val", "test", "test")[number % 6]
    lines.append(f"images/{number:03d}.png,{cell}" + (f",{of}" if split else ""))
  path = folder / "list.csv"
  path.write_text("\n".join(lines) + "\n")
  return path


def _picture(names, rng):
  pixels = np.full((SIDE, SIDE, 3), rng.integers(90, 160), np.uint8)
  pixels = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
  cells = rng.permutation(4)
  for name, cell in zip(names, cells):
    color, shape = name.split()
    top, left = 16 * (cell // 2) + rng.integers(0, 6), 16 * (cell % 2) + rng.integers(0, 6)
    mask = _mask(shape)
    pixels[top : top + 10, left : left + 10][mask] = _COLORS[color]
  return pixels


def _mask(shape):
  y, x = np.mgrid[:10, :10]
  if shape == "square":
    return np.ones((10, 10), bool)
  if shape == "cross":
    return (abs(y - 4.5) < 2) | (abs(x - 4.5) < 2)
  return (y < 2) | (y > 7) | (x < 2) | (x > 7)


def sets_of(path):
  """Returns image -> set of its labels, read by hand."""
  rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
  return {row[0]: set(row[1].split(";")) for row in rows}


def average_precision(embeddings, relevant):
  """Returns the average precision of each query in float64, query by query; NaN without one."""
  scores = np.float32(np.float64(embeddings) @ np.float64(embeddings).T)
  found = []
  for q in range(len(scores)):
    others = np.arange(len(scores)) != q
    mine = relevant[q] & others
    at = [np.mean(mine[others & (scores[q] >= scores[q][p])]) for p in np.flatnonzero(mine)]
    found.append(np.mean(at) if at else np.nan)
  return np.array(found)
