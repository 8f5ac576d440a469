"""Benchmarks `auprc`: the exact SOPRC loss of one long list, by sorting.

The peers compute all pairs in blocks, in jax and in torch.
"""

from collections.abc import Callable, Iterator
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark import harness, peers
import soprc_jax

_POSITIVES, _NEGATIVES, _POINTS = 10**4, 10**6, 100
_PRIOR, _TAU1, _TAU2 = 0.01, 0.1, 0.001
# All pairs take a minute, so the peers get fewer positives. Their time is proportional to the
# number of positives.
_SHARE = 20
_CALLS = 5
_TARGET = 50.0


def rows() -> Iterator[harness.Row]:
  """Yields the rows: loss and both gradients, compared with all pairs."""
  import torch

  case = f"soprc_loss, {_POSITIVES:,} positives x {_NEGATIVES:,} negatives"
  scores = _scores(_POSITIVES, _NEGATIVES)
  part = (scores[0][::_SHARE], *scores[1:])
  sorted_, dense = _ours("auto"), _ours("dense")
  blockwise: dict[str, Callable[[], Any]] = {
    "jax, all pairs in blocks": lambda: dense(*part),
    f"torch {torch.__version__}, all pairs in blocks": functools.partial(_torch_blockwise, *part),
  }
  _check(sorted_(*part), dense(*part), _torch_blockwise(*part))

  def several() -> None:
    # A single call would mostly measure torch's threads, which keep the cores busy for a while
    # after their last work.
    for _ in range(_CALLS):
      jax.block_until_ready(sorted_(*scores))

  # Three repetitions, since all pairs are slow; the warm-up is not timed.
  seconds = harness.time_together({"ours": several, **blockwise}, repetitions=3)
  ours = [second / _CALLS for second in seconds["ours"]]
  for peer in blockwise:
    theirs = [_SHARE * second for second in seconds[peer]]
    note = f"peer: 1 in {_SHARE} of the positives, times {_SHARE}; ours: {_CALLS} calls a turn"
    yield harness.row("auprc", case, peer, ours, theirs, target=_TARGET, note=note)


def growth() -> Iterator[harness.Curve]:
  """Yields seconds and planned memory by the number of negatives.

  Also yields the seconds of `ap_loss` by the number of positives.
  """
  positives, counts = 1000, [10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7]
  seconds, memory = [], []
  for count in counts:
    scores = _scores(positives, count)
    run, plan = _compile(_ours("sorted"), scores)
    seconds.append(harness.median_seconds(run))
    memory.append(
      (plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes) / 2**20
    )
  yield harness.Curve(
    "auprc", f"soprc_loss, {positives:,} positives", "negatives", counts, "seconds", seconds
  )
  yield harness.Curve(
    "auprc", f"soprc_loss, {positives:,} positives", "negatives", counts, "MiB", memory
  )
  counts = [10**3, 10**4, 10**5, 10**6]
  seconds = [
    harness.median_seconds(_compile(_ap_loss(), _scores(count, count)[:2])[0]) for count in counts
  ]
  yield harness.Curve(
    "auprc", "ap_loss, as many negatives", "positives", counts, "seconds", seconds
  )


def _scores(num_positives: int, num_negatives: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns overlapping normal scores of positives and negatives, and v."""
  rng = np.random.default_rng(0)
  positive = jnp.asarray(rng.normal(0.5, 0.2, num_positives), jnp.float32)
  negative = jnp.asarray(rng.normal(0.0, 0.15, num_negatives), jnp.float32)
  return positive, negative, soprc_jax.interpolate_scores(positive, num_points=_POINTS)


def _ours(algorithm: Any) -> Callable[..., Any]:
  def loss(positive: jax.Array, negative: jax.Array, v: jax.Array) -> jax.Array:
    return soprc_jax.soprc_loss(
      positive, negative, v, prior=_PRIOR, tau1=_TAU1, tau2=_TAU2, algorithm=algorithm
    )

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def _ap_loss() -> Callable[..., Any]:
  return jax.jit(
    jax.value_and_grad(functools.partial(soprc_jax.ap_loss, algorithm="sorted"), argnums=(0, 1))
  )


def _torch_blockwise(positive: Any, negative: Any, v: Any, block: int = 2) -> tuple[float, Any]:
  """Computes loss and gradients of Eq. 8 in torch, a few positives at a time."""
  import torch

  torch.set_num_threads(os.cpu_count() or 1)
  h: Any = torch.from_numpy(np.array(positive))
  g: Any = torch.from_numpy(np.array(negative))
  v = torch.from_numpy(np.array(v))
  h.requires_grad_()
  g.requires_grad_()
  total = 0.0
  for first in range(0, len(h), block):
    part = h[first : first + block, None]
    fpr = peers.huber(part - g, _TAU1).mean(1)
    with torch.no_grad():
      tpr = (1 + torch.tanh(torch.relu(v - part) / (2 * _TAU2)).sum(1)) / (len(v) + 1)
    negative_part = (1 - _PRIOR) * fpr
    loss = (negative_part / (negative_part + _PRIOR * tpr)).sum() / len(h)
    loss.backward()
    total += float(loss.detach())
  return total, (h.grad.numpy(), g.grad.numpy())


def _check(*results: Any) -> None:
  """Raises an ArithmeticError if the implementations do not agree."""
  first, *others = results
  for other in others:
    wrong = abs(float(first[0]) - float(other[0])) > 1e-5
    for ours, theirs in zip(first[1], other[1], strict=True):
      wrong |= np.linalg.norm(np.asarray(ours) - np.asarray(theirs)) > 1e-4 * np.linalg.norm(
        np.asarray(theirs)
      )
    if wrong:
      raise ArithmeticError("the implementations of the SOPRC loss do not agree")


def _compile(function: Callable[..., Any], arguments: Any) -> tuple[Callable[[], Any], Any]:
  """Returns a compiled call without arguments, and XLA's plan of its memory."""
  program = function.lower(*arguments).compile()  # type: ignore[attr-defined]
  return lambda: program(*arguments), program.memory_analysis()
