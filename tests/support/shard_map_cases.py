"""Runs every function with ``axis_name`` in `jax.shard_map`, and on one device.

The single device gets the joined batch.

As a program it writes the values of DEVICES devices: ``shard_map_cases.py OUT DEVICES``.
"""

from collections.abc import Callable
import contextlib
import sys
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import soprc_jax
from soprc_jax import lists, losses, memory
from soprc_jax._internal import blockwise, piecewise

AXIS = "devices"
_IMAGES, _CLASSES, _FEATURES, _DIM = 24, 5, 7, 6
_LISTS, _POINTS = 8, 12


class Case(NamedTuple):
  """Describes one function of the batch.

  It is called as ``compute(shared, parts, axis_name) -> (everywhere, parts)``.

  Attributes:
    compute: returns what is equal on all devices, and what is a part of the batch.
    shared: arrays that every device holds.
    parts: arrays of which every device holds a part along the first axis.
    lowered: whether few images take the paths of many, by lower thresholds.
  """

  compute: Callable[..., Any]
  shared: Any
  parts: Any
  lowered: bool = False


def _of_loss(loss_fn):
  """Returns value and gradients of ``loss_fn(shared, floats, others, axis_name)``."""

  def compute(shared, parts, axis_name):
    floats, others = parts

    def value(shared, floats):
      return loss_fn(shared, floats, others, axis_name)

    loss, (of_shared, of_parts) = jax.value_and_grad(value, (0, 1))(shared, floats)
    return {"loss": loss, "gradient": of_shared}, {"gradient": of_parts}

  return compute


def _on_scores(function, **options):
  """Wraps a function of positive and negative scores; a parameter scales the positive ones."""

  def loss_fn(shared, scores, masks, axis_name):
    positive, *others = scores
    where = {"positive_where": masks[0], "negative_where": masks[1]}
    return function(shared["scale"] * positive, *others, axis_name=axis_name, **where, **options)

  return _of_loss(loss_fn)


def _positive_pull(shared, parts, axis_name):
  def loss_fn(shared, scores, masks, axis_name):
    return soprc_jax.positive_pull(
      shared["scale"] * scores[0], positive_where=masks[0], axis_name=axis_name
    )

  return _of_loss(loss_fn)(shared, parts, axis_name)


def _embed(kernel, features):
  vectors = jnp.matmul(features, kernel, precision=jax.lax.Precision.HIGHEST)
  return vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)


def _on_images(function, **options):
  """Wraps a function of embeddings and labels; a parameter makes the embeddings from features.

  Masks of pairs in the parts replace labels.
  """

  def loss_fn(shared, features, others, axis_name):
    labels, where, *pairs = others
    given = pairs[0] if pairs else {"labels": labels}
    return function(
      _embed(shared["kernel"], features[0]), where=where, axis_name=axis_name, **given, **options
    )

  return _of_loss(loss_fn)


def _on_proxies(function):
  """Wraps a loss with proxies, which every device has. Their gradient is one of the values."""

  def loss_fn(shared, features, others, axis_name):
    labels, where = others
    return function(
      _embed(shared["kernel"], features[0]),
      labels,
      shared["proxies"],
      where=where,
      axis_name=axis_name,
    )

  shared, parts = _images()
  proxies = np.float32(np.random.default_rng(4).normal(size=(_CLASSES + 2, _DIM)))
  return Case(_of_loss(loss_fn), shared | {"proxies": proxies}, parts)


def _sigmoid(shared, parts, axis_name):
  def loss_fn(shared, features, others, axis_name):
    labels, where = others
    embeddings = _embed(shared["kernel"], features[0])
    options = {"scale": jnp.exp(shared["log_scale"]), "bias": shared["bias"]}
    return losses.sigmoid_loss(embeddings, labels, where=where, axis_name=axis_name, **options)

  learned = {"log_scale": np.float32(2.0), "bias": np.float32(-5.0)}
  return _of_loss(loss_fn)(shared | learned, parts, axis_name)


def _scores(num_positives, num_negatives, *, with_v=True):
  rng = np.random.default_rng(0)
  positive, negative, v = (
    np.float32(rng.normal(mean, 0.3, (_LISTS, count)))
    for mean, count in ((0.5, num_positives), (0.0, num_negatives), (0.5, _POINTS))
  )
  masks = [rng.random(scores.shape) < 0.8 for scores in (positive, negative)]
  masks[0][3] = False  # a list without a positive
  floats = (positive, negative, v) if with_v else (positive, negative)
  return {"scale": np.float32(1.1)}, (floats, tuple(masks))


def _images():
  rng = np.random.default_rng(1)
  kernel, features = (
    np.float32(rng.normal(size=shape)) for shape in ((_FEATURES, _DIM), (_IMAGES, _FEATURES))
  )
  labels, where = rng.integers(0, _CLASSES, _IMAGES).astype(np.int32), rng.random(_IMAGES) < 0.9
  return {"kernel": kernel}, ((features,), (labels, where))


_SHORT, _LONG = (20, 50), (512, 2**13)


def _with_masks(**pairs):
  """Returns images with masks of pairs, of which every device holds the rows of its images."""
  shared, (features, others) = _images()
  return shared, (features, (*others, pairs))


def _of_labels():
  """Returns images with the relevance mask that their labels make."""
  _, (_, (labels, _)) = _images()
  return _with_masks(positives=labels[:, None] == labels)


def _of_no_labels():
  """Returns images with a relevance mask that is not symmetric, and with ignored pairs."""
  rng = np.random.default_rng(5)
  positives, ignore = (rng.random((_IMAGES, _IMAGES)) < share for share in (0.2, 0.1))
  return _with_masks(positives=positives, ignore=ignore)


def _retrieval_lists(shared, parts, axis_name):
  (features,), (labels, where, *pairs) = parts
  given = pairs[0] if pairs else {"labels": labels}
  found = soprc_jax.retrieval_lists(
    _embed(shared["kernel"], features), max_positives=2, where=where, axis_name=axis_name, **given
  )
  return {"num_dropped": found.num_dropped}, found._replace(num_dropped=None)


def _soprc_of_images(embeddings, labels, *, where, axis_name):
  """Computes embeddings to lists to v to loss, as in a training step."""
  tracker = soprc_jax.score_ema(_CLASSES, _POINTS, 0.1, axis_name=axis_name)
  found = soprc_jax.retrieval_lists(
    embeddings, labels, max_positives=3, where=where, axis_name=axis_name
  )
  v = tracker.lookahead(tracker.init(None), found.positive_scores, labels, found.positive_where)
  masks = {"positive_where": found.positive_where, "negative_where": found.negative_where}
  return soprc_jax.soprc_loss(
    found.positive_scores, found.negative_scores, v, prior=0.1, axis_name=axis_name, **masks
  )


def _retrieval_loss(embeddings, labels, *, where, axis_name):
  tracker = soprc_jax.score_ema(_CLASSES, _POINTS, 0.1, axis_name=axis_name)
  arguments = {
    "tracker": tracker,
    "opt_state": tracker.init(None),
    "where": where,
    "axis_name": axis_name,
  }
  return soprc_jax.retrieval_loss(
    embeddings, labels, prior=0.1, max_positives=3, lambda1=1.0, lambda2=2.0, **arguments
  )[0]


def _graded_retrieval_loss(embeddings, labels, *, where, axis_name):
  """Takes the parity of a class as its superclass."""
  tracker = soprc_jax.score_ema(_CLASSES + 2, _POINTS, 0.1, axis_name=axis_name)
  levels = jnp.stack([labels, labels % 2], axis=1)
  return soprc_jax.graded_retrieval_loss(
    embeddings,
    levels,
    tracker=tracker,
    opt_state=tracker.init(None),
    list_ids=levels + jnp.array([[0, _CLASSES]], jnp.int32),
    gains=(1.0, 0.4),
    num_positives=3 + levels,
    prior=jnp.array([0.1, 0.3]),
    max_positives=5,
    where=where,
    axis_name=axis_name,
  )[0]


def _binary_loss(shared, parts, axis_name):
  """Computes the loss of problems of one device each; those of all devices share one row of v."""
  tracker = soprc_jax.score_ema(1, _POINTS, 0.1, axis_name=axis_name)

  def loss_fn(shared, scores, others, axis_name):
    labels, ids = others
    arguments = {
      "tracker": tracker,
      "opt_state": tracker.init(None),
      "list_ids": ids,
      "axis_name": axis_name,
    }
    return soprc_jax.binary_loss(
      shared["scale"] * scores[0], labels, prior=0.1, lambda2=1.0, **arguments
    )[0]

  return _of_loss(loss_fn)(shared, parts, axis_name)


def _binary_scores():
  rng = np.random.default_rng(3)
  scores = np.float32(rng.normal(size=(_LISTS, 20)))
  others = rng.random(scores.shape) < 0.3, np.zeros(_LISTS, np.int32)
  return {"scale": np.float32(1.1)}, ((scores,), others)


def _score_ema(shared, parts, axis_name):
  scores, ids, where = parts
  tracker, ahead = soprc_jax.score_ema(_CLASSES, _POINTS, 0.1, axis_name=axis_name), []
  state = shared["state"]
  for step in range(2):
    arguments = {"positive_scores": scores + step, "list_ids": ids, "positive_where": where}
    ahead.append(tracker.lookahead(state, *arguments.values()))
    _, state = tracker.update(None, state, **arguments)
  return {"state": state}, {"lookahead": jnp.stack(ahead, axis=1)}


def _lists_of_scores(num_positives):
  rng = np.random.default_rng(2)
  scores = np.float32(rng.normal(size=(_LISTS, num_positives)))
  ids, where = rng.integers(0, _CLASSES, _LISTS).astype(np.int32), rng.random(scores.shape) < 0.7
  return {"state": soprc_jax.score_ema(_CLASSES, _POINTS, 0.1).init(None)}, (scores, ids, where)


def _memory(make, loss_fn):
  """Makes two updates of a memory, and computes the loss before each of them."""

  def compute(shared, parts, axis_name):
    (features,), (labels, where) = parts
    transform, found = make(axis_name), []
    state = transform.init(None)
    for step in range(2):
      step_labels = (labels + step) % _CLASSES

      def value(kernel, state=state, labels=step_labels, step=step):
        embeddings = _embed(jnp.roll(kernel, step, axis=0), features)
        return loss_fn(transform, state, embeddings, labels, where, axis_name), embeddings

      (loss, embeddings), gradient = jax.value_and_grad(value, has_aux=True)(shared["kernel"])
      _, state = transform.update(
        None, state, embeddings=embeddings, labels=step_labels, where=where
      )
      found.append({"loss": loss, "gradient": gradient, "state": state})
    return {str(step): values for step, values in enumerate(found)}, {}

  return Case(compute, *_images())


def _xbm(transform, state, embeddings, labels, where, axis_name):
  ahead = transform.lookahead(state, embeddings, labels, where)
  return losses.xbm_contrastive_loss(embeddings, labels, ahead, where=where, axis_name=axis_name)


def _xbm_of_masks(transform, state, embeddings, labels, where, axis_name):
  ahead = transform.lookahead(state, embeddings, labels, where)
  return losses.xbm_contrastive_loss(
    embeddings,
    None,
    ahead,
    where=where,
    axis_name=axis_name,
    positives=labels[:, None] == ahead.labels[None, :],
  )


def _blackbox(transform, state, embeddings, labels, where, axis_name):
  stored = transform.current(state)
  return losses.blackbox_ap_loss(
    embeddings, labels, memory=stored, where=where, axis_name=axis_name
  )


CASES: dict[str, Case] = {
  "score_ema": Case(_score_ema, *_lists_of_scores(9)),
  "score_ema long": Case(_score_ema, *_lists_of_scores(3000)),
  "retrieval_lists": Case(_retrieval_lists, *_images()),
  "binary_loss": Case(_binary_loss, *_binary_scores()),
  "embedding_memory with xbm_contrastive_loss": _memory(
    lambda axis: memory.embedding_memory(40, _DIM, axis_name=axis), _xbm
  ),
  "embedding_memory with start_after": _memory(
    lambda axis: memory.embedding_memory(40, _DIM, axis_name=axis, start_after=1, overflow="tail"),
    _xbm,
  ),
  "embedding_memory with blackbox_ap_loss": _memory(
    lambda axis: memory.embedding_memory(40, _DIM, axis_name=axis), _blackbox
  ),
}
for _function in (losses.proxy_anchor_loss, losses.norm_softmax_loss, losses.arc_face_loss):
  CASES[_function.__name__] = _on_proxies(_function)
CASES["sigmoid_loss learned"] = Case(_sigmoid, *_images())
for _name, (_p, _n) in {"short": _SHORT, "long": _LONG}.items():
  CASES |= {
    f"soprc_loss {_name}": Case(_on_scores(soprc_jax.soprc_loss, prior=0.1), *_scores(_p, _n)),
    f"soprc_loss tpr_gradient {_name}": Case(
      _on_scores(soprc_jax.soprc_loss, prior=0.1, tau2=0.05, tpr_gradient=True), *_scores(_p, _n)
    ),
    f"soprc_loss link {_name}": Case(
      _on_scores(soprc_jax.soprc_loss, prior=1e-4, link="log"), *_scores(_p, _n)
    ),
    f"ap_loss {_name}": Case(
      _on_scores(soprc_jax.ap_loss, tau2=0.05), *_scores(_p, _n, with_v=False)
    ),
    f"semi_variance {_name}": Case(
      _on_scores(soprc_jax.semi_variance), *_scores(_p, _n, with_v=False)
    ),
  }
CASES |= {
  "soprc_loss sum": Case(
    _on_scores(soprc_jax.soprc_loss, prior=0.1, reduce_fn=jnp.sum), *_scores(*_SHORT)
  ),
  "positive_pull": Case(_positive_pull, *_scores(*_SHORT, with_v=False)),
  "semi_variance list": Case(
    _on_scores(soprc_jax.semi_variance, pool="list"), *_scores(*_SHORT, with_v=False)
  ),
}
_OF_IMAGES = {
  "soprc_loss of images": (_soprc_of_images, {}),
  "retrieval_loss": (_retrieval_loss, {}),
  "graded_retrieval_loss": (_graded_retrieval_loss, {}),
  "contrastive_loss": (losses.contrastive_loss, {}),
  "contrastive_loss active": (losses.contrastive_loss, {"average_active": True}),
  "triplet_loss": (losses.triplet_loss, {}),
  "triplet_loss max_positives": (losses.triplet_loss, {"max_positives": 4}),
  "multi_similarity_loss": (losses.multi_similarity_loss, {}),
  "smooth_ap_loss": (losses.smooth_ap_loss, {"tau": 0.1}),
  "fast_ap_loss": (losses.fast_ap_loss, {}),
  "listwise_ap_loss": (losses.listwise_ap_loss, {}),
  "auroc_loss": (losses.auroc_loss, {}),
  "auroc_loss logistic": (losses.auroc_loss, {"surrogate": "logistic"}),
  "sup_con_loss": (losses.sup_con_loss, {}),
  "quad_linear_ap_loss": (losses.quad_linear_ap_loss, {}),
  "sup_ap_loss": (losses.sup_ap_loss, {"tau": 0.1}),
  "recall_at_k_loss": (losses.recall_at_k_loss, {"tau2": 0.1}),
  "sigmoid_loss": (losses.sigmoid_loss, {}),
  "recall_at_k_loss mixup": (
    losses.recall_at_k_loss,
    {"mixup": True, "key": np.array([1, 2], np.uint32), "tau2": 0.1},
  ),
  "blackbox_ap_loss": (losses.blackbox_ap_loss, {}),
  "blackbox_ap_loss max_positives": (losses.blackbox_ap_loss, {"max_positives": _IMAGES - 1}),
  "blackbox_ap_loss margin": (
    losses.blackbox_ap_loss,
    {"margin": 0.1, "key": np.array([1, 2], np.uint32)},
  ),
}
for _name, (_function, _options) in _OF_IMAGES.items():
  CASES[_name] = Case(_on_images(_function, **_options), *_images())
# Cases with a loop over blocks, or with sums by sorting.
for _name in (
  "soprc_loss of images",
  "triplet_loss",
  "smooth_ap_loss",
  "sup_ap_loss",
  "quad_linear_ap_loss",
  "recall_at_k_loss",
  "auroc_loss",
  "blackbox_ap_loss",
):
  CASES[f"{_name} long"] = CASES[_name]._replace(lowered=True)
for _name in ("contrastive_loss", "smooth_ap_loss", "sup_con_loss", "blackbox_ap_loss"):
  CASES[f"{_name} masks"] = Case(
    _on_images(_OF_IMAGES[_name][0], ignore_above=0.9), *_of_no_labels()
  )
CASES["retrieval_lists masks"] = Case(_retrieval_lists, *_of_no_labels())
# Name of a case of labels -> the same with masks that the labels make.
OF_MASKS = {
  "retrieval_lists": Case(_retrieval_lists, *_of_labels()),
  "embedding_memory with xbm_contrastive_loss": _memory(
    lambda axis: memory.embedding_memory(40, _DIM, axis_name=axis), _xbm_of_masks
  ),
} | {
  _name: CASES[_name]._replace(parts=_of_labels()[1])
  for _name, (_function, _options) in _OF_IMAGES.items()
  if not {
    "soprc_loss of images",
    "retrieval_loss",
    "graded_retrieval_loss",
    "recall_at_k_loss mixup",
  }
  & {_name}
}


@contextlib.contextmanager
def _few_count_as_many():
  with (
    mock.patch.multiple(piecewise, _MIN_THRESHOLDS=1, _MIN_VALUES=1, _MIN_PAIRS=1),
    mock.patch.multiple(
      blockwise, BLOCK_ENTRIES=2 * _IMAGES, _CACHED_ENTRIES=_IMAGES, _FEW_COLUMNS=1
    ),
    mock.patch.object(lists, "_SMALL", 1),
  ):
    yield


def on_one_device(name):
  """Returns values by name, of the joined batch without any mapped axis."""
  case = CASES[name]
  return _flat(
    name, jax.jit(lambda shared, parts: case.compute(shared, parts, None))(case.shared, case.parts)
  )


def on_devices(name, count, cases=CASES):
  """Returns the same values from ``count`` devices."""
  case, spec = cases[name], jax.sharding.PartitionSpec
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), (AXIS,))
  assert mesh.size == count

  def one_device(shared, parts):
    return case.compute(shared, parts, AXIS)

  mapped = jax.shard_map(
    one_device, mesh=mesh, in_specs=(spec(), spec(AXIS)), out_specs=(spec(), spec(AXIS))
  )
  with _few_count_as_many() if case.lowered else contextlib.nullcontext():
    return _flat(name, jax.jit(mapped)(case.shared, case.parts))


def _flat(name, tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {f"{name}/{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}


def main(path, count):
  values = {}
  for name in CASES:
    values |= on_devices(name, int(count))
  for name in OF_MASKS:
    found = on_devices(name, int(count), OF_MASKS)
    values |= {f"of masks: {key}": value for key, value in found.items()}
  np.savez(path, **values)


if __name__ == "__main__":
  main(*sys.argv[1:])
