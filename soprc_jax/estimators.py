"""Estimators of the AUPRC risk: SOPRC (Eq. 8), the AP loss (Eq. 5), the semi-variance term (Eq. 9).

A *list* is one query with its candidates. The last axis is the list, all leading axes are batch
axes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from soprc_jax._internal import checks, collectives, masks
from soprc_jax._internal.pair_sums import ALGORITHMS, L1, L2, pair_means
from soprc_jax.lists import RetrievalLists

ReduceFn = Callable[..., jax.Array]
Algorithm = Literal["auto", "dense", "sorted"]
Link = Literal["share", "log"]
# The risk of a positive as a function of (1 - pi) F and pi T.
LINKS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "share": masks.share,
  "log": masks.log_ratio,
}
# The tau1 of `with_wide`. Cosines of a positive and a negative rarely differ by more.
WIDE_TAU1 = 1.0


def soprc_loss(
  positive_scores: ArrayLike,
  negative_scores: ArrayLike,
  v: ArrayLike,
  *,
  prior: ArrayLike,
  tau1: ArrayLike = 0.1,
  tau2: ArrayLike = 0.001,
  positive_where: ArrayLike | None = None,
  negative_where: ArrayLike | None = None,
  self_weight: ArrayLike | None = None,
  tpr_gradient: bool = False,
  link: Link = "share",
  reduce_fn: ReduceFn | None = jnp.mean,
  axis_name: collectives.AxisName = None,
  algorithm: Algorithm = "auto",
) -> jax.Array:
  r"""Computes the stochastic AUPRC risk of each list, and its mean over the lists (Eq. 8).

  With l1, l2 of Eq. 7, prior pi, self weight s and scores ``h_i`` (positive), ``g_j`` (negative):

  .. math:: F_i = \mathrm{mean}_j\, \ell_1(h_i - g_j), \quad T_i = (1
            - s)\, \mathrm{mean}_m\, \ell_2(h_i - v_m) + s, \quad
            L = \mathrm{mean}_i \frac{(1 - \pi) F_i}{(1 - \pi) F_i + \pi T_i}

  The loss lies in [0, 1]. Unlike ``ap_loss`` it does not depend on the share of positives in the
  batch, only on ``prior`` (Prop. 2).

  **Link.** With ``A_i = (1 - pi) F_i / (pi T_i)`` the above is the mean of ``A / (1 + A)``. This is
  one minus the precision at each positive, the default ``link="share"``. Its gradient ``dA / (1 +
  A)^2`` vanishes where A is large, so a small prior starves an untrained model. ``link="log"`` is
  the mean of ``log(1 + A)``, minus the logarithm of that precision. Its gradient ``dA / (1 + A)``
  does not vanish: where A is large, it is the relative change of A.

  **Upper bound.** Let ``v`` be all ``P`` positive scores of the list and ``prior = P / (P + N)``
  its true share. Let ``0 <= self_weight <= 1 / P``. That holds for the default ``1 / (M + 1)`` with
  ``M = P``, and for the paper's 0. Then ``soprc_loss >= 1 - metrics.auprc`` on the same list, for
  any tau1, tau2 > 0 and either ``tpr_gradient``.

  *Proof.* ``l1 >= l_{0,1}`` gives ``F_i >= FPR(h_i)``. Let ``k`` be the number of positives
  strictly above ``h_i``. As ``l2 <= l_{0,1}`` and ``l2(x) = 0`` for ``x >= 0``, it follows that
  ``mean_m l2 <= k / P``. Because ``h_i`` counts itself in TPR,

  ``T_i <= k / P + s (1 - k / P) <= k / P + s <= (k + 1) / P <= TPR(h_i)``.

  ``x -> x / (1 + x)`` increases, hence each term is at least ``(1 - pi) FPR / ((1 - pi) FPR + pi
  TPR)``. The mean of this over i is ``1 - AUPRC`` (Eq. 2).

  With a larger ``self_weight`` T_i can exceed TPR, and the bound may fail. For any other prior the
  same holds against ``metrics.auprc(..., prior=prior)``.

  The same bound holds for ``link="log"``, because ``log(1 + A) >= A / (1 + A)``. This is ``log x >=
  1 - 1 / x`` at ``x = 1 + A``. By Jensen's inequality even ``exp(-loss) <= AUPRC``, since a
  geometric mean of precisions is at most their arithmetic mean.

  Args:
    positive_scores: ``[..., P]`` scores of the positives, in any finite range. In retrieval they
      are cosine similarities.
    negative_scores: ``[..., N]`` scores of the negatives.
    v: ``[..., M]`` auxiliary vector, a moving average of the positive scores (Eq. 10), in any
      order. Treated as constant: no gradient into v.
    prior: positive rate pi in [0, 1] of the data set, broadcastable to ``[...]``. It is checked if
      it is a plain number or a numpy array, and must then be above 0 with ``link="log"``. A list
      whose traced prior lies outside has a risk of NaN.
    tau1: width of l1, > 0.
    tau2: width of l2, > 0.
    positive_where: ``[..., P]`` mask of valid positives; ``None`` means all.
    negative_where: ``[..., N]`` mask of valid negatives; ``None`` means all.
    self_weight: weight s in [0, 1] with which a positive counts itself in T. ``None`` means ``1 /
      (M + 1)``, as in the authors' code. The paper's text has 0, where the best positive has T = 0,
      loss 1 and no gradient (``link="share"``).
    tpr_gradient: whether the gradient passes through T too. The default False is the authors' code.
      With v held fixed, a positive raises its T by moving down, so True works against the ranking.
    link: ``"share"`` (Eq. 8) or ``"log"``. With ``"log"``, ``pi T`` counts as at least the smallest
      normal number of the dtype. So a positive with ``pi T = 0 < F`` has the finite loss ``log((1 -
      pi) F) + 87.3`` (708.4 in float64), and the gradient of ``log F``.
    reduce_fn: reduces over lists, called as ``reduce_fn(values, where=valid)``. ``None`` returns
      one value per list.
    axis_name: name of a mapped axis whose devices hold the other lists of the batch.
    algorithm: how the sums over a list are computed.

      * ``"dense"``: over every pair of scores, in blocks; ``P N + P M`` operations.
      * ``"sorted"``: by sorting; ``(P + N + M) log`` operations and memory proportional to ``P + N
        + M``. Value and gradient are the same up to float32 rounding, for margins up to ``1e30
        tau1``. Requires scalar taus and reverse mode (no ``jax.jvp``, no ``jax.hessian``).
      * ``"auto"``: for each sum, sorted if the list is long enough for that to be faster. In
        float64 the sum over v stays dense.

  Returns:
    Loss in [0, 1], or >= 0 with ``link="log"``, at least float32: a scalar, or ``[...]`` (0 where
    invalid) if ``reduce_fn`` is None. A list without a valid positive or a valid negative is
    invalid. Without any valid list the loss is 0.

  Raises:
    AssertionError: when traced, if the leading axes differ.
    ValueError: ``prior``, ``self_weight`` or a tau is a plain number out of range, or ``link`` or
      ``algorithm`` is none of the above.

  >>> positive_scores, negative_scores = jnp.array([[0.9, 0.6]]), jnp.array([[0.55, 0.2]])
  >>> v = jnp.array([[0.5, 0.7]])
  >>> print(f"{soprc_loss(positive_scores, negative_scores, v, prior=0.1):.4f}")
  0.3140
  >>> print(f"{soprc_loss(positive_scores, negative_scores, v, prior=0.1, link='log'):.4f}")
  0.4943
  """
  lists, rows = _checked_lists(
    positive_scores, positive_where, negative_scores, negative_where, v=v
  )
  if self_weight is None:
    self_weight = 1.0 / (rows.shape[-1] + 1.0)
  others = jax.lax.stop_gradient(rows), masks.mask_like(None, rows)
  risk = _list_risk(lists, *others, prior, self_weight, tau1, tau2, tpr_gradient, algorithm, link)
  return _reduce_lists(risk, lists.valid, reduce_fn, axis_name)


def ap_loss(
  positive_scores: ArrayLike,
  negative_scores: ArrayLike,
  *,
  tau1: ArrayLike = 0.1,
  tau2: ArrayLike = 0.001,
  positive_where: ArrayLike | None = None,
  negative_where: ArrayLike | None = None,
  self_weight: ArrayLike | None = None,
  tpr_gradient: bool = False,
  reduce_fn: ReduceFn | None = jnp.mean,
  axis_name: collectives.AxisName = None,
  algorithm: Algorithm = "auto",
) -> jax.Array:
  r"""Computes the average-precision loss of the batch alone (Eq. 5), a biased estimator.

  It is meant for comparison. It is Eq. 8 with the positives of the batch in place of v, and the
  share of positives in the batch in place of the prior:

  .. math:: L = \mathrm{mean}_i\, \sigma\!\left(\frac{\sum_j \ell_1(h_i - g_j)}{\sum_k \ell_2(h_i
            - h_k)}\right), \quad \sigma(x) = \frac{x}{1 + x}

  with ``T_i = (1 - s) mean_k l2(h_i - h_k) + s`` for the mean in the denominator. The loss is too
  small if the share of positives in the batch is above that of the data. If the share is below, the
  loss is too large (Prop. 2, sign as proved).

  Args:
    positive_scores: ``[..., P]`` scores of the positives.
    negative_scores: ``[..., N]`` scores of the negatives.
    self_weight: weight s in [0, 1] with which a positive counts itself in T. ``None`` means ``1 /
      P``, where P counts the valid positives of the list. The best positive then has T = 1 / P, its
      exact share.
    tpr_gradient: whether the gradient passes through T too, here through both ``h_i`` and ``h_k``.
    algorithm: as in `soprc_loss`, with the positives of the list in place of v.

  The other arguments, the result and the errors are those of `soprc_loss`.

  >>> print(f"{ap_loss(jnp.array([[0.9, 0.6]]), jnp.array([[0.55, 0.2]])):.4f}")
  0.0714
  """
  (lists,) = _checked_lists(positive_scores, positive_where, negative_scores, negative_where)
  num_positives, num_negatives = (
    jnp.sum(mask, axis=-1).astype(lists.positive_scores.dtype)
    for mask in (lists.positive_where, lists.negative_where)
  )
  if self_weight is None:
    self_weight = masks.ratio(jnp.ones_like(num_positives), num_positives)
  batch_prior = masks.ratio(num_positives, num_positives + num_negatives)
  others = lists.positive_scores, lists.positive_where
  risk = _list_risk(lists, *others, batch_prior, self_weight, tau1, tau2, tpr_gradient, algorithm)
  return _reduce_lists(risk, lists.valid, reduce_fn, axis_name)


def semi_variance(
  positive_scores: ArrayLike,
  negative_scores: ArrayLike,
  *,
  lambda1: ArrayLike = 1.0,
  lambda2: ArrayLike = 5.0,
  positive_where: ArrayLike | None = None,
  negative_where: ArrayLike | None = None,
  average_over: Literal["selected", "all"] = "selected",
  pool: Literal["batch", "list"] = "batch",
  mean_gradient: bool = True,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Computes the semi-variance of positives below and negatives above their mean, L_var (Eq. 9).

  .. math:: L = \lambda_1\, \mathrm{mean}_{h_i < \mu^+} (h_i - \mu^+)^2
            + \lambda_2\, \mathrm{mean}_{g_j > \mu^-} (g_j - \mu^-)^2

  Args:
    positive_scores: ``[..., P]`` scores of the positives, clipped to an absolute value of 2.8e14
      (2e149 in float64), so that no square overflows.
    negative_scores: ``[..., N]`` scores of the negatives, clipped likewise.
    lambda1: weight of the positive part, >= 0.
    lambda2: weight of the negative part, >= 0.
    positive_where: ``[..., P]`` mask of valid positives; ``None`` means all.
    negative_where: ``[..., N]`` mask of valid negatives; ``None`` means all.
    average_over: ``"selected"`` divides by the number of selected scores (authors' code), ``"all"``
      by n+ and n- (paper's text). An empty selection gives 0.
    pool: ``"batch"`` takes means and sums over all valid lists of the batch. ``"list"`` computes
      each list separately, then averages over the valid lists.
    mean_gradient: whether the gradient passes through the means mu.
    axis_name: name of a mapped axis whose devices hold the other lists of the batch.

  Returns:
    Scalar >= 0, at least float32. Lists without a valid positive or a valid negative are ignored.

  Raises:
    AssertionError: when traced, if the leading axes differ.
    ValueError: ``average_over`` or ``pool`` is not one of the above; a lambda is a plain number
      below 0; a mask has another shape, or contains other numbers than 0 and 1.

  >>> print(f"{semi_variance(jnp.array([[0.9, 0.5]]), jnp.array([[0.3, 0.1]])):.4f}")
  0.0900
  """
  if average_over not in ("selected", "all"):
    raise ValueError(f"average_over must be 'selected' or 'all', got {average_over!r}")
  if pool not in ("batch", "list"):
    raise ValueError(f"pool must be 'batch' or 'list', got {pool!r}")
  checks.check_range("lambda1", lambda1, low=0.0)
  checks.check_range("lambda2", lambda2, low=0.0)
  (lists,) = _checked_lists(positive_scores, positive_where, negative_scores, negative_where)
  dtype = lists.positive_scores.dtype
  # 2^30 squares of twice this score have a finite sum.
  limit = float(np.sqrt(float(jnp.finfo(dtype).max)) / 2**16)

  def half(scores: jax.Array, mask: jax.Array, sign: float) -> jax.Array:
    """Returns the semi-variance of the scores above (sign 1) or below (-1) their mean."""
    scores, mask = jnp.clip(scores, -limit, limit), mask & lists.valid[..., None]
    axis, names = (-1, None) if pool == "list" else (None, axis_name)
    mean = masks.masked_mean(scores, mask, axis, names)
    if pool == "list":
      mean = mean[..., None]
    if not mean_gradient:
      mean = jax.lax.stop_gradient(mean)
    excess = jax.nn.relu(sign * (scores - mean))
    selected = mask & ~(excess <= 0) if average_over == "selected" else mask
    return masks.masked_mean(jnp.square(excess), selected, axis, names)

  value = jnp.asarray(lambda1, dtype) * half(lists.positive_scores, lists.positive_where, -1.0)
  value += jnp.asarray(lambda2, dtype) * half(lists.negative_scores, lists.negative_where, 1.0)
  if pool == "list":
    value = masks.masked_mean(value, lists.valid, None, axis_name)
  return value


def positive_pull(
  positive_scores: ArrayLike,
  *,
  alpha: ArrayLike = 2.0,
  base: ArrayLike = 0.5,
  positive_where: ArrayLike | None = None,
  axis_name: collectives.AxisName = None,
) -> jax.Array:
  r"""Computes the positive part of the Multi-Similarity loss, a mean of soft maxima of the lists.

  SOPRC depends on differences of scores only, and stops at a margin of tau1. This term pulls the
  positives towards their query in any case, far ones more than near ones. See Wang et al.,
  "Multi-similarity loss with general pair weighting", CVPR 2019.

  .. math:: L = \mathrm{mean}_{lists}\; \tfrac{1}{\alpha} \log\frac{1 + \sum_i e^{-\alpha (h_i
            - b)}}{1 + n\, e^{-\alpha (1 - b)}}

  The denominator, for n positives, has no gradient. It makes the term 0 where all similarities are
  1.

  Args:
    positive_scores: ``[..., P]`` cosine similarities of the positives.
    alpha: sharpness, > 0.
    base: similarity b below which a positive counts more than 1 does in the sum.
    positive_where: ``[..., P]`` mask of valid positives; ``None`` means all.
    axis_name: name of a mapped axis whose devices hold the other lists of the batch.

  Returns:
    Scalar, at least float32, >= 0 for similarities up to 1. Lists without a valid positive are
    ignored; 0 if there is no other.

  Raises:
    TypeError: the scores are not real numbers.
    ValueError: a number is out of range; the mask has another shape, or contains other numbers than
      0 and 1.

  >>> print(f"{positive_pull(jnp.array([[0.9, 0.5], [1.0, 1.0]])):.3f}")
  0.086
  """
  checks.check_width("alpha", alpha)
  checks.check_range("base", base)
  checks.check_masks_passed(positive_scores=(positive_scores, positive_where))
  (scores,) = masks.promote(positive_scores, names=("positive_scores",))
  scores, mask = masks.masked(scores, positive_where, "positive_where")
  alpha, base = (jnp.asarray(value, scores.dtype) for value in (alpha, base))
  pulls = masks.log1p_sum_exp(-alpha * (scores - base), mask) / alpha
  pulls -= masks.log1p_sum_exp(jnp.full_like(scores, -alpha * (1.0 - base)), mask) / alpha
  return masks.masked_mean(pulls, jnp.any(mask, axis=-1), None, axis_name)


def with_wide(risk: jax.Array, risk_fn: Callable[..., jax.Array], *, wide: ArrayLike) -> jax.Array:
  """Returns the mean of a risk and of the same one at `WIDE_TAU1`, of which ``wide`` is the weight.

  At a small tau1 only the negatives near a positive or above it have a gradient, at this one nearly
  all. Where both risks bound 1 - AUPRC from above (see `soprc_loss`), their mean does.

  Args:
    risk: the risk at its own tau1.
    risk_fn: function of ``tau1``, such as `soprc_loss` with all its other arguments.
    wide: in [0, 1]; at 0 the risk at `WIDE_TAU1` is not computed.
  """
  checks.check_range("wide", wide, low=0.0, high=1.0)
  if not isinstance(wide, jax.Array) and wide == 0:
    return risk
  share = jnp.asarray(wide, risk.dtype)
  return (1.0 - share) * risk + share * risk_fn(tau1=WIDE_TAU1)


def _list_risk(
  lists: RetrievalLists,
  others: jax.Array,
  others_where: jax.Array,
  prior: ArrayLike,
  self_weight: ArrayLike,
  tau1: ArrayLike,
  tau2: ArrayLike,
  tpr_gradient: bool,
  algorithm: str,
  link: str = "share",
) -> jax.Array:
  """Averages the link of ``(1 - pi) F`` and ``pi T`` over the positives of each list, ``[...]``.

  With ``link="share"`` this is Eq. 8 if ``others`` is v, and Eq. 5 if ``others`` are the positives.

  Raises:
    ValueError: a plain number is out of range. Under jit the config has checked them before.
  """
  if link not in LINKS:
    raise ValueError(f"link must be one of {tuple(LINKS)}, got {link!r}")
  if algorithm not in ALGORITHMS:
    raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {algorithm!r}")
  checks.check_width("tau1", tau1)
  checks.check_width("tau2", tau2)
  checks.check_range("self_weight", self_weight, low=0.0, high=1.0)
  checks.check_range(
    "prior (a share of positives, not a percentage or a count)", prior, low=0.0, high=1.0
  )
  if link == "log":  # the precision is 0 at a prior of 0
    checks.check_range("prior (with link='log')", prior, low=0.0, high=1.0, open_low=True)
  positives = lists.positive_scores
  prior = checks.prior_per_list(prior, positives)
  weight = checks.per_list("self_weight", self_weight, positives)
  fpr = pair_means(
    L1, positives, lists.negative_scores, lists.negative_where, tau=tau1, algorithm=algorithm
  )
  tpr = pair_means(L2, positives, others, others_where, tau=tau2, algorithm=algorithm)
  # Scores of 1e38 overflow to inf. Clipping to the largest number keeps (1 - prior) F and the risk
  # defined.
  fpr = jnp.minimum(fpr, jnp.finfo(fpr.dtype).max)
  tpr = (1.0 - weight) * tpr + weight
  if not tpr_gradient:
    tpr = jax.lax.stop_gradient(tpr)
  return masks.masked_mean(
    LINKS[link]((1.0 - prior) * fpr, prior * tpr), lists.positive_where, axis=-1
  )


def _checked_lists(
  positive_scores: ArrayLike,
  positive_where: ArrayLike | None,
  negative_scores: ArrayLike,
  negative_where: ArrayLike | None,
  **others: Any,
) -> tuple[Any, ...]:
  """Checks the arguments of an estimator.

  Returns:
    The lists, with 0 for invalid scores, then each of ``others`` in the dtype of the lists.
  """
  checks.check_masks_passed(
    positive_scores=(positive_scores, positive_where),
    negative_scores=(negative_scores, negative_where),
  )
  named = {"positive_scores": positive_scores, "negative_scores": negative_scores, **others}
  arrays = masks.promote(*named.values(), names=tuple(named))
  checks.check_lists(**dict(zip(named, arrays, strict=True)))
  positives = masks.masked(arrays[0], positive_where, "positive_where")
  negatives = masks.masked(arrays[1], negative_where, "negative_where")
  return RetrievalLists(*positives, *negatives, jnp.zeros([], jnp.int32)), *arrays[2:]


def _reduce_lists(
  values: jax.Array, valid: jax.Array, reduce_fn: ReduceFn | None, axis_name: collectives.AxisName
) -> jax.Array:
  """Reduces over the valid lists of all devices; returns 0 if there are none."""
  values = jnp.where(valid, values, jnp.zeros_like(values))
  if reduce_fn is None:
    return values
  if reduce_fn is jnp.mean:
    return masks.masked_mean(values, valid, None, axis_name)
  if axis_name is not None:
    # A custom reduction needs all values, so each device applies it to the joined batch.
    tiled = values.ndim > 0
    values, valid = jax.lax.all_gather((values, valid), axis_name, tiled=tiled)
  # Without a valid list all values (zeros) are reduced, since jnp.max and others need at least one.
  reduced = reduce_fn(values, where=valid | ~jnp.any(valid))
  # All devices hold the same value. Their mean tells shard_map so, which then counts the gradient
  # once.
  return reduced if axis_name is None else jax.lax.pmean(reduced, axis_name)
