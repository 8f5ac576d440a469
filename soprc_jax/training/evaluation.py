"""Evaluation of a model on a split: embed all images on the devices, rank them on the hosts."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

from flax import linen as nn
from ml_collections import ConfigDict
import numpy as np

from soprc_jax import metrics
from soprc_jax._internal import file_io
from soprc_jax._internal.strings import printable
from soprc_jax.data import datasets, list_files, pipeline, sources, superclasses
from soprc_jax.data.label_sets import LabelSets
from soprc_jax.metrics import per_query
from soprc_jax.training import (
  build,
  checkpoints,
  classes,
  finetuning,
  lora,
  parallel,
  progress,
  superclass_metrics,
)
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib

_log = logging.getLogger(__name__)


class Embedded(NamedTuple):
  """Embeddings of the images of a source.

  Attributes:
    embeddings: ``[N, D]`` float32, of the images that could be decoded.
    labels: ``[N]`` labels of these images.
    positions: ``[N]`` positions of these images in the source.
    num_broken: number of images that could not be decoded and were left out
      (``data.on_broken=skip``).
    superclasses: ``[N]`` integers of these images; None if they are unknown.
    label_sets: labels of each pattern, where an image has several; None: an image has one class.
  """

  embeddings: np.ndarray
  labels: np.ndarray
  positions: np.ndarray
  num_broken: int
  superclasses: np.ndarray | None = None
  label_sets: LabelSets | None = None

  @classmethod
  def of_source(
    cls, embeddings: np.ndarray, source: sources.Source, positions: np.ndarray
  ) -> "Embedded":
    """Returns the embeddings of the images at some positions of a source; the others are broken."""
    labels = source.labels[positions]
    return cls(
      embeddings,
      labels,
      positions,
      len(source) - len(positions),
      superclasses.rows(source, labels),
      sources.label_sets(source),
    )

  @property
  def graded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arguments of `superclass_metrics.measure`."""
    return self.embeddings, self.labels, self.superclasses

  def relevance(self, queries: np.ndarray, candidates: np.ndarray) -> dict[str, Any]:
    """Returns the arguments of a metric that say which candidates are relevant to each query.

    Args:
      queries: ``[n]`` places of the queries among the embeddings.
      candidates: ``[m]`` places of the candidates.
    """
    if self.label_sets is None:
      return {"labels": self.labels[queries]}
    sets, ours, theirs = self.label_sets, self.labels[queries], self.labels[candidates]
    return {"relevance": lambda rows: sets.relevant(ours[rows], theirs)}


EmbedFn = Callable[[Any, sources.Source], Embedded]


def make_embed(model: nn.Module, config: ConfigDict) -> EmbedFn:
  """Returns a function ``(replicated variables, source) -> Embedded``, compiled for one shape.

  The function raises a `step_lib.DivergedError` if an embedding is not finite, since such
  embeddings cannot be ranked.

  Args:
    model: model in evaluation mode.
    config: resolved; ``config.eval`` has the transform, ``config.data.on_broken`` the policy.
  """
  count, settings = parallel.num_devices(), config.eval
  batch_size = -(-settings.batch_size // count) * count  # evaluation pads, so any size works
  step = functools.partial(step_lib.embed_step, model=model, axis_name=parallel.axis_name())
  compiled = parallel.compile_step(step, donate_state=False)

  def embed(variables: Any, source: sources.Source) -> Embedded:
    parts, kept = [], []
    batches = pipeline.eval_batches(
      source,
      batch_size=batch_size,
      image_size=settings.image_size,
      resize_to=settings.resize,
      interpolation=settings.interpolation,
      on_broken=config.data.on_broken,
      shard=(parallel.process_index(), parallel.num_processes()),
    )
    with progress.bar(config, total=len(source), desc="embedding", unit="image") as bar:
      for batch in batches:
        embeddings, where = parallel.unreplicate(compiled(variables, parallel.shard(batch)))
        parts.append(embeddings[where])  # padding never reaches a metric
        kept.append(where)
        bar.update(int(where.sum()))
    good, embeddings = np.concatenate(kept)[: len(source)], np.concatenate(parts)
    bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if bad.size:
      name = printable(source[int(np.flatnonzero(good)[bad[0]])].id)
      raise step_lib.DivergedError(
        f"training diverged: the embeddings of {bad.size} of {len(embeddings)} images are not "
        f"finite, e.g. that of {name}; try a lower optim.learning_rate"
      )
    return Embedded.of_source(embeddings, source, np.flatnonzero(good))

  return embed


def variables_of(state: step_lib.TrainState) -> dict[str, Any]:
  """Returns the variables of the model of a replicated state, replicated, with merged adapters.

  The adapters are merged as in a checkpoint, so that a loaded model has the same embeddings.
  """
  params = state.params
  if finetuning.ADAPTERS in params:
    params = parallel.replicate(lora.merged(parallel.unreplicate(params)))
  return {"params": params, "batch_stats": state.batch_stats}


def evaluate(embedded: Embedded, config: ConfigDict) -> dict[str, Any]:
  """Computes the retrieval metrics of a split against itself, by ``config.eval``.

  Returns:
    The metrics of `soprc_jax.metrics.retrieval_metrics`, those of `superclass_metrics.measure`, and
    the number of images that were left out, ``"num_broken"``.
  """
  found = _rank(embedded, np.arange(len(embedded.labels)), None, config)[0]
  found |= superclass_metrics.measure(*embedded.graded, config)
  return found | {"num_broken": embedded.num_broken}


def test(
  embedded: Embedded, source: sources.Source, config: ConfigDict
) -> tuple[dict[str, Any], per_query.PerQuery]:
  """Computes what `evaluate` does, with 95 % intervals for new classes, ``"intervals"``.

  Args:
    embedded: embeddings of the images of ``source``.
    source: the images.
    config: resolved.

  Returns:
    The metrics, and the result of each query.
  """
  found, ap, above = _rank(embedded, np.arange(len(embedded.labels)), None, config)
  names, labels = sources.ids(source), sources.shown_classes(source)
  queries = per_query.make(
    [names[i] for i in embedded.positions], [labels[i] for i in embedded.positions], ap, above
  )
  intervals = per_query.intervals(queries, metric_names(found))
  found |= superclass_metrics.measure(*embedded.graded, config)
  return found | {"num_broken": embedded.num_broken, "intervals": intervals}, queries


def metric_names(values: Mapping[str, Any]) -> list[str]:
  """Returns the names of the metrics of classes among the values of an evaluation."""
  graded = superclass_metrics.NAMES
  return [name for name, value in values.items() if isinstance(value, float) and name not in graded]


def one_per_class(embedded: Embedded, config: ConfigDict, *, seed: int = 0) -> dict[str, Any]:
  """Computes the retrieval metrics for galleries of one random image of each class.

  The other images are the queries. This is the protocol of VehicleID's authors.

  Args:
    embedded: embeddings and labels.
    config: resolved; ``config.eval.one_per_class`` >= 1 is the number of random galleries.
    seed: seed of the galleries.

  Returns:
    The mean of each metric over the galleries, its standard deviation under ``"NAME_std"``, and
    the number of galleries, ``"num_repeats"``.
  """
  rng, found = np.random.default_rng(seed), []
  for _ in range(config.eval.one_per_class):
    order = rng.permutation(len(embedded.labels))
    chosen = order[np.unique(embedded.labels[order], return_index=True)[1]]
    found.append(_rank(embedded, np.setdiff1d(order, chosen), chosen, config)[0])
  names = metric_names(found[0])
  means = {name: float(np.mean([values[name] for values in found])) for name in names}
  deviations = {f"{name}_std": float(np.std([values[name] for values in found])) for name in names}
  fixed = {name: found[0][name] for name in ("num_queries", "num_skipped", "ks_beyond_gallery")}
  return means | deviations | fixed | {"num_repeats": len(found), "num_broken": embedded.num_broken}


def _rank(
  embedded: Embedded, queries: np.ndarray, gallery: np.ndarray | None, config: ConfigDict
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
  """Computes the metrics of the images at ``queries`` against those at ``gallery``.

  Without a gallery the queries are the gallery. Each process ranks its share of the queries.

  Returns:
    The metrics, the average precision of each query, and the number of negatives above its first
    positive; see `soprc_jax.metrics.retrieval_metrics`.
  """
  size = -(-len(queries) // parallel.num_processes())
  first = parallel.process_index() * size
  mine = queries[first : first + size]
  candidates = queries if gallery is None else gallery
  # The gallery of a share of the queries is all of them; ids exclude each query itself.
  against: dict[str, Any] = {}
  if gallery is not None or parallel.num_processes() > 1:
    against = {"gallery": embedded.embeddings[candidates]}
    if embedded.label_sets is None:
      against["gallery_labels"] = embedded.labels[candidates]
    against |= {"query_ids": mine, "gallery_ids": candidates}
  with progress.bar(config, total=len(mine), desc="ranking", unit="query") as bar:
    found = metrics.retrieval_metrics(
      embedded.embeddings[mine],
      **embedded.relevance(mine, candidates),
      ks=config.eval.ks,
      **against,
      block_size=config.eval.block_size,
      per_query=True,
      on_block=bar.update,
    )
  ap, above = np.full(size, np.nan), np.full(size, -1)
  ap[: len(mine)], above[: len(mine)] = found["ap_per_query"], found["negatives_above"]
  ap, above = parallel.gather_rows(ap)[: len(queries)], parallel.gather_rows(above)[: len(queries)]
  found = metrics.summarise_ranks(
    ap, above, ks=config.eval.ks, num_candidates=len(candidates) - (gallery is None)
  )
  return found, ap, above


class Trained(NamedTuple):
  """The model of a run, ready to embed images.

  Attributes:
    embed: embeds the images of a source.
    variables: variables of the model, on all devices.
    splits: data of the run.
    step: step of the checkpoint.
    meta: metadata of the checkpoint's data, see `classes.describe`.
  """

  embed: EmbedFn
  variables: Any
  splits: dict[str, sources.Source]
  step: int
  meta: dict[str, Any]


def load(config: ConfigDict, workdir: Path, *, newest: bool = False) -> Trained:
  """Loads the model of a run: that of the best validation mAUPRC, or the newest.

  Args:
    config: resolved.
    workdir: folder of the run.
    newest: load the newest checkpoint instead of the best.

  Raises:
    ValueError: ``workdir`` holds no run, or one of another config.
    FileNotFoundError: the run has no such checkpoint yet.
  """
  lines = workdir_lib.config_differences(workdir, config)
  config = workdir_lib.filled(workdir, config)
  if lines:
    raise ValueError(
      "this is not the config of the run in --workdir (without --config that of the run is used):\n"
      + "\n".join(f"  {line}" for line in lines)
    )
  splits = datasets.make_splits(config.data)  # first, so that missing data fails early
  network, step, meta = restore(config, workdir, newest=newest)
  embed = make_embed(build.make_model(config, freeze_bn=True), config)
  return Trained(embed, parallel.replicate(network), splits, step, meta)


def restore(
  config: ConfigDict, workdir: Path, *, newest: bool = False
) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """Restores the model of a checkpoint, without reading any images.

  Args:
    config: config of the run, resolved.
    workdir: folder of the run.
    newest: restore the newest checkpoint instead of that of the best validation mAUPRC.

  Returns:
    ``{"params", "batch_stats"}`` as numpy arrays, the step of the checkpoint, and the metadata of
    its data.

  Raises:
    ValueError: the checkpoint is corrupt, or of another model.
    FileNotFoundError: the run has no such checkpoint yet.
  """
  # Without a validation split there is no best model: the last one was tested.
  folder = workdir / (checkpoints.NEWEST if newest or config.data.trainval else checkpoints.BEST)
  if not folder.is_dir():
    raise FileNotFoundError(
      f"{folder} is missing: the run has not reached its first evaluation yet"
    )
  with contextlib.closing(checkpoints.Store(folder)) as store:
    step, meta = store.latest_step(), store.meta()
    return store.restore_network(build.abstract_network(config)), int(step or 0), meta


def evaluate_workdir(
  config: ConfigDict,
  workdir: Path,
  *,
  split: str,
  newest: bool,
  allow_seen_classes: bool = False,
  group_by: str = "",
) -> tuple[dict[str, Any], per_query.PerQuery]:
  """Computes the metrics of a split for a checkpoint of a run.

  Args:
    config: config of the run, resolved. ``data.root`` may be another folder, also of other images.
    workdir: folder of the run.
    split: see `pick_split`.
    newest: evaluate the newest checkpoint instead of that of the best validation mAUPRC.
    allow_seen_classes: log a warning instead of raising if tested classes were trained on, and
      return the result of `classes.seen` under ``"seen_classes"``.
    group_by: a column of the CSV file ``data.root``; the metrics of each of its values are under
      ``"groups"``, see `per_query.by_group`.

  Returns:
    The metrics of `test`, with the step of the checkpoint under ``"checkpoint_step"``, and the
    result of each query.

  Raises:
    ValueError: see `load`; the data have no such split or column; the data of the run have changed;
      tested classes were trained on.
    FileNotFoundError: see `load`.
  """
  groups = groups_of(config, group_by) if group_by else {}  # first, so that an error comes early
  trained = load(config, workdir, newest=newest)
  images = pick_split(trained.splits, split)
  lines = changes(trained, config, workdir)
  if lines and _same_place(config, workdir):
    raise ValueError(classes.changed_message(workdir, lines))
  if lines:
    _log.warning(
      "Evaluating on other data than those that the run in %s was trained on:\n%s",
      workdir,
      "\n".join(lines),
    )
  tested = {name: source for name, source in trained.splits.items() if split in (name, "all")}
  if not lines:
    tested.pop("train", None)  # the run was trained on it, as the user of this split knows
  found = classes.check_unseen(
    classes.trained_on(trained.meta, where=str(workdir)),
    tested,
    data_source=config.data.source,
    network=f"step {trained.step} of {workdir}",
    allow_seen_classes=allow_seen_classes,
  )
  values, queries = test(trained.embed(trained.variables, images), images, config)
  names = metric_names(values)
  values["checkpoint_step"] = trained.step
  if group_by:
    of_queries = [groups[name] for name in queries.id]
    values["groups"] = {
      "column": group_by,
      "values": per_query.by_group(
        queries, of_queries, names, num_relevant=_num_relevant(images, queries)
      ),
    }
  return values if found is None else values | {"seen_classes": found}, queries


def _num_relevant(images: sources.Source, queries: per_query.PerQuery) -> np.ndarray | None:
  """Returns the number of relevant images of each query, itself included.

  None where an image has one class: then it is the size of the class.
  """
  sets = sources.label_sets(images)
  if sets is None:
    return None
  patterns = dict(zip(sources.ids(images), images.labels.tolist(), strict=True))
  of_queries = np.array([patterns[name] for name in queries.id.tolist()])
  return sets.count(of_queries, of_queries)


def groups_of(config: ConfigDict, column: str) -> dict[str, str]:
  """Returns image -> value of a column of the CSV file of a run."""
  if config.data.source != "csv":
    raise ValueError(
      f"--group_by={column} needs images of a CSV file with that column, and data.source is "
      f"{config.data.source}: train with --config=folder:csv"
    )
  return list_files.csv_column(config.data.root, column)


def changes(trained: Trained, config: ConfigDict, workdir: Path) -> list[str]:
  """Returns a line for each split that differs from the data that the model was trained on.

  See `classes.changes`.
  """
  now = classes.describe(trained.splits, data_source=config.data.source)
  return classes.changes(trained.meta, now, trained.splits, workdir)


def _same_place(config: ConfigDict, workdir: Path) -> bool:
  """Returns whether ``data.root`` is that of the run, compared as resolved paths.

  Under another root, other data are allowed.
  """
  roots = (config.data.root, workdir_lib.read_config(workdir)["data"]["root"])
  there, here = (file_io.given(root, name="data.root").resolve() for root in roots)
  return there == here or config.data.source == "glyphs"  # its root is a cache


def pick_split(splits: dict[str, sources.Source], name: str) -> sources.Source:
  """Returns a split by its name; ``all`` joins train, val and test.

  Raises:
    ValueError: there is no split of that name.
  """
  if name == "all":
    return sources.Joined([splits[part] for part in ("train", "val", "test") if part in splits])
  if name not in splits:
    raise ValueError(f"there is no split {name!r} here: choose one of {', '.join(splits)}, all")
  return splits[name]
