"""Reads array_record data sets of TensorFlow Datasets, without TensorFlow, record by record.

Preparing a data set needs the ``[tfds]`` extra, once: ``tfds build stanford_online_products
--file_format=array_record --data_dir=ROOT``.
"""

from collections.abc import Mapping, Sequence
import logging
from pathlib import Path
from typing import Any

import numpy as np

from soprc_jax._internal import file_io
from soprc_jax.data import decoding, image_files, list_files, sources

_log = logging.getLogger(__name__)
# Name here -> name in TFDS.
DATA_SETS = {"tfds_sop": "stanford_online_products", "tfds_inaturalist": "i_naturalist2018"}
_LAYOUT = (
  "  the output of this command: tfds build {name} --file_format=array_record "
  "--data_dir=ROOT   (needs pip install -e '.[tfds]')"
)
_INATURALIST_LISTS = (
  "\n  Inat_dataset_splits/Inaturalist_train_set1.txt and "
  "Inaturalist_test_set1.txt   of https://github.com/Andrew-Brown1/Smooth_AP"
)


class Records:
  """Provides the images of a TFDS data source, encoded until they are needed.

  Args:
    records: random access to records with the encoded file under ``"image"``.
    labels: ``[N]`` integers.
    ids: ``[N]`` names of the images.
    class_names: label -> name of the class in the data.
  """

  def __init__(
    self,
    records: Any,
    labels: np.ndarray,
    ids: Sequence[str],
    class_names: Mapping[int, str] | None = None,
  ):
    self._records = records
    self.labels = np.asarray(labels, np.int64)
    self.ids = list(ids)
    self.class_names = dict(class_names or {})

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> sources.Example:
    name, label = self.ids[index], int(self.labels[index])
    content = decoding.Encoded(self._records[index]["image"], name)
    return sources.Example(content, label, name, self.class_names.get(label, ""))


def load(name: str, root: str) -> tuple[sources.Source, sources.Source]:
  """Loads the training classes and the test classes of a data set.

  Args:
    name: key of `DATA_SETS`.
    root: ``data_dir`` of the command that prepared it.

  Raises:
    FileNotFoundError: if the data set is missing; the message gives the command.
    ValueError: if a class is in both splits, or an image of the retrieval lists is not in the data.
  """
  tfds_name = DATA_SETS[name]
  layout = _LAYOUT.format(name=tfds_name) + (
    _INATURALIST_LISTS if name == "tfds_inaturalist" else ""
  )
  folder = image_files.check_root(
    root, what=f"{tfds_name} as prepared by TensorFlow Datasets", layout=layout
  )
  builder = _builder(tfds_name, folder, layout)
  return _sop(builder, folder) if name == "tfds_sop" else _inaturalist(builder, folder, layout)


def _sop(builder: Any, folder: Path) -> tuple[sources.Source, sources.Source]:
  splits = []
  for split in ("train", "test"):
    records = _data_source(builder, split)
    labels = _column(records, "class_id", folder, f"{builder.name}-{builder.version}-{split}")
    # TFDS counts classes from 0, the list files of the data set from 1.
    class_names = {label: str(label + 1) for label in np.unique(labels).tolist()}
    splits.append(
      Records(
        records, labels, [f"{builder.name}/{split}/{i}" for i in range(len(records))], class_names
      )
    )
  image_files.check_disjoint(splits[0].labels, splits[1].labels, names=("train", "test"))
  return splits[0], splits[1]


def _inaturalist(builder: Any, folder: Path, layout: str) -> tuple[sources.Source, sources.Source]:
  """Loads the classes of iNaturalist by its retrieval lists.

  The lists name files of the TFDS splits ``train`` and ``validation``. An id is the name of the
  file without its extension.
  """
  rows, class_names, _ = list_files.read_lists("inaturalist", folder, layout=layout)
  label_of = {Path(path).stem: label for found in rows.values() for path, label in found.items()}
  parts: list[sources.Source] = []
  positions: dict[str, int] = {}
  for split in ("train", "validation"):
    records = _data_source(builder, split)
    ids = [
      str(name)
      for name in _column(records, "id", folder, f"{builder.name}-{builder.version}-{split}")
    ]
    positions |= {name: len(positions) + i for i, name in enumerate(ids)}
    # Images that are in no list are never read; their label is -1.
    parts.append(
      Records(records, np.array([label_of.get(name, -1) for name in ids]), ids, class_names)
    )
  everything, splits = sources.Joined(parts), []
  for split in ("train", list_files.TEST):
    stems = [Path(path).stem for path in rows[split]]
    missing = [stem for stem in stems if stem not in positions]
    if missing:
      raise ValueError(
        f"{len(missing)} images of the list for {split} are not in {builder.name}, e.g. "
        f"{missing[0]!r}"
      )
    splits.append(sources.Subset(everything, [positions[stem] for stem in stems]))
  image_files.check_disjoint(
    splits[0].labels, splits[1].labels, names=("the training list", "the test list")
  )
  return splits[0], splits[1]


def _builder(name: str, folder: Path, layout: str) -> Any:
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=str(folder))
    prepared = builder.is_prepared() and builder.info.file_format.file_suffix == "array_record"
  except (ValueError, OSError, ImportError) as error:
    raise FileNotFoundError(
      f"{folder} contains no readable {name} ({error}). It must contain\n{layout}"
    ) from error
  if not prepared:
    raise FileNotFoundError(
      f"{folder} contains no {name} in array_record format. It must contain\n{layout}"
    )
  return builder


def _data_source(builder: Any, split: str) -> Any:
  import tensorflow_datasets as tfds

  return builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})


def _column(part: Any, key: str, folder: Path, name: str) -> np.ndarray:
  """Returns a feature of all records, cached next to the data since it reads the whole data set."""
  path = folder / f".soprc_jax-{name}-{key}-{len(part)}.npy"
  if path.exists():
    try:
      values = np.load(path, allow_pickle=False)
      if values.shape == (len(part),):
        return values
      raise ValueError(f"it has the shape {list(values.shape)}")
    except (OSError, ValueError, EOFError, MemoryError) as error:
      _log.warning("%s is corrupt (%s): reading the records again.", path, error)
  _log.info("Reading %s of %d records; the result is cached.", key, len(part))
  values = np.array([_plain(part[i][key]) for i in range(len(part))])
  try:
    with file_io.whole(path) as file:  # several processes may write it
      np.save(file, values)
  except OSError as error:
    _log.warning("Cannot write %s (%s): the records will be read at every start.", path, error)
  return values


def _plain(value: Any) -> Any:
  return value.decode() if isinstance(value, bytes) else value
