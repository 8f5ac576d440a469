"""Metrics: empirical AUPRC (Eq. 2), retrieval metrics over a gallery, mean PR curve."""

from soprc_jax.metrics.average_precision import auprc
from soprc_jax.metrics.curves import mean_pr_curve
from soprc_jax.metrics.retrieval import retrieval_metrics, summarise_ranks

__all__ = ["auprc", "mean_pr_curve", "retrieval_metrics", "summarise_ranks"]
