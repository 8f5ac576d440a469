r"""Several labels, and classes with a long tail, by mean average precision.

soprc train-binary --config=multilabel:yeast --config.data.root=FOLDER --workdir=runs/yeast

The data sets are in docs/datasets.md. Arguments, joined by commas:

* ``yeast``: 2,417 genes with 103 features and 14 labels, from a package of Debian;
* ``glyph_labels``: the embedded glyphs with 50 labels of style, script, kind and marks; the test
  characters are not among the training characters;
* ``glyph_classes``: 100 characters of the embedded glyphs, 10 to 2 training images by a power law;
* ``character_labels``: 600 Hangul and 200 Han characters from a folder of fonts (data.root), with
  labels of style, script and Hangul letters; the test characters are not among the others;
* ``character_classes``: 100 of these characters, 30 to 2 training images by a power law;
* ``smoke``: a few steps at two seeds, to check that everything works.

docs/config.md describes all keys. All methods choose from one grid of learning rates. The other
values are those of the papers, or were set before the first result.
"""

from collections.abc import Callable
from typing import Any

from configs import common
from experiments.binary import binary_config
from soprc_jax.data import multilabel

# AUROC is a loss of a single list.
_METHODS = ("soprc", "ap", "cross_entropy", "weighted_cross_entropy", "focal", "asl")


def get_config(arg: str = "glyph_labels") -> Any:
  chosen = [name for name in arg.split(",") if name in multilabel.DATA_SETS]
  if len(chosen) > 1:
    raise ValueError(
      f"the arguments name {len(chosen)} data sets, {' and '.join(chosen)}: choose one"
    )
  config = binary_config.default_config()
  config.methods = _METHODS
  config.data.update({"name": "glyph_labels", "batch_size": 128, "classes_per_batch": 8})
  config.seeds = (0, 1, 2)
  config.rates = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
  config.train.steps, config.eval.every = 600, 60
  return common.apply(config, arg, ARGUMENTS)


def _yeast(config: Any) -> None:
  config.data.update({"name": "yeast", "classes_per_batch": 4, "per_class": 4})


def _glyph_labels(config: Any) -> None:
  config.data.name = "glyph_labels"


def _glyph_classes(config: Any) -> None:
  config.methods = (*_METHODS, "softmax")
  config.data.update({"name": "glyph_classes", "classes_per_batch": 32})
  config.data.long_tail.update({"head": 10, "tail": 2})


def _character_labels(config: Any) -> None:
  config.data.name = "character_labels"


def _character_classes(config: Any) -> None:
  config.methods = (*_METHODS, "softmax")
  config.data.update({"name": "character_classes", "classes_per_batch": 32})
  config.data.long_tail.update({"head": 30, "tail": 2, "val_images": 3, "test_images": 8})


def _smoke(config: Any) -> None:
  config.seeds, config.rates, config.model.widths = (0, 1), (0.003, 0.01), (8,)
  config.train.steps, config.eval.every = 20, 10


ARGUMENTS: dict[str, Callable[[Any], None]] = {
  "yeast": _yeast,
  "glyph_labels": _glyph_labels,
  "glyph_classes": _glyph_classes,
  "character_labels": _character_labels,
  "character_classes": _character_classes,
  "smoke": _smoke,
}
