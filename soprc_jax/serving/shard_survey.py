"""Reads the tables of the queries and of a gallery in shards, and scores the positives.

It finds what is missing, mixed or doubled before the first shard is counted by `shard_evaluation`.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soprc_jax._internal import strings
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data import class_column, label_sets
from soprc_jax.metrics import streaming
from soprc_jax.serving import shard_formats, shard_tables
from soprc_jax.serving import shards as shards_lib
from soprc_jax.serving.shards import Shard


class Files(NamedTuple):
  """Holds the shards of an evaluation.

  Attributes:
    queries: shards of the queries.
    gallery: shards of the gallery, those with labels first.
    num_labeled: how many of these have labels.
    rule: how several labels an image are written and compared; None: an image has one class.
  """

  queries: list[Shard]
  gallery: list[Shard]
  num_labeled: int
  rule: label_sets.Rule | None = None

  @property
  def num_candidates(self) -> int:
    """The number of embeddings in the gallery."""
    return sum(shard.rows for shard in self.gallery)


class Prepared(NamedTuple):
  """Holds what is needed to count in any shard.

  Attributes:
    queries: vectors of the queries; their ids are their positions.
    thresholds: scores of the positives.
    excluded: for each shard of the gallery the rows of queries, and the positions of these queries.
    ids: ``[N]`` ids of the queries.
    class_names: ``[N]`` names of their classes.
  """

  queries: streaming.Queries
  thresholds: streaming.Thresholds
  excluded: list[tuple[np.ndarray, np.ndarray]]
  ids: list[str]
  class_names: list[str]


def find(
  queries: str,
  gallery: str,
  distractors: str | None,
  *,
  label_separator: str | None = None,
  min_jaccard: float = 0.0,
) -> Files:
  """Finds the shards of an evaluation and checks that they fit together.

  Args:
    queries: file or pattern of the queries, see `shards.find`; also one file of numbered ones.
    gallery: file or pattern of the candidates with labels.
    distractors: file or pattern of candidates that are positives of no query; None for none.
    label_separator: text between two labels of an image; empty: an image has one class. None: both
      this and ``min_jaccard`` are those of the run that made the files, if they say so.
    min_jaccard: see `label_sets.Rule`.

  Raises:
    ValueError, FileNotFoundError: as `shards.find`, or if shards are of different models, widths or
      separators, or a file of the gallery is given twice.
  """
  asked = shards_lib.find(queries, flag="--queries", may_be_part=True)
  labeled = shards_lib.find(gallery, flag="--gallery")
  others = shards_lib.find(distractors, flag="--distractors") if distractors else []
  seen: set[Path] = set()
  for shard in labeled + others:
    if shard.path.resolve() in seen:
      raise ValueError(f"{printable(shard.path)} is in the gallery twice")
    seen.add(shard.path.resolve())
  shards_lib.check_same_model(asked + labeled + others)
  if label_separator is None:
    rule = _stored_rule(asked + labeled)
  else:
    rule = label_sets.Rule(label_separator, min_jaccard) if label_separator else None
  return Files(asked, labeled + others, len(labeled), rule)


def _stored_rule(found: list[Shard]) -> label_sets.Rule | None:
  """Returns the rule that `soprc embed` has noted in all shards."""
  text = found[0].label_rule
  for shard in found:
    if shard.label_rule != text:
      raise ValueError(
        f"{printable(shard.path)} has labels by {shown(shard.label_rule)}, but "
        f"{printable(found[0].path)} by {shown(text)} (data.label_separator, data.min_jaccard): "
        "give --label_separator"
      )
  try:
    return label_sets.Rule.from_text(text) if text else None
  except ValueError as error:
    raise ValueError(f"{printable(found[0].path)}: {error}: give --label_separator") from error


def prepare(files: Files) -> Prepared:
  """Reads all tables, and scores the positives of the queries.

  Raises:
    ValueError: if ids or labels are missing, an id occurs twice, no query has a positive, or an
      embedding of a query or a positive is not finite.
  """
  vectors, ids, class_names = _read_queries(files.queries, files.rule)
  numbers = {name: number for number, name in enumerate(dict.fromkeys(class_names))}
  labels = np.array([numbers[name] for name in class_names], np.int64)
  queries = streaming.make_queries(vectors, labels, np.arange(len(ids)))
  survey = _Survey(ids, numbers, labels, files.rule)
  thresholds = streaming.find_thresholds(
    queries, map(survey.positives, files.gallery[: files.num_labeled])
  )
  for shard in files.gallery[files.num_labeled :]:
    survey.note(shard, shard_tables.read(shard).ids)
  _check_unique(survey.hashes)
  if files.rule and not survey.overlaps:
    class_column.warn_unused(files.rule.separator, where="--queries and --gallery")
  if not len(thresholds.scores):
    raise ValueError(
      "no query has a positive in --gallery: no label of a query, e.g. "
      f"{shown(class_names[0])}, is that of another image"
    )
  return Prepared(queries, thresholds, survey.excluded, ids, class_names)


def _read_queries(
  found: list[Shard], rule: label_sets.Rule | None
) -> tuple[np.ndarray, list[str], list[str]]:
  """Reads vectors, ids and names of the classes, or patterns, of the queries."""
  ids, class_names, vectors, hashes = list[str](), list[str](), [], []
  for shard in found:
    names, labels = _complete(shard, "queries")
    spelled = [_spelled(label) for label in labels]
    if "" in spelled:
      raise ValueError(
        f"{printable(shard.path)}: query {spelled.index('')} has no label. soprc embed writes "
        "those of a --split, or of a CSV file with the columns path,label as --images"
      )
    if rule:
      spelled = [rule.separator.join(one) for one in _label_lists(shard, spelled, rule)]
    ids += names
    hashes.append((shard, _hashes(names)))
    class_names += spelled
    vectors.append(shards_lib.read(shard, 0, shard.rows).astype(np.float32))
    check_finite(shard, vectors[-1], np.arange(shard.rows))
  if not ids:
    raise ValueError(f"{printable(found[0].path)} has no query")
  _check_unique(hashes)
  return np.concatenate(vectors), ids, class_names


def _complete(shard: Shard, what: str) -> tuple[list[str], list[Any]]:
  """Returns ids and labels of a shard, which must have both."""
  table = shard_tables.read(shard)
  for key, column, names in (
    ("ids", table.ids, shard_formats.IDS),
    ("labels", table.labels, shard_tables.LABELS),
  ):
    if column is None:
      hint = "" if what == "queries" else ", or give it with --distractors"
      raise ValueError(
        f"{printable(shard.path)} has no {key}: put a .parquet or .csv file of the same name next "
        f"to it, with a column {' or '.join(names)}{hint}"
      )
  labels = table.labels or []
  shard_tables.check_types("a label", labels, {str, int, type(None)}, shard.path)
  return table.ids or [], labels


def _spelled(label: Any) -> str:
  return "" if label is None else strings.class_name(str(label))


def _label_lists(
  shard: Shard, cells: Sequence[str], rule: label_sets.Rule
) -> list[tuple[str, ...]]:
  """Returns the labels in each cell; none in an empty one."""
  rows = [row for row, cell in enumerate(cells) if cell]
  found = class_column.label_lists(
    (cells[row] for row in rows),
    rule.separator,
    where=shard.path,
    place=lambda position: f"{printable(shard.path)}, row {rows[position]}",
  )
  return [found.get(cell, ()) for cell in cells]


def check_finite(shard: Shard, vectors: np.ndarray, rows: np.ndarray) -> None:
  """Raises a ValueError if an embedding is not finite; the message names its shard and row."""
  finite = np.isfinite(vectors).all(axis=1)
  if not finite.all():
    raise not_finite(shard, int(rows[np.argmin(finite)]))


def not_finite(shard: Shard, row: int) -> ValueError:
  return ValueError(
    f"{printable(shard.path)} has a value that is not finite in row {row}: embed it again, "
    "or remove the row"
  )


def _hashes(ids: Sequence[str]) -> np.ndarray:
  return np.fromiter(map(hash, ids), np.int64, len(ids))


class _Survey:
  """Collects from the tables of the gallery what concerns the queries.

  Args:
    ids: ``[N]`` ids of the queries.
    numbers: name of a class of the queries -> its label.
    labels: ``[N]`` labels of the queries.
    rule: see `Files`. With it the classes are patterns.
  """

  def __init__(
    self,
    ids: Sequence[str],
    numbers: dict[str, int],
    labels: np.ndarray,
    rule: label_sets.Rule | None,
  ):
    self._queries = {key: position for position, key in enumerate(ids)}
    self._hashes = _hashes(ids)
    self._numbers, self._labels, self._rule = numbers, labels, rule
    # The labels of each pattern of the queries.
    self._lists = [tuple(name.split(rule.separator)) for name in numbers] if rule else []
    self._asked = {label for labels in self._lists for label in labels}
    self.overlaps = any(len(labels) > 1 for labels in self._lists)
    self.excluded: list[tuple[np.ndarray, np.ndarray]] = []
    self.hashes: list[tuple[Shard, np.ndarray]] = []

  def note(self, shard: Shard, ids: list[str] | None) -> np.ndarray:
    """Notes the ids of a shard, and returns the position of the query of each row, -1 for none."""
    ids = ids or []
    hashes = _hashes(ids)
    found = np.full(shard.rows, -1)
    # Hashes are compared first, since few ids are those of queries.
    for row in np.flatnonzero(np.isin(hashes, self._hashes)):
      found[row] = self._queries.get(ids[row], -1)
    rows = np.flatnonzero(found >= 0)
    self.excluded.append((rows, found[rows]))
    self.hashes.append((shard, hashes))
    return found

  def positives(self, shard: Shard) -> streaming.Block:
    """Notes a shard with labels, and reads its candidates of the classes of the queries."""
    ids, labels = _complete(shard, "gallery")
    of_query = self.note(shard, ids)
    numbers, sets = self._numbers_of(shard, labels)
    rows = np.flatnonzero(numbers >= 0)
    vectors = shards_lib.gather(shard, rows)
    check_finite(shard, vectors, rows)
    block = streaming.Block(vectors, numbers[rows], of_query[rows])
    if sets is None:
      return block
    relevance = functools.partial(_relevance, sets, self._labels, numbers[rows])
    return block._replace(labels=None, relevance=relevance)

  def _numbers_of(
    self, shard: Shard, labels: Sequence[Any]
  ) -> tuple[np.ndarray, label_sets.LabelSets | None]:
    """Returns the class of each candidate, or its pattern with the labels of all patterns.

    It is -1 for those that are surely positives of no query.
    """
    if self._rule is None:
      return _label_numbers(labels, self._numbers), None
    lists = _label_lists(shard, list(map(_spelled, labels)), self._rule)
    self.overlaps |= any(len(one) > 1 for one in lists)
    found = {one: number for number, one in enumerate(self._lists)}
    numbers = [
      -1 if self._asked.isdisjoint(one) else found.setdefault(one, len(found)) for one in lists
    ]
    return np.array(numbers, np.int64), label_sets.LabelSets(dict(enumerate(found)), self._rule)


def _relevance(
  sets: label_sets.LabelSets, labels: np.ndarray, others: np.ndarray, queries: np.ndarray
) -> np.ndarray:
  return sets.relevant(labels[queries], others)


def _label_numbers(labels: Sequence[Any], numbers: Mapping[str, int]) -> np.ndarray:
  """Returns the numbers of the classes of labels, -1 if no query is of the class."""
  if set(map(type, labels)) <= {str, int} and "".join(texts := list(map(str, labels))).isascii():
    # As `_spelled`, but ten times as fast.
    spelled = map(str.strip, texts)
  else:
    spelled = map(_spelled, labels)
  return np.fromiter(map(numbers.get, spelled, itertools.repeat(-1)), np.int64, len(labels))


def _check_unique(found: list[tuple[Shard, np.ndarray]]) -> None:
  """Raises a ValueError if an id occurs twice; the message names its shards and rows.

  Args:
    found: shards, and the hashes of their ids.
  """
  joined = np.concatenate([hashes for _, hashes in found])
  ends = np.cumsum([len(hashes) for _, hashes in found])
  ordered = np.sort(joined)
  for value in np.unique(ordered[1:][ordered[1:] == ordered[:-1]]):
    first: dict[str, str] = {}
    for position in np.flatnonzero(joined == value):
      number = int(np.searchsorted(ends, position, side="right"))
      shard, hashes = found[number]
      row = int(position) - int(ends[number]) + len(hashes)
      name = (shard_tables.read(shard).ids or [])[row]
      place = f"{printable(shard.path)}, row {row}"
      if name in first:  # otherwise different ids share a hash
        raise ValueError(
          f"the id {shown(name)} occurs twice: {first[name]}, and {place}. Remove one, or rename it"
        )
      first[name] = place
