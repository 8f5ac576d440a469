"""The table of the keys of a config, and the presets of the loss."""

from collections.abc import Mapping
import re
from typing import Any

from soprc_jax import estimators, interpolation, losses
from soprc_jax.data import characters, datasets, decoding, pipeline, sampler, transforms
from soprc_jax.models import HEADS, RESNETS, resnet
from soprc_jax.training import config_key, objectives, optimizers, vit_keys
from soprc_jax.training import step as step_lib
from soprc_jax.training.config_key import LARGEST_COUNT, Key, group

# What a preset decides (docs/paper.md, errata 2 to 8). A config file may change it:
# config.presets.default.prior.value = 0.03. A self weight of None is 1 / (M + 1).
PRESETS: Mapping[str, Mapping[str, Any]] = {
  "default": {
    "self_weight": None,
    "tpr_gradient": False,
    "initial_v": "debiased",
    "grid": "midpoints",
    "average_over": "selected",
    "pool": "batch",
    "mean_gradient": True,
    "link": "share",
    "pull": 0.0,
    "wide": 0.0,
    "prior": {"kind": "scaled", "value": 0.1, "start": 0.0},
  },
  "paper": {
    "self_weight": 0.0,
    "tpr_gradient": True,
    "initial_v": "uniform",
    "grid": "midpoints",
    "average_over": "all",
    "pool": "list",
    "mean_gradient": True,
    "link": "share",
    "pull": 0.0,
    "wide": 0.0,
    "prior": {"kind": "frequency", "value": 0.0, "start": 0.0},
  },
  "authors": {
    "self_weight": None,
    "tpr_gradient": False,
    "initial_v": "uniform",
    "grid": "blocks",
    "average_over": "selected",
    "pool": "batch",
    "mean_gradient": True,
    "link": "share",
    "pull": 0.0,
    "wide": 0.0,
    "prior": {"kind": "scaled", "value": 0.1, "start": 0.0},
  },
}

# Upper bounds for sizes that allocate memory, so that typos fail fast.
_SIDE, IMAGES, _POINTS, _MEMORY = 2**14, 2**20, 10**6, 2**24
_CODES = len(characters.CODES)
_LOSS = f"one of {', '.join(objectives.LOSSES)}, or package.module:function for a custom loss"
_AFFINE = ("data.augmentation", ("affine",))
_RANDOM = ("data.augmentation", ("affine", "resized_crop", "crop"))
_CONFUSABLE = ("data.sampler", ("confusable",))
_CHARACTERS = ("data.source", ("characters",))
OF_TABLES = ("data.source", ("csv", "features"))
_OF_IMAGES = ("data.source", tuple(name for name in datasets.SOURCES if name != "features"))
_RESNET = ("model.name", tuple(sorted(RESNETS)))
_HEADS = ("model.name", HEADS)
_VIT = ("model.name", ("vit",))
BACKBONES = ("conv3", *sorted(RESNETS), "vit")
_SOPRC, _SOPRC_AP = ("soprc",), ("soprc", "ap")
_PROXIES = ("proxy_anchor", "norm_softmax", "arc_face")


def _is_pattern(text: str) -> bool:
  try:
    re.compile(text)
  except re.error:
    return False
  return True


_PATTERN: dict[str, Any] = {"must": "a regular expression", "holds": _is_pattern}
_NUMBERS: dict[str, Any] = {
  "must": "different numbers >= 1, at least one",
  "holds": lambda ks: config_key.different(ks, lambda k: 1 <= k <= LARGEST_COUNT),
}


def _options(loss: str, *keys: Key) -> tuple[Key, ...]:
  """Returns the keys of the group of one loss."""
  return group(f"loss.{loss}", *keys, losses=(loss,))


# Every key. The defaults are the paper's; where its text gives none, those of the authors' code.
KEYS = (
  Key("seed", 0, "seed of weights, batches and augmentation", high=2**32 - 1, often=True),
  Key(
    "data.source",
    "glyphs",
    "data set, or kind of files",
    choices=tuple(datasets.SOURCES),
    often=True,
  ),
  Key(
    "data.root",
    "",
    "folder of the data, or the CSV file; for glyphs: folder of the cache; for characters: folder "
    "of fonts, empty for those of the system",
    on_resume=True,
    often=True,
  ),
  Key(
    "data.superclass",
    "",
    "what names the superclass of each class: a column of the CSV or of the features, "
    "super_class_id of sop, category of glyphs; empty: none",
    used_with=("data.source", datasets.WITH_SUPERCLASSES),
  ),
  Key(
    "data.image_size",
    224,
    "side of a training image in pixels",
    low=1,
    high=_SIDE,
    may_be_open=True,
    used_with=_OF_IMAGES,
  ),
  Key(
    "data.augmentation",
    "resized_crop",
    "resized_crop: as in the authors' code; crop: as in the paper; affine: small rotation, scale, "
    "shear and shift",
    choices=transforms.AUGMENTATIONS,
  ),
  Key(
    "data.resize",
    256,
    "shorter side before the augmentation crop",
    used_with=("data.augmentation", ("crop",)),
  ),
  Key("data.flip", True, "mirror half of the training images, left to right", used_with=_RANDOM),
  Key(
    "data.min_crop_area",
    0.2,
    "smallest share of the area that a crop keeps; 1: the whole image",
    above=0,
    high=transforms.HIGHEST["min_crop_area"],
    used_with=("data.augmentation", ("resized_crop",)),
  ),
  Key(
    "data.color_jitter",
    0.0,
    "s: random brightness, contrast and saturation, factors 1 - s to 1 + s; 0: none",
    low=0,
    high=transforms.HIGHEST["color_jitter"],
    used_with=_RANDOM,
  ),
  *(
    Key(f"data.{name}", default, meaning, low=0, high=transforms.HIGHEST[name], used_with=_AFFINE)
    for name, default, meaning in (
      ("max_rotation", 15.0, "largest random rotation in degrees"),
      ("max_shift", 0.06, "largest random shift along each axis, as a share of the shorter side"),
      ("max_scale", 0.2, "s: width and height are scaled by random factors 1 - s to 1 + s"),
      ("max_shear", 0.15, "largest random horizontal shear, as a share of the height"),
    )
  ),
  Key(
    "data.on_broken",
    "error",
    "what to do with an image that cannot be decoded",
    choices=pipeline.ON_BROKEN,
    on_resume=True,
    used_with=_OF_IMAGES,
  ),
  Key(
    "data.small_classes",
    "mask",
    "what to do with classes of fewer than per_class images",
    choices=sampler.SMALL_CLASS_POLICIES,
  ),
  Key(
    "data.label_separator",
    "",
    "text between the labels of an image that has several, such as ; in the column label; images "
    "are then relevant to each other by shared labels, and splits are drawn image by image; empty: "
    "one class an image",
    used_with=OF_TABLES,
  ),
  Key(
    "data.min_jaccard",
    0.0,
    "with data.label_separator: smallest share of the labels of two relevant images that both have "
    "(Jaccard index); 0: one shared label suffices",
    low=0,
    high=1,
    used_with=OF_TABLES,
  ),
  Key(
    "data.sampler",
    "random",
    "classes of a batch; confusable: groups of classes that the model takes for each other",
    choices=sampler.SAMPLERS,
  ),
  *group(
    "data.confusable",
    Key("group", 8, "classes in a group of similar classes", low=2),
    Key("pool", 16, "nearest classes of a class that its group is drawn from", low=1),
    Key(
      "refresh",
      None,
      "steps after which the similar classes are found again; None: so that it takes below a tenth "
      "of the time",
      low=1,
      kind=int,
    ),
    used_with=_CONFUSABLE,
  ),
  *group(
    "data.characters",
    Key("train_classes", 11_318, "classes for training and validation", low=2, high=_CODES),
    Key("train_images", 59_551, "images of these classes", low=4, high=_MEMORY),
    Key("test_classes", 11_316, "test classes", low=2, high=_CODES),
    Key("test_images", 60_502, "images of the test classes", low=4, high=_MEMORY),
    Key(
      "pretrain_classes",
      0,
      "further classes that replace the training classes, for a model that others start from; 0: "
      "none",
      high=_CODES,
    ),
    Key("pretrain_images", 0, "images of these classes", high=_MEMORY),
    Key("min_images", 2, "fewest images of a class", low=2),
    Key("max_images", 12, "most images of a class", low=2),
    Key("side", 32, "side of the rendered images in pixels", low=16, high=512),
    used_with=_CHARACTERS,
  ),
  Key(
    "data.train_share",
    0.5,
    "share of the classes (with data.label_separator: of the images) for training, where there is "
    "no official split; the rest is for test",
    above=0,
    high=1,
  ),
  Key(
    "data.val_share",
    0.1,
    "share of the classes (with data.label_separator: of the images) for validation",
    above=0,
    high=1,
  ),
  Key(
    "data.trainval",
    False,
    "train on the validation split too; then there is no validation, and the last model is tested",
  ),
  Key("data.split_seed", 0, "seed of the split of the classes, or of the images"),
  Key("data.workers", 0, "loader processes; 0: threads", high=1024, on_resume=True),
  Key("data.prefetch", 4, "batches loaded ahead", low=1, high=10**4, on_resume=True),
  Key(
    "model.name",
    "resnet50",
    "backbone; vit: the vision transformer of model.vit; conv3: three convolutions, for small "
    "images on CPUs; linear, mlp, residual: heads on stored embeddings",
    must=f"one of {', '.join((*BACKBONES, *HEADS))}, or package.module:function for a model of "
    "another library",
    holds=lambda name: name in (*BACKBONES, *HEADS) or ":" in name,
    often=True,
  ),
  Key(
    "model.features",
    1,
    "width of the stored embeddings",
    low=1,
    high=IMAGES,
    used_with=_HEADS,
    may_be_open=True,
  ),
  Key(
    "model.hidden",
    1024,
    "width of the hidden layer",
    low=1,
    high=IMAGES,
    used_with=("model.name", ("mlp", "residual")),
  ),
  Key("model.width", 64, "channels of the first layers", low=1, high=_SIDE),
  Key(
    "model.stem",
    "imagenet",
    "first layers; small: for small images",
    choices=resnet.STEMS,
    used_with=_RESNET,
  ),
  Key("model.stem_stride", 1, "stride of the stem small", choices=(1, 2), used_with=_RESNET),
  Key(
    "model.pool_grid",
    1,
    "g: the last feature map is averaged to g x g cells; 1: global average. A larger grid keeps "
    "where something is in the image",
    low=1,
    high=_SIDE,
  ),
  Key(
    "model.embedding_dim",
    512,
    "width of the embedding; 0: the features of the backbone as they are",
    low=0,
    high=IMAGES,
    may_be_open=True,
  ),
  Key(
    "model.dtype", "float32", "dtype that the model computes in", choices=("float32", "bfloat16")
  ),
  Key(
    "model.remat",
    False,
    "the gradient computes the inside of each block again instead of keeping it, for less memory",
    used_with=_VIT,
  ),
  Key("model.freeze_bn", True, "batch norm keeps its statistics; its scale and bias are trained"),
  Key(
    "model.init_from",
    "",
    "initial weights: workdir, FILE.pth, FILE.safetensors, hf://USER/REPOSITORY; empty: random",
    often=True,
  ),
  Key(
    "model.lora.rank",
    0,
    "rank r of the trained adapters A B of frozen kernels, the model's are W + alpha/r A B; the "
    "head is trained too; 0: no adapters",
    high=_SIDE,
  ),
  Key("model.lora.alpha", 16.0, "alpha, the scale of the adapters times r", above=0),
  Key(
    "model.lora.targets",
    r"/blocks_\d+/",
    "regular expression of the paths of the dense kernels that have adapters",
    **_PATTERN,
  ),
  *vit_keys.KEYS,
  Key("loss.name", "soprc", "loss", must=_LOSS, often=True),
  *group(
    "loss",
    Key(
      "preset",
      "default",
      "source of the options that are not set",
      choices=tuple(PRESETS),
      often=True,
    ),
    Key("tau1", 0.1, "width of the surrogate l1 (Eq. 7)", above=0),
    Key("tau2", 0.001, "width of the surrogate l2 (Eq. 7)", above=0),
    Key("tpr_gradient", None, "the gradient also passes through T", kind=bool),
    losses=_SOPRC_AP,
  ),
  *group(
    "loss",
    Key(
      "link",
      None,
      "risk at a precision p of a positive; share: 1 - p (Eq. 8); log: -log(p), never flat",
      choices=tuple(estimators.LINKS),
      kind=str,
    ),
    Key(
      "tau1_start",
      0.0,
      "> 0: initial tau1; it changes log-linearly to loss.tau1 over the main phase",
      low=0,
    ),
    Key(
      "beta", 0.1, "weight of the new scores in v at a visit of its class (Eq. 10)", above=0, high=1
    ),
    Key("num_points", 100, "M, the length of the auxiliary vector v", low=1, high=_POINTS),
    Key(
      "v",
      "carried",
      "carried: v is kept over the steps; batch: phi of the batch",
      choices=("carried", "batch"),
    ),
    Key(
      "pull",
      None,
      "final weight of the positive part of Multi-Similarity, which pulls positives to their "
      "query; it grows linearly from 0",
      low=0,
      kind=float,
    ),
    Key(
      "wide",
      None,
      "weight of the same risk at tau1 = 1 in the mean of both; there far negatives count too",
      low=0,
      high=1,
      kind=float,
    ),
    Key(
      "superclass_gain",
      0.0,
      "relevance of a candidate of the query's superclass, where one of its class has 1 "
      "(docs/howto/graded.md); 0: superclasses do not count",
      must="0 or more and below 1",
      holds=lambda gain: 0 <= gain < 1,
    ),
    Key("lambda1", 1.0, "weight of the positives' semi-variance (Eq. 9)", low=0),
    Key("lambda2", 5.0, "weight of the negatives' semi-variance (Eq. 9)", low=0),
    Key(
      "self_weight",
      None,
      "weight of a positive itself in its true positive rate T; None in a preset: 1/(M+1)",
      low=0,
      high=1,
      kind=float,
    ),
    Key(
      "initial_v", None, "initial value of v (erratum 4)", choices=("debiased", "uniform"), kind=str
    ),
    Key("grid", None, "grid of the interpolation (Alg. 2)", choices=interpolation.GRIDS, kind=str),
    Key(
      "average_over",
      None,
      "scores that Eq. 9 averages over (erratum 8)",
      choices=("selected", "all"),
      kind=str,
    ),
    Key(
      "pool", None, "Eq. 9 over the batch or over each list", choices=("batch", "list"), kind=str
    ),
    Key("mean_gradient", None, "the gradient also passes through the means of Eq. 9", kind=bool),
    losses=_SOPRC,
  ),
  *group(
    "loss.prior",
    Key(
      "kind",
      None,
      "how the prior of a class is computed (erratum 7)",
      choices=objectives.PRIOR_KINDS,
      kind=str,
    ),
    Key("value", None, "prior, for the kinds scaled and constant", low=0, high=1, kind=float),
    Key(
      "start",
      None,
      "> 0: initial prior, annealed to that of loss.prior.kind",
      low=0,
      high=1,
      kind=float,
    ),
    Key("shape", "log", "shape of the annealing of the prior", choices=objectives.PRIOR_SHAPES),
    Key("until", 1.0, "share of the main phase after which the annealing ends", above=0, high=1),
    losses=_SOPRC,
  ),
  *_options(
    "contrastive",
    Key("positive_margin", 1.0, "similarity above which a positive has no loss"),
    Key("negative_margin", 0.5, "similarity below which a negative has no loss"),
    Key("average_active", False, "average only over the pairs whose loss is not 0"),
  ),
  *_options("triplet", Key("margin", 0.1, "margin between positive and negative", low=0)),
  *_options(
    "multi_similarity",
    Key("alpha", 2.0, "sharpness for positives", above=0),
    Key("beta", 40.0, "sharpness for negatives", above=0),
    Key("base", 0.5, "similarity around which pairs are weighted"),
  ),
  *_options(
    "smooth_ap",
    Key("tau", 0.01, "temperature of the sigmoid", above=0),
    Key("include_self", True, "the query is relevant to itself"),
  ),
  *_options("fast_ap", Key("num_bins", 10, "bins of the histogram", low=1, high=_POINTS)),
  *_options(
    "listwise_ap",
    Key("num_bins", 20, "centers of the histogram", low=2, high=_POINTS),
    Key("include_self", True, "the query is relevant to itself"),
  ),
  *_options(
    "auroc",
    Key("surrogate", "huber", "loss of a pair", choices=tuple(losses.auroc.SURROGATES)),
    Key("tau", 0.1, "width of huber and sigmoid", above=0),
    Key("include_self", True, "the query is relevant to itself"),
  ),
  *_options("sup_con", Key("temperature", 0.07, "temperature of the softmax", above=0)),
  *_options("quad_linear_ap", Key("width", 0.1, "width of the surrogate", above=0)),
  *_options(
    "sup_ap",
    Key("tau", 0.01, "temperature of the sigmoid", above=0),
    Key("rho", 100.0, "slope of the bound beyond loss.sup_ap.delta", low=0),
    Key("delta", 0.05, "score difference from which on the bound is linear", low=0),
    Key("lambda_", 0.5, "weight of the calibration", low=0, high=1),
    Key("alpha", 0.9, "similarity above which a positive has no calibration loss"),
    Key("beta", 0.6, "similarity below which a negative has no calibration loss"),
  ),
  *_options(
    "recall_at_k",
    Key("ks", (1, 2, 4, 8, 16), "k of the smoothed recalls", **_NUMBERS),
    Key("tau1", 1.0, "temperature on ranks", above=0),
    Key("tau2", 0.01, "temperature on similarities", above=0),
    Key("mixup", False, "add a virtual image for each, mixed with another of its class (SiMix)"),
  ),
  *_options(
    "sigmoid",
    Key("scale", 10.0, "initial factor of the similarities, learned", above=0),
    Key("bias", -10.0, "initial bias, learned"),
  ),
  *_options(
    "proxy_anchor",
    Key("alpha", 32.0, "sharpness", above=0),
    Key("margin", 0.1, "margin", low=0),
  ),
  *_options("norm_softmax", Key("temperature", 0.05, "temperature of the softmax", above=0)),
  *_options(
    "arc_face",
    Key("scale", 64.0, "factor of the cosines", above=0),
    Key("margin", 0.5, "margin added to the angle to the own proxy, in radians", low=0, high=1.5),
  ),
  *_options(
    "xbm",
    Key("memory_size", 4096, "embeddings kept, at least train.batch_size", high=_MEMORY),
    Key("start_after", 0, "steps at the start in which the memory stays empty"),
    Key("negative_margin", 0.5, "similarity below which a negative has no loss"),
    Key("include_self", False, "the query is relevant to itself"),
    Key(
      "overflow",
      "ring",
      "which embeddings a full memory drops: the oldest, or the tail",
      choices=("ring", "tail"),
    ),
  ),
  *_options(
    "blackbox",
    Key("lambda_", 5.0, "width of the interpolation", above=0),
    Key("margin", 0.0, "scale of the random shift of the scores", low=0),
    Key("interclass_coef", 0.9, "share of the ranking of all pairs", low=0, high=1),
    Key("memory_size", 1024, "embeddings kept, at least train.batch_size", high=_MEMORY),
    Key("include_self", True, "the query is relevant to itself"),
  ),
  Key(
    "loss.proxy_multiplier",
    1.0,
    "learning rate of the proxies relative to the model's",
    low=0,
    losses=_PROXIES,
  ),
  Key("loss.custom", {}, "options of a custom loss", losses=("custom losses",)),
  Key("optim.name", "sgd", "optimizer", choices=optimizers.OPTIMIZERS),
  Key(
    "optim.learning_rate",
    0.01,
    "learning rate of the main phase",
    low=0,
    often=True,
    may_be_open=True,
  ),
  Key("optim.schedule", "step", "schedule of the learning rate", choices=optimizers.SCHEDULES),
  Key(
    "optim.milestones",
    (15_000, 30_000),
    "steps of the main phase at which the schedule step multiplies the learning rate by "
    "decay_factor",
    must="ascending steps >= 1",
    holds=lambda steps: (
      list(steps) == sorted(set(steps)) and all(0 < step <= LARGEST_COUNT for step in steps)
    ),
  ),
  Key("optim.decay_factor", 0.1, "factor at each milestone", low=0),
  Key("optim.ramp_steps", 0, "steps of the main phase in which the learning rate rises from 0"),
  Key("optim.momentum", 0.9, "momentum of SGD", low=0, high=1),
  Key("optim.weight_decay", 4e-4, "weight decay, added to the gradient (L2)", low=0),
  Key("optim.head_multiplier", 1.0, "learning rate of the head relative to the backbone's", low=0),
  Key(
    "optim.train_only",
    "",
    "regular expression of the paths of the trained parameters, such as ^head/; the "
    "others are frozen; empty: all are trained",
    **_PATTERN,
  ),
  Key(
    "optim.layer_decay",
    1.0,
    "factor of the learning rate from one layer to the one before it; the head has factor 1",
    above=0,
    high=1,
  ),
  Key("warmup.steps", 0, "steps of the warm-up, before the main phase"),
  Key("warmup.loss", "triplet", "loss of the warm-up, one without carried state", must=_LOSS),
  Key("warmup.learning_rate", 1e-3, "learning rate of the warm-up", low=0),
  Key("warmup.freeze_bn", False, "model.freeze_bn in the warm-up"),
  Key("train.steps", 50_000, "steps after the warm-up", often=True, may_be_open=True),
  Key(
    "train.batch_size",
    224,
    "images per batch, over all devices",
    high=IMAGES,
    often=True,
    may_be_open=True,
  ),
  Key(
    "train.per_class",
    4,
    "images per class in a batch, K",
    must="at least 2, a query needs a positive",
    holds=lambda count: 2 <= count <= LARGEST_COUNT,
    may_be_open=True,
  ),
  Key(
    "train.microbatch",
    0,
    "images that pass through the model at a time",
    must="0, or a divisor of train.batch_size",
  ),
  Key(
    "train.on_nonfinite",
    "stop",
    "what to do at a step with a NaN or an infinity",
    choices=step_lib.NONFINITE_POLICIES,
    on_resume=True,
  ),
  Key("train.max_skipped", 10, "steps in a row that may be skipped", low=1, on_resume=True),
  Key(
    "eval.every",
    1000,
    "steps between evaluations on the validation split; 0: only after the last step",
    may_be_open=True,
  ),
  Key(
    "eval.image_size",
    224,
    "side of the center crop of a test image in pixels",
    low=1,
    high=_SIDE,
    may_be_open=True,
    used_with=_OF_IMAGES,
  ),
  Key(
    "eval.resize",
    0,
    "shorter side before that crop; 0: image_size",
    may_be_open=True,
    used_with=_OF_IMAGES,
  ),
  Key(
    "eval.interpolation",
    "bilinear",
    "how test images are resized",
    choices=decoding.INTERPOLATIONS,
    may_be_open=True,
    used_with=_OF_IMAGES,
  ),
  Key("eval.batch_size", 224, "images embedded at a time", low=1, high=IMAGES),
  Key(
    "eval.baselines",
    True,
    "test thumbnails and the model before training too, before the first step",
  ),
  Key("eval.block_size", 1024, "queries ranked at a time", low=1, high=IMAGES),
  Key("eval.ks", (1, 10, 100, 1000), "k of recall@k", **_NUMBERS),
  Key(
    "eval.one_per_class",
    0,
    "> 0: also test with this number of random galleries of one image per class (VehicleID)",
  ),
  Key("checkpoint.every", 1000, "steps between checkpoints; 0: only at the end", may_be_open=True),
  Key("checkpoint.keep", 2, "checkpoints kept", low=1),
  Key("log.progress", True, "progress bar", on_resume=True),
  Key("log.line_every", 50, "steps between log lines", low=1),
  Key(
    "log.v_classes",
    4,
    "number of training classes whose v is recorded at each evaluation (v.jsonl); 0: none",
    on_resume=True,
  ),
)
# Keys that may differ when a run is resumed. The policies for broken images and non-finite steps
# are among them, since a resumed run has met no such image or step that it could not continue from.
RESUME_FREE = tuple(key.name for key in KEYS if key.on_resume)
# Keys that a config may leave open: `defaults` and `budget` choose them when a run starts.
OPEN = tuple(key.name for key in KEYS if key.may_be_open)
