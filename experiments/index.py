r"""Builds an index of embeddings in files, for soprc search in galleries of any size.

soprc index --gallery='shards/*.npy' --kind=ivfpq --output=photos.faiss

--gallery is a file, a folder or a pattern of the shards of soprc embed --shard. --kind is one of

* ivfpq: an inverted file with short codes, of faiss: the smallest, for the largest galleries;
* hnsw: a graph of float32 vectors, of faiss: fast, and larger than the embeddings;
* usearch: a graph of float16 vectors, of usearch;
* int8, binary: all vectors in 8 bits or one bit a number, of faiss, which are all compared.

faiss and usearch read the file too. FILE.json has the digest of the model and the state of the
shards, which stay where they are: soprc search reads exact vectors, ids and classes from them.

The program prints the recall of the index: which share of the 10 nearest images it finds, for 500
images of the gallery, alone and among its first 100 results. It needs the package faiss (pip
install faiss-cpu) or usearch (pip install usearch).
"""

from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments import flags

_GALLERY = absl_flags.DEFINE_string(
  "gallery", None, "File, folder or pattern of the shards of soprc embed."
)
_KIND = absl_flags.DEFINE_enum(
  "kind", None, ["ivfpq", "hnsw", "int8", "binary", "usearch"], "Kind of the index."
)
_OUTPUT = absl_flags.DEFINE_string(
  "output", None, "File to write, FILE.faiss or FILE.usearch; must not exist."
)


def main(argv: Sequence[str]) -> None:
  flags.require(
    argv,
    "--gallery='shards/*.npy' --kind=ivfpq --output=photos.faiss",
    gallery=_GALLERY.value,
    kind=_KIND.value,
    output=_OUTPUT.value,
  )
  from soprc_jax._internal import file_io, strings
  from soprc_jax.serving import shard_index

  with flags.errors_as_messages():
    output = file_io.given(str(_OUTPUT.value), name="--output")
    kind = str(_KIND.value)
    shard_index.check_output(output, kind)
    found = shard_index.find(str(_GALLERY.value), flag="--gallery")
    rows = sum(shard.rows for shard in found)
    with flags.vectors_bar(rows) as bar:
      recall = shard_index.build(output, found, kind, on_rows=bar.update)
  print(
    f"{rows:,} embeddings, {output.stat().st_size / rows:.0f} bytes each. Recall of the index for "
    f"{recall.num_queries} images of the gallery: {recall.alone:.3f} of the {shard_index.TOP} "
    f"nearest, {recall.rescored:.3f} among its first {shard_index.CANDIDATES}.\n"
    f"Written to {strings.printable(output)}"
  )


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
