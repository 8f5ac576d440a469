"""What a run should exceed on the test images: thumbnails or features, and the untrained model."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from soprc_jax.data import pipeline, sources, transforms
from soprc_jax.training import evaluation, parallel

# Name in results -> displayed name. "initial" is right for random weights and for those of
# model.init_from; "untrained" would be wrong for the latter.
TITLES = {
  "thumbnails_8": "8 x 8 thumbnails",
  "thumbnails_16": "16 x 16 thumbnails",
  "features": "features as they are",
  "initial": "model before training",
}
_SIDE = 16


def measure(
  config: ConfigDict,
  splits: Mapping[str, sources.Source],
  embed: evaluation.EmbedFn,
  variables: Any,
) -> dict[str, dict[str, dict[str, Any]]]:
  """Computes the metrics of the baselines on every test split, by `evaluation.evaluate`.

  * ``"thumbnails_8"``, ``"thumbnails_16"``: see `thumbnails`;
  * ``"features"``: stored embeddings, divided by their norm, instead of thumbnails;
  * ``"initial"``: the model at step 0. As in every evaluation, batch norm uses its running
    statistics. With random weights these are mean 0 and variance 1.

  All processes must call this together.

  Args:
    config: resolved.
    splits: splits of the data.
    embed: function of `evaluation.make_embed`.
    variables: replicated variables of the model at step 0.

  Returns:
    Test split -> name of the baseline -> metrics.

  Raises:
    BrokenImageError: a test image cannot be decoded, and ``data.on_broken`` is ``"error"``.
    DivergedError: an embedding is not finite.
  """
  found = {}
  for split in (name for name in splits if name.startswith("test")):
    source = splits[split]
    embedded = (
      {"features": _features(source)}
      if sources.width(source)
      else {f"thumbnails_{side}": each for side, each in thumbnails(config, source)}
    )
    embedded["initial"] = embed(variables, source)
    found[split] = {name: evaluation.evaluate(each, config) for name, each in embedded.items()}
  return found


def thumbnails(config: ConfigDict, source: sources.Source) -> list[tuple[int, evaluation.Embedded]]:
  """Returns side and embeddings of the thumbnails of 8 and of 16 pixels.

  The embedding is the RGB values, minus their mean over the image, divided by their norm. The
  center crop is that of evaluation, with ``eval.resize`` scaled to the thumbnail and rounded to
  whole pixels. Images are decoded once, and thumbnails of 8 pixels are made of those of 16.
  Unreadable images are treated as in evaluation.

  Args:
    config: resolved.
    source: images.
  """
  settings, count = config.eval, parallel.num_processes()
  images, kept = [], []
  for batch in pipeline.eval_batches(
    source,
    batch_size=-(-settings.batch_size // count) * count,
    image_size=_SIDE,
    resize_to=round(_SIDE * settings.resize / settings.image_size),
    on_broken=config.data.on_broken,
    shard=(parallel.process_index(), count),
  ):
    images.append(parallel.gather_rows(batch["image"]))
    kept.append(parallel.gather_rows(batch["where"]))
  where = np.concatenate(kept)
  large = np.concatenate(images)[where]
  good = where[: len(source)]
  small = np.zeros((len(large), _SIDE // 2, _SIDE // 2, 3), np.uint8)
  for i, image in enumerate(large):
    small[i] = transforms.centre_crop(image, _SIDE // 2)
  which = source, np.flatnonzero(good)
  return [
    (pixels.shape[1], evaluation.Embedded.of_source(_normalized(pixels), *which))
    for pixels in (small, large)
  ]


def _features(source: sources.Source) -> evaluation.Embedded:
  positions = np.arange(len(source))
  vectors = sources.vectors(source, positions)
  # Their largest entry first, whose square could overflow.
  largest = np.abs(vectors).max(axis=1, keepdims=True)
  vectors = _of_norm_1(vectors / np.where(largest > 0, largest, np.float32(1)))
  return evaluation.Embedded.of_source(vectors, source, positions)


def _normalized(pixels: np.ndarray) -> np.ndarray:
  """Returns ``[N, D]`` float32 without mean, of norm 1, or 0 for an image of one color."""
  values = pixels.reshape(len(pixels), 3 * pixels.shape[1] ** 2).astype(np.float32)
  return _of_norm_1(values - values.mean(axis=1, keepdims=True))


def _of_norm_1(values: np.ndarray) -> np.ndarray:
  norms = np.linalg.norm(values, axis=1, keepdims=True)
  return np.asarray(values / np.where(norms > 0, norms, np.float32(1)))


def to_beat(baselines: Mapping[str, Any]) -> str:
  """Describes the result of `measure` on the split ``test`` in one line."""
  reached = [f"{TITLES[name]} {values['mAUPRC']:.4f}" for name, values in baselines["test"].items()]
  return f"Test mAUPRC to beat: {', '.join(reached)}."


def table(results: Mapping[str, Any], split: str) -> tuple[list[str], list[tuple[str, list[Any]]]]:
  """Returns the metrics of a run next to those of its baselines.

  Args:
    results: content of ``results.json``.
    split: name of a test split.

  Returns:
    The names of the metrics, and the displayed name and the values of each row. The first row is
    the trained model. Without baselines there are no rows.
  """
  own, baselines = results[split], results.get("baselines", {}).get(split, {})
  names = [name for name, value in own.items() if isinstance(value, float)]
  rows = {"trained model": own} | {TITLES.get(name, name): baselines[name] for name in baselines}
  if not baselines:
    return names, []
  return names, [(title, [row.get(name) for name in names]) for title, row in rows.items()]


def not_beaten(config: ConfigDict, results: Mapping[str, Any]) -> str:
  """Returns a warning if the test mAUPRC of a run is not above that of every baseline, else "".

  The warning names the likely causes, with the values of the run.

  Args:
    config: config of the run, resolved.
    results: content of ``results.json``; without baselines there is no warning.
  """
  reached = {
    name: values["mAUPRC"] for name, values in results.get("baselines", {}).get("test", {}).items()
  }
  own = results["test"]["mAUPRC"]
  if not reached or own > max(reached.values()):
    return ""
  best = max(reached, key=reached.__getitem__)
  steps = f"train.steps={config.train.steps}"
  steps += f" after warmup.steps={config.warmup.steps}" if config.warmup.steps else ""
  causes = [
    f"too few steps ({steps})",
    f"too small a batch (train.batch_size={config.train.batch_size})",
  ]
  if config.data.augmentation != "none":
    causes.append(f"too strong an augmentation (data.augmentation={config.data.augmentation})")
  causes.append(
    f"too high or too low a learning rate (optim.learning_rate={config.optim.learning_rate:g})"
  )
  return (
    f"The trained model does not beat the baselines: its test mAUPRC of {own:.4f} is not above the "
    f"{reached[best]:.4f} of the {TITLES.get(best, best)}. Likely causes: {', '.join(causes)}."
  )
