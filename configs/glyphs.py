r"""SOPRC on the embedded data set ``glyphs``, from random weights.

The classes are characters, and the images of a class are the character in different typefaces.

soprc train --config=glyphs --workdir=runs/glyphs

Expected: test mAUPRC 0.83 to 0.84, recall@1 0.94 to 0.95 (seed 0; rounding differs by machine) in
about 2 minutes on two CPU cores.

Arguments, joined by commas, change the run: ``--config=glyphs:authors`` or ``:finetune,triplet``.

* ``soprc``: the file as it is;
* ``contrastive``, ``triplet``, ``multi_similarity``, ``xbm``, ``smooth_ap``, ``fast_ap``,
  ``listwise_ap``, ``blackbox``, ``auroc``, ``sup_ap``, ``quad_linear_ap``, ``recall_at_k``,
  ``sup_con``, ``sigmoid``, ``proxy_anchor``, ``norm_softmax``, ``arc_face``, ``ap``: another loss
  instead of SOPRC;
* ``paper``, ``authors``: the preset of that name (docs/paper.md, errata) with its prior and
  semi-variance term;
* ``ablation1`` .. ``ablation5``: the rows of the paper's Table 2: (1) biased prior, v of the batch;
  (2) unbiased prior, v of the batch; (3) carried v; (4) with the semi-variance term; (5) the same
  with Adam. Rows 1 to 4 use SGD;
* ``finetune``: 150 steps with frozen batch norm, as in the paper, from
  ``--config.model.init_from=WORKDIR`` of another run;
* ``compare``: a smaller model and 200 steps, for ``soprc compare``, which then makes 60 runs in
  about 45 minutes, and for ``soprc ablate``;
* ``smoke``: 4 steps of a tiny model, to check that everything works.
"""

from collections.abc import Callable
from typing import Any

from configs import common
from soprc_jax.training import config as config_lib


def get_config(arg: str = "") -> Any:
  config = config_lib.default_config()
  # No flip: b is not d.
  config.data.update({"image_size": 32, "augmentation": "affine", "flip": False})
  config.model.update(
    {"name": "resnet8", "width": 32, "stem": "small", "stem_stride": 2, "embedding_dim": 128}
  )
  config.model.freeze_bn = False
  # From random weights a small prior starves the gradient. Once the model ranks well, a small prior
  # is better.
  config.presets.default.prior.update({"kind": "constant", "value": 0.03, "start": 0.5})
  config.loss.tau1 = 0.03
  config.optim.update(
    {"name": "adam", "learning_rate": 0.016, "schedule": "cosine", "weight_decay": 0.0}
  )
  config.train.steps = 600
  common.compared(config, rates=(0.002, 0.008, 0.032), sgd_rates=(0.1, 0.3, 1.0))
  config.eval.update({"every": 100, "image_size": 32})
  config.checkpoint.every = 100
  return common.apply(config, arg, ARGUMENTS)


def _finetune(config: Any) -> None:
  config.model.freeze_bn = True
  # With frozen batch norm, Adam's first full steps can move a model to where no loss recovers.
  config.optim.update({"learning_rate": 2e-3, "ramp_steps": 30})
  config.train.steps = 150
  config.eval.every = 25
  config.checkpoint.every = 50
  config.compare.sgd_rates = (0.03, 0.1, 0.3)


def _compare(config: Any) -> None:
  config.model.width = 16
  config.optim.learning_rate = 0.008
  config.train.steps = 200
  config.eval.every = 40


def _smoke(config: Any) -> None:
  config.model.width = 4
  config.data.update({"train_share": 0.45, "val_share": 0.5})
  config.train.update({"steps": 4, "batch_size": 16})
  config.eval.every = config.checkpoint.every = 2


ARGUMENTS: dict[str, Callable[[Any], None]] = {
  **common.method_arguments(),
  **common.ablation_arguments(sgd_rate=0.3, adam_rate=0.016),
  "finetune": _finetune,
  "compare": _compare,
  "smoke": _smoke,
}
