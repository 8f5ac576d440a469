"""Measures the quantities that the paper's theory bounds.

They are the listwise on-average model stability (Def. 1) and the generalization gap.

A small model is trained on S and on S^(i), in which one positive (or one negative) is replaced by a
new draw. Start and batches are the same. All copies of a training run side by side as the lists of
one batch. A copy differs from the training on S by one score, that of its own new example.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.stability import stability_training
from experiments.stability.stability_training import ALGORITHMS, Examples
from soprc_jax._internal import checks

# Distance of the two classes, which are standard normal.
SHIFT = 2.0


class Setting(NamedTuple):
  """A training whose stability is measured.

  Attributes:
    algorithm: one of `ALGORITHMS`. The variant "SOPRC without v" uses the interpolated scores of
      the batch instead of v. The variant "SOPRC, self weight 1/n+" has the self weight of the AP
      loss, much more than SOPRC's 1 / (M + 1).
    num_positives: N+.
    num_negatives: N-.
    batch_positives: n+.
    batch_negatives: n-.
    steps: every T at which it is measured, ascending. One training runs to the last T.
    beta: beta of Eq. 10.
    rate: learning rate eta, or C of eta_t = C / t.
    decays: whether the learning rate is C / t (Theorem 2) instead of constant.
  """

  algorithm: str = "SOPRC"
  num_positives: int = 256
  num_negatives: int = 2304
  batch_positives: int = 4
  batch_negatives: int = 36
  steps: tuple[int, ...] = (256,)
  beta: float = 0.1
  rate: float = 0.05
  decays: bool = False


class Measured(NamedTuple):
  """The results of `measure` at L values of T in R repetitions, or in blocks of 4 repetitions.

  The means are the estimates.

  Attributes:
    epsilon_positive: ``[L, R]`` epsilon+ of Def. 1: distance of the parameters, averaged over all
      positives that can be replaced.
    epsilon_negative: ``[L, R]`` epsilon-.
    gap: ``[L, R / 4]`` f(A(S)) - f(A(S); S), with the risk f of Eq. 4 and the surrogates.
    batch_gap: ``[L, R / 4]`` F(A(S)) - F(A(S); S), the left side of Theorem 1, with the risk F of
      Eq. 6: the mean over batches of f-hat, whose v is phi of the batch.
    train_risk: ``[L, R]`` f(A(S); S).
    start_risk: ``[R]`` f(w_1; S).
    gradient: ``[R]`` largest norm of the full gradient of f-hat on the batches of the training, for
      every algorithm. G is at least that.
    smoothness: ``[R]`` largest change of the gradient over the change of the parameters, between
      two copies that see the same batch: an estimate of L from below.
  """

  epsilon_positive: np.ndarray
  epsilon_negative: np.ndarray
  gap: np.ndarray
  batch_gap: np.ndarray
  train_risk: np.ndarray
  start_risk: np.ndarray
  gradient: np.ndarray
  smoothness: np.ndarray


class Replaced(NamedTuple):
  """Examples of one class that are replaced, one per copy.

  Attributes:
    positions: ``[K]`` their positions in S.
    weight: ``[K]`` weights of the copies' distances, whose weighted sum estimates the mean over all
      examples of the class.
  """

  positions: np.ndarray
  weight: np.ndarray


class Draw(NamedTuple):
  """All random values of one repetition.

  Attributes:
    data: S.
    other: S~.
    start: ``[W]`` initial parameters.
    batches: positions in S, ``[T, n+]`` and ``[T, n-]``.
    tested: positions of the batches that estimate the risk of Eq. 6 on S.
    replaced: positives and negatives that are replaced by the examples of S~ at the same positions.
  """

  data: Examples
  other: Examples
  start: np.ndarray
  batches: Examples
  tested: Examples
  replaced: tuple[Replaced, Replaced]


def measure(setting: Setting, *, repetitions: int, replaced: int, seed: int) -> Measured:
  """Measures the stability and the generalization gap of one training.

  The gap needs no test data. Each model is tested on the training sets of the other repetitions of
  its block, which play the role of S~ in the proof of Theorem 1. Every set and every model is in
  both means equally often, so effects of a whole set or of a whole model cancel.

  Args:
    setting: the training to measure.
    repetitions: R, a multiple of 4: independent draws of S, S~ and of the algorithm's randomness.
    replaced: K >= 1, the number of positives, and of negatives, that are replaced one at a time in
      each repetition; see `replace`.
    seed: seed of all draws. Repetition r starts with the same examples and the same parameters in
      every setting.

  Raises:
    ValueError: unknown algorithm, batch larger than the data, or a number out of range.
  """
  check(setting, repetitions, replaced)
  draws = [
    draw(setting, replaced=replaced, seed=seed, repetition=repetition)
    for repetition in range(repetitions)
  ]
  trained = stability_training.train(
    _stack([_inputs(one) for one in draws]),
    algorithm=setting.algorithm,
    beta=setting.beta,
    rate=setting.rate,
    decays=setting.decays,
  )
  at = np.array(setting.steps) - 1
  distances = np.asarray(trained.distances, np.float64)[:, at].reshape(
    repetitions, len(at), 2, replaced
  )
  weights = np.stack([[of_class.weight for of_class in one.replaced] for one in draws])
  epsilon = np.einsum("rlck,rck->clr", distances, weights)
  sets = _stack([one.data for one in draws]), _stack([one.tested for one in draws])
  tested = [stability_training.risks(trained.weights[:, step], *sets) for step in at]
  start, _ = stability_training.risks(np.stack([one.start for one in draws]), *sets)
  return Measured(
    epsilon_positive=epsilon[0],
    epsilon_negative=epsilon[1],
    gap=np.stack([_gap(whole) for whole, _ in tested]),
    batch_gap=np.stack([_gap(batched) for _, batched in tested]),
    train_risk=np.stack([_own(whole) for whole, _ in tested]),
    start_risk=_own(start),
    gradient=np.asarray(trained.gradient, np.float64),
    smoothness=np.asarray(trained.smoothness, np.float64),
  )


def check(setting: Setting, repetitions: int, replaced: int) -> None:
  """Raises a ValueError for a setting that `measure` cannot measure.

  Raises:
    ValueError: as `measure`.
  """
  if setting.algorithm not in ALGORITHMS:
    raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {setting.algorithm!r}")
  for name in ("positives", "negatives"):
    batch, count = getattr(setting, f"batch_{name}"), getattr(setting, f"num_{name}")
    checks.check_count(f"batch_{name}", batch)
    if batch > count:
      raise ValueError(
        f"batch_{name} is {batch}, more than num_{name} = {count}: examples of a batch are distinct"
      )
  checks.check_count("repetitions", repetitions)
  if repetitions % stability_training.BLOCK:
    raise ValueError(
      f"repetitions must be a multiple of {stability_training.BLOCK}, got {repetitions}: models "
      "are tested in blocks"
    )
  checks.check_count("replaced", replaced)
  checks.check_range("beta", setting.beta, low=0.0, high=1.0, open_low=True)
  checks.check_range("rate", setting.rate, low=0.0)
  if (
    not setting.steps or min(setting.steps) < 1 or list(setting.steps) != sorted(set(setting.steps))
  ):
    raise ValueError(f"steps must be ascending numbers of at least 1, got {setting.steps}")


def draw(setting: Setting, *, replaced: int, seed: int, repetition: int) -> Draw:
  """Draws data, start, batches and replaced examples of one repetition."""

  def stream(number: int) -> np.random.Generator:
    return np.random.default_rng((seed, repetition, number))

  def examples(number: int, count: int, shift: float) -> np.ndarray:
    drawn = stream(number).standard_normal((count, stability_training.FEATURES), np.float32)
    return drawn + np.float32(shift / np.sqrt(stability_training.FEATURES))

  batches = Examples(
    draw_batches(stream(4), setting.steps[-1], setting.batch_positives, setting.num_positives),
    draw_batches(stream(5), setting.steps[-1], setting.batch_negatives, setting.num_negatives),
  )
  number = max(
    setting.num_positives // setting.batch_positives,
    setting.num_negatives // setting.batch_negatives,
  )
  tested = Examples(
    partition(stream(9), number, setting.batch_positives, setting.num_positives),
    partition(stream(10), number, setting.batch_negatives, setting.num_negatives),
  )
  return Draw(
    data=Examples(
      examples(0, setting.num_positives, SHIFT), examples(1, setting.num_negatives, 0.0)
    ),
    other=Examples(
      examples(2, setting.num_positives, SHIFT), examples(3, setting.num_negatives, 0.0)
    ),
    start=stability_training.first_weights(stream(6)),
    batches=batches,
    tested=tested,
    replaced=(
      replace(stream(7), batches.positive, setting.num_positives, replaced, setting.steps),
      replace(stream(8), batches.negative, setting.num_negatives, replaced, setting.steps),
    ),
  )


def draw_batches(rng: np.random.Generator, steps: int, size: int, count: int) -> np.ndarray:
  """Draws ``[steps, size]`` positions in [0, count), distinct within a batch.

  Each set of ``size`` is equally likely (Floyd's algorithm).
  """
  uniform = rng.random((steps, size))
  chosen = np.empty((steps, size), np.int32)
  for i in range(size):
    last = count - size + i
    drawn = (uniform[:, i] * (last + 1)).astype(np.int32)
    chosen[:, i] = np.where(np.any(chosen[:, :i] == drawn[:, None], axis=1), last, drawn)
  return chosen


def partition(rng: np.random.Generator, number: int, size: int, count: int) -> np.ndarray:
  """Draws ``[number, size]`` positions in [0, count): the parts of a random partition, repeated.

  Each part is distributed as a batch, so a mean over the parts has the expectation of Eq. 6. It
  varies less than a mean over independent batches, since all examples are in the parts equally
  often (if ``size`` divides ``count``, and the number of parts divides ``number``).
  """
  parts = rng.permutation(count)[: count // size * size].reshape(-1, size)
  return parts[np.arange(number) % len(parts)].astype(np.int32)


def replace(
  rng: np.random.Generator, batches: np.ndarray, count: int, replaced: int, steps: tuple[int, ...]
) -> Replaced:
  r"""Draws examples to replace, such that Def. 1 is the expectation of their weighted distances.

  Only examples that a batch has drawn are chosen. An example that no batch has drawn never enters
  the training, so its distance is exactly 0. A draw s of the training is chosen with probability
  q_s, and with it the example i(s) that it has drawn. So example i has the probability
  :math:`p_i = \sum_{i(s) = i} q_s`. With the weight :math:`1 / (N K p_i)` the sum over the K
  choices is in expectation

  .. math:: K \sum_s q_s \frac{d_{i(s)}}{N K p_{i(s)}} = \sum_{p_i > 0} p_i \frac{d_i}{N p_i}
            = \frac{1}{N} \sum_{i=1}^N d_i

  where the last step uses :math:`d_i = 0` wherever :math:`p_i = 0`. The choices are K points at
  equal distances in the cumulative q, with one random offset. A random one of them is distributed
  by q, and together they are spread over the time of the training. If K is a multiple of the number
  of draws and q is uniform, each draw is chosen equally often and the sum is exactly the mean.

  Args:
    rng: generator of the offset.
    batches: ``[T, n]`` positions that the batches draw.
    count: N.
    replaced: K.
    steps: every T at which the distance is measured. q is the mean of the uniform distributions
      over the draws up to each T, so that a small T has its share of early examples.
  """
  times = np.arange(1, len(batches) + 1)
  by_time = np.mean([(times <= last) / last for last in steps], axis=0)
  chance = np.repeat(by_time / batches.shape[1], batches.shape[1])
  points = (np.arange(replaced) + rng.random()) / replaced
  chosen = np.minimum(np.searchsorted(np.cumsum(chance), points, side="right"), len(chance) - 1)
  positions = batches.ravel()[chosen]
  by_example = np.bincount(batches.ravel(), weights=chance, minlength=count)
  return Replaced(positions, 1 / (count * replaced * by_example[positions]))


def _inputs(one: Draw) -> stability_training.Inputs:
  positive, negative = (of_class.positions for of_class in one.replaced)
  nothing, unused = np.full(1, -1, np.int32), np.full(len(positive), -1, np.int32)
  return stability_training.Inputs(
    start=one.start,
    batches=Examples(
      one.data.positive[one.batches.positive], one.data.negative[one.batches.negative]
    ),
    positions=one.batches,
    # The first copy is the training on S, with no replaced position.
    new=np.concatenate(
      [one.other.positive[:1], one.other.positive[positive], one.other.negative[negative]]
    ),
    replaced=Examples(
      np.concatenate([nothing, positive, unused]), np.concatenate([nothing, unused, negative])
    ),
  )


def _gap(risks: np.ndarray) -> np.ndarray:
  """Returns the mean risk on the sets of others minus that on the own set, ``[B]``.

  ``risks`` is ``[B, models, sets]``.
  """
  own = np.trace(risks, axis1=1, axis2=2)
  size = risks.shape[1]
  return (risks.sum(axis=(1, 2)) - own) / (size * (size - 1)) - own / size


def _own(risks: np.ndarray) -> np.ndarray:
  """Returns the risk of each model on its own set, ``[R]``."""
  return np.diagonal(risks, axis1=1, axis2=2).reshape(-1)


def _stack(trees: Any) -> Any:
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
