r"""Finds the images of a data set that are nearest to one image, by the network of a training run.

python -m experiments.search --config=configs/folder.py --config.data.root=IMAGES --workdir=runs/mine --query=photo.jpg [--split=all] [--top=10] [--checkpoint=best]

Give the same --config flags as in training. Printed are the cosine similarity, the class and the image, the nearest first (the image itself, if it is among them).
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.adopt_module_key_flags(flags)
_QUERY = absl_flags.DEFINE_string("query", None, "Image file.")
_SPLIT = absl_flags.DEFINE_string(
  "split", "all", "Images to search: all, train, val or test (VehicleID: also test_medium, test_small)."
)
_CHECKPOINT = absl_flags.DEFINE_enum("checkpoint", "best", ["best", "newest"], "Which checkpoint: best on val, or newest.")
_TOP = absl_flags.DEFINE_integer("top", 10, "Number of images to show.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv)
  from soprc_jax.training import evaluation, search

  with flags.errors_as_messages():
    query = Path(_QUERY.value or "").expanduser()
    if not query.is_file():
      reason = (
        "an image file is wanted" if not _QUERY.value else "that is a folder" if query.is_dir() else "there is no such file"
      )
      raise FileNotFoundError(f"--query={_QUERY.value or ''}: {reason}")
    trained = evaluation.load(run.config, run.workdir, newest=_CHECKPOINT.value == "newest")
    found = search.nearest(trained, query, split=_SPLIT.value, top=_TOP.value)
  width = max(len("class"), *(len(neighbour.class_name) for neighbour in found))
  print(f"similarity  {'class':<{width}}  image")
  for neighbour in found:
    print(f"{neighbour.similarity:10.4f}  {neighbour.class_name:<{width}}  {neighbour.id}")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
