"""Reads documents of query groups from LETOR text files (SVMlight with qid) or ``.npz`` files.

A line of text is one document, ``RELEVANCE qid:QUERY INDEX:VALUE INDEX:VALUE ... # COMMENT``.
Indices start at 1 and ascend, and a feature that is left out is 0. The documents of a query are
side by side. LETOR 3.0 and 4.0, MSLR-WEB10K and 30K, Yahoo's and Istella's sets have this format.
An ``.npz`` file has the arrays ``features [N, D]``, ``relevance [N]`` and ``group [N]``.
"""

from collections.abc import Iterator
import functools
import os
from pathlib import Path
import re

import numpy as np

from soprc_jax._internal import file_io, stored
from soprc_jax._internal.strings import printable, shown
from soprc_jax.data.query_groups import QueryGroups

# The features are stored as a dense matrix, which a typing error in an index must not fill.
MAX_FEATURES = 100_000
_NUMBER = rb"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_START = re.compile(_NUMBER + rb" qid:[^\s:]+")
# A comment that begins in the query. It hides the rest of the query, and all features.
_CUT = re.compile(rb"\s*[^\s#]+\s+(qid:[^\s#]*#\S*)")
_OF_NUMBERS = b"0123456789+-.eE"


def read(
  path: str | os.PathLike[str], *, name: str, num_features: int | None = None
) -> QueryGroups:
  """Reads a file of any size, in two passes over its lines.

  The memory is that of the arrays. The first pass counts lines and features, the second one fills
  the arrays.

  Args:
    path: text file in the LETOR format, or ``.npz``.
    name: name of the flag, for messages.
    num_features: D, e.g. that of the training documents; None takes the highest index of the file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is wrong. The message has the file, the line, the value and the remedy.
  """
  file = file_io.given(path, name=name)
  why = file_io.why_no_file(file)
  if why:
    raise FileNotFoundError(
      f"{name}={printable(path)} must be a file in the LETOR format or .npz, and it is {why}"
    )
  reader = _read_npz if file.suffix.lower() == ".npz" else _read_text
  return reader(file, num_features)


def _read_text(file: Path, num_features: int | None) -> QueryGroups:
  count, width = _survey(file, num_features)
  if not count:
    raise ValueError(f"{printable(file)} has no documents: lines look like '2 qid:10 1:0.03 3:0.5'")
  features = np.zeros((count, num_features or width), np.float32)
  relevance = np.zeros(count, np.float32)
  sizes, seen, last = list[int](), dict[bytes, int](), b""
  for row, (number, line) in enumerate(_lines(file)):
    where = f"{printable(file)}:{number}"
    try:
      query, relevance[row] = _parse(line, features[row])
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from None
    if query != last:
      if query in seen:
        raise ValueError(
          f"{where}: the query {_text(query)} comes again, its documents began at line "
          f"{seen[query]}: sort the lines by qid, or rename one of two queries of that id"
        )
      seen[query], last = number, query
      sizes.append(0)
    sizes[-1] += 1
  return QueryGroups(
    features, relevance, np.array(sizes), tuple(query.decode(errors="replace") for query in seen)
  )


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
  """Yields the number of each line that has a document, from 1, and the line without comment.

  Raises:
    ValueError: a comment begins in the query.
  """
  with file.open("rb") as stream:
    for number, line in enumerate(stream, 1):
      body = line.partition(b"#")[0].strip()
      # A line that a comment cuts in the query has no other colon before it.
      if body.count(b":") == 1 and (cut := _CUT.match(line)):
        raise ValueError(
          f"{printable(file)}:{number}: a query must not contain #, which begins a comment; got "
          f"{_text(cut[1])}"
        )
      if body:
        yield number, body


def _survey(file: Path, num_features: int | None) -> tuple[int, int]:
  """Returns the number of documents, and the highest index: the last of a line, as they ascend."""
  count = width = 0
  most = num_features or MAX_FEATURES
  for number, line in _lines(file):
    count += 1
    index = line.rsplit(None, 1)[-1].partition(b":")[0]
    # Other lines are checked by `_parse`.
    if index.isdigit() and int(index.lstrip(b"0")[:20] or b"0") > width:
      width = int(index.lstrip(b"0")[:20])
      if width > most:
        remedy = (
          f"the training documents have {num_features} features: leave the others out"
          if num_features
          else f"at most {MAX_FEATURES:,} features are supported: renumber those that occur"
        )
        raise ValueError(f"{printable(file)}:{number}: feature {_text(index)}, and {remedy}")
  return count, width


def _parse(line: bytes, row: np.ndarray) -> tuple[bytes, float]:
  """Writes the features of a line into ``row [D]``, and returns its query and relevance.

  Raises:
    ValueError: the line is wrong; the message says how.
  """
  relevance, query, rest = (*line.split(None, 2), b"", b"")[:3]
  # Without the characters of numbers, each feature leaves its colon.
  left = rest.translate(None, _OF_NUMBERS).split()
  tokens = rest.replace(b":", b" ").split()
  tidy = left.count(b":") == len(left) == len(rest.split()) and len(tokens) == 2 * len(left)
  try:
    if not tidy or not _START.fullmatch(relevance + b" " + query):
      raise ValueError
    grade, values = float(relevance), list(map(float, tokens[1::2]))
    columns = _columns(tuple(tokens[::2]))
  except ValueError:
    raise ValueError(_why_no_document(line)) from None
  with np.errstate(over="ignore"):
    row[columns] = values
  if not np.isfinite(row).all():
    at = int(np.argmin(np.isfinite(row)))
    value = tokens[1::2][columns.tolist().index(at)]
    raise ValueError(f"feature {at + 1} is {_text(value)}, beyond float32: replace the value")
  if grade >= 1e30:
    raise ValueError(f"the relevance must be below 1e30, got {_text(relevance)}: scale it")
  if grade < 0:
    raise ValueError(
      f"the relevance must be >= 0, got {_text(relevance)}: remove documents that nobody has "
      "judged (-1 in some sets)"
    )
  return query[4:], grade


@functools.lru_cache(16)
def _columns(indices: tuple[bytes, ...]) -> np.ndarray:
  """Returns the columns of the features of a line. Lines with all features have the same ones.

  Raises:
    ValueError: the indices are no integers >= 1 in ascending order.
  """
  if not all(index.isdigit() for index in indices):  # int() also takes +1
    raise ValueError
  found = np.array(list(map(int, indices)), np.int64)
  if (np.diff(found, prepend=0) <= 0).any():
    raise ValueError
  return found - 1


def _why_no_document(line: bytes) -> str:
  """Returns what is wrong with a line that has not the format."""
  relevance, *tokens = line.split()
  if relevance.startswith(b"\x1f\x8b"):
    return "the file is compressed by gzip: unpack it"
  if not _is_number(relevance):
    return f"a line begins with the relevance, a finite number; got {_text(relevance)}"
  if not tokens or not _START.fullmatch(b"0 " + tokens[0]):
    return (
      f"qid:QUERY must follow the relevance, got {_text(tokens[0]) if tokens else 'nothing'}: "
      "without it nobody knows which documents compete"
    )
  last = 0
  for token in tokens[1:]:
    index, _, value = token.partition(b":")
    if not index.isdigit():
      return f"a feature is INDEX:VALUE with an integer INDEX >= 1, got {_text(token)}"
    if not _is_number(value):
      return (
        f"feature {_text(index)} must be a finite number, got {_text(value)}: leave out a "
        "missing value (it is then 0)"
      )
    if int(index) < 1:
      return "feature 0: indices start at 1, add 1 to all (also in the other files)"
    if int(index) <= last:
      return (
        f"feature {int(index)} comes after feature {last}: list each feature once, in ascending "
        "order"
      )
    last = int(index)
  return f"the line is not 'RELEVANCE qid:QUERY INDEX:VALUE ...', got {_text(line)}"


def _is_number(token: bytes) -> bool:
  return re.fullmatch(_NUMBER, token) is not None and token.count(b".") < 2


def _text(token: bytes) -> str:
  return shown(token.decode(errors="backslashreplace"))


def _read_npz(file: Path, num_features: int | None) -> QueryGroups:
  arrays = stored.read_arrays(file, ("features", "relevance", "group"))
  features, relevance, group = arrays["features"], arrays["relevance"], arrays["group"]
  where = printable(file)
  if features.dtype.kind not in "fiub" or features.ndim != 2 or 0 in features.shape:
    raise ValueError(
      f"{where}: features must be numbers [N, D], got {features.dtype} {list(features.shape)}"
    )
  if relevance.dtype.kind not in "fiub" or group.dtype.kind not in "iuUS":
    raise ValueError(
      f"{where}: relevance must be numbers and group integers or texts, got {relevance.dtype} and "
      f"{group.dtype}"
    )
  count, width = features.shape
  if relevance.shape != (count,) or group.shape != (count,):
    raise ValueError(
      f"{where}: relevance and group must be [{count}], one for each row of features; got "
      f"{list(relevance.shape)} and {list(group.shape)}"
    )
  if num_features is not None and width > num_features:
    raise ValueError(
      f"{where}: features have {width} columns, and the training documents have {num_features} "
      "features: leave the others out"
    )
  with np.errstate(over="ignore"):
    features, relevance = features.astype(np.float32), relevance.astype(np.float32)
  finite = np.isfinite(features).all(axis=1)
  if not finite.all():
    raise ValueError(
      f"{where}: features are not finite in float32 in row {int(np.argmin(finite))}: replace the "
      "value, by 0 if it is missing"
    )
  judged = (relevance >= 0) & np.isfinite(relevance)
  if not judged.all():
    row = int(np.argmin(judged))
    raise ValueError(
      f"{where}: the relevance must be >= 0, got {relevance[row]:g} in row {row}: remove documents "
      "that nobody has judged"
    )
  starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
  names = tuple(map(str, group[starts].tolist()))
  if len(set(names)) < len(names):
    row = int(starts[next(at for at, one in enumerate(names) if one in names[:at])])
    raise ValueError(
      f"{where}: the group {shown(group[row].item())} comes again in row {row}: sort the rows by "
      "group"
    )
  padded = np.zeros((count, num_features or width), np.float32)
  padded[:, :width] = features
  return QueryGroups(padded, relevance, np.diff(np.r_[starts, count]), names)
