"""The methods that are compared: what each changes in a config, and its name in tables."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from soprc_jax.training import objectives


class Method(NamedTuple):
  """A row of the comparison.

  Attributes:
    label: its name in the paper's tables.
    loss: ``config.loss.name``.
    preset: ``config.loss.preset``.
  """

  label: str
  loss: str
  preset: str = "default"


METHODS: Mapping[str, Method] = {
  "soprc": Method("SOPRC", "soprc"),
  "paper": Method("SOPRC, preset paper", "soprc", "paper"),
  "authors": Method("SOPRC, preset authors", "soprc", "authors"),
  "contrastive": Method("Contrastive", "contrastive"),
  "triplet": Method("Triplet", "triplet"),
  "multi_similarity": Method("Multi-Similarity", "multi_similarity"),
  "xbm": Method("XBM", "xbm"),
  "smooth_ap": Method("SmoothAP", "smooth_ap"),
  "listwise_ap": Method("DIR (listwise AP)", "listwise_ap"),
  "fast_ap": Method("FastAP", "fast_ap"),
  "auroc": Method("AUROC", "auroc"),
  "blackbox": Method("BlackBox", "blackbox"),
  "ap": Method("AP loss (Eq. 5)", "ap"),
}


def is_method(name: str) -> bool:
  """Whether `choose` takes the name."""
  return name in METHODS or objectives.name_problem(name) is None


def choose(config: Any, name: str) -> None:
  """Makes a config train with a method: ``soprc`` leaves it as it is; another one changes
  ``config.loss``.

  Args:
    config: the config of a run, changed in place.
    name: key of `METHODS`, or ``package.module:function`` for a loss of your own.

  Raises:
    ValueError: unknown name.
  """
  if name not in METHODS:
    problem = objectives.name_problem(name)
    if problem:
      raise ValueError(f"a method {problem}")
    config.loss.name = name
    return
  method = METHODS[name]
  config.loss.name = method.loss
  if method.preset != "default":
    # Both presets have the semi-variance term; the paper's text gives no weights, these are the
    # authors'.
    config.loss.update({"preset": method.preset, "lambda1": 1.0, "lambda2": 5.0})


def label(name: str) -> str:
  """Name of a method in tables."""
  return METHODS[name].label if name in METHODS else name
