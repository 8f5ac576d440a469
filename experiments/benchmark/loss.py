"""Benchmarks value and gradient of every loss with respect to the embeddings.

The peers are pytorch-metric-learning, plain torch, and the matrix products that a loss cannot
avoid.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark import harness, peers
from soprc_jax import estimators, lists, losses
from soprc_jax.memory import Memory

SIZES = (224, 1024)
DIM, PER_CLASS, NUM_POINTS, MEMORY_SIZE, PRIOR = 512, 4, 100, 4096, 0.1
_MAX_POSITIVES = PER_CLASS - 1
_GROWTH_SIZES = (224, 448, 896, 1792, 3584)
_GROWTH_LOSSES = ("soprc", "triplet", "smooth_ap", "fast_ap", "blackbox")
# At least twice as fast as a peer, or within one and a half times the products.
_TARGET, _PRODUCTS_TARGET = 2.0, 1 / 1.5


class Batch(NamedTuple):
  """Inputs of the losses.

  They are B unit vectors, four of each class, v of each list for SOPRC, and a memory for XBM.
  """

  embeddings: jax.Array
  labels: jax.Array
  v: jax.Array
  memory: jax.Array
  memory_labels: jax.Array


LossFn = Callable[[jax.Array, Batch], jax.Array]


def make_batch(size: int) -> Batch:
  """Returns vectors that spread around the center of their class, in random order."""
  rng = np.random.default_rng(size)
  labels = rng.permutation(np.repeat(np.arange(size // PER_CLASS), PER_CLASS))
  memory_labels = rng.integers(0, size // PER_CLASS, MEMORY_SIZE)
  centres = rng.normal(size=(size // PER_CLASS, DIM))

  def vectors(labels: np.ndarray) -> jax.Array:
    noisy = centres[labels] + 3.0 * rng.normal(size=(len(labels), DIM))
    return jnp.asarray(noisy / np.linalg.norm(noisy, axis=1, keepdims=True), jnp.float32)

  v = np.sort(rng.uniform(0.0, 0.5, (size, NUM_POINTS)), axis=1)
  return Batch(
    vectors(labels),
    jnp.asarray(labels, jnp.int32),
    jnp.asarray(v, jnp.float32),
    vectors(memory_labels),
    jnp.asarray(memory_labels, jnp.int32),
  )


def _soprc(embeddings: jax.Array, batch: Batch) -> jax.Array:
  found = _lists(embeddings, batch)
  return estimators.soprc_loss(
    found.positive_scores, found.negative_scores, batch.v, prior=PRIOR, **found.masks
  )


def _ap(embeddings: jax.Array, batch: Batch) -> jax.Array:
  found = _lists(embeddings, batch)
  return estimators.ap_loss(found.positive_scores, found.negative_scores, **found.masks)


def _semi_variance(embeddings: jax.Array, batch: Batch) -> jax.Array:
  found = _lists(embeddings, batch)
  return estimators.semi_variance(found.positive_scores, found.negative_scores, **found.masks)


def _lists(embeddings: jax.Array, batch: Batch) -> lists.RetrievalLists:
  return lists.retrieval_lists(embeddings, batch.labels, max_positives=_MAX_POSITIVES)


def _xbm(embeddings: jax.Array, batch: Batch) -> jax.Array:
  memory = Memory(batch.memory, batch.memory_labels, jnp.ones(MEMORY_SIZE, bool))
  return losses.xbm_contrastive_loss(embeddings, batch.labels, memory)


def _plain(loss_fn: Callable[..., jax.Array], **options: Any) -> LossFn:
  return lambda embeddings, batch: loss_fn(embeddings, batch.labels, **options)


LOSSES: Mapping[str, LossFn] = {
  "soprc": _soprc,
  "ap": _ap,
  "semi_variance": _semi_variance,
  "contrastive": _plain(losses.contrastive_loss),
  "triplet": _plain(losses.triplet_loss, max_positives=_MAX_POSITIVES),
  "multi_similarity": _plain(losses.multi_similarity_loss),
  "smooth_ap": _plain(losses.smooth_ap_loss, max_positives=_MAX_POSITIVES),
  "fast_ap": _plain(losses.fast_ap_loss),
  "listwise_ap": _plain(losses.listwise_ap_loss),
  "auroc": _plain(losses.auroc_loss, max_positives=_MAX_POSITIVES),
  "xbm": _xbm,
  "blackbox": _plain(losses.blackbox_ap_loss, max_positives=_MAX_POSITIVES),
}

_NOTES = {
  "fast_ap": "the peer normalizes the embeddings again; gradients compared without their radial "
  "part",
  "listwise_ap": "the similarity 1 of a query to itself is a kink; gradients compared without "
  "their radial part",
  "xbm": f"against a constant memory of {MEMORY_SIZE}",
}
_SMOOTH_AP_NOTE = (
  "the peer (2.9) swaps class size and number of classes, so that its value differs; only the "
  "time is compared"
)


def rows() -> Iterator[harness.Row]:
  """Yields each loss at both sizes, compared with its peers and with the products."""
  import torch

  torch.set_num_threads(os.cpu_count() or 1)
  for size in SIZES:
    batch = make_batch(size)
    for name, loss_fn in LOSSES.items():
      ours = functools.partial(jax.jit(jax.value_and_grad(loss_fn)), batch.embeddings, batch)
      theirs = _peers(name, batch)
      for peer, (step, comparable) in theirs.items():
        if comparable:
          _check(
            f"{name} of {peer} at {size}",
            ours(),
            step(),
            batch,
            radial=name not in ("fast_ap", "listwise_ap"),
          )
      timed = {peer: step for peer, (step, _) in theirs.items()} | {
        "its matrix products in jax": _products(name, batch)
      }
      seconds = _seconds({"ours": ours, **timed}, size)
      for peer in timed:
        target = _TARGET if peer in theirs else _PRODUCTS_TARGET
        comparable = theirs.get(peer, (None, True))[1]
        note = (_NOTES.get(name, "") if comparable else _SMOOTH_AP_NOTE) if peer in theirs else ""
        yield harness.row(
          "loss",
          f"{name}, {size} x {DIM}",
          peer,
          seconds["ours"],
          seconds[peer],
          target=target,
          note=note,
          suffices=peer not in theirs,
        )


def growth() -> Iterator[harness.Curve]:
  """Yields the seconds of a few losses by the size of the batch."""
  steps = {}
  for size in _GROWTH_SIZES:
    batch = make_batch(size)
    for name in _GROWTH_LOSSES:
      steps[name, size] = functools.partial(
        jax.jit(jax.value_and_grad(LOSSES[name])), batch.embeddings, batch
      )
  for name in _GROWTH_LOSSES:
    functions = {str(size): steps[name, size] for size in _GROWTH_SIZES}
    seconds = harness.time_together(functions, repetitions=3, warmup=1)
    costs = [float(np.median(seconds[str(size)])) for size in _GROWTH_SIZES]
    yield harness.Curve(
      "loss", f"{name}, value and gradient", "batch size", _GROWTH_SIZES, "seconds", costs
    )


def _seconds(steps: Mapping[str, Callable[[], Any]], size: int) -> dict[str, list[float]]:
  """Returns the seconds of one step of each, with the steps taking turns.

  A short step is called several times per turn, as training also calls one step after the other. A
  single short step would mostly measure the threads of the other package, which keep a core busy
  for a while after their last work.
  """
  calls = max(1, 2000 // size)

  def repeated(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
      for _ in range(calls):
        jax.block_until_ready(step())

    return run

  seconds = harness.time_together({name: repeated(step) for name, step in steps.items()}, warmup=2)
  return {name: [second / calls for second in each] for name, each in seconds.items()}


def _products(name: str, batch: Batch) -> Callable[[], Any]:
  """Returns a call of the matrix products of the loss alone.

  They are the scores, and their gradient with respect to each factor that is not constant.
  """
  memory = batch.memory if name == "xbm" else None
  width = MEMORY_SIZE if name == "xbm" else batch.labels.shape[0]
  weights = jnp.asarray(
    np.random.default_rng(0).normal(size=(batch.labels.shape[0], width)), jnp.float32
  )
  product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  def products(embeddings: jax.Array, weights: jax.Array) -> Any:
    if memory is not None:
      return product(embeddings, memory.T), product(weights, memory)
    return product(embeddings, embeddings.T), product(weights, embeddings) + product(
      weights.T, embeddings
    )

  return functools.partial(jax.jit(products), batch.embeddings, weights)


def _peers(name: str, batch: Batch) -> dict[str, tuple[Callable[[], Any], bool]]:
  """Returns peer -> (step, whether its value has the same definition).

  A step returns value and gradient.
  """
  import pytorch_metric_learning
  import torch

  embeddings: Any = torch.tensor(np.asarray(batch.embeddings), requires_grad=True)
  labels = torch.tensor(np.asarray(batch.labels)).long()
  v, memory = torch.tensor(np.asarray(batch.v)), torch.tensor(np.asarray(batch.memory))
  memory_labels = torch.tensor(np.asarray(batch.memory_labels)).long()

  def step(loss_fn: peers.TorchLoss, *arguments: Any, **options: Any) -> Callable[[], Any]:
    def run() -> Any:
      embeddings.grad = None
      loss = loss_fn(embeddings, labels, *arguments, **options)
      loss.backward()
      return loss.detach().numpy(), embeddings.grad.numpy()

    return run

  plain = {
    "soprc": step(peers.soprc, v, prior=PRIOR),
    "ap": step(peers.ap),
    "semi_variance": step(peers.semi_variance),
    "smooth_ap": step(peers.smooth_ap),
    "listwise_ap": step(peers.listwise_ap),
    "auroc": step(peers.auroc),
    "xbm": step(peers.xbm, memory, memory_labels),
    "blackbox": step(peers.blackbox),
  }
  library = {
    loss: step(function) for loss, function in peers.metric_learning_losses(len(labels)).items()
  }
  library["xbm"] = step(peers.metric_learning_xbm(memory, memory_labels))
  if len(labels) > 500:
    del library["smooth_ap"]  # it needs some 30 GiB
  found = {}
  if name in library:
    found[f"pytorch-metric-learning {pytorch_metric_learning.__version__}"] = (
      library[name],
      name != "smooth_ap",
    )
  if name in plain:
    found[f"plain torch {torch.__version__}"] = (plain[name], True)
  return found


def _check(what: str, ours: Any, theirs: Any, batch: Batch, *, radial: bool) -> None:
  """Raises an AssertionError if values or gradients differ by more than float32 explains."""
  np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-4, err_msg=what)
  vectors = np.asarray(batch.embeddings)
  gradients = [np.asarray(gradient) for gradient in (ours[1], theirs[1])]
  if not radial:
    gradients = [
      gradient - np.sum(gradient * vectors, axis=1, keepdims=True) * vectors
      for gradient in gradients
    ]
  # If rounding moves a rank or a hinge to its other side, single entries change.
  np.testing.assert_allclose(
    gradients[0], gradients[1], rtol=0, atol=5e-3 * np.abs(gradients[1]).max(), err_msg=what
  )
