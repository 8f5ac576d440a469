r"""SOPRC at the scale of the paper's data sets: Han and Hangul characters in many typefaces.

The classes are characters, and the images of a class are the character in different typefaces, each
image distorted in its own way. The default has the numbers of classes and images of Stanford Online
Products. The fonts come from Debian packages, see docs/datasets.md:

soprc train --config=characters --config.data.root=FONTS/usr/share/fonts \
    --workdir=runs/characters

The images are rendered at the first start, which takes one or two minutes, and cached.

Arguments, joined by commas (``--config=characters:inat,triplet``):

* ``64``: images of 64 pixels instead of 32;
* ``inat``: the numbers of classes and images of iNaturalist's retrieval split;
* ``pretrain``: 10,000 classes that are in no split, for a model to start from;
* ``finetune``: a small learning rate, to start from ``--config.model.init_from=WORKDIR``;
* ``soprc``: the file as it is; ``contrastive``, ``triplet``, ``multi_similarity``, ``xbm``,
  ``smooth_ap``, ``fast_ap``, ``listwise_ap``, ``blackbox``, ``auroc``, ``sup_ap``,
  ``quad_linear_ap``, ``recall_at_k``, ``sup_con``, ``sigmoid``, ``proxy_anchor``,
  ``norm_softmax``, ``arc_face``, ``ap``: another loss;
* ``paper``, ``authors``: the preset of that name (docs/paper.md, errata);
* ``ablation1`` .. ``ablation5``: the rows of the paper's Table 2.
"""

from collections.abc import Callable
from typing import Any

from configs import common
from soprc_jax.training import config as config_lib


def get_config(arg: str = "") -> Any:
  config = config_lib.default_config()
  config.data.update({"source": "characters", "image_size": 32, "val_share": 0.1})
  # Mirrored characters are other characters.
  config.data.update({"augmentation": "affine", "flip": False})
  config.data.update({"max_rotation": 5.0, "max_scale": 0.1, "max_shear": 0.05})
  config.model.update({"name": "conv3", "width": 32, "pool_grid": 4, "embedding_dim": 128})
  config.model.freeze_bn = False
  common.log_link_recipe(config)
  config.optim.learning_rate = 8e-3
  config.train.update({"steps": 2000, "batch_size": 256})
  config.eval.update({"every": 500, "image_size": 32})
  config.checkpoint.every = 500
  common.compared(config, rates=(0.002, 0.008, 0.032), sgd_rates=(0.03, 0.1, 0.3))
  return common.apply(config, arg, ARGUMENTS)


def _side_64(config: Any) -> None:
  config.data.characters.side = 64
  config.data.image_size = 64
  config.eval.image_size = 64
  config.model.name = "resnet8"
  config.model.stem = "small"


def _inat(config: Any) -> None:
  config.data.characters.update({"train_classes": 5690, "train_images": 325_846})
  config.data.characters.update({"test_classes": 2452, "test_images": 136_093})
  config.data.characters.update({"min_images": 10, "max_images": 250})
  config.eval.ks = (1, 4, 16, 32)


def _pretrain(config: Any) -> None:
  config.data.characters.update({"pretrain_classes": 10_000, "pretrain_images": 60_000})


def _finetune(config: Any) -> None:
  config.optim.learning_rate = 1e-3
  config.train.steps = 1000


ARGUMENTS: dict[str, Callable[[Any], None]] = {
  **common.method_arguments(),
  **common.ablation_arguments(sgd_rate=0.1, adam_rate=8e-3),
  "64": _side_64,
  "inat": _inat,
  "pretrain": _pretrain,
  "finetune": _finetune,
}
