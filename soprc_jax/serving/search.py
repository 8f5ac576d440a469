"""Finds the images of an index that are nearest to query images."""

from collections.abc import Iterable, Sequence
import json
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
import numpy as np

from soprc_jax._internal import text_table
from soprc_jax._internal.strings import printable
from soprc_jax.data import decoding, features, image_files, sources
from soprc_jax.serving import image_inputs
from soprc_jax.serving import index as index_lib
from soprc_jax.serving import network as network_lib
from soprc_jax.training import classes

BACKENDS = ("exact", "faiss")
_BLOCK = 1 << 24  # number of float32 similarities computed at a time


class Neighbour(NamedTuple):
  """Holds an image near a query.

  Attributes:
    place: row of the image in the index.
    id: id of the image.
    class_name: name of its class in the data; empty if unknown.
    similarity: cosine similarity to the query.
  """

  place: int
  id: str
  class_name: str
  similarity: float


def check_unseen(
  network: network_lib.Network, split: str, class_names: Iterable[str], *, allow_seen_classes: bool
) -> dict[str, Any] | None:
  """Checks that a search in val or test shows no classes that the model was trained on.

  Args:
    network: the model that embeds.
    split: the split that is searched. ``train`` and ``all`` contain training classes, and the
      user's own images (empty) are not a test. These three are not checked. Where an image has
      several labels, splits share them: they are returned and never raise.
    class_names: class names of the images of the split.
    allow_seen_classes: log a warning instead of raising.

  Returns:
    The result of `soprc_jax.training.classes.seen`; None if nothing was checked.

  Raises:
    ValueError: if the split has training classes, unless ``allow_seen_classes``.
  """
  if split in ("", "train", "all"):
    return None
  where = f"step {network.step} of {network.workdir}"
  trained = classes.trained_on(network.meta, where=where)
  data = network.config.data
  if data.label_separator:
    class_names = [part for name in class_names for part in name.split(data.label_separator)]
  found = classes.seen(
    trained,
    class_names,
    data_source=data.source,
    several_labels=bool(data.label_separator),
  )
  return classes.report_seen(
    found, splits=[split], network=where, allow_seen_classes=allow_seen_classes
  )


def find_queries(given: Sequence[str]) -> image_inputs.Named | features.Features:
  """Finds the queries, and checks that all images are readable whatever ``data.on_broken`` is.

  Args:
    given: files, folders and patterns, see `image_inputs.queries`; or one file of stored
      embeddings.

  Raises:
    FileNotFoundError: as `image_inputs.queries`.
    ValueError: if a file is not an image or cannot be read; the message names the first one.
  """
  if any(map(features.is_file, given)):
    if len(given) > 1:
      raise ValueError("--query takes one file of stored embeddings: join the files")
    return features.load_unlabeled(given[0], name="--query")
  source = image_inputs.Named(Path.cwd(), image_inputs.queries(given or [""], flag="--query"))
  for i in range(len(source)):
    decoding.pixels(decoding.as_picture(source[i].image))
  return source


def embed_queries(
  network: network_lib.Network,
  queries: sources.Source,
  embed: network_lib.EmbedFn | None = None,
) -> np.ndarray:
  """Returns the ``[Q, D]`` embeddings of queries, image files that `find_queries` has checked.

  Raises:
    ValueError: if a file can no longer be read.
  """
  embed = embed or network_lib.make_embed(network, at_most=len(queries))
  embedded = embed(queries)
  gone = np.setdiff1d(np.arange(len(queries)), embedded.positions)
  if gone.size:  # data.on_broken=skip applies to the gallery, not to queries
    name = sources.ids(queries)[int(gone[0])]
    raise decoding.BrokenImageError(f"{printable(name)}: this query can no longer be read")
  return embedded.embeddings


def nearest(
  index: index_lib.Index, queries: np.ndarray, *, top: int, backend: str = "exact"
) -> list[list[Neighbour]]:
  """Finds the nearest images of each query, the nearest first, ties in the order of the index.

  A similarity is the float64 product of two vectors, rounded to float32. Float32 products of numpy
  or faiss only preselect candidates. Their rounding errors are taken into account, so that both
  backends give the same result.

  Args:
    index: the index to search.
    queries: ``[Q, D]`` float32 of norm 1 or 0.
    top: number of images per query, >= 1; all images if there are fewer.
    backend: one of `BACKENDS`.

  Raises:
    ValueError: if queries and index differ in width D, the backend is unknown, or faiss is not
      installed.
  """
  if queries.shape[1] != index.embeddings.shape[1]:
    raise ValueError(
      f"the queries have width {queries.shape[1]}, the index has width {index.embeddings.shape[1]}"
    )
  if backend not in BACKENDS:
    raise ValueError(f"the backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
  top = min(top, len(index.embeddings))
  queries = np.ascontiguousarray(queries, np.float32)
  shortlists = (_by_faiss if backend == "faiss" else _by_products)(index.embeddings, queries, top)
  return [
    ranked(index, query, places, top) for query, places in zip(queries, shortlists, strict=True)
  ]


def folder_of(index: index_lib.Index, config: ConfigDict) -> Path:
  """Returns the folder that the ids of an index are relative to, as an absolute path.

  Args:
    index: the index to search.
    config: config of the run, whose ``data.root`` may have moved since the index was made.
  """
  root = Path((config.data.root if index.split else index.root) or ".").expanduser().absolute()
  return root.parent if root.is_file() else root


def without_query(
  paths: Sequence[str],
  found: Sequence[list[Neighbour]],
  *,
  top: int,
  folder: Path,
) -> tuple[list[list[Neighbour]], list[str]]:
  """Removes from each row the neighbor that is the file of the query itself.

  A link to the file, or an equal file, is another image and stays.

  Args:
    paths: files of the queries.
    found: the nearest ``top + 1`` images of each query, see `nearest`.
    top: number of images to keep per query.
    folder: of the ids, see `folder_of`.

  Returns:
    The rows, and the queries from whose row nothing was removed.
  """
  rows, kept = [], []
  for path, place, row in zip(paths, image_files.places(Path.cwd(), paths), found, strict=True):
    places = image_files.places(folder, (one.id for one in row))
    others = [one for one, other in zip(row, places, strict=True) if other != place]
    rows.append(others[:top])
    kept += [path] * (len(others) == len(row))
  return rows, kept


def ranked(
  index: index_lib.Index, query: np.ndarray, places: np.ndarray, top: int
) -> list[Neighbour]:
  """Ranks some images of an index by their exact similarities to a query, see `nearest`.

  Args:
    index: the index.
    query: ``[D]`` float32.
    places: rows of the images.
    top: number of images to keep.
  """
  places = np.sort(places)
  exact = index.embeddings[places].astype(np.float64) @ query.astype(np.float64)
  # Rounding makes equal vectors equally near, independent of the order of summation.
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
  """Returns a bound on the effect of rounding on the order of two similarities.

  It is twice the largest error of a float32 product of two vectors of norm 1 and of the rounding of
  the float64 product.
  """
  return 2 * (width + 2) * float(np.finfo(np.float32).eps)


def _by_products(gallery: np.ndarray, queries: np.ndarray, top: int) -> list[np.ndarray]:
  """Returns for each query the places among which the nearest are, by numpy."""
  found, margin = [], _margin(gallery.shape[1])
  rows = max(_BLOCK // len(gallery), 1)
  for start in range(0, len(queries), rows):
    for products in queries[start : start + rows] @ gallery.T:
      least = np.partition(products, len(products) - top)[len(products) - top]
      found.append(np.flatnonzero(products >= least - margin))
  return found


def _by_faiss(gallery: np.ndarray, queries: np.ndarray, top: int) -> list[np.ndarray]:
  """Returns the same by faiss: the similarity of the last neighbor, then all within its error."""
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
    # range_search returns values strictly above the limit.
    found.append(flat.range_search(query[None], float(limit) - margin)[2].astype(np.int64))
  return found


def table(found: Sequence[Neighbour], *, classes: bool) -> str:
  """Formats neighbors as a table of similarity, class and image, one line each.

  Args:
    found: neighbors of a query.
    classes: whether to show the column of the classes.
  """
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
  num_images: int | None = None,
) -> str:
  """Formats the neighbors of all queries as ASCII JSON; an unknown class is null.

  Args:
    index: the index that was searched.
    paths: files of the queries.
    found: neighbors of each query.
    seen_classes: result of `check_unseen`; left out if None.
    num_images: number of images of a gallery in shards, of which the index has those that were
      found, with their rows as positions; None if the index has all images.
  """
  content: dict[str, Any] = {
    "network": {"workdir": index.workdir, "step": index.step, "digest": index.digest},
    "gallery": {
      "images": len(index.ids) if num_images is None else num_images,
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
            "place": one.place if num_images is None else int(index.positions[one.place]),
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
