"""The losses in torch, for comparison.

They are those of pytorch-metric-learning, and plain vectorized torch for the others.

All take unit-norm embeddings ``[B, D]`` that require a gradient and labels ``[B]``, and return a
scalar.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

# torch and pytorch-metric-learning are imported where they are used, since only the benchmark needs
# them.

TorchLoss = Callable[..., Any]


def metric_learning_losses(batch_size: int) -> Mapping[str, TorchLoss]:
  """Returns losses of pytorch-metric-learning with the same definitions as ours.

  Its reducers compute our sums over pairs. Where there is a choice, its embeddings are not
  normalized a second time, which saves it time.
  """
  from pytorch_metric_learning import distances, losses, reducers

  cosine = {"distance": distances.DotProductSimilarity(normalize_embeddings=False)}
  triplet = losses.TripletMarginLoss(margin=0.1, reducer=reducers.SumReducer(), **cosine)
  return {
    "contrastive": losses.ContrastiveLoss(
      pos_margin=1.0, neg_margin=0.5, reducer=reducers.SumReducer(), **cosine
    ),
    "triplet": lambda embeddings, labels: triplet(embeddings, labels) / batch_size,
    "multi_similarity": losses.MultiSimilarityLoss(alpha=2.0, beta=40.0, base=0.5, **cosine),
    "smooth_ap": losses.SmoothAPLoss(temperature=0.01),
    "fast_ap": losses.FastAPLoss(num_bins=10),
  }


def metric_learning_xbm(memory: Any, memory_labels: Any) -> TorchLoss:
  """Returns pytorch-metric-learning's contrastive loss of a batch against the memory.

  The upkeep of its queue is left out.
  """
  from pytorch_metric_learning import distances, losses, reducers
  from pytorch_metric_learning.utils import loss_and_miner_utils as pairs

  distance = distances.DotProductSimilarity(normalize_embeddings=False)
  contrastive = losses.ContrastiveLoss(
    pos_margin=1.0, neg_margin=0.5, reducer=reducers.SumReducer(), distance=distance
  )

  def loss(embeddings: Any, labels: Any) -> Any:
    found = pairs.get_all_pairs_indices(labels, memory_labels)
    return contrastive(embeddings, labels, found, memory, memory_labels) / len(labels)

  return loss


def _pairs(embeddings: Any, labels: Any) -> tuple[Any, Any, Any]:
  """Returns scores ``[B, B]`` and the masks of positives and negatives.

  The positives exclude the image itself.
  """
  scores = embeddings @ embeddings.T
  same = labels[:, None] == labels[None, :]
  positive = same.clone()
  positive.fill_diagonal_(False)
  return scores, positive, ~same


def _equal_rows(scores: Any, mask: Any) -> Any:
  """Returns the masked scores of each row, ``[B, K]``.

  Each row has K of them, since the classes of the batch have one size.
  """
  return scores[mask].view(len(scores), -1)


def huber(margin: Any, tau: float) -> Any:
  """Computes l1 of Eq. 7."""
  import torch

  scaled = margin / tau
  return torch.where(scaled < 0, 1 - 2 * scaled, torch.relu(1 - scaled).square())


def _false_positive_rate(scores: Any, positives: Any, negative: Any, tau1: float) -> Any:
  """Computes the mean of l1 over the negatives at each positive, ``[B, K]``."""
  losses = huber(positives[:, :, None] - scores[:, None, :], tau1) * negative[:, None, :]
  return losses.sum(-1) / negative.sum(-1, keepdim=True)


def soprc(
  embeddings: Any, labels: Any, v: Any, *, prior: float, tau1: float = 0.1, tau2: float = 0.001
) -> Any:
  """Computes the SOPRC loss (Eq. 8) with v ``[B, M]`` looked up before."""
  import torch

  scores, positive, negative = _pairs(embeddings, labels)
  positives = _equal_rows(scores, positive)
  fpr = _false_positive_rate(scores, positives, negative, tau1)
  with torch.no_grad():
    hits = torch.tanh(torch.relu(v[:, None, :] - positives[:, :, None]) / (2 * tau2))
    tpr = (1 + hits.sum(-1)) / (1 + v.shape[-1])
  return ((1 - prior) * fpr / ((1 - prior) * fpr + prior * tpr)).mean()


def ap(embeddings: Any, labels: Any, *, tau1: float = 0.1, tau2: float = 0.001) -> Any:
  """Computes the AP loss (Eq. 5)."""
  import torch

  scores, positive, negative = _pairs(embeddings, labels)
  positives = _equal_rows(scores, positive)
  fpr = _false_positive_rate(scores, positives, negative, tau1)
  with torch.no_grad():
    hits = torch.tanh(torch.relu(positives[:, None, :] - positives[:, :, None]) / (2 * tau2))
    count = positives.shape[-1]
    tpr = (1 - 1 / count) * hits.mean(-1) + 1 / count
  prior = count / (count + negative.sum(-1, keepdim=True))
  return ((1 - prior) * fpr / ((1 - prior) * fpr + prior * tpr)).mean()


def semi_variance(
  embeddings: Any, labels: Any, *, lambda1: float = 1.0, lambda2: float = 5.0
) -> Any:
  """Computes the semi-variance (Eq. 9) over the selected scores of the batch."""
  import torch

  scores, positive, negative = _pairs(embeddings, labels)
  positives, negatives = _equal_rows(scores, positive), _equal_rows(scores, negative)
  below = torch.relu(positives.mean() - positives)
  above = torch.relu(negatives - negatives.mean())
  return (
    lambda1 * below.square().sum() / (below > 0).sum()
    + lambda2 * above.square().sum() / (above > 0).sum()
  )


def smooth_ap(embeddings: Any, labels: Any, *, tau: float = 0.01) -> Any:
  """Computes SmoothAP with the query among its relevant images.

  Only ranks of relevant images are computed.
  """
  import torch

  scores, _, negative = _pairs(embeddings, labels)
  relevant = _equal_rows(scores, ~negative)
  above = torch.sigmoid((scores[:, None, :] - relevant[:, :, None]) / tau)
  in_class = 0.5 + (above * (~negative)[:, None, :]).sum(-1)  # the image itself has 1/2
  return (1 - in_class / (0.5 + above.sum(-1))).mean()


def listwise_ap(embeddings: Any, labels: Any, *, num_bins: int = 20) -> Any:
  """Computes listwise AP ("DIR") with the query among its relevant images.

  The histogram is a convolution of width 1, as in its authors' code.
  """
  import torch

  scores, _, negative = _pairs(embeddings, labels)
  relevant = ~negative
  slope = (num_bins - 1) / 2
  position = slope * (1 - scores)
  centres = torch.arange(num_bins, dtype=scores.dtype)[:, None, None]
  weights = torch.relu(1 - (position - centres).abs())
  weights = torch.where(
    (centres == 0) & (position < 0) | (centres == num_bins - 1) & (position > num_bins - 1),
    1.0,
    weights,
  )
  in_class, all_ = (weights * relevant).sum(-1), weights.sum(-1)
  precision = in_class.cumsum(0) / (all_.cumsum(0) + 1e-16)
  return 1 - ((precision * in_class).sum(0) / relevant.sum(-1)).mean()


def auroc(embeddings: Any, labels: Any, *, tau: float = 0.1) -> Any:
  """Computes pairwise l1 over all (relevant, negative) pairs.

  The query is among its relevant images.
  """
  scores, _, negative = _pairs(embeddings, labels)
  relevant = _equal_rows(scores, ~negative)
  losses = huber(relevant[:, :, None] - scores[:, None, :], tau) * negative[:, None, :]
  return (losses.sum((1, 2)) / (relevant.shape[1] * negative.sum(-1))).mean()


def xbm(
  embeddings: Any, labels: Any, memory: Any, memory_labels: Any, *, negative_margin: float = 0.5
) -> Any:
  """Computes the contrastive loss of a batch against the memory."""
  import torch

  scores = embeddings @ memory.T
  same = labels[:, None] == memory_labels[None, :]
  return torch.where(same, 1 - scores, torch.relu(scores - negative_margin)).sum() / len(labels)


def blackbox(
  embeddings: Any, labels: Any, *, lambda_: float = 5.0, interclass_coef: float = 0.9
) -> Any:
  """Computes BlackBox AP without margin and memory: per query, and over all pairs of the batch."""
  import torch

  class Ranks(torch.autograd.Function):
    """Computes ranks 1/n .. 1 in descending order.

    The gradient is that of a second ranking, of perturbed scores.
    """

    @staticmethod
    def forward(context: Any, scores: Any) -> Any:
      ranks = _ranks(scores)
      context.save_for_backward(scores, ranks)
      return ranks / scores.shape[-1]

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
      scores, ranks = context.saved_tensors
      moved = _ranks(scores + lambda_ * gradients[0])
      return (moved - ranks) / scores.shape[-1] / (lambda_ + 1e-8)

  def loss(scores: Any, relevant: Any) -> Any:
    """Computes 1 - AP of each ranking; the ranks among the relevant images are constants."""
    with torch.no_grad():
      among = _ranks(torch.where(relevant, scores, -math.inf)) / scores.shape[-1]
    precision = torch.where(relevant, among / Ranks.apply(scores), 0.0)
    return 1 - precision.sum(-1) / (relevant.sum(-1) + 1e-5)

  scores, _, negative = _pairs(embeddings, labels)
  within, across = (
    loss(scores, ~negative).mean(),
    loss(scores.view(1, -1), ~negative.view(1, -1)).mean(),
  )
  return (1 - interclass_coef) * within + interclass_coef * across


def _ranks(scores: Any) -> Any:
  import torch

  order = scores.argsort(dim=-1, descending=True, stable=True)
  places = torch.arange(1.0, scores.shape[-1] + 1, dtype=scores.dtype).expand_as(scores)
  return torch.empty_like(scores).scatter_(-1, order, places)
