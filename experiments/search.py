r"""Finds the images of a data set that are nearest to one image, by the network of a training run.

python -m experiments.search --config=configs/folder.py --config.data.root=IMAGES --workdir=runs/mine --query=photo.jpg [--split=all] [--top=10]

Give the same --config flags as in training. Printed are the cosine similarity, the class and the image, the nearest first (the image itself, if it is among them).
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app
from absl import flags as absl_flags

from experiments import flags

absl_flags.adopt_module_key_flags(flags)
_QUERY = absl_flags.DEFINE_string("query", None, "Image file.")
_SPLIT = absl_flags.DEFINE_string("split", "all", "Images to search: all, train, val or test.")
_TOP = absl_flags.DEFINE_integer("top", 10, "Number of images to show.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  run = flags.read(argv)
  from soprc_jax.training import evaluation, search

  with flags.errors_as_messages():
    if not _QUERY.value or not Path(_QUERY.value).expanduser().is_file():
      raise FileNotFoundError(f"--query={_QUERY.value or ''} must be an image file")
    trained = evaluation.load(run.config, run.workdir)
    found = search.nearest(trained, Path(_QUERY.value).expanduser(), split=_SPLIT.value, top=_TOP.value)
  print("similarity  class  image")
  for neighbour in found:
    print(f"{neighbour.similarity:10.4f}  {neighbour.label:5d}  {neighbour.id}")


if __name__ == "__main__":
  app.run(main, flags_parser=flags.parse)
