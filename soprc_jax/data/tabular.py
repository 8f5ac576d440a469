"""Loads, subsamples, splits and standardizes tables with a rare positive class.

A missing number is NaN in a `Table`. In a split it becomes the mean of the training examples, which
is 0 after standardization. Each column with a missing number anywhere in the table gets an
indicator column ``NAME is missing`` of 0 and 1.
"""

from collections.abc import Callable, Mapping
import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import checks
from soprc_jax.data import flights

PIP = 'pip install -e ".[binary]"'
_SPLIT_KEY = 0x7AB1E


class Table(NamedTuple):
  """Holds a data set for binary classification.

  Attributes:
    numbers: ``[N, F]`` float32, NaN where missing.
    number_names: names of the F columns.
    categories: name -> ``[N]`` values of any sortable type.
    labels: ``[N]`` bool, True is positive.
  """

  numbers: np.ndarray
  number_names: tuple[str, ...]
  categories: dict[str, np.ndarray]
  labels: np.ndarray


class Part(NamedTuple):
  """Holds the examples of one split.

  Attributes:
    features: ``[n, D]`` float32.
    labels: ``[n]`` int32, 0 or 1; ``[n, K]`` of K labels (`soprc_jax.data.multilabel`).
    rows: ``[n]`` rows of the examples in the table.
  """

  features: np.ndarray
  labels: np.ndarray
  rows: np.ndarray


class Splits(NamedTuple):
  """Holds the three splits of a table as inputs of a model.

  Attributes:
    train: training split, which determines the standardization and the prior.
    val: validation split, for model selection.
    test: test split, for results.
    feature_names: names of the D features.
    label_names: names of the K labels, if there are several.
  """

  train: Part
  val: Part
  test: Part
  feature_names: tuple[str, ...]
  label_names: tuple[str, ...] = ()

  @property
  def prior(self) -> float:
    """The share pi of positives in the training examples."""
    return float(self.train.labels.mean())


def load(name: str, *, positive: int) -> Table:
  """Loads a data set by its name.

  Args:
    name: key of `DATA_SETS`.
    positive: the positive class of ``digits`` or ``breast_cancer`` (0 malignant, 1 benign); other
      data sets ignore it.

  Raises:
    ValueError: if the name or the class is unknown, or if a package is missing.
  """
  if name not in DATA_SETS:
    raise ValueError(f"data.name must be one of {', '.join(DATA_SETS)}; got {name!r}")
  return DATA_SETS[name](positive)


def split(
  table: Table, *, share: float, val_share: float, test_share: float, seed: int, split_seed: int = 0
) -> Splits:
  """Splits a table at random, separately for each class, after subsampling its positives.

  ``split_seed`` alone draws the subsample and its test split. ``seed`` divides the rest into train
  and validation. So no example is in the test split at one seed and in another split at another
  seed. The sizes of the splits do not depend on the seeds. Numbers are standardized by the mean and
  the standard deviation of the training examples. A column that is constant there becomes 0.
  Categories become one-hot columns of 0 and 1.

  Args:
    table: data set.
    share: share of positives after subsampling them; 0 keeps all.
    val_share: share of the examples of each class in the validation split, in (0, 1).
    test_share: the same for the test split; the rest is the training split.
    seed: integer >= 0 of the division into train and validation.
    split_seed: integer >= 0 of the subsample and of the test split.

  Raises:
    ValueError: if the table or a split cannot be used; the message says what to change.
  """
  check(table)
  shares = (val_share, test_share)
  if min(shares) <= 0 or sum(shares) >= 1:
    raise ValueError(
      "data.val_share and data.test_share must be > 0 with a sum below 1 (the rest is for "
      f"training), got {val_share:g} and {test_share:g}"
    )
  rng = np.random.default_rng([_SPLIT_KEY, split_seed])
  negatives = rng.permutation(np.flatnonzero(~table.labels))
  positives = _thinned(rng.permutation(np.flatnonzero(table.labels)), len(negatives), share)
  rng = np.random.default_rng([_SPLIT_KEY, split_seed, seed])
  cuts = [_cut(rows, shares, rng) for rows in (positives, negatives)]
  parts = {}
  for name, *classes in zip(("train", "val", "test"), *cuts):
    if min(len(rows) for rows in classes) < 2:
      raise ValueError(
        f"{name} would have {len(classes[0])} positives and {len(classes[1])} negatives of "
        f"{len(positives)} and {len(negatives)}, "
        "but needs 2 of each: raise data.share, or change data.val_share and data.test_share"
      )
    parts[name] = np.sort(np.concatenate(classes))
  numbers, names = _standardised(table, parts["train"])
  onehot, onehot_names = _one_hot(table)

  def part(rows: np.ndarray) -> Part:
    features = np.concatenate([numbers[rows], onehot[rows].astype(np.float32)], axis=1)
    return Part(features, table.labels[rows].astype(np.int32), rows)

  train, val, test = (part(parts[name]) for name in ("train", "val", "test"))
  return Splits(train, val, test, names + onehot_names)


def check(table: Table) -> None:
  """Raises a ValueError for a table with only one class, or with inconsistent columns."""
  count = len(table.labels)
  if table.labels.dtype != bool or table.labels.ndim != 1:
    raise ValueError(
      f"labels must be [N] booleans, got {table.labels.dtype} of shape {table.labels.shape}"
    )
  if table.numbers.shape != (count, len(table.number_names)):
    raise ValueError(
      f"numbers must be [N, F] = {(count, len(table.number_names))}, got {table.numbers.shape}"
    )
  for name, values in table.categories.items():
    if values.shape != (count,):
      raise ValueError(f"category {name!r} must have {count} values, got {values.shape}")
  if table.labels.all() or not table.labels.any():
    raise ValueError(
      f"all {count} labels are {bool(table.labels.any())}: positives and negatives are needed"
    )
  for name, column in zip(table.number_names, table.numbers.T):
    if np.isinf(column).any():
      raise ValueError(
        f"column {name!r} is infinite in row {int(np.argmax(np.isinf(column)))}: use NaN if the "
        "value is missing"
      )
    if np.isnan(column).all():
      raise ValueError(f"column {name!r} is NaN in every row: remove the column")


def _thinned(positives: np.ndarray, num_negatives: int, share: float) -> np.ndarray:
  """Returns the first positives, as many as give the share."""
  checks.check_range("data.share", share, low=0.0, high=1.0)
  if not share:
    return positives
  own = len(positives) / (len(positives) + num_negatives)
  if share > own:
    raise ValueError(
      f"data.share must be at most {own:.4f}, the share of positives in the data, or 0; got "
      f"{share:g}"
    )
  return positives[: round(num_negatives * share / (1 - share))]


def _cut(
  rows: np.ndarray, shares: tuple[float, float], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the rows of train, val and test; those of test are the first ones, without ``rng``."""
  val, test = (round(len(rows) * share) for share in shares)
  rest = rng.permutation(rows[test:])
  return rest[val:], rest[:val], rows[:test]


def standardization(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Computes the mean of each column of ``numbers [n, F]``, and one over its deviation.

  Both are ``[F]`` float64 and leave out NaN. The second is 0 for a constant column.
  """
  seen = numbers.astype(np.float64)
  known = ~np.isnan(seen)
  count = np.maximum(known.sum(axis=0), 1)
  mean = np.where(known, seen, 0).sum(axis=0) / count
  deviation = np.sqrt((np.where(known, seen - mean, 0) ** 2).sum(axis=0) / count)
  # Rounding gives a constant column a deviation near 0 instead of 0. It must not be a divisor.
  constant = deviation <= 1e-6 * np.maximum(np.abs(mean), 1e-30)
  return mean, np.where(constant, 0, 1 / np.where(constant, 1, deviation))


def _standardised(table: Table, train: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
  """Returns standardized numbers without NaN, ``[N, F + indicator columns]``, and their names."""
  mean, scale = standardization(table.numbers[train])
  standardised = (table.numbers - mean.astype(np.float32)) * scale.astype(np.float32)
  missing = np.isnan(table.numbers)
  columns = np.flatnonzero(missing.any(axis=0))
  companions = tuple(f"{table.number_names[column]} is missing" for column in columns)
  filled = np.where(missing, np.float32(0), standardised)
  return np.concatenate(
    [filled, missing[:, columns].astype(np.float32)], axis=1
  ), table.number_names + companions


def _one_hot(table: Table) -> tuple[np.ndarray, tuple[str, ...]]:
  """Returns ``[N, K]`` bool, one column for each value of each category, and their names."""
  blocks, names = [np.zeros((len(table.labels), 0), bool)], list[str]()
  for name, values in table.categories.items():
    known, codes = np.unique(values, return_inverse=True)
    blocks.append(codes[:, None] == np.arange(len(known))[None, :])
    names += [f"{name} = {value}" for value in known]
  return np.concatenate(blocks, axis=1), tuple(names)


def _from_sklearn(loader: str, positive: int) -> Table:
  """Loads a data set of scikit-learn, with one class against the others."""
  try:
    # Only this module is imported: the others take seconds.
    module = importlib.import_module("sklearn.datasets")
  except ImportError:
    raise ValueError(
      f"the data sets digits and breast_cancer need the package scikit-learn: {PIP}"
    ) from None
  bunch: Any = getattr(module, loader)()
  classes = np.unique(bunch.target)
  if positive not in classes:
    raise ValueError(
      f"data.positive must be a class of {loader.removeprefix('load_')}, {classes[0]} to "
      f"{classes[-1]}; got {positive}"
    )
  names = tuple(str(name) for name in bunch.feature_names)
  return Table(bunch.data.astype(np.float32), names, {}, bunch.target == positive)


def _flights(positive: int) -> Table:
  del positive
  numbers, categories, labels = flights.features(*flights.read(PIP))
  return Table(np.stack(list(numbers.values()), axis=1), tuple(numbers), categories, labels)


# Name -> function of the positive class.
# Names of the data sets that ``positive`` is for.
WITH_CLASSES = ("digits", "breast_cancer")
DATA_SETS: Mapping[str, Callable[[int], Table]] = {
  "digits": functools.partial(_from_sklearn, "load_digits"),
  "breast_cancer": functools.partial(_from_sklearn, "load_breast_cancer"),
  "flights": _flights,
}
