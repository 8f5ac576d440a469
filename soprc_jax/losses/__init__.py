"""Losses that SOPRC is compared with, as pure functions of embeddings and labels.

All accept labels of any integer type or booleans, classes of unequal size, a mask, and an
``axis_name`` for the joined batch of several devices. Those with proxies take rows of proxies as
labels. The others compare pairs of images, and also accept masks of pairs: positives in place of
labels, and pairs to ignore.
"""

from soprc_jax.losses.arc_face import arc_face_loss
from soprc_jax.losses.auroc import auroc_loss
from soprc_jax.losses.blackbox import blackbox_ap_loss
from soprc_jax.losses.contrastive import contrastive_loss
from soprc_jax.losses.fast_ap import fast_ap_loss
from soprc_jax.losses.listwise_ap import listwise_ap_loss
from soprc_jax.losses.multi_similarity import multi_similarity_loss
from soprc_jax.losses.norm_softmax import norm_softmax_loss
from soprc_jax.losses.proxy_anchor import proxy_anchor_loss
from soprc_jax.losses.quad_linear_ap import quad_linear_ap_loss
from soprc_jax.losses.recall_at_k import recall_at_k_loss
from soprc_jax.losses.sigmoid import sigmoid_loss
from soprc_jax.losses.smooth_ap import smooth_ap_loss
from soprc_jax.losses.sup_ap import sup_ap_loss
from soprc_jax.losses.sup_con import sup_con_loss
from soprc_jax.losses.triplet import triplet_loss
from soprc_jax.losses.xbm import xbm_contrastive_loss

__all__ = [
  "arc_face_loss",
  "auroc_loss",
  "blackbox_ap_loss",
  "contrastive_loss",
  "fast_ap_loss",
  "listwise_ap_loss",
  "multi_similarity_loss",
  "norm_softmax_loss",
  "proxy_anchor_loss",
  "quad_linear_ap_loss",
  "recall_at_k_loss",
  "sigmoid_loss",
  "smooth_ap_loss",
  "sup_ap_loss",
  "sup_con_loss",
  "triplet_loss",
  "xbm_contrastive_loss",
]
