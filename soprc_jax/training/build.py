"""Builds the parts of a run from a resolved config: data, model, objectives, optimizer."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import optax

from soprc_jax._internal import file_io
from soprc_jax.data import (
  confusable,
  datasets,
  label_sampler,
  pipeline,
  sampler,
  sources,
  superclasses,
  transforms,
)
from soprc_jax.models import HEADS, RESNETS, ConvNet, EmbeddingNet, Head, ResNet, ViT, adapter
from soprc_jax.training import (
  checkpoints,
  classes,
  finetuning,
  lora,
  objectives,
  optimizers,
  parallel,
  vit_keys,
)
from soprc_jax.training import patterns as patterns_lib
from soprc_jax.training import step as step_lib
from soprc_jax.training import workdir as workdir_lib

StepFn = Callable[[Any, dict[str, np.ndarray]], tuple[Any, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Data:
  """Splits of a data set, with the label rows and the batch sampler for training.

  Attributes:
    splits: of `datasets.make_splits`.
    rows: training label -> row of its class in the auxiliary vectors v.
    sampler: chooses the images of each training batch.
    patterns: labels of each row, where an image has several; None: an image has one class.
  """

  splits: dict[str, sources.Source]
  rows: dict[int, int]
  sampler: sampler.ClassSampler
  patterns: patterns_lib.Patterns | None = None

  def class_counts(self) -> np.ndarray:
    """Returns the number of training images of each row, ``[C]``."""
    return np.unique(self.splits["train"].labels, return_counts=True)[1]

  def superclasses(self) -> np.ndarray | None:
    """Returns the superclass of each row, ``[C]`` integers; None if they are unknown."""
    return superclasses.rows(self.splits["train"], list(self.rows))


def make_data(config: ConfigDict, splits: datasets.Splits | None = None) -> Data:
  """Returns the splits, label rows and sampler of a run.

  Args:
    config: resolved; no key is open.
    splits: splits of ``config.data``; None reads them.
  """
  splits = datasets.make_splits(config.data) if splits is None else splits
  if sources.width(splits["train"]) not in (0, config.model.features):
    raise ValueError(
      f"model.features={config.model.features}, but the vectors in data.root={config.data.root} "
      f"have {sources.width(splits['train'])} entries"
    )
  labels = splits["train"].labels
  settings = {
    "batch_size": config.train.batch_size,
    "per_class": config.train.per_class,
    "seed": config.seed,
    "small_classes": config.data.small_classes,
  }
  rows, sets = sources.label_rows(labels), sources.label_sets(splits["train"])
  if sets is not None:
    several = label_sampler.LabelSampler(labels, label_sets=sets, **settings)
    return Data(splits, rows, several, patterns_lib.make(sets, labels))
  plan = (
    confusable.ConfusableSampler(labels, **settings, **config.data.confusable)
    if config.data.sampler == "confusable"
    else sampler.ClassSampler(labels, **settings)
  )
  return Data(splits, rows, plan)


def make_batches(config: ConfigDict, data: Data) -> pipeline.TrainBatches:
  """Returns the training batches of this process, with random access."""
  return pipeline.TrainBatches(
    data.splits["train"],
    data.sampler,
    rows=data.rows,
    augmentation=config.data.augmentation,
    image_size=config.data.image_size,
    resize_to=config.data.resize,
    augmentation_settings=transforms.Settings(
      **{name: config.data[name] for name in transforms.Settings._fields}
    ),
    on_broken=config.data.on_broken,
    seed=config.seed,
    num_steps=config.warmup.steps + config.train.steps,
    shard=(parallel.process_index(), parallel.num_processes()),
  )


def make_model(config: ConfigDict, *, freeze_bn: bool, axis_name: str | None = None) -> nn.Module:
  """Returns the model of ``config.model``.

  Args:
    config: resolved.
    freeze_bn: whether batch norm keeps its statistics.
    axis_name: mapped axis over which batch norm in training mode takes its statistics.
  """
  dtype = jnp.dtype(config.model.dtype)
  if config.model.name in HEADS:
    return Head(
      config.model.name,
      hidden=config.model.hidden,
      embedding_dim=config.model.embedding_dim,
      dtype=dtype,
    )
  head = {"embedding_dim": config.model.embedding_dim, "dtype": dtype}
  if config.model.name == "vit":
    arch = vit_keys.architecture(config)
    vit = ViT(arch, dtype=dtype, remat=config.model.remat)
    return EmbeddingNet(vit, mean=arch.mean, std=arch.std, **head)
  if ":" in config.model.name:
    made = adapter.make(config.model)
    return EmbeddingNet(adapter.Adapter(made), mean=made.mean, std=made.std, **head)
  shared = {"width": config.model.width, "pool_grid": config.model.pool_grid, "dtype": dtype}
  backbone: nn.Module
  if config.model.name == "conv3":
    backbone = ConvNet(**shared)
  else:
    stages, bottleneck = RESNETS[config.model.name]
    backbone = ResNet(
      stages,
      bottleneck,
      stem=config.model.stem,
      stem_stride=config.model.stem_stride,
      freeze_bn=freeze_bn,
      axis_name=axis_name,
      **shared,
    )
  return EmbeddingNet(backbone, **head)


def embedding_width(config: ConfigDict) -> int:
  """Returns the width of the embeddings of a model, also where ``model.embedding_dim`` is 0."""
  if config.model.embedding_dim:
    return int(config.model.embedding_dim)
  model = make_model(config, freeze_bn=True)
  made, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), example_input(config))
  return int(made.shape[-1])


@dataclasses.dataclass(frozen=True)
class Parts:
  """Model, optimizer and compiled steps of a run.

  Attributes:
    model: model in evaluation mode.
    tx: optimizer chain; the carried state of the loss comes first.
    trained: pattern of the trained parameters, see `finetuning.select`. ``tx`` takes only these.
    schedule: learning rate as a function of the step.
    warmup_step: compiled step of the warm-up phase.
    main_step: compiled step of the main phase.
    init_loss_params: returns the initial parameters of the loss from a random key.
  """

  model: nn.Module
  tx: optax.GradientTransformation
  trained: str
  schedule: optax.Schedule
  warmup_step: StepFn
  main_step: StepFn
  init_loss_params: Callable[[jax.Array], Any]


def make_parts(
  config: ConfigDict,
  class_counts: np.ndarray,
  *,
  superclasses: np.ndarray | None = None,
  of_data: patterns_lib.Patterns | None = None,
  optimizer: optax.GradientTransformation | None = None,
  on_nonfinite: str | None = None,
) -> Parts:
  """Returns the model, the optimizer and the step functions of a run.

  A step is compiled when it is first called.

  Args:
    config: resolved.
    class_counts: ``[C]`` training images of each row of v, see `Data.class_counts`.
    superclasses: ``[C]``, see `Data.superclasses`.
    of_data: labels of each row, see `Data.patterns`.
    optimizer: replaces the one of ``config.optim``; None keeps that one.
    on_nonfinite: replaces ``config.train.on_nonfinite``, see `step.is_kept`; None keeps that one.

  Raises:
    ValueError: the devices do not divide the batch; a custom loss does not work; the loss of the
      warm-up is another one than ``loss.name`` and has parameters; ``optim.train_only``,
      ``optim.layer_decay`` or ``model.lora`` does not fit the model.
  """
  parallel.check_batch(config.train.batch_size, config.train.per_class, config.train.microbatch)
  for name in {config.loss.name} | ({config.warmup.loss} if config.warmup.steps else set()):
    if name not in objectives.LOSSES:
      objectives.check(name, config.loss, of_data)
  setting = objectives.Setting(
    class_counts=class_counts,
    num_steps=config.train.steps,
    max_positives=_max_positives(config, of_data),
    axis_name=parallel.axis_name(),
    embedding_dim=embedding_width(config),
    seed=config.seed,
    superclasses=superclasses,
    patterns=of_data,
  )
  main = objectives.make_objective(config.loss.name, config.loss, setting)
  warmup_setting = setting._replace(num_steps=config.warmup.steps)
  warmup = objectives.make_objective(config.warmup.loss, config.loss, warmup_setting)
  if config.warmup.steps and config.warmup.loss != config.loss.name:
    _check_without_params(config.warmup.loss, warmup)
  trained, factors = _tuning(config)
  if optimizer is None:
    optimizer = optimizers.make_optimizer(config, factors)
  tx = optax.chain(main.tracker, optimizer)
  # A single microbatch is the batch itself.
  microbatch = config.train.microbatch if config.train.microbatch < config.train.batch_size else 0
  if of_data is None:
    has_small = bool(np.any(class_counts < config.train.per_class))
  else:  # an image that the batch has already may have no substitute
    has_small = of_data.overlaps or of_data.smallest < config.train.per_class
  shared = {
    "tx": tx,
    "trained": trained,
    "carrier": main,
    "masked": (has_small and config.data.small_classes == "mask")
    or config.data.on_broken == "skip",
    "axis_name": parallel.axis_name(),
    "microbatch": microbatch // parallel.num_devices(),
    "on_nonfinite": config.train.on_nonfinite if on_nonfinite is None else on_nonfinite,
  }

  def compiled(objective: objectives.Objective, freeze_bn: bool, first_step: int) -> StepFn:
    model = make_model(config, freeze_bn=freeze_bn, axis_name=parallel.axis_name())
    step = functools.partial(
      step_lib.train_step, model=model, objective=objective, first_step=first_step, **shared
    )
    return parallel.compile_step(step)

  return Parts(
    model=make_model(config, freeze_bn=True),
    tx=tx,
    trained=trained,
    schedule=optimizers.make_schedule(config),
    warmup_step=compiled(warmup, config.warmup.freeze_bn, 0),
    main_step=compiled(main, config.model.freeze_bn, config.warmup.steps),
    init_loss_params=main.init_params,
  )


def _max_positives(config: ConfigDict, of_data: patterns_lib.Patterns | None) -> int:
  """Returns the largest number of positives of a query in a batch."""
  if of_data is not None and of_data.overlaps:
    return int(config.train.batch_size) - 1  # all images may share a label
  return int(config.train.per_class) - 1


def _check_without_params(name: str, objective: objectives.Objective) -> None:
  if jax.tree.leaves(jax.eval_shape(objective.init_params, jax.random.key(0))):
    raise ValueError(
      f"warmup.loss={name} has parameters of its own, as proxies, and a run has only those of "
      f"loss.name: choose a loss without parameters for the warm-up, or loss.name={name} too"
    )


def _tuning(config: ConfigDict) -> tuple[str, dict[str, float]]:
  """Returns the pattern of the trained parameters, and the factors of their learning rates.

  The factors are empty if all are 1.

  Raises:
    ValueError: see `make_parts`.
  """
  pattern, decay = config.optim.train_only, config.optim.layer_decay
  adapters = _adapters(config)
  if not pattern and adapters is None and decay == 1:
    return "", {}
  params = abstract_network(config)["params"]
  if adapters is not None:
    pattern = lora.TRAINED
    params = jax.eval_shape(functools.partial(lora.add, **adapters), params, key=jax.random.key(0))
  finetuning.check(params, pattern)
  return pattern, {} if decay == 1 else finetuning.rate_factors(finetuning.flat(params), decay)


def _adapters(config: ConfigDict) -> dict[str, Any] | None:
  return config.model.lora.to_dict() if config.model.lora.rank else None


def example_input(config: ConfigDict, count: Any = 1, *, side: int = 0) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of the input of a model: images ``[n, S, S, 3]`` or vectors ``[n, F]``.

  Args:
    config: resolved.
    count: number n of images, also a symbolic one.
    side: S; 0: ``data.image_size``.
  """
  if config.model.name in HEADS:
    return jax.ShapeDtypeStruct((count, config.model.features), jnp.float32)
  side = side or config.data.image_size
  return jax.ShapeDtypeStruct((count, side, side, 3), jnp.uint8)


def abstract_network(config: ConfigDict) -> dict[str, Any]:
  """Returns shapes and dtypes of ``{"params", "batch_stats"}``, independent of the data."""
  model = make_model(config, freeze_bn=True)
  variables = jax.eval_shape(model.init, jax.random.key(0), example_input(config))
  return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}


def abstract_state(config: ConfigDict, parts: Parts) -> step_lib.TrainState:
  """Returns shapes and dtypes of the state, the target that a checkpoint is restored to.

  Nothing is drawn or compiled.
  """
  return jax.eval_shape(functools.partial(_random_state, config, parts))


def starting_state(config: ConfigDict, parts: Parts) -> step_lib.TrainState:
  """Returns the state at step 0.

  The weights are random by ``config.seed``, or those of ``config.model.init_from``.
  """
  state = _random_state(config, parts)
  if not config.model.init_from:
    return state
  network = checkpoints.load_network(
    config.model.init_from, {"params": lora.base(state.params), "batch_stats": state.batch_stats}
  )
  return dataclasses.replace(state, **(network | {"params": state.params | network["params"]}))


def check_unseen(
  config: ConfigDict, splits: datasets.Splits | None = None, *, allow_seen_classes: bool = False
) -> classes.Names:
  """Raises a ValueError if the initial model was trained on validation or test classes.

  Args:
    config: resolved; ``config.model.init_from`` names the initial model.
    splits: splits of its data; None reads them.
    allow_seen_classes: log a warning instead of raising.

  Returns:
    The classes that the model was trained on, as far as they are known: see `classes.trained_on`.
  """
  start = config.model.init_from
  if not start:
    return {}
  there = workdir_lib.find_config(file_io.given(start, name="model.init_from"))
  if there is not None and not (isinstance(there.get("data"), dict) and "source" in there["data"]):
    raise ValueError(
      f"{start}/{workdir_lib.CONFIG} is not the config of a soprc train run: it has no data.source"
    )
  try:
    meta = checkpoints.find_meta(start)
  except FileNotFoundError:
    return {}  # loading the model raises the error
  if meta is None:
    return {}
  trained = classes.trained_on(meta, where=start)
  splits = datasets.make_splits(config.data) if splits is None else splits
  classes.check_unseen(
    trained,
    {name: split for name, split in splits.items() if name != "train"},
    data_source=config.data.source,
    network=f"model.init_from={start}",
    allow_seen_classes=allow_seen_classes,
  )
  return trained


def _random_state(config: ConfigDict, parts: Parts) -> step_lib.TrainState:
  key = jax.random.key(config.seed)
  return step_lib.init_state(
    parts.model,
    parts.tx,
    key=key,
    like=example_input(config),
    init_loss_params=parts.init_loss_params,
    trained=parts.trained,
    adapters=_adapters(config),
  )
