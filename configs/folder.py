r"""Your own images: a folder with one subfolder a class, or a CSV file.

soprc train --config=folder --config.data.root=IMAGES --workdir=runs/mine
soprc train --config=folder:csv --config.data.root=images.csv --workdir=runs/mine

Half of the classes are for training, a tenth for validation and the rest for testing. No class is
in two splits. A CSV file (UTF-8, header path,label or path,label,split, paths relative to its
folder) can define the splits itself. To start from ImageNet weights, give
``--config.model.init_from=resnet18.pth`` (see ``soprc convert-weights``). With random weights batch
norm is trained.

Batches are made of classes that the model takes for each other (``data.sampler=confusable``). The
loss is minus the logarithm of the precision (``loss.link=log``) at two widths (``loss.tau1``,
``loss.wide``), plus a pull on the images of a class (``loss.pull``). docs/behaviour.md has what
each gained on three data sets.

Batch, image size and learning rate follow the data: ``soprc_jax/training/defaults.py`` has the
rules. The log and the report have each choice with its reason. A value that you set overrides it.
``--minutes=5`` chooses the number of steps by a time budget.

Expected time: 1,000 steps of ResNet-18 at 128 pixels, batch 64, take an estimated 3 minutes on a
GPU and some hours on two CPU cores. ``:small`` is for CPUs.

Arguments, joined by commas:

* ``csv``: ``data.root`` is a CSV file with path,label or path,label,split;
* ``pretrained``: frozen batch norm, a small learning rate and a constant prior, to start from
  ``--config.model.init_from``;
* ``vit``: a vision transformer, by default that of ``--config.model.init_from``, whose features are
  the embeddings. Learning rate and image size are those of pretrained weights;
* ``small``: three convolutions at 32 pixels and 1,000 steps, which take some minutes on two CPU
  cores; for small images in which the object is where it is in all others. Images are moved a
  little and not mirrored;
* ``soprc``: the file as it is; ``contrastive``, ``triplet``, ``multi_similarity``, ``xbm``,
  ``smooth_ap``, ``fast_ap``, ``listwise_ap``, ``blackbox``, ``auroc``, ``sup_ap``,
  ``quad_linear_ap``, ``recall_at_k``, ``sup_con``, ``sigmoid``, ``proxy_anchor``,
  ``norm_softmax``, ``arc_face``, ``ap``: another loss;
* ``paper``, ``authors``: the preset of that name (docs/paper.md, errata);
* ``ablation1`` .. ``ablation5``: the rows of the paper's Table 2.
"""

from typing import Any

from configs import common
from soprc_jax.training import config as config_lib
from soprc_jax.training import defaults


def get_config(arg: str = "") -> Any:
  config = config_lib.default_config()
  config.data.update({"source": "folder", "workers": 0})
  config.model.update({"name": "resnet18", "embedding_dim": 128, "freeze_bn": False})
  # A crop of a fifth of an image, the paper's, may not show its class.
  config.data.min_crop_area = 0.5
  config.data.sampler = "confusable"
  common.log_link_recipe(config)
  # SOPRC alone leaves the images of a class as far apart as the ranking allows.
  config.presets.default.pull = 8.0
  # At a narrow tau1 alone, classes that are ranked well are not moved further apart.
  config.presets.default.wide = 0.25
  # With 1 / (M + 1) the risk of the best-ranked positives, whose T is small, outweighs the others'.
  config.presets.default.self_weight = 0.25
  config.train.steps = 1000
  config.eval.update({"every": 100, "ks": (1, 5, 10)})
  config.checkpoint.every = 100
  config_lib.leave_open(config, *defaults.KEYS)
  common.compared(config, rates=(0.0005, 0.002, 0.008), sgd_rates=(0.03, 0.1, 0.3))
  return common.apply(config, arg, ARGUMENTS)


def _csv(config: Any) -> None:
  config.data.source = "csv"


def _pretrained(config: Any) -> None:
  config.model.freeze_bn = True


def _vit(config: Any) -> None:
  # The features themselves, so that training starts from their ranking.
  config.model.update({"name": "vit", "embedding_dim": 0})
  config_lib.leave_open(config, *defaults.VIT_KEYS)
  config.compare.update({"rates": (5e-6, 2e-5, 8e-5), "sgd_rates": (3e-4, 1e-3, 3e-3)})


def _small(config: Any) -> None:
  config.model.update({"name": "conv3", "width": 32, "pool_grid": 4})
  # Larger movements, crops and mirrors destroy what tells icons or characters apart.
  config.data.update({"augmentation": "affine", "flip": False})
  config.data.update({"max_rotation": 5.0, "max_scale": 0.1, "max_shear": 0.05})


ARGUMENTS = {
  **common.method_arguments(),
  **common.ablation_arguments(sgd_rate=0.1, adam_rate=2e-3),
  "csv": _csv,
  "pretrained": _pretrained,
  "small": _small,
  "vit": _vit,
}
