"""Metadata of a checkpoint's classes and images, to detect seen test classes and changed data."""

from collections.abc import Iterable, Mapping
import gzip
import hashlib
import json
import logging
from pathlib import Path
from typing import Any
import unicodedata
import zlib

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import shown
from soprc_jax.data import features, sources

_log = logging.getLogger(__name__)

# The ids and classes of all images, in the folder of a run: checkpoints hold their digests only.
IMAGES = "images.json.gz"
_LARGEST = 1 << 30  # bytes of that file's content, more than any list of images needs
_SHOWN = 3  # names in a message
# data.source -> the data set whose class ids are the names of its classes. Empty for custom images:
# there the name alone identifies the class.
_DATA_SETS = {"folder": "", "csv": "", "tfds_sop": "sop", "tfds_inaturalist": "inaturalist"}
SPLITS = {str: {"images": int, "digest": str, "order": str}}
_META = {
  "labels": [[int]],
  "class_names": {str: str},
  "data_set": str,
  "started_from": {str: list},
  "splits": SPLITS,
}
# What `seen` returns, for `stored.problem`.
SEEN = {"count": int, "examples": [str]}
# Data set (empty for custom images) -> names of classes.
Names = dict[str, list[str]]


def describe(
  splits: Mapping[str, sources.Source],
  *,
  data_source: str,
  started_from: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
  """Returns the JSON-able metadata of a run's data.

  Args:
    splits: of `datasets.make_splits`.
    data_source: ``config.data.source``.
    started_from: classes that the model of ``model.init_from`` was trained on, see `trained_on`.

  Returns:
    ``"several_labels"``: the labels of the training images, if an image has several;
    ``"labels"``: the row of each training label; ``"class_names"``: names of the labels that are
    not ids of the data set; ``"data_set"``: the data set of the classes; ``"started_from"``: the
    argument; ``"splits"``: of each split the number of images, a digest of their ids and classes,
    and one of their order.
  """
  train = splits["train"]
  several = sources.label_sets(train) is not None
  return {
    **({"several_labels": sorted(sources.compared_names(train))} if several else {}),
    "labels": [[label, row] for label, row in sources.label_rows(train.labels).items()],
    "class_names": {str(label): name for label, name in sources.class_names(train).items()},
    "data_set": _data_set(data_source),
    "started_from": dict(started_from or {}),
    "splits": {name: _digests(split) for name, split in splits.items()},
  }


def trained_on(meta: Mapping[str, Any], *, where: str) -> Names:
  """Returns the classes that the model of a checkpoint was trained on.

  The classes of the models that it was initialized from are included.

  Args:
    meta: metadata of the checkpoint, see `describe`.
    where: names the checkpoint in messages.

  Returns:
    Data set -> names, see `seen`. Where an image had several labels, the names are those of
    patterns and of labels.

  Raises:
    ValueError: the metadata is corrupt.
  """
  _check(meta, where)
  found = {data_set: set(names) for data_set, names in meta["started_from"].items()}
  own = (meta["class_names"].get(str(label), str(label)) for label, _ in meta["labels"])
  of_labels = meta.get("several_labels", [])
  found.setdefault(meta["data_set"], set()).update(map(_normal, [*own, *of_labels]))
  return {data_set: sorted(names) for data_set, names in sorted(found.items())}


def seen(
  trained: Mapping[str, list[str]],
  names: Iterable[str],
  *,
  data_source: str,
  several_labels: bool = False,
) -> dict[str, Any] | None:
  """Returns the number of tested classes that were trained on, and up to three names; None if none.

  Classes of one name are the same class, unless they are ids of two different official data sets.
  With ``several_labels`` the names are those of labels, and ``"unit"`` of the result says so.

  Args:
    trained: of `trained_on`.
    names: names of the tested classes; equal names count once.
    data_source: ``config.data.source`` of the tested classes.
    several_labels: whether a tested image has several labels.

  >>> seen({"sop": ["1", "2"]}, ["2", "2", "3"], data_source="csv")
  {'count': 1, 'examples': ['2']}
  >>> seen({"sop": ["1", "2"]}, ["2", "3"], data_source="vehicle_id")
  """
  own = _data_set(data_source)
  known = {
    name
    for data_set, there in trained.items()
    if not (own and data_set) or own == data_set
    for name in there
  }
  both = sorted(known & set(map(_normal, names)))
  if not both:
    return None
  unit = {"unit": "labels"} if several_labels else {}
  return {"count": len(both), "examples": both[:_SHOWN], **unit}


def check_unseen(
  trained: Mapping[str, list[str]],
  tested: Mapping[str, sources.Source],
  *,
  data_source: str,
  network: str,
  allow_seen_classes: bool,
) -> dict[str, Any] | None:
  """Raises a ValueError, or logs a warning, if a model was trained on classes it is tested on.

  Where a tested image has several labels, the labels are compared, and it never raises: such a test
  is one of unseen images.

  Args:
    trained: of `trained_on`.
    tested: splits that the model is tested on.
    data_source: ``config.data.source`` of these splits.
    network: names the model in messages.
    allow_seen_classes: log a warning instead of raising.

  Returns:
    The result of `seen`.
  """
  names = {name for source in tested.values() for name in sources.compared_names(source)}
  several = any(sources.label_sets(source) is not None for source in tested.values())
  return report_seen(
    seen(trained, names, data_source=data_source, several_labels=several),
    splits=tested,
    network=network,
    allow_seen_classes=allow_seen_classes,
  )


def report_seen(
  found: dict[str, Any] | None, *, splits: Iterable[str], network: str, allow_seen_classes: bool
) -> dict[str, Any] | None:
  """Returns the result of `seen`, after the warning or error of `check_unseen`."""
  if found is None:
    return None
  if "unit" in found:
    _log.info(
      "The test is one of unseen images: %s (%s; the model: %s).",
      sentence(found),
      ", ".join(splits),
      network,
    )
    return found
  told = f"{sentence(found)} ({', '.join(splits)}; the model: {network})"
  if not allow_seen_classes:
    raise ValueError(
      f"{told}, so its metrics would not be those of unseen classes. Choose other data, splits or "
      "another model, or give --allow_seen_classes, which records it in the results"
    )
  _log.warning("%s (--allow_seen_classes).", told)
  return found


def sentence(found: Mapping[str, Any]) -> str:
  """Returns the result of `seen` as a sentence."""
  names = ", ".join(map(shown, found["examples"]))
  more = found["count"] - len(found["examples"])
  unit = found.get("unit", "classes")
  return f"{found['count']} of the {unit} that are tested on were trained on: {names}" + (
    f" and {more} more" if more else ""
  )


def changes(
  meta: Mapping[str, Any],
  now: Mapping[str, Any],
  splits: Mapping[str, sources.Source],
  workdir: Path,
) -> list[str]:
  """Returns a line for each split whose images or classes differ from those of a checkpoint.

  Args:
    meta: metadata of the checkpoint, see `describe`.
    now: result of `describe` for the current data.
    splits: current splits.
    workdir: folder of the run; its list of images shows which ones changed.

  Raises:
    ValueError: the metadata is corrupt.
  """
  _check(meta, str(workdir))
  return split_changes(meta["splits"], now["splits"], splits, workdir)


def split_changes(
  there: Mapping[str, Any],
  here: Mapping[str, Any],
  splits: Mapping[str, sources.Source],
  folder: Path,
) -> list[str]:
  """Returns the lines of `changes`; ``there`` are the stored ``"splits"``, ``here`` the current."""
  nothing = {"images": 0, "digest": ""}
  names = [
    name
    for name in {**here, **there}
    if there.get(name, nothing)["digest"] != here.get(name, nothing)["digest"]
  ]
  if not names:
    return []
  old, lines = _read_images(folder, there), []
  new = {name: dict(_images(split)) for name, split in splits.items()}
  for name in names:
    counts = (there.get(name, nothing)["images"], here.get(name, nothing)["images"])
    details = "" if old is None else _details(old, new, name)
    lines.append(f"{name}: {counts[0]} images in the checkpoint, {counts[1]} now" + details)
  return lines


def check_unchanged(
  meta: Mapping[str, Any],
  now: Mapping[str, Any],
  splits: Mapping[str, sources.Source],
  workdir: Path,
) -> None:
  """Raises a ValueError that lists the changes if the data differ from those of a checkpoint.

  Takes the arguments of `changes`. Logs a warning if only the order of the images changed.
  """
  lines = changes(meta, now, splits, workdir)
  if lines:
    raise ValueError(changed_message(workdir, lines))
  there, here = meta["splits"], now["splits"]
  moved = [name for name in there if there[name]["order"] != here[name]["order"]]
  if moved:
    _log.warning(
      "The images of %s are the same, but listed in another order than when the run in %s began: "
      "from here on its batches differ from those of an uninterrupted run.",
      ", ".join(moved),
      workdir,
    )


def changed_message(folder: Path, lines: Iterable[str]) -> str:
  """Returns the error message for changed data."""
  return (
    f"the data are not those that the run in {folder} was trained on. Restore the original data, "
    "or use a new --workdir:\n" + "\n".join(f"  {line}" for line in lines)
  )


def write_images(folder: Path, splits: Mapping[str, sources.Source]) -> None:
  """Writes the ids and classes of all images, for `changes`."""
  content = {name: sorted(_images(split)) for name, split in splits.items()}
  with file_io.whole(folder / IMAGES) as file:
    file.write(gzip.compress(json.dumps(content).encode(), mtime=0))


def _read_images(folder: Path, there: Mapping[str, Any]) -> dict[str, dict[str, str]] | None:
  """Reads split -> id -> class, as written by `write_images`.

  Returns None if the file is missing, corrupt, or of other data than ``there``.
  """
  try:
    with gzip.open(folder / IMAGES) as file:
      content = json.loads(file.read(_LARGEST))
    digests = {name: _digest(pairs) for name, pairs in content.items()}
    found = {name: dict(pairs) for name, pairs in content.items()}
  # Raised by gzip, by JSON, or by content of another shape.
  except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError, RecursionError):
    return None
  return found if digests == {name: split["digest"] for name, split in there.items()} else None


def _details(
  old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]], name: str
) -> str:
  """Describes the images of a split that were added, removed, moved, or given another class."""
  before, now = old.get(name, {}), new.get(name, {})
  known, left = (set[str]().union(*images.values()) for images in (old, new))
  entered, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
  other = [key for key in sorted(now.keys() & before.keys()) if now[key] != before[key]]
  parts = [
    _list("added", [shown(key) for key in entered if key not in known]),
    _list("moved here from other splits", [shown(key) for key in entered if key in known]),
    _list("removed", [shown(key) for key in gone if key not in left]),
    _list("moved to other splits", [shown(key) for key in gone if key in left]),
    _list(
      "of another class",
      [f"{shown(key)}: {shown(before[key])} is now {shown(now[key])}" for key in other],
    ),
  ]
  return "; " + ", ".join(filter(None, parts))


def _list(what: str, names: list[str]) -> str:
  more = ", ..." if len(names) > _SHOWN else ""
  return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{more})" if names else ""


def _check(meta: Mapping[str, Any], where: str) -> None:
  """Raises a ValueError if metadata is not of `describe`."""
  problem = stored.problem(dict(meta), _META)
  if problem:
    raise ValueError(
      f"{where}: the metadata of its checkpoint is corrupt ({problem}): restore it from a copy, "
      "or train again if an earlier version wrote it"
    )


def _data_set(data_source: str) -> str:
  return _DATA_SETS.get(data_source, data_source)


def _images(source: sources.Source) -> list[tuple[str, str]]:
  """Returns the id of every image, and its class with its superclass if that is known.

  A vector's id has a checksum of its numbers.
  """
  names = features.checked_ids(source) if sources.width(source) else sources.ids(source)
  classes, of_label = sources.shown_classes(source), sources.superclasses(source)
  if of_label:  # their order gives the rows of v
    classes = [
      f"{name} of {of_label[label]}"
      for name, label in zip(classes, source.labels.tolist(), strict=True)
    ]
  return list(zip(map(_normal, names), map(_normal, classes), strict=True))


def _digests(source: sources.Source) -> dict[str, Any]:
  images = _images(source)
  return {"images": len(images), "digest": _digest(sorted(images)), "order": _digest(images)}


def _digest(content: Any) -> str:
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _normal(name: str) -> str:
  """Returns the NFC form of a name, since file systems differ in how they encode accents."""
  return unicodedata.normalize("NFC", name)
