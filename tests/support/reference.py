"""Computes plain numpy float64 references for the tests, which share nothing with soprc_jax.

They loop over one list at a time.
"""

import fractions
import math

import numpy as np


def zero_one(margin):
  """Returns l_{0,1}: 1 where the margin is not positive."""
  return (np.asarray(margin, np.float64) <= 0).astype(np.float64)


def huber(margin, tau):
  """Returns l1 of Eq. 7 with erratum 1, one number at a time."""

  def one(x):
    if x < 0:
      return 1 - 2 * x / tau
    return (1 - x / tau) ** 2 if x < tau else 0.0

  return np.vectorize(one, otypes=[np.float64])(np.asarray(margin, np.float64))


def sigmoid(margin, tau):
  """Returns l2 of Eq. 7 as printed, in the form that cannot overflow."""

  def one(x):
    if x >= 0:
      return 0.0
    decayed = math.exp(x / tau)  # (e^{-x/tau} - 1) / (e^{-x/tau} + 1), both multiplied by e^{x/tau}
    return (1 - decayed) / (1 + decayed)

  return np.vectorize(one, otypes=[np.float64])(np.asarray(margin, np.float64))


def interpolate(scores, num_points, bounds=None, grid="midpoints"):
  """Returns phi of one list, following design.md 2.2 word by word, with exact positions."""
  u = sorted(float(score) for score in scores)
  n = len(u)
  if n == 0:
    return np.zeros(num_points)
  below = 2 * u[0] - u[1] if n > 1 else u[0]
  above = 2 * u[-1] - u[-2] if n > 1 else u[0]
  if bounds is not None:
    below = min(max(below, bounds[0]), u[0])
    above = max(min(above, bounds[1]), u[-1])
  u = [below, *u, above]
  points = []
  for j in range(num_points):
    t = fractions.Fraction(2 * j + 1, 2 * num_points)
    if grid == "blocks":
      t = fractions.Fraction(j, n * math.ceil(num_points / n))
    i = math.floor(t * n)
    a = float(t * n - i)
    left = u[i] + a * (u[i + 1] - u[i])
    right = u[i + 1] + a * (u[i + 2] - u[i + 1])
    points.append((left + right) / 2)
  return np.array(points)


def true_positive_rates(scores, others, self_weight, tau2):
  """Returns T of every score (Eq. 8, erratum 3)."""
  rates = np.array(
    [np.mean(sigmoid(score - np.asarray(others, np.float64), tau2)) for score in scores]
  )
  return (1 - self_weight) * rates + self_weight


def list_risk(positives, negatives, tpr, prior, tau1, link="share", least=0.0):
  """Returns the mean over the positives of (1-pi) F / ((1-pi) F + pi T), with T given.

  With link="log" it is the mean of log(1 + (1-pi) F / (pi T)), where pi T is at least ``least``.
  """
  terms = []
  for score, rate in zip(positives, tpr, strict=True):
    part = (1 - prior) * np.mean(huber(score - np.asarray(negatives, np.float64), tau1))
    if link == "log":
      terms.append(math.log1p(part / max(prior * rate, least)))
      continue
    total = part + prior * rate
    terms.append(part / total if total > 0 else 0.0)
  return float(np.mean(terms))


def soprc(positives, negatives, v, prior, tau1=0.1, tau2=0.001, self_weight=None, **link):
  """Returns Eq. 8 of one list; 0 without a positive or a negative."""
  if not len(positives) or not len(negatives):
    return 0.0
  self_weight = 1 / (len(v) + 1) if self_weight is None else self_weight
  return list_risk(
    positives, negatives, true_positive_rates(positives, v, self_weight, tau2), prior, tau1, **link
  )


def average_precision_loss(positives, negatives, tau1=0.1, tau2=0.001, self_weight=None):
  """Returns Eq. 5 of one list, with the sums as printed; 0 without a positive or a negative."""
  if not len(positives) or not len(negatives):
    return 0.0
  self_weight = 1 / len(positives) if self_weight is None else self_weight
  terms = []
  for score in positives:
    hits = np.sum(sigmoid(score - np.asarray(positives, np.float64), tau2))
    rank = (1 - self_weight) * hits + self_weight * len(positives)
    misses = np.sum(huber(score - np.asarray(negatives, np.float64), tau1))
    terms.append(misses / (misses + rank) if misses + rank > 0 else 0.0)
  return float(np.mean(terms))


def semi_variance(
  positive_lists, negative_lists, lambda1, lambda2, average_over="selected", pool="batch"
):
  """Returns Eq. 9 of a batch of lists; lists without a positive or a negative are excluded."""
  pairs = [(p, n) for p, n in zip(positive_lists, negative_lists, strict=True) if len(p) and len(n)]
  if not pairs:
    return 0.0
  if pool == "batch":
    pairs = [(np.concatenate([p for p, _ in pairs]), np.concatenate([n for _, n in pairs]))]

  def half(scores, sign):
    scores = np.asarray(scores, np.float64)
    excess = [(s - scores.mean()) ** 2 for s in scores if sign * (s - scores.mean()) > 0]
    count = len(excess) if average_over == "selected" else len(scores)
    return sum(excess) / count if excess else 0.0

  return float(np.mean([lambda1 * half(p, -1) + lambda2 * half(n, 1) for p, n in pairs]))


def auprc(scores, labels, prior=None):
  """Returns Eq. 2 of one list: precision at the score of each positive; ties count as retrieved."""
  scores, labels = np.asarray(scores, np.float64), np.asarray(labels) > 0
  positives, negatives = scores[labels], scores[~labels]
  if not len(positives):
    return 0.0
  if not len(negatives):
    return 1.0
  prior = len(positives) / len(scores) if prior is None else prior
  terms = []
  for score in positives:
    tpr, fpr = np.mean(positives >= score), np.mean(negatives >= score)
    terms.append(prior * tpr / (prior * tpr + (1 - prior) * fpr))
  return float(np.mean(terms))


def similarities(queries, gallery):
  """Returns similarities by the rule of `retrieval_metrics`. All pairs take float64 sums in one
  order, rounded to float32 unless an entry is float64.
  """
  products = np.asarray(queries, np.float64)[:, None] * np.asarray(gallery, np.float64)
  is_short = all(
    part.dtype.itemsize <= 4 and part.dtype.kind not in "biu" for part in (queries, gallery)
  )
  return products.sum(axis=-1).astype(np.float32 if is_short else np.float64)


def retrieval(scores, labels, gallery_labels, usable, ks):
  """Computes AP (Eq. 2) and pessimistic recall of every query, from the scores, by brute force.
  Returns ``{"ap": [N], "recall": {k: float}, "above": [N]}``; NaN and -1 for queries without a
  positive.
  """
  size = len(labels)
  ap, above = np.full(size, np.nan), np.full(size, -1)
  for i in range(size):
    same = gallery_labels == labels[i]
    positives, negatives = scores[i][usable[i] & same], scores[i][usable[i] & ~same]
    if not len(positives):
      continue
    candidates = np.concatenate([positives, negatives])
    ap[i] = np.mean([np.sum(positives >= s) / np.sum(candidates >= s) for s in positives])
    above[i] = np.sum(negatives >= positives.max())
  valid = above >= 0
  recall = {k: float(np.mean(above[valid] < k)) if valid.any() else 0.0 for k in ks}
  return {"ap": ap, "recall": recall, "above": above}


class Table:
  """Stores v as in Eq. 10 with errata 4 and 5, row by row. A write takes the mean of the queries of
  a class.
  """

  def __init__(self, num_lists, num_points, initial_v=None):
    self.v = np.zeros((num_lists, num_points))
    self.weight = np.zeros(num_lists)
    if initial_v is not None:
      self.v[:] = initial_v
      self.weight[:] = 1.0

  def update(self, phi, list_ids, beta):
    """Updates with ``phi``: one row per list, None for a list without a valid positive."""
    for c in range(len(self.v)):
      rows = [row for row, i in zip(phi, list_ids, strict=True) if i == c and row is not None]
      if rows:
        self.weight[c] = (1 - beta) * self.weight[c] + beta
        self.v[c] += beta / self.weight[c] * (np.mean(rows, axis=0) - self.v[c])


def by_sorting_all(queries, labels, gallery, gallery_labels, usable):
  """Returns AP and the number of negatives above of each query. They come from the exact scores of
  all candidates. The fast counts must equal them bit for bit.
  """
  scores = np.where(usable, similarities(queries, gallery), -np.inf)
  ap, above = np.full(len(labels), np.nan), np.full(len(labels), -1)
  for i, row in enumerate(scores):
    positives = np.sort(row[(gallery_labels == labels[i]) & usable[i]])
    if len(positives):
      ordered = np.sort(row)
      retrieved = len(row) - np.searchsorted(ordered, positives, side="left")
      hits = len(positives) - np.searchsorted(positives, positives, side="left")
      ap[i], above[i] = np.mean(hits / retrieved), retrieved[-1] - hits[-1]
  return ap, above
