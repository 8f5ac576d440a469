r"""SOPRC on the embedded data set: characters as classes, faces as images, from random weights.

python -m experiments.train --config=configs/glyphs.py --workdir=runs/glyphs

An argument chooses a variant: ``--config=configs/glyphs.py:triplet``.
"""

from typing import Any

from soprc_jax.training import config as config_lib

VARIANTS = ("", "triplet")


def get_config(arg: str = "") -> Any:
  if arg not in VARIANTS:
    raise ValueError(f"the argument must be one of {', '.join(VARIANTS[1:])}, or none; got {arg!r}")
  config = config_lib.default_config()
  config.data.image_size = 32
  config.data.augmentation = "affine"
  config.model.name = "resnet8"
  config.model.width = 32
  config.model.stem = "small"
  config.model.stem_stride = 2
  config.model.embedding_dim = 128
  config.model.freeze_bn = False
  config.loss.tau1 = 0.03
  config.loss.lambda1 = 0.0
  config.loss.lambda2 = 0.0
  config.presets.default.prior.update({"kind": "constant", "value": 0.03, "start": 0.5})
  config.optim.name = "adam"
  config.optim.learning_rate = 4e-3
  config.optim.schedule = "cosine"
  config.optim.weight_decay = 0.0
  config.train.steps = 600
  config.eval.every = 100
  config.eval.image_size = 32
  config.checkpoint.every = 100
  if arg == "triplet":
    config.loss.name = "triplet"
  return config
