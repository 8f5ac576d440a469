r"""Finds the images that are nearest to one or several query images, with the model of a run.

soprc search --workdir=runs/mine --query=photo.jpg [--split=all] [--top=10] [--checkpoint=best]
soprc search --workdir=runs/mine --query=photo.jpg --index=vectors.npz
soprc search --workdir=runs/mine --query=photo.jpg --index=photos.faiss [--candidates=100]
soprc search --workdir=runs/mine --query=PHOTOS --query='more/*.jpg' --contact_sheet=sheet.png

The gallery is a --split of the data that the run was trained on. With --config, given with the same
flags as in training, it is a split of its data. With --index it is a file that `soprc embed` made
with the same model, so that the images need not be embedded again. Or it is an index that `soprc
index` built of shards. Then the exact similarity of its first --candidates decides. A query
is a file, a folder, or a pattern in quotes. --query can be repeated. For a head on stored
embeddings a query is one file of them (.npz, .npy, .parquet, .h5).

The program prints the cosine similarity, the class and the image, the nearest first (the query
itself, if it is among them). --format=json prints the same as JSON on stdout. Searching in val or
test is an error if the model was trained on classes of it. --allow_seen_classes makes that a
warning, and a note in the JSON. --contact_sheet draws the images: one row per query, the query on
the left.
"""

from collections.abc import Sequence
import sys
from typing import TYPE_CHECKING

from absl import app
from absl import flags as absl_flags

from experiments import flags

if TYPE_CHECKING:  # imported later, so that a mistake in a flag is reported at once
  from pathlib import Path

  from soprc_jax.serving import index, shard_index

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_QUERY = absl_flags.DEFINE_multi_string(
  "query", [], "Image file, folder of images, or pattern like 'photos/*.jpg'; repeatable."
)
_SPLIT = absl_flags.DEFINE_string(
  "split",
  "all",
  "Images to search: all, train, val or test (VehicleID: also test_medium, test_small).",
)
_INDEX = absl_flags.DEFINE_string(
  "index",
  None,
  "File written by soprc embed or soprc index, to search in instead of a split.",
)
_CANDIDATES = absl_flags.DEFINE_integer(
  "candidates",
  100,
  "With an index of soprc index: number of images whose exact similarity is computed.",
  lower_bound=1,
)
_CHECKPOINT = absl_flags.DEFINE_enum(
  "checkpoint", "best", ["best", "newest"], "Checkpoint: best validation mAUPRC, or newest."
)
_TOP = absl_flags.DEFINE_integer("top", 10, "Number of images to show.", lower_bound=1)
_SKIP_QUERY = absl_flags.DEFINE_bool(
  "skip_query", False, "Leave the file of the query itself out of the results."
)
_FORMAT = absl_flags.DEFINE_enum("format", "table", ["table", "json"], "Format of the output.")
_CONTACT_SHEET = absl_flags.DEFINE_string(
  "contact_sheet", None, "Image to write, FILE.png; must not exist."
)
_BACKEND = absl_flags.DEFINE_enum(
  "backend",
  "exact",
  ["exact", "faiss"],
  "Search by numpy (exact) or by faiss (pip install faiss-cpu). The results are the same.",
)
_ON_BROKEN = absl_flags.DEFINE_enum(
  "on_broken",
  None,
  ["error", "skip"],
  "What happens to images that cannot be decoded. Default: data.on_broken of the config.",
)

_ALLOW_SEEN = absl_flags.DEFINE_bool(
  "allow_seen_classes",
  False,
  "Search val or test also if the model was trained on classes of it: a warning, not an error.",
)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv, without_config="--workdir=runs/mine --query=photo.jpg")
  from soprc_jax._internal import file_io, strings
  from soprc_jax.data import sources
  from soprc_jax.serving import embed, index, network, search, shard_search, sheet

  with flags.errors_as_messages():
    queries = search.find_queries(_QUERY.value)
    paths = list(sources.ids(queries))
    if sources.width(queries) and (_SKIP_QUERY.value or _CONTACT_SHEET.value):
      raise ValueError(
        "--skip_query and --contact_sheet are for image files, and --query has stored embeddings"
      )
    picture = (
      file_io.given(_CONTACT_SHEET.value, name="--contact_sheet") if _CONTACT_SHEET.value else None
    )
    if picture is not None:
      index.check_output(picture, flag="--contact_sheet", suffix=".png")
      sheet.check_size(len(paths), _TOP.value)
    if _INDEX.value and absl_flags.FLAGS["split"].present:
      raise ValueError("--index and --split exclude each other: give one of them")
    file = None if _INDEX.value is None else file_io.given(_INDEX.value or "", name="--index")
    opened, gallery = _open(file, draws=picture is not None)
    found = network.load(
      run.workdir, run.config, newest=_CHECKPOINT.value == "newest", on_broken=_ON_BROKEN.value
    )
    if file is not None and gallery is not None:
      embedder = None
      index.check_network(gallery, found, name=f"--index={file}")
      names = gallery.class_names if opened is None else shard_search.class_names(opened)
      seen = search.check_unseen(found, gallery.split, names, allow_seen_classes=_ALLOW_SEEN.value)
    else:
      embedder, source = network.make_embed(found), embed.split_source(found, _SPLIT.value)
      shown = sources.shown_classes(source)
      seen = search.check_unseen(found, _SPLIT.value, shown, allow_seen_classes=_ALLOW_SEEN.value)
      gallery = embed.make_index(found, source, split=_SPLIT.value, embed=embedder)
    vectors = search.embed_queries(found, queries, embedder)
    top = _TOP.value + _SKIP_QUERY.value
    if opened is None:
      rows = search.nearest(gallery, vectors, top=top, backend=_BACKEND.value)
    else:
      gallery, rows = shard_search.nearest(
        opened, gallery, vectors, top=top, candidates=_CANDIDATES.value
      )
    if _SKIP_QUERY.value:
      folder = search.folder_of(gallery, found.config)
      rows, kept = search.without_query(paths, rows, top=_TOP.value, folder=folder)
      if kept:
        print(
          f"--skip_query: {strings.printable(kept[0])} is not among what was found in {folder}, so "
          f"nothing was left out ({len(kept)} of {len(paths)} queries).",
          file=sys.stderr,
        )
    if picture is not None:
      sheet.write(picture, sheet.draw(gallery, paths, rows, sheet.loader(gallery, found.config)))
  if _FORMAT.value == "json":
    print(
      search.to_json(
        gallery, paths, rows, seen_classes=seen, num_images=opened and opened.num_images
      )
    )
  else:
    tables = [search.table(row, classes=gallery.has_classes) for row in rows]
    heads = [f"{strings.printable(path)}:\n" if len(rows) > 1 else "" for path in paths]
    print("\n\n".join(head + table for head, table in zip(heads, tables, strict=True)))
  if picture is not None:
    print(f"Contact sheet: {strings.printable(picture)}", file=sys.stderr)


def _open(
  file: "Path | None", *, draws: bool
) -> "tuple[shard_index.Opened | None, index.Index | None]":
  """Reads the index: that of shards, and what describes it; or the file of `soprc embed`."""
  from soprc_jax.serving import index, shard_index, shard_search

  of_shards = file is not None and file.suffix.lower() in shard_index.SUFFIXES
  if absl_flags.FLAGS["candidates"].present and not of_shards:
    raise ValueError("--candidates is for an --index of soprc index: the search is exact")
  if file is None or not of_shards:
    return None, None if file is None else index.read(file)
  if absl_flags.FLAGS["backend"].present:
    raise ValueError("--backend is for other galleries: the index decides what searches it")
  opened = shard_index.read(file)
  about = shard_search.described(opened)
  if about.split and draws:
    raise ValueError("--contact_sheet is for files of images, and the index is of a split")
  return opened, about


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
