"""Defines the config of the study of imbalanced and of multi-label classification.

It has a table of keys, and checks that fail before anything is compiled.
"""

from typing import Any

from experiments.binary import binary_losses
from soprc_jax import estimators
from soprc_jax.data import multilabel, tabular
from soprc_jax.training import config_key, optimizers
from soprc_jax.training.config import ConfigDict
from soprc_jax.training.config_key import Key

# Outside these bounds float32 has no steps, or no numbers.
_RATES = (1e-12, 1e12)
_WIDEST = 2**14
_SURROGATES = ("logistic", "huber")
_BINARY = ("soprc", "cross_entropy", "weighted_cross_entropy", "focal", "auroc", "ap")
_ONE_LABEL = ("data.name", tuple(tabular.DATA_SETS))
_SEVERAL_LABELS = ("data.name", tuple(multilabel.DATA_SETS))
_TAIL = tuple(
  f"data.long_tail.{name}" for name in ("tail", "num_classes", "val_images", "test_images")
)
_SOPRC, _RANKING, _WEIGHTED = ("soprc",), ("soprc", "ap", "auroc"), ("weighted_cross_entropy",)

KEYS = (
  Key(
    "seeds",
    (0, 1, 2, 3, 4),
    "seeds of the division into train and validation, of weights and batches",
    must="different integers >= 0, at least one",
    holds=lambda seeds: config_key.different(seeds, lambda seed: 0 <= seed < 2**31),
    often=True,
  ),
  Key(
    "methods",
    _BINARY,
    "methods; the first one is compared with the others",
    must=f"different names of {', '.join(binary_losses.METHODS)}, at least one",
    holds=lambda names: config_key.different(names, lambda name: name in binary_losses.METHODS),
    often=True,
  ),
  Key(
    "rates",
    (0.001, 0.003, 0.01, 0.03),
    "learning rates; each method uses the best on the validation split",
    must=f"different numbers from {_RATES[0]:g} to {_RATES[1]:g}, at least one",
    holds=lambda rates: config_key.different(rates, lambda rate: _RATES[0] <= rate <= _RATES[1]),
    often=True,
  ),
  Key(
    "data.name",
    "digits",
    "data set",
    choices=(*tabular.DATA_SETS, *multilabel.DATA_SETS),
    often=True,
  ),
  Key(
    "data.root",
    "",
    "folder of the package of yeast, or of fonts for character_labels and character_classes",
    often=True,
    used_with=("data.name", multilabel.ROOTED),
  ),
  Key(
    "data.positive",
    8,
    "the positive class of digits and breast_cancer",
    used_with=("data.name", tabular.WITH_CLASSES),
  ),
  Key(
    "data.share",
    0.05,
    "share of positives to which the data are subsampled; 0: as they are",
    low=0,
    high=0.5,
    used_with=_ONE_LABEL,
  ),
  Key("data.split_seed", 0, "seed of subsampling and of the test split, one for all seeds"),
  Key("data.val_share", 0.2, "share of the data for the validation split", above=0, high=1),
  Key("data.test_share", 0.4, "share of the data for the test split", above=0, high=1),
  Key("data.batch_size", 64, "examples per batch", low=2, high=2**20),
  Key(
    "data.positive_share",
    0.25,
    "share of positives in a batch; 0: the data's own",
    low=0,
    high=0.99,
    used_with=_ONE_LABEL,
  ),
  Key(
    "data.classes_per_batch",
    0,
    "several labels: labels with chosen positives in a batch, each label in turn; 0: none",
    used_with=_SEVERAL_LABELS,
  ),
  Key(
    "data.per_class",
    2,
    "several labels: chosen positives of each of them",
    low=1,
    used_with=_SEVERAL_LABELS,
  ),
  Key(
    "data.long_tail.head",
    0,
    "> 0: training examples of the most frequent class, which fall to tail by a power law",
  ),
  Key("data.long_tail.tail", 2, "training examples of the rarest class", low=1),
  Key("data.long_tail.num_classes", 100, "classes, drawn by data.split_seed", low=2),
  Key("data.long_tail.val_images", 2, "validation examples of each class", low=1),
  Key("data.long_tail.test_images", 4, "test examples of each class", low=1),
  Key(
    "model.widths",
    (64, 64),
    "widths of the hidden layers",
    must=f"integers >= 1 and <= {_WIDEST}",
    holds=lambda widths: all(1 <= width <= _WIDEST for width in widths),
  ),
  Key(
    "loss.scores",
    "sigmoid",
    "scores of the logits, in units of tau1",
    choices=binary_losses.SCORES,
    losses=_RANKING,
  ),
  Key(
    "loss.link",
    "share",
    "risk at a precision p of a positive; share: 1 - p (Eq. 8); log: -log(p)",
    choices=tuple(estimators.LINKS),
    losses=_SOPRC,
  ),
  Key("loss.tau1", 0.1, "width of l1 (Eq. 7)", above=0, losses=_SOPRC, often=True),
  Key("loss.tau2", 0.001, "width of l2 (Eq. 7)", above=0, losses=("soprc", "ap")),
  Key("loss.beta", 0.1, "step of v (Eq. 10)", above=0, high=1, losses=_SOPRC),
  Key(
    "loss.num_points",
    100,
    "M; 0: the positives of the training data (of the most frequent label), as in the paper",
    high=10**6,
    losses=_SOPRC,
  ),
  Key(
    "loss.prior_start",
    0.5,
    "> 0: the prior starts here and ends at the data's, log-linear",
    low=0,
    high=1,
    losses=_SOPRC,
  ),
  Key(
    "loss.self_weight",
    None,
    "weight of a positive in its own T; None: 1/(M+1)",
    low=0,
    high=1,
    kind=float,
    losses=_SOPRC,
  ),
  Key("loss.tpr_gradient", False, "the gradient passes through T too", losses=_SOPRC),
  Key(
    "loss.weighted_cross_entropy.share",
    0.5,
    "weight share of the positives; 0: the data's share",
    low=0,
    high=0.99,
    losses=_WEIGHTED,
  ),
  Key("loss.asl.gamma_positive", 0.0, "exponent of the positives of ASL", low=0, losses=("asl",)),
  Key("loss.asl.gamma_negative", 4.0, "exponent of the negatives of ASL", low=0, losses=("asl",)),
  Key(
    "loss.asl.margin",
    0.05,
    "shift of the probability of a negative of ASL",
    above=0,
    high=0.99,
    losses=("asl",),
  ),
  Key("loss.focal.gamma", 2.0, "exponent of the focal loss", low=0, losses=("focal",)),
  Key(
    "loss.auroc.surrogate",
    "logistic",
    "surrogate loss; logistic: of the logits; huber: of the scores",
    choices=_SURROGATES,
    losses=("auroc",),
  ),
  Key("loss.auroc.tau", 0.1, "width of the surrogate huber", above=0, losses=("auroc",)),
  Key("loss.ap.tau1", 0.1, "width of l1 of the AP loss", above=0, losses=("ap",)),
  Key(
    "loss.libauc.gamma",
    0.9,
    "gamma of APLoss and mAPLoss; the default is LibAUC's",
    above=0,
    high=1,
    losses=(binary_losses.PEER,),
  ),
  Key(
    "loss.libauc.margin",
    1.0,
    "margin of APLoss and mAPLoss; the default is LibAUC's",
    above=0,
    losses=(binary_losses.PEER,),
  ),
  Key("optim.name", "adam", "optimizer", choices=optimizers.OPTIMIZERS),
  Key("optim.schedule", "cosine", "schedule of the learning rate", choices=("constant", "cosine")),
  Key("optim.ramp_steps", 0, "steps in which the learning rate rises from 0"),
  Key("optim.momentum", 0.9, "momentum of SGD", low=0, high=1),
  Key("optim.weight_decay", 0.0, "weight decay, added to the gradient (L2)", low=0),
  Key("train.steps", 1000, "steps, a multiple of eval.every", low=1, high=10**7, often=True),
  Key(
    "eval.every",
    50,
    "steps between validations; the best of these models is tested",
    low=1,
  ),
)


def default_config() -> Any:
  """Returns the keys of `KEYS` with their defaults.

  ``configs/imbalanced.py`` and ``configs/multilabel.py`` change them by data set.
  """
  return config_key.default_config(KEYS)


def resolve(config: Any) -> Any:
  """Returns a checked, locked copy.

  Raises:
    ValueError: a key is wrong. The message names each with its value and what is allowed.
  """
  tree, default = config.to_dict(), default_config().to_dict()
  problems = config_key.key_problems(tree, default)
  if {problem.split(" ")[0] for problem in problems} & (tree.keys() ^ default.keys()):
    problems.append(
      "Is this the config of another program? soprc train-binary takes configs/imbalanced.py "
      "and configs/multilabel.py"
    )
  config_key.raise_if(problems)
  config_key.raise_if(config_key.type_problems(tree, default))
  config = ConfigDict(tree)
  config_key.raise_if([*config_key.value_problems(KEYS, config), *_joint_problems(config)])
  config.lock()
  return config


def without_methods(config: Any) -> Any:
  """Returns a copy without the list of methods, so that a folder can take further ones."""
  kept = config.copy_and_resolve_references()
  with kept.unlocked():
    del kept.methods
  return kept


def _joint_problems(config: Any) -> list[str]:
  """Returns one line for each combination of values that is not allowed."""
  problems, steps, every = [], config.train.steps, config.eval.every
  if config.data.val_share + config.data.test_share >= 1:
    problems.append("data.val_share + data.test_share must be below 1, the rest is for training")
  if every > 0 and steps % every:
    near = max(steps // every, 1) * every
    problems.append(
      f"train.steps must be a multiple of eval.every={every}, e.g. {near}; got {steps}"
    )
  several, long_tail = config.data.name in multilabel.DATA_SETS, config.data.long_tail.head > 0
  for names, allowed, needs in (
    (binary_losses.ONE_LIST, not several, "a data set of configs/imbalanced.py"),
    (
      binary_losses.ONE_LABEL,
      several and long_tail,
      "one label an example, data.long_tail.head > 0",
    ),
  ):
    problems += [
      f"methods must be without {name} here: it needs {needs}"
      for name in names
      if name in config.methods and not allowed
    ]
  if long_tail and not several:
    problems.append("data.long_tail.head must be 0 for a data set of configs/imbalanced.py")
  if long_tail and config.data.long_tail.tail > config.data.long_tail.head:
    problems.append(
      f"data.long_tail.tail={config.data.long_tail.tail} must be at most "
      f"data.long_tail.head={config.data.long_tail.head}"
    )
  return problems + _unused_problems(config)


def _unused_problems(config: Any) -> list[str]:
  """Returns one line for each key of the data that is set, and that the data set does not read."""
  head = config.data.long_tail.head
  several = config.data.name in multilabel.DATA_SETS
  given = [key.name for key in KEYS if config_key.value_of(config, key.name) != key.default]
  by_others = (
    ("data.long_tail.head=0", not head, _TAIL),
    ("data.long_tail.head > 0", head, ("data.val_share", "data.test_share")),
    (
      "data.classes_per_batch=0",
      several and not config.data.classes_per_batch,
      ("data.per_class",),
    ),
  )
  return config_key.used_with_problems(KEYS, config, given) + [
    f"{name} is not used by {reason}: leave it out"
    for reason, applies, names in by_others
    for name in names
    if applies and name in given
  ]
