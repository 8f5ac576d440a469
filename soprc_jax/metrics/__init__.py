"""Metrics: empirical AUPRC (Eq. 2), (graded) retrieval metrics of a gallery, mean PR curve."""

from soprc_jax.metrics.average_precision import auprc
from soprc_jax.metrics.curves import mean_pr_curve
from soprc_jax.metrics.graded import graded_metrics
from soprc_jax.metrics.retrieval import retrieval_metrics, summarise_ranks

__all__ = ["auprc", "graded_metrics", "mean_pr_curve", "retrieval_metrics", "summarise_ranks"]
