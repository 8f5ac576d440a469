"""The images of an index that are nearest to query images."""

from collections.abc import Iterable, Sequence
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import text_table
from soprc_jax._internal.strings import printable
from soprc_jax.data import decoding
from soprc_jax.serving import image_inputs
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import classes

BACKENDS = ("exact", "faiss")
_BLOCK = 1 << 24  # float32 similarities at a time


class Neighbour(NamedTuple):
  """An image near a query.

  Attributes:
    place: of the image in the index.
    id: of the image.
    class_name: its class, as the data call it; empty if unknown.
    similarity: cosine to the query.
  """

  place: int
  id: str
  class_name: str
  similarity: float


def check_unseen(
  network: network_lib.Network, split: str, class_names: Iterable[str], *, allow_seen_classes: bool
) -> dict[str, Any] | None:
  """Raises a ValueError, or logs a warning, if a search in val or test would show classes that were
  trained on.

  Args:
    network: that embeds.
    split: that is searched. ``train`` and ``all`` have classes that were trained on by their names;
      images of a user's own (empty) are not tested on.
    class_names: of its images.
    allow_seen_classes: log a warning instead.

  Returns:
    As `soprc_jax.training.classes.seen`.
  """
  if split in ("", "train", "all"):
    return None
  where = f"step {network.step} of {network.workdir}"
  trained = classes.trained_on(network.meta, where=where)
  if trained is None:
    classes.warn_unknown(where)
    return None
  found = classes.seen(trained, class_names, data_source=network.config.data.source)
  return classes.report_seen(
    found, splits=[split], network=where, allow_seen_classes=allow_seen_classes
  )


def check_queries(paths: Sequence[str]) -> None:
  """Raises an error that names the first file that is no image, whatever ``data.on_broken`` says.

  Raises:
    ValueError: one of them is no image, or cannot be read.
  """
  source = image_inputs.Named(Path.cwd(), paths)
  for i in range(len(source)):
    decoding.pixels(decoding.as_picture(source[i].image))


def embed_queries(
  network: network_lib.Network, paths: Sequence[str], embed: network_lib.EmbedFn | None = None
) -> np.ndarray:
  """``[Q, D]`` embeddings of image files that `check_queries` has looked at.

  Raises:
    ValueError: one of them cannot be read any more.
  """
  embed = embed or network_lib.make_embed(network, at_most=len(paths))
  embedded = embed(image_inputs.Named(Path.cwd(), paths))
  gone = np.setdiff1d(np.arange(len(paths)), embedded.positions)
  if gone.size:  # data.on_broken=skip is for the images that are searched
    raise decoding.BrokenImageError(
      f"{printable(paths[gone[0]])}: this query cannot be read any more"
    )
  return embedded.embeddings


def nearest(
  index: index_lib.Index, queries: np.ndarray, *, top: int, backend: str = "exact"
) -> list[list[Neighbour]]:
  """For each query the images that are nearest to it, the nearest first; of equally near ones the
  one that comes first.

  A similarity is the float64 product of two vectors, rounded to float32. Float32 products, of numpy
  or of faiss, only leave out what by their rounding errors cannot be among the nearest, so that
  both give the same.

  Args:
    index: where to search.
    queries: ``[Q, D]`` of norm 1 or 0.
    top: number of images >= 1; all, if there are fewer.
    backend: one of `BACKENDS`.

  Raises:
    ValueError: another width, or faiss is not installed.
  """
  if queries.shape[1] != index.embeddings.shape[1]:
    raise ValueError(
      f"the queries have {queries.shape[1]} numbers, the index {index.embeddings.shape[1]}"
    )
  if backend not in BACKENDS:
    raise ValueError(f"the backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
  top = min(top, len(index.embeddings))
  queries = np.ascontiguousarray(queries, np.float32)
  shortlists = (_by_faiss if backend == "faiss" else _by_products)(index.embeddings, queries, top)
  return [
    _ranked(index, query, places, top) for query, places in zip(queries, shortlists, strict=True)
  ]


def without_query(
  index: index_lib.Index, paths: Sequence[str], found: Sequence[list[Neighbour]], *, top: int
) -> list[list[Neighbour]]:
  """Leaves out of each row the neighbor that is the file of the query itself.

  Args:
    index: where was searched.
    paths: files of the queries.
    found: of each query its nearest ``top + 1`` images, see `nearest`.
    top: number of images to keep.
  """
  rows = []
  for path, row in zip(paths, found, strict=True):
    place = os.path.realpath(path)
    others = [one for one in row if os.path.realpath(Path(index.root) / one.id) != place]
    rows.append(others[:top])
  return rows


def _ranked(
  index: index_lib.Index, query: np.ndarray, places: np.ndarray, top: int
) -> list[Neighbour]:
  places = np.sort(places)
  exact = index.embeddings[places].astype(np.float64) @ query.astype(np.float64)
  # Rounded, equal vectors are equally near, whatever the order of a sum was.
  similarities = exact.astype(np.float32)
  order = np.argsort(-similarities, kind="stable")[:top]
  return [
    Neighbour(
      int(places[i]),
      str(index.ids[places[i]]),
      str(index.class_names[places[i]]),
      float(similarities[i]),
    )
    for i in order
  ]


def _margin(width: int) -> float:
  """Twice the largest error of a float32 product of two vectors of norm 1, and of the rounding of
  the float64 one.
  """
  return 2 * (width + 2) * float(np.finfo(np.float32).eps)


def _by_products(gallery: np.ndarray, queries: np.ndarray, top: int) -> list[np.ndarray]:
  """Places that hold the nearest, of each query."""
  found, margin = [], _margin(gallery.shape[1])
  rows = max(_BLOCK // len(gallery), 1)
  for start in range(0, len(queries), rows):
    for products in queries[start : start + rows] @ gallery.T:
      least = np.partition(products, len(products) - top)[len(products) - top]
      found.append(np.flatnonzero(products >= least - margin))
  return found


def _by_faiss(gallery: np.ndarray, queries: np.ndarray, top: int) -> list[np.ndarray]:
  """The same by faiss: the similarity of the last of the nearest, then all that may be as near."""
  try:
    import faiss
  except ImportError:
    raise ValueError(
      "--backend=faiss needs the package faiss (pip install faiss-cpu); exact gives the same"
    ) from None
  flat = faiss.IndexFlatIP(gallery.shape[1])
  flat.add(np.ascontiguousarray(gallery))
  least = flat.search(queries, top)[0][:, -1]
  margin = _margin(gallery.shape[1])
  found = []
  for query, limit in zip(queries, least, strict=True):
    # What range_search returns is above the limit, never at it.
    found.append(flat.range_search(query[None], float(limit) - margin)[2].astype(np.int64))
  return found


def table(found: Sequence[Neighbour], *, classes: bool) -> str:
  """Returns lines of similarity, class (where any is known) and image, each name on its line."""
  rows = [("similarity", "class", "image")]
  rows += [
    (f"{one.similarity:10.4f}", printable(one.class_name), printable(one.id)) for one in found
  ]
  return "\n".join(
    text_table.aligned(rows if classes else [(score, image) for score, _, image in rows])
  )


def to_json(
  index: index_lib.Index,
  paths: Sequence[str],
  found: Sequence[Sequence[Neighbour]],
  *,
  seen_classes: dict[str, Any] | None = None,
) -> str:
  """The same as JSON, in ASCII; a class that is not known is null. ``seen_classes``: see
  `check_unseen`.
  """
  content: dict[str, Any] = {
    "network": {"workdir": index.workdir, "step": index.step, "digest": index.digest},
    "gallery": {
      "images": len(index.ids),
      "split": index.split or None,
      "root": index.root,
      "broken": index.broken_ids.tolist(),
    },
    "queries": [
      {
        "query": path,
        "neighbours": [
          {
            "id": one.id,
            "class": one.class_name or None,
            "similarity": one.similarity,
            "place": one.place,
          }
          for one in row
        ],
      }
      for path, row in zip(paths, found, strict=True)
    ],
  }
  if seen_classes is not None:
    content["seen_classes"] = seen_classes
  return json.dumps(content, indent=1)
