"""What a checkpoint knows of the classes that it was trained on: data that have changed under it are told."""

from collections.abc import Mapping
from typing import Any

from soprc_jax.data import sources


def describe(train: sources.Source) -> dict[str, Any]:
  """The row of each training label, and the names behind labels that are places in a list of names; JSON-able."""
  return {
    "labels": [[label, row] for label, row in sources.label_rows(train.labels).items()],
    "class_names": {str(label): name for label, name in sources.class_names(train).items()},
  }


def differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
  """Whether the classes of a checkpoint are not those of the data.

  Such labels stay the same where one class has taken the place of another, so their names are compared; checkpoints of before have none.
  """
  return any(there.get(key, value) != value for key, value in here.items())
