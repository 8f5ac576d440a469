r"""SOPRC on Stanford Online Products, as in the paper.

The model is a ResNet-50 from ImageNet weights with frozen batch norm, trained for 50,000 steps of
224 = 56 x 4 images.

soprc train --config=sop --config.data.root=DATA/Stanford_Online_Products \
    --config.model.init_from=resnet50.pth --workdir=runs/sop

Reported by the paper (test, 60,502 images of 11,316 classes): mAUPRC 62.75, recall@1 81.91, @10
92.50, @100 96.97, @1000 98.96; with ``trainval`` 63.27, 82.15, 92.69, 97.11, 99.02. Not run here
yet. Estimated, not measured: about 8 hours on one A100 or H100, with 16 CPU cores for the images
and 24 GB of GPU memory.

The paper's text gives no tau, lambda or M. The values tau1 = 0.1, tau2 = 0.001, lambda = (1, 5) and
M = 100 are those of the authors' code. Here beta is 0.1, in the paper 0.001: beta counts the visits
of a class, and a class is visited a few hundred times (docs/paper.md, errata 10).

Arguments, joined by commas (``--config=sop:paper,crop``):

* ``soprc``: the file as it is; ``contrastive``, ``triplet``, ``multi_similarity``, ``xbm``,
  ``smooth_ap``, ``fast_ap``, ``listwise_ap``, ``blackbox``, ``auroc``, ``sup_ap``,
  ``quad_linear_ap``, ``recall_at_k``, ``sup_con``, ``sigmoid``, ``proxy_anchor``,
  ``norm_softmax``, ``arc_face``, ``ap``: another loss;
* ``paper``, ``authors``: the preset of that name (docs/paper.md, errata), with the paper's beta =
  0.001;
* ``ablation1`` .. ``ablation5``: the rows of the paper's Table 2; rows 1 to 4 by SGD, row 5 by
  Adam;
* ``adam``: Adam at learning rate 1e-4 (the paper gives none) instead of SGD;
* ``trainval``: training on the validation classes too;
* ``crop``: shorter side to 256, then a random crop of 224, as the paper's text says, instead of the
  authors' random resized crop;
* ``tfds``: the data as prepared by TensorFlow Datasets, see soprc_jax/data/tfds_source.py.
"""

from typing import Any

from configs import common


def get_config(arg: str = "") -> Any:
  config = common.photograph_config(
    "sop",
    learning_rate=0.01,
    milestones=(15_000, 30_000),
    steps=50_000,
    prior=0.01,
    ks=(1, 10, 100, 1000),
  )
  return common.apply(config, arg, ARGUMENTS)


def _tfds(config: Any) -> None:
  config.data.source = "tfds_sop"


ARGUMENTS = {**common.photograph_arguments(sgd_rate=0.01), "tfds": _tfds}
