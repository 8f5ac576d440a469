r"""A head on stored embeddings of any model (DINOv2, CLIP, ...), trained for average precision.

soprc train --config=features --config.data.root=features.npz --workdir=runs/head

The file has embeddings, labels, and optionally splits and ids: docs/howto/features.md. Without
splits, half of the classes are for training, a tenth for validation and the rest for testing. No
class is in two splits. The test result stands beside that of the features as they are.

Widths, batch and learning rate follow the data: ``soprc_jax/training/defaults.py`` has the rules.
``--minutes=5`` chooses the number of steps by a time budget.

Arguments, joined by commas:

* ``mlp``: one hidden layer instead of a linear head;
* ``residual``: the features plus a small network, which starts at 0;
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
  config.data.update({"source": "features", "augmentation": "none"})
  config.model.update({"name": "linear", "freeze_bn": False})
  common.log_link_recipe(config)
  # SOPRC alone leaves the vectors of a class as far apart as the ranking allows.
  config.presets.default.pull = 8.0
  # At a narrow tau1 alone, classes that are ranked well are not moved further apart.
  config.presets.default.wide = 0.25
  config.train.steps = 1000
  config.eval.update({"every": 100, "ks": (1, 5, 10)})
  config.checkpoint.every = 100
  config_lib.leave_open(config, *defaults.FEATURES_KEYS)
  common.compared(config, rates=(0.00025, 0.001, 0.004), sgd_rates=(0.03, 0.1, 0.3))
  return common.apply(config, arg, ARGUMENTS)


def _mlp(config: Any) -> None:
  config.model.name = "mlp"


def _residual(config: Any) -> None:
  config.model.name = "residual"


ARGUMENTS = {
  **common.method_arguments(),
  **common.ablation_arguments(sgd_rate=0.1, adam_rate=1e-3),
  "mlp": _mlp,
  "residual": _residual,
}
