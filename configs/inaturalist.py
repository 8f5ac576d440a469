r"""SOPRC on iNaturalist 2018 with the retrieval split of SmoothAP, as in the paper.

The model is a ResNet-50 from ImageNet weights with frozen batch norm, trained for 130,000 steps.

soprc train --config=inaturalist --config.data.root=DATA/inaturalist \
    --config.model.init_from=resnet50.pth --workdir=runs/inaturalist

Reported by the paper (test, 136,093 images of 2,452 classes): mAUPRC 36.16, recall@1 68.22, @4
82.86, @16 91.02, @32 93.71; with ``trainval`` 37.31, 69.23, 83.41, 91.29, 93.81. Not run here yet.
Estimated, not measured: about 21 hours on one A100 or H100, with 16 CPU cores for the images and 24
GB of GPU memory.

The paper's text gives no tau, lambda or M. The values tau1 = 0.1, tau2 = 0.001, lambda = (1, 5) and
M = 100 are those of the authors' code. Here beta is 0.1, in the paper 0.001: beta counts the visits
of a class, and a class is visited a few hundred times (docs/paper.md, errata 10).

Arguments, joined by commas (``--config=inaturalist:paper,crop``):

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
    "inaturalist",
    learning_rate=0.001,
    milestones=(80_000, 110_000),
    steps=130_000,
    prior=0.1,
    ks=(1, 4, 16, 32),
  )
  return common.apply(config, arg, ARGUMENTS)


def _tfds(config: Any) -> None:
  config.data.source = "tfds_inaturalist"


ARGUMENTS = {**common.photograph_arguments(sgd_rate=0.001), "tfds": _tfds}
