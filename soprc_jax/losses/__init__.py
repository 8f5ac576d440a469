"""Losses that SOPRC is compared with, as pure functions of embeddings and labels.

Arguments of all losses:

* ``embeddings``: ``[B, D]``, unit norm (not normalized again).
* ``labels``: ``[B]`` integers of any type or booleans, in any order, classes of any size. Under jit
  they must fit into 32 bits, see `soprc_jax.retrieval_lists`.
* ``where``: ``[B]`` mask of the valid images; None means all.
* ``axis_name``: name of a mapped axis. The batch is then the joined batch of all its devices.

Those with proxies also take ``proxies``: ``[C, D]``, one vector for each class, of any norm > 0.
They are normalized here, and learned with the model; they are the same on all devices. Labels are
then rows of the proxies: a label on the host that is no row raises a ValueError, and an image with
such a traced label is left out.

The others compare pairs of images. They also take

* ``**pairs``: ``positives`` (in place of ``labels``), ``ignore`` and ``ignore_above``, masks of
  pairs and a limit, see `soprc_jax.retrieval_lists`;
* ``max_positives``, if they rank: static bound on the positives of a query, itself not counted. If
  a query has more, concrete labels raise a ValueError. With traced labels (an argument of a jitted
  function) evenly spaced ones are kept, as in `soprc_jax.retrieval_lists`. None takes the largest
  class of concrete labels. With traced labels None costs time cubic in the batch, though not
  memory.

All return a scalar, at least float32. They raise an AssertionError when traced if shapes do not
fit, and a ValueError if an option is a plain number out of range.
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
