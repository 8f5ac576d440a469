"""SOPRC: stochastic optimization of the area under the precision-recall curve, in JAX.

The core is pure functions and optax transforms; it defines no flags and touches no device on import.
Paper: Wen et al., "Exploring the Algorithm-Dependent Generalization of AUPRC Optimization with List Stability", NeurIPS 2022.
"""

from soprc_jax import losses, metrics
from soprc_jax.batch_loss import binary_loss, retrieval_loss
from soprc_jax.estimators import ap_loss, semi_variance, soprc_loss
from soprc_jax.interpolation import interpolate_scores
from soprc_jax.lists import RetrievalLists, binary_lists, retrieval_lists
from soprc_jax.memory import embedding_memory
from soprc_jax.surrogates import one_sided_huber, one_sided_sigmoid
from soprc_jax.tracking import ScoreEmaState, score_ema
from soprc_jax.version import __version__

__all__ = [
  "RetrievalLists",
  "ScoreEmaState",
  "__version__",
  "ap_loss",
  "binary_lists",
  "binary_loss",
  "embedding_memory",
  "interpolate_scores",
  "losses",
  "metrics",
  "one_sided_huber",
  "one_sided_sigmoid",
  "retrieval_lists",
  "retrieval_loss",
  "score_ema",
  "semi_variance",
  "soprc_loss",
]
