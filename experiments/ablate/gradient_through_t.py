"""Measures where a gradient through T would push the positives, and so why there is none.

The risk of a positive is r = (1 - pi) F / ((1 - pi) F + pi T). It falls when F falls, so that the
positive must move up, and when T rises. With v fixed, T = mean_j l2(h - v_j) rises only if h moves
DOWN. That part of the gradient opposes the ranking, in every positive and at every prior. It is the
derivative of a quantity that does not exist: v follows the positives, and T does not change when
all of them move together.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from soprc_jax import estimators, interpolation, lists
from soprc_jax._internal import text_table
from soprc_jax.training import build, checkpoints

_BOUNDS = (-1.0, 1.0)


class Push(NamedTuple):
  """How a gradient step would move the positive scores of some batches.

  Attributes:
    network: model state, ``start`` or ``trained``.
    prior: constant prior.
    down_without: share of the positives pushed down by the gradient through F alone; 0 by
      construction.
    down_with: the same share with the gradient through T too.
    ratio: norm of the part through T over the norm of the part through F.
    mean_without: mean step -dL/dh of a positive, times the number of positives: upwards if > 0.
    mean_with: the same with T.
  """

  network: str
  prior: float
  down_without: float
  down_with: float
  ratio: float
  mean_without: float
  mean_with: float


def measure(
  config: Any,
  trained: Path,
  *,
  num_batches: int = 8,
  priors: tuple[float, ...] = (0.5, 0.03, 0.001),
) -> list[Push]:
  """Measures how SOPRC's gradient moves the positives on the first training batches of a run.

  It does so for the initial and for the trained model.

  Args:
    config: resolved config of the run, with its tau1, tau2 and M. v is that of the batch.
    trained: folder of the run.
    num_batches: number of batches.
    priors: each is measured separately.
  """
  data = build.make_data(config)
  state = build.starting_state(config, build.make_parts(config, data.class_counts()))
  networks = {
    "start": {"params": state.params, "batch_stats": state.batch_stats},
    "trained": checkpoints.load_network(str(trained), build.abstract_network(config)),
  }
  batches = build.make_batches(config, data)
  found = []
  for name, network in networks.items():
    scores = [_scores(config, network, batches[step]) for step in range(num_batches)]
    for prior in priors:
      pushes = [_pushes(config.loss, prior, batch) for batch in scores]
      found.append(
        _summary(name, prior, *(np.concatenate(part) for part in zip(*pushes, strict=True)))
      )
  return found


def markdown(pushes: list[Push], *, tau2: float) -> str:
  """Returns a Markdown table with a note on what it shows."""
  header = [
    "network",
    "prior",
    "pushed down: through F",
    "and T",
    "mean step: through F",
    "and T",
    "norm of the part of T over F",
  ]
  rows = []
  for push in pushes:
    cells = [push.network, f"{push.prior:g}", f"{push.down_without:.0%}", f"{push.down_with:.0%}"]
    cells += [f"{push.mean_without:+.2f}", f"{push.mean_with:+.2f}", f"{push.ratio:.2g}"]
    rows.append(cells)
  note = (
    "How a gradient step moves the positives, by the path of the gradient (v fixed, tau2 = "
    f"{tau2:g}): the share that it pushes down, and the mean step -dL/dh times the number of "
    "positives, upwards if > 0."
  )
  return "\n".join([text_table.markdown(header, rows), "", note]) + "\n"


def _scores(
  config: Any, network: dict[str, Any], batch: dict[str, np.ndarray]
) -> lists.RetrievalLists:
  """Returns the lists of a batch, with its own batch statistics, as a training step sees them."""
  model = build.make_model(config, freeze_bn=config.model.freeze_bn, axis_name=None)
  embeddings, _ = model.apply(network, batch["image"], train=True, mutable=["batch_stats"])
  return lists.retrieval_lists(
    embeddings,
    batch["label"],
    max_positives=config.train.per_class - 1,
    where=jnp.asarray(batch["where"]),
  )


def _pushes(loss: Any, prior: float, found: lists.RetrievalLists) -> tuple[np.ndarray, np.ndarray]:
  """Returns steps -dL/dh times the number of positives, each ``[valid positives]``.

  The first is through F alone, the second through F and T.
  """
  v = interpolation.interpolate_scores(
    found.positive_scores,
    num_points=loss.num_points,
    bounds=_BOUNDS,
    grid=loss.grid,
    where=found.positive_where,
  )

  @functools.partial(jax.jit, static_argnames="through")
  def gradient(positive_scores: jax.Array, through: bool) -> jax.Array:
    risk = functools.partial(
      estimators.soprc_loss,
      prior=prior,
      tau1=loss.tau1,
      tau2=loss.tau2,
      self_weight=loss.self_weight,
      tpr_gradient=through,
      **found.masks,
    )
    return jax.grad(risk)(positive_scores, found.negative_scores, v)

  where = np.asarray(found.positive_where)
  count = where.sum()
  without, with_ = (
    -count * np.asarray(gradient(found.positive_scores, through))[where]
    for through in (False, True)
  )
  return without, with_


def _summary(name: str, prior: float, without: np.ndarray, with_: np.ndarray) -> Push:
  ratio = np.linalg.norm(with_ - without) / np.linalg.norm(without)
  return Push(
    name,
    prior,
    *(
      float(value)
      for value in ((without < 0).mean(), (with_ < 0).mean(), ratio, without.mean(), with_.mean())
    ),
  )
