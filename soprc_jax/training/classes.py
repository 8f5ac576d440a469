"""Class and image metadata stored with each checkpoint, to detect test classes that were trained
on, and data that changed.
"""

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
from soprc_jax.data import sources

_log = logging.getLogger(__name__)

# The ids and classes of all images, in the folder of a run: checkpoints hold their digests only.
IMAGES = "images.json.gz"
_LARGEST = 1 << 30  # bytes of that file's content, far beyond any list of images
_SHOWN = 3  # names in a message
# data.source -> the data set whose own class ids are the names of its classes. In images of a
# user's own, the name alone says which class it is.
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
# Data set (empty for a user's own images) -> names of classes.
Names = dict[str, list[str]]


def describe(
  splits: Mapping[str, sources.Source],
  *,
  data_source: str,
  started_from: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
  """Returns the JSON-able metadata of a run's data.

  Args:
    splits: as of `datasets.make_splits`.
    data_source: ``config.data.source``.
    started_from: classes that the network of ``model.init_from`` was trained on, see `trained_on`.

  Returns:
    ``"labels"``: the row of each training label; ``"class_names"``: names of the labels that are no
    ids of their own; ``"data_set"`` of the classes; ``"started_from"``; ``"splits"``: number of
    images of each split, digest of their ids and classes, and of their order.
  """
  train = splits["train"]
  return {
    "labels": [[label, row] for label, row in sources.label_rows(train.labels).items()],
    "class_names": {str(label): name for label, name in sources.class_names(train).items()},
    "data_set": _data_set(data_source),
    "started_from": dict(started_from or {}),
    "splits": {name: _digests(split) for name, split in splits.items()},
  }


def trained_on(meta: Mapping[str, Any], *, where: str) -> Names | None:
  """Returns the classes that the network of a checkpoint was trained on, those of its starts
  included.

  Args:
    meta: of the checkpoint, see `describe`.
    where: the checkpoint, for messages.

  Returns:
    Data set -> names, see `seen`; None for a checkpoint of an older version, which holds too
    little.

  Raises:
    ValueError: the metadata are corrupt.
  """
  if not _is_complete(meta, where):
    return None
  found = {data_set: set(names) for data_set, names in meta["started_from"].items()}
  own = (meta["class_names"].get(str(label), str(label)) for label, _ in meta["labels"])
  found.setdefault(meta["data_set"], set()).update(map(_normal, own))
  return {data_set: sorted(names) for data_set, names in sorted(found.items())}


def seen(
  trained: Mapping[str, list[str]], names: Iterable[str], *, data_source: str
) -> dict[str, Any] | None:
  """Returns how many of some classes were trained on, and three of them; None if there is none.

  Classes of one name are the same class, unless they are ids of two different official data sets.

  Args:
    trained: as of `trained_on`.
    names: of the classes that are tested on; equal ones count once.
    data_source: ``config.data.source`` of these.

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
  return {"count": len(both), "examples": both[:_SHOWN]} if both else None


def check_unseen(
  trained: Mapping[str, list[str]],
  tested: Mapping[str, sources.Source],
  *,
  data_source: str,
  network: str,
  allow_seen_classes: bool,
) -> dict[str, Any] | None:
  """Raises a ValueError, or logs a warning, if a network was trained on classes that it is tested
  on.

  Args:
    trained: as of `trained_on`.
    tested: splits that it is tested on.
    data_source: ``config.data.source`` of these.
    network: which, for messages.
    allow_seen_classes: log a warning instead.

  Returns:
    As `seen`.
  """
  names = {name for source in tested.values() for name in sources.shown_classes(source)}
  return report_seen(
    seen(trained, names, data_source=data_source),
    splits=tested,
    network=network,
    allow_seen_classes=allow_seen_classes,
  )


def report_seen(
  found: dict[str, Any] | None, *, splits: Iterable[str], network: str, allow_seen_classes: bool
) -> dict[str, Any] | None:
  """Returns what `seen` has found, as `check_unseen` with its warning or error."""
  if found is None:
    return None
  told = f"{sentence(found)} ({', '.join(splits)}; the network: {network})"
  if not allow_seen_classes:
    raise ValueError(
      f"{told}, so its metrics would not be those of unseen classes. Choose other data, splits or "
      "another network, or "
      "give --allow_seen_classes, which notes it in the results"
    )
  _log.warning("%s (--allow_seen_classes).", told)
  return found


def sentence(found: Mapping[str, Any]) -> str:
  """Returns what `seen` has found, in words."""
  names = ", ".join(map(shown, found["examples"]))
  more = found["count"] - len(found["examples"])
  return f"{found['count']} of the classes that are tested on were trained on: {names}" + (
    f" and {more} more" if more else ""
  )


def warn_unknown(network: str) -> None:
  """Logs that the classes of a run of an older version are not known."""
  _log.warning(
    "It is not known on which classes the network in %s was trained: it is of a version that did "
    "not store them. Test "
    "classes may be among them.",
    network,
  )


def changes(
  meta: Mapping[str, Any],
  now: Mapping[str, Any],
  splits: Mapping[str, sources.Source],
  workdir: Path,
) -> list[str]:
  """Returns a line for each split whose images or classes are not those of a checkpoint.

  Args:
    meta: of the checkpoint, see `describe`.
    now: of the data as they are.
    splits: of the data as they are.
    workdir: of the run; its list of images says which ones have changed.

  Raises:
    ValueError: the metadata are corrupt.
  """
  if not _is_complete(meta, str(workdir)):
    same = all(meta.get(key, now[key]) in (now[key], {}) for key in ("labels", "class_names"))
    return (
      []
      if same
      else [
        "train: other classes than in the checkpoint, which is of a version that stored no images"
      ]
    )
  return split_changes(meta["splits"], now["splits"], splits, workdir)


def split_changes(
  there: Mapping[str, Any],
  here: Mapping[str, Any],
  splits: Mapping[str, sources.Source],
  folder: Path,
) -> list[str]:
  """Returns the lines of `changes`.

  Args:
    there: ``"splits"`` of what `describe` returned.
    here: the same of the data as they are.
    splits: of the data as they are.
    folder: with the list of `write_images`.
  """
  nothing = {"images": 0, "digest": ""}
  names = [
    name
    for name in {**here, **there}
    if there.get(name, nothing)["digest"] != here.get(name, nothing)["digest"]
  ]
  if not names:
    return []
  old, new = (
    _read_images(folder, there),
    {name: dict(_images(split)) for name, split in splits.items()},
  )
  lines = []
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
  """Raises a ValueError that says what has changed if the data are not those of a checkpoint; see
  `changes`.
  """
  lines = changes(meta, now, splits, workdir)
  if lines:
    raise ValueError(changed_message(workdir, lines))
  there = meta.get("splits", {})
  moved = [name for name in there if there[name]["order"] != now["splits"][name]["order"]]
  if moved:
    _log.warning(
      "The images of %s are the same, but listed in another order than when the run in %s began: "
      "its batches from here "
      "on differ from those of an uninterrupted run.",
      ", ".join(moved),
      workdir,
    )


def changed_message(folder: Path, lines: Iterable[str]) -> str:
  """Returns the message for data that have changed."""
  return (
    f"the data are not those that the run in {folder} was trained on. Restore the original data, "
    "or use a new "
    "--workdir:\n" + "\n".join(f"  {line}" for line in lines)
  )


def write_images(folder: Path, splits: Mapping[str, sources.Source]) -> None:
  """Writes the ids and classes of all images, for `changes`."""
  content = {name: sorted(_images(split)) for name, split in splits.items()}
  with file_io.whole(folder / IMAGES) as file:
    file.write(gzip.compress(json.dumps(content).encode(), mtime=0))


def _read_images(folder: Path, there: Mapping[str, Any]) -> dict[str, dict[str, str]] | None:
  """Split -> id -> class as `write_images` has written it; None if that is missing, corrupt or of
  other data.
  """
  try:
    with gzip.open(folder / IMAGES) as file:
      content = json.loads(file.read(_LARGEST))
    digests = {name: _digest(pairs) for name, pairs in content.items()}
    found = {name: dict(pairs) for name, pairs in content.items()}
  # Of gzip, of JSON, or of content of another shape.
  except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError, RecursionError):
    return None
  return found if digests == {name: split["digest"] for name, split in there.items()} else None


def _details(
  old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]], name: str
) -> str:
  """The images of a split that were added, removed, moved, or given another class."""
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


def _is_complete(meta: Mapping[str, Any], where: str) -> bool:
  """Whether metadata are those of `describe`; not of an older version.

  Raises:
    ValueError: they are corrupt.
  """
  if "splits" not in meta:
    return False
  problem = stored.problem(dict(meta), _META)
  if problem:
    raise ValueError(
      f"{where}: the metadata of its checkpoint are corrupt ({problem}): restore it from a copy"
    )
  return True


def _data_set(data_source: str) -> str:
  return _DATA_SETS.get(data_source, data_source)


def _images(source: sources.Source) -> list[tuple[str, str]]:
  """Id and class of every image."""
  return list(
    zip(map(_normal, sources.ids(source)), map(_normal, sources.shown_classes(source)), strict=True)
  )


def _digests(source: sources.Source) -> dict[str, Any]:
  images = _images(source)
  return {"images": len(images), "digest": _digest(sorted(images)), "order": _digest(images)}


def _digest(content: Any) -> str:
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _normal(name: str) -> str:
  """The one spelling of a name: file systems differ in how they spell accents."""
  return unicodedata.normalize("NFC", name)
