"""Computes the test results of a study with several labels: means over labels, and over thirds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.binary import binary_runs
from soprc_jax import metrics
from soprc_jax.data import multilabel, tabular


def classes(splits: tabular.Splits) -> dict[str, Any]:
  """Returns name and numbers of positives of each label, for ``results.json``.

  ``positives`` counts train and validation together, which does not depend on the seed.
  """
  parts = [splits.train.labels.sum(axis=0), splits.val.labels.sum(axis=0)]
  return {
    "names": list(splits.label_names),
    "positives": sum(parts).tolist(),
    "test_positives": splits.test.labels.sum(axis=0).tolist(),
  }


def per_class(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """Computes the AUPRC ``[K]`` of each label, NaN for a label without a positive.

  Args:
    scores: ``[n, K]``.
    labels: ``[n, K]``.
  """
  found = np.asarray(metrics.auprc(scores.T, labels.T), np.float64)
  return np.where(labels.any(axis=0), found, np.nan)


def test_values(row: binary_runs.Row, positives: Sequence[int]) -> dict[str, np.ndarray]:
  """Returns metric -> ``[S]``: mAP, micro AP, and mAP of each third of the labels by frequency.

  mAP is the mean AUPRC over the labels, or over those of a third. Labels without a positive in the
  test are left out. Micro AP is the AUPRC of all pairs of an example and a label as one list.
  """
  parts = multilabel.thirds(np.asarray(positives))
  values: dict[str, list[float]] = {name: [] for name in ("mAP", "micro AP", *parts)}
  for scores, labels, val in zip(row.scores, row.labels, row.val, strict=True):
    fine = bool(np.isfinite(val))
    own = per_class(scores, labels) if fine else np.full(labels.shape[1], np.nan)
    values["mAP"].append(float(np.nanmean(own)) if fine else np.nan)
    micro = metrics.auprc(scores.ravel(), labels.ravel()) if fine else np.nan
    values["micro AP"].append(float(micro))
    for name, chosen in parts.items():
      has = own[chosen][labels[:, chosen].any(axis=0)]
      values[name].append(float(has.mean()) if len(has) else np.nan)
  return {name: np.array(found) for name, found in values.items()}


def note(about: Mapping[str, Any]) -> str:
  """Returns sentences on the labels for below the table."""
  counts, test = (np.array(about[key]) for key in ("positives", "test_positives"))
  parts = [
    f"{name} {counts[chosen].max()} to {counts[chosen].min()}"
    for name, chosen in multilabel.thirds(counts).items()
  ]
  return (
    f"mAP: mean AUPRC over the {np.count_nonzero(test)} labels with a test positive "
    f"({np.count_nonzero(test == 0)} have none and are left out). Micro AP: all pairs of an "
    "example and a label as one list. Thirds of the labels by their positives in train and val: "
    f"{', '.join(parts)}."
  )


def describe(splits: tabular.Splits) -> str:
  """Returns one sentence about the sizes of a split."""
  parts = {"train": splits.train, "val": splits.val, "test": splits.test}
  sizes = [f"{name} {len(part.labels):,}" for name, part in parts.items()]
  train = splits.train.labels
  return (
    f"{', '.join(sizes)}, {len(splits.feature_names)} features, {train.shape[1]} labels, "
    f"{train.sum(axis=1).mean():.1f} an example; training positives of a label "
    f"{train.sum(axis=0).min()} to {train.sum(axis=0).max()}."
  )
