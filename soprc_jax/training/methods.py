"""The compared methods: what each changes in a config, and its name in tables."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from soprc_jax.training import objectives


class Method(NamedTuple):
  """A method of the comparison.

  Attributes:
    label: name of the method in the paper's tables.
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
  "sup_con": Method("SupCon", "sup_con"),
  "quad_linear_ap": Method("QuadLinear-AP", "quad_linear_ap"),
  "sup_ap": Method("SupAP (ROADMAP)", "sup_ap"),
  "recall_at_k": Method("Recall@k surrogate", "recall_at_k"),
  "sigmoid": Method("Sigmoid (SigLIP)", "sigmoid"),
  "proxy_anchor": Method("Proxy-Anchor", "proxy_anchor"),
  "norm_softmax": Method("Normalized softmax", "norm_softmax"),
  "arc_face": Method("ArcFace", "arc_face"),
  "ap": Method("AP loss (Eq. 5)", "ap"),
}

# The rows of the paper's tables, SOPRC in three ways.
OF_PAPER = (
  "soprc",
  "paper",
  "authors",
  "contrastive",
  "triplet",
  "multi_similarity",
  "xbm",
  "smooth_ap",
  "listwise_ap",
  "fast_ap",
  "auroc",
  "blackbox",
)


def is_method(name: str) -> bool:
  """Returns whether `choose` accepts a name."""
  return name in METHODS or objectives.name_problem(name) is None


def choose(config: Any, name: str) -> None:
  """Changes ``config.loss`` to that of a method. ``soprc`` leaves it unchanged.

  Args:
    config: the config of a run, changed in place.
    name: key of `METHODS`, or ``package.module:function`` for a custom loss.

  Raises:
    ValueError: the name is unknown.
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
    # Both presets have the semi-variance term. The paper's text gives no weights; these are those
    # of the authors' code.
    config.loss.update({"preset": method.preset, "lambda1": 1.0, "lambda2": 5.0})


def label(name: str) -> str:
  """Returns the name of a method in tables."""
  return METHODS[name].label if name in METHODS else name
