r"""Embeds images with the model of a training run and writes the vectors to a file.

`soprc search` and numpy read the file.

soprc embed --workdir=runs/mine --output=vectors.npz --images=PHOTOS
soprc embed --workdir=runs/mine --output=vectors.npz --split=test [--config=folder \
    --config.data.root=IMAGES]

--images is one of:

* a folder, with all its subfolders; no classes are needed;
* a CSV file with a header path or path,label;
* a text file with one path per line, relative to the folder of the text file. A name with blanks at
  its ends is kept as it is if such a file exists;
* a .tar file of images (WebDataset: the class of KEY.jpg is the text of KEY.cls), a .parquet file
  with a column of encoded images, or a pattern of them like 'data/*.tar';
* for a head on stored embeddings, a file of them (.npz, .npy, .parquet, .h5).

Otherwise the images are those of a --split of the data that the run was trained on. With --config,
given with the same flags as in training, they are those of a --split of its data. A corrupt or
unreadable image ends the program with its name; --on_broken=skip leaves it out and counts it.

soprc embed --workdir=runs/mine --output=DIR --images=PHOTOS --shard=I/N [--dtype=float16] \
    [--format=npy]

embeds the part I of N (from 0) of the same images into the folder DIR: shard-I-of-N.npy, a .parquet
file (.csv without pyarrow) of ids and labels, and a .json file of the origin. --format=fbin writes
.fbin (big-ann-benchmarks, cuVS), --format=h5 HDF5 (ILIAS) instead of .npy. A finished shard is
skipped. So the same commands, in any order and on any machines, resume. soprc evaluate needs
labels: those of a --split, a CSV file with path,label, or a tar or Parquet file. A folder has none.

The file has embeddings [N, D] float32, ids [N], class_names [N] (empty where unknown), labels (of a
split), and their origin: workdir, step, digest of the model's variables, model, image_size. Read it
with numpy.load("vectors.npz").
"""

from collections.abc import Sequence
from pathlib import Path
import shlex
from typing import TYPE_CHECKING

from absl import app
from absl import flags as absl_flags

from experiments import flags

if TYPE_CHECKING:  # imported later, so that a mistake in a flag is reported at once
  from soprc_jax.data.sources import Source
  from soprc_jax.serving.network import Network

absl_flags.declare_key_flag("config")
absl_flags.declare_key_flag("workdir")
_OUTPUT = absl_flags.DEFINE_string("output", None, "File to write, FILE.npz; must not exist.")
_IMAGES = absl_flags.DEFINE_string(
  "images", None, "Folder, CSV file or list of images, instead of a split of the data."
)
_SPLIT = absl_flags.DEFINE_string(
  "split",
  "all",
  "Images of the data: all, train, val or test (VehicleID: also test_medium, test_small).",
)
_CHECKPOINT = absl_flags.DEFINE_enum(
  "checkpoint", "best", ["best", "newest"], "Checkpoint: best validation mAUPRC, or newest."
)
_ON_BROKEN = absl_flags.DEFINE_enum(
  "on_broken",
  None,
  ["error", "skip"],
  "What happens to images that cannot be decoded. Default: data.on_broken of the config.",
)
_SHARD = absl_flags.DEFINE_string(
  "shard", None, "I/N: embed only part I (from 0) of N, and write it into the folder --output."
)
_DTYPE = absl_flags.DEFINE_enum(
  "dtype", "float32", ["float32", "float16"], "With --shard: type of the stored numbers."
)
_FORMAT = absl_flags.DEFINE_enum(
  "format", "npy", ["npy", "fbin", "h5"], "With --shard: format of the file of embeddings."
)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv, without_config="--workdir=runs/mine --output=vectors.npz --images=PHOTOS")
  flags.require(
    argv, "--workdir=runs/mine --output=vectors.npz --images=PHOTOS", output=_OUTPUT.value
  )
  from soprc_jax._internal import file_io
  from soprc_jax.serving import embed, image_inputs, index, network, shard_formats, shards

  with flags.errors_as_messages():
    if _IMAGES.value and absl_flags.FLAGS["split"].present:
      raise ValueError("--images and --split exclude each other: give one of them")
    output = file_io.given(str(_OUTPUT.value), name="--output")
    part = shards.part(_SHARD.value, flag="--shard") if _SHARD.value else None
    if part is None:
      index.check_output(output, suffix=".npz")
      for name, single in (("dtype", "has float32"), ("format", "is .npz")):
        if absl_flags.FLAGS[name].present:
          raise ValueError(f"--{name} is for --shard: a single file {single}")
    shard_formats.check_written(f".{_FORMAT.value}", str(_DTYPE.value))
    # Before the model is read: only its config says whether links may be dangling.
    on_broken = _ON_BROKEN.value or "skip"
    source = (
      None
      if not _IMAGES.value
      else image_inputs.find(_IMAGES.value, flag="--images", on_broken=on_broken)
    )
    found = network.load(
      run.workdir, run.config, newest=_CHECKPOINT.value == "newest", on_broken=_ON_BROKEN.value
    )
    if part is not None:
      _embed_shard(found, source, output, part)
      return
    made = embed.of_split(found, _SPLIT.value) if source is None else embed.of_images(found, source)
    index.write(output, made)
  print(embed.summary(made, output))
  workdir, index_file = shlex.quote(str(run.workdir)), shlex.quote(str(output))
  newest = " --checkpoint=newest" if _CHECKPOINT.value == "newest" else ""
  print(
    f"Search in it:\n  soprc search --workdir={workdir}{newest} --index={index_file} "
    f"--query={'PHOTO.jpg' if made.image_size else 'QUERIES.npz'}"
  )


def _embed_shard(
  network: "Network", source: "Source | None", folder: Path, part: tuple[int, int]
) -> None:
  """Embeds one shard, unless it exists."""
  from soprc_jax._internal import file_io, strings
  from soprc_jax.serving import embed, shard_writing, shards

  source = embed.split_source(network, _SPLIT.value) if source is None else source
  path = folder / f"{shards.name(*part)}.{_FORMAT.value}"
  images = shard_writing.part_of(source, *part)
  inputs = shard_writing.inputs_digest(source)
  file_io.make_folder(folder, name="--output")
  shard_writing.remove_stale(path)
  if shard_writing.is_finished(path, network, dtype=_DTYPE.value, inputs=inputs, count=part[1]):
    print(f"{strings.printable(path)} is finished.")
    return
  if _IMAGES.value:
    made = embed.of_images(network, images, may_be_empty=True)
  else:
    made = embed.make_index(network, images, split=_SPLIT.value, may_be_empty=True)
  shard_writing.write(path, made, dtype=_DTYPE.value, inputs=inputs)
  print(embed.summary(made, path))


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
