"""SOPRC: stochastic optimization of the area under the precision-recall curve, in JAX.

The core consists of pure functions and optax transforms. Importing it defines no flags and
initializes no device. Paper: Wen et al., "Exploring the Algorithm-Dependent Generalization of AUPRC
Optimization with List Stability", NeurIPS 2022.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from soprc_jax import losses, metrics, statistics
from soprc_jax.batch_loss import binary_loss, retrieval_loss
from soprc_jax.estimators import ap_loss, positive_pull, semi_variance, soprc_loss
from soprc_jax.graded_loss import graded_retrieval_loss
from soprc_jax.interpolation import interpolate_scores
from soprc_jax.lists import RetrievalLists, binary_lists, retrieval_lists
from soprc_jax.memory import embedding_memory
from soprc_jax.surrogates import one_sided_huber, one_sided_sigmoid
from soprc_jax.tracking import ScoreEmaState, score_ema
from soprc_jax.version import __version__

if TYPE_CHECKING:
  from soprc_jax.serving import model

__all__ = [
  "RetrievalLists",
  "ScoreEmaState",
  "__version__",
  "ap_loss",
  "binary_lists",
  "binary_loss",
  "embedding_memory",
  "graded_retrieval_loss",
  "interpolate_scores",
  "load",
  "losses",
  "metrics",
  "one_sided_huber",
  "one_sided_sigmoid",
  "positive_pull",
  "retrieval_lists",
  "retrieval_loss",
  "score_ema",
  "semi_variance",
  "soprc_loss",
  "statistics",
]


def load(path: str | os.PathLike[str]) -> model.Model:
  """Loads a trained model, as `soprc_jax.serving.model.load` does.

  This requires the packages of a training run: ``pip install "soprc_jax[train]"``.

  Args:
    path: workdir of a training run, its folder ``best/``, or the output of ``soprc
      convert-weights``.

  Returns:
    A model with ``embed(images)``, ``search(queries, gallery)`` and ``config``.

  Raises:
    ImportError: the packages of a training run are not installed.
    FileNotFoundError, ValueError: ``path`` holds no such model.
  """
  from soprc_jax.serving import model

  return model.load(path)
