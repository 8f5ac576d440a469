r"""SOPRC on PKU VehicleID, as in the paper.

The model is a ResNet-50 from ImageNet weights with frozen batch norm, trained for 100,000 steps.

soprc train --config=vehicle_id --config.data.root=DATA/VehicleID_V1.0 \
    --config.model.init_from=resnet50.pth --workdir=runs/vehicle_id

Reported by the paper, mAUPRC / recall@1 / @5: small 83.11 / 95.41 / 97.69, medium 79.00 / 93.67 /
96.68, large 74.92 / 92.56 / 96.43 (the appendix prints 74.95 / 92.50 / 96.44 for the last); with
``trainval`` 83.70 / 95.41 / 97.72, 79.84 / 93.80 / 96.77, 75.56 / 92.83 / 96.48. Not run here yet.
results.json has large as ``test``, next to ``test_medium`` and ``test_small``. Their gallery is all
test images. ``*_one_per_class`` is the protocol of the data set's authors: a gallery of one random
image per vehicle, ten times. Estimated, not measured: about 16 hours on one A100 or H100, with 16
CPU cores for the images and 24 GB of GPU memory.

The paper's text gives no tau, lambda or M. The values tau1 = 0.1, tau2 = 0.001, lambda = (1, 5) and
M = 100 are those of the authors' code. Here beta is 0.1, in the paper 0.001: beta counts the visits
of a class, and a class is visited a few hundred times (docs/paper.md, errata 10).

Arguments, joined by commas (``--config=vehicle_id:paper,crop``):

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
  authors' random resized crop.
"""

from typing import Any

from configs import common


def get_config(arg: str = "") -> Any:
  config = common.photograph_config(
    "vehicle_id",
    learning_rate=0.001,
    milestones=(40_000, 80_000),
    steps=100_000,
    prior=0.1,
    ks=(1, 5),
  )
  config.eval.one_per_class = 10
  return common.apply(config, arg, ARGUMENTS)


ARGUMENTS = common.photograph_arguments(sgd_rate=0.001)
