"""Computes the pairwise and listwise losses as printed in their papers.

They loop over queries and pairs in float64 numpy.

Every function takes the valid images only, and classes of any size.
"""

import numpy as np


def _lists(embeddings, labels, include_self):
  """Returns the scores of the relevant candidates and of the negatives of each query. Queries
  without a positive or a negative are excluded.
  """
  scores, count = np.float64(embeddings) @ np.float64(embeddings).T, len(labels)
  for q in range(count):
    positives = [i for i in range(count) if i != q and labels[i] == labels[q]]
    negatives = [i for i in range(count) if labels[i] != labels[q]]
    if positives and negatives:
      yield scores[q][positives + [q] * include_self], scores[q][negatives]


def _mean(values):
  values = list(values)
  return sum(values) / len(values) if values else 0.0


def contrastive(embeddings, labels, positive_margin=1.0, negative_margin=0.5, average_active=False):
  scores, pull, push = np.float64(embeddings) @ np.float64(embeddings).T, [], []
  for i in range(len(labels)):
    for j in range(len(labels)):
      if i != j and labels[i] == labels[j]:
        pull.append(max(positive_margin - scores[i, j], 0))
      elif labels[i] != labels[j]:
        push.append(max(scores[i, j] - negative_margin, 0))
  if average_active:
    return _mean(value for value in pull if value > 0) + _mean(value for value in push if value > 0)
  return sum(pull) + sum(push)


def triplet(embeddings, labels, margin=0.1):
  scores, count, total = np.float64(embeddings) @ np.float64(embeddings).T, len(labels), 0.0
  for a in range(count):
    for p in range(count):
      for n in range(count):
        if p != a and labels[p] == labels[a] != labels[n]:
          total += max(scores[a, n] - scores[a, p] + margin, 0)
  return total / count


def multi_similarity(embeddings, labels, alpha=2.0, beta=40.0, base=0.5):
  scores, count, total = np.float64(embeddings) @ np.float64(embeddings).T, len(labels), 0.0
  for a in range(count):
    positives = [scores[a, i] for i in range(count) if i != a and labels[i] == labels[a]]
    negatives = [scores[a, i] for i in range(count) if labels[i] != labels[a]]
    total += np.log(1 + sum(np.exp(-alpha * (s - base)) for s in positives)) / alpha
    total += np.log(1 + sum(np.exp(beta * (s - base)) for s in negatives)) / beta
  return total / count


def smooth_ap(embeddings, labels, tau=0.01, include_self=True):
  def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))  # cannot overflow

  def one(relevant, negatives):
    ap = 0.0
    for k in range(len(relevant)):
      in_class = 1 + sum(
        sigmoid((relevant[j] - relevant[k]) / tau) for j in range(len(relevant)) if j != k
      )
      ap += (
        in_class
        / (in_class + sum(sigmoid((s - relevant[k]) / tau) for s in negatives))
        / len(relevant)
      )
    return 1 - ap

  return _mean(one(*found) for found in _lists(embeddings, labels, include_self))


def _histogram(positions, num_bins, clip):
  """Returns triangular weights of each position around the centers 0 .. num_bins - 1. With ``clip``
  the ends are open.
  """
  positions = np.clip(positions, 0, num_bins - 1) if clip else positions
  return np.array([sum(max(1 - abs(x - m), 0) for x in positions) for m in range(num_bins)])


def _binned_ap(relevant, negatives, num_bins, clip):
  h, h_all = (
    _histogram(x, num_bins, clip) for x in (relevant, np.concatenate([relevant, negatives]))
  )
  precision = np.divide(
    np.cumsum(h), np.cumsum(h_all), out=np.zeros(num_bins), where=np.cumsum(h_all) > 0
  )
  return np.sum(precision * h) / len(relevant)


def fast_ap(embeddings, labels, num_bins=10):
  def position(scores):
    return (2 - 2 * scores) / (4 / num_bins)

  found = _lists(embeddings, labels, include_self=False)
  return _mean(1 - _binned_ap(position(r), position(n), num_bins + 1, clip=False) for r, n in found)


def listwise_ap(embeddings, labels, num_bins=20, include_self=True):
  def position(scores):
    return (1 - scores) / (2 / (num_bins - 1))

  found = _lists(embeddings, labels, include_self)
  return _mean(1 - _binned_ap(position(r), position(n), num_bins, clip=True) for r, n in found)


def auroc(embeddings, labels, surrogate="huber", tau=0.1, include_self=True):
  functions = {
    "huber": lambda x: 0.0 if x > tau else 1 - 2 * x / tau if x < 0 else (1 - x / tau) ** 2,
    "logistic": lambda x: np.log2(1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(x / tau)),
  }
  f = functions[surrogate]
  found = _lists(embeddings, labels, include_self)
  return _mean(
    np.mean([f(p - n) for p in relevant for n in negatives]) for relevant, negatives in found
  )


def xbm_of_one_batch(embeddings, labels, negative_margin=0.5):
  """Returns the contrastive sums, divided by the batch size. The memory holds the batch only."""
  return contrastive(embeddings, labels, 1.0, negative_margin) / len(labels)


def _blackbox_ap(relevant, negatives):
  # Negatives of an equal score count as above. Of equal relevant ones (a pair, met from both sides)
  # one is ranked after the other.
  order = np.sort(relevant)[::-1]
  within = np.arange(1, len(order) + 1)
  return np.sum(within / (within + [sum(negatives >= s) for s in order])) / (len(order) + 1e-5)


def blackbox(embeddings, labels, interclass_coef=0.9):
  scores, count = np.float64(embeddings) @ np.float64(embeddings).T, len(labels)
  own = _mean(1 - _blackbox_ap(*found) for found in _lists(embeddings, labels, include_self=True))
  pairs = [(i, j) for i in range(count) for j in range(count)]
  relevant = np.array([scores[p] for p in pairs if labels[p[0]] == labels[p[1]]])
  negatives = np.array([scores[p] for p in pairs if labels[p[0]] != labels[p[1]]])
  return (1 - interclass_coef) * own + interclass_coef * (1 - _blackbox_ap(relevant, negatives))


def sup_con(embeddings, labels, temperature=0.07):
  scores, count, queries = np.float64(embeddings) @ np.float64(embeddings).T, len(labels), []
  for q in range(count):
    others = [i for i in range(count) if i != q]
    total = sum(np.exp(scores[q, i] / temperature) for i in others)
    positives = [i for i in others if labels[i] == labels[q]]
    if positives:
      queries.append(_mean(-np.log(np.exp(scores[q, p] / temperature) / total) for p in positives))
  return _mean(queries)


def _reaching(relevant, score):
  return sum(1 for s in relevant if s >= score)


def quad_linear_ap(embeddings, labels, width=0.1):
  def surrogate(d):
    if d > 0:
      return 2 * d / width + 1
    return (d / width) ** 2 + 2 * d / width + 1 if d >= -width else 0.0

  def one(relevant, negatives):
    ap = 0.0
    for score in relevant:
      rank = _reaching(relevant, score)
      ap += rank / (rank + sum(surrogate(s - score) for s in negatives)) / len(relevant)
    return 1 - ap

  return _mean(one(*found) for found in _lists(embeddings, labels, include_self=False))


def sup_ap(embeddings, labels, tau=0.01, rho=100.0, delta=0.05, lambda_=0.5, alpha=0.9, beta=0.6):
  def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))

  def bound(d):
    if d < 0:
      return sigmoid(d / tau)
    if d <= delta:
      return sigmoid(d / tau) + 0.5
    return rho * (d - delta) + sigmoid(delta / tau) + 0.5

  def one(relevant, negatives):
    ap = 0.0
    for score in relevant:
      rank = _reaching(relevant, score)
      ap += rank / (rank + sum(bound(s - score) for s in negatives)) / len(relevant)
    pull = _mean(max(alpha - s, 0) for s in relevant)
    push = _mean(max(s - beta, 0) for s in negatives)
    return (1 - lambda_) * (1 - ap) + lambda_ * (pull + push)

  return _mean(one(*found) for found in _lists(embeddings, labels, include_self=False))


def recall_at_k(embeddings, labels, ks=(1, 2, 4, 8, 16), tau1=1.0, tau2=0.01):
  def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))  # cannot overflow

  def recall(relevant, negatives, k):
    found = 0.0
    for x in range(len(relevant)):
      others = [*(s for z, s in enumerate(relevant) if z != x), *negatives]
      rank = 1 + sum(sigmoid((s - relevant[x]) / tau2) for s in others)
      found += sigmoid((k - rank) / tau1)
    return found / len(relevant)

  found = _lists(embeddings, labels, include_self=False)
  return _mean(1 - _mean(recall(r, n, k) for k in ks) for r, n in found)


def _cosines(embeddings, proxies):
  proxies = np.float64(proxies)
  return np.float64(embeddings) @ (proxies / np.linalg.norm(proxies, axis=1, keepdims=True)).T


def proxy_anchor(embeddings, rows, proxies, alpha=32.0, margin=0.1):
  scores, classes, pull, push = _cosines(embeddings, proxies), len(proxies), [], []
  for c in range(classes):
    own = [scores[i, c] for i in range(len(rows)) if rows[i] == c]
    others = [scores[i, c] for i in range(len(rows)) if rows[i] != c]
    if own:
      pull.append(np.log(1 + sum(np.exp(-alpha * (s - margin)) for s in own)))
    push.append(np.log(1 + sum(np.exp(alpha * (s + margin)) for s in others)))
  return _mean(pull) + _mean(push)


def norm_softmax(embeddings, rows, proxies, temperature=0.05):
  scores = _cosines(embeddings, proxies) / temperature
  return _mean(
    -np.log(np.exp(scores[i, row]) / sum(np.exp(s) for s in scores[i]))
    for i, row in enumerate(rows)
  )


def arc_face(embeddings, rows, proxies, scale=64.0, margin=0.5):
  scores, found = _cosines(embeddings, proxies), []
  for i, row in enumerate(rows):
    angle = np.arccos(np.clip(scores[i, row], -1, 1))
    own = (
      np.cos(angle + margin) if angle + margin <= np.pi else np.cos(angle) - margin * np.sin(margin)
    )
    logits = [scale * (own if c == row else scores[i, c]) for c in range(len(proxies))]
    top = max(logits)
    found.append(top + np.log(sum(np.exp(x - top) for x in logits)) - scale * own)
  return _mean(found)


def sigmoid(embeddings, labels, scale=10.0, bias=-10.0):
  scores, count, pairs = np.float64(embeddings) @ np.float64(embeddings).T, len(labels), []
  for i in range(count):
    for j in range(count):
      if i != j:
        sign = 1 if labels[i] == labels[j] else -1
        pairs.append(np.log(1 + np.exp(-sign * (scale * scores[i, j] + bias))))
  return _mean(pairs)
